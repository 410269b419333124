// Mixtures of experts at torch's boundary: which token goes to which expert, and both layers over all
// experts.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <string>

#include "linear_call.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using vllm_zen::check;
using vllm_zen::Linear;
using vllm_zen::PackedWeight;

// Tokens and their experts that are worked on at a time: what lies between the layers takes some 100 MiB.
constexpr int64_t kMaxPairs = 16 * 1024;

// int8 weights have one scale a column, int4 weights one a group.
PackedWeight packed(const Tensor& weight, const Tensor& scale, const std::optional<Tensor>& offset,
                    int64_t act_bits) {
  if (scale.dim() == 2) {
    STD_TORCH_CHECK(!offset.has_value(), "offset is for int4 weights; those of int8 have none");
    STD_TORCH_CHECK(act_bits == 8, "act_bits must be 8 for int8 weights, got ", act_bits);
    return vllm_zen::packed_int8(weight, scale, true);
  }
  return vllm_zen::packed_int4(weight, scale, offset, act_bits, true);
}

const float* checked_bias(const std::optional<Tensor>& bias, const PackedWeight& weight) {
  if (!bias.has_value()) {
    return nullptr;
  }
  check(*bias, "bias", ScalarType::Float, 2, "[E, blocks * 64]");
  STD_TORCH_CHECK(bias->size(0) == weight.experts && bias->size(1) == weight.blocks * vllm_zen::kColumns,
                  "bias must be [", weight.experts, ", ", weight.blocks * vllm_zen::kColumns, "], got [",
                  bias->size(0), ", ", bias->size(1), "]");
  return static_cast<const float*>(bias->data_ptr());
}

vllm_zen::Activation activation_of(const std::string& name) {
  if (name == "silu") {
    return vllm_zen::Activation::kSilu;
  }
  if (name == "gelu") {
    return vllm_zen::Activation::kGelu;
  }
  STD_TORCH_CHECK(name == "gelu_tanh", "activation must be silu, gelu or gelu_tanh, got ", name);
  return vllm_zen::Activation::kGeluTanh;
}

// Pairs of a token and an expert it chose, sorted by expert.
struct Pairs {
  std::vector<int64_t> token_of;  // by pair
  std::vector<int64_t> row_of;    // pair by choice, [tokens, top_k]; -1: of no expert here
  std::vector<vllm_zen::RowRange> ranges;

  Pairs(const int32_t* ids, int64_t tokens, int64_t top_k, int64_t experts) {
    std::vector<int64_t> next(static_cast<size_t>(experts) + 1);
    for (int64_t i = 0; i < tokens * top_k; ++i) {
      STD_TORCH_CHECK(ids[i] < experts, "topk_ids must be below ", experts, ", got ", ids[i]);
      if (ids[i] >= 0) {
        ++next[static_cast<size_t>(ids[i]) + 1];
      }
    }
    for (int64_t expert = 0; expert < experts; ++expert) {
      int64_t& end = next[static_cast<size_t>(expert) + 1];
      const int64_t begin = next[static_cast<size_t>(expert)];
      end += begin;
      if (end > begin) {
        ranges.push_back({expert, begin, end});
      }
    }
    token_of.resize(static_cast<size_t>(next.back()));
    row_of.assign(static_cast<size_t>(tokens * top_k), -1);
    for (int64_t i = 0; i < tokens * top_k; ++i) {
      if (ids[i] >= 0) {
        const int64_t row = next[static_cast<size_t>(ids[i])]++;
        token_of[static_cast<size_t>(row)] = i / top_k;
        row_of[static_cast<size_t>(i)] = row;
      }
    }
  }

  int64_t size() const { return static_cast<int64_t>(token_of.size()); }
};

