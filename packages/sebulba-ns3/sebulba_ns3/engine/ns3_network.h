// SPDX-License-Identifier: GPL-2.0-or-later
// Flows over links of ns-3: our transport over UDP, or ns-3's own TCP, over IP over point-to-point
// devices.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <utility>

#include "links.h"
#include "ordered_events.h"
#include "senders.h"
#include "tcp_socket.h"

#include "ns3/core-module.h"
#include "ns3/internet-module.h"
#include "ns3/network-module.h"
#include "ns3/point-to-point-module.h"
#include "ns3/traffic-control-module.h"

namespace networks {

// What our transport writes before the payload: the number of the packet that it is, or
// acknowledges.
constexpr uint32_t HEADER_BYTES = 17;
constexpr uint32_t UDP_HEADER_BYTES = 8, IP_HEADER_BYTES = 20, PPP_HEADER_BYTES = 2;
constexpr uint16_t FIRST_PORT = 1000;

// Loses what `Link` says that a link loses.
class LossyLink : public ns3::ErrorModel {
 public:
  LossyLink(Link& link, std::function<void(ns3::Ptr<ns3::Packet>)> on_loss)
      : link_(&link), on_loss_(std::move(on_loss)) {}

 private:
  bool DoCorrupt(ns3::Ptr<ns3::Packet> packet) override {
    const bool is_lost = link_->is_lost();
    if (is_lost) on_loss_(packet);
    return is_lost;
  }
  void DoReset() override {}

  Link* link_;
  std::function<void(ns3::Ptr<ns3::Packet>)> on_loss_;
};

// Routers in a row, link after link, with the ends of flows on them. ns-3 has one simulator a
// process, which lives as long as this.
class Routers {
 public:
  explicit Routers(std::vector<Link>& links) {
    OrderedEvents::install();
    ns3::RngSeedManager::ResetNextStreamIndex();
    nodes_.Create(static_cast<uint32_t>(links.size()) + 1);
    ns3::InternetStackHelper stack;
    stack.SetIpv6StackInstall(false);
    stack.Install(nodes_);
    for (size_t i = 0; i < links.size(); ++i) add_link(links[i], i);
    add_routes();
  }
  ~Routers() { ns3::Simulator::Destroy(); }
  Routers(const Routers&) = delete;
  Routers& operator=(const Routers&) = delete;

  ns3::Ptr<ns3::Node> node(size_t number) const {
    return nodes_.Get(static_cast<uint32_t>(number));
  }
  // The address of a node at the end of a link.
  ns3::Ipv4Address end_of(size_t link) const { return addresses_[link].GetAddress(1); }
  ns3::Ptr<ns3::PointToPointNetDevice> device(size_t link) const {
    return ns3::DynamicCast<ns3::PointToPointNetDevice>(devices_[link].Get(0));
  }
  ns3::Ptr<ns3::PointToPointNetDevice> far_device(size_t link) const {
    return ns3::DynamicCast<ns3::PointToPointNetDevice>(devices_[link].Get(1));
  }

 private:
  void add_link(const Link& link, size_t number) {
    ns3::PointToPointHelper helper;
    helper.SetDeviceAttribute("DataRate", ns3::DataRateValue(static_cast<uint64_t>(link.rate)));
    helper.SetChannelAttribute("Delay", ns3::TimeValue(ns3::NanoSeconds(link.delay)));
    helper.SetQueue("ns3::DropTailQueue<Packet>", "MaxSize",
                    ns3::StringValue(std::to_string(link.buffer) + "p"));
    devices_.push_back(helper.Install(node(number), node(number + 1)));
    // Acknowledgements, which come back over the same link, have another buffer.
    far_device(number)->GetQueue()->SetAttribute("MaxSize", ns3::StringValue("1000000p"));
    ns3::Ipv4AddressHelper addresses(network_of(number).c_str(), MASK);
    addresses_.push_back(addresses.Assign(devices_.back()));
    ns3::TrafficControlHelper().Uninstall(devices_.back());  // no queue before that of the device
  }
  static std::string network_of(size_t number) { return "10.0." + std::to_string(number) + ".0"; }
  void add_routes() {
    for (size_t at = 0; at < nodes_.GetN(); ++at) {
      const auto ipv4 = node(at)->GetObject<ns3::Ipv4>();
      const auto routes = ns3::Ipv4StaticRoutingHelper().GetStaticRouting(ipv4);
      for (size_t link = 0; link < devices_.size(); ++link) {
        if (link == at || link + 1 == at) continue;  // its own
        const size_t over = link > at ? at : at - 1;
        const auto next = addresses_[over].GetAddress(link > at ? 1 : 0);
        const auto device = devices_[over].Get(link > at ? 0 : 1);
        routes->AddNetworkRouteTo(network_of(link).c_str(), MASK, next,
                                  ipv4->GetInterfaceForDevice(device));
      }
    }
  }

