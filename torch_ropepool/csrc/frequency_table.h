// Frequencies of the rotary pairs, correctly rounded, cached per (rope_base, dim).
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "rope_math.h"

namespace rope_pool {

// rope_base^(-2 i / dim) / (2 pi), i < dim / 2, as fractions of a turn.
struct FrequencyTable {
  std::vector<u32> high;  // [dim / 2]
  std::vector<u32> low;   // [dim / 2]
  std::vector<i32> tail;  // [dim / 2]
};

// Computed with integers only, to the nearest unit of 2^-96 turn: no bit depends on a libm.
FrequencyTable make_frequency_table(double rope_base, std::size_t dim);

// The same from a cache. Thread-safe; a repeated request of a thread takes no lock.
std::shared_ptr<const FrequencyTable> frequency_table(double rope_base, std::size_t dim);

}  // namespace rope_pool
