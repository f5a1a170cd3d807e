// A linear layer's weight [outputs, inputs], packed once for the matmul that reads it.
//
// Outputs are cut into panels of kPanel; a panel holds, for each input, the weights of its outputs
// side by side, so that one step along the depth is two vector loads and a panel is one straight
// stream. A paired matrix holds two halves of a merged weight (gate, up): a panel's first vector is
// of the gate, its second of the up projection, and the product of both is made in registers.
#pragma once

#include "memory.h"
#include "simd.h"

namespace rayfin {

enum Storage { kFloat32 = 0, kBFloat16 = 1 };

class Matrix {
 public:
  Matrix(int64_t outputs, int64_t inputs, Storage storage, bool paired);

  // Outputs first .. first + count - 1 from the rows of `weights`, `stride` elements apart.
  template <class T>
  void fill(int64_t first, int64_t count, const T* weights, int64_t stride);

  // The weights of one output, as they are stored.
  void read_row(int64_t output, float* weights) const;

  template <class T>
  const T* panel(int64_t index) const {
    return data_.as<T>() + index * panel_size();
  }
  int64_t panel_size() const { return inputs * kPanel; }

  const int64_t outputs, inputs;
  const Storage storage;
  const bool paired;
  const int64_t panels;

 private:
  struct Place {
    int64_t panel;
    int lane;
  };
  Place place(int64_t output) const;

  Buffer data_;
};

}  // namespace rayfin
