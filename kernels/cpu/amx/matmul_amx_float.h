// Multiplies a chunk of rows by panels of fp32 weights on AMX tiles.
#pragma once

#include "amx/amx_rows.h"

#if defined(__AMX_TILE__)

namespace rayfin {

// Elements of `cut` that multiply_float needs for parts of weights.
int64_t float_cut_size();

// `blocks` blocks of split rows x (amx_rows.h) times panels panel .. panel + side - 1, side being 1 or kSide, to
// out [blocks * per_block][kWide]. The registers are configured: 7 has 16 rows, the others per_block.
void multiply_float(const Matrix& weight, int64_t panel, int64_t side, const Rows& rows, const BFloat16* x,
                    int64_t blocks, BFloat16* cut, float* out);

}  // namespace rayfin

#endif
