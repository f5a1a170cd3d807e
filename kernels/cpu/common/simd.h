// Vectors of floats in the compiler's vector types (GCC, Clang): the compiler flags decide whether the same source
// becomes SSE2, NEON, AVX2 or AVX-512 code. Products and sums contract to FMAs.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define RAYFIN_INLINE inline __attribute__((always_inline))
#define RAYFIN_LAMBDA __attribute__((always_inline))

namespace rayfin {

#if defined(__AVX512F__)
constexpr int kWidth = 16;  // floats in a vector
constexpr int kRows = 12;   // rows of the largest register tile: 12 x 2 sums + 2 weights of 32 registers
#elif defined(__AVX2__)
constexpr int kWidth = 8;
constexpr int kRows = 6;  // 6 x 2 sums + 2 weights + 1 broadcast of 16 registers
#elif defined(__aarch64__)
constexpr int kWidth = 4;
constexpr int kRows = 12;  // 12 x 2 sums + 2 weights of 32 registers
#else
constexpr int kWidth = 4;
constexpr int kRows = 6;
#endif
constexpr int kPanel = 2 * kWidth;  // outputs of a packed panel: one register tile is two vectors wide

typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef int32_t VecI __attribute__((vector_size(kWidth * 4)));
typedef uint32_t VecU __attribute__((vector_size(kWidth * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(kWidth * 2)));
typedef float Vec4 __attribute__((vector_size(16)));
typedef float Vec8 __attribute__((vector_size(32)));

struct BFloat16 {  // the upper half of a float
  uint16_t bits;
};

template <class To, class From>
RAYFIN_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

RAYFIN_INLINE float widen(float x) { return x; }
RAYFIN_INLINE float widen(BFloat16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }

// A 16-bit float (IEEE 754).
RAYFIN_INLINE float widen_half(uint16_t half) {
  const float magnitude = bit_cast<float>(uint32_t(half & 0x7fff) << 13) * 0x1p112f;  // exact, of small ones as well
  return half & 0x8000 ? -magnitude : magnitude;
}

// To nearest, ties to even; what is too large becomes the largest number.
RAYFIN_INLINE uint16_t narrow_half(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude >= 0x477fe000) return uint16_t(sign | 0x7bff);  // 65504
  // Below 2^-14 the steps are 2^-24, those of a float at 0.5.
  if (magnitude < 0x38800000) return uint16_t(sign | (bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000));
  return uint16_t(sign | ((magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13));
}

RAYFIN_INLINE void narrow(float x, float* out) { *out = x; }
RAYFIN_INLINE void narrow(float x, BFloat16* out) {  // to nearest, ties to even
  uint32_t bits = bit_cast<uint32_t>(x);
  bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  out->bits = nan ? uint16_t((bits >> 16) | 0x40) : uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

RAYFIN_INLINE Vec broadcast(float x) { return x - Vec{}; }

RAYFIN_INLINE Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

RAYFIN_INLINE Vec load(const BFloat16* p) {
#if defined(__AVX512F__)  // one instruction; GCC 12 emits three for the generic code
  VecU wide = bit_cast<VecU>(_mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__AVX2__)
  VecU wide = bit_cast<VecU>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  HalfVec half;
  std::memcpy(&half, p, sizeof(half));
  VecU wide = __builtin_convertvector(half, VecU);
#endif
  return bit_cast<Vec>(wide << 16);
}

// 16-bit floats, none of them infinite or NaN.
RAYFIN_INLINE Vec load_halves(const uint16_t* p) {
#if defined(__AVX512F__)
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__aarch64__)
  float16x4_t halves;
  std::memcpy(&halves, p, sizeof(halves));
  return bit_cast<Vec>(vcvt_f32_f16(halves));
#else
  Vec out;
  for (int i = 0; i < kWidth; ++i) out[i] = widen_half(p[i]);
  return out;
#endif
}

// Signed bytes as floats.
RAYFIN_INLINE Vec load_bytes(const int8_t* p) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, bytes));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  typedef int8_t Bytes __attribute__((vector_size(kWidth)));
  Bytes bytes;
  std::memcpy(&bytes, p, sizeof(bytes));
  return __builtin_convertvector(bytes, Vec);
#endif
}

RAYFIN_INLINE void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }

// Stores to memory past the caches, for numbers that are not read soon; p is aligned to a vector. finish_streams orders
// them before what this thread stores later.
#if defined(__AVX512F__)
RAYFIN_INLINE void stream(float* p, Vec v) { _mm512_stream_ps(p, v); }
RAYFIN_INLINE void finish_streams() { _mm_sfence(); }
#elif defined(__AVX2__)
RAYFIN_INLINE void stream(float* p, Vec v) { _mm256_stream_ps(p, v); }
RAYFIN_INLINE void finish_streams() { _mm_sfence(); }
#else
RAYFIN_INLINE void stream(float* p, Vec v) { store(p, v); }
RAYFIN_INLINE void finish_streams() {}
#endif

