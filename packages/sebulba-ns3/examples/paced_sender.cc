// SPDX-License-Identifier: GPL-2.0-or-later
// An agent sets the sending rate of a UDP source, which shares a link with on/off traffic.
//
//   sebulba train neutral-ppo --env.id sebulba_ns3:Ns3Scenario \
//     --env.options.source packages/sebulba-ns3/examples/paced_sender.cc

#include "sebulba_scenario.h"

#include "ns3/applications-module.h"
#include "ns3/internet-module.h"
#include "ns3/network-module.h"
#include "ns3/point-to-point-module.h"
#include "ns3/traffic-control-module.h"

using namespace ns3;

class PacedSender : public sebulba::Scenario {
 public:
  sebulba::Spaces spaces() override {
    // Share of the link that arrived, packets that wait, share of the link that was asked for.
    return {.observation = {{0, 2}, {0, QUEUE_PACKETS}, {0, 1}}, .action = {{0, 1}}};
  }

  void begin() override {
    link_rate_ = 1e6 * parameter("link_mbps", 10, 0.1);
    const double others = 1e6 * parameter("others_mbps", 5, 0);
    nodes_.Create(2);
    PointToPointHelper link;
    link.SetDeviceAttribute("DataRate", DataRateValue(static_cast<uint64_t>(link_rate_)));
    link.SetChannelAttribute("Delay", TimeValue(MilliSeconds(5)));
    link.SetQueue("ns3::DropTailQueue<Packet>", "MaxSize", StringValue("100p"));
    const auto devices = link.Install(nodes_);
    InternetStackHelper().Install(nodes_);
    const auto addresses = Ipv4AddressHelper("10.0.0.0", "255.255.255.0").Assign(devices);
    TrafficControlHelper().Uninstall(devices);
    queue_ = DynamicCast<PointToPointNetDevice>(devices.Get(0))->GetQueue();

    const InetSocketAddress to(addresses.GetAddress(1), PORT);
    receiver_ = Socket::CreateSocket(nodes_.Get(1), UdpSocketFactory::GetTypeId());
    receiver_->Bind(InetSocketAddress(Ipv4Address::GetAny(), PORT));
    receiver_->SetRecvCallback(MakeCallback(&PacedSender::receive, this));
    sender_ = Socket::CreateSocket(nodes_.Get(0), UdpSocketFactory::GetTypeId());
    sender_->Connect(to);

    OnOffHelper other("ns3::UdpSocketFactory", InetSocketAddress(to.GetIpv4(), PORT + 1));
    other.SetConstantRate(DataRate(static_cast<uint64_t>(others)), PACKET_BYTES);
    other.SetAttribute("OnTime", StringValue("ns3::ExponentialRandomVariable[Mean=0.5]"));
    other.SetAttribute("OffTime", StringValue("ns3::ExponentialRandomVariable[Mean=0.5]"));
    other.Install(nodes_.Get(0)).Start(Seconds(0));

    send();
    decide_in(STEP);
  }

  void act(const std::vector<double>& action) override {
    share_ = action[0], num_received_ = 0;
    decide_in(STEP);
  }

  std::vector<double> observe() override { return {arrived(), waiting(), share_}; }

  double reward() override { return arrived() - waiting() / QUEUE_PACKETS; }

  std::map<std::string, double> info() override {
    return {{"goodput_mbps", arrived() * link_rate_ / 1e6}};
  }

 private:
  static constexpr uint16_t PORT = 9;
  static constexpr uint32_t PACKET_BYTES = 1000, QUEUE_PACKETS = 100;
  const Time STEP = MilliSeconds(50);

  double arrived() const { return num_received_ * PACKET_BYTES * 8 / STEP.GetSeconds() / link_rate_; }
  double waiting() const { return queue_ == nullptr ? 0 : queue_->GetNPackets(); }

  void send() {
    sender_->Send(Create<Packet>(PACKET_BYTES));
    const double rate = std::max(share_, 0.01) * link_rate_;
    Simulator::Schedule(Seconds(PACKET_BYTES * 8 / rate), &PacedSender::send, this);
  }
  void receive(Ptr<Socket> socket) {
    while (socket->Recv() != nullptr) ++num_received_;
  }

  NodeContainer nodes_;
  Ptr<Queue<Packet>> queue_;
  Ptr<Socket> sender_, receiver_;
  double link_rate_ = 1, share_ = 0.1;
  int num_received_ = 0;
};

SEBULBA_SCENARIO(PacedSender);
