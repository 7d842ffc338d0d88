// Plain C functions of the library, for torch_ropepool/_library.py and the tests.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <exception>

#include "cpu/rope_pool_cpu_kernel.h"
#include "overlap.h"

#define ROPE_POOL_EXPORT extern "C" __attribute__((visibility("default")))

// The package version that this library was built as.
ROPE_POOL_EXPORT const char* rope_pool_version() { return ROPE_POOL_VERSION; }

// Of the CPU kernel: "baseline", "avx2", "avx512".
ROPE_POOL_EXPORT const char* rope_pool_cpu_isa() {
  try {
    return rope_pool::cpu_isa_name();
  } catch (const std::exception&) {
    return "not the one that TORCH_ROPEPOOL_CPU_ISA names";
  }
}

// 0 no, 1 yes, 2 undecided. The arguments are those of rope_pool::View.
ROPE_POOL_EXPORT int rope_pool_overlap(std::uint64_t a_address, std::int64_t a_itemsize,
                                       std::int64_t a_ndim, const std::int64_t* a_sizes,
                                       const std::int64_t* a_strides, std::uint64_t b_address,
                                       std::int64_t b_itemsize, std::int64_t b_ndim,
                                       const std::int64_t* b_sizes, const std::int64_t* b_strides) {
  return static_cast<int>(rope_pool::overlap({a_address, a_itemsize, a_ndim, a_sizes, a_strides},
                                             {b_address, b_itemsize, b_ndim, b_sizes, b_strides}));
}

// The same for one view with itself.
ROPE_POOL_EXPORT int rope_pool_self_overlap(std::int64_t itemsize, std::int64_t ndim,
                                            const std::int64_t* sizes,
                                            const std::int64_t* strides) {
  return static_cast<int>(rope_pool::self_overlap({0, itemsize, ndim, sizes, strides}));
}
