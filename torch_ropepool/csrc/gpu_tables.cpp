#include "gpu_tables.h"

#include <torch/headeronly/core/DeviceType.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdlib>
#include <cstring>

namespace rope_pool {
namespace {

constexpr auto kCpu = static_cast<std::int32_t>(torch::headeronly::DeviceType::CPU);

OwnedTensor empty_bytes(std::int64_t size, std::int32_t device_type, std::int32_t device_index) {
  const std::int64_t stride = 1;
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      1, &size, &stride, static_cast<std::int32_t>(torch::headeronly::ScalarType::Byte),
      device_type, device_index, &handle));
  return OwnedTensor(handle);
}

}  // namespace

OwnedTensor device_tensor(const void* bytes, std::size_t size, const TensorView& like) {
  const auto length = static_cast<std::int64_t>(size);
  const OwnedTensor host = empty_bytes(length, kCpu, 0);
  void* data = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(host.get(), &data));
  std::memcpy(data, bytes, size);
  OwnedTensor device = empty_bytes(length, like.device_type, like.device_index);
  TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(device.get(), host.get(), /*non_blocking=*/0));
  return device;
}

std::vector<u32> table_words(const FrequencyTable& table) {
  std::vector<u32> words(table.high);
  words.insert(words.end(), table.low.begin(), table.low.end());
  words.insert(words.end(), table.tail.begin(), table.tail.end());
  return words;
}

void check_slots_if_asked(const RopePoolArgs& args) {
  static const bool asked = [] {
    const char* value = std::getenv("TORCH_ROPEPOOL_CHECK_SLOTS");
    return value != nullptr && std::strcmp(value, "1") == 0;
  }();
  if (!asked) return;
  const std::int64_t num_tokens = args.num_tokens();
  const std::int64_t stride = 1;
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(1, &num_tokens, &stride, args.slots.scalar_type, kCpu, 0, &handle));
  const OwnedTensor host(handle);
  TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(
      host.get(), static_cast<AtenTensorHandle>(args.slots.handle), /*non_blocking=*/0));
  check_slots(index_array(view_of(host.get(), "slots")), num_tokens, args.pool_size());
}

}  // namespace rope_pool
