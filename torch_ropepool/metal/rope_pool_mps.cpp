// The MPS backend of the ops, over torch's C shim for Metal: plain C++, no Objective-C. Nothing
// here asks for the device's name, so that tests can drive it with tensors in host memory.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim_mps.h>

#include <array>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

#include "../csrc/gpu_tables.h"
#include "../csrc/rope_pool_ops.h"
#include "rope_pool_shader.h"  // made by tools/embed_shader.py

namespace rope_pool {
namespace {

// A function of libtorch that not every version has, or null.
template <class Function>
Function find_in_torch(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

[[noreturn]] void fail(const std::string& what) {
  static const auto last_error =
      find_in_torch<const char* (*)()>("torch_exception_get_what_without_backtrace");  // 2.13
  const char* why = last_error != nullptr ? last_error() : nullptr;
  throw std::runtime_error(
      "rope_pool_fused: " + what +
      " failed: " + (why != nullptr && *why != '\0' ? why : "torch has logged why to stderr"));
}

void check(AOTITorchError status, const std::string& what) {
  if (status != AOTI_TORCH_SUCCESS) fail(what);
}

// The kernel for a dtype and a form, compiled at its first use. torch's own cache is not locked.
AOTIMetalKernelFunctionHandle kernel_function(DType dtype, GpuForm form) {
  static std::mutex mutex;
  static AOTIMetalShaderLibraryHandle library = nullptr;
  static constexpr std::array<const char*, 3> kDTypes = {"float16", "bfloat16", "float32"};
  static constexpr std::array<const char*, 4> kForms = {"elements", "chunks", "common",
                                                        "few_tokens"};
  static std::array<AOTIMetalKernelFunctionHandle, kDTypes.size() * kForms.size()> functions{};

  const std::size_t type = dtype == DType::kFloat16 ? 0 : dtype == DType::kBFloat16 ? 1 : 2;
  const auto form_index = static_cast<std::size_t>(form);
  const std::lock_guard<std::mutex> lock(mutex);
  AOTIMetalKernelFunctionHandle& function = functions[kForms.size() * type + form_index];
  if (function != nullptr) return function;

  const std::string name =
      std::string("rope_pool_fused_") + kDTypes[type] + "_" + kForms[form_index];
  if (library == nullptr) {
    check(aoti_torch_mps_create_shader_library(kShaderSource, &library),
          "making the Metal shader library");
  }
  AOTIMetalKernelFunctionHandle found = nullptr;
  check(aoti_torch_mps_get_kernel_function(library, name.c_str(), &found),
        "compiling the Metal kernel " + name);
  if (found == nullptr) fail("compiling the Metal kernel " + name);
  function = found;
  return function;
}

// Tensors with these bytes, made once: the last ones asked for are kept. One that is dropped while
// the GPU still reads it is safe on one stream, which is in order. (On several, of torch 2.14, that
// takes more than kMaxEntries others in between.)
class ConstantTensors {
 public:
  using Shared = std::shared_ptr<AtenTensorOpaque>;

  Shared get(const void* bytes, std::size_t size, const TensorView& like) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
      if (entry->device_index != like.device_index || entry->bytes.size() != size ||
          std::memcmp(entry->bytes.data(), bytes, size) != 0) {
        continue;
      }
      entries_.splice(entries_.begin(), entries_, entry);
      return entries_.front().tensor;
    }
    entries_.push_front({like.device_index, std::string(static_cast<const char*>(bytes), size),
                         Shared(device_tensor(bytes, size, like))});
    if (entries_.size() > kMaxEntries) entries_.pop_back();
    return entries_.front().tensor;
  }

 private:
  static constexpr std::size_t kMaxEntries = 64;
  struct Entry {
    std::int32_t device_index;
    std::string bytes;
    Shared tensor;
  };
  std::mutex mutex_;
  std::list<Entry> entries_;  // most recently used first
};

using SetArgBytes = AOTITorchError (*)(AOTIMetalKernelFunctionHandle, unsigned, const void*,
                                       std::uint64_t);

struct Bytes {
  const void* data;
  std::size_t size;
};

// Those that the plan's kernel reads.
Bytes params_of(const GpuPlan& plan) {
  if (plan.form == GpuForm::kCommon || plan.form == GpuForm::kFewTokens) {
    return {&plan.common_params, sizeof plan.common_params};
  }
  return {&plan.params, sizeof plan.params};
}

// One dispatch, to be encoded on torch's stream.
struct Dispatch {
  std::array<AtenTensorHandle, 10> tensors;  // buffers 0 to 9
  const GpuPlan* plan;
  Bytes params_bytes;         // buffer 10, where set_arg_bytes is
  AtenTensorHandle params;    // buffer 10, where it is not
  SetArgBytes set_arg_bytes;  //
  const char* failed = nullptr;