// a b + c, rounded once where the instruction set has that (kFuses): the same numbers wherever it is used, while a
// compiler may round either product of a b + c d.
#if defined(__FMA__) || defined(__aarch64__)
constexpr bool kFuses = true;
#else
constexpr bool kFuses = false;
#endif
#if defined(__AVX512F__)
RAYFIN_INLINE Vec multiply_add(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
#elif defined(__AVX2__)
RAYFIN_INLINE Vec multiply_add(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
#elif defined(__FMA__)
RAYFIN_INLINE Vec multiply_add(Vec a, Vec b, Vec c) {
  return bit_cast<Vec>(_mm_fmadd_ps(bit_cast<__m128>(a), bit_cast<__m128>(b), bit_cast<__m128>(c)));
}
#elif defined(__aarch64__)
RAYFIN_INLINE Vec multiply_add(Vec a, Vec b, Vec c) {
  return bit_cast<Vec>(vfmaq_f32(bit_cast<float32x4_t>(c), bit_cast<float32x4_t>(a), bit_cast<float32x4_t>(b)));
}
#else
RAYFIN_INLINE Vec multiply_add(Vec a, Vec b, Vec c) { return a * b + c; }
#endif

// Loads the first `count` lanes of p and 0 in the others; reads nothing past them.
template <class T>
RAYFIN_INLINE Vec load_some(const T* p, int count) {
  float lanes[kWidth] = {};
  for (int i = 0; i < count; ++i) lanes[i] = widen(p[i]);
  return load(lanes);
}

RAYFIN_INLINE void store_some(float* p, Vec v, int count) {
  float lanes[kWidth];
  store(lanes, v);
  for (int i = 0; i < count; ++i) p[i] = lanes[i];
}

// Loads one depth step of a packed panel, two vectors of weights. 16-bit weights lie as pairs (output i,
// output i + kWidth) in 32 bits, so that a shift and a mask widen both.
RAYFIN_INLINE void load_panel(const float* p, Vec& low, Vec& high) {
  low = load(p);
  high = load(p + kWidth);
}

RAYFIN_INLINE void load_panel(const BFloat16* p, Vec& low, Vec& high) {
  VecU pairs;
  std::memcpy(&pairs, p, sizeof(pairs));
  low = bit_cast<Vec>(pairs << 16);
  high = bit_cast<Vec>(pairs & 0xffff0000u);
}

// Loads `count` weights of a partial panel and then zeros; reads nothing past them.
template <class T>
RAYFIN_INLINE void load_panel_some(const T* p, int count, Vec& low, Vec& high) {
  T lanes[kPanel] = {};
  std::memcpy(lanes, p, size_t(count) * sizeof(T));
  load_panel(lanes, low, high);
}

// The position at which load_panel puts the i-th element that it reads.
template <class T>
RAYFIN_INLINE int64_t panel_place(int64_t i) {
  return sizeof(T) == sizeof(float) ? i : (i & -int64_t(kPanel)) + i % 2 * kWidth + i % kPanel / 2;
}

// Returns b if one is NaN. One instruction; GCC 12 sometimes emits a comparison and a blend for the generic code.
#if defined(__AVX512F__)
RAYFIN_INLINE Vec max(Vec a, Vec b) { return _mm512_maskz_max_ps(0xffff, a, b); }
RAYFIN_INLINE Vec min(Vec a, Vec b) { return _mm512_maskz_min_ps(0xffff, a, b); }
#elif defined(__AVX2__)
RAYFIN_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
RAYFIN_INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
#else
RAYFIN_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
RAYFIN_INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }
#endif

RAYFIN_INLINE Vec4 fold(Vec v) {  // adds halves until four lanes are left
#if defined(__AVX512F__)
  Vec8 half = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
              __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  return __builtin_shufflevector(half, half, 0, 1, 2, 3) + __builtin_shufflevector(half, half, 4, 5, 6, 7);
#elif defined(__AVX2__)
  return __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
#else
  return v;
#endif
}

RAYFIN_INLINE float sum(Vec v) {
  Vec4 f = fold(v);
  return (f[0] + f[2]) + (f[1] + f[3]);
}

// The sums of four vectors.
RAYFIN_INLINE Vec4 sums(Vec a, Vec b, Vec c, Vec d) {
  Vec4 fa = fold(a), fb = fold(b), fc = fold(c), fd = fold(d);
  Vec4 ab = __builtin_shufflevector(fa, fb, 0, 4, 1, 5) + __builtin_shufflevector(fa, fb, 2, 6, 3, 7);
  Vec4 cd = __builtin_shufflevector(fc, fd, 0, 4, 1, 5) + __builtin_shufflevector(fc, fd, 2, 6, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

RAYFIN_INLINE float maximum(Vec v) {
#if defined(__AVX512F__)
  Vec8 low = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7);
  Vec8 high = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  Vec8 half = low > high ? low : high;
  Vec4 a = __builtin_shufflevector(half, half, 0, 1, 2, 3), b = __builtin_shufflevector(half, half, 4, 5, 6, 7);
#elif defined(__AVX2__)
  Vec4 a = __builtin_shufflevector(v, v, 0, 1, 2, 3), b = __builtin_shufflevector(v, v, 4, 5, 6, 7);
#else
  Vec4 a = v, b = v;
#endif
  Vec4 four = a > b ? a : b;
  float left = four[0] > four[2] ? four[0] : four[2], right = four[1] > four[3] ? four[1] : four[3];
  return left > right ? left : right;
}

}  // namespace rayfin
