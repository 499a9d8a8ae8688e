// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-or-later
// Congestion control as an environment: parameters of an episode, observation, reward, ends.
//
// The observation and the reward are those of RayNet's paper (Giacomoni, Benmohamed, Parisis).
#pragma once

#include "json.h"
#include "links.h"
#include "senders.h"

namespace networks {

enum class Features : int64_t { paper, relative };

struct Range {
  double low, high;
  explicit Range(const Json& json) : low(json.list.at(0).number), high(json.list.at(1).number) {}
  double draw(Random& random) const { return low + (high - low) * random.uniform(); }
  int64_t draw_integer(Random& random) const {
    const auto first = static_cast<int64_t>(low), last = static_cast<int64_t>(high);
    return first + static_cast<int64_t>(static_cast<double>(last - first + 1) * random.uniform());
  }
};

// What all episodes have in common.
struct CongestionControlConfig {
  Range bandwidth_mbps, rtt_ms, buffer_packets, random_loss;
  Range cross_traffic_mbps, competitor_start_s, join_s, stay_s;
  Time cross_traffic_on, cross_traffic_off;
  int64_t num_agents, num_aimd, num_cubic, num_bbr, num_hops;
  int64_t flow_packets, slow_start_packets, most_window, max_steps, max_silent_steps;
  Control control;  // of the agents' flows
  Features features;
  bool is_traced;
  bool pays_capacity;  // the share of the link, and not of the largest rate so far
  bool is_tcp;  // what carries flows with a window, where the engine has TCP

  explicit CongestionControlConfig(const Json& json)
      : bandwidth_mbps(json["bandwidth_mbps"]),
        rtt_ms(json["rtt_ms"]),
        buffer_packets(json["buffer_packets"]),
        random_loss(json["random_loss"]),
        cross_traffic_mbps(json["cross_traffic_mbps"]),
        competitor_start_s(json["competitor_start_s"]),
        join_s(json["join_s"]),
        stay_s(json["stay_s"]),
        cross_traffic_on(milliseconds(json["cross_traffic_on_ms"].number)),
        cross_traffic_off(milliseconds(json["cross_traffic_off_ms"].number)),
        num_agents(json["num_agents"].integer()),
        num_aimd(json["num_aimd"].integer()),
        num_cubic(json["num_cubic"].integer()),
        num_bbr(json["num_bbr"].integer()),
        num_hops(json["num_hops"].integer()),
        flow_packets(json["flow_packets"].integer()),
        slow_start_packets(json["slow_start_packets"].integer()),
        most_window(json["max_window_packets"].integer()),
        max_steps(json["max_episode_steps"].integer()),
        max_silent_steps(json["max_silent_steps"].integer()),
        control(control_of(json["control"].text)),
        features(json["features"].text == "relative" ? Features::relative : Features::paper),
        is_traced(json["trace"].number != 0),
        pays_capacity(json.fields.contains("reward") && json["reward"].text == "capacity"),
        is_tcp(json.fields.contains("transport") && json["transport"].text == "tcp") {}

  int num_features() const { return features == Features::relative ? 6 : 4; }
  int num_actions() const { return 1; }  // numbers in an action
  static Time milliseconds(double value) { return static_cast<Time>(std::llround(value * 1e6)); }
  static Control control_of(const std::string& name) {
    if (name == "aimd") return Control::aimd;
    if (name == "cubic") return Control::cubic;
    return name == "bbr" ? Control::bbr : Control::agent;
  }
};

// What a step tells besides; `sebulba_networks.native.INFO` has the names, in this order.
struct Info {
  double time_ns, interval_ns, sent, acked, lost;
  double srtt_ns, least_srtt_ns, most_srtt_ns, mean_rtt_ns, least_rtt_ns;
  double throughput_bps, most_throughput_bps, window, inflight, queue_length, num_drops;
  double bandwidth_bps, base_rtt_ns, buffer_packets, random_loss, cross_traffic_bps;
  double is_cut;
};

// Where a row goes: of A agents, but for `is_over`.
struct Output {
  float* observation;  // [A, F]
  float* reward;
  uint8_t *terminated, *truncated, *is_first, *acting;
  uint8_t* is_over;  // the episode
  Info* info;        // or null
};

// The parameters of an episode.
struct Scene {
  int64_t bandwidth = 0, buffer = 0, cross_traffic = 0;
  Time delay = 0, competitor_start = 0;
  double random_loss = 0;
  std::vector<Time> join, leave;  // of each agent

