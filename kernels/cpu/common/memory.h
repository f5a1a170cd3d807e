// Memory for weights and workspaces, aligned to cache lines, on huge pages where the system allows it
// (a step reads all weights once; with 4 KiB pages each read would miss the TLB).
#pragma once

#include <cstddef>
#include <new>
#include <utility>

namespace rayfin {

void* allocate(size_t bytes);  // zeroed, 64-byte aligned; throws std::bad_alloc
void* allocate_beside(size_t bytes);  // the same, on huge pages with other small blocks that stay for long
void release(void* memory, size_t bytes);

// Owns a block of memory, or shows one that somebody else keeps.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes) : bytes_(bytes), memory_(bytes ? allocate(bytes) : nullptr) {}
  // A block of others, 64-byte aligned, that outlives this; it may be read-only.
  Buffer(void* memory, size_t bytes) : bytes_(bytes), memory_(memory), owned_(false) {}
  Buffer(Buffer&& other) noexcept
      : bytes_(std::exchange(other.bytes_, 0)), memory_(std::exchange(other.memory_, nullptr)), owned_(other.owned_) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(bytes_, other.bytes_);
    std::swap(memory_, other.memory_);
    std::swap(owned_, other.owned_);
    return *this;
  }
  ~Buffer() {
    if (memory_ && owned_) release(memory_, bytes_);
  }

  // A block of a weight.
  static Buffer of_weight(size_t bytes) {
    Buffer buffer;
    if (bytes) buffer.memory_ = allocate_beside(bytes), buffer.bytes_ = bytes;
    return buffer;
  }

  // Returns at least `bytes` of memory; the content is lost when it grows.
  void* reserve(size_t bytes) {
    if (bytes > bytes_) *this = Buffer(bytes + bytes / 2);
    return memory_;
  }

  template <class T>
  T* as() const {
    return static_cast<T*>(memory_);
  }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_ = 0;
  void* memory_ = nullptr;
  bool owned_ = true;
};

}  // namespace rayfin
