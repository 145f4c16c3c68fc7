// How long a router expects a resident's answer to become, given what was predicted and what is there already.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

namespace headway {

class LengthRule {
 public:
  enum class Kind { kSurvival, kPlain, kConditionalMedian };

  explicit LengthRule(Kind kind) : kind_(kind) {}
  // `edges`: rising upper bounds of prompt bins (the last bin is open); `lengths`: sorted answers seen, one row per bin.
  LengthRule(std::vector<int64_t> edges, std::vector<std::vector<double>> lengths)
      : kind_(Kind::kConditionalMedian), edges_(std::move(edges)), lengths_(std::move(lengths)) {}

  // The whole answer expected, above `output` and within `max_tokens` (0: no limit of its own).
  int64_t target(double predicted, int64_t prompt, int64_t output, int64_t max_tokens) const {
    const double done = static_cast<double>(output);
    double expected = predicted;
    // A request that outlives its prediction goes on: a phantom end would free KV blocks that are not free.
    if (kind_ == Kind::kSurvival) expected = done + std::max({predicted - done, 64.0, done / 4});
    if (kind_ == Kind::kConditionalMedian) expected = median_above(prompt, done, predicted);
    int64_t target = std::max(static_cast<int64_t>(std::ceil(std::min(expected, 1e9))), output + 1);
    if (max_tokens > 0) target = std::max(std::min(target, max_tokens), output + 1);
    return target;
  }

 private:
  // The median of the answers seen on such prompts that were longer than `done`; where none was, a quarter more.
  double median_above(int64_t prompt, double done, double predicted) const {
    if (done < 1) return predicted;
    const size_t bin = static_cast<size_t>(std::lower_bound(edges_.begin(), edges_.end(), prompt) - edges_.begin());
    const std::vector<double>& row = lengths_[bin];
    const auto first = std::upper_bound(row.begin(), row.end(), done);
    const int64_t count = row.end() - first;
    return count == 0 ? done + std::max(64.0, done / 4) : *(first + count / 2);
  }

  Kind kind_;
  std::vector<int64_t> edges_;
  std::vector<std::vector<double>> lengths_;
};

}  // namespace headway
