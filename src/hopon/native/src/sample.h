// Choosing tokens: greedy or by chance, and the log-probabilities of the raw distribution. Never sorts the vocabulary.
//
// A row's result is a pure function of (logits row, parameters, uniform(seed, choice, index)):
//   * logits are clamped to the finite floats first and NaN counts as the lowest, so that no value can poison a row;
//   * tokens are ordered by logit, ties by the lower id;
//   * a token's weight is the integer round(2^30 exp((logit - max) / temperature)): sums of integers are exact, so no
//     order of summation matters and the borders of top-k, top-p and min-p are exact;
//   * min_p keeps what weighs at least min_p of the heaviest; top_k then the first k in that order; top_p then the
//     shortest prefix that weighs at least top_p of what was kept;
//   * the choice inverts the cumulative weight over ascending ids of what is left.
// A weight below 2^-31 of the heaviest rounds to 0: such a token is never chosen.
#ifndef HOPON_SAMPLE_H
#define HOPON_SAMPLE_H
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "hopon.h"
#include "pool.h"
#include "simd.h"

namespace hopon {

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with the seed as key and the
// counter (index, choice, 0, 0): the first two words, most significant first, as 53 bits of a number in [0, 1).
inline double uniform(uint64_t seed, uint32_t choice, uint32_t index) {
  uint32_t counter[4] = {index, choice, 0, 0};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter[0], b = uint64_t{0xCD9E8D57} * counter[2];
    const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
                              static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    std::memcpy(counter, next, sizeof counter);
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return static_cast<double>((uint64_t{counter[0]} << 32 | counter[1]) >> 11) * 0x1p-53;
}

}  // namespace hopon

namespace hopon::HOPON_LEVEL {

// Clamps to finite floats; NaN becomes the lowest.
HOPON_INLINE f32x16 finite(f32x16 x) { return min(max(x, broadcast(-FLT_MAX)), broadcast(FLT_MAX)); }
HOPON_INLINE float finite1(float x) { return x > -FLT_MAX ? (x < FLT_MAX ? x : FLT_MAX) : -FLT_MAX; }

// Unsigned integers in the order of floats; both zeros are equal.
HOPON_INLINE uint32_t order_key(float x) {
  const uint32_t bits = float_bits(x + 0.0f);
  return bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
}

// Whether anything but the logits themselves decides what may be chosen.
inline bool adjusts(const hopon_sample_row &row) {
  return row.mask != nullptr || row.num_banned > 0 || row.num_biased > 0 || row.num_seen > 0;
}

// Greedy, and nothing else is asked for than the token.
inline bool is_plain(const hopon_sample_row &row) {
  return row.temperature == 0.0f && row.forced < 0 && row.num_top == 0 && !adjusts(row);
}

// What RowSampler chooses for a plain row, in one pass that writes nothing: the first of the largest.
inline int32_t largest_logit(const float *logits, int32_t vocab) {
  constexpr int kRun = 4 * LANES;
  float best = -INFINITY;
  int32_t begin = 0, i = 0;  // the first run of ids that has the best
  for (; i + kRun <= vocab; i += kRun) {
    const f32x16 a = max(finite(load(logits + i)), finite(load(logits + i + LANES)));
    const f32x16 b = max(finite(load(logits + i + 2 * LANES)), finite(load(logits + i + 3 * LANES)));
    const float top = largest(max(a, b));
    if (top > best) {
      best = top;
      begin = i;
    }
  }
  for (; i < vocab; ++i)
    if (finite1(logits[i]) > best) {
      best = finite1(logits[i]);
      begin = i;
    }
  while (finite1(logits[begin]) != best) ++begin;
  return begin;
}

class RowSampler {
 public:
  static size_t scratch_bytes(int32_t vocab) {
    const size_t blocks = static_cast<size_t>(vocab + kBlock - 1) / kBlock;
    return (blocks * kBlock * 4 + blocks * 2) * sizeof(float) + blocks * sizeof(uint64_t) + kBins * sizeof(uint64_t);
  }

  RowSampler(const float *logits, int32_t vocab, void *scratch)
      : logits_(logits), vocab_(vocab), blocks_((vocab + kBlock - 1) / kBlock) {
    const size_t padded = static_cast<size_t>(blocks_) * kBlock;
    block_weight_ = static_cast<uint64_t *>(scratch);
    bins_ = block_weight_ + blocks_;
    x_ = reinterpret_cast<float *>(bins_ + kBins);
    weight_ = reinterpret_cast<uint32_t *>(x_ + padded);
    list_ = reinterpret_cast<int32_t *>(weight_ + padded);
    other_ = list_ + padded;
    block_max_ = reinterpret_cast<float *>(other_ + padded);
    maxima_ = block_max_ + blocks_;
  }

