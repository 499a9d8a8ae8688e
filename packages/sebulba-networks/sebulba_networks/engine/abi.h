// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-or-later
// The C ABI: a vector of environments, stepped by several threads. An engine defines `make_pool`.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "congestion_control.h"

namespace networks {

constexpr int LEAST_ROWS = 8;  // of a thread: a slow episode does not hold the others up

constexpr std::chrono::microseconds AWAKE{100};  // about the longest row of a step

// Threads that share the rows of a vector; each takes the next row when it has done one.
class Workers {
 public:
  explicit Workers(int num_threads) {
    for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this] { work(); });
  }
  ~Workers() {
    {
      std::lock_guard lock(mutex_);
      is_closed_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  // Calls `row(i)` for i from 0 to num_rows - 1, and returns when all are done.
  void run(int num_rows, const std::function<void(int)>& row) {
    if (threads_.empty()) {
      for (int i = 0; i < num_rows; ++i) row(i);
      return;
    }
    Round round;
    {
      std::lock_guard lock(mutex_);
      round = round_ = {&row, num_rows, round_.number + 1};
      num_undone_ = num_rows;
      next_ = static_cast<uint64_t>(round.number) << 32;
    }
    wake_.notify_all();
    take_rows(round);
    wait_for_others();
  }

 private:
  struct Round {
    const std::function<void(int)>* row = nullptr;
    int num_rows = 0;
    uint32_t number = 0;
  };

  // A thread that comes late, when the rows of its round are all taken, takes none: `next_` has
  // the number of the round in its upper half.
  void take_rows(const Round& round) {
    uint64_t next = next_;
    while (next >> 32 == round.number && static_cast<int>(next) < round.num_rows) {
      if (!next_.compare_exchange_weak(next, next + 1)) continue;
      (*round.row)(static_cast<int>(next));
      if (--num_undone_ == 0) {
        std::lock_guard lock(mutex_);
        done_.notify_one();
      }
      next = next_;
    }
  }
  // Others are in the middle of a row each, so it does not sleep at once: to be woken takes longer.
  void wait_for_others() {
    const auto until = std::chrono::steady_clock::now() + AWAKE;
    while (num_undone_ != 0 && std::chrono::steady_clock::now() < until) std::this_thread::yield();
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return num_undone_ == 0; });
  }
  void work() {
    uint32_t last = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return is_closed_ || round_.number != last; });
      if (is_closed_) return;
      const Round round = round_;
      last = round.number;
      lock.unlock();
      take_rows(round);
      lock.lock();
    }
  }

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Round round_;
  std::atomic<uint64_t> next_{0};
  std::atomic<int> num_undone_{0};
  bool is_closed_ = false;
};

// A vector of environments of any kind.
class AnyPool {
 public:
  virtual ~AnyPool() = default;
  virtual void reset(char* buffer, Info* info) = 0;
  virtual void step(const float* actions, char* buffer, Info* info) = 0;
  virtual int64_t save(char* to) = 0;
  virtual void put_back(const char* from, int64_t size) = 0;
  // Has the next reset begin episode number `episode` in all environments.
  virtual void seek(int64_t episode) = 0;
  virtual const std::vector<Trace>& trace(int row) const = 0;
};

template <class Env>
class Pool : public AnyPool {
 public:
  Pool(const Json& json, int num_envs, const int64_t* seeds, int threads)
      : config_(json),
        workers_(std::max(1, std::min(threads, num_envs / LEAST_ROWS))) {
    for (int i = 0; i < num_envs; ++i)
      envs_.emplace_back(config_, static_cast<uint64_t>(seeds[i]));
  }

