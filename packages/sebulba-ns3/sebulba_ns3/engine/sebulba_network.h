// SPDX-License-Identifier: GPL-2.0-or-later
// Applications on the nodes of an ns-3 program, which send each other messages over its network:
// derive from `sebulba::Network`, and name the class in `SEBULBA_SCENARIO`.
//
// The parts are those of DEFIANCE: observations, rewards and actions travel between applications,
// and agents are applications, too.
#pragma once

#include <cstring>
#include <deque>
#include <functional>
#include <list>

#include "sebulba_scenario.h"

#include "ns3/internet-module.h"
#include "ns3/network-module.h"

namespace sebulba {

using Numbers = std::vector<double>;
class Connection;
class Network;

struct Message {
  Numbers data;
  ns3::Time born, arrived;
  uint32_t number = 0;   // of its connection, from 0 on
  uint32_t ballast = 0;  // bytes that it carried besides
  std::string from;      // name of the application that sent it
};

// The last numbers of a series.
class History {
 public:
  explicit History(size_t capacity = 1000) : capacity_(capacity) {}
  void push(double value) {
    values_.push_back(value);
    if (values_.size() > capacity_) values_.pop_front();
  }
  bool empty() const { return values_.empty(); }
  size_t size() const { return values_.size(); }
  const std::deque<double>& values() const { return values_; }
  // Of an empty one all of these are 0.
  double newest() const { return empty() ? 0 : values_.back(); }
  double average() const {
    double sum = 0;
    for (const double value : values_) sum += value;
    return empty() ? 0 : sum / static_cast<double>(size());
  }
  double least() const { return empty() ? 0 : *std::min_element(values_.begin(), values_.end()); }
  double largest() const { return empty() ? 0 : *std::max_element(values_.begin(), values_.end()); }

 private:
  size_t capacity_;
  std::deque<double> values_;
};

// An application on a node. What observes, rewards or acts is one with a few lines of its own.
class App {
 public:
  App(std::string name, ns3::Ptr<ns3::Node> node) : name(std::move(name)), node(node) {}
  virtual ~App() = default;
  // When the episode begins, after all connections were made.
  virtual void start() {}
  virtual void on_message(const Message&) {}
  // Sends a message over every connection from here, or over those to the application `to`.
  inline void send(const Numbers& data, uint32_t ballast = 0, const std::string& to = "");

  const std::string name;
  ns3::Ptr<ns3::Node> node;

 protected:
  template <class Body>
  void after(ns3::Time time, Body body) {
    ns3::Simulator::Schedule(time, std::move(body));
  }
  inline Network& network() const { return *network_; }

 private:
  friend class Connection;
  friend class Network;
  virtual void deliver(App& to, const Message& message) { to.on_message(message); }
  Network* network_ = nullptr;
};

// What carries the messages of a connection.
struct Via {
  enum Kind { DIRECT, UDP, TCP } kind = DIRECT;
  ns3::Time delay;         // of a direct one
  uint32_t interface = 1;  // of the receiver's node: whose address is used
};
// Without a network; messages arrive after `delay`.
inline Via direct(ns3::Time delay = ns3::Time()) { return {Via::DIRECT, delay, 0}; }
inline Via udp(uint32_t interface = 1) { return {Via::UDP, {}, interface}; }
inline Via tcp(uint32_t interface = 1) { return {Via::TCP, {}, interface}; }

// One way from an application to another.
class Connection {
 public:
  static constexpr uint32_t MOST_UDP_BYTES = 65507, HEADER_BYTES = 16;
  static constexpr int64_t TIMEOUT_MS = 200;  // of TCP, at least; ns-3's are 1 s, and 3 s to connect

  Connection(App& from, App& to, Via via, uint16_t port) : from(from), to(to), via(via), port_(port) {}
  ~Connection() { close(); }
  Connection(const Connection&) = delete;

