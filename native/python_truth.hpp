// Truth engines as the lab sees them: a fleet that plays requests by id, and mirrors of what a router may know.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "length_rule.hpp"
#include "python_engine.hpp"
#include "truth.hpp"

namespace headway::python {

inline LengthRule* length_rule(const std::string& kind, nb::handle edges, nb::handle lengths) {
  if (kind == "survival") return new LengthRule(LengthRule::Kind::kSurvival);
  if (kind == "plain") return new LengthRule(LengthRule::Kind::kPlain);
  if (kind != "conditional_median") fail_input("kind", "must be survival, plain or conditional_median, not '" + kind + "'");
  std::vector<int64_t> bounds;
  for (nb::handle edge : edges) {
    bounds.push_back(as_count(edge, "edges", 0));
    if (bounds.size() > 1 && bounds[bounds.size() - 2] >= bounds.back()) fail_input("edges", "must rise");
  }
  std::vector<std::vector<double>> rows;
  for (nb::handle row : lengths) {
    rows.emplace_back();
    for (nb::handle length : row) rows.back().push_back(as_seconds(length, "lengths"));
    std::sort(rows.back().begin(), rows.back().end());
  }
  if (rows.size() != bounds.size() + 1) fail_input("lengths", "must have one row per bin: one more than edges");
  return new LengthRule(std::move(bounds), std::move(rows));
}

// One truth engine with its ids. A copy is a snapshot: it can be mirrored later.
class TruthInstance {
 public:
  TruthInstance(nb::object limits, nb::handle step_time, double noise, double stall_probability, double stall_mean_s,
                double gap_low_s, double gap_high_s, uint64_t seed)
      : limits_(std::move(limits)),
        engine_(checked_limits(limits_), clock_from(step_time, noise, stall_probability, stall_mean_s, gap_low_s, gap_high_s),
                seed) {}

  void submit(nb::object id, int64_t prompt_tokens, int64_t target_output_tokens, double predicted_output_tokens,
              int64_t max_tokens, int64_t priority, double now) {
    check_prompt(engine_.scheduler().limits(), prompt_tokens);
    if (target_output_tokens < 1 || target_output_tokens > kMaxCount) {
      fail_input("target_output_tokens", "must be from 1 to " + std::to_string(kMaxCount) + ", not " +
                                             std::to_string(target_output_tokens));
    }
    if (!std::isfinite(predicted_output_tokens) || !std::isfinite(now)) {
      fail_input("predicted_output_tokens", "times and lengths must be finite");
    }
    RequestInput input;
    input.prompt = prompt_tokens;
    input.target_output = target_output_tokens;
    input.max_tokens = max_tokens;
    input.priority = priority;
    input.arrival = now;
    const size_t slot = static_cast<size_t>(engine_.submit(input, predicted_output_tokens, now));
    if (ids_.size() <= slot) ids_.resize(slot + 1);
    ids_[slot] = std::move(id);
  }

  // (time_s, id, finished) of every event of the batches started before `now`, in order; infinite: until nothing is left.
  nb::list run_until(double now) {
    if (std::isnan(now)) fail_input("now", "must be a time, not NaN");
    nb::list out;
    events_.clear();
    engine_.run_until(now, events_);
    for (const TruthEvent& event : events_) {
      out.append(nb::make_tuple(event.time_s, id(event.slot), event.kind == TruthEvent::kFinished));
    }
    ending_ids_.clear();
    for (const EndingRequest& ending : engine_.ending()) ending_ids_.push_back(id(ending.slot));
    return out;
  }

  // Fills `view` with what a router may know of this engine, the batch in flight completed, and returns the time at
  // which that batch began: `view` stands there, with the batch's duration by its own clock as residual.
  double mirror(ReplayedEngine& view, const LengthRule& rule) const {
    const Scheduler& s = engine_.scheduler();
    view.clear(limits_, s.limits());
    for (int32_t slot = s.running().first; slot >= 0; slot = s.next_of(slot)) view.place(seen(slot, rule), id(slot));
    for (size_t i = 0; i < engine_.ending().size() && i < ending_ids_.size(); ++i) {
      const EndingRequest& ending = engine_.ending()[i];
      RequestInput input = ending.input;
      if (input.max_tokens > 0 && input.output >= input.max_tokens) continue;  // such an end a router does foresee
      if (input.prompt + input.output >= s.limits().max_model_len) continue;
      input.target_output = rule.target(ending.predicted_output, input.prompt, input.output, input.max_tokens);
      view.place(input, ending_ids_[i]);
    }
    for (int32_t slot = s.waiting().first; slot >= 0; slot = s.next_of(slot)) view.queue(seen(slot, rule), id(slot));
    view.set_residual(engine_.batch().steps > 0 ? view.step_time().seconds(engine_.batch()) : 0.0);
    return engine_.batch_start_s();
  }

  const TruthEngine& engine() const { return engine_; }

 private:
  static Limits checked_limits(nb::handle limits) {
    const Limits l = limits_from(limits);
    if (l.async_scheduling) fail_input("async_scheduling", "cannot be simulated");
    if (l.prefix_caching) fail_input("prefix_caching", "cannot be simulated");
    return l;
  }

  static TruthClock clock_from(nb::handle step_time, double noise, double stall_probability, double stall_mean_s,
                               double gap_low_s, double gap_high_s) {
    const auto check = [](const char* field, double value) {
      if (!std::isfinite(value) || value < 0) fail_input(field, "must be finite and at least 0");
    };
    check("noise", noise);
    check("stall_probability", stall_probability);
    check("stall_mean_s", stall_mean_s);
    check("gap_low_s", gap_low_s);
    check("gap_high_s", gap_high_s);
    if (stall_probability > 0 && stall_mean_s <= 0) fail_input("stall_mean_s", "must be above 0 where stalls happen");
    if (gap_low_s > gap_high_s) fail_input("gap_low_s", "must not exceed gap_high_s");
    return {step_time_from(step_time), noise, stall_probability, stall_mean_s, gap_low_s, gap_high_s};
  }

  const nb::object& id(int32_t slot) const { return ids_[static_cast<size_t>(slot)]; }

  RequestInput seen(int32_t slot, const LengthRule& rule) const {
    const Scheduler& s = engine_.scheduler();
    const Request& r = s.request(slot);
    RequestInput input;
    input.prompt = r.prompt;
    input.computed = s.computed(slot);
    input.output = s.output(slot);
    input.num_blocks = s.blocks(slot);
    input.max_tokens = r.max_tokens;
    input.priority = r.priority;
    input.arrival = r.arrival;
    input.target_output = rule.target(engine_.predicted_output(slot), input.prompt, input.output, r.max_tokens);
    return input;
  }

  nb::object limits_;
  TruthEngine engine_;
  std::vector<nb::object> ids_;  // by slot
  std::vector<nb::object> ending_ids_;
  std::vector<TruthEvent> events_;
};

}  // namespace headway::python
