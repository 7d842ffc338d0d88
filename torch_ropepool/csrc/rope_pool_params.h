// What one launch works on, as plain data: the CPU, Metal and CUDA kernels all read this.
#pragma once

#include "rope_math.h"

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
  i64 num_tokens;
  i64 num_qo_heads;
  i64 num_kv_heads;
  i64 head_dim;
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

}  // namespace rope_pool
