// The inner product of rows rounded to 8 bits with codes in groups: a few rows times panels, all sums in registers.
//
// A code class makes bytes of the next depth steps: `small` ones are 0 .. 63, `wide` ones -128 .. 127. A dot class adds
// the products of eight bytes with those of a row, -127 .. 127, to int32 sums: one class for any machine, others where
// the machine has an instruction for four products (VNNI, Arm's dot product).
#pragma once

#include <algorithm>

#include "matmul/codes.h"
#include "matmul/matrix.h"

namespace rayfin {

// Inputs of a row that share a scale: those of a group of the weight, or a part of it where it is longer.
constexpr int64_t kPart = 32;

constexpr int64_t kByteWords = kPart / 4;  // of an output in a part of bytes

constexpr int64_t parts_of(const Groups& groups) { return (groups.size + kPart - 1) / kPart; }

typedef uint8_t Octets __attribute__((vector_size(kWidth * 4)));

RAYFIN_INLINE VecI load_int(const void* p) {
  VecI v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

RAYFIN_INLINE VecI broadcast_int(const void* p) {
  int32_t value;
  std::memcpy(&value, p, sizeof(value));
  return value - VecI{};
}

RAYFIN_INLINE VecI four_of(int octet) { return VecI{} + octet * 0x01010101; }

#if defined(__AVX2__)
struct VnniDot {
  static constexpr bool kPairs = false;  // whether sums may be of 16 bits first (PairDot)
  // Wide bytes are multiplied as unsigned ones, so sums are too large by this many times the sum of the row's.
  static constexpr int kExcess = 128;

  template <bool kWide>
  static RAYFIN_INLINE VecI add(VecI sums, VecI codes, VecI x) {
    if constexpr (kWide) codes ^= VecI{} + int32_t(0x80808080);
    // In assembly, because the library is also compiled for machines without it (has_vnni).
#if defined(__AVX512F__)
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(x));
#else
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(codes), "x"(x));
#endif
    return sums;
  }
};
#elif defined(__ARM_FEATURE_DOTPROD)
struct SdotDot {
  static constexpr bool kPairs = false;
  static constexpr int kExcess = 0;

  template <bool kWide>
  static RAYFIN_INLINE VecI add(VecI sums, VecI codes, VecI x) {
    return bit_cast<VecI>(vdotq_s32(bit_cast<int32x4_t>(sums), bit_cast<int8x16_t>(codes), bit_cast<int8x16_t>(x)));
  }
};
#endif