  // Returns 0, or HOPON_E_ARGUMENT when the mask allows no token.
  int32_t run(const hopon_sample_row &row, bool want_logprob, int32_t &token, float &logprob, int32_t *top_ids,
              float *top_logprobs) {
    clamp();
    const float raw_max = *std::max_element(block_max_, block_max_ + blocks_);
    double log_sum = 0.0;
    if (want_logprob || row.num_top > 0) log_sum = std::log(sum_of_exp(raw_max));
    auto log_probability = [&](int32_t id) {
      return static_cast<float>(static_cast<double>(finite1(logits_[id])) - raw_max - log_sum);
    };
    if (row.num_top > 0) {
      const int32_t n = keep_best(kEverything, row.num_top);
      std::sort(list_, list_ + n, [&](int32_t a, int32_t b) { return x_[a] != x_[b] ? x_[a] > x_[b] : a < b; });
      for (int32_t i = 0; i < n; ++i) {
        top_ids[i] = list_[i];
        top_logprobs[i] = log_probability(list_[i]);
      }
    }
    if (row.forced >= 0) {
      token = row.forced;
    } else {
      const float best = adjusts(row) ? adjust(row) : raw_max;
      if (best == -INFINITY) return HOPON_E_ARGUMENT;
      token = row.temperature == 0.0f ? first_of(best) : draw(row, best);
    }
    logprob = want_logprob ? log_probability(token) : 0.0f;
    return 0;
  }

 private:
  static constexpr int kBlock = 64;  // ids whose maximum and weight are kept
  static constexpr int kBins = 2048;
  static constexpr int32_t kEverything = -1;  // instead of a list's length: all ids of the vocabulary

  // x = clamped logits, -inf behind the vocabulary; block maxima.
  void clamp() {
    for (int b = 0; b < blocks_; ++b) {
      f32x16 top = broadcast(-INFINITY);
      for (int i = b * kBlock; i < (b + 1) * kBlock; i += LANES) {
        f32x16 v = i + LANES <= vocab_ ? finite(load(logits_ + i)) : broadcast(-INFINITY);
        if (i < vocab_ && i + LANES > vocab_)
          v = keep_first(finite(load_first(logits_ + i, vocab_ - i)), vocab_ - i, -INFINITY);
        store(x_ + i, v);
        top = max(top, v);
      }
      block_max_[b] = largest(top);
    }
  }

  // Sum of exp(x - top), blocks of 4096 ids in ascending order.
  double sum_of_exp(float top) const {
    constexpr int kRun = 4096;
    const f32x16 shift = broadcast(top);
    double total = 0.0;
    for (int begin = 0, end = blocks_ * kBlock; begin < end; begin += kRun) {
      f32x16 part = zero();
      for (int i = begin; i < std::min(end, begin + kRun); i += LANES) part = part + exp(load(x_ + i) - shift);
      total += static_cast<double>(sum(part));
    }
    return total;
  }

  // Makes of x what the choice is made of: -inf for what cannot be chosen, biases and penalties on the rest; returns the
  // largest (-inf if nothing is left).
  float adjust(const hopon_sample_row &row) {
    if (row.mask != nullptr) mask(row.mask);
    float best = measure();
    if (row.num_banned > 0 && best > -INFINITY) {
      for (int32_t i = 0; i < row.num_banned; ++i) x_[row.banned[i]] = -INFINITY;
      best = measure();
      if (best == -INFINITY)  // nothing is left: the bans yield
        for (int32_t i = 0; i < row.num_banned; ++i)
          if (allows(row.mask, row.banned[i])) x_[row.banned[i]] = finite1(logits_[row.banned[i]]);
    }
    for (int32_t i = 0; i < row.num_biased; ++i) {
      float &x = x_[row.biased[i]];
      if (x > -INFINITY) x = finite1(x + row.biases[i]);
    }
    for (int32_t i = 0; i < row.num_seen; ++i) {
      float &x = x_[row.seen[i]];
      if (x == -INFINITY) continue;
      x = x > 0.0f ? x / row.repetition : x * row.repetition;
      x = x - row.frequency * static_cast<float>(row.counts[i]);
      x = finite1(row.counts[i] > 0 ? x - row.presence : x);
    }
    return measure();
  }

  static bool allows(const uint32_t *mask, int32_t id) { return mask == nullptr || (mask[id / 32] >> (id % 32) & 1); }

