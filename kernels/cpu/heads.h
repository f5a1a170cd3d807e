// What happens to a token's query, key and value between their projection and attention.
#pragma once

#include "norms.h"

namespace rayfin {

// Normalises query and key heads, turns them by their position, and puts key and value into their page slot.
// The same struct is laid out in decoder.py; keep both in step.
struct Heads {
  float* qkv;                // [T, (heads + kv_heads) * key_dim + kv_heads * value_dim], queries changed in place
  const float* query_norm;   // [key_dim], or of all heads if `whole_norm`; null = none
  const float* key_norm;
  const float* cos;          // [positions, rotary_dim / 2]; null = no rotary embedding
  const float* sin;
  const int64_t* positions;  // [T]
  const int64_t* slots;      // [T]
  void* k_pages;
  void* v_pages;
  int64_t stride, tokens;
  int64_t heads, kv_heads, key_dim, value_dim;
  int64_t rotary_dim;  // dims of a head that are turned, from the first; pairs are half of them apart
  int64_t storage;     // of the pages
  int64_t whole_norm;
  float eps;
};

void prepare_heads(Pool& pool, const Heads& h);

}  // namespace rayfin
