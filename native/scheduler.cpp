#include "scheduler.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace headway {

namespace {

// Past this, the clock is moved back so that squared sums stay within 64 bits.
constexpr int64_t kClockLimit = int64_t{1} << 24;

struct LaterEnd {
  template <typename Entry>
  bool operator()(const Entry& a, const Entry& b) const {
    return a.finish_clock > b.finish_clock;
  }
};

}  // namespace

Scheduler::Scheduler(const Limits& limits) : limits_(limits), free_(limits.num_blocks - 1) {  // less the null block
  residues_.assign(static_cast<size_t>(limits.block_size), 0);
}

// ---------------------------------------------------------------- requests and lists

int32_t Scheduler::new_slot(const RequestInput& input) {
  int32_t slot;
  if (free_slots_.empty()) {
    slot = static_cast<int32_t>(slots_.size());
    slots_.emplace_back();
  } else {
    slot = free_slots_.back();
    free_slots_.pop_back();
    slots_[static_cast<size_t>(slot)] = Request{};
  }
  Request& r = slots_[static_cast<size_t>(slot)];
  r.prompt = static_cast<int32_t>(input.prompt);
  r.computed = static_cast<int32_t>(input.computed);
  r.output = static_cast<int32_t>(input.output);
  r.target_output = static_cast<int32_t>(input.target_output);
  r.max_tokens = static_cast<int32_t>(input.max_tokens);
  // Stop rule, sched/utils.py check_stop @0.32.0: num_tokens >= max_model_len or outputs >= max_tokens.
  int64_t end = std::min(input.target_output, limits_.max_model_len - input.prompt);
  if (input.max_tokens > 0) end = std::min(end, input.max_tokens);
  r.end_output = static_cast<int32_t>(end);
  r.blocks = static_cast<int32_t>(input.num_blocks < 0 ? blocks_for(input.computed) : input.num_blocks);
  r.priority = input.priority;
  r.arrival = input.arrival;
  r.submission = ++num_submissions_;
  if (std::isnan(input.arrival)) {
    r.arrival = -std::numeric_limits<double>::infinity();
    if (limits_.priority_policy) {
      for (const Request& other : slots_) {
        if (other.place != Place::kNowhere) r.arrival = std::max(r.arrival, other.arrival);
      }
    }
  }
  free_ -= r.blocks;
  return slot;
}

void Scheduler::free_slot(int32_t slot) {
  slots_[static_cast<size_t>(slot)].place = Place::kNowhere;
  free_slots_.push_back(slot);
}

void Scheduler::append(List& list, int32_t slot) { insert_before(list, slot, -1); }

void Scheduler::insert_before(List& list, int32_t slot, int32_t before) {
  Request& r = slots_[static_cast<size_t>(slot)];
  const int32_t previous = before < 0 ? list.last : request(before).previous;
  r.previous = previous;
  r.next = before;
  (previous < 0 ? list.first : slots_[static_cast<size_t>(previous)].next) = slot;
  (before < 0 ? list.last : slots_[static_cast<size_t>(before)].previous) = slot;
  list.size += 1;
}

void Scheduler::unlink(List& list, int32_t slot) {
  const Request& r = request(slot);
  (r.previous < 0 ? list.first : slots_[static_cast<size_t>(r.previous)].next) = r.next;
  (r.next < 0 ? list.last : slots_[static_cast<size_t>(r.next)].previous) = r.previous;
  list.size -= 1;
}

bool Scheduler::sooner(const Request& a, const Request& b) const {
  if (a.priority != b.priority) return a.priority < b.priority;
  if (a.arrival != b.arrival) return a.arrival < b.arrival;
  return a.submission < b.submission;
}

void Scheduler::queue_by_priority(int32_t slot) {
  int32_t before = -1;
  int32_t candidate = waiting_.last;
  while (candidate >= 0 && sooner(request(slot), request(candidate))) {
    before = candidate;
    candidate = request(candidate).previous;
  }
  insert_before(waiting_, slot, before);
}

