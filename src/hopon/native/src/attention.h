// Ragged paged causal attention: any mix of prefill chunks and decodes in one call.
//
// Bit identity. One query row of one head is always computed like this, whatever the batch, the chunk borders, the
// block size, the number of threads and the register blocking:
//   the context is cut into splits of 256 tokens and tiles of 16 at absolute positions;
//   score of a token   s = scale * (one chain over ascending d)
//   within a split     m = max s,  p = exp(s - m),  l = sum p (lanes over ascending tiles, then the tree of `sum`),
//                      o[d] = one chain over ascending tokens
//   splits are merged in ascending order: M' = max(M, m), a = exp(M - M'), b = exp(m - M'), O = fma(o, b, O a), L alike
//   output             O / L
// With K and V in f32 or f16 a chain is made of fmas. With bf16 the query and p are rounded to bf16 too, and a link of the
// chain adds the products of a pair: two neighbouring d, or an even token and the next; l is the sum of the rounded p, in
// lanes of such pairs of tokens over ascending pairs of tiles.
// At the amx level such a link is 32 d, or the 16 tokens of a tile, added in the matrix unit's own order, and the scale
// is fused with the subtraction of m (attention_amx.h); a model whose head_dim is no multiple of 32 stays with pairs.
// Tokens behind the row's own position take no part in any of it: free slots of a block may hold NaN.
// (Online softmax: Milakov and Gimelshein 2018, arXiv 1805.02867; splits over the context: Flash-Decoding, Dao 2023.)
//
// What is shared to save loads, without touching the arithmetic: the heads of one KV head and the query rows of a task (see
// attention_plan.h) are vectors that read a K or V tile together. Knows nothing of projections or rotation.
#ifndef HOPON_ATTENTION_H
#define HOPON_ATTENTION_H
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "attention_plan.h"
#include "attention_vectors.h"
#include "hopon.h"
#include "pool.h"
#include "simd.h"
#if defined(HOPON_LEVEL_AMX)
#include "attention_amx.h"
#endif

namespace hopon::HOPON_LEVEL {

class Attention {
 public:
  // position: of every token of the batch.
  Attention(hopon_pool &pool, const hopon_model &model, const hopon_batch &batch, const int32_t *position)
      : model_(model),
        batch_(batch),
        kv_(model),
        heads_per_kv_(model.num_heads / model.num_kv_heads),
        width_(round_up(model.head_dim, LANES)),
        tiled_(kHasTiles && model.kv_dtype == HOPON_BF16 && model.head_dim % 32 == 0),
        plan_(pool, model, batch, position, std::max(1, (tiled_ ? kTiledVectors : kVectors) / heads_per_kv_)) {
    if (plan_.num_partials() > 0)
      partials_ = static_cast<float *>(pool.reserve(
          kSlotAttention, sizeof(float) * static_cast<size_t>(plan_.num_partials() * heads_per_kv_ * (width_ + 2))));
  }

  // qkv: [num_tokens] rows of stride qkv_width, rotated queries first; out: [num_tokens] rows of stride out_width.
  void run(hopon_pool::Team &team, int layer, const float *qkv, int64_t qkv_width, float *out,
           int64_t out_width) const {
    auto one = [&](int64_t i, int64_t end, int worker) {
      const AttentionTask &task = plan_.task(i), &after = plan_.task(std::min(i + 1, end - 1));
      if (kv_.dtype == HOPON_F32)
        compute<float>(team, task, after, worker, layer, qkv, qkv_width, out, out_width);
      else if (kv_.dtype == HOPON_BF16)
        compute<bf16>(team, task, after, worker, layer, qkv, qkv_width, out, out_width);
      else
        compute<f16>(team, task, after, worker, layer, qkv, qkv_width, out, out_width);
    };
    if (plan_.brief())
      team.run(1, [&](int64_t, int worker) {
        for (int64_t i = 0; i < plan_.num_tasks(); ++i) one(i, plan_.num_tasks(), worker);
      });
    else
      team.run_shares(
          plan_.num_tasks(), [&](int owner) { return plan_.first(owner + 1) - plan_.first(owner); },
          [&](int owner, int64_t k, int worker) { one(plan_.first(owner) + k, plan_.first(owner + 1), worker); });
    if (plan_.num_partials() == 0) return;
    constexpr int64_t kWorthSharing = 64;  // heads of rows
    const int64_t units = plan_.num_cut() * model_.num_kv_heads;
    team.run_ranges(units, units * heads_per_kv_ >= kWorthSharing, [&](int64_t i, int64_t end) {
      for (; i < end; ++i)
        finish_partials(plan_.cut_row(i / model_.num_kv_heads), static_cast<int>(i % model_.num_kv_heads), out, out_width);
    });
  }

