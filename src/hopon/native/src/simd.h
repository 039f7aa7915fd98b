/* Sixteen floats at a time: one small type, the same interface at every instruction level.
 *
 * Chosen by -DHOPON_LEVEL_AMX, _AVX512, _VNNI, _AVX2 or _PORTABLE. The first three share the vectors of AVX-512: amx is
 * avx512 with matrix tiles in linear_amx.h and attention_amx.h, vnni is avx512 without the instructions for bf16
 * (HOPON_HAS_BF16). Everything here is deterministic for one level, and the levels differ in three points only: `fma` is a
 * product followed by a sum at the portable level and fused at all others; with HOPON_HAS_BF16 `store_bf16` writes zero for
 * values below the smallest normal float, and `dot` rounds in the order of its instruction and treats such values as zero
 * too.
 * Knows nothing of matrices, threads or models.
 */
#ifndef HOPON_SIMD_H
#define HOPON_SIMD_H

#include <stdint.h>
#include <string.h>

#if defined(HOPON_LEVEL_AMX)
#define HOPON_LEVEL_AVX512
#define HOPON_HAS_BF16
#define HOPON_LEVEL amx
#define HOPON_LEVEL_NAME "amx"
#elif defined(HOPON_LEVEL_AVX512)
#define HOPON_HAS_BF16
#define HOPON_LEVEL avx512
#define HOPON_LEVEL_NAME "avx512"
#elif defined(HOPON_LEVEL_VNNI)
#define HOPON_LEVEL_AVX512
#define HOPON_LEVEL vnni
#define HOPON_LEVEL_NAME "vnni"
#elif defined(HOPON_LEVEL_AVX2)
#define HOPON_LEVEL avx2
#define HOPON_LEVEL_NAME "avx2"
#elif defined(HOPON_LEVEL_PORTABLE)
#define HOPON_LEVEL portable
#define HOPON_LEVEL_NAME "portable"
#else
#error "define HOPON_LEVEL_AMX, _AVX512, _VNNI, _AVX2 or _PORTABLE"
#endif

#if !defined(HOPON_LEVEL_PORTABLE)
#include <immintrin.h>
#endif

#define HOPON_INLINE static inline __attribute__((always_inline))

namespace hopon::HOPON_LEVEL {

constexpr int LANES = 16;

HOPON_INLINE uint32_t float_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}