  static constexpr const char* MASK = "255.255.255.0";

  ns3::NodeContainer nodes_;
  std::vector<ns3::NetDeviceContainer> devices_;
  std::vector<ns3::Ipv4InterfaceContainer> addresses_;
};

// The network of an environment. Senders are those of the native engine; all between them and the
// acknowledgements that come back is ns-3's.
class Ns3Network : public Senders<Ns3Network> {
 public:
  std::vector<Link> links;

  Time now() const { return ns3::Simulator::Now().GetNanoSeconds(); }

  void begin() {
    routers_ = std::make_unique<Routers>(links);
    num_drops_.assign(links.size(), 0);
    steps_.assign(flows.size(), NEVER);
    timers_.assign(flows.size(), NEVER);
    sockets_.assign(flows.size(), {});
    streams_.assign(flows.size(), {});
    for (size_t i = 0; i < links.size(); ++i) watch(i);
    for (size_t i = 0; i < flows.size(); ++i) {
      open(i);
      flows[i].begin();
      schedule_action(i, flows[i].start);
    }
  }

  // Ends an agent's step at `time`. An event that was for another time does nothing.
  void schedule_step(size_t flow, Time time) {
    steps_[flow] = time;
    if (time == now()) return ns3::Simulator::Stop();
    schedule(Order::step, flow, time, [this, flow] {
      if (steps_[flow] == now()) ns3::Simulator::Stop();
    });
  }

  Time timer(size_t flow) const { return timers_[flow]; }
  void set_timer(size_t flow, Time time) {
    timers_[flow] = time;
    schedule(Order::timer, flow, time, [this, flow] {
      if (timers_[flow] != now()) return;
      timers_[flow] = NEVER;
      expire(flow);
    });
  }

  // Sends as much as the window lets out.
  void send_allowed(size_t flow) {
    if (!flows[flow].is_tcp) return Senders::send_allowed(flow);
    Flow& sender = flows[flow];
    const auto& socket = streams_[flow].socket;
    if (!socket->is_open()) socket->Connect(streams_[flow].to);
    Time& begin = streams_[flow].step_begin;
    if (std::exchange(begin, sender.interval.begin) != sender.interval.begin) socket->work = 0;
    sender.window = socket->send_allowed(sender.window, sender.unsent);
    sender.inflight = socket->num_inflight();
  }

  void transmit(size_t flow, int64_t number) {
    auto packet = packet_of(number);
    packet->AddAtEnd(ns3::Create<ns3::Packet>(PAYLOAD_BYTES));
    sockets_[flow].first->Send(packet);
  }

  // Runs until a step ends; returns whose.
  size_t run() {
    if (!is_step_due()) ns3::Simulator::Run();
    if (!is_step_due()) throw std::runtime_error("nothing happens any more");
    const auto first = std::find(steps_.begin(), steps_.end(), now());
    *first = NEVER;
    return static_cast<size_t>(first - steps_.begin());
  }

  bool is_step_due() const {
    return std::find(steps_.begin(), steps_.end(), now()) != steps_.end();
  }

  int64_t queue_length(size_t link) const { return routers_->device(link)->GetQueue()->GetNPackets(); }
  int64_t num_drops(size_t link) const { return num_drops_[link]; }

  template <class Archive>
  void exchange(Archive&) {
    throw std::runtime_error("ns-3 has no state that could be kept");
  }

