#include "engine.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <csetjmp>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <sstream>

#if defined(__SSE__)
#include <immintrin.h>
#endif

namespace metal_emulator {

namespace {

void* symbol(void* library, const char* name) {
  void* address = dlsym(library, name);
  if (address == nullptr) throw Refusal(std::string("the compiled shader lacks ") + name);
  return address;
}

}  // namespace

Shader::Shader(const std::string& path) : path_(path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw Refusal(dlerror());
  kernels_ = static_cast<const Kernel*>(symbol(library, "metal_emulator_kernels"));
  globals_ = static_cast<const Global*>(symbol(library, "metal_emulator_globals"));
  calls_ = static_cast<uint64_t*>(symbol(library, "metal_emulator_calls"));
  has_barriers_ =
      *static_cast<const uint32_t*>(symbol(library, "metal_emulator_has_barriers")) != 0;
}

const Kernel* Shader::find(const std::string& name) const {
  for (const Kernel* kernel = kernels_; kernel->name != nullptr; ++kernel) {
    if (name == kernel->name) return kernel;
  }
  return nullptr;
}

Recording& recording() {
  static Recording the_recording;
  return the_recording;
}

void Recording::fault(const std::string& key, const std::string& text) {
  constexpr std::size_t kMost = 20;
  if (faults.size() < kMost && fault_keys.insert(key).second) {
    faults.push_back(text);
  } else {
    ++suppressed_faults;
  }
}

namespace {

// ---- Memory

enum class Access { kRead, kWrite, kAtomicRead, kAtomicWrite, kAtomicUpdate };

bool reads(Access a) { return a != Access::kWrite && a != Access::kAtomicWrite; }
bool writes(Access a) { return a != Access::kRead && a != Access::kAtomicRead; }
bool is_atomic(Access a) { return a != Access::kRead && a != Access::kWrite; }

constexpr uint32_t kNobody = 0;
constexpr uint32_t kMany = ~uint32_t{0};

// Who touched a byte last in this dispatch, and after how many barriers. Zeros: nobody.
struct Touch {
  uint32_t thread;
  uint32_t group;  // its threadgroup
  uint32_t epoch;
  uint8_t atomic;
};
struct Cell {
  Touch writer;
  Touch reader;
  uint32_t last_reader;
};

// Only the pages that are touched cost memory: tensors may span gigabytes.
template <class T>
struct Zeros {
  explicit Zeros(std::size_t n)
      : bytes((n + 1) * sizeof(T)),
        data(static_cast<T*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) {
    if (data == MAP_FAILED) throw std::bad_alloc();
  }
  ~Zeros() { munmap(data, bytes); }
  Zeros(const Zeros&) = delete;
  std::size_t bytes;
  T* data;
};

// A piece of memory that threads share. Buffers may share one.
struct Storage {
  Storage(uint8_t* at, int64_t bytes) : base(at), size(bytes), cells(bytes) {}
  uint8_t* base;
  int64_t size;
  Zeros<Cell> cells;
  Contents* contents = nullptr;
};

constexpr uint8_t kLoaded = 1;
constexpr uint8_t kStored = 2;

// A range of addresses that a shader may use.
struct Region {
  std::string name;
  Storage* storage = nullptr;
  Space space = Space::kDevice;
  bool is_const = false;
  Traffic traffic;
  std::unique_ptr<Zeros<uint8_t>> seen;
};

// A buffer's addresses are made up: which buffer is meant shows in the address itself, and an
// access that the runtime did not see cannot reach real memory.
constexpr unsigned kIndexShift = 41;
constexpr uint64_t kMiddle = uint64_t{1} << (kIndexShift - 1);

uint64_t address_of(unsigned index, int64_t offset) {
  return (uint64_t{index} + 1) << kIndexShift | (kMiddle + static_cast<uint64_t>(offset));
}

constexpr int64_t kGuardBytes = 256;  // after each global: instrument.py

// ---- Threads

constexpr uint64_t kMostGroups = 1 << 22;  // thread ids of 32 bits, 1024 to a group
constexpr std::size_t kStackBytes = 128 << 10;

enum class State { kReady, kAtBarrier, kAtExchange, kDone };

struct Fiber {
  Thread thread;
  uint32_t id;
  State state = State::kReady;
  uint32_t line = 0;
  uint32_t flags = 0;
  const void* given = nullptr;
  void* received = nullptr;
  uint32_t given_size = 0;
  ucontext_t context;
  std::unique_ptr<char[]> stack;
};

class Execution {
 public:
  Execution(const Shader& shader, const Kernel& kernel, const Binding (&bindings)[kMaxBuffers],
            const uint64_t (&grid)[3], const uint64_t (&group)[3]);
  void run();
  void* access(uint64_t address, int64_t size, int64_t alignment, Access kind, uint32_t line);
  void barrier(uint32_t flags, uint32_t line);
  void exchange(const void* mine, uint32_t size, void* all, uint32_t line);
  void fault(const std::string& kind, uint32_t line, const std::string& text);
  [[noreturn]] void abandon();
  uint32_t lane() const { return fiber_->thread.lane; }
  DispatchRecord record() const;

