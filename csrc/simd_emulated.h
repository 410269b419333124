// AVX-512 in software, for `make check-native` on a CPU without it: never part of a release.
//
// SIMDe (https://github.com/simd-everywhere/simde) has nearly all that simd_avx512.h uses; the rest is here.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#define _mm512_reduce_max_ps vllm_zen_emulated::reduce_max
#define _mm512_reduce_add_ps vllm_zen_emulated::reduce_add
#define _mm512_cvtneps_pbh vllm_zen_emulated::to_bf16
#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps vllm_zen_emulated::to_floats
#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32 vllm_zen_emulated::widen

namespace vllm_zen_emulated {
namespace {

inline float reduce_max(__m512 a) {
  float lane[16];
  _mm512_storeu_ps(lane, a);
  float result = lane[0];
  for (const float value : lane) {
    result = result > value ? result : value;
  }
  return result;
}

inline float reduce_add(__m512 a) {
  float lane[16];
  _mm512_storeu_ps(lane, a);
  float result = 0.0f;
  for (const float value : lane) {
    result += value;
  }
  return result;
}

inline __m256i to_bf16(__m512 a) {
  uint32_t bits[16];
  _mm512_storeu_ps(bits, a);
  uint16_t rounded[16];
  for (int i = 0; i < 16; ++i) {
    const bool nan = (bits[i] & 0x7fffffffu) > 0x7f800000u;
    rounded[i] = static_cast<uint16_t>(nan ? 0x7fc0u : (bits[i] + 0x7fffu + (bits[i] >> 16 & 1)) >> 16);
  }
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rounded));
}

inline __m512 to_floats(__m512i a) {
  int32_t lane[16];
  _mm512_storeu_si512(lane, a);
  float result[16];
  for (int i = 0; i < 16; ++i) {
    result[i] = static_cast<float>(lane[i]);
  }
  return _mm512_loadu_ps(result);
}

inline __m512i widen(__m256i a) {
  uint16_t narrow[16];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(narrow), a);
  uint32_t wide[16];
  for (int i = 0; i < 16; ++i) {
    wide[i] = narrow[i];
  }
  return _mm512_loadu_si512(wide);
}

}  // namespace
}  // namespace vllm_zen_emulated
