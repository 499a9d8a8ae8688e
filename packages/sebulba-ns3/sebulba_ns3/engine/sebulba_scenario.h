// SPDX-License-Identifier: GPL-2.0-or-later
// An ns-3 program as an environment: derive from `sebulba::Scenario`, and name the class in
// `SEBULBA_SCENARIO`.
#pragma once

#include <limits>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "abi.h"
#include "only_simulator.h"

#include "ns3/core-module.h"

namespace sebulba {

constexpr double INFINITE = std::numeric_limits<double>::infinity();

struct Range {
  double low = -INFINITE, high = INFINITE;
};

// What the agent sees and does.
struct Spaces {
  std::vector<Range> observation;  // of each number
  std::vector<Range> action;       // of each number; empty where there are choices
  int num_choices = 0;             // actions 0, 1, ...; 0 where an action is numbers
};

// An episode. Sebulba makes one, calls `begin`, and lets the simulator run until the time that
// `decide_in` named. Then it asks for the observation, the reward and the end, and calls `act` with
// what the agent does, again and again.
class Scenario {
 public:
  virtual ~Scenario() = default;

  virtual Spaces spaces() = 0;
  // Builds the network and calls `decide_in`.
  virtual void begin() = 0;
  // Does what the agent decided, and calls `decide_in` for its next decision.
  virtual void act(const std::vector<double>& action) = 0;
  virtual std::vector<double> observe() = 0;
  // For what happened since the last decision.
  virtual double reward() = 0;
  virtual bool is_terminated() { return false; }
  virtual bool is_truncated() { return false; }
  // Numbers for a person; always under the same names.
  virtual std::map<std::string, double> info() { return {}; }

  void give(const networks::Json& parameters) { parameters_ = &parameters; }
  const std::set<std::string>& known_parameters() const { return known_; }
  // Whether the agent is to decide; asked once.
  bool take_due() { return std::exchange(is_due_, false); }

 protected:
  // Has the agent decide when `time` has passed.
  void decide_in(ns3::Time time) {
    ns3::Simulator::Schedule(time, [this] { is_due_ = true, ns3::Simulator::Stop(); });
  }
  // Options of the environment; to be read in `spaces` or `begin`.
  double parameter(const std::string& name, double otherwise) {
    const networks::Json* found = find(name);
    if (found == nullptr) return otherwise;
    if (!found->text.empty()) throw std::runtime_error(name + "=" + found->text + " is no number");
    return found->number;
  }
  std::string parameter(const std::string& name, const std::string& otherwise) {
    const networks::Json* found = find(name);
    if (found == nullptr) return otherwise;
    if (found->text.empty()) throw std::runtime_error(name + " must be text");
    return found->text;
  }

 private:
  const networks::Json* find(const std::string& name) {
    known_.insert(name);
    const auto found = parameters_->fields.find(name);
    return found == parameters_->fields.end() ? nullptr : &found->second;
  }

  const networks::Json* parameters_ = nullptr;
  std::set<std::string> known_;
  bool is_due_ = false;
};

std::unique_ptr<Scenario> make_scenario();

}  // namespace sebulba

namespace networks {

// Episodes of a scenario, one after the other.
class ScenarioEnv {
 public:
  struct Config {
    Json parameters;
    int64_t max_steps, num_agents = 1;
    sebulba::Spaces spaces;
    std::vector<std::string> info;

    explicit Config(const Json& json)
        : parameters(json["parameters"]), max_steps(json["max_episode_steps"].integer()) {
      const auto scenario = make();
      spaces = scenario->spaces();
      if (spaces.observation.empty()) throw std::runtime_error("spaces(): no observation");
      if (spaces.action.empty() == (spaces.num_choices == 0))
        throw std::runtime_error("spaces(): give either numbers or choices as actions");
      for (const auto& [name, value] : scenario->info()) info.push_back(name);
    }
    std::unique_ptr<sebulba::Scenario> make() const {
      auto scenario = sebulba::make_scenario();
      scenario->give(parameters);
      return scenario;
    }
    int num_features() const { return static_cast<int>(spaces.observation.size() + info.size()); }
    int num_actions() const { return std::max(1, static_cast<int>(spaces.action.size())); }
  };

  ScenarioEnv(const Config& config, uint64_t seed) : config_(&config), seed_(seed) {}
  ScenarioEnv(ScenarioEnv&&) = default;
  ~ScenarioEnv() { end(); }

  const std::vector<Trace>& trace() const { return trace_; }

  void reset(const Output& output) {
    begin();
    run();
    show(output);
    *output.is_first = 1, *output.reward = 0;
  }

  void step(const float* action, const Output& output) {
    if (has_ended_) return reset(output);
    scenario_->act({action, action + config_->num_actions()});
    run();
    show(output);
    const bool is_late = ++num_steps_ == config_->max_steps;
    *output.terminated = scenario_->is_terminated();
    *output.truncated = !*output.terminated && (is_late || scenario_->is_truncated());
    *output.is_over = has_ended_ = *output.terminated || *output.truncated;
    *output.acting = !has_ended_;
  }