 private:
  void make_group(uint64_t linear);
  void run_group();
  void run_fibers(const std::vector<std::size_t>& order);
  bool release(const std::vector<std::size_t>& order);
  void suspend(State state, uint32_t line);
  static void enter();
  void* access(Region& region, int64_t offset, int64_t size, Access kind, uint32_t line);
  bool ordered(const Touch& touch, Space space) const;
  std::string thread_name(uint32_t id) const;
  std::vector<std::size_t> shuffled(std::size_t n);

  const Shader& shader_;
  const Kernel& kernel_;
  uint64_t grid_[3];
  uint64_t group_[3];
  uint64_t groups_[3];
  std::mt19937_64 random_;
  std::map<const uint8_t*, std::unique_ptr<Storage>> storages_;
  Region buffers_[kMaxBuffers];
  uint64_t addresses_[kMaxBuffers] = {};
  std::vector<std::vector<uint8_t>> bytes_;
  std::map<uint64_t, Region> globals_;
  std::vector<std::unique_ptr<Contents>> group_contents_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::size_t num_fibers_ = 0;
  Fiber* fiber_ = nullptr;
  ucontext_t scheduler_;
  std::jmp_buf next_thread_;
  uint32_t group_number_ = 0;
  uint32_t device_epoch_ = 0;
  uint32_t group_epoch_ = 0;
};

Execution* current = nullptr;

Execution::Execution(const Shader& shader, const Kernel& kernel,
                     const Binding (&bindings)[kMaxBuffers], const uint64_t (&grid)[3],
                     const uint64_t (&group)[3])
    : shader_(shader), kernel_(kernel), random_(recording().seed) {
  for (int i = 0; i < 3; ++i) {
    grid_[i] = grid[i];
    group_[i] = group[i];
    groups_[i] = (grid[i] + group[i] - 1) / group[i];
  }
  bytes_.reserve(kMaxBuffers);
  for (unsigned a = 0; a < kernel.num_arguments; ++a) {
    const Argument& argument = kernel.arguments[a];
    const Binding& binding = bindings[argument.index];
    uint8_t* base = binding.storage;
    int64_t size = binding.size;
    if (binding.kind != Binding::Kind::kTensor) {
      bytes_.push_back(binding.bytes);
      base = bytes_.back().data();
      size = static_cast<int64_t>(bytes_.back().size());
    }
    std::unique_ptr<Storage>& storage = storages_[base];
    if (!storage) {
      storage = std::make_unique<Storage>(base, size);
      const auto incomplete = recording().incomplete.find(base);
      if (incomplete != recording().incomplete.end()) storage->contents = &incomplete->second;
    }
    Region& region = buffers_[argument.index];
    region.name = "buffer " + std::to_string(argument.index) + " (" + argument.name + ")";
    region.storage = storage.get();
    region.space = argument.space;
    region.is_const = argument.is_const;
    region.seen = std::make_unique<Zeros<uint8_t>>(size);
    addresses_[argument.index] = address_of(argument.index, binding.offset);
  }
  for (const Global* global = shader.globals(); global->name != nullptr; ++global) {
    auto* base = reinterpret_cast<uint8_t*>(global->address);
    const auto size = static_cast<int64_t>(global->size);
    std::unique_ptr<Storage>& storage = storages_[base];
    storage = std::make_unique<Storage>(base, size);
    Region& region = globals_[global->address];
    region.name = std::string(global->space == Space::kConstant ? "constant " : "threadgroup ") +
                  global->name;
    region.storage = storage.get();
    region.space = global->space;
    region.is_const = global->space == Space::kConstant;
    region.seen = std::make_unique<Zeros<uint8_t>>(size);
    if (global->space == Space::kThreadgroup) {
      group_contents_.push_back(std::make_unique<Contents>());
      storage->contents = group_contents_.back().get();
    }
  }
}

std::vector<std::size_t> Execution::shuffled(std::size_t n) {
  std::vector<std::size_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t i = n; i > 1; --i) std::swap(order[i - 1], order[random_() % i]);
  return order;
}

void Execution::run() {
  for (std::size_t linear : shuffled(groups_[0] * groups_[1] * groups_[2])) {
    make_group(linear);
    run_group();
  }
}

void Execution::make_group(uint64_t linear) {
  group_number_ = static_cast<uint32_t>(linear);
  device_epoch_ = group_epoch_ = 0;
  const uint64_t at[3] = {linear % groups_[0], linear / groups_[0] % groups_[1],
                          linear / groups_[0] / groups_[1]};
  uint64_t extent[3];
  for (int i = 0; i < 3; ++i) extent[i] = std::min(group_[i], grid_[i] - at[i] * group_[i]);
  num_fibers_ = extent[0] * extent[1] * extent[2];
  while (fibers_.size() < num_fibers_) fibers_.push_back(std::make_unique<Fiber>());
  for (std::size_t index = 0; index < num_fibers_; ++index) {
    Fiber& fiber = *fibers_[index];
    const uint64_t in_group[3] = {index % extent[0], index / extent[0] % extent[1],
                                  index / extent[0] / extent[1]};
    Thread& t = fiber.thread;
    for (int i = 0; i < 3; ++i) {
      t.position_in_grid[i] = static_cast<unsigned>(at[i] * group_[i] + in_group[i]);
      t.grid[i] = static_cast<unsigned>(grid_[i]);
      t.position_in_group[i] = static_cast<unsigned>(in_group[i]);
      t.group[i] = static_cast<unsigned>(extent[i]);
      t.full_group[i] = static_cast<unsigned>(group_[i]);
      t.group_position[i] = static_cast<unsigned>(at[i]);
      t.groups[i] = static_cast<unsigned>(groups_[i]);
    }
    t.buffers = addresses_;
    t.index_in_group = static_cast<unsigned>(index);
    t.lane = t.index_in_group % kSimdWidth;
    t.simdgroup = t.index_in_group / kSimdWidth;
    t.simdgroups = static_cast<unsigned>((num_fibers_ + kSimdWidth - 1) / kSimdWidth);
    fiber.id = static_cast<uint32_t>(linear * 1024 + index + 1);
    fiber.state = State::kReady;
  }
  // Memory of the threadgroup begins anew: garbage, and nobody's.
  for (auto& [address, region] : globals_) {
    if (region.space != Space::kThreadgroup) continue;
    Storage& storage = *region.storage;
    std::memset(storage.base, 0xa5, storage.size);
    std::memset(storage.cells.data, 0, storage.size * sizeof(Cell));
    storage.contents->assign(storage.size, 0);
  }
}

void Execution::run_group() {
  const std::vector<std::size_t> order = shuffled(num_fibers_);
  if (shader_.has_barriers()) return run_fibers(order);
  for (std::size_t i : order) {
    fiber_ = fibers_[i].get();
    if (setjmp(next_thread_) == 0) kernel_.run(&fiber_->thread);
  }
}

// Ends the thread that runs now, where the CPU could not go on. A shader has no destructors.
void Execution::abandon() {
  if (!shader_.has_barriers()) std::longjmp(next_thread_, 1);
  suspend(State::kDone, 0);
  std::abort();
}

// ---- Fibers: each thread runs up to a barrier, then the next one does.

void Execution::enter() {
  Execution& execution = *current;
  execution.kernel_.run(&execution.fiber_->thread);
  execution.suspend(State::kDone, 0);
}

void Execution::suspend(State state, uint32_t line) {
  Fiber& fiber = *fiber_;
  fiber.state = state;
  fiber.line = line;
  swapcontext(&fiber.context, &scheduler_);
}

void Execution::run_fibers(const std::vector<std::size_t>& order) {
  for (std::size_t i : order) {
    Fiber& fiber = *fibers_[i];
    if (!fiber.stack) fiber.stack = std::make_unique<char[]>(kStackBytes);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, &Execution::enter, 0);
  }
  do {
    for (std::size_t i : order) {
      fiber_ = fibers_[i].get();
      if (fiber_->state == State::kReady) swapcontext(&scheduler_, &fiber_->context);
    }
  } while (release(order));
}

