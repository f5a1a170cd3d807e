// One row of scores to weights.
#pragma once

#include "attention.h"
#include "vmath.h"

namespace rayfin {

constexpr int64_t rounded_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// scores[0 .. count - 1] *= scale, then c * tanh(score / c) if there is a soft cap; returns the largest.
// The row is padded to whole vectors; its padding becomes -inf.
inline float scale_scores(float* scores, int64_t count, float scale, float softcap) {
  const int64_t padded = rounded_up(count, kWidth);
  Vec most = broadcast(kNever);
  for (int64_t i = 0; i < padded; i += kWidth) {
    Vec s = load(scores + i) * scale;
    if (softcap > 0.0f) s = tanh(s / softcap) * softcap;
    store(scores + i, s);
  }
  for (int64_t i = count; i < padded; ++i) scores[i] = kNever;
  for (int64_t i = 0; i < padded; i += kWidth) most = max(load(scores + i), most);
  return maximum(most);
}

// scores -> exp(score - most), and their sum; `most` is finite or NaN.
inline float exp_scores(float* scores, int64_t count, float most) {
  Vec total{};
  for (int64_t i = 0; i < count; i += kWidth) {
    Vec e = exp(load(scores + i) - most);
    store(scores + i, e);
    total += e;
  }
  return sum(total);
}

}  // namespace rayfin
