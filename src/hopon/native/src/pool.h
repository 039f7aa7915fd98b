// hopon's worker threads and their scratch memory.
//
// The caller of `together` is worker 0; `threads() - 1` threads of our own are the others. All of them execute the same
// function, a sequence of runs. Every worker has a share of a run's tasks, always the same ones, so that what it reads is
// mostly what it wrote; then it takes from the shares of others, so results may not depend on which worker ran a task.
// A run ends when its tasks are done, not when everybody has come: whoever is away when it begins delays nobody, and passes
// through what the others have finished when it is back. Only who loses its core at work keeps the others waiting, so
// workers give way to whatever else wants their core from time to time, between tasks.
// Cores may be far apart (300 ns there and back between two groups of cores of a processor, 50 within one): a worker's
// claims are a word in a line of its own, and it tells the others once per run how many tasks it did.
// This file knows nothing of models. It is not re-entrant: one `together` at a time, never from inside a task.
//
// A function is "open" between publishing and its end on worker 0. Which one it is and whether it is open are one word
// (`epoch_`, odd while open), so that nobody takes a function for the next one. A worker announces itself (`active_`), then
// looks at the word; the caller closes the function, then waits for those that are active. Both pairs are sequentially
// consistent, so either the worker sees a closed function and touches nothing, or the caller waits for it. Workers that
// give way take their announcement back meanwhile. Hence a worker that is away never delays the end.
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
  void *data() const { return data_; }

 private:
  void *data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace hopon

struct hopon_pool {
 public:
  static constexpr int kSharedSlots = 8;

