// Positions and slots on the CPU: int32 or int64, any stride.
#pragma once

#include "contract.h"
#include "rope_math.h"

namespace rope_pool {

struct IndexArray {
  const void* data;  // [num_tokens], or [rows, num_tokens], of int32 or int64
  bool is_int64;
  i64 row_stride;
  i64 token_stride;

  i64 at(i64 row, i64 token) const {
    const i64 offset = row * row_stride + token * token_stride;
    return is_int64 ? static_cast<const i64*>(data)[offset] : static_cast<const i32*>(data)[offset];
  }
};

inline IndexArray index_array(const TensorView& t) {
  return {t.data, t.dtype == DType::kInt64, t.ndim == 2 ? t.strides[0] : 0, t.strides[t.ndim - 1]};
}

}  // namespace rope_pool
