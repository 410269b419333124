// With ops_attention.cpp the only files that know torch: schemas, argument checks, and the split of work over
// threads.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <string>
#include <tuple>

#include "kernels.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::string isa() { return vllm_zen::kernels().isa; }

void force_isa(std::string name) { vllm_zen::force_isa(name.c_str()); }

// Rows one thread should get at least: waking a thread costs about 5 us, in which one core reads about
// 64 KiB of activations.
int64_t rows_per_task(int64_t row_bytes) {
  constexpr int64_t kBytesWorthAThread = 64 * 1024;
  return row_bytes >= kBytesWorthAThread || row_bytes == 0 ? 1 : kBytesWorthAThread / row_bytes;
}

std::tuple<Tensor, Tensor> quantize_rows_s8(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 2, "quantize_rows_s8: x must be [M, K], got ", x.dim(), " dimensions");
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::BFloat16, "quantize_rows_s8: x must be bfloat16, got ",
                  torch::headeronly::toString(x.scalar_type()));
  const int64_t rows = x.size(0);
  const int64_t k = x.size(1);
  STD_TORCH_CHECK(x.stride(1) == 1 || k <= 1,
                  "quantize_rows_s8: the last dimension of x must be contiguous, got stride ", x.stride(1));

  Tensor q = torch::stable::new_empty(x, {rows, k}, ScalarType::Char);
  Tensor scale = torch::stable::new_empty(x, {rows}, ScalarType::Float);
  const auto* x_data = static_cast<const vllm_zen::bf16_t*>(x.data_ptr());
  auto* q_data = static_cast<int8_t*>(q.data_ptr());
  auto* scale_data = static_cast<float*>(scale.data_ptr());
  const int64_t x_stride = x.stride(0);
  const vllm_zen::Kernels& kernels = vllm_zen::kernels();

  torch::stable::parallel_for(0, rows, rows_per_task(k * 2), [&](int64_t begin, int64_t end) {
    kernels.quantize_rows_s8(x_data + begin * x_stride, x_stride, q_data + begin * k, scale_data + begin,
                             end - begin, k);
  });
  return {q, scale};
}

}  // namespace

STABLE_TORCH_LIBRARY(vllm_zen, m) {
  m.def("isa() -> str");
  m.def("force_isa(str name) -> ()");
  m.def("quantize_rows_s8(Tensor x) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_zen, CompositeExplicitAutograd, m) {
  m.impl("isa", TORCH_BOX(&isa));
  m.impl("force_isa", TORCH_BOX(&force_isa));
}

STABLE_TORCH_LIBRARY_IMPL(vllm_zen, CPU, m) { m.impl("quantize_rows_s8", TORCH_BOX(&quantize_rows_s8)); }