  void seek(int64_t episode) { episode_ = episode - 1, has_ended_ = true; }
  void save(Writer&) { throw std::runtime_error("ns-3 has no state that could be kept"); }
  void put_back(Reader&) { throw std::runtime_error("ns-3 has no state that could be kept"); }

 private:
  void end() {
    if (scenario_ == nullptr) return;
    scenario_.reset();
    ns3::Simulator::Destroy();
  }

  // All of ns-3's random streams follow from the seed and the number of the episode.
  void begin() {
    end();
    ++episode_, num_steps_ = 0, has_ended_ = false;
    const uint64_t key = Random::stream(seed_, static_cast<uint64_t>(episode_), 0).key;
    ns3::RngSeedManager::SetSeed(1 + static_cast<uint32_t>(key >> 33));
    ns3::RngSeedManager::SetRun(static_cast<uint64_t>(episode_));
    ns3::RngSeedManager::ResetNextStreamIndex();
    scenario_ = config_->make();
    scenario_->spaces();
    scenario_->begin();
    for (const auto& [name, value] : config_->parameters.fields)
      if (!scenario_->known_parameters().contains(name)) refuse(name);
  }
  void refuse(const std::string& name) const {
    std::string names;
    for (const auto& known : scenario_->known_parameters()) names += (names.empty() ? "" : ", ") + known;
    throw std::runtime_error("the scenario has no parameter " + name + "; it has " +
                             (names.empty() ? "none" : names));
  }

  void run() {
    ns3::Simulator::Run();
    if (!scenario_->take_due())
      throw std::runtime_error("nothing happens any more, or the program stopped the simulator, and "
                               "the agent has nothing to decide; call decide_in() in begin() and act()");
  }

  void show(const Output& output) {
    const auto observation = scenario_->observe();
    if (observation.size() != config_->spaces.observation.size())
      throw std::runtime_error("observe() returned " + std::to_string(observation.size()) +
                               " numbers, not " + std::to_string(config_->spaces.observation.size()));
    float* to = output.observation;
    for (const double value : observation) *to++ = static_cast<float>(value);
    const auto told = scenario_->info();
    for (const auto& name : config_->info) {
      const auto found = told.find(name);
      *to++ = found == told.end() ? 0.0f : static_cast<float>(found->second);
    }
    *output.reward = static_cast<float>(scenario_->reward());
    *output.is_first = *output.terminated = *output.truncated = *output.is_over = 0;
    *output.acting = 1;
    if (output.info != nullptr) *output.info = {};
  }

  const Config* config_;
  uint64_t seed_;
  int64_t episode_ = -1, num_steps_ = 0;
  bool has_ended_ = true;
  std::unique_ptr<sebulba::Scenario> scenario_;
  std::vector<Trace> trace_;
};

class ScenarioPool final : OnlySimulator, public Pool<ScenarioEnv> {
 public:
  using Pool::Pool;
};

inline AnyPool* make_pool(const Json& json, int num_envs, const int64_t* seeds, int) {
  OnlySimulator::check_rows(num_envs);
  return new ScenarioPool(json, num_envs, seeds, 1);
}

inline std::string as_json(const std::vector<sebulba::Range>& ranges) {
  std::ostringstream text;
  text.precision(17);
  const auto number = [&](double value) {
    if (std::isinf(value)) {
      text << (value < 0 ? "-Infinity" : "Infinity");
    } else {
      text << value;
    }
  };
  for (const auto& [low, high] : ranges) {
    text << (text.tellp() > 0 ? ",[" : "[");
    number(low), text << ",", number(high), text << "]";
  }
  return "[" + text.str() + "]";
}

// Begins an episode, and returns what its agent sees and does.
inline std::string spec_of(const ScenarioEnv::Config& config) {
  std::vector<float> observation(config.num_features());
  float reward;
  uint8_t flags[5];
  ScenarioEnv(config, 0).reset(
      {observation.data(), &reward, flags, flags + 1, flags + 2, flags + 3, flags + 4, nullptr});
  std::string names;
  for (const auto& name : config.info) names += (names.empty() ? "\"" : ",\"") + name + "\"";
  return "{\"observation\":" + as_json(config.spaces.observation) + ",\"action\":" +
         as_json(config.spaces.action) + ",\"num_choices\":" +
         std::to_string(config.spaces.num_choices) + ",\"info\":[" + names + "]}";
}

}  // namespace networks

// Tries a scenario with these parameters; returns what its agent sees and does, as JSON, or null.
extern "C" __attribute__((visibility("default"))) inline const char* net_spec(const char* json) {
  static std::string text;
  const auto done = guarded([&] {
    text = networks::spec_of(networks::ScenarioEnv::Config(networks::Json::parse(json)));
    return 0;
  });
  return done < 0 ? nullptr : text.c_str();
}

// Names the scenario of a program.
#define SEBULBA_SCENARIO(Class)                                                      \
  std::unique_ptr<sebulba::Scenario> sebulba::make_scenario() {                      \
    return std::make_unique<Class>();                                                \
  }                                                                                  \
  __attribute__((used)) const auto sebulba_net_spec = &net_spec