  static constexpr int kRuns = 2;  // at most

 private:
  // T: how the cache stores an element. `after`: the task that this worker will probably take next.
  template <class T>
  void compute(hopon_pool::Team &team, const AttentionTask &task, const AttentionTask &after, int worker, int layer,
               const float *qkv, int64_t qkv_width, float *out, int64_t out_width) const {
#if defined(HOPON_LEVEL_AMX)
    if constexpr (std::is_same_v<T, bf16>)
      if (tiled_) {
        const AttentionTiles registers(task.num_rows * heads_per_kv_);
        if (kv_.direct())
          attend<T, true, true>(team, task, after, worker, layer, qkv, qkv_width, out, out_width);
        else
          attend<T, false, true>(team, task, after, worker, layer, qkv, qkv_width, out, out_width);
        return;
      }
#endif
    // Halves are widened as they are read, unless so many vectors read them that doing it once is cheaper.
    if (kv_.direct() && !(std::is_same_v<T, f16> && task.num_rows * heads_per_kv_ > kQueries))
      attend<T, true>(team, task, after, worker, layer, qkv, qkv_width, out, out_width);
    else
      attend<T, false>(team, task, after, worker, layer, qkv, qkv_width, out, out_width);
  }

  // Tiled: by the matrix unit.
  template <class T, bool Direct, bool Tiled = false>
  void attend(hopon_pool::Team &team, const AttentionTask &task, const AttentionTask &after, int worker, int layer,
              const float *qkv, int64_t qkv_width, float *out, int64_t out_width) const {
    using Element = std::conditional_t<Direct || std::is_same_v<T, bf16>, T, float>;
    constexpr bool packed = kPack<Element> > 1;
    const int vectors = task.num_rows * heads_per_kv_;
    const int last_length = plan_.context(task.rows[task.num_rows - 1]);

    // Scratch of this worker: scores, running and fresh results, words of queries and weights, gathered tiles; pointers.
    const size_t gathered = Direct ? 0 : size_t{kSplit} * (model_.head_dim + width_);
    const size_t words = packed ? (width_ + kSplit) / kPack<Element> : 0;
    const int fresh_vectors = Tiled ? kTileRows : vectors;  // so many at a time
    const int word_vectors = Tiled && vectors > kTileRows ? round_up(vectors, kTileRows) : vectors;
    const size_t floats = static_cast<size_t>(fresh_vectors) * (kSplit + width_) +
                          static_cast<size_t>(vectors) * width_ + word_vectors * words + gathered;
    char *memory = static_cast<char *>(team.scratch(
        worker, sizeof(float) * floats + vectors * (sizeof(SoftmaxState) + 4 * sizeof(float *) + sizeof(int)) + 64));
    float *scores = reinterpret_cast<float *>(memory);
    float *fresh = scores + static_cast<size_t>(fresh_vectors) * kSplit;
    float *running = fresh + static_cast<size_t>(fresh_vectors) * width_;
    float *words_memory = running + static_cast<size_t>(vectors) * width_;
    float *tiles_memory = words_memory + word_vectors * words;
    const float **query = reinterpret_cast<const float **>(memory + sizeof(float) * floats);
    float **score_of = const_cast<float **>(query + vectors);
    float **weight_of = score_of + vectors;
    float **fresh_of = weight_of + vectors;
    SoftmaxState *state = reinterpret_cast<SoftmaxState *>(fresh_of + vectors);
    int *length = reinterpret_cast<int *>(state + vectors);

    for (int v = 0; v < vectors; ++v) {
      const int row = task.rows[v / heads_per_kv_], head = task.kv_head * heads_per_kv_ + v % heads_per_kv_;
      query[v] = qkv + row * qkv_width + head * model_.head_dim;
      length[v] = plan_.context(row);
      if constexpr (!Tiled) {
        score_of[v] = weight_of[v] = scores + static_cast<size_t>(v) * kSplit;
        fresh_of[v] = fresh + static_cast<size_t>(v) * width_;
      }
      if constexpr (packed) {
        float *rounded = words_memory + static_cast<size_t>(v) * words;
        for (int d = 0; d < model_.head_dim; d += LANES)
          store_bf16(reinterpret_cast<uint16_t *>(rounded) + d, load_first(query[v] + d, model_.head_dim - d));
        query[v] = rounded;
        weight_of[v] = rounded + width_ / kPack<Element>;
      }
    }
    std::fill(words_memory + vectors * words, words_memory + word_vectors * words, 0.0f);

    auto take = [&](int v, int split, const SoftmaxState &next, const float *result) {
      float *mine = running + static_cast<size_t>(v) * width_;
      if (task.partial) {
        store_partial(task, v, split, next, result);
      } else if (split == 0) {
        state[v] = next;
        std::memcpy(mine, result, sizeof(float) * width_);
      } else {
        merge_split(state[v], mine, next, result, width_);
      }
    };

    const f32x16 scale = broadcast(model_.attention_scale);
    KvTiles<Element> keys, values;
    for (int split = task.split; split < task.split_end; ++split) {
      const int begin = split * kSplit, end = std::min(last_length, begin + kSplit);
      const int num_tiles = find_tiles<T, Direct>(task, layer, begin, end, tiles_memory, keys.at, values.at);
      look_ahead(keys);
      look_ahead(values);
      if constexpr (Direct)
        if (vectors <= (Tiled ? kTileRows : kQueries)) {
          const bool more = split + 1 < task.split_end;
          find_next<T>(more ? task : after, more ? split + 1 : after.split, layer, num_tiles, keys, values);
        }

#if defined(HOPON_LEVEL_AMX)
      if constexpr (Tiled) {
        TiledSplit tiled = {keys, values, model_.head_dim, Direct && vectors <= kTileRows};
        for (int v = 0; v < vectors; v += kTileRows) {
          const int n = std::min(kTileRows, vectors - v);
          int own[kTileRows];
          for (int q = 0; q < n; ++q) own[q] = std::min(length[v + q] - begin, kSplit);
          attend_tiles(query[v], weight_of[v], words, n, own, tiled, model_.attention_scale, scores, fresh,
                       [&](int q, const SoftmaxState &next, const float *result) { take(v + q, split, next, result); });
        }
        continue;
      }
#endif
      for (int tile = 0; tile < num_tiles; tile += kTiles)
        for (int v = 0; v < vectors; v += kQueries) {
          const int n = std::min(kQueries, vectors - v);
          const int left = length[v + n - 1] - begin - tile * kTile;  // tokens of the last row, the longest one
          if (left <= 0) continue;
          float *target[kQueries];
          for (int q = 0; q < n; ++q) target[q] = score_of[v + q] + tile * kTile;
          with_constant<kQueries>(n, [&](auto N) {
            if (left > kTiles / 2 * kTile)
              score_block<N.value, kTiles>(query + v, keys, tile, model_.head_dim, scale, target);
            else
              score_block<N.value, kTiles / 2>(query + v, keys, tile, model_.head_dim, scale, target);
          });
        }

      std::memset(fresh, 0, sizeof(float) * static_cast<size_t>(vectors) * width_);
      for (int v = 0; v < vectors; v += kQueries) {
        const int n = std::min(kQueries, vectors - v);
        SoftmaxState next[kQueries] = {};
        for (int q = 0; q < n; ++q)
          if (const int n = std::min(length[v + q] - begin, kSplit); n > 0) {
            next[q].max = mask_and_largest(score_of[v + q], n);
            next[q].sum = weigh<Element>(score_of[v + q], n, 1.0f, next[q].max, weight_of[v + q]);
          }
        // Together as far as all of them reach, then each alone: the rows' lengths ascend, or all reach the end.
        const int common = std::max(0, std::min(length[v] - begin, kSplit)) / kPack<Element> * kPack<Element>;
        with_constant<kQueries>(
            n, [&](auto N) { output_columns<N.value>(weight_of + v, values, width_, 0, common, fresh_of + v); });
        for (int q = 0; q < n; ++q) {
          const int own = std::min(length[v + q] - begin, kSplit);
          if (own > common) output_columns<1>(weight_of + v + q, values, width_, common, own, fresh_of + v + q);
        }
        for (int q = 0; q < n; ++q)
          if (length[v + q] > begin) take(v + q, split, next[q], fresh_of[v + q]);
      }
    }
    if (!task.partial)
      for (int v = 0; v < vectors; ++v)
        write(task.rows[v / heads_per_kv_], task.kv_head, v % heads_per_kv_, state[v].sum,
              running + static_cast<size_t>(v) * width_, out, out_width);
  }

