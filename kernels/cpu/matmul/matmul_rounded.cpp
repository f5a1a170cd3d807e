#include "matmul/matmul_rounded.h"

#include <algorithm>

#include "matmul/epilogue.h"
#include "matmul/matmul_int8.h"
#include "matmul/panel_tiles.h"
#include "matmul/rounded_tile.h"

namespace rayfin {

namespace {

constexpr int64_t kChunkBytes = 256 << 10;  // a chunk's rows stay in the second-level cache, as in matmul.cpp
constexpr int64_t kMinChunk = 48, kMaxChunk = 384;
constexpr int64_t kQuantisedAtOnce = 16 << 10;  // values, a few microseconds of work
constexpr double kTileSeconds = 15e-6, kBytesPerSecond = 10e9;
constexpr double kOperationsPerSecond = kWidth == 16 ? 400e9 : 120e9;
constexpr int kMaxRows = kWidth == 16 ? 8 : kRows == 12 ? 6 : 4;  // of a tile, twice as many sums as the registers hold for fewer

constexpr int panels_at_once(int64_t rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

void quantise_row(const Matrix& weight, const float* x, int8_t* out, int32_t* sums, float* scale) {
  const Int8Scale row_scale = int8_scale(x, weight.inputs);
  *scale = row_scale.scale;
  const Groups& groups = weight.groups;
  const int64_t steps = group_steps(weight.storage, groups);
  for (int64_t g = 0; g < groups.count; ++g, out += steps) {
    const float* from = x + g * groups.size;
    const int64_t size = std::min(groups.size, weight.inputs - g * groups.size);
    VecI total{};
    int64_t k = 0;
    for (; k < size; k += kWidth) {
      typedef int8_t Signed __attribute__((vector_size(kWidth)));
      const int64_t left = size - k;
      const Vec values = left >= kWidth ? load(from + k) : load_some(from + k, int(left));
      const VecI numbers = rounded(values * row_scale.inverse);
      total += numbers;
      const Signed octets = __builtin_convertvector(numbers, Signed);
      std::memcpy(out + k, &octets, size_t(std::min<int64_t>(kWidth, steps - k)));
    }
    for (; k < steps; ++k) out[k] = 0;
    int32_t sum = 0;
    for (int i = 0; i < kWidth; ++i) sum += total[i];
    sums[g] = sum;
  }
}

RoundedRows quantise(Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t rows) {
  const int64_t stride = weight.groups.count * group_steps(weight.storage, weight.groups), groups = weight.groups.count;
  char* values = pool.workspace<char>(rows * (stride + 4 * groups + 4));
  int32_t* sums = reinterpret_cast<int32_t*>(values + rows * stride);
  float* scales = reinterpret_cast<float*>(sums + rows * groups);
  const int64_t each = std::max<int64_t>(1, kQuantisedAtOnce / weight.inputs);
  const int32_t* order = weight.order();
  pool.run((rows + each - 1) / each, [&](int64_t tile, int thread) {
    float* ordered = order ? pool.scratch<float>(thread, weight.inputs) : nullptr;
    for (int64_t row = tile * each; row < std::min(rows, (tile + 1) * each); ++row) {
      const float* from = x + row * x_stride;
      if (order) {
        for (int64_t k = 0; k < weight.inputs; ++k) ordered[k] = from[order[k]];
        from = ordered;
      }
      quantise_row(weight, from, reinterpret_cast<int8_t*>(values + row * stride), sums + row * groups, scales + row);
    }
  });
  return {values, sums, scales, stride, groups};
}

template <class Dot, class Code, bool kZeros, int kM, int kP>
void few_rows(const Code& code, const Matrix& weight, const RoundedRows& x, int64_t panel, int64_t last, float* y, int64_t y_stride,
              const Epilogue& epilogue) {
  alignas(64) float out[kM * kP * kPanel];
  for (; panel + kP <= last; panel += kP) {
    rounded_tile<Dot, Code, kZeros, true, kM, kP>(code, weight, x, panel, out);
    for (int p = 0; p < kP; ++p)
      finish_panel(weight, panel + p, out + p * kPanel, kP * kPanel, kM, y, y_stride, epilogue);
  }
  if constexpr (kP > 1) few_rows<Dot, Code, kZeros, kM, kP / 2>(code, weight, x, panel, last, y, y_stride, epilogue);
}

// Multiplies rows of x by panels first .. last - 1; all rows use each panel while it is in cache.
template <class Dot, class Code, bool kZeros>
void many_rows(const Code& code, int64_t rows, const Matrix& weight, const RoundedRows& x, int64_t first, int64_t last, float* out,
               float* y, int64_t y_stride, const Epilogue& epilogue) {
  const int64_t blocks = (rows + kMaxRows - 1) / kMaxRows;
  for (int64_t panel = first; panel < last; ++panel) {
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t row = rows * block / blocks, count = rows * (block + 1) / blocks - row;
      with_rows(count, [&](auto m) {
        if constexpr (m.value <= kMaxRows)
          rounded_tile<Dot, Code, kZeros, false, m.value, 1>(code, weight, x.from(row), panel, out + row * kPanel);
      });
    }
    finish_panel(weight, panel, out, kPanel, rows, y, y_stride, epilogue);
  }
}

int64_t chunk_rows(int64_t rows, int64_t row_bytes) {
  if (rows <= kMinChunk) return rows;
  const int64_t limit = std::clamp(kChunkBytes / row_bytes, kMinChunk, kMaxChunk);
  const int64_t chunks = (rows + limit - 1) / limit, even = (rows + chunks - 1) / chunks;
  return std::min(rows, (even + kMaxRows - 1) / kMaxRows * kMaxRows);
}

template <class Dot, class Code, bool kZeros>
void matmul_by(const Code& code, Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t rows, float* y,
               int64_t y_stride, const Epilogue& epilogue) {
  const RoundedRows quantised = quantise(pool, weight, x, x_stride, rows);
  const bool few = rows <= kMaxRows;
  const int64_t chunk = chunk_rows(rows, quantised.stride), chunks = (rows + chunk - 1) / chunk;
  const double bytes = 4.0 * double(weight.panel_words()), operations = 2.0 * double(chunk) * double(weight.inputs * kPanel);
  const double seconds = std::max(operations / kOperationsPerSecond, bytes / kBytesPerSecond);
  const PanelTiles tiles(weight.panels, few ? panels_at_once(rows) : 1, int64_t(kTileSeconds / seconds) + 1, chunks,
                         pool.threads());
  pool.run(chunks * tiles.count(), [&](int64_t tile, int thread) {
    const int64_t start = tile / tiles.count() * chunk, count = std::min(chunk, rows - start);
    const PanelTiles::Range panels = tiles[tile % tiles.count()];
    if (few) {
      with_rows(rows, [&](auto m) {
        if constexpr (m.value <= kMaxRows)
          few_rows<Dot, Code, kZeros, m.value, panels_at_once(m.value)>(code, weight, quantised, panels.first, panels.last,
                                                                        y, y_stride, epilogue);
      });
      return;
    }
    float* out = pool.scratch<float>(thread, count * kPanel);
    many_rows<Dot, Code, kZeros>(code, count, weight, quantised.from(start), panels.first, panels.last, out,
                           y + start * y_stride, y_stride, epilogue.from(start));
  });
}

}  // namespace

void matmul_rounded(Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t rows, float* y,
                    int64_t y_stride, const Epilogue& epilogue) {
  const auto run = [&](auto dot, const auto& code, auto zeros) {
    matmul_by<decltype(dot), std::decay_t<decltype(code)>, zeros.value>(code, pool, weight, x, x_stride, rows, y,
                                                                        y_stride, epilogue);
  };
  const auto run_numbers = [&](auto dot, const auto& code) {
    if (weight.zeros()) return run(dot, code, std::true_type());
    run(dot, code, std::false_type());
  };
  const auto run_codes = [&](auto dot) {
    switch (weight.storage) {
      case kInt4:
        return run_numbers(dot, RoundedInt4());
      case kCodes8:
        return run_numbers(dot, RoundedInt8());
      case kTable4:
        return run(dot, RoundedTable4(weight.table()), std::false_type());
      case kLevels4:
        return run(dot, RoundedLevels4(), std::false_type());
      case kInt6:
        return run(dot, RoundedInt6(), std::false_type());
      case kLevels6:
        return run(dot, RoundedLevels6(), std::false_type());
      default:
        return;
    }
  };
#if defined(__AVX2__)
  if (pool.vnni) return run_codes(VnniDot());
#elif defined(__ARM_FEATURE_DOTPROD)
  if (pool.vnni) return run_codes(SdotDot());
#endif
  run_codes(PairDot());
}

}  // namespace rayfin
