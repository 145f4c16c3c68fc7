// The Python face of the core: the only file that knows Python exists.
//
// Values cross as the frozen Structs of headway.types, read by attribute; what cannot be right raises
// headway.errors.EngineInputError with the field's name. Calls are microseconds long and keep the GIL: an engine is a
// plain object without locks.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine.hpp"
#include "seqlock.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using headway::Engine;
using headway::Features;
using headway::FirstToken;
using headway::Limits;
using headway::RequestInput;
using headway::Scheduler;
using headway::StepTime;

constexpr int64_t kMaxCount = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxBlockSize = 1 << 16;  // a histogram of this size is kept per engine

[[noreturn]] void fail(const char* error, nb::object arguments) {
  const nb::object type = nb::module_::import_("headway.errors").attr(error);
  PyErr_SetObject(type.ptr(), arguments.ptr());
  throw nb::python_error();
}

[[noreturn]] void fail_input(const char* field, const std::string& message) {
  fail("EngineInputError", nb::make_tuple(field, message));
}

nb::object types() { return nb::module_::import_("headway.types"); }

int64_t as_count(nb::handle value, const char* field, int64_t minimum, int64_t maximum = kMaxCount) {
  int64_t number = 0;
  if (!PyLong_CheckExact(value.ptr()) || !nb::try_cast<int64_t>(value, number)) {
    fail_input(field, "must be an integer within 32 bits, not " + std::string(nb::repr(value).c_str()));
  }
  if (number < minimum || number > maximum) {
    fail_input(field, "must be from " + std::to_string(minimum) + " to " + std::to_string(maximum) + ", not " +
                          std::to_string(number));
  }
  return number;
}

double as_seconds(nb::handle value, const char* field) {
  double seconds = 0;
  if (!nb::try_cast<double>(value, seconds) || !std::isfinite(seconds) || seconds < 0) {
    fail_input(field, "must be finite and at least 0, not " + std::string(nb::repr(value).c_str()));
  }
  return seconds;
}

// None is NaN inside: after all present.
double as_arrival(nb::handle value) {
  if (value.is_none()) return std::numeric_limits<double>::quiet_NaN();
  double seconds = 0;
  if (!nb::try_cast<double>(value, seconds) || !std::isfinite(seconds)) {
    fail_input("arrival_s", "must be a finite number, not " + std::string(nb::repr(value).c_str()));
  }
  return seconds;
}

// ---------------------------------------------------------------- Structs in

Limits limits_from(nb::handle limits) {
  Limits l;
  l.max_num_batched_tokens = as_count(limits.attr("max_num_batched_tokens"), "max_num_batched_tokens", 1);
  l.max_num_seqs = as_count(limits.attr("max_num_seqs"), "max_num_seqs", 1);
  l.max_model_len = as_count(limits.attr("max_model_len"), "max_model_len", 1);
  l.block_size = as_count(limits.attr("block_size"), "block_size", 1, kMaxBlockSize);
  l.num_blocks = as_count(limits.attr("num_blocks"), "num_blocks", 2);
  l.long_prefill_token_threshold =
      as_count(limits.attr("long_prefill_token_threshold"), "long_prefill_token_threshold", 0);
  l.chunked_prefill = nb::cast<bool>(limits.attr("chunked_prefill"));
  l.priority_policy = nb::cast<std::string>(limits.attr("policy")) == "priority";
  l.reserve_full_isl = nb::cast<bool>(limits.attr("reserve_full_isl"));
  // kv_cache_manager.py @0.32.0: watermark_blocks = int(watermark * num_blocks)
  l.watermark_blocks =
      static_cast<int64_t>(nb::cast<double>(limits.attr("watermark")) * static_cast<double>(l.num_blocks));
  return l;
}

StepTime step_time_from(nb::handle step_time) {
  const std::string form = nb::cast<std::string>(step_time.attr("form"));
  std::vector<double> c;
  for (nb::handle value : step_time.attr("coefficients")) c.push_back(nb::cast<double>(value));
  if (form == "linear" && c.size() == 5) return StepTime::linear(c[0], c[1], c[2], c[3], c[4]);
  if (form == "knee" && c.size() == 7) return StepTime::with_knee(c[0], c[1], c[2], c[3], c[4], c[5], c[6]);
  if (form == "six_term" && c.size() == 6) return StepTime::six_term(c[0], c[1], c[2], c[3], c[4], c[5]);
  fail_input("form", "must be linear, knee or six_term, not '" + form + "'");
}

