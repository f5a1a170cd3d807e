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

RAYFIN_INLINE Vec4 load4(const float* p) {
  Vec4 v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

// The transpose of four lines of four floats.
RAYFIN_INLINE void transpose4(const float* const* lines, Vec4* columns) {
  const Vec4 a = load4(lines[0]), b = load4(lines[1]), c = load4(lines[2]), d = load4(lines[3]);
  const Vec4 ab0 = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab1 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Vec4 cd0 = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd1 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  columns[0] = __builtin_shufflevector(ab0, cd0, 0, 1, 4, 5);
  columns[1] = __builtin_shufflevector(ab0, cd0, 2, 3, 6, 7);
  columns[2] = __builtin_shufflevector(ab1, cd1, 0, 1, 4, 5);
  columns[3] = __builtin_shufflevector(ab1, cd1, 2, 3, 6, 7);
}

// A state [count, width] as `width` lines of `count` floats.
void read_state(const float* state, int64_t width, int64_t count, float* lines) {
  int64_t i = 0;
  for (; width == 4 && i + 4 <= count; i += 4) {
    const float* from[] = {state + i * 4, state + i * 4 + 4, state + i * 4 + 8, state + i * 4 + 12};
    Vec4 columns[4];
    transpose4(from, columns);
    for (int column = 0; column < 4; ++column)
      std::memcpy(lines + column * count + i, &columns[column], sizeof(Vec4));
  }
  for (int64_t column = 0; column < width; ++column)
    for (int64_t at = i; at < count; ++at) lines[column * count + at] = state[at * width + column];
}

// The inverse: lines[column] are `count` floats.
void write_state(const float* const* lines, int64_t width, int64_t count, float* state) {
  int64_t i = 0;
  for (; width == 4 && i + 4 <= count; i += 4) {
    const float* from[] = {lines[0] + i, lines[1] + i, lines[2] + i, lines[3] + i};
    Vec4 channels[4];
    transpose4(from, channels);
    std::memcpy(state + i * 4, channels, sizeof(channels));
  }
  for (int64_t column = 0; column < width; ++column)
    for (int64_t at = i; at < count; ++at) state[at * width + column] = lines[column][at];
}

void run_row(const StateRows& rows, const ShortConv& s, int64_t row, int64_t first, int64_t count, float* scratch) {
  const int64_t start = rows.starts[row], end = rows.starts[row + 1], past = s.taps - 1;
  float* history = scratch;  // [width, count]: the state, a column per line
  if (rows.past[row]) {
    read_state(s.states + (rows.read[row] * s.channels + first) * s.width, s.width, count, history);
  } else {
    std::fill(history, history + s.width * count, 0.0f);
  }
  // Line `index` of the state followed by the row's inputs.
  auto line = [&](int64_t index) -> const float* {
    return index < s.width ? history + index * count : s.x + (start + index - s.width) * s.x_stride + first;
  };
  const float* inputs[kTaps];
  auto keep = [&](int64_t passed, int64_t to) {  // the state behind so many tokens
    float* out = s.states + (to * s.channels + first) * s.width;
    if (s.width <= kTaps) {
      for (int64_t column = 0; column < s.width; ++column) inputs[column] = line(passed + column);
      return write_state(inputs, s.width, count, out);
    }
    for (int64_t column = 0; column < s.width; ++column) {
      const float* x = line(passed + column);
      for (int64_t i = 0; i < count; ++i) out[i * s.width + column] = x[i];
    }
  };
  for (int64_t token = start; token < end; ++token) {
    for (int64_t tap = 0; tap < s.taps; ++tap) inputs[tap] = line(token - start + s.width - past + tap);
    convolve(s, inputs, first, count, s.y + token * s.channels + first);
    if (const int64_t to = rows.beside(token); to >= 0) keep(token - start + 1, to);
  }
  keep(end - start, rows.write[row]);
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
