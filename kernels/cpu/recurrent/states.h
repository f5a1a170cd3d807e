// Layers that keep a state per request: short convolutions, the gated delta rule, SSD.
//
// All tokens of a row go through the same instructions in the same order, whether they come one by one or in a chunk,
// alone or among other rows. So a state computed again in other chunks is the same to the last bit.
#pragma once

#include "common/pool.h"

namespace rayfin {

// The rows of a step: tokens starts[r] .. starts[r + 1] continue the state read[r], and write[r] gets the new one.
// recurrent_rows.py declares the same structs; keep them in sync.
struct StateRows {
  const int64_t* starts;  // [rows + 1]
  const int64_t* read;    // [rows]
  const int64_t* write;   // [rows], differs from all others, from all of read and of each
  const int64_t* past;    // [rows], 0 = the row begins with a state of zeros
  const int64_t* each;    // [T] or null: the state that gets the one behind a token too, for drafts; -1 = none
  int64_t rows;

  // each[token], or -1
  int64_t beside(int64_t token) const { return each ? each[token] : -1; }
};

constexpr int64_t kTaps = 16;  // the most of a short convolution

// y[t, c] = act(bias[c] + sum_j weight[j, c] x[t - taps + 1 + j, c]).
struct ShortConv {
  const float* x;       // [T, channels], rows x_stride apart
  const float* weight;  // [taps, channels]
  const float* bias;    // [channels] or null
  float* states;        // [slots, channels, width]: the last inputs
  float* y;             // [T, channels]
  int64_t x_stride, channels, taps, width;  // width >= taps - 1
  int64_t activation;
};

// S = exp(g) S + k (beta (v - exp(g) S^T k))^T;  y = S^T q. q and k are normalized to length 1, q then by key_dim^-0.5.
struct DeltaRule {
  const float* q;     // [T, key_heads, key_dim], tokens q_stride apart
  const float* k;
  const float* v;     // [T, value_heads, value_dim]
  const float* g;     // [T, value_heads]
  const float* beta;  // [T, value_heads]
  float* states;      // [slots, value_heads, key_dim, value_dim]
  float* y;           // [T, value_heads, value_dim]
  int64_t q_stride, k_stride, v_stride;
  int64_t key_heads, value_heads, key_dim, value_dim;
  int64_t normalize;
};

// A layer of the gated delta rule between its projections: short convolution, gates, the rule, and a norm of each head
// times SiLU of a gate. A line of x has queries, keys and values before their convolution, the gate z [value_heads,
// value_dim], b [value_heads] and a [value_heads]: beta = beta_scale sigmoid(b), g = rate softplus(a + shift).
struct GatedDelta {
  const float* x;          // [T, ...], lines x_stride apart
  const float* conv;       // [taps, channels], channels = 2 key_heads key_dim + value_heads value_dim
  const float* conv_bias;  // [channels] or null
  const float* rate;       // [value_heads]
  const float* shift;      // [value_heads]
  const float* norm;       // [value_dim]
  float* conv_states;      // [slots, channels, width]
  float* states;           // [slots, value_heads, key_dim, value_dim]
  float* workspace;        // [T (channels + 2 value_heads)]
  float* y;                // [T, value_heads, value_dim]
  int64_t x_stride, taps, width, activation;
  int64_t key_heads, value_heads, key_dim, value_dim, normalize;
  float eps, beta_scale;
};

// S = exp(dt a) S + dt x b^T;  y = S c + d x.
struct Ssd {
  const float* x;   // [T, heads, head_dim], tokens x_stride apart
  const float* dt;  // [T, heads]
  const float* a;   // [heads]
  const float* b;   // [T, groups, state_dim], tokens b_stride apart
  const float* c;   // [T, groups, state_dim], tokens c_stride apart
  const float* d;   // [heads] or null
  float* states;    // [slots, heads, head_dim, state_dim]
  float* y;         // [T, heads, head_dim]
  int64_t x_stride, b_stride, c_stride;
  int64_t heads, groups, head_dim, state_dim;
};

void short_conv(Pool& pool, const StateRows& rows, const ShortConv& s);
void delta_rule(Pool& pool, const StateRows& rows, const DeltaRule& s);
void gated_delta(Pool& pool, const StateRows& rows, const GatedDelta& s);
void ssd(Pool& pool, const StateRows& rows, const Ssd& s);

}  // namespace rayfin
