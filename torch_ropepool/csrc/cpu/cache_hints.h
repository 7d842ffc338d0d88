// Hints to the cache, where the machine has them: asking for data ahead, and storing past it.
#pragma once

#include <cstddef>

// Sanitizers do not see such stores.
#if (defined(__SSE2__) || defined(_M_X64)) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#include <immintrin.h>
#define ROPE_POOL_STREAMS 1
#endif

namespace rope_pool {

// A macro: GCC takes a function that only does this for one without effect, and drops calls to it.
#if defined(__GNUC__)
#define ROPE_POOL_PREFETCH(from) __builtin_prefetch(from)
#else
#define ROPE_POOL_PREFETCH(from) static_cast<void>(from)
#endif

// A block copied to an aligned place, past the cache.
#if ROPE_POOL_STREAMS
struct Stream16 {
  static constexpr std::size_t kBytes = 16;
  static void copy(char* to, const char* from) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
};
#if defined(__GNUC__)
struct Stream32 {
  static constexpr std::size_t kBytes = 32;
  __attribute__((target("avx"))) static void copy(char* to, const char* from) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
};
struct Stream64 {
  static constexpr std::size_t kBytes = 64;
  __attribute__((target("avx512f"))) static void copy(char* to, const char* from) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
  }
};
#endif
#endif

inline void finish_streams() {
#if ROPE_POOL_STREAMS
  _mm_sfence();
#endif
}

}  // namespace rope_pool
