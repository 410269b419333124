// What the ops_*.cpp files share at torch's boundary.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace vllm_zen {

// Throws, naming the argument and the value, unless it has that type and number of dimensions.
inline void check_kind(const torch::stable::Tensor& tensor, const char* name,
                       torch::headeronly::ScalarType type, int64_t dimensions, const char* shape) {
  STD_TORCH_CHECK(tensor.scalar_type() == type, name, " must be ", torch::headeronly::toString(type),
                  ", got ", torch::headeronly::toString(tensor.scalar_type()));
  STD_TORCH_CHECK(tensor.dim() == dimensions, name, " must be ", shape, ", got ", tensor.dim(),
                  " dimensions");
}

// Scratch of a thread, aligned to 64 and kept from call to call: one for each number of bytes.
template <int64_t Bytes>
void* thread_scratch() {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  thread_local std::unique_ptr<void, Free> memory{std::aligned_alloc(64, Bytes)};
  return memory.get();
}

}  // namespace vllm_zen
