/* Rows of x as the kernels of linear.h want them, made once per layer:
 *
 * bf16   amx, avx512: uint16_t [cols_padded]; others: float [cols_padded], already rounded to bf16 values
 * int    per group: the low digits of its quads (4 inputs), QUAD_BYTES each, and int32_t -zero * sum q, by which sums over
 *        code - zero differ from sums over codes. Then bf16 [groups, even] sums of q; float s (the row's scale);
 *        int32_t number of outliers, the quads that have high digits; their indexes, ascending; their high digits
 *
 * Knows the formats of hopon.h, not what is computed from the rows.
 */
#ifndef HOPON_LINEAR_ROWS_H
#define HOPON_LINEAR_ROWS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>

#include "hopon.h"
#include "pool.h"
#include "simd.h"

namespace hopon::HOPON_LEVEL {

constexpr int GROUP = 32; /* inputs that share a scale and a minimum; cols are padded to it */
constexpr int MAX_Q = 32639; /* 127 * 256 + 127: the high digit fits 8 bits */

#if defined(HOPON_LEVEL_AVX512)
typedef int8_t Digit;
#else
typedef int16_t Digit; /* in every quad in the order 0 2 1 3 */
#endif
constexpr int QUAD_BYTES = 4 * sizeof(Digit);
constexpr int SHIFT_AT = 8 * QUAD_BYTES, GROUP_BYTES = SHIFT_AT + 4;

HOPON_INLINE int zero_code(const hopon_matrix &w) { return w.dtype == HOPON_I8 ? 128 : 8; }
HOPON_INLINE int even(int groups) { return (groups + 1) / 2 * 2; }

/* Offsets of what a prepared row of integers holds. */
struct IntRow {
  size_t sums, scale, count, quads, high, end;
  explicit IntRow(const hopon_matrix &w) {
    const size_t listed = (size_t)w.outliers + 4; /* 4 are scratch */
    const int groups = w.cols_padded / GROUP;
    sums = (size_t)groups * GROUP_BYTES;
    scale = sums + (size_t)even(groups) * 2;
    count = scale + 4;
    quads = count + 4;
    high = (quads + listed * 4 + 7) / 8 * 8;
    end = high + listed * QUAD_BYTES;
  }
};

HOPON_INLINE size_t prepared_row_bytes(const hopon_matrix &w) {
  size_t cols = (size_t)w.cols_padded, bytes;
  if (w.dtype == HOPON_F32)
    bytes = 0;
  else if (w.dtype == HOPON_BF16)
#if defined(HOPON_HAS_BF16)
    bytes = cols * 2;
#else
    bytes = cols * 4;
#endif
  else
    bytes = IntRow(w).end;
  return (bytes + 63) / 64 * 64;
}

HOPON_INLINE f32x16 load_padded(const float *x, int k, int cols) {
  return k + LANES <= cols ? load(x + k) : load_first(x + k, std::max(cols - k, 0));
}

static void prepare_row_bf16(const hopon_matrix &w, const float *x, char *out) {
  const int cols = w.cols, cols_padded = w.cols_padded;
  for (int k = 0; k < cols_padded; k += LANES) {
#if defined(HOPON_HAS_BF16)
    store_bf16((uint16_t *)out + k, load_padded(x, k, cols));
#else
    uint16_t rounded[LANES];
    store_bf16(rounded, load_padded(x, k, cols));
    store((float *)out + k, load_bf16(rounded));
#endif
  }
}

/* The upper 16 bits of the largest magnitude of every 4 of 32 numbers. */
HOPON_INLINE void quad_uppers(f32x16 a, f32x16 b, uint16_t *out) {
#if defined(HOPON_LEVEL_AVX512)
  const __m512i high_halves = _mm512_castps_si512(b.v), low_halves = _mm512_srli_epi32(_mm512_castps_si512(a.v), 16);
  /* Words a0 b0 a1 b1 ...: the quads of a in even words, those of b in odd ones. */
  __m512i words = _mm512_and_si512(_mm512_mask_blend_epi16(0xaaaaaaaa, low_halves, high_halves), _mm512_set1_epi16(0x7fff));
  words = _mm512_max_epu16(words, _mm512_srli_epi64(words, 32));
  words = _mm512_max_epu16(words, _mm512_bsrli_epi128(words, 8)); /* now in the lowest 32 bits of every 128: a, b */
  const __m512i order = _mm512_zextsi128_si512(_mm_setr_epi16(0, 8, 16, 24, 1, 9, 17, 25));
  _mm_storeu_si128((__m128i *)out, _mm512_castsi512_si128(_mm512_permutexvar_epi16(order, words)));
#else
  float t[2 * LANES];
  store(t, abs(a));
  store(t + LANES, abs(b));
  for (int i = 0; i < 8; i++) {
    const float *q = t + 4 * i;
    uint32_t most = std::max(std::max(float_bits(q[0]), float_bits(q[1])), std::max(float_bits(q[2]), float_bits(q[3])));
    out[i] = (uint16_t)(most >> 16);
  }
#endif
}

HOPON_INLINE int count_above(const uint16_t *values, int n, int limit) {
  int count = 0;
#if defined(HOPON_LEVEL_AVX512)
  const __m512i limits = _mm512_set1_epi16((short)limit);
  for (int i = 0; i < n; i += 32) {
    const __mmask32 in = n - i >= 32 ? ~0u : (1u << (n - i)) - 1;
    count += __builtin_popcount(_mm512_mask_cmpgt_epu16_mask(in, _mm512_maskz_loadu_epi16(in, values + i), limits));
  }
#else
  for (int i = 0; i < n; i++) count += values[i] > limit;
#endif
  return count;
}

/* The least number, but at least most - SPAN, that no more than `allowed` of n values from 0 to `most` exceed. */
HOPON_INLINE int bulk_limit(const uint16_t *values, int n, int allowed, int most) {
  constexpr int SPAN = 16 << 7;                       /* of upper halves of floats: 16 powers of two */
  int low = std::max(most - SPAN, 0) - 1, high = most; /* low is too small, high is not */
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (count_above(values, n, middle) > allowed ? low : high) = middle;
  }
  return high;
}