HOPON_INLINE float bits_float(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

HOPON_INLINE float bf16_to_float(uint16_t h) { return bits_float((uint32_t)h << 16); }

/* Round to nearest, ties to even. A NaN stays a NaN. */
HOPON_INLINE uint16_t float_to_bf16(float x) {
  uint32_t u = float_bits(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u);
  return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

/* One fused step at the levels that have it; a product, rounded, then a sum at the portable one. Same as `fma` of lanes. */
HOPON_INLINE float fma1(float a, float b, float c) {
#if defined(HOPON_LEVEL_PORTABLE)
  return a * b + c; /* -ffp-contract=off keeps it two roundings */
#else
  return __builtin_fmaf(a, b, c);
#endif
}

/* `max(a, b)` and `min(a, b)` of lanes give b where either is a NaN. Masks of lanes: 0 <= n; n >= 16 means all. */

#if defined(HOPON_LEVEL_AVX512)
/* ---- avx512 and vnni --------------------------------------------------------------------------------------------- */

struct f32x16 {
  __m512 v;
};

HOPON_INLINE __mmask16 first_lanes(int n) { return n >= LANES ? (__mmask16)0xffff : (__mmask16)((1u << n) - 1u); }

HOPON_INLINE f32x16 broadcast(float x) { return {_mm512_set1_ps(x)}; }
HOPON_INLINE f32x16 zero() { return {_mm512_setzero_ps()}; }
HOPON_INLINE f32x16 load(const float *p) { return {_mm512_loadu_ps(p)}; }
HOPON_INLINE void store(float *p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
/* To 64-byte aligned memory past the caches (the portable level: like store); other threads see it behind end_streams(). */
HOPON_INLINE void stream(float *p, f32x16 a) { _mm512_stream_ps(p, a.v); }
HOPON_INLINE void end_streams() { _mm_sfence(); }
/* The first n lanes from memory, zeros behind them; memory behind is not touched. */
HOPON_INLINE f32x16 load_first(const float *p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
HOPON_INLINE void store_first(float *p, f32x16 a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }
/* a with lanes >= n set to `other`. */
HOPON_INLINE f32x16 keep_first(f32x16 a, int n, float other = 0.0f) {
  return {_mm512_mask_blend_ps(first_lanes(n), _mm512_set1_ps(other), a.v)};
}

HOPON_INLINE f32x16 operator+(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
HOPON_INLINE f32x16 operator-(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
HOPON_INLINE f32x16 operator*(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
HOPON_INLINE f32x16 operator/(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
HOPON_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
HOPON_INLINE f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
HOPON_INLINE f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
HOPON_INLINE f32x16 abs(f32x16 a) { return {_mm512_abs_ps(a.v)}; }

HOPON_INLINE f32x16 load_bf16(const uint16_t *p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
HOPON_INLINE void store_bf16(uint16_t *p, f32x16 a) {
#if defined(HOPON_HAS_BF16)
  _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(a.v));
#else
  __m512i u = _mm512_castps_si512(a.v), half = _mm512_srli_epi32(u, 16);
  __m512i odd = _mm512_and_si512(half, _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, half, _mm512_set1_epi32(0x40));
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(rounded));
#endif
}
HOPON_INLINE void store_f16(uint16_t *p, f32x16 a) {
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#if defined(HOPON_HAS_BF16)
/* 16 pairs of bf16, and sums of products of pairs: c + first * first + second * second, lane by lane; `pair` is the one
 * that all lanes of a are multiplied with, as the bits of a float, its first member in the low half. */
struct bf16x32 {
  __m512i v;
};
HOPON_INLINE bf16x32 load_pairs(const uint16_t *p) { return {_mm512_loadu_si512(p)}; }
HOPON_INLINE bf16x32 keep_first_members(bf16x32 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(0xffff))}; }
HOPON_INLINE f32x16 dot(bf16x32 a, float pair, f32x16 c) {
  return {_mm512_dpbf16_ps(c.v, (__m512bh)a.v, (__m512bh)_mm512_set1_ps(pair))};
}
/* Rounds 32 numbers to memory, and returns them as 16 pairs. */
HOPON_INLINE bf16x32 store_pairs(uint16_t *p, f32x16 a, f32x16 b) {
  const __m512i pairs = (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v);
  _mm512_storeu_si512(p, pairs);
  return {pairs};
}
#endif
/* 16 pairs of bf16: their first members, and their second ones. */
HOPON_INLINE void load_bf16_pairs(const uint16_t *p, f32x16 &first, f32x16 &second) {
  __m512i pairs = _mm512_loadu_si512(p);
  first.v = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  second.v = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)));
}
HOPON_INLINE f32x16 load_f16(const uint16_t *p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p))};
}
HOPON_INLINE f32x16 load_i32(const int32_t *p) { return {_mm512_cvtepi32_ps(_mm512_loadu_si512(p))}; }

/* 2^n for the integer n that `shifted` = 1.5 * 2^23 + n holds in its low bits; -127 <= n <= 128, ends give 0 and inf. */
HOPON_INLINE f32x16 power_of_two(f32x16 shifted) {
  __m512i n = _mm512_sub_epi32(_mm512_castps_si512(shifted.v), _mm512_set1_epi32(0x4b400000 - 127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(n, 23))};
}
/* a * 2^n for the n of `shifted`, by adding it to the exponent: a and the product are normal. */
HOPON_INLINE f32x16 times_power_of_two(f32x16 a, f32x16 shifted) {
  __m512i n = _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), n))};
}

