// One query against many keys: bound by memory. Pages hold all heads of a token side by side, so a tile
// takes all heads of its keys and reads memory straight through. Each line is fetched before its turn, across
// page borders too, which the hardware does not do: each key's line beside the same line of an earlier key.
// (Fetching the same lines in the order of their addresses was a fifth slower.)
#include <algorithm>

#include "attention.h"
#include "softmax.h"

namespace rayfin {

namespace {

constexpr int kKeys = 4;     // keys multiplied at once: their sums fill the FMA pipes
constexpr int64_t kAheadBytes = 16 << 10;
constexpr int kValues = 16;  // values added up between two visits to the outputs

template <class Stored>
RAYFIN_INLINE void fetch(const Stored* p) {
  __builtin_prefetch(p, 0, 2);  // not to the first level: 16 values a power of two apart would drive each other out
}

// scores[g][0 .. 3] = query g . key 0 .. 3, for kG heads that share the keys.
template <int kG, class Stored>
RAYFIN_INLINE void score_keys(const float* query, const Stored* const* keys, const Stored* const* next,
                              int64_t offset, int64_t dim, float* scores, int64_t score_stride) {
  Vec acc[kG][kKeys] = {};
  constexpr int64_t kLine = 64 / int64_t(sizeof(Stored));
  int64_t d = 0;
  for (; d + kWidth <= dim; d += kWidth) {
    if (d % kLine == 0)
      for (int j = 0; j < kKeys; ++j) fetch(next[j] + offset + d);
    Vec k[kKeys];
    for (int j = 0; j < kKeys; ++j) k[j] = load(keys[j] + offset + d);
    for (int g = 0; g < kG; ++g) {
      const Vec q = load(query + g * dim + d);
      for (int j = 0; j < kKeys; ++j) acc[g][j] += q * k[j];
    }
  }
  if (d < dim) {
    const int rest = int(dim - d);
    for (int g = 0; g < kG; ++g)
      for (int j = 0; j < kKeys; ++j)
        acc[g][j] += load_some(query + g * dim + d, rest) * load_some(keys[j] + offset + d, rest);
  }
  for (int g = 0; g < kG; ++g) {
    const Vec4 four = sums(acc[g][0], acc[g][1], acc[g][2], acc[g][3]);
    std::memcpy(scores + g * score_stride, &four, sizeof(four));
  }
}

// mixed[g] += weights[g][j] * value j for kG heads and kV vectors of the head's dims, `rest` lanes in the last
// vector if it is not whole.
template <int kG, int kV, bool kWhole, class Stored>
RAYFIN_INLINE void add_values(const float* weights, int64_t weight_stride, const Stored* const* values,
                              const Stored* const* next, int64_t offset, int64_t count, int rest, float* mixed,
                              int64_t mixed_stride) {
  constexpr int kVectorsPerLine = 64 / (kWidth * int(sizeof(Stored)));
  Vec acc[kG][kV];
  for (int g = 0; g < kG; ++g)
    for (int v = 0; v < kV; ++v) acc[g][v] = load(mixed + g * mixed_stride + v * kWidth);
  for (int64_t j = 0; j < count; ++j) {
    for (int v = 0; v < kV; v += kVectorsPerLine) fetch(next[j] + offset + v * kWidth);
    Vec x[kV];
    for (int v = 0; v < kV; ++v) {
      const Stored* at = values[j] + offset + v * kWidth;
      x[v] = kWhole ? load(at) : load_some(at, rest);
    }
    for (int g = 0; g < kG; ++g) {
      const Vec w = broadcast(weights[g * weight_stride + j]);
      for (int v = 0; v < kV; ++v) acc[g][v] += w * x[v];
    }
  }
  for (int g = 0; g < kG; ++g)
    for (int v = 0; v < kV; ++v) store(mixed + g * mixed_stride + v * kWidth, acc[g][v]);
}

// All dims of one head group, for a block of values.
template <int kG, class Stored>
void add_head_values(const float* weights, int64_t weight_stride, const Stored* const* values,
                     const Stored* const* next, int64_t offset, int64_t dim, int64_t count, float* mixed,
                     int64_t mixed_stride) {
  int64_t d = 0;
  for (; d + 4 * kWidth <= dim; d += 4 * kWidth)  // 3 heads x 4 vectors: a third fewer instructions than x 2
    add_values<kG, 4, true>(weights, weight_stride, values, next, offset + d, count, 0, mixed + d, mixed_stride);
  for (; d < dim; d += kWidth) {
    const int rest = int(std::min<int64_t>(kWidth, dim - d));
    if (rest == kWidth) {
      add_values<kG, 1, true>(weights, weight_stride, values, next, offset + d, count, 0, mixed + d, mixed_stride);
    } else {
      add_values<kG, 1, false>(weights, weight_stride, values, next, offset + d, count, rest, mixed + d, mixed_stride);
    }
  }
}

// A thread's memory for one tile.
template <class Stored>
struct Scratch {
  const Stored** keys;    // [pointers] where each key lies, the last one repeated
  const Stored** values;  // [pointers]
  const Stored** later;   // [pointers] what to fetch while each key is multiplied
  float* scores;          // [heads, score_stride]
  float* mixed;           // [heads, mixed_stride]
  int64_t score_stride, mixed_stride;

