// SPDX-License-Identifier: GPL-2.0-or-later
// A process has one simulator of ns-3.
#pragma once

#include <stdexcept>
#include <utility>

namespace networks {

// ns-3 keeps its simulator in global variables.
class OnlySimulator {
 public:
  OnlySimulator() {
    if (std::exchange(is_alive_, true))
      throw std::runtime_error("a process holds one simulator of ns-3; close the other first");
  }
  ~OnlySimulator() { is_alive_ = false; }

  static void check_rows(int num_envs) {
    if (num_envs != 1) throw std::runtime_error("a process holds one simulator of ns-3, not more");
  }

 private:
  static inline bool is_alive_ = false;
};

}  // namespace networks
