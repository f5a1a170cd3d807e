// The C interface, as library.py declares it to ctypes. The Python callers own the memory and check the sizes.
#include <memory>
#include <new>

#include "paged_attention/attention.h"
#include "layers/allowed.h"
#include "layers/decoder.h"
#include "layers/experts.h"
#include "layers/heads.h"
#include "layers/highest.h"
#include "layers/lora.h"
#include "common/isa.h"
#include "matmul/bfloat16_rows.h"
#include "matmul/matmul.h"
#include "matmul/matmul_rounded.h"
#include "matmul/measure.h"
#include "matmul/round_weights.h"
#include "layers/norms.h"
#include "recurrent/delta_layer.h"
#include "recurrent/states.h"

using namespace rayfin;

#define RAYFIN_API extern "C" __attribute__((visibility("default")))

namespace {

// Holds the pool for one operation.
struct Turn {
  explicit Turn(Pool* pool) : guard(pool->entry) {}
  std::lock_guard<std::mutex> guard;
};

}  // namespace

// The hash of all source files: library.py refuses a library that was built from others.
RAYFIN_API const char* rayfin_sources() { return RAYFIN_SOURCES; }

// The widest instruction set of this machine, which is the name of the library to load.
RAYFIN_API const char* rayfin_best_isa() { return best_isa(); }

RAYFIN_API Pool* rayfin_pool_create(int threads) { return new (std::nothrow) Pool(threads); }
RAYFIN_API void rayfin_pool_destroy(Pool* pool) { delete pool; }

// Sets whether products of bytes use the VNNI instruction, if the machine has it. They do by default.
RAYFIN_API void rayfin_pool_use_vnni(Pool* pool, int use) {
  Turn turn(pool);
  pool->vnni = use && has_vnni();
}

// Rounds the rows that 16-bit weights multiply to bfloat16 from now on, if that is faster here, or with `slower` wherever
// it can be done; else returns 0.
RAYFIN_API int rayfin_pool_round_rows(Pool* pool, int slower) {
  Turn turn(pool);
  return pool->rounds_rows = slower ? has_bfloat16_dot() : has_fast_bfloat16_dot();
}

