/* hopon's CPU data plane: the C ABI.
 *
 * Plain C, no Python, no exceptions across the border. Python builds the structs below from numpy arrays (ctypes) and
 * keeps them alive; native code allocates only its thread pool and per-thread scratch. Every function that can fail
 * returns 0 on success and a negative HOPON_E_* otherwise.
 *
 * One shared library per instruction level is compiled from the same sources (amx, avx512, vnni, avx2, portable).
 *
 * Bit-identity: for one level every number below is a function of its own row alone: one accumulator chain over
 * ascending k per output element, tiles and splits at absolute positions, no dependence on the number of rows,
 * threads, block size or chunk borders.
 */
#ifndef HOPON_H
#define HOPON_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HOPON_ABI 4

enum { HOPON_F32 = 0, HOPON_BF16 = 1, HOPON_I8 = 2, HOPON_I4 = 3, HOPON_F16 = 4 };
enum { HOPON_E_ARGUMENT = -1, HOPON_E_MEMORY = -2 };

/* Packed weight matrix of `rows` outputs (N) by `cols` inputs (K); rows padded to a multiple of 64, cols to one of 32,
 * padding zero (for integers: code, scale and offset all zero). `data` is 64-byte aligned. With B = rows_padded / 64:
 *
 *   F32   float    [B][K][64]            y = sum x * w, one fma chain over ascending k
 *   BF16  uint16_t [B][K/2][64][2]       x rounded to bf16 (nearest even), products accumulated in f32
 *   I8    uint8_t  [B][K/4][64][4]       codes 0..255
 *   I4    uint8_t  [B][K/32][4][64][4]   codes 0..15; within a group of 32 inputs byte [j][n][i] holds k = 4j+i in its
 *                                        low nibble and k = 16+4j+i in its high nibble
 *   scales (I8, I4)  uint16_t [B][S][64]: a scale (IEEE half) per group of 32 inputs [K/32][64], then offsets (bf16) by
 *                    pairs of groups, the last padded with zero, [ceil(K/64)][64][2];  w = scale*(code - zero) + offset,
 *                    where zero is 128 for I8 and 8 for I4
 *
 * Integer kernels round a row of x to fixed point with one scale s per row, q = round-to-nearest-even(x * (1 / s)), in f32.
 * Split q into two signed digits, q = 256*hi + lo, lo in [-128, 127]. Let up(v) be the largest float with the upper 16 bits
 * of |v|. s = max(up(t) / 127, up(max |x|) / 32639), where t is the least float with upper 16 bits from those of max |x| less 2048
 * to those of max |x|, so that in at most `outliers` quads (4 inputs, of the padded row) an |x| exceeds up(t). All others then
 * have hi = 0. s is 0 and q too where s would be subnormal. Sums of products are exact in int32. Then, in f32:
 *   where has_offsets, in ascending order of pairs of groups:  t = dot of two bf16((float)sum q) and the two offsets, plus t
 *   in ascending order of groups:  t = fma((float)(sum code*lo - zero * sum q), scale, t);
 *   in ascending order of the quads with hi != 0:  u = fma((float)sum code*hi, scale, u);
 *   y = fma(u, 256, t) * s.
 * Integers are exact, so the levels differ in nothing but the fmas (portable: multiply, then add) and the order within a dot.
 */
typedef struct hopon_matrix {
  int32_t dtype, rows, cols, rows_padded, cols_padded;
  int32_t outliers;              /* I8, I4: quads of a row of x that may have a second digit */
  int32_t has_offsets, reserved; /* I8, I4: some offset is not zero */
  const void *data;
  const uint16_t *scales;
  const float *bias; /* [rows] or NULL */
} hopon_matrix;

typedef struct hopon_pool hopon_pool; /* worker threads; the caller is worker 0 */

