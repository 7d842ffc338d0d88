// The CPU kernel behind a function pointer: raw pointers and strides, no torch.
#pragma once

#include "../contract.h"
#include "../frequency_table.h"
#include "../index_array.h"
#include "../rope_pool_params.h"

namespace rope_pool {

struct CpuLaunch {
  RopePoolParams params;
  const void* q;         // [num_tokens, num_qo_heads, head_dim]
  const void* k;         // [num_tokens, num_kv_heads, head_dim]
  const void* v;         // [num_tokens, num_kv_heads, head_dim]
  void* q_rot;           // [num_tokens, num_qo_heads, head_dim], may be q
  void* k_rot;           // [num_tokens, num_kv_heads, head_dim], may be k
  void* k_pool;          // [num_pages, page_size, num_kv_heads, head_dim]
  void* v_pool;          // [num_pages, page_size, num_kv_heads, head_dim]
  IndexArray positions;  // [1 or 3, num_tokens]
  IndexArray slots;      // [1, num_tokens]; negative: not stored; all below the pools' size
  const FrequencyTable* table;
  const unsigned char*
      axes;  // [num_pairs], the row of positions that a pair takes; null: the only one
  double attention_scaling;
};

// Does the tokens in [begin, end), in order.
using RopePoolTokens = void (*)(const CpuLaunch& launch, i64 begin, i64 end);

// The kernel for a dtype, built for the best instruction set that this machine has, or for the one
// that TORCH_ROPEPOOL_CPU_ISA names. The same bits from each. Throws std::runtime_error if that
// variable names none that is here.
RopePoolTokens rope_pool_tokens(DType dtype);
const char* cpu_isa_name();

}  // namespace rope_pool
