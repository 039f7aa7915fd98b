// The vector kernels of attention.h: how K and V are read from the cache, and scores, softmax weights and outputs of a few
// query vectors that share them. What they compute is stated there; of tasks they know nothing.
#ifndef HOPON_ATTENTION_VECTORS_H
#define HOPON_ATTENTION_VECTORS_H
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "attention_plan.h"
#include "hopon.h"
#include "simd.h"

namespace hopon::HOPON_LEVEL {

constexpr int kTile = 16;
constexpr int kMaxHeadDim = 256;
constexpr int kTilesPerSplit = kSplit / kTile;

// Register blocking: query vectors x K tiles for scores, query vectors x vectors of V for outputs.
#if defined(HOPON_LEVEL_AVX512)
constexpr int kQueries = 6, kTiles = 4, kColumns = 4;
#elif defined(HOPON_LEVEL_AVX2)
constexpr int kQueries = 2, kTiles = 2, kColumns = 2;
#else
constexpr int kQueries = 1, kTiles = 2, kColumns = 2;
#endif
constexpr int kVectors = 24;  // query vectors of a task (more only where one KV head serves more heads than that)

// The amx level reads a cache in bf16 by the matrix unit: so many vectors at a time, and in a task.
#if defined(HOPON_LEVEL_AMX)
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
#endif
constexpr int kTileRows = 16, kTiledVectors = 48;

// How the cache stores a number: float, or one of these.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

// Numbers that one step of a chain takes: neighbours in d of K, tokens of V. They lie side by side.
template <class E>
constexpr int kPack = 1;
template <>
inline constexpr int kPack<bf16> = 2;

HOPON_INLINE f32x16 load_kv(const float *p) { return load(p); }
HOPON_INLINE f32x16 load_kv(const f16 *p) { return load_f16(&p->bits); }
HOPON_INLINE bf16x32 load_kv(const bf16 *p) { return load_pairs(&p->bits); }

// One link of a chain. `word` is what all lanes are multiplied with: a number, or the bits of a pair.
HOPON_INLINE f32x16 link(f32x16 kv, float word, f32x16 chain) { return fma(broadcast(word), kv, chain); }
HOPON_INLINE f32x16 link(bf16x32 kv, float word, f32x16 chain) { return dot(kv, word, chain); }
HOPON_INLINE f32x16 without_second_token(f32x16 v) { return v; }
HOPON_INLINE bf16x32 without_second_token(bf16x32 v) { return keep_first_members(v); }

// Keeps a value in a register: GCC loads it again for every use otherwise.
template <class V>
HOPON_INLINE V pinned(V v) {
  return v;
}
#if defined(HOPON_LEVEL_AVX512)
HOPON_INLINE f32x16 pinned(f32x16 x) {
  asm("" : "+v"(x.v));
  return x;
}
#endif
#if defined(HOPON_HAS_BF16)
HOPON_INLINE bf16x32 pinned(bf16x32 x) {
  asm("" : "+v"(x.v));
  return x;
}
#endif

template <class T>
HOPON_INLINE void fetch(const T *p) {
  __builtin_prefetch(reinterpret_cast<const char *>(p));
}
// Not into the nearest cache, but the one behind it.
template <class T>
HOPON_INLINE void fetch_far(const T *p) {
  __builtin_prefetch(reinterpret_cast<const char *>(p), 0, 2);
}

inline int round_up(int x, int to) { return (x + to - 1) / to * to; }

// Where the cache keeps one layer and KV head of one block; see hopon.h for the layout.
struct KvView {
  explicit KvView(const hopon_model &model)
      : head_dim(model.head_dim),
        tile_tokens(std::min(kTile, model.block_size)),
        block_size(model.block_size),
        dtype(model.kv_dtype),
        element(model.kv_dtype == HOPON_F32 ? 4 : 2),
        num_kv_heads(model.num_kv_heads),
        block_bytes(model.block_bytes),
        base(static_cast<char *>(model.kv)) {}

