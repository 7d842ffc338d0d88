// The Metal entry points. What a thread does: rope_pool_kernel.h.
// torch compiles this text at first use, with the includes below pasted in (tools/embed_shader.py).
#include <metal_stdlib>

// The user's PYTORCH_MPS_FAST_MATH must not change a bit: no reordering, no fma but those written.
// Older compilers may not know the pragmas.
#if __METAL_VERSION__ >= 320
#pragma METAL fp math_mode(safe)
#pragma METAL fp contract(off)
#endif

#include "../csrc/rope_pool_kernel.h"

using namespace rope_pool;

// Groups and grid: lanes x heads x tokens. Only whole groups are dispatched.
template <class Element, int kVec, bool kFewTokens, class Params>
[[kernel, max_total_threads_per_threadgroup(ROPE_POOL_THREADS_PER_GROUP)]] void rope_pool_fused(
    device const typename Element::storage* q [[buffer(0)]],
    device const typename Element::storage* k [[buffer(1)]],
    device const typename Element::storage* v [[buffer(2)]],
    device const void* positions [[buffer(3)]], device const void* slots [[buffer(4)]],
    device typename Element::storage* k_pool [[buffer(5)]],
    device typename Element::storage* v_pool [[buffer(6)]],
    device typename Element::storage* q_rot [[buffer(7)]],
    device typename Element::storage* k_rot [[buffer(8)]],
    device const void* frequencies [[buffer(9)]], constant Params& params [[buffer(10)]],
    constant long& num_tokens [[buffer(11)]], constant long& heads_per_thread [[buffer(12)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 thread_in_group [[thread_position_in_threadgroup]],
    uint3 group_size [[threads_per_threadgroup]]) {
  threadgroup float4 angles[ROPE_POOL_ANGLES(kVec) / 4];

  RopePoolTensors<typename Element::storage> tensors;
  tensors.q = q;
  tensors.k = k;
  tensors.v = v;
  tensors.positions = positions;
  tensors.slots = slots;
  tensors.k_pool = k_pool;
  tensors.v_pool = v_pool;
  tensors.q_rot = q_rot;
  tensors.k_rot = k_rot;
  tensors.frequencies = frequencies;

  ThreadPosition at;
  at.token = kFewTokens ? group.z : group.z * group_size.z + thread_in_group.z;
  at.lane = kFewTokens ? thread_in_group.x : group.x * group_size.x + thread_in_group.x;
  at.group = group.y;
  at.token_in_group = kFewTokens ? 0u : thread_in_group.z;
  at.lane_in_group = thread_in_group.x;
  at.head_in_group = thread_in_group.y;
  at.lanes_per_group = group_size.x;
  at.heads_per_group = group_size.y;
  at.heads_per_thread = kFewTokens ? 1u : (u32)heads_per_thread;
  rope_pool_thread<Element, kVec, kFewTokens>(tensors, params, (u32)num_tokens, at,
                                              (threadgroup float*)angles);
}

// clang-format off
template [[host_name("rope_pool_fused_float16_elements")]] [[kernel]]
decltype(rope_pool_fused<Float16, 1, false, GpuParams>) rope_pool_fused<Float16, 1, false, GpuParams>;
template [[host_name("rope_pool_fused_float16_chunks")]] [[kernel]]
decltype(rope_pool_fused<Float16, 8, false, GpuParams>) rope_pool_fused<Float16, 8, false, GpuParams>;
template [[host_name("rope_pool_fused_float16_common")]] [[kernel]]
decltype(rope_pool_fused<Float16, 8, false, CommonParams>) rope_pool_fused<Float16, 8, false, CommonParams>;
template [[host_name("rope_pool_fused_float16_few_tokens")]] [[kernel]]
decltype(rope_pool_fused<Float16, 8, true, CommonParams>) rope_pool_fused<Float16, 8, true, CommonParams>;
template [[host_name("rope_pool_fused_bfloat16_elements")]] [[kernel]]
decltype(rope_pool_fused<BFloat16, 1, false, GpuParams>) rope_pool_fused<BFloat16, 1, false, GpuParams>;
template [[host_name("rope_pool_fused_bfloat16_chunks")]] [[kernel]]
decltype(rope_pool_fused<BFloat16, 8, false, GpuParams>) rope_pool_fused<BFloat16, 8, false, GpuParams>;
template [[host_name("rope_pool_fused_bfloat16_common")]] [[kernel]]
decltype(rope_pool_fused<BFloat16, 8, false, CommonParams>) rope_pool_fused<BFloat16, 8, false, CommonParams>;
template [[host_name("rope_pool_fused_bfloat16_few_tokens")]] [[kernel]]
decltype(rope_pool_fused<BFloat16, 8, true, CommonParams>) rope_pool_fused<BFloat16, 8, true, CommonParams>;
template [[host_name("rope_pool_fused_float32_elements")]] [[kernel]]
decltype(rope_pool_fused<Float32Bits, 1, false, GpuParams>) rope_pool_fused<Float32Bits, 1, false, GpuParams>;
template [[host_name("rope_pool_fused_float32_chunks")]] [[kernel]]
decltype(rope_pool_fused<Float32Bits, 4, false, GpuParams>) rope_pool_fused<Float32Bits, 4, false, GpuParams>;
template [[host_name("rope_pool_fused_float32_common")]] [[kernel]]
decltype(rope_pool_fused<Float32Bits, 4, false, CommonParams>) rope_pool_fused<Float32Bits, 4, false, CommonParams>;
template [[host_name("rope_pool_fused_float32_few_tokens")]] [[kernel]]
decltype(rope_pool_fused<Float32Bits, 4, true, CommonParams>) rope_pool_fused<Float32Bits, 4, true, CommonParams>;
// clang-format on
