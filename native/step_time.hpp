// Processing time of a token batch: its features, and their closed-form sums over a run of equal decode batches.
//
// Every supported form (linear, knee, six-term) is a weighted sum of the features below, so that a replay only counts
// features in integers and multiplies once at the end. Contexts are taken before the batch.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace headway {

// Sums over one or many batches. Integers stay exact; squares of contexts may exceed 64 bits over long runs and are
// doubles.
struct Features {
  int64_t steps = 0;
  int64_t requests = 0;        // scheduled requests
  int64_t tokens = 0;          // scheduled tokens
  int64_t prefill_tokens = 0;  // P
  int64_t decodes = 0;         // D
  int64_t decode_context = 0;  // Σ context of decodes
  int64_t context = 0;         // Σ context of all scheduled requests
  int64_t prefill_pairs = 0;   // Σ p·c + p(p+1)/2: query-key pairs of prefill chunks
  double chunk_squares = 0;    // Σ p² of prefill chunks
  double context_squares = 0;  // Σ context² of all scheduled requests
  double tokens_above_knee = 0;

  void operator+=(const Features& other) {
    steps += other.steps;
    requests += other.requests;
    tokens += other.tokens;
    prefill_tokens += other.prefill_tokens;
    decodes += other.decodes;
    decode_context += other.decode_context;
    context += other.context;
    prefill_pairs += other.prefill_pairs;
    chunk_squares += other.chunk_squares;
    context_squares += other.context_squares;
    tokens_above_knee += other.tokens_above_knee;
  }

  Features operator-(const Features& other) const {
    Features f;
    f.steps = steps - other.steps;
    f.requests = requests - other.requests;
    f.tokens = tokens - other.tokens;
    f.prefill_tokens = prefill_tokens - other.prefill_tokens;
    f.decodes = decodes - other.decodes;
    f.decode_context = decode_context - other.decode_context;
    f.context = context - other.context;
    f.prefill_pairs = prefill_pairs - other.prefill_pairs;
    f.chunk_squares = chunk_squares - other.chunk_squares;
    f.context_squares = context_squares - other.context_squares;
    f.tokens_above_knee = tokens_above_knee - other.tokens_above_knee;
    return f;
  }

  // One chunk of `tokens_` tokens over `context_` computed ones. Leaves steps and the knee to close_batch().
  void add_chunk(int64_t tokens_, int64_t context_, bool is_decode) {
    requests += 1;
    tokens += tokens_;
    context += context_;
    context_squares += static_cast<double>(context_) * static_cast<double>(context_);
    if (is_decode) {
      decodes += 1;
      decode_context += context_;
    } else {
      prefill_tokens += tokens_;
      prefill_pairs += tokens_ * context_ + tokens_ * (tokens_ + 1) / 2;
      chunk_squares += static_cast<double>(tokens_) * static_cast<double>(tokens_);
    }
  }

  // `num_steps` batches of the same `num_decodes` decodes; the sums are those of the first batch's contexts, which
  // grow by one per step.
  void add_decodes(int64_t num_decodes, int64_t context_sum, double context_square_sum, int64_t num_steps) {
    const int64_t k = num_steps;
    const int64_t triangle = k * (k - 1) / 2;  // Σ j, j < k
    const int64_t total_context = k * context_sum + num_decodes * triangle;
    requests += k * num_decodes;
    tokens += k * num_decodes;
    decodes += k * num_decodes;
    decode_context += total_context;
    context += total_context;
    const double squares_of_j = static_cast<double>(triangle) * static_cast<double>(2 * k - 1) / 3.0;  // Σ j², j < k
    context_squares += static_cast<double>(k) * context_square_sum +
                       2.0 * static_cast<double>(context_sum) * static_cast<double>(triangle) +
                       static_cast<double>(num_decodes) * squares_of_j;
  }

  // Counts `num_steps` batches whose token count per batch is tokens / num_steps.
  void close_batches(int64_t num_steps, double knee) {
    steps = num_steps;
    const double count = static_cast<double>(num_steps);
    tokens_above_knee = std::max(static_cast<double>(tokens) - count * knee, 0.0);
  }
};

// The weights of the features, in seconds per unit.
struct StepTime {
  double per_step = 0;
  double per_request = 0;
  double per_token = 0;
  double per_token_above_knee = 0;
  double per_prefill_token = 0;
  double per_decode = 0;
  double per_decode_context = 0;
  double per_context = 0;
  double per_prefill_pair = 0;
  double per_chunk_square = 0;
  double per_context_square = 0;
  double knee = 0;

  double seconds(const Features& f) const {
    return per_step * static_cast<double>(f.steps) + per_request * static_cast<double>(f.requests) +
           per_token * static_cast<double>(f.tokens) + per_token_above_knee * f.tokens_above_knee +
           per_prefill_token * static_cast<double>(f.prefill_tokens) + per_decode * static_cast<double>(f.decodes) +
           per_decode_context * static_cast<double>(f.decode_context) + per_context * static_cast<double>(f.context) +
           per_prefill_pair * static_cast<double>(f.prefill_pairs) + per_chunk_square * f.chunk_squares +
           per_context_square * f.context_squares;
  }

  static StepTime linear(double b0, double b1, double b2, double b3, double b_seq) {
    StepTime t;
    t.per_step = b0;
    t.per_token = b1;
    t.per_decode_context = b2;
    t.per_prefill_pair = b3;
    t.per_request = b_seq;
    return t;
  }

  static StepTime with_knee(double b0, double below, double above, double knee, double b2, double b3, double b_seq) {
    StepTime t = linear(b0, below, b2, b3, b_seq);
    t.per_token_above_knee = above - below;
    t.knee = knee;
    return t;
  }

  static StepTime six_term(double b0, double bp, double bpp, double bd, double bs, double bss) {
    StepTime t;
    t.per_step = b0;
    t.per_prefill_token = bp;
    t.per_chunk_square = bpp;
    t.per_decode = bd;
    t.per_context = bs;
    t.per_context_square = bss;
    return t;
  }
};

}  // namespace headway
