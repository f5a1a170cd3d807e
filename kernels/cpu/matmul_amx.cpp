// The matmul of 16-bit weights on AMX tiles: as exact as one of fp32 FMAs, and several times as fast.
//
// A float is the sum of three bfloat16 (8 of its 24 bits each; Henry, Tang and Heinecke, 2019), the product of two
// bfloat16 is exact in fp32, and the tile product adds in fp32: three tile products, one for each part of x, are
// the product of x. (Products below 2^-126 count as zero; x of 3.39e38 or more, which a bfloat16 rounds to
// infinity, gives NaN.)
//
// Each output is one chain of tile products in the order of its inputs. A tile of sums that is stored and loaded
// again is the same tile, so the chain does not depend on how rows and depth are cut: see matmul.h.
#if defined(__AMX_TILE__)

#include <immintrin.h>

#include <algorithm>

#include "amx.h"
#include "epilogue.h"
#include "matmul_amx_few.h"

namespace rayfin {

namespace {

constexpr int64_t kParts = 3;
constexpr int64_t kTile = kRegisterRows * kStep;  // elements of a tile of weights: a kilobyte
constexpr int64_t kSide = 2;                      // panels side by side: four tiles of sums
constexpr int64_t kWide = kSide * kPanel;
constexpr int kLines = int(kTile * 2 / 64);
// Rows of x that are split at once: their parts are 1.5 times the size of x.
constexpr int64_t kMostRows = 512;
constexpr int64_t kSplitFloats = 8 << 10;  // by a tile of the pool
// The parts of a chunk's rows should stay in the second-level cache (2 MiB) while panels pass.
constexpr int64_t kChunkBytes = 1 << 20;
constexpr int64_t kLeastBlocks = 4, kMostBlocks = 16;
// Steps of a strip: its weights (32 KiB) stay in the first-level cache (48 KiB) while a chunk's rows pass.
constexpr int64_t kStripSteps = 8;
// Weights that are used once are fetched so far ahead (half a step of a panel; at a step and beyond more is lost).
constexpr int64_t kAheadBytes = 1024;
constexpr double kTileSeconds = 40e-6, kBytesPerSecond = 12e9, kFlopsPerSecond = 300e9;

// The rows of x, cut into blocks of as many rows as the registers are told to have.
struct Rows {
  int64_t count, blocks, per_block, steps;

  int64_t part_size() const { return per_block * kStep; }  // elements
  int64_t block_size() const { return steps * kParts * part_size(); }
};

// Two vectors of x to three rows of bfloat16, whose sum they are.
RAYFIN_INLINE void split(Vec low, Vec high, BFloat16* out, int64_t part_size) {
  for (int64_t part = 0; part < kParts; ++part, out += part_size) {
    const auto rounded = _mm512_cvtne2ps_pbh(bit_cast<__m512>(high), bit_cast<__m512>(low));
    std::memcpy(out, &rounded, sizeof(rounded));
    low -= load(out);
    high -= load(out + kWidth);
  }
}

// Depth steps first .. last - 1 of a block to tiles [step][part][per_block][kStep]; rows past the last are zeros.
void split_block(const Rows& rows, const float* x, int64_t x_stride, int64_t inputs, int64_t block, int64_t first,
                 int64_t last, BFloat16* parts) {
  BFloat16* out = parts + block * rows.block_size() + first * kParts * rows.part_size();
  for (int64_t step = first; step < last; ++step, out += kParts * rows.part_size()) {
    for (int64_t i = 0; i < rows.per_block; ++i) {
      const int64_t row = block * rows.per_block + i, left = row < rows.count ? inputs - step * kStep : 0;
      const float* at = x + row * x_stride + step * kStep;
      const Vec low = left > 0 ? load_part(at, left) : Vec{};
      const Vec high = left > kWidth ? load_part(at + kWidth, left - kWidth) : Vec{};
      split(low, high, out + i * kStep, rows.part_size());
    }
  }
}

void split_rows(Pool& pool, const Rows& rows, const float* x, int64_t x_stride, int64_t inputs, BFloat16* parts) {
  const int64_t pieces = std::clamp<int64_t>(rows.per_block * inputs / kSplitFloats, 1, rows.steps);
  pool.run(rows.blocks * pieces, [&](int64_t tile, int) {
    const int64_t piece = tile % pieces;
    split_block(rows, x, x_stride, inputs, tile / pieces, rows.steps * piece / pieces,
                rows.steps * (piece + 1) / pieces, parts);
  });
}

// Registers 0 .. 3 are sums [per_block][16] of one or two panels, 4 .. 6 the parts of x, 7 weights.

template <int kC>
RAYFIN_INLINE void start_sums(const float* out, bool resume) {
  if (resume) {
    load_tile<kC>(out + kC * kWidth, kWide * sizeof(float));
  } else {
    zero_tile<kC>();
  }
}

template <int kC>
RAYFIN_INLINE void keep_sums(float* out) {
  store_tile<kC>(out + kC * kWidth, kWide * sizeof(float));
}

// What is fetched while a tile of weights is multiplied: all that lies `bytes` behind it, or some of the strip
// that follows, if other rows multiply by the tile as well.
struct Fetch {
  int64_t bytes = 0;
  const char* next[kSide] = {};
  int64_t lines = 0;

