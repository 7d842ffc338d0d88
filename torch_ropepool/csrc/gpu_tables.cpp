#include "gpu_tables.h"

#include <dlfcn.h>
#include <torch/headeronly/core/DeviceType.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdlib>
#include <cstring>
#include <memory>

namespace rope_pool {
namespace {

using torch::headeronly::ScalarType;

constexpr auto kCpu = static_cast<std::int32_t>(torch::headeronly::DeviceType::CPU);

OwnedTensor empty_vector(std::int64_t size, ScalarType dtype, std::int32_t device_type,
                         std::int32_t device_index) {
  const std::int64_t stride = 1;
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      1, &size, &stride, static_cast<std::int32_t>(dtype), device_type, device_index, &handle));
  return OwnedTensor(handle);
}

// [size] elements of `data`, on the device of `like`. The copy waits for the device.
OwnedTensor to_device(const void* data, std::int64_t size, ScalarType dtype,
                      const TensorView& like) {
  const OwnedTensor host = empty_vector(size, dtype, kCpu, 0);
  void* memory = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(host.get(), &memory));
  std::memcpy(memory, data,
              static_cast<std::size_t>(size) *
                  aoti_torch_dtype_element_size(static_cast<std::int32_t>(dtype)));
  OwnedTensor device = empty_vector(size, dtype, like.device_type, like.device_index);
  TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(device.get(), host.get(), /*non_blocking=*/0));
  return device;
}

bool is_range_check_asked() {
  static const bool asked = [] {
    const char* value = std::getenv("TORCH_ROPEPOOL_CHECK_SLOTS");
    return value != nullptr && std::strcmp(value, "1") == 0;
  }();
  return asked;
}

// A function of libtorch's by its linker name, or null.
void* find_in_torch(const char* name) {
  // Python on Linux does not load torch for all to see.
  static void* const torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  return dlsym(torch != nullptr ? torch : RTLD_DEFAULT, name);
}

// torch.are_deterministic_algorithms_enabled(): at::globalContext().deterministicAlgorithms(),
// which the C shim has not.
bool is_determinism_asked() {
  using GlobalContext = const void* (*)();
  using IsAsked = bool (*)(const void*);
  static const auto global_context =
      reinterpret_cast<GlobalContext>(find_in_torch("_ZN2at13globalContextEv"));
  static const auto is_asked =
      reinterpret_cast<IsAsked>(find_in_torch("_ZNK2at7Context23deterministicAlgorithmsEv"));
  return global_context != nullptr && is_asked != nullptr && is_asked(global_context());
}

}  // namespace

OwnedTensor device_tensor(const void* bytes, std::size_t size, const TensorView& like) {
  return to_device(bytes, static_cast<std::int64_t>(size), ScalarType::Byte, like);
}

std::vector<u32> table_words(const FrequencyTable& table) {
  std::vector<u32> words(table.high);
  words.insert(words.end(), table.low.begin(), table.low.end());
  words.insert(words.end(), table.tail.begin(), table.tail.end());
  return words;
}

OwnedTensor look_at_slots_if_asked(RopePoolArgs& args) {
  const bool wants_range = is_range_check_asked();
  const bool wants_determinism = is_determinism_asked();
  if (!wants_range && !wants_determinism) return nullptr;
  const std::int64_t num_tokens = args.num_tokens();
  const OwnedTensor host =
      empty_vector(num_tokens, static_cast<ScalarType>(args.slots.scalar_type), kCpu, 0);
  TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(
      host.get(), static_cast<AtenTensorHandle>(args.slots.handle), /*non_blocking=*/0));
  const IndexArray slots = index_array(view_of(host.get(), "slots"));
  if (wants_range) check_slots(slots, num_tokens, args.pool_size());
  if (!wants_determinism) return nullptr;
  const std::unique_ptr<i64[]> stored = last_writers(slots, num_tokens);
  bool repeats = false;
  for (i64 t = 0; t < num_tokens; ++t) repeats = repeats || stored[t] != slots.at(0, t);
  if (!repeats) return nullptr;
  OwnedTensor replaced = to_device(stored.get(), num_tokens, ScalarType::Long, args.slots);
  args.slots = view_of(replaced.get(), "slots");
  return replaced;
}

}  // namespace rope_pool