// Lets go those whose barrier all have reached. False when the group is over.
bool Execution::release(const std::vector<std::size_t>& order) {
  const auto all = [&](State state) {
    return std::all_of(order.begin(), order.end(),
                       [&](std::size_t i) { return fibers_[i]->state == state; });
  };
  const Fiber& first = *fibers_[order[0]];
  if (all(State::kDone)) return false;
  if (all(State::kAtBarrier)) {
    for (std::size_t i : order) {
      if (fibers_[i]->line != first.line) {
        fiber_ = fibers_[i].get();
        fault("barrier", first.line, "threads of one threadgroup wait at different barriers");
        return false;
      }
      fibers_[i]->state = State::kReady;
    }
    device_epoch_ += first.flags & 1u;
    group_epoch_ += first.flags >> 1 & 1u;
    return true;
  }
  bool released = false;
  for (std::size_t begin = 0; begin < num_fibers_; begin += kSimdWidth) {
    const std::size_t end = std::min<std::size_t>(begin + kSimdWidth, num_fibers_);
    const auto together = [&](const std::unique_ptr<Fiber>& fiber) {
      return fiber->state == State::kAtExchange && fiber->line == fibers_[begin]->line;
    };
    if (!std::all_of(fibers_.begin() + begin, fibers_.begin() + end, together)) continue;
    for (std::size_t to = begin; to < end; ++to) {
      const std::size_t size = fibers_[to]->given_size;
      auto* received = static_cast<char*>(fibers_[to]->received);
      std::memset(received, 0, size * kSimdWidth);
      for (std::size_t from = begin; from < end; ++from) {
        std::memcpy(received + (from - begin) * size, fibers_[from]->given, size);
      }
    }
    for (std::size_t i = begin; i < end; ++i) fibers_[i]->state = State::kReady;
    released = true;
  }
  if (!released) {
    const auto waiting = std::find_if(order.begin(), order.end(), [&](std::size_t i) {
      return fibers_[i]->state != State::kDone;
    });
    fiber_ = fibers_[*waiting].get();
    fault("barrier", fiber_->line, "waits at a barrier that not all threads reach");
  }
  return released;
}

