// Stands in for <metal_stdlib>: the part of Metal's library that kernels of our kind use, for
// clang on a CPU. Address spaces are part of types here, as they are in Metal.
#pragma once

#include "abi.h"

#define kernel
#define thread
#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))

// ---- Types

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef _Float16 half;
typedef __bf16 bfloat;
typedef signed char int8_t;
typedef uchar uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef ulong uint64_t;

namespace metal {
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
}

#define METAL_EMULATOR_VECTORS(T) \
  typedef metal::vec<T, 2> T##2;  \
  typedef metal::vec<T, 3> T##3;  \
  typedef metal::vec<T, 4> T##4;
METAL_EMULATOR_VECTORS(char)
METAL_EMULATOR_VECTORS(uchar)
METAL_EMULATOR_VECTORS(short)
METAL_EMULATOR_VECTORS(ushort)
METAL_EMULATOR_VECTORS(int)
METAL_EMULATOR_VECTORS(uint)
METAL_EMULATOR_VECTORS(long)
METAL_EMULATOR_VECTORS(ulong)
METAL_EMULATOR_VECTORS(half)
METAL_EMULATOR_VECTORS(bfloat)
METAL_EMULATOR_VECTORS(float)
#undef METAL_EMULATOR_VECTORS

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-7f
#define M_PI_F 3.14159265358979323846f
#define M_1_PI_F 0.318309886183790671538f

namespace metal_emulator {

template <class A, class B>
struct Same {
  static constexpr bool value = false;
};
template <class A>
struct Same<A, A> {
  static constexpr bool value = true;
};

template <class T>
struct Shape {
  typedef T Element;
  static constexpr int size = 1;
};
template <class T, int N>
struct Shape<T __attribute__((ext_vector_type(N)))> {
  typedef T Element;
  static constexpr int size = N;
};

template <class T>
inline T component(T x, int) {
  return x;
}
template <class T, int N>
inline T component(metal::vec<T, N> x, int i) {
  return x[i];
}

template <class... Parts>
constexpr int total_size() {
  int total = 0;
  int sizes[] = {Shape<Parts>::size...};
  for (int size : sizes) total += size;
  return total;
}

// A vector from scalars and vectors one after the other, or from one scalar for all.
template <class V, class... Parts>
inline V make(Parts... parts) {
  constexpr int given = total_size<Parts...>();
  constexpr int size = Shape<V>::size;
  static_assert(given == size || (given == 1 && sizeof...(parts) == 1),
                "as many values as the vector has components, or one for all");
  typedef typename Shape<V>::Element Element;
  V v;
  int at = 0;
  auto append = [&](auto part) {
    for (int i = 0; i < Shape<decltype(part)>::size; ++i) {
      v[at++] = (Element)component(part, i);
    }
    return 0;
  };
  int order[] = {append(parts)...};
  (void)order;
  for (; at < size; ++at) v[at] = v[0];
  return v;
}

}  // namespace metal_emulator

#define METAL_EMULATOR_MAKE(V, ...) ::metal_emulator::make<V>(__VA_ARGS__)
#define char2(...) METAL_EMULATOR_MAKE(char2, __VA_ARGS__)
#define char3(...) METAL_EMULATOR_MAKE(char3, __VA_ARGS__)
#define char4(...) METAL_EMULATOR_MAKE(char4, __VA_ARGS__)
#define uchar2(...) METAL_EMULATOR_MAKE(uchar2, __VA_ARGS__)
#define uchar3(...) METAL_EMULATOR_MAKE(uchar3, __VA_ARGS__)
#define uchar4(...) METAL_EMULATOR_MAKE(uchar4, __VA_ARGS__)
#define short2(...) METAL_EMULATOR_MAKE(short2, __VA_ARGS__)
#define short3(...) METAL_EMULATOR_MAKE(short3, __VA_ARGS__)
#define short4(...) METAL_EMULATOR_MAKE(short4, __VA_ARGS__)
#define ushort2(...) METAL_EMULATOR_MAKE(ushort2, __VA_ARGS__)
#define ushort3(...) METAL_EMULATOR_MAKE(ushort3, __VA_ARGS__)
#define ushort4(...) METAL_EMULATOR_MAKE(ushort4, __VA_ARGS__)
#define int2(...) METAL_EMULATOR_MAKE(int2, __VA_ARGS__)
#define int3(...) METAL_EMULATOR_MAKE(int3, __VA_ARGS__)
#define int4(...) METAL_EMULATOR_MAKE(int4, __VA_ARGS__)
#define uint2(...) METAL_EMULATOR_MAKE(uint2, __VA_ARGS__)
#define uint3(...) METAL_EMULATOR_MAKE(uint3, __VA_ARGS__)
#define uint4(...) METAL_EMULATOR_MAKE(uint4, __VA_ARGS__)
#define long2(...) METAL_EMULATOR_MAKE(long2, __VA_ARGS__)
#define long3(...) METAL_EMULATOR_MAKE(long3, __VA_ARGS__)
#define long4(...) METAL_EMULATOR_MAKE(long4, __VA_ARGS__)
#define ulong2(...) METAL_EMULATOR_MAKE(ulong2, __VA_ARGS__)
#define ulong3(...) METAL_EMULATOR_MAKE(ulong3, __VA_ARGS__)
#define ulong4(...) METAL_EMULATOR_MAKE(ulong4, __VA_ARGS__)
#define half2(...) METAL_EMULATOR_MAKE(half2, __VA_ARGS__)
#define half3(...) METAL_EMULATOR_MAKE(half3, __VA_ARGS__)
#define half4(...) METAL_EMULATOR_MAKE(half4, __VA_ARGS__)
#define bfloat2(...) METAL_EMULATOR_MAKE(bfloat2, __VA_ARGS__)
#define bfloat3(...) METAL_EMULATOR_MAKE(bfloat3, __VA_ARGS__)
#define bfloat4(...) METAL_EMULATOR_MAKE(bfloat4, __VA_ARGS__)
#define float2(...) METAL_EMULATOR_MAKE(float2, __VA_ARGS__)
#define float3(...) METAL_EMULATOR_MAKE(float3, __VA_ARGS__)
#define float4(...) METAL_EMULATOR_MAKE(float4, __VA_ARGS__)