  void mask(const uint32_t *words) {
    for (int32_t begin = 0; begin < vocab_; begin += 32) {
      const uint32_t bits = words[begin / 32];
      if (bits == 0xFFFFFFFFu) continue;
      for (int i = 0; i < 32; ++i) x_[begin + i] = bits >> i & 1 ? x_[begin + i] : -INFINITY;
    }
  }

  // Block maxima of x anew; returns the largest.
  float measure() {
    for (int b = 0; b < blocks_; ++b) {
      f32x16 top = load(x_ + b * kBlock);
      for (int i = LANES; i < kBlock; i += LANES) top = max(top, load(x_ + b * kBlock + i));
      block_max_[b] = largest(top);
    }
    return *std::max_element(block_max_, block_max_ + blocks_);
  }

  int32_t first_of(float value) const {
    const auto block = std::find(block_max_, block_max_ + blocks_, value) - block_max_;
    return static_cast<int32_t>(std::find(x_ + block * kBlock, x_ + (block + 1) * kBlock, value) - x_);
  }

  int32_t draw(const hopon_sample_row &row, float best) {
    weigh(best, row.temperature);
    const double random = uniform(row.seed, static_cast<uint32_t>(row.choice), static_cast<uint32_t>(row.index));
    int32_t kept = kEverything;
    if (row.min_p > 0.0f) kept = keep_heavy(kept, row.min_p);
    if (row.top_k > 0 && row.top_k < vocab_) kept = keep_best(kept, row.top_k);
    if (row.top_p < 1.0f) kept = keep_mass(kept, row.top_p);
    return kept == kEverything ? invert_all(random) : invert_list(kept, random);
  }

  // Weights of all ids and of blocks.
  void weigh(float best, float temperature) {
    const f32x16 shift = broadcast(best), factor = broadcast(std::min(1.0f / temperature, FLT_MAX));
    for (int b = 0; b < blocks_; ++b) {
      uint64_t total = 0;
      alignas(64) float w[kBlock];
      for (int i = 0; i < kBlock; i += LANES)
        store(w + i, exp((load(x_ + b * kBlock + i) - shift) * factor) * broadcast(0x1p30f));
      uint32_t *to = weight_ + b * kBlock;
      for (int i = 0; i < kBlock; ++i) {
        const uint32_t u = static_cast<uint32_t>(static_cast<int32_t>(w[i] + 0.5f));
        to[i] = u;
        total += u;
      }
      block_weight_[b] = total;
    }
  }

  uint64_t total_weight(int32_t n) const {
    uint64_t total = 0;
    if (n == kEverything)
      for (int b = 0; b < blocks_; ++b) total += block_weight_[b];
    else
      for (int32_t i = 0; i < n; ++i) total += weight_[list_[i]];
    return total;
  }

  // Filters keep ids in list_, ascending; each returns how many. f: does id stay? (Every id is written and then counted or
  // not: nobody can predict which ones stay.)
  template <class F>
  int32_t keep_if(int32_t n, F &&f) {
    int32_t kept = 0;
    if (n == kEverything) {
      for (int32_t id = 0; id < vocab_; ++id) {
        list_[kept] = id;
        kept += f(id);
      }
    } else {
      for (int32_t i = 0; i < n; ++i) {
        const int32_t id = list_[i];
        list_[kept] = id;
        kept += f(id);
      }
    }
    return kept;
  }

  int32_t keep_best(int32_t n, int32_t k) {
    if (n == kEverything) {
      // The k-th largest of the block maxima: at least k ids reach it, so the k best do.
      float bound = -INFINITY;
      if (k <= blocks_) {
        std::copy(block_max_, block_max_ + blocks_, maxima_);
        std::nth_element(maxima_, maxima_ + (k - 1), maxima_ + blocks_, std::greater<float>());
        bound = maxima_[k - 1];
      }
      n = 0;
      for (int b = 0; b < blocks_; ++b)
        if (block_max_[b] >= bound)
          for (int32_t id = b * kBlock; id < std::min(vocab_, (b + 1) * kBlock); ++id)
            if (x_[id] >= bound) list_[n++] = id;
    }
    if (n <= k) return n;
    return keep_prefix(n, static_cast<uint64_t>(k), [](int32_t) { return uint64_t{1}; });
  }

  int32_t keep_mass(int32_t n, float top_p) {
    const uint64_t total = total_weight(n);
    const double wanted = std::ceil(static_cast<double>(top_p) * static_cast<double>(total));
    const uint64_t target = std::clamp<uint64_t>(static_cast<uint64_t>(wanted), 1, total);
    // All ids of at most this weight together weigh no more than what may be left out.
    const uint64_t light = (total - target) / static_cast<uint64_t>(vocab_);
    n = keep_if(n, [&](int32_t id) { return weight_[id] > light; });
    return keep_prefix(n, target, [&](int32_t id) { return uint64_t{weight_[id]}; });
  }

