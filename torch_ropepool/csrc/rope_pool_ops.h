// The three ops over one backend: checks, outputs, launch. A backend is a type with
//   static constexpr bool allows_float64;
//   static void launch(const RopePoolArgs& args,   // checked, at least one token
//                      const TensorView& q_rot,    // [num_tokens, num_qo_heads, head_dim], may be
//                      q const TensorView& k_rot);   // [num_tokens, num_kv_heads, head_dim], may
//                      be k
#pragma once

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "tensor_args.h"

namespace rope_pool {

template <class Backend>
struct RopePoolOps {
  using Tensor = torch::stable::Tensor;

  static std::tuple<Tensor, Tensor, Tensor, Tensor> rope_pool_fused(
      Tensor q, Tensor k, Tensor v, Tensor positions, Tensor slots, Tensor k_pool, Tensor v_pool,
      int64_t head_dim, int64_t num_qo_heads, int64_t num_kv_heads, double rope_base) {
    auto [q_rot, k_rot] = primitive(q, k, v, positions, slots, k_pool, v_pool, head_dim,
                                    num_qo_heads, num_kv_heads, rope_base);
    return {q_rot, k_rot, k_pool, v_pool};
  }

  static std::tuple<Tensor, Tensor> primitive(Tensor q, Tensor k, Tensor v, Tensor positions,
                                              Tensor slots, Tensor k_pool, Tensor v_pool,
                                              int64_t head_dim, int64_t num_qo_heads,
                                              int64_t num_kv_heads, double rope_base) {
    const RopePoolArgs args = checked(q, k, v, positions, slots, k_pool, v_pool, head_dim,
                                      num_qo_heads, num_kv_heads, rope_base, /*in_place=*/false);
    Tensor q_rot = empty_like(args.q);
    Tensor k_rot = empty_like(args.k);
    if (args.num_tokens() > 0)
      Backend::launch(args, view_of(q_rot, "q_rot"), view_of(k_rot, "k_rot"));
    return {q_rot, k_rot};
  }

  static void rope_pool_fused_(Tensor q, Tensor k, Tensor v, Tensor positions, Tensor slots,
                               Tensor k_pool, Tensor v_pool, int64_t head_dim, int64_t num_qo_heads,
                               int64_t num_kv_heads, double rope_base) {
    const RopePoolArgs args = checked(q, k, v, positions, slots, k_pool, v_pool, head_dim,
                                      num_qo_heads, num_kv_heads, rope_base, /*in_place=*/true);
    if (args.num_tokens() > 0) Backend::launch(args, args.q, args.k);
  }

  static void register_kernels(torch::stable::detail::StableLibrary& m) {
    m.impl("rope_pool_fused", TORCH_BOX(&RopePoolOps::rope_pool_fused));
    m.impl("_rope_pool_fused", TORCH_BOX(&RopePoolOps::primitive));
    m.impl("rope_pool_fused_", TORCH_BOX(&RopePoolOps::rope_pool_fused_));
  }

 private:
  static RopePoolArgs checked(const Tensor& q, const Tensor& k, const Tensor& v,
                              const Tensor& positions, const Tensor& slots, const Tensor& k_pool,
                              const Tensor& v_pool, int64_t head_dim, int64_t num_qo_heads,
                              int64_t num_kv_heads, double rope_base, bool in_place) {
    // positions and slots are integers, which never require grad
    const Tensor* differentiable[] = {&q, &k, &v, &k_pool, &v_pool};
    const char* const names[] = {"q", "k", "v", "k_pool", "v_pool"};
    require_no_grad(differentiable, names, 5);
    const RopePoolArgs args = {view_of(q, "q"),
                               view_of(k, "k"),
                               view_of(v, "v"),
                               view_of(positions, "positions"),
                               view_of(slots, "slots"),
                               view_of(k_pool, "k_pool"),
                               view_of(v_pool, "v_pool"),
                               head_dim,
                               num_qo_heads,
                               num_kv_heads,
                               rope_base};
    check_contract(args, {in_place, Backend::allows_float64});
    return args;
  }
};

}  // namespace rope_pool
