// What one launch works on, as plain data: the CPU, Metal and CUDA kernels all read this.
#pragma once

#include "rope_math.h"

namespace rope_pool {

// In elements.
struct RowStrides {
  i64 token;    // or pool row
  i64 head;     //
  i64 feature;  //
};

struct RopePoolParams {
  i64 num_tokens;
  i64 num_qo_heads;
  i64 num_kv_heads;
  i64 head_dim;
  RowStrides q;
  RowStrides k;
  RowStrides v;
  RowStrides q_rot;
  RowStrides k_rot;
  RowStrides k_pool;
  RowStrides v_pool;
};

}  // namespace rope_pool