int32_t Scheduler::place_running(const RequestInput& input) {
  const int32_t slot = new_slot(input);
  start_running(slot);
  join_clock_or_track(slot);
  return slot;
}

int32_t Scheduler::submit(const RequestInput& input) {
  const int32_t slot = new_slot(input);
  slots_[static_cast<size_t>(slot)].place = Place::kWaiting;
  if (limits_.priority_policy) {
    queue_by_priority(slot);
  } else {
    append(waiting_, slot);
  }
  return slot;
}

void Scheduler::remove(int32_t slot) {
  free_ += blocks(slot);
  if (request(slot).place == Place::kRunning) {
    if (request(slot).on_clock) {
      leave_clock(slot);
    } else {
      untrack(slot);
    }
    unlink(running_, slot);
  } else {
    unlink(waiting_, slot);
  }
  free_slot(slot);
  drop_stale_ends();
}

void Scheduler::start_running(int32_t slot) {
  Request& r = slots_[static_cast<size_t>(slot)];
  r.place = Place::kRunning;
  r.order = next_order_++;
  append(running_, slot);
  tracked_.push_back(slot);  // the newest stands last in both lists
}

// ---------------------------------------------------------------- the decode clock

int64_t Scheduler::computed(int32_t slot) const {
  const Request& r = request(slot);
  return r.on_clock ? r.computed + clock_ : r.computed;
}

int64_t Scheduler::output(int32_t slot) const {
  const Request& r = request(slot);
  return r.on_clock ? r.output + clock_ : r.output;
}

int64_t Scheduler::blocks(int32_t slot) const {
  const Request& r = request(slot);
  return r.on_clock ? blocks_for(r.computed + clock_) : r.blocks;
}

int64_t Scheduler::residue(int64_t value) const {
  const int64_t rest = value % limits_.block_size;
  return rest < 0 ? rest + limits_.block_size : rest;
}

// Decodes that need a further block in the step at `clock`: those whose computed tokens fill their last block.
int64_t Scheduler::num_clock_blocks_due(int64_t clock) const {
  return residues_[static_cast<size_t>(residue(-clock))];
}

int64_t Scheduler::num_clock_blocks_due(int64_t clock, int64_t num_steps) const {
  int64_t due = num_steps / limits_.block_size * num_on_clock_;
  size_t index = static_cast<size_t>(residue(-clock));
  for (int64_t rest = num_steps % limits_.block_size; rest > 0; --rest) {
    due += residues_[index];
    index = index == 0 ? static_cast<size_t>(limits_.block_size - 1) : index - 1;
  }
  return due;
}

int64_t Scheduler::steps_until_shortage(int64_t at_most) const {
  if ((at_most / limits_.block_size + 1) * num_on_clock_ <= free_) return at_most;
  const int64_t cycles = free_ / num_on_clock_;  // in block_size steps every decode takes one block
  int64_t rest = free_ - cycles * num_on_clock_;
  int64_t steps = cycles * limits_.block_size;
  for (int64_t clock = clock_; steps < at_most; ++clock, ++steps) {
    rest -= num_clock_blocks_due(clock);
    if (rest < 0) break;
  }
  return std::min(steps, at_most);
}

// A decode with no blocks in advance: what its blocks are follows from the clock alone.
bool Scheduler::is_regular_decode(const Request& r) const {
  return r.output > 0 && r.computed == r.prompt + r.output - 1 && r.blocks == blocks_for(r.computed);
}

void Scheduler::join_clock_or_track(int32_t slot) {
  if (!is_regular_decode(request(slot))) return;
  untrack(slot);
  join_clock(slot);
}

void Scheduler::untrack(int32_t slot) { tracked_.erase(std::find(tracked_.begin(), tracked_.end(), slot)); }

