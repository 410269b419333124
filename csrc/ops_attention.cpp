// Attention at torch's boundary: schemas, argument checks, and which thread works on what.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "kernels.h"
#include "ops.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using vllm_zen::Attention;
using vllm_zen::AttentionTask;
using vllm_zen::AttentionWork;
using vllm_zen::KvCache;

static_assert(sizeof(AttentionTask) == vllm_zen::kTaskFields * sizeof(int32_t));

void check(const Tensor& tensor, const char* name, ScalarType type, int64_t dimensions, const char* shape) {
  vllm_zen::check_kind(tensor, name, type, dimensions, shape);
  STD_TORCH_CHECK(tensor.size(dimensions - 1) <= 1 || tensor.stride(dimensions - 1) == 1, name,
                  ": the last dimension must be contiguous, got stride ", tensor.stride(dimensions - 1));
}

// [tokens, heads, head_size] whose heads lie side by side.
void check_heads(const Tensor& tensor, const char* name, int64_t head_size) {
  check(tensor, name, ScalarType::BFloat16, 3, "[tokens, heads, head_size]");
  STD_TORCH_CHECK(tensor.size(2) == head_size, name, " must have the cache's head size, ", head_size,
                  ", got ", tensor.size(2));
  STD_TORCH_CHECK(tensor.size(1) <= 1 || tensor.stride(1) == head_size, name,
                  ": the heads of a token must be contiguous, got stride ", tensor.stride(1));
}

KvCache kv_cache_of(const Tensor& tensor) {
  check(tensor, "kv_cache", ScalarType::BFloat16, 4, "[blocks, kv_heads, block_size, 2 * head_size]");
  KvCache cache;
  cache.data = static_cast<vllm_zen::bf16_t*>(tensor.data_ptr());
  cache.blocks = tensor.size(0);
  cache.kv_heads = tensor.size(1);
  cache.block_size = tensor.size(2);
  cache.head_size = tensor.size(3) / 2;
  cache.block_stride = tensor.stride(0);
  STD_TORCH_CHECK(cache.block_size > 0 && cache.block_size % vllm_zen::kKvTile == 0,
                  "kv_cache: the block size must be a multiple of ", vllm_zen::kKvTile, ", got ",
                  cache.block_size);
  STD_TORCH_CHECK(
      cache.head_size > 0 && tensor.size(3) % 32 == 0 && cache.head_size <= vllm_zen::kMaxHeadSize,
      "kv_cache: the head size must be a multiple of 16 up to ", vllm_zen::kMaxHeadSize, ", got ",
      cache.head_size);
  STD_TORCH_CHECK(tensor.stride(2) == 2 * cache.head_size &&
                      (cache.kv_heads <= 1 || tensor.stride(1) == cache.block_size * 2 * cache.head_size),
                  "kv_cache: a block must be contiguous, got strides ", tensor.stride(1), " and ",
                  tensor.stride(2));
  return cache;
}

void reshape_and_cache(const Tensor& key, const Tensor& value, const Tensor& kv_cache,
                       const Tensor& slot_mapping) {
  const KvCache cache = kv_cache_of(kv_cache);
  check_heads(key, "key", cache.head_size);
  check_heads(value, "value", cache.head_size);
  check(slot_mapping, "slot_mapping", ScalarType::Long, 1, "[tokens]");
  const int64_t tokens = slot_mapping.size(0);
  for (const Tensor* tensor : {&key, &value}) {
    STD_TORCH_CHECK(tensor->size(0) >= tokens && tensor->size(1) == cache.kv_heads,
                    "key and value must hold ", tokens, " tokens of ", cache.kv_heads, " heads, got ",
                    tensor->size(0), " of ", tensor->size(1));
  }
  const auto* slots = static_cast<const int64_t*>(slot_mapping.data_ptr());
  for (int64_t token = 0; token < tokens; ++token) {
    STD_TORCH_CHECK(slots[token] < cache.blocks * cache.block_size, "slot_mapping[", token, "] is ",
                    slots[token], ", the cache has ", cache.blocks * cache.block_size, " slots");
  }

  const auto* keys = static_cast<const vllm_zen::bf16_t*>(key.data_ptr());
  const auto* values = static_cast<const vllm_zen::bf16_t*>(value.data_ptr());
  const int64_t key_stride = key.stride(0);
  const int64_t value_stride = value.stride(0);
  // A token and head is about 0.2 us of scattered stores, and waking a thread 5 us.
  constexpr int64_t kWorthAThread = 64;
  const vllm_zen::Kernels& kernels = vllm_zen::kernels();
  torch::stable::parallel_for(0, tokens * cache.kv_heads, kWorthAThread, [&](int64_t begin, int64_t end) {
    // Head by head, so that a thread's stores to a tile follow each other.
    for (int64_t head = begin / std::max<int64_t>(tokens, 1); head * tokens < end; ++head) {
      const int64_t first = std::max(begin - head * tokens, int64_t{0});
      const int64_t last = std::min(end - head * tokens, tokens);
      kernels.write_kv(cache, keys, key_stride, values, value_stride, slots, first, last, head);
    }
  });
}