// Attribute names, interned once: requests cross by the hundred.
struct RequestNames {
  nb::object id, prompt, computed, output, target, max_tokens, priority, arrival, num_blocks;
  RequestNames()
      : id(intern("request_id")), prompt(intern("prompt_tokens")), computed(intern("computed_tokens")),
        output(intern("output_tokens")), target(intern("target_output_tokens")), max_tokens(intern("max_tokens")),
        priority(intern("priority")), arrival(intern("arrival_s")), num_blocks(intern("num_blocks")) {}
  static nb::object intern(const char* name) { return nb::steal(PyUnicode_InternFromString(name)); }
};

const RequestNames& names() {
  static const RequestNames* const instance = new RequestNames();  // lives as long as the interpreter
  return *instance;
}

nb::object get(nb::handle object, const nb::object& name) {
  PyObject* value = PyObject_GetAttr(object.ptr(), name.ptr());
  if (value == nullptr) throw nb::python_error();
  return nb::steal(value);
}

void check_prompt(const Limits& limits, int64_t prompt) {
  if (prompt > limits.max_model_len - 1) {
    fail_input("prompt_tokens", "must be at most max_model_len - 1 (" + std::to_string(limits.max_model_len - 1) +
                                    "), not " + std::to_string(prompt));
  }
  if ((prompt + limits.block_size - 1) / limits.block_size > limits.num_blocks - 1) {
    fail_input("prompt_tokens", std::to_string(prompt) + " tokens can never fit " +
                                    std::to_string(limits.num_blocks - 1) + " blocks of " +
                                    std::to_string(limits.block_size));
  }
}

RequestInput request_from(nb::handle request, const Limits& limits) {
  const RequestNames& n = names();
  RequestInput r;
  r.prompt = as_count(get(request, n.prompt), "prompt_tokens", 1);
  r.computed = as_count(get(request, n.computed), "computed_tokens", 0);
  r.output = as_count(get(request, n.output), "output_tokens", 0);
  r.target_output = as_count(get(request, n.target), "target_output_tokens", 1);
  r.priority = as_count(get(request, n.priority), "priority", -kMaxCount);
  if (nb::object value = get(request, n.max_tokens); !value.is_none()) r.max_tokens = as_count(value, "max_tokens", 1);
  if (nb::object value = get(request, n.num_blocks); !value.is_none()) r.num_blocks = as_count(value, "num_blocks", 0);
  r.arrival = as_arrival(get(request, n.arrival));
  check_prompt(limits, r.prompt);
  if (r.output > 0 && r.prompt + r.output > limits.max_model_len - 1) {
    fail_input("output_tokens", "prompt and output must stay below max_model_len (" +
                                    std::to_string(limits.max_model_len) + "), not " +
                                    std::to_string(r.prompt + r.output));
  }
  if (r.computed >= r.prompt + r.output) {
    fail_input("computed_tokens", "must be below prompt_tokens + output_tokens between steps");
  }
  const int64_t needed = (r.computed + limits.block_size - 1) / limits.block_size;
  if (r.num_blocks >= 0 && r.num_blocks < needed) {
    fail_input("num_blocks", std::to_string(r.computed) + " computed tokens need " + std::to_string(needed) +
                                 " blocks, not " + std::to_string(r.num_blocks));
  }
  const int64_t held = r.num_blocks < 0 ? needed : r.num_blocks;
  if (held > limits.num_blocks - 1) {
    fail_input("num_blocks", "holds " + std::to_string(held) + " of " + std::to_string(limits.num_blocks - 1) +
                                 " blocks");
  }
  return r;
}

// ---------------------------------------------------------------- the replayed engine

struct TokenBatch {
  nb::dict num_scheduled_tokens;
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

  void load(nb::handle state) {
    ReplayedEngine fresh(state.attr("limits"), engine_->step_time());
    fresh.fill(state);
    std::swap(*this, fresh);
  }

  void submit(nb::handle request) {
    const RequestInput input = request_from(request, limits());
    nb::object id = checked_id(request);
    check_holdings(input);
    remember(engine_->submit(input), std::move(id));
  }

