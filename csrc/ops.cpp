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

std::tuple<Tensor, Tensor> quantize_rows_s8(const Tensor& x, bool rotate) {
  STD_TORCH_CHECK(x.dim() == 2, "quantize_rows_s8: x must be [M, K], got ", x.dim(), " dimensions");
  const bool is_bf16 = x.scalar_type() == ScalarType::BFloat16;
  STD_TORCH_CHECK(is_bf16 || x.scalar_type() == ScalarType::Float,
                  "quantize_rows_s8: x must be bfloat16 or float32, got ",
                  torch::headeronly::toString(x.scalar_type()));
  const int64_t rows = x.size(0);
  const int64_t k = x.size(1);
  STD_TORCH_CHECK(x.stride(1) == 1 || k <= 1,
                  "quantize_rows_s8: the last dimension of x must be contiguous, got stride ", x.stride(1));

  Tensor q = torch::stable::new_empty(x, {rows, k}, ScalarType::Char);
  Tensor scale = torch::stable::new_empty(x, {rows}, ScalarType::Float);
  vllm_zen::RowsS8 call;
  call.x = x.data_ptr();
  call.x_is_bf16 = is_bf16;
  call.x_stride = x.stride(0);
  call.k = k;
  call.rotate = rotate;
  call.q = static_cast<int8_t*>(q.data_ptr());
  call.scale = static_cast<float*>(scale.data_ptr());
  const vllm_zen::Kernels& kernels = vllm_zen::kernels();

  torch::stable::parallel_for(0, rows, rows_per_task(k * (is_bf16 ? 2 : 4)), [&](int64_t begin, int64_t end) {
    kernels.quantize_rows_s8(call, begin, end);
  });
  return {q, scale};
}

}  // namespace

STABLE_TORCH_LIBRARY(vllm_zen, m) {
  m.def("isa() -> str");
  m.def("force_isa(str name) -> ()");
  m.def("quantize_rows_s8(Tensor x, bool rotate=False) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_zen, CompositeExplicitAutograd, m) {
  m.impl("isa", TORCH_BOX(&isa));
  m.impl("force_isa", TORCH_BOX(&force_isa));
}

STABLE_TORCH_LIBRARY_IMPL(vllm_zen, CPU, m) { m.impl("quantize_rows_s8", TORCH_BOX(&quantize_rows_s8)); }