void Execution::barrier(uint32_t flags, uint32_t line) {
  fiber_->flags = flags;
  suspend(State::kAtBarrier, line);
}

void Execution::exchange(const void* mine, uint32_t size, void* all, uint32_t line) {
  fiber_->given = mine;
  fiber_->given_size = size;
  fiber_->received = all;
  suspend(State::kAtExchange, line);
}

// ---- The look at each access

std::string Execution::thread_name(uint32_t id) const {
  if (id == kMany) return "more than one thread";
  const uint64_t linear = (id - 1) / 1024;
  const uint64_t index = (id - 1) % 1024;
  const uint64_t at[3] = {linear % groups_[0], linear / groups_[0] % groups_[1],
                          linear / groups_[0] / groups_[1]};
  uint64_t extent[3];
  for (int i = 0; i < 3; ++i) extent[i] = std::min(group_[i], grid_[i] - at[i] * group_[i]);
  const uint64_t in_group[3] = {index % extent[0], index / extent[0] % extent[1],
                                index / extent[0] / extent[1]};
  std::ostringstream text;
  text << "thread (" << at[0] * group_[0] + in_group[0] << ", " << at[1] * group_[1] + in_group[1]
       << ", " << at[2] * group_[2] + in_group[2] << ")";
  return text.str();
}

