#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include "matrix.h"
#include "softmax.h"

namespace rayfin {

namespace {

// Keys of a tile: about so many bytes of keys and values (a dozen microseconds of memory).
// Fixed by the layout alone, so that a row's sums have one order whatever else is in the step.
constexpr int64_t kTileBytes = 384 << 10;
constexpr int64_t kLeastKeys = 128;  // what a tile gives is a few hundredths of what it reads
constexpr int64_t kMostKeys = 256;   // a prompt's tile has their scores for all its queries in cache
constexpr int64_t kMostRows = 8;     // of a decode tile: reading its keys costs little then
constexpr int64_t kQueryBytes = 256 << 10;  // their queries and outputs stay in cache
constexpr int64_t kTilesPerThread = 4;      // rather than that, some tiles for everybody
constexpr int64_t kPromptRows = 192;  // of a prompt's tile, queries x heads of a group: copies of keys cost little then
constexpr int64_t kLeastPromptRows = 96;    // if everybody has some tiles only with fewer

// The decoding rows' work. Rows that share pages (a common prefix) come one after the other, and share tiles.
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
    const int64_t most = most_rows(pool.threads());
    for (int64_t block = 0; block < blocks; ++block) add_tiles(block, rows, most);
  }

  int64_t tiles() const { return int64_t(tiles_.size()); }

  // Whoever finishes a row's last part puts the row together.
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

  int64_t most_rows(int threads) const {
    const int64_t row_bytes = a_.heads * (a_.key_dim + a_.value_dim) * int64_t(sizeof(float));
    const int64_t most = std::min(kMostRows, part_count_ / (kTilesPerThread * threads));
    return std::max<int64_t>(1, std::min(most, kQueryBytes / row_bytes));
  }

  void add_tiles(int64_t block, const std::vector<int64_t>& rows, int64_t most) {
    bool open = false;  // the last tile may be of this block
    for (int64_t row : rows) {
      if (block < first_block(row) || block >= block_end(row)) continue;
      const int64_t first = std::max(block * keys_, begin(row)), last = std::min(block * keys_ + keys_, int64_t(a_.kv_len[row]));
      float* memory = memory_ + (first_part_[size_t(row)] + block - first_block(row)) * part_;
      if (!open || tiles_.back().count == most || !same_keys(tiles_.back(), row, first, last)) {
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

  // The parts of one row, added up in order, to its outputs.
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
  std::unique_ptr<std::atomic<int64_t>[]> missing_;  // [decoding] parts that are not done
};

std::vector<PrefillTile> prefill_tiles(const Attention& a, int threads) {
  std::vector<PrefillTile> tiles;
  const int64_t rows = (a.query_start[a.rows] - a.query_start[a.decoding]) * a.heads;
  const int64_t of_tile = std::clamp(rows / (kTilesPerThread * threads), kLeastPromptRows, kPromptRows);
  const int64_t tokens = std::max<int64_t>(1, of_tile / a.group());
  for (int64_t row = a.decoding; row < a.rows; ++row) {
    const int64_t start = a.query_start[row], end = a.query_start[row + 1];
    // The last queries see most keys: the longest tiles go first.
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
  const int64_t by_scores = (256 << 10) / (int64_t(sizeof(float)) * a.heads);  // their scores stay in cache
  return std::clamp(std::min(kTileBytes / bytes, by_scores), kLeastKeys, kMostKeys) / kKeys * kKeys;
}

void attention(Pool& pool, const Attention& a) {
  if (a.storage == kBFloat16) {
    attention_as<BFloat16>(pool, a);
  } else {
    attention_as<float>(pool, a);
  }
}

}  // namespace rayfin
