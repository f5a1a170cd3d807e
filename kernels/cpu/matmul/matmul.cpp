#include "matmul/matmul.h"

#include <algorithm>

#include "matmul/bfloat16_rows.h"
#include "matmul/epilogue.h"
#include "matmul/matmul_codes.h"
#include "matmul/matmul_rounded.h"
#include "matmul/panel_tiles.h"
#include "matmul/register_tile.h"

namespace rayfin {

namespace {

// Depth of a block: its part of a panel (16 KiB of floats) stays in the first-level cache while all rows of a chunk use
// it.
constexpr int64_t kDepth = 4096 / kPanel;
// A chunk's rows of x should stay in the second-level cache (512 KiB on Zen 3) for all panels.
constexpr int64_t kChunkBytes = 256 << 10;
constexpr int64_t kMinChunk = 48, kMaxChunk = 192;
// The target time of a tile: far longer than handing it out, far shorter than a time slice.
constexpr double kTileSeconds = 15e-6, kBytesPerSecond = 12e9, kFlopsPerSecond = 80e9;

// Panels multiplied side by side for few rows, whose sums in one panel would not fill the FMA pipes
// (two vectors a row; eight to ten FMAs are in flight).
constexpr int panels_at_once(int64_t rows) {
  if (kRows == 6) return rows == 1 ? 4 : rows == 2 ? 3 : rows == 3 ? 2 : 1;
  return rows == 1 ? 4 : rows <= 3 ? 4 : rows <= 6 ? 2 : 1;
}

template <int kM, int kP, class Weight, class Row>
void few_rows(const Matrix& weight, const Row* x, int64_t x_stride, int64_t panel, int64_t last, float* y,
              int64_t y_stride, const Epilogue& epilogue) {
  alignas(64) float out[kM * kP * kPanel];
  for (; panel + kP <= last; panel += kP) {
    register_tile<kM, kP, true, false>(x, x_stride, weight.panel<Weight>(panel), weight.panel_size(), weight.inputs,
                                       out, kP * kPanel, false);
    for (int p = 0; p < kP; ++p)
      finish_panel(weight, panel + p, out + p * kPanel, kP * kPanel, kM, y, y_stride, epilogue);
  }
  if constexpr (kP > 1) few_rows<kM, kP / 2, Weight>(weight, x, x_stride, panel, last, y, y_stride, epilogue);
}

// Multiplies rows of x by panels first .. last - 1; all rows use each block of a panel. So that rows do not wait for
// weights, each block of them prefetches a share of the next block of weights.
template <class Weight, class Row>
void many_rows(int64_t rows, const Matrix& weight, const Row* x, int64_t x_stride, int64_t first, int64_t last,
               float* out, float* y, int64_t y_stride, const Epilogue& epilogue) {
  const int64_t blocks = (rows + kRows - 1) / kRows;
  const int64_t share = kDepth * kPanel * int64_t(sizeof(Weight)) / blocks;  // bytes prefetched by a block of rows
  for (int64_t panel = first; panel < last; ++panel) {
    for (int64_t k = 0; k < weight.inputs; k += kDepth) {
      const int64_t depth = std::min(kDepth, weight.inputs - k);
      const Weight* weights = weight.panel<Weight>(panel) + k * kPanel;
      const char* next = reinterpret_cast<const char*>(weights + depth * kPanel);
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t row = rows * block / blocks, count = rows * (block + 1) / blocks - row;  // 8 rows are 4 + 4
        const Row* block_x = x + row * x_stride + k;
        rows_by_panel<true>(count, block_x, x_stride, weights, depth, out + row * kPanel, kPanel, k > 0,
                            {next + block * share, share * 16 / kDepth});
      }
    }
    finish_panel(weight, panel, out, kPanel, rows, y, y_stride, epilogue);
  }
}

int64_t chunk_rows(int64_t rows, int64_t inputs) {
  if (rows <= kMinChunk) return rows;
  int64_t fitting = kChunkBytes / (inputs * int64_t(sizeof(float)));
  int64_t limit = std::clamp(fitting, kMinChunk, kMaxChunk);
  int64_t chunks = (rows + limit - 1) / limit;
  int64_t even = (rows + chunks - 1) / chunks;
  return std::min(rows, (even + kRows - 1) / kRows * kRows);
}

PanelTiles tiles_of(const Matrix& weight, int64_t rows, int64_t chunks, int threads, int element) {
  const double flops = 2.0 * double(rows) * double(weight.panel_size());
  const double bytes = double(weight.panel_size()) * element;
  const double seconds = std::max(flops / kFlopsPerSecond, bytes / kBytesPerSecond);
  const int64_t side = rows <= kRows ? panels_at_once(rows) : 1;
  return {weight.panels, side, int64_t(kTileSeconds / seconds) + 1, chunks, threads};
}

// Row is float, or BFloat16 of rows that are rounded.
template <class Weight, class Row>
void matmul_as(Pool& pool, const Matrix& weight, const Row* x, int64_t x_stride, int64_t rows, float* y,
               int64_t y_stride, const Epilogue& epilogue) {
  const int64_t chunk = chunk_rows(rows, weight.inputs), chunks = (rows + chunk - 1) / chunk;
  const PanelTiles tiles = tiles_of(weight, chunk, chunks, pool.threads(), sizeof(Weight));
  pool.run(chunks * tiles.count(), [&](int64_t tile, int thread) {
    const int64_t start = tile / tiles.count() * chunk, count = std::min(chunk, rows - start);
    const PanelTiles::Range panels = tiles[tile % tiles.count()];
    if (rows <= kRows) {
      with_rows(rows, [&](auto m) {
        few_rows<m.value, panels_at_once(m.value), Weight>(weight, x, x_stride, panels.first, panels.last, y, y_stride,
                                                         epilogue);
      });
    } else {
      float* out = pool.scratch<float>(thread, count * kPanel);
      many_rows<Weight>(count, weight, x + start * x_stride, x_stride, panels.first, panels.last, out,
                        y + start * y_stride, y_stride, epilogue.from(start));
    }
  });
}

#if defined(__AVX512F__) && !defined(__AMX_TILE__)
constexpr int64_t kRoundedRows = 512;  // rows that are rounded at once

void matmul_bfloat16(Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t rows, float* y,
                     int64_t y_stride, const Epilogue& epilogue) {
  const int64_t stride = (weight.inputs + 1) / 2 * 2;
  BFloat16* rounded = pool.workspace<BFloat16>(std::min(rows, kRoundedRows) * stride);
  for (int64_t start = 0; start < rows; start += kRoundedRows) {
    const int64_t count = std::min(kRoundedRows, rows - start);
    round_rows(pool, x + start * x_stride, x_stride, count, weight.inputs, rounded, stride);
    matmul_as<BFloat16>(pool, weight, static_cast<const BFloat16*>(rounded), stride, count, y + start * y_stride,
                        y_stride, epilogue.from(start));
  }
}
#endif

}  // namespace

void matmul(Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t rows, float* y,
            int64_t y_stride, const Epilogue& epilogue) {
  if (rows <= 0) return;
  switch (weight.storage) {
    case kFloat32:
#if defined(__AMX_TILE__)
      return matmul_tiles(pool, weight, x, x_stride, rows, y, y_stride, epilogue);
#endif
      return matmul_as<float>(pool, weight, x, x_stride, rows, y, y_stride, epilogue);
    case kBFloat16:
#if defined(__AMX_TILE__)
      return matmul_tiles(pool, weight, x, x_stride, rows, y, y_stride, epilogue);
#else
#if defined(__AVX512F__)
      if (pool.rounds_rows) return matmul_bfloat16(pool, weight, x, x_stride, rows, y, y_stride, epilogue);
#endif
      return matmul_as<BFloat16>(pool, weight, x, x_stride, rows, y, y_stride, epilogue);
#endif
    default:
      if (weight.row_bytes) return matmul_rounded(pool, weight, x, x_stride, rows, y, y_stride, epilogue);
      return matmul_codes(pool, weight, x, x_stride, rows, y, y_stride, epilogue);
  }
}

}  // namespace rayfin