void Execution::fault(const std::string& kind, uint32_t line, const std::string& text) {
  std::ostringstream all;
  all << "kernel " << kernel_.name << ", line " << line << ", " << thread_name(fiber_->id) << ": "
      << text;
  recording().fault(kind + "/" + kernel_.name + "/" + std::to_string(line), all.str());
}

// Whether a barrier lies between that touch and now.
bool Execution::ordered(const Touch& touch, Space space) const {
  if (touch.thread == kNobody || touch.thread == fiber_->id) return true;
  const uint32_t epoch = space == Space::kThreadgroup ? group_epoch_ : device_epoch_;
  return touch.group == group_number_ && touch.epoch < epoch;
}

void* Execution::access(uint64_t address, int64_t size, int64_t alignment, Access kind,
                        uint32_t line) {
  alignas(64) static uint8_t nowhere[256];
  std::memset(nowhere, 0, sizeof nowhere);
  const char* verb = writes(kind) ? "stores " : "loads ";
  const auto amount = std::to_string(size) + " bytes ";
  const uint64_t slot = address >> kIndexShift;
  Region* region = nullptr;
  int64_t offset = 0;
  if (slot >= 1 && slot <= kMaxBuffers && buffers_[slot - 1].storage != nullptr) {
    region = &buffers_[slot - 1];
    offset = static_cast<int64_t>(address - (slot << kIndexShift)) - static_cast<int64_t>(kMiddle);
  } else if (auto after = globals_.upper_bound(address); after != globals_.begin()) {
    region = &std::prev(after)->second;
    offset = static_cast<int64_t>(address - std::prev(after)->first);
    if (offset >= region->storage->size + kGuardBytes) region = nullptr;
  }
  if (region == nullptr) {
    fault("nowhere", line, verb + amount + "through a pointer into no buffer");
    return nowhere;
  }
  if (offset < 0 || size > region->storage->size || offset > region->storage->size - size) {
    fault("bounds" + region->name, line,
          verb + amount + "at byte " + std::to_string(offset) + " of " + region->name +
              ", out of bounds: it has " + std::to_string(region->storage->size));
    return nowhere;
  }
  if (offset % alignment != 0) {
    fault("alignment" + region->name, line,
          verb + amount + "at byte " + std::to_string(offset) + " of " + region->name +
              ", misaligned: not a multiple of " + std::to_string(alignment));
  }
  if (writes(kind) && region->is_const) {
    fault("const" + region->name, line,
          verb + amount + "into " + region->name + ", which is const");
    return nowhere;
  }
  return access(*region, offset, size, kind, line);
}

