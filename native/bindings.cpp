// The Python face of the core: bindings.cpp and python_*.hpp are the only files that know Python exists.
//
// Values cross as the frozen Structs of headway.types, read by attribute; what cannot be right raises
// headway.errors.EngineInputError with the field's name. Calls are microseconds long and keep the GIL: an engine is a
// plain object without locks.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "python_engine.hpp"
#include "python_snapshot.hpp"
#include "python_truth.hpp"
#include "seqlock.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace headway::python;

namespace {

using headway::Features;
using headway::FirstToken;
using headway::StepTime;
using headway::Workload;

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

  using Counts = std::optional<Row<const int64_t>>;

  void first_tokens(Row<const int64_t> prompt_tokens, Row<double> ttft_s, Row<double> wait_s, int64_t priority,
                    const Counts& cached_tokens, const Counts& shared_blocks) {
    const size_t n = pointers_.size();
    if (prompt_tokens.shape(0) != n || ttft_s.shape(0) != n || wait_s.shape(0) != n) {
      fail_input("prompt_tokens", "arrays must have one entry per engine (" + std::to_string(n) + ")");
    }
    check_counts(cached_tokens, "cached_tokens");
    check_counts(shared_blocks, "shared_blocks");
    for (size_t i = 0; i < n; ++i) {
      const FirstToken first = pointers_[i]->first_token_or_never(
          prompt_tokens.data()[i], priority, cached_tokens ? cached_tokens->data()[i] : 0,
          shared_blocks ? shared_blocks->data()[i] : 0);
      ttft_s.data()[i] = first.ttft_s;
      wait_s.data()[i] = first.wait_s;
    }
  }

 private:
  void check_counts(const Counts& counts, const char* field) const {
    if (!counts) return;
    if (counts->shape(0) != pointers_.size()) {
      fail_input(field, "must have one entry per engine (" + std::to_string(pointers_.size()) + ")");
    }
    for (size_t i = 0; i < pointers_.size(); ++i) {
      if (counts->data()[i] < 0) fail_input(field, "must be at least 0, not " + std::to_string(counts->data()[i]));
    }
  }

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
      .def_ro("cached_tokens", &TokenBatch::cached_tokens)
      .def_ro("preempted", &TokenBatch::preempted)
      .def_ro("free_blocks", &TokenBatch::free_blocks)
      .def_ro("first_tokens", &TokenBatch::first_tokens)
      .def_ro("finished", &TokenBatch::finished)
      .def_ro("time_s", &TokenBatch::time_s);

  nb::class_<Workload>(m, "Workload")
      .def_ro("num_running", &Workload::num_running)
      .def_ro("num_waiting", &Workload::num_waiting)
      .def_ro("num_prefills", &Workload::num_prefills)
      .def_ro("prefill_tokens", &Workload::prefill_tokens)
      .def_ro("prefill_pairs", &Workload::prefill_pairs)
      .def_ro("num_decodes", &Workload::num_decodes)
      .def_ro("context_tokens", &Workload::context_tokens)
      .def_ro("decode_tokens", &Workload::decode_tokens);