// What a task costs: a key is read once for all rows, which takes as long as about 12 rows compute with it
// (15 GB/s and 200 GFLOPS a core).
int64_t cost(int64_t rows, int64_t keys) { return (rows + 12) * keys; }

// One sequence's query tokens as tasks, each with all its keys.
void add_tiles(std::vector<AttentionTask>& tasks, int32_t sequence, int32_t first, int32_t tokens,
               int32_t length, bool causal, int64_t group, int64_t window) {
  const auto tokens_in_tile = static_cast<int32_t>(vllm_zen::kMaxRows / group);
  for (int32_t done = 0; done < tokens; done += tokens_in_tile) {
    AttentionTask task{};
    task.sequence = sequence;
    task.first_token = first + done;
    task.tokens = std::min(tokens_in_tile, tokens - done);
    task.position = length - tokens + done;
    task.causal = causal ? 1 : 0;
    if (window > 0) {
      const int64_t start = std::max<int64_t>(task.position + 1 - window, 0);
      task.kv_begin = static_cast<int32_t>(start / vllm_zen::kKvTile * vllm_zen::kKvTile);
    }
    task.kv_end = causal ? task.position + task.tokens : length;
    task.spans = 1;
    tasks.push_back(task);
  }
}

// Cuts tasks that are a large part of all work into spans of keys.
//
// From the shapes alone, not the number of threads, so that every number gives the same result. A 128th of
// the work is small enough for every socket; 512 keys are enough that the partial results are below 2 % of
// what is read.
std::vector<AttentionTask> cut(const std::vector<AttentionTask>& tiles, int64_t group, int64_t kv_heads) {
  constexpr int64_t kParts = 128;
  constexpr int64_t kLeastKeys = 512;
  int64_t total = 0;
  for (const AttentionTask& task : tiles) {
    total += cost(task.tokens * group, task.kv_end - task.kv_begin) * kv_heads;
  }
  std::vector<AttentionTask> tasks;
  int32_t partials = 0;
  for (const AttentionTask& tile : tiles) {
    const int64_t keys = tile.kv_end - tile.kv_begin;
    const int64_t by_cost = cost(tile.tokens * group, keys) * kParts / std::max<int64_t>(total, 1);
    const int64_t wanted = std::max<int64_t>(1, std::min(by_cost, keys / kLeastKeys));
    const int64_t step = ((keys + wanted - 1) / wanted + 127) / 128 * 128;
    const auto spans =
        static_cast<int32_t>(std::max<int64_t>(1, (keys + step - 1) / std::max<int64_t>(step, 1)));
    for (int32_t span = 0; span < spans; ++span) {
      AttentionTask task = tile;
      task.kv_begin = static_cast<int32_t>(tile.kv_begin + span * step);
      task.kv_end = static_cast<int32_t>(std::min<int64_t>(tile.kv_end, task.kv_begin + step));
      task.span = span;
      task.spans = spans;
      task.partial = partials;
      tasks.push_back(task);
    }
    partials += spans > 1 ? spans : 0;
  }
  return tasks;
}

