// One or two rows of x times weights in the AMX layout, by AVX-512: the same bits as the tile product.
//
// So few rows are bound by memory bandwidth. Tiles load a kilobyte at once from one or two places; vectors load from
// four streams, which the hardware prefetches (a tenth more bandwidth).
//
// A tile product sums the even and the odd ones of its 32 inputs separately, from zero, and adds both sums to the
// accumulator (Intel's manual, TDPBF16PS). Products of two bfloat16 are exact, so an FMA rounds as its addition does;
// numbers below 2^-126 count as zeros.
#if defined(__AMX_TILE__)

#include "amx/matmul_amx_few.h"

#include <immintrin.h>

#include <algorithm>
#include <type_traits>

#include "amx/amx_rows.h"
#include "matmul/epilogue.h"
#include "matmul/panel_tiles.h"

namespace rayfin {

namespace {

constexpr int kPairs = kStep / 2;
constexpr int kProducts = 6;  // products of parts, with fp32 weights
constexpr int64_t kAheadBytes = 2048;
constexpr double kTileSeconds = 20e-6, kBytesPerSecond = 12e9;

// Makes numbers below 2^-126 count as zeros, as tiles do, from construction to destruction.
class SmallAsZero {
 public:
  SmallAsZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON | 0x0040); }  // and DAZ
  ~SmallAsZero() { _mm_setcsr(before_); }
  SmallAsZero(const SmallAsZero&) = delete;
  SmallAsZero& operator=(const SmallAsZero&) = delete;

 private:
  const unsigned before_;
};

struct Bits {
  BFloat16 of[kWidth];
};

// Splits x into kCount bfloat16, three of which sum to it (matmul_amx.cpp), each widened: [row][step][part][kStep].
template <int64_t kCount>
void split_rows(const float* x, int64_t x_stride, int64_t rows, int64_t inputs, float* parts) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t k = 0; k < inputs; k += kStep, parts += kCount * kStep) {
      for (int64_t half = 0; half < kStep; half += kWidth) {
        const int64_t left = inputs - k - half;
        Vec rest = left > 0 ? load_part(x + row * x_stride + k + half, left) : Vec{};
        for (int part = 0; part < kCount; ++part) {
          const auto rounded = bit_cast<Bits>(_mm512_cvtneps_pbh(bit_cast<__m512>(rest)));
          const Vec value = load(rounded.of);
          store(parts + part * kStep + half, value);
          rest -= value;
        }
      }
    }
  }
}

// Adds kM rows times the tiles at `weights` + p * panel_size, p < kP, to sums[m][p].
template <int64_t kCount, int kM, int kP>
RAYFIN_INLINE void add_tiles(const float* x, int64_t x_size, const BFloat16* weights, int64_t panel_size,
                             Vec (&sums)[kM][kP]) {
  Vec even[kM][kP][kCount] = {}, odd[kM][kP][kCount] = {};
#pragma GCC unroll 16
  for (int pair = 0; pair < kPairs; ++pair) {
#pragma GCC unroll 4
    for (int p = 0; p < kP; ++p) {
      const BFloat16* at = weights + p * panel_size + pair * kStep;
      __builtin_prefetch(reinterpret_cast<const char*>(at) + kAheadBytes / kP, 0, 3);
      Vec low, high;
      load_panel(at, low, high);
#pragma GCC unroll 2
      for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 3
        for (int part = 0; part < kCount; ++part) {
          const float* two = x + m * x_size + part * kStep + 2 * pair;
          even[m][p][part] += broadcast(two[0]) * low;
          odd[m][p][part] += broadcast(two[1]) * high;
        }
      }
    }
  }
  for (int m = 0; m < kM; ++m)
    for (int p = 0; p < kP; ++p)
      for (int part = kCount - 1; part >= 0; --part) sums[m][p] += even[m][p][part] + odd[m][p][part];
}

