// The gated delta rule (Yang et al., 2024, "Gated Delta Networks"), token by token.
//
// Columns of a state are independent of each other, so a tile is a head's block of columns that stays in the first
// cache while all tokens of its row pass. The update by one token and the products with the next token's key and query
// share one pass over the block: 4 multiply-adds an element, fewer than the chunked form needs.
#include <algorithm>

#include "common/vmath.h"
#include "recurrent/states.h"

namespace rayfin {

namespace {

constexpr int64_t kBlock = 2 * kWidth;  // columns of a tile

struct Token {
  const float* k;  // [key_dim], normalized
  const float* q;
  float kq;  // k . q
};

struct Change {  // S = decay S + k delta^T
  float decay;
  const float* k;
  Vec delta[2];
};

// Applies `change` to the block [key_dim, kBlock] and returns the new block's products with k and q.
// Not inlined: there is one sequence of instructions for all tokens.
__attribute__((noinline)) void pass(float* block, int64_t key_dim, const Change& change, const Token& token, Vec* with_k,
                                    Vec* with_q) {
  const Vec d0 = change.delta[0], d1 = change.delta[1], decay = broadcast(change.decay);
  const float *changed = change.k, *keys = token.k, *query = token.q;
  Vec k0{}, k1{}, q0{}, q1{};
  for (int64_t i = 0; i < key_dim; ++i) {
    float* s = block + i * kBlock;
    const float was = changed[i], k = keys[i], q = query[i];
    const Vec s0 = load(s) * decay + d0 * was, s1 = load(s + kWidth) * decay + d1 * was;
    store(s, s0);
    store(s + kWidth, s1);
    k0 += s0 * k;
    k1 += s1 * k;
    q0 += s0 * q;
    q1 += s1 * q;
  }
  with_k[0] = k0;
  with_k[1] = k1;
  with_q[0] = q0;
  with_q[1] = q1;
}

float dot(const float* a, const float* b, int64_t count) {
  Vec total{};
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) total += load(a + i) * load(b + i);
  float rest = sum(total);
  for (; i < count; ++i) rest += a[i] * b[i];
  return rest;
}

void scaled(const float* x, int64_t count, float factor, float* y) {
  for (int64_t i = 0; i < count; ++i) y[i] = x[i] * factor;
}

// Normalizes a token's key and query into `k` and `q`.
Token prepare(const DeltaRule& s, int64_t token, int64_t head, float* k, float* q) {
  const float *key = s.k + token * s.k_stride + head * s.key_dim, *query = s.q + token * s.q_stride + head * s.key_dim;
  float key_factor = 1.0f, query_factor = 1.0f / __builtin_sqrtf(float(s.key_dim));
  if (s.normalize) {
    key_factor = 1.0f / __builtin_sqrtf(dot(key, key, s.key_dim) + 1e-6f);
    query_factor *= 1.0f / __builtin_sqrtf(dot(query, query, s.key_dim) + 1e-6f);
  }
  scaled(key, s.key_dim, key_factor, k);
  scaled(query, s.key_dim, query_factor, q);
  return {k, q, dot(k, q, s.key_dim)};
}

// Copies `count` columns between a state, whose rows are value_dim apart, and a block.
void read_block(const float* state, int64_t stride, int64_t key_dim, int64_t count, float* block) {
  for (int64_t i = 0; i < key_dim; ++i) {
    std::copy(state + i * stride, state + i * stride + count, block + i * kBlock);
    std::fill(block + i * kBlock + count, block + (i + 1) * kBlock, 0.0f);
  }
}

void write_block(const float* block, int64_t stride, int64_t key_dim, int64_t count, float* state) {
  for (int64_t i = 0; i < key_dim; ++i) std::copy(block + i * kBlock, block + i * kBlock + count, state + i * stride);
}

void run_block(const StateRows& rows, const DeltaRule& s, int64_t row, int64_t head, int64_t first, float* scratch) {
  const int64_t count = std::min(kBlock, s.value_dim - first), size = s.key_dim * s.value_dim;
  const int64_t key_head = head / (s.value_heads / s.key_heads);
  float *block = scratch, *keys = block + s.key_dim * kBlock, *query = keys + 2 * s.key_dim;  // two keys in turn
  if (rows.past[row]) {
    read_block(s.states + (rows.read[row] * s.value_heads + head) * size + first, s.value_dim, s.key_dim, count, block);
  } else {
    std::fill(block, block + s.key_dim * kBlock, 0.0f);
  }
  Change change{1.0f, keys + s.key_dim, {Vec{}, Vec{}}};  // none: the key counts as zeros
  std::fill(keys, keys + 2 * s.key_dim, 0.0f);
  Vec with_k[2], with_q[2];
  for (int64_t token = rows.starts[row]; token < rows.starts[row + 1]; ++token) {
    float* key = change.k == keys ? keys + s.key_dim : keys;
    const Token now = prepare(s, token, key_head, key, query);
    pass(block, s.key_dim, change, now, with_k, with_q);
    const int64_t place = token * s.value_heads + head;
    const float decay = exp(broadcast(s.g[place]))[0];
    const float* value = s.v + token * s.v_stride + head * s.value_dim + first;
    float* y = s.y + place * s.value_dim + first;
    change.decay = decay;
    change.k = key;
    for (int half = 0; half < 2; ++half) {
      const int lanes = int(std::clamp<int64_t>(count - half * kWidth, 0, kWidth));
      const bool whole = lanes == kWidth;
      const Vec v = whole ? load(value + half * kWidth) : load_some(value + half * kWidth, lanes);
      change.delta[half] = (v - with_k[half] * decay) * s.beta[place];
      const Vec out = with_q[half] * decay + change.delta[half] * now.kq;
      whole ? store(y + half * kWidth, out) : store_some(y + half * kWidth, out, lanes);
    }
  }
  pass(block, s.key_dim, change, Token{change.k, change.k, 0.0f}, with_k, with_q);
  write_block(block, s.value_dim, s.key_dim, count,
              s.states + (rows.write[row] * s.value_heads + head) * size + first);
}

}  // namespace

void delta_rule(Pool& pool, const StateRows& rows, const DeltaRule& s) {
  const int64_t blocks = (s.value_dim + kBlock - 1) / kBlock;
  pool.run(rows.rows * s.value_heads * blocks, [&](int64_t tile, int thread) {
    float* scratch = pool.scratch<float>(thread, s.key_dim * (kBlock + 3));
    const int64_t row = tile / (s.value_heads * blocks), head = tile / blocks % s.value_heads;
    run_block(rows, s, row, head, tile % blocks * kBlock, scratch);
  });
}

}  // namespace rayfin
