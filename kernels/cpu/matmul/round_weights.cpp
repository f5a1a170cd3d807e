#include "matmul/round_weights.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/simd.h"

namespace rayfin {

namespace {

constexpr int kVectors = int(kRoundedGroup / kWidth);
constexpr float kFactors = 127.0f;  // the largest factor
// Added to the number of steps between a group's least and largest number.
constexpr float kRanges[] = {0.0f, -1.2f, -0.9f, -0.6f, -0.3f, 0.3f, 0.6f, 0.9f};

// A group's numbers, and ones; zeros past the last input.
struct Group {
  Vec x[kVectors], ones[kVectors];
  float count;

  Group(const float* from, int64_t inputs) : count(float(inputs)) {
    float numbers[kRoundedGroup] = {}, there[kRoundedGroup] = {};
    std::copy_n(from, inputs, numbers);
    std::fill_n(there, inputs, 1.0f);
    for (int i = 0; i < kVectors; ++i) x[i] = load(numbers + i * kWidth), ones[i] = load(there + i * kWidth);
  }

  float mean() const {
    Vec total{};
    for (const Vec& numbers : x) total += numbers;
    return sum(total) / count;
  }
};

// A line of levels: scale * level + least.
struct Line {
  float scale = 0.0f, least = 0.0f;
};

// To the nearest integer from 0 to `top`, for magnitudes below 2^22.
RAYFIN_INLINE Vec level(Vec x, float top) {
  constexpr float kWhole = 0x1.8p23f;
  const Vec whole = (x + kWhole) - kWhole;
  return min(max(whole, Vec{}), broadcast(top));
}

float inverse_of(float scale) { return scale == 0.0f ? 0.0f : 1.0f / scale; }

// The line through a group of the least squared error, and the levels on it.
Line line_of(const Group& group, float lowest, float highest, float top) {
  const float range = highest - lowest, mean = group.mean();
  if (!(range > 1e-30f)) return {0.0f, mean};
  Line line;
  float best = -1.0f;
  for (float more : kRanges) {
    const float inverse = (top + more) / range;
    Vec levels{}, squares{}, products{};
    for (int i = 0; i < kVectors; ++i) {
      const Vec some = level((group.x[i] - lowest) * inverse, top) * group.ones[i];
      levels += some;
      squares = multiply_add(some, some, squares);
      products = multiply_add(some, group.x[i] - mean, products);
    }
    const float total = sum(levels), product = sum(products), spread = sum(squares) - total * total / group.count;
    // The line takes product^2 / spread off the squared distances from the mean.
    if (spread <= 0.0f || product * product <= best * spread) continue;
    best = product * product / spread;
    line.scale = product / spread;
    line.least = mean - line.scale * total / group.count;
  }
  return line;
}

// The least number that suits a scale: the mean distance of the numbers from their levels.
float least_of(const Group& group, Line line, float top) {
  const float inverse = inverse_of(line.scale);
  Vec distance{};
  for (int i = 0; i < kVectors; ++i)
    distance += group.x[i] - level((group.x[i] - line.least) * inverse, top) * line.scale * group.ones[i];
  return sum(distance) / group.count;
}

// Rounds numbers to a 16-bit float and a factor each; writes back what these stand for.
void share(float* numbers, int64_t count, uint16_t* half, int8_t* factors) {
  float largest = 0.0f;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(numbers[i]));
  *half = narrow_half(largest / kFactors);
  const float unit = widen_half(*half), inverse = inverse_of(unit);
  for (int64_t i = 0; i < count; ++i) {
    factors[i] = int8_t(std::clamp(__builtin_rintf(numbers[i] * inverse), -kFactors, kFactors));
    numbers[i] = float(factors[i]) * unit;
  }
}

// The groups of an output that share their 16-bit floats.
void round_super(const float* weights, int64_t inputs, float top, uint8_t* codes, uint16_t* scale, int8_t* factors,
                 uint16_t* least, int8_t* least_factors) {
  const int64_t count = (inputs + kRoundedGroup - 1) / kRoundedGroup;
  std::vector<Group> groups;
  std::vector<float> scales, leasts;
  for (int64_t g = 0; g < count; ++g) {
    const float* from = weights + g * kRoundedGroup;
    const int64_t size = std::min(kRoundedGroup, inputs - g * kRoundedGroup);
    const auto ends = std::minmax_element(from, from + size);
    groups.emplace_back(from, size);
    const Line line = line_of(groups.back(), *ends.first, *ends.second, top);
    scales.push_back(line.scale);
    leasts.push_back(line.least);
  }
  share(scales.data(), count, scale, factors);
  for (size_t g = 0; g < groups.size(); ++g) leasts[g] = least_of(groups[g], {scales[g], leasts[g]}, top);
  share(leasts.data(), count, least, least_factors);
  for (int64_t k = 0; k < inputs; ++k) {
    const size_t g = size_t(k / kRoundedGroup);
    const float steps = (weights[k] - leasts[g]) * inverse_of(scales[g]);
    codes[k] = uint8_t(std::max(0.0f, std::min(__builtin_rintf(steps), top)));
  }
}

}  // namespace

void round_int8(Pool& pool, const float* weights, int64_t outputs, int64_t inputs, int8_t* codes, uint16_t* scales) {
  const int64_t groups = (inputs + kRoundedGroup - 1) / kRoundedGroup;
  pool.run(outputs, [&](int64_t output, int) {
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t start = output * inputs + g * kRoundedGroup, size = std::min(kRoundedGroup, inputs - g * kRoundedGroup);
      float largest = 0.0f;
      for (int64_t k = 0; k < size; ++k) largest = std::max(largest, std::fabs(weights[start + k]));
      uint16_t& scale = scales[output * groups + g];
      scale = narrow_half(largest / 127.0f);
      const float inverse = inverse_of(widen_half(scale));
      for (int64_t k = 0; k < size; ++k)
        codes[start + k] = int8_t(std::clamp(__builtin_rintf(weights[start + k] * inverse), -127.0f, 127.0f));
    }
  });
}

void round_levels(Pool& pool, const float* weights, int64_t outputs, int64_t inputs, int top, int64_t span,
                  uint8_t* codes, RoundedScales scales, RoundedScales leasts) {
  const int64_t groups = (inputs + kRoundedGroup - 1) / kRoundedGroup, supers = (groups + span - 1) / span;
  pool.run(outputs, [&](int64_t output, int) {
    for (int64_t super = 0; super < supers; ++super) {
      const int64_t first = super * span * kRoundedGroup, group = output * groups + super * span;
      round_super(weights + output * inputs + first, std::min(span * kRoundedGroup, inputs - first), float(top),
                  codes + output * inputs + first, scales.halves + output * supers + super, scales.factors + group,
                  leasts.halves + output * supers + super, leasts.factors + group);
    }
  });
}

}  // namespace rayfin
