// The op schemas, nothing else. Kernels are registered by the backends.
#include <torch/csrc/stable/library.h>

// What every op takes after q and k; each op marks what it writes. StackArgs reads this order.
#define ROPE_POOL_ARGS(k_pool_alias, v_pool_alias)                                     \
  "Tensor v, Tensor positions, Tensor slots, Tensor(" k_pool_alias                     \
  "!) k_pool, "                                                                        \
  "Tensor(" v_pool_alias                                                               \
  "!) v_pool, *, "                                                                     \
  "SymInt head_dim, SymInt num_qo_heads, SymInt num_kv_heads, float? rope_base=None, " \
  "Tensor? inv_freq=None, float attention_scaling=1.0, SymInt? rotary_dim=None, "      \
  "bool interleaved=False, SymInt? page_size=None, int[]? mrope_section=None, "        \
  "bool mrope_interleaved=False"

STABLE_TORCH_LIBRARY(ropepool, m) {
  m.def("rope_pool_fused(Tensor q, Tensor k, " ROPE_POOL_ARGS(
      "a", "b") ") -> (Tensor q_rot, Tensor k_rot, Tensor(a!) k_pool_new, Tensor(b!) v_pool_new)");
  m.def("_rope_pool_fused(Tensor q, Tensor k, " ROPE_POOL_ARGS(
      "a", "b") ") -> (Tensor q_rot, Tensor k_rot)");
  m.def("rope_pool_fused_(Tensor(a!) q, Tensor(b!) k, " ROPE_POOL_ARGS("c", "d") ") -> ()");
}
