#include "layers/experts.h"

#include <algorithm>

namespace rayfin {

namespace {

constexpr int64_t kFloatsAtOnce = 16 << 10;  // floats copied by a tile

// A call's memory: inputs and outputs of the experts, ordered by expert, and where each row lies.
struct Gathered {
  float *rows, *gated;
  int32_t *starts, *places;  // an expert's first row; the row of a choice, -1 for none
  int64_t floats;

  Gathered(const Experts& e, int64_t choices, float* memory) {
    float* at = memory;
    auto allocate = [&](int64_t count) {
      float* start = at;
      at += (count + 15) / 16 * 16;
      return start;
    };
    rows = allocate(choices * e.hidden);
    gated = allocate(choices * e.intermediate);
    starts = reinterpret_cast<int32_t*>(allocate(e.count + 1));
    places = reinterpret_cast<int32_t*>(allocate(choices));
    floats = at - memory;
  }
};

bool exists(const Experts& e, int64_t expert) { return expert >= 0 && expert < e.count; }

// A stable counting sort of choices by expert.
void place_rows(const Experts& e, const Routing& routing, const Gathered& g) {
  const int64_t choices = routing.rows * routing.top_k;
  std::fill_n(g.starts, e.count + 1, 0);
  for (int64_t i = 0; i < choices; ++i)
    if (exists(e, routing.chosen[i])) ++g.starts[routing.chosen[i] + 1];
  for (int64_t expert = 0; expert < e.count; ++expert) g.starts[expert + 1] += g.starts[expert];
  for (int64_t i = 0; i < choices; ++i) g.places[i] = exists(e, routing.chosen[i]) ? g.starts[routing.chosen[i]]++ : -1;
  for (int64_t expert = e.count; expert > 0; --expert) g.starts[expert] = g.starts[expert - 1];
  g.starts[0] = 0;
}

// Calls f(row) for all rows, each of which copies about `floats`.
template <class F>
void for_rows(Pool& pool, int64_t rows, int64_t floats, const F& f) {
  const int64_t group = std::max<int64_t>(1, kFloatsAtOnce / floats);
  pool.run((rows + group - 1) / group, [&](int64_t tile, int) {
    for (int64_t row = tile * group; row < std::min(rows, (tile + 1) * group); ++row) f(row);
  });
}

}  // namespace

int64_t experts_workspace_floats(const Experts& e, int64_t rows, int64_t top_k) {
  return Gathered(e, rows * top_k, nullptr).floats;
}

void run_experts(Pool& pool, const Experts& e, const Routing& routing, const float* x, float* workspace, float* y) {
  const int64_t top_k = routing.top_k;
  const Gathered g(e, routing.rows * top_k, workspace);
  place_rows(e, routing, g);
  for_rows(pool, routing.rows, top_k * e.hidden, [&](int64_t row) {
    for (int64_t i = row * top_k; i < (row + 1) * top_k; ++i)
      if (g.places[i] >= 0) std::copy_n(x + row * e.hidden, e.hidden, g.rows + g.places[i] * e.hidden);
  });
  Epilogue gate, plain;
  gate.activation = int(e.activation);
  gate.clamped = e.clamped;
  for (int64_t expert = 0; expert < e.count; ++expert) {
    const int64_t start = g.starts[expert], count = g.starts[expert + 1] - start;
    if (e.gate_up_bias) gate.bias = e.gate_up_bias + expert * 2 * e.intermediate;
    if (e.down_bias) plain.bias = e.down_bias + expert * e.hidden;
    float *rows = g.rows + start * e.hidden, *gated = g.gated + start * e.intermediate;
    matmul(pool, *e.gate_up[expert], rows, e.hidden, count, gated, e.intermediate, gate);
    matmul(pool, *e.down[expert], gated, e.intermediate, count, rows, e.hidden, plain);
  }
  for_rows(pool, routing.rows, top_k * e.hidden, [&](int64_t row) {
    float* out = y + row * e.hidden;
    std::fill_n(out, e.hidden, 0.0f);
    for (int64_t i = row * top_k; i < (row + 1) * top_k; ++i) {
      if (g.places[i] < 0) continue;
      const float *values = g.rows + g.places[i] * e.hidden, weight = routing.weights[i];
      for (int64_t k = 0; k < e.hidden; ++k) out[k] += weight * values[k];
    }
  });
}

}  // namespace rayfin
