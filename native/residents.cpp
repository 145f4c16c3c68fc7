#include "residents.hpp"

#include <cmath>
#include <limits>

namespace headway {

void Residents::reset(const Limits& limits) {
  limits_ = limits;
  slots_.clear();
  free_slots_.clear();
  running_ = waiting_ = List{};
  tracked_.clear();
  free_ = limits.num_blocks - 1;
  pool_.reset();
  clock_.reset(limits.block_size);
  step_number_ = num_submissions_ = 0;
  next_order_ = 0;
}

// ---------------------------------------------------------------- requests and lists

int32_t Residents::new_slot(const RequestInput& input) {
  int32_t slot;
  if (free_slots_.empty()) {
    slot = static_cast<int32_t>(slots_.size());
    slots_.emplace_back();
  } else {
    slot = free_slots_.back();
    free_slots_.pop_back();
    at(slot) = Request{};
  }
  Request& r = at(slot);
  r.prompt = static_cast<int32_t>(input.prompt);
  r.computed = static_cast<int32_t>(input.computed);
  r.output = static_cast<int32_t>(input.output);
  r.target_output = static_cast<int32_t>(input.target_output);
  r.max_tokens = static_cast<int32_t>(input.max_tokens);
  r.cached = static_cast<int32_t>(input.cached);
  // Stop rule, sched/utils.py check_stop @0.32.0: num_tokens >= max_model_len or outputs >= max_tokens.
  int64_t limit = limits_.max_model_len - input.prompt;
  if (input.max_tokens > 0) limit = std::min(limit, input.max_tokens);
  r.end_output = static_cast<int32_t>(std::min(input.target_output, limit));
  // One that has outlived its target ends with its next output, which may be its last by a limit all the same.
  r.ends_by_limit = std::max(input.target_output, input.output + 1) >= limit;
  const int64_t held = input.num_blocks < 0 ? blocks_for(input.computed) : input.num_blocks;
  // Of one that holds nothing yet: those that it will find with another resident.
  const int64_t hit = held > 0 ? 0 : cache_hit(input.cached, input.prompt + input.output);
  r.shared = static_cast<int32_t>(held > 0 ? input.shared_blocks : shared_hit(input.shared_blocks, hit));
  r.blocks = static_cast<int32_t>(std::max<int64_t>(held - r.shared, 0));
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
  if (pool_) pool_->introduce(slot, r.submission, input.block_hashes ? *input.block_hashes : std::vector<uint64_t>{});
  return slot;
}

void Residents::queue_by_priority(int32_t slot) {
  const Request& r = request(slot);
  const auto is_sooner_than = [&r](const Request& other) {
    if (r.priority != other.priority) return r.priority < other.priority;
    if (r.arrival != other.arrival) return r.arrival < other.arrival;
    return r.submission < other.submission;
  };
  int32_t before = -1;
  int32_t candidate = waiting_.last;
  while (candidate >= 0 && is_sooner_than(request(candidate))) {
    before = candidate;
    candidate = request(candidate).previous;
  }
  insert_before(waiting_, slot, before);
}

// ---------------------------------------------------------------- sums

Workload Residents::workload() const {
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
        if (!r.ending) w.num_decodes += 1;
        continue;
      }
      w.num_prefills += 1;
      w.prefill_tokens += rest;
      w.prefill_pairs += static_cast<double>(rest) * static_cast<double>(rest + 2 * done);
    }
  }
  return w;
}

int64_t Residents::remaining_prefill_tokens() const {
  int64_t total = 0;
  for (const int32_t slot : tracked_) total += request(slot).prompt + request(slot).output - request(slot).computed;
  for (int32_t slot = waiting_.first; slot >= 0; slot = request(slot).next) {
    const Request& r = request(slot);
    const int64_t num_tokens = r.prompt + r.output;
    total += num_tokens - (r.computed > 0 ? r.computed : cache_hit(r.cached, num_tokens));
  }
  return total;
}

uint64_t Residents::state_hash() const {
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

}  // namespace headway
