// Quantized linear layers at torch's boundary: schemas, argument checks, and which thread works on what.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "kernels.h"
#include "ops.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using vllm_zen::kColumns;
using vllm_zen::Linear;

using LinearKernel = decltype(vllm_zen::Kernels::linear_w8a8);

void check(const Tensor& tensor, const char* name, ScalarType type, int64_t dimensions, const char* shape) {
  vllm_zen::check_kind(tensor, name, type, dimensions, shape);
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// x as rows: [..., K] with any strides that leave the last dimension contiguous in two dimensions.
Tensor as_rows(const Tensor& x, int64_t k) {
  if (x.dim() == 2 && (x.stride(1) == 1 || k == 1)) {
    return x;
  }
  return torch::stable::view(torch::stable::contiguous(x), {x.numel() / k, k});
}

// The codes of x and what else a linear kernel wants of it. Owns the memory that `call` points to.
struct Quantized {
  Tensor rows;
  Tensor codes;
  Tensor sums_and_scales;  // 4 bytes each
  vllm_zen::Activations to;

  Quantized(const Tensor& x, int64_t padded_k, int64_t chunk, bool rotate) : rows(x) {
    const int64_t parts = divide_up(padded_k, chunk) * x.size(0);
    codes = torch::stable::new_empty(x, {parts * chunk}, ScalarType::Char);
    sums_and_scales = torch::stable::new_empty(x, {2 * parts}, ScalarType::Float);
    to.x = x.data_ptr();
    to.x_is_bf16 = x.scalar_type() == ScalarType::BFloat16;
    to.x_stride = x.stride(0);
    to.rows = x.size(0);
    to.k = x.size(1);
    to.padded_k = padded_k;
    to.chunk = chunk;
    to.rotate = rotate;
    to.codes = static_cast<int8_t*>(codes.data_ptr());
    to.scales = static_cast<float*>(sums_and_scales.data_ptr());
    to.code_sums = reinterpret_cast<int32_t*>(to.scales + parts);
  }

  void run(const vllm_zen::Kernels& kernels) const {
    // One core quantizes 64 KiB in about the time that waking another takes.
    constexpr int64_t kValuesWorthAThread = 32 * 1024;
    const int64_t grain = std::max<int64_t>(1, kValuesWorthAThread / std::max<int64_t>(to.k, 1));
    torch::stable::parallel_for(
        0, to.rows, grain, [&](int64_t begin, int64_t end) { kernels.quantize_activations(to, begin, end); });
  }

  void describe(Linear& call) const {
    call.codes = to.codes;
    call.code_sums = to.code_sums;
    call.code_scales = to.scales;
    call.rows = to.rows;
    call.k = to.padded_k;
    call.chunk = to.chunk;
  }
};

// Hands out pieces of rows and blocks until none is left: a core that others slow down takes fewer.
void run_on_threads(const Linear& call, int64_t blocks, LinearKernel kernel) {
  // Rows of a piece: half a MiB of codes, half of L2, but enough that reading weights costs little.
  constexpr int64_t kCodeBytes = 512 * 1024;
  const int64_t most =
      std::clamp<int64_t>(kCodeBytes / std::max<int64_t>(call.k, 1), 48, vllm_zen::kMaxLinearRows);
  const int64_t row_pieces = divide_up(call.rows, most);
  const int64_t rows = divide_up(call.rows, std::max<int64_t>(row_pieces, 1));
  // Multiplications one core does while another wakes up, about 5 us.
  constexpr int64_t kWorthAThread = 512 * 1024;
  const int64_t work = call.rows * blocks * kColumns * call.k;
  const int64_t threads =
      std::clamp<int64_t>(work / kWorthAThread, 1, std::max<int64_t>(1, torch::stable::get_num_threads()));
  // Eight pieces a thread even out what the threads get; one piece streams through memory without a gap.
  const int64_t piece =
      threads == 1 ? std::max<int64_t>(blocks, 1) : std::max<int64_t>(1, blocks / (threads * 8));
  const int64_t block_pieces = divide_up(blocks, piece);
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      for (int64_t i = next++; i < row_pieces * block_pieces; i = next++) {
        const int64_t row = i / block_pieces * rows;
        const int64_t block = i % block_pieces * piece;
        kernel(call, row, std::min(row + rows, call.rows), block, std::min(block + piece, blocks),
               vllm_zen::thread_scratch<vllm_zen::kLinearScratch>());
      }
    }
  });
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

// [..., K] times a weight of `columns`, of which padded_k of K are packed. Checks x, and allocates the
// output.
Tensor output_of(const Tensor& x, int64_t columns, int64_t blocks, int64_t padded_k, int64_t step) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::BFloat16 || x.scalar_type() == ScalarType::Float,
                  "x must be bfloat16 or float32, got ", torch::headeronly::toString(x.scalar_type()));
  STD_TORCH_CHECK(x.dim() >= 1, "x must be [..., K], got 0 dimensions");
  const int64_t k = x.size(x.dim() - 1);
  STD_TORCH_CHECK(k > 0, "x must have a K of at least 1, got 0");
  STD_TORCH_CHECK(k <= padded_k && padded_k - k < step, "x must have the weight's K, ", padded_k - step + 1,
                  " to ", padded_k, ", got ", k);
  STD_TORCH_CHECK(columns >= 0 && divide_up(columns, kColumns) == blocks, "columns must fill the weight's ",
                  blocks, " blocks of ", kColumns, ", got ", columns);
  std::vector<int64_t> shape;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) {
    shape.push_back(x.size(i));
  }
  shape.push_back(columns);
  return torch::stable::new_empty(x, shape, x.scalar_type());
}

