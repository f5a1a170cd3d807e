#include "layers/decoder.h"

#include <algorithm>

#include "matmul/epilogue.h"

namespace rayfin {

namespace {

int64_t qkv_size(const Decoder& d) { return (d.heads + d.kv_heads) * d.key_dim + d.kv_heads * d.value_dim; }

// A step's activations, laid out in its workspace.
struct Activations {
  float *x, *normed, *qkv, *attended, *gated, *sampled_x, *sampled_attended, *before, *adapted;
  int64_t floats;

  Activations(const Decoder& d, const Step& s, float* memory) {
    const int64_t tokens = s.count, sampled = s.sampled_count;
    const int64_t rows = std::max(tokens, sampled), attended_size = d.heads * d.value_dim;
    float* at = memory;
    auto allocate = [&](int64_t count) {
      float* start = at;
      at += (count + 15) / 16 * 16;
      return start;
    };
    x = allocate(tokens * d.hidden);
    normed = allocate(rows * d.hidden);
    qkv = allocate(tokens * qkv_size(d));
    attended = allocate(tokens * attended_size);
    gated = allocate(rows * d.intermediate);
    sampled_x = allocate(sampled * d.hidden);
    sampled_attended = allocate(sampled * attended_size);
    before = adapted = nullptr;
    if (s.adapters) {
      const int64_t widest = std::max(qkv_size(d), 2 * d.intermediate), deepest = std::max(widest, attended_size);
      before = allocate(rows * std::max(widest, d.hidden));
      adapted = allocate(std::max(lora_workspace_floats(*s.adapters, deepest, widest),
                                  lora_workspace_floats(*s.sampled_adapters, deepest, widest)));
    }
    floats = at - memory;
  }
};

void embed(Pool& pool, const Decoder& d, const Step& s, float* x) {
  const int64_t group = std::max<int64_t>(1, 4096 / d.hidden);
  pool.run((s.count + group - 1) / group, [&](int64_t tile, int) {
    for (int64_t i = tile * group; i < std::min(s.count, (tile + 1) * group); ++i) {
      float* row = x + i * d.hidden;
      if (s.tokens[i] < 0) {
        const float* from = s.given + (-1 - s.tokens[i]) * d.hidden;
        std::copy(from, from + d.hidden, row);
        continue;
      }
      d.embedding->read_row(s.tokens[i], row);
      if (d.embedding_scale != 1.0f)
        for (int64_t k = 0; k < d.hidden; ++k) row[k] *= d.embedding_scale;
    }
  });
}

// Returns x, or its norm in `normed` if there is a weight.
const float* norm_in(Pool& pool, const Decoder& d, const float* x, int64_t rows, const float* weight, float* normed) {
  if (!weight) return x;
  rms_norm(pool, x, d.hidden, rows, d.hidden, weight, d.eps, nullptr, 0, 1.0f, normed, d.hidden);
  return normed;
}

// What the rows' adapters add to the projections of a layer.
struct Adapted {
  const LoraRows* rows;  // null: nothing
  int64_t layer;
  const Activations& a;

  // `parts` linear layers share the projection.
  Epilogue epilogue(Pool& pool, Projection projection, int64_t parts, const Matrix& weight, const float* input) const {
    return epilogue(pool, projection, parts, weight.inputs, weight.outputs, input);
  }
  Epilogue epilogue(Pool& pool, Projection projection, int64_t parts, int64_t inputs, int64_t outputs,
                    const float* input) const {
    Epilogue made;
    if (!rows) return made;
    lora_rows(pool, *rows, layer * kProjections + projection, parts, input, inputs, outputs, a.adapted, a.before);
    made.before = a.before;
    made.before_stride = outputs;
    return made;
  }
};

// x += residual_scale * out_norm(input W^T + bias), in one pass if there is no out_norm.
void add_projection(Pool& pool, const Decoder& d, const Matrix& weight, const float* bias, const float* out_norm,
                    const float* input, int64_t rows, float* x, float* normed, Epilogue epilogue) {
  epilogue.bias = bias;
  if (!out_norm) {
    epilogue.residual = x;
    epilogue.residual_stride = d.hidden;
    epilogue.alpha = d.residual_scale;
    matmul(pool, weight, input, weight.inputs, rows, x, d.hidden, epilogue);
    return;
  }
  matmul(pool, weight, input, weight.inputs, rows, normed, d.hidden, epilogue);
  rms_norm(pool, normed, d.hidden, rows, d.hidden, out_norm, d.eps, x, d.hidden, d.residual_scale, x, d.hidden);
}

void attend(Pool& pool, const Decoder& d, const Layer& layer, const Step& s, const Activations& a,
            const Adapted& adapted) {
  const float* input = norm_in(pool, d, a.x, s.count, layer.attention_norm, a.normed);
  const int64_t stride = qkv_size(d), first = layer.qkv->outputs;
  Epilogue epilogue = adapted.epilogue(pool, kQkv, 3, d.hidden, stride, input);
  epilogue.bias = layer.qkv_bias;
  matmul(pool, *layer.qkv, input, d.hidden, s.count, a.qkv, stride, epilogue);
  if (layer.qkv_rest)
    matmul(pool, *layer.qkv_rest, input, d.hidden, s.count, a.qkv + first, stride, epilogue.from_column(first));
  const int64_t* slots = s.slots + layer.group * s.group_slots;
  prepare_heads(pool, {a.qkv, layer.query_norm, layer.key_norm, layer.cos, layer.sin, s.positions, slots,
                       layer.k_pages, layer.v_pages, stride, s.count, d.heads, d.kv_heads, d.key_dim, d.value_dim,
                       d.rotary_dim, d.storage, d.whole_norm, d.eps});
  Attention attended{};
  attended.query = a.qkv;
  attended.k_pages = layer.k_pages;
  attended.v_pages = layer.v_pages;
  attended.page_tables = s.page_tables + layer.group * s.group_tables;
  attended.query_start = s.query_start;
  attended.kv_len = s.kv_len;
  attended.sees_to = s.sees_to;
  attended.sinks = layer.sinks;
  attended.out = a.attended;
  attended.query_stride = stride;
  attended.table_stride = s.table_stride;
  attended.rows = s.rows;
  attended.decoding = s.decoding;
  attended.page_size = s.page_size;
  attended.heads = d.heads;
  attended.kv_heads = d.kv_heads;
  attended.key_dim = d.key_dim;
  attended.value_dim = d.value_dim;
  attended.window = layer.window;
  attended.storage = d.storage;
  attended.scale = layer.scale;
  attended.softcap = layer.softcap;
  attention(pool, attended);
}

// x[i] += row g of `added`, of this layer, where token places[i] stands for row g (images, DeepStack). Without places
// x has a row for each token.
void add_given(const Decoder& d, const Step& s, int64_t layer, const int64_t* places, int64_t rows, float* x) {
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t token = s.tokens[places ? places[i] : i];
    if (token >= 0) continue;
    const float* from = s.added + ((-1 - token) * s.added_layers + layer) * d.hidden;
    for (int64_t k = 0; k < d.hidden; ++k) x[i * d.hidden + k] += from[k];
  }
}

void gather(const float* x, int64_t size, const int64_t* rows, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) std::copy_n(x + rows[i] * size, size, out + i * size);
}

