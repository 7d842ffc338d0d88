#include "contract.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdio>
#include <stdexcept>

namespace rope_pool {
namespace {

// Only called to build a message.
class Message {
 public:
  Message& operator<<(const char* text) {
    text_ += text;
    return *this;
  }
  Message& operator<<(const std::string& text) {
    text_ += text;
    return *this;
  }
  Message& operator<<(std::int64_t number) {
    text_ += std::to_string(number);
    return *this;
  }
  Message& operator<<(double number) {
    char text[32];
    std::snprintf(text, sizeof text, "%g", number);
    text_ += std::isnan(number) ? "nan" : text;
    return *this;
  }
  // A list or a tensor's shape, as in Python: [4, 8, 64].
  Message& operator<<(const std::vector<std::int64_t>& numbers) {
    text_ += '[';
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      if (i > 0) text_ += ", ";
      text_ += std::to_string(numbers[i]);
    }
    text_ += ']';
    return *this;
  }
  Message& operator<<(const TensorView& tensor) {
    return *this << std::vector<std::int64_t>(tensor.sizes, tensor.sizes + tensor.ndim);
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

[[noreturn]] void fail(const Message& message) { throw std::invalid_argument(message.text()); }

// A [num_tokens, heads, head_dim] tensor given as [num_tokens, heads * head_dim], or with a batch
// dimension in front: the two ways in which callers hold it elsewhere.
void add_rank_hint(Message& message, const TensorView& t, std::int64_t heads,
                   std::int64_t head_dim) {
  if (t.ndim == 2 && heads > 0 && t.sizes[1] % heads == 0 && t.sizes[1] / heads == head_dim) {
    message << "\nhint: the heads of " << t.name << " are packed; pass " << t.name << ".view("
            << t.sizes[0] << ", " << heads << ", " << head_dim << ")";
  } else if (t.ndim == 4 && t.sizes[2] == heads && t.sizes[3] == head_dim) {
    message << "\nhint: " << t.name << " has a batch dimension; pass " << t.name
            << ".flatten(0, 1)";
  }
}

// A paged pool without page_size is what callers of paged attention pass.
void add_pool_rank_hint(Message& message, const TensorView& t, std::int64_t heads,
                        std::int64_t head_dim) {
  if (t.ndim == 4 && t.sizes[2] == heads && t.sizes[3] == head_dim) {
    message << "\nhint: for a paged pool, pass page_size=" << t.sizes[1];
  } else {
    add_rank_hint(message, t, heads, head_dim);
  }
}

[[noreturn]] void fail_mrope_positions(const RopePoolArgs& a) {
  fail(Message() << "positions must be [3, num_tokens], got " << a.positions);
}

void check_ranks(const RopePoolArgs& a) {
  for (const TensorView* t : {&a.q, &a.k, &a.v}) {
    if (t->ndim == 3) continue;
    Message message;
    message << "rope_pool_fused expects q/k/v to be 3-D, got " << t->name << " " << *t;
    add_rank_hint(message, *t, t == &a.q ? a.num_qo_heads : a.num_kv_heads, a.head_dim);
    fail(message);
  }
  if (a.mrope_section && (a.positions.ndim != 2 || a.positions.sizes[0] != 3)) {
    fail_mrope_positions(a);
  }
  for (const TensorView* t : {&a.positions, &a.slots}) {
    if (t->ndim == 1 || (a.mrope_section && t == &a.positions)) continue;
    fail(Message() << "rope_pool_fused expects positions/slots to be 1-D, got " << t->name << " "
                   << *t);
  }
  const std::int64_t pool_rank = a.page_size ? 4 : 3;
  for (const TensorView* t : {&a.k_pool, &a.v_pool}) {
    if (t->ndim == pool_rank) continue;
    Message message;
    message << "rope_pool_fused expects pool tensors to be " << pool_rank << "-D, got " << t->name
            << " " << *t;
    if (pool_rank == 3) add_pool_rank_hint(message, *t, a.num_kv_heads, a.head_dim);
    fail(message);
  }
}

bool same_shape(const TensorView& a, const TensorView& b) {
  return std::equal(a.sizes, a.sizes + a.ndim, b.sizes, b.sizes + b.ndim);
}

void check_shapes(const RopePoolArgs& a) {
  if (a.q.sizes[1] != a.num_qo_heads || a.q.sizes[2] != a.head_dim) {
    Message message;
    message << "q shape must be [num_tokens, num_qo_heads, head_dim], got " << a.q
            << " with num_qo_heads " << a.num_qo_heads << ", head_dim " << a.head_dim;
    if (a.q.sizes[1] == a.num_kv_heads && a.k.sizes[1] == a.num_qo_heads) {
      message << "\nhint: num_qo_heads and num_kv_heads look swapped";
    }
    fail(message);
  }
  if (a.k.sizes[0] != a.num_tokens() || a.k.sizes[1] != a.num_kv_heads ||
      a.k.sizes[2] != a.head_dim) {
    fail(Message() << "k shape must be [num_tokens, num_kv_heads, head_dim], got " << a.k
                   << " with num_tokens " << a.num_tokens() << ", num_kv_heads " << a.num_kv_heads
                   << ", head_dim " << a.head_dim);
  }
  if (!same_shape(a.v, a.k)) {
    fail(Message() << "v shape must match k shape, got " << a.v << " vs " << a.k);
  }
  if (a.mrope_section && a.positions.sizes[1] != a.num_tokens()) fail_mrope_positions(a);
  if (a.positions.sizes[a.positions.ndim - 1] != a.num_tokens() ||
      a.slots.sizes[0] != a.num_tokens()) {
    fail(Message() << "positions/slots must have one entry per token, got positions " << a.positions
                   << ", slots " << a.slots << " for " << a.num_tokens() << " tokens");
  }
  const std::int64_t* row = a.k_pool.sizes + a.k_pool.ndim - 2;
  if (row[0] != a.num_kv_heads || row[1] != a.head_dim) {
    fail(Message() << "k_pool has incompatible shape " << a.k_pool << ": must be ["
                   << (a.page_size ? "num_pages, page_size" : "pool_size")
                   << ", num_kv_heads, head_dim] with num_kv_heads " << a.num_kv_heads
                   << ", head_dim " << a.head_dim);
  }
  if (!same_shape(a.v_pool, a.k_pool)) {
    fail(Message() << "v_pool shape must match k_pool shape, got " << a.v_pool << " vs "
                   << a.k_pool);
  }
}

bool is_half_or_single(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32;
}

void check_dtypes(const RopePoolArgs& a, bool allows_float64) {
  if (a.k.scalar_type != a.q.scalar_type || a.v.scalar_type != a.q.scalar_type) {
    fail(Message() << "q/k/v dtypes must match, got q " << dtype_name(a.q) << ", k "
                   << dtype_name(a.k) << ", v " << dtype_name(a.v));
  }
  if (a.k_pool.scalar_type != a.q.scalar_type || a.v_pool.scalar_type != a.q.scalar_type) {
    fail(Message() << "pool dtypes must match q/k/v dtype, got k_pool " << dtype_name(a.k_pool)
                   << ", v_pool " << dtype_name(a.v_pool) << " with q/k/v " << dtype_name(a.q));
  }
  if (!is_half_or_single(a.q.dtype) && !(allows_float64 && a.q.dtype == DType::kFloat64)) {
    fail(Message() << "q/k/v dtype must be float16, bfloat16 or float32, got " << dtype_name(a.q));
  }
  for (const TensorView* t : {&a.positions, &a.slots}) {
    if (t->dtype == DType::kInt32 || t->dtype == DType::kInt64) continue;
    fail(Message() << "positions/slots must be int32 or int64, got " << t->name << " "
                   << dtype_name(*t));
  }
}

void check_scalars(const RopePoolArgs& a) {
  if (!a.rotary_dim && (a.head_dim % 2 != 0 || a.head_dim < 2)) {
    fail(Message() << "head_dim must be even and at least 2, got " << a.head_dim);
  }
  if (a.num_qo_heads < 1)
    fail(Message() << "num_qo_heads must be at least 1, got " << a.num_qo_heads);
  if (a.num_kv_heads < 1)
    fail(Message() << "num_kv_heads must be at least 1, got " << a.num_kv_heads);
  if (a.rope_base && !(std::isfinite(*a.rope_base) && *a.rope_base > 0)) {
    fail(Message() << "rope_base must be finite and positive, got " << *a.rope_base);
  }
}

View view_of(const TensorView& t) {
  return {t.byte_address, t.itemsize, t.ndim, t.sizes, t.strides};
}

void check_device(const RopePoolArgs& a, const TensorView& t) {
  if (t.device_type == a.q.device_type && t.device_index == a.q.device_index) return;
  fail(Message() << "all tensors must be on one device, got q on " << device_name(a.q) << ", "
                 << t.name << " on " << device_name(t));
}

void check_storage(const TensorView& t) {
  const auto extent = static_cast<std::int64_t>(t.byte_extent);
  const std::int64_t needed = extent == 0 ? 0 : t.storage_offset * t.itemsize + extent;
  if (needed <= t.storage_bytes) return;
  fail(Message() << t.name << " needs a storage of " << needed << " bytes, got one of "
                 << t.storage_bytes);
}

void check_memory(const RopePoolArgs& a) {
  const TensorView* tensors[] = {&a.q, &a.k, &a.v, &a.positions, &a.slots, &a.k_pool, &a.v_pool};
  for (const TensorView* t : tensors) check_device(a, *t);
  for (const TensorView* t : tensors) check_storage(*t);
}

[[noreturn]] void fail_overlap(const char* what, Overlap overlap) {
  Message message;
  message << what;
  if (overlap == Overlap::kUndecided) {
    message << ", which 1000 steps of search could not rule out for these strides";
  }
  fail(message);
}

void check_no_overlap(const TensorView& written, const TensorView& other) {
  if (written.buffer != other.buffer ||
      written.byte_address + written.byte_extent <= other.byte_address ||
      other.byte_address + other.byte_extent <= written.byte_address) {
    return;
  }
  const Overlap found = overlap(view_of(written), view_of(other));
  if (found == Overlap::kNo) return;
  const std::string what = std::string(written.name) + " and " + other.name + " must not overlap";
  fail_overlap(what.c_str(), found);
}

void check_no_self_overlap(const TensorView& written) {
  const Overlap found = self_overlap(view_of(written));
  if (found == Overlap::kNo) return;
  const std::string what = std::string(written.name) + " must not overlap itself";
  fail_overlap(what.c_str(), found);
}

// A tensor that is written shares no memory with itself or any other.
void check_overlaps(const RopePoolArgs& a, bool in_place) {
  check_no_self_overlap(a.k_pool);
  check_no_self_overlap(a.v_pool);
  check_no_overlap(a.k_pool, a.v_pool);
  for (const TensorView* pool : {&a.k_pool, &a.v_pool}) {
    for (const TensorView* t : {&a.q, &a.k, &a.v, &a.positions, &a.slots})
      check_no_overlap(*pool, *t);
  }
  if (!in_place) return;
  check_no_self_overlap(a.q);
  check_no_self_overlap(a.k);
  check_no_overlap(a.q, a.k);
  for (const TensorView* written : {&a.q, &a.k}) {
    for (const TensorView* t : {&a.v, &a.positions, &a.slots}) check_no_overlap(*written, *t);
  }
}

void check_inv_freq(const RopePoolArgs& a, const ContractOptions& options) {
  if (a.rope_base.has_value() == a.inv_freq.has_value()) {
    fail(Message() << "exactly one of rope_base and inv_freq must be given, got "
                   << (a.rope_base ? "both" : "neither"));
  }
  if (!a.inv_freq) return;
  const TensorView& t = *a.inv_freq;
  if (t.ndim != 1 || t.sizes[0] != a.num_pairs()) {
    fail(Message() << "inv_freq shape must be [rotary_dim / 2], got " << t << " with rotary_dim "
                   << a.rotary_dim.value_or(a.head_dim));
  }
  const bool is_float64 = t.dtype == DType::kFloat64 && options.allows_float64_inv_freq;
  if (t.dtype != DType::kFloat32 && !is_float64) {
    fail(Message() << "inv_freq must be float32"
                   << (options.allows_float64_inv_freq ? " or float64" : "") << ", got "
                   << dtype_name(t));
  }
  if (!is_on_cpu(t)) check_device(a, t);
  check_storage(t);
  check_no_overlap(a.k_pool, t);
  check_no_overlap(a.v_pool, t);
  if (!options.in_place) return;
  check_no_overlap(a.q, t);
  check_no_overlap(a.k, t);
}

void check_rotary_dim(const RopePoolArgs& a) {
  if (!a.rotary_dim) return;
  const std::int64_t rotary_dim = *a.rotary_dim;
  if (rotary_dim % 2 != 0 || rotary_dim < 2 || rotary_dim > a.head_dim) {
    fail(Message() << "rotary_dim must be even, at least 2 and at most head_dim, got " << rotary_dim
                   << " with head_dim " << a.head_dim);
  }
}

void check_page_size(const RopePoolArgs& a) {
  if (!a.page_size) return;
  if (*a.page_size < 1 || *a.page_size != a.k_pool.sizes[1]) {
    fail(Message() << "page_size must be k_pool.shape[1] and at least 1, got " << *a.page_size
                   << " with k_pool " << a.k_pool);
  }
}

void check_mrope(const RopePoolArgs& a) {
  if (!a.mrope_section) {
    if (a.mrope_interleaved) fail(Message() << "mrope_interleaved needs mrope_section");
    return;
  }
  const std::vector<std::int64_t>& section = *a.mrope_section;
  const std::int64_t num_pairs = a.num_pairs();
  bool fits = section.size() == 3;
  std::int64_t rest = num_pairs;  // the counts are taken off one by one: a sum might overflow
  for (std::int64_t count : section) {
    fits = fits && count >= 0 && count <= rest;
    rest -= fits ? count : 0;
  }
  if (!fits || rest != 0) {
    fail(Message() << "mrope_section must be 3 counts that sum up to rotary_dim / 2, got "
                   << section << " with rotary_dim " << a.rotary_dim.value_or(a.head_dim));
  }
}

}  // namespace

void check_contract(const RopePoolArgs& args, const ContractOptions& options) {
  check_ranks(args);
  check_shapes(args);
  check_dtypes(args, options.allows_float64);
  check_scalars(args);
  check_memory(args);
  check_overlaps(args, options.in_place);
  check_inv_freq(args, options);
  if (!(std::fabs(args.attention_scaling) <= FLT_MAX)) {
    fail(Message() << "attention_scaling must be finite in float32, got "
                   << args.attention_scaling);
  }
  check_rotary_dim(args);
  check_page_size(args);
  check_mrope(args);
}

}  // namespace rope_pool
