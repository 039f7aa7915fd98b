/* The matrix unit of the amx level: who may use it, and the shapes of its eight tile registers.
 *
 * A product adds to sums [16][16] the product of up to 16 rows of inputs and 16 columns of weights, both packed in words
 * along the inputs: pairs of bf16. It takes 16 cycles, however few words there are.
 */
#ifndef HOPON_TILES_H
#define HOPON_TILES_H

#include <cpuid.h>
#include <immintrin.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "simd.h"

namespace hopon::HOPON_LEVEL {

/* Whether the CPU has the tiles and the system lets this process use them (Linux wants to be asked, once). */
static inline bool tiles_supported() {
  unsigned a, b, c, d;
  constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24, WANTED = BF16 | TILE;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & WANTED) != WANTED) return false;
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

/* Tile loads do not tell the compiler that they read memory: everything written before must be there by now. */
HOPON_INLINE void finish_writes() { asm volatile("" : : : "memory"); }

/* The tile registers of this thread for the lifetime of the object: 0 to 3 are sums of 16 rows by 16 columns, 4 and 5 rows
 * of inputs, 6 and 7 weights; of 4 and 6 come `words` (1 to 16) at a time, of 5 and 7 `words_too`. There may be fewer
 * `rows` of inputs and sums. */
class Tiles {
 public:
  Tiles(int words, int words_too, int rows = 16) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 0, 0, 64, 64};
      uint8_t rows[16] = {};
    } shapes;
    for (int i = 0; i < 6; i++) shapes.rows[i] = (uint8_t)rows;
    shapes.bytes[4] = (uint16_t)(4 * words);
    shapes.bytes[5] = (uint16_t)(4 * words_too);
    shapes.rows[6] = (uint8_t)words;
    shapes.rows[7] = (uint8_t)words_too;
    asm volatile("" : : "r"(&shapes) : "memory"); /* GCC's intrinsic claims to read 8 bytes only */
    _tile_loadconfig(&shapes);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles &) = delete;
  Tiles &operator=(const Tiles &) = delete;
};

} /* namespace hopon::HOPON_LEVEL */

#endif
