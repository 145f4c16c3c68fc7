// The replayed engine as Python sees it: ids instead of slots, Structs instead of inputs.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "python_values.hpp"

namespace headway::python {

using namespace nb::literals;

struct TokenBatch {
  nb::dict num_scheduled_tokens, cached_tokens;
  nb::list preempted, first_tokens, finished;
  int64_t free_blocks = 0;
  double time_s = 0;
};

class ReplayedEngine {
 public:
  ReplayedEngine(nb::object limits, nb::object step_time)
      : limits_(std::move(limits)), engine_(std::make_unique<Engine>(limits_from(limits_), step_time_from(step_time))) {}

  static ReplayedEngine* from_state(nb::handle state, nb::object step_time) {
    auto engine = std::make_unique<ReplayedEngine>(state.attr("limits"), std::move(step_time));
    engine->fill(state);
    return engine.release();
  }

  static ReplayedEngine* with_block_pool(nb::object limits, nb::object step_time) {
    auto engine = std::make_unique<ReplayedEngine>(std::move(limits), std::move(step_time));
    if (!engine->limits().prefix_caching) fail_input("prefix_caching", "must be on for an engine with a block pool");
    engine->engine_->scheduler().use_pool();
    return engine.release();
  }

  void load(nb::handle state) {
    ReplayedEngine fresh(state.attr("limits"), engine_->step_time());
    fresh.fill(state);
    std::swap(*this, fresh);
  }

  void submit(nb::handle request, nb::handle block_hashes) {
    RequestInput input = request_from(request, limits());
    nb::object id = checked_id(request);
    check_is_in_no_batch(input);
    check_holdings(input);
    const std::vector<uint64_t> hashes = hashes_from(block_hashes);
    input.block_hashes = &hashes;
    check_pool(input, hashes);
    remember(engine_->submit(input), std::move(id));
  }

  bool cancel(nb::handle request_id) {
    index_ids();
    const nb::object slot = nb::steal(PyObject_CallMethod(slots_.ptr(), "pop", "OO", request_id.ptr(), Py_None));
    if (!slot.is_valid()) throw nb::python_error();
    if (slot.is_none()) return false;
    engine_->remove(nb::cast<int32_t>(slot));
    ids_[nb::cast<size_t>(slot)] = nb::object();
    return true;
  }

  TokenBatch step() {
    TokenBatch batch;
    batch.time_s = engine_->step();
    const Scheduler& s = scheduler();
    for (const headway::Chunk& chunk : s.chunks()) {
      batch.num_scheduled_tokens[id(chunk.slot)] = chunk.tokens;
      if (const int64_t found = s.found(chunk.slot); found > 0) batch.cached_tokens[id(chunk.slot)] = found;
    }
    for (const int32_t slot : s.preempted()) batch.preempted.append(id(slot));
    for (const int32_t slot : s.given_first_tokens()) batch.first_tokens.append(id(slot));
    for (const int32_t slot : s.finished()) batch.finished.append(id(slot));
    batch.free_blocks = s.free_after();
    forget_departed();
    return batch;
  }

  int64_t advance(double seconds) {
    if (!std::isfinite(seconds) || seconds < 0) {
      fail_input("seconds", "must be finite and at least 0, not " + std::to_string(seconds));
    }
    const int64_t started = engine_->advance(seconds);
    if (started > 0) forget_departed();
    return started;
  }

  void start_batch() {
    engine_->start_batch();
    forget_departed();
  }

  ReplayedEngine* clone() const {
    auto copy = std::make_unique<ReplayedEngine>(*this);
    return copy.release();
  }

  ReplayedEngine(const ReplayedEngine& other)
      : limits_(other.limits_), engine_(std::make_unique<Engine>(*other.engine_)), ids_(other.ids_), is_indexed_(other.is_indexed_) {
    slots_.update(other.slots_);
  }
  ReplayedEngine(ReplayedEngine&&) = default;
  ReplayedEngine& operator=(ReplayedEngine&&) = default;

