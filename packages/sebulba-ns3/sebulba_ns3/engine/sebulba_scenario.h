// SPDX-License-Identifier: GPL-2.0-or-later
// An ns-3 program as an environment: derive from `sebulba::Scenario`, and name the class in
// `SEBULBA_SCENARIO`.
#pragma once

#include <algorithm>
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

// Numbers that an action has besides, where agents have models: its version, and its size in bytes.
constexpr int NUM_PUBLISHED = 2;
constexpr const char* MODEL_VERSION = "model_version";
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

// An agent. The engine adds to what it observes: the last `own_actions` actions that it decided on,
// the newest last (choices as 0 and 1), and the age of the observation in seconds. Where an agent has
// a `model`, it decides with the newest one that has arrived at its node (`ModelServer`).
struct AgentSpec {
  std::string name;
  Spaces spaces;
  int own_actions = 0;
  bool age = false;
  bool model = false;

  // The ranges of an action as numbers from 0 on.
  std::vector<Range> action_ranges() const {
    if (spaces.action.empty()) return std::vector<Range>(spaces.num_choices, {0, 1});
    std::vector<Range> ranges;
    for (const auto& [low, high] : spaces.action)
      ranges.push_back({std::min(low, 0.0), std::max(high, 0.0)});
    return ranges;
  }
  // All that it observes.
  std::vector<Range> observed() const {
    auto ranges = spaces.observation;
    for (int i = 0; i < own_actions; ++i)
      for (const auto& range : action_ranges()) ranges.push_back(range);
    if (age) ranges.push_back({0, INFINITE});
    return ranges;
  }
  size_t num_action_numbers() const { return std::max<size_t>(1, spaces.action.size()); }
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

  // Called when the episode is over, before anything is deleted.
  virtual void stop() {}
  // What happened in the episode, as JSON.
  virtual std::string report() { return "{}"; }

  // Of several agents, by number; an episode of one agent needs none of it (`sebulba_network.h`).
  virtual std::vector<AgentSpec> agents() { return {{"agent", spaces()}}; }
  // Whether the agent is to decide now; of all of them once it has ended, whether it ever was.
  virtual bool is_asked(size_t) { return true; }
  virtual std::vector<double> observe_of(size_t) { return observe(); }
  virtual double reward_of(size_t) { return reward(); }
  virtual void act_of(size_t, const std::vector<double>& action) { act(action); }
  // The version of the newest model that the trainer has, and its size; before each step.
  virtual void publish(double, double) {}
  // The version that has arrived at an agent; 0 for the one with which the episode began, -1 for
  // the newest of the trainer.
  virtual double version_of(size_t) { return 0; }

  void give(const networks::Json& parameters) { parameters_ = &parameters; }
  const std::set<std::string>& known_parameters() const { return known_; }
  // Whether the agent is to decide; asked once.
  bool take_due() { return std::exchange(is_due_, false); }

