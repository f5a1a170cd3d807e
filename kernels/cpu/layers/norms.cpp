#include "layers/norms.h"

#include <algorithm>

namespace rayfin {

namespace {

constexpr int64_t kTileFloats = 16 << 10;  // a few microseconds of work; smaller tiles cost more to hand out

}  // namespace

void rms_norm(Pool& pool, const float* x, int64_t x_stride, int64_t rows, int64_t dim, const float* weight, float eps,
              const float* residual, int64_t residual_stride, float alpha, float* y, int64_t y_stride) {
  const int64_t group = std::max<int64_t>(1, kTileFloats / dim);
  pool.run((rows + group - 1) / group, [&](int64_t tile, int) {
    for (int64_t row = tile * group; row < std::min(rows, (tile + 1) * group); ++row)
      norm_row(x + row * x_stride, dim, weight, eps, residual ? residual + row * residual_stride : nullptr, alpha,
               y + row * y_stride);
  });
}

}  // namespace rayfin
