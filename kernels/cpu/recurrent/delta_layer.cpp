#include "recurrent/delta_layer.h"

#include "layers/norms.h"

namespace rayfin {

namespace {

// x += input W^T + bias
void add_product(Pool& pool, const Matrix& weight, const float* bias, const float* input, int64_t rows, float* x) {
  Epilogue epilogue;
  epilogue.bias = bias;
  epilogue.residual = x;
  epilogue.residual_stride = weight.outputs;
  matmul(pool, weight, input, weight.inputs, rows, x, weight.outputs, epilogue);
}

}  // namespace

void delta_layer(Pool& pool, const StateRows& rows, const GatedDelta& rule, const DeltaLayer& s) {
  const int64_t tokens = rows.starts[rows.rows], hidden = s.in->inputs;
  float *normed = s.workspace, *lines = normed + tokens * hidden, *values = lines + tokens * s.in->outputs;
  float* gated = values + tokens * s.out->inputs;
  auto norm = [&](const float* weight, float eps) {
    rms_norm(pool, s.x, hidden, tokens, hidden, weight, eps, nullptr, 0, 1.0f, normed, hidden);
  };
  norm(s.rule_norm, s.rule_eps);
  matmul(pool, *s.in, normed, hidden, tokens, lines, s.in->outputs, {});
  GatedDelta own = rule;
  own.x = lines;
  own.x_stride = s.in->outputs;
  own.y = values;
  gated_delta(pool, rows, own);
  add_product(pool, *s.out, nullptr, values, tokens, s.x);
  norm(s.mlp_norm, s.mlp_eps);
  Epilogue epilogue;
  epilogue.bias = s.gate_up_bias;
  epilogue.activation = int(s.activation);
  matmul(pool, *s.gate_up, normed, hidden, tokens, gated, s.down->inputs, epilogue);
  add_product(pool, *s.down, s.down_bias, gated, tokens, s.x);
}

}  // namespace rayfin
