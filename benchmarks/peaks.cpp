/* What this machine can do at most: multiply-adds of bf16, int8 and f32 in registers, and reading memory, all threads at
 * once; and how long a word takes from one core to another and back. Prints "name value" lines; operations count a multiply
 * and an add as two. */
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

template <class F>
static double best(int threads, F work) {
  double least = 1e9;
  for (int i = 0; i < 7; i++) {
    auto begin = std::chrono::steady_clock::now();
    std::vector<std::thread> team;
    for (int t = 0; t < threads; t++) team.emplace_back(work, t);
    for (auto &one : team) one.join();
    double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (seconds < least) least = seconds;
  }
  return least;
}

constexpr int64_t ROUNDS = 6000000;
constexpr int CHAINS = 16; /* more than latency times units, fewer than registers */

#define LOOP(zero, step)                                                  \
  auto t0 = zero, t1 = zero, t2 = zero, t3 = zero, t4 = zero, t5 = zero;  \
  auto t6 = zero, t7 = zero, t8 = zero, t9 = zero, ta = zero, tb = zero;  \
  auto tc = zero, td = zero, te = zero, tf = zero;                        \
  for (int64_t i = 0; i < ROUNDS; i++) {                                  \
    step(t0) step(t1) step(t2) step(t3) step(t4) step(t5) step(t6)        \
    step(t7) step(t8) step(t9) step(ta) step(tb) step(tc) step(td)        \
    step(te) step(tf)                                                     \
    /* else equal chains would be computed once */                        \
    asm volatile("" : "+v"(t0), "+v"(t1), "+v"(t2), "+v"(t3), "+v"(t4),   \
                      "+v"(t5), "+v"(t6), "+v"(t7));                      \
    asm volatile("" : "+v"(t8), "+v"(t9), "+v"(ta), "+v"(tb), "+v"(tc),   \
                      "+v"(td), "+v"(te), "+v"(tf));                      \
  }                                                                       \
  asm volatile("" ::"v"(t0), "v"(t1), "v"(t2), "v"(t3), "v"(t4), "v"(t5), \
               "v"(t6), "v"(t7), "v"(t8), "v"(t9), "v"(ta), "v"(tb),      \
               "v"(tc), "v"(td), "v"(te), "v"(tf));

#if defined(__AVX512F__)
typedef __m512 floats;
static floats make(float x) { return _mm512_set1_ps(x); }
static floats multiply_add(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }
#else
typedef __m256 floats;
static floats make(float x) { return _mm256_set1_ps(x); }
static floats multiply_add(floats a, floats b, floats c) { return _mm256_fmadd_ps(a, b, c); }
#endif

static void f32(int) {
  floats a = make(1.0f), b = make(1e-9f);
#define STEP(t) t = multiply_add(a, b, t);
  LOOP(make(0.0f), STEP)
#undef STEP
}

#if defined(__AVX512BF16__)
static void bf16(int) {
  __m512bh a = (__m512bh)_mm512_set1_epi32(0x3f803f80), b = a;
#define STEP(t) t = _mm512_dpbf16_ps(t, a, b);
  LOOP(_mm512_setzero_ps(), STEP)
#undef STEP
}
#endif
#if defined(__AVX512VNNI__)
static void int8(int) {
  __m512i a = _mm512_set1_epi8(1), b = _mm512_set1_epi8(2);
#define STEP(t) asm volatile("vpdpbusd %2, %1, %0" : "+v"(t) : "v"(a), "v"(b));
  LOOP(_mm512_setzero_si512(), STEP)
#undef STEP
}
#endif

/* Seconds that a word takes to another thread's core and back: the least of a few batches. */
static double apart() {
  constexpr int BATCHES = 20, TRIPS = 1000;
  std::atomic<int> word{0};
  std::thread other([&] {
    for (int i = 0; i < BATCHES * TRIPS; i++) {
      while (word.load(std::memory_order_acquire) != 2 * i + 1);
      word.store(2 * i + 2, std::memory_order_release);
    }
  });
  double least = 1e9;
  for (int batch = 0, i = 0; batch < BATCHES; batch++) {
    auto begin = std::chrono::steady_clock::now();
    for (int trip = 0; trip < TRIPS; trip++, i++) {
      word.store(2 * i + 1, std::memory_order_release);
      while (word.load(std::memory_order_acquire) != 2 * i + 2);
    }
    least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / TRIPS);
  }
  other.join();
  return least;
}

int main(int argc, char **argv) {
  int threads = argc > 1 ? atoi(argv[1]) : 1;
  double lanes = sizeof(floats) / 4.0, calls = (double)ROUNDS * CHAINS * threads;
  printf("f32 %.4g\n", calls * lanes * 2 / best(threads, f32));
#if defined(__AVX512BF16__)
  printf("bf16 %.4g\n", calls * 64 / best(threads, bf16));
#endif
#if defined(__AVX512VNNI__)
  printf("int8 %.4g\n", calls * 128 / best(threads, int8));
#endif
  size_t bytes = (size_t)512 << 20;
  char *memory = (char *)aligned_alloc(64, bytes);
  for (size_t i = 0; i < bytes; i += 4096) memory[i] = 1;
  double seconds = best(threads, [&](int t) {
    const char *at = memory + bytes / threads * t, *end = at + bytes / threads;
    __m256i sum = _mm256_setzero_si256();
    for (; at + 256 <= end; at += 256)
      for (int j = 0; j < 256; j += 32) sum = _mm256_add_epi8(sum, _mm256_load_si256((const __m256i *)(at + j)));
    asm volatile("" ::"x"(sum));
  });
  printf("read %.4g\n", bytes / seconds);
  if (std::thread::hardware_concurrency() > 1) printf("apart %.4g\n", apart());
}
