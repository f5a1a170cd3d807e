#include "paged_attention/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include "matmul/matrix.h"
#include "paged_attention/softmax.h"

namespace rayfin {

namespace {

// Bytes of keys and values in a tile (a dozen microseconds of memory bandwidth).
// The size depends on the layout alone, so that a row's sums have the same order in any batch.
constexpr int64_t kTileBytes = 384 << 10;
constexpr int64_t kMinKeys = 128;  // a tile writes a few hundredths of what it reads
constexpr int64_t kMaxKeys = 256;   // the scores of all queries of a prefill tile stay in cache
constexpr int64_t kMaxRows = 8;     // rows of a decode tile: with these, reading its keys costs little
constexpr int64_t kQueryBytes = 256 << 10;  // queries and outputs of a decode tile, to stay in cache
constexpr int64_t kTilesPerThread = 4;      // takes precedence, so that all threads have work
constexpr int64_t kPromptRows = 192;  // queries x heads of a prefill tile: with these, copying keys costs little
constexpr int64_t kMinPromptRows = 96;    // fewer, if some threads would have no tile

// Tiles of the decode rows. Rows that share pages (a common prefix) are sorted side by side and share tiles.
class DecodePlan {
 public:
  DecodePlan(const Attention& a, Pool& pool)
      : a_(a), keys_(keys_per_tile(a)), part_(rounded_up(2 * a.heads, 16) + a.heads * padded_values(a)) {
    std::vector<int64_t> rows(static_cast<size_t>(a.decoding));
    std::iota(rows.begin(), rows.end(), 0);
    std::sort(rows.begin(), rows.end(), [&](int64_t one, int64_t other) {
      return std::lexicographical_compare(pages(one), pages(one) + page_count(one), pages(other),
                                          pages(other) + page_count(other));
    });
    int64_t blocks = 0;
    for (int64_t row = 0; row < a.decoding; ++row) {
      first_part_.push_back(part_count_);
      part_count_ += block_end(row) - first_block(row);
      blocks = std::max(blocks, block_end(row));
    }
    first_part_.push_back(part_count_);
    memory_ = pool.workspace<float>(part_count_ * part_);
    missing_ = std::make_unique<std::atomic<int64_t>[]>(size_t(a.decoding));
    for (int64_t row = 0; row < a.decoding; ++row) missing_[size_t(row)] = parts_of(row);
    parts_.reserve(size_t(part_count_));  // tiles point into it
    const int64_t limit = max_rows(pool.threads());
    for (int64_t block = 0; block < blocks; ++block) add_tiles(block, rows, limit);
  }

  int64_t tiles() const { return int64_t(tiles_.size()); }

  // The thread that finishes a row's last part merges the row.
  template <class Stored>
  void run(int64_t index, Pool& pool, int thread) {
    const DecodeTile& tile = tiles_[size_t(index)];
    decode_tile<Stored>(a_, tile, pool, thread);
    for (int64_t i = 0; i < tile.count; ++i)
      if (missing_[size_t(tile.parts[i].row)].fetch_sub(1, std::memory_order_acq_rel) == 1)
        merge<Stored>(tile.parts[i].row, pool.scratch<float>(thread, padded_values(a_)));
  }

 private:
  int64_t begin(int64_t row) const { return a_.window ? std::max<int64_t>(0, a_.kv_len[row] - a_.window) : 0; }
  int64_t first_block(int64_t row) const { return begin(row) / keys_; }
  int64_t block_end(int64_t row) const { return (a_.kv_len[row] + keys_ - 1) / keys_; }
  int64_t parts_of(int64_t row) const { return first_part_[size_t(row) + 1] - first_part_[size_t(row)]; }
  const int32_t* pages(int64_t row) const { return a_.page_tables + row * a_.table_stride; }
  int64_t page_count(int64_t row) const { return (a_.kv_len[row] + a_.page_size - 1) / a_.page_size; }

  int64_t max_rows(int threads) const {
    const int64_t row_bytes = a_.heads * (a_.key_dim + a_.value_dim) * int64_t(sizeof(float));
    const int64_t limit = std::min(kMaxRows, part_count_ / (kTilesPerThread * threads));
    return std::max<int64_t>(1, std::min(limit, kQueryBytes / row_bytes));
  }

