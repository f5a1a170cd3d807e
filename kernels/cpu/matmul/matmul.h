// y = x W^T for a packed weight; the epilogue runs while the sums are in cache.
#pragma once

#include "matmul/matrix.h"
#include "common/pool.h"

namespace rayfin {

// gpt-oss' gated activation: (1 + up) * gate * sigmoid(slope * gate), the gate at most `limit`, up within +-`limit`.
struct ClampedSwish {
  float slope = 1.0f, limit = 0.0f;
};

// y = residual + alpha * (x W^T + before + bias), or for a paired matrix act(gate) * up with both inside.
struct Epilogue {
  const float* before = nullptr;    // [M, outputs], the halves of a paired matrix one after the other
  int64_t before_stride = 0;
  const float* bias = nullptr;      // [outputs]
  const float* residual = nullptr;  // [M, outputs], may be y itself
  int64_t residual_stride = 0;
  float alpha = 1.0f;
  int activation = 0;  // Activation in vmath.h
  ClampedSwish clamped;  // of kClampedSwish

  // That of the rows from `row` on.
  Epilogue from(int64_t row) const {
    Epilogue rest = *this;
    if (before) rest.before += row * before_stride;
    if (residual) rest.residual += row * residual_stride;
    return rest;
  }

  // That of the outputs from `column` on of a matrix that is not paired.
  Epilogue from_column(int64_t column) const {
    Epilogue rest = *this;
    if (before) rest.before += column;
    if (bias) rest.bias += column;
    if (residual) rest.residual += column;
    return rest;
  }
};

// x [M, inputs] and y [M, outputs] (outputs / 2 if paired), rows `x_stride`, `y_stride` apart.
//
// Each output is one chain of FMAs in the order of its inputs for any M, so a row's result does not depend on the
// other rows. The same holds for 8-bit weights (matmul_rounded.h) and on AMX tiles.
void matmul(Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t rows, float* y,
            int64_t y_stride, const Epilogue& epilogue);

#if defined(__AMX_TILE__)
// The same for 16-bit and fp32 weights (matmul_amx.cpp, matmul_amx_float.cpp); rows > 0.
void matmul_tiles(Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t rows, float* y,
                  int64_t y_stride, const Epilogue& epilogue);
#endif

}  // namespace rayfin
