// The C ABI of hopon.h: checks what comes in, sets the floating point mode and runs the kernels.
//
// Nothing is thrown across this border. What a check can see (sizes, indexes, pointers that must not be null) is an
// HOPON_E_ARGUMENT; lengths of arrays that are not passed are the caller's promise.
#include "hopon.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <initializer_list>
#include <new>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "attention.h"
#include "linear.h"
#include "ops.h"
#include "pool.h"
#include "sample.h"
#include "simd.h"

#define HOPON_EXPORT extern "C" __attribute__((visibility("default")))

using namespace hopon::HOPON_LEVEL;

namespace {

template <class F>
int32_t guarded(F &&f) {
  try {
    hopon::FloatMode mode;
    return f();
  } catch (const std::bad_alloc &) {
    return HOPON_E_MEMORY;
  }
}

bool valid_matrix(const hopon_matrix *w) {
  if (w == nullptr || w->data == nullptr || w->dtype < HOPON_F32 || w->dtype > HOPON_I4) return false;
  if (w->rows < 1 || w->cols < 1 || w->rows_padded % 64 != 0 || w->cols_padded % 32 != 0) return false;
  if (w->rows_padded < w->rows || w->cols_padded < w->cols) return false;
  return w->dtype < HOPON_I8 || (w->scales != nullptr && w->outliers >= 0 && w->outliers <= w->cols_padded / 4);
}

bool valid_model(const hopon_model &model) {
  if (model.num_layers < 1 || model.num_heads < 1 || model.num_kv_heads < 1) return false;
  if (model.num_heads % model.num_kv_heads != 0) return false;
  if (model.head_dim < 8 || model.head_dim > kMaxHeadDim || model.head_dim % 8 != 0) return false;
  if (model.rope_dim < 0 || model.rope_dim > model.head_dim || model.rope_dim % 2 != 0) return false;
  if (model.kv_dtype != HOPON_F32 && model.kv_dtype != HOPON_BF16 && model.kv_dtype != HOPON_F16) return false;
  const int size = model.block_size;
  if (size < 1 || (size < kTile ? kTile % size : size % kTile) != 0) return false;
  if (model.num_blocks < 1 || model.max_position < 1) return false;
  if (model.kv == nullptr || model.rope == nullptr || model.buffers == nullptr || model.ops == nullptr) return false;
  const int64_t element = model.kv_dtype == HOPON_F32 ? 4 : 2;
  return model.block_bytes >= element * 2 * model.num_layers * model.num_kv_heads * size * model.head_dim;
}

bool valid_batch(const hopon_model &model, const hopon_batch &batch) {
  if (batch.num_tokens < 1 || batch.num_segments < 1 || batch.num_logits < 0) return false;
  if (batch.tokens == nullptr || batch.segment_start == nullptr || batch.segment_pos == nullptr) return false;
  if (batch.segment_table == nullptr || batch.block_tables == nullptr) return false;
  if (batch.segment_start[0] != 0 || batch.segment_start[batch.num_segments] != batch.num_tokens) return false;
  for (int s = 0; s < batch.num_segments; ++s) {
    const int64_t rows = int64_t{batch.segment_start[s + 1]} - batch.segment_start[s], first = batch.segment_pos[s];
    if (rows < 1 || first < 0 || first + rows > model.max_position || batch.segment_table[s] < 0) return false;
    const int64_t blocks = (first + rows + model.block_size - 1) / model.block_size;
    if (blocks > batch.table_stride) return false;
    const int32_t *table = batch.block_tables + batch.segment_table[s] * batch.table_stride;
    for (int64_t i = 0; i < blocks; ++i)
      if (table[i] < 0 || table[i] >= model.num_blocks) return false;
  }
  if (batch.num_logits > 0 && batch.logit_index == nullptr) return false;
  for (int i = 0; i < batch.num_logits; ++i) {
    if (batch.logit_index[i] < 0 || batch.logit_index[i] >= batch.num_tokens) return false;
    if (i > 0 && batch.logit_index[i] <= batch.logit_index[i - 1]) return false;
  }
  return true;
}

bool valid_op(const hopon_model &model, const hopon_batch &batch, const hopon_op &op) {
  auto width_of = [&](int32_t buffer) {
    const bool exists = buffer >= 0 && buffer < model.num_buffers && model.buffers[buffer].data != nullptr;
    return exists ? model.buffers[buffer].width : int64_t{-1};
  };
  const int64_t in = width_of(op.in), out = width_of(op.out), heads = int64_t{model.num_heads} * model.head_dim;
  const int64_t qkv = heads + int64_t{2} * model.num_kv_heads * model.head_dim;
  const bool layer = op.layer >= 0 && op.layer < model.num_layers;
  switch (op.kind) {
    case HOPON_EMBED:
      if (op.on_logits || !valid_matrix(op.matrix) || out < op.matrix->cols) return false;
      for (int i = 0; i < batch.num_tokens; ++i)
        if (batch.tokens[i] < 0 || batch.tokens[i] >= op.matrix->rows) return false;
      return true;
    case HOPON_NORM:
      return op.width > 0 && op.groups > 0 && op.vector != nullptr && in >= int64_t{op.width} * op.groups &&
             out >= int64_t{op.width} * op.groups;
    case HOPON_LINEAR:
      return valid_matrix(op.matrix) && op.in != op.out && in >= op.matrix->cols && out >= op.matrix->rows;
    case HOPON_ROPE_KV:
      return !op.on_logits && layer && in >= qkv;
    case HOPON_ATTENTION:
      return !op.on_logits && layer && op.in != op.out && in >= qkv && out >= heads;
    case HOPON_GATE:
      return op.width > 0 && op.in != op.out && in >= int64_t{2} * op.width && out >= op.width;
    case HOPON_SELECT:
      return op.width > 0 && op.in != op.out && in >= op.width && out >= op.width;
    default:
      return false;
  }
}

// Absolute position and block of every token of the batch.
struct Places {
  Places(hopon_pool &pool, const hopon_model &model, const hopon_batch &batch) {
    const size_t tokens = static_cast<size_t>(batch.num_tokens);
    position = static_cast<int32_t *>(pool.reserve(hopon::kSlotStep, 2 * tokens * sizeof(int32_t)));
    block = position + tokens;
    for (int s = 0; s < batch.num_segments; ++s) {
      const int32_t *table = batch.block_tables + batch.segment_table[s] * batch.table_stride;
      for (int t = batch.segment_start[s]; t < batch.segment_start[s + 1]; ++t) {
        position[t] = batch.segment_pos[s] + t - batch.segment_start[s];
        block[t] = table[position[t] / model.block_size];
      }
    }
  }
  int32_t *position, *block;
};

// What the workers share in a step, built before they begin.
struct Shared {
  Shared(hopon_pool &pool, const hopon_model &model, const hopon_batch &batch)
      : places(pool, model, batch), kv(model), attention(pool, model, batch, places.position) {
    for (int i = 0; i < model.num_ops; ++i) {
      const hopon_op &op = model.ops[i];
      if (op.kind != HOPON_LINEAR) continue;
      pool.reserve(hopon::kSlotLinear,
                   linear_scratch_bytes(*op.matrix, op.on_logits ? batch.num_logits : batch.num_tokens));
    }
  }
  const Places places;
  const KvView kv;
  const Attention attention;
};

// Whether barriers cost more than they bring when a core is lost.
bool is_brief(int rows) { return rows < 8; }

size_t max_runs(const hopon_model &model) {
  return static_cast<size_t>(model.num_ops) * std::max(LINEAR_RUNS, Attention::kRuns);
}

// Whether an op makes rows that the next one, a linear, prepares: then each is made right before, on the same worker.
bool feeds_linear(const hopon_model &model, int i) {
  const hopon_op &op = model.ops[i];
  if ((op.kind != HOPON_NORM && op.kind != HOPON_GATE) || i + 1 == model.num_ops) return false;
  const hopon_op &next = model.ops[i + 1];
  return next.kind == HOPON_LINEAR && next.in == op.out && next.on_logits == op.on_logits && prepares(*next.matrix);
}

// The buffers of an op, and what it does to one row where rows are all that it works on.
struct Rows {
  const hopon_model &model;
  const hopon_batch &batch;
  const Shared &shared;
  const hopon_op &op;