  int64_t half_bytes() const { return static_cast<int64_t>(block_size) * head_dim * element; }
  char *keys(int32_t block, int layer, int kv_head) const {
    return base + block * block_bytes + (static_cast<int64_t>(layer) * num_kv_heads + kv_head) * 2 * half_bytes();
  }
  char *values(int32_t block, int layer, int kv_head) const { return keys(block, layer, kv_head) + half_bytes(); }
  // Tiles can be read where they lie; otherwise they are gathered into tiles of full width first.
  bool direct() const { return tile_tokens == kTile && head_dim % LANES == 0; }
  // Where the number of a token and a d lies in a tile of `tokens` tokens and V of `width` numbers per token.
  template <class E>
  static size_t key_at(int token, int d, int tokens) {
    return static_cast<size_t>(d / kPack<E> * tokens + token) * kPack<E> + d % kPack<E>;
  }
  template <class E>
  static size_t value_at(int token, int d, int tokens, int width) {
    const int pack = std::min(kPack<E>, tokens);
    return static_cast<size_t>(token / pack * width + d) * pack + token % pack;
  }

  int head_dim, tile_tokens, block_size, dtype, element, num_kv_heads;
  int64_t block_bytes;
  char *base;
};

// Tiles of a split, and what the kernels below ask the memory for while they read each of them.
template <class E>
struct KvTiles {
  const E *at[kTilesPerSplit];
  const E *next[kTilesPerSplit];
};

// Where many vectors read the tiles again and again, those a little further on are wanted in the nearest cache. Where few
// do, they wait for memory, and have it at work all the time if they ask for the split that comes next (`find_next`).
template <class E>
void look_ahead(KvTiles<E> &tiles) {
  for (int tile = 0; tile < kTilesPerSplit; ++tile)
    tiles.next[tile] = tiles.at[std::min(tile + kTiles, kTilesPerSplit - 1)];
}

// scores[q][tile * 16 + lane] for N query vectors and T tiles from `first`; a query is a list of words.
template <int N, int T, class E>
void score_block(const float *const *queries, const KvTiles<E> &keys, int first, int head_dim, f32x16 scale,
                 float *const *scores) {
  const E *const *tiles = keys.at + first, *const *next = keys.next + first;
  f32x16 acc[N][T];
#pragma GCC unroll 16
  for (int q = 0; q < N; ++q)
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) acc[q][t] = zero();
  for (int i = 0; i < head_dim / kPack<E>; ++i) {
    decltype(load_kv(tiles[0])) k[T];
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
      k[t] = pinned(load_kv(tiles[t] + i * kTile * kPack<E>));
      fetch(next[t] + i * kTile * kPack<E>);
    }
#pragma GCC unroll 16
    for (int q = 0; q < N; ++q)
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) acc[q][t] = link(k[t], queries[q][i], acc[q][t]);
  }
#pragma GCC unroll 16
  for (int q = 0; q < N; ++q)
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) store(scores[q] + t * kTile, acc[q][t] * scale);
}

// out[q][column .. column + 16 C) += sum over tokens from <= t < to of p[q][t] * V[t], ascending. p[q] is a list of words;
// `from` begins a word, `to` need not end one.
template <int N, int C, class E>
void output_block(const float *const *p, const KvTiles<E> &values, int width, int column, int from, int to,
                  float *const *out) {
  constexpr int pack = kPack<E>;
  f32x16 acc[N][C];
#pragma GCC unroll 16
  for (int q = 0; q < N; ++q)
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) acc[q][c] = load(out[q] + column + c * LANES);
  auto take = [&](const E *row, const E *next, int word, auto &&keep) __attribute__((always_inline)) {
    decltype(load_kv(row)) v[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      v[c] = pinned(keep(load_kv(row + c * LANES * pack)));
      fetch(next + c * LANES * pack);
    }
#pragma GCC unroll 16
    for (int q = 0; q < N; ++q)
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) acc[q][c] = link(v[c], p[q][word], acc[q][c]);
  };
  const int words = to / pack;
  for (int w = from / pack; w < words;) {
    const int tile = w * pack / kTile, stop = std::min(words, (tile + 1) * (kTile / pack));
    for (; w < stop; ++w) {
      const int row = (w % (kTile / pack) * width + column) * pack;
      take(values.at[tile] + row, values.next[tile] + row, w, [](auto v) { return v; });
    }
  }
  if (to % pack != 0) {
    const int tile = to / kTile, row = (words % (kTile / pack) * width + column) * pack;
    take(values.at[tile] + row, values.next[tile] + row, words, [](auto v) { return without_second_token(v); });
  }
