#include "common/memory.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace rayfin {

namespace {

constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kLine = 64;

size_t rounded(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

void* allocate(size_t bytes) {
  // Rounds up to whole huge pages only where that adds little.
  size_t alignment = bytes >= 4 * kHugePage ? kHugePage : kLine;
  size_t size = rounded(bytes, alignment);
  void* memory = std::aligned_alloc(alignment, size);
  if (!memory) throw std::bad_alloc();
#if defined(__linux__)
  if (alignment == kHugePage) madvise(memory, size, MADV_HUGEPAGE);
#endif
  std::memset(memory, 0, size);
  return memory;
}

void release(void* memory, size_t) { std::free(memory); }

}  // namespace rayfin