  App &from, &to;
  const Via via;
  uint32_t num_sent = 0, num_arrived = 0;
  uint64_t num_bytes = 0;  // sent over the network, without the headers of protocols
  History ages;  // of messages that arrived, in seconds
  bool is_open() const { return is_open_; }

 private:
  friend class App;
  friend class ModelServer;
  friend class Network;

  void open() {
    is_open_ = true, num_arriving_ = 0;
    if (via.kind == Via::DIRECT) return;
    const auto kind = via.kind == Via::UDP ? ns3::UdpSocketFactory::GetTypeId()
                                           : ns3::TcpSocketFactory::GetTypeId();
    listener_ = ns3::Socket::CreateSocket(to.node, kind);
    sender_ = ns3::Socket::CreateSocket(from.node, kind);
    const auto ip = to.node->GetObject<ns3::Ipv4>();
    if (ip == nullptr || via.interface >= ip->GetNInterfaces())
      throw std::runtime_error("connection from " + from.name + " to " + to.name + ": the node of " +
                               to.name + " has no interface " + std::to_string(via.interface));
    listener_->Bind(ns3::InetSocketAddress(ns3::Ipv4Address::GetAny(), port_));
    for (const auto& socket : {listener_, sender_}) {
      if (via.kind != Via::TCP) continue;
      socket->SetAttribute("TcpNoDelay", ns3::BooleanValue(true));
      socket->SetAttribute("DelAckCount", ns3::UintegerValue(1));
      socket->SetAttribute("SegmentSize", ns3::UintegerValue(1448));
      for (const char* name : {"MinRto", "ConnTimeout"})
        socket->SetAttribute(name, ns3::TimeValue(ns3::MilliSeconds(TIMEOUT_MS)));
    }
    listen();
    if (via.kind == Via::TCP) listener_->Listen();
    const auto address = ip->GetAddress(via.interface, 0).GetLocal();
    sender_->Connect(ns3::InetSocketAddress(address, port_));
    is_connected_ = via.kind == Via::UDP;
  }

  // Has the sockets call this connection.
  void listen() {
    if (accepted_ != nullptr) accept(accepted_, {});
    if (via.kind == Via::UDP) {
      listener_->SetRecvCallback(ns3::MakeCallback(&Connection::receive, this));
    } else {
      listener_->SetAcceptCallback(
          ns3::MakeNullCallback<bool, ns3::Ptr<ns3::Socket>, const ns3::Address&>(),
          ns3::MakeCallback(&Connection::accept, this));
      sender_->SetConnectCallback(ns3::MakeCallback(&Connection::connected, this),
                                  ns3::MakeNullCallback<void, ns3::Ptr<ns3::Socket>>());
      sender_->SetSendCallback(ns3::MakeCallback(&Connection::flush, this));
    }
  }
  // Takes the sockets of `other`, and delivers what is on their way; it sends nothing new.
  void drain(Connection& other) {
    is_open_ = is_draining_ = true, is_connected_ = std::exchange(other.is_connected_, false);
    std::swap(listener_, other.listener_), std::swap(sender_, other.sender_);
    std::swap(accepted_, other.accepted_);
    std::swap(num_flushed_, other.num_flushed_), unsent_.swap(other.unsent_), unread_.swap(other.unread_);
    listen();
  }

  // Messages on their way are lost.
  void close() {
    is_open_ = is_connected_ = false;
    for (auto& socket : {listener_, sender_, accepted_}) {
      if (socket == nullptr) continue;
      socket->SetRecvCallback(ns3::MakeNullCallback<void, ns3::Ptr<ns3::Socket>>());
      socket->SetSendCallback(ns3::MakeNullCallback<void, ns3::Ptr<ns3::Socket>, uint32_t>());
      socket->SetConnectCallback(ns3::MakeNullCallback<void, ns3::Ptr<ns3::Socket>>(),
                                 ns3::MakeNullCallback<void, ns3::Ptr<ns3::Socket>>());
      socket->SetAcceptCallback(
          ns3::MakeNullCallback<bool, ns3::Ptr<ns3::Socket>, const ns3::Address&>(),
          ns3::MakeNullCallback<void, ns3::Ptr<ns3::Socket>, const ns3::Address&>());
      socket->Close();
    }
    listener_ = sender_ = accepted_ = nullptr;
    num_flushed_ = 0, unsent_.clear(), unread_.clear();
  }

