// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-or-later
// The pole on a cart of Barto, Sutton and Anderson (1983), with Gymnasium's equations.
#pragma once

#include <cmath>

namespace networks {

struct Pole {
  static constexpr double GRAVITY = 9.8, CART = 1.0, POLE = 0.1, HALF_LENGTH = 0.5, FORCE = 10;
  static constexpr double MOST_X = 2.4, MOST_ANGLE = 12 * 2 * 3.141592653589793 / 360;

  double state[4] = {}, force = 0;  // position, speed, angle, speed of the angle

  void push(bool right) { force = right ? FORCE : -FORCE; }
  // Euler's method, in the order of Gymnasium.
  void move(double seconds) {
    auto& [x, speed, angle, turning] = state;
    const double total = CART + POLE, moment = POLE * HALF_LENGTH;
    const double cosine = std::cos(angle), sine = std::sin(angle);
    const double pushed = (force + moment * turning * turning * sine) / total;
    const double turns = (GRAVITY * sine - cosine * pushed) /
                         (HALF_LENGTH * (4.0 / 3.0 - POLE * cosine * cosine / total));
    const double speeds_up = pushed - moment * turns * cosine / total;
    x += seconds * speed, speed += seconds * speeds_up;
    angle += seconds * turning, turning += seconds * turns;
  }
  bool has_fallen() const {
    return std::abs(state[0]) > MOST_X || std::abs(state[2]) > MOST_ANGLE;
  }
};

}  // namespace networks
