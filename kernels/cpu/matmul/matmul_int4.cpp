#include "matmul/matmul_int4.h"

#include <algorithm>

#include "matmul/codes.h"
#include "matmul/epilogue.h"
#include "matmul/int8_tile.h"
#include "matmul/matmul_int8.h"
#include "matmul/panel_tiles.h"

namespace rayfin {

namespace {

constexpr int64_t kChunkBytes = 256 << 10;  // a chunk's rows stay in the second-level cache, as in matmul.cpp
constexpr int64_t kMinChunk = 48, kMaxChunk = 384;
constexpr int64_t kQuantisedAtOnce = 16 << 10;  // values, a few microseconds of work
constexpr double kTileSeconds = 15e-6, kBytesPerSecond = 10e9;
constexpr double kOperationsPerSecond = kWidth == 16 ? 400e9 : 120e9;
constexpr int kMaxRows = kWidth == 16 ? 8 : kRows == 12 ? 6 : 4;  // of a tile, twice as many sums as the registers hold for fewer

constexpr int panels_at_once(int64_t rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

// Adds the products of a word's eight codes, 0 .. 15, with eight signed bytes of a row.
#if defined(__AVX2__)
struct VnniDot {
  // In assembly, because the library is also compiled for machines without it (has_vnni).
  static RAYFIN_INLINE VecI add(VecI sums, VecI low, VecI high, const char* x) {
#if defined(__AVX512F__)
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(low), "v"(broadcast_int(x)));
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(high), "v"(broadcast_int(x + 4)));
#else
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(low), "x"(broadcast_int(x)));
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(high), "x"(broadcast_int(x + 4)));
#endif
    return sums;
  }
};
#elif defined(__ARM_FEATURE_DOTPROD)
struct SdotDot {
  static RAYFIN_INLINE VecI add(VecI sums, VecI low, VecI high, const char* x) {
    const auto dot = [](VecI sum, VecI codes, VecI steps) RAYFIN_LAMBDA {
      return bit_cast<VecI>(
          vdotq_s32(bit_cast<int32x4_t>(sum), bit_cast<int8x16_t>(codes), bit_cast<int8x16_t>(steps)));
    };
    return dot(dot(sums, low, broadcast_int(x)), high, broadcast_int(x + 4));
  }
};
#endif

struct PairDot {  // four products of 15 * 127 fit into 16 bits
  static RAYFIN_INLINE VecI add(VecI sums, VecI low, VecI high, const char* x) {
    const VecI first = broadcast_int(x), second = broadcast_int(x + 4);
#if defined(__AVX512BW__)
    const __m512i pairs = _mm512_add_epi16(_mm512_maddubs_epi16(bit_cast<__m512i>(low), bit_cast<__m512i>(first)),
                                           _mm512_maddubs_epi16(bit_cast<__m512i>(high), bit_cast<__m512i>(second)));
    return sums + bit_cast<VecI>(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#elif defined(__AVX2__)
    const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(bit_cast<__m256i>(low), bit_cast<__m256i>(first)),
                                           _mm256_maddubs_epi16(bit_cast<__m256i>(high), bit_cast<__m256i>(second)));
    return sums + bit_cast<VecI>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#else
    typedef int16_t Pairs __attribute__((vector_size(kWidth * 4)));
    const auto even = [](VecI bytes) { return (bit_cast<Pairs>(bytes) << 8) >> 8; };
    const auto odd = [](VecI bytes) { return bit_cast<Pairs>(bytes) >> 8; };
    const VecI four = bit_cast<VecI>(Pairs(even(low) * even(first) + odd(low) * odd(first) + even(high) * even(second) +
                                           odd(high) * odd(second)));
    return sums + ((four << 16) >> 16) + (four >> 16);
#endif
  }
};

// Rows of x in signed bytes, each group from the start of a word of codes on.
struct Rows {
  const char* values;
  const int32_t* sums;  // of each group
  const float* scales;
  int64_t stride, groups;  // bytes of a row, sums of a row

  Rows from(int64_t row) const { return {values + row * stride, sums + row * groups, scales + row, stride, groups}; }
};

