// SPDX-License-Identifier: GPL-2.0-or-later
// The engine on ns-3.

#include "abi.h"
#include "ns3_network.h"

namespace networks {

// ns-3 keeps its simulator in global variables.
class OnlySimulator {
 public:
  OnlySimulator() {
    if (std::exchange(is_alive_, true))
      throw std::runtime_error("a process holds one simulator of ns-3; close the other first");
  }
  ~OnlySimulator() { is_alive_ = false; }

 private:
  static inline bool is_alive_ = false;
};

class Ns3Pool final : OnlySimulator, public Pool<CongestionControl<Ns3Network>> {
 public:
  using Pool::Pool;
};

AnyPool* make_pool(const Json& json, int num_envs, const int64_t* seeds, int) {
  if (num_envs != 1) throw std::runtime_error("a process holds one simulator of ns-3, not more");
  return new Ns3Pool(json, num_envs, seeds, 1);
}

}  // namespace networks