  // (tokens, blocks held by residents) of a prompt that the pool would give to a newcomer now.
  nb::tuple look_up(nb::handle block_hashes, nb::handle prompt_tokens) const {
    const BlockPool* pool = scheduler().pool();
    if (pool == nullptr) fail_input("block_hashes", "only an engine with a block pool looks them up");
    const int64_t num_found = pool->find(hashes_from(block_hashes), as_count(prompt_tokens, "prompt_tokens", 1));
    return nb::make_tuple(num_found * limits().block_size, num_found - pool->num_found_free());
  }

  FirstToken replay(nb::handle request, nb::handle block_hashes) {
    RequestInput newcomer = request_from(request, limits());
    checked_id(request);
    check_is_in_no_batch(newcomer);
    check_holdings(newcomer);
    const std::vector<uint64_t> hashes = hashes_from(block_hashes);
    newcomer.block_hashes = &hashes;
    check_pool(newcomer, hashes);
    if (newcomer.output > 0) fail_input("output_tokens", "a newcomer has no output yet");
    return engine_->first_token(newcomer);
  }

  FirstToken first_token(nb::handle prompt_tokens, nb::handle priority, nb::handle arrival_s, nb::handle cached_tokens,
                         nb::handle shared_blocks) {
    RequestInput r = newcomer(as_count(prompt_tokens, "prompt_tokens", 1), as_count(priority, "priority", -kMaxCount),
                              as_count(cached_tokens, "cached_tokens", 0),
                              as_count(shared_blocks, "shared_blocks", 0));
    r.arrival = as_arrival(arrival_s);
    check_prompt(limits(), r.prompt);
    return engine_->first_token(r);
  }

  // As first_token, but infinite instead of an error where the prompt cannot run here.
  FirstToken first_token_or_never(int64_t prompt_tokens, int64_t priority, int64_t cached_tokens = 0,
                                  int64_t shared_blocks = 0) {
    const Limits& l = limits();
    if (prompt_tokens < 1 || prompt_tokens > l.max_model_len - 1 ||
        scheduler().blocks_for(prompt_tokens) > l.num_blocks - 1) {
      return {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::infinity(), 0};
    }
    return engine_->first_token(newcomer(prompt_tokens, priority, cached_tokens, shared_blocks));
  }

  nb::list requests(const headway::List& list) const {
    const nb::object type = types().attr("EngineRequest");
    nb::list out;
    const Scheduler& s = scheduler();
    std::vector<bool> is_counted(s.pool() ? static_cast<size_t>(limits().num_blocks) : 0);
    for (int32_t slot = list.first; slot >= 0; slot = s.next_of(slot)) {
      const headway::Request& r = s.request(slot);
      int64_t cached = r.cached;
      int64_t shared = r.shared;
      if (s.pool() != nullptr) {
        if (r.place == Place::kWaiting) {
          cached = s.pool()->find(slot, r.prompt + r.output) * limits().block_size;
          shared = s.pool()->num_found() - s.pool()->num_found_free();
        }
        for (const int32_t block : s.pool()->blocks(slot)) {  // it counts at the first of those who hold it
          shared += is_counted[static_cast<size_t>(block)];
          is_counted[static_cast<size_t>(block)] = true;
        }
      }
      out.append(type("request_id"_a = id(slot), "prompt_tokens"_a = r.prompt, "computed_tokens"_a = s.computed(slot),
                      "output_tokens"_a = s.given_output(slot), "target_output_tokens"_a = r.target_output,
                      "max_tokens"_a = r.max_tokens == 0 ? nb::object(nb::none()) : nb::int_(r.max_tokens),
                      "priority"_a = r.priority,
                      "arrival_s"_a = std::isfinite(r.arrival) ? nb::object(nb::float_(r.arrival)) : nb::none(),
                      "num_blocks"_a = s.blocks(slot) + (s.computed(slot) > 0 ? r.shared : 0), "cached_tokens"_a = cached, "shared_blocks"_a = shared,
                      "scheduled_tokens"_a = s.newest_tokens(slot)));
    }
    return out;
  }

