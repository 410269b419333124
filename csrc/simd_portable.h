// simd.h's lanes as plain loops, for any CPU.
#pragma once

// There are too few registers to unroll for.
#define VLLM_ZEN_UNROLL

namespace vllm_zen {
namespace {

constexpr int kLanes = 16;
struct Floats {
  float lane[kLanes];
};
// Sixteen pairs of bf16: the first of a pair in the low half.
struct Pairs {
  uint32_t lane[kLanes];
};

inline float as_float(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t as_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

template <typename Make>
inline Floats each_lane(Make make) {
  Floats result;
  for (int i = 0; i < kLanes; ++i) {
    result.lane[i] = make(i);
  }
  return result;
}

inline Floats set(float value) {
  return each_lane([&](int) { return value; });
}
inline Floats load(const float* from) {
  return each_lane([&](int i) { return from[i]; });
}
inline void store(float* to, const Floats& value) { __builtin_memcpy(to, value.lane, sizeof value.lane); }
inline Floats add(const Floats& a, const Floats& b) {
  return each_lane([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline Floats sub(const Floats& a, const Floats& b) {
  return each_lane([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline Floats mul(const Floats& a, const Floats& b) {
  return each_lane([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline Floats div(const Floats& a, const Floats& b) {
  return each_lane([&](int i) { return a.lane[i] / b.lane[i]; });
}
// a * b + c. Rounded twice here: a call of fmaf for every lane would cost more than it is worth.
inline Floats fma(const Floats& a, const Floats& b, const Floats& c) {
  return each_lane([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
}
// Where either is NaN, the second.
inline Floats max(const Floats& a, const Floats& b) {
  return each_lane([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline Floats min(const Floats& a, const Floats& b) {
  return each_lane([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline Floats select(uint32_t lanes, const Floats& yes, const Floats& no) {
  return each_lane([&](int i) { return (lanes >> i & 1) != 0 ? yes.lane[i] : no.lane[i]; });
}
// Lane i takes the value of lane i ^ D.
template <int D>
inline Floats swap_lanes(const Floats& a) {
  return each_lane([&](int i) { return a.lane[i ^ D]; });
}
inline float largest(const Floats& a) {
  float result = a.lane[0];
  for (int i = 1; i < kLanes; ++i) {
    result = result > a.lane[i] ? result : a.lane[i];
  }
  return result;
}
inline float sum(const Floats& a) {
  Floats s = a;
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) {
      s.lane[i] += s.lane[i + width];
    }
  }
  return s.lane[0];
}
inline Floats lane_numbers() {
  return each_lane([](int i) { return static_cast<float>(i); });
}
// 1.5 * 2^23 leaves no bits below one: adding it rounds to the nearest integer.
inline Floats nearest(const Floats& x) {
  return each_lane([&](int i) { return (x.lane[i] + 12582912.0f) - 12582912.0f; });
}
// p * 2^n for whole n from -127 up: 0 at -127, infinity above 127.
inline Floats times_power_of_two(const Floats& p, const Floats& n) {
  return each_lane([&](int i) {
    const float exponent = n.lane[i] < 128.0f ? n.lane[i] : 128.0f;  // NaN becomes 128, and p is NaN then
    return p.lane[i] * as_float(static_cast<uint32_t>(static_cast<int32_t>(exponent) + 127) << 23);
  });
}

inline Pairs load_pairs(const void* from) {
  Pairs result;
  __builtin_memcpy(result.lane, from, sizeof result.lane);
  return result;
}
inline void store_pairs(void* to, const Pairs& pairs) { __builtin_memcpy(to, pairs.lane, sizeof pairs.lane); }
inline Pairs set_pair(uint32_t pair) {
  Pairs result;
  for (int i = 0; i < kLanes; ++i) {
    result.lane[i] = pair;
  }
  return result;
}
// c + a.first * b.first + a.second * b.second, in float32.
inline Floats dot(const Pairs& a, const Pairs& b, const Floats& c) {
  return each_lane([&](int i) {
    const float second = as_float(a.lane[i] & 0xffff0000u) * as_float(b.lane[i] & 0xffff0000u);
    return c.lane[i] + second + as_float(a.lane[i] << 16) * as_float(b.lane[i] << 16);
  });
}

// Sixteen int32, or the 64 bytes they are made of. Sums wrap around.
using Ints = Pairs;
inline Ints load_ints(const void* from) { return load_pairs(from); }
inline Ints set_int(int32_t value) { return set_pair(static_cast<uint32_t>(value)); }
inline Ints low_nibbles(Ints bytes) {
  for (int i = 0; i < kLanes; ++i) {
    bytes.lane[i] &= 0x0f0f0f0fu;
  }
  return bytes;
}
inline Ints high_nibbles(Ints bytes) {
  for (int i = 0; i < kLanes; ++i) {
    bytes.lane[i] = bytes.lane[i] >> 4 & 0x0f0f0f0fu;
  }
  return bytes;
}
// Of a lane's eight nibbles, 0 to 3 in the low half of its bytes and 4 to 7 in the high half, two less 8 as a
// pair of bf16: in passes 0 to 3 those numbered (0, 2), (4, 6), (1, 3), (5, 7).
constexpr int kNibblePasses = 4;
inline Pairs nibble_pairs(const Ints& nibbles, int pass) {
  const auto less_8 = [](uint32_t nibble) { return as_bits(static_cast<float>(nibble & 15) - 8.0f); };
  Pairs result;
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t shifted = nibbles.lane[i] >> (pass * 4);
    result.lane[i] = (less_8(shifted >> 16) & 0xffff0000u) | less_8(shifted) >> 16;
  }
  return result;
}
// sums + the four products of a lane's bytes, a's unsigned, b's signed.
inline Ints dot_bytes(const Ints& a, const Ints& b, Ints sums) {
  for (int i = 0; i < kLanes; ++i) {
    int32_t products = 0;
    for (int byte = 0; byte < 4; ++byte) {
      const auto unsigned_byte = static_cast<int32_t>(a.lane[i] >> (8 * byte) & 0xff);
      products += unsigned_byte * static_cast<int8_t>(b.lane[i] >> (8 * byte));
    }
    sums.lane[i] += static_cast<uint32_t>(products);
  }
  return sums;
}
// A matter of registers, of which there are too few here anyway.
template <typename Value>
inline void load_after(const uint8_t*&, const Value&) {}
inline Floats to_floats(const Ints& a) {
  return each_lane([&](int i) { return static_cast<float>(static_cast<int32_t>(a.lane[i])); });
}

// Rounds to nearest, ties to even.
inline void store_bf16(bf16_t* to, const Floats& value) {
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t bits = as_bits(value.lane[i]);
    const bool nan = value.lane[i] != value.lane[i];
    to[i] = static_cast<bf16_t>(nan ? 0x7fc0u : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
  }
}
inline Floats load_bf16(const bf16_t* from) {
  Floats result;
  for (int i = 0; i < kLanes; ++i) {
    result.lane[i] = as_float(static_cast<uint32_t>(from[i]) << 16);
  }
  return result;
}

}  // namespace
}  // namespace vllm_zen
