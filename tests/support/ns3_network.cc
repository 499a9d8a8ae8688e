// SPDX-License-Identifier: GPL-2.0-or-later
// What tests need of applications on nodes: `case` names what this program does.

#include "sebulba_links.h"

using namespace ns3;
using namespace sebulba;

// Sends `count` messages of one number, one each `period`.
class Source : public App {
 public:
  Source(std::string name, Ptr<Node> node, Time first, Time period, int count, uint32_t ballast)
      : App(name, node), first_(first), period_(period), left_(count), ballast_(ballast) {}
  void start() override {
    if (first_.IsZero()) return tick();
    after(first_, [this] { tick(); });
  }

 private:
  void tick() {
    if (left_-- <= 0) return;
    send({static_cast<double>(num_++)}, ballast_);
    after(period_, [this] { tick(); });
  }

  const Time first_;
  Time period_;
  int left_, num_ = 0;
  uint32_t ballast_;
};

// Observes the age of the message in ms, and how many observations wait.
class Reader : public Agent {
 public:
  using Agent::Agent;
  void on_message(const Message& message) override {
    earn(1);
    ask({1000 * (message.arrived - message.born).GetSeconds(), message.data[0]}, message.born,
        message.from);
  }
};

class Cases : public Network {
 public:
  std::vector<AgentSpec> agents() override {
    kind_ = parameter("case", "link");
    std::vector<AgentSpec> all;
    const int count = static_cast<int>(parameter("agents", 1));
    for (int i = 0; i < count; ++i)
      all.push_back({.name = "reader_" + std::to_string(i),
                     .spaces = {.observation = {{}, {}}, .num_choices = 3},
                     .own_actions = static_cast<int>(parameter("own_actions", 0)),
                     .age = parameter("age", 0) == 1,
                     .model = kind_ == "models" && i < parameter("with_model", count)});
    return all;
  }

  void build() override {
    NodeContainer nodes(2);
    const auto interface = static_cast<uint32_t>(parameter("interface", 1));
    for (uint32_t i = 1; i < interface; ++i) link_nodes(*this, nodes, {});
    const auto devices = link_nodes(*this, nodes, {.kind = parameter("link", "point-to-point")});
    if (const double loss = parameter("loss", 0)) {
      const auto errors = CreateObject<RateErrorModel>();
      errors->SetUnit(RateErrorModel::ERROR_UNIT_PACKET);
      errors->SetRate(loss);
      devices.Get(1)->SetAttribute("ReceiveErrorModel", PointerValue(errors));
    }
    is_eager = parameter("eager", 0) == 1;
    silent_limit = Seconds(parameter("silent_s", 2));
    const std::string via = parameter("via", "udp");
    const Time period = MicroSeconds(static_cast<int64_t>(1000 * parameter("period_ms", 20)));
    const Time first = MicroSeconds(std::llround(1000 * parameter("start_ms", 0)));
    const int count = static_cast<int>(parameter("count", 1000));
    const auto ballast = static_cast<uint32_t>(parameter("ballast", 0));
    const double service = parameter("service_ms", 0), capacity = parameter("capacity", 1e9);
    const auto rule = Inference::rule_of(parameter("rule", "drop_new"));
    for (size_t i = 0; i < (kind_ == "nobody" ? 1 : agents().size()); ++i) {
      auto& reader = add<Reader>("reader_" + std::to_string(i), nodes.Get(kind_ == "words" && i == 1 ? 0 : 1));
      reader.ages = History(static_cast<size_t>(parameter("remembered", 1000)));
      if (service > 0) reader.inference.service = [=] { return MicroSeconds(std::llround(1000 * service)); };
      reader.inference.capacity = static_cast<size_t>(capacity);
      reader.inference.threads = static_cast<int>(parameter("threads", 1));
      reader.inference.rule = rule;
      readers_.push_back(&reader);
      auto& source = add<Source>("source_" + std::to_string(i), nodes.Get(0), first, period, count, ballast);
      if (kind_ == "nobody" || kind_ == "text") continue;
      if (kind_ == "words" && i == 1) {  // it hears what the other one decides
        connect(*readers_[0], reader, udp());
        continue;
      }
      auto& made = connect(source, reader, via == "tcp" ? tcp(interface) : via == "direct" ? direct(MilliSeconds(7)) : udp(interface));
      if (kind_ == "reconnect") reconnect(made, source, reader);
    }
    if (kind_ == "text") connect(parameter("connections", "source_0>reader_0 udp"));
    if (kind_ == "models") {
      auto& server = add<ModelServer>("server", nodes.Get(0));
      for (size_t i = 0; i < readers_.size(); ++i)
        if (agents()[i].model) connect(server, *readers_[i], tcp());
    }
    if (const double seconds = parameter("end_s", 0)) Simulator::Schedule(Seconds(seconds), [this] { end(false); });
    const bool forward = parameter("forward", 0) == 1;
    if (kind_ == "move")
      Simulator::Schedule(MilliSeconds(500), [this, forward, there = nodes.Get(0)] {
        move(*readers_[0], there, forward);
      });
    if (kind_ == "assert") Simulator::Schedule(MilliSeconds(50), [] { NS_ASSERT_MSG(1 > 2, "one is less"); });
  }

  std::map<std::string, double> info() override {
    auto all = Network::info();
    all["waiting"] = readers_.empty() ? 0 : static_cast<double>(readers_[0]->num_waiting());
    const History ages = readers_.empty() ? History() : readers_[0]->ages;
    all["mean_age_ms"] = 1000 * ages.average(), all["newest_age_ms"] = 1000 * ages.newest();
    all["least_age_ms"] = 1000 * ages.least(), all["largest_age_ms"] = 1000 * ages.largest();
    return all;
  }

 private:
  void reconnect(Connection& connection, App& from, App& to) {
    Simulator::Schedule(MicroSeconds(std::llround(1000 * parameter("reconnect_ms", 10))), [this, &connection, &from, &to] {
      const Via via = connection.via;
      disconnect(connection);
      reconnect(connect(from, to, via), from, to);
    });
  }

  std::string kind_;
  std::vector<Reader*> readers_;
};

SEBULBA_SCENARIO(Cases);
