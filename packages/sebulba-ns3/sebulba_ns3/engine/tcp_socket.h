// SPDX-License-Identifier: GPL-2.0-or-later
// The sending end of a flow that ns-3's own TCP carries.
#pragma once

#include <algorithm>
#include <functional>
#include <utility>

#include "transport.h"

#include "ns3/core-module.h"
#include "ns3/internet-module.h"
#include "ns3/network-module.h"

namespace networks {

constexpr uint32_t TCP_BUFFER_BYTES = 4 << 20;  // of the sender and of the receiver
constexpr double MOST_TCP_WINDOW = TCP_BUFFER_BYTES / PAYLOAD_BYTES - 64;
constexpr int64_t RESERVE = 64;  // packets that wait in the sender's buffer beyond the window
// Work of a step at which it is cut short. ns-3 compares the list of the segments that are on their
// way with itself at every segment that it sends again, so the work is the sum of the squares of the
// list's lengths. 2e8 take half a second. ns-3's own controls are not there to be explored with, and
// may take longer.
constexpr double MOST_WORK = 2e8, MOST_WORK_OF_CONTROLS = 4e9;

// A window that somebody else moves.
class GivenWindow : public ns3::TcpCongestionOps {
 public:
  std::string GetName() const override { return "GivenWindow"; }
  bool HasCongControl() const override { return true; }
  void CongControl(ns3::Ptr<ns3::TcpSocketState> state, const ns3::TcpRateOps::TcpRateConnection&,
                   const ns3::TcpRateOps::TcpRateSample&) override {
    state->m_cWnd = bytes;
  }
  uint32_t GetSsThresh(ns3::Ptr<const ns3::TcpSocketState>, uint32_t) override { return bytes; }
  ns3::Ptr<ns3::TcpCongestionOps> Fork() override { return ns3::CopyObject(ns3::Ptr(this)); }

  uint32_t bytes = 0;
};

inline ns3::Ptr<ns3::TcpCongestionOps> congestion_ops(Control control) {
  switch (control) {
    case Control::aimd:
      return ns3::CreateObject<ns3::TcpNewReno>();
    case Control::cubic:
      return ns3::CreateObject<ns3::TcpCubic>();
    case Control::bbr:
      return ns3::CreateObject<ns3::TcpBbr>();
    default:
      return ns3::CreateObject<GivenWindow>();
  }
}

// Buffers, segments, timeouts and acknowledgements as those of our transport are.
inline void set_attributes(const ns3::Ptr<ns3::Socket>& socket) {
  socket->SetAttribute("SegmentSize", ns3::UintegerValue(PAYLOAD_BYTES));
  socket->SetAttribute("SndBufSize", ns3::UintegerValue(TCP_BUFFER_BYTES));
  socket->SetAttribute("RcvBufSize", ns3::UintegerValue(TCP_BUFFER_BYTES));
  socket->SetAttribute("InitialCwnd", ns3::UintegerValue(static_cast<uint32_t>(FIRST_WINDOW)));
  socket->SetAttribute("DelAckCount", ns3::UintegerValue(1));
  socket->SetAttribute("MinRto", ns3::TimeValue(ns3::NanoSeconds(LEAST_TIMEOUT)));
  socket->SetAttribute("Timestamp", ns3::BooleanValue(false));
}

// Counts what happens, and keeps the sender's buffer filled.
class TcpSender : public ns3::TcpSocketBase {
 public:
  // Segments were sent; how many of them again.
  std::function<void(bool is_again)> on_sent;
  // So many packets arrived; the RTT of one of them, or 0.
  std::function<void(int64_t num_packets, Time rtt)> on_delivered;
  std::function<void()> on_timeout;
  double work = 0;  // since somebody made it 0