/* A prepared row in the making. */
struct Digits {
  char *row;
  const IntRow &at;
  f32x16 inverse; /* 1 / scale */
  int32_t count;  /* of outliers so far */
};

/* Rounds the 32 numbers of a group and appends their digits. Returns the sum of q. */
HOPON_INLINE int append_group(Digits &to, int group, f32x16 a, f32x16 b) {
#if defined(HOPON_LEVEL_AVX512)
  __m512i sums = _mm512_setzero_si512();
  for (int half = 0; half < 2; half++) {
    const int quad = group * 8 + half * 4;
    const __m512i q = _mm512_cvtps_epi32(((half ? b : a) * to.inverse).v);
    sums = _mm512_add_epi32(sums, q);
    _mm_storeu_si128((__m128i *)(to.row + group * GROUP_BYTES + half * 16), _mm512_cvtepi32_epi8(q));
    const __m128i high = _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8));
    const __mmask8 some = _mm_test_epi32_mask(high, high);
    const __m128i index = _mm_add_epi32(_mm_set1_epi32(quad), _mm_setr_epi32(0, 1, 2, 3));
    _mm_storeu_si128((__m128i *)(to.row + to.at.quads + to.count * 4), _mm_maskz_compress_epi32(some, index));
    _mm_storeu_si128((__m128i *)(to.row + to.at.high + to.count * QUAD_BYTES), _mm_maskz_compress_epi32(some, high));
    to.count += __builtin_popcount(some);
  }
  return _mm512_reduce_add_epi32(sums);
