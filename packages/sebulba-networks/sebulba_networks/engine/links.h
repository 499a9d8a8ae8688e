// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-or-later
// The event queue and the links.
#pragma once

#include "containers.h"

namespace networks {

// The next event of each source, and which source is first: a tournament over the sources.
//
// Whatever happens in a simulation comes from a few sources (the pipe of a link, the
// acknowledgements or the timer of a flow), each of which knows its own next time. Of events at one
// time the source with the lowest number is first.
class EventQueue {
 public:
  void resize(int num_sources) {
    leaves_ = 2;
    while (leaves_ < num_sources) leaves_ *= 2;
    times_.assign(leaves_, NEVER);
    rebuild();
  }
  Time time_of(int source) const { return times_[source]; }
  int first() const { return winner_[1]; }
  Time time() const { return times_[winner_[1]]; }
  void set(int source, Time time) {
    times_[source] = time;
    // The winner so far stays in registers: reading back what was just written would take longest.
    int winner = source;
    for (int node = leaves_ + source; node > 1; node /= 2) {
      const int other = winner_[node ^ 1];
      const Time its = times_[other];
      const bool is_first = its < time || (its == time && other < winner);
      winner = is_first ? other : winner, time = is_first ? its : time;
      winner_[node / 2] = winner;
    }
  }
  template <class Archive>
  void exchange(Archive& archive) {
    for (Time& time : times_) archive(time);
    rebuild();
  }

 private:
  void play(int node) {
    const int a = winner_[2 * node], b = winner_[2 * node + 1];
    winner_[node] = times_[b] < times_[a] ? b : a;
  }
  void rebuild() {
    winner_.resize(2 * leaves_);
    for (int i = 0; i < leaves_; ++i) winner_[leaves_ + i] = i;
    for (int node = leaves_ - 1; node > 0; --node) play(node);
  }

  int leaves_ = 2;
  std::vector<Time> times_;
  std::vector<int> winner_;
};

// Time that `bytes` take at a rate, to the nearest whole nanosecond, and down from the middle between
// two: as ns-3 rounds it.
inline Time transmission_time(int64_t bytes, int64_t bits_per_s) {
  const __int128 twice = static_cast<__int128>(bytes) * 16 * SECOND;
  return static_cast<Time>((twice + bits_per_s - 1) / (2 * bits_per_s));
}

// A link with a FIFO buffer that drops what does not fit.
//
// A packet's departure is known when it arrives, so there are no events for departures: `waiting_`
// holds the times at which the packets in the buffer begin to be transmitted. The packet in
// transmission is not in the buffer. Arrivals come before a departure at the same time.
class Link {
 public:
  int64_t rate = 0;     // bits/s
  Time delay = 0;       // propagation
  int64_t buffer = 0;   // packets
  double loss = 0;      // probability with which a transmitted packet is lost
  Random random;        // of the losses
  int64_t num_drops = 0;

  // Takes a packet; returns when its transmission ends, or NEVER if the buffer is full.
  Time transmit(Time now, Time transmission) {
    while (!waiting_.empty() && waiting_.front() < now) waiting_.pop_front();
    Time start = now;
    if (free_at_ >= now) {
      if (static_cast<int64_t>(waiting_.size()) >= buffer) {
        ++num_drops;
        return NEVER;
      }
      start = free_at_;
      waiting_.push_back(start);
    }
    return free_at_ = start + transmission;
  }
  bool is_lost() { return loss > 0 && random.uniform() < loss; }
  int64_t queue_length(Time now) {
    while (!waiting_.empty() && waiting_.front() < now) waiting_.pop_front();
    return static_cast<int64_t>(waiting_.size());
  }
  template <class Archive>
  void exchange(Archive& archive) {
    archive(random), archive(num_drops), archive(free_at_), archive(waiting_);
  }

 private:
  Time free_at_ = -1;
  Ring<Time> waiting_;
};

}  // namespace networks
