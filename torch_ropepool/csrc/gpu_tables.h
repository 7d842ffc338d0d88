// What GPU backends share on the host beside the plan: tensors made from host bytes, slots checked.
#pragma once

#include "rope_pool_plan.h"
#include "tensor_args.h"

namespace rope_pool {

// A tensor of bytes on the device of `like`. The copy waits for the device.
OwnedTensor device_tensor(const void* bytes, std::size_t size, const TensorView& like);

// A table as the kernel reads it: u32 [3, num_pairs].
std::vector<u32> table_words(const FrequencyTable& table);

// With TORCH_ROPEPOOL_CHECK_SLOTS=1, waits for the device and throws std::out_of_range for a slot
// that is not below pool_size. Otherwise such a slot is not stored.
void check_slots_if_asked(const RopePoolArgs& args);

}  // namespace rope_pool
