#include "engine.hpp"

#include <limits>

namespace headway {

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// What follows its first token does not matter.
RequestInput as_newcomer(RequestInput request) {
  request.target_output = std::numeric_limits<int32_t>::max();
  request.max_tokens = 0;
  return request;
}

}  // namespace

void Engine::reset(const Limits& limits) {
  scheduler_.reset(limits);
  residual_s_ = 0;
  newest_ = Features{};
  open_ = OpenStep{};
}

int32_t Engine::place_running(const RequestInput& input) {
  open_ = OpenStep{};
  if (input.scheduled > 0) note_newest(input);
  return scheduler_.place_running(input);
}

void Engine::note_newest(const RequestInput& input) {
  const int64_t context = input.computed - input.scheduled;
  const bool is_decode = input.scheduled == 1 && input.output > 0 && context == input.prompt + input.output - 1;
  newest_.add_chunk(input.scheduled, context, is_decode);
  newest_.close_batches(1, step_time_.knee);
}

void Engine::place_departed(const DepartedChunk& chunk) {
  scheduler_.note_departed(chunk);
  newest_.add_chunk(chunk.tokens, chunk.context, chunk.is_decode);
  newest_.close_batches(1, step_time_.knee);
}

// Features of what starts once `scheduled` is scheduled: the same, or what an asynchronous engine had scheduled before,
// while the `last` of the new batches waits in its place.
Features Engine::begin(const Features& scheduled, const Features& last) {
  if (!scheduler_.limits().async_scheduling) return scheduled;
  Features begun = newest_;
  begun += scheduled - last;
  newest_ = last;
  return begun;
}

Features Engine::all_scheduled() const {
  Features all = total_;
  if (scheduler_.limits().async_scheduling) all += newest_;
  return all;
}

int32_t Engine::submit(const RequestInput& input) {
  if (open_.known) append_to_open_step(input);
  return scheduler_.submit(input);
}

void Engine::remove(int32_t slot) {
  open_ = OpenStep{};
  scheduler_.remove(slot);
}

double Engine::step() {
  open_ = OpenStep{};
  residual_s_ = 0;
  const bool did_anything = scheduler_.step(true, step_time_.knee);
  begin(scheduler_.features(), scheduler_.features());
  return did_anything ? step_time_.seconds(scheduler_.features()) : 0;
}

// Seconds until the last of the next `num_steps` decode steps is over, or for an asynchronous engine until it starts.
double Engine::seconds_of_decodes(int64_t num_steps) const {
  if (!scheduler_.limits().async_scheduling) {
    return step_time_.seconds(scheduler_.decode_features(num_steps, step_time_.knee));
  }
  Features begun = newest_;
  if (num_steps > 1) begun += scheduler_.decode_features(num_steps - 1, step_time_.knee);
  return step_time_.seconds(begun);
}

int64_t Engine::advance(double seconds) {
  if (seconds < residual_s_) {
    residual_s_ -= seconds;
    return 0;
  }
  seconds -= residual_s_;
  residual_s_ = 0;
  scheduler_.watch_anew();
  int64_t started = 0;
  while (seconds > 0 && !scheduler_.livelocked()) {
    int64_t run = scheduler_.decode_run();
    if (run > 1 && seconds_of_decodes(run) > seconds) {
      // The longest part of the run that ends in time, then the step that straddles the end.
      int64_t fits = 0;
      int64_t too_long = run;
      while (too_long - fits > 1) {
        const int64_t middle = fits + (too_long - fits) / 2;
        (seconds_of_decodes(middle) <= seconds ? fits : too_long) = middle;
      }
      run = fits > 0 ? fits : 1;
    }
    Features last;
    if (run > 0) {
      last = scheduler_.decode_features(1, step_time_.knee, run - 1);
      scheduler_.run_decodes(run, step_time_.knee);
    } else if (scheduler_.step(false, step_time_.knee)) {
      last = scheduler_.features();
      run = 1;
    } else if (newest_.steps == 0) {
      break;  // nothing to do, or stuck
    }
    started += run;
    num_steps_ += run;
    const Features begun = begin(scheduler_.features(), last);
    total_ += begun;
    const double duration = step_time_.seconds(begun);
    if (duration > seconds) {
      residual_s_ = duration - seconds;
      seconds = 0;
    } else {
      seconds -= duration;
    }
  }
  // The way to the open step stays right while it lies ahead, but for the threshold, which counts the newcomer.
  if (open_.step < num_steps_ || open_.ahead == nullptr || scheduler_.limits().long_prefill_token_threshold > 0) {
    if (started > 0) open_ = OpenStep{};
  }
  return started;
}

