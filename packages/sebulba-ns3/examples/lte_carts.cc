// SPDX-License-Identifier: GPL-2.0-or-later
// Two carts with a pole each are balanced over LTE by agents on a server, or on the carts.
//
//   sebulba train ppo --env.id ns3:program \
//     --env.options.source packages/sebulba-ns3/examples/lte_carts.cc --env.options.agents-on server

#include "pole.h"
#include "sebulba_network.h"

#include "ns3/lte-module.h"
#include "ns3/mobility-module.h"
#include "ns3/point-to-point-module.h"

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
                     .own_actions = static_cast<int>(parameter("own_actions", 3))});
    return all;
  }

  void build() override {
    NodeContainer server(1), tower(1), carts(2);
    const Time episode = Seconds(parameter("episode_s", 10));
    lte_ = CreateObject<LteHelper>(), core_ = CreateObject<PointToPointEpcHelper>();
    lte_->SetEpcHelper(core_);
    InternetStackHelper internet;
    internet.Install(server), internet.Install(carts);
    PointToPointHelper cable;
    cable.SetDeviceAttribute("DataRate", StringValue("1Gbps"));
    cable.SetChannelAttribute("Delay", StringValue("1ms"));
    Ipv4AddressHelper("1.0.0.0", "255.0.0.0")
        .Assign(cable.Install(core_->GetPgwNode(), server.Get(0)));
    Ipv4StaticRoutingHelper routes;
    routes.GetStaticRouting(server.Get(0)->GetObject<Ipv4>())
        ->AddNetworkRouteTo("7.0.0.0", "255.0.0.0", 1);
    MobilityHelper places;
    places.SetPositionAllocator("ns3::GridPositionAllocator", "DeltaX", DoubleValue(100));
    places.Install(tower), places.Install(carts);
    const auto mast = lte_->InstallEnbDevice(tower), radios = lte_->InstallUeDevice(carts);
    core_->AssignUeIpv4Address(radios);
    lte_->Attach(radios, mast.Get(0));
    const bool is_central = parameter("agents_on", "server") == "server";
    for (uint32_t i = 0; i < 2; ++i) {
      const auto node = carts.Get(i);
      routes.GetStaticRouting(node->GetObject<Ipv4>())
          ->SetDefaultRoute(core_->GetUeDefaultGatewayAddress(), 1);
      auto& agent = add<Agent>("agent_" + std::to_string(i), is_central ? server.Get(0) : node);
      auto& cart = add<Cart>("cart_" + std::to_string(i), node, agent, episode);
      const auto via = is_central ? udp() : direct();
      connect(cart, agent, via), connect(agent, cart, via);
    }
  }

 private:
  Ptr<LteHelper> lte_;  // both have to live as long as the episode
  Ptr<PointToPointEpcHelper> core_;
};

SEBULBA_SCENARIO(LteCarts);
