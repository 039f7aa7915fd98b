// Who computes what in the attention of a step: tasks, the same for every layer. Knows no kernels.
//
// The rows of a task read K and V together. They are neighbours of one segment, or decodes of several sequences whose block
// tables agree over whole splits, as behind a common prefix (Hydragen: Juravsky et al. 2024, arXiv 2402.05099). A row that
// several tasks work on has a partial result per split, merged in ascending order afterwards, as one task alone would do it:
// which tasks there are changes no bit.
#ifndef HOPON_ATTENTION_PLAN_H
#define HOPON_ATTENTION_PLAN_H
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <type_traits>

#include "hopon.h"
#include "pool.h"
#include "simd.h"

namespace hopon::HOPON_LEVEL {

constexpr int kSplit = 256;  // tokens of a context that belong together, at absolute positions

// One unit of work: some rows, one KV head, splits [split, split_end) of their contexts.
struct AttentionTask {
  const int32_t *rows;  // tokens of the batch; within the task's splits no context is longer than the last one's
  int32_t num_rows, table, kv_head, split, split_end, owner;
  bool partial;  // results are partial ones; otherwise these are all the splits, and they go to the output
  int64_t cost;
};

class AttentionPlan {
 public:
  // position: [num_tokens]. The plan lives in memory of the pool until the next one.
  AttentionPlan(hopon_pool &pool, const hopon_model &model, const hopon_batch &batch, const int32_t *position,
                int rows_per_task)
      : model_(model), batch_(batch), position_(position), threads_(pool.threads()), most_rows_(rows_per_task) {
    int64_t splits = 0;
    for (int s = 0; s < batch.num_segments; ++s)
      for (int at = begin_of(s); at < begin_of(s + 1); at += most_rows_) {
        const int last = std::min(at + most_rows_, begin_of(s + 1)) - 1;
        splits += splits_of(context(last));
        cost_ += cost_of(last + 1 - at, context(last));
      }
    cost_ *= model.num_kv_heads;
    reserve(pool, splits);
    // Cutting and sharing pay where there is work for all.
    share_ = cost_ >= kInlineCost ? std::max<int64_t>(1, cost_ / (4 * threads_)) : INT64_MAX;
    if (cost_ >= kInlineCost && kSplit % model.block_size == 0) find_shared();
    for (int s = 0; s < batch.num_segments; ++s) {
      const int from = shared_[s];
      for (int at = begin_of(s); at < begin_of(s + 1); at += most_rows_) {
        const int n = std::min(most_rows_, begin_of(s + 1) - at);
        emit(batch.segment_table[s], rows_ + at, n, from, splits_of(context(at + n - 1)), from > 0);
      }
      if (leader_[s] == s && from > 0) emit_shared(s);
    }
    sort();
  }

  bool brief() const { return cost_ < kInlineCost; }  // waking the other workers costs more than it saves
  int64_t num_tasks() const { return num_tasks_; }
  const AttentionTask &task(int64_t i) const { return tasks_[i]; }
  // Those of a worker's share are the tasks [first(worker), first(worker + 1)), the longest first.
  int64_t first(int worker) const { return first_[worker]; }

  int context(int token) const { return position_[token] + 1; }
  static int splits_of(int length) { return (length + kSplit - 1) / kSplit; }

  // Rows with partial results, and where these are.
  int64_t num_cut() const { return num_cut_; }
  int cut_row(int64_t i) const { return cut_[i]; }
  int64_t num_partials() const { return num_partials_; }
  int64_t partial(int token, int kv_head, int split) const {
    return partial_of_[token] + int64_t{kv_head} * splits_of(context(token)) + split;
  }

 private:
  // Products of a score and of an output.
  static constexpr int64_t kInlineCost = 1 << 16;
  static constexpr int kRowsOfWorker = 8;  // at least, where rows are dealt out

  int begin_of(int segment) const { return batch_.segment_start[segment]; }
  const int32_t *table_of(int segment) const {
    return batch_.block_tables + batch_.segment_table[segment] * batch_.table_stride;
  }
  int64_t cost_of(int rows, int tokens) const {
    return int64_t{rows} * (model_.num_heads / model_.num_kv_heads) * tokens * model_.head_dim;
  }

  // `splits`: of all rows, as many tasks per KV head as there can be.
  void reserve(hopon_pool &pool, int64_t splits) {
    const size_t tokens = static_cast<size_t>(batch_.num_tokens), segments = static_cast<size_t>(batch_.num_segments);
    const size_t tasks = static_cast<size_t>(splits * model_.num_kv_heads), rows = tokens + static_cast<size_t>(splits);
    char *memory = static_cast<char *>(
        pool.reserve(kSlotTasks, tasks * sizeof(AttentionTask) + (threads_ + 1 + tokens) * sizeof(int64_t) +
                                     (rows + tokens + 2 * segments) * sizeof(int32_t)));
    auto take = [&](auto *&array, size_t size) {
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(memory);
      memory += size * sizeof(*array);
    };
    take(tasks_, tasks);
    take(first_, static_cast<size_t>(threads_) + 1);
    take(partial_of_, tokens);
    take(rows_, rows);
    take(cut_, tokens);
    take(leader_, segments);
    take(shared_, segments);
    std::fill_n(partial_of_, tokens, -1);
    std::iota(rows_, rows_ + tokens, 0);
    num_rows_ = static_cast<int64_t>(tokens);
    std::fill_n(leader_, segments, -1);
    std::fill_n(shared_, segments, 0);
  }

