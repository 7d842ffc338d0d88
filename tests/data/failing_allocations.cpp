// Preloaded by tests/test_failures.py: makes one allocation of the op fail.
#include <dlfcn.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

// How many allocations from now on the one is that fails; 0: none.
thread_local long countdown = 0;

bool is_ours(void* caller) {
  Dl_info info;
  return dladdr(caller, &info) != 0 && std::strstr(info.dli_fname, "librope_pool") != nullptr;
}

bool fails_now() { return countdown > 0 && --countdown == 0; }

// What the library itself asks for. torch's own small objects are left alone: not all of its code
// survives their loss.
void* allocate(std::size_t size, void* caller) {
  if (countdown > 0 && is_ours(caller) && fails_now()) throw std::bad_alloc();
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}

}  // namespace

extern "C" void fail_allocation(long number) { countdown = number; }
extern "C" long allocations_left() { return countdown; }

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