  // Addresses of the K and V tiles of positions [begin, end), at most a split; returns their number. The list is filled up
  // with the last tile, so that scores need no second kernel.
  template <class T, bool Direct, class Element>
  int find_tiles(const AttentionTask &task, int layer, int begin, int end, float *memory, const Element **keys,
                 const Element **values) const {
    const int32_t *table = batch_.block_tables + task.table * batch_.table_stride;
    const int num_tiles = (end - begin + kTile - 1) / kTile;
    int block = begin / kv_.block_size, slot = begin % kv_.block_size;
    for (int tile = 0; tile < num_tiles; ++tile) {
      if constexpr (Direct) {
        const size_t offset = static_cast<size_t>(slot) * model_.head_dim;
        keys[tile] = reinterpret_cast<const T *>(kv_.keys(table[block], layer, task.kv_head)) + offset;
        values[tile] = keys[tile] + static_cast<size_t>(kv_.block_size) * model_.head_dim;
        slot += kTile;
        if (slot >= kv_.block_size) ++block, slot = 0;
      } else {
        const int position = begin + tile * kTile;
        Element *k = reinterpret_cast<Element *>(memory) + static_cast<size_t>(tile) * kTile * (model_.head_dim + width_);
        Element *v = k + kTile * model_.head_dim;
        gather_tile<T>(table, layer, task.kv_head, position, std::min(kTile, end - position), k, v);
        keys[tile] = k;
        values[tile] = v;
      }
    }
    for (int tile = num_tiles; tile < kTilesPerSplit; ++tile) {
      keys[tile] = keys[num_tiles - 1];
      values[tile] = values[num_tiles - 1];
    }
    return num_tiles;
  }

