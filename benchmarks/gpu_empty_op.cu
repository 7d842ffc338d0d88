// Ops of the real ones' signatures that launch an empty kernel: what a call costs the host whatever
// it does. benchmarks/bench_gpu.py defines their schemas, from the real ones, and builds
// this.
#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#ifndef DISPATCH_KEY
#define DISPATCH_KEY CUDA
#endif

namespace {

namespace stable = torch::stable::detail;

struct DeleteTensor {
  void operator()(AtenTensorHandle tensor) const { aoti_torch_delete_tensor_object(tensor); }
};
using OwnedTensor = std::unique_ptr<AtenTensorOpaque, DeleteTensor>;

// Takes all arguments off the stack, as any op has to.
std::array<OwnedTensor, 7> take_arguments(StableIValue* stack) {
  std::array<OwnedTensor, 7> tensors;
  for (std::size_t i = 0; i < tensors.size(); ++i)
    tensors[i].reset(stable::to<AtenTensorHandle>(stack[i]));
  OwnedTensor inv_freq(stable::to<std::optional<AtenTensorHandle>>(stack[11]).value_or(nullptr));
  (void)stable::to<std::optional<double>>(stack[10]);
  (void)stable::to<std::optional<std::int64_t>>(stack[13]);
  (void)stable::to<std::optional<std::int64_t>>(stack[15]);
  (void)stable::to<std::optional<std::vector<std::int64_t>>>(stack[16]);
  return tensors;
}

__global__ void empty_kernel() {}

void launch(const OwnedTensor& like) {
  std::int32_t device = 0;
  void* stream = nullptr;
  aoti_torch_get_device_index(like.get(), &device);
  aoti_torch_get_current_cuda_stream(device, &stream);
  empty_kernel<<<1, 32, 0, static_cast<cudaStream_t>(stream)>>>();
  if (cudaGetLastError() != cudaSuccess)
    throw std::runtime_error("the empty kernel's launch failed");
}

StableIValue empty_like(const OwnedTensor& tensor) {
  std::int64_t ndim = 0;
  std::int64_t *sizes = nullptr, *strides = nullptr;
  std::int32_t dtype = 0, device_type = 0, device = 0;
  aoti_torch_get_dim(tensor.get(), &ndim);
  aoti_torch_get_sizes(tensor.get(), &sizes);
  aoti_torch_get_strides(tensor.get(), &strides);
  aoti_torch_get_dtype(tensor.get(), &dtype);
  aoti_torch_get_device_type(tensor.get(), &device_type);
  aoti_torch_get_device_index(tensor.get(), &device);
  AtenTensorHandle output = nullptr;
  if (aoti_torch_empty_strided(ndim, sizes, strides, dtype, device_type, device, &output) !=
      AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("no memory for an output");
  }
  return stable::from(output);
}

void fresh(StableIValue* stack, std::uint64_t, std::uint64_t) {
  auto tensors = take_arguments(stack);
  stack[0] = empty_like(tensors[0]);
  stack[1] = empty_like(tensors[1]);
  launch(tensors[0]);
  stack[2] = stable::from(tensors[5].release());
  stack[3] = stable::from(tensors[6].release());
}

void in_place(StableIValue* stack, std::uint64_t, std::uint64_t) {
  const auto tensors = take_arguments(stack);
  launch(tensors[0]);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ropepool_bench, DISPATCH_KEY, m) {
  m.impl("rope_pool_fused", &fresh);
  m.impl("rope_pool_fused_", &in_place);
}
