// From a snapshot, taken while a batch runs, to a replayed engine between steps: in one call, read from its Structs.
//
// An engine publishes while a batch is in flight. Here that batch is brought to its end, and each resident gets the
// length it is expected to have. vLLM raises num_computed_tokens in schedule() but appends the output in the update: a
// request whose computed tokens equal its tokens gets one output here, and those that thereby end leave with their
// blocks. An asynchronous engine publishes before it schedules the next batch beside the one in flight, and schedules
// that without the outcome: its batch is left in the state, and what comes later waits for the batch after that.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "length_rule.hpp"
#include "python_engine.hpp"

namespace headway::python {

// Attribute names of what is read for every resident, interned once.
struct SnapshotNames {
  nb::object id, prompt, computed, output, num_blocks, max_tokens, priority, arrival, scheduled, cached, shared,
      predicted;
  SnapshotNames()
      : id(names().id), prompt(names().prompt), computed(names().computed), output(names().output),
        num_blocks(names().num_blocks), max_tokens(names().max_tokens), priority(names().priority),
        arrival(names().arrival), scheduled(names().scheduled), cached(names().cached), shared(names().shared),
        predicted(RequestNames::intern("predicted_output_tokens")) {}
};

inline const SnapshotNames& snapshot_names() {
  static const SnapshotNames* const instance = new SnapshotNames();  // lives as long as the interpreter
  return *instance;
}

// What a dict holds at a key, not owned; null where that is nothing.
inline nb::handle find(const nb::dict& dict, nb::handle key) {
  PyObject* value = PyDict_GetItemWithError(dict.ptr(), key.ptr());
  if (value == nullptr && PyErr_Occurred() != nullptr) throw nb::python_error();
  return value;
}

// Engine id -> ledger id of the requests shown: as in `known`, else as `match(engine id)` says.
inline nb::dict shown_ids(nb::handle snapshot, const nb::dict& known, nb::handle match) {
  const nb::object& id_name = snapshot_names().id;
  nb::dict found;
  for (const char* list : {"running", "waiting"}) {
    for (nb::handle request : snapshot.attr(list)) {
      const nb::object id = get(request, id_name);
      const nb::handle ledger_id = find(known, id);
      if (ledger_id.is_valid()) {
        found[id] = ledger_id;
      } else {
        found[id] = match(id);
      }
    }
  }
  return found;
}

class SnapshotLoad {
 public:
  // `ledger_ids` as shown_ids gives them; `ledger`: ledger id -> entry; `released`: ledger ids of those that are gone.
  SnapshotLoad(ReplayedEngine& engine, nb::dict ledger_ids, nb::dict ledger, nb::dict released, const LengthRule& rule,
               double default_output)
      : engine_(engine), ledger_ids_(std::move(ledger_ids)), ledger_(std::move(ledger)),
        released_(std::move(released)), rule_(rule), default_output_(default_output) {}

  void run(nb::handle snapshot) {
    const nb::object limits = snapshot.attr("limits");
    limits_ = limits_from(limits);
    engine_.clear(limits, limits_);
    read(snapshot.attr("running"), running_);
    read(snapshot.attr("waiting"), waiting_);
    free_blocks_ = as_count(snapshot.attr("free_blocks"), "free_blocks", 0);
    const std::vector<int64_t> shared = shared_blocks();
    Features in_flight;
    std::vector<DepartedChunk> departed;
    std::vector<Shown*> stay;
    for (size_t i = 0; i < running_.size(); ++i) {
      Shown& r = running_[i];
      const bool is_scheduled = r.input.scheduled > 0;
      if (is_scheduled && !limits_.async_scheduling) {
        const DepartedChunk chunk = chunk_of(r.input);
        in_flight.add_chunk(chunk.tokens, chunk.context, chunk.is_decode);
        r.input.output += r.input.computed == r.input.prompt + r.input.output;
      } else if (is_scheduled && r.has_left) {
        departed.push_back(chunk_of(r.input));
      }
      const RequestInput& in = r.input;
      const bool ended = (in.max_tokens > 0 && in.max_tokens <= in.output) || in.prompt + in.output >= limits_.max_model_len;
      if (r.has_left || (ended && !limits_.async_scheduling)) {
        free_blocks_ += in.num_blocks - shared[i];
      } else {
        r.input.shared_blocks = shared[i];
        stay.push_back(&r);
      }
    }
    if (static_cast<int64_t>(stay.size()) > limits_.max_num_seqs) {
      fail_input("running", std::to_string(stay.size()) + " requests, max_num_seqs is " +
                                std::to_string(limits_.max_num_seqs));
    }
    const size_t num_running = stay.size();
    for (Shown& r : waiting_) {
      if (!r.has_left) stay.push_back(&r);
    }
    check_ids(stay);
    for (size_t i = 0; i < stay.size(); ++i) {
      RequestInput& input = stay[i]->input;
      if (!limits_.async_scheduling || i >= num_running) input.scheduled = 0;
      expect(*stay[i]);
      if (i < num_running) {
        engine_.place(input, std::move(stay[i]->id));
      } else {
        engine_.queue(input, std::move(stay[i]->id));
      }
    }
    for (const DepartedChunk& chunk : departed) {
      if (chunk.context < 0) fail_input("departed", "context must be at least 0");
      engine_.depart(chunk);
    }
    if (free_blocks_ < 0) fail_input("free_blocks", "must be at least 0, not " + std::to_string(free_blocks_));
    engine_.take_free_blocks(free_blocks_);
    set_residual(in_flight);
  }