void Scheduler::join_clock(int32_t slot) {
  if (clock_ > kClockLimit) rebase_clock();
  Request& r = slots_[static_cast<size_t>(slot)];
  // A request already at its end still takes the token that vLLM checks.
  r.finish_clock = clock_ + std::max(1, r.end_output - r.output);
  r.computed -= static_cast<int32_t>(clock_);
  r.output -= static_cast<int32_t>(clock_);
  r.on_clock = true;
  num_on_clock_ += 1;
  relative_sum_ += r.computed;
  relative_square_sum_ += int64_t{r.computed} * r.computed;
  residues_[static_cast<size_t>(residue(r.computed))] += 1;
  last_clock_order_ = std::max(last_clock_order_, r.order);
  ends_.push_back({r.finish_clock, slot, r.submission});
  std::push_heap(ends_.begin(), ends_.end(), LaterEnd{});
}

void Scheduler::leave_clock(int32_t slot) {
  Request& r = slots_[static_cast<size_t>(slot)];
  num_on_clock_ -= 1;
  relative_sum_ -= r.computed;
  relative_square_sum_ -= int64_t{r.computed} * r.computed;
  residues_[static_cast<size_t>(residue(r.computed))] -= 1;
  r.computed += static_cast<int32_t>(clock_);
  r.output += static_cast<int32_t>(clock_);
  r.blocks = static_cast<int32_t>(blocks_for(r.computed));
  r.on_clock = false;
  if (num_on_clock_ == 0) {
    ends_.clear();
    last_clock_order_ = -1;
  }
}

void Scheduler::drop_stale_ends() {
  while (!ends_.empty()) {
    const ClockEntry& top = ends_.front();
    const Request& r = request(top.slot);
    if (r.on_clock && r.submission == top.submission && r.finish_clock == top.finish_clock) return;
    std::pop_heap(ends_.begin(), ends_.end(), LaterEnd{});
    ends_.pop_back();
  }
}

void Scheduler::rebase_clock() {
  const int64_t shift = clock_ - clock_ % limits_.block_size;  // a whole number of blocks leaves the residues alone
  clock_ -= shift;
  relative_sum_ = relative_square_sum_ = 0;
  for (int32_t slot = running_.first; slot >= 0; slot = request(slot).next) {
    Request& r = slots_[static_cast<size_t>(slot)];
    if (!r.on_clock) continue;
    r.computed += static_cast<int32_t>(shift);
    r.output += static_cast<int32_t>(shift);
    r.finish_clock -= shift;
    relative_sum_ += r.computed;
    relative_square_sum_ += int64_t{r.computed} * r.computed;
  }
  for (ClockEntry& entry : ends_) entry.finish_clock -= shift;
}

int64_t Scheduler::remaining_prefill_tokens() const {
  int64_t total = 0;
  for (const int32_t slot : tracked_) total += request(slot).prompt + request(slot).output - request(slot).computed;
  for (int32_t slot = waiting_.first; slot >= 0; slot = request(slot).next) {
    total += request(slot).prompt + request(slot).output - request(slot).computed;
  }
  return total;
}

// ---------------------------------------------------------------- runs of unchanged decodes

bool Scheduler::next_step_is_open() const {
  return waiting_.size == 0 && tracked_.empty() && num_on_clock_ < limits_.max_num_batched_tokens &&
         running_.size < limits_.max_num_seqs && free_after_next_decodes() >= 0;
}

int64_t Scheduler::decode_run() const {
  if (num_on_clock_ == 0 || !tracked_.empty() || num_on_clock_ > limits_.max_num_batched_tokens) return 0;
  const int64_t free = free_after_next_decodes();
  if (free < 0) return 0;
  const int64_t budget = limits_.max_num_batched_tokens - num_on_clock_;
  if (waiting_.size > 0 && budget > 0 && running_.size < limits_.max_num_seqs) {
    // Free blocks only shrink until a decode ends, so a head that must wait now waits until then.
    const Request& head = request(waiting_.first);
    if (admissible_chunk(head.prompt + head.output, head.computed, head.blocks, budget, free, running_.size,
                         num_requests() + num_phantoms_) > 0) {
      return 0;
    }
  }
  return steps_until_shortage(ends_.front().finish_clock - clock_);
}

