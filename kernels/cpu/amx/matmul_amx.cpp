// The matmul of 16-bit weights on AMX tiles: as exact as fp32 FMAs and several times as fast.
// matmul_amx_float.cpp adds what fp32 weights need.
//
// A float is the sum of three bfloat16 (8 of its 24 bits each; Henry, Tang and Heinecke, 2019), the product of two
// bfloat16 is exact in fp32, and the tile product adds in fp32: three tile products, one for each part of x, are
// the product of x. (Products below 2^-126 count as zero; x of 3.39e38 or more, which a bfloat16 rounds to
// infinity, gives NaN.)
//
// Each output is one chain of tile products in the order of its inputs. A tile of sums that is stored and loaded
// again keeps its bits, so the chain does not depend on how rows and depth are cut (matmul.h).
//
// Rows that are rounded (Pool::rounds_rows) are their first part alone: a third of the products.
#if defined(__AMX_TILE__)

#include <algorithm>

#include "amx/amx_sums.h"
#include "matmul/epilogue.h"
#include "amx/matmul_amx_few.h"
#include "amx/matmul_amx_float.h"
#include "matmul/panel_tiles.h"

namespace rayfin {

namespace {

constexpr int kLines = int(kTile * 2 / 64);
// Rows of x split at once; their parts take 1.5 times the memory of x.
constexpr int64_t kMaxRows = 512;
// The parts of a chunk's rows should stay in the second-level cache (2 MiB) while panels pass.
constexpr int64_t kChunkBytes = 1 << 20;
constexpr int64_t kMinBlocks = 4, kMaxBlocks = 16;
// Steps of a strip: its weights (32 KiB) stay in the first-level cache (48 KiB) while a chunk's rows pass.
constexpr int64_t kStripSteps = 8;
// Prefetch distance of weights that are used once: half a step of a panel. A whole step or more is slower.
constexpr int64_t kAheadBytes = 1024;
constexpr double kTileSeconds = 40e-6, kBytesPerSecond = 12e9, kFlopsPerSecond = 300e9;

// What is prefetched while a tile of weights is multiplied: the tile that lies `bytes` ahead, or a share of the next
// strip if other rows use the tile as well.
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

template <int64_t kCount, int kC, bool kAlone>
RAYFIN_INLINE void multiply_tile(const BFloat16* weights, const Fetch& fetch, int64_t step) {
  fetch.with<kC, kAlone>(weights, step);
  load_tile<7>(weights, kRegisterBytes);
  if constexpr (kCount == kParts) {
    multiply_bfloat16<kC, 6, 7>();
    multiply_bfloat16<kC, 5, 7>();
  }
  multiply_bfloat16<kC, 4, 7>();
}

// Adds x's parts times `steps` of one or two panels to a block's sums, which continue from `out` if `resume`.
template <int64_t kCount, int kPanels, bool kAlone>
RAYFIN_INLINE void multiply_block(const BFloat16* x, int64_t part_size, const BFloat16* weights, int64_t panel_size,
                                  int64_t steps, float* out, bool resume, const Fetch& fetch) {
  start_sums<kPanels>(out, resume);
  for (int64_t s = 0; s < steps; ++s, x += kCount * part_size, weights += 2 * kTile) {
    load_parts<kCount>(x, part_size);
    multiply_tile<kCount, 0, kAlone>(weights, fetch, s);
    multiply_tile<kCount, 1, kAlone>(weights + kTile, fetch, s);
    if constexpr (kPanels == 2) {
      multiply_tile<kCount, 2, kAlone>(weights + panel_size, fetch, s);
      multiply_tile<kCount, 3, kAlone>(weights + panel_size + kTile, fetch, s);
    }
  }
  keep_sums<kPanels>(out);
}

// A single block times one or two panels. The weights come from memory and are used once.
template <int64_t kCount, int kPanels>
void one_block(const Matrix& weight, int64_t panel, const Rows& rows, const BFloat16* x, float* out) {
  Fetch fetch;
  fetch.bytes = kAheadBytes;
  multiply_block<kCount, kPanels, true>(x, rows.part_size(), weight.panel<BFloat16>(panel), weight.panel_size(), rows.steps,
                                out, false, fetch);
}

// Several blocks times one or two panels, strip by strip; each block prefetches a share of the next strip.
template <int64_t kCount, int kPanels>
void some_blocks(const Matrix& weight, int64_t panel, const Rows& rows, const BFloat16* x, int64_t blocks, float* out) {
  for (int64_t step = 0; step < rows.steps; step += kStripSteps) {
    const int64_t steps = std::min(kStripSteps, rows.steps - step);
    const BFloat16* strip = weight.panel<BFloat16>(panel) + step * 2 * kTile;
    Fetch fetch;
    fetch.lines = (kLines + blocks - 1) / blocks;
    for (int64_t block = 0; block < blocks; ++block) {
      fetch.next[0] = reinterpret_cast<const char*>(strip + 2 * steps * kTile) + block * 2 * steps * fetch.lines * 64;
      fetch.next[1] = fetch.next[0] + weight.panel_size() * int64_t(sizeof(BFloat16));
      multiply_block<kCount, kPanels, false>(x + block * rows.block_size() + step * kCount * rows.part_size(),
                                             rows.part_size(), strip, weight.panel_size(), steps,
                                             out + block * rows.per_block * kWide, step > 0, fetch);
    }
  }
}

// 16-bit weights times a chunk's blocks, of kCount parts.
template <int64_t kCount>
void multiply_halves(const Matrix& weight, int64_t panel, int64_t side, const Rows& rows, const BFloat16* x,
                     int64_t blocks, float* out) {
  if (blocks == 1) {
    (side == 2 ? one_block<kCount, 2> : one_block<kCount, 1>)(weight, panel, rows, x, out);
  } else {
    (side == 2 ? some_blocks<kCount, 2> : some_blocks<kCount, 1>)(weight, panel, rows, x, blocks, out);
  }
}

// A chunk's blocks times a panel and, if side is 2, the next.
void multiply_side(const Matrix& weight, int64_t panel, int64_t side, const Rows& rows, const BFloat16* x,
                   int64_t blocks, BFloat16* cut, float* out) {
  if (weight.storage == kFloat32) {
    multiply_float(weight, panel, side, rows, x, blocks, cut, out);
  } else {
    (rows.parts == 1 ? multiply_halves<1> : multiply_halves<kParts>)(weight, panel, side, rows, x, blocks, out);
  }
}

int64_t chunks_of(const Rows& rows) {
  const int64_t fitting = kChunkBytes / (rows.block_size() * int64_t(sizeof(BFloat16)));
  const int64_t limit = std::clamp(fitting, kMinBlocks, kMaxBlocks);
  return (rows.blocks + limit - 1) / limit;
}

PanelTiles tiles_of(const Matrix& weight, int64_t rows, int64_t chunks, int threads) {
  const double flops = 2.0 * double(rows) * double(weight.panel_size());
  const double bytes = double(weight.panel_size()) * double(sizeof(BFloat16));
  const double seconds = std::max(flops / kFlopsPerSecond, bytes / kBytesPerSecond);
  return {weight.panels, kSide, int64_t(kTileSeconds / seconds) + 1, chunks, threads};
}

// Multiplies at most kMaxRows rows.
void multiply_rows(Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t count, float* y,
                   int64_t y_stride, const Epilogue& epilogue) {
  const Rows rows(count, weight.inputs, pool.rounds_rows && weight.storage == kBFloat16 ? 1 : kParts);
  BFloat16* parts = pool.workspace<BFloat16>(rows.blocks * rows.block_size());
  split_rows(pool, rows, x, x_stride, weight.inputs, parts);
  const int64_t chunks = chunks_of(rows);
  const PanelTiles tiles = tiles_of(weight, (count + chunks - 1) / chunks, chunks, pool.threads());
  const uint8_t height = uint8_t(rows.per_block);
  const int64_t cut_size = weight.storage == kFloat32 ? float_cut_size() : 0;
  pool.run(chunks * tiles.count(), [&](int64_t tile, int thread) {
    const TileShapes shapes({height, height, height, height, height, height, height, kRegisterRows});
    const int64_t chunk = tile / tiles.count();
    const PanelTiles::Range panels = tiles[tile % tiles.count()];
    const int64_t first = rows.blocks * chunk / chunks, last = rows.blocks * (chunk + 1) / chunks;
    const int64_t start = first * rows.per_block, n = std::min(last * rows.per_block, rows.count) - start;
    float* out = pool.scratch<float>(thread, (last - first) * rows.per_block * kWide + cut_size / 2);
    BFloat16* cut = reinterpret_cast<BFloat16*>(out + (last - first) * rows.per_block * kWide);
    for (int64_t panel = panels.first; panel < panels.last; panel += kSide) {
      const int64_t side = std::min(kSide, panels.last - panel);
      multiply_side(weight, panel, side, rows, parts + first * rows.block_size(), last - first, cut, out);
      for (int64_t p = 0; p < side; ++p)
        finish_panel(weight, panel + p, out + p * kPanel, kWide, n, y + start * y_stride, y_stride,
                     epilogue.from(start));
    }
  });
}

}  // namespace

void matmul_tiles(Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t rows, float* y,
                  int64_t y_stride, const Epilogue& epilogue) {
  if (rows <= kFewRows) return matmul_few(pool, weight, x, x_stride, rows, y, y_stride, epilogue);
  for (int64_t start = 0; start < rows; start += kMaxRows) {
    multiply_rows(pool, weight, x + start * x_stride, x_stride, std::min(kMaxRows, rows - start),
                  y + start * y_stride, y_stride, epilogue.from(start));
  }
}

}  // namespace rayfin

#endif