Tensor plan_attention(const Tensor& query_start_loc, const Tensor& seq_lens, bool causal,
                      const std::optional<Tensor>& causal_of, int64_t heads, int64_t kv_heads,
                      int64_t window) {
  check(query_start_loc, "query_start_loc", ScalarType::Int, 1, "[sequences + 1]");
  check(seq_lens, "seq_lens", ScalarType::Int, 1, "[sequences]");
  const int64_t sequences = query_start_loc.size(0) - 1;
  STD_TORCH_CHECK(sequences >= 0 && seq_lens.size(0) >= sequences, "seq_lens must have ", sequences,
                  " lengths, got ", seq_lens.size(0));
  STD_TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0 && heads / kv_heads <= vllm_zen::kMaxRows,
                  "heads must be a multiple of kv_heads, at most ", vllm_zen::kMaxRows, " times it, got ",
                  heads, " and ", kv_heads);
  if (causal_of.has_value()) {
    check(*causal_of, "causal_of", ScalarType::Bool, 1, "[sequences]");
    STD_TORCH_CHECK(causal_of->size(0) >= sequences, "causal_of must have ", sequences, " values, got ",
                    causal_of->size(0));
  }
  const auto* starts = static_cast<const int32_t*>(query_start_loc.data_ptr());
  const auto* lengths = static_cast<const int32_t*>(seq_lens.data_ptr());
  const auto* causals = causal_of.has_value() ? static_cast<const bool*>(causal_of->data_ptr()) : nullptr;
  const int64_t group = heads / kv_heads;

  std::vector<AttentionTask> tiles;
  for (int64_t i = 0; i < sequences; ++i) {
    const int32_t tokens = starts[i + 1] - starts[i];
    STD_TORCH_CHECK(starts[i] >= 0 && tokens >= 0, "query_start_loc must not decrease, got ", starts[i],
                    " and ", starts[i + 1], " at ", i);
    STD_TORCH_CHECK(lengths[i] >= tokens, "seq_lens[", i, "] is ", lengths[i], ", less than its ", tokens,
                    " query tokens");
    add_tiles(tiles, static_cast<int32_t>(i), starts[i], tokens, lengths[i],
              causals == nullptr ? causal : causals[i], group, window);
  }
  std::vector<AttentionTask> tasks = cut(tiles, group, kv_heads);
  // The longest first: what is left at the end is short, so the threads finish together.
  std::stable_sort(tasks.begin(), tasks.end(), [&](const AttentionTask& a, const AttentionTask& b) {
    return cost(a.tokens * group, a.kv_end - a.kv_begin) > cost(b.tokens * group, b.kv_end - b.kv_begin);
  });
  Tensor plan = torch::stable::new_empty(
      query_start_loc, {static_cast<int64_t>(tasks.size()), vllm_zen::kTaskFields}, ScalarType::Int);
  std::copy(tasks.begin(), tasks.end(), static_cast<AttentionTask*>(plan.data_ptr()));
  return plan;
}

void check_task(const AttentionTask& task, int64_t tokens, int64_t sequences, int64_t group,
                const int32_t* lengths) {
  STD_TORCH_CHECK(task.sequence >= 0 && task.sequence < sequences, "tasks: sequence ", task.sequence,
                  " of a block table of ", sequences);
  STD_TORCH_CHECK(task.tokens > 0 && task.tokens * group <= vllm_zen::kMaxRows && task.first_token >= 0 &&
                      task.first_token + task.tokens <= tokens,
                  "tasks: query tokens ", task.first_token, " to ", task.first_token + task.tokens,
                  ", of which there are ", tokens);
  STD_TORCH_CHECK(task.kv_begin >= 0 && task.kv_begin % vllm_zen::kKvTile == 0 &&
                      task.kv_end <= lengths[task.sequence] && task.position >= 0,
                  "tasks: keys ", task.kv_begin, " to ", task.kv_end, " of a sequence of ",
                  lengths[task.sequence]);
  STD_TORCH_CHECK(task.spans > 0 && task.span >= 0 && task.span < task.spans && task.partial >= 0,
                  "tasks: span ", task.span, " of ", task.spans);
}