void Engine::start_batch() {
  if (newest_.steps == 0 || residual_s_ > 0) return;
  open_ = OpenStep{};
  scheduler_.step(false, step_time_.knee);
  residual_s_ = step_time_.seconds(begin(scheduler_.features(), scheduler_.features()));
}

FirstToken Engine::first_token(const RequestInput& request) {
  if (!open_.known) {
    num_steps_ = 0;
    total_ = Features{};
  }
  const bool brings_tokens = request.computed > 0 || request.num_blocks > 0;
  if (scheduler_.limits().priority_policy || brings_tokens || scheduler_.pool() != nullptr) {
    Scheduler scheduler(scheduler_);
    const int32_t slot = scheduler.submit(as_newcomer(request));
    return replay_newcomer(scheduler, slot, num_steps_, all_scheduled(), kNever);
  }
  const int64_t prompt = request.prompt;
  if (!open_.known) find_open_step();
  if (open_.never) return {kNever, kNever, 0};
  const int64_t cached = scheduler_.cache_hit(request.cached, prompt);
  const int64_t shared = scheduler_.shared_hit(request.shared_blocks, cached);
  const int64_t chunk = scheduler_
                            .admission(prompt, cached, shared, open_.budget, open_.free, open_.num_running,
                                       open_.num_present)
                            .tokens;
  const double wait_s = residual_s_ + since(open_.before);
  Features with_newcomer = open_.residents;
  with_newcomer.add_chunk(chunk, cached, false);
  with_newcomer.close_batches(1, step_time_.knee);
  if (cached + chunk == prompt) return {wait_s + step_time_.seconds(with_newcomer), wait_s, open_.step + 1 - num_steps_};

  // It needs further steps: go on from the open step with the newcomer in its place.
  RequestInput newcomer = as_newcomer(request);
  Scheduler scheduler(open_.ahead ? *open_.ahead : scheduler_);
  scheduler.set_phantoms(0);
  if (!open_.is_past || chunk == 0) {
    const int32_t slot = scheduler.submit(newcomer);
    Features total = open_.before;
    if (open_.is_past) total += open_.residents;
    return replay_newcomer(scheduler, slot, open_.step + (open_.is_past ? 1 : 0), total, kNever);
  }
  newcomer.computed = cached + chunk;
  newcomer.shared_blocks = shared;
  const int32_t slot = scheduler.place_running(newcomer);
  Features total = open_.before;
  total += with_newcomer;
  return replay_newcomer(scheduler, slot, open_.step + 1, total, wait_s);
}

// Steps until the newcomer's first output. `wait_s` is known already where it has had a chunk.
FirstToken Engine::replay_newcomer(Scheduler& scheduler, int32_t slot, int64_t steps, Features total,
                                   double wait_s) const {
  while (!scheduler.livelocked()) {
    if (const int64_t run = scheduler.decode_run(); run > 0) {
      scheduler.run_decodes(run, step_time_.knee);
      total += scheduler.features();
      steps += run;
      continue;
    }
    const Features before = total;
    if (!scheduler.step(false, step_time_.knee)) break;
    total += scheduler.features();
    steps += 1;
    if (wait_s == kNever) {
      for (const Chunk& chunk : scheduler.chunks()) {
        if (chunk.slot == slot) wait_s = residual_s_ + since(before);
      }
    }
    for (const int32_t first : scheduler.first_tokens()) {
      if (first == slot) return {residual_s_ + since(total), wait_s, steps - num_steps_};
    }
  }
  return {kNever, wait_s, 0};
}

