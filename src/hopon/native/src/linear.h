/* y[m][n] (= or +=) x[m] . w[n] + bias[n] for packed weights: the work of hopon_linear, see hopon.h for the layouts.
 *
 * Two stages. First the rows of x are prepared, once: rounded to bf16, or to integers with one scale per row (for
 * f32 there is nothing to do). Then tiles of a few rows walk blocks of 64 columns. Every output element has
 * one chain of additions over ascending k in a lane of its own, whatever the tile it falls into, so its bits depend
 * on its own row and column only.
 *
 * Integers q = 256 high + low: the row's scale is chosen so that all but the largest few of its quads (4 inputs) have
 * no high digit. A tile sums the low digits over all inputs; then every row adds the high digits of the quads on its own
 * short list. So nearly all inputs cost one 8-bit product, and the few large ones keep 16 bits.
 *
 * Does not check its arguments, and counts on the float mode that pool.h sets.
 */
#ifndef HOPON_LINEAR_H
#define HOPON_LINEAR_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <optional>
#include <type_traits>
#include <utility>

#include "hopon.h"
#include "linear_rows.h"
#include "pool.h"
#include "simd.h"

#define HOPON_LAMBDA __attribute__((always_inline))

namespace hopon::HOPON_LEVEL {

constexpr int BLOCK = 64; /* columns of a packed block */

/* Rows of the largest tile of floats that keeps its accumulators in registers. */
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
  bool streams; /* finished rows go past the caches: y is aligned to 64 bytes */
};

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
      if (n < LANES)
        store_first(y, t, n);
      else if (job.streams)
        stream(y, t);
      else
        store(y, t);
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

/* What a tile asks the memory for while it computes, a little at a time: its share of the block that this worker will
 * probably take next. Guessing wrong costs time and nothing else. */
struct Fetch {
  const char *at;
  size_t bytes;
};
HOPON_INLINE void prefetch(const void *p) { __builtin_prefetch(p, 0, 2); /* to L2 */ }

/* A block of weights. Integers: its first byte, and its scales [groups][64] as floats if they were expanded for many rows. */
struct Block {
  int index;
  const uint8_t *codes;
  const float *scales;
};

/* f32: [K][64] */
template <int R>
static void block_f32(const Linear &job, int row, int, const Block &block, Fetch next) {
  constexpr int V = vectors_f32<R>();
  const float *x = job.x + row * job.ldx;
  const int64_t ldx = job.ldx;
  const int cols = job.w.cols;
  const size_t step = next.bytes / (size_t)job.w.cols_padded;
  for (int c = 0; c < BLOCK; c += V * LANES) {
    const float *w = (const float *)job.w.data + (size_t)block.index * BLOCK * (size_t)job.w.cols_padded + c;
    f32x16 t[R][V];
    unroll<R>([&](auto r) HOPON_LAMBDA { unroll<V>([&](auto v) HOPON_LAMBDA { t[r][v] = zero(); }); });
    for (int k = 0; k < cols; k++, w += BLOCK) {
      f32x16 wk[V];
      unroll<V>([&](auto v) HOPON_LAMBDA {
        wk[v] = load(w + v * LANES);
        prefetch(next.at + (size_t)k * step + c * 4 + v * 64);
      });
      unroll<R>([&](auto r) HOPON_LAMBDA {
        f32x16 a = broadcast(x[r * ldx + k]);
        unroll<V>([&](auto v) HOPON_LAMBDA { t[r][v] = fma(a, wk[v], t[r][v]); });
      });
    }
    finish_tile<R, V>(job, row, block.index * BLOCK + c, t);
  }
}