  // Makes one on a node.
  static ns3::Ptr<TcpSender> make(const ns3::Ptr<ns3::Node>& node, Control control,
                                  double threshold) {
    const auto tcp = node->GetObject<ns3::TcpL4Protocol>();
    const auto socket = ns3::CreateObject<TcpSender>();
    socket->SetNode(node), socket->SetTcp(tcp);
    socket->SetRtt(ns3::CreateObject<ns3::RttMeanDeviation>());
    socket->SetCongestionControlAlgorithm(congestion_ops(control));
    socket->SetRecoveryAlgorithm(ns3::CreateObject<ns3::TcpPrrRecovery>());
    tcp->AddSocket(socket);
    if (control != Control::agent) socket->most_work_ = MOST_WORK_OF_CONTROLS;
    set_attributes(socket);
    const auto bytes = static_cast<uint32_t>(threshold) * static_cast<uint32_t>(PAYLOAD_BYTES);
    socket->SetAttribute("InitialSlowStartThreshold", ns3::UintegerValue(bytes));
    return socket;
  }

  // Sends what the window lets out of `unsent` packets, which are taken from it; returns how many
  // packets the window now has. A given window counts at once; the others move theirs alone.
  double send_allowed(double window, int64_t& unsent) {
    if (is_too_much_work()) return window;
    if (const auto given = ns3::DynamicCast<GivenWindow>(m_congestionControl)) {
      given->bytes = static_cast<uint32_t>(window) * static_cast<uint32_t>(PAYLOAD_BYTES);
      m_tcb->m_cWnd = given->bytes;
    } else {
      window = static_cast<double>(m_tcb->m_cWnd.Get()) / PAYLOAD_BYTES;
    }
    if (m_state != ESTABLISHED) return window;
    const int64_t wanted = static_cast<int64_t>(window) + RESERVE;
    for (; unsent > 0 && num_buffered() < wanted && GetTxAvailable() >= PAYLOAD_BYTES; --unsent)
      Send(ns3::Create<ns3::Packet>(static_cast<uint32_t>(PAYLOAD_BYTES)), 0);
    SendPendingData(true);
    return window;
  }
  bool is_open() const { return m_state != CLOSED; }
  bool is_too_much_work() const { return work > most_work_; }
  int64_t num_buffered() const {
    return (TCP_BUFFER_BYTES - GetTxAvailable() + PAYLOAD_BYTES - 1) / PAYLOAD_BYTES;
  }
  int64_t num_inflight() const { return m_tcb->m_bytesInFlight.Get() / PAYLOAD_BYTES; }

 private:
  ns3::Time CalculateRttSample(const ns3::TcpHeader& header,
                               const ns3::RttHistory& history) override {
    const auto sample = TcpSocketBase::CalculateRttSample(header, history);
    if (sample.IsStrictlyPositive()) rtt_ = sample.GetNanoSeconds();
    return sample;
  }
  void ProcessAck(const ns3::SequenceNumber32& number, bool is_news, uint32_t delivered,
                  const ns3::SequenceNumber32& before, bool has_data) override {
    TcpSocketBase::ProcessAck(number, is_news, delivered, before, has_data);
    delivered_ += delivered;
    const int64_t num_packets = delivered_ / PAYLOAD_BYTES;
    delivered_ -= num_packets * PAYLOAD_BYTES;
    on_delivered(num_packets, std::exchange(rtt_, 0));
  }
  void UpdateRttHistory(const ns3::SequenceNumber32& number, uint32_t size, bool is_again) override {
    TcpSocketBase::UpdateRttHistory(number, size, is_again);
    on_sent(is_again);
    if (!is_again) return;
    const double length =
        (m_tcb->m_highTxMark.Get() - m_txBuffer->HeadSequence()) / static_cast<double>(PAYLOAD_BYTES);
    work += length * length;
    if (is_too_much_work()) close_window();  // what is being sent at this moment goes on otherwise
  }
  void ReTxTimeout() override {
    TcpSocketBase::ReTxTimeout();
    on_timeout();
  }

  void close_window() {
    m_tcb->m_cWnd = 0;
    if (const auto given = ns3::DynamicCast<GivenWindow>(m_congestionControl)) given->bytes = 0;
  }

  double most_work_ = MOST_WORK;
  Time rtt_ = 0;
  int64_t delivered_ = 0;  // bytes that are no whole packet yet
};

}  // namespace networks
