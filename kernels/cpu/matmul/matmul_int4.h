// The matmul of 4-bit weights in groups with rows rounded to 8 bits ("W4A8"), each row with a scale as in matmul_int8.h.
//
// The products of a group are summed exactly in int32, and the groups in fp32 in their order, for any number of rows.
#pragma once

#include "matmul/matmul.h"

namespace rayfin {

// matmul for a weight stored as kInt4 or kLevels4 that rounds its rows.
void matmul_int4(Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t rows, float* y,
                 int64_t y_stride, const Epilogue& epilogue);

}  // namespace rayfin
