// A real network on this machine in place of the simulated one: UDP over the loopback interface.
#pragma once

#include <arpa/inet.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "links.h"
#include "senders.h"

namespace networks {

constexpr int64_t HEADER_BYTES = 17;  // of the transport; UDP, IP and PPP are not written by us
constexpr int SOCKET_BUFFER = 8 << 20;
constexpr int MOST_AT_ONCE = 64;      // datagrams that are read before the clock is looked at

inline Time to_time(const timespec& time) { return time.tv_sec * SECOND + time.tv_nsec; }

inline Time clock_time(clockid_t clock = CLOCK_MONOTONIC) {
  timespec now;
  clock_gettime(clock, &now);
  return to_time(now);
}

[[noreturn]] inline void fail(const char* what) {
  throw std::runtime_error(std::string(what) + " failed: " + std::strerror(errno));
}

// A datagram starts with the number of the packet that it is, or acknowledges.
struct Datagram {
  int64_t size = 0;
  Time arrival = 0;  // at the socket, by the system's clock of the day
  std::array<char, HEADER_BYTES + PAYLOAD_BYTES> bytes{};

  static Datagram of(int64_t number, int64_t size) {
    Datagram datagram;
    datagram.size = size;
    std::memcpy(datagram.bytes.data(), &number, sizeof number);
    return datagram;
  }
  int64_t number() const {
    int64_t value;
    std::memcpy(&value, bytes.data(), sizeof value);
    return value;
  }
};

// A file descriptor, closed at the end.
class Descriptor {
 public:
  Descriptor(int number, const char* what) : number_(number) {
    if (number < 0) fail(what);
  }
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  int get() const { return number_; }

 private:
  int number_;
};

// A UDP socket of 127.0.0.1 that talks to one other, and does not block.
class Socket {
 public:
  Socket() : descriptor_(socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), "socket") {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(get(), reinterpret_cast<sockaddr*>(&address), sizeof address) < 0) fail("bind");
    for (const int option : {SO_RCVBUF, SO_SNDBUF})  // at most what the system lets have
      setsockopt(get(), SOL_SOCKET, option, &SOCKET_BUFFER, sizeof SOCKET_BUFFER);
    const int yes = 1;
    setsockopt(get(), SOL_SOCKET, SO_TIMESTAMPNS, &yes, sizeof yes);
  }
  int get() const { return descriptor_.get(); }

  static void join(Socket& one, Socket& other) {
    one.connect_to(other);
    other.connect_to(one);
  }
  // What the system has no room for is lost, as it would be on its way.
  void send(const Datagram& datagram) const {
    ::send(get(), datagram.bytes.data(), static_cast<size_t>(datagram.size), 0);
  }
  bool receive(Datagram& datagram) const {
    iovec bytes{datagram.bytes.data(), datagram.bytes.size()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(timespec))];
    msghdr message{};
    message.msg_iov = &bytes, message.msg_iovlen = 1;
    message.msg_control = control, message.msg_controllen = sizeof control;
    datagram.size = recvmsg(get(), &message, 0);
    if (datagram.size < HEADER_BYTES) return false;
    const cmsghdr* stamp = CMSG_FIRSTHDR(&message);
    if (stamp != nullptr && stamp->cmsg_type == SCM_TIMESTAMPNS) {
      timespec arrival;
      std::memcpy(&arrival, CMSG_DATA(stamp), sizeof arrival);
      datagram.arrival = to_time(arrival);
    } else {
      datagram.arrival = clock_time(CLOCK_REALTIME);
    }
    return true;
  }

 private:
  void connect_to(const Socket& other) {
    sockaddr_in address{};
    socklen_t size = sizeof address;
    if (getsockname(other.get(), reinterpret_cast<sockaddr*>(&address), &size) < 0 ||
        connect(get(), reinterpret_cast<sockaddr*>(&address), size) < 0)
      fail("connect");
  }

  Descriptor descriptor_;
};

// Waits until one of the descriptors can be read, or for a time.
template <size_t N>
void wait_for(const std::array<int, N>& descriptors, Time at_most) {
  std::array<pollfd, N> polled;
  for (size_t i = 0; i < N; ++i) polled[i] = {descriptors[i], POLLIN, 0};
  const Time wait = std::clamp<Time>(at_most, 0, SECOND);
  const timespec limit{wait / SECOND, wait % SECOND};
  ppoll(polled.data(), N, &limit, nullptr);
}

// A link between two sockets, and the receiver at its end, in threads of their own.
//
// The link is that of the simulation, by the clock: a packet waits in its FIFO buffer, is
// transmitted and propagates; an acknowledgement comes back after `return_delay`. Both arrive when
// the system has them, however late this thread looks, and go on when it gets to them.
class EmulatedLink {
 public:
  EmulatedLink(const Link& link, Time transmission, Time return_delay)
      : link_(link),
        transmission_(transmission),
        return_delay_(return_delay),
        stop_(eventfd(0, EFD_CLOEXEC), "eventfd") {
    Socket::join(sender, near_);
    Socket::join(far_, receiver_);
    threads_[0] = std::thread([this] { carry(); });
    threads_[1] = std::thread([this] { acknowledge(); });
  }
  ~EmulatedLink() {
    const uint64_t one = 1;
    if (write(stop_.get(), &one, sizeof one) < 0) std::terminate();
    for (auto& thread : threads_) thread.join();
  }

