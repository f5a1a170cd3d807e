// The product of matmul_tiles for few rows, without tiles.
#pragma once

#include "matmul.h"

namespace rayfin {

#if defined(__AMX_TILE__)
constexpr int64_t kFewRows = 2;  // as fast as tiles or faster

// Bit for bit what tiles give; rows 1 .. kFewRows.
void matmul_few(Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t rows, float* y,
                int64_t y_stride, const Epilogue& epilogue);
#endif

}  // namespace rayfin
