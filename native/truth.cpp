#include "truth.hpp"

namespace headway {

int32_t TruthEngine::submit(const RequestInput& input, double predicted_output, double now) {
  if (scheduler_.num_requests() == 0 && now > batch_end_s_) {  // idle until now
    batch_start_s_ = batch_end_s_ = now;
    batch_ = Features{};
    ending_.clear();
  }
  const int32_t slot = scheduler_.submit(input);
  if (predicted_.size() <= static_cast<size_t>(slot)) predicted_.resize(static_cast<size_t>(slot) + 1);
  predicted_[static_cast<size_t>(slot)] = predicted_output;
  return slot;
}

double TruthEngine::draw_duration(double step_s) {
  double duration_s = clock_.log_sigma > 0 ? step_s * std::exp(clock_.log_sigma * normal_(random_)) : step_s;
  if (clock_.gap_high_s > 0) {
    duration_s += std::uniform_real_distribution<double>(clock_.gap_low_s, clock_.gap_high_s)(random_);
  }
  if (clock_.stall_probability > 0 && std::uniform_real_distribution<double>()(random_) < clock_.stall_probability) {
    duration_s += std::exponential_distribution<double>(1 / clock_.stall_mean_s)(random_);
  }
  return duration_s;
}

void TruthEngine::note_step(double duration_s, std::vector<TruthEvent>& events) {
  batch_start_s_ = batch_end_s_;
  batch_end_s_ += duration_s;
  num_steps_ += 1;
  for (const int32_t slot : scheduler_.first_tokens()) {
    events.push_back({batch_end_s_, slot, TruthEvent::kFirstToken});
  }
  ending_.clear();
  for (const int32_t slot : scheduler_.finished()) {
    events.push_back({batch_end_s_, slot, TruthEvent::kFinished});
    const Request& r = scheduler_.request(slot);  // left, but its figures stand until the slot is taken again
    RequestInput input;
    input.prompt = r.prompt;
    input.output = std::max(r.end_output, 1);
    input.computed = input.prompt + input.output - 1;
    input.max_tokens = r.max_tokens;
    input.priority = r.priority;
    input.arrival = r.arrival;
    ending_.push_back({slot, input, predicted_[static_cast<size_t>(slot)]});
  }
}

// Steps of unchanged decodes, each with a duration of its own, as long as they begin before `now`.
void TruthEngine::run_decodes_until(int64_t run, double now) {
  const double knee = clock_.step_time.knee;
  Features one = scheduler_.decode_features(1, knee);
  const double num_decodes = static_cast<double>(one.decodes);
  int64_t done = 0;
  for (; done < run && batch_end_s_ < now; ++done) {
    batch_start_s_ = batch_end_s_;
    batch_ = one;
    batch_end_s_ += draw_duration(clock_.step_time.seconds(one));
    // The next step's contexts are one longer each: Σ(c+1)² = Σc² + 2Σc + n.
    one.context_squares += 2 * static_cast<double>(one.context) + num_decodes;
    one.context += one.decodes;
    one.decode_context += one.decodes;
  }
  scheduler_.run_decodes(done, knee);
  num_steps_ += done;
}

void TruthEngine::run_until(double now, std::vector<TruthEvent>& events) {
  while (batch_end_s_ < now && !scheduler_.livelocked()) {
    const int64_t run = scheduler_.decode_run();
    if (run > 1) {
      // The last step of a run may end requests and is itemised by note_step.
      run_decodes_until(run - 1, now);
      if (batch_end_s_ >= now) {
        ending_.clear();
        return;
      }
    }
    const double knee = clock_.step_time.knee;
    if (run > 0) {
      scheduler_.run_decodes(1, knee);
    } else if (!scheduler_.step(false, knee)) {
      if (scheduler_.num_requests() == 0) {  // idle: the ends of its last batch are past, and known
        batch_start_s_ = batch_end_s_;
        batch_ = Features{};
        ending_.clear();
      }
      return;  // nothing to do, or stuck
    }
    batch_ = scheduler_.features();
    note_step(draw_duration(clock_.step_time.seconds(batch_)), events);
  }
}

}  // namespace headway