  void add_tiles(int64_t block, const std::vector<int64_t>& rows, int64_t limit) {
    bool open = false;  // whether the last tile is of this block
    for (int64_t row : rows) {
      if (block < first_block(row) || block >= block_end(row)) continue;
      const int64_t first = std::max(block * keys_, begin(row)), last = std::min(block * keys_ + keys_, int64_t(a_.kv_len[row]));
      float* memory = memory_ + (first_part_[size_t(row)] + block - first_block(row)) * part_;
      if (!open || tiles_.back().count == limit || !same_keys(tiles_.back(), row, first, last)) {
        tiles_.push_back({first, last, parts_.data() + parts_.size(), 0});
        open = true;
      }
      parts_.push_back({row, reinterpret_cast<Sums*>(memory), memory + rounded_up(2 * a_.heads, 16)});
      ++tiles_.back().count;
    }
  }

  bool same_keys(const DecodeTile& tile, int64_t row, int64_t first, int64_t last) const {
    const int64_t first_page = first / a_.page_size, last_page = (last - 1) / a_.page_size;
    const int32_t* other = pages(tile.parts->row);
    return tile.first == first && tile.last == last &&
           std::equal(other + first_page, other + last_page + 1, pages(row) + first_page);
  }

  // Merges the parts of one row in order and writes its outputs.
  template <class Stored>
  void merge(int64_t row, float* mixed) const {
    float* out = a_.out + a_.query_start[row] * a_.heads * a_.value_dim;
    const float* parts = memory_ + first_part_[size_t(row)] * part_;
    const int64_t count = parts_of(row), size = padded_values(a_);
    for (int64_t head = 0; head < a_.heads; ++head, out += a_.value_dim) {
      Sums whole;
      std::fill_n(mixed, size, 0.0f);
      for (int64_t i = 0; i < count; ++i) {
        const float* part = parts + i * part_;
        rayfin::merge(whole, mixed, reinterpret_cast<const Sums*>(part)[head],
                      part + rounded_up(2 * a_.heads, 16) + head * size, size);
      }
      const float by = factor(whole, a_.sinks ? a_.sinks + head : nullptr);
      for (int64_t d = 0; d < a_.value_dim; ++d) out[d] = mixed[panel_place<Stored>(d)] * by;
    }
  }

  const Attention& a_;
  const int64_t keys_, part_;          // keys of a tile; floats of a part
  int64_t part_count_ = 0;
  float* memory_ = nullptr;            // [part_count, part], a row's parts side by side
  std::vector<int64_t> first_part_;    // [decoding + 1]
  std::vector<DecodePart> parts_;      // in the order of tiles
  std::vector<DecodeTile> tiles_;
  std::unique_ptr<std::atomic<int64_t>[]> missing_;  // [decoding] parts still to compute
};

std::vector<PrefillTile> prefill_tiles(const Attention& a, int threads) {
  std::vector<PrefillTile> tiles;
  const int64_t rows = (a.query_start[a.rows] - a.query_start[a.decoding]) * a.heads;
  const int64_t of_tile = std::clamp(rows / (kTilesPerThread * threads), kMinPromptRows, kPromptRows);
  const int64_t tokens = std::max<int64_t>(1, of_tile / a.group());
  for (int64_t row = a.decoding; row < a.rows; ++row) {
    const int64_t start = a.query_start[row], end = a.query_start[row + 1];
    // The last queries see the most keys, so the longest tiles start first.
    for (int64_t last = end; last > start; last -= std::min(tokens, last - start))
      for (int64_t kv_head = 0; kv_head < a.kv_heads; ++kv_head)
        tiles.push_back({row, std::max(start, last - tokens), last, kv_head});
  }
  return tiles;
}

template <class Stored>
void attention_as(Pool& pool, const Attention& a) {
  const std::vector<PrefillTile> prefill = prefill_tiles(a, pool.threads());
  DecodePlan decode(a, pool);
  const int64_t count = int64_t(prefill.size());
  pool.run(count + decode.tiles(), [&](int64_t i, int thread) {
    if (i < count) {
      prefill_tile<Stored>(a, prefill[size_t(i)], pool, thread);
    } else {
      decode.run<Stored>(i - count, pool, thread);
    }
  });
}

}  // namespace

int64_t keys_per_tile(const Attention& a) {
  const int64_t element = a.storage == kBFloat16 ? 2 : 4;
  const int64_t bytes = a.kv_heads * (a.key_dim + a.value_dim) * element;
  const int64_t by_scores = (256 << 10) / (int64_t(sizeof(float)) * a.heads);  // scores of a tile, to stay in cache
  return std::clamp(std::min(kTileBytes / bytes, by_scores), kMinKeys, kMaxKeys) / kKeys * kKeys;
}

void attention(Pool& pool, const Attention& a) {
  if (a.storage == kBFloat16) {
    attention_as<BFloat16>(pool, a);
  } else {
    attention_as<float>(pool, a);
  }
}

}  // namespace rayfin
