// torch's C functions for MPS (shim_mps.h), over CPU tensors and the emulator. They refuse what
// torch refuses; what a GPU would let pass is a fault of the recording.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim_mps.h>

#include <cstring>
#include <functional>
#include <unordered_map>

#include "engine.h"

#if __has_include(<torch/csrc/shim_exception_state.h>)  // since torch 2.13
#include <torch/csrc/shim_exception_state.h>
#define METAL_EMULATOR_SAY(text)                              \
  torch::csrc::shim::details::set_torch_exception_what(text); \
  torch::csrc::shim::details::set_torch_exception_what_without_backtrace(text)
#else
#define METAL_EMULATOR_SAY(text) (void)(text)
#endif

namespace metal_emulator {

// Compiles a shader: a path, or after '!' the reason why not.
using CompileCallback = void (*)(const char* source, char* result, uint64_t result_size);

struct Function;

struct Library {
  std::string source;
  std::unique_ptr<Shader> shader;
  std::map<std::string, std::unique_ptr<Function>> functions;
  bool deleted = false;
};

struct Function {
  Library* library;
  const Kernel* kernel;
  uint64_t encoded_in = 0;  // the command block in which encoding was started; 0: never
};

namespace {

// The queue: one command block at a time, and one encoder in it.
struct Queue {
  std::recursive_mutex mutex;
  uint64_t blocks = 0;
  bool in_block = false;
  Function* pipeline = nullptr;
  Binding bindings[kMaxBuffers];
};

Queue& queue() {
  static Queue the_queue;
  return the_queue;
}

CompileCallback compile_callback = nullptr;
bool compile_lazily = false;
// Which function of the shim fails next, and at which of its calls from here; 0: none.
std::string failing_function;
int calls_until_it_fails = 0;
// Kept for good: use after deletion is a fault, not a crash.
std::vector<std::unique_ptr<Library>> libraries;
std::vector<AtenTensorHandle> kept_tensors;

void check(AOTITorchError error) {
  if (error != AOTI_TORCH_SUCCESS) throw Refusal("a tensor function of torch failed");
}

// As torch does: an exception becomes an error code. A fault outside any recording is one too, so
// that none goes unseen.
template <class Body>
AOTITorchError guarded(const char* name, Body body) {
  const std::lock_guard<std::recursive_mutex> lock(queue().mutex);
  Recording& r = recording();
  const std::size_t faults = r.faults.size();
  try {
    if (name == failing_function && calls_until_it_fails > 0 && --calls_until_it_fails == 0) {
      throw Refusal("a failure that the test asked for");
    }
    body();
    if (!r.active && r.faults.size() > faults) throw Refusal(r.faults.back());
    return AOTI_TORCH_SUCCESS;
  } catch (const std::exception& e) {
    if (!r.active) {
      r.faults.clear();
      r.fault_keys.clear();
    }
    const std::string text = std::string(name) + ": " + e.what();
    METAL_EMULATOR_SAY(text);
    return AOTI_TORCH_FAILURE;
  }
}

void compile(Library& library) {
  if (library.shader) return;
  static std::vector<char> result(1 << 20);
  compile_callback(library.source.c_str(), result.data(), result.size());
  if (result[0] == '!') throw Refusal(result.data() + 1);
  library.shader = std::make_unique<Shader>(result.data());
}

Function& function_of(AOTIMetalKernelFunctionHandle handle) {
  auto* function = reinterpret_cast<Function*>(handle);
  if (function == nullptr) throw Refusal("the kernel function is null");
  if (function->library->deleted) {
    const std::string text =
        "kernel " + std::string(function->kernel->name) + " is used after its library was deleted";
    recording().fault("deleted", text);
    throw Refusal(text);
  }
  return *function;
}

// Whether arguments may be set: encoding was started in the command block that runs now.
bool encoding(const Function& function, const char* what) {
  const std::string name = "kernel " + std::string(function.kernel->name) + ": ";
  std::string text;
  if (!queue().in_block) {
    text = name + what + " outside a command block";
  } else if (function.encoded_in != queue().blocks) {
    text = name + what + " without start_encoding in this command block";
  } else if (queue().pipeline != &function) {
    text = name + what + " while the encoder is at kernel " + queue().pipeline->kernel->name;
  } else {
    return true;
  }
  recording().fault("encoding/" + text, text);
  return false;
}

void bind(Function& function, unsigned index, Binding binding, const char* what) {
  if (!encoding(function, what)) return;
  if (index >= kMaxBuffers) {
    recording().fault("index/" + std::to_string(index),
                      "kernel " + std::string(function.kernel->name) + ": buffer " +
                          std::to_string(index) + " is set, but Metal has 31: 0 to 30");
    return;
  }
  queue().bindings[index] = std::move(binding);
}

Binding bytes_binding(Binding::Kind kind, const void* data, uint64_t size) {
  Binding binding;
  binding.kind = kind;
  binding.bytes.assign(static_cast<const uint8_t*>(data), static_cast<const uint8_t*>(data) + size);
  return binding;
}

uint8_t* storage_of(AtenTensorHandle tensor, int64_t& offset) {
  void* data = nullptr;
  int32_t dtype = 0;
  check(aoti_torch_get_data_ptr(tensor, &data));
  check(aoti_torch_get_storage_offset(tensor, &offset));
  check(aoti_torch_get_dtype(tensor, &dtype));
  offset *= static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
  return data == nullptr ? nullptr : static_cast<uint8_t*>(data) - offset;
}

// The threadgroup is torch's own choice where none is given.
void dispatch_threads(AOTIMetalKernelFunctionHandle handle, const uint64_t* length,
                      std::size_t dims, const uint64_t* group, std::size_t group_dims,
                      bool single) {
  Function& function = function_of(handle);
  const Kernel& kernel = *function.kernel;
  if (dims == 0 || dims > 3) throw Refusal("a dispatch has 1 to 3 dimensions");
  if (group != nullptr && group_dims != dims) {
    throw Refusal("the grid and the threadgroup have different numbers of dimensions");
  }
  const uint64_t most = kernel.max_threads != 0
                            ? std::min<uint64_t>(kernel.max_threads, recording().max_threads)
                            : recording().max_threads;
  uint64_t grid[3] = {1, 1, 1};
  uint64_t size[3] = {single ? std::min(length[0], most) : most, 1, 1};
  for (std::size_t i = 0; i < dims; ++i) {
    grid[i] = length[i];
    if (group != nullptr) size[i] = group[i];
  }
  if (size[0] * size[1] * size[2] > most) {
    const std::string text = "kernel " + std::string(kernel.name) + ": a threadgroup of " +
                             std::to_string(size[0] * size[1] * size[2]) +
                             " threads exceeds the limit of " + std::to_string(most);
    recording().fault("group/" + text, text);
    throw Refusal(text);
  }
  if (!encoding(function, "dispatch")) return;
  dispatch(*function.library->shader, kernel, queue().bindings, grid, size);
}

void* torch_symbol(const char* name) {
  static void* library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  void* address = library == nullptr ? nullptr : dlsym(library, name);
  if (address == nullptr) throw Refusal(std::string("torch has no ") + name);
  return address;
}

// A tensor that the host code made: its bytes hold nothing yet. Kept until the recording ends, so
// that no other tensor gets its memory meanwhile.
void note_allocation(AtenTensorHandle tensor) {
  Recording& r = recording();
  if (!r.active) return;
  int64_t size = 0;
  int64_t offset = 0;
  check(aoti_torch_get_storage_size(tensor, &size));
  const uint8_t* storage = storage_of(tensor, offset);
  AtenTensorHandle kept = nullptr;
  check(aoti_torch_new_tensor_handle(tensor, &kept));
  kept_tensors.push_back(kept);
  r.allocations.push_back(static_cast<uint64_t>(size));
  if (storage != nullptr) r.incomplete[storage] = Contents(static_cast<std::size_t>(size), 0);
}

// What torch itself writes to has contents.
void note_write(const char* op, AtenTensorHandle tensor) {
  const std::lock_guard<std::recursive_mutex> lock(queue().mutex);
  if (!recording().active) return;
  ++recording().torch_calls[op];
  int64_t numel = 0;
  int64_t offset = 0;
  check(aoti_torch_get_numel(tensor, &numel));
  if (numel > 0) recording().incomplete.erase(storage_of(tensor, offset));
}

template <class Call>
AOTITorchError watched_call(const char* op, StableIValue* stack, Call call) {
  const std::string name = op;
  // An in-place op's first argument is what it writes to.
  if (name.back() == '_') note_write(op, reinterpret_cast<AtenTensorHandle>(stack[0]));
  const AOTITorchError error = call();
  const std::lock_guard<std::recursive_mutex> lock(queue().mutex);
  if (error != AOTI_TORCH_SUCCESS || !recording().active) return error;
  if (name.back() != '_') ++recording().torch_calls[name];
  if (name.rfind("aten::empty", 0) == 0 || name.rfind("aten::new_empty", 0) == 0) {
    note_allocation(reinterpret_cast<AtenTensorHandle>(stack[0]));
  }
  return error;
}

}  // namespace

// For the library that has torch 2.14's addition.
AOTITorchError set_arg_bytes(AOTIMetalKernelFunctionHandle func, unsigned idx, const void* ptr,
                             uint64_t size) {
  return guarded("torch_mps_set_arg_bytes", [&] {
    if (ptr == nullptr) throw Refusal("the pointer is null");
    if (size == 0 || size > 4096) throw Refusal("the size must be 1 to 4096 bytes");
    bind(function_of(func), idx, bytes_binding(Binding::Kind::kBytes, ptr, size), "set_arg_bytes");
  });
}

}  // namespace metal_emulator

