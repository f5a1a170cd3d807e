// Loads a library of kernels, as ctypes does, and multiplies with it: for machines that only an emulator stands for.
//   loads LIBRARY HASH-OF-THE-SOURCES
#include <dlfcn.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "matmul/matmul.h"

using namespace rayfin;

namespace {

void require(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

template <class Function>
Function* symbol(void* library, const char* name) {
  void* found = dlsym(library, name);
  require(found != nullptr, name);
  return reinterpret_cast<Function*>(found);
}

}  // namespace

int main(int count, char** arguments) {
  require(count == 3, "loads LIBRARY HASH");
  void* library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) require(false, dlerror());
  require(!std::strcmp(symbol<const char*()>(library, "rayfin_sources")(), arguments[2]), "built from other sources");
  const char* best = symbol<const char*()>(library, "rayfin_best_isa")();

  const int64_t outputs = 37, inputs = 70, rows = 5;
  std::vector<float> weights(outputs * inputs), x(rows * inputs), y(rows * outputs);
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = float(int(i * 7919 % 31) - 15) / 8;
  for (size_t i = 0; i < x.size(); ++i) x[i] = float(int(i * 104729 % 29) - 14) / 4;
  auto* create = symbol<Matrix*(int64_t, int64_t, int, int, void* const*)>(library, "rayfin_matrix_create");
  auto* fill = symbol<void(Matrix*, int64_t, int64_t, const void*, int64_t, int)>(library, "rayfin_matrix_fill");
  auto* multiply = symbol<void(Pool*, const Matrix*, const float*, int64_t, int64_t, float*, int64_t, const float*,
                               const float*, int64_t, float, int)>(library, "rayfin_matmul");
  Matrix* matrix = create(outputs, inputs, kFloat32, 0, nullptr);
  fill(matrix, 0, outputs, weights.data(), inputs, kFloat32);
  for (int threads : {1, 3}) {
    Pool* pool = symbol<Pool*(int)>(library, "rayfin_pool_create")(threads);
    multiply(pool, matrix, x.data(), inputs, rows, y.data(), outputs, nullptr, nullptr, 0, 1.0f, 0);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t output = 0; output < outputs; ++output) {
        double sum = 0;
        for (int64_t i = 0; i < inputs; ++i) sum += double(x[row * inputs + i]) * weights[output * inputs + i];
        require(std::fabs(sum - y[row * outputs + output]) < 1e-3, "a product is wrong");
      }
    }
    symbol<void(Pool*)>(library, "rayfin_pool_destroy")(pool);
  }
  symbol<void(Matrix*)>(library, "rayfin_matrix_destroy")(matrix);
  std::printf("%s\n", best);
  return 0;
}