  bool cancel(nb::handle request_id) {
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
    for (const headway::Chunk& chunk : s.chunks()) batch.num_scheduled_tokens[id(chunk.slot)] = chunk.tokens;
    for (const int32_t slot : s.preempted()) batch.preempted.append(id(slot));
    for (const int32_t slot : s.first_tokens()) batch.first_tokens.append(id(slot));
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

  ReplayedEngine* clone() const {
    auto copy = std::make_unique<ReplayedEngine>(*this);
    return copy.release();
  }

  ReplayedEngine(const ReplayedEngine& other)
      : limits_(other.limits_), engine_(std::make_unique<Engine>(*other.engine_)), ids_(other.ids_) {
    slots_.update(other.slots_);
  }
  ReplayedEngine(ReplayedEngine&&) = default;
  ReplayedEngine& operator=(ReplayedEngine&&) = default;

  FirstToken replay(nb::handle request) {
    const RequestInput newcomer = request_from(request, limits());
    checked_id(request);
    check_holdings(newcomer);
    if (newcomer.output > 0) fail_input("output_tokens", "a newcomer has no output yet");
    return engine_->first_token(newcomer);
  }

  FirstToken first_token(nb::handle prompt_tokens, nb::handle priority, nb::handle arrival_s) {
    RequestInput r = newcomer(as_count(prompt_tokens, "prompt_tokens", 1), as_count(priority, "priority", -kMaxCount));
    r.arrival = as_arrival(arrival_s);
    check_prompt(limits(), r.prompt);
    return engine_->first_token(r);
  }

  // As first_token, but infinite instead of an error where the prompt cannot run here.
  FirstToken first_token_or_never(int64_t prompt_tokens, int64_t priority) {
    const Limits& l = limits();
    if (prompt_tokens < 1 || prompt_tokens > l.max_model_len - 1 ||
        scheduler().blocks_for(prompt_tokens) > l.num_blocks - 1) {
      return {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::infinity(), 0};
    }
    return engine_->first_token(newcomer(prompt_tokens, priority));
  }

  nb::list requests(const headway::List& list) const {
    const nb::object type = types().attr("EngineRequest");
    nb::list out;
    const Scheduler& s = scheduler();
    for (int32_t slot = list.first; slot >= 0; slot = s.next_of(slot)) {
      const headway::Request& r = s.request(slot);
      out.append(type("request_id"_a = id(slot), "prompt_tokens"_a = r.prompt, "computed_tokens"_a = s.computed(slot),
                      "output_tokens"_a = s.output(slot), "target_output_tokens"_a = r.target_output,
                      "max_tokens"_a = r.max_tokens == 0 ? nb::object(nb::none()) : nb::int_(r.max_tokens),
                      "priority"_a = r.priority,
                      "arrival_s"_a = std::isfinite(r.arrival) ? nb::object(nb::float_(r.arrival)) : nb::none(),
                      "num_blocks"_a = s.blocks(slot)));
    }
    return out;
  }

  nb::object state() const {
    return types().attr("EngineState")("limits"_a = limits_, "running"_a = nb::tuple(requests(scheduler().running())),
                                       "waiting"_a = nb::tuple(requests(scheduler().waiting())),
                                       "residual_s"_a = engine_->residual_s(),
                                       "free_blocks"_a = scheduler().free_blocks());
  }

  bool contains(nb::handle request_id) const { return slots_.contains(request_id); }
  const Scheduler& scheduler() const { return engine_->scheduler(); }
  double residual_s() const { return engine_->residual_s(); }

 private:
  ReplayedEngine(nb::object limits, const StepTime& step_time)
      : limits_(std::move(limits)), engine_(std::make_unique<Engine>(limits_from(limits_), step_time)) {}

  const Limits& limits() const { return scheduler().limits(); }

  nb::object checked_id(nb::handle request) const {
    nb::object id = get(request, names().id);
    if (!nb::isinstance<nb::str>(id)) fail_input("request_id", "must be a string");
    if (slots_.contains(id)) {
      fail_input("request_id", "'" + nb::cast<std::string>(id) + "' is already in this engine");
    }
    return id;
  }

  void check_holdings(const RequestInput& r) const {
    const int64_t held = r.num_blocks < 0 ? scheduler().blocks_for(r.computed) : r.num_blocks;
    if (held > scheduler().free_blocks()) {
      fail_input("num_blocks", "holds " + std::to_string(held) + " blocks, only " +
                                   std::to_string(scheduler().free_blocks()) + " are free");
    }
  }

  static RequestInput newcomer(int64_t prompt_tokens, int64_t priority) {
    RequestInput r;
    r.prompt = prompt_tokens;
    r.priority = priority;
    r.arrival = std::numeric_limits<double>::quiet_NaN();
    return r;
  }

  void remember(int32_t slot, nb::object id) {
    slots_[id] = slot;
    if (ids_.size() <= static_cast<size_t>(slot)) ids_.resize(static_cast<size_t>(slot) + 1);
    ids_[static_cast<size_t>(slot)] = std::move(id);
  }

  const nb::object& id(int32_t slot) const { return ids_[static_cast<size_t>(slot)]; }

  // Drops the ids of requests that ended. A long advance() ends many at once, so the map is compared, not notified.
  void forget_departed() {
    const Scheduler& s = scheduler();
    if (static_cast<int64_t>(slots_.size()) == s.num_requests()) return;
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
      remember(engine_->submit(input), std::move(id));
    }
    const int64_t unheld = scheduler().free_blocks();
    if (unheld < 0) {
      fail_input("num_blocks", "requests hold " + std::to_string(l.num_blocks - 1 - unheld) + " blocks, only " +
                                   std::to_string(l.num_blocks - 1) + " exist");
    }
    if (nb::object free = state.attr("free_blocks"); !free.is_none()) {
      const int64_t given = as_count(free, "free_blocks", 0);
      if (given > unheld) {
        fail_input("free_blocks", std::to_string(given) + " free and " + std::to_string(l.num_blocks - 1 - unheld) +
                                      " held are more than the " + std::to_string(l.num_blocks - 1) + " that exist");
      }
      engine_->scheduler().set_free_blocks(given);
    }
    engine_->set_residual(as_seconds(state.attr("residual_s"), "residual_s"));
  }