  static Scene draw(const CongestionControlConfig& config, uint64_t seed, uint64_t episode) {
    Random random = Random::stream(seed, episode, 0);
    Scene scene;
    scene.bandwidth = std::llround(config.bandwidth_mbps.draw(random) * 1e6);
    scene.delay = std::llround(config.rtt_ms.draw(random) * 1e6 / 2);
    scene.buffer = config.buffer_packets.draw_integer(random);
    scene.random_loss = config.random_loss.draw(random);
    scene.cross_traffic = std::llround(config.cross_traffic_mbps.draw(random) * 1e6);
    scene.competitor_start = std::llround(config.competitor_start_s.draw(random) * 1e9);
    scene.join = {0}, scene.leave = {NEVER};
    for (int64_t i = 1; i < config.num_agents; ++i) {
      const Time join = std::llround(config.join_s.draw(random) * 1e9);
      const Time stay = std::llround(config.stay_s.draw(random) * 1e9);
      scene.join.push_back(join), scene.leave.push_back(stay > 0 ? join + stay : NEVER);
    }
    return scene;
  }
};

// An agent, beyond its flow.
struct Agent {
  enum class Phase : int64_t { begins, acts, waits, left };
  Phase phase = Phase::begins;
  int64_t num_steps = 0, num_silent = 0;
  double most_throughput = 0;
};

// One environment, on a network such as `Simulation`. The first flows are those of the agents, each
// with its own step clock; they cross `num_hops` links alike, each of which also carries cross
// traffic and competitors of its own.
template <class Network>
class CongestionControl {
 public:
  using Config = CongestionControlConfig;

  CongestionControl(const CongestionControlConfig& config, uint64_t seed)
      : config_(&config), seed_(seed) {}

  const std::vector<Trace>& trace() const { return network_.trace; }

  // Begins the next episode.
  void reset(const Output& output) {
    ++episode_;
    begin_episode();
    run(output, true);
  }

  // Lets agents act, and runs until others or the same are to act; begins the next episode if the
  // last one has ended.
  void step(const float* actions, const Output& output) {
    if (has_ended_) return reset(output);
    for (size_t i = 0; i < agents_.size(); ++i)
      if (agents_[i].phase == Agent::Phase::acts) act(i, static_cast<double>(actions[i]));
    run(output, false);
  }

  // Has the next reset begin episode number `episode`.
  void seek(int64_t episode) { episode_ = episode - 1, has_ended_ = true; }

  void save(Writer& writer) { exchange(writer, [] {}); }
  void put_back(Reader& reader) {
    exchange(reader, [this] { begin_episode(); });
  }

 private:
  template <class Archive, class Begin>
  void exchange(Archive& archive, const Begin& begin) {
    archive(seed_), archive(episode_), archive(has_ended_);
    if (episode_ < 0) return;
    begin();
    for (Agent& agent : agents_) archive(agent);
    network_.exchange(archive);
  }

  // Sets up agents, links and flows of episode `episode_`.
  void begin_episode() {
    scene_ = Scene::draw(*config_, seed_, static_cast<uint64_t>(episode_));
    agents_.assign(config_->num_agents, {});
    network_ = Network();
    network_.is_traced = config_->is_traced;
    for (int64_t i = 0; i < config_->num_hops; ++i) network_.links.push_back(make_link(i));
    std::vector<int> all(config_->num_hops);
    for (int64_t i = 0; i < config_->num_hops; ++i) all[i] = static_cast<int>(i);
    for (const Time join : scene_.join) add_agent(all, join);
    for (int hop : all) {
      add_competitors(Control::aimd, config_->num_aimd, hop);
      add_competitors(Control::cubic, config_->num_cubic, hop);
      add_competitors(Control::bbr, config_->num_bbr, hop);
      if (scene_.cross_traffic > 0) add_cross_traffic(hop);
    }
    network_.begin();
  }

