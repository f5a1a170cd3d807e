#include "layers/highest.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/simd.h"

namespace rayfin {

namespace {

constexpr int64_t kBlock = 4096;  // still in cache when the index is searched
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The largest value of a block, or NaN if it holds one.
float highest_of(const float* x, int64_t count) {
  Vec largest = broadcast(-kInfinity);
  VecI is_nan{};
  auto add = [&](Vec v) {
    largest = v > largest ? v : largest;
    is_nan |= v != v;
  };
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) add(load(x + i));
  float best = -kInfinity;
  for (; i < count; ++i) {
    if (!(x[i] <= best)) best = x[i];
    if (std::isnan(best)) return best;
  }
  for (int lane = 0; lane < kWidth; ++lane) {
    if (is_nan[lane]) return std::numeric_limits<float>::quiet_NaN();
    best = std::max(best, largest[lane]);
  }
  return best;
}

}  // namespace

int64_t highest_of_row(const float* x, int64_t count) {
  float best = -kInfinity;
  int64_t place = 0;
  for (int64_t start = 0; start < count; start += kBlock) {
    const float highest = highest_of(x + start, std::min(kBlock, count - start));
    if (highest <= best) continue;
    best = highest;
    place = start;
    if (!std::isfinite(best)) return -1;
  }
  if (!std::isfinite(best)) return -1;
  return std::find(x + place, x + count, best) - x;
}

void highest(Pool& pool, const float* x, int64_t stride, int64_t rows, int64_t count, int64_t* index) {
  pool.run(rows, [&](int64_t row, int) { index[row] = highest_of_row(x + row * stride, count); });
}

}  // namespace rayfin
