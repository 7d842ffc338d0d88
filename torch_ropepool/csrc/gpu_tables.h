// What GPU backends share on the host beside the plan: tensors made from host memory, slots that
// are looked at.
#pragma once

#include "rope_pool_plan.h"
#include "tensor_args.h"

namespace rope_pool {

// A tensor of bytes on the device of `like`. The copy waits for the device.
OwnedTensor device_tensor(const void* bytes, std::size_t size, const TensorView& like);

// A table as the kernel reads it: u32 [3, num_pairs].
std::vector<u32> table_words(const FrequencyTable& table);

// Two requests for which the slots are read, which waits for the device. With
// TORCH_ROPEPOOL_CHECK_SLOTS=1, throws std::out_of_range for a slot that is not below pool_size.
// Under torch.use_deterministic_algorithms(True), where tokens share a slot, puts other slots into
// `args`, by which the last of them alone is stored, as on the CPU: the tensor that is returned.
OwnedTensor look_at_slots_if_asked(RopePoolArgs& args);

}  // namespace rope_pool
