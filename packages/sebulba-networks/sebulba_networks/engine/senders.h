// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-or-later
// What the senders of flows do, whatever carries their packets.
#pragma once

#include "transport.h"

namespace networks {

enum class Happening : int64_t { sent, dropped, acknowledged, lost, timeout };

struct Trace {
  Time time;
  int64_t happening, flow, number;
};

// A base of `Network`, which has the time and moves packets:
//   now()                         the time
//   transmit(flow, number)        brings a packet onto the first link of its path
//   schedule_step(flow, time)     has an agent's step end
//   timer(flow), set_timer(flow, time)   when to call `expire`; NEVER where it is not set
// It calls `act` when a flow begins and then at the times that this returns, and `acknowledge`.
template <class Network>
class Senders {
 public:
  std::vector<Flow> flows;
  bool is_traced = false;
  std::vector<Trace> trace;

  // Sends as much as the window lets out.
  void send_allowed(size_t flow) {
    Flow& sender = flows[flow];
    while (sender.may_send()) send(flow);
    move_timer(flow);
  }

 protected:
  void note(Happening happening, size_t flow, int64_t number) {
    if (is_traced)
      trace.push_back({now(), static_cast<int64_t>(happening), static_cast<int64_t>(flow), number});
  }

  // A flow begins, an agent's slow start has lasted too long, or a source without a window sends;
  // returns when the next of these happens.
  Time act(size_t flow) {
    Flow& sender = flows[flow];
    if (sender.has_window()) {
      Time next = NEVER;
      if (sender.next_number == 0) {
        if (sender.is_observed) next = now() + LONGEST_SLOW_START;
      } else if (sender.is_slow_start && !sender.is_done) {
        sender.is_slow_start = false;
        begin_first_step(flow);
      }
      network().send_allowed(flow);
      return next;
    }
    if (sender.control == Control::on_off && now() >= sender.on_until) toggle(sender);
    if (sender.control == Control::on_off && !sender.is_on) return sender.on_until;
    const int64_t number = sender.next_number++;
    note(Happening::sent, flow, number);
    network().transmit(flow, number);
    return now() + sender.interval_between;
  }

  void acknowledge(size_t flow, int64_t number) {
    Flow& sender = flows[flow];
    if (sender.is_done) return;
    const bool was_slow_start = sender.is_slow_start;
    const int64_t lost = sender.acknowledge(now(), number);
    note(Happening::acknowledged, flow, number);
    if (lost < 0) return;
    if (lost > 0) note(Happening::lost, flow, lost);
    sender.adapt(now(), number, lost);
    after_change(flow, was_slow_start);
  }

  // The timer of a flow, which is not set any more, is up.
  void expire(size_t flow) {
    Flow& sender = flows[flow];
    if (sender.inflight == 0 || sender.is_done) return;
    if (sender.deadline() > now()) return move_timer(flow);
    const bool was_slow_start = sender.is_slow_start;
    sender.give_up_oldest();
    note(Happening::timeout, flow, sender.last_lost);
    sender.adapt(now(), -1, 1);
    if (sender.unsent > 0) send(flow);  // whatever the window says
    after_change(flow, was_slow_start);
  }

  // Sends, and has an agent's first step end when that is due.
  void after_change(size_t flow, bool was_slow_start) {
    Flow& sender = flows[flow];
    if (sender.is_done) {
      if (sender.is_observed) network().schedule_step(flow, now());
      return;
    }
    if (was_slow_start && !sender.is_slow_start && sender.is_observed) begin_first_step(flow);
    network().send_allowed(flow);
  }

 private:
  Network& network() { return static_cast<Network&>(*this); }
  Time now() const { return static_cast<const Network&>(*this).now(); }

  void send(size_t flow) {
    const int64_t number = flows[flow].send(now());
    note(Happening::sent, flow, number);
    network().transmit(flow, number);
  }

  void begin_first_step(size_t flow) {
    Flow& sender = flows[flow];
    sender.interval = {now(), 0, 0, 0, 0};
    network().schedule_step(flow, now() + (sender.srtt > 0 ? sender.srtt : LEAST_TIMEOUT));
  }

  // Timers are not moved with every packet: one that is early looks again (`expire`).
  void move_timer(size_t flow) {
    const Flow& sender = flows[flow];
    if (sender.inflight > 0 && sender.deadline() < network().timer(flow))
      network().set_timer(flow, sender.deadline());
  }

  void toggle(Flow& sender) {
    sender.is_on = !sender.is_on;
    const double mean = static_cast<double>(sender.is_on ? sender.mean_on : sender.mean_off);
    const double length = -mean * std::log1p(-sender.random.uniform());
    sender.on_until = now() + 1 + static_cast<Time>(length);
  }
};

}  // namespace networks