  nb::class_<ReplayedEngine>(m, "ReplayedEngine")
      .def(nb::init<nb::object, nb::object>(), "limits"_a, "step_time"_a)
      .def_static("from_state", &ReplayedEngine::from_state, "state"_a, "step_time"_a, nb::rv_policy::take_ownership)
      .def_static("with_block_pool", &ReplayedEngine::with_block_pool, "limits"_a, "step_time"_a,
                  nb::rv_policy::take_ownership)
      .def("load", &ReplayedEngine::load, "state"_a)
      .def("load_snapshot", &load_snapshot, "snapshot"_a, "ledger_ids"_a, "ledger"_a, "released"_a, "rule"_a,
           "default_output_tokens"_a)
      .def("submit", &ReplayedEngine::submit, "request"_a, "block_hashes"_a = nb::make_tuple())
      .def("look_up", &ReplayedEngine::look_up, "block_hashes"_a, "prompt_tokens"_a)
      .def("cancel", &ReplayedEngine::cancel, "request_id"_a)
      .def("step", &ReplayedEngine::step)
      .def("advance", &ReplayedEngine::advance, "seconds"_a)
      .def("start_batch", &ReplayedEngine::start_batch)
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
      .def("workload", [](const ReplayedEngine& e) { return e.scheduler().workload(); })
      .def("__contains__", &ReplayedEngine::contains, "request_id"_a)
      .def("replay",
           [](ReplayedEngine& e, nb::handle request, nb::handle block_hashes) {
             return as_replay(e.replay(request, block_hashes));
           },
           "request"_a, "block_hashes"_a = nb::make_tuple())
      .def("first_token",
           [](ReplayedEngine& e, nb::handle prompt_tokens, nb::handle priority, nb::handle arrival_s,
              nb::handle cached_tokens, nb::handle shared_blocks) {
             return as_replay(e.first_token(prompt_tokens, priority, arrival_s, cached_tokens, shared_blocks));
           },
           "prompt_tokens"_a, "priority"_a = 0, "arrival_s"_a.none() = nb::none(), "cached_tokens"_a = 0,
           "shared_blocks"_a = 0)
      .def("ttft_s",
           [](ReplayedEngine& e, int64_t prompt_tokens) { return e.first_token_or_never(prompt_tokens, 0).ttft_s; },
           "prompt_tokens"_a);

  nb::class_<EngineGroup>(m, "EngineGroup")
      .def(nb::init<nb::list>(), "engines"_a)
      // Arrays are filled in place: a converted copy would be filled and thrown away.
      .def("first_tokens", &EngineGroup::first_tokens, "prompt_tokens"_a.noconvert(), "ttft_s"_a.noconvert(),
           "wait_s"_a.noconvert(), "priority"_a = 0, "cached_tokens"_a.noconvert().none() = nb::none(),
           "shared_blocks"_a.noconvert().none() = nb::none());

  nb::class_<headway::LengthRule>(m, "LengthRule")
      .def(nb::new_(&length_rule), "kind"_a, nb::kw_only(), "edges"_a = nb::make_tuple(), "lengths"_a = nb::make_tuple())
      .def("target_tokens", &headway::LengthRule::target, "predicted_tokens"_a, "prompt_tokens"_a, "output_tokens"_a,
           "max_tokens"_a);

  nb::class_<TruthInstance>(m, "TruthEngine")
      .def(nb::init<nb::object, nb::handle, double, double, double, double, double, uint64_t>(), "limits"_a,
           "step_time"_a, nb::kw_only(), "noise"_a, "stall_probability"_a, "stall_mean_s"_a, "gap_low_s"_a,
           "gap_high_s"_a, "seed"_a)
      .def("submit", &TruthInstance::submit, "request_id"_a, nb::kw_only(), "prompt_tokens"_a,
           "target_output_tokens"_a, "predicted_output_tokens"_a, "max_tokens"_a, "priority"_a = 0, "now"_a)
      .def("run_until", &TruthInstance::run_until, "now"_a)
      .def("mirror", &TruthInstance::mirror, "view"_a, "rule"_a)
      .def("clone", [](const TruthInstance& e) { return new TruthInstance(e); }, nb::rv_policy::take_ownership)
      .def_prop_ro("num_running", [](const TruthInstance& e) { return e.engine().scheduler().running().size; })
      .def_prop_ro("num_waiting", [](const TruthInstance& e) { return e.engine().scheduler().waiting().size; })
      .def_prop_ro("free_blocks", [](const TruthInstance& e) { return e.engine().scheduler().free_blocks(); })
      .def_prop_ro("num_steps", [](const TruthInstance& e) { return e.engine().num_steps(); });

  m.def("shown_ids", &shown_ids, "snapshot"_a, "known"_a, "match"_a);
  m.def("batch_time_s", &batch_time_s, "step_time"_a, "chunks"_a);

  nb::class_<SeqlockWriter>(m, "SeqlockWriter")
      .def(nb::init<nb::handle>(), "buffer"_a)
      .def("write", &SeqlockWriter::write, "payload"_a);
  nb::class_<SeqlockReader>(m, "SeqlockReader")
      .def(nb::init<nb::handle>(), "buffer"_a)
      .def("sequence", &SeqlockReader::sequence)
      .def("read", &SeqlockReader::read, "max_attempts"_a = 1000);
}
