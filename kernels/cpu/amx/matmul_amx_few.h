// matmul_tiles for few rows, by AVX-512 vectors instead of tiles.
#pragma once

#include "matmul/matmul.h"

namespace rayfin {

#if defined(__AMX_TILE__)
constexpr int64_t kFewRows = 2;  // as fast as tiles or faster

// Gives the same bits as tiles; rows 1 .. kFewRows.
void matmul_few(Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t rows, float* y,
                int64_t y_stride, const Epilogue& epilogue);
#endif

}  // namespace rayfin