Features Scheduler::decode_features(int64_t num_steps, double knee) const {
  Features f;
  const int64_t context = relative_sum_ + num_on_clock_ * clock_;
  const int64_t squares = relative_square_sum_ + 2 * clock_ * relative_sum_ + num_on_clock_ * clock_ * clock_;
  f.add_decodes(num_on_clock_, context, static_cast<double>(squares), num_steps);
  f.close_batches(num_steps, knee);
  return f;
}

void Scheduler::run_decodes(int64_t num_steps, double knee) {
  begin_step();
  features_ = decode_features(num_steps, knee);
  free_ -= num_clock_blocks_due(clock_, num_steps);
  clock_ += num_steps;
  finish_clock_ends();
}

// ---------------------------------------------------------------- one step: schedule

void Scheduler::begin_step() {
  step_number_ += 1;
  budget_ = limits_.max_num_batched_tokens;
  // schedule(): the threshold protects others, so a request that is alone ignores it.
  threshold_ = num_requests() + num_phantoms_ > 1 ? limits_.long_prefill_token_threshold : 0;
  chunks_.clear();
  preempted_.clear();
  finished_.clear();
  first_tokens_.clear();
}

bool Scheduler::step(bool itemised, double knee) {
  begin_step();
  decodes_in_bulk_ = !itemised && schedule_running_in_bulk();
  if (!decodes_in_bulk_) schedule_running_one_by_one();
  if (preempted_.empty()) admit_waiting();
  free_after_ = free_;
  running_after_ = running_.size;
  waiting_empty_after_ = waiting_.size == 0;
  count_features(knee);
  if (features_.requests == 0 && preempted_.empty()) {
    features_ = Features{};
    return false;
  }
  update();
  return true;
}

// Tokens a running request wants in this step; the budget is the caller's concern.
int64_t Scheduler::chunk_limit(const Request& r, int64_t computed) const {
  const int64_t true_output = r.on_clock ? r.output + clock_ : r.output;
  int64_t n = r.prompt + true_output - computed;
  if (threshold_ > 0) n = std::min(n, threshold_);
  return std::min(n, limits_.max_model_len - computed - 1);  // never samples beyond the model's length
}

// The running loop of schedule() for the common case: every decode gets its token and no block is short, so that the
// order of the running list decides nothing but which prefill the last tokens of the budget go to.
bool Scheduler::schedule_running_in_bulk() {
  int64_t wanted = num_on_clock_;
  for (const int32_t slot : tracked_) wanted += chunk_limit(request(slot), request(slot).computed);
  if (wanted > budget_) {
    const bool decodes_come_first = num_on_clock_ == 0 || last_clock_order_ < request(tracked_.front()).order;
    if (num_on_clock_ > budget_ || (num_on_clock_ > 0 && tracked_.empty()) || !decodes_come_first) return false;
  }
  int64_t budget = budget_ - num_on_clock_;
  int64_t blocks_needed = num_clock_blocks_due(clock_);
  for (const int32_t slot : tracked_) {
    if (budget == 0) break;
    const Request& r = request(slot);
    const int64_t n = std::min(chunk_limit(r, r.computed), budget);
    if (n == 0) continue;
    budget -= n;
    blocks_needed += std::max<int64_t>(blocks_for(r.computed + n) - r.blocks, 0);
    chunks_.push_back({slot, static_cast<int32_t>(n)});
  }
  if (blocks_needed > free_) {
    chunks_.clear();
    return false;
  }
  for (const Chunk& chunk : chunks_) {
    Request& r = slots_[static_cast<size_t>(chunk.slot)];
    r.blocks = std::max(r.blocks, static_cast<int32_t>(blocks_for(r.computed + chunk.tokens)));
  }
  free_ -= blocks_needed;
  budget_ = budget;
  return true;
}

