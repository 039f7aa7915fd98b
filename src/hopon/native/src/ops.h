// The small ops of a program, each on a range of rows: embedding, RMSNorm, rotation and KV write, gate, selection.
//
// Every row is a function of itself alone. Sums run over lanes of ascending index and then the tree of `sum`; nothing
// depends on how rows are spread over workers. Knows nothing of the program's order or of attention.
#ifndef HOPON_OPS_H
#define HOPON_OPS_H
#include <cmath>
#include <cstring>

#include "attention.h"
#include "hopon.h"
#include "pool.h"
#include "simd.h"

namespace hopon::HOPON_LEVEL {

// Calls f(first, end) on ranges of rows that together cover [0, rows): several when there is work for all. `cost` is a
// rough number of lane operations per row; a barrier is worth about two thousand.
template <class F>
void for_rows(hopon_pool::Team &team, int rows, int64_t cost, F &&f) {
  constexpr int64_t kWorthwhile = 1 << 13;
  const int64_t total = cost * rows;
  const bool alone = total < kWorthwhile || rows < 2;
  team.run_ranges(rows, alone ? 0 : std::clamp<int64_t>(total * 4 / kWorthwhile / team.threads(), 1, 4), f);
}

// Row `id` of a packed matrix as floats, out[cols]. Layouts: hopon.h.
inline void embed_row(const hopon_matrix &w, int32_t id, float *out) {
  const int64_t block = id / 64, lane = id % 64, cols = w.cols_padded;
  if (w.dtype == HOPON_F32) {
    const float *data = static_cast<const float *>(w.data) + block * cols * 64 + lane;
    for (int k = 0; k < w.cols; ++k) out[k] = data[int64_t{k} * 64];
    return;
  }
  if (w.dtype == HOPON_BF16) {
    const uint16_t *data = static_cast<const uint16_t *>(w.data) + block * cols * 64 + lane * 2;
    for (int k = 0; k < w.cols; ++k) out[k] = bf16_to_float(data[int64_t{k / 2} * 128 + k % 2]);
    return;
  }
  const uint8_t *data = static_cast<const uint8_t *>(w.data) + block * cols * (w.dtype == HOPON_I8 ? 64 : 32);
  for (int group = 0; group * 32 < w.cols; ++group) {
    const int64_t groups = cols / 32;
    const uint16_t *scales = w.scales + block * (groups + (groups + 1) / 2 * 2) * 64, *offsets = scales + groups * 64;
    const float scale = f16_to_float(scales[group * 64 + lane]);
    const float offset = bf16_to_float(offsets[(group / 2 * 64 + lane) * 2 + group % 2]);
    for (int i = 0; i < 32 && group * 32 + i < w.cols; ++i) {
      const int k = group * 32 + i;
      int code;
      if (w.dtype == HOPON_I8) {
        code = data[int64_t{k / 4} * 256 + lane * 4 + k % 4];
      } else {
        const int byte = data[int64_t{group} * 1024 + i % 16 / 4 * 256 + lane * 4 + i % 4];
        code = i < 16 ? byte & 15 : byte >> 4;
      }
      out[k] = fma1(static_cast<float>(code - (w.dtype == HOPON_I8 ? 128 : 8)), scale, offset);
    }
  }
}

// out = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, arXiv 1910.07467). out may be x.
inline void rms_norm(const float *x, const float *weight, float eps, int width, float *out) {
  f32x16 sums[4] = {zero(), zero(), zero(), zero()};
  int i = 0;
  for (; i + 4 * LANES <= width; i += 4 * LANES)
    for (int j = 0; j < 4; ++j) {
      f32x16 v = load(x + i + j * LANES);
      sums[j] = fma(v, v, sums[j]);
    }
  for (int j = 0; i < width; i += LANES, ++j) {
    f32x16 v = load_first(x + i, std::min(LANES, width - i));
    sums[j] = fma(v, v, sums[j]);
  }
  const float mean = sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / static_cast<float>(width);
  const f32x16 factor = broadcast(1.0f / std::sqrt(mean + eps));
  for (i = 0; i + LANES <= width; i += LANES) store(out + i, load(x + i) * factor * load(weight + i));
  if (i < width) {
    const int n = width - i;
    store_first(out + i, load_first(x + i, n) * factor * load_first(weight + i, n), n);
  }
}

// out = silu(gate) * up = gate / (1 + exp(-gate)) * up; in = [gate | up] of `width` values each.
inline void gate_row(const float *in, int width, float *out) {
  const f32x16 one = broadcast(1.0f);
  auto lanes = [&](f32x16 gate, f32x16 up) { return gate / (one + exp(zero() - gate)) * up; };
  int i = 0;
  for (; i + LANES <= width; i += LANES) store(out + i, lanes(load(in + i), load(in + width + i)));
  if (i < width) {
    const int n = width - i;
    store_first(out + i, lanes(load_first(in + i, n), load_first(in + width + i, n)), n);
  }
}

// Rotates one head in place. `table` = cos[dim/2], sin[dim/2] of the position (Su et al. 2021, arXiv 2104.09864).
// interleaved: pairs (2i, 2i+1); otherwise pairs (i, i + dim/2).
inline void rotate(float *x, const float *table, int dim, bool interleaved) {
  const int half = dim / 2;
  int i = 0;
  if (!interleaved)
    for (; i + LANES <= half; i += LANES) {
      const f32x16 c = load(table + i), s = load(table + half + i), first = load(x + i), second = load(x + half + i);
      store(x + i, first * c - second * s);
      store(x + half + i, second * c + first * s);
    }
  const int step = interleaved ? 2 : 1, distance = interleaved ? 1 : half;
  for (; i < half; ++i) {
    float *a = x + i * step, *b = a + distance;
    const float c = table[i], s = table[half + i], first = *a, second = *b;
    *a = first * c - second * s;
    *b = second * c + first * s;
  }
}

// What the cache keeps of 16 numbers. Those that f16 has no number for become its largest.
HOPON_INLINE void narrow(f32x16 x, float *to) { store(to, x); }
HOPON_INLINE void narrow(f32x16 x, bf16 *to) { store_bf16(&to->bits, x); }
HOPON_INLINE void narrow(f32x16 x, f16 *to) {
  store_f16(&to->bits, max(broadcast(-65504.0f), min(broadcast(65504.0f), x)));
}

// Writes K and V of one token and KV head into its slot of a block.
template <class T>
void write_kv(const KvView &kv, int layer, int kv_head, int32_t block, int slot, const float *k, const float *v) {
  const int dim = kv.head_dim, tokens = kv.tile_tokens, token = slot % tokens;
  const size_t tile = static_cast<size_t>(slot / tokens) * tokens * dim;
  T *keys = reinterpret_cast<T *>(kv.keys(block, layer, kv_head)) + tile;
  T *values = reinterpret_cast<T *>(kv.values(block, layer, kv_head)) + tile;
  T key[kMaxHeadDim], value[kMaxHeadDim];
  for (int d = 0; d < dim; d += LANES) {
    narrow(load_first(k + d, dim - d), key + d);
    narrow(load_first(v + d, dim - d), value + d);
  }
  for (int d = 0; d < dim; d += kPack<T>)
    std::memcpy(keys + kv.key_at<T>(token, d, tokens), key + d, kPack<T> * sizeof(T));
  if (kPack<T> == 1 || tokens == 1)
    std::memcpy(values + kv.value_at<T>(token, 0, tokens, dim), value, dim * sizeof(T));
  else
    for (int d = 0; d < dim; ++d) values[kv.value_at<T>(token, d, tokens, dim)] = value[d];
}

// One token's row [q heads | k heads | v heads]: optional norm of q and k heads, rotation, K and V into the cache.
inline void rope_kv_row(const hopon_model &model, const hopon_op &op, const KvView &kv, float *row, int position,
                        int32_t block) {
  const int dim = model.head_dim;
  const float *table = model.rope + static_cast<int64_t>(position) * model.rope_dim;
  for (int h = 0; h < model.num_heads + model.num_kv_heads; ++h) {
    float *head = row + static_cast<int64_t>(h) * dim;
    const float *weight = h < model.num_heads ? op.vector : op.vector2;
    if (weight != nullptr) rms_norm(head, weight, op.eps, dim, head);
    rotate(head, table, model.rope_dim, model.rope_interleaved != 0);
  }
  const float *keys = row + static_cast<int64_t>(model.num_heads) * dim, *values = keys + model.num_kv_heads * dim;
  const int slot = position % kv.block_size;
  for (int h = 0; h < model.num_kv_heads; ++h) {
    const float *k = keys + h * dim, *v = values + h * dim;
    if (kv.dtype == HOPON_F32)
      write_kv<float>(kv, op.layer, h, block, slot, k, v);
    else if (kv.dtype == HOPON_BF16)
      write_kv<bf16>(kv, op.layer, h, block, slot, k, v);
    else
      write_kv<f16>(kv, op.layer, h, block, slot, k, v);
  }
}

}  // namespace hopon::HOPON_LEVEL
#endif
