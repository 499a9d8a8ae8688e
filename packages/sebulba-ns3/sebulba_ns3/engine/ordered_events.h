// SPDX-License-Identifier: GPL-2.0-or-later
// An event queue of ns-3 in which events at one time have the order that Sebulba's networks say.
//
// ns-3 alone takes events at one time as they were scheduled, which depends on what is between them.
#pragma once

#include <map>
#include <tuple>
#include <utility>

#include "ns3/core-module.h"

namespace networks {

enum class Order : int { step, action, ns3, timer };

// An event of a sender.
class OwnEvent : public ns3::EventImpl {
 public:
  OwnEvent(Order order, size_t flow) : order_(order), flow_(flow) {}
  std::pair<Order, size_t> order() const { return {order_, flow_}; }

 private:
  Order order_;
  size_t flow_;
};

// It calls `body`.
template <class Body>
class SenderEvent : public OwnEvent {
 public:
  SenderEvent(Order order, size_t flow, Body body) : OwnEvent(order, flow), body_(std::move(body)) {}

 private:
  void Notify() override { body_(); }

  Body body_;
};

class OrderedEvents : public ns3::Scheduler {
 public:
  static ns3::TypeId GetTypeId() {
    static const ns3::TypeId id = ns3::TypeId("sebulba::OrderedEvents")
                                      .SetParent<ns3::Scheduler>()
                                      .AddConstructor<OrderedEvents>();
    return id;
  }
  // Has the simulator use it.
  static void install() {
    ns3::ObjectFactory factory;
    factory.SetTypeId(GetTypeId());
    ns3::Simulator::SetScheduler(factory);
  }

  void Insert(const Event& event) override { events_.emplace(key(event), event); }
  bool IsEmpty() const override { return events_.empty(); }
  Event PeekNext() const override { return events_.begin()->second; }
  Event RemoveNext() override { return events_.extract(events_.begin()).mapped(); }
  void Remove(const Event& event) override { events_.erase(key(event)); }

 private:
  using Key = std::tuple<uint64_t, Order, size_t, uint32_t>;  // time, order, flow, number

  static Key key(const Event& event) {
    const auto* own = dynamic_cast<const OwnEvent*>(event.impl);
    const auto [order, flow] = own != nullptr ? own->order() : std::pair{Order::ns3, size_t{0}};
    return {event.key.m_ts, order, flow, event.key.m_uid};
  }

  std::map<Key, Event> events_;
};

}  // namespace networks