  nb::object limits_;
  std::unique_ptr<Engine> engine_;
  std::vector<nb::object> ids_;  // by slot
  nb::dict slots_;               // id -> slot
};

nb::object as_replay(const FirstToken& first) {
  return types().attr("Replay")(first.ttft_s, first.wait_s, first.num_steps);
}

// ---------------------------------------------------------------- many engines in one call

template <typename T>
using Row = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

class EngineGroup {
 public:
  explicit EngineGroup(nb::list engines) : engines_(std::move(engines)) {
    for (nb::handle engine : engines_) {
      if (!nb::isinstance<ReplayedEngine>(engine)) throw nb::type_error("engines: every entry must be a ReplayedEngine");
      pointers_.push_back(nb::cast<ReplayedEngine*>(engine));
    }
  }

  void first_tokens(Row<const int64_t> prompt_tokens, Row<double> ttft_s, Row<double> wait_s, int64_t priority) {
    const size_t n = pointers_.size();
    if (prompt_tokens.shape(0) != n || ttft_s.shape(0) != n || wait_s.shape(0) != n) {
      fail_input("prompt_tokens", "arrays must have one entry per engine (" + std::to_string(n) + ")");
    }
    for (size_t i = 0; i < n; ++i) {
      const FirstToken first = pointers_[i]->first_token_or_never(prompt_tokens.data()[i], priority);
      ttft_s.data()[i] = first.ttft_s;
      wait_s.data()[i] = first.wait_s;
    }
  }

 private:
  nb::list engines_;  // keeps them alive
  std::vector<ReplayedEngine*> pointers_;
};

double batch_time_s(nb::handle step_time, nb::handle chunks) {
  const StepTime weights = step_time_from(step_time);
  Features f;
  for (nb::handle chunk : chunks) {
    f.add_chunk(nb::cast<int64_t>(chunk[0]), nb::cast<int64_t>(chunk[1]), nb::cast<bool>(chunk[2]));
  }
  f.close_batches(1, weights.knee);
  return weights.seconds(f);
}

// ---------------------------------------------------------------- the shared-memory slot

// A writable C-contiguous buffer, held for the lifetime of its view.
class HeldBuffer {
 public:
  HeldBuffer(nb::handle object, bool writable) {
    if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
      throw nb::python_error();
    }
  }
  ~HeldBuffer() { PyBuffer_Release(&view_); }
  HeldBuffer(const HeldBuffer&) = delete;
  HeldBuffer& operator=(const HeldBuffer&) = delete;
  void* data() const { return view_.buf; }
  size_t size() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

class SeqlockWriter {
 public:
  explicit SeqlockWriter(nb::handle buffer) : buffer_(buffer, true), writer_(buffer_.data(), buffer_.size()) {}
  void write(nb::bytes payload) { writer_.write(payload.c_str(), payload.size()); }

 private:
  HeldBuffer buffer_;
  headway::SeqlockWriter writer_;
};

