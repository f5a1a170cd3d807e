// Attention over paged keys and values, for a step of decoding rows and prompt chunks.
//
// A token's result is the same to the last bit for any batch, any sharing of pages, any number of threads and any
// split of its sequence into chunks: a decoded token that is computed again as part of a prompt keeps its bits.
// Results differ between instruction sets.
//
// For that, decode and prefill add up in one order:
// * A score is one chain of FMAs for each lane of a vector, over the dims that load_panel puts there. The chains are
//   added in pairs, as `sum` does.
// * Keys are cut into tiles of keys_per_tile at fixed positions. A tile's weights are relative to its largest score
//   and summed by lanes; its values are one chain of FMAs.
// * A row's tiles are merged in order (softmax.h).
#pragma once

#include "common/pool.h"
#include "common/simd.h"

namespace rayfin {

// One layer's attention in one step. Rows 0 .. decoding - 1 are chunks of one token.
// attention.py declares the same struct; keep both in sync.
struct Attention {
  const float* query;          // [T, heads, key_dim], tokens query_stride apart
  const void* k_pages;         // [pages, page_size, kv_heads, key_dim] of `storage`
  const void* v_pages;         // [pages, page_size, kv_heads, value_dim]
  const int32_t* page_tables;  // [rows, table_stride]
  const int32_t* query_start;  // [rows + 1]
  const int32_t* kv_len;       // [rows]
  const int32_t* sees_to;      // [T] position of the last key that a token sees, rising in a row; null: its own
  const float* sinks;          // [heads] or null
  float* out;                  // [T, heads, value_dim]
  int64_t query_stride, table_stride;
  int64_t rows, decoding, page_size;
  int64_t heads, kv_heads, key_dim, value_dim;
  int64_t window;  // keys that a query sees; 0 = all
  int64_t storage;  // kFloat32 or kBFloat16
  float scale;
  float softcap;  // 0 = none

  int64_t group() const { return heads / kv_heads; }
  int64_t slot(int64_t row, int64_t position) const {
    return int64_t(page_tables[row * table_stride + position / page_size]) * page_size + position % page_size;
  }
};

void attention(Pool& pool, const Attention& a);

constexpr int64_t kKeys = 64;               // keys of a block: two or more panels of any width
int64_t keys_per_tile(const Attention& a);  // a multiple of kKeys

struct Sums;

// A decode row's partial result over one tile of keys.
struct DecodePart {
  int64_t row;
  Sums* sums;    // [heads]
  float* mixed;  // [heads, padded_values] sum of exp(score - max) * value, dims in the order of load_panel
};
inline int64_t padded_keys(const Attention& a) { return (a.key_dim + kPanel - 1) / kPanel * kPanel; }
inline int64_t padded_values(const Attention& a) { return (a.value_dim + kPanel - 1) / kPanel * kPanel; }

// Keys first .. last - 1, all heads, for rows that share the pages of these keys: each key and value is read from
// memory once for all of them. A row's part is the same to the last bit, whichever rows share the tile.
struct DecodeTile {
  int64_t first, last;
  const DecodePart* parts;
  int64_t count;
};
template <class Stored>
void decode_tile(const Attention& a, const DecodeTile& tile, Pool& pool, int thread);

// Some queries of one prompt chunk, for the query heads of one key head.
struct PrefillTile {
  int64_t row, first, last;  // tokens of T
  int64_t kv_head;
};
template <class Stored>
void prefill_tile(const Attention& a, const PrefillTile& tile, Pool& pool, int thread);

constexpr float kNever = -__builtin_inff();

}  // namespace rayfin
