// CartPole in the event loop.
#pragma once

#include "congestion_control.h"
#include "pole.h"

namespace networks {

// The physics and the steps of the agent are events of one queue. At one time the pole moves first.
class CartPole {
 public:
  struct Config {
    int64_t max_steps, num_agents = 1;
    explicit Config(const Json& json) : max_steps(json["max_episode_steps"].integer()) {}
    int num_features() const { return 4; }
    int num_actions() const { return 1; }
  };

  CartPole(const Config& config, uint64_t seed) : config_(&config), seed_(seed) {
    queue_.resize(NUM_SOURCES);
  }

  const std::vector<Trace>& trace() const { return trace_; }

  void reset(const Output& output) {
    Random random = Random::stream(seed_, static_cast<uint64_t>(++episode_), 0);
    for (double& value : pole_.state) value = 0.1 * random.uniform() - 0.05;
    num_steps_ = 0, has_ended_ = false;
    queue_.set(PHYSICS, now_ + PERIOD);
    show(output);
    *output.is_first = 1, *output.reward = 0;
  }

  void step(const float* action, const Output& output) {
    if (has_ended_) return reset(output);
    pole_.push(*action > 0.5f);
    queue_.set(STEP, now_ + PERIOD);
    run();
    ++num_steps_;
    const bool has_fallen = pole_.has_fallen();
    const bool is_late = !has_fallen && num_steps_ >= config_->max_steps;
    has_ended_ = has_fallen || is_late;
    show(output);
    *output.terminated = has_fallen, *output.truncated = is_late;
  }

  void seek(int64_t episode) { episode_ = episode - 1, has_ended_ = true; }
  void save(Writer& writer) { exchange(writer); }
  void put_back(Reader& reader) { exchange(reader); }

 private:
  enum Source { PHYSICS, STEP, NUM_SOURCES };
  static constexpr Time PERIOD = SECOND / 50;

  template <class Archive>
  void exchange(Archive& archive) {
    archive(seed_), archive(episode_), archive(num_steps_), archive(has_ended_), archive(now_);
    archive(pole_);
    queue_.exchange(archive);
  }

  // Runs until the agent's step ends.
  void run() {
    for (;;) {
      const int source = queue_.first();
      now_ = queue_.time();
      if (source == STEP) return queue_.set(STEP, NEVER);
      pole_.move(static_cast<double>(PERIOD) / SECOND);
      queue_.set(PHYSICS, now_ + PERIOD);
    }
  }

  void show(const Output& output) const {
    std::copy_n(pole_.state, 4, output.observation);
    *output.reward = 1;
    *output.terminated = *output.truncated = *output.is_first = 0;
    *output.acting = !has_ended_, *output.is_over = has_ended_;
    if (output.info != nullptr) *output.info = {};
  }

  const Config* config_;
  uint64_t seed_;
  int64_t episode_ = -1, num_steps_ = 0;
  bool has_ended_ = true;
  Time now_ = 0;
  Pole pole_;
  EventQueue queue_;
  std::vector<Trace> trace_;  // nothing
};

}  // namespace networks
