// From checked arguments to what the kernels read. No torch in here.
#pragma once

#include <memory>

#include "contract.h"
#include "frequency_table.h"
#include "index_array.h"
#include "rope_pool_params.h"

namespace rope_pool {

RopePoolParams params_of(const RopePoolArgs& args, const TensorView& q_rot,
                         const TensorView& k_rot);

// Whether inv_freq is on the tensors' own device, where the kernel reads it.
bool has_device_inv_freq(const RopePoolArgs& args);

// From rope_base, or from an inv_freq on the CPU. Throws std::invalid_argument for an inv_freq that
// is not finite.
std::shared_ptr<const FrequencyTable> table_of(const RopePoolArgs& args);

// Throws std::out_of_range for the first slot that is not below pool_size. Returns whether the
// slots that are stored to increase strictly, so that no two are the same.
bool check_slots(const IndexArray& slots, i64 num_tokens, i64 pool_size);

// The slots with -1 in place of each that a later token names again. So whatever the order in which
// threads come to the tokens, the last one's row is what stays. [num_tokens]
std::unique_ptr<i64[]> last_writers(const IndexArray& slots, i64 num_tokens);

// Which of a dtype's kernels: by what a lane's chunks are, and by its parameters.
enum class GpuForm {
  kElements,   // chunks of one element
  kChunks,     // chunks of 16 bytes
  kCommon,     // the same, with CommonParams
  kFewTokens,  // the same, and a thread has one head
};

// How a GPU kernel is launched: rope_pool_kernel.h. A group has lanes x heads x tokens threads.
struct GpuPlan {
  GpuForm form;
  GpuParams params;
  CommonParams common_params;  // of the forms kCommon and kFewTokens, which read no others
  i64 num_tokens;
  i64 lanes_per_group;
  i64 heads_per_group;  // at a time
  i64 heads_per_thread;
  i64 tokens_per_group;
  // Of the grid.
  i64 lane_groups;
  i64 head_groups;
  i64 token_groups;
};

// A token's heads are split over more groups until there are `enough_groups`.
GpuPlan gpu_plan_of(const RopePoolArgs& args, const TensorView& q_rot, const TensorView& k_rot,
                    i64 enough_groups);

}  // namespace rope_pool
