// Token-batch formation of vLLM 0.32 V1, `Scheduler.schedule()` and the update after it, without a model.
//
// The rules are those of vllm/v1/core/sched/scheduler.py @0.32.0 (synchronous scheduling, no prefix cache). Requests
// that only decode are not touched step by step: they share one *decode clock*, and each keeps its counts relative to
// it. A step costs work for prefills, admissions and ends, and a run of steps without any of these costs O(1).
// A second engine version is a second class behind the same methods, not a flag in this one.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "step_time.hpp"

namespace headway {

struct Limits {
  int64_t max_num_batched_tokens = 0;
  int64_t max_num_seqs = 0;
  int64_t max_model_len = 0;
  int64_t block_size = 0;
  int64_t num_blocks = 0;
  int64_t long_prefill_token_threshold = 0;
  bool chunked_prefill = true;
  bool priority_policy = false;
  bool reserve_full_isl = true;
  bool async_scheduling = false;
  bool prefix_caching = false;
  int64_t watermark_blocks = 0;
};

// A request as it is handed in; `num_blocks` < 0 means ceil(computed / block_size).
struct RequestInput {
  int64_t prompt = 0;
  int64_t computed = 0;
  int64_t output = 0;
  int64_t target_output = 1;
  int64_t max_tokens = 0;  // 0: no limit of its own
  int64_t priority = 0;
  double arrival = 0;  // NaN: after all present
  int64_t num_blocks = -1;
  int64_t cached = 0;  // tokens to be found in the prefix cache when it is first scheduled
};

// A scheduled chunk of a token batch.
struct Chunk {
  int32_t slot;
  int32_t tokens;
};

// The first chunk of a request that leaves the queue, and the blocks it takes.
struct Admission {
  int64_t tokens = 0;
  int64_t blocks = 0;
};

// What the residents of an engine still have before them: sums over running and waiting requests.
struct Workload {
  int64_t num_running = 0;
  int64_t num_waiting = 0;
  int64_t num_prefills = 0;      // residents whose prompt (or recompute) is not complete
  int64_t prefill_tokens = 0;    // tokens these still have to prefill
  double prefill_pairs = 0;      // of these p tokens with c computed before them: sum of p*p + 2*p*c
  int64_t num_decodes = 0;       // residents that only decode
  int64_t context_tokens = 0;    // computed tokens of all running requests
  int64_t decode_tokens = 0;     // outputs expected yet, of all residents
};

enum class Place : uint8_t { kNowhere, kRunning, kWaiting };

struct Request {
  // For a request on the decode clock, computed and output are relative to it: add the clock for the true count.
  int32_t computed = 0;
  int32_t output = 0;
  int32_t prompt = 0;
  int32_t end_output = 0;  // it ends once this many outputs are there
  int32_t blocks = 0;      // held; derived from computed while on the decode clock
  int32_t previous = -1;   // neighbours in the running or waiting list
  int32_t next = -1;
  Place place = Place::kNowhere;
  bool on_clock = false;
  bool tracked = false;
  int64_t finish_clock = 0;  // decode clock at which it ends
  int32_t previous_end = -1;  // neighbours in the bucket of its finish clock
  int32_t next_end = -1;
  int64_t order = 0;         // rises along the running list
  int64_t priority = 0;
  double arrival = 0;
  uint64_t submission = 0;
  uint64_t scheduled_in = 0;  // number of the last step that scheduled it (itemised steps only)
  int32_t target_output = 0;
  int32_t max_tokens = 0;
  int32_t cached = 0;  // tokens found in the prefix cache once it is admitted
};

struct List {
  int32_t first = -1;
  int32_t last = -1;
  int32_t size = 0;
};

inline constexpr int64_t kWheelSize = 512;

class Scheduler {
 public:
  explicit Scheduler(const Limits& limits);
  // Empties it for other limits, keeping its memory.
  void reset(const Limits& limits);

  // Adds a request to the running list (a state taken from elsewhere), in list order.
  int32_t place_running(const RequestInput& input);
  // Queues a request by the policy: at the end (fcfs), or by (priority, arrival, submission).
  int32_t submit(const RequestInput& input);
  // Takes a request out wherever it is and frees its blocks.
  void remove(int32_t slot);

  // One step: schedule, then update. `itemised` fills chunks() with every scheduled request in scheduling order;
  // without it decodes are left out, which is much cheaper. False when nothing was scheduled and nothing preempted.
  bool step(bool itemised, double knee);
  // How many steps from now hold nothing but the same decodes (0: the next step is no such step).
  int64_t decode_run() const;
  // Runs `num_steps` <= decode_run() such steps.
  void run_decodes(int64_t num_steps, double knee);
  // Features of `num_steps` such steps, without running them.
  Features decode_features(int64_t num_steps, double knee) const;

  // The last step, as after scheduling (features, chunks, free_after, budget_left) and as after the update.
  const Features& features() const { return features_; }
  const std::vector<Chunk>& chunks() const { return chunks_; }
  const std::vector<int32_t>& preempted() const { return preempted_; }
  const std::vector<int32_t>& finished() const { return finished_; }
  const std::vector<int32_t>& first_tokens() const { return first_tokens_; }
  int64_t free_after() const { return free_after_; }
  int64_t budget_left() const { return budget_; }
  int32_t running_after() const { return running_after_; }

  // Would a newcomer at the end of the queue have been tried in the last step?
  bool last_step_was_open() const {
    return preempted_.empty() && budget_ > 0 && waiting_empty_after_ && running_after_ < limits_.max_num_seqs;
  }
  // Is the next step one of unchanged decodes only (or idle) in which a newcomer would be tried?
  bool next_step_is_open() const;
  // Free blocks as the next step leaves them when it is such a step.
  int64_t free_after_next_decodes() const { return free_ - num_clock_blocks_due(clock_); }

