// Registers 0 .. 3 hold a block's sums: two columns of 16 outputs for each of one or two panels.
#pragma once

#include "amx/amx_rows.h"

#if defined(__AMX_TILE__)

namespace rayfin {

template <int kColumn>
RAYFIN_INLINE void start_column(const float* out, bool resume) {
  if (resume) {
    load_tile<kColumn>(out + kColumn * kWidth, kWide * sizeof(float));
  } else {
    zero_tile<kColumn>();
  }
}

template <int kColumn>
RAYFIN_INLINE void keep_column(float* out) {
  store_tile<kColumn>(out + kColumn * kWidth, kWide * sizeof(float));
}

// Starts from zero, or from out [per_block][kWide] if `resume`.
template <int kPanels>
RAYFIN_INLINE void start_sums(const float* out, bool resume) {
  start_column<0>(out, resume);
  start_column<1>(out, resume);
  if constexpr (kPanels == 2) {
    start_column<2>(out, resume);
    start_column<3>(out, resume);
  }
}

template <int kPanels>
RAYFIN_INLINE void keep_sums(float* out) {
  keep_column<0>(out);
  keep_column<1>(out);
  if constexpr (kPanels == 2) {
    keep_column<2>(out);
    keep_column<3>(out);
  }
}

// Loads a step's parts of x into registers 4, 5 and 6.
template <int64_t kCount = kParts>
RAYFIN_INLINE void load_parts(const BFloat16* x, int64_t part_size) {
  if constexpr (kCount == kParts) {
    load_tile<6>(x + 2 * part_size, kRegisterBytes);
    load_tile<5>(x + part_size, kRegisterBytes);
  }
  load_tile<4>(x, kRegisterBytes);
}

}  // namespace rayfin

#endif
