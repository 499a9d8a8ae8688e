// SPDX-License-Identifier: GPL-2.0-or-later
// The published experiments of DEFIANCE with base stations 1,000 m apart: `experiment` names one.
// Observed are, for each cell, the last SINR in dB that each phone had in it (0 before), and how far
// the first phone is from the first cell, in m. The actions are the powers of the cells in dBm.

#include <cmath>

#include "sebulba_scenario.h"

#include "ns3/applications-module.h"
#include "ns3/internet-module.h"
#include "ns3/lte-module.h"
#include "ns3/mobility-module.h"
#include "ns3/network-module.h"
#include "ns3/point-to-point-module.h"

using namespace ns3;

class Cells : public sebulba::Scenario {
 public:
  sebulba::Spaces spaces() override {
    experiment_ = parameter("experiment", "3_1");
    if (experiment_ == "3_1") places_ = {{0, 0}}, cell_of_ = {0};
    if (experiment_ == "3_2") places_ = {{0, 500}, {1000, 500}}, cell_of_ = {0, 1};
    if (experiment_ == "4_1") places_ = {{0, 0}}, cell_of_ = {0};
    if (experiment_ == "4_2") places_ = {{0, 0}, {1000, 500}, {1000, 250}}, cell_of_ = {0, 1, 1};
    if (experiment_ == "4_3")
      places_ = {{0, 0}, {0, 250}, {1000, 500}, {1000, 250}}, cell_of_ = {0, 0, 1, 1};
    num_cells_ = experiment_ == "3_1" ? 1 : 2;
    sinr_.assign(num_cells_ * places_.size(), 0.0);
    return {.observation = std::vector<sebulba::Range>(sinr_.size() + 1),
            .action = std::vector<sebulba::Range>(num_cells_, {0, 30})};
  }

  void begin() override {
    const bool is_moving = experiment_[0] == '4';
    NodeContainer masts(num_cells_), phones(places_.size());
    lte_ = CreateObject<LteHelper>();
    lte_->SetAttribute("PathlossModel",
                       TypeIdValue(TypeId::LookupByName("ns3::FriisPropagationLossModel")));
    if (is_moving) {
      core_ = CreateObject<PointToPointEpcHelper>();
      lte_->SetEpcHelper(core_);
      lte_->SetHandoverAlgorithmType("ns3::A3RsrpHandoverAlgorithm");
      lte_->SetHandoverAlgorithmAttribute("Hysteresis", DoubleValue(parameter("hysteresis_db", 3)));
      lte_->SetHandoverAlgorithmAttribute(
          "TimeToTrigger", TimeValue(MilliSeconds(std::llround(parameter("trigger_ms", 256)))));
    }
    MobilityHelper mobility;
    mobility.SetMobilityModel("ns3::ConstantVelocityMobilityModel");
    mobility.Install(masts), mobility.Install(phones);
    for (int i = 0; i < num_cells_; ++i) put(masts.Get(i), {1000.0 * i, 0});
    for (size_t i = 0; i < places_.size(); ++i) put(phones.Get(i), places_[i]);
    first_ = phones.Get(0)->GetObject<ConstantVelocityMobilityModel>();
    if (is_moving) first_->SetVelocity(Vector(100, 0, 0));
    const auto stations = lte_->InstallEnbDevice(masts), radios = lte_->InstallUeDevice(phones);
    if (is_moving) {
      InternetStackHelper().Install(phones);
      core_->AssignUeIpv4Address(radios);
      load(phones);
    }
    for (uint32_t i = 0; i < radios.GetN(); ++i) {
      lte_->Attach(radios.Get(i), stations.Get(cell_of_[i]));
      DynamicCast<LteUeNetDevice>(radios.Get(i))->GetPhy()->TraceConnectWithoutContext(
          "ReportCurrentCellRsrpSinr", MakeBoundCallback(&Cells::report, this, i));
    }
    // Cells with phones send all the time.
    if (is_moving) {
      lte_->AddX2Interface(masts);
    } else {
      lte_->ActivateDataRadioBearer(radios, EpsBearer(EpsBearer::NGBR_VIDEO_TCP_DEFAULT));
    }
    for (int i = 0; i < num_cells_; ++i)
      stations_.push_back(DynamicCast<LteEnbNetDevice>(stations.Get(i))->GetPhy());
    decide_in(MilliSeconds(300));
  }
  void act(const std::vector<double>& powers) override {
    for (int i = 0; i < num_cells_; ++i) stations_[i]->SetTxPower(powers[i]);
    decide_in(MilliSeconds(5));
  }
  std::vector<double> observe() override {
    auto all = sinr_;
    all.push_back(first_->GetPosition().x);
    return all;
  }
  double reward() override { return 0; }

 private:
  // Sends each phone more than its cell can carry.
  void load(const NodeContainer& phones) {
    NodeContainer server(1);
    InternetStackHelper().Install(server);
    PointToPointHelper cable;
    cable.SetDeviceAttribute("DataRate", StringValue("10Gbps"));
    Ipv4AddressHelper("1.0.0.0", "255.0.0.0")
        .Assign(cable.Install(core_->GetPgwNode(), server.Get(0)));
    Ipv4StaticRoutingHelper routes;
    routes.GetStaticRouting(server.Get(0)->GetObject<Ipv4>())
        ->AddNetworkRouteTo("7.0.0.0", "255.0.0.0", 1);
    for (uint32_t i = 0; i < phones.GetN(); ++i) {
      const auto to = phones.Get(i)->GetObject<Ipv4>()->GetAddress(1, 0).GetLocal();
      UdpClientHelper client(to, 9);
      client.SetAttribute("MaxPackets", UintegerValue(1000000000));
      client.SetAttribute("Interval", TimeValue(MicroSeconds(500)));
      client.SetAttribute("PacketSize", UintegerValue(1400));
      client.Install(server.Get(0));
    }
  }
  static void put(Ptr<Node> node, std::pair<double, double> place) {
    node->GetObject<MobilityModel>()->SetPosition(Vector(place.first, place.second, 0));
  }
  static void report(Cells* all, uint32_t phone, uint16_t cell, uint16_t, double, double sinr, uint8_t) {
    all->sinr_[(cell - 1) * all->places_.size() + phone] = 10 * std::log10(sinr);
  }

  std::string experiment_;
  int num_cells_ = 1;
  std::vector<std::pair<double, double>> places_;
  std::vector<int> cell_of_;
  std::vector<double> sinr_;
  Ptr<LteHelper> lte_;
  Ptr<PointToPointEpcHelper> core_;
  Ptr<ConstantVelocityMobilityModel> first_;
  std::vector<Ptr<LteEnbPhy>> stations_;
};

SEBULBA_SCENARIO(Cells);
