// SPDX-License-Identifier: GPL-2.0-or-later
// Four LTE cells set their powers for eight users who drive about. `deployment` says who decides:
//   center  one agent at a center observes all cells and sets all powers, over the backhaul;
//   cells   an agent in each cell observes and sets its own;
//   models  an agent in each cell, with the models that the center sends it every `every_s`.
// The reward is the mean over users of the logarithm of their Shannon rate in Mbit/s.
//
//   sebulba train ppo --env.id ns3:program --env.options.source packages/sebulba-ns3/examples/cells.cc \
//     --env.options.deployment models --env.options.backhaul-mbps 1

#include <array>
#include <cmath>

#include "sebulba_links.h"

using namespace ns3;
using namespace sebulba;

constexpr int NUM_CELLS = 4, USERS_A_CELL = 2, NUM_SEEN = USERS_A_CELL + 1;
constexpr double MIDDLE_DBM = 25, SPREAD_DB = 15, RATE_HZ = 4.5e6 / USERS_A_CELL;

// Reports what its users receive, and sets the power.
class Site : public App {
 public:
  Site(std::string name, Ptr<Node> node, Ptr<LteEnbPhy> station, Time period)
      : App(name, node), station_(station), period_(period) {}
  void start() override { after(period_, [this] { tick(); }); }
  void on_message(const Message& message) override { set(message.data[0]); }

  void set(double action) {
    power_ = std::clamp(action, -1.0, 1.0);
    station_->SetTxPower(MIDDLE_DBM + SPREAD_DB * power_);
  }
  static void report(Site* site, int user, uint16_t, uint16_t, double, double sinr, uint8_t) {
    site->sinr_[user] = sinr;
  }
  double mbps(int user) const { return RATE_HZ * std::log2(1 + sinr_[user]) / 1e6; }

 private:
  void tick() {
    Numbers seen;
    for (const double sinr : sinr_) seen.push_back(std::log10(std::max(sinr, 1e-3)));
    seen.push_back(power_);
    send(seen);
    start();
  }

  Ptr<LteEnbPhy> station_;
  const Time period_;
  std::array<double, USERS_A_CELL> sinr_{1, 1};
  double power_ = 0;
};

// Decides for all cells on what has arrived of them.
class Center : public Agent {
 public:
  Center(std::string name, Ptr<Node> node, Time period) : Agent(name, node), period_(period) {}
  void start() override {
    after(period_ * 1.5, [this] { tick(); });
  }
  void on_message(const Message& message) override {
    const size_t cell = message.from.back() - '0';
    std::copy(message.data.begin(), message.data.end(), seen_.begin() + cell * NUM_SEEN);
  }
  void act(const Numbers& action) override {
    for (int i = 0; i < NUM_CELLS; ++i) send({action[i]}, 0, "site_" + std::to_string(i));
  }

 private:
  void tick() {
    ask(seen_);
    after(period_, [this] { tick(); });
  }
  const Time period_;
  Numbers seen_ = Numbers(NUM_CELLS * NUM_SEEN);
};

class Cells : public Network {
 public:
  std::vector<AgentSpec> agents() override {
    deployment_ = choice("deployment", {"center", "cells", "models"});
    const std::vector<Range> one(NUM_SEEN);
    if (deployment_ == "center")
      return {{.name = "center",
               .spaces = {.observation = std::vector<Range>(NUM_CELLS * NUM_SEEN),
                          .action = std::vector<Range>(NUM_CELLS, {-1, 1})}}};
    std::vector<AgentSpec> all;
    for (int i = 0; i < NUM_CELLS; ++i)
      all.push_back({.name = "cell_" + std::to_string(i),
                     .spaces = {.observation = one, .action = {{-1, 1}}},
                     .model = deployment_ == "models"});
    return all;
  }

