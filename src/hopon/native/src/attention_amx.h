// Attention tiles of the amx level: 16 query vectors, each a row, by a tile of K or V at a time in the matrix unit.
//
// A cache in bf16 is read here for every number of vectors, because the unit's order of additions is its own: within a
// step of 32 d or 16 tokens fixed by the instruction, steps in ascending order; a row never meets another. What the rows
// of a tile share is how many steps they take. Those behind a row's own context have weights of zero, and change no bit
// but the sign of a zero left by an underflow (so zeros lose it), unless V is no number there (then each row goes alone).
// Knows nothing of tasks, splits or blocks. Included by attention.h only.
#ifndef HOPON_ATTENTION_AMX_H
#define HOPON_ATTENTION_AMX_H

#include "tiles.h"

namespace hopon::HOPON_LEVEL {

constexpr int kStep = 32;  // d that a product takes; it takes the tokens of one tile

// The registers for that many vectors: 4 and 6 for queries and K, 5 and 7 for weights and V.
class AttentionTiles : Tiles {
 public:
  explicit AttentionTiles(int vectors) : Tiles(kStep / 2, kTile / 2, std::min(vectors, kTileRows)) {}
};

// What the vectors of a split read.
struct TiledSplit {
  KvTiles<bf16> keys, values;
  int head_dim;
  bool look_ahead;  // ask the memory for the tiles that come next
};

// The first n tokens of a V tile, zeros behind them: free slots may hold NaN, which a weight of 0 does not undo.
inline void keep_first_tokens(const bf16 *tile, int n, int width, bf16 *to) {
  const int whole = n / 2 * 2 * width;
  std::memcpy(to, tile, sizeof(bf16) * static_cast<size_t>(whole));
  std::memset(to + whole, 0, sizeof(bf16) * static_cast<size_t>(kTile * width - whole));
  if (n % 2 != 0)
    for (int i = whole; i < whole + 2 * width; i += 2) to[i] = tile[i];
}

// scores[row][token], not yet scaled, for K tiles [0, num_tiles) and those that fill up the last four.
inline void score_tiles(const float *queries, size_t stride, const TiledSplit &split, int num_tiles, float *scores) {
  constexpr int row_bytes = kSplit * sizeof(float), line = 64;
  finish_writes();
  for (int tile = 0; tile < num_tiles; tile += 4) {
    const bf16 *const *k = split.keys.at + tile, *const *next = split.keys.next + tile;
    auto ask = [&](const bf16 *from) __attribute__((always_inline)) {
      for (int i = 0; i < kStep * kTile && split.look_ahead; i += 2 * LANES) fetch_far(from + i);
    };
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int d = 0; d < split.head_dim; d += kStep) {
      const int at = d * kTile;
      _tile_loadd(4, queries + d / 2, stride * sizeof(float));
      _tile_loadd(6, k[0] + at, line);
      _tile_dpbf16ps(0, 4, 6);
      ask(next[0] + at);
      _tile_loadd(6, k[1] + at, line);
      _tile_dpbf16ps(1, 4, 6);
      ask(next[1] + at);
      _tile_loadd(6, k[2] + at, line);
      _tile_dpbf16ps(2, 4, 6);
      ask(next[2] + at);
      _tile_loadd(6, k[3] + at, line);
      _tile_dpbf16ps(3, 4, 6);
      ask(next[3] + at);
    }
    float *to = scores + tile * kTile;
    _tile_stored(0, to, row_bytes);
    _tile_stored(1, to + kTile, row_bytes);
    _tile_stored(2, to + 2 * kTile, row_bytes);
    _tile_stored(3, to + 3 * kTile, row_bytes);
  }
  finish_writes();
}