  void act(size_t i, double exponent) {
    Flow& flow = network_.flows[i];
    const Time now = network_.now();
    agents_[i].phase = Agent::Phase::waits;
    flow.interval = {now, 0, 0, 0, 0};
    if (flow.is_done || flow.is_cut) return network_.schedule_step(i, now);
    if (flow.control == Control::agent) flow.set_window(flow.window * std::exp2(exponent));
    const Time length = 2 * flow.least_rtt.value(now);
    network_.schedule_step(i, now + (length > 0 ? length : LEAST_TIMEOUT));
    network_.send_allowed(i);
  }

  // Runs until steps end, and shows the agents whose they are.
  void run(const Output& output, bool is_first) {
    const size_t num_agents = agents_.size();
    for (size_t i = 0; i < num_agents; ++i) {
      clear(output, i);
      output.is_first[i] = is_first;
    }
    do show(network_.run(), output);
    while (network_.is_step_due());
    has_ended_ = std::all_of(agents_.begin(), agents_.end(), [](const Agent& agent) {
      return agent.phase == Agent::Phase::left;
    });
    *output.is_over = has_ended_;
  }

  void clear(const Output& output, size_t i) const {
    const int num_features = config_->num_features();
    std::fill_n(output.observation + i * num_features, num_features, 0.0f);
    if (config_->features == Features::paper)
      output.observation[i * num_features + 3] = static_cast<float>(LEAST_WINDOW);
    output.reward[i] = 0;
    output.terminated[i] = output.truncated[i] = output.acting[i] = 0;
    if (output.info != nullptr) output.info[i] = {};
  }

  // Shows the end of a step of agent `i`, which acts next, unless it leaves.
  void show(size_t i, const Output& output) {
    Agent& agent = agents_[i];
    const Flow& flow = network_.flows[i];
    write(i, output);
    const bool is_begin = agent.phase == Agent::Phase::begins;
    agent.phase = Agent::Phase::acts;
    output.acting[i] = 1;
    if (is_begin) {
      output.reward[i] = 0;
      return;
    }
    ++agent.num_steps;
    agent.num_silent = flow.interval.acked > 0 ? 0 : agent.num_silent + 1;
    const bool is_late = network_.now() >= scene_.leave[i];
    output.terminated[i] = flow.is_done || agent.num_silent >= config_->max_silent_steps;
    output.truncated[i] =
        !output.terminated[i] && (is_late || flow.is_cut || agent.num_steps >= config_->max_steps);
    if (output.terminated[i] || output.truncated[i]) leave(i, output);
  }

  void leave(size_t i, const Output& output) {
    agents_[i].phase = Agent::Phase::left;
    output.acting[i] = 0;
    network_.flows[i].stop();
  }

  Random stream(uint64_t number) const {
    return Random::stream(seed_, static_cast<uint64_t>(episode_), number);
  }
  Link make_link(int64_t number) const {
    Link link;
    link.rate = scene_.bandwidth, link.delay = scene_.delay / config_->num_hops;
    link.buffer = scene_.buffer, link.loss = scene_.random_loss;
    link.random = stream(1 + 2 * static_cast<uint64_t>(number));
    return link;
  }
  Flow& add_flow(Control control, const std::vector<int>& path) {
    const size_t number = network_.flows.size();
    Flow flow;
    flow.control = control, flow.path = path;
    flow.is_tcp = config_->is_tcp && flow.has_window();
    flow.random = stream(2 + 2 * number);
    flow.most_window = flow.threshold = static_cast<double>(config_->most_window);
    for (int link : path) {
      const Link& on = network_.links[link];
      flow.transmission.push_back(transmission_time(PACKET_BYTES, on.rate));
      flow.return_delay += on.delay + transmission_time(ACK_BYTES, on.rate);
    }
    network_.flows.push_back(flow);
    return network_.flows.back();
  }
  void add_agent(const std::vector<int>& path, Time join) {
    Flow& flow = add_flow(config_->control, path);
    flow.is_observed = true, flow.start = join;
    flow.threshold =
        static_cast<double>(std::min(config_->slow_start_packets, config_->most_window));
    if (config_->flow_packets > 0) flow.size = config_->flow_packets;
  }
  void add_competitors(Control control, int64_t number, int hop) {
    for (int64_t i = 0; i < number; ++i)
      add_flow(control, {hop}).start = scene_.competitor_start;
  }
  void add_cross_traffic(int hop) {
    const bool is_always_on = config_->cross_traffic_off == 0;
    Flow& flow = add_flow(is_always_on ? Control::constant_rate : Control::on_off, {hop});
    flow.interval_between = transmission_time(PACKET_BYTES, scene_.cross_traffic);
    flow.mean_on = config_->cross_traffic_on, flow.mean_off = config_->cross_traffic_off;
  }