  // The header: 16 bits of the count of numbers, 48 of the time of birth in ns, 32 each of the
  // message's number and of its length.
  void send(const Numbers& data, uint32_t ballast) {
    if (data.size() > 0xffff) throw std::runtime_error("a message has at most 65,535 numbers");
    const uint64_t size = HEADER_BYTES + 8 * data.size() + ballast;
    if (via.kind == Via::UDP && size > MOST_UDP_BYTES)
      throw std::runtime_error("a message of " + std::to_string(size) + " bytes from " + from.name +
                               " to " + to.name + " is too long for UDP, which carries " +
                               std::to_string(MOST_UDP_BYTES) + "; use TCP");
    const uint32_t number = num_sent++;
    ++num_arriving_;
    const auto born = ns3::Simulator::Now();
    if (via.kind == Via::DIRECT) {
      const Message message{data, born, born + via.delay, number, ballast, from.name};
      ns3::Simulator::Schedule(via.delay, [alive = std::weak_ptr<int>(alive_), this, message] {
        if (!alive.expired() && is_open_) deliver(message);
      });
      return;
    }
    num_bytes += size;
    std::string bytes(HEADER_BYTES + 8 * data.size(), '\0');
    const uint64_t first = uint64_t{data.size()} << 48 | static_cast<uint64_t>(born.GetNanoSeconds());
    const uint32_t length = static_cast<uint32_t>(size);
    std::memcpy(bytes.data(), &first, 8);
    std::memcpy(bytes.data() + 8, &number, 4);
    std::memcpy(bytes.data() + 12, &length, 4);
    std::memcpy(bytes.data() + HEADER_BYTES, data.data(), 8 * data.size());
    bytes.resize(size);
    if (via.kind == Via::UDP) {
      sender_->Send(packet_of(bytes));
    } else {
      unsent_ += bytes;
      flush(sender_, 0);
    }
  }
  static ns3::Ptr<ns3::Packet> packet_of(const std::string& bytes) {
    return ns3::Create<ns3::Packet>(reinterpret_cast<const uint8_t*>(bytes.data()),
                                    static_cast<uint32_t>(bytes.size()));
  }
  void connected(ns3::Ptr<ns3::Socket> socket) { is_connected_ = true, flush(socket, 0); }
  void flush(ns3::Ptr<ns3::Socket> socket, uint32_t) {
    while (is_connected_ && num_flushed_ < unsent_.size()) {
      const size_t room = std::min<size_t>(socket->GetTxAvailable(), unsent_.size() - num_flushed_);
      if (room == 0) return;
      const int taken = socket->Send(packet_of(unsent_.substr(num_flushed_, room)));
      if (taken <= 0) return;
      num_flushed_ += static_cast<size_t>(taken);
      // Only by halves: to erase a little of a large model at each acknowledgement copies the rest.
      if (2 * num_flushed_ >= unsent_.size()) unsent_.erase(0, std::exchange(num_flushed_, 0));
    }
  }
  void accept(ns3::Ptr<ns3::Socket> socket, const ns3::Address&) {
    accepted_ = socket;
    socket->SetRecvCallback(ns3::MakeCallback(&Connection::receive, this));
  }
  void receive(ns3::Ptr<ns3::Socket> socket) {
    const std::weak_ptr<int> alive = alive_;
    while (ns3::Ptr<ns3::Packet> packet = socket->Recv()) {
      std::string bytes(packet->GetSize(), '\0');
      packet->CopyData(reinterpret_cast<uint8_t*>(bytes.data()), packet->GetSize());
      if (bytes.empty()) return;  // the other end was closed
      unread_ += bytes;
      while (!alive.expired() && take_message()) {}
      if (alive.expired() || !is_open_) return;  // a message had it closed
    }
  }
  bool take_message() {
    if (unread_.size() < HEADER_BYTES) return false;
    uint64_t first;
    uint32_t number, length;
    std::memcpy(&first, unread_.data(), 8);
    std::memcpy(&number, unread_.data() + 8, 4);
    std::memcpy(&length, unread_.data() + 12, 4);
    if (unread_.size() < length) return false;
    Numbers data(first >> 48);
    std::memcpy(data.data(), unread_.data() + HEADER_BYTES, 8 * data.size());
    const auto born = ns3::NanoSeconds(static_cast<int64_t>(first & ((uint64_t{1} << 48) - 1)));
    const auto ballast = static_cast<uint32_t>(length - HEADER_BYTES - 8 * data.size());
    unread_.erase(0, length);
    deliver({data, born, ns3::Simulator::Now(), number, ballast, from.name});
    return true;
  }
  void deliver(const Message& message) {
    ++num_arrived, num_arriving_ -= num_arriving_ > 0;
    ages.push((message.arrived - message.born).GetSeconds());
    from.deliver(to, message);
  }

