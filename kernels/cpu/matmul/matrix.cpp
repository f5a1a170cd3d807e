#include "matmul/matrix.h"

#include <algorithm>

namespace rayfin {

namespace {

size_t element_size(Storage storage) { return storage == kFloat32 ? 4 : 2; }

int64_t depth_of(int64_t inputs, Storage storage) {
  if (has_codes(storage)) return inputs;
#if defined(__AMX_TILE__)
  return (inputs + kStep - 1) / kStep * kStep;
#else
  return inputs;
#endif
}

int64_t panels_of(int64_t outputs, bool paired) {
  int64_t columns = paired ? outputs / 2 : outputs;
  int64_t width = paired ? kWidth : kPanel;
  return (columns + width - 1) / width;
}

Groups groups_of(int64_t inputs, Storage storage, int64_t size) {
  if (!has_codes(storage)) return {};
  const Words words = words_of(storage);
  return {size, (inputs + size - 1) / size, (size + words.steps - 1) / words.steps * words.count};
}

#if defined(__AMX_TILE__)
// The row among a panel's tiles that holds depth step k of a lane.
int64_t tile_row(int lane, int64_t k) { return (k / kStep * 2 + lane / kWidth) * (kStep / 2) + k % kStep / 2; }
#endif

}  // namespace

Matrix::Matrix(int64_t outputs, int64_t inputs, Storage storage, bool paired, int64_t group, bool zeros,
               void* const* parts, SharedScales shared)
    : outputs(outputs),
      inputs(inputs),
      depth(depth_of(inputs, storage)),
      storage(storage),
      paired(paired),
      panels(panels_of(outputs, paired)),
      groups(groups_of(inputs, storage, group)),
      shared(shared) {
  auto block = [parts](int part, int64_t count, size_t size) {
    const size_t bytes = size_t(count) * size;
    return parts ? Buffer(parts[part], bytes) : Buffer::of_weight(bytes);
  };
  if (has_codes(storage)) {
    data_ = block(0, panels * panel_words(), sizeof(int32_t));
    scales_ = block(1, panels * groups.count * kPanel, size_t(scale_size()));
    if (zeros) zeros_ = block(3, panels * groups.count * kPanel, size_t(zero_size()));
    if (shared.factors) halves_ = block(2, panels * halves_stride(), sizeof(uint16_t));
    return;
  }
  data_ = block(0, panels * panel_size(), element_size(storage));
}

void Matrix::parts(void** memory, int64_t* bytes) const {
  const Buffer* blocks[kParts] = {&data_, &scales_, &halves_, &zeros_};
  for (int part = 0; part < kParts; ++part) {
    memory[part] = blocks[part]->as<void>();
    bytes[part] = int64_t(blocks[part]->bytes());
  }
}

Matrix::Place Matrix::place(int64_t output) const {
  if (!paired) return {output / kPanel, int(output % kPanel)};
  int64_t half = output >= outputs / 2;
  int64_t column = output - half * (outputs / 2);
  return {column / kWidth, int(half * kWidth + column % kWidth)};
}

// Rows that lie side by side in a panel are turned together: a line of memory is written at once. An input's place
// behind the first one is the same for all outputs.
template <class T>
void Matrix::fill(int64_t first, int64_t count, const T* weights, int64_t stride) {
  for (int64_t i = 0; i < count; i += kWidth) {
    const int64_t rows = std::min<int64_t>(kWidth, count - i);
    const T* source = weights + i * stride;
    if (storage == kFloat32) {
      float* base[kWidth];
      for (int64_t row = 0; row < rows; ++row) base[row] = float_at(place(first + i + row), 0);
      for (int64_t k = 0; k < inputs; ++k) {
        const ptrdiff_t offset = float_at({0, 0}, k) - float_at({0, 0}, 0);
        for (int64_t row = 0; row < rows; ++row) base[row][offset] = widen(source[row * stride + k]);
      }
    } else {
      BFloat16* base[kWidth];
      for (int64_t row = 0; row < rows; ++row) base[row] = half_at(place(first + i + row), 0);
      for (int64_t k = 0; k < inputs; ++k) {
        const ptrdiff_t offset = half_at({0, 0}, k) - half_at({0, 0}, 0);
        for (int64_t row = 0; row < rows; ++row) narrow(widen(source[row * stride + k]), base[row] + offset);
      }
    }
  }
}

// The place of depth step k of an output.
float* Matrix::float_at(Place at, int64_t k) const {
  float* panel = data_.as<float>() + at.panel * panel_size();
#if defined(__AMX_TILE__)
  return panel + tile_row(at.lane, k) * kPanel + k % 2 * kWidth + at.lane % kWidth;
#else
  return panel + k * kPanel + at.lane;
#endif
}

BFloat16* Matrix::half_at(Place at, int64_t k) const {
  BFloat16* panel = data_.as<BFloat16>() + at.panel * panel_size();
#if defined(__AMX_TILE__)
  return panel + tile_row(at.lane, k) * kPanel + at.lane % kWidth * 2 + k % 2;
#else  // in pairs of outputs (load_panel)
  return panel + k * kPanel + (at.lane < kWidth ? 2 * at.lane : 2 * (at.lane - kWidth) + 1);
#endif
}

template void Matrix::fill(int64_t, int64_t, const float*, int64_t);
template void Matrix::fill(int64_t, int64_t, const BFloat16*, int64_t);

void Matrix::read_row(int64_t output, float* weights) const {
  Place at = place(output);
  if (has_codes(storage)) return read_codes(at, weights);
  for (int64_t k = 0; k < inputs; ++k) {
    if (storage == kFloat32) {
      weights[k] = *float_at(at, k);
    } else {
      weights[k] = widen(*half_at(at, k));
    }
  }
}

}  // namespace rayfin
