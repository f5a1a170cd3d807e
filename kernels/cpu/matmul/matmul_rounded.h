// The matmul of codes in groups with rows rounded to 8 bits, each row with a scale as in matmul_int8.h.
//
// The products of a group are summed exactly in int32, and the groups in fp32 in their order, for any number of rows.
#pragma once

#include "matmul/matmul.h"

namespace rayfin {

// matmul for a weight of codes that rounds its rows (can_round_rows).
void matmul_rounded(Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t rows, float* y,
                    int64_t y_stride, const Epilogue& epilogue);

}  // namespace rayfin