// Codes of tokens copied to the pairs they are in.
void gather(const vllm_zen::Activations& from, const vllm_zen::Activations& to, const Pairs& pairs) {
  const int64_t chunks = vllm_zen::divide_up(from.padded_k, from.chunk);
  const int64_t bytes = from.chunk * from.act_bits / 8;
  constexpr int64_t kBytesWorthAThread = 64 * 1024;
  const int64_t grain = std::max<int64_t>(1, kBytesWorthAThread / std::max<int64_t>(from.padded_k, 1));
  torch::stable::parallel_for(0, to.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t source = chunk * from.rows + pairs.token_of[static_cast<size_t>(row)];
        const int64_t target = chunk * to.rows + row;
        std::memcpy(to.codes + target * bytes, from.codes + source * bytes, static_cast<size_t>(bytes));
        to.code_sums[target] = from.code_sums[source];
        to.scales[target] = from.scales[source];
      }
    }
  });
}

// Both layers of all experts.
struct Experts {
  PackedWeight w13, w2;
  const float* w13_bias;
  const float* w2_bias;
  vllm_zen::Activation activation;
  int64_t intermediate;
  bool rotated;

  // Rows of a layer's output, of x's type.
  Tensor layer(const vllm_zen::Prepared& input, const PackedWeight& weight, const float* bias,
               int64_t columns, const Pairs& pairs) const {
    Tensor output = torch::stable::new_empty(input.rows, {pairs.size(), columns}, input.rows.scalar_type());
    Linear call{};
    input.describe(call);
    call.output = output.data_ptr();
    call.output_is_bf16 = input.to.x_is_bf16;
    call.output_stride = columns;
    call.columns = columns;
    std::vector<vllm_zen::RowRange> pieces;
    for (const vllm_zen::RowRange& range : pairs.ranges) {
      vllm_zen::append_pieces(pieces, range, weight);
    }
    vllm_zen::run_on_threads(call, weight, bias, pieces);
    return output;
  }

  // The experts' results [pairs, K] of x [tokens, K].
  Tensor results(const Tensor& x, const Pairs& pairs) const {
    const vllm_zen::Kernels& kernels = vllm_zen::kernels();
    const vllm_zen::Prepared tokens(x, w13, rotated);
    tokens.run(kernels);
    const Tensor of_pairs = torch::stable::new_empty(x, {pairs.size(), 0}, x.scalar_type());
    vllm_zen::Prepared input(of_pairs, w13, rotated);
    gather(tokens.to, input.to, pairs);
    Tensor gate_up = layer(input, w13, w13_bias, 2 * intermediate, pairs);
    // The gated values take the place of the gates.
    const Tensor gated = torch::stable::narrow(gate_up, 1, 0, intermediate);
    const vllm_zen::Prepared hidden(gated, w2, rotated);
    const vllm_zen::Gate gate{gate_up.data_ptr(), hidden.to.x_is_bf16, intermediate, activation};
    torch::stable::parallel_for(0, pairs.size(), hidden.rows_worth_a_thread(),
                                [&](int64_t begin, int64_t end) {
                                  kernels.gate(gate, begin, end);
                                  kernels.prepare_activations(hidden.to, begin, end);
                                });
    return layer(hidden, w2, w2_bias, x.size(1), pairs);
  }

  // Output [tokens, K] of x [tokens, K].
  void run(const Tensor& x, const float* weights, const int32_t* ids, int64_t top_k, void* output) const {
    const Pairs pairs(ids, x.size(0), top_k, w13.experts);
    const Tensor of_pairs = results(x, pairs);
    const bool is_bf16 = x.scalar_type() == ScalarType::BFloat16;
    const vllm_zen::Combine combine{of_pairs.data_ptr(), is_bf16, x.size(1), weights,
                                    pairs.row_of.data(), top_k,   output};
    constexpr int64_t kValuesWorthAThread = 64 * 1024;
    const int64_t grain = std::max<int64_t>(1, kValuesWorthAThread / std::max<int64_t>(x.size(1) * top_k, 1));
    torch::stable::parallel_for(0, x.size(0), grain, [&](int64_t begin, int64_t end) {
      vllm_zen::kernels().combine(combine, begin, end);
    });
  }
};

