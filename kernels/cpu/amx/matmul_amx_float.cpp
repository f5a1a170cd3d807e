// fp32 weights are split into three bfloat16, like x, while they are multiplied. Of the nine products of parts the
// three smallest are left out: they are below 2^-24 of the result, which fp32 rounds away as well (oneMKL's
// float_to_bf16x3 does the same). Weights stay fp32 in memory: six bytes instead of four would be slower for few rows,
// which are bound by memory bandwidth.
//
// Vector units split the weights while tile units multiply them: each block of rows splits a share of the next strip.
#if defined(__AMX_TILE__)

#include "amx/matmul_amx_float.h"

#include <algorithm>

#include "amx/amx_sums.h"

namespace rayfin {

namespace {

// Steps of a strip: the parts of two strips (12 KiB a step) stay in the first-level cache (48 KiB). A single block
// keeps its sums in registers and uses short strips, which read memory more evenly.
constexpr int64_t kMaxSteps = 2;
template <bool kAlone>
constexpr int64_t kStripSteps = kAlone ? 1 : kMaxSteps;
// Prefetch distance of weights ahead of the split, in floats.
template <bool kAlone>
constexpr int64_t kAhead = kAlone ? 256 : 2 * kTile * kMaxSteps;
constexpr int64_t kCutTile = kParts * kTile;

// A few steps of one or two panels.
struct Strip {
  const float* weights;
  int64_t panel_size, steps;
  BFloat16* cut;  // parts [step][column][kParts][kTile]

  template <int kColumn>
  RAYFIN_INLINE const float* tile(int64_t step) const {
    return weights + kColumn / 2 * panel_size + (2 * step + kColumn % 2) * kTile;
  }
  template <int kPanels, int kColumn>
  RAYFIN_INLINE BFloat16* parts(int64_t step) const {
    return cut + (step * 2 * kPanels + kColumn) * kCutTile;
  }
};

// The rows of each tile of the next strip that a block splits.
struct Share {
  int64_t first, last;
};

template <bool kAlone>
RAYFIN_INLINE void cut_rows(const float* weights, Share share, BFloat16* out) {
  for (int64_t row = share.first; row < share.last; ++row) {
    const float* at = weights + row * kPanel;
    __builtin_prefetch(at + kAhead<kAlone>, 0, kAlone ? 3 : 2);
    __builtin_prefetch(at + kAhead<kAlone> + kWidth, 0, kAlone ? 3 : 2);
    Vec even[kParts], odd[kParts];
    cut(load(at), even);
    cut(load(at + kWidth), odd);
    for (int64_t part = 0; part < kParts; ++part) {
      const VecU pairs = bit_cast<VecU>(even[part]) >> 16 | bit_cast<VecU>(odd[part]);
      std::memcpy(out + part * kTile + row * kStep, &pairs, sizeof(pairs));
    }
  }
}

// Adds the parts of x times those of a tile of weights to a column's sums, the smallest products first.
template <int kColumn>
RAYFIN_INLINE void multiply_parts(const BFloat16* weights) {
  load_tile<7>(weights + 2 * kTile, kRegisterBytes);
  multiply_bfloat16<kColumn, 4, 7>();
  load_tile<7>(weights + kTile, kRegisterBytes);
  multiply_bfloat16<kColumn, 5, 7>();
  multiply_bfloat16<kColumn, 4, 7>();
  load_tile<7>(weights, kRegisterBytes);
  multiply_bfloat16<kColumn, 6, 7>();
  multiply_bfloat16<kColumn, 5, 7>();
  multiply_bfloat16<kColumn, 4, 7>();
}

template <int kPanels, bool kAlone, int kColumn>
RAYFIN_INLINE void multiply_column(const Strip& strip, const Strip& next, int64_t step, Share share) {
  if (step < next.steps)
    cut_rows<kAlone>(next.tile<kColumn>(step), share, next.parts<kPanels, kColumn>(step));
  multiply_parts<kColumn>(strip.parts<kPanels, kColumn>(step));
}

// Adds a block of x times a strip to the sums, and splits a share of the next strip, which has no more steps.
template <int kPanels, bool kAlone>
void multiply_block(const BFloat16* x, int64_t part_size, const Strip& strip, const Strip& next, Share share) {
  for (int64_t step = 0; step < strip.steps; ++step, x += kParts * part_size) {
    load_parts(x, part_size);
    multiply_column<kPanels, kAlone, 0>(strip, next, step, share);
    multiply_column<kPanels, kAlone, 1>(strip, next, step, share);
    if constexpr (kPanels == 2) {
      multiply_column<kPanels, kAlone, 2>(strip, next, step, share);
      multiply_column<kPanels, kAlone, 3>(strip, next, step, share);
    }
  }
}

template <int kPanels>
void cut_strip(const Strip& strip) {
  const Share whole{0, kRegisterRows};
  for (int64_t step = 0; step < strip.steps; ++step) {
    cut_rows<true>(strip.tile<0>(step), whole, strip.parts<kPanels, 0>(step));
    cut_rows<true>(strip.tile<1>(step), whole, strip.parts<kPanels, 1>(step));
    if constexpr (kPanels == 2) {
      cut_rows<true>(strip.tile<2>(step), whole, strip.parts<kPanels, 2>(step));
      cut_rows<true>(strip.tile<3>(step), whole, strip.parts<kPanels, 3>(step));
    }
  }
}

// kAlone means a single block, whose sums stay in registers from the first strip to the last.
template <int kPanels, bool kAlone>
void multiply_panels(const Matrix& weight, int64_t panel, const Rows& rows, const BFloat16* x, int64_t blocks,
                     BFloat16* cut, float* out) {
  constexpr int64_t kSteps = kStripSteps<kAlone>, kCutStrip = kSteps * 2 * kPanels * kCutTile;
  const float* weights = weight.panel<float>(panel);
  auto strip_at = [&](int64_t step) {
    return Strip{weights + step * 2 * kTile, weight.panel_size(), std::clamp<int64_t>(rows.steps - step, 0, kSteps),
                 cut + step / kSteps % 2 * kCutStrip};
  };
  cut_strip<kPanels>(strip_at(0));
  for (int64_t step = 0; step < rows.steps; step += kSteps) {
    const Strip strip = strip_at(step), next = strip_at(step + kSteps);
    for (int64_t block = 0; block < blocks; ++block) {
      float* sums = out + block * rows.per_block * kWide;
      const Share share{kRegisterRows * block / blocks, kRegisterRows * (block + 1) / blocks};
      if (!kAlone || step == 0) start_sums<kPanels>(sums, step > 0);
      multiply_block<kPanels, kAlone>(x + block * rows.block_size() + step * kParts * rows.part_size(),
                                      rows.part_size(), strip, next, share);
      if (!kAlone || next.steps == 0) keep_sums<kPanels>(sums);
    }
  }
}

}  // namespace

int64_t float_cut_size() { return 2 * kMaxSteps * 2 * kSide * kCutTile; }

void multiply_float(const Matrix& weight, int64_t panel, int64_t side, const Rows& rows, const BFloat16* x,
                    int64_t blocks, BFloat16* cut, float* out) {
  if (blocks == 1) {
    (side == 2 ? multiply_panels<2, true> : multiply_panels<1, true>)(weight, panel, rows, x, blocks, cut, out);
  } else {
    (side == 2 ? multiply_panels<2, false> : multiply_panels<1, false>)(weight, panel, rows, x, blocks, cut, out);
  }
}

}  // namespace rayfin

#endif
