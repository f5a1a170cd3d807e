// Intel's matrix tiles (AMX): eight registers of up to 16 rows of 64 bytes, and their products.
//
// Inline assembly, because GCC's intrinsics take only literal register numbers and do not declare that they
// read and write memory. A product of bf16 pairs, C[m][n] += A[m][2k] * B[k][2n] + A[m][2k+1] * B[k][2n+1],
// adds exact products in fp32, in an order that depends on the depth alone.
#pragma once

#if defined(__AMX_TILE__)

#include <algorithm>
#include <cstdint>

namespace rayfin {

constexpr int kRegisterRows = 16;   // rows of a tile
constexpr int kRegisterBytes = 64;  // bytes of a row

// Configures the eight registers of this thread, from construction to destruction. Done for each tile of a pool's
// job (a tenth of a microsecond), because other code in the process uses the registers as well, and a thread
// without tile state is cheaper to switch.
class TileShapes {
 public:
  // Register i has rows[i] rows of 64 bytes.
  explicit TileShapes(const uint8_t (&rows)[8]) {
    for (int i = 0; i < 8; ++i) {
      config_.row_bytes[i] = rows[i] ? kRegisterBytes : 0;
      config_.rows[i] = rows[i];
    }
    asm volatile("ldtilecfg %0" : : "m"(config_));
  }
  // Register i has rows[i] rows of bytes[i] bytes.
  TileShapes(const uint8_t (&rows)[8], const uint8_t (&bytes)[8]) {
    std::copy_n(rows, 8, config_.rows);
    std::copy_n(bytes, 8, config_.row_bytes);
    asm volatile("ldtilecfg %0" : : "m"(config_));
  }
  ~TileShapes() { asm volatile("tilerelease" : : : "memory"); }
  TileShapes(const TileShapes&) = delete;
  TileShapes& operator=(const TileShapes&) = delete;

 private:
  struct Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };
  alignas(64) Config config_;
};

template <int kTile>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

// Loads rows of 64 bytes, `stride` bytes apart.
template <int kTile>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
}

// C += A B of bf16 pairs, fp32 sums.
template <int kC, int kA, int kB>
inline void multiply_bfloat16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

// C += A B of signed bytes in fours, int32 sums.
template <int kC, int kA, int kB>
inline void multiply_int8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

}  // namespace rayfin

#endif
