// Decode attention: one query per row against many keys, bound by memory bandwidth. Measurements behind the design:
// * One stream of addresses gets half the bandwidth of four: the hardware prefetches a few lines for each stream,
//   within a 4 KiB page. So four keys are multiplied at once that lie a quarter of the tile apart, and each quarter
//   is read in order, all heads of a token, then the next token. Values have to be added in their order
//   (attention.h), so they are prefetched in four streams instead.
// * The hardware does not prefetch across page borders, so each line is prefetched a few KiB ahead in its stream.
// * 16-bit elements are widened in pairs (load_panel), two vectors from one load: half the instructions.
#include <algorithm>

#include "paged_attention/attention.h"
#include "paged_attention/softmax.h"

namespace rayfin {

namespace {

constexpr int64_t kStreams = 4;  // keys multiplied at once: their sums fill the FMA pipes
constexpr int64_t kAheadBytes = 3 << 10;  // prefetch distance of a stream, rounded up to a power of two of keys
constexpr int kMaxHeads = kRows == 12 ? 6 : 3;  // heads whose sums fit into registers
constexpr int64_t kSharedValues = 16;  // values added between two accesses to the outputs, if several rows share them

template <class Stored>
RAYFIN_INLINE void fetch(const Stored* p) {
  __builtin_prefetch(p, 0, 2);
}

// scores[g][j * apart] = query g . key j, j < kStreams, for kG heads that share the keys. `next` is what to
// prefetch, or null.
template <int kG, class Stored>
RAYFIN_INLINE void score_keys(const float* query, int64_t query_stride, const Stored* const* keys,
                              const Stored* const* next, int64_t offset, int64_t dim, float* scores,
                              int64_t score_stride, int64_t apart) {
  constexpr int64_t kLine = 64 / int64_t(sizeof(Stored));
  Vec acc[kG][kStreams] = {};
  auto add = [&](int64_t d, const Vec* low, const Vec* high) {
    for (int g = 0; g < kG; ++g) {
      const Vec first = load(query + g * query_stride + d), second = load(query + g * query_stride + d + kWidth);
      for (int j = 0; j < kStreams; ++j) acc[g][j] += first * low[j];
      for (int j = 0; j < kStreams; ++j) acc[g][j] += second * high[j];
    }
  };
  int64_t d = 0;
  for (; d + kPanel <= dim; d += kPanel) {
    if (next && d % kLine == 0)
      for (int j = 0; j < kStreams; ++j)
        for (int64_t line = 0; line < kPanel; line += kLine) fetch(next[j] + offset + d + line);
    Vec low[kStreams], high[kStreams];
    for (int j = 0; j < kStreams; ++j) load_panel(keys[j] + offset + d, low[j], high[j]);
    add(d, low, high);
  }
  if (d < dim) {
    Vec low[kStreams], high[kStreams];
    for (int j = 0; j < kStreams; ++j) load_panel_some(keys[j] + offset + d, int(dim - d), low[j], high[j]);
    add(d, low, high);
  }
  for (int g = 0; g < kG; ++g) {
    const Vec4 four = sums(acc[g][0], acc[g][1], acc[g][2], acc[g][3]);
    for (int j = 0; j < kStreams; ++j) scores[g * score_stride + j * apart] = four[j];
  }
}

// mixed[g] += weights[g][j] * value j for kG heads and kP panels of the head's dims. A panel that is not whole has
// `rest` dims.
template <int kG, int kP, bool kWhole, class Stored>
RAYFIN_INLINE void add_panels(const float* weights, int64_t weight_stride, const Stored* const* values,
                              const Stored* const* next, int64_t offset, int64_t count, int rest, float* mixed,
                              int64_t mixed_stride) {
  constexpr int64_t kLine = 64 / int64_t(sizeof(Stored));
  Vec acc[kG][2 * kP];
  for (int g = 0; g < kG; ++g)
    for (int v = 0; v < 2 * kP; ++v) acc[g][v] = load(mixed + g * mixed_stride + v * kWidth);
  for (int64_t j = 0; j < count; ++j) {
    if (next)
      for (int64_t line = 0; line < kP * kPanel; line += kLine) fetch(next[j] + offset + line);
    Vec x[2 * kP];
    for (int p = 0; p < kP; ++p) {
      const Stored* at = values[j] + offset + p * kPanel;
      if (kWhole) {
        load_panel(at, x[2 * p], x[2 * p + 1]);
      } else {
        load_panel_some(at, rest, x[2 * p], x[2 * p + 1]);
      }
    }
    for (int g = 0; g < kG; ++g) {
      const Vec w = broadcast(weights[g * weight_stride + j]);
      for (int v = 0; v < 2 * kP; ++v) acc[g][v] += w * x[v];
    }
  }
  for (int g = 0; g < kG; ++g)
    for (int v = 0; v < 2 * kP; ++v) store(mixed + g * mixed_stride + v * kWidth, acc[g][v]);
}

// All dims of kG heads, for a block of values.
template <int kG, class Stored>
RAYFIN_INLINE void add_values(const float* weights, int64_t weight_stride, const Stored* const* values,
                              const Stored* const* next, int64_t offset, int64_t dim, int64_t count, float* mixed,
                              int64_t mixed_stride) {
  int64_t d = 0;
  for (; d + 2 * kPanel <= dim; d += 2 * kPanel)
    add_panels<kG, 2, true>(weights, weight_stride, values, next, offset + d, count, 0, mixed + d, mixed_stride);
  for (; d + kPanel <= dim; d += kPanel)
    add_panels<kG, 1, true>(weights, weight_stride, values, next, offset + d, count, 0, mixed + d, mixed_stride);
  if (d < dim)
    add_panels<kG, 1, false>(weights, weight_stride, values, next, offset + d, count, int(dim - d), mixed + d,
                             mixed_stride);
}

// Calls f(first head, heads as a compile-time constant) for the heads that share a key head, in even parts.
template <class F>
RAYFIN_INLINE void each_part(int64_t group, const F& f) {
  const int64_t parts = (group + kMaxHeads - 1) / kMaxHeads;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t first = group * part / parts;
    switch (group * (part + 1) / parts - first) {
      case 1: f(first, std::integral_constant<int, 1>()); break;
      case 2: f(first, std::integral_constant<int, 2>()); break;
      case 3: f(first, std::integral_constant<int, 3>()); break;
      case 4: if constexpr (kMaxHeads >= 4) f(first, std::integral_constant<int, 4>()); break;
      case 5: if constexpr (kMaxHeads >= 5) f(first, std::integral_constant<int, 5>()); break;
      case 6: if constexpr (kMaxHeads >= 6) f(first, std::integral_constant<int, 6>()); break;
    }
  }
}

// A thread's memory for one tile.
template <class Stored>
struct Scratch {
  const Stored** keys;    // [quarter, kStreams] address of each key; the nearest key's for slots without one
  const Stored** values;  // [slots] the same for values, in order
  const Stored** later;   // [slots] what to prefetch while each key is multiplied
  const Stored** later_values;
  float* query;           // [count, heads, query_stride] from to_panels
  float* scores;          // [count, heads, slots]
  int64_t lead;           // slots before the first key, so that each key has a fixed lane in the sum of weights
  int64_t slots, quarter;
  int64_t query_stride;