HOPON_INLINE void split(f32x16 a, __m256 &low, __m256 &high) {
  low = _mm512_castps512_ps256(a.v);
  high = _mm512_extractf32x8_ps(a.v, 1);
}

#elif defined(HOPON_LEVEL_AVX2)
/* ---- avx2 ------------------------------------------------------------------------------------------------------- */

struct f32x16 {
  __m256 low, high;
};

/* Masks of the first n of 16 lanes, n <= 16, as two vectors. */
HOPON_INLINE __m256i first_lanes(int n, int from) {
  const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n - from), index);
}

HOPON_INLINE f32x16 broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
HOPON_INLINE f32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
HOPON_INLINE f32x16 load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
HOPON_INLINE void store(float *p, f32x16 a) {
  _mm256_storeu_ps(p, a.low);
  _mm256_storeu_ps(p + 8, a.high);
}
HOPON_INLINE void stream(float *p, f32x16 a) {
  _mm256_stream_ps(p, a.low);
  _mm256_stream_ps(p + 8, a.high);
}
HOPON_INLINE void end_streams() { _mm_sfence(); }
HOPON_INLINE f32x16 load_first(const float *p, int n) {
  return {_mm256_maskload_ps(p, first_lanes(n, 0)), _mm256_maskload_ps(p + 8, first_lanes(n, 8))};
}
HOPON_INLINE void store_first(float *p, f32x16 a, int n) {
  _mm256_maskstore_ps(p, first_lanes(n, 0), a.low);
  _mm256_maskstore_ps(p + 8, first_lanes(n, 8), a.high);
}
HOPON_INLINE f32x16 keep_first(f32x16 a, int n, float other = 0.0f) {
  __m256 o = _mm256_set1_ps(other);
  return {_mm256_blendv_ps(o, a.low, _mm256_castsi256_ps(first_lanes(n, 0))),
          _mm256_blendv_ps(o, a.high, _mm256_castsi256_ps(first_lanes(n, 8)))};
}

HOPON_INLINE f32x16 operator+(f32x16 a, f32x16 b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
HOPON_INLINE f32x16 operator-(f32x16 a, f32x16 b) {
  return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
HOPON_INLINE f32x16 operator*(f32x16 a, f32x16 b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
HOPON_INLINE f32x16 operator/(f32x16 a, f32x16 b) {
  return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
HOPON_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
HOPON_INLINE f32x16 max(f32x16 a, f32x16 b) {
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
HOPON_INLINE f32x16 min(f32x16 a, f32x16 b) {
  return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
HOPON_INLINE f32x16 abs(f32x16 a) {
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(a.low, magnitude), _mm256_and_ps(a.high, magnitude)};
}

HOPON_INLINE f32x16 load_bf16(const uint16_t *p) {
  __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
  __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p + 8)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
}
/* 8 floats rounded to bf16, in the low halves of 32-bit lanes. */
HOPON_INLINE __m256i round_bf16(__m256 a) {
  __m256i u = _mm256_castps_si256(a);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
  __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
  return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
}
HOPON_INLINE void store_bf16(uint16_t *p, f32x16 a) {
  __m256i packed = _mm256_packus_epi32(round_bf16(a.low), round_bf16(a.high));
  _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(packed, 0xd8));
}
HOPON_INLINE void load_bf16_pairs(const uint16_t *p, f32x16 &first, f32x16 &second) {
  const __m256i mask = _mm256_set1_epi32((int)0xffff0000);
  __m256i low = _mm256_loadu_si256((const __m256i *)p), high = _mm256_loadu_si256((const __m256i *)(p + 16));
  first = {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
  second = {_mm256_castsi256_ps(_mm256_and_si256(low, mask)), _mm256_castsi256_ps(_mm256_and_si256(high, mask))};
}
HOPON_INLINE void store_f16(uint16_t *p, f32x16 a) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a.low, nearest));
  _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(a.high, nearest));
}
HOPON_INLINE f32x16 load_f16(const uint16_t *p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
HOPON_INLINE f32x16 load_i32(const int32_t *p) {
  return {_mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i *)p)),
          _mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i *)(p + 8)))};
}