void quantise_row(const Matrix& weight, const float* x, int8_t* out, int32_t* sums, float* scale) {
  const Int8Scale row_scale = int8_scale(x, weight.inputs);
  *scale = row_scale.scale;
  const Groups& groups = weight.groups;
  for (int64_t g = 0; g < groups.count; ++g, out += groups.words * Nibbles::kSteps) {
    const float* from = x + g * groups.size;
    const int64_t size = std::min(groups.size, weight.inputs - g * groups.size);
    VecI total{};
    int64_t k = 0;
    for (; k < size; k += kWidth) {
      typedef int8_t Signed __attribute__((vector_size(kWidth)));
      const int64_t left = size - k;
      const Vec values = left >= kWidth ? load(from + k) : load_some(from + k, int(left));
      const VecI steps = rounded(values * row_scale.inverse);
      total += steps;
      const Signed octets = __builtin_convertvector(steps, Signed);
      std::memcpy(out + k, &octets, size_t(std::min<int64_t>(kWidth, groups.words * Nibbles::kSteps - k)));
    }
    for (; k < groups.words * Nibbles::kSteps; ++k) out[k] = 0;
    int32_t sum = 0;
    for (int i = 0; i < kWidth; ++i) sum += total[i];
    sums[g] = sum;
  }
}

