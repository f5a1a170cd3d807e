// Turns scores into weights and merges the parts of a row.
//
// Decode and prefill share these functions and add a row's keys in one order (attention.h), so that a token gets the
// same bits from either. For that the functions are compiled once and never inlined.
#pragma once

#include "paged_attention/attention.h"

namespace rayfin {

constexpr int64_t rounded_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Over a row's keys so far: the largest score, and the sum of exp(score - max).
struct Sums {
  float max_score = kNever;
  float total = 0.0f;
};

// Turns the scores of keys from .. to - 1 into weights: c * tanh(score / c) if there is a softcap c, and then
// exp(score - max). The other keys of `count` get 0. `count` is a multiple of kWidth.
Sums soften(float* scores, int64_t from, int64_t to, int64_t count, float softcap);

// Merges one part of a row's keys into the whole: its sums, and its weighted values [size].
void merge(Sums& whole, float* mixed, const Sums& part, const float* part_mixed, int64_t size);

// The factor for a row's mixed values at the end. `sink` is a score without a value, or null.
float factor(const Sums& whole, const float* sink);

}  // namespace rayfin