HOPON_INLINE f32x16 power_of_two(f32x16 shifted) {
  const __m256i base = _mm256_set1_epi32(0x4b400000 - 127);
  __m256i low = _mm256_sub_epi32(_mm256_castps_si256(shifted.low), base);
  __m256i high = _mm256_sub_epi32(_mm256_castps_si256(shifted.high), base);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(low, 23)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 23))};
}
HOPON_INLINE f32x16 times_power_of_two(f32x16 a, f32x16 shifted) {
  auto add = [](__m256 x, __m256 n) __attribute__((always_inline)) {
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_castps_si256(n), 23)));
  };
  return {add(a.low, shifted.low), add(a.high, shifted.high)};
}

HOPON_INLINE void split(f32x16 a, __m256 &low, __m256 &high) {
  low = a.low;
  high = a.high;
}

#else
/* ---- portable: GCC/Clang vectors of 4, which every target has or emulates ---------------------------------------- */

typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));

struct f32x16 {
  f32x4 v[4];
};

#define HOPON_EACH(expression) \
  f32x16 r;                    \
  for (int i = 0; i < 4; i++) r.v[i] = (expression); \
  return r

HOPON_INLINE f32x16 broadcast(float x) { HOPON_EACH((f32x4{x, x, x, x})); }
HOPON_INLINE f32x16 zero() { return broadcast(0.0f); }
HOPON_INLINE f32x16 load(const float *p) {
  f32x16 r;
  memcpy(&r, p, sizeof r);
  return r;
}
HOPON_INLINE void store(float *p, f32x16 a) { memcpy(p, &a, sizeof a); }
HOPON_INLINE void stream(float *p, f32x16 a) { store(p, a); }
HOPON_INLINE void end_streams() {}
HOPON_INLINE f32x16 load_first(const float *p, int n) {
  float t[LANES] = {};
  memcpy(t, p, sizeof(float) * (size_t)(n < LANES ? n : LANES));
  return load(t);
}
HOPON_INLINE void store_first(float *p, f32x16 a, int n) {
  float t[LANES];
  store(t, a);
  memcpy(p, t, sizeof(float) * (size_t)(n < LANES ? n : LANES));
}
HOPON_INLINE f32x16 keep_first(f32x16 a, int n, float other = 0.0f) {
  float t[LANES];
  store(t, a);
  for (int i = n; i < LANES; i++) t[i] = other;
  return load(t);
}

HOPON_INLINE f32x16 operator+(f32x16 a, f32x16 b) { HOPON_EACH(a.v[i] + b.v[i]); }
HOPON_INLINE f32x16 operator-(f32x16 a, f32x16 b) { HOPON_EACH(a.v[i] - b.v[i]); }
HOPON_INLINE f32x16 operator*(f32x16 a, f32x16 b) { HOPON_EACH(a.v[i] * b.v[i]); }
HOPON_INLINE f32x16 operator/(f32x16 a, f32x16 b) { HOPON_EACH(a.v[i] / b.v[i]); }
HOPON_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { HOPON_EACH(a.v[i] * b.v[i] + c.v[i]); }
HOPON_INLINE f32x4 choose(i32x4 mask, f32x4 a, f32x4 b) { return (f32x4)((mask & (i32x4)a) | (~mask & (i32x4)b)); }
HOPON_INLINE f32x16 max(f32x16 a, f32x16 b) { HOPON_EACH(choose(a.v[i] > b.v[i], a.v[i], b.v[i])); }
HOPON_INLINE f32x16 min(f32x16 a, f32x16 b) { HOPON_EACH(choose(a.v[i] < b.v[i], a.v[i], b.v[i])); }
HOPON_INLINE f32x16 abs(f32x16 a) {
  const i32x4 magnitude = {0x7fffffff, 0x7fffffff, 0x7fffffff, 0x7fffffff};
  HOPON_EACH((f32x4)((i32x4)a.v[i] & magnitude));
}

