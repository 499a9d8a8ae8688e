// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-or-later
// Containers, random numbers, and states as bytes: what the simulation is built of.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>
#include <vector>

namespace networks {

using Time = int64_t;  // nanoseconds
constexpr Time NEVER = INT64_MAX;
constexpr Time SECOND = 1'000'000'000;

// Random numbers of a counter: number i of a stream is a hash of (key, i) (SplitMix64, Steele et
// al. 2014), so that a stream is put back by two integers and streams do not disturb each other.
struct Random {
  uint64_t key = 0;
  uint64_t counter = 0;

  static uint64_t mixed(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }
  static Random stream(uint64_t seed, uint64_t episode, uint64_t number) {
    return {mixed(mixed(mixed(seed) ^ episode) ^ number), 0};
  }
  // A double in [0, 1).
  double uniform() { return (mixed(key ^ mixed(counter++)) >> 11) * 0x1p-53; }
};

// A queue in a circular buffer that grows.
template <class T>
class Ring {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  bool empty() const { return count_ == 0; }
  size_t size() const { return count_; }
  const T& front() const { return items_[head_]; }
  const T& back() const { return items_[(head_ + count_ - 1) & mask_]; }
  void pop_front() { head_ = (head_ + 1) & mask_, --count_; }
  void pop_back() { --count_; }
  void push_back(const T& item) {
    if (count_ == items_.size()) grow();
    items_[(head_ + count_++) & mask_] = item;
  }
  const T& operator[](size_t i) const { return items_[(head_ + i) & mask_]; }
  T& operator[](size_t i) { return items_[(head_ + i) & mask_]; }
  void clear() { head_ = count_ = 0; }

 private:
  void grow() {
    std::vector<T> larger(items_.empty() ? 16 : 2 * items_.size());
    for (size_t i = 0; i < count_; ++i) larger[i] = (*this)[i];
    items_.swap(larger);
    head_ = 0, mask_ = items_.size() - 1;
  }

  std::vector<T> items_;
  size_t head_ = 0, count_ = 0, mask_ = 0;
};

// Writes values one after the other; nothing is written where `to` is null, only counted.
class Writer {
 public:
  explicit Writer(char* to) : to_(to) {}
  size_t size() const { return size_; }

  template <class T>
  void operator()(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    if (to_ != nullptr) std::memcpy(to_ + size_, &value, sizeof(T));
    size_ += sizeof(T);
  }
  template <class T>
  void operator()(const Ring<T>& ring) {
    (*this)(static_cast<uint64_t>(ring.size()));
    for (size_t i = 0; i < ring.size(); ++i) (*this)(ring[i]);
  }

 private:
  char* to_;
  size_t size_ = 0;
};

// Reads what a Writer wrote.
class Reader {
 public:
  Reader(const char* from, size_t size) : from_(from), left_(size) {}
  bool at_end() const { return left_ == 0; }

  template <class T>
  void operator()(T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    if (left_ < sizeof(T)) throw std::runtime_error("the state is too short");
    std::memcpy(&value, from_, sizeof(T));
    from_ += sizeof(T), left_ -= sizeof(T);
  }
  template <class T>
  void operator()(Ring<T>& ring) {
    uint64_t count;
    (*this)(count);
    if (count > left_ / sizeof(T)) throw std::runtime_error("the state is too short");
    ring.clear();
    for (uint64_t i = 0; i < count; ++i) {
      T item;
      (*this)(item);
      ring.push_back(item);
    }
  }

 private:
  const char* from_;
  size_t left_;
};

}  // namespace networks
