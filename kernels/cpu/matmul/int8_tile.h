// The inner int8 product: a few rows of x times panels of an 8-bit weight, all sums in registers.
//
// A panel holds four depth steps of an output side by side in 32 bits, a vector of outputs for each four steps. Three
// classes multiply them: `Widened` on any machine, `Vnni` (x86) and `Sdot` (Arm) where the machine has that instruction.
#pragma once

#include "matmul/register_tile.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace rayfin {

constexpr int kInt8Steps = 4;                      // depth steps in 32 bits
constexpr int64_t kInt8Group = kPanel * kInt8Steps;  // bytes of a panel in four steps

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

// Multiplies weights and rows as 16-bit integers. Of the four bytes, 0 and 2 are the even ones, 1 and 3 the odd ones.
// A row holds its steps in the order 0 2 1 3, to match.
struct Widened {
  typedef int16_t Value;
  typedef int16_t Pairs __attribute__((vector_size(kWidth * 4)));
  struct Weights {
    Pairs even, odd;
  };
  static constexpr int32_t kOffset = 0;
  static constexpr int kMaxRows = kWidth == 16 ? 12 : 4;

  static constexpr int panels_at_once(int64_t rows) {
    if (kWidth == 16) return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
    return rows == 1 ? 2 : 1;
  }

  static RAYFIN_INLINE Weights load(const int8_t* p) {
    Pairs bytes = bit_cast<Pairs>(load_int(p));
    return {(bytes << 8) >> 8, bytes >> 8};
  }

  static RAYFIN_INLINE VecI add(VecI sums, const Weights& w, const char* x) {
    const Pairs even = bit_cast<Pairs>(broadcast_int(x)), odd = bit_cast<Pairs>(broadcast_int(x + 4));
#if defined(__AVX512BW__)
    sums += bit_cast<VecI>(_mm512_madd_epi16(bit_cast<__m512i>(w.even), bit_cast<__m512i>(even)));
    return sums + bit_cast<VecI>(_mm512_madd_epi16(bit_cast<__m512i>(w.odd), bit_cast<__m512i>(odd)));
#elif defined(__AVX2__)
    sums += bit_cast<VecI>(_mm256_madd_epi16(bit_cast<__m256i>(w.even), bit_cast<__m256i>(even)));
    return sums + bit_cast<VecI>(_mm256_madd_epi16(bit_cast<__m256i>(w.odd), bit_cast<__m256i>(odd)));
#else
    const VecI pair = bit_cast<VecI>(w.even * even + w.odd * odd);  // two products of 127 * 127 fit into 16 bits
    return sums + ((pair << 16) >> 16) + (pair >> 16);
#endif
  }

  static RAYFIN_INLINE void store(Value* p, VecI steps) {
    for (int i = 0; i < kWidth; i += kInt8Steps) {
      p[i] = Value(steps[i]), p[i + 1] = Value(steps[i + 2]);
      p[i + 2] = Value(steps[i + 1]), p[i + 3] = Value(steps[i + 3]);
    }
  }
};

#if defined(__AVX2__)
// vpdpbusd multiplies unsigned bytes of a row by signed weights and adds four products to a sum. A row's bytes are
// stored with 128 added, so each sum is too large by 128 times the sum of the weights (Int8Panel::offsets).
struct Vnni {
  typedef uint8_t Value;
  typedef VecI Weights;
  static constexpr int32_t kOffset = 128;
  static constexpr int kMaxRows = kRows;

  static constexpr int panels_at_once(int64_t rows) {
    if (kWidth == 16) return rows <= 2 ? 4 : rows == 3 ? 3 : rows <= 6 ? 2 : 1;
    return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
  }

  static RAYFIN_INLINE Weights load(const int8_t* p) { return load_int(p); }

