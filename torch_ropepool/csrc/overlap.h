// Whether strided views share memory, decided exactly.
#pragma once

#include <cstdint>

namespace rope_pool {

struct View {
  std::uint64_t address;        // of the first element, in bytes
  std::int64_t itemsize;        // in bytes
  std::int64_t ndim;            // at most kMaxDims
  const std::int64_t* sizes;    // [ndim]
  const std::int64_t* strides;  // [ndim], in elements, not negative
};

constexpr std::int64_t kMaxDims = 4;  // a paged pool

enum class Overlap : int { kNo = 0, kYes = 1, kUndecided = 2 };

// The bytes that a view touches lie in [address, address + byte_extent). 0 when it is empty.
std::uint64_t byte_extent(std::int64_t itemsize, std::int64_t ndim, const std::int64_t* sizes,
                          const std::int64_t* strides);

// Whether a byte belongs to both views.
Overlap overlap(const View& a, const View& b);

// Whether two index tuples of the view name the same element.
Overlap self_overlap(const View& view);

}  // namespace rope_pool