void Engine::find_open_step() {
  open_ = OpenStep{};
  open_.known = true;
  open_.step = num_steps_;
  if (scheduler_.next_step_is_open()) {
    open_.before = all_scheduled();
    note_open_next_step(scheduler_);
    return;
  }
  open_.ahead = std::make_unique<Scheduler>(scheduler_);
  open_.ahead->set_phantoms(1);
  open_.ahead->watch_anew();
  seek_open_step(num_steps_, all_scheduled());
}

void Engine::note_open_next_step(const Scheduler& scheduler) {
  open_.is_past = false;
  open_.residents = scheduler.num_decodes() > 0 ? scheduler.decode_features(1, step_time_.knee) : Features{};
  open_.budget = scheduler.limits().max_num_batched_tokens - scheduler.num_decodes();
  open_.free = scheduler.free_after_next_decodes();
  open_.num_running = scheduler.running().size;
  open_.num_present = scheduler.num_requests() + 1;
}

// Replays the residents from `ahead` until a step that would try a newcomer.
void Engine::seek_open_step(int64_t steps, Features total) {
  Scheduler& ahead = *open_.ahead;
  while (!ahead.livelocked()) {
    if (ahead.next_step_is_open()) {
      open_.step = steps;
      open_.before = total;
      return note_open_next_step(ahead);
    }
    const int64_t run = ahead.decode_run();
    if (run > 0) {
      ahead.run_decodes(run, step_time_.knee);
      steps += run;
      total += ahead.features();
      continue;
    }
    const int64_t num_present = ahead.num_requests() + 1;
    if (!ahead.step(false, step_time_.knee)) break;
    if (ahead.last_step_was_open()) {
      open_.is_past = true;
      open_.step = steps;
      open_.before = total;
      open_.residents = ahead.features();
      open_.budget = ahead.budget_left();
      open_.free = ahead.free_after();
      open_.num_running = ahead.running_after();
      open_.num_present = num_present;
      return;
    }
    steps += 1;
    total += ahead.features();
  }
  open_.never = true;
}

// A routed newcomer becomes a resident: the known way ahead is extended by it instead of being replayed anew.
void Engine::append_to_open_step(const RequestInput& input) {
  // With a threshold one more request changes the chunks of those before it; without `ahead` replaying is as cheap.
  if (open_.never || open_.ahead == nullptr || scheduler_.limits().long_prefill_token_threshold > 0 ||
      input.computed > 0 || input.output > 0) {
    open_ = OpenStep{};
    return;
  }
  Scheduler& ahead = *open_.ahead;
  if (!open_.is_past) {
    ahead.submit(input);
    seek_open_step(open_.step, open_.before);
    return;
  }
  const int64_t cached = scheduler_.cache_hit(input.cached, input.prompt);
  const int64_t shared = scheduler_.shared_hit(input.shared_blocks, cached);
  const auto [chunk, blocks] = scheduler_.admission(input.prompt, cached, shared, open_.budget, open_.free,
                                                    open_.num_running, open_.num_present);
  if (chunk == 0) {
    ahead.submit(input);
  } else {
    RequestInput admitted = input;
    admitted.computed = cached + chunk;
    admitted.shared_blocks = shared;
    const bool gives_output = admitted.computed == input.prompt;
    const bool ends_at_once = gives_output && (input.target_output == 1 || input.max_tokens == 1 ||
                                               input.prompt + 1 >= scheduler_.limits().max_model_len);
    if (scheduler_.limits().async_scheduling) {
      admitted.scheduled = chunk;  // what it gives, and whether it ends, is known a step later
      ahead.place_running(admitted);
    } else if (!ends_at_once) {
      admitted.output = gives_output ? 1 : 0;
      ahead.place_running(admitted);
    }
    open_.residents.add_chunk(chunk, cached, false);
    open_.residents.close_batches(1, step_time_.knee);
    open_.budget -= chunk;
    open_.free -= blocks;
    open_.num_running += 1;
    open_.num_present += 1;
    if (open_.budget > 0 && open_.num_running < scheduler_.limits().max_num_seqs) return;
  }
  Features total = open_.before;
  total += open_.residents;
  seek_open_step(open_.step + 1, total);
}

}  // namespace headway