  void build() override {
    period_ = MilliSeconds(std::llround(parameter("period_ms", 50, 1)));
    const double backhaul = parameter("backhaul_mbps", 10);
    NodeContainer center(1), masts(NUM_CELLS), users(NUM_CELLS * USERS_A_CELL);
    for (int i = 0; i < NUM_CELLS; ++i)
      link_nodes(*this, {center.Get(0), masts.Get(i)}, {.mbps = backhaul, .delay_ms = 5});
    MobilityHelper places;
    places.SetMobilityModel("ns3::ConstantVelocityMobilityModel");
    places.Install(masts), places.Install(users);
    const auto lte = CreateObject<LteHelper>();
    keep(lte);
    const auto stations = lte->InstallEnbDevice(masts), radios = lte->InstallUeDevice(users);
    if (deployment_ == "center") decider_ = &add<Center>("center", center.Get(0), period_);
    auto* models = deployment_ == "models" ? &add<ModelServer>("models", center.Get(0),
                                                               Seconds(parameter("every_s", 0.5, 0.001)))
                                           : nullptr;
    const auto chance = CreateObject<UniformRandomVariable>();
    for (int i = 0; i < NUM_CELLS; ++i) {
      const std::string number = std::to_string(i);
      const Vector middle(400.0 * (i % 2), 400.0 * (i / 2), 0);
      put(masts.Get(i), middle, Vector());
      auto& site = add<Site>("site_" + number, masts.Get(i),
                             DynamicCast<LteEnbNetDevice>(stations.Get(i))->GetPhy(), period_);
      sites_.push_back(&site);
      for (int k = 0; k < USERS_A_CELL; ++k) {
        const int user = i * USERS_A_CELL + k;
        const double away = chance->GetValue(0, 2 * M_PI), to = chance->GetValue(0, 2 * M_PI);
        const double far = chance->GetValue(50, 200);
        put(users.Get(user), middle + Vector(far * std::cos(away), far * std::sin(away), 0),
            Vector(30 * std::cos(to), 30 * std::sin(to), 0));
        lte->Attach(radios.Get(user), stations.Get(i));
        DynamicCast<LteUeNetDevice>(radios.Get(user))->GetPhy()->TraceConnectWithoutContext(
            "ReportCurrentCellRsrpSinr", MakeBoundCallback(&Site::report, &site, k));
      }
      if (deployment_ == "center") {
        connect(site, *decider_, udp(1 + i)), connect(*decider_, site, udp());
        continue;
      }
      auto& agent = add<Agent>("cell_" + number, masts.Get(i));
      agents_in_cells_.push_back(&agent);
      connect(site, agent, direct()), connect(agent, site, direct());
      if (models != nullptr) connect(*models, agent, tcp());
    }
    Simulator::Schedule(period_ / 2, &Cells::judge, this);
    Simulator::Schedule(Seconds(parameter("episode_s", 4, 0.1)), [this] { end(false); });
  }

  std::map<std::string, double> info() override {
    auto all = Network::info();
    all["mbps"] = mbps_ / std::max(1, num_judged_), all["worth"] = worth_ / std::max(1, num_judged_);
    return all;
  }

 private:
  static void put(Ptr<Node> node, Vector place, Vector velocity) {
    const auto model = node->GetObject<ConstantVelocityMobilityModel>();
    model->SetPosition(place), model->SetVelocity(velocity);
  }
  void judge() {
    double all = 0, worth = 0;
    for (const Site* site : sites_)
      for (int k = 0; k < USERS_A_CELL; ++k)
        all += site->mbps(k), worth += std::log(0.01 + site->mbps(k));
    constexpr int NUM_USERS = NUM_CELLS * USERS_A_CELL;
    mbps_ += all / NUM_USERS, worth_ += worth / NUM_USERS, ++num_judged_;
    if (decider_ != nullptr) decider_->earn(worth / NUM_USERS);
    for (Agent* agent : agents_in_cells_) agent->earn(worth / NUM_USERS);
    Simulator::Schedule(period_, &Cells::judge, this);
  }

  std::string deployment_;
  Time period_;
  Center* decider_ = nullptr;
  std::vector<Agent*> agents_in_cells_;
  std::vector<Site*> sites_;
  double mbps_ = 0, worth_ = 0;  // sums over the times at which it was judged
  int num_judged_ = 0;
};

SEBULBA_SCENARIO(Cells);
