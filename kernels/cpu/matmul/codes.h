// Weights of 4 or 8 bits, widened in registers. A 32-bit word holds the next few depth steps of one output, and a
// vector of words those of kWidth outputs.
#pragma once

#include "matmul/matrix.h"
#include "matmul/register_tile.h"

namespace rayfin {

// Zero points, as integers.
RAYFIN_INLINE VecI load_zeros(const int16_t* p) {
  typedef int16_t Half __attribute__((vector_size(kWidth * 2)));
  Half half;
  std::memcpy(&half, p, sizeof(half));
  return __builtin_convertvector(half, VecI);
}

// Scales, or least numbers, of the groups of a panel: floats, 16-bit floats, or factors on 16-bit floats.
class GroupFloats {
 public:
  GroupFloats(const Matrix& weight, int64_t panel, bool least) : groups_(weight.groups.count * kPanel) {
    const int64_t first = panel * groups_;
    if (!weight.shared.span) {
      floats_ = (least ? weight.zeros<float>() : weight.scales()) + first;
      return;
    }
    halves_ = weight.halves(panel, least);
    halves_stride_ = weight.halves_stride();
    while (weight.shared.span >> (shift_ + 1)) ++shift_;
    if (weight.shared.factors) factors_ = (least ? weight.zeros<int8_t>() : weight.scales<int8_t>()) + first;
  }

  // Widens those of this panel to out [groups][kPanel].
  void widen(int64_t count, float* out) const {
    for (int64_t g = 0; g < count; ++g)
      for (int v = 0; v < 2; ++v) store(out + g * kPanel + v * kWidth, at(g, v));
  }

  // Those of a group, for vector `v` of the panels from this one on.
  RAYFIN_INLINE Vec at(int64_t group, int v) const {
    const int64_t lane = v % 2 * kWidth, index = v / 2 * groups_ + group * kPanel + lane;
    if (floats_) return load(floats_ + index);
    const Vec halves = load_halves(halves_ + v / 2 * halves_stride_ + (group >> shift_) * kPanel + lane);
    return factors_ ? halves * load_bytes(factors_ + index) : halves;
  }

 private:
  const float* floats_ = nullptr;
  const uint16_t* halves_ = nullptr;
  const int8_t* factors_ = nullptr;
  int64_t groups_, halves_stride_ = 0;
  int shift_ = 0;
};

// Those of a single panel that were widened.
struct WideFloats {
  const float* floats;

  RAYFIN_INLINE Vec at(int64_t group, int v) const { return load(floats + group * kPanel + v * kWidth); }
};

// One class for each kind of code. `widen` reads the code that lies `shift` bits up in each word, `shift_of` a depth
// step. A number is what `widen` gives times kFactor, a power of two that scales take over.
//
// Of eight 4-bit codes the first four are the low halves of the bytes and the others the high halves, so that a mask
// gives four bytes for products of bytes.
struct Nibbles {
  typedef float Stored;  // of a scale
  typedef int16_t Zero;
  static constexpr float kFactor = 1.0f;
  static constexpr int kSteps = 8;
  static constexpr int shift_of(int step) { return step < 4 ? 8 * step : 8 * (step - 4) + 4; }
};

// 4-bit numbers, 8 added.
struct Int4 : Nibbles {
#if defined(__AVX512F__)
  const Vec numbers = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};

  RAYFIN_INLINE Vec widen(VecI words, int shift) const {  // the permutation reads only the lowest four bits
    const VecI codes = bit_cast<VecI>(bit_cast<VecU>(words) >> shift);
    return bit_cast<Vec>(_mm512_maskz_permutexvar_ps(0xffff, bit_cast<__m512i>(codes), bit_cast<__m512>(numbers)));
  }
#else
  RAYFIN_INLINE Vec widen(VecI words, int shift) const {
    return __builtin_convertvector(bit_cast<VecI>(bit_cast<VecU>(words) >> shift) & 15, Vec) - 8.0f;
  }
#endif
};

// 4-bit levels above a least number.
struct Levels4 : Nibbles {
  typedef float Zero;
#if defined(__AVX512F__)
  const Vec numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

  RAYFIN_INLINE Vec widen(VecI words, int shift) const {
    const VecI codes = bit_cast<VecI>(bit_cast<VecU>(words) >> shift);
    return bit_cast<Vec>(_mm512_maskz_permutexvar_ps(0xffff, bit_cast<__m512i>(codes), bit_cast<__m512>(numbers)));
  }
#else
  RAYFIN_INLINE Vec widen(VecI words, int shift) const {
    return __builtin_convertvector(bit_cast<VecI>(bit_cast<VecU>(words) >> shift) & 15, Vec);
  }
#endif
};

