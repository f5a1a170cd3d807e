// Exponentials and activations of vectors.
#pragma once

#include "common/simd.h"

namespace rayfin {

// e^x for x <= 88.37, within a unit in the last place; 0 from -87.3 down (-inf included), NaN stays NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r = 1 + r + r^2 p(r), p fitted for the least relative error (3e-9).
RAYFIN_INLINE Vec exp_in_range(Vec x) {
  const Vec lowest = broadcast(-87.3365447504f);
  const Vec inside = max(lowest, x);
  const Vec magic = broadcast(12583039.0f);  // 1.5 * 2^23 + 127: adding it rounds to an integer, as an exponent
  const Vec shifted = inside * 1.44269504088896341f + magic;
  const Vec n = shifted - magic;
  Vec r = inside - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vec p = broadcast(1.3814540026e-3f);
  p = p * r + 8.3687451126e-3f;
  p = p * r + 4.1668390787e-2f;
  p = p * r + 1.6666520399e-1f;
  p = p * r + 4.9999993432e-1f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const Vec result = p * bit_cast<Vec>(bit_cast<VecU>(shifted) << 23);
  return x < lowest ? Vec{} : result;
}

// e^x of any x; e^88.37 above that.
RAYFIN_INLINE Vec exp(Vec x) { return exp_in_range(min(broadcast(88.3762626647f), x)); }

RAYFIN_INLINE Vec tanh(Vec x) {  // absolute error of 1e-7
  return 1.0f - 2.0f / (exp(x * 2.0f) + 1.0f);
}

RAYFIN_INLINE Vec erf(Vec x) {  // Abramowitz and Stegun 7.1.26, absolute error of 2e-7
  Vec a = x < 0.0f ? -x : x;
  Vec t = 1.0f / (a * 0.3275911f + 1.0f);
  Vec p = broadcast(1.061405429f);
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  Vec y = 1.0f - p * t * exp(-a * a);
  return x < 0.0f ? -y : y;
}

// kClampedSwish is of gated products alone (gated in epilogue.h).
enum Activation { kNone = 0, kSilu = 1, kGeluTanh = 2, kGelu = 3, kClampedSwish = 4 };

RAYFIN_INLINE Vec activate(Vec x, int activation) {
  switch (activation) {
    case kSilu:
      return x / (exp(-x) + 1.0f);
    case kGeluTanh:
      return 0.5f * x * (tanh((x * x * x * 0.044715f + x) * 0.7978845608f) + 1.0f);
    case kGelu:
      return 0.5f * x * (erf(x * 0.70710678118f) + 1.0f);
    default:
      return x;
  }
}

}  // namespace rayfin
