// Weights of codes: filled from a checkpoint, copied, and read back.
#include <algorithm>
#include <vector>

#include "matmul/codes.h"
#include "matmul/matrix.h"

namespace rayfin {

namespace {

// Where some bits of a code lie: `low` ones of a code, the others above them.
struct Bits {
  int64_t word;
  int shift, count, low;
};

// Calls f for the bits of the code of a depth step in a group.
template <class F>
void for_bits(Storage storage, int64_t k, const F& f) {
  if (has_six_bits(storage)) {
    const int64_t first = k / 16 * 3, step = k % 16;
    f(Bits{first + step / 8, Nibbles::shift_of(int(step % 8)), 4, 0});
    f(Bits{first + 2, int(8 * (step % 4) + 2 * (step / 4)), 2, 4});
  } else if (words_of(storage).steps / words_of(storage).count == 8) {
    f(Bits{k / 8, Nibbles::shift_of(int(k % 8)), 4, 0});
  } else {
    f(Bits{k / 4, Bytes::shift_of(int(k % 4)), 8, 0});
  }
}

float number_of(Storage storage, const float* table, int code) {
  switch (storage) {
    case kInt4:
      return float(code - 8);
    case kInt6:
      return float(code - 32);
    case kTable4:
      return table[code];
    case kFp4:
      return kE2m1[code];
    case kFp8:
      return Fp8().widen(VecI{} + code, 0)[0] * Fp8::kFactor;
    case kCodes8:
      return float(int8_t(code));
    default:
      return float(code);
  }
}

}  // namespace

int32_t& Matrix::word_at(Place at, int64_t group, int64_t word) const {
  return data_.as<int32_t>()[at.panel * panel_words() + (group * groups.words + word) * kPanel + at.lane];
}

int64_t Matrix::group_at(Place at, int64_t group) const { return (at.panel * groups.count + group) * kPanel + at.lane; }

int64_t Matrix::scale_size() const {
  if (storage == kFp4 || shared.factors) return 1;
  return shared.span ? sizeof(uint16_t) : sizeof(float);
}

int64_t Matrix::zero_size() const {
  if (!has_levels(storage)) return sizeof(int16_t);
  return shared.factors ? 1 : shared.span ? sizeof(uint16_t) : sizeof(float);
}

uint16_t* Matrix::half_at(Place at, int64_t super, bool least) const {
  return const_cast<uint16_t*>(halves(at.panel, least)) + super * kPanel + at.lane;
}

// A scale, or the least number of levels.
float Matrix::scale_at(Place at, int64_t group, bool least) const {
  const int64_t index = group_at(at, group);
  const Buffer& stored = least ? zeros_ : scales_;
  if (storage == kFp4) return bit_cast<float>(uint32_t(stored.as<uint8_t>()[index]) << 23);
  if (!shared.span) return stored.as<float>()[index];
  const float half = widen_half(*half_at(at, group / shared.span, least));
  return shared.factors ? half * float(stored.as<int8_t>()[index]) : half;
}

int Matrix::code_at(Place at, int64_t group, int64_t step) const {
  uint32_t code = 0;
  for_bits(storage, step, [&](Bits bits) {
    code |= (uint32_t(word_at(at, group, bits.word)) >> bits.shift & ((1u << bits.count) - 1)) << bits.low;
  });
  return int(code);
}

void Matrix::fill_words(Place at, const uint8_t* codes) {
  const Words words = words_of(storage);
  for (int64_t g = 0; g < groups.count; ++g) {
    const uint8_t* from = codes + g * groups.size;
    const int64_t size = std::min(groups.size, inputs - g * groups.size);
    for (int64_t word = 0, k = 0; word < groups.words; word += words.count) {
      uint32_t some[3] = {};
      for (const int64_t end = std::min(k + words.steps, size); k < end; ++k) {
        for_bits(storage, k % words.steps, [&](Bits bits) {
          some[bits.word] |= (uint32_t(from[k]) >> bits.low & ((1u << bits.count) - 1)) << bits.shift;
        });
      }
      for (int64_t part = 0; part < words.count; ++part) word_at(at, g, word + part) = int32_t(some[part]);
    }
  }
}

void Matrix::fill_codes(int64_t first, int64_t count, const uint8_t* codes, const float* scales, const void* zeros) {
  for (int64_t i = 0; i < count; ++i) {
    const Place at = place(first + i);
    fill_words(at, codes + i * inputs);
    for (int64_t g = 0; g < groups.count; ++g) {
      const int64_t index = group_at(at, g), from = i * groups.count + g;
      if (storage == kFp4) {
        scales_.as<uint8_t>()[index] = uint8_t(bit_cast<uint32_t>(scales[from]) >> 23);
      } else {
        scales_.as<float>()[index] = scales[from];
      }
      if (zeros)
        std::memcpy(zeros_.as<char>() + index * zero_size(), static_cast<const char*>(zeros) + from * zero_size(),
                    size_t(zero_size()));
    }
  }
}

void Matrix::fill_codes(int64_t first, int64_t count, const uint8_t* codes, SharedFloats scales, SharedFloats leasts) {
  for (int64_t i = 0; i < count; ++i) {
    const Place at = place(first + i);
    fill_words(at, codes + i * inputs);
    for (bool least : {false, true}) {
      const SharedFloats& from = least ? leasts : scales;
      if (!from.halves) continue;
      for (int64_t super = 0; super < supers(); ++super) *half_at(at, super, least) = from.halves[i * supers() + super];
      for (int64_t g = 0; shared.factors && g < groups.count; ++g)
        (least ? zeros_ : scales_).as<int8_t>()[group_at(at, g)] = from.factors[i * groups.count + g];
    }
  }
}

void Matrix::copy_codes(int64_t first, const Matrix& from, int64_t start, int64_t count) {
  const auto copy = [](const Buffer& to, int64_t at, const Buffer& source, int64_t place, int64_t size) {
    std::memcpy(to.as<char>() + at * size, source.as<char>() + place * size, size_t(size));
  };
  const bool both = zeros_.bytes() && from.zeros_.bytes();
  for (int64_t i = 0; i < count; ++i) {
    const Place to = place(first + i), source = from.place(start + i);
    for (int64_t g = 0; g < groups.count; ++g) {
      const int64_t at = group_at(to, g), place = from.group_at(source, g);
      copy(scales_, at, from.scales_, place, scale_size());
      if (both) copy(zeros_, at, from.zeros_, place, zero_size());
      for (int64_t word = 0; word < groups.words; ++word) word_at(to, g, word) = from.word_at(source, g, word);
    }
    for (int64_t super = 0; shared.factors && super < supers(); ++super) {
      *half_at(to, super, false) = *from.half_at(source, super, false);
      if (both) *half_at(to, super, true) = *from.half_at(source, super, true);
    }
  }
}

void Matrix::set_order(const int32_t* order) {
  order_ = Buffer(size_t(inputs) * sizeof(int32_t));
  std::copy_n(order, inputs, order_.as<int32_t>());
}

void Matrix::set_table(const float* table) { std::copy_n(table, 16, table_); }

void Matrix::read_codes(Place at, float* weights) const {
  for (int64_t k = 0; k < inputs; ++k) {
    const int64_t g = k / groups.size;
    float number = number_of(storage, table_, code_at(at, g, k - g * groups.size));
    if (!has_levels(storage) && zeros()) number -= float(zeros()[group_at(at, g)]);
    float weight = number * scale_at(at, g, false);
    if (has_levels(storage)) weight += scale_at(at, g, true);
    weights[order() ? order()[k] : k] = weight;
  }
}

}  // namespace rayfin
