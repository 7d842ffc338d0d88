// Element math of the op: phase, sine and cosine, rotation, conversions of half types.
// C++17, CUDA and MSL all read this one file, so it keeps to their common subset: no pointers, no
// library call but fma, and no double or 64-bit literal outside the parts that Metal does not see.
// Compile it with floating-point contraction off: every fma is written out.
#pragma once

#if !defined(__METAL_VERSION__)
#include <cmath>
#include <cstdint>
#include <cstring>
#endif

// A table of u32 that device code may index.
#if defined(__METAL_VERSION__)
#define ROPE_POOL_TABLE(name) constant u32 name[]
#elif defined(__CUDA_ARCH__)
#define ROPE_POOL_TABLE(name) static __constant__ u32 name[]
#else
#define ROPE_POOL_TABLE(name) constexpr u32 name[]
#endif

#if defined(__METAL_VERSION__)
#define ROPE_POOL_FN inline
#elif defined(__CUDACC__)
#define ROPE_POOL_FN __host__ __device__ __forceinline__
#elif defined(_MSC_VER)
#define ROPE_POOL_FN __forceinline
#else
#define ROPE_POOL_FN inline __attribute__((always_inline))
#endif

namespace rope_pool {

#if defined(__METAL_VERSION__)
typedef ushort u16;
typedef uint u32;
typedef int i32;
typedef ulong u64;
typedef long i64;
ROPE_POOL_FN u32 bits_of(float x) { return as_type<u32>(x); }
ROPE_POOL_FN float float_of(u32 bits) { return as_type<float>(bits); }
ROPE_POOL_FN float fma(float a, float b, float c) { return metal::fma(a, b, c); }
#else
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using i32 = std::int32_t;
using u64 = std::uint64_t;
using i64 = std::int64_t;
ROPE_POOL_FN u32 bits_of(float x) {
  u32 bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
ROPE_POOL_FN float float_of(u32 bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
ROPE_POOL_FN float fma(float a, float b, float c) { return std::fma(a, b, c); }
ROPE_POOL_FN double fma(double a, double b, double c) { return std::fma(a, b, c); }
#endif

// ---- Phase: position * frequency as a fraction of a turn. The integer product wraps around at
// whole turns, which is the exact range reduction.

// Turns per position of one pair: (high * 2^32 + low + tail * 2^-32) * 2^-64.
struct Frequency {
  u32 high;
  u32 low;
  i32 tail;
};

// 1 / 2 pi in binary, 32 bits an entry: enough for every float64.
ROPE_POOL_TABLE(kInverseTwoPi) = {
    0x28be60dbu, 0x9391054au, 0x7f09d5f4u, 0x7d4d3770u, 0x36d8a566u, 0x4f10e410u, 0x7f9458eau,
    0xf7aef158u, 0x6dc91b8eu, 0x909374b8u, 0x01924bbau, 0x82746487u, 0x3f877ac7u, 0x2c4a69cfu,
    0xba208d7du, 0x4baed121u, 0x3a671c09u, 0xad17df90u, 0x4e64758eu, 0x60d4ce7du, 0x272117e2u,
    0xef7e4a0eu, 0xc7fe25ffu, 0xf7816603u, 0xfbcbc462u, 0xd6829b47u, 0xdb4d9fb3u, 0xc9f2c26du,
    0xd3d18fd9u, 0xa797fa8bu, 0x5d49eeb1u, 0xfaf97c5eu, 0xcf41ce7du, 0xe294a4bau, 0x9afed7ecu,
    0x47e35742u, 0x1580cc11u, 0xbf1edaeau};

// The frequency for (mantissa_high * 2^32 + mantissa_low) * 2^exponent radians per position,
// rounded correctly; the mantissa below 2^53, the exponent as in a float64. Whole turns are
// dropped.
ROPE_POOL_FN Frequency frequency_of(u32 mantissa_high, u32 mantissa_low, i32 exponent,
                                    bool negative) {
  // Entries of 1 / 2 pi that the exponent makes whole turns are skipped. Of the rest, seven make
  // the product right to 2^-140 turn.
  i32 first = exponent > 0 ? exponent / 32 : 0;
  u32 product[9] = {0u, 0u, 0u, 0u, 0u,
                    0u, 0u, 0u, 0u};  // least significant first, the point before [7]
  u64 carry = 0u;
  for (i32 i = 0; i < 7; ++i) {
    carry += (u64)mantissa_low * (u64)kInverseTwoPi[first + 6 - i];
    product[i] = (u32)carry;
    carry >>= 32;
  }
  product[7] = (u32)carry;
  carry = 0u;
  for (i32 i = 0; i < 7; ++i) {
    carry += (u64)mantissa_high * (u64)kInverseTwoPi[first + 6 - i] + (u64)product[i + 1];
    product[i + 1] = (u32)carry;
    carry >>= 32;
  }
  product[8] = (u32)carry;

  u32 fraction[3];  // the first 96 bits after the point of product * 2^(exponent - 32 first)
  for (i32 k = 0; k < 3; ++k) {
    i32 bit = 32 * (6 - k) - (exponent - 32 * first);
    u32 low = bit / 32 < 9 ? product[bit / 32] : 0u;
    u32 high = bit / 32 < 8 ? product[bit / 32 + 1] : 0u;
    u32 word = bit % 32 == 0 ? low : (low >> (bit % 32)) | (high << (32 - bit % 32));
    fraction[k] = negative ? ~word : word;  // the product is no integer: the floor of its negative
  }
  u64 nearest = (((u64)fraction[0] << 32) | (u64)fraction[1]) + (u64)(fraction[2] >> 31);
  Frequency f;
  f.high = (u32)(nearest >> 32);
  f.low = (u32)nearest;
  f.tail = (i32)fraction[2];
  return f;
}

ROPE_POOL_FN Frequency frequency_of(float inv_freq) {
  u32 bits = bits_of(inv_freq);
  u32 mantissa = bits & 0x7fffffu;
  i32 exponent = (i32)((bits >> 23) & 0xffu);
  mantissa |= exponent > 0 ? 0x800000u : 0u;
  exponent = exponent > 0 ? exponent : 1;
  return frequency_of(0u, mantissa, exponent - 150, (bits >> 31) != 0u && mantissa != 0u);
}

#if !defined(__METAL_VERSION__)
ROPE_POOL_FN Frequency frequency_of(double inv_freq) {
  u64 bits;
  std::memcpy(&bits, &inv_freq, sizeof bits);
  u64 mantissa = bits & 0xfffffffffffffu;
  i32 exponent = (i32)((bits >> 52) & 0x7ffu);
  mantissa |= exponent > 0 ? u64{1} << 52 : u64{0};
  exponent = exponent > 0 ? exponent : 1;
  return frequency_of((u32)(mantissa >> 32), (u32)mantissa, exponent - 1075,
                      (bits >> 63) != 0u && mantissa != 0u);
}
#endif

// Which of the three rows of positions a pair takes. Interleaved: dealt out in turn, while a row
// has some of its pairs left; otherwise in three runs. The third row gets what the others leave.
ROPE_POOL_FN i64 mrope_axis(i64 pair, i64 section0, i64 section1, i64 section2, bool interleaved) {
  i64 turn = pair % 3;
  i64 limit = turn == 1 ? 3 * section1 : (turn == 2 ? 3 * section2 : 0);
  i64 in_turn = pair < limit ? turn : 0;
  i64 in_runs = pair < section0 ? 0 : (pair < section0 + section1 ? 1 : 2);
  return interleaved ? in_turn : in_runs;
}

// The phase in units of 2^-32 turn, for a position that fits in 32 bits.
// Off by at most |position| * 2^-65 + 2^-32 turn.
ROPE_POOL_FN u32 phase32(i32 position, u32 high, u32 low) {
  u32 p = (u32)position;
  u32 borrow = position < 0 ? low : 0u;  // a negative position is p - 2^32
  return p * high + (u32)(((u64)p * (u64)low) >> 32) - borrow;
}

// The phase in units of 2^-64 turn, for any position.
// Off by at most |position| * 2^-96 + 2^-63 turn.
ROPE_POOL_FN u64 phase64(i64 position, Frequency f) {
  u64 nearest = ((u64)f.high << 32) | (u64)f.low;
  i64 position_high = position >> 32;
  i64 position_low = position & (i64)0xffffffffu;
  i64 tail = position_high * (i64)f.tail + ((position_low * (i64)f.tail) >> 32);
  return (u64)position * nearest + (u64)tail;
}

// The phase in units of 2^-32 turn, for any position: float32 angles are made of this one.
ROPE_POOL_FN u32 phase_of(i64 position, Frequency f) {
  i32 position32 = (i32)position;
  return (i64)position32 == position ? phase32(position32, f.high, f.low)
                                     : (u32)(phase64(position, f) >> 32);
}

// ---- Sine and cosine of a phase: an eighth of a turn either way by polynomial, then whole
// quarters.

template <class T>
struct Angle {
  T cos;
  T sin;
};

template <class T>
ROPE_POOL_FN Angle<T> turn_quarters(u32 quarters, T cos, T sin) {
  bool odd = (quarters & 1u) != 0u;
  T c = odd ? sin : cos;
  T s = odd ? cos : sin;
  Angle<T> angle;
  angle.cos = ((quarters + 1u) & 2u) != 0u ? -c : c;
  angle.sin = (quarters & 2u) != 0u ? -s : s;
  return angle;
}

// Phase in units of 2^-32 turn. Absolute error below 9e-8: tests/test_rope_math.py.
// Coefficients: tools/fit_sincos.py.
ROPE_POOL_FN Angle<float> angle_of(u32 phase) {
  u32 quarters = (phase + 0x20000000u) >> 30;
  float x =
      (float)(i32)(phase - (quarters << 30)) * 9.31322574615478515625e-10f;  // in quarter turns
  float x2 = x * x;
  // sin(pi/2 x), its leading coefficient in two parts
  float s = fma(x2, -4.5923316e-3f, 7.9675920e-2f);
  s = fma(x2, s, -6.4596295e-1f);
  s = fma(x2, s, -6.5306621e-8f);
  s = fma(x, 1.57079637f, x * s);
  // cos(pi/2 x)
  float c = fma(x2, 9.0406055e-4f, -2.0860309e-2f);
  c = fma(x2, c, 2.5366926e-1f);
  c = fma(x2, c, -1.2337005f);
  c = fma(x2, c, 1.0f);
  return turn_quarters(quarters, c, s);
}

#if !defined(__METAL_VERSION__)
// Phase in units of 2^-64 turn. Taylor series, to below a unit in double's last place.
ROPE_POOL_FN Angle<double> angle_of(u64 phase) {
  u32 quarters = (u32)((phase + (u64{1} << 61)) >> 62);
  double x = (double)(i64)(phase - ((u64)quarters << 62)) * 2.168404344971008868e-19;  // 2^-62
  double x2 = x * x;
  double s = fma(x2, 6.06693573110619567e-12, -6.68803510981146723e-10);
  s = fma(x2, s, 5.69217292196792681e-8);
  s = fma(x2, s, -3.59884323521208534e-6);
  s = fma(x2, s, 1.60441184787359822e-4);
  s = fma(x2, s, -4.6817541353186881e-3);
  s = fma(x2, s, 7.96926262461670451e-2);
  s = fma(x2, s, -6.45964097506246254e-1);
  s = fma(x2, s, 6.12323399573676589e-17);
  s = fma(x, 1.5707963267948966, x * s);
  double c = fma(x2, -5.29440020073462376e-13, 6.56596311497947236e-11);
  c = fma(x2, c, -6.38660308379185224e-9);
  c = fma(x2, c, 4.7108747788181715e-7);
  c = fma(x2, c, -2.52020423730606055e-5);
  c = fma(x2, c, 9.1926027483942658e-4);
  c = fma(x2, c, -2.08634807633529609e-2);
  c = fma(x2, c, 2.53669507901048014e-1);
  c = fma(x2, c, -1.23370055013616983);
  c = fma(x2, c, 1.0);
  return turn_quarters(quarters & 3u, c, s);
}
#endif

// ---- Element types: how a tensor's bits become the type computed in, and back. One rounding, to
// nearest even. Half types are converted with integers, so that no flush-to-zero mode touches them.

struct Float32 {
  typedef float storage;
  typedef float compute;
  static ROPE_POOL_FN float load(float x) { return x; }
  static ROPE_POOL_FN float store(float x) { return x; }
};

struct BFloat16 {
  typedef u16 storage;
  typedef float compute;
  static ROPE_POOL_FN float load(u16 x) { return float_of((u32)x << 16); }
  static ROPE_POOL_FN u16 store(float x) {
    u32 bits = bits_of(x);
    u32 quiet_nan = bits | 0x400000u;
    return (u16)(((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded(bits)) >> 16);
  }
  // A number's upper half rounded to nearest even, the lower half left as it comes out.
  static ROPE_POOL_FN u32 rounded(u32 bits) { return bits + 0x7fffu + ((bits >> 16) & 1u); }
};

struct Float16 {
  typedef u16 storage;
  typedef float compute;
  static ROPE_POOL_FN float load(u16 x) { return widened((u32)x); }
  static ROPE_POOL_FN u16 store(float x) { return (u16)rounded(x); }
  // From the bits in the lower half; the upper one is not looked at.
  static ROPE_POOL_FN float widened(u32 x) {
    u32 sign = (x & 0x8000u) << 16;
    i32 magnitude = (i32)(x & 0x7fffu);
    u32 normal = ((u32)magnitude << 13) + 0x38000000u;
    u32 inf_or_nan = normal + 0x38000000u;
    u32 subnormal = bits_of((float)magnitude * 5.9604644775390625e-8f);  // 2^-24
    u32 bits = magnitude < 0x400 ? subnormal : (magnitude < 0x7c00 ? normal : inf_or_nan);
    return float_of(bits | sign);
  }
  // The bits to store, in the lower half; the upper one is zero.
  static ROPE_POOL_FN u32 rounded(float x) {
    u32 sign = (bits_of(x) >> 16) & 0x8000u;
    i32 magnitude = (i32)(bits_of(x) & 0x7fffffffu);
    i32 finite = magnitude < 0x47800000 ? magnitude : 0x47800000;  // 65536 becomes infinity
    i32 exponent = finite & 0x7f800000;
    exponent = exponent > 0x38800000 ? exponent : 0x38800000;  // subnormals have the least one
    // The last place of 2^13 times the power of two is float16's step: the addition rounds to it.
    u32 step = (u32)exponent + (13u << 23);
    u32 steps = bits_of(float_of((u32)finite) + float_of(step)) - step;
    u32 bits = steps + ((u32)exponent >> 13) - (113u << 10);
    bits = magnitude > 0x7f800000 ? 0x7e00u : bits;  // NaN
    return bits | sign;
  }
};

#if !defined(__METAL_VERSION__)
struct Float64 {
  typedef double storage;
  typedef double compute;
  static ROPE_POOL_FN double load(double x) { return x; }
  static ROPE_POOL_FN double store(double x) { return x; }
};
#endif

// Two elements in one word, the first in its lower half. Devices that convert two at a time do.

template <class Element>
struct WordOf {
  static ROPE_POOL_FN float low(u32 word) { return Element::load((u16)word); }
  static ROPE_POOL_FN float high(u32 word) { return Element::load((u16)(word >> 16)); }
  static ROPE_POOL_FN u32 store(float low, float high) {
    return (u32)Element::store(low) | ((u32)Element::store(high) << 16);
  }
};

#if defined(__CUDA_ARCH__)
template <>
struct WordOf<BFloat16> {
  static ROPE_POOL_FN float low(u32 word) { return float_of(word << 16); }
  static ROPE_POOL_FN float high(u32 word) { return float_of(word & 0xffff0000u); }
  static ROPE_POOL_FN u32 store(float low, float high) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
  }
};

template <>
struct WordOf<Float16> {
  static ROPE_POOL_FN float low(u32 word) {
    float x;
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(x) : "r"(word));
    return x;
  }
  static ROPE_POOL_FN float high(u32 word) { return low(word >> 16); }
  static ROPE_POOL_FN u32 store(float low, float high) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
  }
};
#else
// All in 32 bits: a compiler's vectors then have elements of one size.
template <>
struct WordOf<Float16> {
  static ROPE_POOL_FN float low(u32 word) { return Float16::widened(word); }
  static ROPE_POOL_FN float high(u32 word) { return Float16::widened(word >> 16); }
  static ROPE_POOL_FN u32 store(float low, float high) {
    return Float16::rounded(low) | (Float16::rounded(high) << 16);
  }
};
#endif

// ---- Rotation of one pair: (x1 cos - x2 sin, x2 cos + x1 sin).

template <class T>
struct Pair {
  T first;
  T second;
};

template <class T>
ROPE_POOL_FN Pair<T> rotate(T x1, T x2, T cos, T sin) {
  Pair<T> rotated;
  rotated.first = fma(x1, cos, -(x2 * sin));
  rotated.second = fma(x2, cos, x1 * sin);
  return rotated;
}

// The same on what tensors store.
template <class Element>
ROPE_POOL_FN Pair<typename Element::storage> rotate_stored(typename Element::storage first,
                                                           typename Element::storage second,
                                                           typename Element::compute cos,
                                                           typename Element::compute sin) {
  Pair<typename Element::compute> pair =
      rotate(Element::load(first), Element::load(second), cos, sin);
  Pair<typename Element::storage> rotated;
  rotated.first = Element::store(pair.first);
  rotated.second = Element::store(pair.second);
  return rotated;
}

}  // namespace rope_pool
