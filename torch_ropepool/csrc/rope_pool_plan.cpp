#include "rope_pool_plan.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace rope_pool {
namespace {

constexpr i64 kVectorBytes = 16;
constexpr i64 kWordBytes = 4;

RowStrides row_strides(const TensorView& t) { return {t.strides[0], t.strides[1], t.strides[2]}; }

PoolStrides pool_strides(const TensorView& t) {
  if (t.ndim == 4) return {t.strides[0], t.strides[1], t.strides[2], t.strides[3]};
  return {0, t.strides[0], t.strides[1], t.strides[2]};
}

double inv_freq_at(const TensorView& t, i64 i) {
  return t.dtype == DType::kFloat64 ? static_cast<const double*>(t.data)[i * t.strides[0]]
                                    : double{static_cast<const float*>(t.data)[i * t.strides[0]]};
}

// Whether every chunk of the tensor that begins at a multiple of `chunk` elements is one aligned
// access of kVectorBytes.
bool consists_of_chunks(const TensorView& t, i64 chunk) {
  const i64 last = t.ndim - 1;
  if (t.strides[last] != 1 || t.byte_address % kVectorBytes != 0) return false;
  for (i64 dim = 0; dim < last; ++dim) {
    if (t.sizes[dim] > 1 && t.strides[dim] % chunk != 0) return false;
  }
  return true;
}

// Whether every offset in the tensor, in units of so many bytes, fits in 32 bits.
bool has_short_offsets(const TensorView& t, i64 unit) {
  i64 last = 0;
  for (i64 dim = 0; dim < t.ndim; ++dim)
    last += std::max(t.sizes[dim] - 1, i64{0}) * t.strides[dim];
  return last * t.itemsize / unit <= static_cast<i64>(UINT32_MAX);
}

// A stride in chunks. That of a dimension of one is never used, so it may be anything.
u32 in_chunks(i64 stride, i64 chunk) { return static_cast<u32>(stride / chunk); }

CommonHeads common_heads(const GpuHeads& h, i64 chunk) {
  return {in_chunks(h.in.token, chunk),
          in_chunks(h.in.head, chunk),
          in_chunks(h.out.token, chunk),
          in_chunks(h.out.head, chunk),
          in_chunks(h.pool.row, chunk),
          in_chunks(h.pool.head, chunk),
          h.num_heads,
          h.first_group};
}

CommonParams common_params(const GpuParams& p, i64 chunk) {
  return {p.positions_are_int64,
          p.slots_are_int64,
          p.keeps_unturned,
          p.attention_scaling,
          static_cast<u32>(p.head_dim),
          static_cast<u32>(p.num_pairs),
          static_cast<u32>(p.positions_stride),
          static_cast<u32>(p.slots_stride),
          p.pool_size,
          {common_heads(p.heads[0], chunk), common_heads(p.heads[1], chunk),
           common_heads(p.heads[2], chunk)}};
}

// Whether pages follow each other in memory as their rows do.
bool is_one_page(const PoolStrides& s, i64 page_size) { return s.page == page_size * s.row; }

i64 divide_up(i64 a, i64 b) { return (a + b - 1) / b; }

}  // namespace

RopePoolParams params_of(const RopePoolArgs& args, const TensorView& q_rot,
                         const TensorView& k_rot) {
  RopePoolParams p{};
  p.num_qo_heads = args.num_qo_heads;
  p.num_kv_heads = args.num_kv_heads;
  p.head_dim = args.head_dim;
  p.pool_size = args.pool_size();
  p.page_size = args.page_size.value_or(args.pool_size());
  p.num_pairs = args.num_pairs();
  p.pair_step = args.interleaved ? 2 : 1;
  p.pair_distance = args.interleaved ? 1 : p.num_pairs;
  p.q = row_strides(args.q);
  p.k = row_strides(args.k);
  p.v = row_strides(args.v);
  p.q_rot = row_strides(q_rot);
  p.k_rot = row_strides(k_rot);
  p.k_pool = pool_strides(args.k_pool);
  p.v_pool = pool_strides(args.v_pool);
  return p;
}

bool has_device_inv_freq(const RopePoolArgs& args) {
  return args.inv_freq && args.inv_freq->device_type == args.q.device_type &&
         args.inv_freq->device_index == args.q.device_index;
}