  template <int kC, bool kAlone>
  RAYFIN_INLINE void with(const BFloat16* weights, int64_t step) const {
    if constexpr (kAlone) {
      const char* at = reinterpret_cast<const char*>(weights) + bytes;
#pragma GCC unroll 16
      for (int line = 0; line < kLines; ++line) __builtin_prefetch(at + line * 64, 0, 3);
    } else {
      const char* at = next[kC / 2] + (2 * step + kC % 2) * lines * 64;
      for (int64_t line = 0; line < lines; ++line) __builtin_prefetch(at + line * 64, 0, 2);
    }
  }
};

template <int kC, bool kAlone>
RAYFIN_INLINE void multiply_tile(const BFloat16* weights, const Fetch& fetch, int64_t step) {
  fetch.with<kC, kAlone>(weights, step);
  load_tile<7>(weights, kRegisterBytes);
  multiply_bfloat16<kC, 6, 7>();
  multiply_bfloat16<kC, 5, 7>();
  multiply_bfloat16<kC, 4, 7>();
}

// Adds to the sums of a block, in `out` if `resume`: x's parts times `steps` of one or two panels.
template <int kPanels, bool kAlone>
RAYFIN_INLINE void multiply_block(const BFloat16* x, int64_t part_size, const BFloat16* weights, int64_t panel_size,
                                  int64_t steps, float* out, bool resume, const Fetch& fetch) {
  start_sums<0>(out, resume);
  start_sums<1>(out, resume);
  if constexpr (kPanels == 2) {
    start_sums<2>(out, resume);
    start_sums<3>(out, resume);
  }
  for (int64_t s = 0; s < steps; ++s, x += kParts * part_size, weights += 2 * kTile) {
    load_tile<6>(x + 2 * part_size, kRegisterBytes);
    load_tile<5>(x + part_size, kRegisterBytes);
    load_tile<4>(x, kRegisterBytes);
    multiply_tile<0, kAlone>(weights, fetch, s);
    multiply_tile<1, kAlone>(weights + kTile, fetch, s);
    if constexpr (kPanels == 2) {
      multiply_tile<2, kAlone>(weights + panel_size, fetch, s);
      multiply_tile<3, kAlone>(weights + panel_size + kTile, fetch, s);
    }
  }
  keep_sums<0>(out);
  keep_sums<1>(out);
  if constexpr (kPanels == 2) {
    keep_sums<2>(out);
    keep_sums<3>(out);
  }
}

// The one block of few rows times one or two panels, whose weights come from memory and are used once.
template <int kPanels>
void one_block(const Matrix& weight, int64_t panel, const Rows& rows, const BFloat16* x, float* out) {
  Fetch fetch;
  fetch.bytes = kAheadBytes;
  multiply_block<kPanels, true>(x, rows.part_size(), weight.panel<BFloat16>(panel), weight.panel_size(), rows.steps,
                                out, false, fetch);
}

// Several blocks times one or two panels, strip by strip; each fetches a share of the strip that follows.
template <int kPanels>
void some_blocks(const Matrix& weight, int64_t panel, const Rows& rows, const BFloat16* x, int64_t blocks, float* out) {
  for (int64_t step = 0; step < rows.steps; step += kStripSteps) {
    const int64_t steps = std::min(kStripSteps, rows.steps - step);
    const BFloat16* strip = weight.panel<BFloat16>(panel) + step * 2 * kTile;
    Fetch fetch;
    fetch.lines = (kLines + blocks - 1) / blocks;
    for (int64_t block = 0; block < blocks; ++block) {
      fetch.next[0] = reinterpret_cast<const char*>(strip + 2 * steps * kTile) + block * 2 * steps * fetch.lines * 64;
      fetch.next[1] = fetch.next[0] + weight.panel_size() * int64_t(sizeof(BFloat16));
      multiply_block<kPanels, false>(x + block * rows.block_size() + step * kParts * rows.part_size(),
                                     rows.part_size(), strip, weight.panel_size(), steps,
                                     out + block * rows.per_block * kWide, step > 0, fetch);
    }
  }
}

// A chunk's blocks times a panel and, if side is 2, the next.
void multiply_side(const Matrix& weight, int64_t panel, int64_t side, const Rows& rows, const BFloat16* x,
                   int64_t blocks, float* out) {
  if (blocks == 1) {
    (side == 2 ? one_block<2> : one_block<1>)(weight, panel, rows, x, out);
  } else {
    (side == 2 ? some_blocks<2> : some_blocks<1>)(weight, panel, rows, x, blocks, out);
  }
}

Rows cut_rows(int64_t count, int64_t inputs) {
  Rows rows;
  rows.count = count;
  rows.blocks = (count + kRegisterRows - 1) / kRegisterRows;
  rows.per_block = (count + rows.blocks - 1) / rows.blocks;
  rows.steps = (inputs + kStep - 1) / kStep;
  return rows;
}

int64_t chunks_of(const Rows& rows) {
  const int64_t fitting = kChunkBytes / (rows.block_size() * int64_t(sizeof(BFloat16)));
  const int64_t most = std::clamp(fitting, kLeastBlocks, kMostBlocks);
  return (rows.blocks + most - 1) / most;
}

int64_t panels_per_tile(const Matrix& weight, int64_t rows, int64_t chunks, int threads) {
  const double flops = 2.0 * double(rows) * double(weight.panel_size());
  const double bytes = double(weight.panel_size()) * double(sizeof(BFloat16));
  const double seconds = std::max(flops / kFlopsPerSecond, bytes / kBytesPerSecond);
  const int64_t wanted = int64_t(kTileSeconds / seconds) + 1;
  const int64_t fair = weight.panels * chunks / (4 * threads) + 1;  // some tiles for everybody
  return (std::min(wanted, fair) + kSide - 1) / kSide * kSide;
}

// At most kMostRows rows.
void multiply_rows(Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t count, float* y,
                   int64_t y_stride, const Epilogue& epilogue) {
  const Rows rows = cut_rows(count, weight.inputs);
  BFloat16* parts = pool.workspace<BFloat16>(rows.blocks * rows.block_size());
  split_rows(pool, rows, x, x_stride, weight.inputs, parts);
  const int64_t chunks = chunks_of(rows);
  const int64_t group = panels_per_tile(weight, (count + chunks - 1) / chunks, chunks, pool.threads());
  const int64_t groups = (weight.panels + group - 1) / group;
  const uint8_t height = uint8_t(rows.per_block);
  pool.run(chunks * groups, [&](int64_t tile, int thread) {
    const TileShapes shapes({height, height, height, height, height, height, height, kRegisterRows});
    const int64_t chunk = tile / groups, first_panel = tile % groups * group;
    const int64_t first = rows.blocks * chunk / chunks, last = rows.blocks * (chunk + 1) / chunks;
    const int64_t start = first * rows.per_block, n = std::min(last * rows.per_block, rows.count) - start;
    float* out = pool.scratch<float>(thread, (last - first) * rows.per_block * kWide);
    const float* residual = epilogue.residual ? epilogue.residual + start * epilogue.residual_stride : nullptr;
    const int64_t end = std::min(first_panel + group, weight.panels);
    for (int64_t panel = first_panel; panel < end; panel += kSide) {
      const int64_t side = std::min(kSide, end - panel);
      multiply_side(weight, panel, side, rows, parts + first * rows.block_size(), last - first, out);
      for (int64_t p = 0; p < side; ++p)
        finish_panel(weight, panel + p, out + p * kPanel, kWide, n, residual, y + start * y_stride, y_stride,
                     epilogue);
    }
  });
}

}  // namespace

void matmul_tiles(Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t rows, float* y,
                  int64_t y_stride, const Epilogue& epilogue) {
  if (rows <= kFewRows) return matmul_few(pool, weight, x, x_stride, rows, y, y_stride, epilogue);
  for (int64_t start = 0; start < rows; start += kMostRows) {
    Epilogue own = epilogue;
    if (own.residual) own.residual += start * own.residual_stride;
    multiply_rows(pool, weight, x + start * x_stride, x_stride, std::min(kMostRows, rows - start),
                  y + start * y_stride, y_stride, own);
  }
}

}  // namespace rayfin

#endif
