#include "attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "matrix.h"

namespace rayfin {

namespace {

// Keys of a decode tile: about so many bytes of keys and values (a dozen microseconds of memory).
// Fixed by the layout alone, so that a row's sums have one order whatever else is in the step.
constexpr int64_t kTileBytes = 256 << 10;
constexpr int64_t kLeastKeys = 64, kMostKeys = 512;

int64_t keys_per_tile(const Attention& a) {
  int64_t element = a.storage == kBFloat16 ? 2 : 4;
  int64_t bytes = a.kv_heads * (a.key_dim + a.value_dim) * element;
  int64_t by_scores = (256 << 10) / (int64_t(sizeof(float)) * a.heads);  // their scores stay in cache
  return std::clamp(std::min(kTileBytes / bytes, by_scores), kLeastKeys, kMostKeys) / 16 * 16;
}

struct Plan {
  std::vector<PrefillTile> prefill;
  std::vector<DecodeTile> decode;
  std::vector<int64_t> first_tile;  // [decoding + 1]
};

Plan make_plan(const Attention& a) {
  Plan plan;
  const int64_t keys = keys_per_tile(a);
  for (int64_t row = 0; row < a.decoding; ++row) {
    plan.first_tile.push_back(int64_t(plan.decode.size()));
    const int64_t end = a.kv_len[row], begin = a.window ? std::max<int64_t>(0, end - a.window) : 0;
    for (int64_t first = begin / keys * keys; first < end; first += keys)
      plan.decode.push_back({row, std::max(first, begin), std::min(first + keys, end), nullptr, nullptr, nullptr});
  }
  plan.first_tile.push_back(int64_t(plan.decode.size()));
  const int64_t tokens = prefill_tokens(a);
  for (int64_t row = a.decoding; row < a.rows; ++row) {
    const int64_t start = a.query_start[row], end = a.query_start[row + 1];
    // The last queries see most keys: the longest tiles go first.
    for (int64_t last = end; last > start; last -= std::min(tokens, last - start))
      for (int64_t kv_head = 0; kv_head < a.kv_heads; ++kv_head)
        plan.prefill.push_back({row, std::max(start, last - tokens), last, kv_head});
  }
  return plan;
}

// The tiles of one row, added up in order, to its outputs.
void merge(const Attention& a, const DecodeTile* tiles, int64_t count, int64_t row) {
  float* out = a.out + a.query_start[row] * a.heads * a.value_dim;
  for (int64_t head = 0; head < a.heads; ++head, out += a.value_dim) {
    float most = a.sinks ? a.sinks[head] : kNever;
    for (int64_t i = 0; i < count; ++i) most = std::max(most, tiles[i].most[head]);
    float total = a.sinks ? std::exp(a.sinks[head] - most) : 0.0f;
    for (int64_t i = 0; i < count; ++i) total += tiles[i].total[head] * std::exp(tiles[i].most[head] - most);
    for (int64_t i = 0; i < count; ++i) {
      const float share = std::exp(tiles[i].most[head] - most) / total;
      const float* mixed = tiles[i].mixed + head * a.value_dim;
      for (int64_t d = 0; d < a.value_dim; ++d) out[d] = (i ? out[d] : 0.0f) + share * mixed[d];
    }
  }
}

template <class Stored>
void attention_as(Pool& pool, const Attention& a) {
  Plan plan = make_plan(a);
  const int64_t prefill = int64_t(plan.prefill.size()), decode = int64_t(plan.decode.size());
  const int64_t part = a.heads * (2 + a.value_dim);
  float* parts = pool.workspace<float>(decode * part);
  for (int64_t i = 0; i < decode; ++i) {
    DecodeTile& tile = plan.decode[size_t(i)];
    tile.most = parts + i * part;
    tile.total = tile.most + a.heads;
    tile.mixed = tile.total + a.heads;
  }
  pool.run(prefill + decode, [&](int64_t i, int thread) {
    if (i < prefill) {
      prefill_tile<Stored>(a, plan.prefill[size_t(i)], pool, thread);
    } else {
      decode_tile<Stored>(a, plan.decode[size_t(i - prefill)], pool, thread);
    }
  });
  for (int64_t row = 0; row < a.decoding; ++row) {
    const int64_t first = plan.first_tile[size_t(row)];
    merge(a, plan.decode.data() + first, plan.first_tile[size_t(row) + 1] - first, row);
  }
}

}  // namespace

void attention(Pool& pool, const Attention& a) {
  if (a.storage == kBFloat16) {
    attention_as<BFloat16>(pool, a);
  } else {
    attention_as<float>(pool, a);
  }
}

}  // namespace rayfin