  hopon_buffer in() const { return model.buffers[op.in]; }
  hopon_buffer out() const { return model.buffers[op.out]; }
  int number() const { return op.on_logits || op.kind == HOPON_SELECT ? batch.num_logits : batch.num_tokens; }

  int64_t cost() const {  // as for_rows wants it
    switch (op.kind) {
      case HOPON_EMBED:
        return op.matrix->cols;
      case HOPON_NORM:
        return int64_t{op.width} * op.groups / 8;
      case HOPON_ROPE_KV:
        return int64_t{model.num_heads + 4 * model.num_kv_heads} * model.head_dim / 4;
      case HOPON_SELECT:
        return op.width / 8;
      default:
        return op.width;
    }
  }

  void make(int64_t row) const {
    const hopon_buffer from = op.kind == HOPON_EMBED ? hopon_buffer{} : in();
    const hopon_buffer to = op.kind == HOPON_ROPE_KV ? hopon_buffer{} : out();
    float *x = from.data + row * from.width, *y = to.data + row * to.width;
    switch (op.kind) {
      case HOPON_EMBED:
        embed_row(*op.matrix, batch.tokens[row], y);
        break;
      case HOPON_NORM:
        for (int64_t g = 0; g < op.groups; ++g)
          rms_norm(x + g * op.width, op.vector, op.eps, op.width, y + g * op.width);
        break;
      case HOPON_ROPE_KV:
        rope_kv_row(model, op, shared.kv, x, shared.places.position[row], shared.places.block[row]);
        break;
      case HOPON_GATE:
        gate_row(x, op.width, y);
        break;
      case HOPON_SELECT:
        std::memcpy(y, from.data + batch.logit_index[row] * from.width, sizeof(float) * static_cast<size_t>(op.width));
        break;
    }
  }
};

// The first linear layer from op i on.
Upcoming upcoming_from(const hopon_model &model, const hopon_batch &batch, int i) {
  for (; i < model.num_ops; ++i)
    if (const hopon_op &op = model.ops[i]; op.kind == HOPON_LINEAR)
      return {op.matrix, op.on_logits ? batch.num_logits : batch.num_tokens};
  return {nullptr, 0};
}

// Every worker of the team calls it.
void forward(hopon_pool::Team &team, const hopon_model &model, const hopon_batch &batch, const Shared &shared) {
  auto apply = [&](int i, auto &&make) {
    const Rows rows{model, batch, shared, model.ops[i]};
    const hopon_buffer in = rows.in(), out = rows.out();
    if (rows.number() > 0)
      linear(team, *rows.op.matrix, in.data, in.width, out.data, out.width, rows.number(), rows.op.accumulate != 0,
             upcoming_from(model, batch, i + 1), make);
  };
  for (int i = 0; i < model.num_ops; ++i) {
    const Rows rows{model, batch, shared, model.ops[i]};
    const hopon_op &op = rows.op;
    if (op.kind == HOPON_LINEAR) {
      apply(i, [](int64_t) {});
    } else if (op.kind == HOPON_ATTENTION) {
      shared.attention.run(team, op.layer, rows.in().data, rows.in().width, rows.out().data, rows.out().width);
    } else if (feeds_linear(model, i)) {
      apply(++i, [&](int64_t row) { rows.make(row); });
    } else {
      for_rows(team, rows.number(), rows.cost(), [&](int64_t row, int64_t end) {
        for (; row < end; ++row) rows.make(row);
      });
    }
  }
}

bool valid_step(const hopon_model &model, const hopon_batch &batch) {
  if (!valid_model(model) || !valid_batch(model, batch)) return false;
  return std::all_of(model.ops, model.ops + model.num_ops, [&](const hopon_op &op) { return valid_op(model, batch, op); });
}

const hopon_sample_row &sample_row_of(const hopon_sampling &s, int64_t i) {
  return s.rows[s.which == nullptr ? i : s.which[i]];
}

bool valid_sampling(const hopon_sampling &s) {
  if (s.num_rows < 0 || s.vocab < 1 || s.stride < s.vocab || s.max_top < 0) return false;
  if (s.num_rows == 0) return true;
  if (s.logits == nullptr || s.rows == nullptr || s.want_logprob == nullptr || s.out_token == nullptr) return false;
  if (s.out_logprob == nullptr) return false;
  if (s.max_top > 0 && (s.out_top_ids == nullptr || s.out_top_logprobs == nullptr)) return false;
  for (int32_t i = 0; i < s.num_rows; ++i)
    if (!sample_row_valid(sample_row_of(s, i), s.vocab, s.max_top)) return false;
  return true;
}

// Chooses a token per row; a status other than 0 goes to `result`. Every worker of the team calls it.
void sample(hopon_pool::Team &team, const hopon_sampling &s, std::atomic<int32_t> &result) {
  team.run(s.num_rows, [&](int64_t i, int worker) {
    const hopon_sample_row &row = sample_row_of(s, i);
    const float *logits = s.logits + (s.which == nullptr ? row.logits_row : i) * s.stride;
    const bool want_logprob = s.want_logprob[i] != 0;
    if (is_plain(row) && !want_logprob) {
      s.out_token[i] = largest_logit(logits, s.vocab);
      s.out_logprob[i] = 0.0f;
      return;
    }
    RowSampler sampler(logits, s.vocab, team.scratch(worker, RowSampler::scratch_bytes(s.vocab)));
    const int32_t status = sampler.run(row, want_logprob, s.out_token[i], s.out_logprob[i],
                                       s.max_top > 0 ? s.out_top_ids + i * s.max_top : nullptr,
                                       s.max_top > 0 ? s.out_top_logprobs + i * s.max_top : nullptr);
    if (status != 0) result.store(status, std::memory_order_relaxed);
  });
}

}  // namespace

