// The matmul of an 8-bit weight: 8-bit rows, sums in int32, results in fp32.
//
// Each row of x gets a scale of its own, its largest value over 127, as each output of the weight has one
// ("dynamic W8A8"; the scales of LLM.int8(), Dettmers et al., 2022, without its outliers). Sums are exact for
// up to 133,000 inputs: every instruction set gives the same ones.
#pragma once

#include "matmul.h"

namespace rayfin {

// What `count` values are divided by to be integers from -127 to 127, and its reciprocal; of a row of zeros
// and what is next to nothing, 0 and 0. Not finite if a value is not.
struct Int8Scale {
  float scale, inverse;
};
Int8Scale int8_scale(const float* x, int64_t count);

// Whether this machine multiplies four pairs of bytes and adds them in one instruction of this library's width.
bool has_vnni();

// As matmul, for a weight stored as kInt8.
void matmul_int8(Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t rows, float* y,
                 int64_t y_stride, const Epilogue& epilogue);

}  // namespace rayfin
