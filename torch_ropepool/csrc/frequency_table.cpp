#include "frequency_table.h"

#include <cmath>
#include <list>
#include <mutex>

namespace rope_pool {
namespace {

// A non-negative fixed-point number in limbs of 32 bits, least significant first. Results are
// truncated to its width; the callers below keep 200 guard bits.
class Fixed {
 public:
  Fixed(std::size_t integer_limbs, std::size_t fraction_limbs, u64 value = 0)
      : limbs_(integer_limbs + fraction_limbs), fraction_(fraction_limbs) {
    limbs_[fraction_] = static_cast<u32>(value);
    limbs_[fraction_ + 1] = static_cast<u32>(value >> 32);
  }

  // The i-th limb below the point.
  u32 fraction_limb(std::size_t i) const { return limbs_[fraction_ - 1 - i]; }

  bool is_zero() const {
    for (u32 limb : limbs_) {
      if (limb != 0) return false;
    }
    return true;
  }

  bool operator<(const Fixed& other) const {
    for (std::size_t i = limbs_.size(); i-- > 0;) {
      if (limbs_[i] != other.limbs_[i]) return limbs_[i] < other.limbs_[i];
    }
    return false;
  }

  Fixed operator+(const Fixed& other) const {
    Fixed result = *this;
    u64 carry = 0;
    for (std::size_t i = 0; i < limbs_.size(); ++i) {
      carry += u64{limbs_[i]} + other.limbs_[i];
      result.limbs_[i] = static_cast<u32>(carry);
      carry >>= 32;
    }
    return result;
  }

  Fixed operator-(const Fixed& other) const {
    Fixed result = *this;
    u64 borrow = 0;
    for (std::size_t i = 0; i < limbs_.size(); ++i) {
      const u64 difference = u64{limbs_[i]} - other.limbs_[i] - borrow;
      result.limbs_[i] = static_cast<u32>(difference);
      borrow = difference >> 63;
    }
    return result;
  }

  Fixed operator*(const Fixed& other) const {
    const std::size_t n = limbs_.size();
    std::vector<u32> product(2 * n);
    for (std::size_t i = 0; i < n; ++i) {
      u64 carry = 0;
      for (std::size_t j = 0; j < n; ++j) {
        carry += u64{limbs_[i]} * other.limbs_[j] + product[i + j];
        product[i + j] = static_cast<u32>(carry);
        carry >>= 32;
      }
      product[i + n] = static_cast<u32>(carry);
    }
    Fixed result = *this;
    for (std::size_t i = 0; i < n; ++i) result.limbs_[i] = product[i + fraction_];
    return result;
  }

  Fixed times(u32 factor) const {
    Fixed result = *this;
    u64 carry = 0;
    for (u32& limb : result.limbs_) {
      carry += u64{limb} * factor;
      limb = static_cast<u32>(carry);
      carry >>= 32;
    }
    return result;
  }

  Fixed over(u32 divisor) const {
    Fixed result = *this;
    u64 rest = 0;
    for (std::size_t i = limbs_.size(); i-- > 0;) {
      rest = rest << 32 | limbs_[i];
      result.limbs_[i] = static_cast<u32>(rest / divisor);
      rest %= divisor;
    }
    return result;
  }

  // The quotient, which must be below 1 or exactly 1. Long division in binary.
  Fixed operator/(const Fixed& divisor) const {
    Fixed result(limbs_.size() - fraction_, fraction_);
    Fixed rest = *this;
    for (std::size_t bit = 32 * fraction_ + 1; bit-- > 0;) {
      if (!(rest < divisor)) {
        rest = rest - divisor;
        result.limbs_[bit / 32] |= u32{1} << (bit % 32);
      }
      rest = rest + rest;
    }
    return result;
  }

