#include "matmul/matmul_int8.h"

#include <algorithm>

#include "matmul/epilogue.h"
#include "matmul/int8_tile.h"
#include "matmul/panel_tiles.h"

#if defined(__AVX2__)
#include <cpuid.h>
#endif

namespace rayfin {

namespace {

constexpr int64_t kChunkBytes = 256 << 10;  // a chunk's rows stay in the second-level cache, as in matmul.cpp
constexpr int64_t kMinChunk = 48, kMaxChunk = 384;
constexpr int64_t kFetchedRows = 64;
constexpr int64_t kQuantisedAtOnce = 16 << 10;  // values, a few microseconds of work
constexpr double kTileSeconds = 15e-6, kBytesPerSecond = 12e9;
constexpr double kOperationsPerSecond = kWidth == 16 ? 500e9 : 150e9;

// Rows of x, quantized.
struct Rows {
  const char* values;
  const float* scales;
  int64_t stride;  // bytes

  Rows from(int64_t row) const { return {values + row * stride, scales + row, stride}; }
};

template <class Dot>
void quantise_row(const float* x, int64_t inputs, int64_t depth, typename Dot::Value* out, float* scale) {
  const Int8Scale row_scale = int8_scale(x, inputs);
  *scale = row_scale.scale;
  for (int64_t k = 0; k < depth; k += kWidth) {
    const int64_t count = inputs - k;
    const Vec values = count >= kWidth ? load(x + k) : count > 0 ? load_some(x + k, int(count)) : Vec{};
    Dot::store(out + k, rounded(values * row_scale.inverse));
  }
}

template <class Dot>
Rows quantise(Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t rows) {
  const int64_t stride = weight.depth * int64_t(sizeof(typename Dot::Value));
  char* values = pool.workspace<char>(rows * (stride + int64_t(sizeof(float))));
  float* scales = reinterpret_cast<float*>(values + rows * stride);
  const int64_t group = std::max<int64_t>(1, kQuantisedAtOnce / weight.depth);
  pool.run((rows + group - 1) / group, [&](int64_t tile, int) {
    for (int64_t row = tile * group; row < std::min(rows, (tile + 1) * group); ++row) {
      auto* out = reinterpret_cast<typename Dot::Value*>(values + row * stride);
      quantise_row<Dot>(x + row * x_stride, weight.inputs, weight.depth, out, scales + row);
    }
  });
  return {values, scales, stride};
}

Int8Panel panel_of(const Matrix& weight, int64_t panel) {
  return {weight.panel<int8_t>(panel), weight.scales() + panel * kPanel, weight.offsets() + panel * kPanel};
}

template <class Dot, int kM, int kP>
void few_rows(const Matrix& weight, const Rows& x, int64_t panel, int64_t last, float* y, int64_t y_stride,
              const Epilogue& epilogue) {
  alignas(64) float out[kM * kP * kPanel];
  for (; panel + kP <= last; panel += kP) {
    int8_tile<Dot, kM, kP, true, false>(x.values, x.stride, x.scales, panel_of(weight, panel), weight.depth, out,
                                        kP * kPanel);
    for (int p = 0; p < kP; ++p)
      finish_panel(weight, panel + p, out + p * kPanel, kP * kPanel, kM, y, y_stride, epilogue);
  }
  if constexpr (kP > 1) few_rows<Dot, kM, kP / 2>(weight, x, panel, last, y, y_stride, epilogue);
}

// Multiplies rows of x by panels first .. last - 1; all rows use each panel while it is in cache. Up to kFetchedRows
// rows would wait for weights, so each block of rows prefetches a share of the next panel.
template <class Dot>
void many_rows(int64_t rows, const Matrix& weight, const Rows& x, int64_t first, int64_t last, float* out,
               float* y, int64_t y_stride, const Epilogue& epilogue) {
  const int64_t blocks = (rows + Dot::kMaxRows - 1) / Dot::kMaxRows;
  const int64_t share = weight.panel_size() / blocks;  // bytes prefetched by a block of rows
  for (int64_t panel = first; panel < last; ++panel) {
    const Int8Panel weights = panel_of(weight, panel);
    const char* next = reinterpret_cast<const char*>(weights.weights) + weight.panel_size();
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t row = rows * block / blocks, count = rows * (block + 1) / blocks - row;
      const Rows some = x.from(row);
      float* sums = out + row * kPanel;
      with_rows(count, [&](auto m) {
        if constexpr (m.value <= Dot::kMaxRows) {
          if (rows <= kFetchedRows) {
            int8_tile<Dot, m.value, 1, false, true>(some.values, some.stride, some.scales, weights, weight.depth, sums,
                                                    kPanel, {next + block * share, share * 16 / weight.depth});
          } else {
            int8_tile<Dot, m.value, 1, false, false>(some.values, some.stride, some.scales, weights, weight.depth,
                                                     sums, kPanel);
          }
        }
      });
    }
    finish_panel(weight, panel, out, kPanel, rows, y, y_stride, epilogue);
  }
}

int64_t chunk_rows(int64_t rows, int64_t row_bytes, int64_t unit) {
  if (rows <= kMinChunk) return rows;
  int64_t limit = std::clamp(kChunkBytes / row_bytes, kMinChunk, kMaxChunk);
  int64_t chunks = (rows + limit - 1) / limit;
  int64_t even = (rows + chunks - 1) / chunks;
  return std::min(rows, (even + unit - 1) / unit * unit);
}

PanelTiles tiles_of(const Matrix& weight, int64_t rows, int64_t chunks, int threads, int64_t side) {
  const double seconds = std::max(2.0 * double(rows) * double(weight.panel_size()) / kOperationsPerSecond,
                                  double(weight.panel_size()) / kBytesPerSecond);
  return {weight.panels, side, int64_t(kTileSeconds / seconds) + 1, chunks, threads};
}

template <class Dot>
void matmul_by(Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t rows, float* y,
               int64_t y_stride, const Epilogue& epilogue) {
  const Rows quantised = quantise<Dot>(pool, weight, x, x_stride, rows);
  const bool few = rows <= Dot::kMaxRows;
  const int64_t chunk = chunk_rows(rows, quantised.stride, Dot::kMaxRows), chunks = (rows + chunk - 1) / chunk;
  const PanelTiles tiles = tiles_of(weight, chunk, chunks, pool.threads(), few ? Dot::panels_at_once(rows) : 1);
  pool.run(chunks * tiles.count(), [&](int64_t tile, int thread) {
    const int64_t start = tile / tiles.count() * chunk, count = std::min(chunk, rows - start);
    const PanelTiles::Range panels = tiles[tile % tiles.count()];
    if (few) {
      with_rows(rows, [&](auto m) {
        if constexpr (m.value <= Dot::kMaxRows)
          few_rows<Dot, m.value, Dot::panels_at_once(m.value)>(weight, quantised, panels.first, panels.last, y, y_stride,
                                                              epilogue);
      });
    } else {
      float* out = pool.scratch<float>(thread, count * kPanel);
      many_rows<Dot>(count, weight, quantised.from(start), panels.first, panels.last, out,
                     y + start * y_stride, y_stride, epilogue.from(start));
    }
  });
}

}  // namespace