// Pairs are sums of 16 bits. They hold four products of small bytes, 4 * 63 * 127, more of smaller ones, but only two of
// wide ones, 2 * 128 * 127.
struct PairDot {
  static constexpr bool kPairs = true;
  static constexpr int kExcess = 0;

#if defined(__AVX512BW__)
  typedef __m512i Pairs;
  static RAYFIN_INLINE Pairs small_pairs(VecI codes, VecI x) {
    return _mm512_maddubs_epi16(bit_cast<__m512i>(codes), bit_cast<__m512i>(x));
  }
  static RAYFIN_INLINE Pairs wide_pairs(VecI codes, VecI x) {  // the row's bytes get the signs of the codes
    const __m512i signs = bit_cast<__m512i>(codes), steps = bit_cast<__m512i>(x);
    const __m512i signed_steps = _mm512_mask_sub_epi8(steps, _mm512_movepi8_mask(signs), _mm512_setzero_si512(), steps);
    return _mm512_maddubs_epi16(_mm512_abs_epi8(signs), signed_steps);
  }
  static RAYFIN_INLINE Pairs both(Pairs a, Pairs b) { return _mm512_add_epi16(a, b); }
  static RAYFIN_INLINE VecI widened(Pairs pairs) {
    return bit_cast<VecI>(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
  }
#elif defined(__AVX2__)
  typedef __m256i Pairs;
  static RAYFIN_INLINE Pairs small_pairs(VecI codes, VecI x) {
    return _mm256_maddubs_epi16(bit_cast<__m256i>(codes), bit_cast<__m256i>(x));
  }
  static RAYFIN_INLINE Pairs wide_pairs(VecI codes, VecI x) {  // the row's bytes get the signs of the codes
    const __m256i signs = bit_cast<__m256i>(codes);
    return _mm256_maddubs_epi16(_mm256_abs_epi8(signs), _mm256_sign_epi8(bit_cast<__m256i>(x), signs));
  }
  static RAYFIN_INLINE Pairs both(Pairs a, Pairs b) { return _mm256_add_epi16(a, b); }
  static RAYFIN_INLINE VecI widened(Pairs pairs) {
    return bit_cast<VecI>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
#else
  typedef int16_t Pairs __attribute__((vector_size(kWidth * 4)));
  static RAYFIN_INLINE Pairs small_pairs(VecI codes, VecI x) {
    const auto even = [](VecI bytes) { return (bit_cast<Pairs>(bytes) << 8) >> 8; };
    const auto odd = [](VecI bytes) { return bit_cast<Pairs>(bytes) >> 8; };
    return even(codes) * even(x) + odd(codes) * odd(x);
  }
  static RAYFIN_INLINE Pairs wide_pairs(VecI codes, VecI x) { return small_pairs(codes, x); }
  static RAYFIN_INLINE Pairs both(Pairs a, Pairs b) { return a + b; }
  static RAYFIN_INLINE VecI widened(Pairs pairs) {
    const VecI sums = bit_cast<VecI>(pairs);
    return ((sums << 16) >> 16) + (sums >> 16);
  }
#endif

  static RAYFIN_INLINE Pairs products(const VecI* bytes, VecI x, VecI next) {  // of small bytes
    return both(small_pairs(bytes[0], x), small_pairs(bytes[1], next));
  }

  template <bool kWide>
  static RAYFIN_INLINE VecI add(VecI sums, const VecI* bytes, VecI x, VecI next) {
    if constexpr (!kWide) return sums + widened(products(bytes, x, next));
    return sums + widened(wide_pairs(bytes[0], x)) + widened(wide_pairs(bytes[1], next));
  }
};

// The code classes. `bytes` makes kSteps / 4 vectors of kWords words, which lie kPanel apart from `at` on; a byte less
// kOffset is the number or level that the code stands for. The products of kPairs words fit into sums of 16 bits.
struct RoundedNibbles {
  static constexpr bool kFull = false, kWide = false, kLevels = false;  // kFull: no part has fewer inputs
  static constexpr int kSteps = 8, kWords = 1, kOffset = 0, kPairs = 32767 / (4 * 15 * 127);

  RAYFIN_INLINE void bytes(const int32_t* at, VecI* out) const { halves(load_int(at), out); }

  static RAYFIN_INLINE void halves(VecI words, VecI* out) {
    out[0] = words & four_of(0x0f);
    out[1] = bit_cast<VecI>(bit_cast<VecU>(words) >> 4) & four_of(0x0f);
  }
};

struct RoundedInt4 : RoundedNibbles {
  static constexpr int kOffset = 8;
};

struct RoundedLevels4 : RoundedNibbles {
  static constexpr bool kLevels = true;
};

struct RoundedTable4 : RoundedNibbles {
  static constexpr bool kWide = true;
  static constexpr int kPairs = 1;

  explicit RoundedTable4(const float* table) {
    for (int i = 0; i < 16; ++i) numbers[i] = int8_t(table[i]);
  }

  RAYFIN_INLINE void bytes(const int32_t* at, VecI* out) const {
    halves(load_int(at), out);
    out[0] = look_up(out[0]), out[1] = look_up(out[1]);
  }

  RAYFIN_INLINE VecI look_up(VecI codes) const {
#if defined(__AVX512BW__)
    const __m512i four = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(numbers)));
    return bit_cast<VecI>(_mm512_shuffle_epi8(four, bit_cast<__m512i>(codes)));
#elif defined(__AVX2__)
    const __m256i two = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(numbers)));
    return bit_cast<VecI>(_mm256_shuffle_epi8(two, bit_cast<__m256i>(codes)));
#elif defined(__aarch64__)
    return bit_cast<VecI>(vqtbl1q_s8(vld1q_s8(numbers), bit_cast<uint8x16_t>(codes)));
#else
    Octets octets = bit_cast<Octets>(codes);
    for (int i = 0; i < kWidth * 4; ++i) octets[i] = uint8_t(numbers[octets[i]]);
    return bit_cast<VecI>(octets);
#endif
  }

  alignas(16) int8_t numbers[16];
};

