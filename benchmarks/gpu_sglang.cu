// sglang's kernel, from the headers of a checkout, for benchmarks/bench_gpu.py: rotation in place
// and the KV pool in one launch, as its FusedRopeKernel makes it.
#include <algorithm>
#include <csrc/elementwise/rope.cuh>

#include "gpu_vendors.h"

namespace {

template <typename T, int kHeadDim, bool kOverlap>
int launch(const Args& a, cudaStream_t stream) {
  using Kernel = sglang::FusedRopeKernel</*kIsNeox=*/true, kHeadDim, kOverlap, T>;
  const auto kernel = Kernel::template _kernel_1<int32_t>;
  constexpr int kBlockSize = static_cast<int>(sglang::kBlockSize);
  const int64_t head = kHeadDim * sizeof(T);
  const int64_t q_heads = a.num_qo_heads * head;  // k's heads are counted from q's first one

  sglang::FusedRopeStoreParams params{};
  params.base_params = {a.q,
                        static_cast<char*>(a.k) - q_heads,
                        a.cos_sin,
                        a.positions,
                        q_heads,
                        a.num_kv_heads * head,
                        head,
                        static_cast<uint32_t>(a.num_qo_heads),
                        static_cast<uint32_t>(a.num_kv_heads),
                        static_cast<uint32_t>(a.num_tokens)};
  params.v_ptr = a.v;
  params.k_cache = static_cast<char*>(a.k_pool) - q_heads;
  params.v_cache = a.v_pool;
  params.out_loc = a.slots;
  params.v_stride_bytes = params.cache_stride_bytes = a.num_kv_heads * head;

  static const int most_blocks = [&] {
    int device = 0, processors = 0, blocks = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kBlockSize, 0);
    return blocks * processors;
  }();
  const int heads = (a.num_qo_heads + 2 * a.num_kv_heads) * a.num_tokens;
  const int heads_per_block = kBlockSize / static_cast<int>(Kernel::kWorkThreads);
  const int blocks = std::min(most_blocks, (heads + heads_per_block - 1) / heads_per_block);

  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kBlockSize);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = kOverlap ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params);
}

template <typename T, bool kOverlap>
int launch(const Args& a, cudaStream_t stream) {
  if (a.head_dim == 128) return launch<T, 128, kOverlap>(a, stream);
  if (a.head_dim == 64) return launch<T, 64, kOverlap>(a, stream);
  return cudaErrorInvalidValue;
}

}  // namespace

// overlap: a launch may begin before the one before it has ended (programmatic dependent launch).
extern "C" int rope_pool(const Args* a, int overlap, cudaStream_t stream) {
  return with_type(*a, [&](auto zero) {
    using T = decltype(zero);
    return overlap ? launch<T, true>(*a, stream) : launch<T, false>(*a, stream);
  });
}
