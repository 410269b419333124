// Sixteen float lanes, on AVX-512 or as plain loops: what a kernel body is written in once.
//
// Included by the bodies under each isa_*.cpp's flags, and everything here is in an anonymous namespace, so
// two tables never share a copy. A Floats is one zmm register where there are any; elsewhere an array that
// the compiler splits into what the CPU has.
#pragma once

#include "kernels.h"

#if defined(__AVX512BF16__) || defined(VLLM_ZEN_EMULATE)
#include "simd_avx512.h"
#else
#include "simd_portable.h"
#endif

namespace vllm_zen {
namespace {

// The lanes i with lo <= first + i < hi, as bits.
inline uint32_t lanes_between(int64_t first, int64_t lo, int64_t hi) {
  const int64_t from = lo - first < 0 ? 0 : lo - first > kLanes ? kLanes : lo - first;
  const int64_t to = hi - first < 0 ? 0 : hi - first > kLanes ? kLanes : hi - first;
  return to <= from ? 0u : ((1u << to) - 1u) & ~((1u << from) - 1u);
}

// Into L2: the kernels ask for tens of kilobytes ahead.
inline void prefetch(const void* address) { __builtin_prefetch(address, 0, 2); }

// 2^x. A result below the smallest normal float is 0, NaN stays NaN, -infinity gives 0.
//
// x = n + r with n the nearest integer, so |r| <= 1/2, and 2^r by the degree-6 Taylor polynomial: the first
// term left out is (r ln 2)^7 / 7! < 1.3e-7 of the result, about one rounding of a float.
inline Floats exp2(Floats x) {
  const Floats n = nearest(max(set(-127.0f), x));
  const Floats r = sub(max(set(-127.0f), x), n);
  Floats p = fma(r, set(1.5403530e-4f), set(1.3333558e-3f));
  p = fma(r, p, set(9.6181291e-3f));
  p = fma(r, p, set(5.5504109e-2f));
  p = fma(r, p, set(2.4022651e-1f));
  p = fma(r, p, set(6.9314718e-1f));
  p = fma(r, p, set(1.0f));
  return times_power_of_two(p, n);
}

// tanh(x) as 1 - 2 / (e^2x + 1), which saturates to 1 and -1 where e^2x leaves the range of a float.
inline Floats tanh(Floats x) {
  const Floats clamped = min(set(40.0f), max(set(-40.0f), x));
  const Floats e = exp2(mul(clamped, set(2.0f * 1.44269504f)));
  return sub(set(1.0f), div(set(2.0f), add(e, set(1.0f))));
}

// Sixteen values from the one at `at`, of a tensor in bf16 or float32.
inline Floats load_value(const void* from, bool is_bf16, int64_t at) {
  return is_bf16 ? load_bf16(static_cast<const bf16_t*>(from) + at)
                 : load(static_cast<const float*>(from) + at);
}

inline void store_value(void* to, bool is_bf16, int64_t at, Floats value) {
  if (is_bf16) {
    store_bf16(static_cast<bf16_t*>(to) + at, value);
  } else {
    store(static_cast<float*>(to) + at, value);
  }
}

}  // namespace
}  // namespace vllm_zen
