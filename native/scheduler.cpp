#include "scheduler.hpp"

#include <algorithm>

namespace headway {

void Scheduler::reset(const Limits& limits) {
  Residents::reset(limits);
  num_phantoms_ = 0;
  remembered_state_ = 0;
  watch_anew();
  budget_ = threshold_ = free_after_ = first_new_order_ = 0;
  running_after_ = 0;
  decodes_in_bulk_ = head_blocked_ = waiting_empty_after_ = false;
  features_ = Features{};
  chunks_.clear();
  for (auto* slots : {&ending_, &ended_, &held_back_, &preempted_, &finished_, &first_tokens_, &given_first_tokens_,
                      &samples_, &given_}) {
    slots->clear();
  }
}

// ---------------------------------------------------------------- requests in and out

int32_t Scheduler::place_running(const RequestInput& input) {
  const int32_t slot = new_slot(input);
  head_blocked_ = false;
  watch_anew();
  start_running(slot);
  if (!limits_.async_scheduling) {
    join_clock_or_track(slot);
    return slot;
  }
  Request& r = at(slot);
  r.newest_in = step_number_;
  r.newest_tokens = static_cast<int32_t>(input.scheduled);
  r.newest_samples = input.scheduled > 0 && r.computed == r.prompt + r.output;
  if (r.newest_samples) {
    r.output += 1;
    if (r.output == 1) first_tokens_.push_back(slot);
  }
  join_clock_or_track(slot);
  if (r.newest_samples && output(slot) >= r.end_output) end(slot);
  return slot;
}

int32_t Scheduler::submit(const RequestInput& input) {
  const int32_t slot = new_slot(input);
  head_blocked_ = false;
  watch_anew();
  at(slot).place = Place::kWaiting;
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
  release_blocks(slot, blocks(slot));
  if (limits_.async_scheduling) {  // what the newest batch would have given it is dropped
    note_departure(slot);
    std::erase(ending_, slot);
    std::erase(first_tokens_, slot);
    std::erase(samples_, slot);
  }
  if (request(slot).place == Place::kRunning) {
    stop_running(slot);
  } else {
    unlink(waiting_, slot);
  }
  free_slot(slot);
}

// ---------------------------------------------------------------- runs of unchanged decodes

int64_t Scheduler::decode_run() const {
  if (clock_.size() == 0 || pool_ || !tracked_.empty() || clock_.size() > limits_.max_num_batched_tokens) return 0;
  // Free blocks only shrink until a request ends, so a head that had to wait waits until then.
  if (waiting_.size > 0 && running_.size < limits_.max_num_seqs && !head_blocked_) return 0;
  if (free_after_next_decodes() < 0) return 0;
  if (!ending_.empty()) return 1;  // the step after the next may have their seats and blocks
  return clock_.steps_until_shortage(free_, clock_.steps_to_next_end());
}

[[gnu::flatten]] void Scheduler::run_decodes(int64_t num_steps, double knee) {
  begin_step();
  features_ = decode_features(num_steps, knee);
  free_ -= clock_.num_blocks_due(num_steps);
  clock_.advance(num_steps);
  end_on_clock();
  if (limits_.async_scheduling) finish_ended();
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
  if (limits_.async_scheduling) {
    ended_.swap(ending_);
    ending_.clear();
    departed_.clear();
    given_.swap(samples_);
    samples_.clear();
    given_first_tokens_.swap(first_tokens_);
  }
  first_tokens_.clear();
}

// Flattened: called once per event of a replay, where the calls of its small parts would cost a fifth more.
[[gnu::flatten]] bool Scheduler::step(bool itemised, double knee) {
  begin_step();
  if (itemised) first_new_order_ = next_order_;
  decodes_in_bulk_ = !itemised && !pool_ && schedule_running_in_bulk();
  if (!decodes_in_bulk_) schedule_running_one_by_one();
  if (preempted_.empty()) admit_waiting();
  head_blocked_ = decodes_in_bulk_ && chunks_.empty();
  free_after_ = free_;
  running_after_ = running_.size;
  waiting_empty_after_ = waiting_.size == 0;
  count_features(knee);
  if (features_.requests == 0 && preempted_.empty()) {
    features_ = Features{};
    if (ended_.empty()) return false;
  }
  update();
  if (!preempted_.empty()) watch_for_livelock();
  return true;
}

// Tokens a running request wants in this step; the budget is the caller's concern.
int64_t Scheduler::chunk_limit(const Request& r, int64_t computed) const {
  const int64_t true_output = r.on_clock ? r.output + clock_.now() : r.output;
  int64_t n = r.prompt + true_output - computed;
  if (threshold_ > 0) n = std::min(n, threshold_);
  return std::min(n, limits_.max_model_len - computed - 1);  // never samples beyond the model's length
}

// The running loop of schedule() for the common case: every decode gets its token and no block is short, so that the
// order of the running list decides nothing but which prefill the last tokens of the budget go to.
bool Scheduler::schedule_running_in_bulk() {
  int64_t wanted = clock_.size();
  for (const int32_t slot : tracked_) wanted += chunk_limit(request(slot), request(slot).computed);
  if (wanted > budget_) {
    if (clock_.size() > budget_ || tracked_.empty()) return false;
    if (clock_.size() > 0 && clock_.last_order() > request(tracked_.front()).order) return false;
  }
  int64_t budget = budget_ - clock_.size();
  int64_t blocks_needed = clock_.num_blocks_due();
  for (const int32_t slot : tracked_) {
    if (budget == 0) break;
    const Request& r = request(slot);
    const int64_t n = std::min(chunk_limit(r, r.computed), budget);
    if (n == 0) continue;
    budget -= n;
    blocks_needed += std::max<int64_t>(blocks_for(r.computed + n) - r.blocks - r.shared, 0);
    chunks_.push_back({slot, static_cast<int32_t>(n)});
  }
  if (blocks_needed > free_) {
    chunks_.clear();
    return false;
  }
  for (const Chunk& chunk : chunks_) {
    Request& r = at(chunk.slot);
    r.blocks = std::max(r.blocks, static_cast<int32_t>(blocks_for(r.computed + chunk.tokens)) - r.shared);
  }
  free_ -= blocks_needed;
  budget_ = budget;
  return true;
}

// The running loop of schedule(), request by request in list order.
void Scheduler::schedule_running_one_by_one() {
  int32_t slot = running_.first;
  while (slot >= 0 && budget_ > 0) {
    const Request& r = request(slot);
    // async: "we are sure that the previous step has reached" the request's end, so it gets no further step.
    const bool is_over = r.ending && r.ends_by_limit;
    const int64_t n = is_over ? 0 : std::min(chunk_limit(r, computed(slot)), budget_);
    if (n > 0) {
      if (!allocate_or_preempt(slot, n)) return;
      at(slot).scheduled_in = step_number_;
      chunks_.push_back({slot, static_cast<int32_t>(n)});
      budget_ -= n;
    }
    slot = request(slot).next;
  }
}

// kv_cache_manager.allocate_slots() and the preemption loop around it. False when the request itself was preempted.
bool Scheduler::allocate_or_preempt(int32_t slot, int64_t tokens) {
  const int64_t needed = std::max<int64_t>(blocks_for(computed(slot) + tokens) - held(slot), 0);
  while (needed > free_) {
    const int32_t victim = choose_victim();
    preempt(victim);
    if (victim == slot) return false;
  }
  free_ -= needed;
  Request& r = at(slot);
  if (!r.on_clock) r.blocks += static_cast<int32_t>(needed);
  if (pool_) {
    pool_->take(slot, needed);
    pool_->cache(slot, std::min(computed(slot) + tokens, r.prompt + known_output(slot)));
  }
  return true;
}

// Outputs of a running request that are known while this step is scheduled: not the one of the batch before.
int64_t Scheduler::known_output(int32_t slot) const {
  const Request& r = request(slot);
  const bool is_waited_for = r.newest_in == step_number_ - 1 ? r.newest_samples : r.on_clock;
  return output(slot) - (limits_.async_scheduling && is_waited_for ? 1 : 0);
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
    // The block of this step is taken already.
    if (request(slot).on_clock) held = blocks_for(computed(slot) + 1) - request(slot).shared;
  }
  release_blocks(slot, held);
  if (request(slot).on_clock) {
    leave_clock(slot);
  } else {
    untrack(slot);
  }
  unlink(running_, slot);
  Request& r = at(slot);
  r.computed = 0;
  r.blocks = r.shared = 0;
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
    Request& r = at(slot);
    const int64_t num_tokens = r.prompt + r.output;
    int64_t computed = r.computed > 0 ? r.computed : cache_hit(r.cached, num_tokens);
    int64_t held = r.blocks + r.shared;
    if (pool_) {
      computed = pool_->find(slot, num_tokens) * limits_.block_size;
      held = computed / limits_.block_size - pool_->num_found_free();  // those found in the free queue are taken from it
    }
    const Admission first = admission(num_tokens, computed, held, budget_, free_, running_.size, num_present);
    if (first.tokens == 0) return;
    if (limits_.prefix_caching) r.cached = static_cast<int32_t>(computed - r.computed);
    r.computed = static_cast<int32_t>(computed);
    free_ -= first.blocks;
    budget_ -= first.tokens;
    r.blocks += static_cast<int32_t>(first.blocks);
    if (pool_) {
      r.blocks = static_cast<int32_t>(blocks_for(computed + first.tokens));
      pool_->take_found(slot);
      pool_->take(slot, r.blocks - computed / limits_.block_size);
      pool_->cache(slot, computed + first.tokens);
    }
    r.scheduled_in = step_number_;
    unlink(waiting_, slot);
    start_running(slot);
    chunks_.push_back({slot, static_cast<int32_t>(first.tokens)});
  }
}

