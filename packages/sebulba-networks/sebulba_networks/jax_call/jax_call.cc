// A step of a vector of environments as a call of XLA, within a compiled program.
//
// This is a library of its own, because it depends on the headers of jaxlib, and the engine on
// nothing. It reaches the engine by the functions of the C ABI (`engine/abi.h`) that it is given.
#include <cstdint>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using Flags = ffi::Buffer<ffi::PRED>;
using Handle = ffi::Buffer<ffi::U32>;

// A vector of environments that compiled programs may step.
struct Opened {
  void* pool;
  int64_t (*step)(void* pool, const float* actions, char* buffer, void* info);
  const char* (*error)();
  int64_t num_actions, num_bytes;  // what `step` reads and writes
};

// By the numbers that programs know them by: a number that was closed is not used again, so a program
// that outlives its environments gets an error.
std::unordered_map<uint64_t, Opened> opened;
uint64_t latest = 0;
std::shared_mutex mutex;  // shared by steps, so that nothing is closed during one

// Copies the rows that the engine wrote one after the other into the arrays of the program.
template <class... Arrays>
void copy_rows(const char* from, Arrays&... arrays) {
  const auto copy = [&](auto& array) {
    std::memcpy(array->untyped_data(), from, array->size_bytes());
    from += array->size_bytes();
  };
  (copy(arrays), ...);
}

// Steps; `next` is `handle`, and has the calls of a program form a chain.
ffi::Error step(Handle handle, Floats actions, ffi::Result<Handle> next, ffi::Result<Floats> obs,
                ffi::Result<Floats> reward, ffi::Result<Flags> terminated,
                ffi::Result<Flags> truncated, ffi::Result<Flags> is_first,
                ffi::Result<Flags> acting, ffi::Result<Flags> episode_end) {
  uint64_t number = 0;
  if (handle.size_bytes() != sizeof(number) || next->size_bytes() != sizeof(number))
    return ffi::Error::InvalidArgument("a handle must be two numbers");
  std::memcpy(&number, handle.untyped_data(), sizeof(number));
  std::memcpy(next->untyped_data(), &number, sizeof(number));
  std::shared_lock lock(mutex);
  const auto found = opened.find(number);
  if (found == opened.end())
    return ffi::Error::InvalidArgument("this network is closed; make a new one");
  const Opened& of = found->second;
  const size_t num_bytes = obs->size_bytes() + reward->size_bytes() + terminated->size_bytes() +
                           truncated->size_bytes() + is_first->size_bytes() +
                           acting->size_bytes() + episode_end->size_bytes();
  if (static_cast<int64_t>(actions.element_count()) != of.num_actions ||
      static_cast<int64_t>(num_bytes) != of.num_bytes)
    return ffi::Error::InvalidArgument("this network has another number of environments");
  thread_local std::vector<char> buffer;
  buffer.resize(num_bytes);
  if (of.step(of.pool, actions.typed_data(), buffer.data(), nullptr) < 0)
    return ffi::Error::Internal(std::string("the network engine: ") + of.error());
  copy_rows(buffer.data(), obs, reward, terminated, truncated, is_first, acting, episode_end);
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(net_jax_step, step,
                              ffi::Ffi::Bind()
                                  .Arg<Handle>()
                                  .Arg<Floats>()
                                  .Ret<Handle>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Flags>()
                                  .Ret<Flags>()
                                  .Ret<Flags>()
                                  .Ret<Flags>()
                                  .Ret<Flags>());

extern "C" {

// Lets programs step `pool`, and returns its number.
uint64_t net_jax_open(void* pool, decltype(Opened::step) step, decltype(Opened::error) error,
                      int64_t num_actions, int64_t num_bytes) {
  std::unique_lock lock(mutex);
  opened[++latest] = {pool, step, error, num_actions, num_bytes};
  return latest;
}

// Waits for a step in progress; later ones of this number are errors.
void net_jax_close(uint64_t number) {
  std::unique_lock lock(mutex);
  opened.erase(number);
}
}
#pragma GCC visibility pop
