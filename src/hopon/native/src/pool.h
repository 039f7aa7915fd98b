// hopon's worker threads and their scratch memory.
//
// The caller of `run` is worker 0; `threads() - 1` threads of our own are the others. Tasks are claimed one by one from
// an atomic counter, so results may not depend on which worker ran a task: nothing here hands out work by worker.
// This file knows nothing of models. It is not re-entrant: one `run` at a time, never from inside a task.
//
// A run is "open" between publishing and its last claimed task. A worker announces itself (`active_`), then looks
// whether the run is open; the caller closes the run, then looks whether anyone is active. Both pairs are sequentially
// consistent, so either the worker sees a closed run and touches nothing, or the caller waits for it. Hence a
// worker that is still waking up never delays a run which the others have finished.
#ifndef HOPON_POOL_H
#define HOPON_POOL_H
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <thread>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hopon {

// Sets the floating point mode that every kernel counts on, for the lifetime of the object: round to nearest even,
// subnormals kept, no traps. Bits would otherwise depend on what the host program did to the calling thread.
class FloatMode {
 public:
#if defined(__x86_64__)
  FloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~FloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~FloatMode() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
#error "hopon knows x86-64 and aarch64"
#endif
  FloatMode(const FloatMode &) = delete;
  FloatMode &operator=(const FloatMode &) = delete;
};

inline void cpu_relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  asm volatile("yield");
#endif
}

// A 64-byte aligned block of memory that only grows; growing loses the contents.
class Scratch {
 public:
  Scratch() = default;
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch &) = delete;
  Scratch &operator=(const Scratch &) = delete;

  void *grow(size_t bytes) {
    if (bytes > size_) {
      size_t want = bytes > 2 * size_ ? bytes : 2 * size_;
      want = (want + 63) / 64 * 64;
      std::free(data_);
      size_ = 0;
      data_ = std::aligned_alloc(64, want);
      if (data_ == nullptr) throw std::bad_alloc();
      size_ = want;
    }
    return data_;
  }

 private:
  void *data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace hopon

struct hopon_pool {
 public:
  static constexpr int kSharedSlots = 8;

  // Throws std::system_error when a thread cannot be started and std::bad_alloc without memory.
  explicit hopon_pool(int threads) : scratch_(static_cast<size_t>(threads)) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are the host program's business, on its own threads
    try {
      for (int worker = 1; worker < threads; ++worker) workers_.emplace_back([this, worker] { live(worker); });
    } catch (...) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      stop();
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  ~hopon_pool() { stop(); }
  hopon_pool(const hopon_pool &) = delete;
  hopon_pool &operator=(const hopon_pool &) = delete;

  int threads() const { return static_cast<int>(scratch_.size()); }

  // Calls f(task, worker) once for every task in [0, num_tasks), in any order and on any worker, and returns when all
  // are done. A task that throws ends the run early with std::bad_alloc (kernels throw nothing else).
  template <class F>
  void run(int64_t num_tasks, F &&f) {
    if (num_tasks <= 1 || workers_.empty()) {
      for (int64_t task = 0; task < num_tasks; ++task) f(task, 0);
      return;
    }
    using Function = std::remove_reference_t<F>;
    call_ = [](void *function, int64_t task, int worker) { (*static_cast<Function *>(function))(task, worker); };
    function_ = const_cast<void *>(static_cast<const void *>(&f));
    num_tasks_ = num_tasks;
    next_.store(0, std::memory_order_relaxed);
    failed_.store(false, std::memory_order_relaxed);
    open_.store(true);
    epoch_.fetch_add(1);
    if (sleepers_.load() != 0) wake();
    work(0);
    open_.store(false);
    Spin spin;
    while (active_.load() != 0)
      if (!spin.again()) sched_yield();
    if (failed_.load(std::memory_order_relaxed)) throw std::bad_alloc();
  }

  // At least `bytes` of memory of one worker, 64-byte aligned, contents undefined, valid until the worker's next call
  // (from any kernel). Call it from the worker's own task.
  void *scratch(int worker, size_t bytes) { return scratch_[static_cast<size_t>(worker)].grow(bytes); }

  // The same for all workers together; call it outside of `run`, use it inside. Slots: hopon::SharedSlot.
  void *shared_scratch(int slot, size_t bytes) { return shared_[slot].grow(bytes); }

 private:
  // Busy waiting with a limit: `again` is true for about 100 microseconds. Longer than a task (kernels aim at 50), or
  // whoever is done first would fall asleep before every next run, and waking costs tens of microseconds.
  class Spin {
   public:
    bool again() {
      hopon::cpu_relax();
      return std::chrono::steady_clock::now() < end_;
    }

   private:
    std::chrono::steady_clock::time_point end_ = std::chrono::steady_clock::now() + std::chrono::microseconds(100);
  };

  void live(int worker) {
    hopon::FloatMode mode;
    uint32_t seen = 0;
    for (;;) {
      seen = await(seen);
      if (stopping_.load()) return;
      active_.fetch_add(1);
      if (open_.load()) work(worker);
      active_.fetch_sub(1);
    }
  }

  // Returns the epoch as soon as it differs from `seen`.
  uint32_t await(uint32_t seen) {
    for (;;) {
      Spin spin;
      do {
        uint32_t now = epoch_.load();
        if (now != seen) return now;
      } while (spin.again());
      sleepers_.fetch_add(1);
      // Sleeps only if the epoch is still `seen`; whoever changes it afterwards sees the sleeper and wakes it.
      syscall(SYS_futex, futex_word(), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
      sleepers_.fetch_sub(1);
    }
  }

  void work(int worker) {
    try {
      for (;;) {
        int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
        if (task >= num_tasks_) return;
        call_(function_, task, worker);
      }
    } catch (...) {
      failed_.store(true, std::memory_order_relaxed);
      next_.store(num_tasks_, std::memory_order_relaxed);
    }
  }

  void wake() { syscall(SYS_futex, futex_word(), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
  uint32_t *futex_word() { return reinterpret_cast<uint32_t *>(&epoch_); }

  void stop() {
    stopping_.store(true);
    epoch_.fetch_add(1);
    wake();
    for (std::thread &worker : workers_) worker.join();
    workers_.clear();
  }

  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "the kernel waits on this word");

  // A line for what the caller publishes (the run's description is written while no worker is active and read by workers
  // that saw it open), one for the claims, one for who is active, and one that hardly ever changes: a run costs two
  // transfers of a line from core to core for each side, and no more.
  alignas(64) std::atomic<uint32_t> epoch_{0};  // counts runs; a word that workers sleep on
  std::atomic<bool> open_{false};
  std::atomic<bool> failed_{false};
  void (*call_)(void *, int64_t, int) = nullptr;
  void *function_ = nullptr;
  int64_t num_tasks_ = 0;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int32_t> active_{0};
  alignas(64) std::atomic<int32_t> sleepers_{0};
  std::atomic<bool> stopping_{false};

  std::vector<hopon::Scratch> scratch_;
  hopon::Scratch shared_[kSharedSlots];
  std::vector<std::thread> workers_;
};

namespace hopon {
// Who uses which slot of hopon_pool::shared_scratch; two kernels of one step never overlap in time, but a caller's
// slot must survive the kernels it calls.
enum SharedSlot { kSlotLinear = 0, kSlotAttention = 1, kSlotTasks = 2, kSlotStep = 3 };
}  // namespace hopon
#endif