  uint16_t port_;
  bool is_open_ = false, is_connected_ = false, is_draining_ = false;
  uint32_t num_arriving_ = 0;  // messages on their way, or lost
  ns3::Ptr<ns3::Socket> listener_, sender_, accepted_;
  std::string unsent_, unread_;
  size_t num_flushed_ = 0;  // bytes of unsent_ that the socket has taken
  std::shared_ptr<int> alive_ = std::make_shared<int>();
};

// What an inference costs. Observations that find all threads busy wait in a queue.
struct Inference {
  // What a full queue drops; or a new observation replaces the waiting one of its source.
  enum Rule { DROP_NEW, DROP_OLD, NEWEST_PER_SOURCE };
  std::function<ns3::Time()> service;  // of one; none takes no time
  size_t capacity = std::numeric_limits<size_t>::max();  // of the queue
  int threads = 1;
  double slowdown = 0;  // a service takes 1 + slowdown times as long for each other one beside it
  Rule rule = DROP_NEW;

  // The rule that an option of the environment names.
  static Rule rule_of(const std::string& name) {
    if (name == "drop_new") return DROP_NEW;
    if (name == "drop_old") return DROP_OLD;
    if (name == "newest_per_source") return NEWEST_PER_SOURCE;
    throw std::runtime_error("the rule " + name +
                             " is none; use drop_new, drop_old or newest_per_source");
  }
};

// An application that decides. Python decides for it; `act` gets the action when its service is over.
class Agent : public App {
 public:
  using App::App;

  Inference inference;
  History ages, waits;  // of what it decided on, in seconds: since birth, and in the queue
  uint32_t num_asked = 0, num_dropped = 0;
  double version = 0;  // of the model that has arrived; 0 for the one with which the episode began

  // Decides on an observation, which was born at `born`.
  void ask(Numbers observation, ns3::Time born, const std::string& source = "") {
    ++num_asked;
    const Waiting one{std::move(observation), born, ns3::Simulator::Now(), source};
    if (static_cast<int>(served_.size()) < inference.threads) return serve(one);
    if (inference.rule == Inference::NEWEST_PER_SOURCE) {
      for (auto& other : queue_)
        if (other.source == source) return ++num_dropped, void(other = one);
    }
    if (queue_.size() >= inference.capacity) {
      ++num_dropped;
      if (inference.rule != Inference::DROP_OLD || queue_.empty()) return;
      queue_.pop_front();
    }
    queue_.push_back(one);
  }
  void ask(Numbers observation) { ask(std::move(observation), ns3::Simulator::Now()); }
  void ask(const Message& message) { ask(message.data, message.born, message.from); }
  size_t num_waiting() const { return queue_.size(); }

