// Finishes a tile of sums [rows, panels * kPanel] in cache and writes it to y.
#pragma once

#include "matmul/matmul.h"
#include "common/vmath.h"

namespace rayfin {

RAYFIN_INLINE Vec load_part(const float* p, int64_t count) {
  return count >= kWidth ? load(p) : load_some(p, int(count));
}

RAYFIN_INLINE void store_part(float* p, Vec v, int64_t count) {
  if (count >= kWidth) {
    store(p, v);
  } else {
    store_some(p, v, int(count));
  }
}

// act(gate) * up. The clamps leave NaN as it is.
RAYFIN_INLINE Vec gated(Vec gate, Vec up, const Epilogue& epilogue) {
  if (epilogue.activation != kClampedSwish) return activate(gate, epilogue.activation) * up;
  const Vec limit = broadcast(epilogue.clamped.limit), low = min(limit, gate);
  const Vec within = max(-limit, min(limit, up));
  return (within + 1.0f) * (low / (exp(low * -epilogue.clamped.slope) + 1.0f));
}

// Writes one panel's sums [rows, kPanel], rows `stride` apart, to rows of y (which points at the first row).
inline void finish_panel(const Matrix& weight, int64_t panel, const float* panel_sums, int64_t stride, int64_t rows,
                         float* y, int64_t y_stride, const Epilogue& epilogue) {
  if (weight.paired) {
    const int64_t half = weight.outputs / 2, column = panel * kWidth, count = half - column;
    Vec gate_bias{}, up_bias{};
    if (epilogue.bias) {
      gate_bias = load_part(epilogue.bias + column, count);
      up_bias = load_part(epilogue.bias + half + column, count);
    }
    for (int64_t m = 0; m < rows; ++m) {
      Vec gate = load(panel_sums + m * stride), up = load(panel_sums + m * stride + kWidth);
      if (epilogue.before) {
        const float* before = epilogue.before + m * epilogue.before_stride + column;
        gate += load_part(before, count);
        up += load_part(before + half, count);
      }
      gate += gate_bias;
      up += up_bias;
      store_part(y + m * y_stride + column, gated(gate, up, epilogue), count);
    }
    return;
  }
  for (int half = 0; half < 2; ++half) {
    const int64_t column = panel * kPanel + half * kWidth, count = weight.outputs - column;
    if (count <= 0) return;
    const Vec bias = epilogue.bias ? load_part(epilogue.bias + column, count) : Vec{};
    for (int64_t m = 0; m < rows; ++m) {
      Vec value = load(panel_sums + m * stride + half * kWidth);
      if (epilogue.before) value += load_part(epilogue.before + m * epilogue.before_stride + column, count);
      value = activate(value + bias, epilogue.activation) * epilogue.alpha;
      if (epilogue.residual) value += load_part(epilogue.residual + m * epilogue.residual_stride + column, count);
      store_part(y + m * y_stride + column, value, count);
    }
  }
}

}  // namespace rayfin