  void write(size_t i, const Output& output) {
    const Flow& flow = network_.flows[i];
    const Interval& done = flow.interval;
    const Time length = network_.now() - done.begin;
    const double bits = static_cast<double>(done.acked * PAYLOAD_BYTES * 8);
    const double throughput = length > 0 ? bits * SECOND / static_cast<double>(length) : 0;
    double& most_throughput = agents_[i].most_throughput;
    most_throughput = std::max(most_throughput, throughput);
    const double share = most_throughput > 0 ? throughput / most_throughput : 0;
    const double sent = static_cast<double>(std::max<int64_t>(done.sent, 1));
    const double loss = std::min(1.0, static_cast<double>(done.lost) / sent);
    const double delay = static_cast<double>(flow.srtt);
    const double least = static_cast<double>(flow.least_srtt);
    const double most = static_cast<double>(flow.most_srtt);
    const double normalized = most > least ? (delay - least) / (most - least) : 0;
    const double capacity = static_cast<double>(scene_.bandwidth);
    const double paid = config_->pays_capacity ? throughput / capacity : share;
    const double gain = paid - loss;
    const bool is_best = gain < 1 && flow.srtt == flow.least_srtt;
    const double reward = is_best ? gain : gain * (least / delay) * (1 - normalized);
    output.reward[i] = static_cast<float>(flow.srtt > 0 ? reward : gain);
    float* observation = output.observation + i * config_->num_features();
    const double values[4] = {share, normalized, loss, flow.window};
    std::copy_n(values, 4, observation);
    if (config_->features == Features::relative) write_relative(observation, i);
    if (output.info != nullptr) output.info[i] = info(i, length, throughput);
  }

  // Three features that mean the same at every bandwidth and delay.
  void write_relative(float* observation, size_t i) const {
    const Flow& flow = network_.flows[i];
    const double delay = static_cast<double>(std::max<Time>(flow.srtt, 1));
    const double least = static_cast<double>(std::max<Time>(flow.least_srtt, 1));
    const double most = agents_[i].most_throughput;
    const double product = most * least / SECOND / (8 * PAYLOAD_BYTES);  // packets
    observation[3] = static_cast<float>(std::log2(flow.window));
    observation[4] = static_cast<float>(std::log2(delay / least));
    observation[5] = static_cast<float>(std::log2(flow.window / std::max(product, 1.0)));
  }

  Info info(size_t i, Time length, double throughput) {
    Flow& flow = network_.flows[i];
    const Interval& done = flow.interval;
    Time base = flow.return_delay;
    int64_t waiting = 0, drops = 0;
    for (size_t hop = 0; hop < flow.path.size(); ++hop) {
      const size_t link = flow.path[hop];
      base += network_.links[link].delay + flow.transmission[hop];
      waiting += network_.queue_length(link), drops += network_.num_drops(link);
    }
    const auto number = [](auto value) { return static_cast<double>(value); };
    const double rtts = number(std::max<int64_t>(done.acked, 1));
    return {number(network_.now()), number(length), number(done.sent), number(done.acked),
            number(done.lost), number(flow.srtt), number(flow.least_srtt), number(flow.most_srtt),
            number(done.rtt_sum) / rtts, number(flow.least_rtt.value(network_.now())),
            throughput, agents_[i].most_throughput, flow.window, number(flow.inflight), number(waiting),
            number(drops), number(scene_.bandwidth), number(base), number(scene_.buffer),
            scene_.random_loss, number(scene_.cross_traffic), number(flow.is_cut)};
  }

  const CongestionControlConfig* config_;
  uint64_t seed_;
  int64_t episode_ = -1;
  bool has_ended_ = true;
  Scene scene_;
  std::vector<Agent> agents_;
  Network network_;
};

}  // namespace networks