// 4-bit indices of a table of numbers.
struct Table4 : Nibbles {
  explicit Table4(const float* table) : low(load(table)) {
    if constexpr (kWidth == 8) high = load(table + 8);
    std::memcpy(all, table, sizeof(all));
#if defined(__aarch64__)
    for (int i = 0; i < 4; ++i) bytes.val[i] = bit_cast<uint8x16_t>(load(table + 4 * i));
#endif
  }

  RAYFIN_INLINE Vec widen(VecI words, int shift) const {
    const VecI codes = bit_cast<VecI>(bit_cast<VecU>(words) >> shift);
#if defined(__AVX512F__)
    return bit_cast<Vec>(_mm512_maskz_permutexvar_ps(0xffff, bit_cast<__m512i>(codes), bit_cast<__m512>(low)));
#elif defined(__AVX2__)  // the permutations read three bits, the choice between them the fourth
    const __m256 first = _mm256_permutevar8x32_ps(bit_cast<__m256>(low), bit_cast<__m256i>(codes));
    const __m256 second = _mm256_permutevar8x32_ps(bit_cast<__m256>(high), bit_cast<__m256i>(codes));
    return bit_cast<Vec>(_mm256_blendv_ps(first, second, bit_cast<__m256>(codes << 28)));
#elif defined(__aarch64__)  // a lane's four bytes of the table's 64
    const VecI places = (codes & 15) * 0x04040404 + 0x03020100;
    return bit_cast<Vec>(vqtbl4q_u8(bytes, bit_cast<uint8x16_t>(places)));
#else
    Vec out;
    for (int i = 0; i < kWidth; ++i) out[i] = all[codes[i] & 15];
    return out;
#endif
  }

  Vec low, high{};
  float all[16];
#if defined(__aarch64__)
  uint8x16x4_t bytes;
#endif
};

struct Bytes {
  typedef float Stored;
  typedef int16_t Zero;
  static constexpr float kFactor = 1.0f;
  static constexpr int kSteps = 4;
  static constexpr int shift_of(int step) { return 8 * step; }
};

// Signed bytes.
struct Int8 : Bytes {
  RAYFIN_INLINE Vec widen(VecI words, int shift) const {
    return __builtin_convertvector((words << (24 - shift)) >> 24, Vec);
  }
};

// 8-bit levels above a least number.
struct Levels8 : Bytes {
  typedef float Zero;

  RAYFIN_INLINE Vec widen(VecI words, int shift) const {
    return __builtin_convertvector(bit_cast<VecI>(bit_cast<VecU>(words) >> shift) & 255, Vec);
  }
};

// 8-bit floats, 4 bits of exponent and 3 of mantissa, none of them NaN: shifted to where a float has them they are
// 2^120 too small, subnormals as well.
struct Fp8 : Bytes {
  static constexpr float kFactor = 0x1p120f;

  RAYFIN_INLINE Vec widen(VecI words, int shift) const {
    return bit_cast<Vec>(((words << (24 - shift)) >> 4) & int32_t(0x87f00000));  // the sign is shifted in four times
  }
};

// 4-bit floats: a sign, 2 bits of exponent and 1 of mantissa.
constexpr float kE2m1[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};

struct Fp4 : Table4 {
  typedef uint8_t Stored;
  Fp4() : Table4(kE2m1) {}
};