  const Limits& limits() const { return limits_; }
  const Request& request(int32_t slot) const { return slots_[static_cast<size_t>(slot)]; }
  int64_t computed(int32_t slot) const;
  int64_t output(int32_t slot) const;
  int64_t blocks(int32_t slot) const;
  const List& running() const { return running_; }
  const List& waiting() const { return waiting_; }
  int32_t next_of(int32_t slot) const { return request(slot).next; }
  int64_t free_blocks() const { return free_; }
  void set_free_blocks(int64_t free) { free_ = free; }
  int64_t num_decodes() const { return num_on_clock_; }
  int64_t num_requests() const { return running_.size + waiting_.size; }
  Workload workload() const;  // O(residents)
  int64_t remaining_prefill_tokens() const;
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

  int64_t blocks_for(int64_t tokens) const {
    // 32-bit division: token counts fit (checked where they come in), and it costs a third.
    return static_cast<int64_t>((static_cast<uint32_t>(tokens) + static_cast<uint32_t>(limits_.block_size) - 1) /
                                static_cast<uint32_t>(limits_.block_size));
  }
  // What a prefix cache holding `cached` tokens of a request saves it: full blocks, and never its last token.
  int64_t cache_hit(int64_t cached, int64_t num_tokens) const {
    if (!limits_.prefix_caching || cached == 0) return 0;
    return std::min(cached, num_tokens - 1) / limits_.block_size * limits_.block_size;
  }
  // The admission rule for the head of the queue: its first chunk, of 0 tokens if it has to wait.
  Admission admission(int64_t num_tokens, int64_t computed, int64_t held, int64_t budget, int64_t free,
                      int64_t num_running, int64_t num_present) const;

 private:
  struct Empty {};
  Scheduler(Empty, const Limits& limits) : limits_(limits), free_(limits.num_blocks - 1) {}  // without its tables

  int32_t new_slot(const RequestInput& input);
  void free_slot(int32_t slot);
  void unlink(List& list, int32_t slot);
  void append(List& list, int32_t slot);
  void insert_before(List& list, int32_t slot, int32_t before);
  void queue_by_priority(int32_t slot);
  bool sooner(const Request& a, const Request& b) const;

  void start_running(int32_t slot);
  void join_clock_or_track(int32_t slot);
  void join_clock(int32_t slot);
  void leave_clock(int32_t slot);
  void forget_on_clock(int32_t slot);
  void untrack(int32_t slot);
  int64_t residue(int64_t value) const {
    const int32_t rest = static_cast<int32_t>(value) % static_cast<int32_t>(limits_.block_size);
    return rest < 0 ? rest + limits_.block_size : rest;
  }
  // Decodes that need a further block in the step at `clock`: those whose computed tokens fill their last block.
  int64_t num_clock_blocks_due(int64_t clock) const { return residues_[static_cast<size_t>(residue(-clock))]; }
  int64_t num_clock_blocks_due(int64_t clock, int64_t num_steps) const;
  int64_t steps_until_shortage(int64_t at_most) const;
  void rebase_clock();
  void add_end(int32_t slot);
  void remove_end(int32_t slot);
  int64_t steps_to_next_end() const;

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
  void finish_clock_ends();
  void finish(int32_t slot);
  void watch_for_livelock();
  uint64_t state_hash() const;
  int64_t chunk_limit(const Request& r, int64_t computed) const;

  Limits limits_;
  std::vector<Request> slots_;
  std::vector<int32_t> free_slots_;
  List running_;
  List waiting_;
  std::vector<int32_t> tracked_;  // running requests not on the clock (prefills), in running order; between steps
  int64_t free_ = 0;
  uint64_t num_submissions_ = 0;
  int64_t next_order_ = 0;
  int64_t num_phantoms_ = 0;

  // Brent's cycle detection over the states after preempting steps.
  bool livelocked_ = false;
  uint64_t remembered_state_ = 0;
  uint64_t preempting_steps_ = 0;
  uint64_t remember_next_at_ = 1;

  // The decode clock: requests on it have computed = clock + relative.
  int64_t clock_ = 0;
  int64_t num_on_clock_ = 0;
  int64_t relative_sum_ = 0;
  int64_t relative_square_sum_ = 0;
  std::vector<int32_t> residues_;  // how many have relative mod block_size = r
  // A timing wheel of the ends: the bucket of a finish clock heads a list of requests; one that ends a whole turn later
  // shares the bucket, is passed over, and can only make a run shorter than need be.
  std::vector<int32_t> wheel_;
  std::array<uint64_t, kWheelSize / 64> wheel_bits_{};  // which buckets are not empty
  int64_t last_clock_order_ = -1;  // no request on the clock stands later in the running list than this

  // The last step.
  uint64_t step_number_ = 0;
  int64_t budget_ = 0;
  int64_t threshold_ = 0;
  bool decodes_in_bulk_ = false;
  bool head_blocked_ = false;  // the head of the queue was tried beside decodes only, and nothing was freed since
  int64_t free_after_ = 0;
  int32_t running_after_ = 0;
  bool waiting_empty_after_ = false;
  Features features_;
  std::vector<Chunk> chunks_;
  std::vector<int32_t> held_back_;
  std::vector<int32_t> preempted_;
  std::vector<int32_t> finished_;
  std::vector<int32_t> first_tokens_;
};

}  // namespace headway