class SeqlockReader {
 public:
  explicit SeqlockReader(nb::handle buffer) : buffer_(buffer, false), reader_(buffer_.data(), buffer_.size()) {}
  uint64_t sequence() const { return reader_.sequence(); }
  nb::object read(size_t max_attempts) {
    switch (reader_.read(scratch_, max_attempts)) {
      case headway::SeqlockRead::kEmpty:
        return nb::none();
      case headway::SeqlockRead::kTorn:
        fail("SnapshotTornError", nb::make_tuple("the writer was inside the slot on every attempt"));
      default:
        return nb::bytes(scratch_.data(), scratch_.size());
    }
  }

 private:
  HeldBuffer buffer_;
  headway::SeqlockReader reader_;
  std::string scratch_;
};

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "Token-batch replay and the shared-memory slot, natively.";
  nb::set_leak_warnings(false);  // a process may exit while its fleet still holds engines

  nb::class_<TokenBatch>(m, "TokenBatch")
      .def_ro("num_scheduled_tokens", &TokenBatch::num_scheduled_tokens)
      .def_ro("preempted", &TokenBatch::preempted)
      .def_ro("free_blocks", &TokenBatch::free_blocks)
      .def_ro("first_tokens", &TokenBatch::first_tokens)
      .def_ro("finished", &TokenBatch::finished)
      .def_ro("time_s", &TokenBatch::time_s);

  nb::class_<ReplayedEngine>(m, "ReplayedEngine")
      .def(nb::init<nb::object, nb::object>(), "limits"_a, "step_time"_a)
      .def_static("from_state", &ReplayedEngine::from_state, "state"_a, "step_time"_a, nb::rv_policy::take_ownership)
      .def("load", &ReplayedEngine::load, "state"_a)
      .def("submit", &ReplayedEngine::submit, "request"_a)
      .def("cancel", &ReplayedEngine::cancel, "request_id"_a)
      .def("step", &ReplayedEngine::step)
      .def("advance", &ReplayedEngine::advance, "seconds"_a)
      .def("clone", &ReplayedEngine::clone, nb::rv_policy::take_ownership)
      .def("state", &ReplayedEngine::state)
      .def_prop_ro("running", [](const ReplayedEngine& e) { return e.requests(e.scheduler().running()); })
      .def_prop_ro("waiting", [](const ReplayedEngine& e) { return e.requests(e.scheduler().waiting()); })
      .def_prop_ro("num_running", [](const ReplayedEngine& e) { return e.scheduler().running().size; })
      .def_prop_ro("num_waiting", [](const ReplayedEngine& e) { return e.scheduler().waiting().size; })
      .def_prop_ro("free_blocks", [](const ReplayedEngine& e) { return e.scheduler().free_blocks(); })
      .def_prop_ro("residual_s", &ReplayedEngine::residual_s)
      .def_prop_ro("remaining_prefill_tokens",
                   [](const ReplayedEngine& e) { return e.scheduler().remaining_prefill_tokens(); })
      .def("__contains__", &ReplayedEngine::contains, "request_id"_a)
      .def("replay", [](ReplayedEngine& e, nb::handle request) { return as_replay(e.replay(request)); }, "request"_a)
      .def("first_token",
           [](ReplayedEngine& e, nb::handle prompt_tokens, nb::handle priority, nb::handle arrival_s) {
             return as_replay(e.first_token(prompt_tokens, priority, arrival_s));
           },
           "prompt_tokens"_a, "priority"_a = 0, "arrival_s"_a.none() = nb::none())
      .def("ttft_s",
           [](ReplayedEngine& e, int64_t prompt_tokens) { return e.first_token_or_never(prompt_tokens, 0).ttft_s; },
           "prompt_tokens"_a);

  nb::class_<EngineGroup>(m, "EngineGroup")
      .def(nb::init<nb::list>(), "engines"_a)
      // Arrays are filled in place: a converted copy would be filled and thrown away.
      .def("first_tokens", &EngineGroup::first_tokens, "prompt_tokens"_a.noconvert(), "ttft_s"_a.noconvert(),
           "wait_s"_a.noconvert(), "priority"_a = 0);

  m.def("batch_time_s", &batch_time_s, "step_time"_a, "chunks"_a);

  nb::class_<SeqlockWriter>(m, "SeqlockWriter")
      .def(nb::init<nb::handle>(), "buffer"_a)
      .def("write", &SeqlockWriter::write, "payload"_a);
  nb::class_<SeqlockReader>(m, "SeqlockReader")
      .def(nb::init<nb::handle>(), "buffer"_a)
      .def("sequence", &SeqlockReader::sequence)
      .def("read", &SeqlockReader::read, "max_attempts"_a = 1000);
}
