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
// 8-bit weights are integers from -127 to 127 times their output's scale. Four depth steps of an output lie side by
// side in 32 bits, and the depth is padded with zeros to whole cache lines of a row.
#pragma once

#include "common/memory.h"
#include "common/simd.h"

namespace rayfin {

constexpr int64_t kStep = 32;

enum Storage { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2 };

class Matrix {
 public:
  Matrix(int64_t outputs, int64_t inputs, Storage storage, bool paired);

  // Fills outputs first .. first + count - 1 from the rows of `weights`, `stride` elements apart.
  template <class T>
  void fill(int64_t first, int64_t count, const T* weights, int64_t stride);

  // Reads the weights of one output as stored, times its scale if there is one.
  void read_row(int64_t output, float* weights) const;

  template <class T>
  const T* panel(int64_t index) const {
    return data_.as<T>() + index * panel_size();
  }
  int64_t panel_size() const { return depth * kPanel; }

  // For 8-bit weights, in panel order: each output's scale, and 128 times the sum of its weights.
  const float* scales() const { return scales_.as<float>(); }
  const int32_t* offsets() const { return offsets_.as<int32_t>(); }

  const int64_t outputs, inputs;
  const int64_t depth;  // inputs, padded as the storage needs it
  const Storage storage;
  const bool paired;
  const int64_t panels;

 private:
  struct Place {
    int64_t panel;
    int lane;
  };
  Place place(int64_t output) const;
  void fill_int8(Place at, const float* weights);
  int8_t* int8_at(Place at, int64_t k) const;
  float* float_at(Place at, int64_t k) const;
  BFloat16* half_at(Place at, int64_t k) const;

  Buffer data_, scales_, offsets_;
};

}  // namespace rayfin