  // While the `current` tiles of a split are read, those of another one will be asked for, keys beside keys and values
  // beside values; at once those that have no partner.
  template <class T>
  void find_next(const AttentionTask &task, int split, int layer, int current, KvTiles<T> &keys,
                 KvTiles<T> &values) const {
    const int begin = split * kSplit;
    const int end = std::min(plan_.context(task.rows[task.num_rows - 1]), begin + kSplit);
    const int num_tiles = find_tiles<T, true>(task, layer, begin, end, nullptr, keys.next, values.next);
    for (int tile = current; tile < num_tiles; ++tile)
      for (int i = 0; i < kTile * model_.head_dim; i += 64 / sizeof(T)) {
        fetch(keys.next[tile] + i);
        fetch(values.next[tile] + i);
      }
  }

  // n tokens from `position` as a full tile, with V of `width_` numbers per token; the rest is zero.
  template <class T, class E>
  void gather_tile(const int32_t *table, int layer, int kv_head, int position, int n, E *k, E *v) const {
    const int dim = model_.head_dim, tokens = kv_.tile_tokens;
    if constexpr (std::is_same_v<T, f16>)
      if (kv_.direct()) {  // the same places, other numbers; those of free slots are never used
        const size_t offset = static_cast<size_t>(position % kv_.block_size) * dim;
        const int32_t block = table[position / kv_.block_size];
        const T *key = reinterpret_cast<const T *>(kv_.keys(block, layer, kv_head)) + offset;
        const T *value = reinterpret_cast<const T *>(kv_.values(block, layer, kv_head)) + offset;
        for (int i = 0; i < kTile * dim; i += LANES) store(k + i, load_kv(key + i));
        for (int i = 0; i < kTile * dim; i += LANES) store(v + i, load_kv(value + i));
        return;
      }
    std::memset(k, 0, sizeof(E) * kTile * (dim + width_));
    for (int i = 0; i < n; i += tokens - (position + i) % tokens) {  // small blocks lie far apart: ask for all at once
      const char *from = kv_.keys(table[(position + i) / kv_.block_size], layer, kv_head);
      for (int64_t line = 0; line < 2 * kv_.half_bytes() && tokens < kTile; line += 64) fetch(from + line);
    }
    for (int i = 0; i < n; ++i) {
      const int32_t block = table[(position + i) / kv_.block_size];
      const int slot = (position + i) % kv_.block_size;
      const size_t offset = static_cast<size_t>(slot / tokens) * tokens * dim;
      const T *key = reinterpret_cast<const T *>(kv_.keys(block, layer, kv_head)) + offset;
      const T *value = reinterpret_cast<const T *>(kv_.values(block, layer, kv_head)) + offset;
      // Words of K (a d, or a pair of them) and numbers of V lie at fixed distances, here and there.
      constexpr int word = kPack<E>;
      static_assert(kPack<T> == word);
      const int pack = std::min(word, tokens);
      const T *from_key = key + kv_.key_at<T>(slot % tokens, 0, tokens);
      const T *from_value = value + kv_.value_at<T>(slot % tokens, 0, tokens, dim);
      E *to_key = k + kv_.key_at<E>(i, 0, kTile), *to_value = v + kv_.value_at<E>(i, 0, kTile, width_);
      for (int d = 0; d < dim; d += word)
        for (int j = 0; j < word; ++j) widen(from_key[d * tokens + j], to_key[d * kTile + j]);
      if (pack == 1)
        for (int d = 0; d < dim; ++d) widen(from_value[d], to_value[d * word]);
      else
        for (int d = 0; d < dim; ++d) widen(from_value[d * word], to_value[d * word]);
    }
  }
  template <class T>
  static void widen(T x, T &to) {
    to = x;
  }
  static void widen(f16 x, float &to) { to = f16_to_float(x.bits); }

