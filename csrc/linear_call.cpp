// Packed weights checked, activations prepared, and work handed out to threads.
#include "linear_call.h"

namespace vllm_zen {

namespace {

// Size `dimension` of an operand, after the experts.
int64_t size_of(const Tensor& tensor, bool with_experts, int64_t dimension) {
  return tensor.size(dimension + (with_experts ? 1 : 0));
}

PackedWeight packed(const Tensor& weight, bool with_experts, const char* shape) {
  check(weight, "weight", ScalarType::Byte, with_experts ? 5 : 4, shape);
  STD_TORCH_CHECK(size_of(weight, with_experts, 2) == kColumns && size_of(weight, with_experts, 3) == 4,
                  "weight must be ", shape, ", got [.., ", size_of(weight, with_experts, 2), ", ",
                  size_of(weight, with_experts, 3), "]");
  PackedWeight result;
  result.experts = with_experts ? weight.size(0) : 1;
  result.blocks = size_of(weight, with_experts, 0);
  result.call.weight = static_cast<const uint8_t*>(weight.data_ptr());
  result.weight_bytes = result.experts == 0 ? 0 : weight.numel() / result.experts;
  return result;
}

// Scales or offsets of groups.
void check_grouped(const Tensor& tensor, const char* name, ScalarType type, const PackedWeight& weight,
                   int64_t groups, bool with_experts) {
  check(tensor, name, type, with_experts ? 4 : 3,
        with_experts ? "[E, blocks, groups, 64]" : "[blocks, groups, 64]");
  STD_TORCH_CHECK((!with_experts || tensor.size(0) == weight.experts) &&
                      size_of(tensor, with_experts, 0) == weight.blocks &&
                      size_of(tensor, with_experts, 1) == groups &&
                      size_of(tensor, with_experts, 2) == kColumns,
                  name, " must be [", with_experts ? "E, " : "", weight.blocks, ", ", groups, ", 64], got [",
                  with_experts ? ".., " : "", size_of(tensor, with_experts, 0), ", ",
                  size_of(tensor, with_experts, 1), ", ", size_of(tensor, with_experts, 2), "]");
}

}  // namespace

PackedWeight packed_int8(const Tensor& weight, const Tensor& scale, bool with_experts) {
  PackedWeight result =
      packed(weight, with_experts, with_experts ? "[E, blocks, K / 4, 64, 4]" : "[blocks, K / 4, 64, 4]");
  check(scale, "scale", ScalarType::Float, with_experts ? 2 : 1,
        with_experts ? "[E, blocks * 64]" : "[blocks * 64]");
  const int64_t scales = result.blocks * kColumns;
  STD_TORCH_CHECK(scale.numel() == result.experts * scales && size_of(scale, with_experts, 0) == scales,
                  "scale must have ", scales, " values of each weight, got ", scale.numel(), " for ",
                  result.experts);
  result.kernel = kernels().linear_w8a8;
  result.padded_k = size_of(weight, with_experts, 1) * 4;
  result.chunk = kChunkW8;
  result.step = 4;
  result.call.scale = scale.data_ptr();
  result.scale_bytes = scales * 4;
  return result;
}

PackedWeight packed_int4(const Tensor& weight, const Tensor& scale, const std::optional<Tensor>& offset,
                         int64_t act_bits, bool with_experts) {
  PackedWeight result =
      packed(weight, with_experts, with_experts ? "[E, blocks, K / 8, 64, 4]" : "[blocks, K / 8, 64, 4]");
  const bool is_bf16 = scale.scalar_type() == ScalarType::BFloat16;
  const int64_t k = size_of(weight, with_experts, 1) * 8;
  const int64_t groups = scale.dim() == (with_experts ? 4 : 3) ? size_of(scale, with_experts, 1) : 0;
  const int64_t group = groups == 0 ? 0 : k / groups;
  check_grouped(scale, "scale", is_bf16 ? ScalarType::BFloat16 : ScalarType::Float, result, groups,
                with_experts);
  STD_TORCH_CHECK(k == group * groups && (group == 32 || group == 64 || group == 128 || k == 0),
                  "weight and scale must make groups of 32, 64 or 128, got ", groups, " groups of ", k,
                  " weights");
  if (offset.has_value()) {
    check_grouped(*offset, "offset", scale.scalar_type(), result, groups, with_experts);
  }
  STD_TORCH_CHECK(act_bits == 8 || act_bits == 16, "act_bits must be 8 or 16, got ", act_bits);
  result.act_bits = act_bits;
  result.kernel = act_bits == 8 ? kernels().linear_w4a8 : kernels().linear_w4a16;
  result.padded_k = k;
  result.chunk = std::max<int64_t>(group, 8);
  result.step = std::max<int64_t>(group, 1);
  result.call.scale = scale.data_ptr();
  result.call.scale_is_bf16 = is_bf16;
  result.call.offset = offset.has_value() ? offset->data_ptr() : nullptr;
  result.scale_bytes = result.blocks * groups * kColumns * (is_bf16 ? 2 : 4);
  return result;
}

Prepared::Prepared(const Tensor& x, const PackedWeight& weight, bool rotate) : rows(x) {
  const int64_t parts = divide_up(weight.padded_k, weight.chunk) * x.size(0);
  codes = torch::stable::new_empty(x, {parts * weight.chunk * (weight.act_bits / 8)}, ScalarType::Char);
  sums_and_scales = torch::stable::new_empty(x, {2 * parts}, ScalarType::Float);
  to.x = x.data_ptr();
  to.x_is_bf16 = x.scalar_type() == ScalarType::BFloat16;
  to.x_stride = x.stride(0);
  to.rows = x.size(0);
  to.k = x.size(1);
  to.padded_k = weight.padded_k;
  to.chunk = weight.chunk;
  to.rotate = rotate;
  to.act_bits = weight.act_bits;
  to.codes = static_cast<int8_t*>(codes.data_ptr());
  to.scales = static_cast<float*>(sums_and_scales.data_ptr());
  to.code_sums = reinterpret_cast<int32_t*>(to.scales + parts);
}

int64_t Prepared::rows_worth_a_thread() const {
  // One core prepares 64 KiB in about the time that waking another takes.
  constexpr int64_t kValuesWorthAThread = 32 * 1024;
  return std::max<int64_t>(1, kValuesWorthAThread / std::max<int64_t>(to.k, 1));
}

void Prepared::run(const Kernels& kernels) const {
  torch::stable::parallel_for(0, to.rows, rows_worth_a_thread(), [&](int64_t begin, int64_t end) {
    kernels.prepare_activations(to, begin, end);
  });
}

void Prepared::describe(Linear& call) const {
  call.codes = to.codes;
  call.code_sums = to.code_sums;
  call.code_scales = to.scales;
  call.rows = to.rows;
  call.k = to.padded_k;
  call.chunk = to.chunk;
}

void append_pieces(std::vector<RowRange>& pieces, const RowRange& rows, const PackedWeight& weight) {
  // Rows of a piece: half a MiB of codes, half of L2, but enough that reading weights costs little.
  constexpr int64_t kCodeBytes = 512 * 1024;
  const int64_t row_bytes = std::max<int64_t>(weight.padded_k * weight.act_bits / 8, 1);
  const int64_t most = std::clamp<int64_t>(kCodeBytes / row_bytes, 48, kMaxLinearRows);
  const int64_t count = rows.end - rows.begin;
  const int64_t each = divide_up(count, std::max<int64_t>(divide_up(count, most), 1));
  for (int64_t begin = rows.begin; begin < rows.end; begin += each) {
    pieces.push_back({rows.expert, begin, std::min(begin + each, rows.end)});
  }
}

// Hands out pieces of rows and blocks until none is left: a core that others slow down takes fewer.
void run_on_threads(const Linear& call, const PackedWeight& weight, const float* bias,
                    const std::vector<RowRange>& pieces) {
  const auto row_pieces = static_cast<int64_t>(pieces.size());
  // Multiplications one core does while another wakes up, about 5 us.
  constexpr int64_t kWorthAThread = 512 * 1024;
  const int64_t work = call.rows * weight.blocks * kColumns * call.k;
  const int64_t threads =
      std::clamp<int64_t>(work / kWorthAThread, 1, std::max<int64_t>(1, torch::stable::get_num_threads()));
  // Eight pieces a thread even out what the threads get; one piece streams through memory without a gap.
  // Experts are pieces already, of unequal size: 32 a thread in all.
  const int64_t even = threads * 8;
  const int64_t of_experts =
      std::clamp<int64_t>(divide_up(threads * 32, std::max<int64_t>(row_pieces, 1)), 1, even);
  const int64_t wanted = threads == 1 ? 1 : weight.experts == 1 ? even : of_experts;
  const int64_t piece = std::max<int64_t>(1, weight.blocks / wanted);
  const int64_t block_pieces = divide_up(weight.blocks, piece);
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      for (int64_t i = next++; i < row_pieces * block_pieces; i = next++) {
        const RowRange& rows = pieces[static_cast<size_t>(i / block_pieces)];
        const int64_t block = i % block_pieces * piece;
        Linear one = weight.of_expert(call, rows.expert);
        one.bias = bias == nullptr ? nullptr : bias + rows.expert * weight.blocks * kColumns;
        weight.kernel(one, rows.begin, rows.end, block, std::min(block + piece, weight.blocks),
                      thread_scratch<kLinearScratch>());
      }
    }
  });
}

}  // namespace vllm_zen
