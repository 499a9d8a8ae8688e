// Flows over links, event by event.
#pragma once

#include "links.h"
#include "transport.h"

namespace networks {

enum class Happening : int64_t { sent, dropped, acknowledged, lost, timeout };

struct Trace {
  Time time;
  int64_t happening, flow, number;
};

// Sources of events, by the order in which events at one time happen: the step of an agent, the
// begin of a flow or what a source without a window does, arrivals at links, acknowledgements,
// timers. What arrives at a link comes before a departure at the same time.
class Simulation {
 public:
  std::vector<Link> links;
  std::vector<Flow> flows;
  bool is_traced = false;
  std::vector<Trace> trace;

  Time now() const { return now_; }

  // Begins at time 0, with links and flows as they were added.
  void begin() {
    now_ = 0;
    pipes_.assign(links.size(), {});
    acks_.assign(flows.size(), {});
    queue_.resize(static_cast<int>(4 * flows.size() + links.size()));
    for (size_t f = 0; f < flows.size(); ++f) {
      flows[f].begin();
      queue_.set(action_source(f), flows[f].start);
    }
  }

  // Ends an agent's step at `time`.
  void schedule_step(size_t flow, Time time) { queue_.set(step_source(flow), time); }

  // Runs until a step ends; returns whose.
  size_t run() {
    const int num_flows = static_cast<int>(flows.size());
    const int pipes = 2 * num_flows, acks = pipes + static_cast<int>(links.size());
    for (;;) {
      const int source = queue_.first();
      now_ = queue_.time();
      if (source >= acks + num_flows) {
        expire(source - acks - num_flows);
      } else if (source >= acks) {
        take_acknowledgement(source - acks);
      } else if (source >= pipes) {
        arrive(source - pipes);
      } else if (source >= num_flows) {
        act(source - num_flows);
      } else {
        queue_.set(source, NEVER);
        return source;
      }
    }
  }

  // Tells whether another step ends now.
  bool is_step_due() const {
    return queue_.first() < static_cast<int>(flows.size()) && queue_.time() == now_;
  }

  // Sends as much as the window lets out.
  void send_allowed(size_t flow) {
    Flow& sender = flows[flow];
    while (sender.may_send()) send(flow);
    set_timer(flow);
  }

  template <class Archive>
  void exchange(Archive& archive) {
    archive(now_);
    for (Link& link : links) link.exchange(archive);
    for (Flow& flow : flows) flow.exchange(archive);
    for (auto& pipe : pipes_) archive(pipe);
    for (auto& acks : acks_) archive(acks);
    queue_.exchange(archive);
  }

 private:
  struct Ack {
    Time time;
    int64_t number;
  };
  struct Packet {
    Time time;
    int64_t number;
    int32_t flow, hop;
  };

  int step_source(size_t flow) const { return static_cast<int>(flow); }
  int action_source(size_t flow) const { return static_cast<int>(flows.size() + flow); }
  int pipe_source(size_t link) const { return static_cast<int>(2 * flows.size() + link); }
  int ack_source(size_t flow) const { return pipe_source(links.size()) + static_cast<int>(flow); }
  int timer_source(size_t flow) const { return ack_source(flows.size()) + static_cast<int>(flow); }

  void note(Happening happening, size_t flow, int64_t number) {
    if (is_traced)
      trace.push_back({now_, static_cast<int64_t>(happening), static_cast<int64_t>(flow), number});
  }

  void send(size_t flow) {
    const int64_t number = flows[flow].send(now_);
    note(Happening::sent, flow, number);
    forward({now_, number, static_cast<int32_t>(flow), 0});
  }

  // Brings a packet onto a link of its path.
  void forward(Packet packet) {
    Flow& flow = flows[packet.flow];
    const size_t at = flow.path[packet.hop];
    Link& link = links[at];
    const Time end = link.transmit(now_, flow.transmission[packet.hop]);
    if (end == NEVER || link.is_lost()) {
      note(Happening::dropped, packet.flow, packet.number);
      return;
    }
    packet.time = end + link.delay;
    if (++packet.hop < static_cast<int>(flow.path.size())) {
      if (pipes_[at].empty()) queue_.set(pipe_source(at), packet.time);
      pipes_[at].push_back(packet);
    } else if (flow.has_window()) {
      auto& acks = acks_[packet.flow];
      const Time time = packet.time + flow.return_delay;
      if (acks.empty()) queue_.set(ack_source(packet.flow), time);
      acks.push_back({time, packet.number});
    }
  }