  // head: of those that share the KV head.
  void write(int token, int kv_head, int head, float sum, const float *result, float *out, int64_t out_width) const {
    float *target = out + token * out_width + (kv_head * heads_per_kv_ + head) * model_.head_dim;
    const f32x16 divisor = broadcast(sum);
    for (int d = 0; d < model_.head_dim; d += LANES)
      store_first(target + d, load(result + d) / divisor, std::min(LANES, model_.head_dim - d));
  }

  // A partial result: [width_] numbers, the maximum, the sum.
  float *partial_at(int token, int kv_head, int head, int split) const {
    return partials_ + (plan_.partial(token, kv_head, split) * heads_per_kv_ + head) * (width_ + 2);
  }
  void store_partial(const AttentionTask &task, int v, int split, const SoftmaxState &state, const float *result) const {
    float *to = partial_at(task.rows[v / heads_per_kv_], task.kv_head, v % heads_per_kv_, split);
    std::memcpy(to, result, sizeof(float) * width_);
    to[width_] = state.max;
    to[width_ + 1] = state.sum;
  }
  void finish_partials(int token, int kv_head, float *out, int64_t out_width) const {
    for (int head = 0; head < heads_per_kv_; ++head) {
      float *first = partial_at(token, kv_head, head, 0);
      SoftmaxState state = {first[width_], first[width_ + 1]};
      for (int split = 1; split < plan_.splits_of(plan_.context(token)); ++split) {
        const float *next = partial_at(token, kv_head, head, split);
        merge_split(state, first, {next[width_], next[width_ + 1]}, next, width_);
      }
      write(token, kv_head, head, state.sum, first, out, out_width);
    }
  }

  const hopon_model &model_;
  const hopon_batch &batch_;
  const KvView kv_;
  const int heads_per_kv_, width_;
  const bool tiled_;
  const AttentionPlan plan_;
  float *partials_ = nullptr;
};

}  // namespace hopon::HOPON_LEVEL
#endif