  // Throws std::system_error when a thread cannot be started and std::bad_alloc without memory.
  explicit hopon_pool(int threads) : shares_(static_cast<size_t>(threads)), scratch_(static_cast<size_t>(threads)) {
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

  // What one worker knows of the function that all are in.
  class Team {
   public:
    int threads() const { return pool_.threads(); }

    // Calls f(owner, k, worker) once for every k in [0, size(owner)) of every worker's share, `total` in all, in any
    // order and on any worker, and returns when all are done. All workers make the same runs in the same order. A task
    // that throws ends the function with std::bad_alloc on every worker (kernels throw nothing else), once the others of
    // its run are done.
    template <class Size, class F>
    void run_shares(int64_t total, Size &&size, F &&f) {
      if (threads() == 1 || (total <= 1 && pool_.brief_)) {
        if (worker_ == 0)
          for (int owner = 0; owner < threads(); ++owner)
            for (int64_t k = 0, share = size(owner); k < share; ++k) f(owner, k, 0);
        gated_ = true;
        return;
      }
      Run &run = pool_.runs_.at(number_);
      const uint64_t number = pool_.first_run_ + number_++;
      if (gated_) pass(run.gate);
      gated_ = false;
      int64_t unsaid = 0;  // tasks done that the others do not know of
      auto say = [&] {
        if (unsaid != 0) run.done.fetch_add(unsaid, std::memory_order_release);
        unsaid = 0;
      };
      for (int i = 0, workers = threads(); i < workers; ++i) {
        const int owner = (worker_ + i) % workers;
        const int64_t share = size(owner);
        for (int64_t k; (k = pool_.shares_[owner].claim(number, share)) >= 0;) {
          try {
            f(owner, k, worker_);
          } catch (...) {
            pool_.failed_.store(true, std::memory_order_relaxed);
          }
          ++unsaid;
          if (std::chrono::steady_clock::now() >= turn_end_) {
            say();
            give_way();
          }
        }
      }
      say();
      wait_until([&] { return run.done.load(std::memory_order_acquire) >= total; });
      if (pool_.failed_.load(std::memory_order_relaxed)) throw std::bad_alloc();
    }

    // Calls f(task, worker) once for every task in [0, num_tasks). Task t is in the share of worker t % threads().
    template <class F>
    void run(int64_t num_tasks, F &&f) {
      const int workers = threads();
      run_shares(
          num_tasks, [&](int owner) { return (num_tasks - owner + workers - 1) / workers; },
          [&](int owner, int64_t k, int worker) { f(owner + k * workers, worker); });
    }

    // Calls f(first, end) on ranges that together cover [0, count), `parts` of them for every worker; without parts on all
    // at once. A worker's ranges are neighbours, whatever `parts` is: it finds in its caches what it did before to them.
    template <class F>
    void run_ranges(int64_t count, int64_t parts, F &&f) {
      const int64_t workers = threads(), ranges = parts * workers;
      if (parts == 0) return run(count > 0, [&](int64_t, int) { f(int64_t{0}, count); });
      run(ranges, [&](int64_t task, int) {
        const int64_t range = task % workers * parts + task / workers;
        f(count * range / ranges, count * (range + 1) / ranges);
      });
    }

    // At least `bytes` of memory of one worker, 64-byte aligned, contents undefined, valid until the worker's next call
    // (from any kernel). Call it from the worker's own task.
    void *scratch(int worker, size_t bytes) { return pool_.scratch_[static_cast<size_t>(worker)].grow(bytes); }

    // What was reserved for all workers together.
    void *shared_scratch(int slot) { return pool_.shared_[slot].data(); }

   private:
    friend struct hopon_pool;
    struct Over {};  // while this worker was away, the others finished

    // Shorter than a time slice of the kernel, and long beside the cost of asking.
    static constexpr std::chrono::microseconds kTurn{500};

    Team(hopon_pool &pool, int worker, uint32_t epoch)
        : pool_(pool), worker_(worker), epoch_(epoch), turn_end_(std::chrono::steady_clock::now() + kTurn) {}

    template <class F>
    void wait_until(F &&happened) {
      Spin spin;
      while (!happened())
        if (!spin.again()) give_way();
    }

    // Worker 0 opens the gate, the others wait for it.
    void pass(std::atomic<bool> &gate) {
      if (worker_ == 0)
        gate.store(true, std::memory_order_release);
      else
        wait_until([&] { return gate.load(std::memory_order_acquire); });
    }

    void give_way() {
      if (worker_ == 0) {
        sched_yield();
      } else {
        pool_.active_.fetch_sub(1);
        sched_yield();
        pool_.active_.fetch_add(1);
        if (pool_.epoch_.load() != epoch_) throw Over();
      }
      turn_end_ = std::chrono::steady_clock::now() + kTurn;
    }

    hopon_pool &pool_;
    const int worker_;
    const uint32_t epoch_;
    size_t number_ = 0;   // of runs so far
    bool gated_ = false;  // worker 0 does things alone before the next run
    std::chrono::steady_clock::time_point turn_end_;
  };

  // Calls f(team) on every worker that comes in time, at least on this one. f makes at most `max_runs` runs. When it is
  // `brief`, runs of a single task are left to the caller, without a barrier behind them: the others wait where the next
  // run begins. That is quicker, but nobody goes on where the caller loses its core.
  // Throws std::bad_alloc when a task did.
  template <class F>
  void together(size_t max_runs, bool brief, F &&f) {
    if (workers_.empty()) {
      Team team(*this, 0, 0);
      f(team);
      return;
    }
    if (runs_.size() < max_runs) runs_ = std::vector<Run>(max_runs);
    for (Run &run : runs_) run.reset();
    first_run_ += runs_.size();
    using Function = std::remove_reference_t<F>;
    call_ = [](void *function, Team &team) { (*static_cast<Function *>(function))(team); };
    function_ = const_cast<void *>(static_cast<const void *>(&f));
    brief_ = brief;
    failed_.store(false, std::memory_order_relaxed);
    const uint32_t epoch = epoch_.fetch_add(1) + 1;
    if (sleepers_.load() != 0) wake();
    Team team(*this, 0, epoch);
    try {
      f(team);
    } catch (...) {
      failed_.store(true, std::memory_order_relaxed);
    }
    epoch_.fetch_add(1);
    Spin spin;
    while (active_.load() != 0)
      if (!spin.again()) sched_yield();
    if (failed_.load(std::memory_order_relaxed)) throw std::bad_alloc();
  }

  // At least `bytes` of memory for all workers together, 64-byte aligned, contents undefined. Slots: hopon::SharedSlot.
  // Not while a function is open.
  void *reserve(int slot, size_t bytes) { return shared_[slot].grow(bytes); }

 private:
  // Several to a line: a worker that ends one run begins the next.
  struct Run {
    std::atomic<int64_t> done{0};
    std::atomic<bool> gate{false};

    void reset() {
      done.store(0, std::memory_order_relaxed);
      gate.store(false, std::memory_order_relaxed);
    }
  };

  // How far a worker's share is claimed: the number of a run and the next task of its share there. Whoever comes first to a
  // run moves the word on from an earlier one; in a later one nothing is left to claim.
  class alignas(64) Share {
   public:
    // A task of the share in run `number`, -1 when all `size` are claimed.
    int64_t claim(uint64_t number, int64_t size) {
      uint64_t word = word_.load(std::memory_order_relaxed);
      for (;;) {
        const uint64_t at = word >> kTaskBits;
        const int64_t next = at == number ? static_cast<int64_t>(word & ((uint64_t{1} << kTaskBits) - 1)) : 0;
        if (at > number || next >= size) return -1;
        if (word_.compare_exchange_weak(word, number << kTaskBits | static_cast<uint64_t>(next + 1),
                                        std::memory_order_relaxed))
          return next;
      }
    }

   private:
    static constexpr int kTaskBits = 24;  // leaves enough for the runs of a year
    std::atomic<uint64_t> word_{0};
  };

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
      await(seen);
      active_.fetch_add(1);
      seen = epoch_.load();
      if (stopping_.load()) return;  // asked last: the epoch that ends the pool looks like an open function
      if (is_open(seen)) {
        Team team(*this, worker, seen);
        try {
          call_(function_, team);
        } catch (const Team::Over &) {
        } catch (...) {
          failed_.store(true, std::memory_order_relaxed);
        }
      }
      active_.fetch_sub(1);
    }
  }

  static bool is_open(uint32_t epoch) { return epoch % 2 != 0; }

  // Returns as soon as a function is open that is not `seen`.
  void await(uint32_t seen) {
    for (;;) {
      Spin spin;
      uint32_t now;
      do {
        now = epoch_.load();
        if (now != seen && is_open(now)) return;
      } while (spin.again());
      sleepers_.fetch_add(1);
      // Sleeps only if the epoch is still `now`; whoever opens a function afterwards sees the sleeper and wakes it.
      syscall(SYS_futex, futex_word(), FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0);
      sleepers_.fetch_sub(1);
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

  // A line for what the caller publishes (the function is written while no worker is active and read by workers that saw
  // it open), one for who is active and one that hardly ever changes.
  alignas(64) std::atomic<uint32_t> epoch_{0};  // counts beginnings and ends of functions; a word that workers sleep on
  std::atomic<bool> failed_{false};
  void (*call_)(void *, Team &) = nullptr;
  void *function_ = nullptr;
  bool brief_ = false;
  alignas(64) std::atomic<int32_t> active_{0};
  alignas(64) std::atomic<int32_t> sleepers_{0};
  std::atomic<bool> stopping_{false};
  std::vector<Run> runs_;
  uint64_t first_run_ = 0;  // runs are numbered for ever, from 1; that of the first of this function
  std::vector<Share> shares_;

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