void* Execution::access(Region& region, int64_t offset, int64_t size, Access kind, uint32_t line) {
  Storage& storage = *region.storage;
  const uint32_t me = fiber_->id;
  const uint32_t epoch = region.space == Space::kThreadgroup ? group_epoch_ : device_epoch_;
  const auto race = [&](int64_t byte, const char* what, const Touch& other) {
    fault("race" + region.name, line,
          std::string("race: ") + what + " byte " + std::to_string(byte) + " of " + region.name +
              (writes(kind) ? ", which " : ", stored by ") + thread_name(other.thread) +
              (&other == &storage.cells.data[byte].reader ? " loads"
               : writes(kind)                             ? " stores"
                                                          : "") +
              " in the same dispatch");
  };
  for (int64_t byte = offset; byte < offset + size; ++byte) {
    Cell& cell = storage.cells.data[byte];
    uint8_t& seen = region.seen->data[byte];
    const bool writer_conflicts =
        !ordered(cell.writer, region.space) && !(is_atomic(kind) && cell.writer.atomic != 0);
    if (reads(kind)) {
      ++region.traffic.bytes_loaded;
      region.traffic.distinct_bytes_loaded += (seen & kLoaded) == 0;
      region.traffic.bytes_reloaded += cell.last_reader == me;
      seen |= kLoaded;
      if (writer_conflicts) {
        race(byte, "loads", cell.writer);
      } else if (storage.contents != nullptr && (*storage.contents)[byte] == 0) {
        fault("unwritten" + region.name, line,
              "loads byte " + std::to_string(byte) + " of " + region.name +
                  ", unwritten: nothing was stored there before");
      }
      cell.last_reader = me;
    }
    if (writes(kind)) {
      ++region.traffic.bytes_stored;
      region.traffic.distinct_bytes_stored += (seen & kStored) == 0;
      seen |= kStored;
      if (writer_conflicts) {
        race(byte, "stores", cell.writer);
      } else if (!ordered(cell.reader, region.space) &&
                 !(is_atomic(kind) && cell.reader.atomic != 0)) {
        race(byte, "stores", cell.reader);
      }
      cell.writer = {me, group_number_, epoch, is_atomic(kind)};
      if (storage.contents != nullptr) (*storage.contents)[byte] = 1;
    }
    if (reads(kind)) {
      Touch& reader = cell.reader;
      const bool shared = !ordered(reader, region.space);
      reader.atomic = is_atomic(kind) && (reader.atomic != 0 || !shared);
      reader.group = shared && reader.group != group_number_ ? kMany : group_number_;
      reader.thread = shared ? kMany : me;
      reader.epoch = epoch;
    }
  }
  return storage.base + offset;
}

DispatchRecord Execution::record() const {
  DispatchRecord record;
  record.kernel = kernel_.name;
  record.shader = shader_.path();
  for (int i = 0; i < 3; ++i) {
    record.grid[i] = grid_[i];
    record.group[i] = group_[i];
  }
  for (unsigned a = 0; a < kernel_.num_arguments; ++a) {
    const Argument& argument = kernel_.arguments[a];
    record.buffers[argument.index] = {argument.name, buffers_[argument.index].traffic};
  }
  const auto add = [](Traffic& sum, const Traffic& x) {
    sum.bytes_loaded += x.bytes_loaded;
    sum.bytes_stored += x.bytes_stored;
    sum.distinct_bytes_loaded += x.distinct_bytes_loaded;
    sum.distinct_bytes_stored += x.distinct_bytes_stored;
    sum.bytes_reloaded += x.bytes_reloaded;
  };
  for (const auto& [address, region] : globals_) {
    add(region.space == Space::kConstant ? record.constants : record.threadgroup, region.traffic);
  }
  return record;
}

// ---- What is bound against what is declared

std::string in_kernel(const Kernel& kernel) { return std::string("kernel ") + kernel.name + ": "; }