void Scheduler::count_features(double knee) {
  Features f;  // local, so that it can live in registers
  if (decodes_in_bulk_) {
    f.requests = f.tokens = f.decodes = clock_.size();
    f.decode_context = f.context = clock_.context();
    f.context_squares = clock_.context_squares();
  }
  for (const Chunk& chunk : chunks_) {
    const Request& r = request(chunk.slot);
    const int64_t context = r.on_clock ? r.computed + clock_.now() : r.computed;
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

// ---------------------------------------------------------------- one step: update

void Scheduler::update() {
  held_back_.clear();
  if (!decodes_in_bulk_) hold_back_unscheduled();
  if (clock_.size() > 0) clock_.advance(1);
  for (const int32_t slot : held_back_) join_clock(slot);
  for (const Chunk& chunk : chunks_) {
    const Request& r = request(chunk.slot);
    if (!r.on_clock) {
      apply_chunk(chunk.slot, chunk.tokens);
      continue;
    }
    if (pool_ && limits_.async_scheduling && !r.ending) samples_.push_back(chunk.slot);
    if (r.finish_clock == clock_.now()) end(chunk.slot);
  }
  end_on_clock();
  if (limits_.async_scheduling) finish_ended();
}

// Decodes that got no token in this step (budget spent, or the loop ended in a preemption) fall behind the clock.
void Scheduler::hold_back_unscheduled() {
  for (int32_t slot = running_.first; slot >= 0; slot = request(slot).next) {
    if (request(slot).on_clock && request(slot).scheduled_in != step_number_) held_back_.push_back(slot);
  }
  for (const int32_t slot : held_back_) {
    leave_clock(slot);
    at(slot).newest_in = step_number_;
    at(slot).newest_tokens = 0;
    at(slot).newest_samples = false;
  }
  // One that is over is let go in this step, scheduled or not.
  std::erase_if(held_back_, [this](int32_t slot) { return request(slot).ending; });
}

void Scheduler::apply_chunk(int32_t slot, int64_t tokens) {
  Request& r = at(slot);
  r.computed += static_cast<int32_t>(tokens);
  const bool samples = r.computed == r.prompt + r.output && !r.ending;  // what is over decodes in vain
  if (limits_.async_scheduling) {
    r.newest_in = step_number_;
    r.newest_tokens = static_cast<int32_t>(tokens);
    r.newest_samples = samples;
    if (r.ending) return;
    if (pool_ && samples) samples_.push_back(slot);
  }
  if (!samples) return join_clock_or_track(slot);  // more chunks to come
  r.output += 1;
  if (r.output == 1) first_tokens_.push_back(slot);
  if (r.output >= r.end_output) {
    end(slot);
  } else {
    join_clock_or_track(slot);
  }
}

void Scheduler::end_on_clock() {
  int32_t slot = clock_.first_end();
  while (slot >= 0) {
    const int32_t next = request(slot).next_end;
    if (request(slot).finish_clock == clock_.now()) end(slot);
    slot = next;
  }
}

// The batch just scheduled gives this request its last output.
void Scheduler::end(int32_t slot) {
  if (!limits_.async_scheduling) return finish(slot);
  Request& r = at(slot);
  if (r.ending) return;
  r.ending = true;
  ending_.push_back(slot);
  if (!r.ends_by_limit) {  // not foreseen: it is scheduled once more, and has no other end
    if (r.on_clock) {
      clock_.end_next_step(slots_, slot);
    } else {
      join_clock_or_track(slot);
    }
    return;
  }
  head_blocked_ = false;  // it leaves its token of the budget to others
  if (r.on_clock) {
    leave_clock(slot);
    if (r.newest_in != step_number_) {
      r.newest_in = step_number_;
      r.newest_tokens = 1;
      r.newest_samples = true;
    }
  } else {
    untrack(slot);
  }
}

void Scheduler::finish(int32_t slot) {
  head_blocked_ = false;
  release_blocks(slot, blocks(slot));
  stop_running(slot);
  free_slot(slot);
  finished_.push_back(slot);
}

// Asynchronous: a request leaves that may have a share of the newest batch.
void Scheduler::note_departure(int32_t slot) {
  const int64_t tokens = newest_tokens(slot);
  if (tokens == 0) return;
  const Request& r = request(slot);
  const int64_t context = computed(slot) - tokens;
  const int64_t given = given_output(slot);
  departed_.push_back({tokens, context, tokens == 1 && given > 0 && context == r.prompt + given - 1});
}

// update_from_output() of the batch before, whose outcome is known only now. What became full by an output is cached
// before its request ends, and both request by request.
void Scheduler::finish_ended() {
  auto given = given_.begin();
  const auto cache_given = [&](int32_t until) {
    for (; given != given_.end(); ++given) {
      if (request(*given).place == Place::kRunning) {
        pool_->cache(*given, request(*given).prompt + given_output(*given) - 1);
      }
      if (*given == until) {
        ++given;
        return;
      }
    }
  };
  for (const int32_t slot : ended_) {
    cache_given(slot);
    if (request(slot).place == Place::kRunning) {
      note_departure(slot);
      finish(slot);
      continue;
    }
    unlink(waiting_, slot);  // preempted in this very step: it waits without blocks
    free_slot(slot);
    finished_.push_back(slot);
  }
  cache_given(-1);
  ended_.clear();
}

}  // namespace headway
