// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-or-later
// Flows: the window transport, what moves its window, and sources without one.
#pragma once

#include <algorithm>
#include <cmath>

#include "containers.h"

namespace networks {

constexpr int64_t PAYLOAD_BYTES = 1448;
constexpr int64_t PACKET_BYTES = 1495;  // with the headers of transport (17), UDP, IP and PPP
constexpr int64_t ACK_BYTES = 47;
constexpr int64_t REORDERING = 3;       // a packet this far below an acknowledged one is lost
constexpr Time LEAST_TIMEOUT = 200'000'000;
constexpr Time RTT_WINDOW = 10 * SECOND;
constexpr Time LONGEST_SLOW_START = 10 * SECOND;
constexpr int MOST_DOUBLINGS = 6;       // of the timeout
constexpr double FIRST_WINDOW = 10;
constexpr double LEAST_WINDOW = 1;
constexpr int64_t ENDLESS = INT64_MAX / 2;

// What moves the window of a flow, or that it has none.
enum class Control : int { agent, aimd, cubic, bbr, constant_rate, on_off };

// The least value of the last RTT_WINDOW: candidates in rising order, the oldest first.
class WindowedMinimum {
 public:
  void add(Time now, Time value) {
    while (!candidates_.empty() && candidates_.back().value >= value) candidates_.pop_back();
    candidates_.push_back({now, value});
    forget(now);
  }
  // The newest value stays, however old it is; 0 before the first.
  Time value(Time now) {
    forget(now);
    return candidates_.empty() ? 0 : candidates_.front().value;
  }
  template <class Archive>
  void exchange(Archive& archive) {
    archive(candidates_);
  }

 private:
  struct Candidate {
    Time time, value;
  };
  void forget(Time now) {
    while (candidates_.size() > 1 && candidates_.front().time < now - RTT_WINDOW)
      candidates_.pop_front();
  }
  Ring<Candidate> candidates_;
};

// Counts since an agent acted.
struct Interval {
  Time begin = 0;
  int64_t sent = 0, acked = 0, lost = 0;
  Time rtt_sum = 0;
};

// CUBIC's memory (RFC 9438).
struct Cubic {
  static constexpr double BETA = 0.7, C = 0.4;
  double most = 0;       // window before the last reduction
  double estimate = 0;   // window that AIMD would have
  double k = 0;          // seconds until `most` is reached again
  Time epoch = NEVER;

  void reduce(double& window) {
    most = window < most ? window * (1 + BETA) / 2 : window;
    window = std::max(2.0, window * BETA);
    epoch = NEVER;
  }
  void grow(double& window, Time now, Time srtt) {
    if (epoch == NEVER) {
      epoch = now;
      most = std::max(most, window);
      k = std::cbrt((most - window) / C);
      estimate = window;
    }
    const double t = static_cast<double>(now + srtt - epoch) / SECOND;
    const double target = std::min(C * (t - k) * (t - k) * (t - k) + most, 1.5 * window);
    estimate += 3 * (1 - BETA) / (1 + BETA) / window;
    window += target > window ? (target - window) / window : 0;
    window = std::max(window, estimate);
  }
};

// BBR's memory (Cardwell et al. 2016), whose window stands for a pacing rate too.
//
// A round ends with the acknowledgement of what was sent after it began.
struct Bbr {
  enum class Phase : int64_t { startup, drain, probe_bandwidth, probe_rtt };
  static constexpr int MEMORY = 10;  // rounds of which the largest rate counts
  static constexpr int CYCLE = 8;    // rounds, the first of which probes for more bandwidth
  static constexpr int FLAT_ROUNDS = 3;
  static constexpr double STARTUP_GAIN = 2.885, PROBE_GAIN = 1.25, GROWTH = 1.25;
  static constexpr double LEAST_WINDOW = 4;
  static constexpr Time PROBE_RTT_TIME = 200'000'000;

  Phase phase = Phase::startup;
  double rates[MEMORY] = {};  // packets a second
  double full_rate = 0;
  int64_t round = 0, round_end = 0, delivered = 0, num_flat = 0;
  Time round_begin = 0, least_rtt = NEVER, least_rtt_at = 0, probe_end = 0;

  double rate() const { return *std::max_element(rates, rates + MEMORY); }

