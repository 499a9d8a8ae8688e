// SPDX-License-Identifier: GPL-2.0-or-later
// The engine on ns-3.

#include "abi.h"
#include "ns3_network.h"
#include "only_simulator.h"

namespace networks {

class Ns3Pool final : OnlySimulator, public Pool<CongestionControl<Ns3Network>> {
 public:
  using Pool::Pool;
};

AnyPool* make_pool(const Json& json, int num_envs, const int64_t* seeds, int) {
  OnlySimulator::check_rows(num_envs);
  return new Ns3Pool(json, num_envs, seeds, 1);
}

}  // namespace networks
