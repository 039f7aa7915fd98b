/* Tiles of integer weights: products of digits, sums over groups, outliers. See the top of linear.h, which alone includes it. */
#ifndef HOPON_LINEAR_INT_H
#define HOPON_LINEAR_INT_H

#if defined(HOPON_LEVEL_PORTABLE) && defined(__SSE2__)
#include <emmintrin.h> /* part of every x86-64 */
#endif

namespace hopon::HOPON_LEVEL {

/* Rows of the largest tile that keeps its accumulators in registers. */
#if defined(HOPON_LEVEL_PORTABLE)
constexpr int MAX_INT_ROWS = 3;
#elif defined(HOPON_LEVEL_AVX2)
constexpr int MAX_INT_ROWS = 4;
#else
constexpr int MAX_INT_ROWS = 6;
#endif

template <int R>
constexpr int vectors_int() {
#if defined(HOPON_LEVEL_AVX512)
  return R <= 3 ? 4 : 2;
#else
  return 1;
#endif
}

/* One quad (4 inputs) of 16 columns: codes times digits, added to 16 int32 sums. NIBBLES: codes are the 4 bits of every
 * byte above the lowest `shift`. */
#if defined(HOPON_LEVEL_AVX512)
typedef __m512i i32x16;
typedef __m512i Quad;
HOPON_INLINE i32x16 broadcast_i32(int32_t a) { return _mm512_set1_epi32(a); }
HOPON_INLINE f32x16 to_float(i32x16 a) { return {_mm512_cvtepi32_ps(a)}; }
template <bool NIBBLES>
HOPON_INLINE Quad load_quad(const uint8_t *w, int shift) {
  typedef uint16_t u16x32 __attribute__((vector_size(64)));
  __m512i codes = _mm512_loadu_si512(w);
  return NIBBLES ? _mm512_and_si512((__m512i)((u16x32)codes >> shift), _mm512_set1_epi8(15)) : codes;
}
HOPON_INLINE void add_quad(i32x16 &sums, const Quad &w, const char *digits) {
  int32_t four;
  memcpy(&four, digits, 4);
  /* Not the intrinsic: GCC copies every accumulator before and after it. */
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(w), "v"(_mm512_set1_epi32(four)));
}
#elif defined(HOPON_LEVEL_AVX2)
struct i32x16 {
  __m256i low, high;
};
struct Quad { /* codes 0 and 2, and codes 1 and 3, of 8 + 8 columns as 16-bit words */
  __m256i even[2], odd[2];
};
HOPON_INLINE i32x16 broadcast_i32(int32_t a) { return {_mm256_set1_epi32(a), _mm256_set1_epi32(a)}; }
HOPON_INLINE f32x16 to_float(i32x16 a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
template <bool NIBBLES>
HOPON_INLINE Quad load_quad(const uint8_t *w, int shift) {
  typedef uint16_t u16x16 __attribute__((vector_size(32)));
  const uint16_t m = NIBBLES ? 15 : 255;
  Quad q;
  for (int half = 0; half < 2; half++) {
    u16x16 codes = (u16x16)_mm256_loadu_si256((const __m256i *)w + half);
    q.even[half] = (__m256i)((codes >> shift) & m);
    q.odd[half] = (__m256i)((codes >> (8 + shift)) & m);
  }
  return q;
}
/* Not the intrinsics: GCC sums the products of all quads in an order of its own and spills every one of them. */
HOPON_INLINE void add_pairs(__m256i &sums, __m256i codes, __m256i digits) {
  __m256i products;
  asm("vpmaddwd %2, %3, %0\n\tvpaddd %0, %1, %1" : "=&x"(products), "+x"(sums) : "x"(codes), "x"(digits));
}
HOPON_INLINE void add_quad(i32x16 &sums, const Quad &w, const char *q) {
  const __m256i even = _mm256_castps_si256(_mm256_broadcast_ss((const float *)q));
  const __m256i odd = _mm256_castps_si256(_mm256_broadcast_ss((const float *)(q + 4)));
  add_pairs(sums.low, w.even[0], even);
  add_pairs(sums.high, w.even[1], even);
  add_pairs(sums.low, w.odd[0], odd);
  add_pairs(sums.high, w.odd[1], odd);
}
#else
struct i32x16 {
  i32x4 v[4];
};
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
HOPON_INLINE i32x16 broadcast_i32(int32_t a) {
  const i32x4 four = {a, a, a, a};
  return {{four, four, four, four}};
}
HOPON_INLINE f32x16 to_float(i32x16 a) {
  int32_t t[LANES];
  memcpy(t, &a, sizeof a);
  return load_i32(t);
}
template <bool NIBBLES>
HOPON_INLINE Quad load_quad(const uint8_t *w, int shift) {
  const uint16_t m = NIBBLES ? 15 : 255;
  Quad q;
  unroll<4>([&](auto part) HOPON_LAMBDA {
    u16x8 codes;
    memcpy(&codes, w + part * 16, 16);
    q.even[part] = (codes >> shift) & m;
    q.odd[part] = (codes >> (8 + shift)) & m;
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

/* Scales and offsets of a block. */
HOPON_INLINE const uint16_t *block_scales(const hopon_matrix &w, int block) {
  const int groups = w.cols_padded / GROUP;
  return w.scales + (size_t)block * (size_t)(groups + even(groups)) * BLOCK;
}

template <bool EXPANDED>
HOPON_INLINE f32x16 load_scale(const Block &block, const uint16_t *scales, size_t at) {
  return EXPANDED ? load(block.scales + at) : load_f16(scales + at);
}

/* Adds the high digits to a tile [rows][64] of sums over the low ones, and multiplies by the rows' scales. */
template <bool NIBBLES, bool EXPANDED>
static __attribute__((noinline)) void add_outliers(const Linear &job, int row, int rows, const Block &block, float *tile) {
  constexpr int V = BLOCK / LANES;
  const IntRow at(job.w);
  const uint16_t *scales = block_scales(job.w, block.index);
  for (int r = 0; r < rows; r++, tile += BLOCK) {
    const char *x = job.rows + (size_t)(row + r) * job.row_bytes;
    const uint32_t *quads = (const uint32_t *)(x + at.quads); /* unsigned: dividing and widening them costs less */
    const size_t count = *(const uint32_t *)(x + at.count);
    f32x16 high[V] = {zero(), zero(), zero(), zero()};
    for (size_t i = 0; i < count; i++) {
      const size_t quad = quads[i], group = quad / 8;
      const uint8_t *w = block.codes + (NIBBLES ? group * 4 + quad % 4 : quad) * BLOCK * 4;
      unroll<V>([&](auto v) HOPON_LAMBDA {
        i32x16 sums = broadcast_i32(0);
        add_quad(sums, load_quad<NIBBLES>(w + v * 4 * LANES, NIBBLES ? quad & 4 : 0), x + at.high + i * QUAD_BYTES);
        high[v] = fma(to_float(sums), load_scale<EXPANDED>(block, scales, group * BLOCK + v * LANES), high[v]);
      });
    }
    const f32x16 scale = broadcast(*(const float *)(x + at.scale));
    unroll<V>([&](auto v) HOPON_LAMBDA {
      float *t = tile + v * LANES;
      store(t, fma(high[v], broadcast(256.0f), load(t)) * scale);
    });
  }
}

/* int8: [K/4][64][4]; int4 (NIBBLES): [K/32][4][64][4] */
template <int R, bool NIBBLES, bool EXPANDED>
static void block_int(const Linear &job, int row, int, const Block &block, Fetch next) {
  constexpr int V = vectors_int<R>();
  constexpr int LINES = NIBBLES ? 4 : 8; /* of 256 bytes: a quad, or two */
  const int groups = job.w.cols_padded / GROUP;
  const char *x = job.rows + (size_t)row * job.row_bytes;
  const size_t stride = job.row_bytes, step = next.bytes / (size_t)(groups * (BLOCK / (V * LANES)));
  const IntRow at(job.w);
  alignas(64) float tile[R * BLOCK];
  for (int c = 0; c < BLOCK; c += V * LANES) {
    const uint8_t *w = block.codes + c * 4;
    const uint16_t *scales = block_scales(job.w, block.index), *offsets = scales + 2 * c + groups * BLOCK;
    f32x16 t[R][V];
    unroll<R>([&](auto r) HOPON_LAMBDA { unroll<V>([&](auto v) HOPON_LAMBDA { t[r][v] = zero(); }); });
    for (int g = 0; job.w.has_offsets && g < groups; g += 2, offsets += 2 * BLOCK) {
      bf16x32 pairs[V];
      unroll<V>([&](auto v) HOPON_LAMBDA { pairs[v] = load_pairs(offsets + v * 2 * LANES); });
      unroll<R>([&](auto r) HOPON_LAMBDA {
        float pair;
        memcpy(&pair, x + r * stride + at.sums + (size_t)g * 2, 4);
        unroll<V>([&](auto v) HOPON_LAMBDA { t[r][v] = dot(pairs[v], pair, t[r][v]); });
      });
    }
    for (int g = 0; g < groups; g++, w += LINES * BLOCK * 4) {
      const char *digits = x + g * GROUP_BYTES; /* of the first row */
      for (size_t i = 0; i < step; i += 64) prefetch(next.at + i);
      next.at += step;
      i32x16 sums[R][V];
      unroll<R>([&](auto r) HOPON_LAMBDA {
        int32_t shift;
        memcpy(&shift, digits + r * stride + SHIFT_AT, 4);
        unroll<V>([&](auto v) HOPON_LAMBDA { sums[r][v] = broadcast_i32(shift); });
      });
      auto add_quads = [&](int first, int shift) HOPON_LAMBDA {
        unroll<LINES>([&](auto j) HOPON_LAMBDA {
          Quad quad[V];
          unroll<V>([&](auto v) HOPON_LAMBDA {
            quad[v] = load_quad<NIBBLES>(w + j * BLOCK * 4 + v * 4 * LANES, shift);
          });
          unroll<R>([&](auto r) HOPON_LAMBDA {
            const char *four = digits + r * stride + (first + j) * QUAD_BYTES;
            unroll<V>([&](auto v) HOPON_LAMBDA { add_quad(sums[r][v], quad[v], four); });
          });
        });
      };
      add_quads(0, 0);
      if (NIBBLES) add_quads(4, 4);
      f32x16 scale[V];
      unroll<V>([&](auto v) HOPON_LAMBDA {
        scale[v] = load_scale<EXPANDED>(block, scales, (size_t)(g * BLOCK + c + v * LANES));
      });
      unroll<R>([&](auto r) HOPON_LAMBDA {
        unroll<V>([&](auto v) HOPON_LAMBDA { t[r][v] = fma(to_float(sums[r][v]), scale[v], t[r][v]); });
      });
    }
    unroll<R>([&](auto r) HOPON_LAMBDA {
      unroll<V>([&](auto v) HOPON_LAMBDA { store(tile + r * BLOCK + c + v * LANES, t[r][v]); });
    });
  }
  add_outliers<NIBBLES, EXPANDED>(job, row, R, block, tile);
  finish(job, row, R, block.index * BLOCK, BLOCK, tile);
}

} /* namespace hopon::HOPON_LEVEL */

#endif