  void note_rtt(Time now, Time rtt) {
    const bool is_old = now - least_rtt_at > RTT_WINDOW;
    if (rtt <= least_rtt || is_old) least_rtt = rtt, least_rtt_at = now;
    if (is_old && phase > Phase::startup) {
      phase = Phase::probe_rtt;
      probe_end = now + rtt + PROBE_RTT_TIME;
    }
  }
  // Looks at the rate of the round that has ended; what was delivered while the RTT was probed for
  // says nothing.
  void end_round(Time now, int64_t next_number, int64_t all_delivered) {
    if (round_end > 0 && phase != Phase::probe_rtt) {
      const double packets = static_cast<double>(all_delivered - delivered);
      rates[round++ % MEMORY] = packets * SECOND / static_cast<double>(now - round_begin);
    }
    round_end = next_number, round_begin = now, delivered = all_delivered;
    if (phase != Phase::startup) return;
    if (rate() >= GROWTH * full_rate) {
      full_rate = rate(), num_flat = 0;
    } else if (++num_flat >= FLAT_ROUNDS) {
      phase = Phase::drain;
    }
  }
  // Returns the window after an acknowledgement.
  double next_window(double window, Time now, int64_t inflight) {
    if (phase == Phase::probe_rtt && now >= probe_end) phase = Phase::probe_bandwidth;
    const double product = rate() * static_cast<double>(least_rtt) / SECOND;
    if (phase == Phase::drain && static_cast<double>(inflight) <= product)
      phase = Phase::probe_bandwidth;
    double target = product;
    if (phase == Phase::startup)
      target = product > 0 ? std::max(window, STARTUP_GAIN * product) : window + 1;
    if (phase == Phase::probe_bandwidth && round % CYCLE == 0) target *= PROBE_GAIN;
    if (phase == Phase::probe_rtt) target = 0;
    return std::max(LEAST_WINDOW, std::min(window + 1, target));
  }
};

// The sender of a flow and its receiver. How its packets travel is the simulation's.
class Flow {
 public:
  // What it is; not part of the state.
  Control control = Control::agent;
  bool is_observed = false;    // by an agent, in steps
  bool is_tcp = false;         // carried by the TCP of an engine, not by our transport
  std::vector<int> path;       // links
  std::vector<Time> transmission;  // of a packet on each of them
  Time return_delay = 0;       // of an acknowledgement
  int64_t size = ENDLESS;      // packets to deliver
  double most_window = 0;
  Time start = 0, interval_between = 0;        // of sources without a window, from packet to packet
  Time mean_on = 0, mean_off = 0;  // of on/off sources

  // What it has become.
  double window = FIRST_WINDOW;
  int64_t inflight = 0, next_number = 0, oldest = 0, unsent = ENDLESS, delivered = 0;
  Time srtt = 0, least_srtt = 0, most_srtt = 0, last_activity = 0;
  int64_t doublings = 0, recovered_at = 0, last_lost = -1;
  double threshold = 0;
  bool is_slow_start = true, is_done = false, is_on = false;
  bool is_cut = false;  // its step was too much work for the engine; not part of the state
  Time on_until = 0;
  Interval interval;
  WindowedMinimum least_rtt;
  Cubic cubic;
  Bbr bbr;
  Random random;

  void begin() { unsent = size; }
  void stop() { unsent = 0, is_done = true; }
  bool has_window() const { return control < Control::constant_rate; }
  bool may_send() const {
    return unsent > 0 && static_cast<double>(inflight + 1) <= window;
  }
  Time timeout() const { return std::max(LEAST_TIMEOUT, 3 * srtt) << doublings; }
  Time deadline() const { return last_activity + timeout(); }

  // Counts a packet as sent; returns its number, which no other transmission has.
  int64_t send(Time now) {
    sent_.push_back(now);
    --unsent, ++inflight, ++interval.sent;
    last_activity = now;
    return next_number++;
  }