  nb::object state() const {
    nb::list departed;
    for (const DepartedChunk& chunk : scheduler().departed()) {
      departed.append(nb::make_tuple(chunk.tokens, chunk.context, chunk.is_decode));
    }
    return types().attr("EngineState")("departed"_a = nb::tuple(departed),
                                       "limits"_a = limits_, "running"_a = nb::tuple(requests(scheduler().running())),
                                       "waiting"_a = nb::tuple(requests(scheduler().waiting())),
                                       "residual_s"_a = engine_->residual_s(),
                                       "free_blocks"_a = scheduler().free_blocks());
  }

  // Filling without Structs, for mirrors of an engine on this side: inputs are taken as right.
  void clear(nb::object limits, const Limits& native_limits) {
    limits_ = std::move(limits);
    engine_->reset(native_limits);
    ids_.clear();
    slots_.clear();
    is_indexed_ = false;
  }
  void place(const RequestInput& input, nb::object id) { note(engine_->place_running(input), std::move(id)); }
  void queue(const RequestInput& input, nb::object id) { note(engine_->submit(input), std::move(id)); }
  void depart(const DepartedChunk& chunk) {
    if (!limits().async_scheduling) fail_input("departed", "must be empty for an engine without async_scheduling");
    engine_->place_departed(chunk);
  }
  // Once all are placed: as many blocks are free as the engine says, or (-1) as nobody holds.
  void take_free_blocks(int64_t given) {
    const int64_t most = limits().num_blocks - 1, unheld = scheduler().free_blocks();
    if (unheld < 0) {
      fail_input("num_blocks", "requests hold " + std::to_string(most - unheld) + " blocks, only " +
                                   std::to_string(most) + " exist");
    }
    if (given > unheld) {
      fail_input("free_blocks", std::to_string(given) + " free and " + std::to_string(most - unheld) +
                                    " held are more than the " + std::to_string(most) + " that exist");
    }
    if (given >= 0) engine_->scheduler().set_free_blocks(given);
  }
  void set_residual(double seconds) { engine_->set_residual(seconds); }
  const StepTime& step_time() const { return engine_->step_time(); }

  bool contains(nb::handle request_id) {
    if (!is_indexed_) {  // an id is often the very object that was handed in
      for (size_t slot = 0; slot < ids_.size(); ++slot) {
        if (ids_[slot].is(request_id)) {
          return scheduler().request(static_cast<int32_t>(slot)).place != Place::kNowhere;
        }
      }
    }
    index_ids();
    return slots_.contains(request_id);
  }
  const Scheduler& scheduler() const { return engine_->scheduler(); }
  double residual_s() const { return engine_->residual_s(); }

 private:
  ReplayedEngine(nb::object limits, const StepTime& step_time)
      : limits_(std::move(limits)), engine_(std::make_unique<Engine>(limits_from(limits_), step_time)) {}

  const Limits& limits() const { return scheduler().limits(); }

  nb::object checked_id(nb::handle request) {
    index_ids();
    nb::object id = get(request, names().id);
    if (!nb::isinstance<nb::str>(id)) fail_input("request_id", "must be a string");
    if (slots_.contains(id)) {
      fail_input("request_id", "'" + nb::cast<std::string>(id) + "' is already in this engine");
    }
    return id;
  }

  static std::vector<uint64_t> hashes_from(nb::handle block_hashes) {
    std::vector<uint64_t> hashes;
    for (nb::handle hash : block_hashes) {
      uint64_t value = 0;
      if (!PyLong_CheckExact(hash.ptr()) || !nb::try_cast<uint64_t>(hash, value)) {
        fail_input("block_hashes", "must be integers within 64 bits, not " + std::string(nb::repr(hash).c_str()));
      }
      hashes.push_back(value);
    }
    return hashes;
  }

  void check_pool(const RequestInput& r, const std::vector<uint64_t>& hashes) const {
    if (scheduler().pool() == nullptr) {
      if (!hashes.empty()) fail_input("block_hashes", "only an engine with a block pool looks them up");
      return;
    }
    if (r.cached > 0) fail_input("cached_tokens", "an engine with a block pool looks them up itself");
    if (r.computed > 0 || r.num_blocks > 0) fail_input("num_blocks", "a request brings no blocks into a block pool");
  }