/* bf16: [K/2][64][2] */
template <int R>
static void block_bf16(const Linear &job, int row, int, const Block &block, Fetch next) {
  constexpr int V = vectors_f32<R>();
  const int pairs = job.w.cols_padded / 2;
  const char *x = job.rows + (size_t)row * job.row_bytes;
  const size_t stride = job.row_bytes, step = next.bytes / (size_t)pairs;
  for (int c = 0; c < BLOCK; c += V * LANES) {
    const uint16_t *w = (const uint16_t *)job.w.data + (size_t)block.index * BLOCK * 2 * (size_t)pairs + c * 2;
    f32x16 t[R][V];
    unroll<R>([&](auto r) HOPON_LAMBDA { unroll<V>([&](auto v) HOPON_LAMBDA { t[r][v] = zero(); }); });
    for (int p = 0; p < pairs; p++, w += BLOCK * 2) {
#if defined(HOPON_HAS_BF16)
      __m512i wp[V];
      unroll<V>([&](auto v) HOPON_LAMBDA {
        wp[v] = _mm512_loadu_si512(w + v * 2 * LANES);
        prefetch(next.at + (size_t)p * step + c * 4 + v * 64);
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
        prefetch(next.at + (size_t)p * step + c * 4 + v * 64);
      });
      unroll<R>([&](auto r) HOPON_LAMBDA {
        const float *a = (const float *)(x + r * stride) + 2 * p;
        f32x16 a0 = broadcast(a[0]), a1 = broadcast(a[1]);
        unroll<V>([&](auto v) HOPON_LAMBDA { t[r][v] = fma(a1, odd[v], fma(a0, even[v], t[r][v])); });
      });
#endif
    }
    finish_tile<R, V>(job, row, block.index * BLOCK + c, t);
  }
}

} /* namespace hopon::HOPON_LEVEL */

#include "linear_int.h"
#if defined(HOPON_LEVEL_AMX)
#include "linear_amx.h"
#endif

