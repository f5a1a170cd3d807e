// Greedy sampling: the index of each row's largest value.
#pragma once

#include "common/pool.h"

namespace rayfin {

// index[row] = the first index of the largest of x[row][0 .. count - 1], rows `stride` apart. A row that holds NaN or
// +inf, or only -inf, cannot be sampled and gets -1.
void highest(Pool& pool, const float* x, int64_t stride, int64_t rows, int64_t count, int64_t* index);

// The same for one row.
int64_t highest_of_row(const float* x, int64_t count);

}  // namespace rayfin
