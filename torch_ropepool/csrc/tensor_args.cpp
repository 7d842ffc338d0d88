#include "tensor_args.h"

#include <torch/headeronly/core/DeviceType.h>
#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <stdexcept>
#include <utility>

namespace rope_pool {
namespace {

using torch::headeronly::DeviceType;
using torch::headeronly::ScalarType;

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

// Exchanges a tensor for what one of torch's own unary operators gives.
StableIValue call_unary(const char* name, StableIValue tensor) {
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", &tensor, TORCH_ABI_VERSION));
  return tensor;
}

// 0 for kOther.
std::int64_t itemsize_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    default:
      return 0;
  }
}

StableIValue new_reference(AtenTensorHandle tensor) {
  AtenTensorHandle reference = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor, &reference));
  return torch::stable::detail::from(reference);
}

bool is_leaf(StableIValue tensor) {
  return torch::stable::detail::to<bool>(call_unary("aten::is_leaf", tensor));
}

// The C shim cannot ask this directly. In grad mode, a tensor requires grad exactly when an alias
// of it is no leaf of the autograd graph. (Below autograd, in a TorchDispatchMode, an alias shows
// nothing. There only a tensor that is itself no leaf does.)
bool requires_grad(AtenTensorHandle tensor) {
  return !is_leaf(new_reference(tensor)) ||
         !is_leaf(call_unary("aten::alias", new_reference(tensor)));
}

OwnedTensor take_tensor(StableIValue value) {
  return OwnedTensor(torch::stable::detail::to<AtenTensorHandle>(value));
}

template <class T>
std::optional<T> take_optional(StableIValue value) {
  return torch::stable::detail::to<std::optional<T>>(value);
}

}  // namespace

StackArgs::StackArgs(StableIValue* stack)
    : q(take_tensor(stack[0])),
      k(take_tensor(stack[1])),
      v(take_tensor(stack[2])),
      positions(take_tensor(stack[3])),
      slots(take_tensor(stack[4])),
      k_pool(take_tensor(stack[5])),
      v_pool(take_tensor(stack[6])),
      inv_freq(take_optional<AtenTensorHandle>(stack[11]).value_or(nullptr)),
      args{} {
  using torch::stable::detail::to;
  args.head_dim = to<std::int64_t>(stack[7]);
  args.num_qo_heads = to<std::int64_t>(stack[8]);
  args.num_kv_heads = to<std::int64_t>(stack[9]);
  args.rope_base = take_optional<double>(stack[10]);
  args.attention_scaling = to<double>(stack[12]);
  args.rotary_dim = take_optional<std::int64_t>(stack[13]);
  args.interleaved = to<bool>(stack[14]);
  args.page_size = take_optional<std::int64_t>(stack[15]);
  args.mrope_section = take_optional<std::vector<std::int64_t>>(stack[16]);
  args.mrope_interleaved = to<bool>(stack[17]);
}

void StackArgs::view_tensors() {
  args.q = view_of(q.get(), "q");
  args.k = view_of(k.get(), "k");
  args.v = view_of(v.get(), "v");
  args.positions = view_of(positions.get(), "positions");
  args.slots = view_of(slots.get(), "slots");
  args.k_pool = view_of(k_pool.get(), "k_pool");
  args.v_pool = view_of(v_pool.get(), "v_pool");
  if (inv_freq != nullptr) args.inv_freq = view_of(inv_freq.get(), "inv_freq");
}

std::array<std::pair<const char*, const OwnedTensor*>, 8> StackArgs::tensors() const {
  return {{{"q", &q},
           {"k", &k},
           {"v", &v},
           {"positions", &positions},
           {"slots", &slots},
           {"k_pool", &k_pool},
           {"v_pool", &v_pool},
           {"inv_freq", &inv_freq}}};
}

