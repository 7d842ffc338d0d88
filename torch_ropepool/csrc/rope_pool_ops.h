// The three ops over one backend: checks, outputs, launch. A backend is a type with
//   static constexpr bool kAllowsFloat64, kAllowsFloat64InvFreq;
//   static void launch(RopePoolArgs& args,        // checked; it may give other slots
//                      const TensorView& q_rot,   // [num_tokens, num_qo_heads, head_dim], may be q
//                      const TensorView& k_rot,   // [num_tokens, num_kv_heads, head_dim], may be k
//                      const BeforeWrite& before_write);
// launch checks what only the values can tell, does whatever else can fail, calls before_write(),
// which may throw, and then writes.
#pragma once

#include "tensor_args.h"

namespace rope_pool {

template <class Backend>
class RopePoolOps {
 public:
  static void register_kernels(torch::stable::detail::StableLibrary& m) {
    m.impl("rope_pool_fused", &rope_pool_fused);
    m.impl("_rope_pool_fused", &primitive);
    m.impl("rope_pool_fused_", &rope_pool_fused_);
  }

 private:
  struct Rotated {
    OwnedTensor q;
    OwnedTensor k;
  };

  // Boxed kernels: they take the arguments off the stack and leave the results there.

  static void rope_pool_fused(StableIValue* stack, std::uint64_t, std::uint64_t) {
    StackArgs call(stack);
    Rotated rotated = run_out_of_place(call);
    push(stack[0], rotated.q);
    push(stack[1], rotated.k);
    push(stack[2], call.k_pool);
    push(stack[3], call.v_pool);
  }

  static void primitive(StableIValue* stack, std::uint64_t, std::uint64_t) {
    StackArgs call(stack);
    Rotated rotated = run_out_of_place(call);
    push(stack[0], rotated.q);
    push(stack[1], rotated.k);
  }

  static void rope_pool_fused_(StableIValue* stack, std::uint64_t, std::uint64_t) {
    StackArgs call(stack);
    check(call, /*in_place=*/true);
    launch(call, call.args.q, call.args.k, /*in_place=*/true);
  }

  static Rotated run_out_of_place(StackArgs& call) {
    check(call, /*in_place=*/false);
    Rotated rotated = {empty_like(call.args.q), empty_like(call.args.k)};
    launch(call, view_of(rotated.q.get(), "q_rot"), view_of(rotated.k.get(), "k_rot"),
           /*in_place=*/false);
    return rotated;
  }

  static void launch(StackArgs& call, const TensorView& q_rot, const TensorView& k_rot,
                     bool in_place) {
    Backend::launch(call.args, q_rot, k_rot, [&] {
      record_write(call.k_pool);
      record_write(call.v_pool);
      if (!in_place) return;
      record_write(call.q);
      record_write(call.k);
    });
  }

  static void check(StackArgs& call, bool in_place) {
    call.view_tensors();
    require_no_grad(call);
    check_contract(call.args, {in_place, Backend::kAllowsFloat64, Backend::kAllowsFloat64InvFreq});
  }

  static void push(StableIValue& slot, OwnedTensor& tensor) {
    slot = torch::stable::detail::from(tensor.release());
  }
};

}  // namespace rope_pool
