#include "common/pool.h"

#include <chrono>

#include "matmul/matmul_rounded.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace rayfin {

namespace {

constexpr uint64_t kClosed = uint64_t(1) << 31;
constexpr uint64_t kInside = kClosed - 1;
// Longer than the gaps inside a step, and short enough not to disturb other processes.
constexpr auto kSpin = std::chrono::microseconds(100);
constexpr int kPausesPerLook = 32;
constexpr int kLooksBeforeYield = 64;

uint32_t epoch_of(uint64_t state) { return uint32_t(state >> 32); }

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Pool::Pool(int threads)
    : vnni(has_vnni()), threads_(threads < 1 ? 1 : threads), scratch_(threads_), state_(kClosed) {
  for (int i = 1; i < threads_; ++i) workers_.emplace_back([this, i] { work(i); });
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(sleep_);
    stop_.store(true);
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Pool::run(int64_t tiles, Function function, const void* context) {
  if (threads_ == 1 || tiles <= 1) {
    for (int64_t tile = 0; tile < tiles; ++tile) function(context, tile, 0);
    return;
  }
  function_ = function;
  context_ = context;
  tiles_ = tiles;
  next_.store(0, std::memory_order_relaxed);
  uint64_t epoch = epoch_of(state_.load(std::memory_order_relaxed)) + 1;
  state_.store(epoch << 32);  // opens the job; sequentially consistent, like the load of sleepers_
  if (sleepers_.load() > 0) {
    { std::lock_guard<std::mutex> lock(sleep_); }
    wake_.notify_all();
  }
  run_tiles(0);
  state_.fetch_or(kClosed);  // a worker that has not started by now is not waited for
  for (int looks = 0; state_.load(std::memory_order_acquire) & kInside; ++looks) {
    if (looks < kLooksBeforeYield) {
      for (int i = 0; i < kPausesPerLook; ++i) pause();
    } else {
      std::this_thread::yield();  // the missing thread may be waiting for this very core
    }
  }
}

void Pool::run_tiles(int thread) {
  for (;;) {
    int64_t tile = next_.fetch_add(1, std::memory_order_relaxed);
    if (tile >= tiles_) return;
    function_(context_, tile, thread);
  }
}

void Pool::work(int thread) {
  uint32_t seen = 0;
  while (wait_for_job(seen)) {
    uint64_t state = state_.load(std::memory_order_acquire);
    while (epoch_of(state) != seen && !(state & kClosed)) {
      if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
        run_tiles(thread);
        state_.fetch_sub(1, std::memory_order_acq_rel);
        break;
      }
    }
    seen = epoch_of(state);
  }
}

// Returns true if there is a job that this worker has not seen, false when the pool ends.
bool Pool::wait_for_job(uint32_t seen) {
  auto until = std::chrono::steady_clock::now() + kSpin;
  while (std::chrono::steady_clock::now() < until) {
    for (int i = 0; i < kPausesPerLook; ++i) {
      if (epoch_of(state_.load(std::memory_order_acquire)) != seen) return true;
      pause();
    }
    if (stop_.load(std::memory_order_relaxed)) return false;
  }
  std::unique_lock<std::mutex> lock(sleep_);
  sleepers_.fetch_add(1);
  wake_.wait(lock, [&] { return stop_.load() || epoch_of(state_.load()) != seen; });
  sleepers_.fetch_sub(1);
  return !stop_.load();
}

}  // namespace rayfin
