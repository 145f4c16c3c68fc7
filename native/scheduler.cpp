#include "scheduler.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace headway {

namespace {

// Past this, the clock is moved back so that squared sums stay within 64 bits.
constexpr int64_t kClockLimit = int64_t{1} << 24;

}  // namespace

Scheduler::Scheduler(const Limits& limits) : limits_(limits), free_(limits.num_blocks - 1) {  // less the null block
  residues_.assign(static_cast<size_t>(limits.block_size), 0);
  wheel_.assign(kWheelSize, -1);
}

void Scheduler::reset(const Limits& limits) {
  std::vector<Request> slots = std::move(slots_);
  std::vector<int32_t> residues = std::move(residues_);
  std::vector<int32_t> wheel = std::move(wheel_);
  *this = Scheduler(Empty{}, limits);
  slots.clear();
  residues.assign(static_cast<size_t>(limits.block_size), 0);
  wheel.assign(kWheelSize, -1);
  slots_ = std::move(slots);
  residues_ = std::move(residues);
  wheel_ = std::move(wheel);
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
  r.cached = static_cast<int32_t>(input.cached);
  // Stop rule, sched/utils.py check_stop @0.32.0: num_tokens >= max_model_len or outputs >= max_tokens.
  int64_t end = std::min(input.target_output, limits_.max_model_len - input.prompt);
  if (input.max_tokens > 0) end = std::min(end, input.max_tokens);
  r.end_output = static_cast<int32_t>(end);
  r.blocks = static_cast<int32_t>(input.num_blocks < 0 ? blocks_for(input.computed) : input.num_blocks);
  r.priority = input.priority;
  r.arrival = input.arrival;
  r.submission = ++num_submissions_;
  if (std::isnan(input.arrival) && limits_.priority_policy) {
    // After all present, strictly: vLLM's arrivals differ, and among equal ones the eldest would be the victim.
    r.arrival = std::numeric_limits<double>::lowest();
    for (const Request& other : slots_) {
      if (other.place == Place::kNowhere) continue;
      r.arrival = std::max(r.arrival, std::nextafter(other.arrival, std::numeric_limits<double>::max()));
    }
  }
  free_ -= r.blocks;
  head_blocked_ = false;
  watch_anew();
  return slot;
}

void Scheduler::free_slot(int32_t slot) {
  slots_[static_cast<size_t>(slot)].place = Place::kNowhere;
  slots_[static_cast<size_t>(slot)].on_clock = false;
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
  head_blocked_ = false;
  watch_anew();
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
}

void Scheduler::start_running(int32_t slot) {
  Request& r = slots_[static_cast<size_t>(slot)];
  r.place = Place::kRunning;
  r.order = next_order_++;
  append(running_, slot);
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

// A decode with no blocks in advance joins the clock: what it holds follows from the clock alone. All else is tracked.
void Scheduler::join_clock_or_track(int32_t slot) {
  Request& r = slots_[static_cast<size_t>(slot)];
  if (r.output > 0 && r.computed == r.prompt + r.output - 1 && r.blocks == blocks_for(r.computed)) {
    untrack(slot);
    join_clock(slot);
  } else if (!r.tracked) {
    r.tracked = true;
    tracked_.push_back(slot);  // newest last, as in the running list
  }
}

void Scheduler::untrack(int32_t slot) {
  Request& r = slots_[static_cast<size_t>(slot)];
  if (!r.tracked) return;
  r.tracked = false;
  tracked_.erase(std::find(tracked_.begin(), tracked_.end(), slot));
}

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
  add_end(slot);
}

void Scheduler::forget_on_clock(int32_t slot) {
  const Request& r = request(slot);
  remove_end(slot);
  relative_sum_ -= r.computed;
  relative_square_sum_ -= int64_t{r.computed} * r.computed;
  residues_[static_cast<size_t>(residue(r.computed))] -= 1;
  num_on_clock_ -= 1;
  if (num_on_clock_ == 0) last_clock_order_ = -1;
}

