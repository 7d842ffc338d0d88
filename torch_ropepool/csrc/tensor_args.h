// From torch's tensors to the contract's plain views, over the stable ABI only.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "contract.h"

namespace rope_pool {

TensorView view_of(const torch::stable::Tensor& tensor, const char* name);

// An uninitialized contiguous tensor of the same shape, dtype and device.
torch::stable::Tensor empty_like(const TensorView& tensor);

// With grad mode on, throws std::runtime_error for the first of the tensors that requires grad.
void require_no_grad(const torch::stable::Tensor* const* tensors, const char* const* names,
                     int count);

}  // namespace rope_pool