HOPON_INLINE f32x16 load_bf16(const uint16_t *p) {
  float t[LANES];
  for (int i = 0; i < LANES; i++) t[i] = bf16_to_float(p[i]);
  return load(t);
}
HOPON_INLINE void store_bf16(uint16_t *p, f32x16 a) {
  float t[LANES];
  uint16_t bits[LANES];
  store(t, a);
  for (int i = 0; i < LANES; i++) bits[i] = float_to_bf16(t[i]);
  memcpy(p, bits, sizeof bits);
}
/* Round to nearest, ties to even; a subnormal half is what adding 1/2, whose last bit is 2^-24, leaves of a float. */
HOPON_INLINE void store_f16(uint16_t *p, f32x16 a) {
  float t[LANES];
  store(t, a);
  for (int i = 0; i < LANES; i++) {
    uint32_t u = float_bits(t[i]), magnitude = u & 0x7fffffffu, half;
    if (magnitude > 0x7f800000u) half = 0x7e00u; /* NaN */
    else if (magnitude >= 0x477ff000u) half = 0x7c00u; /* beyond 65504 and its half step */
    else if (magnitude < 0x38800000u) half = float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f);
    else half = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    p[i] = (uint16_t)((u >> 16 & 0x8000u) | half);
  }
}
HOPON_INLINE void load_bf16_pairs(const uint16_t *p, f32x16 &first, f32x16 &second) {
  const int32_t m = (int32_t)0xffff0000;
  const i32x4 mask = {m, m, m, m};
  for (int i = 0; i < 4; i++) {
    i32x4 pairs;
    memcpy(&pairs, p + 8 * i, 16); /* little endian */
    first.v[i] = (f32x4)(pairs << 16);
    second.v[i] = (f32x4)(pairs & mask);
  }
}
/* Exact, and without subnormal floats in between, so that it holds under any flush-to-zero setting. */
HOPON_INLINE f32x16 load_f16(const uint16_t *p) {
  float t[LANES];
  for (int i = 0; i < LANES; i++) {
    uint32_t sign = (uint32_t)(p[i] & 0x8000) << 16, exponent = p[i] & 0x7c00, magnitude = p[i] & 0x7fff;
    uint32_t normal = (magnitude << 13) + ((exponent == 0x7c00 ? 224u : 112u) << 23);
    uint32_t subnormal = float_bits((float)(int32_t)magnitude * 0x1p-24f);
    t[i] = bits_float(sign | (exponent ? normal : subnormal));
  }
  return load(t);
}
HOPON_INLINE f32x16 load_i32(const int32_t *p) {
  float t[LANES];
  for (int i = 0; i < LANES; i++) t[i] = (float)p[i];
  return load(t);
}

HOPON_INLINE f32x16 power_of_two(f32x16 shifted) {
  const int32_t b = 0x4b400000 - 127;
  const i32x4 base = {b, b, b, b};
  HOPON_EACH((f32x4)(((i32x4)shifted.v[i] - base) << 23));
}
HOPON_INLINE f32x16 times_power_of_two(f32x16 a, f32x16 shifted) {
  HOPON_EACH((f32x4)((i32x4)a.v[i] + ((i32x4)shifted.v[i] << 23)));
}

#undef HOPON_EACH
#endif

/* ---- the same source for every level ----------------------------------------------------------------------------- */

#if !defined(HOPON_HAS_BF16)
/* Pairs of bf16 as two vectors of floats; see avx512. */
struct bf16x32 {
  f32x16 first, second;
};
HOPON_INLINE bf16x32 load_pairs(const uint16_t *p) {
  bf16x32 r;
  load_bf16_pairs(p, r.first, r.second);
  return r;
}
HOPON_INLINE bf16x32 keep_first_members(bf16x32 a) { return {a.first, zero()}; }
HOPON_INLINE bf16x32 store_pairs(uint16_t *p, f32x16 a, f32x16 b) {
  store_bf16(p, a);
  store_bf16(p + LANES, b);
  return load_pairs(p);
}
HOPON_INLINE f32x16 dot(bf16x32 a, float pair, f32x16 c) {
  const uint32_t bits = float_bits(pair);
  c = fma(a.first, broadcast(bits_float(bits << 16)), c);
  return fma(a.second, broadcast(bits_float(bits & 0xffff0000u)), c);
}
#endif