  // Finds decodes that begin with the same blocks. The first one of them leads; shared_: how many leading splits a follower
  // has from its leader, and the leader at most has from itself.
  void find_shared() {
    const int blocks = kSplit / model_.block_size;
    auto whole_splits = [&](int s) { return position_[begin_of(s)] / kSplit; };  // the row's own token left out
    for (int s = 0; s < batch_.num_segments; ++s) {
      if (begin_of(s + 1) - begin_of(s) > 1 || whole_splits(s) == 0) continue;
      leader_[s] = s;
      for (int other = 0; other < s; ++other) {
        if (leader_[other] != other || table_of(other)[0] != table_of(s)[0]) continue;
        const int most = std::min(whole_splits(s), whole_splits(other));
        const int same = static_cast<int>(
            std::mismatch(table_of(s), table_of(s) + most * blocks, table_of(other)).first - table_of(s)) / blocks;
        if (same == 0) continue;
        leader_[s] = other;
        shared_[s] = same;
        shared_[other] = std::max(shared_[other], same);
        break;
      }
    }
  }

  // Tasks for what the followers of a leader have from it.
  void emit_shared(int leader) {
    for (int from = 0, to; from < shared_[leader]; from = to) {
      int32_t *members = rows_ + num_rows_;
      int count = 0;
      to = shared_[leader];
      for (int s = leader; s < batch_.num_segments; ++s) {
        if (leader_[s] != leader || shared_[s] <= from) continue;
        members[count++] = begin_of(s);
        to = std::min(to, shared_[s]);
      }
      num_rows_ += count;
      const int groups = (count + most_rows_ - 1) / most_rows_;
      for (int group = 0; group < groups; ++group) {
        const int first = count * group / groups, end = count * (group + 1) / groups;
        emit(batch_.segment_table[leader], members + first, end - first, from, to, true);
      }
    }
  }

  // Tasks of some rows for the splits [from, to): several for each KV head where whole ones would leave workers idle.
  void emit(int32_t table, const int32_t *rows, int n, int from, int to, bool partial) {
    const int length = context(rows[n - 1]);
    auto cost = [&](int first, int end) { return cost_of(n, std::min(length, end * kSplit) - first * kSplit); };
    int pieces = 1;
    if (threads_ > 1) pieces = static_cast<int>(std::min<int64_t>(to - from, (cost(from, to) - 1) / share_ + 1));
    partial = partial || pieces > 1;
    for (int r = 0; partial && r < n; ++r) {
      if (partial_of_[rows[r]] >= 0) continue;
      partial_of_[rows[r]] = num_partials_;
      num_partials_ += int64_t{model_.num_kv_heads} * splits_of(context(rows[r]));
      cut_[num_cut_++] = rows[r];
    }
    // Rows belong to the worker who works on them in the other ops, where there are enough to deal them out.
    const bool deal_rows = batch_.num_tokens >= kRowsOfWorker * threads_;
    const int64_t row_owner = (int64_t{rows[0] + 1} * threads_ - 1) / batch_.num_tokens;
    for (int h = 0; h < model_.num_kv_heads; ++h)
      for (int piece = 0; piece < pieces; ++piece) {
        const int first = from + (to - from) * piece / pieces, end = from + (to - from) * (piece + 1) / pieces;
        const int owner = static_cast<int>(deal_rows ? row_owner : num_tasks_ % threads_);
        tasks_[num_tasks_++] = {rows, n, table, h, first, end, owner, partial, cost(first, end)};
      }
  }

  void sort() {
    std::sort(tasks_, tasks_ + num_tasks_, [](const AttentionTask &a, const AttentionTask &b) {
      return a.owner != b.owner ? a.owner < b.owner : a.cost > b.cost;
    });
    for (int64_t owner = 0, i = 0; owner <= threads_; ++owner) {
      while (i < num_tasks_ && tasks_[i].owner < owner) ++i;
      first_[owner] = i;
    }
  }

  const hopon_model &model_;
  const hopon_batch &batch_;
  const int32_t *position_;
  const int threads_, most_rows_;
  int64_t cost_ = 0, share_ = 0, num_tasks_ = 0, num_rows_ = 0, num_cut_ = 0, num_partials_ = 0;
  AttentionTask *tasks_ = nullptr;
  int64_t *first_ = nullptr, *partial_of_ = nullptr;
  int32_t *rows_ = nullptr, *cut_ = nullptr, *leader_ = nullptr, *shared_ = nullptr;
};

}  // namespace hopon::HOPON_LEVEL
#endif
