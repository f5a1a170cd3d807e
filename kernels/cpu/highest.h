// Greedy sampling: the highest number of each row.
#pragma once

#include "pool.h"

namespace rayfin {

// index[row] = the first of the highest of x[row][0 .. count - 1], rows `stride` apart; -1 where a row cannot be
// sampled: it holds a NaN or +inf, or nothing but -inf.
void highest(Pool& pool, const float* x, int64_t stride, int64_t rows, int64_t count, int64_t* index);

}  // namespace rayfin
