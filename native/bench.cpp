// Measures the replay without Python: `_bench_core CASE` runs one case once (for instruction counts under callgrind,
// collected inside headway_measured_call only), `_bench_core microseconds` prints CPU times as JSON.
//
// States, seed 7: prompts uniform 100..2000, outputs so far 1..300, remaining 1..600, budget 8192, ample blocks; the
// newcomer has 1000 tokens. light_256: 256 running, the newcomer fits the next step. saturated_R_W: max_num_seqs = R,
// R running, W waiting. cached: a second estimate on the unchanged saturated_128_128 state. Means over 8 states.
#include <time.h>

#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine.hpp"

namespace {

using headway::Engine;

constexpr int kNumStates = 8;
constexpr int64_t kNewcomerTokens = 1000;

struct Case {
  const char* name;
  int64_t num_running;
  int64_t num_waiting;
  int64_t max_num_seqs;
  bool cached;
};

constexpr Case kCases[] = {
    {"light_256", 256, 0, 512, false},
    {"saturated_128_128", 128, 128, 128, false},
    {"saturated_256_768", 256, 768, 256, false},
    {"cached", 128, 128, 128, true},
};

std::vector<std::unique_ptr<Engine>> make_states(const Case& wanted) {
  headway::Limits limits;
  limits.max_num_batched_tokens = 8192;
  limits.max_num_seqs = wanted.max_num_seqs;
  limits.max_model_len = 32768;
  limits.block_size = 16;
  limits.num_blocks = 1'000'000;
  const auto step_time = headway::StepTime::linear(7.49e-3, 2.078e-5, 5.037e-8, 1.033e-9, 0);
  std::mt19937_64 random(7);
  const auto uniform = [&random](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  std::vector<std::unique_ptr<Engine>> engines;
  for (int i = 0; i < kNumStates; ++i) {
    auto engine = std::make_unique<Engine>(limits, step_time);
    for (int64_t j = 0; j < wanted.num_running + wanted.num_waiting; ++j) {
      headway::RequestInput request;
      request.prompt = uniform(100, 2000);
      const int64_t output = uniform(1, 300);
      const int64_t remaining = uniform(1, 600);
      if (j < wanted.num_running) {
        request.output = output;
        request.computed = request.prompt + output - 1;
        request.target_output = output + remaining;
        engine->place_running(request);
      } else {
        request.target_output = remaining;
        engine->submit(request);
      }
    }
    engines.push_back(std::move(engine));
  }
  return engines;
}

headway::RequestInput newcomer() {
  headway::RequestInput request;
  request.prompt = kNewcomerTokens;
  return request;
}

double thread_cpu_us() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e6 + static_cast<double>(t.tv_nsec) * 1e-3;
}

}  // namespace

extern "C" __attribute__((noinline)) double headway_measured_call(Engine& engine) {
  return engine.first_token(newcomer()).ttft_s;
}

namespace {

double microseconds(const Case& wanted) {
  const auto states = make_states(wanted);
  constexpr int kRepeats = 200;
  double total_us = 0;
  double sink = 0;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    for (const auto& state : states) {
      Engine fresh(*state);
      const int num_calls = wanted.cached ? 1000 : 1;
      if (wanted.cached) sink += headway_measured_call(fresh);
      const double start_us = thread_cpu_us();
      for (int call = 0; call < num_calls; ++call) sink += headway_measured_call(fresh);
      total_us += (thread_cpu_us() - start_us) / num_calls;
    }
  }
  if (sink < 0) std::puts("");  // keeps the calls
  return total_us / (kRepeats * kNumStates);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string wanted = argc == 2 ? argv[1] : "";
  if (wanted == "microseconds") {
    std::printf("{");
    for (const Case& c : kCases) std::printf("%s\"%s\": %.4f", &c == kCases ? "" : ", ", c.name, microseconds(c));
    std::printf("}\n");
    return 0;
  }
  for (const Case& c : kCases) {
    if (wanted != c.name) continue;
    for (const auto& state : make_states(c)) {
      // Of a cached case only the second call is collected: the first goes round the measured function.
      if (c.cached) state->first_token(newcomer());
      headway_measured_call(*state);
    }
    return 0;
  }
  std::fprintf(stderr, "usage: _bench_core microseconds | CASE\n");
  return 2;
}