  // In assembly, because the library is also compiled for machines without it (has_vnni).
  static RAYFIN_INLINE VecI add(VecI sums, const Weights& w, const char* x) {
#if defined(__AVX512F__)
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(broadcast_int(x)), "v"(w));
#else
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(broadcast_int(x)), "x"(w));
#endif
    return sums;
  }

  static RAYFIN_INLINE void store(Value* p, VecI steps) {
    typedef uint8_t Bytes __attribute__((vector_size(kWidth)));
    const Bytes bytes = __builtin_convertvector(steps + kOffset, Bytes);
    std::memcpy(p, &bytes, sizeof(bytes));
  }
};
#endif

#if defined(__ARM_FEATURE_DOTPROD)
// sdot multiplies signed bytes and adds four products to a sum.
struct Sdot {
  typedef int8_t Value;
  typedef VecI Weights;
  static constexpr int32_t kOffset = 0;
  static constexpr int kMaxRows = kRows;

  static constexpr int panels_at_once(int64_t rows) { return rows <= 2 ? 4 : rows <= 6 ? 2 : 1; }

  static RAYFIN_INLINE Weights load(const int8_t* p) { return load_int(p); }

  static RAYFIN_INLINE VecI add(VecI sums, const Weights& w, const char* x) {
    return bit_cast<VecI>(vdotq_s32(bit_cast<int32x4_t>(sums), bit_cast<int8x16_t>(w),
                                    bit_cast<int8x16_t>(broadcast_int(x))));
  }

  static RAYFIN_INLINE void store(Value* p, VecI steps) {
    typedef int8_t Bytes __attribute__((vector_size(kWidth)));
    const Bytes bytes = __builtin_convertvector(steps, Bytes);
    std::memcpy(p, &bytes, sizeof(bytes));
  }
};
#endif

// One panel of weights.
struct Int8Panel {
  const int8_t* weights;
  const float* scales;    // of each output
  const int32_t* offsets;  // how much each output's sums are too large
};

// out[m][p * kPanel ..] = x[m] . panel p in float, rows of x `x_stride` bytes apart, panels one after the other.
// kStream: as in register_tile.
template <class Dot, int kM, int kP, bool kStream, bool kFetch>
RAYFIN_INLINE void int8_tile(const char* x, int64_t x_stride, const float* x_scales, const Int8Panel& panel,
                             int64_t depth, float* out, int64_t out_stride, Ahead ahead = {}) {
  VecI acc[kM][2 * kP] = {};
  const int64_t panel_bytes = depth * kPanel;
#pragma GCC unroll 2
  for (int64_t k = 0; k < depth; k += kInt8Steps) {
    typename Dot::Weights w[2 * kP];
#pragma GCC unroll 8
    for (int p = 0; p < kP; ++p) {
      const int8_t* at = panel.weights + p * panel_bytes + k * kPanel;
      if constexpr (kStream) {
        for (int64_t line = 0; line < kInt8Group; line += 64)
          __builtin_prefetch(at + kAheadBytes / kP + line, 0, 3);
      }
      w[2 * p] = Dot::load(at);
      w[2 * p + 1] = Dot::load(at + kInt8Group / 2);
    }
    if constexpr (kFetch) __builtin_prefetch(ahead.start + ((k * ahead.step) >> 4), 0, 2);
#pragma GCC unroll 16
    for (int m = 0; m < kM; ++m) {
      const char* steps = x + m * x_stride + k * int64_t(sizeof(typename Dot::Value));
#pragma GCC unroll 16
      for (int v = 0; v < 2 * kP; ++v) acc[m][v] = Dot::add(acc[m][v], w[v], steps);
    }
  }
#pragma GCC unroll 16
  for (int v = 0; v < 2 * kP; ++v) {
    const Vec scales = load(panel.scales + v * kWidth);
    const VecI offsets = Dot::kOffset ? load_int(panel.offsets + v * kWidth) : VecI{};
#pragma GCC unroll 16
    for (int m = 0; m < kM; ++m) {
      const Vec sums = __builtin_convertvector(acc[m][v] - offsets, Vec);
      store(out + m * out_stride + v * kWidth, sums * (scales * x_scales[m]));
    }
  }
}

}  // namespace rayfin