HOPON_INLINE float f16_to_float(uint16_t h) {
  uint16_t in[LANES] = {h};
  float out[LANES];
  store(out, load_f16(in));
  return out[0];
}

/* Sum of 16 lanes in one fixed order: lanes i and i+8, then i and i+4, i and i+2, i and i+1. */
HOPON_INLINE float sum(f32x16 a) {
#if defined(HOPON_LEVEL_PORTABLE)
  f32x4 x = (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]);
  return (x[0] + x[2]) + (x[1] + x[3]);
#else
  __m256 low, high;
  split(a, low, high);
  __m256 x = _mm256_add_ps(low, high);
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
#endif
}

/* Largest of 16 lanes, in the same order (the order decides nothing unless there are NaNs). */
HOPON_INLINE float largest(f32x16 a) {
#if defined(HOPON_LEVEL_PORTABLE)
  float t[LANES];
  store(t, a);
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) t[i] = t[i] > t[i + half] ? t[i] : t[i + half];
  return t[0];
#else
  __m256 low, high;
  split(a, low, high);
  __m256 x = _mm256_max_ps(low, high);
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
#endif
}

/* e^x with a relative error below 2e-7 for -87.3 <= x <= 88.3. Exactly 0 below -87.7 (and at -inf), +inf above 88.4,
 * NaN of NaN. x = n ln2 + r with |r| <= ln2 / 2; e^r by its Taylor polynomial of degree 7 (truncation 5e-9). */
HOPON_INLINE f32x16 exp(f32x16 x) {
  const f32x16 shift = broadcast(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
  x = max(broadcast(-88.0f), min(broadcast(89.0f), x));
  f32x16 shifted = x * broadcast(1.44269504f) + shift;
  f32x16 n = shifted - shift;
  f32x16 r = fma(n, broadcast(-0.693359375f), x); /* 9 bits: n times it is exact, fused or not */
  r = fma(n, broadcast(2.12194440e-4f), r);
  f32x16 p = broadcast(1.0f / 5040);
  p = fma(p, r, broadcast(1.0f / 720));
  p = fma(p, r, broadcast(1.0f / 120));
  p = fma(p, r, broadcast(1.0f / 24));
  p = fma(p, r, broadcast(1.0f / 6));
  p = fma(p, r, broadcast(0.5f));
  p = fma(p, r, broadcast(1.0f));
  p = fma(p, r, broadcast(1.0f));
  return p * power_of_two(shifted);
}

/* e^x for x <= 0 with a relative error below 2e-4: for what is rounded to bf16 afterwards. Exactly 1 at 0, about 1e-38
 * below -87, NaN of NaN. 2^f, |f| <= 1/2, by the polynomial of degree 3 with the least relative error among those that
 * are 1 at 0. */
HOPON_INLINE f32x16 exp_rough(f32x16 x) {
  const f32x16 shift = broadcast(12582912.0f), log2e = broadcast(1.44269504f);
  x = max(broadcast(-87.0f), x);
  f32x16 shifted = fma(x, log2e, shift);
  f32x16 f = fma(x, log2e, shift - shifted);
  f32x16 p = broadcast(0.0550090578f);
  p = fma(p, f, broadcast(0.242210975f));
  p = fma(p, f, broadcast(0.693282898f));
  p = fma(p, f, broadcast(1.0f));
  return times_power_of_two(p, shifted);
}

/* e^x of one number, the same bits as in a lane. */
HOPON_INLINE float exp1(float x) {
  float t[LANES];
  store(t, exp(broadcast(x)));
  return t[0];
}

} /* namespace hopon::HOPON_LEVEL */

#endif
