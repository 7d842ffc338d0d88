// Where torch would run the kernels and get it wrong, the ops refuse by name.
#include <stdexcept>
#include <string>

#include "tensor_args.h"

namespace rope_pool {
namespace {

// For a tensor with the negative bit set. torch would pass on a copy, and fail after the write.
void refuse_negative(StableIValue* stack, std::uint64_t, std::uint64_t) {
  const StackArgs call(stack);
  for (const auto& [name, tensor] : call.tensors()) {
    if (*tensor == nullptr || !is_negative(tensor->get())) continue;
    throw std::invalid_argument(std::string(name) + " must not be a lazily negated view: pass " +
                                name + ".resolve_neg()");
  }
}

// Under torch.func's transforms. torch would take gradients to be zero, or of a copy.
void refuse_transform(StableIValue* stack, std::uint64_t, std::uint64_t) {
  const StackArgs call(stack);
  throw std::runtime_error(
      "rope_pool_fused has no backward and writes its pools: it cannot be under a transform of "
      "torch.func (grad, vjp, jvp, vmap, functionalize)");
}

void register_for_all_ops(torch::stable::detail::StableLibrary& m,
                          void (*kernel)(StableIValue*, std::uint64_t, std::uint64_t)) {
  for (const char* op : {"rope_pool_fused", "_rope_pool_fused", "rope_pool_fused_"}) {
    m.impl(op, kernel);
  }
}

}  // namespace
}  // namespace rope_pool

STABLE_TORCH_LIBRARY_IMPL(ropepool, Negative, m) {
  rope_pool::register_for_all_ops(m, rope_pool::refuse_negative);
}

STABLE_TORCH_LIBRARY_IMPL(ropepool, FuncTorchDynamicLayerFrontMode, m) {
  rope_pool::register_for_all_ops(m, rope_pool::refuse_transform);
}
