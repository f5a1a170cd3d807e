#include "matmul/measure.h"

#include <algorithm>

namespace rayfin {

namespace {

constexpr int64_t kTileFloats = 64 << 10;
constexpr int kStreams = 4;  // as in the matmul for one row
constexpr int64_t kSteps = 1 << 16;
constexpr int kChains = kRows == 12 ? 20 : 10;  // more than latency x ports, fewer than registers

}  // namespace

float read_all(Pool& pool, const Matrix& data) {
  const float* start = data.panel<float>(0);
  const int64_t tiles = data.panels * data.panel_size() / kTileFloats;
  std::atomic<int64_t> odd{0};
  pool.run(tiles, [&](int64_t tile, int) {
    constexpr int64_t kPart = kTileFloats / kStreams;
    const float* at = start + tile * kTileFloats;
    Vec acc[kStreams] = {};
    for (int64_t i = 0; i < kPart; i += 16) {
      for (int stream = 0; stream < kStreams; ++stream) {
        const float* line = at + stream * kPart + i;
        __builtin_prefetch(line + 128, 0, 3);
        for (int v = 0; v < 16; v += kWidth) acc[stream] += load(line + v);
      }
    }
    Vec total{};
    for (const Vec& stream : acc) total += stream;
    odd += sum(total) == 1.5f;
  });
  return float(odd.load());
}

double multiply_all(Pool& pool, float* out) {
  pool.run(pool.threads(), [&](int64_t tile, int) {
    Vec acc[kChains], factor = broadcast(0.999f + float(tile) * 1e-6f);
    for (int c = 0; c < kChains; ++c) acc[c] = factor + float(c);
    for (int64_t i = 0; i < kSteps; ++i) {
#pragma GCC unroll 20
      for (int c = 0; c < kChains; ++c) acc[c] = acc[c] * factor + factor;
    }
    Vec total = acc[0];
    for (int c = 1; c < kChains; ++c) total += acc[c];
    out[tile] = sum(total);
  });
  return 2.0 * kChains * kWidth * double(kSteps) * pool.threads();
}

}  // namespace rayfin
