// Sampling where rows may not take every token: a bit for each token says whether it may be sampled.
#pragma once

#include "common/pool.h"

namespace rayfin {

// The bits of some rows: those of row r are bits[place[r]][0 .. words - 1], lowest bit first; place[r] < 0 allows all.
struct Allowed {
  const uint32_t* bits;
  int64_t words;
  const int64_t* place;

  const uint32_t* of(int64_t row) const { return place[row] < 0 ? nullptr : bits + place[row] * words; }
};

// `highest` among the allowed tokens. What is not allowed is not read where 32 tokens in a row are not, so it may be
// NaN. A row without an allowed token gets -1.
void highest_allowed(Pool& pool, const float* x, int64_t stride, int64_t rows, int64_t count, const Allowed& allowed,
                     int64_t* index);

// y[row][0 .. count - 1] = x, and -inf for tokens that are not allowed; rows of y are `count` apart.
void copy_allowed(Pool& pool, const float* x, int64_t stride, int64_t rows, int64_t count, const Allowed& allowed,
                  float* y);

}  // namespace rayfin