// The running loop of schedule(), request by request in list order.
void Scheduler::schedule_running_one_by_one() {
  int32_t slot = running_.first;
  while (slot >= 0 && budget_ > 0) {
    const int64_t n = std::min(chunk_limit(request(slot), computed(slot)), budget_);
    if (n > 0) {
      if (!allocate_or_preempt(slot, n)) return;
      slots_[static_cast<size_t>(slot)].scheduled_in = step_number_;
      chunks_.push_back({slot, static_cast<int32_t>(n)});
      budget_ -= n;
    }
    slot = request(slot).next;
  }
}

// kv_cache_manager.allocate_slots() and the preemption loop around it. False when the request itself was preempted.
bool Scheduler::allocate_or_preempt(int32_t slot, int64_t tokens) {
  const int64_t needed = std::max<int64_t>(blocks_for(computed(slot) + tokens) - blocks(slot), 0);
  while (needed > free_) {
    const int32_t victim = choose_victim();
    preempt(victim);
    if (victim == slot) {
      if (running_.size == 0) num_hopeless_ += 1;
      return false;
    }
  }
  free_ -= needed;
  Request& r = slots_[static_cast<size_t>(slot)];
  if (!r.on_clock) r.blocks += static_cast<int32_t>(needed);
  return true;
}

// fcfs: the last running request. priority: the first of those with the largest (priority, arrival).
int32_t Scheduler::choose_victim() const {
  if (!limits_.priority_policy) return running_.last;
  int32_t victim = running_.first;
  for (int32_t slot = request(victim).next; slot >= 0; slot = request(slot).next) {
    const Request& r = request(slot);
    const Request& v = request(victim);
    if (r.priority > v.priority || (r.priority == v.priority && r.arrival > v.arrival)) victim = slot;
  }
  return victim;
}

// _preempt_request(): recompute. Blocks are freed, outputs kept, and the request goes to the front of the queue (fcfs)
// or back to its place in it (priority).
void Scheduler::preempt(int32_t slot) {
  const bool was_scheduled = request(slot).scheduled_in == step_number_;
  int64_t held = blocks(slot);
  if (was_scheduled) {
    const auto chunk = std::find_if(chunks_.begin(), chunks_.end(), [&](const Chunk& c) { return c.slot == slot; });
    budget_ += chunk->tokens;
    chunks_.erase(chunk);
    if (request(slot).on_clock) held = blocks_for(computed(slot) + 1);  // the block of this step is taken already
  }
  free_ += held;
  if (request(slot).on_clock) {
    leave_clock(slot);
  } else {
    untrack(slot);
  }
  unlink(running_, slot);
  Request& r = slots_[static_cast<size_t>(slot)];
  r.computed = 0;
  r.blocks = 0;
  r.scheduled_in = 0;
  r.place = Place::kWaiting;
  if (limits_.priority_policy) {
    queue_by_priority(slot);
  } else {
    insert_before(waiting_, slot, waiting_.first);
  }
  preempted_.push_back(slot);
}

int64_t Scheduler::admissible_chunk(int64_t num_tokens, int64_t computed, int64_t held, int64_t budget, int64_t free,
                                    int64_t num_running, int64_t num_present) const {
  int64_t n = num_tokens - computed;
  if (limits_.long_prefill_token_threshold > 0 && num_present > 1) {
    n = std::min(n, limits_.long_prefill_token_threshold);
  }
  if (!limits_.chunked_prefill && n > budget) return 0;
  n = std::min(n, budget);
  const int64_t watermark = num_running > 0 ? limits_.watermark_blocks : 0;
  if (limits_.reserve_full_isl) {
    const int64_t whole = std::max<int64_t>(blocks_for(std::min(num_tokens, limits_.max_model_len)) - held, 0);
    if (whole + watermark > free) return 0;
  }
  const int64_t first = std::max<int64_t>(blocks_for(computed + n) - held, 0);
  return first + watermark > free ? 0 : n;
}