struct RoundedInt8 {
  static constexpr bool kFull = false, kWide = true, kLevels = false;
  static constexpr int kSteps = 8, kWords = 2, kOffset = 0, kPairs = 1;

  RAYFIN_INLINE void bytes(const int32_t* at, VecI* out) const {
    out[0] = load_int(at), out[1] = load_int(at + kPanel);
  }
};

// Two words of the lowest four bits, and one of the highest two: byte i of it holds those of steps i, 4 + i, 8 + i, 12 + i.
struct RoundedLevels6 {
  static constexpr bool kFull = false, kWide = false, kLevels = true;
  static constexpr int kSteps = 16, kWords = 3, kOffset = 0, kPairs = 1;

  RAYFIN_INLINE void bytes(const int32_t* at, VecI* out) const {
    RoundedNibbles::halves(load_int(at), out);
    RoundedNibbles::halves(load_int(at + kPanel), out + 2);
    const VecI high = load_int(at + 2 * kPanel);
    out[0] |= (high << 4) & four_of(0x30);
    out[1] |= (high << 2) & four_of(0x30);
    out[2] |= high & four_of(0x30);
    out[3] |= bit_cast<VecI>(bit_cast<VecU>(high) >> 2) & four_of(0x30);
  }
};

struct RoundedInt6 : RoundedLevels6 {
  static constexpr bool kLevels = false;
  static constexpr int kOffset = 32;
};

// Words of an output in a part.
template <class Code>
constexpr int64_t kPartWords = kPart / Code::kSteps * Code::kWords;

// Sums of products start from this integer. The bits of a float of 1.5 * 2^23 more are then the sum's own, so that it needs
// no conversion: no part's sum reaches 2^22.
constexpr int32_t kStart = 0x4b400000;
constexpr float kStarted = 0x1.8p23f;

// Rows of x in signed bytes: those of a group one after the other, and zeros up to whole words of codes. Each part of a
// group has a scale, the sum of its bytes, and what its sums of products start from. The rows of a tile lie side by side:
// four bytes of each, then the next four; and so do the numbers of a part.
struct RoundedRows {
  const char* values;
  const float *scales, *sums;
  const int32_t* starts;
  int64_t stride, parts;  // bytes of a row, parts of a row

  RoundedRows from(int64_t row) const {
    return {values + row * stride, scales + row * parts, sums + row * parts, starts + row * parts, stride, parts};
  }
};

// How much too large the codes are.
template <class Dot, class Code>
constexpr int kExcess = Code::kOffset + (Code::kWide ? Dot::kExcess : 0);

// A panel's codes as bytes with the excess of `Dot`, each part filled up with zeros.
template <class Dot, class Code>
struct Unpacked {
  static constexpr bool kFull = true;
  static constexpr bool kWide = Code::kWide && !Dot::kExcess, kLevels = Code::kLevels;
  static constexpr int kWords = Dot::kPairs ? 2 : 1, kSteps = 4 * kWords;
  static constexpr int kOffset = kExcess<Dot, Code>, kPairs = Code::kPairs;

  static RAYFIN_INLINE void bytes(const int32_t* at, VecI* out) {
    for (int i = 0; i < kWords; ++i) out[i] = load_int(at + i * kPanel);
  }
};

// Writes a panel's codes as bytes, less `offset`: [part][kByteWords][kPanel].
template <class Code>
void unpack(const Code& code, const Matrix& weight, int64_t panel, int offset, int32_t* to) {
  const Groups& groups = weight.groups;
  const int32_t* words = weight.words(panel);
  for (int64_t g = 0; g < groups.count; ++g) {
    int32_t* const end = to + parts_of(groups) * kByteWords * kPanel;
    for (int64_t word = 0; word < groups.words; word += Code::kWords, words += Code::kWords * kPanel) {
      for (int v = 0; v < 2; ++v) {
        VecI bytes[Code::kSteps / 4];
        code.bytes(words + v * kWidth, bytes);
        for (int i = 0; i < Code::kSteps / 4; ++i) {
          const Octets octets = bit_cast<Octets>(bytes[i]) - uint8_t(offset);
          std::memcpy(to + i * kPanel + v * kWidth, &octets, sizeof(octets));
        }
      }
      to += Code::kSteps / 4 * kPanel;
    }
    to = std::fill_n(to, end - to, 0);
  }
}

