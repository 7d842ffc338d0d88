// What a compiled shader and the runtime that runs it say to each other. Plain data: the shader
// side has no standard library.
#pragma once

namespace metal_emulator {

enum class Space : unsigned { kThread = 0, kDevice = 1, kConstant = 2, kThreadgroup = 3 };

// One buffer argument of a kernel, as its declaration has it.
struct Argument {
  const char* name;
  unsigned index;
  Space space;
  bool is_const;
  bool is_reference;
  unsigned long size;  // of what is pointed to
  unsigned long alignment;
};

// Where one thread of a dispatch stands. Sizes are those of the thread's own threadgroup, which is
// smaller at the grid's far edges.
struct Thread {
  const unsigned long* buffers;  // the address that each buffer index was given
  unsigned position_in_grid[3];
  unsigned grid[3];
  unsigned position_in_group[3];
  unsigned group[3];
  unsigned full_group[3];
  unsigned group_position[3];
  unsigned groups[3];
  unsigned index_in_group;
  unsigned lane;
  unsigned simdgroup;
  unsigned simdgroups;
};

struct Kernel {
  const char* name;
  void (*run)(const Thread*);
  const Argument* arguments;
  unsigned num_arguments;
  unsigned max_threads;  // [[max_total_threads_per_threadgroup]], or 0
};

// A variable at namespace scope (constant) or shared by a threadgroup.
struct Global {
  const char* name;
  unsigned long address;
  unsigned long size;
  Space space;
};

constexpr unsigned kSimdWidth = 32;
constexpr unsigned kMaxBuffers = 31;
constexpr unsigned long kEndOfCalls = ~0ul;  // ends the counts of calls

}  // namespace metal_emulator