int32_t hopon_abi(void);
const char *hopon_level(void);                 /* "amx", "avx512", "vnni", "avx2", "portable" */
int32_t hopon_level_supported(void);           /* does this CPU (and OS) have what this library was compiled for */
hopon_pool *hopon_pool_create(int32_t threads); /* NULL on failure; 1..1024 threads */
void hopon_pool_destroy(hopon_pool *);

/* y[m][n] (= or +=) x[m] . w[n] + bias[n]; x has stride ldx floats, y ldy floats. x may not overlap y. */
int32_t hopon_linear(hopon_pool *, const hopon_matrix *w, const float *x, int64_t ldx, float *y, int64_t ldy, int32_t m,
                     int32_t accumulate);

/* ---- the program ---------------------------------------------------------------------------------------------- */

typedef struct hopon_buffer {
  float *data;   /* [capacity][width] */
  int64_t width; /* stride in floats */
} hopon_buffer;

enum {
  HOPON_EMBED = 0,   /* out = rows of `matrix` (any dtype) picked by the batch's token ids */
  HOPON_NORM = 1,    /* RMSNorm of `groups` groups of `width` values per row, with `vector` weights; in may equal out */
  HOPON_LINEAR = 2,  /* out (= or +=) in . matrix + bias; columns [0, matrix.rows) of out */
  HOPON_ROPE_KV = 3, /* in = qkv buffer [q heads | k heads | v heads]: optional per-head RMSNorm of q (vector) and k
                        (vector2), rotate q (in place) and k, write K and V into the cache of `layer` */
  HOPON_ATTENTION = 4, /* in = qkv buffer (rotated q), out = [heads * head_dim]; causal, through the block tables */
  HOPON_GATE = 5,    /* in = [gate | up] of `width` each, out = silu(gate) * up */
  HOPON_SELECT = 6   /* out = rows of in that want logits, in the order of batch.logit_index */
};

typedef struct hopon_op {
  int32_t kind;
  int32_t on_logits; /* 0: all tokens of the batch; 1: the rows that want logits (after SELECT) */
  int32_t in, out;   /* buffer indexes */
  int32_t layer;
  int32_t width, groups;
  int32_t accumulate;
  float eps;
  int32_t reserved;
  const hopon_matrix *matrix;
  const float *vector, *vector2;
} hopon_op;

/* KV cache, block-major: block b starts at (char*)kv + b * block_bytes, and holds [layer][kv head][K then V]:
 *   tile of T = min(16, block_size) tokens; a block is block_size / T tiles, [K|V] each [tiles][...]:
 *   K  f32, f16: [head_dim][T]   bf16: [head_dim/2][T][2]   (transposed: tokens are lanes)
 *   V  f32, f16: [T][head_dim]   bf16: [T/2][head_dim][2]   (a pair of tokens side by side; T = 1: [head_dim])
 * f16 numbers beyond its range are kept as +-65504. With bf16 the query and the softmax weights are rounded to bf16 too.
 * Block sizes below 16 are gathered into a full tile first, with the same bits.
 */
typedef struct hopon_model {
  int32_t num_layers, num_heads, num_kv_heads, head_dim;
  int32_t rope_dim;          /* rotated values per head, <= head_dim */
  int32_t rope_interleaved;  /* 1: adjacent pairs (2i, 2i+1); 0: halves (i, i + rope_dim/2) */
  int32_t kv_dtype;          /* HOPON_F32, HOPON_BF16 or HOPON_F16 */
  int32_t block_size, num_blocks;
  int32_t max_position;
  float attention_scale;
  int32_t num_buffers, num_ops;
  const float *rope;         /* [max_position][rope_dim]: cos[rope_dim/2], sin[rope_dim/2] */
  void *kv;
  int64_t block_bytes;
  const hopon_buffer *buffers;
  const hopon_op *ops;
} hopon_model;

