// What a scheduler is told and what it holds: limits, requests as they come in, requests as they stand.
#pragma once

#include <cstdint>
#include <vector>

namespace headway {

struct Limits {
  int64_t max_num_batched_tokens = 0;
  int64_t max_num_seqs = 0;
  int64_t max_model_len = 0;
  int64_t block_size = 0;
  int64_t num_blocks = 0;
  int64_t long_prefill_token_threshold = 0;
  bool chunked_prefill = true;
  bool priority_policy = false;
  bool reserve_full_isl = true;
  bool async_scheduling = false;
  bool prefix_caching = false;
  int64_t watermark_blocks = 0;
};

// A request as it is handed in; `num_blocks` < 0 means ceil(computed / block_size). `shared_blocks` of them count at
// another resident (prefix caching).
struct RequestInput {
  int64_t prompt = 0;
  int64_t computed = 0;
  int64_t output = 0;
  int64_t target_output = 1;
  int64_t max_tokens = 0;  // 0: no limit of its own
  int64_t priority = 0;
  double arrival = 0;  // NaN: after all present
  int64_t num_blocks = -1;
  int64_t shared_blocks = 0;
  int64_t cached = 0;     // tokens to be found in the prefix cache when it is first scheduled
  const std::vector<uint64_t>* block_hashes = nullptr;  // of its first full blocks, for an engine with a block pool
  int64_t scheduled = 0;  // of `computed`, those of the newest batch, whose outcome `output` does not show yet (async)
};

// A scheduled chunk of a token batch.
struct Chunk {
  int32_t slot;
  int32_t tokens;
};

// A chunk of a batch that is still to run, although its request is gone: it ran in vain.
struct DepartedChunk {
  int64_t tokens;
  int64_t context;
  bool is_decode;
};

// The first chunk of a request that leaves the queue, and the blocks it takes.
struct Admission {
  int64_t tokens = 0;
  int64_t blocks = 0;
};

// What the residents of an engine still have before them: sums over running and waiting requests.
struct Workload {
  int64_t num_running = 0;
  int64_t num_waiting = 0;
  int64_t num_prefills = 0;    // residents whose prompt (or recompute) is not complete
  int64_t prefill_tokens = 0;  // tokens these still have to prefill
  double prefill_pairs = 0;    // of these p tokens with c computed before them: sum of p*p + 2*p*c
  int64_t num_decodes = 0;     // residents that only decode
  int64_t context_tokens = 0;  // computed tokens of all running requests
  int64_t decode_tokens = 0;   // outputs expected yet, of all residents
};

enum class Place : uint8_t { kNowhere, kRunning, kWaiting };

// Its size is a power of two, which makes a slot an address by one shift.
struct alignas(64) Request {
  // For a request on the decode clock, computed and output are relative to it: add the clock for the true count. Under
  // asynchronous scheduling `output` counts an output as soon as the batch that will give it is scheduled.
  int32_t computed = 0;
  int32_t output = 0;
  int32_t prompt = 0;
  int32_t end_output = 0;  // it ends once this many outputs are there
  int32_t blocks = 0;      // its own; derived from computed while on the decode clock
  int32_t previous = -1;   // neighbours in the running or waiting list
  int32_t next = -1;
  Place place = Place::kNowhere;
  bool on_clock = false;
  bool tracked = false;
  bool ends_by_limit = false;  // at max_tokens or the model's length, which the scheduler foresees, not at a stop token
  bool ending = false;         // asynchronous: its last output comes with the newest batch
  bool newest_samples = false;
  int32_t newest_tokens = 0;   // its share of the newest batch, while newest_in is that batch's number
  uint64_t newest_in = 0;
  int64_t finish_clock = 0;    // decode clock at which it ends
  int32_t previous_end = -1;   // neighbours in the bucket of its finish clock
  int32_t next_end = -1;
  int64_t order = 0;           // rises along the running list
  int64_t priority = 0;
  double arrival = 0;
  uint64_t submission = 0;
  uint64_t scheduled_in = 0;  // number of the last step that scheduled it (itemised steps only)
  int32_t target_output = 0;
  int32_t max_tokens = 0;
  int32_t cached = 0;  // tokens found in the prefix cache once it is admitted
  int32_t shared = 0;  // blocks it holds beside its own, which count at another resident
};

struct List {
  int32_t first = -1;
  int32_t last = -1;
  int32_t size = 0;
};

}  // namespace headway