HOPON_EXPORT int32_t hopon_abi(void) { return HOPON_ABI; }
HOPON_EXPORT const char *hopon_level(void) { return HOPON_LEVEL_NAME; }

// Asks the processor itself: compilers' own helpers for this differ, and one of them answers no to everything.
HOPON_EXPORT int32_t hopon_level_supported(void) {
#if defined(HOPON_LEVEL_PORTABLE)
  return 1;
#else
  auto has = [](unsigned word, std::initializer_list<int> bits) {
    return std::all_of(bits.begin(), bits.end(), [&](int bit) { return word >> bit & 1; });
  };
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, {12 /* FMA */, 27 /* OSXSAVE */, 29 /* F16C */})) return 0;
  unsigned state;  // register states that the operating system saves
  asm("xgetbv" : "=a"(state), "=d"(d) : "c"(0));
  if (!has(state, {1, 2})) return 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !has(b, {5 /* AVX2 */})) return 0;
#if defined(HOPON_LEVEL_AVX512)
  if (!has(state, {5, 6, 7}) || !has(b, {16 /* F */, 17 /* DQ */, 30 /* BW */, 31 /* VL */})) return 0;
  if (!has(c, {11 /* VNNI */})) return 0;
#endif
#if defined(HOPON_HAS_BF16)
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !has(a, {5 /* BF16 */})) return 0;
#endif
#if defined(HOPON_LEVEL_AMX)
  if (!tiles_supported()) return 0;
