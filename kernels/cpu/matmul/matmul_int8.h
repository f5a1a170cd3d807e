// The matmul of 8-bit weights: rows are rounded to 8 bits, sums are int32, results fp32.
//
// Each row of x has a scale, its largest magnitude over 127, and so has each output of the weight ("dynamic W8A8"; the
// scales of LLM.int8(), Dettmers et al., 2022, without its outliers). Sums are exact for up to 133,000 inputs, so
// every instruction set gives the same ones.
#pragma once

#include "matmul/matmul.h"

namespace rayfin {

// The scale that maps `count` values to integers from -127 to 127, and its reciprocal. Both are 0 if all values are
// (nearly) zero, and not finite if a value is not.
struct Int8Scale {
  float scale, inverse;
};
Int8Scale int8_scale(const float* x, int64_t count);

// Whether this machine has VNNI (vpdpbusd) at this library's vector width.
bool has_vnni();

// matmul for a weight stored as kInt8.
void matmul_int8(Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t rows, float* y,
                 int64_t y_stride, const Epilogue& epilogue);

}  // namespace rayfin