bool check_arguments(const Kernel& kernel, const Binding (&bindings)[kMaxBuffers]) {
  const std::size_t before = recording().faults.size() + recording().suppressed_faults;
  const auto wrong = [&](unsigned index, const std::string& text) {
    recording().fault("argument/" + std::string(kernel.name) + "/" + std::to_string(index),
                      in_kernel(kernel) + "buffer " + std::to_string(index) + text);
  };
  const Argument* declared[kMaxBuffers] = {};
  for (unsigned a = 0; a < kernel.num_arguments; ++a) {
    declared[kernel.arguments[a].index] = &kernel.arguments[a];
  }
  for (unsigned index = 0; index < kMaxBuffers; ++index) {
    const Binding& binding = bindings[index];
    const bool bound = binding.kind != Binding::Kind::kNone;
    if (declared[index] == nullptr) {
      if (bound) wrong(index, " is bound, but the kernel declares none of that index");
      continue;
    }
    const Argument& argument = *declared[index];
    const std::string name = std::string(" (") + argument.name + ")";
    if (!bound) {
      wrong(index, name + " is not bound");
      continue;
    }
    const auto size = static_cast<int64_t>(argument.size);
    if (binding.kind == Binding::Kind::kTensor) {
      if (binding.offset % static_cast<int64_t>(argument.alignment) != 0) {
        wrong(index, name + " begins at byte " + std::to_string(binding.offset) +
                         " of its storage, misaligned: not a multiple of " +
                         std::to_string(argument.alignment));
      }
      if (argument.is_reference && binding.size - binding.offset < size) {
        wrong(index, name + " has the wrong size: the tensor has " +
                         std::to_string(binding.size - binding.offset) +
                         " bytes from its offset on, the kernel declares " + std::to_string(size));
      }
      continue;
    }
    const auto given = static_cast<int64_t>(binding.bytes.size());
    if (!argument.is_const) wrong(index, name + " is set as bytes, but the kernel may store to it");
    if (argument.is_reference ? given != size : given % size != 0) {
      wrong(index, name + " has the wrong size: " + std::to_string(given) +
                       " bytes are set, the kernel declares " + std::to_string(size));
    }
  }
  return recording().faults.size() + recording().suppressed_faults == before;
}

bool check_threads(const Kernel& kernel, const uint64_t (&grid)[3], const uint64_t (&group)[3]) {
  const auto wrong = [&](const std::string& text) {
    recording().fault("threads/" + std::string(kernel.name), in_kernel(kernel) + text);
    return false;
  };
  for (int i = 0; i < 3; ++i) {
    if (grid[i] == 0) return wrong("the grid has no threads");
    if (group[i] == 0) return wrong("the threadgroup has no threads");
    if (grid[i] >> 32 != 0) return wrong("the grid has 2^32 threads or more along one axis");
  }
  uint64_t groups = 1;
  for (int i = 0; i < 3; ++i) groups *= (grid[i] + group[i] - 1) / group[i];
  if (groups >= kMostGroups)
    return wrong("the grid has more threadgroups than the emulator counts");
  return true;
}

// Denormals become zeros while a shader runs, as they may on a GPU.
class DenormalMode {
 public:
  explicit DenormalMode(bool flush) {
#if defined(__SSE__)
    before_ = _mm_getcsr();
    if (flush) _mm_setcsr(before_ | 0x8040u);
#else
    (void)flush;
#endif
  }
  ~DenormalMode() {
#if defined(__SSE__)
    _mm_setcsr(before_);
#endif
  }

 private:
  unsigned before_ = 0;
};

}  // namespace

void dispatch(const Shader& shader, const Kernel& kernel, const Binding (&bindings)[kMaxBuffers],
              const uint64_t (&grid)[3], const uint64_t (&group)[3]) {
  // No short cut: both lists of faults are wanted.
  const bool good_arguments = check_arguments(kernel, bindings);
  if (!check_threads(kernel, grid, group) || !good_arguments) return;
  Execution execution(shader, kernel, bindings, grid, group);
  std::size_t num_functions = 0;
  while (shader.calls()[num_functions] != kEndOfCalls) shader.calls()[num_functions++] = 0;
  current = &execution;
  {
    DenormalMode mode(recording().flush_denormals);
    execution.run();
  }
  current = nullptr;
  if (!recording().active) return;
  DispatchRecord record = execution.record();
  record.calls.assign(shader.calls(), shader.calls() + num_functions);
  recording().dispatches.push_back(std::move(record));
}

