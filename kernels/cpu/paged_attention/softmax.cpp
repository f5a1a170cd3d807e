#include "paged_attention/softmax.h"

#include <algorithm>
#include <cmath>

#include "common/vmath.h"

namespace rayfin {

namespace {

float largest(const float* scores, int64_t count) {
  constexpr int kChains = 4;  // independent comparisons, to hide their latency
  Vec largest_score[kChains];
  std::fill_n(largest_score, kChains, broadcast(kNever));
  int64_t i = 0;
  for (; i + kChains * kWidth <= count; i += kChains * kWidth)
    for (int c = 0; c < kChains; ++c) largest_score[c] = max(load(scores + i + c * kWidth), largest_score[c]);
  for (; i < count; i += kWidth) largest_score[0] = max(load(scores + i), largest_score[0]);
  return maximum(max(max(largest_score[0], largest_score[1]), max(largest_score[2], largest_score[3])));
}

}  // namespace

Sums soften(float* scores, int64_t from, int64_t to, int64_t count, float softcap) {
  if (from >= to) {
    std::fill_n(scores, count, 0.0f);
    return {};
  }
  const int64_t begin = from / kWidth * kWidth, end = rounded_up(to, kWidth);
  if (softcap > 0.0f)
    for (int64_t i = begin; i < end; i += kWidth) store(scores + i, tanh(load(scores + i) / softcap) * softcap);
  std::fill(scores + begin, scores + from, kNever);
  std::fill(scores + to, scores + end, kNever);
  const float largest_score = largest(scores + begin, end - begin);
  Vec total{};
  for (int64_t i = begin; i < end; i += kWidth) {
    const Vec weight = exp_in_range(load(scores + i) - largest_score);
    store(scores + i, weight);
    total += weight;
  }
  std::fill(scores, scores + begin, 0.0f);
  std::fill(scores + end, scores + count, 0.0f);
  return {largest_score, sum(total)};
}

void merge(Sums& whole, float* mixed, const Sums& part, const float* part_mixed, int64_t size) {
  if (part.total == 0.0f) return;
  const float largest_score = std::max(whole.max_score, part.max_score);
  const float keep = whole.max_score == largest_score ? 1.0f : std::exp(whole.max_score - largest_score);
  const float add = part.max_score == largest_score ? 1.0f : std::exp(part.max_score - largest_score);
  whole.total = whole.total * keep + part.total * add;
  whole.max_score = largest_score;
  for (int64_t d = 0; d < size; d += kWidth) store(mixed + d, load(mixed + d) * keep + load(part_mixed + d) * add);
}

float factor(const Sums& whole, const float* sink) {
  if (!sink) return 1.0f / whole.total;
  const float largest_score = std::max(whole.max_score, *sink), shrink = std::exp(whole.max_score - largest_score);
  return shrink / (whole.total * shrink + std::exp(*sink - largest_score));
}

}  // namespace rayfin
