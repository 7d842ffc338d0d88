// From the dispatcher's stack to the contract's plain views, over the stable ABI only.
#pragma once

#include <torch/csrc/stable/library.h>

#include <array>
#include <cstdint>
#include <memory>
#include <utility>

#include "contract.h"

namespace rope_pool {

struct DeleteTensor {
  void operator()(AtenTensorHandle tensor) const { aoti_torch_delete_tensor_object(tensor); }
};
using OwnedTensor = std::unique_ptr<AtenTensorOpaque, DeleteTensor>;

// The arguments of a call, taken off the stack of a boxed kernel. All three ops have the same.
struct StackArgs {
  explicit StackArgs(StableIValue* stack);

  // Sets the views of `args`. Throws std::invalid_argument where a tensor is None.
  void view_tensors();
  // All tensors by name, inv_freq the last.
  std::array<std::pair<const char*, const OwnedTensor*>, 8> tensors() const;

  OwnedTensor q;
  OwnedTensor k;
  OwnedTensor v;
  OwnedTensor positions;
  OwnedTensor slots;
  OwnedTensor k_pool;
  OwnedTensor v_pool;
  OwnedTensor inv_freq;  // may be null
  RopePoolArgs args;
};

TensorView view_of(AtenTensorHandle tensor, const char* name);

// An uninitialized contiguous tensor of the same 3-D shape, dtype and device.
OwnedTensor empty_like(const TensorView& tensor);

// In grad mode, tells autograd that the tensor was written, so that a backward that needs its
// former value raises. (A compiled kernel has to do this itself; outside of grad mode it costs too
// much.)
void record_write(const OwnedTensor& tensor);

// Whether the tensor is a view that is to be read with its sign changed.
bool is_negative(AtenTensorHandle tensor);

// With grad mode on, throws std::runtime_error for the first tensor that requires grad.
void require_no_grad(const StackArgs& stack_args);

}  // namespace rope_pool
