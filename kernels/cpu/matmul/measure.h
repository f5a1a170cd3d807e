// Measures the machine's peak, the reference for benchmarks.
#pragma once

#include "matmul/matrix.h"
#include "common/pool.h"

namespace rayfin {

// Reads a float32 matrix once, as the matmul does; the result keeps the compiler from removing the reads.
float read_all(Pool& pool, const Matrix& data);

// Runs FMAs in registers on every thread, out [threads]; returns the number of floating point operations.
double multiply_all(Pool& pool, float* out);

}  // namespace rayfin
