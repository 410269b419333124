// simd.h's lanes as zmm registers.
#pragma once

#if defined(VLLM_ZEN_EMULATE)
#include "simd_emulated.h"
#else
#include <immintrin.h>
#endif

// On loops over registers: one that stays a loop would keep its sums in memory. In software they are there
// anyway, and unrolled it would take many minutes to compile.
#if defined(VLLM_ZEN_EMULATE)
#define VLLM_ZEN_UNROLL
#else
#define VLLM_ZEN_UNROLL _Pragma("GCC unroll 8")
#endif

namespace vllm_zen {
namespace {

constexpr int kLanes = 16;
using Floats = __m512;
// Sixteen pairs of bf16: the first of a pair in the low half.
using Pairs = __m512i;

inline Floats set(float value) { return _mm512_set1_ps(value); }
inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Floats value) { _mm512_storeu_ps(to, value); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
// a * b + c, rounded once.
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
// Where either is NaN, the second.
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats select(uint32_t lanes, Floats yes, Floats no) {
  return _mm512_mask_blend_ps(static_cast<__mmask16>(lanes), no, yes);
}
// Lane i takes the value of lane i ^ D; D is 1, 2, 4 or 8.
template <int D>
inline Floats swap_lanes(Floats a) {
  if constexpr (D <= 2) {
    return _mm512_permute_ps(a, D == 1 ? 0xb1 : 0x4e);
  } else {
    return _mm512_shuffle_f32x4(a, a, D == 4 ? 0xb1 : 0x4e);
  }
}
inline float largest(Floats a) { return _mm512_reduce_max_ps(a); }
inline float sum(Floats a) { return _mm512_reduce_add_ps(a); }
inline Floats lane_numbers() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
inline Floats nearest(Floats x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// p * 2^n for whole n from -127 up: 0 at -127, infinity above 127.
inline Floats times_power_of_two(Floats p, Floats n) {
  const __mmask16 normal = _mm512_cmp_ps_mask(n, _mm512_set1_ps(-127.0f), _CMP_NLE_UQ);  // NaN too
  return _mm512_maskz_scalef_ps(normal, p, n);
}

inline Pairs load_pairs(const void* from) { return _mm512_loadu_si512(from); }
inline void store_pairs(void* to, Pairs pairs) { _mm512_storeu_si512(to, pairs); }
inline Pairs set_pair(uint32_t pair) { return _mm512_set1_epi32(static_cast<int>(pair)); }
// c + a.first * b.first + a.second * b.second, in float32; subnormals count as 0.
inline Floats dot(Pairs a, Pairs b, Floats c) {
  return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

// Sixteen int32, or the 64 bytes they are made of.
using Ints = __m512i;
inline Ints load_ints(const void* from) { return _mm512_loadu_si512(from); }
inline Ints set_int(int32_t value) { return _mm512_set1_epi32(value); }
inline Ints low_nibbles(Ints bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
inline Ints high_nibbles(Ints bytes) { return low_nibbles(_mm512_srli_epi32(bytes, 4)); }
// Of a lane's eight nibbles, 0 to 3 in the low half of its bytes and 4 to 7 in the high half, two less 8 as a
// pair of bf16: in passes 0 to 3 those numbered (0, 2), (4, 6), (1, 3), (5, 7).
constexpr int kNibblePasses = 4;
inline Pairs nibble_pairs(Ints nibbles, int pass) {
  // The table twice: the index is five bits, of which the last is another nibble's.
  alignas(64) static constexpr uint16_t kLess8[32] = {
      0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000,
      0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
      0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
  return _mm512_permutexvar_epi16(_mm512_srli_epi16(nibbles, static_cast<unsigned>(pass * 4)),
                                  _mm512_load_si512(kLess8));
}
// sums + the four products of a lane's bytes, a's unsigned, b's signed. As assembly in order: left to itself,
// g++ 12 interleaves a tile's products until its sums no longer fit in registers.
#if defined(VLLM_ZEN_EMULATE)
__attribute__((noinline)) inline Ints dot_bytes(Ints a, Ints b, Ints sums) {
  return _mm512_dpbusd_epi32(sums, a, b);
}
template <typename Value>
inline void load_after(const uint8_t*&, const Value&) {}
#else
inline Ints dot_bytes(Ints a, Ints b, Ints sums) {
  __asm__ volatile("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
  return sums;
}
// Keeps the compiler from loading through `pointer` before `value` is computed.
template <typename Value>
inline void load_after(const uint8_t*& pointer, Value& value) {
  __asm__ volatile("" : "+r"(pointer), "+v"(value));
}
#endif
inline Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }

// Rounds to nearest, ties to even; subnormals count as 0.
inline void store_bf16(bf16_t* to, Floats value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(value)));
}
inline Floats load_bf16(const bf16_t* from) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

}  // namespace
}  // namespace vllm_zen