using namespace metal_emulator;

extern "C" {

AOTITorchError aoti_torch_mps_create_shader_library(const char* source,
                                                    AOTIMetalShaderLibraryHandle* handle) {
  return guarded("aoti_torch_mps_create_shader_library", [&] {
    auto library = std::make_unique<Library>();
    library->source = source;
    if (!compile_lazily) compile(*library);
    ++recording().libraries;
    libraries.push_back(std::move(library));
    *handle = reinterpret_cast<AOTIMetalShaderLibraryHandle>(libraries.back().get());
  });
}

AOTITorchError aoti_torch_mps_delete_shader_library(AOTIMetalShaderLibraryHandle handle) {
  return guarded("aoti_torch_mps_delete_shader_library", [&] {
    auto* library = reinterpret_cast<Library*>(handle);
    if (library->deleted) recording().fault("deleted twice", "a shader library is deleted twice");
    library->deleted = true;
  });
}

AOTITorchError aoti_torch_mps_get_kernel_function(AOTIMetalShaderLibraryHandle handle,
                                                  const char* name,
                                                  AOTIMetalKernelFunctionHandle* function) {
  return guarded("aoti_torch_mps_get_kernel_function", [&] {
    auto* library = reinterpret_cast<Library*>(handle);
    if (library->deleted) {
      recording().fault("deleted", "a kernel is asked of a shader library that was deleted");
      throw Refusal("the shader library was deleted");
    }
    compile(*library);
    std::unique_ptr<Function>& cached = library->functions[name];
    if (!cached) {
      const Kernel* kernel = library->shader->find(name);
      if (kernel == nullptr) throw Refusal(std::string("no kernel is named ") + name);
      cached = std::make_unique<Function>(Function{library, kernel});
      ++recording().pipelines;
    }
    *function = reinterpret_cast<AOTIMetalKernelFunctionHandle>(cached.get());
  });
}

AOTITorchError aoti_torch_mps_start_encoding(AOTIMetalKernelFunctionHandle func) {
  return guarded("aoti_torch_mps_start_encoding", [&] {
    Function& function = function_of(func);
    if (!queue().in_block) {
      recording().fault("start", "kernel " + std::string(function.kernel->name) +
                                     ": start_encoding outside a command block");
      return;
    }
    function.encoded_in = queue().blocks;
    queue().pipeline = &function;
    // torch leaves what earlier kernels bound. To lean on that is a fault, so nothing stays.
    for (Binding& binding : queue().bindings) binding = Binding();
  });
}

AOTITorchError aoti_torch_mps_set_arg_tensor(AOTIMetalKernelFunctionHandle func, unsigned idx,
                                             AtenTensorHandle tensor) {
  return guarded("aoti_torch_mps_set_arg_tensor", [&] {
    if (tensor == nullptr) throw Refusal("the tensor is null");
    Binding binding;
    binding.kind = Binding::Kind::kTensor;
    binding.storage = storage_of(tensor, binding.offset);
    check(aoti_torch_get_storage_size(tensor, &binding.size));
    bind(function_of(func), idx, std::move(binding), "set_arg_tensor");
  });
}

AOTITorchError aoti_torch_mps_set_arg_int(AOTIMetalKernelFunctionHandle func, unsigned idx,
                                          int64_t val) {
  return guarded("aoti_torch_mps_set_arg_int", [&] {
    bind(function_of(func), idx, bytes_binding(Binding::Kind::kInt, &val, sizeof val),
         "set_arg_int");
  });
}

AOTITorchError aoti_torch_mps_dispatch_single(AOTIMetalKernelFunctionHandle func, uint64_t length) {
  return guarded("aoti_torch_mps_dispatch_single",
                 [&] { dispatch_threads(func, &length, 1, nullptr, 0, true); });
}

AOTITorchError aoti_torch_mps_dispatch_single_with_group_size(AOTIMetalKernelFunctionHandle func,
                                                              uint64_t length,
                                                              uint64_t group_size) {
  return guarded("aoti_torch_mps_dispatch_single_with_group_size",
                 [&] { dispatch_threads(func, &length, 1, &group_size, 1, true); });
}

AOTITorchError aoti_torch_mps_dispatch_array(AOTIMetalKernelFunctionHandle func,
                                             const uint64_t* length, size_t length_size) {
  return guarded("aoti_torch_mps_dispatch_array",
                 [&] { dispatch_threads(func, length, length_size, nullptr, 0, false); });
}

AOTITorchError aoti_torch_mps_dispatch_array_with_group_size(AOTIMetalKernelFunctionHandle func,
                                                             const uint64_t* length,
                                                             size_t length_size,
                                                             const uint64_t* group_size,
                                                             size_t group_size_size) {
  return guarded("aoti_torch_mps_dispatch_array_with_group_size", [&] {
    dispatch_threads(func, length, length_size, group_size, group_size_size, false);
  });
}

void aoti_torch_mps_shared_callback(AOTIMetalKernelFunctionHandle func, void* user_data) {
  (*static_cast<std::function<void(AOTIMetalKernelFunctionHandle)>*>(user_data))(func);
}

AOTITorchError aoti_torch_mps_run_command_block(AOTIMetalKernelFunctionHandle func,
                                                aoti_torch_mps_command_block_callback_t callback,
                                                void* user_data) {
  return guarded("aoti_torch_mps_run_command_block", [&] {
    function_of(func);
    Queue& q = queue();
    if (q.in_block) throw Refusal("a command block inside a command block");
    ++q.blocks;
    ++recording().command_blocks;
    q.in_block = true;
    const auto leave = [&q] {
      q.in_block = false;
      q.pipeline = nullptr;
    };
    try {
      callback(func, user_data);
    } catch (...) {
      leave();
      throw;
    }
    leave();
  });
}

// ---- Allocations and other work that the host code gives to torch: noted, then torch's own.

AOTITorchError aoti_torch_empty_strided(int64_t ndim, const int64_t* sizes, const int64_t* strides,
                                        int32_t dtype, int32_t device_type, int32_t device_index,
                                        AtenTensorHandle* tensor) {
  static const auto real = reinterpret_cast<decltype(&aoti_torch_empty_strided)>(
      torch_symbol("aoti_torch_empty_strided"));
  const AOTITorchError error = real(ndim, sizes, strides, dtype, device_type, device_index, tensor);
  const std::lock_guard<std::recursive_mutex> lock(queue().mutex);
  if (error == AOTI_TORCH_SUCCESS) note_allocation(*tensor);
  return error;
}

AOTITorchError aoti_torch_copy_(AtenTensorHandle to, AtenTensorHandle from, int32_t non_blocking) {
  static const auto real =
      reinterpret_cast<decltype(&aoti_torch_copy_)>(torch_symbol("aoti_torch_copy_"));
  note_write("aten::copy_", to);
  return real(to, from, non_blocking);
}

AOTITorchError aoti_torch_zero_(AtenTensorHandle tensor) {
  static const auto real =
      reinterpret_cast<decltype(&aoti_torch_zero_)>(torch_symbol("aoti_torch_zero_"));
  note_write("aten::zero_", tensor);
  return real(tensor);
}

AOTITorchError aoti_torch_call_dispatcher(const char* op, const char* overload,
                                          StableIValue* stack) {
  static const auto real = reinterpret_cast<decltype(&aoti_torch_call_dispatcher)>(
      torch_symbol("aoti_torch_call_dispatcher"));
  return watched_call(op, stack, [&] { return real(op, overload, stack); });
}

AOTI_TORCH_EXPORT AOTITorchError torch_call_dispatcher(const char* op, const char* overload,
                                                       StableIValue* stack,
                                                       uint64_t extension_build_version) {
  using Call = AOTITorchError (*)(const char*, const char*, StableIValue*, uint64_t);
  static const auto real = reinterpret_cast<Call>(torch_symbol("torch_call_dispatcher"));
  return watched_call(op, stack,
                      [&] { return real(op, overload, stack, extension_build_version); });
}

// ---- What the tests ask of the emulator

AOTI_TORCH_EXPORT void metal_emulator_set_compiler(CompileCallback callback, bool lazily) {
  compile_callback = callback;
  compile_lazily = lazily;
}

AOTI_TORCH_EXPORT void metal_emulator_fail(const char* function, int at_call) {
  const std::lock_guard<std::recursive_mutex> lock(queue().mutex);
  failing_function = function;
  calls_until_it_fails = at_call;
}

AOTI_TORCH_EXPORT void metal_emulator_begin(uint64_t seed, uint64_t max_threads,
                                            bool flush_denormals) {
  const std::lock_guard<std::recursive_mutex> lock(queue().mutex);
  recording() = Recording();
  recording().active = true;
  recording().seed = seed;
  recording().max_threads = max_threads;
  recording().flush_denormals = flush_denormals;
}

AOTI_TORCH_EXPORT void metal_emulator_mark_uninitialised(AtenTensorHandle tensor) {
  const std::lock_guard<std::recursive_mutex> lock(queue().mutex);
  int64_t offset = 0;
  int64_t size = 0;
  const uint8_t* storage = storage_of(tensor, offset);
  check(aoti_torch_get_storage_size(tensor, &size));
  recording().incomplete[storage] = Contents(static_cast<std::size_t>(size), 0);
}

// How many of a tensor's storage's bytes nothing was written to; -1 where that is not known.
AOTI_TORCH_EXPORT int64_t metal_emulator_unwritten(AtenTensorHandle tensor) {
  const std::lock_guard<std::recursive_mutex> lock(queue().mutex);
  int64_t offset = 0;
  const auto found = recording().incomplete.find(storage_of(tensor, offset));
  if (found == recording().incomplete.end()) return -1;
  return std::count(found->second.begin(), found->second.end(), 0);
}

// Valid until the next call.
AOTI_TORCH_EXPORT const char* metal_emulator_report() {
  const std::lock_guard<std::recursive_mutex> lock(queue().mutex);
  static std::string report;
  report = to_json(recording());
  return report.c_str();
}

AOTI_TORCH_EXPORT void metal_emulator_end() {
  const std::lock_guard<std::recursive_mutex> lock(queue().mutex);
  recording() = Recording();
  for (AtenTensorHandle tensor : kept_tensors) aoti_torch_delete_tensor_object(tensor);
  kept_tensors.clear();
}

// torch's memory functions for MPS, which a kernel's host code has no use for.
AOTITorchError aoti_torch_mps_malloc(void** buffer, size_t num_bytes) {
  *buffer = num_bytes == 0 ? nullptr : std::malloc(num_bytes);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_mps_free(void* ptr) {
  std::free(ptr);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_mps_memcpy(void* buffer, size_t constant_offset, size_t bytes_read,
                                     size_t data_size, uint8_t* constants_start) {
  std::memcpy(static_cast<uint8_t*>(buffer) + constant_offset, constants_start + bytes_read,
              data_size);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_mps_copy_buffer(void* src_buffer, void* dst_buffer, size_t data_size,
                                          size_t src_offset, size_t dst_offset) {
  std::memcpy(static_cast<uint8_t*>(dst_buffer) + dst_offset,
              static_cast<uint8_t*>(src_buffer) + src_offset, data_size);
  return AOTI_TORCH_SUCCESS;
}
}