// The same with fp32 weights, in the six products of matmul_amx_float.cpp. Their sums fill the registers, so panels
// are multiplied one after the other; prefetches still alternate between them, which is a fifth faster.
template <int64_t, int kM, int kP>
RAYFIN_INLINE void add_tiles(const float* x, int64_t x_size, const float* weights, int64_t panel_size,
                             Vec (&sums)[kM][kP]) {
  for (int p = 0; p < kP; ++p) {
    Vec even[kM][kProducts] = {}, odd[kM][kProducts] = {};
#pragma GCC unroll 4
    for (int pair = 0; pair < kPairs; ++pair) {
      const float* at = weights + p * panel_size + pair * kStep;
      const float* ahead = weights + kTile + pair % kP * panel_size + (p * kPairs + pair) / kP * kStep;
      __builtin_prefetch(ahead, 0, 3);
      __builtin_prefetch(ahead + kWidth, 0, 3);
      Vec e[kParts], o[kParts];
      cut(load(at), e);
      cut(load(at + kWidth), o);
#pragma GCC unroll 2
      for (int m = 0; m < kM; ++m) {
        const float* two = x + m * x_size + 2 * pair;
        int product = 0;
#pragma GCC unroll 3
        for (int part = kParts - 1; part >= 0; --part) {
#pragma GCC unroll 3
          for (int x_part = kParts - 1 - part; x_part >= 0; --x_part, ++product) {
            even[m][product] += broadcast(two[x_part * kStep]) * e[part];
            odd[m][product] += broadcast(two[x_part * kStep + 1]) * o[part];
          }
        }
      }
    }
    for (int m = 0; m < kM; ++m)
      for (int product = 0; product < kProducts; ++product) sums[m][p] += even[m][product] + odd[m][product];
  }
}

// kM rows times panels first .. first + kP - 1: out[m][p][kPanel].
template <int64_t kCount, int kM, int kP, class Weight>
void some_panels(const Matrix& weight, int64_t first, const float* x, float* out) {
  const int64_t steps = weight.depth / kStep, x_size = steps * kCount * kStep;
  const Weight* weights = weight.panel<Weight>(first);
  Vec sums[2][kM][kP] = {};
  for (int64_t step = 0; step < steps; ++step, weights += 2 * kTile, x += kCount * kStep)
    for (int half = 0; half < 2; ++half)
      add_tiles<kCount, kM, kP>(x, x_size, weights + half * kTile, weight.panel_size(), sums[half]);
  for (int m = 0; m < kM; ++m)
    for (int p = 0; p < kP; ++p)
      for (int half = 0; half < 2; ++half) store(out + (m * kP + p) * kPanel + half * kWidth, sums[half][m][p]);
}

template <int64_t kCount, int kM, int kP, class Weight>
void multiply_panels(const Matrix& weight, int64_t panel, int64_t last, const float* x, float* y, int64_t y_stride,
                     const Epilogue& epilogue) {
  alignas(64) float out[kM * kP * kPanel];
  for (; panel + kP <= last; panel += kP) {
    some_panels<kCount, kM, kP, Weight>(weight, panel, x, out);
    for (int p = 0; p < kP; ++p)
      finish_panel(weight, panel + p, out + p * kPanel, kP * kPanel, kM, y, y_stride, epilogue);
  }
  if constexpr (kP > 1) multiply_panels<kCount, kM, kP / 2, Weight>(weight, panel, last, x, y, y_stride, epilogue);
}

template <int64_t kCount, int kM, class Weight>
void multiply(Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, float* y, int64_t y_stride,
              const Epilogue& epilogue) {
  constexpr int kP = sizeof(Weight) == sizeof(float) ? 4 : 4 / kM;
  const double seconds = double(weight.panel_size()) * double(sizeof(Weight)) / kBytesPerSecond;
  const PanelTiles tiles(weight.panels, kP, int64_t(kTileSeconds / seconds) + 1, 1, pool.threads());
  pool.run(tiles.count(), [&](int64_t tile, int thread) {
    const SmallAsZero mode;
    float* parts = pool.scratch<float>(thread, kM * weight.depth * kCount);
    split_rows<kCount>(x, x_stride, kM, weight.inputs, parts);
    multiply_panels<kCount, kM, kP, Weight>(weight, tiles[tile].first, tiles[tile].last, parts, y, y_stride, epilogue);
  });
}

}  // namespace

void matmul_few(Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t rows, float* y,
                int64_t y_stride, const Epilogue& epilogue) {
  const bool whole = weight.storage == kFloat32;
  const auto run = [&](auto m) {
    const auto exact = whole ? multiply<kParts, m.value, float> : multiply<kParts, m.value, BFloat16>;
    const auto product = pool.rounds_rows && !whole ? multiply<1, m.value, BFloat16> : exact;
    product(pool, weight, x, x_stride, y, y_stride, epilogue);
  };
  if (rows == 1) {
    run(std::integral_constant<int, 1>());
  } else {
    run(std::integral_constant<int, 2>());
  }
}

}  // namespace rayfin

#endif
