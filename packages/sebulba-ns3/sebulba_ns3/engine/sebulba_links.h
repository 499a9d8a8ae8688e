// SPDX-License-Identifier: GPL-2.0-or-later
// Links of the usual kinds between the nodes of a `sebulba::Network`, in one call each.
#pragma once

#include "sebulba_network.h"

#include "ns3/csma-module.h"
#include "ns3/lte-module.h"
#include "ns3/mobility-module.h"
#include "ns3/point-to-point-module.h"
#include "ns3/wifi-module.h"

namespace sebulba {

struct Link {
  // "point-to-point" between two nodes, "csma" (a shared cable), "wifi" (ad hoc, 802.11g), or "lte":
  // its first node is a server behind the core network, and the others are phones around one mast.
  std::string kind = "point-to-point";
  double mbps = 10, delay_ms = 5;  // of the cable; of LTE, between the core and the server
  double apart_m = 10;             // nodes without a place stand in a row, so far from each other
};

namespace links {

inline void place(const ns3::NodeContainer& nodes, double apart_m) {
  ns3::MobilityHelper places;
  places.SetPositionAllocator("ns3::GridPositionAllocator", "DeltaX", ns3::DoubleValue(apart_m),
                              "GridWidth", ns3::UintegerValue(1000));
  ns3::NodeContainer without;
  for (uint32_t i = 0; i < nodes.GetN(); ++i)
    if (nodes.Get(i)->GetObject<ns3::MobilityModel>() == nullptr) without.Add(nodes.Get(i));
  places.Install(without);
}

inline ns3::NetDeviceContainer wired(const ns3::NodeContainer& nodes, const Link& link) {
  const ns3::DataRateValue rate(static_cast<uint64_t>(std::llround(1e6 * link.mbps)));
  const ns3::TimeValue delay(ns3::MicroSeconds(std::llround(1e3 * link.delay_ms)));
  if (link.kind == "csma") {
    ns3::CsmaHelper cable;
    cable.SetChannelAttribute("DataRate", rate), cable.SetChannelAttribute("Delay", delay);
    return cable.Install(nodes);
  }
  if (nodes.GetN() != 2)
    throw std::runtime_error("a point-to-point link is between 2 nodes; use csma");
  ns3::PointToPointHelper cable;
  cable.SetDeviceAttribute("DataRate", rate), cable.SetChannelAttribute("Delay", delay);
  return cable.Install(nodes);
}

inline ns3::NetDeviceContainer wifi(const ns3::NodeContainer& nodes, const Link& link) {
  place(nodes, link.apart_m);
  ns3::WifiHelper radio;
  radio.SetStandard(ns3::WIFI_STANDARD_80211g);
  radio.SetRemoteStationManager("ns3::ConstantRateWifiManager", "DataMode",
                                ns3::StringValue("ErpOfdmRate24Mbps"));
  ns3::WifiMacHelper mac;
  mac.SetType("ns3::AdhocWifiMac");
  ns3::YansWifiPhyHelper phy;
  phy.SetChannel(ns3::YansWifiChannelHelper::Default().Create());
  return radio.Install(phy, mac, nodes);
}

inline ns3::NetDeviceContainer lte(Network& network, const ns3::NodeContainer& nodes, const Link& link) {
  const auto lte = ns3::CreateObject<ns3::LteHelper>();
  const auto core = ns3::CreateObject<ns3::PointToPointEpcHelper>();
  network.keep(lte), network.keep(core);
  lte->SetEpcHelper(core);
  ns3::NodeContainer mast(1), phones;
  for (uint32_t i = 1; i < nodes.GetN(); ++i) phones.Add(nodes.Get(i));
  place(ns3::NodeContainer(mast, phones), link.apart_m);
  const auto cable = wired({core->GetPgwNode(), nodes.Get(0)}, {.mbps = link.mbps, .delay_ms = link.delay_ms});
  ns3::Ipv4AddressHelper("1.0.0.0", "255.0.0.0").Assign(cable);
  ns3::Ipv4StaticRoutingHelper routes;
  const auto server = nodes.Get(0)->GetObject<ns3::Ipv4>();
  routes.GetStaticRouting(server)->AddNetworkRouteTo(
      "7.0.0.0", "255.0.0.0", static_cast<uint32_t>(server->GetInterfaceForDevice(cable.Get(1))));
  const auto station = lte->InstallEnbDevice(mast), radios = lte->InstallUeDevice(phones);
  core->AssignUeIpv4Address(radios);
  lte->Attach(radios, station.Get(0));
  for (uint32_t i = 0; i < phones.GetN(); ++i) {
    const auto phone = phones.Get(i)->GetObject<ns3::Ipv4>();
    const int32_t radio = phone->GetInterfaceForDevice(radios.Get(i));
    routes.GetStaticRouting(phone)->SetDefaultRoute(core->GetUeDefaultGatewayAddress(),
                                                    static_cast<uint32_t>(radio));
  }
  return radios;
}

}  // namespace links

// Links nodes, with ns-3's internet and addresses on them; returns the devices. On a node that had
// no link it is interface 1. Phones of LTE can send once they are attached, after some 0.3 s.
inline ns3::NetDeviceContainer link_nodes(Network& network, const ns3::NodeContainer& nodes,
                                          const Link& link = {}) {
  if (!(link.mbps > 0 && link.delay_ms >= 0))
    throw std::runtime_error("a link needs a rate above 0 and a delay of at least 0");
  for (uint32_t i = 0; i < nodes.GetN(); ++i)
    if (nodes.Get(i)->GetObject<ns3::Ipv4>() == nullptr)
      ns3::InternetStackHelper().Install(nodes.Get(i));
  if (link.kind == "lte") return links::lte(network, nodes, link);
  const bool is_cable = link.kind == "csma" || link.kind == "point-to-point";
  if (!is_cable && link.kind != "wifi")
    throw std::runtime_error("the link " + link.kind + " is none; use point-to-point, csma, wifi or lte");
  const auto devices = is_cable ? links::wired(nodes, link) : links::wifi(nodes, link);
  const auto subnet = "10.0." + std::to_string(network.next_subnet()) + ".0";
  ns3::Ipv4AddressHelper(subnet.c_str(), "255.255.255.0").Assign(devices);
  return devices;
}

}  // namespace sebulba
