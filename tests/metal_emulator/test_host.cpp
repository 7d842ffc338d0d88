// Host code as an MPS op has it: a shader library made once, one dispatch, one new tensor.
// tests/test_metal_emulator.py runs it on the emulator.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim_mps.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <functional>
#include <stdexcept>

namespace {

using torch::stable::Tensor;

constexpr const char* kShader = R"(
#include <metal_stdlib>
using namespace metal;
kernel void scale(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                  constant FACTOR& factor [[buffer(2)]], uint id [[thread_position_in_grid]]) {
  if (id % 4 != 3 || LAST) y[id] = x[id] * float(factor);
}
)";

void check(AOTITorchError error) {
  if (error != AOTI_TORCH_SUCCESS) throw std::runtime_error("a function of the MPS shim failed");
}

using SetArgBytes = AOTITorchError (*)(AOTIMetalKernelFunctionHandle, unsigned, const void*,
                                       uint64_t);
SetArgBytes set_arg_bytes() {
  static const auto found =
      reinterpret_cast<SetArgBytes>(dlsym(RTLD_DEFAULT, "torch_mps_set_arg_bytes"));
  return found;
}

AOTIMetalKernelFunctionHandle kernel(bool last) {
  static const auto make = [](bool with_last) {
    std::string source = kShader;
    source.replace(source.find("FACTOR"), 6, set_arg_bytes() != nullptr ? "float" : "long");
    source.replace(source.find("LAST"), 4, with_last ? "true" : "false");
    AOTIMetalShaderLibraryHandle library = nullptr;
    AOTIMetalKernelFunctionHandle function = nullptr;
    check(aoti_torch_mps_create_shader_library(source.c_str(), &library));
    check(aoti_torch_mps_get_kernel_function(library, "scale", &function));
    return function;
  };
  static const AOTIMetalKernelFunctionHandle functions[] = {make(false), make(true)};
  return functions[last ? 1 : 0];
}

// `last` false: a fault of the kernel leaves every fourth number unwritten.
Tensor scale(const Tensor& x, int64_t factor, bool last) {
  Tensor y = torch::stable::empty_like(x);
  const AOTIMetalKernelFunctionHandle function = kernel(last);
  std::function<void(AOTIMetalKernelFunctionHandle)> encode = [&](auto f) {
    check(aoti_torch_mps_start_encoding(f));
    check(aoti_torch_mps_set_arg_tensor(f, 0, x.get()));
    check(aoti_torch_mps_set_arg_tensor(f, 1, y.get()));
    if (set_arg_bytes() != nullptr) {
      const auto value = static_cast<float>(factor);
      check(set_arg_bytes()(f, 2, &value, sizeof value));
    } else {
      check(aoti_torch_mps_set_arg_int(f, 2, factor));
    }
    check(aoti_torch_mps_dispatch_single(f, static_cast<uint64_t>(x.numel())));
  };
  check(aoti_torch_mps_run_command_block(function, aoti_torch_mps_shared_callback, &encode));
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY(metal_emulator_test, m) {
  m.def("scale(Tensor x, int factor, bool last) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(metal_emulator_test, MPS, m) { m.impl("scale", TORCH_BOX(&scale)); }
