#include <algorithm>

#include "common/vmath.h"
#include "recurrent/states.h"

namespace rayfin {

namespace {

constexpr int64_t kChannels = 256;  // of a tile: inputs of all taps stay in the first cache

// One token: `taps` pointers to inputs, the oldest first.
void convolve(const ShortConv& s, const float* const* inputs, int64_t first, int64_t count, float* y) {
  for (int64_t i = 0; i < count; i += kWidth) {
    const int lanes = int(std::min<int64_t>(kWidth, count - i));
    const bool whole = lanes == kWidth;
    Vec total{};
    if (s.bias) total = whole ? load(s.bias + first + i) : load_some(s.bias + first + i, lanes);
    for (int64_t tap = 0; tap < s.taps; ++tap) {
      const float *w = s.weight + tap * s.channels + first + i, *x = inputs[tap] + i;
      total += whole ? load(w) * load(x) : load_some(w, lanes) * load_some(x, lanes);
    }
    total = activate(total, int(s.activation));
    whole ? store(y + i, total) : store_some(y + i, total, lanes);
  }
}

void run_row(const StateRows& rows, const ShortConv& s, int64_t row, int64_t first, int64_t count, float* scratch) {
  const int64_t start = rows.starts[row], end = rows.starts[row + 1], past = s.taps - 1;
  float* history = scratch;  // [width, count]: the state, a column per line
  const float* state = s.states + (rows.read[row] * s.channels + first) * s.width;
  for (int64_t column = 0; column < s.width; ++column)
    for (int64_t i = 0; i < count; ++i)
      history[column * count + i] = rows.past[row] ? state[i * s.width + column] : 0.0f;
  // Line `index` of the state followed by the row's inputs.
  auto line = [&](int64_t index) -> const float* {
    return index < s.width ? history + index * count : s.x + (start + index - s.width) * s.x_stride + first;
  };
  const float* inputs[kTaps];
  for (int64_t token = start; token < end; ++token) {
    for (int64_t tap = 0; tap < s.taps; ++tap) inputs[tap] = line(token - start + s.width - past + tap);
    convolve(s, inputs, first, count, s.y + token * s.channels + first);
  }
  float* out = s.states + (rows.write[row] * s.channels + first) * s.width;
  for (int64_t column = 0; column < s.width; ++column) {
    const float* x = line(end - start + column);
    for (int64_t i = 0; i < count; ++i) out[i * s.width + column] = x[i];
  }
}

}  // namespace

void short_conv(Pool& pool, const StateRows& rows, const ShortConv& s) {
  const int64_t blocks = (s.channels + kChannels - 1) / kChannels;
  pool.run(rows.rows * blocks, [&](int64_t tile, int thread) {
    const int64_t first = tile % blocks * kChannels, count = std::min(kChannels, s.channels - first);
    run_row(rows, s, tile / blocks, first, count, pool.scratch<float>(thread, s.width * count));
  });
}

}  // namespace rayfin