  // No exception may cross torch's command block.
  static void encode(AOTIMetalKernelFunctionHandle function, void* data) {
    auto& dispatch = *static_cast<Dispatch*>(data);
    dispatch.failed = dispatch.try_encode(function);
  }

  static std::uint64_t size(i64 number) { return static_cast<std::uint64_t>(number); }

  // The name of the step that failed, or null.
  const char* try_encode(AOTIMetalKernelFunctionHandle function) const {
    if (aoti_torch_mps_start_encoding(function) != AOTI_TORCH_SUCCESS) return "encoding";
    unsigned index = 0;
    for (AtenTensorHandle tensor : tensors) {
      if (aoti_torch_mps_set_arg_tensor(function, index++, tensor) != AOTI_TORCH_SUCCESS) {
        return "binding a tensor";
      }
    }
    const AOTITorchError bound =
        params != nullptr ? aoti_torch_mps_set_arg_tensor(function, index++, params)
                          : set_arg_bytes(function, index++, params_bytes.data, params_bytes.size);
    if (bound != AOTI_TORCH_SUCCESS) return "binding the parameters";
    for (i64 number : {plan->num_tokens, plan->heads_per_thread}) {
      if (aoti_torch_mps_set_arg_int(function, index++, number) != AOTI_TORCH_SUCCESS) {
        return "binding a number";
      }
    }
    const std::array<std::uint64_t, 3> group_size = {
        size(plan->lanes_per_group), size(plan->heads_per_group), size(plan->tokens_per_group)};
    const std::array<std::uint64_t, 3> length = {size(plan->lane_groups) * group_size[0],
                                                 size(plan->head_groups) * group_size[1],
                                                 size(plan->token_groups) * group_size[2]};
    if (aoti_torch_mps_dispatch_array_with_group_size(function, length.data(), length.size(),
                                                      group_size.data(),
                                                      group_size.size()) != AOTI_TORCH_SUCCESS) {
      return "dispatching";
    }
    return nullptr;
  }
};

AtenTensorHandle handle_of(const TensorView& t) { return static_cast<AtenTensorHandle>(t.handle); }

struct Mps {
  static constexpr bool kAllowsFloat64 = false;
  static constexpr bool kAllowsFloat64InvFreq = false;
  // Eight for each core of a large GPU of Apple's.
  static constexpr i64 kEnoughGroups = 8 * 40;

  template <class BeforeWrite>
  static void launch(RopePoolArgs& args, const TensorView& q_rot, const TensorView& k_rot,
                     const BeforeWrite& before_write) {
    static const auto set_arg_bytes =
        find_in_torch<SetArgBytes>("torch_mps_set_arg_bytes");  // 2.14
    // Never destroyed: torch may be gone by then.
    static auto& tables = *new ConstantTensors;
    static auto& layouts = *new ConstantTensors;

    const auto table = has_device_inv_freq(args) ? nullptr : table_of(args);
    if (args.num_tokens() == 0) return before_write();
    const OwnedTensor other_slots = look_at_slots_if_asked(args);

    const GpuPlan plan = gpu_plan_of(args, q_rot, k_rot, kEnoughGroups);
    ConstantTensors::Shared frequencies;
    if (table != nullptr) {
      const std::vector<u32> words = table_words(*table);
      frequencies = tables.get(words.data(), words.size() * sizeof(u32), args.q);
    }
    const Bytes params_bytes = params_of(plan);
    ConstantTensors::Shared params;
    if (set_arg_bytes == nullptr) {
      params = layouts.get(params_bytes.data, params_bytes.size, args.q);
    }
    // An empty pool has no buffer to bind, and no slot is stored to it.
    const bool has_pool = args.pool_size() > 0;
    Dispatch dispatch{
        {handle_of(args.q), handle_of(args.k), handle_of(args.v), handle_of(args.positions),
         handle_of(args.slots), handle_of(has_pool ? args.k_pool : q_rot),
         handle_of(has_pool ? args.v_pool : q_rot), handle_of(q_rot), handle_of(k_rot),
         table != nullptr ? frequencies.get() : handle_of(*args.inv_freq)},
        &plan,
        params_bytes,
        params.get(),
        set_arg_bytes};
    // torch's kernel object holds the encoder between the steps, for whichever thread began last.
    static std::mutex encoding;
    const AOTIMetalKernelFunctionHandle function = kernel_function(args.q.dtype, plan.form);
    before_write();
    const AOTITorchError status = [&] {
      const std::lock_guard<std::mutex> lock(encoding);
      return aoti_torch_mps_run_command_block(function, &Dispatch::encode, &dispatch);
    }();
    if (dispatch.failed != nullptr) fail(dispatch.failed);
    check(status, "the command block");
  }
};

}  // namespace
}  // namespace rope_pool

STABLE_TORCH_LIBRARY_IMPL(ropepool, MPS, m) {
  rope_pool::RopePoolOps<rope_pool::Mps>::register_kernels(m);
}
