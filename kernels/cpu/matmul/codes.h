// Weights of 4 or 8 bits, widened in registers. A 32-bit word holds the next few depth steps of one output, and a
// vector of words those of kWidth outputs.
#pragma once

#include "matmul/register_tile.h"

namespace rayfin {

// One class for each kind of code. `prepare` is applied to words once, `widen` to each depth step; `shift_of` is where a
// step's bits lie in a word. A number is what `widen` gives times kFactor, a power of two that scales take over.
//
// Of eight 4-bit codes the first four are the low halves of the bytes and the others the high halves, so that a mask
// gives four bytes for products of bytes.
struct Nibbles {
  static constexpr float kFactor = 1.0f;
  static constexpr int kSteps = 8;
  static constexpr int shift_of(int step) { return step < 4 ? 8 * step : 8 * (step - 4) + 4; }
};

// 4-bit numbers, 8 added.
struct Int4 : Nibbles {
#if defined(__AVX512F__)
  const Vec numbers = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};

  RAYFIN_INLINE VecI prepare(VecI words) const { return words; }
  RAYFIN_INLINE Vec widen(VecI words, int shift) const {  // the permutation reads only the lowest four bits
    const VecI codes = bit_cast<VecI>(bit_cast<VecU>(words) >> shift);
    return bit_cast<Vec>(_mm512_maskz_permutexvar_ps(0xffff, bit_cast<__m512i>(codes), bit_cast<__m512>(numbers)));
  }
#else
  RAYFIN_INLINE VecI prepare(VecI words) const { return words ^ int32_t(0x88888888); }  // to two's complement
  RAYFIN_INLINE Vec widen(VecI words, int shift) const {
    return __builtin_convertvector((words << (28 - shift)) >> 28, Vec);
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

  RAYFIN_INLINE VecI prepare(VecI words) const { return words; }
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
  static constexpr float kFactor = 1.0f;
  static constexpr int kSteps = 4;
  static constexpr int shift_of(int step) { return 8 * step; }
  RAYFIN_INLINE VecI prepare(VecI words) const { return words; }
};

// Signed bytes.
struct Int8 : Bytes {
  RAYFIN_INLINE Vec widen(VecI words, int shift) const {
    return __builtin_convertvector((words << (24 - shift)) >> 24, Vec);
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

}  // namespace rayfin
