// State space duality (Dao and Gu, 2024, "Transformers are SSMs"), token by token.
//
// Rows of a head's state are independent of each other. A tile is a few of them, which stay in the first cache while
// all tokens of a request's row pass: one pass over the state for each token.
#include <algorithm>

#include "common/vmath.h"
#include "recurrent/states.h"

namespace rayfin {

namespace {

constexpr int64_t kLines = 4;    // rows of a state that share the loads of b and c
constexpr int64_t kGroup = 16;   // rows of a tile

RAYFIN_INLINE Vec load_part(const float* p, int64_t count) {
  return count >= kWidth ? load(p) : load_some(p, int(count));
}

// One token and four rows: S = decay S + x b^T, and the sums of S c. Not inlined: one sequence of instructions.
__attribute__((noinline)) Vec4 pass(float* block, int64_t padded, int64_t state_dim, float decay, Vec4 x, const float* b,
                                    const float* c) {
  Vec y[kLines] = {};
  for (int64_t i = 0; i < state_dim; i += kWidth) {
    const Vec bs = load_part(b + i, state_dim - i), cs = load_part(c + i, state_dim - i);
    for (int line = 0; line < kLines; ++line) {
      float* s = block + line * padded + i;
      const Vec state = load(s) * decay + bs * x[line];
      store(s, state);
      y[line] += state * cs;
    }
  }
  return sums(y[0], y[1], y[2], y[3]);
}

void run_lines(const StateRows& rows, const Ssd& s, int64_t row, int64_t head, int64_t first, int64_t padded,
               float* block) {
  const int64_t count = std::min(kLines, s.head_dim - first), group = head / (s.heads / s.groups);
  const int64_t size = s.head_dim * s.state_dim;
  std::fill(block, block + kLines * padded, 0.0f);
  if (rows.past[row]) {
    const float* state = s.states + (rows.read[row] * s.heads + head) * size + first * s.state_dim;
    for (int64_t line = 0; line < count; ++line)
      std::copy(state + line * s.state_dim, state + (line + 1) * s.state_dim, block + line * padded);
  }
  auto keep = [&](int64_t to) {
    float* state = s.states + (to * s.heads + head) * size + first * s.state_dim;
    for (int64_t line = 0; line < count; ++line)
      std::copy(block + line * padded, block + line * padded + s.state_dim, state + line * s.state_dim);
  };
  for (int64_t token = rows.starts[row]; token < rows.starts[row + 1]; ++token) {
    const float dt = s.dt[token * s.heads + head], decay = exp(broadcast(dt * s.a[head]))[0];
    const float* x = s.x + token * s.x_stride + head * s.head_dim + first;
    Vec4 in{};
    for (int64_t line = 0; line < count; ++line) in[line] = x[line] * dt;
    const Vec4 y = pass(block, padded, s.state_dim, decay, in, s.b + token * s.b_stride + group * s.state_dim,
                        s.c + token * s.c_stride + group * s.state_dim);
    float* out = s.y + (token * s.heads + head) * s.head_dim + first;
    for (int64_t line = 0; line < count; ++line) out[line] = y[line] + (s.d ? s.d[head] * x[line] : 0.0f);
    if (const int64_t to = rows.beside(token); to >= 0) keep(to);
  }
  keep(rows.write[row]);
}

}  // namespace

void ssd(Pool& pool, const StateRows& rows, const Ssd& s) {
  const int64_t groups = (s.head_dim + kGroup - 1) / kGroup;
  const int64_t padded = (s.state_dim + kWidth - 1) / kWidth * kWidth;
  pool.run(rows.rows * s.heads * groups, [&](int64_t tile, int thread) {
    float* block = pool.scratch<float>(thread, kLines * padded);
    const int64_t row = tile / (s.heads * groups), head = tile / groups % s.heads, from = tile % groups * kGroup;
    for (int64_t first = from; first < std::min(from + kGroup, s.head_dim); first += kLines)
      run_lines(rows, s, row, head, first, padded, block);
  });
}

}  // namespace rayfin
