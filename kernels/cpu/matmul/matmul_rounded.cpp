#include "matmul/matmul_rounded.h"

#include <algorithm>
#include <utility>

#if defined(__AVX2__)
#include <cpuid.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "amx/rounded_amx.h"
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

#if defined(__AMX_TILE__)
constexpr int64_t kUnit = kRegisterRows;  // rows that are multiplied, and read, at once
#else
constexpr int64_t kUnit = 6;
#endif

constexpr int panels_at_once(int64_t rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

constexpr int64_t kPartVectors = kPart / kWidth;

// The largest magnitude of kPart values; NaN, if one is.
RAYFIN_INLINE float largest_of(const float* x) {
  typedef int32_t Four __attribute__((vector_size(16)));
  VecI magnitudes{};  // compared as integers: NaN is the largest
  for (int i = 0; i < kPartVectors; ++i) {
    const VecI magnitude = load_int(x + i * kWidth) & 0x7fffffff;
    magnitudes = magnitude > magnitudes ? magnitude : magnitudes;
  }
  Four fours[kWidth / 4];
  std::memcpy(fours, &magnitudes, sizeof(fours));
  const auto larger = [](Four a, Four b) { return a > b ? a : b; };
  for (int i = 1; i < kWidth / 4; ++i) fours[0] = larger(fours[0], fours[i]);
  const Four two = larger(fours[0], __builtin_shufflevector(fours[0], fours[0], 2, 3, 0, 1));
  return bit_cast<float>(larger(two, __builtin_shufflevector(two, two, 1, 0, 3, 2))[0]);
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

typedef int8_t PartBytes __attribute__((vector_size(kPart)));

// kPart numbers as bytes. GCC 12 converts the lanes of the generic code one by one.
RAYFIN_INLINE PartBytes bytes_of(const VecI (&numbers)[kPartVectors]) {
#if defined(__AVX512F__)
  const __m128i low = _mm512_maskz_cvtepi32_epi8(0xffff, bit_cast<__m512i>(numbers[0]));
  const __m128i high = _mm512_maskz_cvtepi32_epi8(0xffff, bit_cast<__m512i>(numbers[1]));
  return bit_cast<PartBytes>(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
#elif defined(__AVX2__)
  const __m256i low = _mm256_packs_epi32(bit_cast<__m256i>(numbers[0]), bit_cast<__m256i>(numbers[1]));
  const __m256i high = _mm256_packs_epi32(bit_cast<__m256i>(numbers[2]), bit_cast<__m256i>(numbers[3]));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // both packs work in halves of 128 bits
  return bit_cast<PartBytes>(_mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order));
#else
  typedef int8_t Bytes __attribute__((vector_size(kWidth)));
  PartBytes out;
  for (int i = 0; i < kPartVectors; ++i) {
    const Bytes bytes = __builtin_convertvector(numbers[i], Bytes);
    std::memcpy(reinterpret_cast<char*>(&out) + i * kWidth, &bytes, sizeof(bytes));
  }
  return out;
#endif
}

RAYFIN_INLINE int32_t sum_of(PartBytes bytes) {
#if defined(__AVX2__)
  const __m256i values = _mm256_xor_si256(bit_cast<__m256i>(bytes), _mm256_set1_epi8(-128));
  const __m256i fours = _mm256_sad_epu8(values, _mm256_setzero_si256());
  const __m128i twos = _mm_add_epi64(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
  return _mm_cvtsi128_si32(twos) + _mm_extract_epi32(twos, 2) - 128 * int32_t(kPart);
#else
  int32_t sum = 0;
  for (int i = 0; i < kPart; ++i) sum += bytes[i];
  return sum;
#endif
}

// Where a row is rounded to, one of `side` rows side by side.
struct RowPlace {
  int64_t side;
  int8_t* values;
  float *scales, *sums;
  int32_t* starts;
};

// Calls f(values, count, room) for each part of a row: `count` values, perhaps fewer than kPart or none, and `room` bytes.
template <class F>
RAYFIN_INLINE void for_parts(const Matrix& weight, const float* x, const F& f) {
  const Groups& groups = weight.groups;
  const int64_t steps = group_steps(weight.storage, groups);
  for (int64_t g = 0; g < groups.count; ++g) {
    const int64_t start = g * groups.size, size = std::min(groups.size, weight.inputs - start);
    for (int64_t k = 0; k < groups.size; k += kPart) f(x + start + k, size - k, std::min(steps - k, kPart));
  }
}

// `excess` is how much too large the codes are. Scales map the largest magnitude of a part to 127. They and their
// reciprocals, which lie in the place of sums until these are known, are 0 for (nearly) zero, and not finite for a value
// that is not.
void quantise_row(const Matrix& weight, const float* x, int excess, RowPlace to, int64_t parts) {
  float* largest = to.scales;
  for_parts(weight, x, [&](const float* from, int64_t count, int64_t) RAYFIN_LAMBDA {
    if (count >= kPart) {
      *largest = largest_of(from);
    } else {
      float some[kPart] = {};
      if (count > 0) std::copy_n(from, count, some);
      *largest = largest_of(some);
    }
    largest += to.side;
  });
  for (int64_t i = 0; i < parts * to.side; i += to.side) {
    const float magnitude = to.scales[i];
    const bool none = magnitude < 1e-30f;  // the reciprocal could be infinite
    to.scales[i] = none ? 0.0f : magnitude / 127.0f;
    to.sums[i] = none ? 0.0f : 127.0f / magnitude;
  }
  for_parts(weight, x, [&](const float* from, int64_t count, int64_t room) RAYFIN_LAMBDA {
    float some[kPart] = {};
    if (count < kPart) {
      if (count > 0) std::copy_n(from, count, some);
      from = some;
    }
    VecI numbers[kPartVectors];
    for (int i = 0; i < kPartVectors; ++i) numbers[i] = rounded(load(from + i * kWidth) * *to.sums);
    const PartBytes bytes = bytes_of(numbers);
    const int32_t sum = sum_of(bytes);
    if (to.side == 1 && room == kPart) {
      std::memcpy(to.values, &bytes, kPart);
    } else {
      for (int64_t i = 0; i < room; i += 4)
        std::memcpy(to.values + i * to.side, reinterpret_cast<const char*>(&bytes) + i, 4);
    }
    *to.sums = float(sum);
    *to.starts = kStart - sum * excess;
    to.sums += to.side, to.starts += to.side, to.values += room * to.side;
  });
}

// What rounding took off a row; `out` may be x.
void subtract_row(const Matrix& weight, const float* x, RowPlace row, float* out) {
  for_parts(weight, x, [&](const float* from, int64_t count, int64_t room) RAYFIN_LAMBDA {
    for (int64_t k = 0; k < std::min(count, kPart); ++k)
      out[from - x + k] = from[k] - float(row.values[k / 4 * 4 * row.side + k % 4]) * *row.scales;
    row.values += room * row.side, row.scales += row.side;
  });
}

// Adds the sums of rows that lie one after the other, `copies` for each of `rows`.
RAYFIN_INLINE void merge_rows(float* sums, int64_t rows, int copies, int64_t stride) {
  if (copies == 1) return;
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t i = 0; i < stride; i += kWidth)
      store(sums + m * stride + i, load(sums + 2 * m * stride + i) + load(sums + (2 * m + 1) * stride + i));
}

// Too few rows to unpack codes for. The registers of AVX2 do not hold packed ones beside six rows.
constexpr int64_t kPackedRows = kRows == 12 ? 12 : 0;

// Splits rows into chunks, and these into blocks of about the same size, which lie side by side.
struct RowBlocks {
  int64_t rows, chunk, limit;  // rows in all, of a chunk, and the most of a block

  int64_t count(int64_t size) const { return (size + limit - 1) / limit; }  // of a chunk of `size` rows
  static int64_t first(int64_t block, int64_t size, int64_t blocks) { return size * block / blocks; }

  // The first row of a row's block, and how many it has.
  std::pair<int64_t, int64_t> of(int64_t row) const {
    const int64_t start = row / chunk * chunk, size = std::min(chunk, rows - start), blocks = count(size);
    const int64_t block = ((row - start + 1) * blocks - 1) / size, at = first(block, size, blocks);
    return {start + at, first(block + 1, size, blocks) - at};
  }
};

RoundedRows quantise(Pool& pool, const Matrix& weight, int excess, const float* x, int64_t x_stride,
                     const RowBlocks& blocks) {
  const Groups& groups = weight.groups;
  const int64_t stride = groups.count * group_steps(weight.storage, groups);
  const int64_t parts = groups.count * ((groups.size + kPart - 1) / kPart);
  const int64_t copies = weight.row_bytes, all = blocks.rows, rows = all / copies;
  // Unpacked codes are multiplied by whole parts: what lies past a row's last ones, times zeros.
  const int64_t room = (all + kUnit - 1) / kUnit * kUnit * (stride + kPart);
  char* values = pool.workspace<char>(room + all * 12 * parts);
  float* scales = reinterpret_cast<float*>(values + room);
  float* sums = scales + all * parts;
  int32_t* starts = reinterpret_cast<int32_t*>(sums + all * parts);
  const int64_t each = std::max<int64_t>(1, kQuantisedAtOnce / weight.inputs);
  const int32_t* order = weight.order();
  pool.run((rows + each - 1) / each, [&](int64_t tile, int thread) {
    float* own = order || copies > 1 ? pool.scratch<float>(thread, weight.inputs) : nullptr;
    for (int64_t row = tile * each; row < std::min(rows, (tile + 1) * each); ++row) {
      const float* from = x + row * x_stride;
      if (order) {
        for (int64_t k = 0; k < weight.inputs; ++k) own[k] = from[order[k]];
        from = own;
      }
      for (int64_t i = row * copies; i < (row + 1) * copies; ++i) {
        const auto [first, side] = blocks.of(i);
        const int64_t at = first * parts + i - first;
        const RowPlace to{side, reinterpret_cast<int8_t*>(values + first * stride + 4 * (i - first)), scales + at, sums + at,
                          starts + at};
        quantise_row(weight, from, excess, to, parts);
        if (copies > 1) subtract_row(weight, from, to, own);
        from = own;
      }
    }
  });
  return {values, scales, sums, starts, stride, parts};
}

PanelWords packed_words(const Matrix& weight, int64_t panel) {
  return {weight.words(panel), weight.panel_words(), weight.groups.words, weight.groups.count,
          group_steps(weight.storage, weight.groups)};
}

template <class Dot, class Code, bool kZeros, int kM, int kP>
void few_rows(const Code& code, const Matrix& weight, const RoundedRows& x, int64_t panel, int64_t last, float* y, int64_t y_stride,
              const Epilogue& epilogue) {
  alignas(64) float out[kM * kP * kPanel];
  for (; panel + kP <= last; panel += kP) {
    const GroupFloats scales(weight, panel, false), leasts(weight, panel, Code::kLevels);
    const int16_t* zeros = kZeros ? weight.zeros() + panel * weight.groups.count * kPanel : nullptr;
    rounded_tile<Dot, Code, kZeros, kM, kP, true>(code, packed_words(weight, panel), scales, leasts, zeros, x, out);
    const int64_t rows = kM / weight.row_bytes;
    merge_rows(out, rows, weight.row_bytes, kP * kPanel);
    for (int p = 0; p < kP; ++p)
      finish_panel(weight, panel + p, out + p * kPanel, kP * kPanel, rows, y, y_stride, epilogue);
  }
  if constexpr (kP > 1) few_rows<Dot, Code, kZeros, kM, kP / 2>(code, weight, x, panel, last, y, y_stride, epilogue);
}

// Whether many rows are multiplied on matrix tiles.
#if defined(__AMX_TILE__)
template <class Dot>
constexpr bool kTiles = !Dot::kPairs;
#else
template <class Dot>
constexpr bool kTiles = false;
#endif

// Floats of a thread for many_rows.
template <class Code>
int64_t scratch_floats(const Matrix& weight, int64_t rows) {
  return (rows + (parts_of(weight.groups) * kByteWords + (Code::kLevels ? 2 : 1)) * weight.groups.count) * kPanel;
}

// Multiplies a block of rows of x by a panel.
template <class Dot, class Code, bool kZeros, bool kStream, class Floats>
void rows_by_panel(const Code& code, const PanelWords& words, const Floats& scales, const Floats& leasts,
                   const int16_t* zeros, const RoundedRows& x, int64_t rows, float* out) {
  const int64_t blocks = RowBlocks{rows, rows, kTileRows<Dot>}.count(rows);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t row = RowBlocks::first(block, rows, blocks), count = RowBlocks::first(block + 1, rows, blocks) - row;
    with_rows(count, [&](auto m) {
      if constexpr (m.value <= kTileRows<Dot>)
        rounded_tile<Dot, Code, kZeros, m.value, 1, kStream>(code, words, scales, leasts, zeros, x.from(row),
                                                             out + row * kPanel);
    });
  }
}

// Multiplies rows of x by panels first .. last - 1; all rows use each panel, its codes unpacked, while it is in cache.
template <class Dot, class Code, bool kZeros>
void many_rows(const Code& code, int64_t rows, const Matrix& weight, const RoundedRows& x, int64_t first, int64_t last,
               float* scratch, float* y, int64_t y_stride, const Epilogue& epilogue) {
  const int64_t groups = weight.groups.count;
  float *out = scratch, *low = out + rows * kPanel, *wide = Code::kLevels ? low + groups * kPanel : low;
  int32_t* const bytes = reinterpret_cast<int32_t*>(wide + groups * kPanel);
#if defined(__AMX_TILE__)
  const PartShapes shapes;
#endif
  constexpr int kOffset = kTiles<Dot> ? Code::kOffset : Code::kWide ? -Dot::kExcess : 0;
  const bool lies_so = weight.storage == kCodes8 && kOffset == 0 && weight.groups.words % kByteWords == 0;
  for (int64_t panel = first; panel < last; ++panel) {
    const PanelWords packed = packed_words(weight, panel);
    const int16_t* zeros = kZeros ? weight.zeros() + panel * groups * kPanel : nullptr;
    if (!kTiles<Dot> && rows <= kPackedRows) {
      const GroupFloats scales(weight, panel, false), leasts(weight, panel, Code::kLevels);
      rows_by_panel<Dot, Code, kZeros, true>(code, packed, scales, leasts, zeros, x, rows, out);
    } else {
      GroupFloats(weight, panel, false).widen(groups, wide);
      if constexpr (Code::kLevels) GroupFloats(weight, panel, true).widen(groups, low);
      if (!lies_so) unpack(code, weight, panel, kOffset, bytes);
      const PanelWords words{lies_so ? packed.first : bytes, 0, parts_of(weight.groups) * kByteWords, groups, packed.steps};
#if defined(__AMX_TILE__)
      if constexpr (kTiles<Dot>)
        multiply_parts<Code, kZeros>(weight, words.first, {wide}, {low}, zeros, x, rows, out);
      else
#endif
        rows_by_panel<Dot, Unpacked<Dot, Code>, kZeros, false>({}, words, WideFloats{wide}, WideFloats{low}, zeros, x, rows,
                                                               out);
    }
    const int64_t merged = rows / weight.row_bytes;
    merge_rows(out, merged, weight.row_bytes, kPanel);
    finish_panel(weight, panel, out, kPanel, merged, y, y_stride, epilogue);
  }
}

int64_t chunk_rows(int64_t rows, int64_t row_bytes) {
  if (rows <= kMinChunk) return rows;
  const int64_t limit = std::clamp(kChunkBytes / row_bytes, kMinChunk, kMaxChunk);
  const int64_t chunks = (rows + limit - 1) / limit, even = (rows + chunks - 1) / chunks;
  return std::min(rows, (even + kUnit - 1) / kUnit * kUnit);
}

template <class Dot, class Code, bool kZeros>
void matmul_by(const Code& code, Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t count,
               float* y, int64_t y_stride, const Epilogue& epilogue) {
  const int64_t rows = count * weight.row_bytes;
  const bool few = rows <= kTileRows<Dot>;
  const int64_t chunk = chunk_rows(rows, weight.groups.count * group_steps(weight.storage, weight.groups));
  const int64_t chunks = (rows + chunk - 1) / chunk;
  const RowBlocks blocks{rows, chunk, kTiles<Dot> && !few ? 1 : kTileRows<Dot>};
  const RoundedRows quantised = quantise(pool, weight, kExcess<Dot, Code>, x, x_stride, blocks);
  const double bytes = 4.0 * double(weight.panel_words()), operations = 2.0 * double(chunk) * double(weight.inputs * kPanel);
  const double seconds = std::max(operations / kOperationsPerSecond, bytes / kBytesPerSecond);
  const PanelTiles tiles(weight.panels, few ? panels_at_once(rows) : 1, int64_t(kTileSeconds / seconds) + 1, chunks,
                         pool.threads());
  pool.run(chunks * tiles.count(), [&](int64_t tile, int thread) {
    const int64_t start = tile / tiles.count() * chunk, size = std::min(chunk, rows - start);
    const PanelTiles::Range panels = tiles[tile % tiles.count()];
    if (few) {
      with_rows(rows, [&](auto m) {
        if constexpr (m.value <= kTileRows<Dot>)
          few_rows<Dot, Code, kZeros, m.value, panels_at_once(m.value)>(code, weight, quantised, panels.first, panels.last,
                                                                        y, y_stride, epilogue);
      });
      return;
    }
    const int64_t merged = start / weight.row_bytes;
    many_rows<Dot, Code, kZeros>(code, size, weight, quantised.from(start), panels.first, panels.last,
                                 pool.scratch<float>(thread, scratch_floats<Code>(weight, size)), y + merged * y_stride,
                                 y_stride, epilogue.from(merged));
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
