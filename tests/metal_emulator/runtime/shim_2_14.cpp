// What torch 2.14 adds. A library of its own: linked or not, as the torch to be stood in for.
#include <torch/csrc/inductor/aoti_torch/c/shim_mps.h>

#include <cstdint>

namespace metal_emulator {
AOTITorchError set_arg_bytes(AOTIMetalKernelFunctionHandle func, unsigned idx, const void* ptr,
                             uint64_t size);
}

extern "C" AOTI_TORCH_EXPORT AOTITorchError torch_mps_set_arg_bytes(
    AOTIMetalKernelFunctionHandle func, unsigned idx, const void* ptr, uint64_t size) {
  return metal_emulator::set_arg_bytes(func, idx, ptr, size);
}
