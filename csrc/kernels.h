// The contract between the boundary (ops.cpp) and the loops (*.inc): plain pointers and sizes, no torch.
//
// Every kernel works on a range of rows, so that ops.cpp decides how work is split over threads and a
// result never depends on the split.
#pragma once

#include <cstdint>

namespace vllm_zen {

// A bfloat16 as it lies in memory: sign, 8 bits of exponent, 7 of mantissa.
using bf16_t = uint16_t;

struct Kernels {
  // The name VLLM_ZEN_ISA takes.
  const char* isa;

  // Symmetric int8 quantization, one scale a row.
  //   x      [rows, k], row stride x_stride elements, k contiguous
  //   q      [rows, k] contiguous
  //   scale  [rows]; x is about q * scale
  // A row of zeros, or one so small that its scale would be subnormal, gives q = 0 and scale = 0. A row
  // that holds a NaN or an infinity gives q = 0 and scale = NaN: the fault stays in its own row.
  void (*quantize_rows_s8)(const bf16_t* x, int64_t x_stride, int8_t* q, float* scale, int64_t rows,
                           int64_t k);
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
