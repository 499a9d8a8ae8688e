// SPDX-License-Identifier: GPL-2.0-or-later
// An agent sets the power of an LTE base station, from which a phone drives away: the case of
// DEFIANCE's published experiments. It observes the SINR at the phone in dB, and the distance in m.
//
//   sebulba train ppo --env.id ns3:program --env.max-episode-steps 500 \
//     --env.options.source packages/sebulba-ns3/examples/lte_power.cc

#include <cmath>

#include "sebulba_scenario.h"

#include "ns3/lte-module.h"
#include "ns3/mobility-module.h"
#include "ns3/network-module.h"

using namespace ns3;

class LtePower : public sebulba::Scenario {
 public:
  sebulba::Spaces spaces() override {
    return {.observation = {{-100, 200}, {0, 100000}}, .action = {{0, 30}}};
  }

  void begin() override {
    NodeContainer mast(1), phone(1);
    lte_ = CreateObject<LteHelper>();
    const std::string loss = parameter("propagation", "ns3::FriisPropagationLossModel");
    lte_->SetAttribute("PathlossModel", TypeIdValue(TypeId::LookupByName(loss)));
    MobilityHelper still, moving;
    moving.SetMobilityModel("ns3::ConstantVelocityMobilityModel");
    still.Install(mast), moving.Install(phone);
    car_ = phone.Get(0)->GetObject<ConstantVelocityMobilityModel>();
    car_->SetPosition(Vector(parameter("start_m", 30), 0, 0));
    car_->SetVelocity(Vector(parameter("speed_mps", 100), 0, 0));
    const auto station = lte_->InstallEnbDevice(mast), radio = lte_->InstallUeDevice(phone);
    lte_->Attach(radio, station.Get(0));
    station_ = DynamicCast<LteEnbNetDevice>(station.Get(0))->GetPhy();
    DynamicCast<LteUeNetDevice>(radio.Get(0))->GetPhy()->TraceConnectWithoutContext(
        "ReportCurrentCellRsrpSinr", MakeCallback(&LtePower::report, this));
    decide_in(Time());
  }
  void act(const std::vector<double>& action) override {
    station_->SetTxPower(action[0]);
    decide_in(MilliSeconds(5));
  }
  std::vector<double> observe() override { return {sinr_, car_->GetPosition().x}; }
  // Close to the least power with which the phone has 10 dB.
  double reward() override { return sinr_ < 10 ? -1 : 1 - station_->GetTxPower() / 30; }

 private:
  void report(uint16_t, uint16_t, double, double sinr, uint8_t) { sinr_ = 10 * std::log10(sinr); }

  Ptr<LteHelper> lte_;
  Ptr<LteEnbPhy> station_;
  Ptr<ConstantVelocityMobilityModel> car_;
  double sinr_ = 0;
};

SEBULBA_SCENARIO(LtePower);