  static void check_is_in_no_batch(const RequestInput& r) {
    if (r.scheduled > 0) fail_input("scheduled_tokens", "must be 0 for a request that does not run");
  }

  void check_holdings(const RequestInput& r) const {
    const int64_t held = r.num_blocks < 0 ? scheduler().blocks_for(r.computed) : r.num_blocks;
    if (held - r.shared_blocks > scheduler().free_blocks()) {
      fail_input("num_blocks", "holds " + std::to_string(held) + " blocks, only " +
                                   std::to_string(scheduler().free_blocks()) + " are free");
    }
  }

  static RequestInput newcomer(int64_t prompt_tokens, int64_t priority, int64_t cached_tokens, int64_t shared_blocks) {
    RequestInput r;
    r.prompt = prompt_tokens;
    r.priority = priority;
    r.cached = cached_tokens;
    r.shared_blocks = shared_blocks;
    r.arrival = std::numeric_limits<double>::quiet_NaN();
    return r;
  }

  void remember(int32_t slot, nb::object id) {
    slots_[id] = slot;
    note(slot, std::move(id));
  }

  // Most mirrors are asked for a first token and thrown away: the index of ids waits until somebody asks for one.
  void index_ids() {
    if (is_indexed_) return;
    is_indexed_ = true;
    for (size_t slot = 0; slot < ids_.size(); ++slot) {
      if (ids_[slot].is_valid() && scheduler().request(static_cast<int32_t>(slot)).place != Place::kNowhere) {
        slots_[ids_[slot]] = static_cast<int32_t>(slot);
      }
    }
  }

  void note(int32_t slot, nb::object id) {
    if (ids_.size() <= static_cast<size_t>(slot)) ids_.resize(static_cast<size_t>(slot) + 1);
    ids_[static_cast<size_t>(slot)] = std::move(id);
  }

  const nb::object& id(int32_t slot) const { return ids_[static_cast<size_t>(slot)]; }

  // Drops the ids of requests that ended. A long advance() ends many at once, so the map is compared, not notified.
  void forget_departed() {
    const Scheduler& s = scheduler();
    if (!is_indexed_ || static_cast<int64_t>(slots_.size()) == s.num_requests()) return;
    for (size_t slot = 0; slot < ids_.size(); ++slot) {
      if (ids_[slot].is_valid() && s.request(static_cast<int32_t>(slot)).place == headway::Place::kNowhere) {
        if (slots_.contains(ids_[slot])) PyDict_DelItem(slots_.ptr(), ids_[slot].ptr());
        ids_[slot] = nb::object();
      }
    }
  }

  void fill(nb::handle state) {
    const Limits& l = limits();
    const nb::object running = state.attr("running");
    const nb::object waiting = state.attr("waiting");
    if (static_cast<int64_t>(nb::len(running)) > l.max_num_seqs) {
      fail_input("running", std::to_string(nb::len(running)) + " requests, max_num_seqs is " +
                                std::to_string(l.max_num_seqs));
    }
    for (nb::handle request : running) {
      const RequestInput input = request_from(request, l);
      nb::object id = checked_id(request);
      remember(engine_->place_running(input), std::move(id));
    }
    for (nb::handle request : waiting) {
      const RequestInput input = request_from(request, l);
      nb::object id = checked_id(request);
      check_is_in_no_batch(input);
      remember(engine_->submit(input), std::move(id));
    }
    for (nb::handle chunk : state.attr("departed")) {
      depart({as_count(nb::object(chunk[0]), "departed", 1), as_count(nb::object(chunk[1]), "departed", 0),
              nb::cast<bool>(chunk[2])});
    }
    nb::object free = state.attr("free_blocks");
    take_free_blocks(free.is_none() ? -1 : as_count(free, "free_blocks", 0));
    engine_->set_residual(as_seconds(state.attr("residual_s"), "residual_s"));
  }

  nb::object limits_;
  std::unique_ptr<Engine> engine_;
  std::vector<nb::object> ids_;  // by slot
  nb::dict slots_;               // id -> slot
  bool is_indexed_ = true;       // slots_ holds every id
};

}  // namespace headway::python
