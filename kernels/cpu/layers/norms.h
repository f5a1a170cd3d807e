// RMS norms.
#pragma once

#include "common/pool.h"
#include "common/vmath.h"

namespace rayfin {

// y = residual + alpha * x / sqrt(mean(x^2) + eps) * weight for each row; residual may be null or y itself,
// y may be x.
void rms_norm(Pool& pool, const float* x, int64_t x_stride, int64_t rows, int64_t dim, const float* weight, float eps,
              const float* residual, int64_t residual_stride, float alpha, float* y, int64_t y_stride);

// rms_norm of one row.
inline void norm_row(const float* x, int64_t dim, const float* weight, float eps, const float* residual, float alpha,
                     float* y) {
  Vec squares{};
  int64_t i = 0;
  for (; i + kWidth <= dim; i += kWidth) {
    const Vec v = load(x + i);
    squares += v * v;
  }
  float total = sum(squares);
  for (; i < dim; ++i) total += x[i] * x[i];
  const float factor = alpha / __builtin_sqrtf(total / float(dim) + eps);
  for (i = 0; i + kWidth <= dim; i += kWidth) {
    Vec v = load(x + i) * factor * load(weight + i);
    if (residual) v += load(residual + i);
    store(y + i, v);
  }
  for (; i < dim; ++i) y[i] = (residual ? residual[i] : 0.0f) + x[i] * factor * weight[i];
}

}  // namespace rayfin
