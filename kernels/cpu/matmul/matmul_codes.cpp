#include "matmul/matmul_codes.h"

#include <algorithm>

#include "matmul/codes.h"
#include "matmul/epilogue.h"
#include "matmul/panel_tiles.h"

namespace rayfin {

namespace {

constexpr int64_t kFewRows = 4;  // up to here weights are widened for each tile, from there on once for all rows
// Depth steps that are widened at once: 16 KiB, half of the first-level cache.
constexpr int64_t kStrip = (16 << 10) / (kPanel * int64_t(sizeof(float)));
constexpr int64_t kChunkBytes = 256 << 10;  // a chunk's rows stay in the second-level cache, as in matmul.cpp
constexpr int64_t kMinChunk = 48, kMaxChunk = 192;
constexpr double kTileSeconds = 15e-6, kBytesPerSecond = 10e9, kFlopsPerSecond = 80e9;

constexpr int panels_at_once(int64_t rows) { return rows <= 2 ? 2 : 1; }

// Where a panel lies.
template <class Code, bool kZeros>
struct Panel {
  static constexpr bool kExponents = std::is_same_v<typename Code::Stored, uint8_t>;
  static constexpr bool kLeasts = std::is_same_v<typename Code::Zero, float>;
  const int32_t* words;
  const GroupFloats scales, leasts;
  const uint8_t* exponents;
  const int16_t* zeros;
  const int64_t stride;

  Panel(const Matrix& weight, int64_t index)
      : words(weight.words(index)),
        scales(weight, index, false),
        leasts(weight, index, kLeasts),
        exponents(weight.scales<uint8_t>() + index * weight.groups.count * kPanel),
        zeros(kZeros ? weight.zeros() + index * weight.groups.count * kPanel : nullptr),
        stride(weight.groups.count * kPanel) {}

