// The shape and dtype contract of the op, once, for every compiled backend. No torch in here.
// torch_ropepool/_fake.py says the same on symbolic shapes; tests/test_contract_parity.py holds the
// two together.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "overlap.h"

namespace rope_pool {

enum class DType { kFloat16, kBFloat16, kFloat32, kFloat64, kInt32, kInt64, kOther };

// What the contract and the kernels need to know of a tensor.
struct TensorView {
  const char* name;  // the argument's
  void* handle;      // torch's, for backends that pass the tensor on
  void* data;        // of the first element; on MPS a buffer's handle plus the offset
  DType dtype;
  std::int64_t itemsize;        // in bytes
  std::int64_t ndim;            //
  const std::int64_t* sizes;    // [ndim]
  const std::int64_t* strides;  // [ndim], in elements
  std::int64_t storage_offset;  // in elements
  std::int64_t storage_bytes;
  std::uint64_t byte_extent;   // of what the tensor spans, 0 when it is empty
  std::uint64_t buffer;        // what must be equal for addresses to compare
  std::uint64_t byte_address;  // of the first element; within its buffer on MPS
  std::int32_t device_type;    // torch's number for it
  std::int32_t device_index;   //
  std::int32_t scalar_type;    // torch's number for the dtype, for messages
};

struct RopePoolArgs {
  TensorView q;          // [num_tokens, num_qo_heads, head_dim]
  TensorView k;          // [num_tokens, num_kv_heads, head_dim]
  TensorView v;          // [num_tokens, num_kv_heads, head_dim]
  TensorView positions;  // [num_tokens]; [3, num_tokens] with mrope_section
  TensorView slots;      // [num_tokens]
  TensorView k_pool;     // [pool_size, num_kv_heads, head_dim];
                         // [num_pages, page_size, num_kv_heads, head_dim] with page_size
  TensorView v_pool;     // as k_pool
  std::int64_t head_dim;
  std::int64_t num_qo_heads;
  std::int64_t num_kv_heads;
  std::optional<double> rope_base;
  std::optional<TensorView> inv_freq;  // [rotary_dim / 2]
  double attention_scaling;
  std::optional<std::int64_t> rotary_dim;
  bool interleaved;
  std::optional<std::int64_t> page_size;
  std::optional<std::vector<std::int64_t>> mrope_section;
  bool mrope_interleaved;

  // For checked arguments.
  std::int64_t num_tokens() const { return q.sizes[0]; }
  std::int64_t num_pairs() const { return rotary_dim.value_or(head_dim) / 2; }
  std::int64_t pool_size() const {
    return page_size ? k_pool.sizes[0] * k_pool.sizes[1] : k_pool.sizes[0];
  }
};

// What differs between backends and ops.
struct ContractOptions {
  bool in_place;                 // q and k are written too
  bool allows_float64;           // the backend has a float64 kernel
  bool allows_float64_inv_freq;  // the backend reads inv_freq in float64
};

// Throws std::invalid_argument, which torch turns into ValueError, for the first broken rule.
void check_contract(const RopePoolArgs& args, const ContractOptions& options);

// From the file that knows torch's numbers. Names as in messages: "float32", "cuda:0".
std::string dtype_name(const TensorView& tensor);
std::string device_name(const TensorView& tensor);
bool is_on_cpu(const TensorView& tensor);

}  // namespace rope_pool