// Powers of two, of which the exponents of floats are stored; 0 is 0. GCC 12 converts the bytes of the generic code one
// by one.
RAYFIN_INLINE Vec load_scales(const uint8_t* p) {
#if defined(__AVX512F__)
  const VecI wide = bit_cast<VecI>(_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  const VecI wide = bit_cast<VecI>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  typedef uint8_t Exponents __attribute__((vector_size(kWidth)));
  Exponents exponents;
  std::memcpy(&exponents, p, sizeof(exponents));
  const VecI wide = __builtin_convertvector(exponents, VecI);
#endif
  return bit_cast<Vec>(wide << 23);
}

// The scale and the zero point of a group for a vector of outputs.
template <class Code, bool kZeros>
struct Scale {
  Vec scale, zero;

  RAYFIN_INLINE void set(Vec scales, const int16_t* zeros) {
    scale = scales * Code::kFactor;
    if constexpr (kZeros) zero = __builtin_convertvector(load_zeros(zeros), Vec);
  }

  // The weights of a depth step: (number - zero) * scale.
  RAYFIN_INLINE Vec weights(const Code& code, VecI words, int step) const {
    Vec numbers = code.widen(words, Code::shift_of(step));
    if constexpr (kZeros) numbers -= zero;
    return numbers * scale;
  }
};

// The same for levels: level * scale + least, which is rounded once where the product is exact.
template <class Code>
struct LevelScale {
  Vec scale, least;

  RAYFIN_INLINE void set(Vec scales, Vec leasts) { scale = scales, least = leasts; }

  RAYFIN_INLINE Vec weights(const Code& code, VecI words, int step) const {
    return multiply_add(code.widen(words, Code::shift_of(step)), scale, least);
  }
};

template <>
struct Scale<Levels8, true> : LevelScale<Levels8> {};

#if defined(__AVX512F__)
template <>
struct Scale<Levels4, true> : LevelScale<Levels4> {};
#else
template <>
struct Scale<Levels4, true> {  // as Int4 below
  Vec scale[4], least;

  RAYFIN_INLINE void set(Vec scales, Vec leasts) {
    for (int i = 0; i < 4; ++i) scale[i] = scales * (1.0f / float(1 << 4 * i));
    least = leasts;
  }

  RAYFIN_INLINE Vec weights(const Levels4&, VecI words, int step) const {
    const int shift = Levels4::shift_of(step), place = shift % 16;
    const VecI half = shift < 16 ? words : bit_cast<VecI>(bit_cast<VecU>(words) >> 16);
    return multiply_add(__builtin_convertvector(half & (15 << place), Vec), scale[place / 4], least);
  }
};
#endif

#if !defined(__AVX512F__)
// A code is widened where it lies, times a power of two by which the scale is smaller. Without zero points code * scale -
// 8 * scale rounded once is (code - 8) * scale rounded once, for 8 * scale is exact.
template <bool kZeros>
struct Scale<Int4, kZeros> {
  static constexpr bool kOnce = kFuses && !kZeros;
  Vec scale[4], less;
  VecI zero[4];

  RAYFIN_INLINE void set(Vec one, const int16_t* zeros) {
    VecI number = VecI{} + 8;
    if constexpr (kZeros) number += load_zeros(zeros);
    for (int i = 0; i < 4; ++i) {
      scale[i] = one * (1.0f / float(1 << 4 * i));
      if constexpr (!kOnce) zero[i] = number << 4 * i;
    }
    less = one * -8.0f;
  }

  RAYFIN_INLINE Vec weights(const Int4&, VecI words, int step) const {
    const int shift = Int4::shift_of(step), place = shift % 16;
    const VecI half = shift < 16 ? words : bit_cast<VecI>(bit_cast<VecU>(words) >> 16), codes = half & (15 << place);
    if constexpr (kOnce) return multiply_add(__builtin_convertvector(codes, Vec), scale[place / 4], less);
    return __builtin_convertvector(codes - zero[place / 4], Vec) * scale[place / 4];
  }
};
#endif

#if (defined(__AVX2__) && !defined(__AVX512F__)) || defined(__aarch64__)
// Four codes of a word become bytes at once: 12 more than twice the number, 0 .. 24. Such a byte is widened where it lies
// as above, and byte * scale / 2 - 6 * scale is exact: a scale is a power of two.
template <>
struct Scale<Fp4, false> {
  Vec scale[4], less;

  RAYFIN_INLINE void set(Vec scales, const int16_t*) {
    const Vec half = scales * 0.5f;
    for (int i = 0; i < 4; ++i) scale[i] = half * (1.0f / float(1 << 8 * i));
    less = half * -12.0f;
  }

  RAYFIN_INLINE Vec weights(const Fp4&, VecI words, int step) const {
    const VecI bytes = bytes_of((step < 4 ? words : words >> 4) & 0x0f0f0f0f);
    return multiply_add(__builtin_convertvector(bytes & int32_t(0xffu << 8 * (step % 4)), Vec), scale[step % 4], less);
  }

 private:
  RAYFIN_INLINE static VecI bytes_of(VecI codes) {
    constexpr int8_t table[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
#if defined(__AVX2__)
    const __m256i numbers = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return bit_cast<VecI>(_mm256_shuffle_epi8(numbers, bit_cast<__m256i>(codes)));
#else
    return bit_cast<VecI>(vqtbl1q_s8(vld1q_s8(table), bit_cast<uint8x16_t>(codes)));
#endif
  }
};
#endif

}  // namespace rayfin
