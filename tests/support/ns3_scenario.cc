// SPDX-License-Identifier: GPL-2.0-or-later
// A walk to 5 in ns-3's time, with what can go wrong in a program of a user.

#include <cstdio>

#include "sebulba_scenario.h"

class Walk : public sebulba::Scenario {
 public:
  sebulba::Spaces spaces() override {
    if (parameter("spaces", 1) == 0) return {};
    return {.observation = {{-100, 100}, {0, 1}}, .num_choices = 3};
  }
  void begin() override {
    fault_ = parameter("fault", "none"), at_ = parameter("start", 0), file_ = parameter("file", "none");
    chance_ = ns3::CreateObject<ns3::UniformRandomVariable>();
    if (fault_ == "begin") throw std::runtime_error("no network today");
    decide_in(ns3::MilliSeconds(1));
  }
  void act(const std::vector<double>& action) override {
    at_ += action[0] - 1;
    if (at_ == 3 && fault_ == "fatal") NS_FATAL_ERROR("a road block");
    if (at_ == 3 && fault_ == "fatal once" && std::remove(file_.c_str()) == 0)
      NS_FATAL_ERROR("a road block");
    if (at_ == 3 && fault_ == "silence") return;
    if (at_ == 3 && fault_ == "hang") for (volatile int i = 0;;) i = i;
    decide_in(ns3::MilliSeconds(2));
  }
  std::vector<double> observe() override {
    if (at_ == 3 && fault_ == "observe") return {at_};
    return {at_, chance_->GetValue()};
  }
  double reward() override { return at_ == 5 ? 1 : -0.1; }
  bool is_terminated() override { return at_ == 5; }
  std::map<std::string, double> info() override {
    return {{"ms", ns3::Simulator::Now().GetSeconds() * 1000}};
  }

 private:
  std::string fault_, file_;
  double at_ = 0;
  ns3::Ptr<ns3::UniformRandomVariable> chance_;
};

SEBULBA_SCENARIO(Walk);
