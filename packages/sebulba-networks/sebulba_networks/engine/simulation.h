// Flows over links, event by event.
#pragma once

#include "links.h"
#include "senders.h"

namespace networks {

// Sources of events, by the order in which events at one time happen: the step of an agent, the
// begin of a flow or what a source without a window does, arrivals at links, acknowledgements,
// timers. What arrives at a link comes before a departure at the same time.
class Simulation : public Senders<Simulation> {
 public:
  std::vector<Link> links;

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

  Time timer(size_t flow) const { return queue_.time_of(timer_source(flow)); }
  void set_timer(size_t flow, Time time) { queue_.set(timer_source(flow), time); }

  // Brings a packet onto the first link of its path.
  void transmit(size_t flow, int64_t number) {
    forward({now_, number, static_cast<int32_t>(flow), 0});
  }

  // Runs until a step ends; returns whose.
  size_t run() {
    const int num_flows = static_cast<int>(flows.size());
    const int pipes = 2 * num_flows, acks = pipes + static_cast<int>(links.size());
    for (;;) {
      const int source = queue_.first();
      now_ = queue_.time();
      if (source >= acks + num_flows) {
        queue_.set(source, NEVER);
        expire(source - acks - num_flows);
      } else if (source >= acks) {
        take_acknowledgement(source - acks);
      } else if (source >= pipes) {
        arrive(source - pipes);
      } else if (source >= num_flows) {
        queue_.set(source, act(source - num_flows));
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

  int64_t queue_length(size_t link) { return links[link].queue_length(now_); }
  int64_t num_drops(size_t link) const { return links[link].num_drops; }

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
    acknowledge(flow, number);
    // Last, because sending may have filled the pipe again.
    queue_.set(ack_source(flow), acks.empty() ? NEVER : acks.front().time);
  }

  Time now_ = 0;
  EventQueue queue_;
  std::vector<Ring<Packet>> pipes_;  // of each link: what goes on to another link
  std::vector<Ring<Ack>> acks_;      // of each flow: on their way back
};

}  // namespace networks