void Scheduler::leave_clock(int32_t slot) {
  forget_on_clock(slot);
  Request& r = slots_[static_cast<size_t>(slot)];
  r.computed += static_cast<int32_t>(clock_);
  r.output += static_cast<int32_t>(clock_);
  r.blocks = static_cast<int32_t>(blocks_for(r.computed));
  r.on_clock = false;
}

void Scheduler::add_end(int32_t slot) {
  Request& r = slots_[static_cast<size_t>(slot)];
  const size_t bucket = static_cast<size_t>(r.finish_clock % kWheelSize);
  r.previous_end = -1;
  r.next_end = wheel_[bucket];
  if (r.next_end >= 0) slots_[static_cast<size_t>(r.next_end)].previous_end = slot;
  wheel_[bucket] = slot;
  wheel_bits_[bucket / 64] |= uint64_t{1} << (bucket % 64);
}

void Scheduler::remove_end(int32_t slot) {
  const Request& r = request(slot);
  if (r.next_end >= 0) slots_[static_cast<size_t>(r.next_end)].previous_end = r.previous_end;
  if (r.previous_end >= 0) {
    slots_[static_cast<size_t>(r.previous_end)].next_end = r.next_end;
    return;
  }
  const size_t bucket = static_cast<size_t>(r.finish_clock % kWheelSize);
  wheel_[bucket] = r.next_end;
  if (r.next_end < 0) wheel_bits_[bucket / 64] &= ~(uint64_t{1} << (bucket % 64));
}

// Steps from now until a bucket with ends comes up, 1..kWheelSize.
int64_t Scheduler::steps_to_next_end() const {
  const int64_t start = (clock_ + 1) % kWheelSize;
  uint64_t word = wheel_bits_[static_cast<size_t>(start / 64)] >> (start % 64);
  if (word != 0) return 1 + std::countr_zero(word);
  int64_t steps = 1 + 64 - start % 64;
  for (int64_t i = 1; i < kWheelSize / 64; ++i, steps += 64) {
    word = wheel_bits_[static_cast<size_t>((start / 64 + i) % (kWheelSize / 64))];
    if (word != 0) return steps + std::countr_zero(word);
  }
  return kWheelSize - 64 + 1;  // the rest of the first word: every bucket before it is empty
}

void Scheduler::rebase_clock() {
  // A whole number of blocks and of turns of the wheel leaves both alone.
  const int64_t period = limits_.block_size * kWheelSize;
  const int64_t shift = clock_ - clock_ % period;
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
}

Workload Scheduler::workload() const {
  Workload w;
  w.num_running = running_.size;
  w.num_waiting = waiting_.size;
  for (const List* list : {&running_, &waiting_}) {
    for (int32_t slot = list->first; slot >= 0; slot = request(slot).next) {
      const Request& r = request(slot);
      const int64_t given = output(slot);
      const int64_t held = computed(slot);
      const int64_t done = held > 0 ? held : cache_hit(r.cached, r.prompt + given);
      w.decode_tokens += std::max<int64_t>(r.end_output - given, 0);
      if (list == &running_) w.context_tokens += done;
      const int64_t rest = r.prompt + given - done;
      if (rest == 1 && given > 0) {
        w.num_decodes += 1;
        continue;
      }
      w.num_prefills += 1;
      w.prefill_tokens += rest;
      w.prefill_pairs += static_cast<double>(rest) * static_cast<double>(rest + 2 * done);
    }
  }
  return w;
}

