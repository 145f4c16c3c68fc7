// A simulated engine's truth: the scheduler under a noisy clock of its own, event by event.
//
// The lab plays fleets of these. Every step's duration is its step time times a lognormal factor, plus a host gap, and
// now and then a stall, drawn per step from the engine's own seed. What a router may see of it is a mirror: the residents
// with the lengths it expects (never the true ones), and the batch in flight completed as it would complete it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "engine.hpp"

namespace headway {

struct TruthClock {
  StepTime step_time;
  double log_sigma = 0;         // of the factor's logarithm; its median is 1
  double stall_probability = 0;  // per step
  double stall_mean_s = 0;       // exponential
  double gap_low_s = 0;          // uniform, per step
  double gap_high_s = 0;
};

struct TruthEvent {
  enum Kind : int { kFirstToken = 0, kFinished = 1 };
  double time_s;
  int32_t slot;
  Kind kind;
};

// A request whose end lies in the batch in flight: a router does not know that yet.
struct EndingRequest {
  int32_t slot;  // free by now
  RequestInput input;
  double predicted_output;
};

class TruthEngine {
 public:
  TruthEngine(const Limits& limits, const TruthClock& clock, uint64_t seed)
      : scheduler_(limits), clock_(clock), random_(seed) {}

  // Queues a request that arrives now. `predicted_output` is what a router expects of it. Call run_until(now) before.
  int32_t submit(const RequestInput& input, double predicted_output, double now);
  // Starts every batch that begins before `now`; appends the events of the batches started, also those still to come.
  void run_until(double now, std::vector<TruthEvent>& events);
  const Scheduler& scheduler() const { return scheduler_; }
  double predicted_output(int32_t slot) const { return predicted_[static_cast<size_t>(slot)]; }
  const std::vector<EndingRequest>& ending() const { return ending_; }
  // The batch in flight: when it began, what it holds. An idle engine's began when it became idle.
  double batch_start_s() const { return batch_start_s_; }
  const Features& batch() const { return batch_; }
  double batch_end_s() const { return batch_end_s_; }
  int64_t num_steps() const { return num_steps_; }

 private:
  double draw_duration(double step_s);
  void run_decodes_until(int64_t run, double now);
  void note_step(double duration_s, std::vector<TruthEvent>& events);

  Scheduler scheduler_;
  TruthClock clock_;
  std::mt19937_64 random_;
  std::normal_distribution<double> normal_;
  std::vector<double> predicted_;  // by slot
  std::vector<EndingRequest> ending_;
  double batch_start_s_ = 0;
  double batch_end_s_ = 0;
  Features batch_;
  int64_t num_steps_ = 0;
};

}  // namespace headway
