// Many queries against many keys: two matrix products with an online softmax between (FlashAttention,
// Dao et al., 2022). Blocks of keys and values are copied from their pages into panels of fp32, as the
// register tile of the matmul wants its weights; kTileRows queries share each copy.
#include <algorithm>
#include <cmath>

#include "attention.h"
#include "register_tile.h"
#include "softmax.h"

namespace rayfin {

namespace {

constexpr int64_t kKeys = 64;      // keys of a block: two or more panels of any width
constexpr int64_t kTileRows = 96;  // queries x heads of a group; copying a block costs a twentieth of its products

// A thread's memory for one tile of `rows` queries.
struct Scratch {
  float *query, *scores, *mixed, *keys, *values, *most, *total;
  int64_t mixed_stride;

  Scratch(const Attention& a, int64_t rows, Pool& pool, int thread) {
    mixed_stride = rounded_up(a.value_dim, kPanel);
    float* memory = pool.scratch<float>(
        thread, rows * (a.key_dim + kKeys + mixed_stride + 2) + kKeys * (a.key_dim + mixed_stride));
    keys = memory;
    values = keys + kKeys * a.key_dim;
    scores = values + kKeys * mixed_stride;
    mixed = scores + rows * kKeys;
    query = mixed + rows * mixed_stride;
    most = query + rows * a.key_dim;
    total = most + rows;
  }
};

// Four keys' rows of `dim` to columns: out[d * kPanel + 0 .. 3].
template <class Stored>
RAYFIN_INLINE void transpose_four(const Stored* const* rows, int64_t dim, float* out) {
  for (int64_t d = 0; d < dim; ++d) {
    Vec4 four = {widen(rows[0][d]), widen(rows[1][d]), widen(rows[2][d]), widen(rows[3][d])};
    std::memcpy(out + d * kPanel, &four, sizeof(four));
  }
}

RAYFIN_INLINE Vec4 load4(const float* p) {
  Vec4 v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

RAYFIN_INLINE Vec4 load4(const BFloat16* p) {
  typedef uint16_t Half4 __attribute__((vector_size(8)));
  typedef uint32_t Whole4 __attribute__((vector_size(16)));
  Half4 half;
  std::memcpy(&half, p, sizeof(half));
  return bit_cast<Vec4>(__builtin_convertvector(half, Whole4) << 16);
}

// The same, four dims at a time.
template <class Stored>
RAYFIN_INLINE void transpose_block(const Stored* const* rows, int64_t dim, float* out) {
  int64_t d = 0;
  for (; d + 4 <= dim; d += 4) {
    Vec4 a = load4(rows[0] + d), b = load4(rows[1] + d), c = load4(rows[2] + d), e = load4(rows[3] + d);
    Vec4 ab0 = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab1 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    Vec4 ce0 = __builtin_shufflevector(c, e, 0, 4, 1, 5), ce1 = __builtin_shufflevector(c, e, 2, 6, 3, 7);
    Vec4 columns[4] = {
        __builtin_shufflevector(ab0, ce0, 0, 1, 4, 5), __builtin_shufflevector(ab0, ce0, 2, 3, 6, 7),
        __builtin_shufflevector(ab1, ce1, 0, 1, 4, 5), __builtin_shufflevector(ab1, ce1, 2, 3, 6, 7)};
    for (int i = 0; i < 4; ++i) std::memcpy(out + (d + i) * kPanel, &columns[i], sizeof(columns[i]));
  }
  const Stored* tail[4] = {rows[0] + d, rows[1] + d, rows[2] + d, rows[3] + d};
  transpose_four(tail, dim - d, out + d * kPanel);
}

// Keys first .. first + count - 1 of one head to panels [kKeys / kPanel][key_dim][kPanel]. What lies past them
// in the last group of four is the last key again: its scores are masked.
template <class Stored>
void pack_keys(const Attention& a, const PrefillTile& tile, int64_t first, int64_t count, float* panels) {
  const Stored* pages = static_cast<const Stored*>(a.k_pages) + tile.kv_head * a.key_dim;
  for (int64_t i = 0; i < count; i += 4) {
    const Stored* rows[4];
    for (int64_t j = 0; j < 4; ++j)
      rows[j] = pages + a.slot(tile.row, first + std::min(i + j, count - 1)) * a.kv_heads * a.key_dim;
    transpose_block(rows, a.key_dim, panels + i / kPanel * kPanel * a.key_dim + i % kPanel);
  }
}

// The same keys' values to panels [value_dim / kPanel][kKeys][kPanel].
template <class Stored>
void pack_values(const Attention& a, const PrefillTile& tile, int64_t first, int64_t count, float* panels) {
  const Stored* pages = static_cast<const Stored*>(a.v_pages) + tile.kv_head * a.value_dim;
  for (int64_t i = 0; i < count; ++i) {
    const Stored* row = pages + a.slot(tile.row, first + i) * a.kv_heads * a.value_dim;
    for (int64_t d = 0; d < a.value_dim; d += kWidth) {
      const int lanes = int(std::min<int64_t>(kWidth, a.value_dim - d));
      float* out = panels + d / kPanel * kPanel * kKeys + i * kPanel + d % kPanel;
      store(out, lanes == kWidth ? load(row + d) : load_some(row + d, lanes));
    }
  }
}

// out[rows][panels * kPanel] (+)= x[rows][depth] * panels.
void multiply(int64_t rows, const float* x, int64_t x_stride, const float* panels, int64_t panel_size, int64_t count,
              int64_t depth, float* out, int64_t out_stride, bool resume) {
  const int64_t blocks = (rows + kRows - 1) / kRows;
  for (int64_t panel = 0; panel < count; ++panel) {
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t row = rows * block / blocks, n = rows * (block + 1) / blocks - row;
      rows_by_panel<false>(n, x + row * x_stride, x_stride, panels + panel * panel_size, depth,
                           out + row * out_stride + panel * kPanel, out_stride, resume);
    }
  }
}

// Scores of one query against the block's keys `from` .. `to` - 1 to weights; what was mixed so far is put on
// the scale of the new largest score.
void soften(const Attention& a, const Scratch& s, int64_t row, int64_t from, int64_t to, int64_t count) {
  float* scores = s.scores + row * kKeys;
  if (from >= to) {
    std::fill(scores, scores + count, 0.0f);
    return;
  }
  if (a.softcap > 0.0f) scale_scores(scores, to, 1.0f, a.softcap);
  std::fill(scores, scores + from, kNever);
  std::fill(scores + to, scores + kKeys, kNever);
  Vec largest = broadcast(kNever);
  for (int64_t i = 0; i < kKeys; i += kWidth) largest = max(load(scores + i), largest);
  const float block_most = maximum(largest);
  const float most = std::max(s.most[row], block_most);
  const float block_total = exp_scores(scores, kKeys, most);
  if (most != s.most[row]) {
    const float shrink = std::exp(s.most[row] - most);
    s.total[row] *= shrink;
    float* mixed = s.mixed + row * s.mixed_stride;
    for (int64_t d = 0; d < s.mixed_stride; d += kWidth) store(mixed + d, load(mixed + d) * shrink);
    s.most[row] = most;
  }
  s.total[row] += block_total;
}

void finish(const Attention& a, const PrefillTile& tile, const Scratch& s) {
  const int64_t group = a.group();
  for (int64_t token = tile.first; token < tile.last; ++token) {
    for (int64_t g = 0; g < group; ++g) {
      const int64_t row = (token - tile.first) * group + g, head = tile.kv_head * group + g;
      float factor = 1.0f / s.total[row];
      if (a.sinks) {
        const float most = std::max(s.most[row], a.sinks[head]);
        const float shrink = std::exp(s.most[row] - most);
        factor = shrink / (s.total[row] * shrink + std::exp(a.sinks[head] - most));
      }
      float* out = a.out + (token * a.heads + head) * a.value_dim;
      const float* mixed = s.mixed + row * s.mixed_stride;
      for (int64_t d = 0; d < a.value_dim; ++d) out[d] = mixed[d] * factor;
    }
  }
}

void start(const Attention& a, const PrefillTile& tile, int64_t rows, const Scratch& s) {
  const int64_t group = a.group();
  for (int64_t row = 0; row < rows; ++row) {
    const float* query = a.query + (tile.first + row / group) * a.query_stride +
                         (tile.kv_head * group + row % group) * a.key_dim;
    for (int64_t d = 0; d < a.key_dim; ++d) s.query[row * a.key_dim + d] = query[d] * a.scale;
    s.most[row] = kNever;
    s.total[row] = 0.0f;
  }
  std::memset(s.mixed, 0, size_t(rows * s.mixed_stride) * sizeof(float));
  std::memset(s.keys, 0, size_t(kKeys * (a.key_dim + s.mixed_stride)) * sizeof(float));
}

}  // namespace

int64_t prefill_tokens(const Attention& a) { return std::max<int64_t>(1, kTileRows / a.group()); }

template <class Stored>
void prefill_tile(const Attention& a, const PrefillTile& tile, Pool& pool, int thread) {
  const int64_t group = a.group(), rows = (tile.last - tile.first) * group;
  const int64_t cached = a.kv_len[tile.row] - (a.query_start[tile.row + 1] - a.query_start[tile.row]);
  const int64_t position = cached + tile.first - a.query_start[tile.row];  // of the first query
  const int64_t end = position + (tile.last - tile.first);
  // Blocks lie at the same keys whatever the chunk, so that a query's sums have one order.
  const int64_t begin = a.window ? std::max<int64_t>(0, position - a.window + 1) / kKeys * kKeys : 0;
  const Scratch s(a, rows, pool, thread);
  start(a, tile, rows, s);
  for (int64_t first = begin; first < end; first += kKeys) {
    const int64_t count = std::min(kKeys, end - first);
    pack_keys<Stored>(a, tile, first, count, s.keys);
    pack_values<Stored>(a, tile, first, count, s.values);
    multiply(rows, s.query, a.key_dim, s.keys, a.key_dim * kPanel, (count + kPanel - 1) / kPanel, a.key_dim, s.scores,
             kKeys, false);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t p = position + row / group;
      const int64_t from = a.window ? p - a.window + 1 - first : 0;
      soften(a, s, row, std::max<int64_t>(0, from), std::min(count, p + 1 - first), count);
    }
    multiply(rows, s.scores, kKeys, s.values, kKeys * kPanel, s.mixed_stride / kPanel, count, s.mixed, s.mixed_stride,
             true);
  }
  finish(a, tile, s);
}

template void prefill_tile<float>(const Attention&, const PrefillTile&, Pool&, int);
template void prefill_tile<BFloat16>(const Attention&, const PrefillTile&, Pool&, int);

}  // namespace rayfin
