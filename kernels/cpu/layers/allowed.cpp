#include "layers/allowed.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "common/simd.h"
#include "layers/highest.h"

namespace rayfin {

namespace {

constexpr int64_t kWord = 32;        // tokens of a word
constexpr int64_t kBlock = 128;      // words whose logits are still in cache when the index is searched
constexpr uint32_t kAll = ~uint32_t(0);
constexpr float kInfinity = std::numeric_limits<float>::infinity();

RAYFIN_INLINE VecU lane_bits() {  // 1 << lane
  VecU bits{};
  for (int lane = 0; lane < kWidth; ++lane) bits[lane] = uint32_t(1) << lane;
  return bits;
}

// x where the lanes' bits of `word` from `first` on are set, else -inf.
RAYFIN_INLINE Vec select(Vec x, uint32_t word, int first, VecU lanes) {
  const VecU set = (VecU{} + (word >> first)) & lanes;
  return set != 0 ? x : broadcast(-kInfinity);
}

// The bits of a word that belong to one of `left` tokens.
uint32_t bits_within(uint32_t word, int64_t left) { return left >= kWord ? word : word & ((uint32_t(1) << left) - 1); }

// The largest allowed value of up to kBlock words, or NaN if one is.
float highest_of(const float* x, const uint32_t* bits, int64_t words, int64_t count) {
  const VecU lanes = lane_bits();
  Vec largest = broadcast(-kInfinity);
  VecI is_nan{};
  float best = -kInfinity;
  for (int64_t w = 0; w < words; ++w) {
    const int64_t left = count - w * kWord;
    uint32_t word = bits_within(bits[w], left);
    if (!word) continue;
    const float* from = x + w * kWord;
    if (left >= kWord) {
      for (int first = 0; first < kWord; first += kWidth) {
        const Vec v = word == kAll ? load(from + first) : select(load(from + first), word, first, lanes);
        largest = v > largest ? v : largest;
        is_nan |= v != v;
      }
      continue;
    }
    for (; word; word &= word - 1) {
      const float value = from[__builtin_ctz(word)];
      if (!(value <= best)) best = value;
      if (std::isnan(best)) return best;
    }
  }
  for (int lane = 0; lane < kWidth; ++lane) {
    if (is_nan[lane]) return std::numeric_limits<float>::quiet_NaN();
    best = std::max(best, largest[lane]);
  }
  return best;
}

// The first allowed index of `value` from the word `start` on, where there is one.
int64_t find(const float* x, const uint32_t* bits, int64_t start, int64_t count, float value) {
  for (int64_t w = start;; ++w) {
    for (uint32_t word = bits_within(bits[w], count - w * kWord); word; word &= word - 1) {
      const int64_t i = w * kWord + __builtin_ctz(word);
      if (x[i] == value) return i;
    }
  }
}

int64_t highest_of_row(const float* x, const uint32_t* bits, int64_t count) {
  const int64_t words = (count + kWord - 1) / kWord;
  float best = -kInfinity;
  int64_t place = 0;
  for (int64_t start = 0; start < words; start += kBlock) {
    const int64_t first = start * kWord;
    const float value = highest_of(x + first, bits + start, std::min(kBlock, words - start), count - first);
    if (value <= best) continue;
    best = value;
    place = start;
    if (!std::isfinite(best)) return -1;
  }
  return std::isfinite(best) ? find(x, bits, place, count, best) : -1;
}

void copy_row(const float* x, const uint32_t* bits, int64_t count, float* y) {
  const VecU lanes = lane_bits();
  int64_t i = 0;
  for (; i + kWord <= count; i += kWord) {
    const uint32_t word = bits[i / kWord];
    for (int first = 0; first < kWord; first += kWidth) {
      store(y + i + first, word ? select(load(x + i + first), word, first, lanes) : broadcast(-kInfinity));
    }
  }
  for (; i < count; ++i) y[i] = bits[i / kWord] >> (i % kWord) & 1 ? x[i] : -kInfinity;
}

}  // namespace

void highest_allowed(Pool& pool, const float* x, int64_t stride, int64_t rows, int64_t count, const Allowed& allowed,
                     int64_t* index) {
  pool.run(rows, [&](int64_t row, int) {
    const uint32_t* bits = allowed.of(row);
    index[row] = bits ? highest_of_row(x + row * stride, bits, count) : highest_of_row(x + row * stride, count);
  });
}

void copy_allowed(Pool& pool, const float* x, int64_t stride, int64_t rows, int64_t count, const Allowed& allowed,
                  float* y) {
  pool.run(rows, [&](int64_t row, int) {
    const uint32_t* bits = allowed.of(row);
    const float* from = x + row * stride;
    if (bits) {
      copy_row(from, bits, count, y + row * count);
    } else {
      std::memcpy(y + row * count, from, size_t(count) * sizeof(float));
    }
  });
}

}  // namespace rayfin
