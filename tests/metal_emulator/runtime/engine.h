// Runs a compiled shader's threads on CPU memory, and looks at every access they make.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "../shader/abi.h"

namespace metal_emulator {

// What torch or Metal answers with an error.
struct Refusal : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A shader as the compiler left it: a shared library.
class Shader {
 public:
  explicit Shader(const std::string& path);
  const Kernel* find(const std::string& name) const;
  const Global* globals() const { return globals_; }
  bool has_barriers() const { return has_barriers_; }
  uint64_t* calls() const { return calls_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  const Kernel* kernels_;
  const Global* globals_;
  uint64_t* calls_;
  bool has_barriers_;
};

// What is bound to a buffer index: a tensor's storage from an offset on, or bytes of its own.
struct Binding {
  enum class Kind { kNone, kTensor, kInt, kBytes };
  Kind kind = Kind::kNone;
  uint8_t* storage = nullptr;
  int64_t size = 0;
  int64_t offset = 0;
  std::vector<uint8_t> bytes;
};

struct Traffic {
  uint64_t bytes_loaded = 0;
  uint64_t bytes_stored = 0;
  uint64_t distinct_bytes_loaded = 0;
  uint64_t distinct_bytes_stored = 0;
  uint64_t bytes_reloaded = 0;  // by a thread that had loaded them before
};

// Which of its bytes hold something, for storage that began without contents.
using Contents = std::vector<uint8_t>;

struct DispatchRecord {
  std::string kernel;
  std::string shader;
  uint64_t grid[3];
  uint64_t group[3];
  std::map<unsigned, std::pair<std::string, Traffic>> buffers;
  Traffic constants;
  Traffic threadgroup;
  std::vector<uint64_t> calls;
};

// What happens from `begin` to `report`.
struct Recording {
  bool active = false;
  uint64_t seed = 0;
  uint64_t max_threads = 1024;
  bool flush_denormals = false;
  std::vector<std::string> faults;
  std::set<std::string> fault_keys;
  uint64_t suppressed_faults = 0;
  std::vector<DispatchRecord> dispatches;
  uint64_t command_blocks = 0;
  uint64_t libraries = 0;
  uint64_t pipelines = 0;
  std::vector<uint64_t> allocations;
  std::map<std::string, uint64_t> torch_calls;
  std::map<const uint8_t*, Contents> incomplete;

  // Once for each key; the rest is counted.
  void fault(const std::string& key, const std::string& text);
};

Recording& recording();
std::string to_json(const Recording& recording);

void dispatch(const Shader& shader, const Kernel& kernel, const Binding (&bindings)[kMaxBuffers],
              const uint64_t (&grid)[3], const uint64_t (&group)[3]);

}  // namespace metal_emulator