/* One step: `num_segments` runs of consecutive tokens of one sequence each, concatenated (ragged). */
typedef struct hopon_batch {
  int32_t num_tokens, num_segments, num_logits, reserved;
  const int32_t *tokens;         /* [num_tokens] */
  const int32_t *segment_start;  /* [num_segments + 1] first token of each segment in the batch */
  const int32_t *segment_pos;    /* [num_segments] absolute position of a segment's first token */
  const int32_t *segment_table;  /* [num_segments] row of block_tables */
  const int32_t *block_tables;   /* [rows][table_stride] block ids */
  int64_t table_stride;
  const int32_t *logit_index;    /* [num_logits] token indexes, ascending */
} hopon_batch;

int32_t hopon_forward(hopon_pool *, const hopon_model *, const hopon_batch *);

/* ---- sampling --------------------------------------------------------------------------------------------------- */

/* temperature 0 = greedy (argmax, ties to the lower id). Filters apply to softmax(logits / temperature) in the order
 * min_p, top_k, top_p; all off when 0 / 0 / 1. The random number is a pure function of (seed, choice, index).
 * `forced` >= 0 scores that token instead of choosing one. `num_top` most likely tokens of the raw distribution are
 * reported, best first; log-probabilities are raw ones whatever is masked, banned or changed. Before a token is chosen:
 *   1. only ids whose bit of `mask` is set can be chosen (bit i % 32 of word i / 32; NULL: all of them), at least one;
 *   2. `banned` ids cannot be chosen, unless nothing else is left;
 *   3. biases[i] is added to the logit of biased[i];
 *   4. a logit of seen[i] is divided by `repetition` if it is positive, else multiplied by it; then frequency * counts[i]
 *      and, where counts[i] > 0, `presence` are subtracted. */
typedef struct hopon_sample_row {
  int32_t logits_row; /* row of the logits matrix */
  int32_t forced;
  float temperature, top_p, min_p;
  int32_t top_k;
  uint64_t seed;
  int32_t choice, index;
  int32_t num_banned, num_top;
  const int32_t *banned;
  const uint32_t *mask; /* [(vocab + 31) / 32] */
  int32_t num_biased, num_seen;
  const int32_t *biased; /* [num_biased] */
  const float *biases;
  const int32_t *seen;   /* [num_seen] distinct ids */
  const int32_t *counts; /* [num_seen] how often in the output */
  float repetition, frequency, presence;
  int32_t reserved;
} hopon_sample_row;

/* Row i of the results comes from the parameters rows[which[i]] and from logits row i. Without `which` it comes from
 * rows[i], which says itself where its logits are. Only num_top places of a row of out_top_* are filled. Without
 * want_logprob a greedy row needs no log-sum-exp and its out_logprob is 0. */
typedef struct hopon_sampling {
  const float *logits;
  int64_t stride; /* floats from one row of logits to the next */
  int32_t vocab, num_rows, max_top, reserved;
  const hopon_sample_row *rows;
  const int32_t *which;        /* [num_rows], or NULL */
  const uint8_t *want_logprob; /* [num_rows] flags */
  int32_t *out_token;          /* [num_rows] */
  float *out_logprob;          /* [num_rows] */
  int32_t *out_top_ids;        /* [num_rows][max_top] */
  float *out_top_logprobs;     /* [num_rows][max_top] */
} hopon_sampling;

int32_t hopon_sample(hopon_pool *, const hopon_sampling *);

/* hopon_forward, then sampling from what it computed, in one call: between the two nothing else gets into the caches. */
int32_t hopon_step(hopon_pool *, const hopon_model *, const hopon_batch *, const hopon_sampling *);

/* The random number of an output token in [0, 1): Philox4x32-10, key seed, counter (index, choice, 0, 0). */
double hopon_uniform(uint64_t seed, int32_t choice, int32_t index);

/* sizeof of matrix, buffer, op, model, batch, sample_row and sampling, so that a binding can compare its own. */
void hopon_sizes(int32_t sizes[7]);

#ifdef __cplusplus
}
#endif
#endif
