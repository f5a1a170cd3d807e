// A mixture of experts: each row of x goes through the few experts that its router chose.
#pragma once

#include "matmul.h"

namespace rayfin {

// The same struct is laid out in experts.py; keep both in step.
struct Experts {
  const Matrix* const* gate_up;  // [count], paired
  const Matrix* const* down;     // [count]
  int64_t count, hidden, intermediate;
  int64_t activation;  // of vmath.h
};

// What the router says: for each row its experts, of which one that does not exist counts for nothing.
struct Routing {
  const int64_t* chosen;  // [rows, top_k]
  const float* weights;   // [rows, top_k]
  int64_t rows, top_k;
};

int64_t experts_workspace_floats(const Experts& e, int64_t rows, int64_t top_k);

// y[r] = sum over ranks of weights[r, rank] * down(act(gate x[r]) * up x[r]), in the order of ranks: a row's result
// does not depend on the rows beside it. x and y are [rows, hidden], dense.
//
// Rows are gathered by expert, so that each expert's weights are read once.
void run_experts(Pool& pool, const Experts& e, const Routing& routing, const float* x, float* workspace, float* y);

}  // namespace rayfin