TensorView view_of(AtenTensorHandle tensor, const char* name) {
  TensorView view{};
  view.name = name;
  view.handle = tensor;
  std::int64_t* sizes = nullptr;
  std::int64_t* strides = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &view.scalar_type));
  view.dtype = dtype_of(view.scalar_type);
  view.itemsize = itemsize_of(view.dtype);
  if (view.dtype == DType::kOther) {
    bool is_defined = false;
    TORCH_ERROR_CODE_CHECK(aoti_torch_is_defined(tensor, &is_defined));
    if (!is_defined) throw std::invalid_argument(std::string(name) + " must be a tensor, got None");
    view.itemsize = static_cast<std::int64_t>(aoti_torch_dtype_element_size(view.scalar_type));
  }
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &view.ndim));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &sizes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &strides));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(tensor, &view.storage_offset));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor, &view.storage_bytes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor, &view.device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor, &view.device_index));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor, &view.data));
  view.sizes = sizes;
  view.strides = strides;
  view.byte_extent = byte_extent(view.itemsize, view.ndim, sizes, strides);
  view.byte_address = reinterpret_cast<std::uintptr_t>(view.data);
  if (view.device_type == static_cast<std::int32_t>(DeviceType::MPS)) {
    // The data pointer is the address of a buffer object, not of its memory.
    const auto offset = static_cast<std::uint64_t>(view.storage_offset * view.itemsize);
    view.buffer = view.byte_address - offset;
    view.byte_address = offset;
  }
  return view;
}

OwnedTensor empty_like(const TensorView& tensor) {
  const std::array<std::int64_t, 3> strides = {tensor.sizes[1] * tensor.sizes[2], tensor.sizes[2],
                                               1};
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(tensor.ndim, tensor.sizes, strides.data(), tensor.scalar_type,
                               tensor.device_type, tensor.device_index,
                               &handle) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error(std::string("rope_pool_fused could not allocate an output of ") +
                             tensor.name + "'s size; torch has logged why");
  }
  return OwnedTensor(handle);
}

void record_write(const OwnedTensor& tensor) {
  using torch::stable::detail::to;
  if (!aoti_torch_grad_mode_is_enabled()) return;
  // Tensors made in inference mode have no version to raise.
  if (to<bool>(call_unary("aten::is_inference", new_reference(tensor.get())))) return;
  // An in-place operation on an empty view raises the version. This one touches the view's sizes
  // only, never memory. The view has as many dimensions as the tensor.
  const std::int64_t sizes[kMaxDims] = {};
  const std::int64_t strides[kMaxDims] = {};
  AtenTensorHandle nothing = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_as_strided(tensor.get(), sizes, strides, &nothing));
  take_tensor(call_unary("aten::squeeze_", torch::stable::detail::from(nothing)));
}

bool is_negative(AtenTensorHandle tensor) {
  return torch::stable::detail::to<bool>(call_unary("aten::is_neg", new_reference(tensor)));
}

void require_no_grad(const StackArgs& stack_args) {
  if (!aoti_torch_grad_mode_is_enabled()) return;
  for (const auto& [name, tensor] : stack_args.tensors()) {
    if (*tensor == nullptr || !requires_grad(tensor->get())) continue;
    throw std::runtime_error(std::string("rope_pool_fused has no backward, but ") + name +
                             " requires grad: call it under torch.no_grad(), or detach " + name);
  }
}

std::string dtype_name(const TensorView& tensor) {
  // torch's ScalarType numbers, which are part of its stable ABI, by their Python names.
  // clang-format off
  static constexpr const char* kNames[] = {
      "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex32",
      "complex64", "complex128", "bool", "qint8", "quint8", "qint32", "bfloat16", "quint4x2",
      "quint2x4", "bits1x8", "bits2x4", "bits4x2", "bits8", "bits16", "float8_e5m2",
      "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "uint16", "uint32", "uint64",
      "uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7", "int1", "int2", "int3",
      "int4", "int5", "int6", "int7", "float8_e8m0fnu", "float4_e2m1fn_x2",
      "bcomplex32"};
  // clang-format on
  constexpr std::int32_t kCount = sizeof kNames / sizeof kNames[0];
  const std::int32_t number = tensor.scalar_type;
  return number >= 0 && number < kCount ? kNames[number] : "dtype number " + std::to_string(number);
}

std::string device_name(const TensorView& tensor) {
  const std::string index = ":" + std::to_string(tensor.device_index);
  // The shim's functions for these numbers are not in every version of torch.
  switch (static_cast<DeviceType>(tensor.device_type)) {
    case DeviceType::CPU:
      return "cpu";
    case DeviceType::Meta:
      return "meta";
    case DeviceType::CUDA:
      return "cuda" + index;
    case DeviceType::MPS:
      return "mps" + index;
    case DeviceType::XPU:
      return "xpu" + index;
    default:
      return "device type " + std::to_string(tensor.device_type) + index;
  }
}

bool is_on_cpu(const TensorView& tensor) {
  return tensor.device_type == static_cast<std::int32_t>(DeviceType::CPU);
}

}  // namespace rope_pool