  Scratch(const Attention& a, const DecodeTile& tile, Pool& pool, int thread)
      : lead(tile.first % kWidth),
        slots(rounded_up(lead + tile.last - tile.first, kWidth)),
        quarter(slots / kStreams),
        query_stride(padded_keys(a)) {
    const int64_t heads = tile.count * a.heads, floats = heads * (query_stride + slots);
    char* memory = pool.scratch<char>(thread, floats * int64_t(sizeof(float)) + 4 * slots * int64_t(sizeof(void*)));
    query = reinterpret_cast<float*>(memory);
    scores = query + heads * query_stride;
    keys = reinterpret_cast<const Stored**>(scores + heads * slots);
    values = keys + slots;
    later = values + slots;
    later_values = later + slots;
  }
};

// The number of keys in kAheadBytes, rounded up to a power of two, at most 16.
inline int64_t keys_ahead(int64_t key_bytes) {
  int64_t keys = 1;
  while (keys < 16 && keys * key_bytes < kAheadBytes) keys *= 2;
  return keys;
}

template <class Stored>
void find_tokens(const Attention& a, const DecodeTile& tile, const Scratch<Stored>& s) {
  const int64_t key_size = a.kv_heads * a.key_dim, value_size = a.kv_heads * a.value_dim;
  const int64_t last = s.lead + tile.last - tile.first - 1;
  const int32_t* page = a.page_tables + tile.parts[0].row * a.table_stride + tile.first / a.page_size;
  int64_t offset = tile.first % a.page_size;
  for (int64_t stream = 0, i = 0; stream < kStreams; ++stream) {
    for (int64_t at = 0; at < s.quarter; ++at, ++i) {
      const int64_t slot = *page * a.page_size + offset;
      s.keys[at * kStreams + stream] = static_cast<const Stored*>(a.k_pages) + slot * key_size;
      s.values[i] = static_cast<const Stored*>(a.v_pages) + slot * value_size;
      if (i < s.lead || i >= last) continue;  // the next slot has no key
      if (++offset == a.page_size) ++page, offset = 0;
    }
  }
  const int64_t ahead = kStreams * keys_ahead(key_size * int64_t(sizeof(Stored)));
  for (int64_t i = 0; i < s.slots; ++i) {
    const int64_t target = i + ahead;
    s.later[i] = target < s.slots ? s.keys[target] : s.values[std::min(target - s.slots, s.slots - 1)];
  }
  // While a group of values is added, the next group is prefetched: the first of each quarter, then the second.
  const int64_t quarter = keys_ahead(value_size * int64_t(sizeof(Stored))), group = kStreams * quarter;
  for (int64_t first = 0; first < s.slots; first += group)
    for (int64_t i = 0; i < std::min(group, s.slots - first); ++i) {
      const int64_t target = first + group + i % kStreams * quarter + i / kStreams;
      s.later_values[first + i] = s.values[std::min(target, s.slots - 1)];
    }
}

// A head's query times `scale`, in the order of dims that load_panel gives, padded with zeros.
template <class Stored>
void to_panels(const float* query, int64_t dim, float scale, float* out) {
  std::fill_n(out, rounded_up(dim, kPanel), 0.0f);
  for (int64_t d = 0; d < dim; ++d) out[panel_place<Stored>(d)] = query[d] * scale;
}

}  // namespace

