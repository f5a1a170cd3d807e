// Exponentials and what is made of them, a vector at a time.
#pragma once

#include "simd.h"

namespace rayfin {

// e^x within 2 units in the last place; 0 below -87.3 (-inf included), NaN stays NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2, e^r by its series to r^6 (minimax coefficients of Cephes).
RAYFIN_INLINE Vec exp(Vec x) {
  const Vec lowest = broadcast(-87.3365447504f), highest = broadcast(88.3762626647f);
  Vec clamped = x < lowest ? lowest : (x > highest ? highest : x);
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Vec shifted = clamped * 1.44269504088896341f + magic;
  Vec n = shifted - magic;
  Vec r = clamped - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vec p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  VecI exponent = (bit_cast<VecI>(shifted) - bit_cast<VecI>(magic) + 127) << 23;
  Vec result = p * bit_cast<Vec>(exponent);
  return x < lowest ? Vec{} : result;
}

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

enum Activation { kNone = 0, kSilu = 1, kGeluTanh = 2, kGelu = 3 };

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