  // Sets the scale of a group for vector `v` of the panels from this one on.
  RAYFIN_INLINE void set(Scale<Code, kZeros>& scale, int64_t group, int v) const {
    const int64_t at = v / 2 * stride + group * kPanel + v % 2 * kWidth;
    if constexpr (kLeasts) {
      scale.set(scales.at(group, v), leasts.at(group, v));
    } else if constexpr (kExponents) {
      scale.set(load_scales(exponents + at), nullptr);
    } else {
      scale.set(scales.at(group, v), kZeros ? zeros + at : nullptr);
    }
  }
};

RAYFIN_INLINE VecI load_words(const int32_t* p) {
  VecI v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

// Calls f(step) for the steps of a word; the compiler knows the shifts of a whole one.
template <class Code, class F>
RAYFIN_INLINE void for_steps(int64_t count, const F& f) {
  if (count >= Code::kSteps) {
#pragma GCC unroll 8
    for (int step = 0; step < Code::kSteps; ++step) f(step);
  } else {
    for (int step = 0; step < int(count); ++step) f(step);
  }
}

// out[m][p * kPanel ..] = x[m] . panel p, widened in registers. x[m][k] lies at x + m * x_stride + k.
template <class Code, bool kZeros, int kM, int kP>
RAYFIN_INLINE void codes_tile(const Code& code, const float* x, int64_t x_stride, const Matrix& weight, int64_t panel,
                              float* out) {
  const Groups& groups = weight.groups;
  const Panel<Code, kZeros> first(weight, panel);
  const int64_t panel_words = weight.panel_words();
  Vec acc[kM][2 * kP] = {};
  for (int64_t g = 0; g < groups.count; ++g) {
    Scale<Code, kZeros> scale[2 * kP];
#pragma GCC unroll 4
    for (int v = 0; v < 2 * kP; ++v) first.set(scale[v], g, v);
    const int32_t* words = first.words + g * groups.words * kPanel;
    const int64_t end = std::min((g + 1) * groups.size, weight.inputs);
    for (int64_t k = g * groups.size; k < end; k += Code::kSteps, words += kPanel) {
      VecI word[2 * kP];
#pragma GCC unroll 4
      for (int v = 0; v < 2 * kP; ++v) {
        const int32_t* at = words + v / 2 * panel_words + v % 2 * kWidth;
        if (v % 2 * kWidth * 4 % kLineBytes == 0)
          __builtin_prefetch(reinterpret_cast<const char*>(at) + kAheadBytes / kP, 0, 3);
        word[v] = load_words(at);
      }
      for_steps<Code>(end - k, [&](int step) RAYFIN_LAMBDA {
        Vec w[2 * kP];
#pragma GCC unroll 4
        for (int v = 0; v < 2 * kP; ++v) w[v] = scale[v].weights(code, word[v], step);
#pragma GCC unroll 4
        for (int m = 0; m < kM; ++m) {
          const Vec a = broadcast(x[m * x_stride + k + step]);
#pragma GCC unroll 4
          for (int v = 0; v < 2 * kP; ++v) acc[m][v] += a * w[v];
        }
      });
    }
  }
  for (int m = 0; m < kM; ++m)
    for (int v = 0; v < 2 * kP; ++v) store(out + (m * 2 * kP + v) * kWidth, acc[m][v]);
}

template <class Code, bool kZeros, int kM, int kP>
void few_rows(const Code& code, const Matrix& weight, const float* x, int64_t x_stride, int64_t panel, int64_t last,
              float* y, int64_t y_stride, const Epilogue& epilogue) {
  alignas(64) float out[kM * kP * kPanel];
  for (; panel + kP <= last; panel += kP) {
    codes_tile<Code, kZeros, kM, kP>(code, x, x_stride, weight, panel, out);
    for (int p = 0; p < kP; ++p)
      finish_panel(weight, panel + p, out + p * kPanel, kP * kPanel, kM, y, y_stride, epilogue);
  }
  if constexpr (kP > 1) few_rows<Code, kZeros, kM, kP / 2>(code, weight, x, x_stride, panel, last, y, y_stride, epilogue);
}

// Widens inputs first .. last - 1 of a panel to out [last - first][kPanel]; `first` begins a word.
template <class Code, bool kZeros>
void widen_strip(const Code& code, const Matrix& weight, const Panel<Code, kZeros>& panel, int64_t first, int64_t last,
                 float* out) {
  const Groups& groups = weight.groups;
  for (int64_t k = first; k < last;) {
    const int64_t g = k / groups.size, end = std::min((g + 1) * groups.size, last);
    const int32_t* words = panel.words + (g * groups.words + (k - g * groups.size) / Code::kSteps) * kPanel;
    Scale<Code, kZeros> scale[2];
    for (int v = 0; v < 2; ++v) panel.set(scale[v], g, v);
    for (; k < end; k += Code::kSteps, words += kPanel) {
      for (int64_t line = 0; line < kPanel; line += 16) __builtin_prefetch(words + kAheadBytes / 4 + line, 0, 3);
      const VecI word[2] = {load_words(words), load_words(words + kWidth)};
      float* at = out + (k - first) * kPanel;
      for_steps<Code>(end - k, [&](int step) RAYFIN_LAMBDA {
        for (int v = 0; v < 2; ++v) store(at + step * kPanel + v * kWidth, scale[v].weights(code, word[v], step));
      });
    }
    k = end;
  }
}

// Multiplies rows of x by panels first .. last - 1; all rows use each strip of a panel.
template <class Code, bool kZeros>
void many_rows(const Code& code, int64_t rows, const Matrix& weight, const float* x, int64_t x_stride, int64_t first,
               int64_t last, float* scratch, float* y, int64_t y_stride, const Epilogue& epilogue) {
  float *strip = scratch, *out = scratch + kStrip * kPanel;
  const int64_t blocks = (rows + kRows - 1) / kRows, group = weight.groups.size;
  for (int64_t panel = first; panel < last; ++panel) {
    const Panel<Code, kZeros> codes(weight, panel);
    for (int64_t k = 0, end; k < weight.inputs; k = end) {
      end = std::min(k + kStrip, weight.inputs);
      if (group % Code::kSteps) end = std::min(end, (k / group + 1) * group);  // each group begins a word
      widen_strip<Code, kZeros>(code, weight, codes, k, end, strip);
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t row = rows * block / blocks, count = rows * (block + 1) / blocks - row;
        rows_by_panel<false>(count, x + row * x_stride + k, x_stride, strip, end - k, out + row * kPanel, kPanel, k > 0);
      }
    }
    finish_panel(weight, panel, out, kPanel, rows, y, y_stride, epilogue);
  }
}

int64_t chunk_rows(int64_t rows, int64_t inputs) {
  if (rows <= kMinChunk) return rows;
  const int64_t limit = std::clamp(kChunkBytes / (inputs * int64_t(sizeof(float))), kMinChunk, kMaxChunk);
  const int64_t chunks = (rows + limit - 1) / limit, even = (rows + chunks - 1) / chunks;
  return std::min(rows, (even + kRows - 1) / kRows * kRows);
}

template <class Code, bool kZeros>
void matmul_by(const Code& code, Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t rows,
               float* y, int64_t y_stride, const Epilogue& epilogue) {
  const int64_t chunk = chunk_rows(rows, weight.inputs), chunks = (rows + chunk - 1) / chunk;
  const double flops = 2.0 * double(chunk) * double(weight.inputs * kPanel), bytes = 4.0 * double(weight.panel_words());
  const double seconds = std::max(flops / kFlopsPerSecond, bytes / kBytesPerSecond);
  const PanelTiles tiles(weight.panels, rows <= kFewRows ? panels_at_once(rows) : 1, int64_t(kTileSeconds / seconds) + 1,
                         chunks, pool.threads());
  pool.run(chunks * tiles.count(), [&](int64_t tile, int thread) {
    const int64_t start = tile / tiles.count() * chunk, count = std::min(chunk, rows - start);
    const PanelTiles::Range panels = tiles[tile % tiles.count()];
    if (rows <= kFewRows) {
      with_rows(rows, [&](auto m) {
        if constexpr (m.value <= kFewRows)
          few_rows<Code, kZeros, m.value, panels_at_once(m.value)>(code, weight, x, x_stride, panels.first, panels.last, y,
                                                                   y_stride, epilogue);
      });
      return;
    }
    float* scratch = pool.scratch<float>(thread, (kStrip + count) * kPanel);
    many_rows<Code, kZeros>(code, count, weight, x + start * x_stride, x_stride, panels.first, panels.last, scratch,
                            y + start * y_stride, y_stride, epilogue.from(start));
  });
}

// Rows of x with their values in the weight's order of inputs.
const float* reordered(Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t rows) {
  float* out = pool.workspace<float>(rows * weight.inputs);
  const int32_t* order = weight.order();
  pool.run((rows + 7) / 8, [&](int64_t tile, int) {
    for (int64_t row = tile * 8; row < std::min(rows, tile * 8 + 8); ++row)
      for (int64_t k = 0; k < weight.inputs; ++k) out[row * weight.inputs + k] = x[row * x_stride + order[k]];
  });
  return out;
}

}  // namespace

void matmul_codes(Pool& pool, const Matrix& weight, const float* x, int64_t x_stride, int64_t rows, float* y,
                  int64_t y_stride, const Epilogue& epilogue) {
  if (weight.order()) {
    x = reordered(pool, weight, x, x_stride, rows);
    x_stride = weight.inputs;
  }
  const auto run = [&](const auto& code) {
    using Code = std::decay_t<decltype(code)>;
    if (weight.zeros()) return matmul_by<Code, true>(code, pool, weight, x, x_stride, rows, y, y_stride, epilogue);
    matmul_by<Code, false>(code, pool, weight, x, x_stride, rows, y, y_stride, epilogue);
  };
  const auto run_plain = [&](const auto& code) {
    matmul_by<std::decay_t<decltype(code)>, false>(code, pool, weight, x, x_stride, rows, y, y_stride, epilogue);
  };
  const auto run_levels = [&](const auto& code) {
    matmul_by<std::decay_t<decltype(code)>, true>(code, pool, weight, x, x_stride, rows, y, y_stride, epilogue);
  };
  switch (weight.storage) {
    case kInt4:
      return run(Int4());
    case kCodes8:
      return run(Int8());
    case kTable4:
      return run_plain(Table4(weight.table()));
    case kFp8:
      return run_plain(Fp8());
    case kFp4:
      return run_plain(Fp4());
    case kLevels4:
      return run_levels(Levels4());
    case kLevels8:
      return run_levels(Levels8());
    default:
      return;
  }
}

}  // namespace rayfin
