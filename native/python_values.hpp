// Python values in and out: conversion, and errors that name the field. Included by the binding files only.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "engine.hpp"

namespace nb = nanobind;
namespace headway::python {

constexpr int64_t kMaxCount = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxBlockSize = 1 << 16;  // a histogram of this size is kept per engine

[[noreturn]] inline void fail(const char* error, nb::object arguments) {
  const nb::object type = nb::module_::import_("headway.errors").attr(error);
  PyErr_SetObject(type.ptr(), arguments.ptr());
  throw nb::python_error();
}

[[noreturn]] inline void fail_input(const char* field, const std::string& message) {
  fail("EngineInputError", nb::make_tuple(field, message));
}

inline nb::object types() { return nb::module_::import_("headway.types"); }

inline int64_t as_count(nb::handle value, const char* field, int64_t minimum, int64_t maximum = kMaxCount) {
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

inline double as_seconds(nb::handle value, const char* field) {
  double seconds = 0;
  if (!nb::try_cast<double>(value, seconds) || !std::isfinite(seconds) || seconds < 0) {
    fail_input(field, "must be finite and at least 0, not " + std::string(nb::repr(value).c_str()));
  }
  return seconds;
}

// None is NaN inside: after all present.
inline double as_arrival(nb::handle value) {
  if (value.is_none()) return std::numeric_limits<double>::quiet_NaN();
  double seconds = 0;
  if (!nb::try_cast<double>(value, seconds) || !std::isfinite(seconds)) {
    fail_input("arrival_s", "must be a finite number, not " + std::string(nb::repr(value).c_str()));
  }
  return seconds;
}

// ---------------------------------------------------------------- Structs in

inline Limits limits_from(nb::handle limits) {
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
  l.prefix_caching = nb::cast<bool>(limits.attr("prefix_caching"));
  l.async_scheduling = nb::cast<bool>(limits.attr("async_scheduling"));
  // kv_cache_manager.py @0.32.0: watermark_blocks = int(watermark * num_blocks)
  l.watermark_blocks =
      static_cast<int64_t>(nb::cast<double>(limits.attr("watermark")) * static_cast<double>(l.num_blocks));
  return l;
}

inline StepTime step_time_from(nb::handle step_time) {
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
  nb::object id, prompt, computed, output, target, max_tokens, priority, arrival, num_blocks, shared, cached,
      scheduled;
  RequestNames()
      : id(intern("request_id")), prompt(intern("prompt_tokens")), computed(intern("computed_tokens")),
        output(intern("output_tokens")), target(intern("target_output_tokens")), max_tokens(intern("max_tokens")),
        priority(intern("priority")), arrival(intern("arrival_s")), num_blocks(intern("num_blocks")),
        shared(intern("shared_blocks")), cached(intern("cached_tokens")), scheduled(intern("scheduled_tokens")) {}
  static nb::object intern(const char* name) { return nb::steal(PyUnicode_InternFromString(name)); }
};

inline const RequestNames& names() {
  static const RequestNames* const instance = new RequestNames();  // lives as long as the interpreter
  return *instance;
}

inline nb::object get(nb::handle object, const nb::object& name) {
  PyObject* value = PyObject_GetAttr(object.ptr(), name.ptr());
  if (value == nullptr) throw nb::python_error();
  return nb::steal(value);
}

inline void check_prompt(const Limits& limits, int64_t prompt) {
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

// What no engine between two steps could hold is refused, field by field.
inline void check_request(const RequestInput& r, const Limits& limits) {
  check_prompt(limits, r.prompt);
  if (r.output > 0 && r.prompt + r.output > limits.max_model_len - 1) {
    fail_input("output_tokens", "prompt and output must stay below max_model_len (" +
                                    std::to_string(limits.max_model_len) + "), not " +
                                    std::to_string(r.prompt + r.output));
  }
  if (r.scheduled > 0 && !limits.async_scheduling) {
    fail_input("scheduled_tokens", "must be 0 between the steps of an engine without async_scheduling");
  }
  if (r.scheduled > r.computed) fail_input("scheduled_tokens", "must not exceed computed_tokens, which count them");
  if (r.computed - (r.scheduled > 0 ? 1 : 0) >= r.prompt + r.output) {
    fail_input("computed_tokens", "must be below prompt_tokens + output_tokens between steps");
  }
  const int64_t needed = (r.computed + limits.block_size - 1) / limits.block_size;
  if (r.num_blocks >= 0 && r.num_blocks < needed) {
    fail_input("num_blocks", std::to_string(r.computed) + " computed tokens need " + std::to_string(needed) +
                                 " blocks, not " + std::to_string(r.num_blocks));
  }
  const int64_t held = r.num_blocks < 0 ? needed : r.num_blocks;
  if (r.shared_blocks > 0 && !limits.prefix_caching) {
    fail_input("shared_blocks", "must be 0 for an engine without prefix_caching");
  }
  if (held > 0 && r.shared_blocks > held) {
    fail_input("shared_blocks", "must not exceed the " + std::to_string(held) + " it holds");
  }
  if (held > limits.num_blocks - 1) {
    fail_input("num_blocks", "holds " + std::to_string(held) + " of " + std::to_string(limits.num_blocks - 1) +
                                 " blocks");
  }
}

inline RequestInput request_from(nb::handle request, const Limits& limits) {
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
  r.cached = as_count(get(request, n.cached), "cached_tokens", 0);
  r.scheduled = as_count(get(request, n.scheduled), "scheduled_tokens", 0);
  r.shared_blocks = as_count(get(request, n.shared), "shared_blocks", 0);
  check_request(r, limits);
  return r;
}

}  // namespace headway::python