#endif
  return 1;
#endif
}

HOPON_EXPORT void hopon_sizes(int32_t sizes[7]) {
  sizes[0] = sizeof(hopon_matrix);
  sizes[1] = sizeof(hopon_buffer);
  sizes[2] = sizeof(hopon_op);
  sizes[3] = sizeof(hopon_model);
  sizes[4] = sizeof(hopon_batch);
  sizes[5] = sizeof(hopon_sample_row);
  sizes[6] = sizeof(hopon_sampling);
}

HOPON_EXPORT hopon_pool *hopon_pool_create(int32_t threads) {
  if (threads < 1 || threads > 1024) return nullptr;
  try {
    return new hopon_pool(threads);
  } catch (const std::exception &) {
    return nullptr;
  }
}

HOPON_EXPORT void hopon_pool_destroy(hopon_pool *pool) { delete pool; }

HOPON_EXPORT int32_t hopon_linear(hopon_pool *pool, const hopon_matrix *w, const float *x, int64_t ldx, float *y,
                                  int64_t ldy, int32_t m, int32_t accumulate) {
  if (pool == nullptr || !valid_matrix(w) || x == nullptr || y == nullptr || m < 0 || ldx < w->cols || ldy < w->rows)
    return HOPON_E_ARGUMENT;
  return guarded([&] {
    pool->reserve(hopon::kSlotLinear, linear_scratch_bytes(*w, m));
    pool->together(LINEAR_RUNS, is_brief(m), [&](hopon_pool::Team &team) {
      linear(team, *w, x, ldx, y, ldy, m, accumulate != 0, {}, [](int64_t) {});
    });
    return 0;
  });
}

HOPON_EXPORT int32_t hopon_forward(hopon_pool *pool, const hopon_model *model, const hopon_batch *batch) {
  if (pool == nullptr || model == nullptr || batch == nullptr || !valid_step(*model, *batch)) return HOPON_E_ARGUMENT;
  return guarded([&] {
    const Shared shared(*pool, *model, *batch);
    pool->together(max_runs(*model), is_brief(batch->num_tokens), [&](hopon_pool::Team &team) {
      forward(team, *model, *batch, shared);
    });
    return 0;
  });
}

HOPON_EXPORT int32_t hopon_step(hopon_pool *pool, const hopon_model *model, const hopon_batch *batch,
                                const hopon_sampling *sampling) {
  if (pool == nullptr || model == nullptr || batch == nullptr || sampling == nullptr) return HOPON_E_ARGUMENT;
  if (!valid_step(*model, *batch) || !valid_sampling(*sampling)) return HOPON_E_ARGUMENT;
  return guarded([&] {
    const Shared shared(*pool, *model, *batch);
    std::atomic<int32_t> result{0};
    pool->together(max_runs(*model) + 1, is_brief(batch->num_tokens), [&](hopon_pool::Team &team) {
      forward(team, *model, *batch, shared);
      sample(team, *sampling, result);
    });
    return result.load();
  });
}

HOPON_EXPORT double hopon_uniform(uint64_t seed, int32_t choice, int32_t index) {
  return hopon::uniform(seed, static_cast<uint32_t>(choice), static_cast<uint32_t>(index));
}

HOPON_EXPORT int32_t hopon_sample(hopon_pool *pool, const hopon_sampling *sampling) {
  if (pool == nullptr || sampling == nullptr || !valid_sampling(*sampling)) return HOPON_E_ARGUMENT;
  return guarded([&] {
    std::atomic<int32_t> result{0};
    pool->together(1, is_brief(sampling->num_rows), [&](hopon_pool::Team &team) { sample(team, *sampling, result); });
    return result.load();
  });
}
