// A linear layer's weight [outputs, inputs], packed for the matmul.
//
// Outputs are cut into panels of kPanel. For each input a panel holds the weights of its outputs side by side, so one
// depth step is two vector loads and a panel is one contiguous stream. A paired matrix holds the two halves of a merged
// weight (gate, up): a panel's first vector is from the gate, its second from the up projection, and their product is
// computed in registers.
//
// With AMX a panel of 16-bit or fp32 weights is cut along its depth into steps of kStep inputs, padded with zeros, and
// a step into two tiles of 16 outputs. A row of a tile is a pair of inputs of each output: 16-bit pairs lie side by
// side (amx.h), 32-bit ones as all even inputs before all odd ones.
//
// Codes (has_codes) are weights of 4 or 8 bits as a checkpoint has them: groups of inputs share a scale, and perhaps a
// zero point. A 32-bit word holds eight or four depth steps of an output (codes.h), and three words sixteen of 6 bits
// (rounded_tile.h). Each group begins a word. Levels have in place of a zero point the number that code 0 stands for, in
// fp32.
// Scales of e2m1 floats are powers of two, stored as the exponent of a float in a byte (OCP Microscaling, 2023). Scales
// and least numbers may be 16-bit floats, or 8-bit factors on such floats of several groups (SharedScales).
#pragma once

#include "common/memory.h"
#include "common/simd.h"

namespace rayfin {

constexpr int64_t kStep = 32;

// The codes: 0 .. 15 for -8 .. 7, signed bytes, e4m3 floats, 0 .. 15 for the numbers of a table, e2m1 floats, levels
// 0 .. 15 and 0 .. 255 above a least number, and 0 .. 63 for -32 .. 31 or as levels; these two round rows.
enum Storage {
  kFloat32 = 0, kBFloat16 = 1, kInt4 = 3, kCodes8 = 4, kFp8 = 5, kTable4 = 6, kFp4 = 7, kLevels4 = 8,
  kLevels8 = 9, kInt6 = 10, kLevels6 = 11
};

constexpr bool has_codes(Storage storage) { return storage >= kInt4; }
constexpr bool has_levels(Storage storage) {
  return storage == kLevels4 || storage == kLevels8 || storage == kLevels6;
}
constexpr bool has_six_bits(Storage storage) { return storage == kInt6 || storage == kLevels6; }

// The fewest words that are read at once, and the depth steps in them.
struct Words {
  int64_t count, steps;
};
constexpr Words words_of(Storage storage) {
  if (has_six_bits(storage)) return {3, 16};
  if (storage == kCodes8) return {2, 8};
  return storage == kFp8 || storage == kLevels8 ? Words{1, 4} : Words{1, 8};
}

// The groups of a weight's inputs.
struct Groups {
  int64_t size = 0;   // inputs, of the last group perhaps fewer
  int64_t count = 0;
  int64_t words = 0;  // of an output in a group
};

// The depth steps in the words of a group, with those that fill the last one.
constexpr int64_t group_steps(Storage storage, const Groups& groups) {
  return groups.words / words_of(storage).count * words_of(storage).steps;
}

// How scales, and least numbers of levels, are stored: as floats if `span` is 0; else `span` groups, a power of two, share
// a 16-bit float. With `factors` each group has an 8-bit integer that it is multiplied by; without, `span` is 1.
struct SharedScales {
  int64_t span = 0;
  bool factors = false;
};

// What such a weight is filled from: [outputs, supers] and, with factors, [outputs, groups].
struct SharedFloats {
  const uint16_t* halves;
  const int8_t* factors;
};

class Matrix {
 public:
  // `group` inputs share a scale, if the weight is of codes; with `zeros` a zero point too. `parts` [kParts] is the
  // content of another such matrix, which stays where it is.
  Matrix(int64_t outputs, int64_t inputs, Storage storage, bool paired, int64_t group = 0, bool zeros = false,
         void* const* parts = nullptr, SharedScales shared = {});

  // The blocks of memory that hold the weights; `bytes` is 0 for those that the storage has not.
  static constexpr int kParts = 4;
  void parts(void** memory, int64_t* bytes) const;

