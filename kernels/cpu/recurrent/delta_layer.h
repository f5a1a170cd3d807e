// A whole decoder layer of the gated delta rule: norm, projection, the rule, projection, norm, gated MLP.
#pragma once

#include "matmul/matmul.h"
#include "recurrent/states.h"

namespace rayfin {

// recurrent_rows.py declares the same struct; keep both in sync.
struct DeltaLayer {
  float* x;  // [T, hidden], changed in place
  const float* rule_norm;  // [hidden], before the rule
  const float* mlp_norm;   // [hidden], before the MLP
  const Matrix* in;        // hidden -> a line of GatedDelta::x
  const Matrix* out;       // [value_heads * value_dim] -> hidden
  const Matrix* gate_up;   // paired, hidden -> intermediate
  const Matrix* down;      // intermediate -> hidden
  const float* gate_up_bias;  // or null
  const float* down_bias;
  float* workspace;  // [T (hidden + lines + values + intermediate)]
  int64_t activation;
  float rule_eps, mlp_eps;
};

// `rule` has no x and no y: they are in the workspace. Each part gives what it gives alone, to the last bit.
void delta_layer(Pool& pool, const StateRows& rows, const GatedDelta& rule, const DeltaLayer& layer);

}  // namespace rayfin
