#include <algorithm>
#include <cmath>

#include "common/vmath.h"
#include "layers/norms.h"
#include "recurrent/states.h"

namespace rayfin {

namespace {

constexpr int64_t kGroup = 16;  // tokens of a tile

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// g and beta of a token's heads.
void gates(const GatedDelta& s, const float* line, int64_t z, float* g, float* beta) {
  const float *b = line + z + s.value_heads * s.value_dim, *a = b + s.value_heads;
  for (int64_t head = 0; head < s.value_heads; ++head) {
    g[head] = s.rate[head] * softplus(a[head] + s.shift[head]);
    beta[head] = s.beta_scale / (1.0f + std::exp(-b[head]));
  }
}

// y = rms_norm(y) * silu(z)
void gated_norm(const GatedDelta& s, const float* z, float* y) {
  norm_row(y, s.value_dim, s.norm, s.eps, nullptr, 1.0f, y);
  int64_t i = 0;
  for (; i + kWidth <= s.value_dim; i += kWidth) store(y + i, load(y + i) * activate(load(z + i), kSilu));
  if (const int rest = int(s.value_dim - i); rest > 0)
    store_some(y + i, load_some(y + i, rest) * activate(load_some(z + i, rest), kSilu), rest);
}

}  // namespace

void gated_delta(Pool& pool, const StateRows& rows, const GatedDelta& s) {
  const int64_t tokens = rows.starts[rows.rows], keys = s.key_heads * s.key_dim, values = s.value_heads * s.value_dim;
  const int64_t channels = 2 * keys + values, z = channels;
  float *mixed = s.workspace, *g = mixed + tokens * channels, *beta = g + tokens * s.value_heads;
  short_conv(pool, rows,
             {s.x, s.conv, s.conv_bias, s.conv_states, mixed, s.x_stride, channels, s.taps, s.width, s.activation});
  const int64_t groups = (tokens + kGroup - 1) / kGroup;
  pool.run(groups, [&](int64_t group, int) {
    for (int64_t token = group * kGroup; token < std::min(tokens, (group + 1) * kGroup); ++token)
      gates(s, s.x + token * s.x_stride, z, g + token * s.value_heads, beta + token * s.value_heads);
  });
  delta_rule(pool, rows,
             {mixed, mixed + keys, mixed + 2 * keys, g, beta, s.states, s.y, channels, channels, channels, s.key_heads,
              s.value_heads, s.key_dim, s.value_dim, s.normalize});
  pool.run(groups * s.value_heads, [&](int64_t tile, int) {
    const int64_t head = tile % s.value_heads, first = tile / s.value_heads * kGroup;
    for (int64_t token = first; token < std::min(tokens, first + kGroup); ++token)
      gated_norm(s, s.x + token * s.x_stride + z + head * s.value_dim, s.y + token * values + head * s.value_dim);
  });
}

}  // namespace rayfin