// Runs tasks from the front of the list on all threads, and merges spans as the last of each is done.
class Run {
 public:
  Run(const Attention& call, const AttentionTask* tasks, int64_t count)
      : call_(call), tasks_(tasks), count_(count), kv_heads_(call.cache.kv_heads) {
    int64_t slots = 0;
    int64_t rows = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (tasks[i].spans > 1) {
        slots = std::max<int64_t>(slots, tasks[i].partial + tasks[i].spans);
        rows = std::max<int64_t>(rows, tasks[i].tokens * (call.heads / kv_heads_));
      }
    }
    stride_ = vllm_zen::partial_floats(rows, call.cache.head_size);
    // Not a vector, which would write zeros to it first.
    partials_.reset(new float[static_cast<size_t>(slots * kv_heads_ * stride_)]);
    done_ = std::vector<std::atomic<int32_t>>(static_cast<size_t>(slots * kv_heads_));
  }

  // Returns a sequence whose block table names a block that does not exist, or -1.
  int64_t run(int64_t threads) {
    threads_ = threads;
    torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t worker = begin; worker < end; ++worker) {
        work();
      }
    });
    return bad_sequence_.load();
  }

 private:
  void work() {
    const vllm_zen::Kernels& kernels = vllm_zen::kernels();
    for (int64_t i = next_++; i < count_ * kv_heads_; i = next_++) {
      const AttentionWork work = work_at(i);
      const AttentionTask& task = *work.task;
      const int64_t head = work.kv_head;
      // Every other thread takes one meanwhile, where all are as long.
      const int64_t following = next_.load() + threads_ - 1;
      // The spans of a task and head lie stride_ * kv_heads_ apart.
      float* partials = partials_.get() + (task.partial * kv_heads_ + head) * stride_;
      float* mine = task.spans > 1 ? partials + task.span * kv_heads_ * stride_ : nullptr;
      if (!kernels.attend(call_, work, work_at(following), mine,
                          vllm_zen::thread_scratch<vllm_zen::kAttentionScratch>())) {
        bad_sequence_ = task.sequence;
        next_ = count_ * kv_heads_;
        return;
      }
      if (task.spans > 1 &&
          done_[static_cast<size_t>(task.partial * kv_heads_ + head)].fetch_add(1) + 1 == task.spans) {
        kernels.merge_spans(call_, task, head, partials, kv_heads_ * stride_);
      }
    }
  }

  AttentionWork work_at(int64_t index) const {
    const bool exists = index < count_ * kv_heads_;
    return {exists ? tasks_ + index / kv_heads_ : nullptr, index % kv_heads_};
  }

  const Attention& call_;
  const AttentionTask* tasks_;
  const int64_t count_;
  const int64_t kv_heads_;
  int64_t stride_ = 0;
  int64_t threads_ = 1;
  std::unique_ptr<float[]> partials_;
  std::vector<std::atomic<int32_t>> done_;
  std::atomic<int64_t> next_{0};
  std::atomic<int64_t> bad_sequence_{-1};
};

const float* per_head(const std::optional<Tensor>& tensor, const char* name, int64_t heads) {
  if (!tensor.has_value()) {
    return nullptr;
  }
  check(*tensor, name, ScalarType::Float, 1, "[heads]");
  STD_TORCH_CHECK(tensor->size(0) == heads, name, " must have ", heads, " values, got ", tensor->size(0));
  return static_cast<const float*>(tensor->data_ptr());
}

int64_t threads_worth_waking(const AttentionTask* tasks, int64_t count, int64_t kv_heads, int64_t group) {
  // Work of one row and 1,000 keys, about 5 us, for every thread that is woken in as long.
  constexpr int64_t kWorthAThread = 13 * 1024;
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    total += cost(tasks[i].tokens * group, tasks[i].kv_end - tasks[i].kv_begin) * kv_heads;
  }
  return std::max<int64_t>(
      1, std::min<int64_t>({torch::stable::get_num_threads(), count * kv_heads, total / kWorthAThread}));
}