  void on_message(const Message& message) override { ask(message); }
  // By default it sends the action over its connections.
  virtual void act(const Numbers& action) { send(action); }
  // Adds to the reward of its next decision.
  void earn(double reward) { earned_ += reward; }

 private:
  friend class Network;

  struct Waiting {
    Numbers observation;
    ns3::Time born, came;
    std::string source;
  };
  struct Ask {
    Numbers observation, action;
    double reward, age, version;
    bool is_shown = false, is_answered = false, is_due = false;
  };

  inline void serve(const Waiting& one);
  inline void decide(const std::shared_ptr<Ask>& ask);
  void finish(const std::shared_ptr<Ask>& ask) {
    served_.remove(ask);
    act(ask->action);
    if (queue_.empty() || static_cast<int>(served_.size()) >= inference.threads) return;
    const Waiting next = std::move(queue_.front());
    queue_.pop_front();
    serve(next);
  }
  // Shows the decision that is due first, if there is one.
  bool show() {
    for (const auto& ask : served_) {
      if (ask->is_shown) continue;
      ask->is_shown = true, shown_ = last_ = ask;
      return true;
    }
    return false;
  }
  void answer(const Numbers& action) {
    const auto ask = std::exchange(shown_, nullptr);
    ask->action = action, ask->is_answered = true;
    decided_.push_back(action);
    if (ask->is_due) finish(ask);
  }

  std::deque<Waiting> queue_;
  std::list<std::shared_ptr<Ask>> served_;
  std::shared_ptr<Ask> shown_, last_;
  std::deque<Numbers> decided_;
  double earned_ = 0;
};

// Brings models from the trainer to the agents to which it is connected: messages of their true size,
// which no `on_message` gets. Each `period` it sends the newest one, where the last one has arrived.
class ModelServer : public App {
 public:
  ModelServer(std::string name, ns3::Ptr<ns3::Node> node, ns3::Time period = ns3::MilliSeconds(100))
      : App(name, node), period_(period) {}
  inline void start() override;

 private:
  void deliver(App& to, const Message& message) override {
    auto* agent = dynamic_cast<Agent*>(&to);
    if (agent == nullptr) throw std::runtime_error(name + " sends models, and " + to.name + " is no agent");
    agent->version = std::max(agent->version, message.data[0]);
  }

  const ns3::Time period_;
  std::map<std::string, double> sent_;  // the newest version, by agent
};

// A program of applications. `agents` names those who decide, and `build` makes all of them.
//
// Decisions are deferred: the simulator runs on to the first time at which one takes effect, and all
// decisions that are in service are then shown at once. This changes nothing, as none acts earlier.
class Network : public Scenario {
 public:
  std::vector<AgentSpec> agents() override = 0;
  virtual void build() = 0;