int64_t Scheduler::remaining_prefill_tokens() const {
  int64_t total = 0;
  for (const int32_t slot : tracked_) total += request(slot).prompt + request(slot).output - request(slot).computed;
  for (int32_t slot = waiting_.first; slot >= 0; slot = request(slot).next) {
    const Request& r = request(slot);
    const int64_t num_tokens = r.prompt + r.output;
    total += num_tokens - (r.computed > 0 ? r.computed : cache_hit(r.cached, num_tokens));
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
  // Free blocks only shrink until a request ends, so a head that had to wait waits until then.
  if (waiting_.size > 0 && running_.size < limits_.max_num_seqs && !head_blocked_) return 0;
  if (free_after_next_decodes() < 0) return 0;
  return steps_until_shortage(steps_to_next_end());
}

Features Scheduler::decode_features(int64_t num_steps, double knee) const {
  Features f;
  const int64_t context = relative_sum_ + num_on_clock_ * clock_;
  const int64_t squares = relative_square_sum_ + 2 * clock_ * relative_sum_ + num_on_clock_ * clock_ * clock_;
  f.add_decodes(num_on_clock_, context, static_cast<double>(squares), num_steps);
  f.close_batches(num_steps, knee);
  return f;
}

[[gnu::flatten]] void Scheduler::run_decodes(int64_t num_steps, double knee) {
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

// Flattened: called once per event of a replay, where the calls of its small parts would cost a fifth more.
[[gnu::flatten]] bool Scheduler::step(bool itemised, double knee) {
  begin_step();
  decodes_in_bulk_ = !itemised && schedule_running_in_bulk();
  if (!decodes_in_bulk_) schedule_running_one_by_one();
  if (preempted_.empty()) admit_waiting();
  head_blocked_ = decodes_in_bulk_ && chunks_.empty();
  free_after_ = free_;
  running_after_ = running_.size;
  waiting_empty_after_ = waiting_.size == 0;
  count_features(knee);
  if (features_.requests == 0 && preempted_.empty()) {
    features_ = Features{};
    return false;
  }
  update();
  if (!preempted_.empty()) watch_for_livelock();
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
    if (num_on_clock_ > budget_ || tracked_.empty()) return false;
    if (num_on_clock_ > 0 && last_clock_order_ > request(tracked_.front()).order) return false;
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
    if (victim == slot) return false;
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
  r.cached = 0;  // how much of it outlives the shortage is not known here
  r.scheduled_in = 0;
  r.place = Place::kWaiting;
  if (limits_.priority_policy) {
    queue_by_priority(slot);
  } else {
    insert_before(waiting_, slot, waiting_.first);
  }
  preempted_.push_back(slot);
}

Admission Scheduler::admission(int64_t num_tokens, int64_t computed, int64_t held, int64_t budget, int64_t free,
                               int64_t num_running, int64_t num_present) const {
  const int64_t wanted = num_tokens - computed;
  int64_t n = wanted;
  if (limits_.long_prefill_token_threshold > 0 && num_present > 1) {
    n = std::min(n, limits_.long_prefill_token_threshold);
  }
  if (!limits_.chunked_prefill && n > budget) return {};
  n = std::min(n, budget);
  const int64_t available = num_running > 0 ? free - limits_.watermark_blocks : free;
  // scheduler_reserve_full_isl: the whole request must fit, although only the first chunk's blocks are taken now.
  const int64_t reserved = limits_.reserve_full_isl || n == wanted ? num_tokens : computed + n;
  int64_t needed = std::max<int64_t>(blocks_for(reserved) - held, 0);
  if (needed > available) return {};
  if (n < wanted && reserved == num_tokens) needed = std::max<int64_t>(blocks_for(computed + n) - held, 0);
  return {n, needed};
}

// The waiting loop of schedule(): only the head is tried.
void Scheduler::admit_waiting() {
  const int64_t num_present = num_requests() + num_phantoms_;
  while (budget_ > 0 && waiting_.size > 0 && running_.size < limits_.max_num_seqs) {
    const int32_t slot = waiting_.first;
    Request& r = slots_[static_cast<size_t>(slot)];
    const int64_t num_tokens = r.prompt + r.output;
    const int64_t computed = r.computed > 0 ? r.computed : cache_hit(r.cached, num_tokens);
    const Admission first = admission(num_tokens, computed, r.blocks, budget_, free_, running_.size, num_present);
    if (first.tokens == 0) return;
    r.computed = static_cast<int32_t>(computed);
    free_ -= first.blocks;
    budget_ -= first.tokens;
    r.blocks += static_cast<int32_t>(first.blocks);
    r.scheduled_in = step_number_;
    unlink(waiting_, slot);
    start_running(slot);
    chunks_.push_back({slot, static_cast<int32_t>(first.tokens)});
  }
}

void Scheduler::count_features(double knee) {
  Features f;  // local, so that it can live in registers
  if (decodes_in_bulk_) {
    const int64_t squares = relative_square_sum_ + 2 * clock_ * relative_sum_ + num_on_clock_ * clock_ * clock_;
    f.requests = f.tokens = f.decodes = num_on_clock_;
    f.decode_context = f.context = relative_sum_ + num_on_clock_ * clock_;
    f.context_squares = static_cast<double>(squares);
  }
  for (const Chunk& chunk : chunks_) {
    const Request& r = request(chunk.slot);
    const int64_t context = r.on_clock ? r.computed + clock_ : r.computed;
    const bool is_decode = chunk.tokens == 1 && (r.on_clock || (r.output > 0 && context == r.prompt + r.output - 1));
    f.add_chunk(chunk.tokens, context, is_decode);
  }
  f.close_batches(1, knee);
  features_ = f;
}

// The schedule is a function of the state, so a state that comes back comes back for ever. Outputs only grow: none of
// the requests gives one in between.
void Scheduler::watch_for_livelock() {
  const uint64_t state = state_hash();
  preempting_steps_ += 1;
  if (preempting_steps_ > 1 && state == remembered_state_) livelocked_ = true;
  if (preempting_steps_ == remember_next_at_) {
    remembered_state_ = state;
    remember_next_at_ *= 2;
  }
}

uint64_t Scheduler::state_hash() const {
  uint64_t hash = 14695981039346656037ULL;  // FNV-1a, over whole words
  const auto mix = [&hash](int64_t word) {
    hash = (hash ^ static_cast<uint64_t>(word)) * 1099511628211ULL;
    hash ^= hash >> 32;
  };
  for (const List* list : {&running_, &waiting_}) {
    mix(list->size);
    for (int32_t slot = list->first; slot >= 0; slot = request(slot).next) {
      mix(static_cast<int64_t>(request(slot).submission));
      mix(computed(slot));
      mix(output(slot));
      mix(blocks(slot));
    }
  }
  return hash;
}

// ---------------------------------------------------------------- one step: update

void Scheduler::update() {
  held_back_.clear();
  if (!decodes_in_bulk_) hold_back_unscheduled();
  if (num_on_clock_ > 0) clock_ += 1;
  for (const int32_t slot : held_back_) join_clock(slot);
  for (const Chunk& chunk : chunks_) {
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
void Scheduler::hold_back_unscheduled() {
  for (int32_t slot = running_.first; slot >= 0; slot = request(slot).next) {
    if (request(slot).on_clock && request(slot).scheduled_in != step_number_) held_back_.push_back(slot);
  }
  for (const int32_t slot : held_back_) leave_clock(slot);
}

void Scheduler::apply_chunk(int32_t slot, int64_t tokens) {
  Request& r = slots_[static_cast<size_t>(slot)];
  r.computed += static_cast<int32_t>(tokens);
  if (r.computed < r.prompt + r.output) return join_clock_or_track(slot);  // more chunks to come
  r.output += 1;
  if (r.output == 1) first_tokens_.push_back(slot);
  if (r.output >= r.end_output) {
    finish(slot);
  } else {
    join_clock_or_track(slot);
  }
}

void Scheduler::finish_clock_ends() {
  int32_t slot = wheel_[static_cast<size_t>(clock_ % kWheelSize)];
  while (slot >= 0) {
    const int32_t next = request(slot).next_end;
    if (request(slot).finish_clock == clock_) finish(slot);
    slot = next;
  }
}

void Scheduler::finish(int32_t slot) {
  head_blocked_ = false;
  free_ += blocks(slot);
  if (request(slot).on_clock) {
    forget_on_clock(slot);
  } else {
    untrack(slot);
  }
  unlink(running_, slot);
  free_slot(slot);
  finished_.push_back(slot);
}

}  // namespace headway
