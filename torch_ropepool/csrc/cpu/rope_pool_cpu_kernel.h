// The CPU kernel behind a function pointer: raw pointers and strides, no torch.
#pragma once

#include "../contract.h"
#include "../frequency_table.h"
#include "../rope_pool_params.h"

namespace rope_pool {

struct IndexArray {
  const void* data;  // [num_tokens] of int32 or int64
  bool is_int64;
  i64 stride;

  i64 operator[](i64 token) const {
    return is_int64 ? static_cast<const i64*>(data)[token * stride]
                    : static_cast<const i32*>(data)[token * stride];
  }
};

struct CpuLaunch {
  RopePoolParams params;
  const void* q;  // [num_tokens, num_qo_heads, head_dim]
  const void* k;  // [num_tokens, num_kv_heads, head_dim]
  const void* v;  // [num_tokens, num_kv_heads, head_dim]
  void* q_rot;    // [num_tokens, num_qo_heads, head_dim], may be q
  void* k_rot;    // [num_tokens, num_kv_heads, head_dim], may be k
  void* k_pool;   // [pool_size, num_kv_heads, head_dim]
  void* v_pool;   // [pool_size, num_kv_heads, head_dim]
  IndexArray positions;
  IndexArray slots;  // negative: not stored; all below pool_size
  const FrequencyTable* table;
};

// Does the tokens in [begin, end), in order.
using RopePoolTokens = void (*)(const CpuLaunch& launch, i64 begin, i64 end);

// The kernel for a dtype, built for the best instruction set that this machine has, or for the one
// that TORCH_ROPEPOOL_CPU_ISA names. The same bits from each. Throws std::runtime_error if that
// variable names none that is here.
RopePoolTokens rope_pool_tokens(DType dtype);

}  // namespace rope_pool
