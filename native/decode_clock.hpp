// The decode clock: requests that only decode share one counter and keep their figures relative to it.
//
// A step moves the counter and touches none of them. Block needs come from a histogram of relative positions, the next
// end from a timing wheel, and the features of any number of steps from three sums. Requests themselves stay in the
// caller's table; `on_clock`, `computed`, `output`, `finish_clock` and the links of the wheel are written here.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <vector>

#include "request.hpp"
#include "step_time.hpp"

namespace headway {

class DecodeClock {
 public:
  explicit DecodeClock(int64_t block_size) { reset(block_size); }

  void reset(int64_t block_size) {
    block_size_ = block_size;
    now_ = size_ = relative_sum_ = relative_square_sum_ = 0;
    last_order_ = -1;
    residues_.assign(static_cast<size_t>(block_size), 0);
    wheel_.assign(kWheelSize, -1);
    wheel_bits_.fill(0);
  }

  int64_t now() const { return now_; }
  int64_t size() const { return size_; }
  // No request on the clock stands later in the running list than this.
  int64_t last_order() const { return last_order_; }
  void advance(int64_t num_steps) { now_ += num_steps; }

  // Puts a decode on the clock that ends in `num_outputs` steps.
  void join(std::vector<Request>& slots, int32_t slot, int32_t num_outputs) {
    Request& r = slots[static_cast<size_t>(slot)];
    r.finish_clock = now_ + num_outputs;
    r.computed -= static_cast<int32_t>(now_);
    r.output -= static_cast<int32_t>(now_);
    r.on_clock = true;
    size_ += 1;
    relative_sum_ += r.computed;
    relative_square_sum_ += int64_t{r.computed} * r.computed;
    residues_[static_cast<size_t>(residue(r.computed))] += 1;
    last_order_ = std::max(last_order_, r.order);
    add_end(slots, slot);
  }

  // Takes a request off the clock without restoring its figures: it is about to go.
  void forget(std::vector<Request>& slots, int32_t slot) {
    const Request& r = slots[static_cast<size_t>(slot)];
    remove_end(slots, slot);
    relative_sum_ -= r.computed;
    relative_square_sum_ -= int64_t{r.computed} * r.computed;
    residues_[static_cast<size_t>(residue(r.computed))] -= 1;
    size_ -= 1;
    if (size_ == 0) last_order_ = -1;
  }

  // Takes a request off the clock; its figures are true counts again, but for its blocks.
  void leave(std::vector<Request>& slots, int32_t slot) {
    forget(slots, slot);
    Request& r = slots[static_cast<size_t>(slot)];
    r.computed += static_cast<int32_t>(now_);
    r.output += static_cast<int32_t>(now_);
    r.on_clock = false;
  }

  // Moves a request's end to the next step.
  void end_next_step(std::vector<Request>& slots, int32_t slot) {
    remove_end(slots, slot);
    slots[static_cast<size_t>(slot)].finish_clock = now_ + 1;
    add_end(slots, slot);
  }

  // Heads the list of requests that may end now; follow next_end, and compare finish_clock.
  int32_t first_end() const { return wheel_[bucket_of(now_)]; }

  // Steps from now until a bucket with ends comes up, 1..kWheelSize.
  int64_t steps_to_next_end() const {
    const size_t start = bucket_of(now_ + 1);
    uint64_t word = wheel_bits_[start / 64] >> (start % 64);
    if (word != 0) return 1 + std::countr_zero(word);
    int64_t steps = 1 + 64 - static_cast<int64_t>(start % 64);
    for (size_t i = 1; i < kWheelSize / 64; ++i, steps += 64) {
      word = wheel_bits_[(start / 64 + i) % (kWheelSize / 64)];
      if (word != 0) return steps + std::countr_zero(word);
    }
    return int64_t{kWheelSize} - 64 + 1;  // the rest of the first word: every bucket before it is empty
  }

  // Decodes that need a further block in the next step: those whose computed tokens fill their last block.
  int64_t num_blocks_due() const { return num_blocks_due_at(now_); }
  // The same over the next `num_steps` steps.
  int64_t num_blocks_due(int64_t num_steps) const {
    int64_t due = num_steps / block_size_ * size_;
    size_t index = static_cast<size_t>(residue(-now_));
    for (int64_t rest = num_steps % block_size_; rest > 0; --rest) {
      due += residues_[index];
      index = index == 0 ? static_cast<size_t>(block_size_ - 1) : index - 1;
    }
    return due;
  }

