// What linear layers and experts share at torch's boundary: packed weights, prepared activations, and which
// thread works on what.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <vector>

#include "kernels.h"
#include "ops.h"

namespace vllm_zen {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void check(const Tensor& tensor, const char* name, ScalarType type, int64_t dimensions,
                  const char* shape) {
  check_kind(tensor, name, type, dimensions, shape);
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
}

inline void check_x(const Tensor& x) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::BFloat16 || x.scalar_type() == ScalarType::Float,
                  "x must be bfloat16 or float32, got ", torch::headeronly::toString(x.scalar_type()));
}

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A packed weight, or those of all experts, one after the other.
struct PackedWeight {
  decltype(Kernels::linear_w8a8) kernel;
  Linear call{};  // weight, scale and offset, of the first expert
  int64_t experts = 1;
  int64_t blocks;
  int64_t padded_k;
  int64_t chunk;
  int64_t step;          // K was padded to a multiple of it
  int64_t act_bits = 8;  // of the activations it takes

  int64_t weight_bytes;  // from expert to expert
  int64_t scale_bytes;

  // A call on the activations of all experts, with the weight of one.
  Linear of_expert(const Linear& shared, int64_t expert) const {
    Linear one = shared;
    one.weight = call.weight + expert * weight_bytes;
    one.scale = static_cast<const char*>(call.scale) + expert * scale_bytes;
    one.scale_is_bf16 = call.scale_is_bf16;
    one.offset =
        call.offset == nullptr ? nullptr : static_cast<const char*>(call.offset) + expert * scale_bytes;
    return one;
  }

  // Whether the last dimension of x is this weight's K.
  void check_k(const Tensor& x) const {
    const int64_t k = x.size(x.dim() - 1);
    STD_TORCH_CHECK(k > 0, "x must have a K of at least 1, got 0");
    STD_TORCH_CHECK(k <= padded_k && padded_k - k < step, "x must have the weight's K, ", padded_k - step + 1,
                    " to ", padded_k, ", got ", k);
  }

  void check_columns(int64_t columns) const {
    STD_TORCH_CHECK(columns >= 0 && divide_up(columns, kColumns) == blocks, "columns must fill the weight's ",
                    blocks, " blocks of ", kColumns, ", got ", columns);
  }
};

// Operands as Int8Weight and Int4Weight of ops_linear.py hold them; with_experts: stacked.
PackedWeight packed_int8(const Tensor& weight, const Tensor& scale, bool with_experts);
PackedWeight packed_int4(const Tensor& weight, const Tensor& scale, const std::optional<Tensor>& offset,
                         int64_t act_bits, bool with_experts);

// The codes of x [rows, K], or its values in order, and what else a linear kernel wants of it. Owns the
// memory that `call` points to.
struct Prepared {
  Tensor rows;
  Tensor codes;
  Tensor sums_and_scales;  // 4 bytes each
  Activations to;

  Prepared(const Tensor& x, const PackedWeight& weight, bool rotate);
  int64_t rows_worth_a_thread() const;
  void run(const Kernels& kernels) const;
  void describe(Linear& call) const;
};

// Rows that one expert, or the only weight, works on.
struct RowRange {
  int64_t expert;
  int64_t begin, end;
};

// Appends [begin, end) in pieces that share a pass over the weights.
void append_pieces(std::vector<RowRange>& pieces, const RowRange& rows, const PackedWeight& weight);

// Runs the weights over the pieces on all threads. `call` has activations and output; bias [experts, blocks *
// 64], or null.
void run_on_threads(const Linear& call, const PackedWeight& weight, const float* bias,
                    const std::vector<RowRange>& pieces);

}  // namespace vllm_zen