// The factors of a part for a vector of outputs.
template <bool kZeros, bool kLevels>
struct PartFactors {
  Vec scale, started, least, zero;

  RAYFIN_INLINE PartFactors(Vec scales, Vec leasts, const int16_t* zeros)
      : scale(bit_cast<Vec>(bit_cast<VecI>(scales) & ~3)), started(scale * -kStarted), least(leasts) {
    if constexpr (kZeros) zero = -__builtin_convertvector(load_zeros(zeros), Vec);
  }

  // Adds the part's sums of products, which began with kStart, to a total: the same FMAs in any tile, so that a row's
  // bits do not depend on the rows beside it. Scales have 22 bits here, so kStarted times one is exact.
  RAYFIN_INLINE Vec add(Vec total, VecI dot, float sum, float row_scale) const {
    Vec products = bit_cast<Vec>(dot);
    if constexpr (kZeros) products = multiply_add(zero, broadcast(sum), products);  // exact: integers below 2^24
    products = kFuses ? multiply_add(products, scale, started) : (products - kStarted) * scale;
    if constexpr (kLevels) products = multiply_add(least, broadcast(sum), products);
    return multiply_add(products, broadcast(row_scale), total);
  }
};

// Words of codes of panels one after the other.
struct PanelWords {
  const int32_t* first;
  int64_t stride, each;        // from panel to panel, of an output in a group
  int64_t group_count, steps;  // groups, and depth steps of one in rows of x
};

// Rows of a tile that is one panel wide.
template <class Dot>
constexpr int kTileRows = kRows == 12 || !Dot::kPairs ? 6 : 4;

// Whether the registers hold a tile's sums beside those of a part; else `out` does.
template <int kM, int kP>
constexpr bool kKeeps = kRows == 12 && kM * kP <= 6;

