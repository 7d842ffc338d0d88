// vLLM's kernels, from the sources of a checkout, for benchmarks/bench_gpu.py: rotation in place,
// then the KV cache. Their host functions are dropped by the linker, so nothing of torch is linked.
#include <cache_kernels.cu>
#include <pos_encoding_kernels.cu>

#include "gpu_vendors.h"

namespace {

constexpr int kBlockSize = 16;  // vLLM's default; slot = block * kBlockSize + offset

// Word: the type that vLLM lets the cache's kernel move T as.
template <typename T, typename Word>
int launch(const Args& a, cudaStream_t stream) {
  const int64_t q_row = a.num_qo_heads * a.head_dim, kv_row = a.num_kv_heads * a.head_dim;
  vllm::rotary_embedding_kernel<T, T, /*IS_NEOX=*/true>
      <<<a.num_tokens, std::min<int64_t>(q_row / 2, 512), 0, stream>>>(
          a.positions_64, static_cast<T*>(a.q), static_cast<T*>(a.k), static_cast<T*>(a.cos_sin),
          a.head_dim, q_row, kv_row, a.head_dim, a.num_qo_heads, a.num_kv_heads, a.head_dim,
          /*rope_dim_offset=*/0, /*inverse=*/false);
  vllm::reshape_and_cache_flash_kernel<Word, Word, vllm::Fp8KVCacheDataType::kAuto>
      <<<a.num_tokens, std::min<int64_t>(kv_row, 512), 0, stream>>>(
          static_cast<Word*>(a.k), static_cast<Word*>(a.v), static_cast<Word*>(a.k_pool),
          static_cast<Word*>(a.v_pool), a.slots_64, kBlockSize * kv_row, kv_row, a.head_dim, kv_row,
          kv_row, a.num_kv_heads, a.head_dim, kBlockSize, /*k_scale=*/nullptr, /*v_scale=*/nullptr,
          /*kv_scale_stride=*/0);
  return cudaGetLastError();
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int rope_pool(const Args* a,
                                                                cudaStream_t stream) {
  if (a->itemsize == 4) return launch<float, float>(*a, stream);
  return a->is_bfloat16 ? launch<torch::headeronly::BFloat16, __nv_bfloat16>(*a, stream)
                        : launch<torch::headeronly::Half, uint16_t>(*a, stream);
}