 private:
  using Socket = ns3::Ptr<ns3::Socket>;

  // The sending end of a flow that TCP carries.
  struct Stream {
    ns3::Ptr<TcpSender> socket;
    ns3::Address to;
    int64_t num_again = 0;  // segments sent again since an acknowledgement
    Time step_begin = NEVER;
  };

  template <class Body>
  void schedule(Order order, size_t flow, Time time, Body body) {
    ns3::Simulator::Schedule(
        ns3::NanoSeconds(time - now()),
        ns3::Ptr<ns3::EventImpl>(new SenderEvent<Body>(order, flow, std::move(body)), false));
  }
  void schedule_action(size_t flow, Time time) {
    schedule(Order::action, flow, time, [this, flow] {
      const Time next = act(flow);
      if (next != NEVER) schedule_action(flow, next);
    });
  }

  static ns3::Ptr<ns3::Packet> packet_of(int64_t number) {
    std::array<uint8_t, HEADER_BYTES> header{};
    std::memcpy(header.data(), &number, sizeof number);
    return ns3::Create<ns3::Packet>(header.data(), HEADER_BYTES);
  }
  static int64_t number_of(const ns3::Packet& packet, uint32_t before = 0) {
    std::array<uint8_t, 64> bytes{};
    packet.CopyData(bytes.data(), before + HEADER_BYTES);
    int64_t number;
    std::memcpy(&number, bytes.data() + before, sizeof number);
    return number;
  }
  // Takes note of a lost packet, whose IP header begins after `before` bytes.
  void note_drop(const ns3::Packet& packet, uint32_t before) {
    if (!is_traced) return;
    const uint32_t udp = before + IP_HEADER_BYTES;
    std::array<uint8_t, 64> bytes{};
    packet.CopyData(bytes.data(), udp + UDP_HEADER_BYTES);
    const auto port = static_cast<size_t>(bytes[udp + 2] << 8 | bytes[udp + 3]);
    note(Happening::dropped, port - FIRST_PORT, number_of(packet, udp + UDP_HEADER_BYTES));
  }

  // Counts what a full buffer drops, and loses packets at random. What arrives while a full buffer
  // has stopped the layer before it is dropped there, and else by the buffer.
  void watch(size_t link) {
    routers_->node(link)->GetObject<ns3::TrafficControlLayer>()->TraceConnectWithoutContext(
        "TcDrop", ns3::MakeCallback(&Ns3Network::drop<0>, this, link));
    routers_->device(link)->GetQueue()->TraceConnectWithoutContext(
        "DropBeforeEnqueue", ns3::MakeCallback(&Ns3Network::drop<PPP_HEADER_BYTES>, this, link));
    if (links[link].loss > 0)
      routers_->far_device(link)->SetReceiveErrorModel(ns3::Create<LossyLink>(
          links[link],
          [this](ns3::Ptr<ns3::Packet> packet) { note_drop(*packet, PPP_HEADER_BYTES); }));
  }
  template <uint32_t HEADER_BYTES_BEFORE>
  void drop(size_t link, ns3::Ptr<const ns3::Packet> packet) {
    ++num_drops_[link];
    note_drop(*packet, HEADER_BYTES_BEFORE);
  }