#pragma GCC unroll 16
  for (int q = 0; q < N; ++q)
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) store(out[q] + column + c * LANES, acc[q][c]);
}

template <int N, class E>
void output_columns(const float *const *p, const KvTiles<E> &values, int width, int from, int to, float *const *out) {
  int column = 0;
  for (; column + kColumns * LANES <= width; column += kColumns * LANES)
    output_block<N, kColumns>(p, values, width, column, from, to, out);
  if (kColumns > 2 && column + 2 * LANES <= width) {
    output_block<N, 2>(p, values, width, column, from, to, out);
    column += 2 * LANES;
  }
  if (column < width) output_block<N, 1>(p, values, width, column, from, to, out);
}

// Calls f(std::integral_constant<int, n>) for 1 <= n <= N.
template <int N, class F>
void with_constant(int n, F &&f) {
  if constexpr (N > 1)
    if (n < N) return with_constant<N - 1>(n, f);
  f(std::integral_constant<int, N>{});
}

struct SoftmaxState {
  float max, sum;
};

// The largest of n scores. Lanes from n to the tile's end become -infinity.
HOPON_INLINE float mask_and_largest(float *scores, int n) {
  const float infinity = INFINITY;
  const int full = n / kTile * kTile, rest = n - full;
  f32x16 top = broadcast(-infinity);
  for (int t = 0; t < full; t += kTile) top = max(load(scores + t), top);
  if (rest) {
    store(scores + full, keep_first(load(scores + full), rest, -infinity));
    top = max(load(scores + full), top);
  }
  return largest(top);
}

// Weights exp(scale * score - m) of n scores as words for V of E, those from n to the end of the tile, or of its pair
// of tiles, 0; returns their sum. If they are floats they may lie where the scores are.
template <class E>
float weigh(const float *scores, int n, float scale, float m, float *words) {
  const f32x16 factor = broadcast(scale), shift = broadcast(-m);
  auto shifted = [&](int t) __attribute__((always_inline)) { return fma(load(scores + t), factor, shift); };
  f32x16 total = zero();
  if constexpr (kPack<E> == 1) {
    for (int t = 0; t < n; t += kTile) {
      const f32x16 p = exp(shifted(t));
      store(words + t, p);
      total = total + p;
    }
  } else {
    auto weights = [&](int t) __attribute__((always_inline)) { return exp_rough(shifted(t)); };
    uint16_t *rounded = reinterpret_cast<uint16_t *>(words);
    const float ones = bits_float(0x3f803f80);
    int t = 0;
    for (; t + 2 * kTile <= n; t += 2 * kTile)
      total = dot(store_pairs(rounded + t, weights(t), weights(t + kTile)), ones, total);
    if (const int rest = n - t; rest > 0) {
      const f32x16 second = rest > kTile ? keep_first(weights(t + kTile), rest - kTile) : zero();
      total = dot(store_pairs(rounded + t, keep_first(weights(t), rest), second), ones, total);
    }
  }
  return sum(total);
}

// A running result (M, L, O) takes in the result of the next split.
inline void merge_split(SoftmaxState &into, float *into_out, const SoftmaxState &next, const float *next_out,
                        int width) {
  const bool keeps = into.max > next.max;
  const float less = exp1(keeps ? next.max - into.max : into.max - next.max);  // e^0 = 1 is the other one
  const float a = keeps ? 1.0f : less, b = keeps ? less : 1.0f;
  if (!keeps) into.max = next.max;
  into.sum = fma1(next.sum, b, into.sum * a);
  const f32x16 va = broadcast(a), vb = broadcast(b);
  for (int i = 0; i < width; i += LANES)
    store(into_out + i, fma(load(next_out + i), vb, load(into_out + i) * va));
}

}  // namespace hopon::HOPON_LEVEL

#endif
