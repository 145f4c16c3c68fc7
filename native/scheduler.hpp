// Token-batch formation of vLLM 0.32 V1, `Scheduler.schedule()` and the update after it, without a model.
//
// The rules are those of vllm/v1/core/sched/scheduler.py and async_scheduler.py @0.32.0. A step costs work for prefills,
// admissions and ends, and a run of steps without any of these costs O(1): see decode_clock.hpp.
//
// Asynchronous scheduling forms batch k + 1 before the outcome of batch k is known. Here a step then schedules a batch
// and applies the outcome of the batch *before* it. Outputs of the newest batch are counted at once (what is scheduled
// does not depend on them), but a request whose last output is among them is *ending*: it keeps its seat and blocks
// through one more schedule, in which it is passed over (an end by max_tokens or the model's length is foreseen) or
// decodes once more in vain (a stop token is not).
// A second engine version is a second class behind the same methods, not a flag in this one.
#pragma once

#include <cstdint>
#include <vector>

#include "residents.hpp"
#include "step_time.hpp"

namespace headway {

class Scheduler : public Residents {
 public:
  explicit Scheduler(const Limits& limits) : Residents(limits) {}
  // Empties it for other limits, keeping its memory.
  void reset(const Limits& limits);

  // Tells blocks apart from here on, so that prefixes are really looked up; for an empty engine with prefix_caching.
  void use_pool() { pool_.emplace(limits_.num_blocks, limits_.block_size); }

  // Adds a request to the running list (a state taken from elsewhere), in list order.
  int32_t place_running(const RequestInput& input);
  // Queues a request by the policy: at the end (fcfs), or by (priority, arrival, submission).
  int32_t submit(const RequestInput& input);
  // Takes a request out wherever it is and frees its blocks.
  void remove(int32_t slot);

  // One step: schedule, then update. `itemised` fills chunks() with every scheduled request in scheduling order;
  // without it decodes are left out, which is much cheaper. False when nothing was scheduled, preempted or ended.
  bool step(bool itemised, double knee);
  // How many steps from now hold nothing but the same decodes (0: the next step is no such step).
  int64_t decode_run() const;
  // Runs `num_steps` <= decode_run() such steps.
  void run_decodes(int64_t num_steps, double knee);
  // Features of `num_steps` such steps, without running them; the first of them lies `steps_ahead` steps ahead.
  Features decode_features(int64_t num_steps, double knee, int64_t steps_ahead = 0) const {
    return clock_.features(num_steps, knee, steps_ahead);
  }

  // The last step, as after scheduling (features, chunks, free_after, budget_left) and as after the update.
  const Features& features() const { return features_; }
  const std::vector<Chunk>& chunks() const { return chunks_; }
  // Tokens that a request in chunks() found in the prefix cache when the last step admitted it; 0 if it ran before.
  int64_t found(int32_t slot) const { return !limits_.prefix_caching || request(slot).order < first_new_order_ ? 0 : request(slot).cached; }
  const std::vector<int32_t>& preempted() const { return preempted_; }
  const std::vector<int32_t>& finished() const { return finished_; }
  // Requests to which the last step's batch gives their first output, and those that got theirs by its update: the same
  // but under asynchronous scheduling.
  const std::vector<int32_t>& first_tokens() const { return first_tokens_; }
  const std::vector<int32_t>& given_first_tokens() const {
    return limits_.async_scheduling ? given_first_tokens_ : first_tokens_;
  }
  // Asynchronous: (tokens, context, is it a decode) of the newest batch's requests that have left since.
  const std::vector<DepartedChunk>& departed() const { return departed_; }
  void note_departed(const DepartedChunk& chunk) { departed_.push_back(chunk); }
  int64_t free_after() const { return free_after_; }
  int64_t budget_left() const { return budget_; }
  int32_t running_after() const { return running_after_; }

  // Would a newcomer at the end of the queue have been tried in the last step?
  bool last_step_was_open() const {
    return preempted_.empty() && budget_ > 0 && waiting_empty_after_ && running_after_ < limits_.max_num_seqs;
  }
  // Is the next step one of unchanged decodes only (or idle) in which a newcomer would be tried?
  bool next_step_is_open() const {
    return waiting_.size == 0 && tracked_.empty() && clock_.size() < limits_.max_num_batched_tokens &&
           running_.size < limits_.max_num_seqs && free_after_next_decodes() >= 0;
  }
  // Free blocks as the next step leaves them when it is such a step.
  int64_t free_after_next_decodes() const { return free_ - clock_.num_blocks_due(); }

  // The residents preempt each other in a cycle and none will ever give another output (they need more blocks than
  // exist). Only a request that comes or goes from outside can end it.
  bool livelocked() const { return livelocked_; }
  // Looks for livelock from here on: what was seen before belongs to another question.
  void watch_anew() {
    livelocked_ = false;
    preempting_steps_ = 0;
    remember_next_at_ = 1;
  }
  // Requests that count for the long-prefill threshold although they are not here (the imagined newcomer).
  void set_phantoms(int64_t count) { num_phantoms_ = count; }

  // The admission rule for the head of the queue: its first chunk, of 0 tokens if it has to wait.
  Admission admission(int64_t num_tokens, int64_t computed, int64_t held, int64_t budget, int64_t free,
                      int64_t num_running, int64_t num_present) const;

 private:
  void begin_step();
  bool schedule_running_in_bulk();
  void schedule_running_one_by_one();
  bool allocate_or_preempt(int32_t slot, int64_t tokens);
  int32_t choose_victim() const;
  void preempt(int32_t slot);
  void admit_waiting();
  void count_features(double knee);
  void update();
  void hold_back_unscheduled();
  void apply_chunk(int32_t slot, int64_t tokens);
  void end_on_clock();
  void end(int32_t slot);
  void finish(int32_t slot);
  void finish_ended();
  int64_t known_output(int32_t slot) const;
  void note_departure(int32_t slot);
  void watch_for_livelock();
  int64_t chunk_limit(const Request& r, int64_t computed) const;

  int64_t num_phantoms_ = 0;
  std::vector<int32_t> ending_;  // asynchronous: their last output comes with the newest batch, in its order
  std::vector<int32_t> ended_;   // within a step: those whose last output came with the batch before
  std::vector<int32_t> samples_;  // asynchronous with a pool: who gets an output of the newest batch, in its order
  std::vector<int32_t> given_;    // within a step: who gets one of the batch before

  std::vector<DepartedChunk> departed_;

  // Brent's cycle detection over the states after preempting steps.
  bool livelocked_ = false;
  uint64_t remembered_state_ = 0;
  uint64_t preempting_steps_ = 0;
  uint64_t remember_next_at_ = 1;

  // The last step.
  int64_t budget_ = 0;
  int64_t threshold_ = 0;
  int64_t first_new_order_ = 0;
  bool decodes_in_bulk_ = false;
  bool head_blocked_ = false;  // the head of the queue was tried beside decodes only, and nothing changed for it since
  int64_t free_after_ = 0;
  int32_t running_after_ = 0;
  bool waiting_empty_after_ = false;
  Features features_;
  std::vector<Chunk> chunks_;
  std::vector<int32_t> held_back_;
  std::vector<int32_t> preempted_;
  std::vector<int32_t> finished_;
  std::vector<int32_t> first_tokens_;
  std::vector<int32_t> given_first_tokens_;
};

}  // namespace headway
