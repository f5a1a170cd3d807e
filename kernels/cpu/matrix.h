// A linear layer's weight [outputs, inputs], packed once for the matmul that reads it.
//
// Outputs are cut into panels of kPanel; a panel holds, for each input, the weights of its outputs
// side by side, so that one step along the depth is two vector loads and a panel is one straight
// stream. A paired matrix holds two halves of a merged weight (gate, up): a panel's first vector is
// of the gate, its second of the up projection, and the product of both is made in registers.
//
// With AMX a panel of 16-bit or fp32 weights is cut along its depth into steps of kStep inputs, filled up with zeros,
// and a step into two tiles of 16 outputs. A row of a tile is a pair of inputs of each output: side by side if of 16
// bits, as amx.h wants them, and the even inputs before the odd ones if of 32.
//
// 8-bit weights are integers from -127 to 127 times a scale of their output. Four depth steps of an output lie
// side by side in 32 bits, and the depth is filled up with zeros to whole cache lines of a row.
#pragma once

#include "memory.h"
#include "simd.h"

namespace rayfin {

constexpr int64_t kStep = 32;

enum Storage { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2 };

class Matrix {
 public:
  Matrix(int64_t outputs, int64_t inputs, Storage storage, bool paired);

  // Outputs first .. first + count - 1 from the rows of `weights`, `stride` elements apart.
  template <class T>
  void fill(int64_t first, int64_t count, const T* weights, int64_t stride);

  // The weights of one output, as they are stored, times its scale if there is one.
  void read_row(int64_t output, float* weights) const;

  template <class T>
  const T* panel(int64_t index) const {
    return data_.as<T>() + index * panel_size();
  }
  int64_t panel_size() const { return depth * kPanel; }

  // Of 8-bit weights, for each output in the order of the panels: its scale, and 128 times the sum of its weights.
  const float* scales() const { return scales_.as<float>(); }
  const int32_t* offsets() const { return offsets_.as<int32_t>(); }

  const int64_t outputs, inputs;
  const int64_t depth;  // inputs, filled up where the storage wants it
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