// Metal has as_type at namespace scope and in metal.
template <class To, class From>
inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  return __builtin_bit_cast(To, from);
}

namespace metal {

// ---- Arithmetic

#define METAL_EMULATOR_UNARY(name, builtin) \
  template <class T>                        \
  inline T name(T x) {                      \
    return builtin(x);                      \
  }
#define METAL_EMULATOR_BINARY(name, builtin) \
  template <class T>                         \
  inline T name(T x, T y) {                  \
    return builtin(x, y);                    \
  }
#define METAL_EMULATOR_FLOAT_FUNCTIONS                   \
  METAL_EMULATOR_UNARY(sin, __builtin_elementwise_sin)   \
  METAL_EMULATOR_UNARY(cos, __builtin_elementwise_cos)   \
  METAL_EMULATOR_UNARY(tan, __builtin_elementwise_tan)   \
  METAL_EMULATOR_UNARY(exp, __builtin_elementwise_exp)   \
  METAL_EMULATOR_UNARY(exp2, __builtin_elementwise_exp2) \
  METAL_EMULATOR_UNARY(log, __builtin_elementwise_log)   \
  METAL_EMULATOR_UNARY(log2, __builtin_elementwise_log2) \
  METAL_EMULATOR_UNARY(sqrt, __builtin_elementwise_sqrt) \
  METAL_EMULATOR_BINARY(pow, __builtin_elementwise_pow)  \
  template <class T>                                     \
  inline T rsqrt(T x) {                                  \
    return (T)1.0f / __builtin_elementwise_sqrt(x);      \
  }                                                      \
  template <class T>                                     \
  inline T sincos(T x, thread T& cosine) {               \
    cosine = __builtin_elementwise_cos(x);               \
    return __builtin_elementwise_sin(x);                 \
  }
METAL_EMULATOR_FLOAT_FUNCTIONS
namespace precise {
METAL_EMULATOR_FLOAT_FUNCTIONS
}
namespace fast {
METAL_EMULATOR_FLOAT_FUNCTIONS
}
METAL_EMULATOR_UNARY(abs, __builtin_elementwise_abs)
METAL_EMULATOR_UNARY(fabs, __builtin_elementwise_abs)
METAL_EMULATOR_UNARY(floor, __builtin_elementwise_floor)
METAL_EMULATOR_UNARY(ceil, __builtin_elementwise_ceil)
METAL_EMULATOR_UNARY(trunc, __builtin_elementwise_trunc)
METAL_EMULATOR_UNARY(rint, __builtin_elementwise_roundeven)
METAL_EMULATOR_UNARY(round, __builtin_elementwise_round)
METAL_EMULATOR_UNARY(popcount, __builtin_elementwise_popcount)
METAL_EMULATOR_BINARY(min, __builtin_elementwise_min)
METAL_EMULATOR_BINARY(max, __builtin_elementwise_max)
#undef METAL_EMULATOR_FLOAT_FUNCTIONS
#undef METAL_EMULATOR_UNARY
#undef METAL_EMULATOR_BINARY

template <class T>
inline T fma(T x, T y, T z) {
  return __builtin_elementwise_fma(x, y, z);
}
template <class T>
inline T clamp(T x, T low, T high) {
  return min(max(x, low), high);
}
template <class T>
inline T select(T if_false, T if_true, bool condition) {
  return condition ? if_true : if_false;
}
template <class T>
inline bool isnan(T x) {
  return x != x;
}
template <class T, int N>
inline T dot(vec<T, N> x, vec<T, N> y) {
  T sum = x[0] * y[0];
  for (int i = 1; i < N; ++i) sum += x[i] * y[i];
  return sum;
}
inline uint mulhi(uint x, uint y) { return (uint)(((ulong)x * (ulong)y) >> 32); }
inline int mulhi(int x, int y) { return (int)(((long)x * (long)y) >> 32); }

using ::as_type;

// ---- Threads of a threadgroup

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((uint)a | (uint)b); }

}  // namespace metal

