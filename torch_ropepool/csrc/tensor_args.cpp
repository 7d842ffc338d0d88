#include "tensor_args.h"

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <stdexcept>

namespace rope_pool {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

DType dtype_of(std::int32_t scalar_type) {
  switch (static_cast<ScalarType>(scalar_type)) {
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Double:
      return DType::kFloat64;
    case ScalarType::Int:
      return DType::kInt32;
    case ScalarType::Long:
      return DType::kInt64;
    default:
      return DType::kOther;
  }
}

// One of torch's own operators on one tensor.
StableIValue call_unary(const char* name, const Tensor& tensor) {
  StableIValue stack[] = {torch::stable::detail::from(tensor)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack, TORCH_ABI_VERSION));
  return stack[0];
}

// The C shim cannot ask this directly. In grad mode, a tensor requires grad exactly when an alias
// of it is no leaf of the autograd graph.
bool requires_grad(const Tensor& tensor) {
  const auto alias = torch::stable::detail::to<Tensor>(call_unary("aten::alias", tensor));
  return !torch::stable::detail::to<bool>(call_unary("aten::is_leaf", alias));
}

}  // namespace

TensorView view_of(const Tensor& tensor, const char* name) {
  const AtenTensorHandle handle = tensor.get();
  TensorView view{};
  view.name = name;
  std::int64_t* sizes = nullptr;
  std::int64_t* strides = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &view.scalar_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &view.ndim));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &sizes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &strides));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(handle, &view.storage_offset));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(handle, &view.storage_bytes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &view.device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle, &view.device_index));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle, &view.data));
  view.sizes = sizes;
  view.strides = strides;
  view.dtype = dtype_of(view.scalar_type);
  view.itemsize = static_cast<std::int64_t>(aoti_torch_dtype_element_size(view.scalar_type));
  return view;
}

Tensor empty_like(const TensorView& tensor) {
  const std::array<std::int64_t, 3> strides = {tensor.sizes[1] * tensor.sizes[2], tensor.sizes[2],
                                               1};
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(tensor.ndim, tensor.sizes, strides.data(),
                                                  tensor.scalar_type, tensor.device_type,
                                                  tensor.device_index, &handle));
  return Tensor(handle);
}

void require_no_grad(const Tensor* const* tensors, const char* const* names, int count) {
  if (!aoti_torch_grad_mode_is_enabled()) return;
  for (int i = 0; i < count; ++i) {
    if (!requires_grad(*tensors[i])) continue;
    throw std::runtime_error(std::string("rope_pool_fused has no backward, but ") + names[i] +
                             " requires grad: call it under torch.no_grad(), or detach " +
                             names[i]);
  }
}

std::string dtype_name(const TensorView& tensor) {
  // torch's ScalarType numbers, which are part of its stable ABI, by their Python names.
  static constexpr const char* kNames[] = {"uint8",
                                           "int8",
                                           "int16",
                                           "int32",
                                           "int64",
                                           "float16",
                                           "float32",
                                           "float64",
                                           "complex32",
                                           "complex64",
                                           "complex128",
                                           "bool",
                                           "qint8",
                                           "quint8",
                                           "qint32",
                                           "bfloat16",
                                           "quint4x2",
                                           "quint2x4",
                                           "bits1x8",
                                           "bits2x4",
                                           "bits4x2",
                                           "bits8",
                                           "bits16",
                                           "float8_e5m2",
                                           "float8_e4m3fn",
                                           "float8_e5m2fnuz",
                                           "float8_e4m3fnuz",
                                           "uint16",
                                           "uint32",
                                           "uint64",
                                           "uint1",
                                           "uint2",
                                           "uint3",
                                           "uint4",
                                           "uint5",
                                           "uint6",
                                           "uint7",
                                           "int1",
                                           "int2",
                                           "int3",
                                           "int4",
                                           "int5",
                                           "int6",
                                           "int7",
                                           "float8_e8m0fnu",
                                           "float4_e2m1fn_x2"};
  constexpr std::int32_t kCount = sizeof kNames / sizeof kNames[0];
  const std::int32_t number = tensor.scalar_type;
  return number >= 0 && number < kCount ? kNames[number] : "dtype number " + std::to_string(number);
}

std::string device_name(const TensorView& tensor) {
  std::string name = "device type " + std::to_string(tensor.device_type);
  if (tensor.device_type == aoti_torch_device_type_cpu()) return "cpu";
  if (tensor.device_type == aoti_torch_device_type_meta()) return "meta";
  if (tensor.device_type == aoti_torch_device_type_cuda()) name = "cuda";
  if (tensor.device_type == aoti_torch_device_type_mps()) name = "mps";
  if (tensor.device_type == aoti_torch_device_type_xpu()) name = "xpu";
  return name + ":" + std::to_string(tensor.device_index);
}

}  // namespace rope_pool
