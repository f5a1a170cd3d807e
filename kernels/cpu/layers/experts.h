// A mixture of experts: each row of x goes through the experts that the router chose for it.
#pragma once

#include "matmul/matmul.h"

namespace rayfin {

// experts.py declares the same struct; keep both in sync.
struct Experts {
  const Matrix* const* gate_up;  // [count], paired
  const Matrix* const* down;     // [count]
  const float* gate_up_bias;     // [count, 2 * intermediate], gate before up, or null
  const float* down_bias;        // [count, hidden], or null
  int64_t count, hidden, intermediate;
  int64_t activation;  // Activation in vmath.h
  ClampedSwish clamped;
};

// The router's choice of experts for each row. Ids of experts that do not exist are ignored.
struct Routing {
  const int64_t* chosen;  // [rows, top_k]
  const float* weights;   // [rows, top_k]
  int64_t rows, top_k;
};

int64_t experts_workspace_floats(const Experts& e, int64_t rows, int64_t top_k);

// y[r] = sum over ranks of weights[r, rank] * down(act(gate x[r]) * up x[r]), with biases, in the order of ranks: a
// row's result does not depend on the rows beside it. x and y are [rows, hidden], dense.
//
// Rows are gathered by expert, so that each expert's weights are read once.
void run_experts(Pool& pool, const Experts& e, const Routing& routing, const float* x, float* workspace, float* y);

}  // namespace rayfin