// out[m][p * kPanel ..] = x[m] . panel p. Weights are prefetched, as they come from memory. Parts are added in their order.
template <class Dot, class Code, bool kZeros, int kM, int kP, bool kStream, class Floats>
__attribute__((noinline)) void rounded_tile(const Code& code, const PanelWords& from, const Floats& all_scales,
                                            const Floats& all_leasts, const int16_t* zeros, const RoundedRows& x,
                                            float* out) {
  constexpr bool kInPairs = Dot::kPairs && Code::kPairs > 1;
  static_assert(!kInPairs || Code::kPairs >= kPart / 8, "a part's products fit into sums of 16 bits");
  const int64_t groups = from.group_count, panel_scales = groups * kPanel, stride = from.stride, each = from.each;
  const int64_t group_bytes = from.steps * kM;
  const int32_t* words = from.first;
  const float *sums = x.sums, *row_scales = x.scales;
  const int32_t* starts = x.starts;
  // Their own members could be what `out` writes to.
  const Floats scales = all_scales, leasts = all_leasts;
  int64_t part = 0;
  constexpr bool kKept = kKeeps<kM, kP>;
  Vec kept[kKept ? kM : 1][kKept ? 2 * kP : 1] = {};
  if constexpr (!kKept)
    for (int i = 0; i < kM * 2 * kP; ++i) store(out + i * kWidth, Vec{});
  for (int64_t g = 0; g < groups; ++g) {
    const char* steps = x.values + g * group_bytes;
    for (int64_t word = 0; word < each; ++part) {
      const int64_t end = Code::kFull ? word + kPartWords<Code> : std::min(word + kPartWords<Code>, each);
      // Calls add(m, v, bytes, steps of row m) for the words of the part.
      const auto for_words = [&](const auto& add) RAYFIN_LAMBDA {
        const auto some = [&](int64_t i) RAYFIN_LAMBDA {
          constexpr int kBytes = Code::kSteps / 4;
          VecI bytes[2 * kP][kBytes];
          const auto read = [&](int v) RAYFIN_LAMBDA {
            const int32_t* at = words + i * Code::kWords * kPanel + v / 2 * stride + v % 2 * kWidth;
            if (kStream && v % 2 * kWidth * 4 % kLineBytes == 0) {
#pragma GCC unroll 3
              for (int line = 0; line < Code::kWords; ++line)
                __builtin_prefetch(reinterpret_cast<const char*>(at + line * kPanel) + kAheadBytes / kP, 0, 3);
            }
            code.bytes(at, bytes[v]);
          };
          // Registers hold the bytes of all vectors, and one broadcast after the other; of a few rows the broadcasts.
          if constexpr (kM > 2) {
#pragma GCC unroll 8
            for (int v = 0; v < 2 * kP; ++v) read(v);
#pragma GCC unroll 16
            for (int m = 0; m < kM; ++m)
#pragma GCC unroll 8
              for (int v = 0; v < 2 * kP; ++v) add(m, v, bytes[v], steps + i * Code::kSteps * kM + 4 * m);
          } else {
#pragma GCC unroll 8
            for (int v = 0; v < 2 * kP; ++v) {
              read(v);
#pragma GCC unroll 2
              for (int m = 0; m < kM; ++m) add(m, v, bytes[v], steps + i * Code::kSteps * kM + 4 * m);
            }
          }
        };
        const int64_t count = (end - word) / Code::kWords;
        if (Code::kFull || count == kPartWords<Code> / Code::kWords) {
#pragma GCC unroll 8
          for (int64_t i = 0; i < kPartWords<Code> / Code::kWords; ++i) some(i);
        } else {
          for (int64_t i = 0; i < count; ++i) some(i);
        }
        word = end, words += count * Code::kWords * kPanel, steps += count * Code::kSteps * kM;
      };
      const auto start = [&](int m) RAYFIN_LAMBDA {
        return kExcess<Dot, Code> ? broadcast_int(starts + part * kM + m) : kStart - VecI{};
      };
      // Adds the part's sums of products, dot(m, v).
      const auto finish = [&](const auto& dot) RAYFIN_LAMBDA {
#pragma GCC unroll 8
        for (int v = 0; v < 2 * kP; ++v) {
          const PartFactors<kZeros, Code::kLevels> factors(
              scales.at(g, v), Code::kLevels ? leasts.at(g, v) : Vec{},
              kZeros ? zeros + v / 2 * panel_scales + g * kPanel + v % 2 * kWidth : nullptr);
#pragma GCC unroll 16
          for (int m = 0; m < kM; ++m) {
            const int64_t at = part * kM + m;
            if constexpr (kKept) {
              kept[m][v] = factors.add(kept[m][v], dot(m, v), sums[at], row_scales[at]);
            } else {
              float* total = out + (m * 2 * kP + v) * kWidth;
              store(total, factors.add(load(total), dot(m, v), sums[at], row_scales[at]));
            }
          }
        }
      };
      if constexpr (kInPairs) {
        typename Dot::Pairs pairs[kM][2 * kP] = {};
        for_words([&](int m, int v, const VecI* bytes, const char* at) RAYFIN_LAMBDA {
          pairs[m][v] = Dot::both(pairs[m][v], Dot::products(bytes, broadcast_int(at), broadcast_int(at + 4 * kM)));
        });
        finish([&](int m, int v) RAYFIN_LAMBDA { return start(m) + Dot::widened(pairs[m][v]); });
      } else {
        VecI dot[kM][2 * kP];
#pragma GCC unroll 16
        for (int m = 0; m < kM; ++m)
#pragma GCC unroll 8
          for (int v = 0; v < 2 * kP; ++v) dot[m][v] = start(m);
        for_words([&](int m, int v, const VecI* bytes, const char* at) RAYFIN_LAMBDA {
          if constexpr (Dot::kPairs) {
#pragma GCC unroll 2
            for (int i = 0; i < Code::kSteps / 8; ++i)
              dot[m][v] = Dot::template add<Code::kWide>(dot[m][v], bytes + 2 * i, broadcast_int(at + 8 * i * kM),
                                                             broadcast_int(at + (8 * i + 4) * kM));
          } else {
#pragma GCC unroll 4
            for (int i = 0; i < Code::kSteps / 4; ++i)
              dot[m][v] = Dot::template add<Code::kWide>(dot[m][v], bytes[i], broadcast_int(at + 4 * i * kM));
          }
        });
        finish([&](int m, int v) RAYFIN_LAMBDA { return dot[m][v]; });
      }
    }
  }
  if constexpr (kKept) {
#pragma GCC unroll 16
    for (int m = 0; m < kM; ++m)
#pragma GCC unroll 8
      for (int v = 0; v < 2 * kP; ++v) store(out + (m * 2 * kP + v) * kWidth, kept[m][v]);
  }
}

}  // namespace rayfin