  // Takes an acknowledgement; returns how many packets are now known to be lost, or -1 if the
  // packet had been given up.
  int64_t acknowledge(Time now, int64_t number) {
    if (number < oldest) return -1;
    Time& sent = sent_[number - oldest];
    note_rtt(now, now - sent);
    sent = ACKED;
    --inflight, ++delivered, ++interval.acked;
    last_activity = now;
    doublings = 0;
    int64_t lost = 0;
    while (oldest < next_number && (sent_.front() == ACKED || oldest <= number - REORDERING)) {
      if (sent_.front() != ACKED) ++lost, last_lost = oldest;
      sent_.pop_front(), ++oldest;
    }
    count_lost(lost);
    is_done = delivered >= size;
    return lost;
  }

  // Counts packets that TCP delivered, and the RTT of one of them or 0.
  void deliver(Time now, int64_t num_packets, Time rtt) {
    if (rtt > 0) note_rtt(now, rtt);
    interval.rtt_sum += (num_packets - (rtt > 0)) * srtt;  // the others have no sample
    delivered += num_packets, interval.acked += num_packets;
    is_done = delivered >= size;
  }

  // Gives up the oldest packet in flight, because nothing was heard for the timeout.
  void give_up_oldest() {
    last_lost = oldest;
    do sent_.pop_front(), ++oldest;
    while (oldest < next_number && sent_.front() == ACKED);
    count_lost(1);
    doublings = std::min<int64_t>(doublings + 1, MOST_DOUBLINGS);
  }

  void set_window(double value) { window = std::clamp(value, LEAST_WINDOW, most_window); }

  // Moves the window after an acknowledgement of `number`, or after a timeout (number = -1).
  void adapt(Time now, int64_t number, int64_t lost) {
    switch (control) {
      case Control::agent:
        if (is_slow_start) slow_start(number, lost);
        break;
      case Control::aimd:
      case Control::cubic:
        congestion_avoidance(now, number, lost);
        break;
      case Control::bbr:
        estimate(now, number);
        break;
      default:
        break;
    }
  }

  template <class Archive>
  void exchange(Archive& archive) {
    archive(window), archive(inflight), archive(next_number), archive(oldest), archive(unsent);
    archive(delivered), archive(srtt), archive(least_srtt), archive(most_srtt);
    archive(last_activity), archive(doublings), archive(recovered_at), archive(last_lost);
    archive(threshold), archive(is_slow_start), archive(is_done), archive(is_on);
    archive(on_until), archive(interval), archive(cubic), archive(bbr), archive(random), archive(sent_);
    least_rtt.exchange(archive);
  }

 private:
  static constexpr Time ACKED = -1;

  void note_rtt(Time now, Time rtt) {
    srtt = srtt == 0 ? rtt : (7 * srtt + rtt) / 8;
    least_srtt = least_srtt == 0 ? srtt : std::min(least_srtt, srtt);
    most_srtt = std::max(most_srtt, srtt);
    interval.rtt_sum += rtt;
    least_rtt.add(now, rtt);
    if (control == Control::bbr) bbr.note_rtt(now, rtt);
  }
  void count_lost(int64_t lost) {
    inflight -= lost, unsent += lost, interval.lost += lost;
  }
  void slow_start(int64_t number, int64_t lost) {
    if (lost > 0) {
      set_window(std::max(2.0, window / 2));
    } else if (number >= 0) {
      set_window(window + 1);
    }
    is_slow_start = lost == 0 && window < threshold;
  }
  void congestion_avoidance(Time now, int64_t number, int64_t lost) {
    if (lost > 0 && last_lost >= recovered_at) {  // one reduction a round trip
      if (control == Control::cubic) {
        cubic.reduce(window);
      } else {
        window = std::max(2.0, window / 2);
      }
      threshold = window;
      recovered_at = next_number;
      is_slow_start = false;
    } else if (number >= recovered_at) {
      if (window < threshold) {
        window += 1;
      } else if (control == Control::cubic) {
        cubic.grow(window, now, srtt);
      } else {
        window += 1 / window;
      }
    }
    set_window(number < 0 ? 2.0 : window);
  }
  void estimate(Time now, int64_t number) {
    if (number < 0) return set_window(Bbr::LEAST_WINDOW);
    if (number >= bbr.round_end) bbr.end_round(now, next_number, delivered);
    set_window(bbr.next_window(window, now, inflight));
    is_slow_start = is_slow_start && bbr.phase == Bbr::Phase::startup;
  }

  Ring<Time> sent_;  // when packets oldest, oldest + 1, ... were sent, or ACKED
};

}  // namespace networks
