// What one launch works on, as plain data: the CPU, Metal and CUDA kernels all read this.
#pragma once

#include "rope_math.h"

// A GPU kernel's threads per threadgroup (CUDA: block), at most.
#define ROPE_POOL_THREADS_PER_GROUP 64

// Floats of a threadgroup's memory: a cosine and a sine for each pair, kVec pairs a thread.
#define ROPE_POOL_ANGLES(kVec) (2 * (kVec) * ROPE_POOL_THREADS_PER_GROUP)

namespace rope_pool {

// In elements.
struct RowStrides {
  i64 token;    //
  i64 head;     //
  i64 feature;  //
};

// In elements. A pool that is not paged is one page.
struct PoolStrides {
  i64 page;     //
  i64 row;      // of a page
  i64 head;     //
  i64 feature;  //
};

struct RopePoolParams {
  i64 num_qo_heads;
  i64 num_kv_heads;
  i64 head_dim;
  i64 pool_size;
  i64 page_size;

  // Pair i is the features i * pair_step and i * pair_step + pair_distance.
  i64 num_pairs;
  i64 pair_step;
  i64 pair_distance;

  RowStrides q;
  RowStrides k;
  RowStrides v;
  RowStrides q_rot;
  RowStrides k_rot;
  PoolStrides k_pool;
  PoolStrides v_pool;
};

// The heads of q, of k, or of v.
struct GpuHeads {
  RowStrides in;     //
  RowStrides out;    // of q_rot or k_rot
  PoolStrides pool;  //
  u32 num_heads;
  u32 first_group;  // threadgroups of a token: q's, then k's, then v's
};

// What a GPU kernel reads, the most used first. The number of tokens is not here: Metal keeps these
// bytes in GPU memory, one copy for all calls of a layout.
struct GpuParams {
  u32 inv_freq_itemsize;  // of radians per position; 0: the frequencies are a table

  // Yes or no.
  u32 positions_are_int64;
  u32 slots_are_int64;
  u32 interleaved;
  u32 keeps_unturned;  // in place: what does not turn is where it has to be
  u32 has_mrope;
  u32 mrope_interleaved;

  float attention_scaling;

  i64 head_dim;
  i64 num_pairs;
  i64 pool_size;
  i64 page_size;

  // In words of 32 bits, of which an index has one or two.
  i64 positions_stride;       //
  i64 slots_stride;           //
  i64 positions_axis_stride;  // of the three rows, with mrope

  i64 inv_freq_stride;  // in elements

  GpuHeads heads[3];  // q, k, v

  i64 mrope_section[3];
};
static_assert(sizeof(GpuParams) == 4 * 8 + 8 * (4 + 4 + 3 * 11 + 3), "as on every device");

// The same for what most calls are: chunks of 16 bytes, half-split pairs, frequencies from a table,
// one row of positions, pools of one page, and offsets that fit in 32 bits. A small call waits for
// these bytes, and GPUs are slow at 64 bits.
struct CommonHeads {
  // Strides in chunks.
  u32 in_token;
  u32 in_head;
  u32 out_token;
  u32 out_head;
  u32 pool_row;
  u32 pool_head;

  u32 num_heads;
  u32 first_group;
};

struct CommonParams {
  u32 positions_are_int64;
  u32 slots_are_int64;
  u32 keeps_unturned;
  float attention_scaling;
  u32 head_dim;
  u32 num_pairs;
  u32 positions_stride;  // in words of 32 bits
  u32 slots_stride;      // in words of 32 bits
  i64 pool_size;

  CommonHeads heads[3];  // q, k, v
};
static_assert(sizeof(CommonParams) == 4 * 8 + 8 + 3 * 4 * 8, "as on every device");

}  // namespace rope_pool
