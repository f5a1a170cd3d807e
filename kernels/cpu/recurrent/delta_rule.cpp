// The gated delta rule (Yang et al., 2024, "Gated Delta Networks"), token by token.
//
// Columns of a state are independent of each other. Of a row of many tokens a tile is a head's block of columns, which
// stays in the first cache while all tokens pass. The update by one token and the products with the next token's key
// and query share one pass over the block: 4 multiply-adds an element, fewer than the chunked form needs.
//
// A row of one token waits for memory. Its tile is a whole head, whose state is read in the order in which it lies, and
// the next state is written past the caches: what is not read first costs no read.
#include <algorithm>

#include "common/vmath.h"
#include "recurrent/states.h"

namespace rayfin {

namespace {

constexpr int64_t kBlock = 2 * kWidth;         // columns of a tile
constexpr int64_t kLines = 8;                  // lines of a state that are read together
constexpr int64_t kStreamedBytes = 256 << 10;  // states of a call that are better written past the caches

struct Token {
  const float* k;  // [key_dim], normalized
  const float* q;
  float kq;  // k . q
  float decay, beta;
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
    const Vec s0 = multiply_add(load(s), decay, d0 * was), s1 = multiply_add(load(s + kWidth), decay, d1 * was);
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

// The output of a token, and how the state changes, from its products with the token's key and query.
__attribute__((noinline)) Vec answer(const Token& token, Vec value, Vec with_k, Vec with_q, Vec* delta) {
  const Vec change = (value - with_k * token.decay) * token.beta;
  *delta = change;
  return with_q * token.decay + change * token.kq;
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
__attribute__((noinline)) Token prepare(const DeltaRule& s, int64_t token, int64_t head, float* k, float* q) {
  const int64_t key_head = head / (s.value_heads / s.key_heads), place = token * s.value_heads + head;
  const float *key = s.k + token * s.k_stride + key_head * s.key_dim,
              *query = s.q + token * s.q_stride + key_head * s.key_dim;
  float key_factor = 1.0f, query_factor = 1.0f / __builtin_sqrtf(float(s.key_dim));
  if (s.normalize) {
    key_factor = 1.0f / __builtin_sqrtf(dot(key, key, s.key_dim) + 1e-6f);
    query_factor *= 1.0f / __builtin_sqrtf(dot(query, query, s.key_dim) + 1e-6f);
  }
  scaled(key, s.key_dim, key_factor, k);
  scaled(query, s.key_dim, query_factor, q);
  return {k, q, dot(k, q, s.key_dim), exp(broadcast(s.g[place]))[0], s.beta[place]};
}

// Copies `count` columns of a state, whose lines are value_dim apart, to a block.
void read_block(const float* state, int64_t stride, int64_t key_dim, int64_t count, float* block) {
  for (int64_t i = 0; i < key_dim; ++i) {
    std::copy(state + i * stride, state + i * stride + count, block + i * kBlock);
    std::fill(block + i * kBlock + count, block + (i + 1) * kBlock, 0.0f);
  }
}

// Applies the last change to a block and copies it back.
void write_block(const float* block, const Change& change, int64_t stride, int64_t key_dim, int64_t count,
                 float* state) {
  const Vec decay = broadcast(change.decay);
  for (int64_t i = 0; i < key_dim; ++i) {
    for (int half = 0; half < 2; ++half) {
      const int64_t lanes = count - half * kWidth;
      const Vec now = multiply_add(load(block + i * kBlock + half * kWidth), decay, change.delta[half] * change.k[i]);
      float* out = state + i * stride + half * kWidth;
      if (lanes >= kWidth) {
        store(out, now);
      } else if (lanes > 0) {
        store_some(out, now, int(lanes));
      }
    }
  }
}

void run_block(const StateRows& rows, const DeltaRule& s, int64_t row, int64_t head, int64_t first, float* scratch) {
  const int64_t count = std::min(kBlock, s.value_dim - first), size = s.key_dim * s.value_dim;
  float *block = scratch, *keys = block + s.key_dim * kBlock, *query = keys + 2 * s.key_dim;  // two keys in turn
  if (rows.past[row]) {
    read_block(s.states + (rows.read[row] * s.value_heads + head) * size + first, s.value_dim, s.key_dim, count, block);
  } else {
    std::fill(block, block + s.key_dim * kBlock, 0.0f);
  }
  auto keep = [&](const Change& change, int64_t to) {
    write_block(block, change, s.value_dim, s.key_dim, count, s.states + (to * s.value_heads + head) * size + first);
  };
  Change change{1.0f, keys + s.key_dim, {Vec{}, Vec{}}};  // none: the key counts as zeros
  std::fill(keys, keys + 2 * s.key_dim, 0.0f);
  Vec with_k[2], with_q[2];
  for (int64_t token = rows.starts[row]; token < rows.starts[row + 1]; ++token) {
    float* key = change.k == keys ? keys + s.key_dim : keys;
    const Token now = prepare(s, token, head, key, query);
    pass(block, s.key_dim, change, now, with_k, with_q);
    const float* value = s.v + token * s.v_stride + head * s.value_dim + first;
    float* y = s.y + (token * s.value_heads + head) * s.value_dim + first;
    change.decay = now.decay;
    change.k = key;
    for (int half = 0; half < 2; ++half) {
      const int lanes = int(std::clamp<int64_t>(count - half * kWidth, 0, kWidth));
      const bool whole = lanes == kWidth;
      const Vec v = whole ? load(value + half * kWidth) : load_some(value + half * kWidth, lanes);
      const Vec out = answer(now, v, with_k[half], with_q[half], &change.delta[half]);
      whole ? store(y + half * kWidth, out) : store_some(y + half * kWidth, out, lanes);
    }
    if (const int64_t to = rows.beside(token); to >= 0) keep(change, to);
  }
  keep(change, rows.write[row]);
}

// Adds the products of kVecs vectors of some lines of a state with a key and a query, in the order of the lines.
template <int kVecs>
RAYFIN_INLINE void add_products(const float* state, int64_t stride, int64_t lines, const float* keys,
                                const float* query, float* with_k, float* with_q) {
  Vec ks[kVecs], qs[kVecs];
  for (int v = 0; v < kVecs; ++v) ks[v] = load(with_k + v * kWidth), qs[v] = load(with_q + v * kWidth);
  for (int64_t i = 0; i < lines; ++i) {
    const float k = keys[i], q = query[i];
    for (int v = 0; v < kVecs; ++v) {
      const Vec s = load(state + i * stride + v * kWidth);
      ks[v] += s * k;
      qs[v] += s * q;
    }
  }
  for (int v = 0; v < kVecs; ++v) store(with_k + v * kWidth, ks[v]), store(with_q + v * kWidth, qs[v]);
}

// A head of a row of one token that has a past. Each element gets what run_block gives it, to the last bit.
template <bool kStreams>
void run_head(const StateRows& rows, const DeltaRule& s, int64_t row, int64_t head, float* scratch) {
  const int64_t size = s.key_dim * s.value_dim, columns = s.value_dim, token = rows.starts[row];
  float *delta = scratch, *with_k = delta + columns, *with_q = with_k + columns;
  float *key = with_q + columns, *query = key + s.key_dim;
  const float* from = s.states + (rows.read[row] * s.value_heads + head) * size;
  float* to = s.states + (rows.write[row] * s.value_heads + head) * size;
  const Token now = prepare(s, token, head, key, query);
  std::fill(with_k, with_k + 2 * columns, 0.0f);
  for (int64_t i = 0; i < s.key_dim; i += kLines) {
    const int64_t lines = std::min(kLines, s.key_dim - i);
    int64_t c = 0;
    for (; c + 4 * kWidth <= columns; c += 4 * kWidth)
      add_products<4>(from + i * columns + c, columns, lines, key + i, query + i, with_k + c, with_q + c);
    for (; c < columns; c += kWidth)
      add_products<1>(from + i * columns + c, columns, lines, key + i, query + i, with_k + c, with_q + c);
  }
  const float* value = s.v + token * s.v_stride + head * columns;
  float* y = s.y + (token * s.value_heads + head) * columns;
  for (int64_t c = 0; c < columns; c += kWidth) {
    Vec change;
    store(y + c, answer(now, load(value + c), load(with_k + c), load(with_q + c), &change));
    store(delta + c, change);
  }
  const Vec decay = broadcast(now.decay);
  for (int64_t i = 0; i < s.key_dim; ++i) {
    const float was = key[i];
    for (int64_t c = 0; c < columns; c += kWidth) {
      const Vec next = multiply_add(load(from + i * columns + c), decay, load(delta + c) * was);
      kStreams ? stream(to + i * columns + c, next) : store(to + i * columns + c, next);
    }
  }
  if (kStreams) finish_streams();
}

}  // namespace

void delta_rule(Pool& pool, const StateRows& rows, const DeltaRule& s) {
  const int64_t blocks = (s.value_dim + kBlock - 1) / kBlock, heads = s.value_heads;
  // Rows in the order of their tiles: those of several tokens, which take longest, first.
  int64_t* order = pool.workspace<int64_t>(rows.rows);
  const bool whole = s.value_dim % kWidth == 0;
  int64_t several = 0, single = rows.rows;
  for (int64_t row = 0; row < rows.rows; ++row) {
    const bool one = whole && rows.past[row] && rows.starts[row + 1] - rows.starts[row] == 1;
    order[one ? --single : several++] = row;
  }
  const int64_t first = several * heads * blocks, ones = (rows.rows - several) * heads;
  const int64_t bytes = ones * s.key_dim * s.value_dim * int64_t(sizeof(float));
  const bool aligned = reinterpret_cast<uintptr_t>(s.states) % (kWidth * sizeof(float)) == 0;
  const bool streams = aligned && bytes >= kStreamedBytes;
  const int64_t floats = std::max(s.key_dim * (kBlock + 3), 3 * s.value_dim + 2 * s.key_dim);
  pool.run(first + ones, [&](int64_t tile, int thread) {
    float* scratch = pool.scratch<float>(thread, floats);
    if (tile < first) {
      const int64_t row = order[tile / (heads * blocks)], head = tile / blocks % heads;
      return run_block(rows, s, row, head, tile % blocks * kBlock, scratch);
    }
    const int64_t row = order[several + (tile - first) / heads], head = (tile - first) % heads;
    streams ? run_head<true>(rows, s, row, head, scratch) : run_head<false>(rows, s, row, head, scratch);
  });
}

}  // namespace rayfin