Tensor run(const Tensor& x, Linear& call, int64_t blocks, int64_t padded_k, int64_t chunk, int64_t step,
           int64_t columns, const std::optional<Tensor>& bias, bool rotate, LinearKernel kernel) {
  Tensor output = output_of(x, columns, blocks, padded_k, step);
  const Bias padded(bias, columns);
  if (output.numel() == 0) {
    return output;
  }
  const vllm_zen::Kernels& kernels = vllm_zen::kernels();
  const Quantized quantized(as_rows(x, x.size(x.dim() - 1)), padded_k, chunk, rotate);
  quantized.run(kernels);
  quantized.describe(call);
  call.bias = padded.data;
  call.output = output.data_ptr();
  call.output_is_bf16 = x.scalar_type() == ScalarType::BFloat16;
  call.output_stride = columns;
  call.columns = columns;
  run_on_threads(call, blocks, kernel);
  return output;
}

Tensor linear_w8a8(const Tensor& x, const Tensor& weight, const Tensor& scale,
                   const std::optional<Tensor>& bias, int64_t columns, bool rotate) {
  check(weight, "weight", ScalarType::Byte, 4, "[blocks, K / 4, 64, 4]");
  STD_TORCH_CHECK(weight.size(2) == kColumns && weight.size(3) == 4,
                  "weight must be [blocks, K / 4, 64, 4], got [.., ", weight.size(2), ", ", weight.size(3),
                  "]");
  const int64_t blocks = weight.size(0);
  check(scale, "scale", ScalarType::Float, 1, "[blocks * 64]");
  STD_TORCH_CHECK(scale.size(0) == blocks * kColumns, "scale must have ", blocks * kColumns, " values, got ",
                  scale.size(0));
  Linear call{};
  call.weight = static_cast<const uint8_t*>(weight.data_ptr());
  call.scale = scale.data_ptr();
  return run(x, call, blocks, weight.size(1) * 4, vllm_zen::kChunkW8, 4, columns, bias, rotate,
             vllm_zen::kernels().linear_w8a8);
}

Tensor linear_w4a8(const Tensor& x, const Tensor& weight, const Tensor& scale,
                   const std::optional<Tensor>& offset, const std::optional<Tensor>& bias, int64_t columns) {
  check(weight, "weight", ScalarType::Byte, 4, "[blocks, K / 8, 64, 4]");
  STD_TORCH_CHECK(weight.size(2) == kColumns && weight.size(3) == 4,
                  "weight must be [blocks, K / 8, 64, 4], got [.., ", weight.size(2), ", ", weight.size(3),
                  "]");
  const int64_t blocks = weight.size(0);
  const int64_t k = weight.size(1) * 8;
  const bool is_bf16 = scale.scalar_type() == ScalarType::BFloat16;
  check(scale, "scale", is_bf16 ? ScalarType::BFloat16 : ScalarType::Float, 3, "[blocks, groups, 64]");
  const int64_t groups = scale.size(1);
  const int64_t group = groups == 0 ? 0 : k / groups;
  STD_TORCH_CHECK(scale.size(0) == blocks && scale.size(2) == kColumns, "scale must be [", blocks,
                  ", groups, 64], got [", scale.size(0), ", ", groups, ", ", scale.size(2), "]");
  STD_TORCH_CHECK(k == group * groups && (group == 32 || group == 64 || group == 128 || k == 0),
                  "weight and scale must make groups of 32, 64 or 128, got ", groups, " groups of ", k,
                  " weights");
  if (offset.has_value()) {
    check(*offset, "offset", scale.scalar_type(), 3, "[blocks, groups, 64]");
    STD_TORCH_CHECK(offset->size(0) == blocks && offset->size(1) == groups && offset->size(2) == kColumns,
                    "offset must be [", blocks, ", ", groups, ", 64], got [", offset->size(0), ", ",
                    offset->size(1), ", ", offset->size(2), "]");
  }
  Linear call{};
  call.weight = static_cast<const uint8_t*>(weight.data_ptr());
  call.scale = scale.data_ptr();
  call.scale_is_bf16 = is_bf16;
  call.offset = offset.has_value() ? offset->data_ptr() : nullptr;
  return run(x, call, blocks, k, std::max<int64_t>(group, 8), std::max<int64_t>(group, 1), columns, bias,
             /*rotate=*/false, vllm_zen::kernels().linear_w4a8);
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
      "linear_w4a8(Tensor x, Tensor weight, Tensor scale, Tensor? offset, Tensor? bias, int columns) -> "
      "Tensor");
  m.def(
      "search_groups_s4(Tensor weight, int group, bool with_offset, float emphasis) -> (Tensor, Tensor, "
      "Tensor)");
  m.def(
      "embedding_w8(Tensor ids, Tensor weight, Tensor scale, int k, bool bf16, bool rotated=False) -> "
      "Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_zen, CPU, m) {
  m.impl("linear_w8a8", TORCH_BOX(&linear_w8a8));
  m.impl("linear_w4a8", TORCH_BOX(&linear_w4a8));
  m.impl("search_groups_s4", TORCH_BOX(&search_groups_s4));
  m.impl("embedding_w8", TORCH_BOX(&embedding_w8));
}