  // How many steps, `at_most` so many, `free` blocks last.
  int64_t steps_until_shortage(int64_t free, int64_t at_most) const {
    if ((at_most / block_size_ + 1) * size_ <= free) return at_most;
    const int64_t cycles = free / size_;  // in block_size steps every decode takes one block
    int64_t rest = free - cycles * size_;
    int64_t steps = cycles * block_size_;
    for (int64_t clock = now_; steps < at_most; ++clock, ++steps) {
      rest -= num_blocks_due_at(clock);
      if (rest < 0) break;
    }
    return std::min(steps, at_most);
  }

  // Features of `num_steps` steps of these decodes alone, the first of them `steps_ahead` steps from now.
  Features features(int64_t num_steps, double knee, int64_t steps_ahead = 0) const {
    Features f;
    f.add_decodes(size_, context(steps_ahead), context_squares(steps_ahead), num_steps);
    f.close_batches(num_steps, knee);
    return f;
  }
  int64_t context(int64_t steps_ahead = 0) const { return relative_sum_ + size_ * (now_ + steps_ahead); }
  double context_squares(int64_t steps_ahead = 0) const {
    const int64_t then = now_ + steps_ahead;
    return static_cast<double>(relative_square_sum_ + 2 * then * relative_sum_ + size_ * then * then);
  }

  // Past its limit the clock has to be moved back, so that squared sums stay within 64 bits.
  bool is_past_its_limit() const { return now_ > kClockLimit; }
  // Moves it back; `first` heads the list of all requests that may be on it.
  void rebase(std::vector<Request>& slots, int32_t first) {
    // A whole number of blocks and of turns of the wheel leaves both alone.
    const int64_t shift = now_ - now_ % (block_size_ * int64_t{kWheelSize});
    now_ -= shift;
    relative_sum_ = relative_square_sum_ = 0;
    for (int32_t slot = first; slot >= 0; slot = slots[static_cast<size_t>(slot)].next) {
      Request& r = slots[static_cast<size_t>(slot)];
      if (!r.on_clock) continue;
      r.computed += static_cast<int32_t>(shift);
      r.output += static_cast<int32_t>(shift);
      r.finish_clock -= shift;
      relative_sum_ += r.computed;
      relative_square_sum_ += int64_t{r.computed} * r.computed;
    }
  }

 private:
  static constexpr size_t kWheelSize = 512;
  static constexpr int64_t kClockLimit = int64_t{1} << 24;

  int64_t residue(int64_t value) const {
    const int32_t rest = static_cast<int32_t>(value) % static_cast<int32_t>(block_size_);
    return rest < 0 ? rest + block_size_ : rest;
  }
  static size_t bucket_of(int64_t clock) { return static_cast<size_t>(clock) % kWheelSize; }
  int64_t num_blocks_due_at(int64_t clock) const { return residues_[static_cast<size_t>(residue(-clock))]; }

  void add_end(std::vector<Request>& slots, int32_t slot) {
    Request& r = slots[static_cast<size_t>(slot)];
    const size_t bucket = bucket_of(r.finish_clock);
    r.previous_end = -1;
    r.next_end = wheel_[bucket];
    if (r.next_end >= 0) slots[static_cast<size_t>(r.next_end)].previous_end = slot;
    wheel_[bucket] = slot;
    wheel_bits_[bucket / 64] |= uint64_t{1} << (bucket % 64);
  }

  void remove_end(std::vector<Request>& slots, int32_t slot) {
    const Request& r = slots[static_cast<size_t>(slot)];
    if (r.next_end >= 0) slots[static_cast<size_t>(r.next_end)].previous_end = r.previous_end;
    if (r.previous_end >= 0) {
      slots[static_cast<size_t>(r.previous_end)].next_end = r.next_end;
      return;
    }
    const size_t bucket = bucket_of(r.finish_clock);
    wheel_[bucket] = r.next_end;
    if (r.next_end < 0) wheel_bits_[bucket / 64] &= ~(uint64_t{1} << (bucket % 64));
  }

  int64_t block_size_ = 1;
  int64_t now_ = 0;
  int64_t size_ = 0;
  // Requests have computed = now + relative; sums over the relative positions.
  int64_t relative_sum_ = 0;
  int64_t relative_square_sum_ = 0;
  std::vector<int32_t> residues_;  // how many have relative mod block_size = r
  // A timing wheel of the ends: the bucket of a finish clock heads a list of requests; one that ends a whole turn later
  // shares the bucket, is passed over, and can only make a run shorter than need be.
  std::vector<int32_t> wheel_;
  std::array<uint64_t, kWheelSize / 64> wheel_bits_{};  // which buckets are not empty
  int64_t last_order_ = -1;
};

}  // namespace headway