  Scratch(const Attention& a, int64_t count, Pool& pool, int thread) {
    const int64_t pointers = count + 2 * kValues;
    score_stride = rounded_up(count, 16);
    mixed_stride = rounded_up(a.value_dim, kWidth);
    const int64_t floats = a.heads * (score_stride + mixed_stride);
    char* memory = pool.scratch<char>(thread, floats * int64_t(sizeof(float)) + 3 * pointers * int64_t(sizeof(void*)));
    keys = reinterpret_cast<const Stored**>(memory);
    values = keys + pointers;
    later = values + pointers;
    scores = reinterpret_cast<float*>(later + pointers);
    mixed = scores + a.heads * score_stride;
  }
};

template <class Stored>
void find_tokens(const Attention& a, const DecodeTile& tile, int64_t count, const Scratch<Stored>& s) {
  const int64_t key_size = a.kv_heads * a.key_dim, value_size = a.kv_heads * a.value_dim;
  const int32_t* page = a.page_tables + tile.row * a.table_stride + tile.first / a.page_size;
  int64_t offset = tile.first % a.page_size;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t slot = *page * a.page_size + offset;
    s.keys[i] = static_cast<const Stored*>(a.k_pages) + slot * key_size;
    s.values[i] = static_cast<const Stored*>(a.v_pages) + slot * value_size;
    if (++offset == a.page_size) ++page, offset = 0;
  }
  std::fill_n(s.keys + count, 2 * kValues, s.keys[count - 1]);
  std::fill_n(s.values + count, 2 * kValues, s.values[count - 1]);
  // Memory answers after a hundred nanoseconds, in which several small keys are multiplied.
  const int64_t ahead = std::clamp<int64_t>(kAheadBytes / (key_size * int64_t(sizeof(Stored))), kKeys, 64);
  for (int64_t i = 0; i < count + kKeys; ++i) {
    const int64_t target = i + ahead;
    s.later[i] = target < count ? s.keys[target] : s.values[std::min(target - count, count - 1)];
  }
}

}  // namespace

template <class Stored>
void decode_tile(const Attention& a, const DecodeTile& tile, Pool& pool, int thread) {
  const int64_t count = tile.last - tile.first, group = a.group();
  const Scratch<Stored> s(a, count, pool, thread);
  find_tokens(a, tile, count, s);
  const float* query = a.query + a.query_start[tile.row] * a.query_stride;

  for (int64_t i = 0; i < count; i += kKeys) {
    for (int64_t kv_head = 0; kv_head < a.kv_heads; ++kv_head) {
      const int64_t offset = kv_head * a.key_dim;
      for (int64_t g = 0; g < group;) {
        const int64_t head = kv_head * group + g, left = group - g;
        const float* q = query + head * a.key_dim;
        float* out = s.scores + head * s.score_stride + i;
        if (left >= 3) {
          score_keys<3>(q, s.keys + i, s.later + i, offset, a.key_dim, out, s.score_stride), g += 3;
        } else if (left == 2) {
          score_keys<2>(q, s.keys + i, s.later + i, offset, a.key_dim, out, s.score_stride), g += 2;
        } else {
          score_keys<1>(q, s.keys + i, s.later + i, offset, a.key_dim, out, s.score_stride), g += 1;
        }
      }
    }
  }
  for (int64_t head = 0; head < a.heads; ++head) {
    float* scores = s.scores + head * s.score_stride;
    tile.most[head] = scale_scores(scores, count, a.scale, a.softcap);
    tile.total[head] = exp_scores(scores, count, tile.most[head]);
  }
  std::memset(s.mixed, 0, size_t(a.heads * s.mixed_stride) * sizeof(float));
  for (int64_t i = 0; i < count; i += kValues) {
    const int64_t n = std::min<int64_t>(kValues, count - i);
    for (int64_t kv_head = 0; kv_head < a.kv_heads; ++kv_head) {
      const int64_t offset = kv_head * a.value_dim;
      for (int64_t g = 0; g < group;) {
        const int64_t head = kv_head * group + g, left = group - g;
        const float* weights = s.scores + head * s.score_stride + i;
        float* mixed = s.mixed + head * s.mixed_stride;
        const Stored* const* values = s.values + i;
        const Stored* const* next = values + kValues;
        if (left >= 3) {
          add_head_values<3>(weights, s.score_stride, values, next, offset, a.value_dim, n, mixed, s.mixed_stride);
          g += 3;
        } else if (left == 2) {
          add_head_values<2>(weights, s.score_stride, values, next, offset, a.value_dim, n, mixed, s.mixed_stride);
          g += 2;
        } else {
          add_head_values<1>(weights, s.score_stride, values, next, offset, a.value_dim, n, mixed, s.mixed_stride);
          g += 1;
        }
      }
    }
  }
  for (int64_t head = 0; head < a.heads; ++head)
    std::memcpy(tile.mixed + head * a.value_dim, s.mixed + head * s.mixed_stride,
                size_t(a.value_dim) * sizeof(float));
}

template void decode_tile<float>(const Attention&, const DecodeTile&, Pool&, int);
template void decode_tile<BFloat16>(const Attention&, const DecodeTile&, Pool&, int);

}  // namespace rayfin
