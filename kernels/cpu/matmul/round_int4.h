// Rounds weights to 4 bits, groups of inputs with a scale each.
#pragma once

#include "common/pool.h"

namespace rayfin {

// weights [outputs, inputs] -> codes 0 .. 15 for -8 .. 7, and scales [outputs, groups].
//
// The number of largest magnitude becomes -8, so all 16 codes are in use (llama.cpp's Q4_0). Of a few scales around
// that one the group takes the one of the least squared error.
void round_int4(Pool& pool, const float* weights, int64_t outputs, int64_t inputs, int64_t group, uint8_t* codes,
                float* scales);

}  // namespace rayfin
