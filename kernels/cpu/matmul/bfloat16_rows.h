// Rows of x rounded to bfloat16, for products of two depth steps at once (vdpbf16ps).
#pragma once

#include <cstdint>

namespace rayfin {

class Pool;
struct BFloat16;

// Whether rounded rows can multiply 16-bit weights: on AMX tiles, or by AVX512-BF16.
bool has_bfloat16_dot();
// Whether that is faster than exact rows. With AMX it is. vdpbf16ps has the rate of an FMA on AMD's processors; on Intel's,
// where it is at most half of that, FMAs are faster.
bool has_fast_bfloat16_dot();

// Writes x to out [rows][stride], rounded to nearest; what is past the inputs is zero.
void round_rows(Pool& pool, const float* x, int64_t x_stride, int64_t rows, int64_t inputs, BFloat16* out,
                int64_t stride);

}  // namespace rayfin