template <class Stored>
void decode_tile(const Attention& a, const DecodeTile& tile, Pool& pool, int thread) {
  const int64_t group = a.group(), heads = a.heads;
  const Scratch<Stored> s(a, tile, pool, thread);
  find_tokens(a, tile, s);
  for (int64_t r = 0; r < tile.count; ++r) {
    const float* query = a.query + a.query_start[tile.parts[r].row] * a.query_stride;
    for (int64_t head = 0; head < heads; ++head)
      to_panels<Stored>(query + head * a.key_dim, a.key_dim, a.scale, s.query + (r * heads + head) * s.query_stride);
  }

  for (int64_t i = 0; i < s.slots; i += kStreams) {
    for (int64_t kv_head = 0; kv_head < a.kv_heads; ++kv_head) {
      for (int64_t r = 0; r < tile.count; ++r) {
        each_part(group, [&](int64_t first, auto part) {
          const int64_t head = r * heads + kv_head * group + first;
          const Stored* const* next = r + first == 0 ? s.later + i : nullptr;
          score_keys<part.value>(s.query + head * s.query_stride, s.query_stride, s.keys + i, next,
                                 kv_head * a.key_dim, a.key_dim, s.scores + head * s.slots + i / kStreams, s.slots,
                                 s.quarter);
        });
      }
    }
  }
  const int64_t end = s.lead + tile.last - tile.first, mixed_stride = padded_values(a);
  for (int64_t r = 0; r < tile.count; ++r) {
    const DecodePart& part = tile.parts[r];
    for (int64_t head = 0; head < heads; ++head)
      part.sums[head] = soften(s.scores + (r * heads + head) * s.slots, s.lead, end, s.slots, a.softcap);
    std::fill_n(part.mixed, heads * mixed_stride, 0.0f);
  }
  const int64_t block = tile.count == 1 ? kStreams : kSharedValues;
  for (int64_t i = s.lead; i < end; i += block) {
    const int64_t n = std::min(block, end - i);
    for (int64_t kv_head = 0; kv_head < a.kv_heads; ++kv_head) {
      for (int64_t r = 0; r < tile.count; ++r) {
        each_part(group, [&](int64_t first, auto part) {
          const int64_t head = r * heads + kv_head * group + first;
          const Stored* const* next = r + first == 0 ? s.later_values + i : nullptr;
          add_values<part.value>(s.scores + head * s.slots + i, s.slots, s.values + i, next, kv_head * a.value_dim,
                                 a.value_dim, n, tile.parts[r].mixed + (head - r * heads) * mixed_stride,
                                 mixed_stride);
        });
      }
    }
  }
}

template void decode_tile<float>(const Attention&, const DecodeTile&, Pool&, int);
template void decode_tile<BFloat16>(const Attention&, const DecodeTile&, Pool&, int);

}  // namespace rayfin