 private:
  struct Shown {
    RequestInput input;
    nb::object id;
    nb::handle entry;  // of the ledger, where it has one
    bool has_left = false;
  };

  void read(nb::handle requests, std::vector<Shown>& out) const {
    const SnapshotNames& n = snapshot_names();
    out.reserve(nb::len(requests));
    for (nb::handle request : requests) {
      Shown r;
      r.id = get(request, n.id);
      r.input.prompt = as_count(get(request, n.prompt), "prompt_tokens", 1);
      r.input.computed = as_count(get(request, n.computed), "computed_tokens", 0);
      r.input.output = as_count(get(request, n.output), "output_tokens", 0);
      r.input.num_blocks = as_count(get(request, n.num_blocks), "num_blocks", 0);
      r.input.max_tokens = as_count(get(request, n.max_tokens), "max_tokens", 0);
      r.input.priority = as_count(get(request, n.priority), "priority", -kMaxCount);
      r.input.arrival = as_arrival(get(request, n.arrival));
      r.input.scheduled = as_count(get(request, n.scheduled), "scheduled_tokens", 0);
      r.input.cached = as_count(get(request, n.cached), "cached_tokens", 0);
      r.input.shared_blocks = as_count(get(request, n.shared), "shared_blocks", 0);
      const nb::handle ledger_id = find(ledger_ids_, r.id);
      if (ledger_id.is_valid() && !ledger_id.is_none()) {
        r.entry = find(ledger_, ledger_id);
        r.has_left = find(released_, ledger_id).is_valid();
      }
      out.push_back(std::move(r));
    }
  }

  void check_ids(const std::vector<Shown*>& stay) const {
    if (nb::len(ledger_ids_) >= running_.size() + waiting_.size()) return;
    nb::dict seen;
    for (const Shown* r : stay) {
      if (seen.contains(r->id)) {
        fail_input("request_id", "'" + nb::cast<std::string>(r->id) + "' is already in this engine");
      }
      seen[r->id] = nb::none();
    }
  }

  // Its share of the batch in flight.
  static DepartedChunk chunk_of(const RequestInput& r) {
    const int64_t context = r.computed - r.scheduled;
    return {r.scheduled, context, r.scheduled == 1 && r.output > 0 && context == r.prompt + r.output - 1};
  }

  // Of each running request's blocks those that count at another one.
  //
  // A block that several requests hold is counted at each of them in a snapshot, so all blocks together are too many:
  // as many too many as are shared. They count at the eldest; from the newest on they are taken off, first from those
  // blocks that a request found in the prefix cache.
  std::vector<int64_t> shared_blocks() const {
    std::vector<int64_t> shared(running_.size(), 0);
    int64_t surplus = free_blocks_ - (limits_.num_blocks - 1);
    for (const Shown& r : running_) surplus += r.input.num_blocks;
    for (const Shown& r : waiting_) surplus += r.input.num_blocks;
    if (surplus <= 0 || !limits_.prefix_caching) return shared;
    for (const bool only_found : {true, false}) {
      for (size_t i = running_.size(); i-- > 0;) {
        const RequestInput& r = running_[i].input;
        const int64_t most = only_found ? std::min(r.num_blocks, r.cached / limits_.block_size) : r.num_blocks;
        const int64_t more = std::min(std::max<int64_t>(most - shared[i], 0), surplus);
        shared[i] += more;
        surplus -= more;
      }
    }
    return shared;
  }

  // Gives a resident the length it is expected to have, and refuses what none can be.
  void expect(Shown& r) const {
    RequestInput& in = r.input;
    double predicted = default_output_;
    if (r.entry.is_valid()) {
      const nb::object value = get(r.entry, snapshot_names().predicted);
      if (!nb::try_cast<double>(value, predicted)) fail_input("predicted_output_tokens", "must be a number");
    }
    // One more is there already where it comes with the batch in flight.
    const bool comes = in.scheduled > 0 && in.computed == in.prompt + in.output;
    in.target_output = rule_.target(predicted, in.prompt, in.output + comes, in.max_tokens);
    check_request(in, limits_);
  }

  void set_residual(Features& in_flight) {
    const StepTime& step_time = engine_.step_time();
    double residual_s = 0;
    if (in_flight.requests > 0) {
      in_flight.close_batches(1, step_time.knee);
      residual_s = step_time.seconds(in_flight);
    }
    if (!std::isfinite(residual_s) || residual_s < 0) fail_input("residual_s", "must be finite and at least 0");
    engine_.set_residual(residual_s);
  }

  ReplayedEngine& engine_;
  nb::dict ledger_ids_, ledger_, released_;
  const LengthRule& rule_;
  double default_output_;
  Limits limits_;
  int64_t free_blocks_ = 0;
  std::vector<Shown> running_, waiting_;
};

inline void load_snapshot(ReplayedEngine& engine, nb::handle snapshot, nb::dict ledger_ids, nb::dict ledger,
                          nb::dict released, const LengthRule& rule, double default_output) {
  SnapshotLoad(engine, std::move(ledger_ids), std::move(ledger), std::move(released), rule, default_output).run(snapshot);
}

}  // namespace headway::python
