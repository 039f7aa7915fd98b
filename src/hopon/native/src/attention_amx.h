// Attention tiles of the amx level: 16 query vectors, each a row, by a K or V tile at a time in the matrix unit.
//
// A cache in bf16 is read here for every number of vectors, because the unit's order of additions is its own: within a step
// of 32 d or 16 tokens fixed by the instruction, steps in ascending order; a row never meets another. What rows have in
// common is how many steps they take: weights behind a row's own context are zeros, and a step of zeros changes no bit. (It
// would change a -0, which only underflow makes: `output_tiles` gives out none.)
// Knows nothing of tasks, splits or blocks. Included by attention.h only.
#ifndef HOPON_ATTENTION_AMX_H
#define HOPON_ATTENTION_AMX_H

#include "tiles.h"

namespace hopon::HOPON_LEVEL {

constexpr int kTileRows = 16;  // vectors at a time
constexpr int kStepDims = 32;  // of K that a product takes; of V it takes the tokens of a tile

// Registers for up to kTileRows vectors: 4 and 6 for queries and K, 5 and 7 for weights and V.
class AttentionTiles : Tiles {
 public:
  explicit AttentionTiles(int rows) : Tiles(kStepDims / 2, kTile / 2, rows) {}
};

// scores[row][tile * 16 + lane] of the rows of `queries`, for K tiles [0, num_tiles) and those that fill up the last four.
inline void score_tiles(const float *queries, size_t query_bytes, int rows, const KvTiles<bf16> &keys, int num_tiles,
                        int head_dim, f32x16 scale, float *scores) {
  constexpr int row_bytes = kSplit * sizeof(float), line = 64;
  finish_writes();
  for (int first = 0; first < num_tiles; first += 4) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int d = 0; d < head_dim; d += kStepDims) {
      const int at = d * kTile;
      const bf16 *const *k = keys.at + first, *const *next = keys.next + first;
      for (int t = 0; t < 4; ++t)
        for (int i = 0; i < kStepDims * kTile; i += line / 2) fetch(next[t] + at + i);
      _tile_loadd(4, queries + d / 2, query_bytes);
      _tile_loadd(6, k[0] + at, line);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(6, k[1] + at, line);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(6, k[2] + at, line);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(6, k[3] + at, line);
      _tile_dpbf16ps(3, 4, 6);
    }
    float *to = scores + first * kTile;
    _tile_stored(0, to, row_bytes);
    _tile_stored(1, to + kTile, row_bytes);
    _tile_stored(2, to + 2 * kTile, row_bytes);
    _tile_stored(3, to + 3 * kTile, row_bytes);
    finish_writes();
    for (int row = 0; row < rows; ++row)
      for (int t = 0; t < 4; ++t) {
        float *place = to + row * kSplit + t * kTile;
        store(place, load(place) * scale);
      }
  }
}

// out[row][0 .. width): sums over the tokens of `num_tiles` tiles, ascending, of weights, in pairs, times V. Returns
// whether all of them are finite.
inline bool output_tiles(const float *weights, size_t weight_bytes, int rows, const KvTiles<bf16> &values, int num_tiles,
                         int width, float *out) {
  const size_t row_bytes = static_cast<size_t>(width) * sizeof(float);
  finish_writes();
  for (int column = 0; column < width;) {
    const bool four = column + 4 * LANES <= width;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int tile = 0; tile < num_tiles; ++tile) {
      const bf16 *v = values.at[tile] + column * 2, *next = values.next[tile] + column * 2;
      for (int i = 0; i < kTile / 2; ++i)
        for (int c = 0; c < (four ? 4 : 2); ++c) fetch(next + (i * width + c * LANES) * 2);
      _tile_loadd(5, weights + tile * kTile / 2, weight_bytes);
      _tile_loadd(7, v, row_bytes);
      _tile_dpbf16ps(0, 5, 7);
      _tile_loadd(7, v + 2 * LANES, row_bytes);
      _tile_dpbf16ps(1, 5, 7);
      if (four) {
        _tile_loadd(7, v + 4 * LANES, row_bytes);
        _tile_dpbf16ps(2, 5, 7);
        _tile_loadd(7, v + 6 * LANES, row_bytes);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    float *to = out + column;
    _tile_stored(0, to, row_bytes);
    _tile_stored(1, to + LANES, row_bytes);
    if (four) {
      _tile_stored(2, to + 2 * LANES, row_bytes);
      _tile_stored(3, to + 3 * LANES, row_bytes);
    }
    column += four ? 4 * LANES : 2 * LANES;
  }
  finish_writes();
  f32x16 check = zero();
  for (float *at = out; at < out + rows * width; at += LANES) {
    const f32x16 o = load(at) + zero();
    store(at, o);
    check = fma(o, zero(), check);
  }
  return sum(check) == 0.0f;
}

// The first n tokens of a V tile, zeros behind them: what free slots hold may be NaN, which a weight of 0 does not undo.
inline void keep_first_tokens(const bf16 *tile, int n, int width, bf16 *to) {
  const int whole = n / 2 * 2 * width;
  std::memcpy(to, tile, sizeof(bf16) * static_cast<size_t>(whole));
  std::memset(to + whole, 0, sizeof(bf16) * static_cast<size_t>(kTile * width - whole));
  if (n % 2 != 0)
    for (int d = 0; d < 2 * width; d += 2) to[whole + d] = tile[whole + d];
}

// Up to kTileRows vectors and one split, of which a row's context has the first own[row] tokens; these ascend, or all are
// the whole split. Hands take(row, its softmax, its output) the results of rows that have tokens here.
// query: words of the first row; weights: room for those of a split. The rows of both lie `stride` words apart.
template <class Take>
void attend_tiles(const float *query, float *weights, size_t stride, int rows, const int *own, const KvTiles<bf16> &keys,
                  KvTiles<bf16> values, int head_dim, f32x16 scale, float *scores, float *out, Take &&take) {
  const int reach = own[rows - 1], num_tiles = (reach + kTile - 1) / kTile;
  if (reach <= 0) return;
  score_tiles(query, stride * sizeof(float), rows, keys, num_tiles, head_dim, scale, scores);
  SoftmaxState state[kTileRows];
  for (int row = 0; row < rows; ++row) {
    float *words = weights + row * stride;
    if (own[row] > 0) state[row] = softmax<bf16>(scores + row * kSplit, own[row], words);
    for (int t = round_up(std::max(own[row], 0), 2 * kTile); t < reach; t += 2 * kTile) store(words + t / 2, zero());
  }
  alignas(64) bf16 last[kTile * kMaxHeadDim];
  auto outputs = [&](int tokens) {
    const int tile = (tokens - 1) / kTile;
    const bf16 *const whole = values.at[tile];
    if (tokens % kTile != 0) {
      keep_first_tokens(whole, tokens % kTile, head_dim, last);
      values.at[tile] = last;
    }
    const bool finite = output_tiles(weights, stride * sizeof(float), rows, values, tile + 1, head_dim, out);
    values.at[tile] = whole;
    return finite;
  };
  // A row must not meet what is no number behind its own context: then each gets its result alone.
  const bool together = outputs(reach);
  for (int row = 0; row < rows; ++row) {
    if (own[row] <= 0) continue;
    if (!together) outputs(own[row]);
    take(row, state[row], out + row * head_dim);
  }
}

}  // namespace hopon::HOPON_LEVEL
#endif