Tensor moe(const Tensor& x, const Tensor& w13, const Tensor& w13_scale,
           const std::optional<Tensor>& w13_offset, const std::optional<Tensor>& w13_bias, const Tensor& w2,
           const Tensor& w2_scale, const std::optional<Tensor>& w2_offset,
           const std::optional<Tensor>& w2_bias, const Tensor& topk_weights, const Tensor& topk_ids,
           int64_t intermediate, std::string activation, bool rotated, int64_t act_bits) {
  vllm_zen::check_x(x);
  STD_TORCH_CHECK(x.dim() == 2, "x must be [tokens, K], got ", x.dim(), " dimensions");
  check(x, "x", x.scalar_type(), 2, "[tokens, K]");
  const int64_t tokens = x.size(0);
  const int64_t hidden = x.size(1);
  Experts experts{packed(w13, w13_scale, w13_offset, act_bits),
                  packed(w2, w2_scale, w2_offset, act_bits),
                  nullptr,
                  nullptr,
                  activation_of(activation),
                  intermediate,
                  rotated};
  experts.w13_bias = checked_bias(w13_bias, experts.w13);
  experts.w2_bias = checked_bias(w2_bias, experts.w2);
  experts.w13.check_k(x);
  experts.w13.check_columns(2 * intermediate);
  experts.w2.check_columns(hidden);
  STD_TORCH_CHECK(experts.w13.experts == experts.w2.experts, "w13 and w2 must be of as many experts, got ",
                  experts.w13.experts, " and ", experts.w2.experts);
  STD_TORCH_CHECK(intermediate >= 1 && intermediate <= experts.w2.padded_k &&
                      experts.w2.padded_k - intermediate < experts.w2.step,
                  "intermediate must be the K of w2, up to ", experts.w2.padded_k, ", got ", intermediate);
  check(topk_weights, "topk_weights", ScalarType::Float, 2, "[tokens, top_k]");
  check(topk_ids, "topk_ids", ScalarType::Int, 2, "[tokens, top_k]");
  const int64_t top_k = topk_ids.size(1);
  STD_TORCH_CHECK(
      topk_weights.size(0) == tokens && topk_ids.size(0) == tokens && topk_weights.size(1) == top_k,
      "topk_weights and topk_ids must be [", tokens, ", top_k], got [", topk_weights.size(0), ", ",
      topk_weights.size(1), "] and [", topk_ids.size(0), ", ", top_k, "]");
  Tensor output = torch::stable::new_empty(x, {tokens, hidden}, x.scalar_type());
  const int64_t most = std::max<int64_t>(1, kMaxPairs / std::max<int64_t>(top_k, 1));
  const int64_t row_bytes = hidden * (x.scalar_type() == ScalarType::BFloat16 ? 2 : 4);
  for (int64_t begin = 0; begin < tokens; begin += most) {
    const int64_t count = std::min(most, tokens - begin);
    Tensor all = x;  // narrow() takes no constant
    experts.run(torch::stable::narrow(all, 0, begin, count),
                static_cast<const float*>(topk_weights.data_ptr()) + begin * top_k,
                static_cast<const int32_t*>(topk_ids.data_ptr()) + begin * top_k, top_k,
                static_cast<char*>(output.data_ptr()) + begin * row_bytes);
  }
  return output;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_zen, m) {
  m.def(
      "moe(Tensor x, Tensor w13, Tensor w13_scale, Tensor? w13_offset, Tensor? w13_bias, Tensor w2, Tensor "
      "w2_scale, Tensor? w2_offset, Tensor? w2_bias, Tensor topk_weights, Tensor topk_ids, int intermediate, "
      "str activation, bool rotated=False, int act_bits=8) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_zen, CPU, m) { m.impl("moe", TORCH_BOX(&moe)); }
