// FlashInfer's kernels, from the headers of a checkout, for benchmarks/bench_gpu.py: rotation, then
// a paged KV cache with pages of one token.
#include <flashinfer/page.cuh>
#include <flashinfer/pos_enc.cuh>

#include "gpu_vendors.h"

namespace {

template <typename T>
cudaError_t rotate(const Args& a, bool angles_inside, cudaStream_t stream) {
  T *q = static_cast<T*>(a.q), *k = static_cast<T*>(a.k);
  T *q_out = static_cast<T*>(a.q_out), *k_out = static_cast<T*>(a.k_out);
  const std::size_t q_row = a.num_qo_heads * a.head_dim, kv_row = a.num_kv_heads * a.head_dim;
  const std::size_t head = a.head_dim;
  if (angles_inside)
    return flashinfer::BatchQKApplyRotaryPosIds<T, int32_t>(
        q, k, q_out, k_out, a.positions, a.num_tokens, a.num_qo_heads, a.num_kv_heads, a.head_dim,
        a.head_dim, q_row, head, kv_row, head, q_row, head, kv_row, head, /*interleave=*/false,
        /*rope_scale=*/1.0f, a.rope_base, stream);
  return flashinfer::BatchQKApplyRotaryPosIdsCosSinCache<T, int32_t>(
      q, k, q_out, k_out, static_cast<float*>(a.cos_sin), a.positions, a.num_tokens, a.num_qo_heads,
      a.num_kv_heads, a.head_dim, a.head_dim, q_row, head, kv_row, head, q_row, head, kv_row, head,
      /*interleave=*/false, stream);
}

// The cache as one request of num_tokens pages, or as num_tokens requests of one page.
template <typename T>
cudaError_t append(const Args& a, bool one_request, cudaStream_t stream) {
  T *k = static_cast<T*>(a.k_out), *v = static_cast<T*>(a.v);
  const flashinfer::paged_kv_t<T, int32_t> cache(
      a.num_kv_heads, /*page_size=*/1, a.head_dim, one_request ? 1 : a.num_tokens,
      flashinfer::QKVLayout::kNHD, static_cast<T*>(a.k_pool), static_cast<T*>(a.v_pool), a.slots,
      one_request ? a.ends : a.count, a.ones);
  const std::size_t row = a.num_kv_heads * a.head_dim, head = a.head_dim;
  if (one_request)
    return flashinfer::AppendPagedKVCache(cache, k, v, a.zeros, a.count, a.num_tokens, row, head,
                                          row, head, stream);
  return flashinfer::AppendPagedKVCacheDecode(cache, k, v, stream);
}

}  // namespace

extern "C" int rope_pool(const Args* a, int angles_inside, int one_request, cudaStream_t stream) {
  return with_half_type(*a, [&](auto zero) -> int {
    using T = decltype(zero);
    const cudaError_t status = rotate<T>(*a, angles_inside != 0, stream);
    return status != cudaSuccess ? status : append<T>(*a, one_request != 0, stream);
  });
}
