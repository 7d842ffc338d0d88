// Preloaded by tests/test_failures.py: makes one step of a call fail, which is an allocation, or
// something that the op asks of torch.
#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

// How many steps from now on the one is that fails; 0: none.
thread_local long countdown = 0;

// Where the op's library is in memory.
std::uintptr_t first_address = 0;
std::uintptr_t last_address = 0;

int find_library(dl_phdr_info* info, std::size_t, void*) {
  if (std::strstr(info->dlpi_name, "librope_pool.") == nullptr) return 0;
  first_address = info->dlpi_addr;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    last_address = std::max<std::uintptr_t>(
        last_address, info->dlpi_addr + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz);
  }
  return 1;
}

bool is_ours(void* caller) {
  const auto address = reinterpret_cast<std::uintptr_t>(caller);
  return first_address <= address && address < last_address;
}

bool fails_now() { return countdown > 0 && --countdown == 0; }

// What the library itself asks for. torch's own small objects are left alone: not all of its code
// survives their loss.
void* allocate(std::size_t size, void* caller) {
  if (countdown > 0 && is_ours(caller) && fails_now()) throw std::bad_alloc();
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}

// torch's own function of that name.
template <class Function>
Function* in_torch(const char* name, Function*) {
  static void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  return reinterpret_cast<Function*>(dlsym(torch, name));
}

}  // namespace

extern "C" void fail_step(long number) {
  if (first_address == 0) dl_iterate_phdr(find_library, nullptr);
  countdown = number;
}
extern "C" long steps_left() { return countdown; }

void* operator new(std::size_t size) { return allocate(size, __builtin_return_address(0)); }
void* operator new[](std::size_t size) { return allocate(size, __builtin_return_address(0)); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

// What torch's CPU allocator calls for the memory of a tensor.
extern "C" int posix_memalign(void** memory, std::size_t alignment, std::size_t size) {
  if (fails_now()) return ENOMEM;
  // aligned_alloc wants a multiple of the alignment.
  *memory = std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
  return *memory == nullptr ? ENOMEM : 0;
}

// What torch's C shim returns for what fails in torch.
constexpr int kFailure = 1;

extern "C" int aoti_torch_new_tensor_handle(void* tensor, void** result) {
  static auto* next = in_torch("aoti_torch_new_tensor_handle", &aoti_torch_new_tensor_handle);
  return fails_now() ? kFailure : next(tensor, result);
}
extern "C" int aoti_torch_as_strided(void* tensor, const std::int64_t* sizes,
                                     const std::int64_t* strides, void** result) {
  static auto* next = in_torch("aoti_torch_as_strided", &aoti_torch_as_strided);
  return fails_now() ? kFailure : next(tensor, sizes, strides, result);
}
extern "C" int torch_call_dispatcher(const char* name, const char* overload, std::uint64_t* stack,
                                     std::uint64_t version) {
  static auto* next = in_torch("torch_call_dispatcher", &torch_call_dispatcher);
  return fails_now() ? kFailure : next(name, overload, stack, version);
}
