// What the machine can do, for benchmarks to divide by.
#pragma once

#include "matrix.h"
#include "pool.h"

namespace rayfin {

// Reads a float32 matrix once, as the matmul does; the result only keeps the compiler from leaving it out.
float read_all(Pool& pool, const Matrix& data);

// Makes FMAs in registers on every thread, out [threads]; returns the floating point operations.
double multiply_all(Pool& pool, float* out);

}  // namespace rayfin
