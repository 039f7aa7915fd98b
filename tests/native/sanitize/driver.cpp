// Drives every kernel with random sizes, for the sanitizers to watch: linear, a whole program with attention, sampling
// and the pool. All memory that kernels get has exactly the size that hopon.h asks for, so that a step beyond it is seen.
// Besides, results with one worker and with several must be the same bits. Prints "ok" and returns 0.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "hopon.cpp"

namespace {

std::mt19937 rng(1);

int between(int low, int high) { return low + static_cast<int>(rng() % static_cast<unsigned>(high - low + 1)); }
template <class T>
T one_of(std::initializer_list<T> values) {
  return values.begin()[rng() % values.size()];
}
float number() { return static_cast<float>(static_cast<int>(rng() % 2001) - 1000) / 1000.0f; }

void require(bool condition, const char *what) {
  if (condition) return;
  std::printf("failed: %s\n", what);
  std::exit(1);
}

// Heap memory of exactly `count` values, 64-byte aligned.
template <class T>
class Array {
 public:
  explicit Array(size_t count, bool random = true)
      : count_(count), data_(static_cast<T *>(::operator new(std::max<size_t>(count, 1) * sizeof(T), std::align_val_t(64)))) {
    std::uninitialized_value_construct_n(data_.get(), count);
    if constexpr (std::is_same_v<T, float>)
      if (random) std::generate_n(data_.get(), count, number);
  }
  T *get() const { return data_.get(); }
  T &operator[](size_t i) const { return data_.get()[i]; }
  size_t size() const { return count_; }

