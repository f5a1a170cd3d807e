// Rounds weights [outputs, inputs] to codes, groups of inputs with 16-bit scales, for products with rounded rows.
#pragma once

#include "common/pool.h"

namespace rayfin {

constexpr int64_t kRoundedGroup = 32;  // inputs

// Codes -127 .. 127, whose largest magnitude in a group is 127, and scales [outputs, groups] (llama.cpp's Q8_0).
void round_int8(Pool& pool, const float* weights, int64_t outputs, int64_t inputs, int8_t* codes, uint16_t* scales);

// Where the scales of levels go, or their least numbers: `span` groups share a 16-bit float [outputs, supers], and each
// has a factor on it [outputs, groups].
struct RoundedScales {
  uint16_t* halves;
  int8_t* factors;
};

// Levels 0 .. top above a least number. Of a few ranges around that of a group's numbers it takes the one whose levels
// lie on the line of the least squared error, and then that line.
void round_levels(Pool& pool, const float* weights, int64_t outputs, int64_t inputs, int top, int64_t span,
                  uint8_t* codes, RoundedScales scales, RoundedScales leasts);

}  // namespace rayfin