// out[row][d]: sums over the tokens of tiles [0, num_tiles), ascending, of weights times V.
inline void output_tiles(const float *weights, size_t stride, const TiledSplit &split, int num_tiles, float *out) {
  const int width = split.head_dim;
  const size_t row_bytes = static_cast<size_t>(width) * sizeof(float);
  finish_writes();
  for (int column = 0; column < width;) {
    const bool four = column + 4 * LANES <= width;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int tile = 0; tile < num_tiles; ++tile) {
      const bf16 *v = split.values.at[tile] + column * 2, *next = split.values.next[tile] + column * 2;
      auto ask = [&](int from) __attribute__((always_inline)) {
        for (int i = 0; i < kTile / 2 && split.look_ahead; ++i) fetch_far(next + from + i * width * 2);
      };
      _tile_loadd(5, weights + tile * (kTile / 2), stride * sizeof(float));
      _tile_loadd(7, v, row_bytes);
      _tile_dpbf16ps(0, 5, 7);
      ask(0);
      _tile_loadd(7, v + 2 * LANES, row_bytes);
      _tile_dpbf16ps(1, 5, 7);
      ask(2 * LANES);
      if (!four) continue;
      _tile_loadd(7, v + 4 * LANES, row_bytes);
      _tile_dpbf16ps(2, 5, 7);
      ask(4 * LANES);
      _tile_loadd(7, v + 6 * LANES, row_bytes);
      _tile_dpbf16ps(3, 5, 7);
      ask(6 * LANES);
    }
    float *to = out + column;
    _tile_stored(0, to, row_bytes);
    _tile_stored(1, to + LANES, row_bytes);
    column += 2 * LANES;
    if (!four) continue;
    _tile_stored(2, to + 2 * LANES, row_bytes);
    _tile_stored(3, to + 3 * LANES, row_bytes);
    column += 2 * LANES;
  }
  finish_writes();
}

// Takes the sign from zeros, and says whether all numbers are finite.
inline bool settle(float *numbers, int count) {
  f32x16 check = zero();
  for (int i = 0; i < count; i += LANES) {
    const f32x16 x = load(numbers + i) + zero();
    store(numbers + i, x);
    check = fma(x, zero(), check);
  }
  return sum(check) == 0.0f;
}

// Up to kTileRows vectors and one split, of which row's context has the first own[row] tokens; these ascend, or all are
// the whole split. Hands take(row, its softmax, its output) the results of the rows that have tokens here.
// query: words of the first row; weights: room for those of a split. The rows of both lie `stride` words apart.
template <class Take>
void attend_tiles(const float *query, float *weights, size_t stride, int rows, const int *own, TiledSplit &split,
                  float scale, float *scores, float *out, Take &&take) {
  const int reach = own[rows - 1], width = split.head_dim;
  if (reach <= 0) return;
  score_tiles(query, stride, split, (reach + kTile - 1) / kTile, scores);
  SoftmaxState state[kTileRows];
  for (int row = 0; row < rows; ++row)
    if (own[row] > 0) state[row].max = scale * mask_and_largest(scores + row * kSplit, own[row]);
  for (int row = 0; row < rows; ++row) {
    float *words = weights + row * stride;
    if (own[row] > 0) state[row].sum = weigh<bf16>(scores + row * kSplit, own[row], scale, state[row].max, words);
    for (int t = round_up(std::max(own[row], 0), 2 * kTile); t < reach; t += 2 * kTile) store(words + t / 2, zero());
  }
  // Outputs of the first n tokens; of all rows, whether they are finite.
  auto outputs = [&](int n) {
    alignas(64) bf16 last[kTile * kMaxHeadDim];
    const int tile = (n - 1) / kTile;
    const bf16 *const whole = split.values.at[tile];
    if (n % kTile != 0) {
      keep_first_tokens(whole, n % kTile, width, last);
      split.values.at[tile] = last;
    }
    output_tiles(weights, stride, split, tile + 1, out);
    split.values.at[tile] = whole;
    return settle(out, rows * width);
  };
  const bool together = outputs(reach);
  for (int row = 0; row < rows; ++row) {
    if (own[row] <= 0) continue;
    if (!together) outputs(own[row]);
    take(row, state[row], out + row * width);
  }
}

}  // namespace hopon::HOPON_LEVEL
#endif
