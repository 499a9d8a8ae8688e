// SPDX-License-Identifier: GPL-2.0-or-later
// Two carts with a pole each are balanced over LTE by agents on a server, or on the carts.
//
//   sebulba train ppo --env.id ns3:program \
//     --env.options.source packages/sebulba-ns3/examples/lte_carts.cc --env.options.agents-on server

#include "pole.h"
#include "sebulba_links.h"

using namespace ns3;
using namespace sebulba;

// Gymnasium's CartPole, in its steps.
class Cart : public App {
 public:
  Cart(std::string name, Ptr<Node> node, Agent& agent, Time episode)
      : App(name, node), agent_(agent), left_(episode.GetTimeStep() / TICK.GetTimeStep()) {}

  void start() override {
    const auto chance = CreateObject<UniformRandomVariable>();
    for (double& one : pole_.state) one = chance->GetValue(-0.05, 0.05);
    after(ATTACHED, [this] { tick(); });
  }
  void on_message(const Message& message) override { pole_.push(message.data[0] == 1); }

 private:
  void tick() {
    send(Numbers(pole_.state, pole_.state + 4));
    after(TICK, [this] { move(), tick(); });
  }
  void move() {
    pole_.move(TICK.GetSeconds());
    agent_.earn(1);
    if (pole_.has_fallen() || --left_ == 0) network().end(pole_.has_fallen());
  }

  const Time TICK = MilliSeconds(20), ATTACHED = MilliSeconds(500);
  Agent& agent_;
  networks::Pole pole_;
  int64_t left_;
};

class LteCarts : public Network {
 public:
  std::vector<AgentSpec> agents() override {
    const Range any;
    std::vector<AgentSpec> all;
    for (const char* name : {"agent_0", "agent_1"})
      all.push_back({.name = name,
                     .spaces = {.observation = {any, any, any, any}, .num_choices = 2},
                     .own_actions = static_cast<int>(parameter("own_actions", 3, 0))});
    return all;
  }

  void build() override {
    NodeContainer nodes(3);  // a server, and the carts
    link_nodes(*this, nodes, {.kind = "lte", .mbps = 1000, .delay_ms = 1, .apart_m = 100});
    const Time episode = Seconds(parameter("episode_s", 10, 0.1));
    const double service = parameter("service_ms", 0, 0);
    const bool is_central = choice("agents_on", {"server", "carts"}) == "server";
    for (uint32_t i = 0; i < 2; ++i) {
      const auto node = nodes.Get(1 + i);
      auto& agent = add<Agent>("agent_" + std::to_string(i), is_central ? nodes.Get(0) : node);
      agent.inference.service = [=] { return MicroSeconds(std::llround(1000 * service)); };
      auto& cart = add<Cart>("cart_" + std::to_string(i), node, agent, episode);
      const auto via = is_central ? udp() : direct();
      connect(cart, agent, via), connect(agent, cart, via);
    }
    is_eager = parameter("eager", 0) == 1;
  }
};

SEBULBA_SCENARIO(LteCarts);