  Socket sender;  // the near end, for the sender of the flow
  std::atomic<int64_t> num_waiting{0}, num_drops{0}, num_received{0};

 private:
  struct Due {
    Time time;
    Datagram datagram;
  };

  bool is_stopped() const {
    pollfd polled{stop_.get(), POLLIN, 0};
    return poll(&polled, 1, 0) > 0;
  }

  void carry() {
    prctl(PR_SET_TIMERSLACK, 1UL);
    while (!is_stopped()) {
      Datagram datagram;
      for (int i = 0; i < MOST_AT_ONCE && near_.receive(datagram); ++i) take_packet(datagram);
      for (int i = 0; i < MOST_AT_ONCE && far_.receive(datagram); ++i)
        acknowledgements_.push_back({datagram.arrival + to_monotonic_ + return_delay_, datagram});
      const Time next = std::min(deliver(packets_, far_), deliver(acknowledgements_, near_));
      num_waiting = link_.queue_length(clock_time());
      const Time now = clock_time();
      if (next > now) wait_for<3>({near_.get(), far_.get(), stop_.get()}, next - now);
    }
  }
  void take_packet(const Datagram& datagram) {
    ++num_received;
    const Time end = link_.transmit(datagram.arrival + to_monotonic_, transmission_);
    num_drops = link_.num_drops;
    if (end != NEVER && !link_.is_lost()) packets_.push_back({end + link_.delay, datagram});
  }
  // Sends on what is due; returns when the next is.
  static Time deliver(Ring<Due>& pipe, const Socket& to) {
    for (; !pipe.empty() && pipe.front().time <= clock_time(); pipe.pop_front())
      to.send(pipe.front().datagram);
    return pipe.empty() ? NEVER : pipe.front().time;
  }

  void acknowledge() {
    Datagram datagram;
    while (!is_stopped()) {
      wait_for<2>({receiver_.get(), stop_.get()}, SECOND);
      while (receiver_.receive(datagram))
        receiver_.send(Datagram::of(datagram.number(), HEADER_BYTES));
    }
  }

  Link link_;
  Time transmission_, return_delay_;
  Time to_monotonic_ = clock_time() - clock_time(CLOCK_REALTIME);
  Socket near_, far_, receiver_;
  Ring<Due> packets_, acknowledgements_;
  Descriptor stop_;
  std::array<std::thread, 2> threads_;
};

// One flow over one link, in real time. While nobody runs it, what arrives waits in the socket.
class Loopback : public Senders<Loopback> {
 public:
  std::vector<Link> links;

  Time now() const { return now_; }

  void begin() {
    const Flow& flow = flows.at(0);
    link_ = std::make_unique<EmulatedLink>(links.at(0), flow.transmission[0], flow.return_delay);
    epoch_ = clock_time(), now_ = 0;
    step_ = timer_ = NEVER;
    flows[0].begin();
    action_ = flows[0].start;
    prctl(PR_SET_TIMERSLACK, 1UL);
  }

  void schedule_step(size_t, Time time) { step_ = time; }
  Time timer(size_t) const { return timer_; }
  void set_timer(size_t, Time time) { timer_ = time; }
  void transmit(size_t, int64_t number) {
    link_->sender.send(Datagram::of(number, HEADER_BYTES + PAYLOAD_BYTES));
  }

  // Runs until the step ends; returns whose.
  size_t run() {
    for (;;) {
      now_ = clock_time() - epoch_;
      if (step_ <= now_) {
        step_ = NEVER;
        return 0;
      }
      if (action_ <= now_) action_ = act(0);
      if (timer_ <= now_) {
        timer_ = NEVER;
        expire(0);
      }
      const Time next = std::min({step_, action_, timer_});
      wait_for<1>({link_->sender.get()}, next - now_);
      take_acknowledgements();
    }
  }
  bool is_step_due() const { return step_ <= now_; }

  int64_t queue_length(size_t) { return link_->num_waiting; }
  int64_t num_drops(size_t) const { return link_->num_drops; }

  template <class Archive>
  void exchange(Archive&) {
    throw std::runtime_error("a real network has no state that could be kept");
  }

 private:
  void take_acknowledgements() {
    Datagram datagram;
    for (int i = 0; i < MOST_AT_ONCE && link_->sender.receive(datagram); ++i) {
      now_ = clock_time() - epoch_;
      acknowledge(0, datagram.number());
    }
  }

  std::unique_ptr<EmulatedLink> link_;
  Time epoch_ = 0, now_ = 0, step_ = NEVER, action_ = NEVER, timer_ = NEVER;
};

}  // namespace networks
