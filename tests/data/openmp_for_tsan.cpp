// Preloaded by tools/sanitize.py: tells ThreadSanitizer what OpenMP's runtime, which is not built
// for it, promises. What comes before a parallel region happens before all of it, and all of it
// before what comes after.
#include <dlfcn.h>

extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);

namespace {

struct Region {
  void (*body)(void*);
  void* data;
};

void run(void* data) {
  auto* region = static_cast<Region*>(data);
  __tsan_acquire(region);
  region->body(region->data);
  __tsan_release(region);
}

}  // namespace

// What a compiler makes of `#pragma omp parallel`.
extern "C" void GOMP_parallel(void (*body)(void*), void* data, unsigned num_threads,
                              unsigned flags) {
  static auto* next = reinterpret_cast<decltype(&GOMP_parallel)>(
      dlsym(dlopen("libgomp.so.1", RTLD_LAZY | RTLD_NOLOAD), "GOMP_parallel"));
  Region region{body, data};
  __tsan_release(&region);
  next(run, &region, num_threads, flags);
  __tsan_acquire(&region);
}
