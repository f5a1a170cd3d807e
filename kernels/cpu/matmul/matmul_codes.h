// The matmul of weights of 4 or 8 bits in groups, with rows as they are.
//
// A weight is (number - zero) * scale, or level * scale + least, rounded once as fp32, and each output is one chain of FMAs in the order of its
// inputs. So the result has the bits that the widened weight in fp32 gives (matmul.cpp), for any number of rows.
#pragma once

#include "matmul/matmul.h"

namespace rayfin {

// matmul for a weight stored as codes (has_codes).
void matmul_codes(Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t rows, float* y,
                  int64_t y_stride, const Epilogue& epilogue);

}  // namespace rayfin
