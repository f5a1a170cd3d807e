// Prefill attention, many queries against many keys: two matrix products for each tile of keys with a softmax between
// them (FlashAttention, Dao et al., 2022), then the tiles are merged. Blocks of keys and values are copied from their
// pages into fp32 panels, the layout that the matmul's register tile reads; all queries of a tile share each copy.
#include <algorithm>
#include <cmath>

#include "paged_attention/attention.h"
#include "matmul/register_tile.h"
#include "paged_attention/softmax.h"

namespace rayfin {

namespace {

constexpr int kChains = 2;  // chains of a score that are summed at once
constexpr int64_t kScored = kRows / kChains;  // rows scored at once

// The lane of a vector that holds the i-th chain of a score. Neighbours are added in pairs, then these pairs, in the
// order in which `fold` and `sum` add lanes.
constexpr int64_t lane_of(int64_t i) {
  int64_t lane = 0;
  for (int64_t bit = 1; bit < kWidth; bit *= 2, i /= 2) lane = lane * 2 + i % 2;
  return lane;
}

// A thread's memory for one tile of `rows` queries. The depth of queries and keys is in the order of the chains:
// [kWidth / kChains][depth / kWidth][kChains], with kScored queries side by side.
struct Scratch {
  float *query, *scores, *mixed, *part, *keys, *values;
  Sums *sums, *part_sums;
  int64_t* place;  // [key_dim] position of a dim in that order
  int64_t* ends;   // [tokens] past the last key that a token sees
  int64_t depth, tile_keys, mixed_stride, group;

  template <class Stored>
  Scratch(const Attention& a, int64_t rows, Pool& pool, int thread, Stored)
      : depth(padded_keys(a)), tile_keys(keys_per_tile(a)), mixed_stride(padded_values(a)), group(a.group()) {
    const int64_t panels = kKeys * (depth + mixed_stride), last = 4 + 2 * (a.key_dim + rows / group);
    float* memory = pool.scratch<float>(thread, rows * (depth + tile_keys + 2 * mixed_stride + 4) + panels + last);
    keys = memory;
    values = keys + kKeys * depth;
    scores = values + kKeys * mixed_stride;
    mixed = scores + rows * tile_keys;
    part = mixed + rows * mixed_stride;
    query = part + rows * mixed_stride;
    sums = reinterpret_cast<Sums*>(query + rows * depth);
    part_sums = sums + rows;
    place = reinterpret_cast<int64_t*>(part_sums + rows);
    ends = place + a.key_dim;
    const int64_t steps = depth / kWidth;
    int64_t chain[kWidth];
    for (int64_t i = 0; i < kWidth; ++i) chain[lane_of(i)] = i;
    for (int64_t d = 0; d < a.key_dim; ++d) {
      const int64_t at = panel_place<Stored>(d);
      place[d] = (chain[at % kWidth] / kChains * steps + at / kWidth) * kChains + chain[at % kWidth] % kChains;
    }
  }
};

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

// Transposes four keys: dim d goes to out[place[d] * kPanel + 0 .. 3].
template <class Stored>
RAYFIN_INLINE void transpose(const Stored* const* rows, int64_t dim, const int64_t* place, float* out) {
  int64_t d = 0;
  for (; d + 4 <= dim; d += 4) {
    Vec4 a = load4(rows[0] + d), b = load4(rows[1] + d), c = load4(rows[2] + d), e = load4(rows[3] + d);
    Vec4 ab0 = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab1 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    Vec4 ce0 = __builtin_shufflevector(c, e, 0, 4, 1, 5), ce1 = __builtin_shufflevector(c, e, 2, 6, 3, 7);
    Vec4 columns[4] = {
        __builtin_shufflevector(ab0, ce0, 0, 1, 4, 5), __builtin_shufflevector(ab0, ce0, 2, 3, 6, 7),
        __builtin_shufflevector(ab1, ce1, 0, 1, 4, 5), __builtin_shufflevector(ab1, ce1, 2, 3, 6, 7)};
    for (int i = 0; i < 4; ++i) std::memcpy(out + place[d + i] * kPanel, &columns[i], sizeof(columns[i]));
  }
  for (; d < dim; ++d) {
    Vec4 four = {widen(rows[0][d]), widen(rows[1][d]), widen(rows[2][d]), widen(rows[3][d])};
    std::memcpy(out + place[d] * kPanel, &four, sizeof(four));
  }
}

// The slots of keys first .. first + count - 1 of `row`. Keys before `seen` get the slot of `seen`.
struct Block {
  int64_t slots[kKeys];
  int64_t count;

