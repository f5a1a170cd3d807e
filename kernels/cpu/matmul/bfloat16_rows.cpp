#include "matmul/bfloat16_rows.h"

#if defined(__AVX512F__) && !defined(__AMX_TILE__)
#include <cpuid.h>
#endif

#include "common/pool.h"
#include "common/simd.h"

namespace rayfin {

bool has_bfloat16_dot() {
#if defined(__AMX_TILE__)
  return true;
#elif defined(__AVX512F__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
#else
  return false;
#endif
}

bool has_fast_bfloat16_dot() {
#if defined(__AVX512F__) && !defined(__AMX_TILE__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool is_amd = __get_cpuid(0, &a, &b, &c, &d) && c == signature_AMD_ecx;
  return is_amd && has_bfloat16_dot();
#else
  return has_bfloat16_dot();
#endif
}

void round_rows(Pool& pool, const float* x, int64_t x_stride, int64_t rows, int64_t inputs, BFloat16* out,
                int64_t stride) {
  pool.run(rows, [&](int64_t row, int) {
    const float* from = x + row * x_stride;
    BFloat16* to = out + row * stride;
    for (int64_t k = 0; k < inputs; ++k) narrow(from[k], to + k);
    for (int64_t k = inputs; k < stride; ++k) to[k] = {};
  });
}

}  // namespace rayfin