namespace hopon::HOPON_LEVEL {

/* ---- blocks and tasks --------------------------------------------------------------------------------------------- */

typedef void (*BlockKernel)(const Linear &, int row, int rows, const Block &block, Fetch next);
struct Kernels {
  int max_rows;
  bool expanded;           /* wants scales as floats and codes as bytes */
  BlockKernel by_rows[32]; /* [rows - 1] */
};

template <int... I>
HOPON_INLINE Kernels float_kernels(const hopon_matrix &w, std::integer_sequence<int, I...>) {
  if (w.dtype == HOPON_F32) return {MAX_ROWS, false, {block_f32<I + 1>...}};
  return {MAX_ROWS, false, {block_bf16<I + 1>...}};
}

template <int... I>
HOPON_INLINE Kernels int_kernels(const hopon_matrix &w, int m, std::integer_sequence<int, I...>) {
  /* With fewer rows expanding a block costs more than it saves. */
  if (m > 8 * MAX_INT_ROWS) return {MAX_INT_ROWS, true, {block_int<I + 1, false, true>...}};
  if (w.dtype == HOPON_I8) return {MAX_INT_ROWS, false, {block_int<I + 1, false, false>...}};
  return {MAX_INT_ROWS, false, {block_int<I + 1, true, false>...}};
}

HOPON_INLINE Kernels choose(const hopon_matrix &w, int m) {
#if defined(HOPON_LEVEL_AMX)
  if (w.dtype == HOPON_BF16) {
    Kernels tiles = {32, false, {}};
    std::fill_n(tiles.by_rows, 32, block_bf16_tiles);
    return tiles;
  }
#endif
  if (w.dtype == HOPON_F32 || w.dtype == HOPON_BF16) return float_kernels(w, std::make_integer_sequence<int, MAX_ROWS>{});
  return int_kernels(w, m, std::make_integer_sequence<int, MAX_INT_ROWS>{});
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

/* What to ask the memory for ahead of a block. Its scales are few: they are asked for here. */
HOPON_INLINE Fetch fetch_of(const hopon_matrix &w, int block) {
  if (w.scales != nullptr) {
    const char *scales = (const char *)block_scales(w, block), *end = (const char *)block_scales(w, block + 1);
    for (; scales < end; scales += 64) prefetch(scales);
  }
  return {(const char *)w.data + (size_t)block * block_bytes(w), block_bytes(w)};
}

/* Bytes that `expand` needs. */
HOPON_INLINE size_t expanded_bytes(const hopon_matrix &w) {
  return (size_t)w.cols_padded / GROUP * BLOCK * sizeof(float) + (w.dtype == HOPON_I4 ? block_bytes(w) * 2 : 0);
}

/* A block of integers with scales as floats and codes as bytes. */
static Block expand(const hopon_matrix &w, const Block &block, char *memory) {
  const int groups = w.cols_padded / GROUP;
  float *scales = (float *)memory;
  const uint16_t *halves = block_scales(w, block.index);
  for (int i = 0; i < groups * BLOCK; i += LANES) store(scales + i, load_f16(halves + i));
  if (w.dtype == HOPON_I8) return {block.index, block.codes, scales};
  uint8_t *codes = (uint8_t *)(scales + groups * BLOCK);
  expand_nibbles(block.codes, codes, groups);
  return {block.index, codes, scales};
}

/* Bytes that must be reserved in kSlotLinear for m rows. */
HOPON_INLINE size_t linear_scratch_bytes(const hopon_matrix &w, int m) {
  return prepared_row_bytes(w) * (size_t)(m + choose(w, m).max_rows);
}

constexpr int LINEAR_RUNS = 2; /* at most */

/* Whether linear() looks at each row of x once, so that a row may be made at that moment. */
HOPON_INLINE bool prepares(const hopon_matrix &w) { return w.dtype != HOPON_F32; }

/* How the work on m rows is laid out. Workers form a grid, `row_shares` times `column_shares`, and each keeps to its own
 * rows and columns. A share's rows are split evenly into tiles, tiles evenly into `parts`, so that nothing is left over to
 * a slow narrow tile. A task is a run of `per_task` blocks times one part; its prepared rows stay in the L2 cache beside a
 * block of weights. */
struct Layout {
  int row_shares, column_shares, parts, per_task, runs; /* runs: of one column share */

  Layout(const hopon_matrix &w, int m, int max_rows, int workers) {
    /* Where rows are many, everybody has rows of its own and no values go from core to core; where they are few, that
     * would read the weights too often. */
    const int rows_for_weights = w.dtype == HOPON_F32 ? 48 : w.dtype == HOPON_I4 ? 8 : 24;
    row_shares = std::clamp(m / std::max(rows_for_weights, max_rows), 1, workers);
    while (workers % row_shares != 0) row_shares--;
    column_shares = workers / row_shares;

    constexpr int ROWS_PER_PART = 144, TASKS = 4; /* of a worker, for balance */
    const int rows = (m + row_shares - 1) / row_shares, tiles = (rows + max_rows - 1) / max_rows;
    const int blocks = w.rows_padded / BLOCK, wanted = workers > 1 ? TASKS * column_shares : 1;
    parts = (rows + ROWS_PER_PART - 1) / ROWS_PER_PART;
    if (blocks * parts < wanted) parts = std::min((wanted + blocks - 1) / blocks, std::max(1, tiles / 4));
    parts = std::min(parts, tiles);
    constexpr int64_t TASK_VALUES = 65536; /* weights times tiles of a task at least, so that claiming it costs little */
    const int64_t values = (int64_t)BLOCK * w.cols_padded * std::max(1, tiles / parts);
    per_task = (int)std::clamp<int64_t>(TASK_VALUES / values, 1, std::max(1, blocks / wanted));
    runs = (blocks + per_task * column_shares - 1) / (per_task * column_shares);
  }
  /* A worker's columns are neighbours: memory gives more to whoever reads straight on. */
  int first_block(int owner, int run) const { return (owner % column_shares * runs + run) * per_task; }
};

/* The linear layer that comes next, with its rows; nothing where `w` is null. */
struct Upcoming {
  const hopon_matrix *w;
  int m;
};

/* What a worker asks for ahead of it, at the end of w. */
static Fetch fetch_first(const hopon_matrix &w, Upcoming upcoming, int owner, int workers) {
  const Fetch nothing = {(const char *)w.data, 0};
  if (upcoming.w == nullptr || upcoming.m == 0) return nothing;
  const Layout layout(*upcoming.w, upcoming.m, choose(*upcoming.w, upcoming.m).max_rows, workers);
  const int block = layout.first_block(owner, 0);
  return block * BLOCK < upcoming.w->rows_padded ? fetch_of(*upcoming.w, block) : nothing;
}

/* The whole operation; see the top. m >= 0. Where it `prepares`, make(i) is called before row i of x is read. */
template <class Make>
static void linear(hopon_pool::Team &team, const hopon_matrix &w, const float *x, int64_t ldx, float *y, int64_t ldy,
                   int m, bool accumulate, Upcoming upcoming, Make &&make) {
  if (m == 0) return;
  const Kernels kernels = choose(w, m);
  size_t row_bytes = prepared_row_bytes(w);
  char *rows = nullptr;
  if (prepares(w)) {
    rows = (char *)team.shared_scratch(kSlotLinear); /* tiles may read beyond m */
    prepare(team, w, x, ldx, m, rows, row_bytes, make);
  }
  const int workers = team.threads(), blocks = w.rows_padded / BLOCK;
  const Layout layout(w, m, kernels.max_rows, workers);
  /* What is written here, others read next, unless all columns of a row are one worker's. Lines that they hold from the
   * last time would have to be taken from them one by one. */
  const bool streams = layout.column_shares > 1 && !accumulate && (uintptr_t)y % 64 == 0 && ldy % LANES == 0;
  const Linear job = {w, x, ldx, rows, row_bytes, y, ldy, accumulate, streams};

  const int64_t turns = (int64_t)layout.runs * layout.parts;
  team.run_shares(turns * workers, [&](int) { return turns; }, [&](int owner, int64_t turn, int worker) {
#if defined(HOPON_LEVEL_AMX)
    std::optional<Tiles> registers;
    if (w.dtype == HOPON_BF16) registers.emplace(16, 16);
#endif
    const int row_share = owner / layout.column_shares, part = (int)(turn / layout.runs), run = (int)(turn % layout.runs);
    const int first_row = (int)((int64_t)m * row_share / layout.row_shares);
    const int num_rows = (int)((int64_t)m * (row_share + 1) / layout.row_shares) - first_row;
    const int tiles = (num_rows + kernels.max_rows - 1) / kernels.max_rows;
    const int first_tile = tiles * part / layout.parts, last_tile = tiles * (part + 1) / layout.parts;
    const int first_block = layout.first_block(owner, run), end_block = std::min(blocks, first_block + layout.per_task);
    if (first_tile == last_tile) return;
    char *memory = kernels.expanded ? (char *)team.scratch(worker, expanded_bytes(w)) : nullptr;
    for (int index = first_block; index < end_block; index++) {
      Block block = {index, (const uint8_t *)w.data + (size_t)index * block_bytes(w), nullptr};
      if (kernels.expanded) block = expand(w, block, memory);
      /* The next block: of this task, of the one that this worker takes next, or of the next layer. */
      const bool last = index + 1 == end_block && run + 1 == layout.runs;
      const Fetch next = index + 1 < blocks && !last ? fetch_of(w, index + 1) : fetch_first(w, upcoming, owner, workers);
      const size_t fetch_bytes = next.bytes / (size_t)(last_tile - first_tile);
      const char *fetch_at = next.at;
      for (int tile = first_tile; tile < last_tile; tile++, fetch_at += fetch_bytes) {
        int row = num_rows * tile / tiles, end = num_rows * (tile + 1) / tiles;
        kernels.by_rows[end - row - 1](job, first_row + row, end - row, block, {fetch_at, fetch_bytes});
      }
    }
    end_streams();
  });
}

} /* namespace hopon::HOPON_LEVEL */

#endif
