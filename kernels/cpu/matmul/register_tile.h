// The inner product: a few rows of x times a panel of weights, all sums in registers.
#pragma once

#include <type_traits>

#include "common/simd.h"

namespace rayfin {

constexpr int kAheadBytes = 2048;
constexpr int kLineBytes = 64;  // bytes of a line of the caches

// Prefetches weights into the second-level cache while a tile is computed: `start` + k * `step` / 16 at step k.
struct Ahead {
  const char* start = nullptr;
  int64_t step = 0;  // sixteenths of a byte for each depth step
};

// sums[m][p * kPanel ..] (+)= x[m] . panel p, over `depth` steps. x[m][k] lies at x + m * x_stride + k;
// panel p starts at `weights` + p * panel_stride. `resume` continues from `out`.
// kStream: the weights come from memory and are used once, so they are prefetched kAheadBytes ahead
// (1 KiB is a sixth slower for four to six rows, more than 2 KiB is no faster).
template <int kM, int kP, bool kStream, bool kFetch, class Weight>
RAYFIN_INLINE void register_tile(const float* x, int64_t x_stride, const Weight* weights, int64_t panel_stride,
                                 int64_t depth, float* out, int64_t out_stride, bool resume, Ahead ahead = {}) {
  Vec acc[kM][2 * kP];
  for (int m = 0; m < kM; ++m)
    for (int v = 0; v < 2 * kP; ++v) acc[m][v] = resume ? load(out + m * out_stride + v * kWidth) : Vec{};
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; ++k) {
    Vec w[2 * kP];
#pragma GCC unroll 8
    for (int p = 0; p < kP; ++p) {
      const Weight* at = weights + p * panel_stride + k * kPanel;
      if constexpr (kStream) __builtin_prefetch(reinterpret_cast<const char*>(at) + kAheadBytes / kP, 0, 3);
      load_panel(at, w[2 * p], w[2 * p + 1]);
    }
    if constexpr (kFetch) __builtin_prefetch(ahead.start + ((k * ahead.step) >> 4), 0, 2);
#pragma GCC unroll 16
    for (int m = 0; m < kM; ++m) {
      const Vec a = broadcast(x[m * x_stride + k]);
#pragma GCC unroll 16
      for (int v = 0; v < 2 * kP; ++v) acc[m][v] += a * w[v];
    }
  }
  for (int m = 0; m < kM; ++m)
    for (int v = 0; v < 2 * kP; ++v) store(out + m * out_stride + v * kWidth, acc[m][v]);
}

#if defined(__AVX512F__)
// sum + a b of two depth steps, each a pair of bfloat16. In assembly, because the library is also compiled for machines
// without it (has_bfloat16_dot).
RAYFIN_INLINE Vec add_pairs(Vec sum, VecU a, VecU b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}

// Two depth steps of a panel, as pairs of each output: the first step of `count` has no second one.
RAYFIN_INLINE void load_pairs(const BFloat16* p, bool two, VecU& low, VecU& high) {
  VecU first, second{};
  std::memcpy(&first, p, sizeof(first));
  if (two) std::memcpy(&second, p + kPanel, sizeof(second));
  low = (first & 0xffffu) | second << 16;
  high = first >> 16 | (second & 0xffff0000u);
}

// The same for rows of bfloat16, two depth steps at once: x has a zero behind an odd depth.
template <int kM, int kP, bool kStream, bool kFetch>
RAYFIN_INLINE void register_tile(const BFloat16* x, int64_t x_stride, const BFloat16* weights, int64_t panel_stride,
                                 int64_t depth, float* out, int64_t out_stride, bool resume, Ahead ahead = {}) {
  Vec acc[kM][2 * kP];
  for (int m = 0; m < kM; ++m)
    for (int v = 0; v < 2 * kP; ++v) acc[m][v] = resume ? load(out + m * out_stride + v * kWidth) : Vec{};
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; k += 2) {
    VecU w[2 * kP];
#pragma GCC unroll 8
    for (int p = 0; p < kP; ++p) {
      const BFloat16* at = weights + p * panel_stride + k * kPanel;
      if constexpr (kStream) {
        __builtin_prefetch(reinterpret_cast<const char*>(at) + kAheadBytes / kP, 0, 3);
        __builtin_prefetch(reinterpret_cast<const char*>(at) + kAheadBytes / kP + kLineBytes, 0, 3);
      }
      load_pairs(at, k + 1 < depth, w[2 * p], w[2 * p + 1]);
    }
    if constexpr (kFetch) {
      __builtin_prefetch(ahead.start + ((k * ahead.step) >> 4), 0, 2);
      __builtin_prefetch(ahead.start + (((k + 1) * ahead.step) >> 4), 0, 2);
    }
#pragma GCC unroll 16
    for (int m = 0; m < kM; ++m) {
      uint32_t pair;
      std::memcpy(&pair, x + m * x_stride + k, sizeof(pair));
      const VecU a = pair - VecU{};
#pragma GCC unroll 16
      for (int v = 0; v < 2 * kP; ++v) acc[m][v] = add_pairs(acc[m][v], w[v], a);
    }
  }
  for (int m = 0; m < kM; ++m)
    for (int v = 0; v < 2 * kP; ++v) store(out + m * out_stride + v * kWidth, acc[m][v]);
}
#endif

// Calls f with `rows` (1 .. kRows) as a compile-time constant.
template <class F>
RAYFIN_INLINE void with_rows(int64_t rows, const F& f) {
#define RAYFIN_CASE(M) \
  case M:              \
    if constexpr (M <= kRows) f(std::integral_constant<int, M>()); \
    break;
  switch (rows) {
    RAYFIN_CASE(1)
    RAYFIN_CASE(2)
    RAYFIN_CASE(3)
    RAYFIN_CASE(4)
    RAYFIN_CASE(5)
    RAYFIN_CASE(6)
    RAYFIN_CASE(7)
    RAYFIN_CASE(8)
    RAYFIN_CASE(9)
    RAYFIN_CASE(10)
    RAYFIN_CASE(11)
    RAYFIN_CASE(12)
  }
#undef RAYFIN_CASE
}

// Multiplies `rows` (1 .. kRows) rows by one panel that is already in cache.
template <bool kFetch, class Row, class Weight>
inline void rows_by_panel(int64_t rows, const Row* x, int64_t x_stride, const Weight* weights, int64_t depth,
                          float* out, int64_t out_stride, bool resume, Ahead ahead = {}) {
  with_rows(rows, [&](auto m) {
    register_tile<m.value, 1, false, kFetch>(x, x_stride, weights, 0, depth, out, out_stride, resume, ahead);
  });
}

}  // namespace rayfin
