// Congestion control as an environment: parameters of an episode, observation, reward, ends.
//
// The observation and the reward are those of RayNet's paper (Giacomoni, Benmohamed, Parisis).
#pragma once

#include "json.h"
#include "simulation.h"

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
  Range cross_traffic_mbps, competitor_start_s;
  Time cross_traffic_on, cross_traffic_off;
  int64_t num_aimd, num_cubic, num_hops;
  int64_t flow_packets, slow_start_packets, most_window, max_steps, max_silent_steps;
  Features features;
  bool is_traced;

  explicit CongestionControlConfig(const Json& json)
      : bandwidth_mbps(json["bandwidth_mbps"]),
        rtt_ms(json["rtt_ms"]),
        buffer_packets(json["buffer_packets"]),
        random_loss(json["random_loss"]),
        cross_traffic_mbps(json["cross_traffic_mbps"]),
        competitor_start_s(json["competitor_start_s"]),
        cross_traffic_on(milliseconds(json["cross_traffic_on_ms"].number)),
        cross_traffic_off(milliseconds(json["cross_traffic_off_ms"].number)),
        num_aimd(json["num_aimd"].integer()),
        num_cubic(json["num_cubic"].integer()),
        num_hops(json["num_hops"].integer()),
        flow_packets(json["flow_packets"].integer()),
        slow_start_packets(json["slow_start_packets"].integer()),
        most_window(json["max_window_packets"].integer()),
        max_steps(json["max_episode_steps"].integer()),
        max_silent_steps(json["max_silent_steps"].integer()),
        features(json["features"].text == "relative" ? Features::relative : Features::paper),
        is_traced(json["trace"].number != 0) {}

  int num_features() const { return features == Features::relative ? 6 : 4; }
  static Time milliseconds(double value) { return static_cast<Time>(std::llround(value * 1e6)); }
};

// What a step tells besides; `sebulba.envs.networks.native.INFO` has the names, in this order.
struct Info {
  double time_ns, interval_ns, sent, acked, lost;
  double srtt_ns, least_srtt_ns, most_srtt_ns, mean_rtt_ns, least_rtt_ns;
  double throughput_bps, most_throughput_bps, window, inflight, queue_length, num_drops;
  double bandwidth_bps, base_rtt_ns, buffer_packets, random_loss, cross_traffic_bps;
};

struct Output {
  float* observation;
  float* reward;
  uint8_t* terminated;
  uint8_t* truncated;
  uint8_t* is_first;
  Info* info;
};

// The parameters of an episode.
struct Scene {
  int64_t bandwidth = 0, buffer = 0, cross_traffic = 0;
  Time delay = 0, competitor_start = 0;
  double random_loss = 0;

  static Scene draw(const CongestionControlConfig& config, uint64_t seed, uint64_t episode) {
    Random random = Random::stream(seed, episode, 0);
    Scene scene;
    scene.bandwidth = std::llround(config.bandwidth_mbps.draw(random) * 1e6);
    scene.delay = std::llround(config.rtt_ms.draw(random) * 1e6 / 2);
    scene.buffer = config.buffer_packets.draw_integer(random);
    scene.random_loss = config.random_loss.draw(random);
    scene.cross_traffic = std::llround(config.cross_traffic_mbps.draw(random) * 1e6);
    scene.competitor_start = std::llround(config.competitor_start_s.draw(random) * 1e9);
    return scene;
  }
};

// One environment: flow 0 is the agent's. It crosses `num_hops` links alike, each of which also
// carries cross traffic and competitors of its own.
class CongestionControl {
 public:
  CongestionControl(const CongestionControlConfig& config, uint64_t seed)
      : config_(&config), seed_(seed) {}

  const std::vector<Trace>& trace() const { return simulation_.trace; }

  // Begins the next episode.
  void reset(const Output& output) {
    ++episode_;
    begin_episode();
    simulation_.run();
    write(output, true);
    *output.reward = 0;
    num_steps_ = num_silent_ = 0;
    has_ended_ = false;
  }

  // Acts until the next step ends; begins the next episode if the last one has ended.
  void step(float action, const Output& output) {
    if (has_ended_) return reset(output);
    Flow& flow = simulation_.flows[0];
    flow.interval = {simulation_.now(), 0, 0, 0, 0};
    if (!flow.is_done) {
      flow.set_window(flow.window * std::exp2(static_cast<double>(action)));
      const Time length = 2 * flow.least_rtt.value(simulation_.now());
      simulation_.schedule_step(0, simulation_.now() + (length > 0 ? length : LEAST_TIMEOUT));
      simulation_.send_allowed(0);
      simulation_.run();
    }
    ++num_steps_;
    num_silent_ = flow.interval.acked > 0 ? 0 : num_silent_ + 1;
    write(output, false);
    *output.terminated = flow.is_done || num_silent_ >= config_->max_silent_steps;
    *output.truncated = !*output.terminated && num_steps_ >= config_->max_steps;
    has_ended_ = *output.terminated || *output.truncated;
  }

  void save(Writer& writer) {
    writer(seed_), writer(episode_), writer(num_steps_), writer(num_silent_), writer(has_ended_);
    writer(most_throughput_);
    if (episode_ >= 0) simulation_.exchange(writer);
  }
  void put_back(Reader& reader) {
    reader(seed_), reader(episode_), reader(num_steps_), reader(num_silent_), reader(has_ended_);
    reader(most_throughput_);
    if (episode_ < 0) return;
    begin_episode_again();
    simulation_.exchange(reader);
  }

