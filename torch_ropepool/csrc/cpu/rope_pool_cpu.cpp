// The CPU backend of the ops: slots checked, work split over torch's threads.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <memory>

#include "../rope_pool_ops.h"
#include "../rope_pool_plan.h"
#include "rope_pool_cpu_kernel.h"

namespace rope_pool {
namespace {

std::vector<unsigned char> mrope_axes(const RopePoolArgs& args) {
  std::vector<unsigned char> axes(static_cast<std::size_t>(args.num_pairs()));
  const std::vector<i64>& section = *args.mrope_section;
  for (std::size_t i = 0; i < axes.size(); ++i) {
    axes[i] = static_cast<unsigned char>(mrope_axis(static_cast<i64>(i), section[0], section[1],
                                                    section[2], args.mrope_interleaved));
  }
  return axes;
}

// Tokens per thread below which a second thread does not pay: about 20 us of work, several times
// what it takes to wake one.
i64 grain_size(const RopePoolParams& p, i64 itemsize) {
  constexpr i64 kBytes = 128 * 1024;
  const i64 token_bytes = (2 * p.num_qo_heads + 5 * p.num_kv_heads) * p.head_dim * itemsize;
  return std::max(i64{1}, kBytes / token_bytes);
}

struct Cpu {
  static constexpr bool kAllowsFloat64 = true;
  static constexpr bool kAllowsFloat64InvFreq = true;

  template <class BeforeWrite>
  static void launch(const RopePoolArgs& args, const TensorView& q_rot, const TensorView& k_rot,
                     const BeforeWrite& before_write) {
    const auto table = table_of(args);
    const i64 num_tokens = args.num_tokens();
    if (num_tokens == 0) return before_write();

    CpuLaunch launch{};
    launch.params = params_of(args, q_rot, k_rot);
    launch.q = args.q.data;
    launch.k = args.k.data;
    launch.v = args.v.data;
    launch.q_rot = q_rot.data;
    launch.k_rot = k_rot.data;
    launch.k_pool = args.k_pool.data;
    launch.v_pool = args.v_pool.data;
    launch.positions = index_array(args.positions);
    launch.slots = index_array(args.slots);
    launch.attention_scaling = args.attention_scaling;

    const bool increasing = check_slots(launch.slots, num_tokens, args.pool_size());
    launch.table = table.get();
    std::vector<unsigned char> axes;
    if (args.mrope_section) {
      axes = mrope_axes(args);
      launch.axes = axes.data();
    }
    const RopePoolTokens tokens = rope_pool_tokens(args.q.dtype);

    const i64 grain = grain_size(launch.params, args.q.itemsize);
    if (num_tokens < 2 * grain) {
      before_write();
      tokens(launch, 0, num_tokens);
      return;
    }
    std::unique_ptr<i64[]> stored;
    if (!increasing) {
      stored = last_writers(launch.slots, num_tokens);
      launch.slots = {stored.get(), /*is_int64=*/true, 0, 1};
    }
    before_write();
    torch::stable::parallel_for(0, num_tokens, grain,
                                [&](int64_t begin, int64_t end) { tokens(launch, begin, end); });
  }
};

}  // namespace
}  // namespace rope_pool

STABLE_TORCH_LIBRARY_IMPL(ropepool, CPU, m) {
  rope_pool::RopePoolOps<rope_pool::Cpu>::register_kernels(m);
}