void paged_attention(const Tensor& query, const Tensor& kv_cache, const Tensor& block_table,
                     const Tensor& seq_lens, const Tensor& tasks, Tensor output, double scale,
                     double soft_cap, int64_t window, const std::optional<Tensor>& alibi_slopes,
                     const std::optional<Tensor>& sinks) {
  Attention call;
  call.cache = kv_cache_of(kv_cache);
  check_heads(query, "query", call.cache.head_size);
  check_heads(output, "output", call.cache.head_size);
  call.heads = query.size(1);
  const int64_t kv_heads = call.cache.kv_heads;
  STD_TORCH_CHECK(kv_heads > 0 && call.heads % kv_heads == 0, "query must have a multiple of ", kv_heads,
                  " heads, got ", call.heads);
  STD_TORCH_CHECK(output.size(0) >= query.size(0) && output.size(1) == call.heads, "output must hold ",
                  query.size(0), " tokens of ", call.heads, " heads, got ", output.size(0), " of ",
                  output.size(1));
  check(block_table, "block_table", ScalarType::Int, 2, "[sequences, blocks]");
  check(seq_lens, "seq_lens", ScalarType::Int, 1, "[sequences]");
  check(tasks, "tasks", ScalarType::Int, 2, "[tasks, fields]");
  STD_TORCH_CHECK(tasks.size(1) == vllm_zen::kTaskFields && tasks.is_contiguous(),
                  "tasks must come from plan_attention, got ", tasks.size(1), " fields");
  const auto* lengths = static_cast<const int32_t*>(seq_lens.data_ptr());
  const int64_t sequences = std::min(block_table.size(0), seq_lens.size(0));
  for (int64_t i = 0; i < sequences; ++i) {
    STD_TORCH_CHECK(lengths[i] <= block_table.size(1) * call.cache.block_size, "seq_lens[", i, "] is ",
                    lengths[i], ", its ", block_table.size(1), " blocks hold ",
                    block_table.size(1) * call.cache.block_size);
  }
  const auto* list = static_cast<const AttentionTask*>(tasks.data_ptr());
  const int64_t group = call.heads / kv_heads;
  for (int64_t i = 0; i < tasks.size(0); ++i) {
    check_task(list[i], query.size(0), sequences, group, lengths);
  }

  call.query = static_cast<const vllm_zen::bf16_t*>(query.data_ptr());
  call.query_stride = query.stride(0);
  call.output = static_cast<vllm_zen::bf16_t*>(output.data_ptr());
  call.output_stride = output.stride(0);
  call.block_table = static_cast<const int32_t*>(block_table.data_ptr());
  call.block_table_stride = block_table.stride(0);
  call.scale = static_cast<float>(scale);
  call.soft_cap = static_cast<float>(soft_cap);
  call.window = window;
  call.alibi_slopes = per_head(alibi_slopes, "alibi_slopes", call.heads);
  call.sinks = per_head(sinks, "sinks", call.heads);
  const int64_t bad =
      Run(call, list, tasks.size(0)).run(threads_worth_waking(list, tasks.size(0), kv_heads, group));
  STD_TORCH_CHECK(bad < 0, "block_table[", bad, "] names a block that the cache of ", call.cache.blocks,
                  " blocks does not have");
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_zen, m) {
  m.def("reshape_and_cache(Tensor key, Tensor value, Tensor(a!) kv_cache, Tensor slot_mapping) -> ()");
  m.def(
      "plan_attention(Tensor query_start_loc, Tensor seq_lens, bool causal, Tensor? causal_of, int heads, "
      "int kv_heads, int window) -> Tensor");
  m.def(
      "paged_attention(Tensor query, Tensor kv_cache, Tensor block_table, Tensor seq_lens, Tensor tasks, "
      "Tensor(a!) output, float scale, float soft_cap, int window, Tensor? alibi_slopes, Tensor? sinks) -> "
      "()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_zen, CPU, m) {
  m.impl("reshape_and_cache", TORCH_BOX(&reshape_and_cache));
  m.impl("plan_attention", TORCH_BOX(&plan_attention));
  m.impl("paged_attention", TORCH_BOX(&paged_attention));
}
