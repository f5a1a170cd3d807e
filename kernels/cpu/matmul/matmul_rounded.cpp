#include "matmul/matmul_rounded.h"

#include <algorithm>

#if defined(__AVX2__)
#include <cpuid.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "matmul/epilogue.h"
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

constexpr int64_t kPartVectors = kPart / kWidth;

// The scale that maps the largest of some magnitudes to 127, and its reciprocal. Both are 0 for (nearly) zero, and not
// finite for a value that is not.
struct RowScale {
  float scale, inverse;
};

RowScale scale_of(VecI magnitudes) {  // compared as integers: NaN is the largest
  typedef int32_t Four __attribute__((vector_size(16)));
  Four fours[kWidth / 4];
  std::memcpy(fours, &magnitudes, sizeof(fours));
  for (int i = 1; i < kWidth / 4; ++i) fours[0] = fours[i] > fours[0] ? fours[i] : fours[0];
  const Four four = fours[0];
  const float magnitude = bit_cast<float>(std::max({four[0], four[1], four[2], four[3]}));
  if (magnitude < 1e-30f) return {0.0f, 0.0f};  // the reciprocal could be infinite
  return {magnitude / 127.0f, 127.0f / magnitude};
}

RAYFIN_INLINE VecI rounded(Vec v) {  // to the nearest integer, ties to even
#if defined(__AVX512F__)
  return bit_cast<VecI>(_mm512_maskz_cvtps_epi32(0xffff, bit_cast<__m512>(v)));
#elif defined(__AVX2__)
  return bit_cast<VecI>(_mm256_cvtps_epi32(bit_cast<__m256>(v)));
#elif defined(__SSE2__)
  return bit_cast<VecI>(_mm_cvtps_epi32(bit_cast<__m128>(v)));
#elif defined(__aarch64__)
  return bit_cast<VecI>(vcvtnq_s32_f32(bit_cast<float32x4_t>(v)));
#else
  VecI out;
  for (int i = 0; i < kWidth; ++i) out[i] = int32_t(__builtin_lrintf(v[i]));
  return out;
#endif
}

// Stores kPart numbers as bytes. GCC 12 converts the lanes of the generic code one by one.
RAYFIN_INLINE void store_bytes(const VecI (&numbers)[kPartVectors], int8_t* out) {
#if defined(__AVX512F__)
  for (int i = 0; i < 2; ++i)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i * kWidth),
                     _mm512_maskz_cvtepi32_epi8(0xffff, bit_cast<__m512i>(numbers[i])));
#elif defined(__AVX2__)
  const __m256i low = _mm256_packs_epi32(bit_cast<__m256i>(numbers[0]), bit_cast<__m256i>(numbers[1]));
  const __m256i high = _mm256_packs_epi32(bit_cast<__m256i>(numbers[2]), bit_cast<__m256i>(numbers[3]));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // both packs work in halves of 128 bits
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bytes);
#else
  typedef int8_t Bytes __attribute__((vector_size(kWidth)));
  for (int i = 0; i < kPartVectors; ++i) {
    const Bytes bytes = __builtin_convertvector(numbers[i], Bytes);
    std::memcpy(out + i * kWidth, &bytes, sizeof(bytes));
  }
#endif
}

// Rounds kPart values; returns the sum of the bytes.
RAYFIN_INLINE int32_t round_part(const float* x, int8_t* out, float* scale) {
  Vec values[kPartVectors];
  VecI numbers[kPartVectors], magnitudes{}, total{};
  for (int i = 0; i < kPartVectors; ++i) {
    values[i] = load(x + i * kWidth);
    const VecI magnitude = bit_cast<VecI>(values[i]) & 0x7fffffff;
    magnitudes = magnitude > magnitudes ? magnitude : magnitudes;
  }
  const RowScale part = scale_of(magnitudes);
  *scale = part.scale;
  for (int i = 0; i < kPartVectors; ++i) {
    numbers[i] = rounded(values[i] * part.inverse);
    total += numbers[i];
  }
  store_bytes(numbers, out);
  int32_t sum = 0;
  for (int i = 0; i < kWidth; ++i) sum += total[i];
  return sum;
}

// Where a row is rounded to.
struct RowPlace {
  int8_t* values;
  float *scales, *sums;
  int32_t* starts;
};

