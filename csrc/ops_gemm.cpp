// Quantized linear layers at torch's boundary: schemas and argument checks.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <tuple>

#include "linear_call.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using vllm_zen::check;
using vllm_zen::divide_up;
using vllm_zen::kColumns;
using vllm_zen::Linear;
using vllm_zen::PackedWeight;

// x as rows: [..., K] with any strides that leave the last dimension contiguous in two dimensions.
Tensor as_rows(const Tensor& x, int64_t k) {
  if (x.dim() == 2 && (x.stride(1) == 1 || k == 1)) {
    return x;
  }
  return torch::stable::view(torch::stable::contiguous(x), {x.numel() / k, k});
}

// A bias of whole blocks of float32: the kernels read registers.
struct Bias {
  std::vector<float> padded;
  const float* data = nullptr;

  Bias(const std::optional<Tensor>& bias, int64_t columns) {
    if (!bias.has_value()) {
      return;
    }
    const bool is_bf16 = bias->scalar_type() == ScalarType::BFloat16;
    check(*bias, "bias", is_bf16 ? ScalarType::BFloat16 : ScalarType::Float, 1, "[columns]");
    STD_TORCH_CHECK(bias->size(0) == columns, "bias must have ", columns, " values, got ", bias->size(0));
    if (!is_bf16 && columns % kColumns == 0) {
      data = static_cast<const float*>(bias->data_ptr());
      return;
    }
    padded.assign(static_cast<size_t>(divide_up(columns, kColumns) * kColumns), 0.0f);
    if (is_bf16) {
      const auto* values = static_cast<const vllm_zen::bf16_t*>(bias->data_ptr());
      std::transform(values, values + columns, padded.begin(), [](vllm_zen::bf16_t value) {
        const uint32_t bits = static_cast<uint32_t>(value) << 16;
        float result;
        std::memcpy(&result, &bits, sizeof result);
        return result;
      });
    } else {
      const auto* values = static_cast<const float*>(bias->data_ptr());
      std::copy(values, values + columns, padded.begin());
    }
    data = padded.data();
  }
};

Tensor run(const Tensor& x, const PackedWeight& weight, const std::optional<Tensor>& bias, int64_t columns,
           bool rotate) {
  vllm_zen::check_x(x);
  STD_TORCH_CHECK(x.dim() >= 1, "x must be [..., K], got 0 dimensions");
  weight.check_k(x);
  weight.check_columns(columns);
  const int64_t k = x.size(x.dim() - 1);
  std::vector<int64_t> shape;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) {
    shape.push_back(x.size(i));
  }
  shape.push_back(columns);
  Tensor output = torch::stable::new_empty(x, shape, x.scalar_type());
  const Bias padded(bias, columns);
  if (output.numel() == 0) {
    return output;
  }
  const vllm_zen::Prepared prepared(as_rows(x, k), weight, rotate);
  prepared.run(vllm_zen::kernels());
  Linear call{};
  prepared.describe(call);
  call.output = output.data_ptr();
  call.output_is_bf16 = x.scalar_type() == ScalarType::BFloat16;
  call.output_stride = columns;
  call.columns = columns;
  std::vector<vllm_zen::RowRange> pieces;
  vllm_zen::append_pieces(pieces, {0, 0, call.rows}, weight);
  vllm_zen::run_on_threads(call, weight, padded.data, pieces);
  return output;
}

Tensor linear_w8a8(const Tensor& x, const Tensor& weight, const Tensor& scale,
                   const std::optional<Tensor>& bias, int64_t columns, bool rotate) {
  return run(x, vllm_zen::packed_int8(weight, scale, false), bias, columns, rotate);
}

Tensor linear_w4(const Tensor& x, const Tensor& weight, const Tensor& scale,
                 const std::optional<Tensor>& offset, const std::optional<Tensor>& bias, int64_t columns,
                 int64_t act_bits) {
  return run(x, vllm_zen::packed_int4(weight, scale, offset, act_bits, false), bias, columns, false);
}

