#include "layers/lora.h"

#include <algorithm>

#include "matmul/epilogue.h"
#include "matmul/register_tile.h"

namespace rayfin {

namespace {

struct Block {
  const int64_t* rows;
  int64_t count;
  const LoraPart* parts;  // of the projection; null: none
};

Block block_of(const LoraRows& r, int64_t index, int64_t block) {
  const int64_t start = r.starts[block];
  const LoraPart* parts = r.adapters[block];
  return {r.order + start, r.starts[block + 1] - start, parts ? parts + index * kLoraParts : nullptr};
}

void clear(const Block& block, int64_t first, int64_t count, int64_t outputs, float* before) {
  for (int64_t i = 0; i < block.count; ++i) std::fill_n(before + block.rows[i] * outputs + first, count, 0.0f);
}

void gather(const Block& block, const float* x, int64_t inputs, float* rows) {
  for (int64_t i = 0; i < block.count; ++i) std::copy_n(x + block.rows[i] * inputs, inputs, rows + i * inputs);
}

#if defined(__AMX_TILE__)

// One block after the other: a weight in tiles is for `matmul` alone.
void add_blocks(Pool& pool, const LoraRows& r, int64_t index, int64_t parts, const float* x, int64_t inputs,
                int64_t outputs, float* workspace, float* before) {
  float *rows = workspace, *narrow = rows + r.most_rows * inputs, *wide = narrow + r.most_rows * r.most_rank;
  for (int64_t number = 0; number < r.blocks; ++number) {
    const Block block = block_of(r, index, number);
    clear(block, 0, outputs, outputs, before);
    if (!block.parts) continue;
    gather(block, x, inputs, rows);
    for (int64_t i = 0; i < parts; ++i) {
      const LoraPart& part = block.parts[i];
      if (!part.a || !part.count) continue;
      Epilogue plain, scaled;
      scaled.alpha = part.scale;
      matmul(pool, *part.a, rows, inputs, block.count, narrow, part.a->outputs, plain);
      matmul(pool, *part.b, narrow, part.a->outputs, block.count, wide, part.count, scaled);
      for (int64_t row = 0; row < block.count; ++row)
        std::copy_n(wide + row * part.count, part.count, before + block.rows[row] * outputs + part.first);
    }
  }
}

#else

// The first vector of a panel's sums: a weight of up to kWidth outputs has no more.
template <int kM, class Weight>
RAYFIN_INLINE void half_panel(const float* x, int64_t x_stride, const Weight* weights, int64_t depth, float* y,
                              int64_t y_stride) {
  Vec sums[kM] = {};
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; ++k) {
    Vec low, high;
    load_panel(weights + k * kPanel, low, high);
#pragma GCC unroll 16
    for (int m = 0; m < kM; ++m) sums[m] += broadcast(x[m * x_stride + k]) * low;
  }
  for (int m = 0; m < kM; ++m) store(y + m * y_stride, sums[m]);
}

// Multiplies rows of x by all panels of a weight; `y` takes whole panels.
template <class Weight>
void by_panels(const Matrix& weight, const float* x, int64_t x_stride, int64_t rows, float* y, int64_t y_stride) {
  for (int64_t start = 0; start < rows; start += kRows) {
    const int64_t count = std::min<int64_t>(kRows, rows - start);
    if (weight.outputs <= kWidth) {
      with_rows(count, [&](auto m) {
        half_panel<m.value>(x + start * x_stride, x_stride, weight.panel<Weight>(0), weight.inputs,
                            y + start * y_stride, y_stride);
      });
      continue;
    }
    for (int64_t panel = 0; panel < weight.panels; ++panel)
      rows_by_panel<false>(count, x + start * x_stride, x_stride, weight.panel<Weight>(panel), weight.inputs,
                           y + start * y_stride + panel * kPanel, y_stride, false);
  }
}

// Multiplies narrow rows by B, and writes them times `scale` to their places.
template <class Weight>
void scatter(const LoraPart& part, const Block& block, const float* narrow, int64_t stride, int64_t outputs,
             float* before) {
  alignas(64) float sums[kRows * kPanel];
  const Matrix& weight = *part.b;
  for (int64_t start = 0; start < block.count; start += kRows) {
    const int64_t count = std::min<int64_t>(kRows, block.count - start);
    for (int64_t panel = 0; panel < weight.panels; ++panel) {
      rows_by_panel<false>(count, narrow + start * stride, stride, weight.panel<Weight>(panel), weight.inputs, sums,
                           kPanel, false);
      for (int64_t row = 0; row < count; ++row) {
        float* out = before + block.rows[start + row] * outputs + part.first;
        for (int half = 0; half < 2; ++half) {
          const int64_t column = panel * kPanel + half * kWidth;
          if (column >= part.count) break;
          const Vec value = load(sums + row * kPanel + half * kWidth) * part.scale;
          store_part(out + column, value, part.count - column);
        }
      }
    }
  }
}

void add_part(Pool& pool, int thread, const LoraPart& part, const Block& block, const float* x, int64_t inputs,
              int64_t outputs, float* before) {
  const int64_t stride = part.a->panels * kPanel;
  float* rows = pool.scratch<float>(thread, block.count * (inputs + stride));
  float* narrow = rows + block.count * inputs;
  gather(block, x, inputs, rows);
  if (part.a->storage == kBFloat16) {
    by_panels<BFloat16>(*part.a, rows, inputs, block.count, narrow, stride);
  } else {
    by_panels<float>(*part.a, rows, inputs, block.count, narrow, stride);
  }
  if (part.b->storage == kBFloat16) {
    scatter<BFloat16>(part, block, narrow, stride, outputs, before);
  } else {
    scatter<float>(part, block, narrow, stride, outputs, before);
  }
}

// A tile is one block and one linear layer.
void add_blocks(Pool& pool, const LoraRows& r, int64_t index, int64_t parts, const float* x, int64_t inputs,
                int64_t outputs, float* before) {
  pool.run(r.blocks * parts, [&](int64_t tile, int thread) {
    const Block block = block_of(r, index, tile / parts);
    const int64_t number = tile % parts;
    if (!block.parts) {
      if (number == 0) clear(block, 0, outputs, outputs, before);
      return;
    }
    const LoraPart& part = block.parts[number];
    if (part.a) {
      add_part(pool, thread, part, block, x, inputs, outputs, before);
    } else if (part.count) {
      clear(block, part.first, part.count, outputs, before);
    }
  });
}

#endif

}  // namespace

int64_t lora_workspace_floats(const LoraRows& r, int64_t inputs, int64_t outputs) {
#if defined(__AMX_TILE__)
  return r.most_rows * (inputs + r.most_rank + outputs);
#else
  (void)r, (void)inputs, (void)outputs;
  return 0;
#endif
}

void lora_rows(Pool& pool, const LoraRows& r, int64_t index, int64_t parts, const float* x, int64_t inputs,
               int64_t outputs, float* workspace, float* before) {
#if defined(__AMX_TILE__)
  add_blocks(pool, r, index, parts, x, inputs, outputs, workspace, before);
#else
  (void)workspace;
  add_blocks(pool, r, index, parts, x, inputs, outputs, before);
#endif
}

}  // namespace rayfin
