// Rows rounded to 8 bits times codes in groups (rounded_tile.h) on AMX tiles: the same integers, which the same FMAs scale
// and add, so the same bits. A product takes 16 rows times 16 outputs of one part.
#pragma once

#if defined(__AMX_TILE__)

#include "amx/amx.h"
#include "matmul/rounded_tile.h"

namespace rayfin {

// Registers 0 .. 3 hold sums of two parts, 4 and 5 their rows of x, 6 and 7 weights.
class PartShapes : TileShapes {
 public:
  PartShapes() : TileShapes({16, 16, 16, 16, 16, 16, kByteWords, kByteWords}, {64, 64, 64, 64, kPart, kPart, 64, 64}) {}
};

// The products of 16 rows and a panel's part, in registers kSums and kSums + 1, to sums [16][kPanel].
template <int kSums, int kRows>
RAYFIN_INLINE void multiply_part(const char* x, int64_t stride, int32_t* sums) {
  load_tile<kRows>(x, stride);
  zero_tile<kSums>();
  zero_tile<kSums + 1>();
  multiply_int8<kSums, kRows, 6>();
  multiply_int8<kSums + 1, kRows, 7>();
  store_tile<kSums>(sums, kPanel * sizeof(int32_t));
  store_tile<kSums + 1>(sums + kWidth, kPanel * sizeof(int32_t));
}

// out[m] = x[m] . panel, of `rows` rows; `bytes` are its weights. Rows of x are read up to a multiple of 16. The sums of
// a part are scaled while tiles multiply the next one.
template <class Code, bool kZeros>
void multiply_parts(const Matrix& weight, const int32_t* bytes, const WideFloats& scales, const WideFloats& leasts,
                    const int16_t* zeros, const RoundedRows& x, int64_t rows, float* out) {
  const int64_t each = parts_of(weight.groups), steps = group_steps(weight.storage, weight.groups);
  alignas(64) int32_t sums[2][kRegisterRows * kPanel];
  std::fill_n(out, rows * kPanel, 0.0f);
  for (int64_t row = 0; row < rows; row += kRegisterRows) {
    const RoundedRows some = x.from(row);
    const int64_t count = std::min<int64_t>(kRegisterRows, rows - row);
    const auto multiply = [&](int64_t part) RAYFIN_LAMBDA {
      const int32_t* weights = bytes + part * kByteWords * kPanel;
      const char* steps_at = some.values + part / each * steps + part % each * kPart;
      load_tile<6>(weights, kPanel * sizeof(int32_t));
      load_tile<7>(weights + kWidth, kPanel * sizeof(int32_t));
      if (part % 2) {
        multiply_part<0, 4>(steps_at, some.stride, sums[1]);
      } else {
        multiply_part<2, 5>(steps_at, some.stride, sums[0]);
      }
    };
    multiply(0);
    for (int64_t part = 0; part < x.parts; ++part) {
      if (part + 1 < x.parts) multiply(part + 1);
      const int64_t g = part / each;
      const auto factors_of = [&](int v) RAYFIN_LAMBDA {
        return PartFactors<kZeros, Code::kLevels>(scales.at(g, v), Code::kLevels ? leasts.at(g, v) : Vec{},
                                                  kZeros ? zeros + g * kPanel + v * kWidth : nullptr);
      };
      const PartFactors<kZeros, Code::kLevels> factors[2] = {factors_of(0), factors_of(1)};
#pragma GCC unroll 4
      for (int64_t m = 0; m < count; ++m) {
        const int64_t at = m * x.parts + part;
        float* total = out + (row + m) * kPanel;
        const int32_t* dot = sums[part % 2] + m * kPanel;
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v)
          store(total + v * kWidth, factors[v].add(load(total + v * kWidth), load_int(dot + v * kWidth) + kStart,
                                                   some.sums[at], some.scales[at]));
      }
    }
  }
}

}  // namespace rayfin

#endif
