// Low-rank adapters (LoRA, arXiv:2106.09685) of rows: what they add to the sums of a projection.
//
// Rows are grouped by adapter (as in Punica, arXiv:2310.18547, and S-LoRA, arXiv:2311.03285). A row's part does not
// depend on the rows beside it. kernels/cpu/lora.py declares the same structs; keep both in sync.
#pragma once

#include "matmul/matmul.h"

namespace rayfin {

constexpr int64_t kLoraParts = 3;  // linear layers of a projection, at most: query, key and value

// What an adapter does to one linear layer of a projection: scale * B (A x), added to `count` outputs from `first` on.
struct LoraPart {
  const Matrix *a, *b;  // [rank, inputs], [count, rank]; null: nothing
  int64_t first, count;  // count 0: the projection has no such layer
  float scale;
};

// The rows of a step in blocks, each of one adapter.
struct LoraRows {
  const int64_t* order;             // [rows], block after block
  const int64_t* starts;            // [blocks + 1], in `order`
  const LoraPart* const* adapters;  // [blocks] the first of an adapter's parts [projections][kLoraParts]; null: none
  int64_t blocks, most_rows, most_rank;  // blocks; rows of the largest, and the largest rank
};

int64_t lora_workspace_floats(const LoraRows& r, int64_t inputs, int64_t outputs);

// before[row] = what its adapter adds to projection `index`, of `parts` layers: [rows, outputs], dense, all of it
// written. x is [rows, inputs], dense. `workspace` has lora_workspace_floats.
void lora_rows(Pool& pool, const LoraRows& r, int64_t index, int64_t parts, const float* x, int64_t inputs,
               int64_t outputs, float* workspace, float* before);

}  // namespace rayfin