  // Adds an application, whose constructor gets the name, the node and `more`.
  template <class Kind, class... More>
  Kind& add(const std::string& name, ns3::Ptr<ns3::Node> node, More&&... more) {
    auto made = std::make_unique<Kind>(name, node, std::forward<More>(more)...);
    Kind& app = *made;
    app.network_ = this;
    apps_.push_back(std::move(made));
    if (!names_.emplace(name, &app).second)
      throw std::runtime_error("build() adds two applications " + name);
    if constexpr (std::is_base_of_v<Agent, Kind>) by_name_[name] = &app;
    return app;
  }
  // TCP cannot connect while the program is being built, so a connection opens at the next event.
  Connection& connect(App& from, App& to, Via via) {
    connections_.push_back(std::make_unique<Connection>(from, to, via, next_port()));
    Connection* made = connections_.back().get();
    made->is_open_ = via.kind == Via::DIRECT;
    ns3::Simulator::ScheduleNow([alive = std::weak_ptr<int>(made->alive_), made] {
      if (!alive.expired()) made->open();
    });
    return *made;
  }
  // Connects as a text says: "cart>agent udp; agent>cart tcp 2; a>b direct 5". After the kind stands the
  // number of the receiver's interface, or the delay in ms.
  void connect(const std::string& text) {
    std::istringstream all(text);
    for (std::string one; std::getline(all, one, ';');) {
      std::istringstream words(one);
      std::string ends, kind, rest;
      if (!(words >> ends)) continue;
      const size_t middle = ends.find('>');
      double number = 0;
      const bool has_kind = static_cast<bool>(words >> kind), has_number = static_cast<bool>(words >> number);
      const bool is_kind = kind == "udp" || kind == "tcp" || kind == "direct";
      if (middle == std::string::npos || !has_kind || !is_kind || (!has_number && !words.eof()))
        throw std::runtime_error("the connection \"" + one +
                                 "\" is not understood; use a>b, and udp, tcp or direct");
      const auto interface = has_number ? static_cast<uint32_t>(number) : 1;
      const auto via = kind == "udp"   ? udp(interface)
                       : kind == "tcp" ? tcp(interface)
                                       : direct(ns3::MicroSeconds(std::llround(1000 * number)));
      connect(app(ends.substr(0, middle)), app(ends.substr(middle + 1)), via);
    }
  }
  // The application of a name.
  App& app(const std::string& name) const {
    const auto found = names_.find(name);
    if (found != names_.end()) return *found->second;
    std::string known;
    for (const auto& [one, app] : names_) known += (known.empty() ? "" : ", ") + one;
    throw std::runtime_error("there is no application " + name + "; there are " + known);
  }
  // Has an object of ns-3 live as long as the episode, as helpers of LTE have to.
  void keep(ns3::Ptr<ns3::Object> object) { kept_.push_back(object); }
  // A number that no other network of the program has.
  int next_subnet() { return num_subnets_++; }
  // Ends a connection, which is deleted; messages on their way are lost.
  void disconnect(Connection& connection) {
    num_sent_ += connection.num_sent, num_arrived_ += connection.num_arrived;
    num_bytes_ += connection.num_bytes;
    connections_.remove_if([&](const auto& one) { return one.get() == &connection; });
  }
  // Moves an application to another node; its connections are made again. Messages on their way are
  // lost, or forwarded: those that reach its old place get to it.
  void move(App& app, ns3::Ptr<ns3::Node> node, bool forward) {
    app.node = node;
    std::list<std::unique_ptr<Connection>> old;
    for (const auto& one : connections_) {
      const bool is_own = &one->from == &app || &one->to == &app;
      if (!is_own || !one->is_open_ || one->is_draining_ || one->via.kind == Via::DIRECT) continue;
      if (forward) {
        old.push_back(std::make_unique<Connection>(one->from, one->to, one->via, one->port_));
        old.back()->drain(*one);
      }
      one->close(), one->port_ = next_port(), one->open();
    }
    connections_.splice(connections_.end(), old);
  }
  // Ends the episode.
  void end(bool terminated) {
    (terminated ? is_terminated_ : is_truncated_) = true;
    ns3::Simulator::Stop();
    ns3::Simulator::ScheduleNow([] { ns3::Simulator::Stop(); });  // where none runs now
  }
  // An episode is cut if nobody decides for so long.
  ns3::Time silent_limit = ns3::Seconds(10);
  // Shows each decision when it is asked for, and not when one takes effect.
  bool is_eager = false;

  std::map<std::string, double> info() override {
    double sent = num_sent_, arrived = num_arrived_, dropped = 0, age = 0, count = 0;
    double bytes = static_cast<double>(num_bytes_);
    for (const auto& one : connections_)
      sent += one->num_sent, arrived += one->num_arrived, bytes += static_cast<double>(one->num_bytes);
    for (const auto& [name, agent] : by_name_) {
      dropped += agent->num_dropped;
      if (!agent->ages.empty()) age += agent->ages.newest(), ++count;
    }
    return {{"sent", sent}, {"arrived", arrived}, {"bytes", bytes}, {"dropped", dropped},
            {"age_ms", count > 0 ? 1000 * age / count : 0}, {"silent", is_silent_ ? 1.0 : 0.0}};
  }