// ---- Report

namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", c);
      out += escape;
    } else {
      out += c;
    }
  }
  return out + '"';
}

template <class Items, class Print>
std::string joined(const Items& items, Print print) {
  std::string out;
  for (const auto& item : items) out += (out.empty() ? "" : ", ") + print(item);
  return out;
}

std::string to_json(const Traffic& t) {
  std::ostringstream out;
  out << "{\"bytes_loaded\": " << t.bytes_loaded << ", \"bytes_stored\": " << t.bytes_stored
      << ", \"distinct_bytes_loaded\": " << t.distinct_bytes_loaded
      << ", \"distinct_bytes_stored\": " << t.distinct_bytes_stored
      << ", \"bytes_reloaded\": " << t.bytes_reloaded << "}";
  return out.str();
}

std::string to_json(const DispatchRecord& d) {
  const auto number = [](uint64_t n) { return std::to_string(n); };
  std::ostringstream out;
  out << "{\"kernel\": " << quoted(d.kernel) << ", \"shader\": " << quoted(d.shader)
      << ", \"grid\": [" << joined(d.grid, number) << "], \"group\": [" << joined(d.group, number)
      << "], \"buffers\": {"
      << joined(d.buffers,
                [](const auto& b) {
                  return quoted(std::to_string(b.first)) + ": [" + quoted(b.second.first) + ", " +
                         to_json(b.second.second) + "]";
                })
      << "}, \"constants\": " << to_json(d.constants)
      << ", \"threadgroup\": " << to_json(d.threadgroup) << ", \"calls\": ["
      << joined(d.calls, number) << "]}";
  return out.str();
}

}  // namespace

std::string to_json(const Recording& r) {
  std::ostringstream out;
  out << "{\"faults\": [" << joined(r.faults, quoted)
      << "], \"suppressed_faults\": " << r.suppressed_faults << ", \"dispatches\": ["
      << joined(r.dispatches, [](const DispatchRecord& d) { return to_json(d); })
      << "], \"command_blocks\": " << r.command_blocks << ", \"libraries\": " << r.libraries
      << ", \"pipelines\": " << r.pipelines << ", \"allocations\": ["
      << joined(r.allocations, [](uint64_t n) { return std::to_string(n); })
      << "], \"torch_calls\": {"
      << joined(r.torch_calls,
                [](const auto& call) {
                  return quoted(call.first) + ": " + std::to_string(call.second);
                })
      << "}}";
  return out.str();
}

}  // namespace metal_emulator

// ---- What compiled shaders call

using metal_emulator::current;

extern "C" {

void* metal_emulator_access(uint64_t address, uint64_t size, uint64_t alignment, uint32_t kind,
                            uint32_t line) {
  return current->access(address, static_cast<int64_t>(size), static_cast<int64_t>(alignment),
                         static_cast<metal_emulator::Access>(kind), line);
}

void metal_emulator_barrier(uint32_t flags, uint32_t line) { current->barrier(flags, line); }

void metal_emulator_exchange(const void* mine, uint32_t size, void* all, uint32_t line) {
  current->exchange(mine, size, all, line);
}

uint32_t metal_emulator_lane() { return current->lane(); }

// What C++ leaves undefined: instrument.py has the same order.
void metal_emulator_undefined(uint32_t kind, uint32_t line) {
  static const char* const kTexts[] = {
      "an index outside its array",
      "a shift by more than the width, or a negative one",
      "a division by zero, or that overflows",
      "a signed sum that overflows",
      "a signed difference that overflows",
      "a signed product that overflows",
      "a signed negation that overflows",
      "a float that its integer type cannot hold",
      "the end of a function that returns a value",
      "a place that cannot be reached",
  };
  const std::string text = std::string("undefined behaviour: ") + kTexts[kind];
  current->fault(text, line, text);
  current->abandon();
}
}
