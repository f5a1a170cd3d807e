#include "matmul/round_int4.h"

#include <algorithm>
#include <cmath>

#include "common/simd.h"

namespace rayfin {

namespace {

constexpr float kFactors[] = {1.0f, 1.0625f, 0.9375f, 0.875f, 0.8125f, 0.75f};  // of the scale; the first of equals wins

float code_of(float weight, float inverse) {
  return std::clamp(__builtin_rintf(weight * inverse), -8.0f, 7.0f);
}

float error_of(const float* weights, int64_t count, float scale) {
  const float inverse = 1.0f / scale;
  float lanes[kWidth] = {};
  for (int64_t k = 0; k < count; ++k) {
    const float difference = weights[k] - code_of(weights[k], inverse) * scale;
    lanes[k % kWidth] += difference * difference;
  }
  float total = 0.0f;
  for (float lane : lanes) total += lane;
  return total;
}

float scale_of(const float* weights, int64_t count) {
  float peak = 0.0f;
  for (int64_t k = 0; k < count; ++k)
    if (std::fabs(weights[k]) > std::fabs(peak)) peak = weights[k];
  if (!(std::fabs(peak) >= 1e-30f)) return 0.0f;
  float best = 0.0f, least = INFINITY;
  for (float factor : kFactors) {
    const float scale = peak / -8.0f * factor, error = error_of(weights, count, scale);
    if (error < least) best = scale, least = error;
  }
  return best;
}

}  // namespace

void round_int4(Pool& pool, const float* weights, int64_t outputs, int64_t inputs, int64_t group, uint8_t* codes,
                float* scales) {
  const int64_t groups = (inputs + group - 1) / group;
  pool.run(outputs, [&](int64_t output, int) {
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t start = output * inputs + g * group, count = std::min(group, inputs - g * group);
      const float scale = scale_of(weights + start, count);
      scales[output * groups + g] = scale;
      const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
      for (int64_t k = 0; k < count; ++k) codes[start + k] = uint8_t(int(code_of(weights[start + k], inverse)) + 8);
    }
  });
}

}  // namespace rayfin