  // A packet arrives at the end of a link and goes on over the next.
  void arrive(size_t link) {
    auto& pipe = pipes_[link];
    const Packet packet = pipe.front();
    pipe.pop_front();
    queue_.set(pipe_source(link), pipe.empty() ? NEVER : pipe.front().time);
    forward(packet);
  }

  void take_acknowledgement(size_t flow) {
    auto& acks = acks_[flow];
    const int64_t number = acks.front().number;
    acks.pop_front();
    if (!flows[flow].is_done) acknowledge(flow, number);
    // Last, because sending may have filled the pipe again.
    queue_.set(ack_source(flow), acks.empty() ? NEVER : acks.front().time);
  }

  void acknowledge(size_t flow, int64_t number) {
    Flow& sender = flows[flow];
    const bool was_slow_start = sender.is_slow_start;
    const int64_t lost = sender.acknowledge(now_, number);
    note(Happening::acknowledged, flow, number);
    if (lost < 0) return;
    if (lost > 0) note(Happening::lost, flow, lost);
    sender.adapt(now_, number, lost);
    after_change(flow, was_slow_start);
  }

  void expire(size_t flow) {
    Flow& sender = flows[flow];
    queue_.set(timer_source(flow), NEVER);
    if (sender.inflight == 0 || sender.is_done) return;
    if (sender.deadline() > now_) return set_timer(flow);
    const bool was_slow_start = sender.is_slow_start;
    sender.give_up_oldest();
    note(Happening::timeout, flow, sender.last_lost);
    sender.adapt(now_, -1, 1);
    if (sender.unsent > 0) send(flow);  // whatever the window says
    after_change(flow, was_slow_start);
  }

  // Sends, and has an agent's first step end when that is due.
  void after_change(size_t flow, bool was_slow_start) {
    Flow& sender = flows[flow];
    if (sender.is_done) {
      if (sender.is_observed) schedule_step(flow, now_);
      return;
    }
    if (was_slow_start && !sender.is_slow_start && sender.is_observed)
      begin_first_step(flow);
    send_allowed(flow);
  }

  void begin_first_step(size_t flow) {
    Flow& sender = flows[flow];
    sender.interval = {now_, 0, 0, 0, 0};
    schedule_step(flow, now_ + (sender.srtt > 0 ? sender.srtt : LEAST_TIMEOUT));
  }

  // Timers are not moved with every packet: one that is early looks again (`expire`).
  void set_timer(size_t flow) {
    const Flow& sender = flows[flow];
    if (sender.inflight > 0 && sender.deadline() < queue_.time_of(timer_source(flow)))
      queue_.set(timer_source(flow), sender.deadline());
  }

  // A flow begins, an agent's slow start has lasted too long, or a source without a window sends.
  void act(size_t flow) {
    Flow& sender = flows[flow];
    Time next = NEVER;
    if (sender.has_window()) {
      if (sender.next_number == 0) {
        if (sender.is_observed) next = now_ + LONGEST_SLOW_START;
      } else if (sender.is_slow_start && !sender.is_done) {
        sender.is_slow_start = false;
        begin_first_step(flow);
      }
      send_allowed(flow);
    } else {
      if (sender.control == Control::on_off && now_ >= sender.on_until) toggle(sender);
      if (sender.control == Control::constant_rate || sender.is_on) {
        const int64_t number = sender.next_number++;
        note(Happening::sent, flow, number);
        forward({now_, number, static_cast<int32_t>(flow), 0});
        next = now_ + sender.interval_between;
      } else {
        next = sender.on_until;
      }
    }
    queue_.set(action_source(flow), next);
  }

  void toggle(Flow& sender) {
    sender.is_on = !sender.is_on;
    const double mean = static_cast<double>(sender.is_on ? sender.mean_on : sender.mean_off);
    const double length = -mean * std::log1p(-sender.random.uniform());
    sender.on_until = now_ + 1 + static_cast<Time>(length);
  }

  Time now_ = 0;
  EventQueue queue_;
  std::vector<Ring<Packet>> pipes_;  // of each link: what goes on to another link
  std::vector<Ring<Ack>> acks_;      // of each flow: on their way back
};

}  // namespace networks
