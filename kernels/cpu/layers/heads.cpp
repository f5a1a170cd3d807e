#include "layers/heads.h"

#include <algorithm>

#include "matmul/matrix.h"

namespace rayfin {

namespace {

constexpr int64_t kTileFloats = 16 << 10;

void normalize(const Heads& h, float* x, int64_t heads, const float* weight) {
  if (!weight) return;
  if (h.whole_norm) {
    norm_row(x, heads * h.key_dim, weight, h.eps, nullptr, 1.0f, x);
    return;
  }
  for (int64_t head = 0; head < heads; ++head)
    norm_row(x + head * h.key_dim, h.key_dim, weight, h.eps, nullptr, 1.0f, x + head * h.key_dim);
}

// Rotary position embedding (Su et al., 2021), pairs (i, i + half).
void rotate(const float* cos, const float* sin, int64_t half, float* __restrict x, float* __restrict y) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = y[i];
    x[i] = a * cos[i] - b * sin[i];
    y[i] = b * cos[i] + a * sin[i];
  }
}

template <class Stored>
void write_slot(const float* x, int64_t count, void* pages, int64_t slot) {
  Stored* out = static_cast<Stored*>(pages) + slot * count;
  for (int64_t i = 0; i < count; ++i) narrow(x[i], &out[i]);
}

template <class Stored>
void prepare_token(const Heads& h, int64_t token) {
  float* query = h.qkv + token * h.stride;
  float* key = query + h.heads * h.key_dim;
  normalize(h, query, h.heads, h.query_norm);
  normalize(h, key, h.kv_heads, h.key_norm);
  if (h.cos) {
    const int64_t half = h.rotary_dim / 2;
    const float *cos = h.cos + h.positions[token] * half, *sin = h.sin + h.positions[token] * half;
    for (int64_t head = 0; head < h.heads + h.kv_heads; ++head)
      rotate(cos, sin, half, query + head * h.key_dim, query + head * h.key_dim + half);
  }
  write_slot<Stored>(key, h.kv_heads * h.key_dim, h.k_pages, h.slots[token]);
  write_slot<Stored>(key + h.kv_heads * h.key_dim, h.kv_heads * h.value_dim, h.v_pages, h.slots[token]);
}

}  // namespace

void prepare_heads(Pool& pool, const Heads& h) {
  const int64_t group = std::max<int64_t>(1, kTileFloats / h.stride);
  pool.run((h.tokens + group - 1) / group, [&](int64_t tile, int) {
    for (int64_t token = tile * group; token < std::min(h.tokens, (tile + 1) * group); ++token) {
      if (h.storage == kBFloat16) {
        prepare_token<BFloat16>(h, token);
      } else {
        prepare_token<float>(h, token);
      }
    }
  });
}

}  // namespace rayfin