  // Puts the two ends of a flow onto routers.
  void open(size_t flow) {
    if (flows[flow].is_tcp) return open_tcp(flow);
    const auto type = ns3::UdpSocketFactory::GetTypeId();
    const size_t first = flows[flow].path.front(), last = flows[flow].path.back();
    const auto sender = ns3::Socket::CreateSocket(routers_->node(first), type);
    const auto receiver = ns3::Socket::CreateSocket(routers_->node(last + 1), type);
    const auto port = static_cast<uint16_t>(FIRST_PORT + flow);
    receiver->Bind(ns3::InetSocketAddress(ns3::Ipv4Address::GetAny(), port));
    sender->Bind();
    sender->Connect(ns3::InetSocketAddress(routers_->end_of(last), port));
    if (flows[flow].has_window()) {
      receiver->SetRecvCallback(ns3::MakeCallback(&Ns3Network::answer, this));
      sender->SetRecvCallback(ns3::MakeCallback(&Ns3Network::take_acknowledgements, this, flow));
    }
    sockets_[flow] = {sender, receiver};
  }
  void open_tcp(size_t flow) {
    Flow& sender = flows[flow];
    sender.most_window = std::min(sender.most_window, MOST_TCP_WINDOW);
    const size_t last = sender.path.back();
    const auto receiver = ns3::Socket::CreateSocket(routers_->node(last + 1),
                                                    ns3::TcpSocketFactory::GetTypeId());
    const auto port = static_cast<uint16_t>(FIRST_PORT + flow);
    set_attributes(receiver);
    receiver->Bind(ns3::InetSocketAddress(ns3::Ipv4Address::GetAny(), port));
    receiver->Listen();
    receiver->SetAcceptCallback(ns3::MakeNullCallback<bool, Socket, const ns3::Address&>(),
                                ns3::MakeCallback(&Ns3Network::accept, this));
    const auto socket = TcpSender::make(routers_->node(sender.path.front()), sender.control,
                                        std::min(sender.threshold, MOST_TCP_WINDOW));
    socket->Bind();
    socket->on_sent = [this, flow](bool is_again) { count_sent(flow, is_again); };
    socket->on_delivered = [this, flow](int64_t num, Time rtt) { count_delivered(flow, num, rtt); };
    socket->on_timeout = [this, flow] { count_delivered(flow, 0, 0); };
    socket->SetConnectCallback(ns3::MakeCallback(&Ns3Network::connected, this, flow),
                               ns3::MakeNullCallback<void, Socket>());
    sockets_[flow].second = receiver;
    streams_[flow] = {socket, ns3::InetSocketAddress(routers_->end_of(last), port)};
  }
  void accept(Socket socket, const ns3::Address&) {
    socket->SetRecvCallback(ns3::MakeCallback(&Ns3Network::discard, this));
  }
  void discard(Socket socket) {
    while (socket->Recv() != nullptr) {
    }
  }
  void connected(size_t flow, Socket) { send_allowed(flow); }

  void count_sent(size_t flow, bool is_again) {
    ++flows[flow].next_number, ++flows[flow].interval.sent;
    streams_[flow].num_again += is_again;
  }
  // Packets of a TCP connection arrived, or it had a timeout. What it sends again counts as lost.
  void count_delivered(size_t flow, int64_t num_packets, Time rtt) {
    Flow& sender = flows[flow];
    if (sender.is_done) return;
    const bool was_slow_start = sender.is_slow_start;
    const int64_t lost = count_lost(flow);
    sender.deliver(now(), num_packets, rtt);
    if (sender.control == Control::agent) {
      for (int64_t i = 0; i < num_packets; ++i) sender.adapt(now(), 0, 0);
      if (lost > 0) sender.adapt(now(), -1, lost);
    } else if (lost > 0) {
      sender.is_slow_start = false;
    }
    after_change(flow, was_slow_start);
    guard(flow);
  }
  int64_t count_lost(size_t flow) {
    const int64_t lost = std::exchange(streams_[flow].num_again, 0);
    flows[flow].interval.lost += lost;
    return lost;
  }
  // Ends a step that is too much work.
  void guard(size_t flow) {
    Flow& sender = flows[flow];
    if (!streams_[flow].socket->is_too_much_work() || !sender.is_observed || sender.is_cut) return;
    sender.is_cut = true;
    count_lost(flow);
    schedule_step(flow, now());
  }
  void answer(Socket receiver) {
    ns3::Address from;
    while (const auto packet = receiver->RecvFrom(from))
      receiver->SendTo(packet_of(number_of(*packet)), 0, from);
  }
  void take_acknowledgements(size_t flow, Socket sender) {
    while (const auto packet = sender->Recv()) acknowledge(flow, number_of(*packet));
  }

  std::unique_ptr<Routers> routers_;
  std::vector<std::pair<Socket, Socket>> sockets_;  // of each flow: sender, receiver
  std::vector<Stream> streams_;
  std::vector<int64_t> num_drops_;
  std::vector<Time> steps_, timers_;  // NEVER where they are not set
};

}  // namespace networks
