// The native engine.

#include "abi.h"
#include "cart_pole.h"
#include "loopback.h"
#include "simulation.h"

namespace networks {

AnyPool* make_pool(const Json& json, int num_envs, const int64_t* seeds, int threads) {
  if (json["kind"].text == "cart_pole")
    return new Pool<CartPole>(json, num_envs, seeds, threads);
  if (json["kind"].text == "loopback")
    return new Pool<CongestionControl<Loopback>>(json, num_envs, seeds, threads);
  return new Pool<CongestionControl<Simulation>>(json, num_envs, seeds, threads);
}

}  // namespace networks
