// The contract between the boundary (ops.cpp) and the loops (*.inc): plain pointers and sizes, no torch.
//
// Every kernel works on a range of rows, so that ops.cpp decides how work is split over threads and a
// result never depends on the split.
#pragma once

#include <cstdint>

namespace vllm_zen {

// A bfloat16 as it lies in memory: sign, 8 bits of exponent, 7 of mantissa.
using bf16_t = uint16_t;

// A paged KV cache of one layer: blocks of block_size tokens, each [kv_heads][2][block_size * head_size],
// keys before values, in the layout that csrc/README.md draws.
struct KvCache {
  bf16_t* data;
  int64_t block_stride;  // elements from block to block
  int64_t blocks;
  int64_t block_size;  // a multiple of kKvTile
  int64_t kv_heads;
  int64_t head_size;  // a multiple of 16, up to kMaxHeadSize
};

// Tokens in a tile of the KV cache: keys of a tile lie side by side.
constexpr int64_t kKvTile = 32;
constexpr int64_t kMaxHeadSize = 256;
// Query rows (tokens times the query heads of one KV head) that a task works on. 96 rows keep scores,
// output and a chunk of keys and values within a 1 MiB L2 at head size 256, and make 16 groups of 6, the
// rows that fit in registers.
constexpr int64_t kMaxRows = 96;

// What all tasks of one attention call share.
struct Attention {
  const bf16_t* query;  // [tokens, heads, head_size], the last two contiguous
  int64_t query_stride;
  bf16_t* output;  // like query
  int64_t output_stride;
  KvCache cache;
  const int32_t* block_table;  // [sequences, block_table_stride]
  int64_t block_table_stride;
  int64_t heads;
  float scale;                // of the scores
  float soft_cap;             // 0: none
  int64_t window;             // tokens a query sees, itself included; 0: all
  const float* alibi_slopes;  // [heads], or null
  const float* sinks;         // [heads], or null
};

// Query tokens of one sequence against one span of its keys. Made once a step (ops_attention.cpp).
struct AttentionTask {
  int32_t sequence;
  int32_t first_token;  // row of the query
  int32_t tokens;       // tokens * heads / kv_heads <= kMaxRows
  int32_t position;     // of first_token in its sequence
  int32_t causal;       // 0: a token sees the whole sequence
  int32_t kv_begin;     // a multiple of kKvTile
  int32_t kv_end;
  int32_t span;     // which of the spans of these tokens
  int32_t spans;    // 1: the task writes the output; more: it writes partial results
  int32_t partial;  // of the first of these spans, in the buffer of partial results
};
constexpr int kTaskFields = 10;

// What a thread does at a time.
struct AttentionWork {
  const AttentionTask* task;  // null: nothing
  int64_t kv_head;
};

// Floats of the partial results of one task and KV head: rows of [head_size], maxima, sums.
constexpr int64_t partial_floats(int64_t rows, int64_t head_size) { return rows * (head_size + 2); }

// Bytes of scratch that attend() wants, aligned to 64.
constexpr int64_t kAttentionScratch = 256 * 1024;

// Columns of a packed weight that lie side by side (csrc/README.md draws the layouts).
constexpr int64_t kColumns = 64;
// Rows of a tile of a linear layer: 6 rows by 4 registers of sums leave 8 of 32 for weights and activations.
constexpr int64_t kTileRows = 6;
// Rows that share a pass over the weights: their sums, 64 KiB, and half a MiB of codes fit in L2.
constexpr int64_t kMaxLinearRows = 252;
// The largest group of int4 weights.
constexpr int64_t kMaxGroup = 128;
// Inputs of a chunk of int8 weights: 16 KiB of weights, half of L1, and few enough to share a scale.
constexpr int64_t kChunkW8 = 256;
// Bytes of scratch that linear_*() want, aligned to 64.
constexpr int64_t kLinearScratch = kMaxLinearRows * kColumns * 4;

// Rows to quantize to int8, symmetrically, one scale a row: x is about q * scale.
struct RowsS8 {
  const void* x;   // [rows, k], k contiguous
  bool x_is_bf16;  // else float32
  int64_t x_stride;
  int64_t k;
  bool rotate;   // first: as weights of activations that are rotated (rotate.inc)
  int8_t* q;     // [rows, k]
  float* scale;  // [rows]
};

// Rows of activations, and where their int8 codes go: chunk by chunk along K, in each all rows. A chunk of a
// row has its own scale, so that an outlier costs precision in its chunk only. With 16 bits they stay bf16.
struct Activations {
  const void* x;   // [rows, k], k contiguous
  bool x_is_bf16;  // else float32
  int64_t x_stride;
  int64_t rows;
  int64_t k;
  int64_t padded_k;    // of the packed weight, at least k: the codes between are 0
  int64_t chunk;       // k-values; a chunk that reaches beyond padded_k is filled with 0 too
  bool rotate;         // chunks of kChunkW8: each is rotated first (rotate.inc)
  int64_t act_bits;    // 8, or 16: bf16 in the order of nibble_pairs()
  int8_t* codes;       // [chunks, rows, chunk] of act_bits each
  int32_t* code_sums;  // [chunks, rows]; not with 16 bits
  float* scales;       // [chunks, rows]; NaN where the chunk holds a NaN or an infinity. 16 bits: its sum
};

// A linear layer over prepared activations.
struct Linear {
  const int8_t* codes;  // these three as in Activations, of the same chunk
  const int32_t* code_sums;
  const float* code_scales;
  int64_t rows;
  int64_t k;              // padded_k
  int64_t chunk;          // int4: the group
  const uint8_t* weight;  // w8a8: codes plus 128
  const void* scale;      // w8a8: float [blocks * 64]; int4: [blocks, groups, 64]
  bool scale_is_bf16;     // int4; else float32
  const void* offset;     // int4: like scale, what a code of 8 stands for; null: 0
  const float* bias;      // [blocks * 64], or null
  void* output;           // [rows, columns]
  bool output_is_bf16;    // else float32
  int64_t output_stride;
  int64_t columns;
};

// Rows of weights to quantize to int4, and where codes, scales and offsets go.
struct GroupSearch {
  const void* x;  // [rows, k]
  bool x_is_bf16;
  int64_t k;
  int64_t group;  // 32, 64 or 128; the last of a row may be short
  float emphasis;
  uint8_t* codes;  // [rows, k], 0 to 15
  bf16_t* scale;   // [rows, groups]; x is about scale * (code - 8) + offset
  bf16_t* offset;  // [rows, groups], or null: 0
};

// A packed int8 weight to look rows up in (linear_w8a8's).
struct RowsW8 {
  const uint8_t* weight;
  const float* scale;
  int64_t k, padded_k;
  bool rotated;         // the weight is, and is turned back
  const int64_t* rows;  // all valid
  void* output;         // [rows, k]
  bool output_is_bf16;
};

enum class Activation { kSilu, kGelu, kGeluTanh };

// What stands between the layers of an expert: activation(gate) * up, written over the gates.
struct Gate {
  void* rows;    // [rows, 2, k]: gates and ups
  bool is_bf16;  // else float32
  int64_t k;
  Activation activation;
};

// The results of a token's experts, weighted and added up.
struct Combine {
  const void* results;  // [pairs, columns]
  bool is_bf16;         // and the output; else float32
  int64_t columns;
  const float* weights;   // [tokens, top_k]
  const int64_t* row_of;  // [tokens, top_k]: row of results; -1: none
  int64_t top_k;
  void* output;  // [tokens, columns]
};

struct Kernels {
  // The name VLLM_ZEN_ISA takes.
  const char* isa;

