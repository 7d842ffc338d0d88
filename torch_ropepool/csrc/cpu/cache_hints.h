// Hints to the cache, where the machine has them: asking for data ahead, and storing past it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

// Sanitizers do not see such stores.
#if (defined(__SSE2__) || defined(_M_X64)) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#include <emmintrin.h>
#define ROPE_POOL_STREAMS 1
#endif

namespace rope_pool {

inline void prefetch(const void* from) {
#if defined(__GNUC__)
  __builtin_prefetch(from);
#endif
}

// `to` does not overlap `from`. Call finish_streams before another thread may read what was copied.
inline void stream_copy(void* to, const void* from, std::size_t size) {
#if ROPE_POOL_STREAMS
  if (reinterpret_cast<std::uintptr_t>(to) % 16 == 0 && size % 16 == 0) {
    auto* vectors = static_cast<__m128i*>(to);
    const auto* source = static_cast<const __m128i*>(from);
    for (std::size_t i = 0; i < size / 16; ++i) {
      _mm_stream_si128(vectors + i, _mm_loadu_si128(source + i));
    }
    return;
  }
#endif
  std::memcpy(to, from, size);
}

inline void finish_streams() {
#if ROPE_POOL_STREAMS
  _mm_sfence();
#endif
}

}  // namespace rope_pool
