// Splits rows of x for the tile products: each float into three bfloat16 that sum to it.
#pragma once

#include "common/pool.h"
#include "common/simd.h"

#if defined(__AMX_TILE__)

#include "amx/amx.h"
#include "matmul/matrix.h"

namespace rayfin {

constexpr int64_t kParts = 3;  // of exact rows; rounded ones have one part
constexpr int64_t kTile = kRegisterRows * kStep;  // elements of a tile of weights
constexpr int64_t kSide = 2;                      // panels side by side: four tiles of sums
constexpr int64_t kWide = kSide * kPanel;

// Splits floats into three bfloat16 that sum to them, each the upper half of the remainder.
RAYFIN_INLINE void cut(Vec floats, Vec (&parts)[kParts]) {
  const VecU upper = VecU{} + 0xffff0000u;
  for (int64_t part = 0; part < kParts; ++part) {
    parts[part] = bit_cast<Vec>(bit_cast<VecU>(floats) & upper);
    floats -= parts[part];
  }
}

// Rows of x in blocks, each of as many rows as the tile registers are configured for.
struct Rows {
  int64_t count, parts, blocks, per_block, steps;

  Rows(int64_t count, int64_t inputs, int64_t parts);
  int64_t part_size() const { return per_block * kStep; }  // elements
  int64_t block_size() const { return steps * parts * part_size(); }
};

// Writes x to parts[block][step][part][per_block][kStep]; rows past the last are zeros. With one part x is rounded.
void split_rows(Pool& pool, const Rows& rows, const float* x, int64_t x_stride, int64_t inputs, BFloat16* parts);

}  // namespace rayfin

#endif