  void reset(char* buffer, Info* info) override {
    run(buffer, info, [](Env& env, int, const Output& o) { env.reset(o); });
  }
  void step(const float* actions, char* buffer, Info* info) override {
    const int64_t num_numbers = config_.num_agents * config_.num_actions();
    run(buffer, info, [=](Env& env, int i, const Output& o) {
      env.step(actions + i * num_numbers, o);
    });
  }
  int64_t save(char* to) override {
    Writer writer(to);
    for (auto& env : envs_) env.save(writer);
    return static_cast<int64_t>(writer.size());
  }
  void put_back(const char* from, int64_t size) override {
    Reader reader(from, static_cast<size_t>(size));
    for (auto& env : envs_) env.put_back(reader);
    if (!reader.at_end()) throw std::runtime_error("the state is too long");
  }
  void seek(int64_t episode) override {
    for (auto& env : envs_) env.seek(episode);
  }
  const std::vector<Trace>& trace(int row) const override { return envs_.at(row).trace(); }

 protected:
  std::vector<Env>& envs() { return envs_; }

 private:
  // `buffer` holds observations [B, A, F] and rewards [B, A] of floats, then terminated, truncated,
  // is_first and acting [B, A] and the ends of episodes [B] of bytes.
  template <class Act>
  void run(char* buffer, Info* info, const Act& act) {
    const size_t num_agents = config_.num_agents, num_features = config_.num_features();
    const size_t num_slots = envs_.size() * num_agents;
    float* observations = reinterpret_cast<float*>(buffer);
    float* rewards = observations + num_slots * num_features;
    uint8_t* flags = reinterpret_cast<uint8_t*>(rewards + num_slots);
    workers_.run(static_cast<int>(envs_.size()), [&](int i) {
      const size_t at = i * num_agents;
      uint8_t* own = flags + at;
      act(envs_[i], i,
          Output{observations + at * num_features, rewards + at, own, own + num_slots,
                 own + 2 * num_slots, own + 3 * num_slots, flags + 4 * num_slots + i,
                 info == nullptr ? nullptr : info + at});
    });
  }

  typename Env::Config config_;
  std::vector<Env> envs_;
  Workers workers_;
};

inline thread_local std::string last_error;

// Calls `body`; an exception becomes -1 and a message.
template <class Body>
int64_t guarded(const Body& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    last_error = error.what();
  }
  return -1;
}

// Makes the environments of an engine.
AnyPool* make_pool(const Json& json, int num_envs, const int64_t* seeds, int threads);

}  // namespace networks

using networks::guarded;
using networks::Info;
using networks::AnyPool;

#pragma GCC visibility push(default)
extern "C" {

const char* net_error() { return networks::last_error.c_str(); }

int64_t net_info_size() { return sizeof(Info) / sizeof(double); }

void* net_create(const char* json, int num_envs, const int64_t* seeds, int threads) {
  AnyPool* pool = nullptr;
  guarded([&] {
    return pool = networks::make_pool(networks::Json::parse(json), num_envs, seeds, threads), 0;
  });
  return pool;
}

int64_t net_reset(void* pool, char* buffer, Info* info) {
  return guarded([&] { return static_cast<AnyPool*>(pool)->reset(buffer, info), 0; });
}

int64_t net_step(void* pool, const float* actions, char* buffer, Info* info) {
  return guarded([&] { return static_cast<AnyPool*>(pool)->step(actions, buffer, info), 0; });
}

// Returns the size of the state, which is written where `to` is not null.
int64_t net_state(void* pool, char* to) {
  return guarded([&] { return static_cast<AnyPool*>(pool)->save(to); });
}

int64_t net_put_back(void* pool, const char* from, int64_t size) {
  return guarded([&] { return static_cast<AnyPool*>(pool)->put_back(from, size), 0; });
}

int64_t net_seek(void* pool, int64_t episode) {
  return guarded([&] { return static_cast<AnyPool*>(pool)->seek(episode), 0; });
}

// Returns how many events of a row were traced since its last reset, at most `capacity` of which
// are copied.
int64_t net_trace(void* pool, int row, networks::Trace* to, int64_t capacity) {
  return guarded([&] {
    const auto& trace = static_cast<AnyPool*>(pool)->trace(row);
    const auto size = static_cast<int64_t>(trace.size());
    std::copy_n(trace.begin(), std::min(size, capacity), to);
    return size;
  });
}

void net_close(void* pool) { delete static_cast<AnyPool*>(pool); }
}
#pragma GCC visibility pop
