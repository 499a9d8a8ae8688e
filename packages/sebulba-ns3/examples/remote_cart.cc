// SPDX-License-Identifier: GPL-2.0-or-later
// An agent balances a pole on a cart that is at the other end of a link. The cart sends what it
// observes every 20 ms, and the agent answers with the side to which the cart is to be pushed.
//
//   sebulba train ppo --env.id ns3:program \
//     --env.options.source packages/sebulba-ns3/examples/remote_cart.cc --env.options.delay-ms 5

#include "pole.h"
#include "sebulba_links.h"

using namespace ns3;
using namespace sebulba;

// Gymnasium's CartPole, in its steps.
class Cart : public App {
 public:
  Cart(std::string name, Ptr<Node> node, Agent& agent) : App(name, node), agent_(agent) {}

  void start() override {
    const auto chance = CreateObject<UniformRandomVariable>();
    for (double& one : pole_.state) one = chance->GetValue(-0.05, 0.05);
    tick();
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
    if (pole_.has_fallen() || ++num_ticks_ == 500) network().end(pole_.has_fallen());
  }

  const Time TICK = MilliSeconds(20);
  Agent& agent_;
  networks::Pole pole_;
  int num_ticks_ = 0;
};

class RemoteCart : public Network {
 public:
  std::vector<AgentSpec> agents() override {
    const Range any;
    return {{.name = "agent",
             .spaces = {.observation = {any, any, any, any}, .num_choices = 2},
             .own_actions = static_cast<int>(parameter("own_actions", 0, 0)),
             .age = parameter("age", 0) == 1}};
  }

  void build() override {
    NodeContainer nodes(2);
    link_nodes(*this, nodes,
               {.kind = parameter("link", "point-to-point"),
                .mbps = parameter("link_mbps", 10),
                .delay_ms = parameter("delay_ms", 5)});

    auto& agent = add<Agent>("agent", nodes.Get(1));
    const double service = parameter("service_ms", 0, 0), room = parameter("capacity", 1e9, 0);
    agent.inference = {.service = [=] { return MicroSeconds(std::llround(1000 * service)); },
                       .capacity = static_cast<size_t>(room),
                       .rule = Inference::rule_of(parameter("rule", "drop_new"))};
    auto& cart = add<Cart>("cart", nodes.Get(0), agent);
    const std::string via = choice("via", {"udp", "tcp", "direct"});
    const auto carried = via == "direct" ? direct() : via == "tcp" ? tcp() : udp();
    connect(cart, agent, carried), connect(agent, cart, carried);
  }
};

SEBULBA_SCENARIO(RemoteCart);
