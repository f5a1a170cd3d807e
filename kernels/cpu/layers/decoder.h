// Runs a whole decoder in one call: embedding, layers, logits of the sampled tokens.
//
//   x = embedding * scale
//   for each layer:   x += residual_scale * out_norm(attention(in_norm(x)))
//                     x += residual_scale * out_norm(down(act(gate(in_norm(x))) * up(in_norm(x))))
//   logits = cap(head(norm(x)) * logit_scale)
//
// Every norm, bias and cap may be absent. Llama, Qwen 2 and 3, Mistral, Phi-3, Gemma 2 and 3, OLMo 2
// and Granite are of this form. decoder.py declares the same structs; keep both in sync.
#pragma once

#include "paged_attention/attention.h"
#include "layers/heads.h"
#include "layers/lora.h"
#include "matmul/matmul.h"

namespace rayfin {

struct Layer {
  const float *attention_norm, *attention_out_norm, *mlp_norm, *mlp_out_norm;
  const Matrix *qkv, *qkv_rest, *attention_out, *gate_up, *down;  // qkv_rest: the last outputs of qkv, or null
  const float *qkv_bias, *attention_out_bias, *gate_up_bias, *down_bias;
  const float *query_norm, *key_norm, *sinks;
  const float *cos, *sin;
  void *k_pages, *v_pages;
  int64_t window, group;  // the group of layers whose page tables it reads
  float scale, softcap;
};

struct Decoder {
  const Layer* layers;
  const Matrix *embedding, *head;
  const float *final_norm, *head_bias;
  int64_t layer_count, hidden, intermediate, vocabulary;
  int64_t heads, kv_heads, key_dim, value_dim, rotary_dim;
  int64_t storage, whole_norm, activation;
  float eps, embedding_scale, residual_scale, logit_scale, logit_softcap;
};

struct Step {
  const int64_t *tokens, *positions, *slots;  // [T]; token -1 - g stands for row g of `given`
  const int64_t* sampled;                     // [S], indices in T
  const int32_t *page_tables, *query_start, *kv_len;
  float* logits;     // [S, vocabulary]
  float* workspace;  // workspace_floats floats
  const float* given;  // [G, hidden] inputs that are no embedded tokens (images), or null
  const LoraRows *adapters, *sampled_adapters;  // of the tokens, and of those at `sampled`; null: of none
  const int64_t* tap_layers;  // [tap_count], rising: the layers whose inputs go to `taps`; layer_count: the last output
  float* taps;                // [T, tap_count * hidden], or null
  const float* added;  // [G, added_layers, hidden] what the first layers add to those rows, or null
  const int32_t* sees_to;  // [T] as in Attention, or null
  int64_t count, sampled_count;
  int64_t table_stride, rows, decoding, page_size;
  int64_t tap_count, added_layers;
  int64_t group_tables, group_slots;  // entries from a group's page_tables and slots to the next one's
};

// The projections of a layer, in the order of an adapter's parts.
enum Projection { kQkv, kAttentionOut, kGateUp, kDown, kProjections };

int64_t workspace_floats(const Decoder& d, const Step& s);
void run_decoder(Pool& pool, const Decoder& d, const Step& s);

}  // namespace rayfin