std::tuple<Tensor, Tensor, Tensor> search_groups_s4(const Tensor& weight, int64_t group, bool with_offset,
                                                    double emphasis) {
  const bool is_bf16 = weight.scalar_type() == ScalarType::BFloat16;
  check(weight, "weight", is_bf16 ? ScalarType::BFloat16 : ScalarType::Float, 2, "[N, K]");
  STD_TORCH_CHECK(group == 32 || group == 64 || group == 128, "group must be 32, 64 or 128, got ", group);
  const int64_t rows = weight.size(0);
  const int64_t k = weight.size(1);
  const int64_t groups = divide_up(k, group);
  Tensor codes = torch::stable::new_empty(weight, {rows, k}, ScalarType::Byte);
  Tensor scale = torch::stable::new_empty(weight, {rows, groups}, ScalarType::BFloat16);
  Tensor offset = torch::stable::new_empty(weight, {with_offset ? rows : 0, groups}, ScalarType::BFloat16);
  vllm_zen::GroupSearch call;
  call.x = weight.data_ptr();
  call.x_is_bf16 = is_bf16;
  call.k = k;
  call.group = group;
  call.emphasis = static_cast<float>(emphasis);
  call.codes = static_cast<uint8_t*>(codes.data_ptr());
  call.scale = static_cast<vllm_zen::bf16_t*>(scale.data_ptr());
  call.offset = with_offset ? static_cast<vllm_zen::bf16_t*>(offset.data_ptr()) : nullptr;
  const vllm_zen::Kernels& kernels = vllm_zen::kernels();
  torch::stable::parallel_for(
      0, rows, 1, [&](int64_t begin, int64_t end) { kernels.search_groups_s4(call, begin, end); });
  return {codes, scale, offset};
}

Tensor embedding_w8(const Tensor& ids, const Tensor& weight, const Tensor& scale, int64_t k, bool bf16,
                    bool rotated) {
  check(weight, "weight", ScalarType::Byte, 4, "[blocks, K / 4, 64, 4]");
  check(scale, "scale", ScalarType::Float, 1, "[blocks * 64]");
  check(ids, "ids", ScalarType::Long, ids.dim(), "[...]");
  STD_TORCH_CHECK(
      weight.size(2) == kColumns && weight.size(3) == 4 && scale.size(0) == weight.size(0) * kColumns,
      "weight must be [blocks, K / 4, 64, 4] and scale [blocks * 64]");
  vllm_zen::RowsW8 call;
  call.k = k;
  call.padded_k = weight.size(1) * 4;
  STD_TORCH_CHECK(k <= call.padded_k && call.padded_k - k < 4, "k must be the weight's, up to ",
                  call.padded_k, ", got ", k);
  call.output_is_bf16 = bf16;
  call.rotated = rotated;
  std::vector<int64_t> shape;
  for (int64_t i = 0; i < ids.dim(); ++i) {
    shape.push_back(ids.size(i));
  }
  shape.push_back(k);
  Tensor output = torch::stable::new_empty(ids, shape, bf16 ? ScalarType::BFloat16 : ScalarType::Float);
  call.rows = static_cast<const int64_t*>(ids.data_ptr());
  for (int64_t i = 0; i < ids.numel(); ++i) {
    STD_TORCH_CHECK(call.rows[i] >= 0 && call.rows[i] < scale.size(0), "ids must be below ", scale.size(0),
                    ", got ", call.rows[i]);
  }
  call.weight = static_cast<const uint8_t*>(weight.data_ptr());
  call.scale = static_cast<const float*>(scale.data_ptr());
  call.output = output.data_ptr();
  const vllm_zen::Kernels& kernels = vllm_zen::kernels();
  // A row of 2048 is 512 lines from memory, as long as waking a thread.
  torch::stable::parallel_for(0, ids.numel(), 2,
                              [&](int64_t begin, int64_t end) { kernels.rows_w8(call, begin, end); });
  return output;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(vllm_zen, m) {
  m.def(
      "linear_w8a8(Tensor x, Tensor weight, Tensor scale, Tensor? bias, int columns, bool rotated=False) -> "
      "Tensor");
  m.def(
      "linear_w4(Tensor x, Tensor weight, Tensor scale, Tensor? offset, Tensor? bias, int columns, int "
      "act_bits=8) -> Tensor");
  m.def(
      "search_groups_s4(Tensor weight, int group, bool with_offset, float emphasis) -> (Tensor, Tensor, "
      "Tensor)");
  m.def(
      "embedding_w8(Tensor ids, Tensor weight, Tensor scale, int k, bool bf16, bool rotated=False) -> "
      "Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_zen, CPU, m) {
  m.impl("linear_w8a8", TORCH_BOX(&linear_w8a8));
  m.impl("linear_w4", TORCH_BOX(&linear_w4));
  m.impl("search_groups_s4", TORCH_BOX(&search_groups_s4));
  m.impl("embedding_w8", TORCH_BOX(&embedding_w8));
}