// Copies the input of layer `layer`, or the last output, to the part of `taps` that is for it, if there is one.
void copy_tap(const Decoder& d, const Step& s, int64_t layer, const float* x) {
  for (int64_t tap = 0; tap < s.tap_count; ++tap) {
    if (s.tap_layers[tap] != layer) continue;
    for (int64_t i = 0; i < s.count; ++i)
      std::copy_n(x + i * d.hidden, d.hidden, s.taps + (i * s.tap_count + tap) * d.hidden);
  }
}

void compute_logits(Pool& pool, const Decoder& d, const Step& s, const float* x, float* normed) {
  Epilogue epilogue;
  epilogue.bias = d.head_bias;
  epilogue.alpha = d.logit_scale;
  const float* input = norm_in(pool, d, x, s.sampled_count, d.final_norm, normed);
  matmul(pool, *d.head, input, d.hidden, s.sampled_count, s.logits, d.vocabulary, epilogue);
  if (d.logit_softcap <= 0.0f) return;
  pool.run(s.sampled_count, [&](int64_t row, int) {
    float* logits = s.logits + row * d.vocabulary;
    for (int64_t i = 0; i < d.vocabulary; i += kWidth) {
      const int64_t count = d.vocabulary - i;
      store_part(logits + i, tanh(load_part(logits + i, count) / d.logit_softcap) * d.logit_softcap, count);
    }
  });
}

}  // namespace

int64_t workspace_floats(const Decoder& d, const Step& s) { return Activations(d, s, nullptr).floats; }

void run_decoder(Pool& pool, const Decoder& d, const Step& s) {
  const Activations a(d, s, s.workspace);
  embed(pool, d, s, a.x);
  float *x = a.x, *attended = a.attended;
  int64_t rows = s.count;
  const bool taps_last = s.tap_count && s.tap_layers[s.tap_count - 1] == d.layer_count;
  for (int64_t i = 0; i < d.layer_count; ++i) {
    const Layer& layer = d.layers[i];
    Adapted adapted{s.adapters, i, a};
    copy_tap(d, s, i, x);
    attend(pool, d, layer, s, a, adapted);
    if (i + 1 == d.layer_count && !taps_last) {  // no later layer reads the other tokens
      gather(x, d.hidden, s.sampled, s.sampled_count, a.sampled_x);
      gather(attended, d.heads * d.value_dim, s.sampled, s.sampled_count, a.sampled_attended);
      x = a.sampled_x, attended = a.sampled_attended, rows = s.sampled_count;
      adapted.rows = s.sampled_adapters;
    }
    add_projection(pool, d, *layer.attention_out, layer.attention_out_bias, layer.attention_out_norm, attended, rows, x,
                   a.normed, adapted.epilogue(pool, kAttentionOut, 1, *layer.attention_out, attended));
    const float* input = norm_in(pool, d, x, rows, layer.mlp_norm, a.normed);
    Epilogue epilogue = adapted.epilogue(pool, kGateUp, 2, *layer.gate_up, input);
    epilogue.bias = layer.gate_up_bias;
    epilogue.activation = int(d.activation);
    matmul(pool, *layer.gate_up, input, d.hidden, rows, a.gated, d.intermediate, epilogue);
    add_projection(pool, d, *layer.down, layer.down_bias, layer.mlp_out_norm, a.gated, rows, x, a.normed,
                   adapted.epilogue(pool, kDown, 1, *layer.down, a.gated));
    if (i < s.added_layers) add_given(d, s, i, x == a.sampled_x ? s.sampled : nullptr, rows, x);
  }
  if (taps_last) {
    copy_tap(d, s, d.layer_count, x);
    gather(x, d.hidden, s.sampled, s.sampled_count, a.sampled_x);
    x = a.sampled_x;
  }
  compute_logits(pool, d, s, x, a.normed);
}

}  // namespace rayfin