// Without `parts` of another matrix, which must outlive this one, it is zeroed (rayfin_matrix_parts).
RAYFIN_API Matrix* rayfin_matrix_create(int64_t outputs, int64_t inputs, int storage, int paired, void* const* parts) {
  try {
    return new Matrix(outputs, inputs, Storage(storage), paired != 0, 0, false, parts);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

RAYFIN_API void rayfin_matrix_destroy(Matrix* matrix) { delete matrix; }

// The blocks of memory that hold a weight, and their sizes: [Matrix::kParts] each.
RAYFIN_API void rayfin_matrix_parts(const Matrix* matrix, void** memory, int64_t* bytes) {
  matrix->parts(memory, bytes);
}

RAYFIN_API void rayfin_matrix_fill(Matrix* matrix, int64_t first, int64_t count, const void* weights, int64_t stride,
                                   int storage) {
  if (storage == kBFloat16) {
    matrix->fill(first, count, static_cast<const BFloat16*>(weights), stride);
  } else {
    matrix->fill(first, count, static_cast<const float*>(weights), stride);
  }
}

// A weight of codes (Storage): `group` inputs share a scale. Some may round rows (Matrix::row_bytes). `order` [inputs] and `table` [16] may be null.
RAYFIN_API Matrix* rayfin_codes_create(int64_t outputs, int64_t inputs, int storage, int paired, int64_t group,
                                       int zeros, int row_bytes, const int32_t* order, const float* table,
                                       void* const* parts, int64_t span, int factors) {
  try {
    const SharedScales shared{span, factors != 0};
    auto matrix =
        std::make_unique<Matrix>(outputs, inputs, Storage(storage), paired != 0, group, zeros != 0, parts, shared);
    matrix->row_bytes = row_bytes;
    if (order) matrix->set_order(order);
    if (table) matrix->set_table(table);
    return matrix.release();
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

RAYFIN_API void rayfin_codes_fill(Matrix* matrix, int64_t first, int64_t count, const uint8_t* codes,
                                  const float* scales, const void* zeros) {
  matrix->fill_codes(first, count, codes, scales, zeros);
}

// The same of a weight with SharedScales; what it has not is null.
RAYFIN_API void rayfin_codes_fill_shared(Matrix* matrix, int64_t first, int64_t count, const uint8_t* codes,
                                         const uint16_t* scales, const int8_t* factors, const uint16_t* leasts,
                                         const int8_t* least_factors) {
  matrix->fill_codes(first, count, codes, SharedFloats{scales, factors}, SharedFloats{leasts, least_factors});
}

RAYFIN_API void rayfin_round_int8(Pool* pool, const float* weights, int64_t outputs, int64_t inputs, int8_t* codes,
                                  uint16_t* scales) {
  Turn turn(pool);
  round_int8(*pool, weights, outputs, inputs, codes, scales);
}

RAYFIN_API void rayfin_round_levels(Pool* pool, const float* weights, int64_t outputs, int64_t inputs, int top,
                                    int64_t span, uint8_t* codes, uint16_t* scales, int8_t* factors, uint16_t* leasts,
                                    int8_t* least_factors) {
  Turn turn(pool);
  round_levels(*pool, weights, outputs, inputs, top, span, codes, {scales, factors}, {leasts, least_factors});
}

RAYFIN_API void rayfin_codes_copy(Matrix* matrix, int64_t first, const Matrix* from, int64_t start, int64_t count) {
  matrix->copy_codes(first, *from, start, count);
}

RAYFIN_API void rayfin_matrix_rows(const Matrix* matrix, const int64_t* outputs, int64_t count, float* out,
                                   int64_t stride) {
  for (int64_t i = 0; i < count; ++i) matrix->read_row(outputs[i], out + i * stride);
}

// Whether every value is exactly a BFloat16.
RAYFIN_API int rayfin_fits_bfloat16(const float* values, int64_t count) {
  uint32_t rest = 0;
  for (int64_t i = 0; i < count; ++i) rest |= bit_cast<uint32_t>(values[i]) & 0xffff;
  return rest == 0;
}

RAYFIN_API void rayfin_matmul(Pool* pool, const Matrix* weight, const float* x, int64_t x_stride, int64_t rows,
                              float* y, int64_t y_stride, const float* bias, const float* residual,
                              int64_t residual_stride, float alpha, int activation) {
  Turn turn(pool);
  Epilogue epilogue;
  epilogue.bias = bias;
  epilogue.residual = residual;
  epilogue.residual_stride = residual_stride;
  epilogue.alpha = alpha;
  epilogue.activation = activation;
  matmul(*pool, *weight, x, x_stride, rows, y, y_stride, epilogue);
}

RAYFIN_API void rayfin_attention(Pool* pool, const Attention* a) {
  Turn turn(pool);
  attention(*pool, *a);
}

RAYFIN_API void rayfin_rms_norm(Pool* pool, const float* x, int64_t x_stride, int64_t rows, int64_t dim,
                                const float* weight, float eps, const float* residual, int64_t residual_stride,
                                float alpha, float* y, int64_t y_stride) {
  Turn turn(pool);
  rms_norm(*pool, x, x_stride, rows, dim, weight, eps, residual, residual_stride, alpha, y, y_stride);
}

RAYFIN_API void rayfin_highest(Pool* pool, const float* x, int64_t stride, int64_t rows, int64_t count,
                               int64_t* index) {
  Turn turn(pool);
  highest(*pool, x, stride, rows, count, index);
}

RAYFIN_API void rayfin_highest_allowed(Pool* pool, const float* x, int64_t stride, int64_t rows, int64_t count,
                                       const uint32_t* bits, int64_t words, const int64_t* place, int64_t* index) {
  Turn turn(pool);
  highest_allowed(*pool, x, stride, rows, count, Allowed{bits, words, place}, index);
}

RAYFIN_API void rayfin_copy_allowed(Pool* pool, const float* x, int64_t stride, int64_t rows, int64_t count,
                                    const uint32_t* bits, int64_t words, const int64_t* place, float* y) {
  Turn turn(pool);
  copy_allowed(*pool, x, stride, rows, count, Allowed{bits, words, place}, y);
}

RAYFIN_API void rayfin_prepare_heads(Pool* pool, const Heads* heads) {
  Turn turn(pool);
  prepare_heads(*pool, *heads);
}

RAYFIN_API int64_t rayfin_lora_workspace(const LoraRows* rows, int64_t inputs, int64_t outputs) {
  return lora_workspace_floats(*rows, inputs, outputs);
}

RAYFIN_API void rayfin_lora_rows(Pool* pool, const LoraRows* rows, int64_t index, int64_t parts, const float* x,
                                 int64_t inputs, int64_t outputs, float* workspace, float* before) {
  Turn turn(pool);
  lora_rows(*pool, *rows, index, parts, x, inputs, outputs, workspace, before);
}

RAYFIN_API int64_t rayfin_decoder_workspace(const Decoder* decoder, const Step* step) {
  return workspace_floats(*decoder, *step);
}

RAYFIN_API void rayfin_decoder_run(Pool* pool, const Decoder* decoder, const Step* step) {
  Turn turn(pool);
  run_decoder(*pool, *decoder, *step);
}

RAYFIN_API int64_t rayfin_experts_workspace(const Experts* experts, int64_t rows, int64_t top_k) {
  return experts_workspace_floats(*experts, rows, top_k);
}

RAYFIN_API void rayfin_experts_run(Pool* pool, const Experts* experts, const Routing* routing, const float* x,
                                   float* workspace, float* y) {
  Turn turn(pool);
  run_experts(*pool, *experts, *routing, x, workspace, y);
}

RAYFIN_API void rayfin_short_conv(Pool* pool, const StateRows* rows, const ShortConv* conv) {
  Turn turn(pool);
  short_conv(*pool, *rows, *conv);
}

RAYFIN_API void rayfin_delta_rule(Pool* pool, const StateRows* rows, const DeltaRule* rule) {
  Turn turn(pool);
  delta_rule(*pool, *rows, *rule);
}

RAYFIN_API void rayfin_gated_delta(Pool* pool, const StateRows* rows, const GatedDelta* layer) {
  Turn turn(pool);
  gated_delta(*pool, *rows, *layer);
}

RAYFIN_API void rayfin_delta_layer(Pool* pool, const StateRows* rows, const GatedDelta* rule,
                                   const DeltaLayer* layer) {
  Turn turn(pool);
  delta_layer(*pool, *rows, *rule, *layer);
}

RAYFIN_API void rayfin_ssd(Pool* pool, const StateRows* rows, const Ssd* scan) {
  Turn turn(pool);
  ssd(*pool, *rows, *scan);
}

RAYFIN_API float rayfin_read_all(Pool* pool, const Matrix* data) {
  Turn turn(pool);
  return read_all(*pool, *data);
}

RAYFIN_API double rayfin_multiply_all(Pool* pool, float* out) {
  Turn turn(pool);
  return multiply_all(*pool, out);
}