#else
  const f32x16 shift = broadcast(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer, ties to even */
  float shifted[GROUP];
  store(shifted, a * to.inverse + shift);
  store(shifted + LANES, b * to.inverse + shift);
  int sum = 0;
  for (int i = 0; i < GROUP; i += 4) {
    const int quad = (group * GROUP + i) / 4;
    const int order[4] = {0, 2, 1, 3};
    Digit low[4], high[4];
    bool some = false;
    for (int j = 0; j < 4; j++) {
      const int32_t q = (int32_t)(float_bits(shifted[i + order[j]]) - 0x4b400000u);
      sum += q;
      high[j] = (Digit)((q + 128) >> 8);
      low[j] = (Digit)(q - 256 * high[j]);
      some |= high[j] != 0;
    }
    memcpy(to.row + group * GROUP_BYTES + i / 4 * QUAD_BYTES, low, QUAD_BYTES);
    memcpy(to.row + to.at.quads + to.count * 4, &quad, 4);
    memcpy(to.row + to.at.high + to.count * QUAD_BYTES, high, QUAD_BYTES);
    to.count += some;
  }
  return sum;
#endif
}

/* A row with an infinity or a NaN gets a NaN scale and so NaN results. A row whose scale would be subnormal counts as
 * all zero, because its reciprocal would not be accurate enough. */
static void prepare_row_int(const hopon_matrix &w, const float *x, char *out) {
  const IntRow at(w);
  const int cols = w.cols, cols_padded = w.cols_padded, quads = cols_padded / 4, zero_at = zero_code(w);
  uint16_t *upper = (uint16_t *)out; /* halves of the largest of every quad, until the digits take their place */
  for (int k = 0; k < cols_padded; k += GROUP)
    quad_uppers(load_padded(x, k, cols), load_padded(x, k + LANES, cols), upper + k / 4);
  int most = 0;
  for (int i = 0; i < quads; i++) most = std::max<int>(most, upper[i]);
  const bool finite = most < 0x7f80;
  float scale = bits_float(0x7fc00000);
  if (finite) {
    auto largest_of = [](int half) { return bits_float(((uint32_t)half << 16) + 0xffff); };
    int limit = bulk_limit(upper, quads, w.outliers, most);
    scale = std::max(largest_of(limit) / 127, largest_of(most) / MAX_Q);
    if (scale < 1.17549435e-38f) scale = 0.0f;
  }
  const bool some = finite && scale > 0.0f;
  Digits to = {out, at, broadcast(some ? 1.0f / scale : 0.0f), 0};
  for (int k = 0; k < cols_padded; k += GROUP) {
    f32x16 a = some ? load_padded(x, k, cols) : zero(), b = some ? load_padded(x, k + LANES, cols) : zero();
    const int32_t sum = append_group(to, k / GROUP, a, b), shift = -zero_at * sum;
    const uint16_t rounded = float_to_bf16((float)sum);
    memcpy(out + k / GROUP * GROUP_BYTES + SHIFT_AT, &shift, 4);
    memcpy(out + at.sums + k / GROUP * 2, &rounded, 2);
  }
  if (cols_padded / GROUP % 2) memset(out + at.scale - 2, 0, 2);
  memcpy(out + at.scale, &scale, 4);
  memcpy(out + at.count, &to.count, 4);
}

/* make(i) finishes row i of x just before it is prepared, where its reader finds it in the nearest cache. */
template <class Make>
static void prepare(hopon_pool::Team &team, const hopon_matrix &w, const float *x, int64_t ldx, int m, char *out,
                    size_t row_bytes, Make &&make) {
  constexpr int64_t WORTH_SHARING = 4096, VALUES_PER_TASK = 16384; /* a barrier, a few microseconds */
  const int64_t values = (int64_t)m * w.cols, team_values = team.threads() * VALUES_PER_TASK;
  team.run_ranges(m, values < WORTH_SHARING ? 0 : (values + team_values - 1) / team_values, [&](int64_t i, int64_t end) {
    for (; i < end; i++) {
      make(i);
      auto row = w.dtype == HOPON_BF16 ? prepare_row_bf16 : prepare_row_int;
      row(w, x + i * ldx, out + (size_t)i * row_bytes);
    }
  });
}

} /* namespace hopon::HOPON_LEVEL */

#endif
