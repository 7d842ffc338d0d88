// Frequencies of the rotary pairs, correctly rounded and cached.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "rope_math.h"

namespace rope_pool {

struct FrequencyTable {
  explicit FrequencyTable(std::size_t num_pairs)
      : high(num_pairs), low(num_pairs), tail(num_pairs) {}
  void set(std::size_t pair, Frequency f) {
    high[pair] = f.high;
    low[pair] = f.low;
    tail[pair] = f.tail;
  }

  std::vector<u32> high;  // [num_pairs]
  std::vector<u32> low;   // [num_pairs]
  std::vector<i32> tail;  // [num_pairs]
};

// rope_base^(-2 i / dim), i < dim / 2. Computed with integers only: no bit depends on a libm.
FrequencyTable make_frequency_table(double rope_base, std::size_t dim);

// inv_freq[i], in radians per position, finite.
FrequencyTable make_frequency_table(const std::vector<double>& inv_freq);

// The same from a cache. Thread-safe; a repeated request of a thread takes no lock.
std::shared_ptr<const FrequencyTable> frequency_table(double rope_base, std::size_t dim);
std::shared_ptr<const FrequencyTable> frequency_table(const std::vector<double>& inv_freq);

}  // namespace rope_pool