  // Fills outputs first .. first + count - 1 from the rows of `weights`, `stride` elements apart.
  template <class T>
  void fill(int64_t first, int64_t count, const T* weights, int64_t stride);

  // Fills outputs from codes [count, inputs] (as Storage says), scales and, if not null, zero points [count, groups]: of
  // levels least numbers, which are floats.
  void fill_codes(int64_t first, int64_t count, const uint8_t* codes, const float* scales, const void* zeros);
  // The same with scales, and leasts of levels, as `shared` has them.
  void fill_codes(int64_t first, int64_t count, const uint8_t* codes, SharedFloats scales, SharedFloats leasts);
  // Copies outputs start .. start + count - 1 of a weight of the same storage, inputs and groups to output `first` on.
  void copy_codes(int64_t first, const Matrix& from, int64_t start, int64_t count);
  // The k-th code of an output is that of input order[k]; as many as inputs.
  void set_order(const int32_t* order);
  void set_table(const float* table);  // 16 numbers

  // Reads the weights of one output as stored, times its scale if there is one.
  void read_row(int64_t output, float* weights) const;

  template <class T>
  const T* panel(int64_t index) const {
    return data_.as<T>() + index * panel_size();
  }
  int64_t panel_size() const { return depth * kPanel; }

  // Codes: a panel's words [group][word][kPanel]; its scales and zero points, which may be absent, are [group][kPanel].
  const int32_t* words(int64_t panel) const { return data_.as<int32_t>() + panel * panel_words(); }
  int64_t panel_words() const { return groups.count * groups.words * kPanel; }
  template <class Zero = int16_t>
  const Zero* zeros() const {
    return zeros_.as<Zero>();
  }
  // The 16-bit floats: of leasts where `least`. Those that have factors lie [super][kPanel], scales before leasts.
  const uint16_t* halves(int64_t panel, bool least) const {
    if (!shared.factors) return (least ? zeros_ : scales_).as<uint16_t>() + panel * groups.count * kPanel;
    return halves_.as<uint16_t>() + (panel * (zeros_.bytes() ? 2 : 1) + least) * supers() * kPanel;
  }
  int64_t supers() const { return (groups.count + shared.span - 1) / shared.span; }
  // Halves from a panel to the next one.
  int64_t halves_stride() const { return shared.factors ? supers() * kPanel * (zeros_.bytes() ? 2 : 1) : groups.count * kPanel; }
  const int32_t* order() const { return order_.as<int32_t>(); }
  const float* table() const { return table_; }

  template <class Stored = float>
  const Stored* scales() const {
    return scales_.as<Stored>();
  }

  const int64_t outputs, inputs;
  const int64_t depth;  // inputs, padded as the storage needs it
  const Storage storage;
  const bool paired;
  const int64_t panels;
  const Groups groups;
  const SharedScales shared;
  // Bytes that the numbers of a row of x are rounded to (matmul_rounded.h), 0 for exact ones: 1 or 2 of kInt4, kCodes8,
  // kLevels4, codes of 6 bits, and kTable4 of integers that are signed bytes.
  int row_bytes = 0;

 private:
  struct Place {
    int64_t panel;
    int lane;
  };
  Place place(int64_t output) const;
  float* float_at(Place at, int64_t k) const;
  BFloat16* half_at(Place at, int64_t k) const;

  int32_t& word_at(Place at, int64_t group, int64_t word) const;
  int code_at(Place at, int64_t group, int64_t step) const;
  int64_t group_at(Place at, int64_t group) const;
  // Of a scale, or a zero point or least number, in bytes.
  int64_t scale_size() const;
  int64_t zero_size() const;
  float scale_at(Place at, int64_t group, bool least) const;
  uint16_t* half_at(Place at, int64_t super, bool least) const;
  void fill_words(Place at, const uint8_t* codes);
  void read_codes(Place at, float* weights) const;

  Buffer data_, scales_, halves_, zeros_, order_;
  float table_[16] = {};
};

}  // namespace rayfin