 protected:
  // Has the agent decide when `time` has passed.
  void decide_in(ns3::Time time) {
    ns3::Simulator::Schedule(time, [this] { decide_now(); });
  }
  // Has the agents decide once this event is over.
  void decide_now() { is_due_ = true, ns3::Simulator::Stop(); }
  // Options of the environment; to be read in `spaces` or `begin`.
  double parameter(const std::string& name, double otherwise, double least = -INFINITE) {
    const networks::Json* found = find(name);
    if (found == nullptr) return otherwise;
    if (!found->text.empty()) throw std::runtime_error(name + "=" + found->text + " is no number");
    if (found->number >= least) return found->number;
    std::ostringstream said;
    said << name << "=" << found->number << " must be at least " << least;
    throw std::runtime_error(said.str());
  }
  std::string parameter(const std::string& name, const std::string& otherwise) {
    const networks::Json* found = find(name);
    if (found == nullptr) return otherwise;
    if (found->text.empty()) throw std::runtime_error(name + " must be text");
    return found->text;
  }
  // One of `all`; the first one if no other is given.
  std::string choice(const std::string& name, const std::vector<std::string>& all) {
    const std::string found = parameter(name, all.front());
    std::string known;
    for (const auto& one : all) {
      if (one == found) return found;
      known += (known.empty() ? "" : ", ") + one;
    }
    throw std::runtime_error(name + "=" + found + " is none of " + known);
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
    int64_t max_steps, num_agents = 0;
    std::vector<sebulba::AgentSpec> agents;
    std::vector<std::string> info;
    bool has_models = false;

    explicit Config(const Json& json)
        : parameters(json["parameters"]), max_steps(json["max_episode_steps"].integer()) {
      const auto scenario = make();
      agents = scenario->agents(), num_agents = static_cast<int64_t>(agents.size());
      if (agents.empty()) throw std::runtime_error("agents(): no agent");
      for (const auto& agent : agents) {
        const auto& spaces = agent.spaces;
        if (spaces.observation.empty()) throw std::runtime_error("spaces(): no observation");
        if (agent.own_actions < 0 || agent.own_actions > 10'000)
          throw std::runtime_error("own_actions must be from 0 to 10,000");
        if (spaces.action.empty() == (spaces.num_choices == 0))
          throw std::runtime_error("spaces(): give either numbers or choices as actions");
        has_models |= agent.model;
      }
      for (const auto& [name, value] : scenario->info()) info.push_back(name);
      if (has_models) info.push_back(sebulba::MODEL_VERSION);
    }
    std::unique_ptr<sebulba::Scenario> make() const {
      auto scenario = sebulba::make_scenario();
      scenario->give(parameters);
      return scenario;
    }
    // Rows of agents with fewer numbers are filled up with 0.
    size_t num_observed() const {
      size_t most = 0;
      for (const auto& agent : agents) most = std::max(most, agent.observed().size());
      return most;
    }
    int num_features() const { return static_cast<int>(num_observed() + info.size()); }
    int num_actions() const {
      size_t most = 1;
      for (const auto& agent : agents) most = std::max(most, agent.num_action_numbers());
      return static_cast<int>(most) + (has_models ? sebulba::NUM_PUBLISHED : 0);
    }
  };

  ScenarioEnv(const Config& config, uint64_t seed) : config_(&config), seed_(seed) {}
  ScenarioEnv(ScenarioEnv&&) = default;
  ~ScenarioEnv() { end(); }

  const std::vector<Trace>& trace() const { return trace_; }
  std::string report() { return scenario_ == nullptr ? "{}" : scenario_->report(); }

  void reset(const Output& output) {
    begin();
    run();
    show(output);
    for (int64_t i = 0; i < config_->num_agents; ++i) output.is_first[i] = 1, output.reward[i] = 0;
  }

  // An episode that ended before anybody was to decide ends in its first step.
  void step(const float* action, const Output& output) {
    if (has_ended_) return reset(output);
    if (is_due_) {
      if (const float* end = action + config_->num_actions(); config_->has_models)
        scenario_->publish(end[-2], end[-1]);
      for (size_t i = 0; i < config_->agents.size(); ++i, action += config_->num_actions())
        if (is_asked_[i])
          scenario_->act_of(i, {action, action + config_->agents[i].num_action_numbers()});
      run();
    }
    const bool is_late = ++num_steps_ == config_->max_steps, has_won = scenario_->is_terminated();
    has_ended_ = has_won || is_late || scenario_->is_truncated();
    show(output);
    *output.is_over = has_ended_;
    for (int64_t i = 0; has_ended_ && i < config_->num_agents; ++i) {
      const bool was_there = output.acting[i] || config_->num_agents == 1;
      output.terminated[i] = was_there && has_won, output.truncated[i] = was_there && !has_won;
      output.acting[i] = 0;
    }
  }

  void seek(int64_t episode) { episode_ = episode - 1, has_ended_ = true; }
  void save(Writer&) { throw std::runtime_error("ns-3 has no state that could be kept"); }
  void put_back(Reader&) { throw std::runtime_error("ns-3 has no state that could be kept"); }

 private:
  void end() {
    if (scenario_ == nullptr) return;
    scenario_->stop();
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
    scenario_->agents();
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
    is_due_ = scenario_->take_due();
    if (!is_due_ && !scenario_->is_terminated() && !scenario_->is_truncated())
      throw std::runtime_error("nothing happens any more, or the program stopped the simulator, and "
                               "the agent has nothing to decide; call decide_in() in begin() and act()");
  }

  void show(const Output& output) {
    const size_t num_features = config_->num_features(), num_observed = config_->num_observed();
    const auto told = scenario_->info();
    is_asked_.assign(config_->agents.size(), false);
    for (size_t i = 0; i < config_->agents.size(); ++i) {
      float* to = output.observation + i * num_features;
      std::fill(to, to + num_features, 0.0f);
      output.reward[i] = 0;
      output.acting[i] = is_asked_[i] = (is_due_ || has_ended_) && scenario_->is_asked(i);
      output.is_first[i] = output.terminated[i] = output.truncated[i] = 0;
      if (is_asked_[i]) {
        const auto observation = scenario_->observe_of(i);
        const size_t wanted = config_->agents[i].observed().size();
        if (observation.size() != wanted)
          throw std::runtime_error("observe() returned " + std::to_string(observation.size()) +
                                   " numbers, not " + std::to_string(wanted));
        std::copy(observation.begin(), observation.end(), to);
        output.reward[i] = static_cast<float>(scenario_->reward_of(i));
      }
      to += num_observed;
      for (const auto& name : config_->info) {
        if (name == sebulba::MODEL_VERSION) {
          *to++ = static_cast<float>(scenario_->version_of(i));
          continue;
        }
        const auto found = told.find(name);
        *to++ = found == told.end() ? 0.0f : static_cast<float>(found->second);
      }
      if (output.info != nullptr) output.info[i] = {};
    }
    *output.is_over = 0;
  }

  const Config* config_;
  uint64_t seed_;
  int64_t episode_ = -1, num_steps_ = 0;
  bool has_ended_ = true, is_due_ = false;
  std::vector<bool> is_asked_;
  std::unique_ptr<sebulba::Scenario> scenario_;
  std::vector<Trace> trace_;
};

class ScenarioPool final : OnlySimulator, public Pool<ScenarioEnv> {
 public:
  using Pool::Pool;
  std::string report() { return envs().at(0).report(); }
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

inline std::string joined(const std::vector<std::string>& texts) {
  std::string all;
  for (const auto& text : texts) all += (all.empty() ? "" : ",") + text;
  return "[" + all + "]";
}

// Begins an episode, and returns what its agents see and do.
inline std::string spec_of(const ScenarioEnv::Config& config) {
  const size_t count = config.agents.size();
  std::vector<float> observation(count * config.num_features()), reward(count);
  std::vector<uint8_t> flags(4 * count + 1);
  uint8_t* flag = flags.data();
  ScenarioEnv(config, 0).reset({observation.data(), reward.data(), flag, flag + count,
                                flag + 2 * count, flag + 3 * count, flag + 4 * count, nullptr});
  std::vector<std::string> agents, names;
  for (const auto& agent : config.agents)
    agents.push_back("{\"name\":\"" + agent.name + "\",\"observation\":" +
                     as_json(agent.observed()) + ",\"action\":" + as_json(agent.spaces.action) +
                     ",\"num_choices\":" + std::to_string(agent.spaces.num_choices) + "}");
  for (const auto& name : config.info) names.push_back("\"" + name + "\"");
  return "{\"agents\":" + joined(agents) + ",\"info\":" + joined(names) + "}";
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

// Returns what happened in the episode of a simulator so far, as JSON, or null.
extern "C" __attribute__((visibility("default"))) inline const char* net_report(void* pool) {
  static std::string text;
  const auto done = guarded([&] {
    text = dynamic_cast<networks::ScenarioPool&>(*static_cast<networks::AnyPool*>(pool)).report();
    return 0;
  });
  return done < 0 ? nullptr : text.c_str();
}

// Names the scenario of a program.
#define SEBULBA_SCENARIO(Class)                                                      \
  std::unique_ptr<sebulba::Scenario> sebulba::make_scenario() {                      \
    return std::make_unique<Class>();                                                \
  }                                                                                  \
  __attribute__((used)) const auto sebulba_net_spec = &net_spec;                     \
  __attribute__((used)) const auto sebulba_net_report = &net_report
