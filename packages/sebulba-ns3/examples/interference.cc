// SPDX-License-Identifier: GPL-2.0-or-later
// A radio chooses one of four channels for each slot of 100 ms; a jammer is in one of them, and goes
// through all in turn. The case of ns3-gym's interference pattern: 1 for a slot without the jammer, -1
// for one with it, and three of those within ten slots end the episode. At most: 1 a slot.
//
//   sebulba train ppo --env.id ns3:program --env.max-episode-steps 100 \
//     --env.options.source packages/sebulba-ns3/examples/interference.cc

#include <deque>

#include "sebulba_scenario.h"

#include "ns3/mobility-module.h"
#include "ns3/network-module.h"
#include "ns3/spectrum-module.h"

using namespace ns3;

class Interference : public sebulba::Scenario {
 public:
  sebulba::Spaces spaces() override {
    return {.observation = std::vector<sebulba::Range>(NUM_CHANNELS, {0, 1}),
            .num_choices = NUM_CHANNELS};
  }

  void begin() override {
    Bands bands;
    for (int i = 0; i < NUM_CHANNELS; ++i) {
      const double low = 5.17e9 + 20e6 * i;
      bands.push_back({low, low + 10e6, low + 20e6});
    }
    model_ = Create<SpectrumModel>(bands);
    NodeContainer nodes(2);
    MobilityHelper().Install(nodes);
    const auto air = SpectrumChannelHelper::Default().Create();

    WaveformGeneratorHelper jammer;
    jammer.SetChannel(air);
    jammer.SetTxPowerSpectralDensity(power_in(0));
    jammer.SetPhyAttribute("Period", TimeValue(SLOT));
    jammer.SetPhyAttribute("DutyCycle", DoubleValue(1));
    const auto device = DynamicCast<NonCommunicatingNetDevice>(jammer.Install(nodes.Get(0)).Get(0));
    jammer_ = DynamicCast<WaveformGenerator>(device->GetPhy());
    jammer_->Start();
    Simulator::Schedule(SLOT / 2, &Interference::hop, this);

    SpectrumAnalyzerHelper analyzer;
    analyzer.SetChannel(air);
    analyzer.SetRxSpectrumModel(model_);
    analyzer.SetPhyAttribute("Resolution", TimeValue(SLOT / 10));
    const auto seen = DynamicCast<NonCommunicatingNetDevice>(analyzer.Install(nodes.Get(1)).Get(0));
    const auto analyst = DynamicCast<SpectrumAnalyzer>(seen->GetPhy());
    analyst->TraceConnectWithoutContext("AveragePowerSpectralDensityReport",
                                        MakeCallback(&Interference::report, this));
    analyst->Start();
    decide_in(SLOT - SLOT / 20);
  }
  void act(const std::vector<double>& action) override {
    Simulator::Schedule(SLOT, [this, own = static_cast<size_t>(action[0])] {
      met_.push_back(is_jammed_[own] > 0);
      if (met_.size() > 10) met_.pop_front();
      decide_now();
    });
  }
  std::vector<double> observe() override { return is_jammed_; }
  double reward() override { return met_.empty() ? 0 : met_.back() ? -1 : 1; }
  bool is_terminated() override { return std::count(met_.begin(), met_.end(), true) >= 3; }

 private:
  static constexpr int NUM_CHANNELS = 4;
  const Time SLOT = MilliSeconds(100);

  Ptr<SpectrumValue> power_in(int channel) const {
    const auto power = Create<SpectrumValue>(model_);
    (*power)[channel] = 0.1 / 20e6;  // 100 mW
    return power;
  }
  void hop() {
    channel_ = (channel_ + 1) % NUM_CHANNELS;
    jammer_->SetTxPowerSpectralDensity(power_in(channel_));  // from its next slot on
    Simulator::Schedule(SLOT, &Interference::hop, this);
  }
  void report(Ptr<const SpectrumValue> power) {
    for (int i = 0; i < NUM_CHANNELS; ++i) is_jammed_[i] = (*power)[i] > LEAST ? 1 : 0;
  }

  static constexpr double LEAST = 1e-15;  // W/Hz
  Ptr<SpectrumModel> model_;
  Ptr<WaveformGenerator> jammer_;
  std::vector<double> is_jammed_ = std::vector<double>(NUM_CHANNELS);
  std::deque<bool> met_;
  int channel_ = 0;
};

SEBULBA_SCENARIO(Interference);
