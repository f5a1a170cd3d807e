// Weights of codes: filled from a checkpoint, copied, and read back.
#include <algorithm>
#include <vector>

#include "matmul/codes.h"
#include "matmul/matrix.h"

namespace rayfin {

namespace {

int shift_of(Storage storage, int64_t step) {
  return codes_in_word(storage) == 8 ? Nibbles::shift_of(int(step)) : Bytes::shift_of(int(step));
}

float number_of(Storage storage, const float* table, int32_t word, int shift) {
  const VecI words = VecI{} + word;
  switch (storage) {
    case kInt4:
      return Int4().widen(words, shift)[0];
    case kTable4:
      return table[uint32_t(word) >> shift & 15];
    case kFp4:
      return kE2m1[uint32_t(word) >> shift & 15];
    case kLevels4:
      return float(uint32_t(word) >> shift & 15);
    case kLevels8:
      return float(uint32_t(word) >> shift & 255);
    case kFp8:
      return Fp8().widen(words, shift)[0] * Fp8::kFactor;
    default:
      return Int8().widen(words, shift)[0];
  }
}

}  // namespace

int32_t& Matrix::word_at(Place at, int64_t group, int64_t word) const {
  return data_.as<int32_t>()[at.panel * panel_words() + (group * groups.words + word) * kPanel + at.lane];
}

int64_t Matrix::group_at(Place at, int64_t group) const { return (at.panel * groups.count + group) * kPanel + at.lane; }

float Matrix::scale_at(int64_t group) const {
  return storage == kFp4 ? bit_cast<float>(uint32_t(scales<uint8_t>()[group]) << 23) : scales()[group];
}

void Matrix::set_scale(int64_t group, float scale) {
  if (storage == kFp4) {
    scales_.as<uint8_t>()[group] = uint8_t(bit_cast<uint32_t>(scale) >> 23);
  } else {
    scales_.as<float>()[group] = scale;
  }
}

void Matrix::copy_zero(int64_t group, const void* zeros, int64_t from) {
  if (has_levels(storage)) {
    zeros_.as<float>()[group] = static_cast<const float*>(zeros)[from];
  } else {
    zeros_.as<int16_t>()[group] = static_cast<const int16_t*>(zeros)[from];
  }
}

void Matrix::fill_codes(int64_t first, int64_t count, const uint8_t* codes, const float* scales, const void* zeros) {
  const int64_t each = codes_in_word(storage);
  for (int64_t i = 0; i < count; ++i) {
    const Place at = place(first + i);
    for (int64_t g = 0; g < groups.count; ++g) {
      set_scale(group_at(at, g), scales[i * groups.count + g]);
      if (zeros) copy_zero(group_at(at, g), zeros, i * groups.count + g);
      const uint8_t* from = codes + i * inputs + g * groups.size;
      const int64_t size = std::min(groups.size, inputs - g * groups.size);
      for (int64_t k = 0; k < size; k += each) {
        uint32_t word = 0;
        for (int64_t step = 0; step < std::min(each, size - k); ++step)
          word |= uint32_t(from[k + step]) << shift_of(storage, step);
        word_at(at, g, k / each) = int32_t(word);
      }
    }
  }
}

void Matrix::copy_codes(int64_t first, const Matrix& from, int64_t start, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const Place to = place(first + i), source = from.place(start + i);
    for (int64_t g = 0; g < groups.count; ++g) {
      set_scale(group_at(to, g), from.scale_at(from.group_at(source, g)));
      if (zeros() && from.zeros()) copy_zero(group_at(to, g), from.zeros(), from.group_at(source, g));
      for (int64_t word = 0; word < groups.words; ++word) word_at(to, g, word) = from.word_at(source, g, word);
    }
  }
}

void Matrix::set_order(const int32_t* order) {
  order_ = Buffer(size_t(inputs) * sizeof(int32_t));
  std::copy_n(order, inputs, order_.as<int32_t>());
}

void Matrix::set_table(const float* table) { std::copy_n(table, 16, table_); }

void Matrix::read_codes(Place at, float* weights) const {
  const int64_t each = codes_in_word(storage);
  for (int64_t k = 0; k < inputs; ++k) {
    const int64_t g = k / groups.size, inside = k - g * groups.size;
    float number = number_of(storage, table_, word_at(at, g, inside / each), shift_of(storage, inside % each));
    if (!has_levels(storage) && zeros()) number -= float(zeros()[group_at(at, g)]);
    float weight = number * scale_at(group_at(at, g));
    if (has_levels(storage)) weight += zeros<float>()[group_at(at, g)];
    weights[order() ? order()[k] : k] = weight;
  }
}

}  // namespace rayfin