extern "C" void metal_emulator_barrier(uint flags, uint line);
extern "C" void metal_emulator_exchange(const void* mine, uint size, void* of_all_lanes, uint line);

namespace metal {

// The line tells one barrier from another.
inline void threadgroup_barrier(mem_flags flags, uint line = __builtin_LINE()) {
  metal_emulator_barrier((uint)flags, line);
}

// Each lane gives a value and gets those of its whole simdgroup; absent lanes hold zeros.
template <class T>
struct Lanes {
  T of[metal_emulator::kSimdWidth];
  Lanes(T mine, uint line) { metal_emulator_exchange(&mine, sizeof(T), of, line); }
};
extern "C" uint metal_emulator_lane();
inline void simdgroup_barrier(mem_flags, uint line = __builtin_LINE()) { Lanes<uint>(0u, line); }
template <class T>
inline T simd_shuffle(T x, ushort lane, uint line = __builtin_LINE()) {
  return Lanes<T>(x, line).of[lane % metal_emulator::kSimdWidth];
}
template <class T>
inline T simd_broadcast(T x, ushort lane, uint line = __builtin_LINE()) {
  return simd_shuffle(x, lane, line);
}
template <class T>
inline T simd_shuffle_xor(T x, ushort mask, uint line = __builtin_LINE()) {
  return simd_shuffle(x, (ushort)(metal_emulator_lane() ^ mask), line);
}
template <class T>
inline T simd_shuffle_down(T x, ushort by, uint line = __builtin_LINE()) {
  return simd_shuffle(x, (ushort)(metal_emulator_lane() + by), line);
}
template <class T>
inline T simd_shuffle_up(T x, ushort by, uint line = __builtin_LINE()) {
  return simd_shuffle(x, (ushort)(metal_emulator_lane() - by), line);
}
template <class T>
inline T simd_sum(T x, uint line = __builtin_LINE()) {
  Lanes<T> lanes(x, line);
  T sum = lanes.of[0];
  for (uint i = 1; i < metal_emulator::kSimdWidth; ++i) sum += lanes.of[i];
  return sum;
}

// ---- Atomics, of 32 bits only

enum memory_order { memory_order_relaxed };

template <class T>
struct atomic {
  static_assert(sizeof(T) == 4, "Metal has no 64-bit atomics that every Apple GPU supports");
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<long> atomic_long;
typedef atomic<ulong> atomic_ulong;

#define METAL_EMULATOR_ATOMICS(space)                                                       \
  template <class T>                                                                        \
  inline T atomic_load_explicit(const volatile space atomic<T>* object, memory_order) {     \
    return __atomic_load_n(&object->value, __ATOMIC_RELAXED);                               \
  }                                                                                         \
  template <class T, class U>                                                               \
  inline void atomic_store_explicit(volatile space atomic<T>* object, U x, memory_order) {  \
    __atomic_store_n(&object->value, (T)x, __ATOMIC_RELAXED);                               \
  }                                                                                         \
  template <class T, class U>                                                               \
  inline T atomic_fetch_add_explicit(volatile space atomic<T>* object, U x, memory_order) { \
    return __atomic_fetch_add(&object->value, (T)x, __ATOMIC_RELAXED);                      \
  }                                                                                         \
  template <class T, class U>                                                               \
  inline T atomic_fetch_or_explicit(volatile space atomic<T>* object, U x, memory_order) {  \
    return __atomic_fetch_or(&object->value, (T)x, __ATOMIC_RELAXED);                       \
  }                                                                                         \
  template <class T, class U>                                                               \
  inline T atomic_fetch_min_explicit(volatile space atomic<T>* object, U x, memory_order) { \
    return __atomic_fetch_min(&object->value, (T)x, __ATOMIC_RELAXED);                      \
  }                                                                                         \
  template <class T, class U>                                                               \
  inline T atomic_fetch_max_explicit(volatile space atomic<T>* object, U x, memory_order) { \
    return __atomic_fetch_max(&object->value, (T)x, __ATOMIC_RELAXED);                      \
  }
METAL_EMULATOR_ATOMICS(device)
METAL_EMULATOR_ATOMICS(threadgroup)
#undef METAL_EMULATOR_ATOMICS

}  // namespace metal

// clang calls this to round to bfloat; not every system's library has it.
extern "C" __attribute__((used, weak, visibility("hidden"))) bfloat __truncsfbf2(float x) {
  uint bits = __builtin_bit_cast(uint, x);
  uint rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  uint quiet_nan = bits | 0x400000u;
  ushort half_of = (ushort)(((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded) >> 16);
  return __builtin_bit_cast(bfloat, half_of);
}

// ---- How a kernel's arguments are made: from its type, and the attributes that the translator
// read.

namespace metal_emulator {

template <unsigned I, class F>
struct Parameter;
template <unsigned I, class First, class... Rest>
struct Parameter<I, void(First, Rest...)> {
  typedef typename Parameter<I - 1, void(Rest...)>::Type Type;
};
template <class First, class... Rest>
struct Parameter<0, void(First, Rest...)> {
  typedef First Type;
};
template <unsigned I, class F>
using ParameterOf = typename Parameter<I, F>::Type;

template <class T>
struct SizeOf {
  static constexpr unsigned long size = sizeof(T);
  static constexpr unsigned long alignment = alignof(T);
};
template <>
struct SizeOf<void> {
  static constexpr unsigned long size = 1;
  static constexpr unsigned long alignment = 1;
};

template <class T>
struct BufferType {
  static_assert(sizeof(T) == 0,
                "a [[buffer]] argument must be a pointer or a reference to device or constant "
                "memory: its address space is missing or wrong");
};
#define METAL_EMULATOR_BUFFER_TYPE(qualifiers, star, space_, const_, reference_) \
  template <class T>                                                             \
  struct BufferType<qualifiers T star> {                                         \
    typedef T Pointee;                                                           \
    typedef qualifiers T* Pointer;                                               \
    static constexpr Space space = space_;                                       \
    static constexpr bool is_const = const_;                                     \
    static constexpr bool is_reference = reference_;                             \
  };
#define METAL_EMULATOR_AS1 __attribute__((address_space(1)))
#define METAL_EMULATOR_AS2 __attribute__((address_space(2)))
METAL_EMULATOR_BUFFER_TYPE(METAL_EMULATOR_AS1, *, Space::kDevice, false, false)
METAL_EMULATOR_BUFFER_TYPE(const METAL_EMULATOR_AS1, *, Space::kDevice, true, false)
METAL_EMULATOR_BUFFER_TYPE(METAL_EMULATOR_AS1, &, Space::kDevice, false, true)
METAL_EMULATOR_BUFFER_TYPE(const METAL_EMULATOR_AS1, &, Space::kDevice, true, true)
METAL_EMULATOR_BUFFER_TYPE(const METAL_EMULATOR_AS2, *, Space::kConstant, true, false)
METAL_EMULATOR_BUFFER_TYPE(const METAL_EMULATOR_AS2, &, Space::kConstant, true, true)
#undef METAL_EMULATOR_BUFFER_TYPE

template <class T>
constexpr Argument argument(const char* name, unsigned index) {
  typedef BufferType<T> Type;
  typedef SizeOf<typename Type::Pointee> Size;
  return {name,       index,          Type::space, Type::is_const, Type::is_reference,
          Size::size, Size::alignment};
}

template <class T, bool is_reference = BufferType<T>::is_reference>
struct Bind {
  static T buffer(unsigned long address) { return (T)address; }
};
template <class T>
struct Bind<T, true> {
  static T buffer(unsigned long address) { return *(typename BufferType<T>::Pointer)address; }
};

template <class T>
inline T position(const unsigned (&x)[3]) {
  typedef typename Shape<T>::Element Element;
  static_assert(Same<Element, uint>::value || Same<Element, ushort>::value,
                "a thread's position is a uint or a ushort, or a vector of 2 or 3 of them");
  static_assert(Shape<T>::size <= 3, "a thread's position has at most 3 components");
  T p;
  if constexpr (Shape<T>::size == 1) {
    p = (T)x[0];
  } else {
    for (int i = 0; i < Shape<T>::size; ++i) p[i] = (Element)x[i];
  }
  return p;
}
template <class T>
inline T position(unsigned x) {
  static_assert(Same<T, uint>::value || Same<T, ushort>::value,
                "an index among threads is a uint or a ushort");
  return (T)x;
}

}  // namespace metal_emulator
