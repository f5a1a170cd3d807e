#include "softmax.h"

#include <algorithm>
#include <cmath>

#include "vmath.h"

namespace rayfin {

namespace {

float largest(const float* scores, int64_t count) {
  constexpr int kChains = 4;  // at once: one would wait for each comparison
  Vec most[kChains];
  std::fill_n(most, kChains, broadcast(kNever));
  int64_t i = 0;
  for (; i + kChains * kWidth <= count; i += kChains * kWidth)
    for (int c = 0; c < kChains; ++c) most[c] = max(load(scores + i + c * kWidth), most[c]);
  for (; i < count; i += kWidth) most[0] = max(load(scores + i), most[0]);
  return maximum(max(max(most[0], most[1]), max(most[2], most[3])));
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
  const float most = largest(scores + begin, end - begin);
  Vec total{};
  for (int64_t i = begin; i < end; i += kWidth) {
    const Vec weight = exp_in_range(load(scores + i) - most);
    store(scores + i, weight);
    total += weight;
  }
  std::fill(scores, scores + begin, 0.0f);
  std::fill(scores + end, scores + count, 0.0f);
  return {most, sum(total)};
}

void merge(Sums& whole, float* mixed, const Sums& part, const float* part_mixed, int64_t size) {
  if (part.total == 0.0f) return;
  const float most = std::max(whole.most, part.most);
  const float keep = whole.most == most ? 1.0f : std::exp(whole.most - most);
  const float add = part.most == most ? 1.0f : std::exp(part.most - most);
  whole.total = whole.total * keep + part.total * add;
  whole.most = most;
  for (int64_t d = 0; d < size; d += kWidth) store(mixed + d, load(mixed + d) * keep + load(part_mixed + d) * add);
}

float factor(const Sums& whole, const float* sink) {
  if (!sink) return 1.0f / whole.total;
  const float most = std::max(whole.most, *sink), shrink = std::exp(whole.most - most);
  return shrink / (whole.total * shrink + std::exp(*sink - most));
}

}  // namespace rayfin
