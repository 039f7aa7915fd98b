/* Linear tiles of the amx level: 16 rows by 16 columns at a time in the matrix unit's tile registers.
 *
 * bf16 runs here for every number of rows, because the unit's order of additions is its own: within a step of 32 inputs
 * fixed by the instruction, steps in ascending order; a row of a tile never meets another. Integers stay with the vectors
 * of linear.h. Included by linear.h only.
 */
#ifndef HOPON_LINEAR_AMX_H
#define HOPON_LINEAR_AMX_H

#include "tiles.h"

namespace hopon::HOPON_LEVEL {

/* Asks for part i of n of what comes next. */
HOPON_INLINE void fetch(Fetch next, int i, int n) {
  const size_t step = next.bytes / (size_t)n;
  const char *at = next.at + (size_t)i * step, *end = at + step;
  for (; at < end; at += 64) prefetch(at);
}

/* bf16, up to 32 rows: [K/2][64][2] is 16 by 16 pairs at a stride of 256 bytes. */
static void block_bf16_tiles(const Linear &job, int row, int rows, const Block &block, Fetch next) {
  constexpr int STRIDE = BLOCK * 4, STEP_BYTES = 16 * STRIDE;
  const char *x = job.rows + (size_t)row * job.row_bytes;
  const size_t row_bytes = job.row_bytes;
  const int steps = job.w.cols_padded / 32;
  alignas(64) float total[32 * BLOCK];
  finish_writes();
  if (rows <= 16) {
    const char *w = (const char *)block.codes;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int s = 0; s < steps; s++, w += STEP_BYTES) {
      fetch(next, s, steps);
      _tile_loadd(4, x + s * 64, row_bytes);
      _tile_loadd(5, w, STRIDE);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, w + 64, STRIDE);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(7, w + 128, STRIDE);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, w + 192, STRIDE);
      _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, total, STRIDE);
    _tile_stored(1, total + 16, STRIDE);
    _tile_stored(2, total + 32, STRIDE);
    _tile_stored(3, total + 48, STRIDE);
  } else {
    for (int c = 0; c < BLOCK; c += 32) {
      const char *w = (const char *)block.codes + c * 4;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int s = 0; s < steps; s++, w += STEP_BYTES) {
        fetch(next, 2 * s + c / 32, 2 * steps);
        _tile_loadd(4, x + s * 64, row_bytes);
        _tile_loadd(6, w, STRIDE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + 64, STRIDE);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x + 16 * row_bytes + s * 64, row_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, total + c, STRIDE);
      _tile_stored(1, total + c + 16, STRIDE);
      _tile_stored(2, total + 16 * BLOCK + c, STRIDE);
      _tile_stored(3, total + 16 * BLOCK + c + 16, STRIDE);
    }
  }
  finish(job, row, rows, block.index * BLOCK, BLOCK, total);
}

} /* namespace hopon::HOPON_LEVEL */

#endif