  std::string report() override {
    std::ostringstream text;
    text.precision(9);
    const auto list = [&](const char* name, const History& history) {
      text << ",\"" << name << "\":[";
      for (size_t i = 0; i < history.size(); ++i) text << (i > 0 ? "," : "") << history.values()[i];
      text << "]}";
    };
    text << "{\"nodes\":{";
    for (const auto& app : apps_)
      text << (app == apps_.front() ? "" : ",") << "\"" << app->name << "\":" << app->node->GetId();
    text << "},\"connections\":[";
    for (const auto& one : connections_) {
      const char* kinds[] = {"direct", "UDP", "TCP"};
      text << (one == connections_.front() ? "" : ",") << "{\"from\":\"" << one->from.name
           << "\",\"to\":\"" << one->to.name << "\",\"via\":\"" << kinds[one->via.kind]
           << "\",\"sent\":" << one->num_sent << ",\"arrived\":" << one->num_arrived
           << ",\"bytes\":" << one->num_bytes;
      list("ages", one->ages);
    }
    text << "],\"agents\":[";
    for (const auto& agent : agents_) {
      text << (agent == agents_.front() ? "" : ",") << "{\"name\":\"" << agent->name
           << "\",\"asked\":" << agent->num_asked << ",\"dropped\":" << agent->num_dropped
           << ",\"waiting\":" << agent->num_waiting();
      list("waits", agent->waits);
    }
    text << "]}";
    return text.str();
  }

  // What the engine asks.
  Spaces spaces() final { return {}; }
  void begin() final {
    specs_ = agents();
    build();
    for (const auto& spec : specs_) {
      const auto found = by_name_.find(spec.name);
      if (found == by_name_.end())
        throw std::runtime_error("build() adds no agent " + spec.name + ", which agents() names");
      agents_.push_back(found->second);
    }
    if (by_name_.size() != specs_.size())
      throw std::runtime_error("build() adds an agent that agents() does not name");
    ns3::Simulator::ScheduleNow([this] {
      for (size_t i = 0; i < apps_.size(); ++i) apps_[i]->start();
    });
    watch(silent_limit);
  }
  // Sockets close, so what they send over must still be there.
  void stop() final { connections_.clear(); }
  bool is_terminated() final { return is_terminated_; }
  bool is_truncated() final { return is_truncated_; }
  bool is_asked(size_t i) final {
    if (is_terminated_ || is_truncated_) return agents_[i]->last_ != nullptr;
    return agents_[i]->shown_ != nullptr || agents_[i]->show();
  }
  Numbers observe_of(size_t i) final {
    const Agent& agent = *agents_[i];
    const AgentSpec& spec = specs_[i];
    Numbers all = agent.last_->observation;
    const size_t width = spec.action_ranges().size();
    const size_t wanted = static_cast<size_t>(spec.own_actions), known = agent.decided_.size();
    for (size_t k = wanted; k > 0; --k) {
      Numbers action(width, 0.0);
      if (k <= known) {
        const Numbers& decided = agent.decided_[known - k];
        if (spec.spaces.action.empty()) {
          action.at(static_cast<size_t>(decided[0])) = 1;
        } else {
          action = decided;
        }
      }
      all.insert(all.end(), action.begin(), action.end());
    }
    if (spec.age) all.push_back(agent.last_->age);
    return all;
  }
  double reward_of(size_t i) final {
    Agent& agent = *agents_[i];
    double reward = std::exchange(agent.last_->reward, 0);
    if (!is_terminated_ && !is_truncated_) return reward;
    for (const auto& ask : agent.served_) reward += std::exchange(ask->reward, 0);
    return reward + std::exchange(agent.earned_, 0);
  }
  void act_of(size_t i, const Numbers& action) final { agents_[i]->answer(action); }
  void publish(double version, double bytes) final {
    if (first_published_ == 0) first_published_ = version;
    published_ = version, model_bytes_ = bytes;
  }
  double version_of(size_t i) final {
    if (!specs_[i].model) return -1;
    const auto& ask = agents_[i]->last_;
    return ask == nullptr ? 0 : ask->version;
  }