std::shared_ptr<const FrequencyTable> table_of(const RopePoolArgs& args) {
  if (!args.inv_freq) {
    return frequency_table(*args.rope_base, static_cast<std::size_t>(2 * args.num_pairs()));
  }
  std::vector<double> inv_freq(static_cast<std::size_t>(args.num_pairs()));
  for (std::size_t i = 0; i < inv_freq.size(); ++i) {
    inv_freq[i] = inv_freq_at(*args.inv_freq, static_cast<i64>(i));
    if (std::isfinite(inv_freq[i])) continue;
    const char* text = std::isnan(inv_freq[i]) ? "nan" : inv_freq[i] > 0 ? "inf" : "-inf";
    throw std::invalid_argument(std::string("inv_freq must be finite, got ") + text + " at index " +
                                std::to_string(i));
  }
  return frequency_table(inv_freq);
}

bool check_slots(const IndexArray& slots, i64 num_tokens, i64 pool_size) {
  bool increasing = true;
  i64 previous = -1;
  for (i64 token = 0; token < num_tokens; ++token) {
    const i64 slot = slots.at(0, token);
    if (slot < 0) continue;
    if (slot >= pool_size) {
      throw std::out_of_range("slots[" + std::to_string(token) + "] is " + std::to_string(slot) +
                              ", out of range for pool_size " + std::to_string(pool_size) +
                              "; a negative slot means: do not store");
    }
    increasing = increasing && slot > previous;
    previous = slot;
  }
  return increasing;
}

std::unique_ptr<i64[]> last_writers(const IndexArray& slots, i64 num_tokens) {
  // An open-addressing hash set of the slots seen from the end, at most half full.
  std::size_t capacity = 4;
  while (capacity < 2 * static_cast<std::size_t>(num_tokens)) capacity *= 2;
  std::unique_ptr<i64[]> result(new i64[static_cast<std::size_t>(num_tokens)]);
  std::unique_ptr<i64[]> seen(new i64[capacity]);
  std::fill(seen.get(), seen.get() + capacity, i64{-1});
  for (i64 token = num_tokens; token-- > 0;) {
    const i64 slot = slots.at(0, token);
    result[static_cast<std::size_t>(token)] = slot;
    if (slot < 0) continue;
    std::size_t at = (static_cast<std::size_t>(slot) * 0x9e3779b97f4a7c15u >> 32) & (capacity - 1);
    while (seen[at] != -1 && seen[at] != slot) at = (at + 1) & (capacity - 1);
    if (seen[at] == slot) result[static_cast<std::size_t>(token)] = -1;
    seen[at] = slot;
  }
  return result;
}

