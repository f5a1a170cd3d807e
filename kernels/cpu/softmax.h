// From scores to weights, and from parts of a row to the whole.
//
// Decoding and prompts share these. Their sums go over a row's keys in one order (attention.h), so that a token gets
// the same bits from either; what is here is therefore compiled once and never inlined.
#pragma once

#include "attention.h"

namespace rayfin {

constexpr int64_t rounded_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// What has been seen of a row's keys: the largest score, and the sum of exp(score - most).
struct Sums {
  float most = kNever;
  float total = 0.0f;
};

// Scores of the keys from .. to - 1 of `count` to weights: c * tanh(score / c) if there is a soft cap, and of that
// exp(score - most). Other keys get 0. `count` in whole vectors.
Sums soften(float* scores, int64_t from, int64_t to, int64_t count, float softcap);

// Takes a part of the keys into the whole: its sums, and its values [size] mixed by its weights.
void merge(Sums& whole, float* mixed, const Sums& part, const float* part_mixed, int64_t size);

// What a row's mixed values are multiplied by in the end; `sink`: a score without a value, or null.
float factor(const Sums& whole, const float* sink);

}  // namespace rayfin
