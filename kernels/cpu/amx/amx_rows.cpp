#include "amx/amx_rows.h"

#if defined(__AMX_TILE__)

#include <immintrin.h>

#include <algorithm>

#include "matmul/epilogue.h"

namespace rayfin {

namespace {

constexpr int64_t kSplitFloats = 8 << 10;  // floats split by one tile of the pool

// Splits two vectors of x into `parts` rows of bfloat16; three sum to them.
RAYFIN_INLINE void split(Vec low, Vec high, BFloat16* out, int64_t parts, int64_t part_size) {
  for (int64_t part = 0; part < parts; ++part, out += part_size) {
    const auto rounded = _mm512_cvtne2ps_pbh(bit_cast<__m512>(high), bit_cast<__m512>(low));
    std::memcpy(out, &rounded, sizeof(rounded));
    low -= load(out);
    high -= load(out + kWidth);
  }
}

// Splits depth steps first .. last - 1 of a block.
void split_block(const Rows& rows, const float* x, int64_t x_stride, int64_t inputs, int64_t block, int64_t first,
                 int64_t last, BFloat16* parts) {
  BFloat16* out = parts + block * rows.block_size() + first * rows.parts * rows.part_size();
  for (int64_t step = first; step < last; ++step, out += rows.parts * rows.part_size()) {
    for (int64_t i = 0; i < rows.per_block; ++i) {
      const int64_t row = block * rows.per_block + i, left = row < rows.count ? inputs - step * kStep : 0;
      const float* at = x + row * x_stride + step * kStep;
      const Vec low = left > 0 ? load_part(at, left) : Vec{};
      const Vec high = left > kWidth ? load_part(at + kWidth, left - kWidth) : Vec{};
      split(low, high, out + i * kStep, rows.parts, rows.part_size());
    }
  }
}

}  // namespace

Rows::Rows(int64_t count, int64_t inputs, int64_t parts)
    : count(count),
      parts(parts),
      blocks((count + kRegisterRows - 1) / kRegisterRows),
      per_block((count + blocks - 1) / blocks),
      steps((inputs + kStep - 1) / kStep) {}

void split_rows(Pool& pool, const Rows& rows, const float* x, int64_t x_stride, int64_t inputs, BFloat16* parts) {
  const int64_t pieces = std::clamp<int64_t>(rows.per_block * inputs / kSplitFloats, 1, rows.steps);
  pool.run(rows.blocks * pieces, [&](int64_t tile, int) {
    const int64_t piece = tile % pieces;
    split_block(rows, x, x_stride, inputs, tile / pieces, rows.steps * piece / pieces,
                rows.steps * (piece + 1) / pieces, parts);
  });
}

}  // namespace rayfin

#endif