  int32_t keep_heavy(int32_t n, float min_p) {
    const double least = static_cast<double>(min_p) * 0x1p30;
    return keep_if(n, [&](int32_t id) { return static_cast<double>(weight_[id]) >= least; });
  }

  // The shortest prefix, in order of x and then of id, whose measure is at least `target` > 0 (it exists). A radix
  // select: descends through the bits of the order key, 11 + 11 + 10 of them, looking at the chosen bin's ids only.
  template <class F>
  int32_t keep_prefix(int32_t n, uint64_t target, F &&measure) {
    constexpr int kShift[] = {21, 10, 0}, kBits[] = {11, 11, 10};
    uint32_t prefix = 0;
    const int32_t *ids = list_;
    int32_t count = n;
    uint64_t missing = target;
    for (int level = 0; level < 3; ++level) {
      const uint32_t bins = 1u << kBits[level], mask = bins - 1;
      std::memset(bins_, 0, bins * sizeof *bins_);
      for (int32_t i = 0; i < count; ++i) bins_[order_key(x_[ids[i]]) >> kShift[level] & mask] += measure(ids[i]);
      uint32_t bin = mask;
      while (bins_[bin] < missing) missing -= bins_[bin--];
      prefix |= bin << kShift[level];
      int32_t inside = 0;
      for (int32_t i = 0; i < count; ++i) {
        const int32_t id = ids[i];
        other_[inside] = id;
        inside += (order_key(x_[id]) >> kShift[level]) == (prefix >> kShift[level]);
      }
      ids = other_;
      count = inside;
    }
    // Of the ids with the border's logit the lowest, until nothing is missing.
    int32_t last = -1;
    for (int32_t i = 0; i < count && missing > 0; ++i) {
      last = ids[i];
      missing -= std::min(missing, measure(last));
    }
    return keep_if(n, [&](int32_t id) {
      const uint32_t key = order_key(x_[id]);
      return (key > prefix) | ((key == prefix) & (id <= last));
    });
  }

  static uint64_t aim(double random, uint64_t total) {
    return std::min(static_cast<uint64_t>(random * static_cast<double>(total)), total - 1);
  }

  // The first id whose cumulative weight exceeds `random` of the total.
  int32_t invert_all(double random) const {
    uint64_t left = aim(random, total_weight(kEverything));
    int b = 0;
    while (block_weight_[b] <= left) left -= block_weight_[b++];
    int32_t id = b * kBlock;
    while (weight_[id] <= left) left -= weight_[id++];
    return id;
  }
  int32_t invert_list(int32_t n, double random) const {
    uint64_t left = aim(random, total_weight(n));
    int32_t i = 0;
    while (weight_[list_[i]] <= left) left -= weight_[list_[i++]];
    return list_[i];
  }

  const float *logits_;
  const int32_t vocab_, blocks_;
  uint64_t *block_weight_, *bins_;
  float *x_, *block_max_, *maxima_;
  uint32_t *weight_;
  int32_t *list_, *other_;
};

// `count` ids within the vocabulary.
inline bool ids_valid(const int32_t *ids, int32_t count, int32_t vocab) {
  if (count < 0 || (count > 0 && ids == nullptr)) return false;
  return std::all_of(ids, ids + count, [&](int32_t id) { return id >= 0 && id < vocab; });
}

inline bool sample_row_valid(const hopon_sample_row &row, int32_t vocab, int32_t max_top) {
  if (row.logits_row < 0 || row.forced < -1 || row.forced >= vocab) return false;
  if (!(row.temperature >= 0.0f && row.temperature <= FLT_MAX)) return false;
  if (!(row.top_p > 0.0f && row.top_p <= 1.0f) || !(row.min_p >= 0.0f && row.min_p <= 1.0f)) return false;
  if (row.num_top < 0 || row.num_top > max_top || row.num_top > vocab) return false;
  if (!ids_valid(row.banned, row.num_banned, vocab) || !ids_valid(row.biased, row.num_biased, vocab)) return false;
  if (!ids_valid(row.seen, row.num_seen, vocab)) return false;
  if (row.num_biased > 0 && row.biases == nullptr) return false;
  for (int32_t i = 0; i < row.num_biased; ++i)
    if (!std::isfinite(row.biases[i])) return false;
  if (row.num_seen == 0) return true;
  if (row.counts == nullptr || !(row.repetition > 0.0f && row.repetition <= FLT_MAX)) return false;
  return std::isfinite(row.frequency) && std::isfinite(row.presence);
}

}  // namespace hopon::HOPON_LEVEL
#endif