Int8Scale int8_scale(const float* x, int64_t count) {
  VecI largest_lanes{};  // magnitudes compared as integers: NaN is the largest
  int64_t k = 0;
  for (; k < count; k += kWidth) {
    const Vec values = count - k >= kWidth ? load(x + k) : load_some(x + k, int(count - k));
    const VecI magnitudes = bit_cast<VecI>(values) & 0x7fffffff;
    largest_lanes = magnitudes > largest_lanes ? magnitudes : largest_lanes;
  }
  int32_t largest = 0;
  for (int i = 0; i < kWidth; ++i) largest = std::max(largest, int32_t(largest_lanes[i]));
  const float magnitude = bit_cast<float>(largest);
  if (magnitude < 1e-30f) return {0.0f, 0.0f};  // the reciprocal could be infinite
  return {magnitude / 127.0f, 127.0f / magnitude};
}

bool has_vnni() {
#if defined(__AVX2__)
  unsigned a = 0, b = 0, c = 0, d = 0;
#if defined(__AVX512F__)
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c >> 11 & 1);
#else
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
#endif
#elif defined(__ARM_FEATURE_DOTPROD)
  return true;  // the library is loaded by machines with it only (isa.cpp)
#else
  return false;
#endif
}

void matmul_int8(Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t rows, float* y,
                 int64_t y_stride, const Epilogue& epilogue) {
#if defined(__AVX2__)
  if (pool.vnni) return matmul_by<Vnni>(pool, weight, x, x_stride, rows, y, y_stride, epilogue);
#elif defined(__ARM_FEATURE_DOTPROD)
  if (pool.vnni) return matmul_by<Sdot>(pool, weight, x, x_stride, rows, y, y_stride, epilogue);
#endif
  matmul_by<Widened>(pool, weight, x, x_stride, rows, y, y_stride, epilogue);
}

}  // namespace rayfin