Rows quantise(Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t rows) {
  const int64_t stride = weight.groups.count * weight.groups.words * Nibbles::kSteps, groups = weight.groups.count;
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

// What the codes of a weight stand for.
enum Codes { kNumbers, kNumbersAndZeros, kLevels };

// out[m][p * kPanel ..] = x[m] . panel p.
template <class Dot, Codes kCodes, bool kStream, int kM, int kP>
RAYFIN_INLINE void int4_tile(const Matrix& weight, const Rows& x, int64_t panel, float* out) {
  const Groups& groups = weight.groups;
  const int64_t panel_words = weight.panel_words(), panel_scales = groups.count * kPanel;
  const int32_t* words = weight.words(panel);
  const float* scales = weight.scales() + panel * panel_scales;
  const int16_t* zeros = kCodes == kNumbersAndZeros ? weight.zeros() + panel * panel_scales : nullptr;
  const float* leasts = kCodes == kLevels ? weight.zeros<float>() + panel * panel_scales : nullptr;
  const char* steps = x.values;
  Vec acc[kM][2 * kP] = {};
  for (int64_t g = 0; g < groups.count; ++g) {
    VecI dot[kM][2 * kP];
    for (int m = 0; m < kM; ++m)
      for (int v = 0; v < 2 * kP; ++v) dot[m][v] = VecI{} - (kCodes == kLevels ? 0 : 8 * x.sums[m * x.groups + g]);
    for (int64_t word = 0; word < groups.words; ++word, words += kPanel, steps += Nibbles::kSteps) {
#pragma GCC unroll 8
      for (int v = 0; v < 2 * kP; ++v) {
        const int32_t* at = words + v / 2 * panel_words + v % 2 * kWidth;
        if constexpr (kStream) __builtin_prefetch(reinterpret_cast<const char*>(at) + kAheadBytes / kP, 0, 3);
        const VecI codes = load_int(at), low = codes & 0x0f0f0f0f;
        const VecI high = bit_cast<VecI>(bit_cast<VecU>(codes) >> 4) & 0x0f0f0f0f;
#pragma GCC unroll 16
        for (int m = 0; m < kM; ++m) dot[m][v] = Dot::add(dot[m][v], low, high, steps + m * x.stride);
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kP; ++v) {
      const int64_t at = v / 2 * panel_scales + g * kPanel + v % 2 * kWidth;
      const Vec scale = load(scales + at);
      VecI zero{};
      if constexpr (kCodes == kNumbersAndZeros) {
        typedef int16_t Half __attribute__((vector_size(kWidth * 2)));
        Half half;
        std::memcpy(&half, zeros + at, sizeof(half));
        zero = __builtin_convertvector(half, VecI);
      }
#pragma GCC unroll 16
      for (int m = 0; m < kM; ++m) {
        if constexpr (kCodes == kNumbersAndZeros) dot[m][v] -= zero * x.sums[m * x.groups + g];
        acc[m][v] += __builtin_convertvector(dot[m][v], Vec) * scale;
        if constexpr (kCodes == kLevels) acc[m][v] += load(leasts + at) * float(x.sums[m * x.groups + g]);
      }
    }
  }
  for (int m = 0; m < kM; ++m)
    for (int v = 0; v < 2 * kP; ++v) store(out + (m * 2 * kP + v) * kWidth, acc[m][v] * x.scales[m]);
}

template <class Dot, Codes kCodes, int kM, int kP>
void few_rows(const Matrix& weight, const Rows& x, int64_t panel, int64_t last, float* y, int64_t y_stride,
              const Epilogue& epilogue) {
  alignas(64) float out[kM * kP * kPanel];
  for (; panel + kP <= last; panel += kP) {
    int4_tile<Dot, kCodes, true, kM, kP>(weight, x, panel, out);
    for (int p = 0; p < kP; ++p)
      finish_panel(weight, panel + p, out + p * kPanel, kP * kPanel, kM, y, y_stride, epilogue);
  }
  if constexpr (kP > 1) few_rows<Dot, kCodes, kM, kP / 2>(weight, x, panel, last, y, y_stride, epilogue);
}

// Multiplies rows of x by panels first .. last - 1; all rows use each panel while it is in cache.
template <class Dot, Codes kCodes>
void many_rows(int64_t rows, const Matrix& weight, const Rows& x, int64_t first, int64_t last, float* out,
               float* y, int64_t y_stride, const Epilogue& epilogue) {
  const int64_t blocks = (rows + kMaxRows - 1) / kMaxRows;
  for (int64_t panel = first; panel < last; ++panel) {
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t row = rows * block / blocks, count = rows * (block + 1) / blocks - row;
      with_rows(count, [&](auto m) {
        if constexpr (m.value <= kMaxRows)
          int4_tile<Dot, kCodes, false, m.value, 1>(weight, x.from(row), panel, out + row * kPanel);
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

template <class Dot, Codes kCodes>
void matmul_by(Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t rows, float* y,
               int64_t y_stride, const Epilogue& epilogue) {
  const Rows quantised = quantise(pool, weight, x, x_stride, rows);
  const bool few = rows <= kMaxRows;
  const int64_t chunk = chunk_rows(rows, quantised.stride), chunks = (rows + chunk - 1) / chunk;
  const double bytes = 4.0 * double(weight.panel_words()), operations = 4.0 * double(chunk) * bytes;
  const double seconds = std::max(operations / kOperationsPerSecond, bytes / kBytesPerSecond);
  const PanelTiles tiles(weight.panels, few ? panels_at_once(rows) : 1, int64_t(kTileSeconds / seconds) + 1, chunks,
                         pool.threads());
  pool.run(chunks * tiles.count(), [&](int64_t tile, int thread) {
    const int64_t start = tile / tiles.count() * chunk, count = std::min(chunk, rows - start);
    const PanelTiles::Range panels = tiles[tile % tiles.count()];
    if (few) {
      with_rows(rows, [&](auto m) {
        if constexpr (m.value <= kMaxRows)
          few_rows<Dot, kCodes, m.value, panels_at_once(m.value)>(weight, quantised, panels.first, panels.last, y,
                                                                  y_stride, epilogue);
      });
      return;
    }
    float* out = pool.scratch<float>(thread, count * kPanel);
    many_rows<Dot, kCodes>(count, weight, quantised.from(start), panels.first, panels.last, out,
                           y + start * y_stride, y_stride, epilogue.from(start));
  });
}

}  // namespace

void matmul_int4(Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t rows, float* y,
                 int64_t y_stride, const Epilogue& epilogue) {
  const auto run = [&](auto dot) {
    using Dot = decltype(dot);
    if (has_levels(weight.storage))
      return matmul_by<Dot, kLevels>(pool, weight, x, x_stride, rows, y, y_stride, epilogue);
    if (weight.zeros()) return matmul_by<Dot, kNumbersAndZeros>(pool, weight, x, x_stride, rows, y, y_stride, epilogue);
    matmul_by<Dot, kNumbers>(pool, weight, x, x_stride, rows, y, y_stride, epilogue);
  };
#if defined(__AVX2__)
  if (pool.vnni) return run(VnniDot());
#elif defined(__ARM_FEATURE_DOTPROD)
  if (pool.vnni) return run(SdotDot());
#endif
  run(PairDot());
}

}  // namespace rayfin
