// The CPU kernel's body, compiled once per instruction set, and the choice between them.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "cache_hints.h"
#include "rope_pool_cpu_kernel.h"

#if defined(__clang__)
#define ROPE_POOL_NO_DEPENDENCE _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define ROPE_POOL_NO_DEPENDENCE _Pragma("GCC ivdep")
#elif defined(_MSC_VER)
#define ROPE_POOL_NO_DEPENDENCE __pragma(loop(ivdep))
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#define ROPE_POOL_X86_TARGETS 1
#endif

namespace rope_pool {

namespace baseline {
#if ROPE_POOL_STREAMS
using Stream = Stream16;
#endif
#include "rope_pool_tokens.h"
}  // namespace baseline

#if ROPE_POOL_X86_TARGETS
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace avx2 {
#if ROPE_POOL_STREAMS
using Stream = Stream32;
#endif
#include "rope_pool_tokens.h"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))), \
                             apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")
#endif
namespace avx512 {
#if ROPE_POOL_STREAMS
using Stream = Stream64;
#endif
#include "rope_pool_tokens.h"
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

namespace {

struct Isa {
  const char* name;
  bool (*is_here)();
  RopePoolTokens (*kernel_for)(DType);
};

// Best first.
constexpr Isa kIsas[] = {
#if ROPE_POOL_X86_TARGETS
    {"avx512",
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
              __builtin_cpu_supports("fma");
     },
     avx512::kernel_for},
    {"avx2", [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); },
     avx2::kernel_for},
#endif
    {"baseline", [] { return true; }, baseline::kernel_for},
};

const Isa& choose_isa() {
  const char* wanted = std::getenv("TORCH_ROPEPOOL_CPU_ISA");
  const bool any = wanted == nullptr || *wanted == '\0';
  std::string names;
  for (const Isa& isa : kIsas) {
    if (!isa.is_here()) continue;
    if (any || std::strcmp(wanted, isa.name) == 0) return isa;
    names += std::string(names.empty() ? "" : ", ") + isa.name;
  }
  throw std::runtime_error("TORCH_ROPEPOOL_CPU_ISA must be one of " + names +
                           " on this machine, got " + wanted);
}

const Isa& chosen_isa() {
  static const Isa& isa = choose_isa();
  return isa;
}

}  // namespace

RopePoolTokens rope_pool_tokens(DType dtype) { return chosen_isa().kernel_for(dtype); }

const char* cpu_isa_name() { return chosen_isa().name; }

}  // namespace rope_pool
