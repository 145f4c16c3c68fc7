// A replayed engine: a scheduler with a clock. It steps, lets time pass, and tells a newcomer's first token.
//
// Under fcfs the residents' schedule does not depend on a newcomer before its admission (it is last in the queue and
// first to be preempted), so the way to the first step that would try a newcomer is replayed once, kept, and used for
// every query until the residents change.
//
// An asynchronous engine stands where a batch has been scheduled that nobody has run yet (the *newest*): when it starts,
// `residual_s` from now, the next one is scheduled. So a newcomer's wait includes all of the newest batch.
#pragma once

#include <cstdint>
#include <memory>

#include "scheduler.hpp"

namespace headway {

// A newcomer's way to its first token. Infinite times: the engine can never admit it.
struct FirstToken {
  double ttft_s = 0;
  double wait_s = 0;
  int64_t num_steps = 0;
};

class Engine {
 public:
  Engine(const Limits& limits, const StepTime& step_time) : scheduler_(limits), step_time_(step_time) {}
  Engine(const Engine& other)
      : scheduler_(other.scheduler_),
        step_time_(other.step_time_),
        residual_s_(other.residual_s_),
        newest_(other.newest_) {}
  Engine& operator=(const Engine&) = delete;

  // Empties it for other limits, keeping step time and memory.
  void reset(const Limits& limits);
  int32_t place_running(const RequestInput& input);
  int32_t submit(const RequestInput& input);
  void remove(int32_t slot);
  // A chunk of the newest batch whose request has left (a state taken from elsewhere).
  void place_departed(const DepartedChunk& chunk);
  void set_residual(double seconds) { residual_s_ = seconds; }

  // One step (after the batch in flight, if any). Returns the duration of what it scheduled, 0 where that is nothing.
  double step();
  // Lets time pass and returns the number of steps started. The batch in flight at the end is completed, its
  // remaining time becomes the residual; exactly at a boundary no new step is started. A livelocked engine stands still.
  // An asynchronous engine's steps are counted as they are scheduled.
  int64_t advance(double seconds);

  // Starts the batch that an asynchronous engine has scheduled, which schedules the next: its time becomes the residual.
  // Nothing happens where none is about to start.
  void start_batch();

  // First token of a newcomer (without outputs). O(1) while the residents stay the same, under fcfs.
  FirstToken first_token(const RequestInput& request);

  const Scheduler& scheduler() const { return scheduler_; }
  Scheduler& scheduler() { return scheduler_; }
  const StepTime& step_time() const { return step_time_; }
  double residual_s() const { return residual_s_; }

 private:
  // The first step that would try a newcomer at the end of the queue.
  struct OpenStep {
    bool known = false;
    bool never = false;       // the residents are stuck: no such step comes
    bool is_past = false;     // `ahead` stands after the open step (its own chunks included), not before it
    int64_t step = 0;         // number of steps before it, counted like num_steps_
    Features before;          // features of those steps, counted like total_
    Features residents;       // features of the open step without the newcomer
    int64_t budget = 0;
    int64_t free = 0;
    int64_t num_running = 0;
    int64_t num_present = 0;  // requests that count for the long-prefill threshold, the newcomer included
    std::unique_ptr<Scheduler> ahead;  // residents at the open step; null: this engine itself stands before it
  };

  void note_newest(const RequestInput& input);
  Features begin(const Features& scheduled, const Features& last);
  Features all_scheduled() const;
  double seconds_of_decodes(int64_t num_steps) const;
  void find_open_step();
  void note_open_next_step(const Scheduler& scheduler);
  void append_to_open_step(const RequestInput& input);
  void seek_open_step(int64_t steps, Features total);
  FirstToken replay_newcomer(Scheduler& scheduler, int32_t slot, int64_t steps, Features total, double wait_s) const;
  double since(const Features& now) const { return step_time_.seconds(now - total_); }

  Scheduler scheduler_;
  StepTime step_time_;
  double residual_s_ = 0;
  Features newest_;  // asynchronous: the batch that is scheduled and not started
  // Steps scheduled and features of batches started since the open step was sought: short sums, so that differences of
  // them stay exact.
  int64_t num_steps_ = 0;
  Features total_;
  OpenStep open_;
};

}  // namespace headway