 private:
  std::vector<u32> limbs_;
  std::size_t fraction_;
};

// The functions below take and give numbers of one width; `one` says which.

// Sum of x^(2k+1) / (2k+1); 0 <= x < 1.
Fixed artanh(const Fixed& x) {
  const Fixed square = x * x;
  Fixed sum = x;
  Fixed power = x * square;
  for (u32 n = 3; !power.is_zero(); n += 2) {
    sum = sum + power.over(n);
    power = power * square;
  }
  return sum;
}

// arctan(1 / n).
Fixed arctan_of_inverse(const Fixed& one, u32 n) {
  Fixed power = one.over(n);
  Fixed positive = power;
  Fixed negative = one - one;
  power = power.over(n * n);
  for (u32 k = 3; !power.is_zero(); k += 2) {
    Fixed& sum = k % 4 == 3 ? negative : positive;
    sum = sum + power.over(k);
    power = power.over(n * n);
  }
  return positive - negative;
}

// e^x; 0 <= x < 1.
Fixed exponential(const Fixed& one, const Fixed& x) {
  Fixed sum = one;
  Fixed term = one;
  for (u32 n = 1; !term.is_zero(); ++n) {
    term = (term * x).over(n);
    sum = sum + term;
  }
  return sum;
}

// rope_base^(-2 / dim).
Fixed ratio_of_frequencies(const Fixed& one, double rope_base, std::size_t dim) {
  // rope_base = m * 2^exponent, 1 <= m < 2, so ln(rope_base) = ln(m) + exponent * ln(2).
  int exponent = 0;
  const u64 mantissa = static_cast<u64>(std::ldexp(std::frexp(rope_base, &exponent), 53));
  exponent -= 1;
  Fixed m = one - one;
  for (int bit = 0; bit < 53; ++bit) {
    m = m.over(2);
    if ((mantissa >> bit & 1) != 0) m = m + one;
  }
  const Fixed ln_m = artanh((m - one) / (m + one)).times(2);
  const Fixed ln_2 = artanh(one.over(3)).times(2);
  const bool grows = exponent < 0;  // a base below 1
  const Fixed ln_base = grows ? ln_2.times(static_cast<u32>(-exponent)) - ln_m
                              : ln_2.times(static_cast<u32>(exponent)) + ln_m;

  Fixed rest = ln_base.times(2).over(static_cast<u32>(dim));
  std::size_t doublings = 0;
  for (; !(rest < ln_2); ++doublings) rest = rest - ln_2;
  Fixed ratio = exponential(one, rest);
  if (!grows) ratio = one / ratio;
  for (std::size_t i = 0; i < doublings; ++i) ratio = grows ? ratio + ratio : ratio.over(2);
  return ratio;
}

}  // namespace

FrequencyTable make_frequency_table(const std::vector<double>& inv_freq) {
  FrequencyTable table(inv_freq.size());
  for (std::size_t i = 0; i < inv_freq.size(); ++i) table.set(i, frequency_of(inv_freq[i]));
  return table;
}

FrequencyTable make_frequency_table(double rope_base, std::size_t dim) {
  // A base below 1 gives frequencies of up to 2^1074 turns, of which the fraction is wanted.
  const std::size_t extra =
      rope_base < 1 ? static_cast<std::size_t>(-std::log2(rope_base)) / 32 + 2 : 0;
  const Fixed one(2 + extra, 10 + 2 * extra, 1);
  const Fixed pi = arctan_of_inverse(one, 5).times(16) - arctan_of_inverse(one, 239).times(4);
  const Fixed ratio = ratio_of_frequencies(one, rope_base, dim);

  const std::size_t num_pairs = dim / 2;
  FrequencyTable table(num_pairs);
  Fixed turns = one / pi.times(2);
  for (std::size_t i = 0; i < num_pairs; ++i) {
    const u64 top = u64{turns.fraction_limb(0)} << 32 | turns.fraction_limb(1);
    const u32 rest = turns.fraction_limb(2);
    const u64 nearest = top + (rest >> 31);
    table.set(i,
              {static_cast<u32>(nearest >> 32), static_cast<u32>(nearest), static_cast<i32>(rest)});
    turns = turns * ratio;
  }
  return table;
}

std::shared_ptr<const FrequencyTable> frequency_table(double rope_base, std::size_t dim) {
  struct Entry {
    double rope_base = 0;
    std::size_t dim = 0;
    std::shared_ptr<const FrequencyTable> table;
    bool is(double other_base, std::size_t other_dim) const {
      return table != nullptr && rope_base == other_base && dim == other_dim;
    }
  };
  // Bounded: a model with dynamic scaling changes its base all the time.
  constexpr std::size_t kMaxEntries = 64;
  static std::mutex mutex;
  static std::list<Entry> entries;  // most recently used first
  thread_local Entry last;

  if (last.is(rope_base, dim)) return last.table;
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = entries.begin();
  while (found != entries.end() && !found->is(rope_base, dim)) ++found;
  if (found == entries.end()) {
    entries.push_front(
        {rope_base, dim,
         std::make_shared<const FrequencyTable>(make_frequency_table(rope_base, dim))});
    if (entries.size() > kMaxEntries) entries.pop_back();
  } else {
    entries.splice(entries.begin(), entries, found);
  }
  last = entries.front();
  return last.table;
}

std::shared_ptr<const FrequencyTable> frequency_table(const std::vector<double>& inv_freq) {
  thread_local std::vector<double> last;
  thread_local std::shared_ptr<const FrequencyTable> table;
  if (table == nullptr || last != inv_freq) {
    table = std::make_shared<const FrequencyTable>(make_frequency_table(inv_freq));
    last = inv_freq;
  }
  return table;
}

}  // namespace rope_pool