  Numbers observe() final { return {}; }
  double reward() final { return 0; }
  void act(const Numbers&) final {}

 private:
  friend class App;
  friend class Agent;
  friend class ModelServer;
  static constexpr uint16_t FIRST_PORT = 10000;

  uint16_t next_port() { return next_port_ = next_port_ == 65535 ? FIRST_PORT : next_port_ + 1; }
  void decide() { decided_at_ = ns3::Simulator::Now(), decide_now(); }
  void watch(ns3::Time time) {
    ns3::Simulator::Schedule(time, [this] {
      const auto left = silent_limit - (ns3::Simulator::Now() - decided_at_);
      if (left.IsStrictlyPositive()) return watch(left);
      is_silent_ = true, end(false);
    });
  }

  std::vector<AgentSpec> specs_;
  std::vector<std::unique_ptr<App>> apps_;
  std::map<std::string, Agent*> by_name_;
  std::vector<Agent*> agents_;
  std::list<std::unique_ptr<Connection>> connections_;
  uint16_t next_port_ = FIRST_PORT;
  uint32_t num_sent_ = 0, num_arrived_ = 0;
  uint64_t num_bytes_ = 0;
  int num_subnets_ = 0;
  double first_published_ = 0, published_ = 0, model_bytes_ = 0;
  std::map<std::string, App*> names_;
  std::vector<ns3::Ptr<ns3::Object>> kept_;
  ns3::Time decided_at_;
  bool is_terminated_ = false, is_truncated_ = false, is_silent_ = false;
};

void App::send(const Numbers& data, uint32_t ballast, const std::string& to) {
  bool is_known = to.empty();
  for (const auto& one : network_->connections_) {
    if (&one->from != this || !(to.empty() || one->to.name == to)) continue;
    is_known = true;
    if (one->is_open_ && !one->is_draining_) one->send(data, ballast);
  }
  if (!is_known) throw std::runtime_error(name + " has no connection to " + to);
}

void ModelServer::start() {
  for (const auto& one : network().connections_) {
    double& sent = sent_[one->to.name];
    const bool is_own = &one->from == this && one->is_open_ && !one->is_draining_;
    if (!is_own || network().published_ <= std::max(sent, network().first_published_)) continue;
    if (one->num_arriving_ > 0 && one->via.kind != Via::UDP) continue;
    sent = network().published_;
    one->send({sent}, static_cast<uint32_t>(network().model_bytes_));
  }
  after(period_, [this] { start(); });
}

void Agent::serve(const Waiting& one) {
  auto ask = std::make_shared<Ask>();
  ask->observation = one.observation;
  ask->reward = std::exchange(earned_, 0);
  const auto now = ns3::Simulator::Now();
  ask->age = (now - one.born).GetSeconds(), ask->version = version;
  ages.push(ask->age), waits.push((now - one.came).GetSeconds());
  auto time = inference.service ? inference.service() : ns3::Time();
  time = ns3::Time(static_cast<int64_t>(static_cast<double>(time.GetTimeStep()) *
                                        (1 + inference.slowdown * static_cast<double>(served_.size()))));
  served_.push_back(ask);
  if (network().is_eager) network().decide();
  ns3::Simulator::Schedule(time, [this, ask] { decide(ask); });
}

void Agent::decide(const std::shared_ptr<Ask>& ask) {
  if (ask->is_answered) return finish(ask);
  ask->is_due = true;
  // It is shown now, also where one that takes longer came before it.
  served_.remove(ask), served_.push_front(ask);
  network().decide();
}

}  // namespace sebulba
