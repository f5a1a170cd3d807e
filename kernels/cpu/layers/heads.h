// Prepares a token's query, key and value between their projection and attention.
#pragma once

#include "layers/norms.h"

namespace rayfin {

// Normalizes query and key heads, applies rotary embedding, and writes key and value to their slot.
// decoder.py declares the same struct; keep both in sync.
struct Heads {
  float* qkv;                // [T, (heads + kv_heads) * key_dim + kv_heads * value_dim], changed in place
  const float* query_norm;   // [key_dim], or [heads * key_dim] if `whole_norm`; null = none
  const float* key_norm;
  const float* cos;          // [positions, rotary_dim / 2]; null = no rotary embedding
  const float* sin;
  const int64_t* positions;  // [T]
  const int64_t* slots;      // [T]
  void* k_pages;
  void* v_pages;
  int64_t stride, tokens;
  int64_t heads, kv_heads, key_dim, value_dim;
  int64_t rotary_dim;  // the first dims of a head are rotated, in pairs half of rotary_dim apart
  int64_t storage;     // Storage of the pages
  int64_t whole_norm;
  float eps;
};

void prepare_heads(Pool& pool, const Heads& h);

}  // namespace rayfin