GpuPlan gpu_plan_of(const RopePoolArgs& args, const TensorView& q_rot, const TensorView& k_rot,
                    i64 enough_groups) {
  GpuPlan plan{};
  GpuParams& p = plan.params;
  const RopePoolParams rope = params_of(args, q_rot, k_rot);
  if (std::max({args.num_qo_heads, args.num_kv_heads, args.head_dim, args.num_tokens()}) >
      INT_MAX) {
    throw std::invalid_argument("rope_pool_fused: too many tokens, heads or features for a GPU");
  }
  p.head_dim = rope.head_dim;
  p.num_pairs = rope.num_pairs;
  p.pool_size = rope.pool_size;
  p.page_size = rope.page_size;
  if (is_one_page(rope.k_pool, rope.page_size) && is_one_page(rope.v_pool, rope.page_size)) {
    p.page_size = p.pool_size;
  }
  p.interleaved = args.interleaved ? 1 : 0;
  p.keeps_unturned = q_rot.handle == args.q.handle ? 1 : 0;
  const IndexArray positions = index_array(args.positions);
  const IndexArray slots = index_array(args.slots);
  p.positions_axis_stride = positions.row_stride * args.positions.itemsize / kWordBytes;
  p.positions_stride = positions.token_stride * args.positions.itemsize / kWordBytes;
  p.slots_stride = slots.token_stride * args.slots.itemsize / kWordBytes;
  p.positions_are_int64 = positions.is_int64 ? 1 : 0;
  p.slots_are_int64 = slots.is_int64 ? 1 : 0;
  if (has_device_inv_freq(args)) {
    p.inv_freq_itemsize = static_cast<u32>(args.inv_freq->itemsize);
    p.inv_freq_stride = args.inv_freq->strides[0];
  }
  if (args.mrope_section) {
    p.has_mrope = 1;
    p.mrope_interleaved = args.mrope_interleaved ? 1 : 0;
    std::copy(args.mrope_section->begin(), args.mrope_section->end(), p.mrope_section);
  }
  p.attention_scaling = static_cast<float>(args.attention_scaling);

  const i64 chunk = kVectorBytes / args.q.itemsize;
  bool has_chunks =
      p.num_pairs % chunk == 0 && (args.head_dim - 2 * p.num_pairs) % (2 * chunk) == 0;
  bool is_common = p.page_size == p.pool_size && !args.interleaved && !args.mrope_section &&
                   !has_device_inv_freq(args) && has_short_offsets(args.positions, kWordBytes) &&
                   has_short_offsets(args.slots, kWordBytes);
  for (const TensorView* t :
       {&args.q, &args.k, &args.v, &q_rot, &k_rot, &args.k_pool, &args.v_pool}) {
    has_chunks = has_chunks && consists_of_chunks(*t, chunk);
    is_common = is_common && has_short_offsets(*t, kVectorBytes);
  }
  plan.form = !has_chunks ? GpuForm::kElements : is_common ? GpuForm::kCommon : GpuForm::kChunks;

  constexpr i64 kThreads = ROPE_POOL_THREADS_PER_GROUP;
  constexpr i64 kMaxHeadsPerThread = 8;
  const i64 num_qo_heads = args.num_qo_heads;
  const i64 num_kv_heads = args.num_kv_heads;
  const i64 num_lanes = divide_up(args.head_dim, 2 * (has_chunks ? chunk : 1));
  plan.num_tokens = args.num_tokens();
  plan.lanes_per_group = std::min(num_lanes, kThreads);
  plan.lane_groups = divide_up(num_lanes, plan.lanes_per_group);
  const bool few_tokens = plan.num_tokens < enough_groups / 4;
  // Measured: where a token's heads fill groups, the form for few tokens pays for longer.
  const bool fills_groups = num_kv_heads * num_lanes >= kThreads;
  if (plan.form == GpuForm::kCommon && plan.lane_groups == 1 &&
      (few_tokens || (fills_groups && plan.num_tokens < enough_groups))) {
    plan.form = GpuForm::kFewTokens;
  }
  const bool is_few = plan.form == GpuForm::kFewTokens;
  // All of k's heads at a time, and q's in a few turns. With few tokens all threads go to one of
  // them, so that each makes few angles.
  const i64 most_heads = std::max(kThreads / plan.lanes_per_group, i64{1});
  const i64 wanted_heads =
      few_tokens || is_few ? std::max(num_qo_heads, num_kv_heads)
                           : std::max(num_kv_heads, divide_up(num_qo_heads, kMaxHeadsPerThread));
  plan.heads_per_group = std::clamp(wanted_heads, i64{1}, most_heads);
  plan.tokens_per_group =
      is_few ? 1
             : std::clamp(kThreads / (plan.lanes_per_group * plan.heads_per_group), i64{1},
                          std::min(std::max(plan.num_tokens, i64{1}), i64{64}));  // CUDA allows 64
  plan.token_groups = divide_up(plan.num_tokens, plan.tokens_per_group);

  const auto head_groups = [&](i64 heads_per_thread) {
    const i64 heads = plan.heads_per_group * heads_per_thread;
    return divide_up(num_qo_heads, heads) + 2 * divide_up(num_kv_heads, heads);
  };
  plan.heads_per_thread =
      is_few ? 1 : std::min(kMaxHeadsPerThread, divide_up(num_qo_heads, plan.heads_per_group));
  while (plan.heads_per_thread > 1 &&
         head_groups(plan.heads_per_thread) * plan.lane_groups * plan.token_groups <
             enough_groups) {
    --plan.heads_per_thread;
  }
  plan.head_groups = head_groups(plan.heads_per_thread);

  const i64 heads = plan.heads_per_group * plan.heads_per_thread;
  const auto q_groups = static_cast<u32>(divide_up(num_qo_heads, heads));
  const auto kv_groups = static_cast<u32>(divide_up(num_kv_heads, heads));
  const auto num_q = static_cast<u32>(num_qo_heads);
  const auto num_kv = static_cast<u32>(num_kv_heads);
  p.heads[0] = {rope.q, rope.q_rot, {}, num_q, 0};
  p.heads[1] = {rope.k, rope.k_rot, rope.k_pool, num_kv, q_groups};
  p.heads[2] = {rope.v, {}, rope.v_pool, num_kv, q_groups + kv_groups};
  if (plan.form == GpuForm::kCommon || is_few) plan.common_params = common_params(p, chunk);
  return plan;
}

}  // namespace rope_pool