  Block(const Attention& a, int64_t row, int64_t first, int64_t count, int64_t seen) : count(count) {
    int64_t position = std::max(first, seen), offset = position % a.page_size;
    const int32_t* page = a.page_tables + row * a.table_stride + position / a.page_size;
    for (int64_t i = 0; i < count; ++i) {
      slots[i] = *page * a.page_size + offset;
      if (first + i < seen) continue;
      if (++offset == a.page_size && i + 1 < count) ++page, offset = 0;
    }
  }
};

// Copies a block's keys of one head to panels [kKeys / kPanel][depth][kPanel]. The last group of four is filled up
// with the last key, whose extra scores are masked.
template <class Stored>
void pack_keys(const Attention& a, int64_t kv_head, const Block& block, const Scratch& s) {
  const Stored* pages = static_cast<const Stored*>(a.k_pages) + kv_head * a.key_dim;
  for (int64_t i = 0; i < block.count; i += 4) {
    const Stored* rows[4];
    for (int64_t j = 0; j < 4; ++j)
      rows[j] = pages + block.slots[std::min(i + j, block.count - 1)] * a.kv_heads * a.key_dim;
    transpose(rows, a.key_dim, s.place, s.keys + i / kPanel * kPanel * s.depth + i % kPanel);
  }
}

// Copies the same keys' values to panels [value_dim / kPanel][kKeys][kPanel].
template <class Stored>
void pack_values(const Attention& a, int64_t kv_head, const Block& block, float* panels) {
  const Stored* pages = static_cast<const Stored*>(a.v_pages) + kv_head * a.value_dim;
  for (int64_t i = 0; i < block.count; ++i) {
    const Stored* row = pages + block.slots[i] * a.kv_heads * a.value_dim;
    int64_t d = 0;
    for (; d + kPanel <= a.value_dim; d += kPanel) {
      store(panels + d * kKeys + i * kPanel, load(row + d));
      store(panels + d * kKeys + i * kPanel + kWidth, load(row + d + kWidth));
    }
    for (; d < a.value_dim; ++d) panels[d / kPanel * kPanel * kKeys + i * kPanel + d % kPanel] = widen(row[d]);
  }
}

// Calls f(row, rows) for even parts of at most `limit` rows.
template <class F>
RAYFIN_INLINE void each_rows(int64_t rows, int64_t limit, const F& f) {
  const int64_t blocks = (rows + limit - 1) / limit;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t row = rows * block / blocks;
    f(row, rows * (block + 1) / blocks - row);
  }
}

// out[kM][kPanel] = x . panel, in chains of `steps` FMAs that are added in pairs; kChains of them in registers.
// x: [kWidth / kChains][steps][kChains][kM].
template <int kM>
RAYFIN_INLINE void score_panel(const float* x, int64_t steps, const float* panel, float* out, int64_t out_stride) {
  constexpr int kLevels = __builtin_ctz(kWidth / kChains) + 1;
  alignas(64) float pending[kLevels][kM * kPanel];  // sums of 1, 2, 4 .. times kChains chains that wait for their neighbour
  for (int group = 0; group < kWidth / kChains; ++group) {
    Vec acc[kChains][kM][2] = {};
    for (int64_t k = 0; k < steps; k += 2) {
#pragma GCC unroll 4
      for (int i = 0; i < 2 * kChains; ++i, x += kM, panel += kPanel) {
        const Vec low = load(panel), high = load(panel + kWidth);
#pragma GCC unroll 16
        for (int m = 0; m < kM; ++m) {
          const Vec a = broadcast(x[m]);
          acc[i % kChains][m][0] += a * low;
          acc[i % kChains][m][1] += a * high;
        }
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < kM; ++m) acc[0][m][0] += acc[1][m][0], acc[0][m][1] += acc[1][m][1];
    float* level = pending[0];
    for (int done = group; done & 1; done >>= 1, level += kM * kPanel) {
#pragma GCC unroll 16
      for (int m = 0; m < kM; ++m) {
        acc[0][m][0] += load(level + m * kPanel);
        acc[0][m][1] += load(level + m * kPanel + kWidth);
      }
    }
    const bool whole = (group + 1) * kChains == kWidth;
    float* to = whole ? out : level;
    const int64_t stride = whole ? out_stride : kPanel;
#pragma GCC unroll 16
    for (int m = 0; m < kM; ++m) {
      store(to + m * stride, acc[0][m][0]);
      store(to + m * stride + kWidth, acc[0][m][1]);
    }
  }
}

// Scores all rows against the `keys` keys in s.keys, of position `first` on, from column `at` of the tile. Panels that no
// row of a block sees are skipped.
void score(const Scratch& s, int64_t rows, int64_t at, int64_t keys, int64_t first) {
  for (int64_t panel = 0; panel < (keys + kPanel - 1) / kPanel; ++panel) {
    each_rows(rows, kScored, [&](int64_t row, int64_t count) {
      if (s.ends[(row + count - 1) / s.group] - first <= panel * kPanel) return;
      with_rows(count, [&](auto m) {
        if constexpr (m.value <= kScored)
          score_panel<m.value>(s.query + row * s.depth, s.depth / kWidth, s.keys + panel * kPanel * s.depth,
                               s.scores + row * s.tile_keys + at + panel * kPanel, s.tile_keys);
      });
    });
  }
}

// s.part (+)= weights from column `at` times the `keys` values in s.values, of position `first` on.
void mix(const Scratch& s, int64_t rows, int64_t at, int64_t keys, int64_t first) {
  for (int64_t panel = 0; panel < s.mixed_stride / kPanel; ++panel) {
    each_rows(rows, kRows, [&](int64_t row, int64_t count) {
      const int64_t depth = std::clamp<int64_t>(s.ends[(row + count - 1) / s.group] - first, 0, keys);
      rows_by_panel<false>(count, s.scores + row * s.tile_keys + at, s.tile_keys, s.values + panel * kPanel * kKeys,
                           depth, s.part + row * s.mixed_stride + panel * kPanel, s.mixed_stride, at > 0);
    });
  }
}

void finish(const Attention& a, const PrefillTile& tile, const Scratch& s) {
  for (int64_t token = tile.first; token < tile.last; ++token) {
    for (int64_t g = 0; g < s.group; ++g) {
      const int64_t row = (token - tile.first) * s.group + g, head = tile.kv_head * s.group + g;
      const float by = factor(s.sums[row], a.sinks ? a.sinks + head : nullptr);
      float* out = a.out + (token * a.heads + head) * a.value_dim;
      const float* mixed = s.mixed + row * s.mixed_stride;
      for (int64_t d = 0; d < a.value_dim; ++d) out[d] = mixed[d] * by;
    }
  }
}

void start(const Attention& a, const PrefillTile& tile, int64_t rows, const Scratch& s) {
  if (a.key_dim < s.depth) std::memset(s.query, 0, size_t(rows * s.depth) * sizeof(float));
  each_rows(rows, kScored, [&](int64_t first, int64_t count) {
    const float* query[kScored];
    for (int64_t i = 0; i < count; ++i)
      query[i] = a.query + (tile.first + (first + i) / s.group) * a.query_stride +
                 (tile.kv_head * s.group + (first + i) % s.group) * a.key_dim;
    for (int64_t d = 0; d < a.key_dim; ++d) {
      float* out = s.query + first * s.depth + s.place[d] * count;
      for (int64_t i = 0; i < count; ++i) out[i] = query[i][d] * a.scale;
    }
  });
  if (a.key_dim < s.depth) std::memset(s.keys, 0, size_t(kKeys * s.depth) * sizeof(float));
  if (a.value_dim < s.mixed_stride) std::memset(s.values, 0, size_t(kKeys * s.mixed_stride) * sizeof(float));
}

}  // namespace

template <class Stored>
void prefill_tile(const Attention& a, const PrefillTile& tile, Pool& pool, int thread) {
  const int64_t group = a.group(), rows = (tile.last - tile.first) * group;
  const int64_t cached = a.kv_len[tile.row] - (a.query_start[tile.row + 1] - a.query_start[tile.row]);
  const int64_t position = cached + tile.first - a.query_start[tile.row];  // position of the first query
  const int64_t seen = a.window ? std::max<int64_t>(0, position - a.window + 1) : 0;  // the first key that any query sees
  Scratch s(a, rows, pool, thread, Stored());
  start(a, tile, rows, s);
  for (int64_t i = 0; i < tile.last - tile.first; ++i)
    s.ends[i] = a.sees_to ? a.sees_to[tile.first + i] + 1 : position + i + 1;
  const int64_t end = s.ends[tile.last - tile.first - 1];
  for (int64_t begin = seen / kKeys * kKeys, next; begin < end; begin = next) {
    next = std::min(begin / s.tile_keys * s.tile_keys + s.tile_keys, end);
    for (int64_t first = begin; first < next; first += kKeys) {
      const Block block(a, tile.row, first, std::min(kKeys, next - first), seen);
      pack_keys<Stored>(a, tile.kv_head, block, s);
      score(s, rows, first - begin, block.count, first);
    }
    const int64_t count = rounded_up(next - begin, kWidth);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t p = position + row / group, from = a.window ? std::max<int64_t>(0, p - a.window + 1 - begin) : 0;
      const int64_t to = std::min(next, s.ends[row / group]) - begin;
      s.part_sums[row] = soften(s.scores + row * s.tile_keys, from, to, count, a.softcap);
    }
    for (int64_t first = begin; first < next; first += kKeys) {
      const Block block(a, tile.row, first, std::min(kKeys, next - first), seen);
      pack_values<Stored>(a, tile.kv_head, block, s.values);
      mix(s, rows, first - begin, block.count, first);
    }
    if (begin <= seen) {  // the first tile: nothing to merge with yet
      std::swap(s.sums, s.part_sums);
      std::swap(s.mixed, s.part);
      continue;
    }
    for (int64_t row = 0; row < rows; ++row)
      merge(s.sums[row], s.mixed + row * s.mixed_stride, s.part_sums[row], s.part + row * s.mixed_stride,
            s.mixed_stride);
  }
  finish(a, tile, s);
}

template void prefill_tile<float>(const Attention&, const PrefillTile&, Pool&, int);
template void prefill_tile<BFloat16>(const Attention&, const PrefillTile&, Pool&, int);

}  // namespace rayfin