// The waiting loop of schedule(): only the head is tried.
void Scheduler::admit_waiting() {
  const int64_t num_present = num_requests() + num_phantoms_;
  while (budget_ > 0 && waiting_.size > 0 && running_.size < limits_.max_num_seqs) {
    const int32_t slot = waiting_.first;
    Request& r = slots_[static_cast<size_t>(slot)];
    const int64_t n =
        admissible_chunk(r.prompt + r.output, r.computed, r.blocks, budget_, free_, running_.size, num_present);
    if (n == 0) return;
    const int64_t needed = std::max<int64_t>(blocks_for(r.computed + n) - r.blocks, 0);
    free_ -= needed;
    r.blocks += static_cast<int32_t>(needed);
    r.scheduled_in = step_number_;
    unlink(waiting_, slot);
    start_running(slot);
    chunks_.push_back({slot, static_cast<int32_t>(n)});
    budget_ -= n;
  }
}

void Scheduler::count_features(double knee) {
  features_ = decodes_in_bulk_ && num_on_clock_ > 0 ? decode_features(1, knee) : Features{};
  features_.steps = 0;
  for (const Chunk& chunk : chunks_) {
    const Request& r = request(chunk.slot);
    const int64_t context = computed(chunk.slot);
    const bool is_decode = chunk.tokens == 1 && (r.on_clock || (r.output > 0 && context == r.prompt + r.output - 1));
    features_.add_chunk(chunk.tokens, context, is_decode);
  }
  features_.close_batches(1, knee);
}

// ---------------------------------------------------------------- one step: update

void Scheduler::update() {
  std::vector<int32_t> held_back;
  if (!decodes_in_bulk_) hold_back_unscheduled(held_back);
  if (num_on_clock_ > 0) clock_ += 1;
  for (const int32_t slot : held_back) join_clock(slot);
  for (size_t i = 0; i < chunks_.size(); ++i) {
    const Chunk chunk = chunks_[i];
    const Request& r = request(chunk.slot);
    if (!r.on_clock) {
      apply_chunk(chunk.slot, chunk.tokens);
    } else if (r.finish_clock == clock_) {
      finish(chunk.slot);
    }
  }
  finish_clock_ends();
}

// Decodes that got no token in this step (budget spent, or the loop ended in a preemption) fall behind the clock.
void Scheduler::hold_back_unscheduled(std::vector<int32_t>& held_back) {
  for (int32_t slot = running_.first; slot >= 0; slot = request(slot).next) {
    if (request(slot).on_clock && request(slot).scheduled_in != step_number_) held_back.push_back(slot);
  }
  for (const int32_t slot : held_back) leave_clock(slot);
}

void Scheduler::apply_chunk(int32_t slot, int64_t tokens) {
  Request& r = slots_[static_cast<size_t>(slot)];
  r.computed += static_cast<int32_t>(tokens);
  if (r.computed < r.prompt + r.output) return;  // more chunks to come
  r.output += 1;
  if (r.output == 1) first_tokens_.push_back(slot);
  if (r.output >= r.end_output) {
    finish(slot);
  } else {
    join_clock_or_track(slot);
  }
}

void Scheduler::finish_clock_ends() {
  drop_stale_ends();
  while (!ends_.empty() && ends_.front().finish_clock <= clock_) {
    const int32_t slot = ends_.front().slot;
    std::pop_heap(ends_.begin(), ends_.end(), LaterEnd{});
    ends_.pop_back();
    finish(slot);
    drop_stale_ends();
  }
}

void Scheduler::finish(int32_t slot) {
  free_ += blocks(slot);
  if (request(slot).on_clock) {
    leave_clock(slot);
  } else {
    untrack(slot);
  }
  unlink(running_, slot);
  free_slot(slot);
  finished_.push_back(slot);
}

}  // namespace headway