 private:
  struct Free {
    void operator()(T *p) const { ::operator delete(p, std::align_val_t(64)); }
  };
  size_t count_;
  std::unique_ptr<T, Free> data_;
};

bool same(const Array<float> &a, const Array<float> &b) {
  return a.size() == b.size() && std::memcmp(a.get(), b.get(), a.size() * sizeof(float)) == 0;
}

struct Matrix {
  Matrix(int rows, int cols, int dtype)
      : n((rows + 63) / 64 * 64),
        k((cols + 31) / 32 * 32),
        bytes(bytes_of(dtype), false),
        scales(dtype >= HOPON_I8 ? static_cast<size_t>(n) * (k / 32 + (k + 63) / 64 * 2) : 0, false),
        bias(static_cast<size_t>(rows)) {
    if (dtype == HOPON_F32)
      for (size_t i = 0; i < bytes.size() / 4; ++i) reinterpret_cast<float *>(bytes.get())[i] = number() / 8;
    else if (dtype == HOPON_BF16)
      for (size_t i = 0; i < bytes.size() / 2; ++i)
        reinterpret_cast<uint16_t *>(bytes.get())[i] = float_to_bf16(number() / 8);
    else
      for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(rng());
    for (size_t i = 0; i < scales.size(); ++i) scales[i] = static_cast<uint16_t>(0x1400 + rng() % 0x400);  // about 0.001
    c = {dtype, rows, cols, n, k, between(0, k / 4), between(0, 1), 0, bytes.get(), scales.size() ? scales.get() : nullptr,
         rng() % 2 ? bias.get() : nullptr};
  }
  size_t bytes_of(int dtype) const {
    const size_t values = static_cast<size_t>(n) * static_cast<size_t>(k);
    return dtype == HOPON_F32 ? values * 4 : dtype == HOPON_BF16 ? values * 2 : dtype == HOPON_I8 ? values : values / 2;
  }
  int n, k;
  Array<uint8_t> bytes;
  Array<uint16_t> scales;
  Array<float> bias;
  hopon_matrix c;
};

int any_dtype() { return between(HOPON_F32, HOPON_I4); }

void drive_linear(const std::vector<hopon_pool *> &pools) {
  const int rows = between(1, 200), cols = between(1, 150), m = between(0, 20);
  const Matrix w(rows, cols, any_dtype());
  const int ldx = cols + between(0, 3), ldy = rows + between(0, 3), accumulate = between(0, 1);
  // A row behind the last one needs no padding: the arrays end with the last value that counts.
  const Array<float> x(m ? static_cast<size_t>((m - 1) * ldx + cols) : 0);
  std::vector<std::unique_ptr<Array<float>>> out;
  for (hopon_pool *pool : pools) {
    out.push_back(std::make_unique<Array<float>>(m ? static_cast<size_t>((m - 1) * ldy + rows) : 0, false));
    require(hopon_linear(pool, &w.c, x.get(), ldx, out.back()->get(), ldy, m, accumulate) == 0, "linear");
    require(same(*out.front(), *out.back()), "linear depends on the threads");
  }
#if defined(__x86_64__)
  // A caller that flushes subnormals and rounds towards zero gets the same bits, and its mode back.
  const unsigned before = _mm_getcsr(), odd = 0xFFC0;
  Array<float> other(out.front()->size(), false);
  _mm_setcsr(odd);
  const int32_t status = hopon_linear(pools.back(), &w.c, x.get(), ldx, other.get(), ldy, m, accumulate);
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  require(status == 0 && same(*out.front(), other), "linear depends on the caller's floating point mode");
  require((after & 0xFFC0) == odd, "the caller's floating point mode was not restored");
#endif
}

void drive_program(const std::vector<hopon_pool *> &pools) {
  const int group = between(1, 7), kv_heads = between(1, 3), heads = group * kv_heads, dim = 8 * between(1, 9);
  const int hidden = between(3, 70), mlp = between(2, 90), vocab = between(2, 140), layers = between(1, 2);
  const int qkv = (heads + 2 * kv_heads) * dim, block_size = one_of({1, 2, 4, 8, 16, 32, 128}), max_position = 700;
  const int kv_dtype = one_of({HOPON_F32, HOPON_BF16, HOPON_F16}), rope_dim = 2 * between(0, dim / 2);

  // Sequences that are up to three steps long: a chunk, a decode, a chunk.
  const int num_sequences = between(1, 4), num_steps = 3;
  std::vector<std::vector<int>> counts(num_steps);
  std::vector<int> totals(num_sequences);
  for (auto &step : counts)
    for (int s = 0; s < num_sequences; ++s) {
      step.push_back(rng() % 3 ? between(1, one_of({2, 40, 200})) : 1);
      totals[s] += step.back();
    }
  const int longest = *std::max_element(totals.begin(), totals.end());
  const int stride = (longest + block_size - 1) / block_size, num_blocks = stride * num_sequences;
  Array<int32_t> tables(static_cast<size_t>(stride * num_sequences), false);
  for (size_t i = 0; i < tables.size(); ++i) tables[i] = static_cast<int32_t>(i);
  std::shuffle(tables.get(), tables.get() + tables.size(), rng);

  const int dtype = any_dtype();
  const Matrix embed(vocab, hidden, dtype), in(qkv, hidden, dtype), back(hidden, heads * dim, dtype);
  const Matrix up(2 * mlp, hidden, dtype), down(hidden, mlp, dtype);
  const Array<float> norm(static_cast<size_t>(hidden)), head_norm(static_cast<size_t>(dim));
  const Array<float> rope(static_cast<size_t>(max_position) * std::max(rope_dim, 1));
  const bool with_head_norm = rng() % 2;

  std::vector<hopon_op> ops;
  auto add = [&](hopon_op op) { ops.push_back(op); };
  auto op = [](int kind, int from, int to) {
    hopon_op o = {};
    o.kind = kind, o.in = from, o.out = to, o.eps = 1e-5f;
    return o;
  };
  auto norm_op = [&](int from, int to, int on_logits) {
    hopon_op o = op(HOPON_NORM, from, to);
    o.width = hidden, o.groups = 1, o.vector = norm.get(), o.on_logits = on_logits;
    add(o);
  };
  auto linear_op = [&](int from, int to, const Matrix &w, int accumulate, int on_logits) {
    hopon_op o = op(HOPON_LINEAR, from, to);
    o.matrix = &w.c, o.accumulate = accumulate, o.on_logits = on_logits;
    add(o);
  };
  hopon_op first = op(HOPON_EMBED, 0, 0);
  first.matrix = &embed.c;
  add(first);
  for (int layer = 0; layer < layers; ++layer) {
    norm_op(0, 1, 0);
    linear_op(1, 2, in, 0, 0);
    hopon_op o = op(HOPON_ROPE_KV, 2, 0);
    o.layer = layer;
    if (with_head_norm) o.vector = o.vector2 = head_norm.get();
    add(o);
    o = op(HOPON_ATTENTION, 2, 3);
    o.layer = layer;
    add(o);
    linear_op(3, 0, back, 1, 0);
    norm_op(0, 1, 0);
    linear_op(1, 4, up, 0, 0);
    o = op(HOPON_GATE, 4, 5);
    o.width = mlp;
    add(o);
    linear_op(5, 0, down, 1, 0);
  }
  hopon_op select = op(HOPON_SELECT, 0, 6);
  select.width = hidden;
  add(select);
  norm_op(6, 6, 1);
  linear_op(6, 7, embed, 0, 1);

  std::vector<std::unique_ptr<Array<float>>> logits;
  const auto token_rng = rng;
  for (hopon_pool *pool : pools) {
    rng = token_rng;
    const size_t element = kv_dtype == HOPON_F32 ? 4 : 2;
    const size_t block_bytes = element * 2 * static_cast<size_t>(layers * kv_heads * block_size * dim);
    Array<uint8_t> kv(block_bytes * static_cast<size_t>(num_blocks), false);
    std::memset(kv.get(), 0xFF, kv.size());  // NaN
    std::vector<int> done(num_sequences);
    for (int step = 0; step < num_steps; ++step) {
      Array<int32_t> start(static_cast<size_t>(num_sequences) + 1, false), position(num_sequences, false);
      Array<int32_t> table(num_sequences, false);
      for (int s = 0; s < num_sequences; ++s) {
        start[s + 1] = start[s] + counts[step][s];
        position[s] = done[s];
        table[s] = s;
        done[s] += counts[step][s];
      }
      const int n = start[num_sequences];
      Array<int32_t> tokens(n, false), wanted(num_sequences, false);
      for (int i = 0; i < n; ++i) tokens[i] = between(0, vocab - 1);
      for (int s = 0; s < num_sequences; ++s) wanted[s] = start[s + 1] - 1;
      std::vector<Array<float>> memory;
      std::vector<hopon_buffer> buffers;
      for (int width : {hidden, hidden, qkv, heads * dim, 2 * mlp, mlp, hidden, vocab}) {
        memory.emplace_back(static_cast<size_t>((buffers.size() < 6 ? n : num_sequences) * width), false);
        buffers.push_back({memory.back().get(), width});
      }
      hopon_model model = {};
      model.num_layers = layers, model.num_heads = heads, model.num_kv_heads = kv_heads, model.head_dim = dim;
      model.rope_dim = rope_dim, model.rope_interleaved = with_head_norm, model.kv_dtype = kv_dtype;
      model.block_size = block_size, model.num_blocks = num_blocks, model.max_position = max_position;
      model.attention_scale = 0.1f, model.num_buffers = static_cast<int>(buffers.size());
      model.num_ops = static_cast<int>(ops.size()), model.rope = rope.get(), model.kv = kv.get();
      model.block_bytes = static_cast<int64_t>(block_bytes), model.buffers = buffers.data(), model.ops = ops.data();
      const hopon_batch batch = {n,           num_sequences, num_sequences, 0,      tokens.get(), start.get(),
                                 position.get(), table.get(),   tables.get(),  stride, wanted.get()};
      require(hopon_forward(pool, &model, &batch) == 0, "forward");
      if (step + 1 == num_steps) {
        logits.push_back(std::make_unique<Array<float>>(static_cast<size_t>(num_sequences * vocab), false));
        std::memcpy(logits.back()->get(), memory[7].get(), logits.back()->size() * sizeof(float));
        for (size_t i = 0; i < logits.back()->size(); ++i) require(std::isfinite((*logits.back())[i]), "a NaN leaked");
        require(same(*logits.front(), *logits.back()), "the program depends on the threads");
      }
      // Garbage in the batch is refused or harmless, never followed.
      hopon_batch bad = batch;
      bad.num_tokens += between(-1, 1) * 3;
      if (bad.num_tokens != n) require(hopon_forward(pool, &model, &bad) == HOPON_E_ARGUMENT, "bad token count");
      position[0] = one_of({-1, max_position, max_position - 1 + (counts[step][0] == 1), INT32_MAX});
      require(hopon_forward(pool, &model, &batch) == HOPON_E_ARGUMENT, "bad position");
    }
  }
}

void drive_sampling(const std::vector<hopon_pool *> &pools) {
  const int vocab = one_of({1, 5, 16, 63, 64, 65, 1000, 5000}), num_logits = between(1, 3), num_rows = between(1, 12);
  const int stride = vocab + between(0, 2), max_top = std::min(vocab, between(0, 20));
  Array<float> logits(static_cast<size_t>((num_logits - 1) * stride + vocab));
  for (size_t i = 0; i < logits.size(); ++i) {
    if (rng() % 3 == 0) logits[i] *= 30;
    if (rng() % 50 == 0) logits[i] = one_of({NAN, INFINITY, -INFINITY, FLT_MAX, -FLT_MAX, -0.0f, 0.0f});
  }
  Array<int32_t> banned(static_cast<size_t>(std::min(vocab - 1, between(0, 4))), false);
  for (size_t i = 0; i < banned.size(); ++i) banned[i] = between(0, vocab - 1);
  Array<uint32_t> mask(static_cast<size_t>((vocab + 31) / 32), false);
  for (size_t i = 0; i < mask.size(); ++i) mask[i] = i == 0 ? 1 : one_of({0u, ~0u, static_cast<uint32_t>(rng())});
  Array<int32_t> biased(static_cast<size_t>(between(0, 5)), false), seen(static_cast<size_t>(std::min(vocab, between(0, 70))), false);
  Array<float> biases(biased.size());
  for (size_t i = 0; i < biased.size(); ++i) biased[i] = between(0, vocab - 1);
  Array<int32_t> counts(seen.size(), false);
  for (size_t i = 0; i < seen.size(); ++i) seen[i] = static_cast<int32_t>(i), counts[i] = between(0, 3);
  Array<hopon_sample_row> rows(static_cast<size_t>(num_rows), false);
  Array<uint8_t> wanted(static_cast<size_t>(num_rows), false);
  for (int i = 0; i < num_rows; ++i) {
    wanted[i] = rng() % 2;
    rows[i] = {between(0, num_logits - 1),
               rng() % 4 ? -1 : between(0, vocab - 1),
               one_of({0.0f, 1e-40f, 1e-6f, 0.7f, 1.0f, 5.0f, 3e38f}),
               one_of({1.0f, 0.9f, 0.5f, 1e-6f}),
               one_of({0.0f, 0.01f, 1.0f}),
               one_of({-1, 0, 1, 3, 50, 100000}),
               uint64_t{rng()} << 32 | rng(),
               between(0, 3),
               between(0, 100000),
               static_cast<int32_t>(banned.size()),
               between(0, max_top),
               banned.size() ? banned.get() : nullptr,
               rng() % 3 ? nullptr : mask.get(),
               static_cast<int32_t>(biased.size()),
               static_cast<int32_t>(seen.size()),
               biased.get(),
               biases.get(),
               seen.get(),
               counts.get(),
               one_of({0.01f, 1.0f, 1.3f, 1e30f}),
               one_of({-2.0f, 0.0f, 0.5f, 3e38f}),
               one_of({-2.0f, 0.0f, 0.5f}),
               0};
  }
  std::vector<Array<float>> results;
  for (hopon_pool *pool : pools) {
    Array<int32_t> token(num_rows, false), top_ids(static_cast<size_t>(num_rows * max_top), false);
    Array<float> logprob(num_rows, false), top_logprobs(static_cast<size_t>(num_rows * max_top), false);
    const hopon_sampling sampling = {logits.get(), stride,      vocab,         num_rows,      max_top,       0,
                                     rows.get(),   nullptr,     wanted.get(),  token.get(),   logprob.get(), top_ids.get(),
                                     top_logprobs.get()};
    require(hopon_sample(pool, &sampling) == 0, "sample");
    Array<float> all(static_cast<size_t>(num_rows * 2), false);
    for (int i = 0; i < num_rows; ++i) {
      require(token[i] >= 0 && token[i] < vocab, "a token outside the vocabulary");
      require(!std::isnan(logprob[i]), "a NaN among the log-probabilities");
      all[2 * i] = static_cast<float>(token[i]);
      all[2 * i + 1] = logprob[i];
    }
    results.push_back(std::move(all));
    require(same(results.front(), results.back()), "sampling depends on the threads");
  }
}

void drive_pool(int threads) {
  std::unique_ptr<hopon_pool, void (*)(hopon_pool *)> pool(hopon_pool_create(threads), hopon_pool_destroy);
  require(pool != nullptr, "no pool");
  for (int i = 0; i < 300; ++i) {
    const int tasks = between(0, 50);
    std::vector<int> seen(static_cast<size_t>(tasks));
    int *shared = static_cast<int *>(pool->reserve(5, sizeof(int) * static_cast<size_t>(between(1, 5000))));
    shared[0] = i;
    std::vector<int> order(static_cast<size_t>(tasks));
    pool->together(3, i % 2 == 0, [&](hopon_pool::Team &team) {
      team.run(tasks, [&](int64_t task, int worker) {
        static_cast<char *>(team.scratch(worker, static_cast<size_t>(64 + 100 * task)))[63] = 1;
        seen[static_cast<size_t>(task)] += static_cast<int *>(team.shared_scratch(5))[0] == i;
        if (task % 16 == 3 && i % 50 == 0) usleep(800);  // longer than a turn: workers give way and come back
      });
      team.run(1, [&](int64_t, int) { shared[0] = i + 1000; });
      team.run(tasks, [&](int64_t task, int) { order[static_cast<size_t>(task)] = shared[0] - 1000; });
    });
    for (int count : seen) require(count == 1, "a task was lost or run twice");
    for (int found : order) require(found == i, "a run began before the one in front of it had ended");
    const int parts = between(0, 3), count = between(0, 40);
    std::vector<int> range_of(static_cast<size_t>(count), -1);
    pool->together(1, false, [&](hopon_pool::Team &team) {
      team.run_ranges(count, parts, [&](int64_t first, int64_t end) {
        for (int64_t row = first; row < end; ++row) {
          require(range_of[static_cast<size_t>(row)] == -1, "two ranges share a row");
          range_of[static_cast<size_t>(row)] = static_cast<int>(first);
        }
      });
    });
    for (int row = 0; row < count; ++row) {
      require(range_of[static_cast<size_t>(row)] >= 0, "no range has a row");
      if (parts == 0) require(range_of[static_cast<size_t>(row)] == 0, "without parts there is more than one range");
    }
    if (i % 20 == 0) usleep(60);
  }
  bool thrown = false, went_on = false;
  try {
    pool->together(2, false, [&](hopon_pool::Team &team) {
      team.run(20, [&](int64_t task, int) {
        if (task == 7) throw std::bad_alloc();
      });
      team.run(1, [&](int64_t, int) { went_on = true; });
    });
  } catch (const std::bad_alloc &) {
    thrown = true;
  }
  require(!went_on, "a failed function went on");
  require(thrown, "a task's exception was lost");
}

// Destroyed while a worker is only just waking to the one function that the pool ever had.
void drive_short_lives() {
  for (int i = 0; i < 100; ++i) {
    std::unique_ptr<hopon_pool, void (*)(hopon_pool *)> pool(hopon_pool_create(3), hopon_pool_destroy);
    require(pool != nullptr, "no pool");
    if (i % 7 != 0) usleep(static_cast<unsigned>(i % 7 * 10));
    int done = 0;
    pool->together(1, false, [&](hopon_pool::Team &team) { team.run(1, [&](int64_t, int) { ++done; }); });
    require(done == 1, "a task was lost or run twice");
  }
}

}  // namespace

int main(int count, char **arguments) {
  const int rounds = count > 1 ? std::atoi(arguments[1]) : 20;
  for (int i = 0; i <= rounds; ++i) drive_short_lives();
  for (int i = 0; i <= rounds; ++i)
    for (int threads : {1, 2, 4}) drive_pool(threads);
  std::vector<hopon_pool *> pools;
  for (int threads : {1, 2, 3}) pools.push_back(hopon_pool_create(threads));
  for (int round = 0; round < rounds; ++round) {
    drive_linear(pools);
    drive_program(pools);
    for (int i = 0; i < 5; ++i) drive_sampling(pools);
  }
  for (hopon_pool *pool : pools) hopon_pool_destroy(pool);
  std::puts("ok");
  return 0;
}
