// Threads that share the tiles of one operation.
//
// An atomic counter hands out one tile at a time, so a thread that loses its core to another process delays the
// operation by at most its tile. (With OpenMP's static shares the other threads wait for a whole time slice of the
// system, which is milliseconds beside a busy HTTP process.) The calling thread works too, and does not wait for a
// thread that has not started yet.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "common/memory.h"

namespace rayfin {

class Pool {
 public:
  explicit Pool(int threads);  // the calling thread is one of them
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  // Calls body(tile, thread) for each tile in 0 .. tiles - 1, in any order and at the same time.
  // A body must not call it.
  template <class Body>
  void run(int64_t tiles, const Body& body) {
    run(tiles, [](const void* context, int64_t tile, int thread) {
          (*static_cast<const Body*>(context))(tile, thread);
        }, &body);
  }

  // Memory of one thread for one tile.
  template <class T>
  T* scratch(int thread, int64_t count) {
    return static_cast<T*>(scratch_[thread].reserve(size_t(count) * sizeof(T)));
  }

  // Memory of one operation, shared by its tiles.
  template <class T>
  T* workspace(int64_t count) {
    return static_cast<T*>(workspace_.reserve(size_t(count) * sizeof(T)));
  }

  std::mutex entry;  // held by the running operation
  bool vnni;         // whether int8 products use VNNI; tests may turn it off
  bool rounds_rows = false;  // to bfloat16, that 16-bit weights multiply (bfloat16_rows.h)

 private:
  using Function = void (*)(const void* context, int64_t tile, int thread);

  void run(int64_t tiles, Function function, const void* context);
  void run_tiles(int thread);
  void work(int thread);
  bool wait_for_job(uint32_t seen);

  const int threads_;
  std::vector<std::thread> workers_;
  std::vector<Buffer> scratch_;
  Buffer workspace_;

  // The job, written only while no worker is in it.
  Function function_ = nullptr;
  const void* context_ = nullptr;
  int64_t tiles_ = 0;

  // The upper half is the epoch; the lower one holds whether the job is closed, and the number of workers in it.
  alignas(64) std::atomic<uint64_t> state_;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::mutex sleep_;
  std::condition_variable wake_;
};

}  // namespace rayfin