 private:
  void begin_episode() {
    most_throughput_ = 0;
    begin_episode_again();
  }
  // Sets up the links and flows of episode `episode_`.
  void begin_episode_again() {
    scene_ = Scene::draw(*config_, seed_, static_cast<uint64_t>(episode_));
    simulation_ = Simulation();
    simulation_.is_traced = config_->is_traced;
    for (int64_t i = 0; i < config_->num_hops; ++i) simulation_.links.push_back(make_link(i));
    std::vector<int> all(config_->num_hops);
    for (int64_t i = 0; i < config_->num_hops; ++i) all[i] = static_cast<int>(i);
    Flow& agent = add_flow(Control::agent, all);
    agent.threshold =
        static_cast<double>(std::min(config_->slow_start_packets, config_->most_window));
    if (config_->flow_packets > 0) agent.size = config_->flow_packets;
    for (int hop : all) {
      for (int64_t i = 0; i < config_->num_aimd; ++i) add_flow(Control::aimd, {hop});
      for (int64_t i = 0; i < config_->num_cubic; ++i) add_flow(Control::cubic, {hop});
      if (scene_.cross_traffic > 0) add_cross_traffic(hop);
    }
    simulation_.begin();
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
    const size_t number = simulation_.flows.size();
    Flow flow;
    flow.control = control, flow.path = path;
    flow.random = stream(2 + 2 * number);
    flow.most_window = flow.threshold = static_cast<double>(config_->most_window);
    for (int link : path) {
      const Link& on = simulation_.links[link];
      flow.transmission.push_back(transmission_time(PACKET_BYTES, on.rate));
      flow.return_delay += on.delay + transmission_time(ACK_BYTES, on.rate);
    }
    if (control == Control::aimd || control == Control::cubic)
      flow.start = scene_.competitor_start;
    simulation_.flows.push_back(flow);
    return simulation_.flows.back();
  }
  void add_cross_traffic(int hop) {
    const bool is_always_on = config_->cross_traffic_off == 0;
    Flow& flow = add_flow(is_always_on ? Control::constant_rate : Control::on_off, {hop});
    flow.interval_between = transmission_time(PACKET_BYTES, scene_.cross_traffic);
    flow.mean_on = config_->cross_traffic_on, flow.mean_off = config_->cross_traffic_off;
  }

  void write(const Output& output, bool is_first) {
    const Flow& flow = simulation_.flows[0];
    const Interval& done = flow.interval;
    const Time length = simulation_.now() - done.begin;
    const double bits = static_cast<double>(done.acked * PAYLOAD_BYTES * 8);
    const double throughput = length > 0 ? bits * SECOND / static_cast<double>(length) : 0;
    most_throughput_ = std::max(most_throughput_, throughput);
    const double share = most_throughput_ > 0 ? throughput / most_throughput_ : 0;
    const double sent = static_cast<double>(std::max<int64_t>(done.sent, 1));
    const double loss = std::min(1.0, static_cast<double>(done.lost) / sent);
    const double delay = static_cast<double>(flow.srtt);
    const double least = static_cast<double>(flow.least_srtt);
    const double most = static_cast<double>(flow.most_srtt);
    const double normalized = most > least ? (delay - least) / (most - least) : 0;
    const double gain = share - loss;
    const bool is_best = gain < 1 && flow.srtt == flow.least_srtt;
    const double reward = is_best ? gain : gain * (least / delay) * (1 - normalized);
    *output.reward = static_cast<float>(flow.srtt > 0 ? reward : gain);
    *output.terminated = *output.truncated = 0;
    *output.is_first = is_first;
    const double values[6] = {share, normalized, loss, flow.window, 0, 0};
    for (int i = 0; i < config_->num_features(); ++i)
      output.observation[i] = static_cast<float>(values[i]);
    if (config_->features == Features::relative) write_relative(output.observation, flow);
    if (output.info != nullptr) *output.info = info(length, throughput);
  }

  // Three features that mean the same at every bandwidth and delay.
  void write_relative(float* observation, const Flow& flow) const {
    const double delay = static_cast<double>(std::max<Time>(flow.srtt, 1));
    const double least = static_cast<double>(std::max<Time>(flow.least_srtt, 1));
    const double product = most_throughput_ * least / SECOND / (8 * PAYLOAD_BYTES);  // packets
    observation[3] = static_cast<float>(std::log2(flow.window));
    observation[4] = static_cast<float>(std::log2(delay / least));
    observation[5] = static_cast<float>(std::log2(flow.window / std::max(product, 1.0)));
  }

  Info info(Time length, double throughput) {
    Flow& flow = simulation_.flows[0];
    const Interval& done = flow.interval;
    Time base = flow.return_delay;
    int64_t waiting = 0, drops = 0;
    for (size_t i = 0; i < flow.path.size(); ++i) {
      Link& link = simulation_.links[flow.path[i]];
      base += link.delay + flow.transmission[i];
      waiting += link.queue_length(simulation_.now()), drops += link.num_drops;
    }
    const auto number = [](auto value) { return static_cast<double>(value); };
    const double rtts = number(std::max<int64_t>(done.acked, 1));
    return {number(simulation_.now()), number(length), number(done.sent), number(done.acked),
            number(done.lost), number(flow.srtt), number(flow.least_srtt), number(flow.most_srtt),
            number(done.rtt_sum) / rtts, number(flow.least_rtt.value(simulation_.now())),
            throughput, most_throughput_, flow.window, number(flow.inflight), number(waiting),
            number(drops), number(scene_.bandwidth), number(base), number(scene_.buffer),
            scene_.random_loss, number(scene_.cross_traffic)};
  }

  const CongestionControlConfig* config_;
  uint64_t seed_;
  int64_t episode_ = -1, num_steps_ = 0, num_silent_ = 0;
  bool has_ended_ = true;
  double most_throughput_ = 0;
  Scene scene_;
  Simulation simulation_;
};

}  // namespace networks
