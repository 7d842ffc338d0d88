// What the wrappers of other projects' kernels have in common. gpu_vendors.py has Args' fields too.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

struct Args {
  void* q;                // [num_tokens, num_qo_heads, head_dim]
  void* k;                // [num_tokens, num_kv_heads, head_dim]
  void* v;                // as k
  void* q_out;            // as q; q itself if in place
  void* k_out;            // as k; k itself if in place
  void* k_pool;           // [pool_size, num_kv_heads, head_dim]
  void* v_pool;           // as k_pool
  void* cos_sin;          // [max_position + 1, head_dim]: cosines, then sines
  int32_t* positions;     // [num_tokens]
  int32_t* slots;         // [num_tokens]
  int64_t* positions_64;  // [num_tokens]
  int64_t* slots_64;      // [num_tokens]
  int32_t* zeros;         // [num_tokens]
  int32_t* ones;          // [num_tokens]
  int32_t* count;         // [num_tokens + 1]: 0, 1, 2, ...
  int32_t* ends;          // [2]: 0, num_tokens
  int32_t num_tokens;
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t itemsize;
  int32_t is_bfloat16;
  float rope_base;
};

// Calls f with a value of the elements' type.
template <typename F>
int with_half_type(const Args& a, F f) {
  if (a.itemsize != 2) return cudaErrorInvalidValue;
  return a.is_bfloat16 ? f(__nv_bfloat16{}) : f(__half{});
}

template <typename F>
int with_type(const Args& a, F f) {
  return a.itemsize == 4 ? f(float{}) : with_half_type(a, f);
}
