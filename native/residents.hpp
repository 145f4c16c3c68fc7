// The requests inside an engine: running and waiting lists in engine order, the decode clock, and the free blocks.
//
// Requests that only decode stand on the clock; running requests that do anything else are *tracked* one by one. This
// class moves requests between the places and answers what stands where; which request runs is the scheduler's word.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "block_pool.hpp"
#include "decode_clock.hpp"
#include "request.hpp"

namespace headway {

class Residents {
 public:
  const Limits& limits() const { return limits_; }
  const Request& request(int32_t slot) const { return slots_[static_cast<size_t>(slot)]; }
  const List& running() const { return running_; }
  const List& waiting() const { return waiting_; }
  int32_t next_of(int32_t slot) const { return request(slot).next; }
  int64_t num_requests() const { return running_.size + waiting_.size; }
  int64_t num_decodes() const { return clock_.size(); }
  // Whose blocks are whose, and what they hold: null where blocks are only counted.
  const BlockPool* pool() const { return pool_ ? &*pool_ : nullptr; }
  int64_t free_blocks() const { return free_; }
  void set_free_blocks(int64_t free) { free_ = free; }

  int64_t computed(int32_t slot) const {
    const Request& r = request(slot);
    return r.on_clock ? r.computed + clock_.now() : r.computed;
  }
  int64_t output(int32_t slot) const {
    const Request& r = request(slot);
    return r.on_clock ? r.output + clock_.now() : r.output;
  }
  // Its own blocks: those that come free when it goes. With a pool that is the pool's word, and these are all it holds.
  int64_t blocks(int32_t slot) const {
    const Request& r = request(slot);
    return r.on_clock ? blocks_for(r.computed + clock_.now()) - r.shared : r.blocks;
  }
  int64_t held(int32_t slot) const { return blocks(slot) + request(slot).shared; }
  // Its share of the newest batch, whose outcome an asynchronous engine does not know yet.
  int64_t newest_tokens(int32_t slot) const {
    const Request& r = request(slot);
    if (r.newest_in == step_number_) return r.newest_tokens;
    return limits_.async_scheduling && r.on_clock ? 1 : 0;
  }
  // Outputs it has given; output() also counts the one that the newest batch will give.
  int64_t given_output(int32_t slot) const {
    const Request& r = request(slot);
    const bool samples = r.newest_in == step_number_ ? r.newest_samples : limits_.async_scheduling && r.on_clock;
    return output(slot) - (samples ? 1 : 0);
  }
  Workload workload() const;  // O(residents)
  int64_t remaining_prefill_tokens() const;

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
  // Of the blocks of such a hit, those that another resident holds: they cost no free block.
  int64_t shared_hit(int64_t shared_blocks, int64_t hit) const {
    return hit == 0 ? 0 : std::min(shared_blocks, hit / limits_.block_size);
  }

 protected:
  explicit Residents(const Limits& limits)
      : limits_(limits), free_(limits.num_blocks - 1), clock_(limits.block_size) {}  // less the null block
  void reset(const Limits& limits);

  Request& at(int32_t slot) { return slots_[static_cast<size_t>(slot)]; }
  int32_t new_slot(const RequestInput& input);
  void free_slot(int32_t slot);
  // Gives back `num_own` blocks of a request: all it holds.
  void release_blocks(int32_t slot, int64_t num_own) {
    if (!pool_) {
      free_ += num_own;
      return;
    }
    pool_->release(slot);
    free_ = pool_->num_free();
  }
  void unlink(List& list, int32_t slot);
  void append(List& list, int32_t slot) { insert_before(list, slot, -1); }
  void insert_before(List& list, int32_t slot, int32_t before);
  void queue_by_priority(int32_t slot);

  void start_running(int32_t slot);
  // Takes a request out of the running list, its clock or its tracking. Its blocks are the caller's concern.
  void stop_running(int32_t slot);
  void join_clock_or_track(int32_t slot);
  void join_clock(int32_t slot);
  void leave_clock(int32_t slot);
  void untrack(int32_t slot);
  uint64_t state_hash() const;

  Limits limits_;
  std::vector<Request> slots_;
  std::vector<int32_t> free_slots_;
  List running_;
  List waiting_;
  std::vector<int32_t> tracked_;  // running requests not on the clock, in running order; between steps
  int64_t free_ = 0;
  std::optional<BlockPool> pool_;
  DecodeClock clock_;
  uint64_t step_number_ = 0;
  uint64_t num_submissions_ = 0;
  int64_t next_order_ = 0;
};

// Inline, because a replay calls these at every event.

inline void Residents::free_slot(int32_t slot) {
  at(slot).place = Place::kNowhere;
  at(slot).on_clock = false;
  free_slots_.push_back(slot);
}

inline void Residents::insert_before(List& list, int32_t slot, int32_t before) {
  Request& r = at(slot);
  const int32_t previous = before < 0 ? list.last : request(before).previous;
  r.previous = previous;
  r.next = before;
  (previous < 0 ? list.first : at(previous).next) = slot;
  (before < 0 ? list.last : at(before).previous) = slot;
  list.size += 1;
}

inline void Residents::unlink(List& list, int32_t slot) {
  const Request& r = request(slot);
  (r.previous < 0 ? list.first : at(r.previous).next) = r.next;
  (r.next < 0 ? list.last : at(r.next).previous) = r.previous;
  list.size -= 1;
}

inline void Residents::start_running(int32_t slot) {
  Request& r = at(slot);
  r.place = Place::kRunning;
  r.order = next_order_++;
  append(running_, slot);
}

inline void Residents::stop_running(int32_t slot) {
  if (request(slot).on_clock) {
    clock_.forget(slots_, slot);
  } else {
    untrack(slot);
  }
  unlink(running_, slot);
}

// A decode with no blocks in advance joins the clock: what it holds follows from the clock alone. All else is tracked.
inline void Residents::join_clock_or_track(int32_t slot) {
  Request& r = at(slot);
  if (r.output > 0 && r.computed == r.prompt + r.output - 1 &&
      r.blocks + r.shared == blocks_for(r.computed)) {
    untrack(slot);
    join_clock(slot);
  } else if (!r.tracked) {
    r.tracked = true;
    tracked_.push_back(slot);  // newest last, as in the running list
  }
}

inline void Residents::join_clock(int32_t slot) {
  if (clock_.is_past_its_limit()) clock_.rebase(slots_, running_.first);
  // A request already at its end still takes the token that vLLM checks.
  clock_.join(slots_, slot, std::max(1, request(slot).end_output - request(slot).output));
}

inline void Residents::leave_clock(int32_t slot) {
  clock_.leave(slots_, slot);
  at(slot).blocks = static_cast<int32_t>(blocks_for(request(slot).computed)) - request(slot).shared;
}

inline void Residents::untrack(int32_t slot) {
  Request& r = at(slot);
  if (!r.tracked) return;
  r.tracked = false;
  tracked_.erase(std::find(tracked_.begin(), tracked_.end(), slot));
}

}  // namespace headway
