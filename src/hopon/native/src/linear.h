/* y[m][n] (= or +=) x[m] . w[n] + bias[n] for packed weights: the work of hopon_linear, see hopon.h for the layouts.
 *
 * Two stages. First the rows of x are prepared, once: rounded to bf16, or to 16-bit integers with one scale per row (for
 * f32 there is nothing to do). Then tiles of a few rows walk blocks of 64 columns. Every output element has
 * one chain of additions over ascending k in a lane of its own, whatever the tile it falls into, so its bits depend
 * on its own row and column only. Does not check its arguments, and counts on the float mode that pool.h sets.
 */
#ifndef HOPON_LINEAR_H
#define HOPON_LINEAR_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "hopon.h"
#include "pool.h"
#include "simd.h"

#if defined(HOPON_LEVEL_PORTABLE) && defined(__SSE2__)
#include <emmintrin.h> /* part of every x86-64 */
#endif

#define HOPON_LAMBDA __attribute__((always_inline))

namespace hopon::HOPON_LEVEL {

constexpr int BLOCK = 64; /* columns of a packed block */
constexpr int GROUP = 32; /* inputs that share a scale and a minimum; cols are padded to it */
constexpr int MAX_Q = 32639; /* 127 * 256 + 127, so that the high digit fits 8 bits after rounding */

/* Rows of the largest tile that keeps its accumulators in registers. */
#if defined(HOPON_LEVEL_PORTABLE)
constexpr int MAX_ROWS = 3;
#else
constexpr int MAX_ROWS = 6;
#endif

/* f(0), f(1) ... f(N - 1) with the index as a constant: compilers keep arrays indexed by it in registers. */
template <class F, int... I>
HOPON_INLINE void unroll_indexes(F &&f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
HOPON_INLINE void unroll(F &&f) {
  unroll_indexes(f, std::make_integer_sequence<int, N>{});
}

/* One call of hopon_linear. */
struct Linear {
  const hopon_matrix &w;
  const float *x; /* f32 only */
  int64_t ldx;
  const char *rows; /* prepared rows (all but f32), `row_bytes` apart, see prepare_row */
  size_t row_bytes;
  float *y;
  int64_t ldy;
  bool accumulate;
};

/* ---- preparing rows ----------------------------------------------------------------------------------------------
 *
 * bf16   avx512: uint16_t [cols_padded]; others: float [cols_padded], already rounded to bf16 values
 * int    64 bytes per group of 32 inputs, then float [groups] sums of q, then float s (the row's scale)
 *        avx512: 32 high digits, 32 low digits (int8_t)
 *        others: int16_t q, in every quad in the order 0 2 1 3
 */

HOPON_INLINE size_t prepared_row_bytes(const hopon_matrix &w) {
  size_t cols = (size_t)w.cols_padded, bytes;
  if (w.dtype == HOPON_F32)
    bytes = 0;
  else if (w.dtype == HOPON_BF16)
#if defined(HOPON_LEVEL_AVX512)
    bytes = cols * 2;
#else
    bytes = cols * 4;
#endif
  else
    bytes = cols / GROUP * (64 + 4) + 4;
  return (bytes + 63) / 64 * 64;
}

HOPON_INLINE f32x16 load_padded(const float *x, int k, int cols) {
  return k + LANES <= cols ? load(x + k) : load_first(x + k, std::max(cols - k, 0));
}

static void prepare_row_bf16(const float *x, int cols, int cols_padded, char *out) {
  for (int k = 0; k < cols_padded; k += LANES) {
#if defined(HOPON_LEVEL_AVX512)
    store_bf16((uint16_t *)out + k, load_padded(x, k, cols));
#else
    uint16_t rounded[LANES];
    store_bf16(rounded, load_padded(x, k, cols));
    store((float *)out + k, load_bf16(rounded));
#endif
  }
}

/* A row with an infinity or a NaN gets a NaN scale and so NaN results. A row whose scale would be subnormal counts as
 * all zero (|x| < 4e-34), because x / s would not be accurate enough to stay within the limit. */
static void prepare_row_int(const float *x, int cols, int cols_padded, char *out) {
  f32x16 most = zero(), poison = zero();
  for (int k = 0; k < cols_padded; k += LANES) {
    f32x16 v = load_padded(x, k, cols);
    most = max(most, abs(v));
    poison = poison + v * zero();
  }
  float scale = largest(most) / (float)MAX_Q;
  if (scale < 1.17549435e-38f) scale = 0.0f;
  float nan = sum(poison);
  bool finite = nan == 0.0f;
  f32x16 divisor = broadcast(finite && scale > 0.0f ? scale : 1.0f);
  const f32x16 shift = broadcast(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer, ties to even */
  int groups = cols_padded / GROUP;
  float *sums = (float *)(out + groups * 64);
  for (int g = 0; g < groups; g++) {
    float shifted[GROUP];
    int32_t q[GROUP], sum_q = 0;
    for (int h = 0; h < GROUP; h += LANES)
      store(shifted + h, load_padded(x, g * GROUP + h, cols) / divisor + shift);
    for (int i = 0; i < GROUP; i++) {
      q[i] = finite && scale > 0.0f ? (int32_t)(float_bits(shifted[i]) - 0x4b400000u) : 0;
      sum_q += q[i];
    }
    sums[g] = (float)sum_q;
#if defined(HOPON_LEVEL_AVX512)
    int8_t *digits = (int8_t *)out + g * 64;
    for (int i = 0; i < GROUP; i++) {
      digits[i] = (int8_t)((q[i] + 128) >> 8);
      digits[GROUP + i] = (int8_t)(q[i] & 255);
    }
#else
    int16_t *words = (int16_t *)(out + g * 64);
    for (int i = 0; i < GROUP; i += 4) {
      const int order[4] = {0, 2, 1, 3};
      for (int j = 0; j < 4; j++) words[i + j] = (int16_t)q[i + order[j]];
    }
#endif
  }
  sums[groups] = finite ? scale : nan;
}

template <class Pool>
void prepare(Pool &pool, const hopon_matrix &w, const float *x, int64_t ldx, int m, char *out, size_t row_bytes) {
  constexpr int64_t VALUES_PER_TASK = 16384; /* a few microseconds */
  int64_t rows_per_task = std::max<int64_t>(1, VALUES_PER_TASK / w.cols_padded);
  pool.run((int)((m + rows_per_task - 1) / rows_per_task), [&](int64_t task, int) {
    int64_t end = std::min<int64_t>(m, (task + 1) * rows_per_task);
    for (int64_t i = task * rows_per_task; i < end; i++) {
      auto row = w.dtype == HOPON_BF16 ? prepare_row_bf16 : prepare_row_int;
      row(x + i * ldx, w.cols, w.cols_padded, out + (size_t)i * row_bytes);
    }
  });
}

/* ---- tiles -------------------------------------------------------------------------------------------------------
 *
 * A tile is R rows by V vectors of 16 columns, V chosen so that all accumulators stay in registers.
 */

template <int R>
constexpr int vectors_f32() {
#if defined(HOPON_LEVEL_AVX512)
  return 4;
#elif defined(HOPON_LEVEL_AVX2)
  return R == 1 ? 4 : R <= 3 ? 2 : 1;
#else
  return R == 1 ? 2 : 1;
#endif
}

template <int R>
constexpr int vectors_int() {
#if defined(HOPON_LEVEL_AVX512)
  return R <= 3 ? 4 : 2;
#else
  return 1;
#endif
}

/* Writes `rows` rows of a finished tile, [rows][width], that starts at `column`: total (times the row's scale, already),
 * + bias, + what y held before if it accumulates. Not inlined: the tiles call it once per few thousand additions. */
static __attribute__((noinline)) void finish(const Linear &job, int row, int rows, int column, int width,
                                             const float *tile) {
  for (int end = std::min(column + width, job.w.rows), c = column; c < end; c += LANES) {
    int n = end - c;
    f32x16 bias = job.w.bias ? load_padded(job.w.bias, c, end) : zero();
    for (int r = 0; r < rows; r++) {
      float *y = job.y + (row + r) * job.ldy + c;
      f32x16 t = load(tile + r * width + (c - column));
      if (job.w.bias) t = t + bias;
      if (job.accumulate) t = t + (n >= LANES ? load(y) : load_first(y, n));
      if (n >= LANES)
        store(y, t);
      else
        store_first(y, t, n);
    }
  }
}

template <int R, int V>
HOPON_INLINE void finish_tile(const Linear &job, int row, int column, f32x16 (&total)[R][V]) {
  alignas(64) float tile[R * V * LANES];
  unroll<R>([&](auto r) HOPON_LAMBDA {
    unroll<V>([&](auto v) HOPON_LAMBDA { store(tile + (r * V + v) * LANES, total[r][v]); });
  });
  finish(job, row, R, column, V * LANES, tile);
}

/* What a tile asks the memory for while it computes: its share of the block that this worker will probably take next.
 * `step` bytes per 256 bytes of its own weights. Guessing wrong costs time and nothing else. */
struct Fetch {
  const char *at;
  size_t step;
};
HOPON_INLINE void prefetch(const void *p) { __builtin_prefetch(p, 0, 2); /* to L2 */ }

/* f32: [K][64] */
template <int R>
static void block_f32(const Linear &job, int row, int, int block, const uint8_t *, Fetch next) {
  constexpr int V = vectors_f32<R>();
  const float *x = job.x + row * job.ldx;
  const int64_t ldx = job.ldx;
  const int cols = job.w.cols;
  for (int c = 0; c < BLOCK; c += V * LANES) {
    const float *w = (const float *)job.w.data + (size_t)block * BLOCK * (size_t)job.w.cols_padded + c;
    f32x16 t[R][V];
    unroll<R>([&](auto r) HOPON_LAMBDA { unroll<V>([&](auto v) HOPON_LAMBDA { t[r][v] = zero(); }); });
    for (int k = 0; k < cols; k++, w += BLOCK) {
      f32x16 wk[V];
      unroll<V>([&](auto v) HOPON_LAMBDA {
        wk[v] = load(w + v * LANES);
        prefetch(next.at + (size_t)k * next.step + c * 4 + v * 64);
      });
      unroll<R>([&](auto r) HOPON_LAMBDA {
        f32x16 a = broadcast(x[r * ldx + k]);
        unroll<V>([&](auto v) HOPON_LAMBDA { t[r][v] = fma(a, wk[v], t[r][v]); });
      });
    }
    finish_tile<R, V>(job, row, block * BLOCK + c, t);
  }
}

/* bf16: [K/2][64][2] */
template <int R>
static void block_bf16(const Linear &job, int row, int, int block, const uint8_t *, Fetch next) {
  constexpr int V = vectors_f32<R>();
  const int pairs = job.w.cols_padded / 2;
  const char *x = job.rows + (size_t)row * job.row_bytes;
  const size_t stride = job.row_bytes;
  for (int c = 0; c < BLOCK; c += V * LANES) {
    const uint16_t *w = (const uint16_t *)job.w.data + (size_t)block * BLOCK * 2 * (size_t)pairs + c * 2;
    f32x16 t[R][V];
    unroll<R>([&](auto r) HOPON_LAMBDA { unroll<V>([&](auto v) HOPON_LAMBDA { t[r][v] = zero(); }); });
    for (int p = 0; p < pairs; p++, w += BLOCK * 2) {
#if defined(HOPON_LEVEL_AVX512)
      __m512i wp[V];
      unroll<V>([&](auto v) HOPON_LAMBDA {
        wp[v] = _mm512_loadu_si512(w + v * 2 * LANES);
        prefetch(next.at + (size_t)p * next.step + c * 4 + v * 64);
      });
      unroll<R>([&](auto r) HOPON_LAMBDA {
        int32_t pair;
        memcpy(&pair, x + r * stride + p * 4, 4);
        __m512i a = _mm512_set1_epi32(pair);
        unroll<V>([&](auto v) HOPON_LAMBDA { t[r][v].v = _mm512_dpbf16_ps(t[r][v].v, (__m512bh)a, (__m512bh)wp[v]); });
      });
#else
      f32x16 even[V], odd[V];
      unroll<V>([&](auto v) HOPON_LAMBDA {
        load_bf16_pairs(w + v * 2 * LANES, even[v], odd[v]);
        prefetch(next.at + (size_t)p * next.step + c * 4 + v * 64);
      });
      unroll<R>([&](auto r) HOPON_LAMBDA {
        const float *a = (const float *)(x + r * stride) + 2 * p;
        f32x16 a0 = broadcast(a[0]), a1 = broadcast(a[1]);
        unroll<V>([&](auto v) HOPON_LAMBDA { t[r][v] = fma(a1, odd[v], fma(a0, even[v], t[r][v])); });
      });
#endif
    }
    finish_tile<R, V>(job, row, block * BLOCK + c, t);
  }
}

/* One quad (4 inputs) of 16 columns: codes times q, added to 16 int32 sums. HIGH: the high nibbles. */
#if defined(HOPON_LEVEL_AVX512)
typedef __m512i i32x16;
typedef __m512i Quad;
constexpr int QUAD_STEP = 4; /* bytes of prepared row per quad: one digit each, or all of q */
HOPON_INLINE i32x16 zero_i32() { return _mm512_setzero_si512(); }
HOPON_INLINE f32x16 to_float(i32x16 a) { return {_mm512_cvtepi32_ps(a)}; }
template <bool NIBBLES, bool HIGH>
HOPON_INLINE Quad load_quad(const uint8_t *w) {
  __m512i codes = _mm512_loadu_si512(w);
  if (HIGH) codes = _mm512_srli_epi16(codes, 4);
  return NIBBLES ? _mm512_and_si512(codes, _mm512_set1_epi8(15)) : codes;
}
HOPON_INLINE void add_quad(i32x16 &sums, const Quad &w, const char *digits) {
  int32_t four;
  memcpy(&four, digits, 4);
  sums = _mm512_dpbusd_epi32(sums, w, _mm512_set1_epi32(four));
}
#elif defined(HOPON_LEVEL_AVX2)
struct i32x16 {
  __m256i low, high;
};
constexpr int QUAD_STEP = 8;
struct Quad { /* codes 0 and 2, and codes 1 and 3, of 8 + 8 columns as 16-bit words */
  __m256i even[2], odd[2];
};
HOPON_INLINE i32x16 zero_i32() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
HOPON_INLINE f32x16 to_float(i32x16 a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
template <bool NIBBLES, bool HIGH>
HOPON_INLINE Quad load_quad(const uint8_t *w) {
  const __m256i mask = _mm256_set1_epi16(NIBBLES ? 15 : 255);
  Quad q;
  for (int half = 0; half < 2; half++) {
    __m256i codes = _mm256_loadu_si256((const __m256i *)w + half);
    q.even[half] = _mm256_and_si256(HIGH ? _mm256_srli_epi16(codes, 4) : codes, mask);
    q.odd[half] = _mm256_srli_epi16(codes, HIGH ? 12 : 8);
    if (NIBBLES && !HIGH) q.odd[half] = _mm256_and_si256(q.odd[half], mask);
  }
  return q;
}
HOPON_INLINE void add_quad(i32x16 &sums, const Quad &w, const char *q) {
  int32_t pair[2];
  memcpy(pair, q, 8);
  __m256i even = _mm256_set1_epi32(pair[0]), odd = _mm256_set1_epi32(pair[1]);
  sums.low = _mm256_add_epi32(sums.low, _mm256_madd_epi16(w.even[0], even));
  sums.high = _mm256_add_epi32(sums.high, _mm256_madd_epi16(w.even[1], even));
  sums.low = _mm256_add_epi32(sums.low, _mm256_madd_epi16(w.odd[0], odd));
  sums.high = _mm256_add_epi32(sums.high, _mm256_madd_epi16(w.odd[1], odd));
}
#else
struct i32x16 {
  i32x4 v[4];
};
constexpr int QUAD_STEP = 8;
typedef uint16_t u16x8 __attribute__((vector_size(16)));
struct Quad { /* codes 0 and 2, and codes 1 and 3, of 4 times 4 columns as 16-bit words */
  u16x8 even[4], odd[4];
};
/* Signed products of 16-bit words, summed in pairs. */
HOPON_INLINE i32x4 multiply_pairs(u16x8 a, u16x8 b) {
#if defined(__SSE2__)
  return (i32x4)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  i32x4 x = (i32x4)a, y = (i32x4)b; /* little endian */
  return ((x << 16) >> 16) * ((y << 16) >> 16) + (x >> 16) * (y >> 16);
#endif
}
HOPON_INLINE i32x16 zero_i32() { return {{i32x4{}, i32x4{}, i32x4{}, i32x4{}}}; }
HOPON_INLINE f32x16 to_float(i32x16 a) {
  int32_t t[LANES];
  memcpy(t, &a, sizeof a);
  return load_i32(t);
}
template <bool NIBBLES, bool HIGH>
HOPON_INLINE Quad load_quad(const uint8_t *w) {
  const uint16_t m = NIBBLES ? 15 : 255;
  const u16x8 mask = {m, m, m, m, m, m, m, m};
  Quad q;
  unroll<4>([&](auto part) HOPON_LAMBDA {
    u16x8 codes;
    memcpy(&codes, w + part * 16, 16);
    q.even[part] = (HIGH ? codes >> 4 : codes) & mask;
    q.odd[part] = (codes >> (HIGH ? 12 : 8)) & mask;
  });
  return q;
}
HOPON_INLINE void add_quad(i32x16 &sums, const Quad &w, const char *words) {
  int32_t pair[2];
  memcpy(pair, words, 8);
  u16x8 even = (u16x8)i32x4{pair[0], pair[0], pair[0], pair[0]}, odd = (u16x8)i32x4{pair[1], pair[1], pair[1], pair[1]};
  unroll<4>([&](auto part) HOPON_LAMBDA {
    sums.v[part] += multiply_pairs(w.even[part], even) + multiply_pairs(w.odd[part], odd);
  });
}
#endif

/* int8: [K/4][64][4]; int4 (NIBBLES): [K/32][4][64][4]. `codes` is the block's first byte. */
template <int R, bool NIBBLES>
static void block_int(const Linear &job, int row, int, int block, const uint8_t *codes, Fetch next) {
  constexpr int V = vectors_int<R>();
  constexpr int QUAD_BYTES = BLOCK * 4, GROUP_BYTES = NIBBLES ? QUAD_BYTES * 4 : QUAD_BYTES * 8;
  const int groups = job.w.cols_padded / GROUP;
  const char *x = job.rows + (size_t)row * job.row_bytes;
  const size_t stride = job.row_bytes;
  for (int c = 0; c < BLOCK; c += V * LANES) {
    const uint8_t *w = codes + c * 4;
    const uint16_t *scales = job.w.scales + ((size_t)block * (size_t)groups) * 2 * BLOCK + c;
    f32x16 t[R][V];
    unroll<R>([&](auto r) HOPON_LAMBDA { unroll<V>([&](auto v) HOPON_LAMBDA { t[r][v] = zero(); }); });
    for (int g = 0; g < groups; g++, w += GROUP_BYTES, scales += 2 * BLOCK) {
      i32x16 sums[R][V];
      unroll<R>([&](auto r) HOPON_LAMBDA { unroll<V>([&](auto v) HOPON_LAMBDA { sums[r][v] = zero_i32(); }); });
      auto add_digit = [&](auto digit) HOPON_LAMBDA {
        auto add_quads = [&](auto high, const char *q) HOPON_LAMBDA { /* q: the first row's digits of the first quad */
          constexpr int QUADS = NIBBLES ? 4 : 8;
          for (int j = 0; j < QUADS; j++, q += QUAD_STEP) {
            Quad quad[V];
            unroll<V>([&](auto v) HOPON_LAMBDA {
              const uint8_t *p = w + j * QUAD_BYTES + v * 4 * LANES;
              quad[v] = load_quad<NIBBLES, high>(p);
              if (!high && digit == 0) prefetch(next.at + (size_t)(g * QUADS + j) * next.step + c * 4 + v * 64);
            });
            unroll<R>([&](auto r) HOPON_LAMBDA {
              unroll<V>([&](auto v) HOPON_LAMBDA { add_quad(sums[r][v], quad[v], q + r * stride); });
            });
          }
        };
        const char *q = x + g * 64 + digit * GROUP;
        add_quads(std::false_type{}, q);
        if (NIBBLES) add_quads(std::true_type{}, q + 4 * QUAD_STEP);
      };
      add_digit(std::integral_constant<int, 0>{});
#if defined(HOPON_LEVEL_AVX512)
      unroll<R>([&](auto r) HOPON_LAMBDA {
        unroll<V>([&](auto v) HOPON_LAMBDA { sums[r][v] = _mm512_slli_epi32(sums[r][v], 8); });
      });
      add_digit(std::integral_constant<int, 1>{});
#endif
      unroll<V>([&](auto v) HOPON_LAMBDA {
        f32x16 scale = load_f16(scales + v * LANES), minimum = load_f16(scales + BLOCK + v * LANES);
        unroll<R>([&](auto r) HOPON_LAMBDA {
          const float *sum_q = (const float *)(x + r * stride + (size_t)groups * 64) + g;
          t[r][v] = fma(to_float(sums[r][v]), scale, t[r][v]);
          t[r][v] = fma(broadcast(*sum_q), minimum, t[r][v]);
        });
      });
    }
    unroll<R>([&](auto r) HOPON_LAMBDA {
      f32x16 scale = broadcast(((const float *)(x + r * stride + (size_t)groups * 64))[groups]);
      unroll<V>([&](auto v) HOPON_LAMBDA { t[r][v] = t[r][v] * scale; });
    });
    finish_tile<R, V>(job, row, block * BLOCK + c, t);
  }
}

} /* namespace hopon::HOPON_LEVEL */

#if defined(HOPON_LEVEL_AMX)
#include "linear_amx.h"
#endif

namespace hopon::HOPON_LEVEL {

/* ---- blocks and tasks --------------------------------------------------------------------------------------------- */

typedef void (*BlockKernel)(const Linear &, int row, int rows, int block, const uint8_t *codes, Fetch next);
struct Kernels {
  int max_rows;
  bool wide;               /* int4: wants its codes as bytes */
  BlockKernel by_rows[32]; /* [rows - 1] */
};

template <int... I>
HOPON_INLINE Kernels choose(const hopon_matrix &w, int m, std::integer_sequence<int, I...>) {
#if defined(HOPON_LEVEL_AMX)
  if (w.dtype == HOPON_BF16) {
    Kernels tiles = {32, false, {}};
    std::fill_n(tiles.by_rows, 32, block_bf16_tiles);
    return tiles;
  }
  if (w.dtype != HOPON_F32 && m >= MIN_TILE_ROWS * ((m + 15) / 16)) {
    Kernels tiles = {16, w.dtype == HOPON_I4, {}};
    std::fill_n(tiles.by_rows, 16, block_int_tiles);
    return tiles;
  }
#endif
  const bool wide = w.dtype == HOPON_I4 && m > 2 * MAX_ROWS; /* worth it when a block is used a few times */
  if (w.dtype == HOPON_F32) return {MAX_ROWS, false, {block_f32<I + 1>...}};
  if (w.dtype == HOPON_BF16) return {MAX_ROWS, false, {block_bf16<I + 1>...}};
  if (w.dtype == HOPON_I8 || wide) return {MAX_ROWS, wide, {block_int<I + 1, false>...}};
  return {MAX_ROWS, false, {block_int<I + 1, true>...}};
}

HOPON_INLINE size_t block_bytes(const hopon_matrix &w) {
  size_t values = (size_t)BLOCK * (size_t)w.cols_padded;
  return w.dtype == HOPON_F32 ? values * 4 : w.dtype == HOPON_BF16 ? values * 2 : w.dtype == HOPON_I8 ? values : values / 2;
}

/* int4 codes of a block as int8 codes. */
static void expand_nibbles(const uint8_t *in, uint8_t *out, int groups) {
  constexpr int HALF = BLOCK * GROUP / 2;
  for (int g = 0; g < groups; g++, in += HALF, out += 2 * HALF)
    for (int i = 0; i < HALF; i++) {
      out[i] = in[i] & 15;
      out[HALF + i] = in[i] >> 4;
    }
}

/* The whole operation; see the top. m >= 0. */
template <class Pool>
void linear(Pool &pool, const hopon_matrix &w, const float *x, int64_t ldx, float *y, int64_t ldy, int m,
            bool accumulate) {
  if (m == 0) return;
  const Kernels kernels = choose(w, m, std::make_integer_sequence<int, MAX_ROWS>{});
  size_t row_bytes = prepared_row_bytes(w);
  char *rows = nullptr;
  if (w.dtype != HOPON_F32) {
    rows = (char *)pool.shared_scratch(kSlotLinear, row_bytes * (size_t)(m + kernels.max_rows)); /* tiles may read beyond m */
    prepare(pool, w, x, ldx, m, rows, row_bytes);
  }
  const Linear job = {w, x, ldx, rows, row_bytes, y, ldy, accumulate};

  /* Rows split evenly into tiles, tiles evenly into parts, so that nothing is left over to a slow narrow tile. A task is
   * some blocks times one part; its prepared rows stay in the L2 cache beside a block of weights. */
  constexpr int ROWS_PER_PART = 144;
  const int tiles = (m + kernels.max_rows - 1) / kernels.max_rows, blocks = w.rows_padded / BLOCK;
  int parts = (m + ROWS_PER_PART - 1) / ROWS_PER_PART;
  const int wanted = pool.threads() > 1 ? 4 * pool.threads() : 1; /* tasks, for balance */
  if (blocks * parts < wanted) parts = std::min((wanted + blocks - 1) / blocks, std::max(1, tiles / 4));
  parts = std::min(parts, tiles);
  constexpr int64_t TASK_VALUES = 65536; /* weights times tiles of a task at least, so that claiming it costs little */
  int64_t values = (int64_t)BLOCK * w.cols_padded * std::max(1, tiles / parts);
  int per_task = (int)std::clamp<int64_t>(TASK_VALUES / values, 1, std::max(1, blocks / wanted));
  int runs = (blocks + per_task - 1) / per_task;

  pool.run(runs * parts, [&](int64_t task, int worker) {
#if defined(HOPON_LEVEL_AMX)
    const Tiles tile_registers(w.dtype);
#endif
    int part = (int)task / runs, run = (int)task % runs;
    int first_tile = (int)((int64_t)tiles * part / parts), last_tile = (int)((int64_t)tiles * (part + 1) / parts);
    const int end_block = std::min(blocks, (run + 1) * per_task);
    const size_t lines = block_bytes(w) / 64 * (kernels.wide ? 2 : 1);
    for (int block = run * per_task; block < end_block; block++) {
      const uint8_t *codes = (const uint8_t *)w.data + (size_t)block * block_bytes(w);
      if (kernels.wide) {
        uint8_t *bytes = (uint8_t *)pool.scratch(worker, block_bytes(w) * 2);
        expand_nibbles(codes, bytes, w.cols_padded / GROUP);
        codes = bytes;
      }
      /* The next block: of this task, or of the task that comes after those which the other workers have now. */
      int after = block + 1 < end_block ? block + 1 : (run + pool.threads()) * per_task;
      const char *fetch_at = (const char *)w.data + (size_t)std::min(after, blocks - 1) * block_bytes(w);
      size_t fetch_bytes = after < blocks ? block_bytes(w) / (size_t)(last_tile - first_tile) : 0;
      for (int tile = first_tile; tile < last_tile; tile++, fetch_at += fetch_bytes) {
        int row = (int)((int64_t)m * tile / tiles), end = (int)((int64_t)m * (tile + 1) / tiles);
        kernels.by_rows[end - row - 1](job, row, end - row, block, codes, {fetch_at, fetch_bytes / (lines / 4)});
      }
    }
  });
}

} /* namespace hopon::HOPON_LEVEL */

#endif
