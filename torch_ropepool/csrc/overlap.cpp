#include "overlap.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace rope_pool {
namespace {

// One variable of a sum: stride * n, 0 <= n <= last.
struct Term {
  std::uint64_t stride;
  std::uint64_t last;
};

// Insertion sort: there are a handful, mostly in order.
void sort_by_stride(Term* terms, int count) {
  for (int i = 1; i < count; ++i) {
    for (int j = i; j > 0 && terms[j].stride < terms[j - 1].stride; --j) {
      std::swap(terms[j], terms[j - 1]);
    }
  }
}

// Is target = sum of stride_i * n_i for some n_i? Depth first, the largest stride first; each level
// tries only the n that the smaller strides can complete, and only if their gcd allows it.
class BoundedSum {
 public:
  void add(std::uint64_t stride, std::uint64_t last) {
    if (stride > 0 && last > 0) terms_[count_++] = {stride, last};
  }

  Overlap reaches(std::uint64_t target) {
    sort_by_stride(terms_, count_);
    merge_equal_strides();
    std::uint64_t sum = 0;
    std::uint64_t divisor = 0;
    for (int i = 0; i < count_; ++i) {
      sum += terms_[i].stride * terms_[i].last;
      divisor = std::gcd(divisor, terms_[i].stride);
      max_sum_[i] = sum;
      gcd_[i] = divisor;
    }
    return search(count_ - 1, target);
  }

 private:
  static constexpr int kMaxSteps = 1000;
  static constexpr int kMaxTerms = 2 * (static_cast<int>(kMaxDims) + 1);

  void merge_equal_strides() {
    int kept = 0;
    for (int i = 0; i < count_; ++i) {
      if (kept > 0 && terms_[kept - 1].stride == terms_[i].stride) {
        terms_[kept - 1].last += terms_[i].last;
      } else {
        terms_[kept++] = terms_[i];
      }
    }
    count_ = kept;
  }

  Overlap search(int i, std::uint64_t target) {
    if (target == 0) return Overlap::kYes;
    if (i < 0 || target > max_sum_[i] || target % gcd_[i] != 0) return Overlap::kNo;
    const Term& term = terms_[i];
    const std::uint64_t rest = i > 0 ? max_sum_[i - 1] : 0;
    const std::uint64_t first = target > rest ? (target - rest + term.stride - 1) / term.stride : 0;
    const std::uint64_t last = std::min(term.last, target / term.stride);
    for (std::uint64_t n = first; n <= last; ++n) {
      if (++steps_ > kMaxSteps) return Overlap::kUndecided;
      const Overlap found = search(i - 1, target - n * term.stride);
      if (found != Overlap::kNo) return found;
    }
    return Overlap::kNo;
  }

  Term terms_[kMaxTerms];
  std::uint64_t max_sum_[kMaxTerms];  // of the terms up to this one
  std::uint64_t gcd_[kMaxTerms];      // of the strides up to this one
  int count_ = 0;
  int steps_ = 0;
};

std::uint64_t extent_of(const View& view) {
  return byte_extent(view.itemsize, view.ndim, view.sizes, view.strides);
}

Term term_of(const View& view, std::int64_t d) {
  return {static_cast<std::uint64_t>(view.strides[d]),
          static_cast<std::uint64_t>(view.sizes[d] - 1)};
}

}  // namespace

std::uint64_t byte_extent(std::int64_t itemsize, std::int64_t ndim, const std::int64_t* sizes,
                          const std::int64_t* strides) {
  std::uint64_t last_element = 0;
  for (std::int64_t d = 0; d < ndim; ++d) {
    if (sizes[d] == 0) return 0;
    last_element +=
        static_cast<std::uint64_t>(sizes[d] - 1) * static_cast<std::uint64_t>(strides[d]);
  }
  return (last_element + 1) * static_cast<std::uint64_t>(itemsize);
}

Overlap overlap(const View& a, const View& b) {
  const std::uint64_t a_extent = extent_of(a);
  const std::uint64_t b_extent = extent_of(b);
  if (a_extent == 0 || b_extent == 0) return Overlap::kNo;
  if (a.address + a_extent <= b.address || b.address + b_extent <= a.address) return Overlap::kNo;

  // A byte of a is a.address + sum of steps; one of b, counted from its end, b.address + b_extent -
  // 1 minus a sum of steps. They are the same byte when both sums together make up the difference.
  BoundedSum sum;
  for (const View* view : {&a, &b}) {
    const auto itemsize = static_cast<std::uint64_t>(view->itemsize);
    sum.add(1, itemsize - 1);
    for (std::int64_t d = 0; d < view->ndim; ++d) {
      const Term term = term_of(*view, d);
      sum.add(term.stride * itemsize, term.last);
    }
  }
  return sum.reaches(b.address + b_extent - 1 - a.address);
}

Overlap self_overlap(const View& view) {
  if (extent_of(view) == 0) return Overlap::kNo;
  Term terms[kMaxDims];
  int count = 0;
  for (std::int64_t d = 0; d < view.ndim; ++d) {
    if (view.sizes[d] > 1) terms[count++] = term_of(view, d);
  }
  sort_by_stride(terms, count);

  // Two tuples that name one element differ by a sum of stride * difference that is zero. Take the
  // largest stride whose indices differ, by at least 1; the smaller ones must make up for it.
  std::uint64_t smaller = 0;  // sum of the smaller strides' stride * last
  for (int top = 0; top < count; ++top) {
    const Term& term = terms[top];
    if (term.stride == 0) return Overlap::kYes;
    if (term.stride <= smaller) {
      // stride * (1 + n) = sum of smaller stride * difference, each difference within +-last;
      // counted from -last, they and stride * n must sum to smaller - stride.
      BoundedSum sum;
      sum.add(term.stride, term.last - 1);
      for (int i = 0; i < top; ++i) sum.add(terms[i].stride, 2 * terms[i].last);
      const Overlap found = sum.reaches(smaller - term.stride);
      if (found != Overlap::kNo) return found;
    }
    smaller += term.stride * term.last;
  }
  return Overlap::kNo;
}

}  // namespace rope_pool
