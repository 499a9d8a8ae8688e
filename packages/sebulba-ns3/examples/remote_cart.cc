// SPDX-License-Identifier: GPL-2.0-or-later
// An agent balances a pole on a cart that is at the other end of a link. The cart sends what it
// observes every 20 ms, and the agent answers with the side to which the cart is to be pushed.
//
//   sebulba train ppo --env.id ns3:program \
//     --env.options.source packages/sebulba-ns3/examples/remote_cart.cc --env.options.delay-ms 5

#include <cmath>

#include "sebulba_network.h"

#include "ns3/point-to-point-module.h"

using namespace ns3;
using namespace sebulba;

// CartPole of Barto, Sutton and Anderson (1983), in the steps of Gymnasium's.
class Cart : public App {
 public:
  Cart(std::string name, Ptr<Node> node, Agent& agent) : App(name, node), agent_(agent) {}

  void start() override {
    const auto chance = CreateObject<UniformRandomVariable>();
    for (double* one : {&x_, &v_, &angle_, &turn_}) *one = chance->GetValue(-0.05, 0.05);
    tick();
  }
  void on_message(const Message& message) override { force_ = message.data[0] == 1 ? 10 : -10; }

 private:
  void tick() {
    send({x_, v_, angle_, turn_});
    after(TICK, [this] { move(), tick(); });
  }
  void move() {
    const double sine = std::sin(angle_), cosine = std::cos(angle_);
    const double push = (force_ + 0.05 * turn_ * turn_ * sine) / 1.1;
    const double spin =
        (9.8 * sine - cosine * push) / (0.5 * (4.0 / 3 - 0.1 * cosine * cosine / 1.1));
    const double pull = push - 0.05 * spin * cosine / 1.1, s = TICK.GetSeconds();
    x_ += s * v_, v_ += s * pull, angle_ += s * turn_, turn_ += s * spin;
    agent_.earn(1);
    const bool has_fallen = std::abs(x_) > 2.4 || std::abs(angle_) > 12 * M_PI / 180;
    if (has_fallen || ++num_ticks_ == 500) network().end(has_fallen);
  }

  const Time TICK = MilliSeconds(20);
  Agent& agent_;
  double x_ = 0, v_ = 0, angle_ = 0, turn_ = 0, force_ = 0;
  int num_ticks_ = 0;
};

class RemoteCart : public Network {
 public:
  std::vector<AgentSpec> agents() override {
    const Range any;
    return {{.name = "agent",
             .spaces = {.observation = {any, any, any, any}, .num_choices = 2},
             .own_actions = static_cast<int>(parameter("own_actions", 0)),
             .age = parameter("age", 0) == 1}};
  }

  void build() override {
    NodeContainer nodes(2);
    PointToPointHelper link;
    const double rate = 1e6 * parameter("link_mbps", 10), delay = parameter("delay_ms", 5);
    link.SetDeviceAttribute("DataRate", DataRateValue(static_cast<uint64_t>(rate)));
    link.SetChannelAttribute("Delay", TimeValue(MicroSeconds(std::llround(1000 * delay))));
    const auto devices = link.Install(nodes);
    InternetStackHelper().Install(nodes);
    Ipv4AddressHelper("10.0.0.0", "255.255.255.0").Assign(devices);

    auto& agent = add<Agent>("agent", nodes.Get(1));
    auto& cart = add<Cart>("cart", nodes.Get(0), agent);
    const std::string via = parameter("via", "udp");
    const auto carried = via == "direct" ? direct() : via == "tcp" ? tcp() : udp();
    connect(cart, agent, carried), connect(agent, cart, carried);
  }
};

SEBULBA_SCENARIO(RemoteCart);
