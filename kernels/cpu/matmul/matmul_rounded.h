// The matmul of codes in groups with rows rounded to 8 bits ("dynamic W8A8").
//
// Each 32 inputs of a row that lie in one group of the weight have a scale, their largest magnitude over 127 (llama.cpp's
// Q8_0). Their products are summed exactly in int32, and these sums in fp32 in their order, for any number of rows.
// Rows of two bytes are two such rows, of the numbers and of what rounding took off them; their sums are added.
#pragma once

#include "matmul/matmul.h"

namespace rayfin {

// Whether this machine has VNNI (vpdpbusd) at this library's vector width.
bool has_vnni();

// matmul for a weight of codes that rounds its rows (Matrix::row_bytes).
void matmul_rounded(Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t rows, float* y,
                    int64_t y_stride, const Epilogue& epilogue);

}  // namespace rayfin
