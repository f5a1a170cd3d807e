#include "common/memory.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace rayfin {

namespace {

constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kLine = 64;
constexpr size_t kOwnPages = 4 * kHugePage;  // from here on rounding up to whole huge pages adds little
constexpr size_t kChunk = 32 * kHugePage;

size_t rounded(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

char* aligned(size_t bytes, size_t alignment) {
  void* memory = std::aligned_alloc(alignment, bytes);
  if (!memory) throw std::bad_alloc();
#if defined(__linux__)
  if (alignment == kHugePage) madvise(memory, bytes, MADV_HUGEPAGE);
#endif
  return static_cast<char*>(memory);
}

// Small blocks side by side in chunks of huge pages: a weight of 3 MiB alone fills one of those, one of 1 MiB none.
// The system gives a chunk memory only where blocks have been. First fit: what a loader needs for a moment fills the
// same holes again. A chunk goes back with its last block.
class Chunks {
 public:
  char* take(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [start, holes] : chunks_) {
      for (auto hole = holes.begin(); hole != holes.end(); ++hole)
        if (hole->second >= bytes) return cut(holes, hole, bytes);
    }
    char* start = aligned(kChunk, kHugePage);
    Holes& holes = chunks_[start];
    return cut(holes, holes.emplace(start, kChunk).first, bytes);
  }

  // Returns false if the block is of no chunk.
  bool give_back(char* block, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto chunk = chunks_.upper_bound(block);
    if (chunk == chunks_.begin() || block >= (--chunk)->first + kChunk) return false;
    Holes& holes = chunk->second;
    auto hole = holes.emplace(block, bytes).first;
    if (auto next = std::next(hole); next != holes.end() && next->first == block + bytes) {
      hole->second += next->second;
      holes.erase(next);
    }
    if (hole != holes.begin()) {
      if (auto before = std::prev(hole); before->first + before->second == block) {
        before->second += hole->second;
        holes.erase(hole);
      }
    }
    if (holes.begin()->second == kChunk) {
      std::free(chunk->first);
      chunks_.erase(chunk);
    }
    return true;
  }

 private:
  using Holes = std::map<char*, size_t>;

  static char* cut(Holes& holes, Holes::iterator hole, size_t bytes) {
    auto [start, size] = *hole;
    holes.erase(hole);
    if (size > bytes) holes.emplace(start + bytes, size - bytes);
    return start;
  }

  std::mutex mutex_;
  std::map<char*, Holes> chunks_;
};

Chunks& chunks() {
  static Chunks& all = *new Chunks;  // weights may be released when the process ends
  return all;
}

}  // namespace

void* allocate(size_t bytes) {
  const size_t alignment = bytes >= kOwnPages ? kHugePage : kLine;
  const size_t size = rounded(bytes, alignment);
  return std::memset(aligned(size, alignment), 0, size);
}

void* allocate_beside(size_t bytes) {
#if !defined(__SANITIZE_ADDRESS__)  // which sees reads past the end of a block of its own only
  if (const size_t size = rounded(bytes, kLine); size < kOwnPages) return std::memset(chunks().take(size), 0, size);
#endif
  return allocate(bytes);
}

void release(void* memory, size_t bytes) {
  const size_t size = rounded(bytes, kLine);
  if (size < kOwnPages && chunks().give_back(static_cast<char*>(memory), size)) return;
  std::free(memory);
}

}  // namespace rayfin