  // Quantizes rows [begin, end). A row of zeros, or one so small that its scale would be subnormal, gives
  // q = 0 and scale = 0. A row that holds a NaN or an infinity gives q = 0 and scale = NaN: the fault stays
  // in its own row.
  void (*quantize_rows_s8)(const RowsS8& call, int64_t begin, int64_t end);

  // Writes keys and values of tokens [begin, end) and one KV head into the cache.
  //   key, value  [tokens, kv_heads, head_size], strides between tokens, the last two contiguous
  //   slots       [tokens]: block * block_size + place in the block, all valid; negative: not written
  void (*write_kv)(const KvCache& cache, const bf16_t* key, int64_t key_stride, const bf16_t* value,
                   int64_t value_stride, const int64_t* slots, int64_t begin, int64_t end, int64_t kv_head);

  // Attention of one task and KV head. With one span it writes bf16 output, with more its partial results
  // to `partial` (partial_floats). Returns false, having read nothing there, when the block table names a
  // block that does not exist. `following` is what this thread probably does next: its first keys are
  // fetched while this work ends, and nothing else depends on it.
  bool (*attend)(const Attention& call, const AttentionWork& work, const AttentionWork& following,
                 float* partial, void* scratch);

  // Merges the partial results of all spans of a task's tokens, stride floats apart, in their order, and
  // writes the output.
  void (*merge_spans)(const Attention& call, const AttentionTask& task, int64_t kv_head,
                      const float* partials, int64_t stride);

  // Rows [begin, end): a chunk of a row is quantized with the arithmetic of quantize_rows_s8, or put in
  // order.
  void (*prepare_activations)(const Activations& activations, int64_t begin, int64_t end);

  // Rows [row_begin, row_end), at most kMaxLinearRows, times blocks [block_begin, block_end) of 64 columns.
  // A row with a scale of NaN gives NaN, one of zeros the bias.
  void (*linear_w8a8)(const Linear& call, int64_t row_begin, int64_t row_end, int64_t block_begin,
                      int64_t block_end, void* scratch);
  void (*linear_w4a8)(const Linear& call, int64_t row_begin, int64_t row_end, int64_t block_begin,
                      int64_t block_end, void* scratch);
  void (*linear_w4a16)(const Linear& call, int64_t row_begin, int64_t row_end, int64_t block_begin,
                       int64_t block_end, void* scratch);

  // Quantizes rows [begin, end) with the scales that make the weighted error small (search_s4.inc).
  void (*search_groups_s4)(const GroupSearch& search, int64_t begin, int64_t end);

  // Dequantizes output rows [begin, end).
  void (*rows_w8)(const RowsW8& lookup, int64_t begin, int64_t end);

  // Rows [begin, end); values are computed in float32.
  void (*gate)(const Gate& call, int64_t begin, int64_t end);

  // Tokens [begin, end); added in float32 in the order of a token's choices.
  void (*combine)(const Combine& call, int64_t begin, int64_t end);
};

// The tables. One a file isa_*.cpp; only those this build can compile are defined.
extern const Kernels kernels_ref;
#if defined(__x86_64__)
extern const Kernels kernels_zen4;
#endif

// The table of this process: the best this CPU can run, or the one VLLM_ZEN_ISA names.
// Throws std::runtime_error when VLLM_ZEN_ISA names a table that is unknown or that this CPU cannot run.
const Kernels& kernels();

// Replaces the table for the rest of the process. For tests and benchmarks, which compare tables.
// Throws like kernels(), and then changes nothing.
void force_isa(const char* name);

}  // namespace vllm_zen