// `excess` is how much too large the codes are.
void quantise_row(const Matrix& weight, const float* x, int excess, RowPlace to) {
  const Groups& groups = weight.groups;
  const int64_t steps = group_steps(weight.storage, groups);
  for (int64_t g = 0; g < groups.count; ++g, to.values += steps) {
    const float* from = x + g * groups.size;
    const int64_t size = std::min(groups.size, weight.inputs - g * groups.size);
    for (int64_t k = 0; k < groups.size; k += kPart) {
      const int64_t count = size - k, room = steps - k;
      int32_t sum;
      if (count >= kPart) {
        sum = round_part(from + k, to.values + k, to.scales);
      } else {
        float some[kPart] = {};
        int8_t bytes[kPart];
        if (count > 0) std::copy_n(from + k, count, some);
        sum = round_part(some, bytes, to.scales);
        std::copy_n(bytes, std::min(room, kPart), to.values + k);
      }
      *to.sums++ = float(sum);
      *to.starts++ = int32_t(uint32_t(sum) * uint32_t(-excess));
      ++to.scales;
    }
  }
}

RoundedRows quantise(Pool& pool, const Matrix& weight, int excess, const float* x, int64_t x_stride, int64_t rows) {
  const Groups& groups = weight.groups;
  const int64_t stride = groups.count * group_steps(weight.storage, groups);
  const int64_t parts = groups.count * ((groups.size + kPart - 1) / kPart);
  char* values = pool.workspace<char>(rows * (stride + 12 * parts));
  float* scales = reinterpret_cast<float*>(values + rows * stride);
  float* sums = scales + rows * parts;
  int32_t* starts = reinterpret_cast<int32_t*>(sums + rows * parts);
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
      const int64_t at = row * parts;
      quantise_row(weight, from, excess,
                   {reinterpret_cast<int8_t*>(values + row * stride), scales + at, sums + at, starts + at});
    }
  });
  return {values, scales, sums, starts, stride, parts};
}

template <class Dot, class Code, bool kZeros, int kM, int kP>
void few_rows(const Code& code, const Matrix& weight, const RoundedRows& x, int64_t panel, int64_t last, float* y, int64_t y_stride,
              const Epilogue& epilogue) {
  alignas(64) float out[kM * kP * kPanel];
  for (; panel + kP <= last; panel += kP) {
    const GroupFloats scales(weight, panel, false), leasts(weight, panel, Code::kLevels);
    rounded_tile<Dot, Code, kZeros, true, kM, kP>(code, weight, scales, leasts, x, panel, out);
    for (int p = 0; p < kP; ++p)
      finish_panel(weight, panel + p, out + p * kPanel, kP * kPanel, kM, y, y_stride, epilogue);
  }
  if constexpr (kP > 1) few_rows<Dot, Code, kZeros, kM, kP / 2>(code, weight, x, panel, last, y, y_stride, epilogue);
}

// Multiplies rows of x by panels first .. last - 1; all rows use each panel while it is in cache.
template <class Dot, class Code, bool kZeros>
void many_rows(const Code& code, int64_t rows, const Matrix& weight, const RoundedRows& x, int64_t first, int64_t last,
               float* scratch, float* y, int64_t y_stride, const Epilogue& epilogue) {
  const int64_t blocks = (rows + kMaxRows - 1) / kMaxRows, groups = weight.groups.count;
  float *out = scratch, *wide = scratch + rows * kPanel, *low = wide + groups * kPanel;
  const GroupFloats scales(wide), leasts(low);
  for (int64_t panel = first; panel < last; ++panel) {
    GroupFloats(weight, panel, false).widen(groups, wide);
    if constexpr (Code::kLevels) GroupFloats(weight, panel, true).widen(groups, low);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t row = rows * block / blocks, count = rows * (block + 1) / blocks - row;
      with_rows(count, [&](auto m) {
        if constexpr (m.value <= kMaxRows)
          rounded_tile<Dot, Code, kZeros, false, m.value, 1>(code, weight, scales, leasts, x.from(row), panel,
                                                             out + row * kPanel);
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
  const RoundedRows quantised = quantise(pool, weight, kExcess<Dot, Code>, x, x_stride, rows);
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
    float* scratch = pool.scratch<float>(thread, (count + (Code::kLevels ? 2 : 1) * weight.groups.count) * kPanel);
    many_rows<Dot, Code, kZeros>(code, count, weight, quantised.from(start), panels.first, panels.last, scratch,
                           y + start * y_stride, y_stride, epilogue.from(start));
  });
}

}  // namespace

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
