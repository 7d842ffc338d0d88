// The floor of rope_pool_fused on CUDA: a copy of as many bytes between the same rows, no
// arithmetic. benchmarks/bench_gpu.py builds it and takes the fastest of its variants.
#include <cuda_runtime.h>

#include <cstdint>

struct CopyArgs {
  const uint4* q;        // [num_tokens, q_chunks], in chunks of 16 bytes
  const uint4* k;        // [num_tokens, kv_chunks]
  const uint4* v;        // [num_tokens, kv_chunks]
  uint4* q_out;          // [num_tokens, q_chunks]
  uint4* k_out;          // [num_tokens, kv_chunks]
  uint4* k_pool;         // [pool_size, kv_chunks]
  uint4* v_pool;         // [pool_size, kv_chunks]
  const int32_t* slots;  // [num_tokens]
  int64_t num_tokens;
  int32_t q_chunks;
  int32_t kv_chunks;
};

// A block's threads go over a token's chunks, kUnroll at a time; blocks are tokens.
template <int kUnroll, bool kStream>
__global__ void copy_rows(CopyArgs a) {
  const int64_t token = blockIdx.x;
  const int64_t slot = a.slots[token];
  const int total = a.q_chunks + 2 * a.kv_chunks;
  for (int base = blockIdx.y * blockDim.x * kUnroll + threadIdx.x; base < total;
       base += gridDim.y * blockDim.x * kUnroll) {
    uint4 data[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int chunk = base + i * blockDim.x;
      if (chunk >= total) continue;
      const uint4* from = chunk < a.q_chunks ? a.q + token * a.q_chunks + chunk
                          : chunk < a.q_chunks + a.kv_chunks
                              ? a.k + token * a.kv_chunks + (chunk - a.q_chunks)
                              : a.v + token * a.kv_chunks + (chunk - a.q_chunks - a.kv_chunks);
      data[i] = kStream ? __ldcs(from) : *from;
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int chunk = base + i * blockDim.x;
      if (chunk >= total) continue;
      const auto store = [&](uint4* to) {
        if (kStream) {
          __stcs(to, data[i]);
        } else {
          *to = data[i];
        }
      };
      if (chunk < a.q_chunks) {
        store(a.q_out + token * a.q_chunks + chunk);
      } else if (chunk < a.q_chunks + a.kv_chunks) {
        store(a.k_out + token * a.kv_chunks + (chunk - a.q_chunks));
        store(a.k_pool + slot * a.kv_chunks + (chunk - a.q_chunks));
      } else {
        store(a.v_pool + slot * a.kv_chunks + (chunk - a.q_chunks - a.kv_chunks));
      }
    }
  }
}

__global__ void empty_kernel() {}

// variant: 2 * log2(unroll) + streaming; threads: of a block; splits: blocks of a token.
extern "C" int copy_rows(const CopyArgs* args, int variant, int threads, int splits,
                         cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(args->num_tokens), static_cast<unsigned>(splits));
  switch (variant) {
    case 0:
      copy_rows<1, false><<<grid, threads, 0, stream>>>(*args);
      break;
    case 1:
      copy_rows<1, true><<<grid, threads, 0, stream>>>(*args);
      break;
    case 2:
      copy_rows<2, false><<<grid, threads, 0, stream>>>(*args);
      break;
    case 3:
      copy_rows<2, true><<<grid, threads, 0, stream>>>(*args);
      break;
    case 4:
      copy_rows<4, false><<<grid, threads, 0, stream>>>(*args);
      break;
    default:
      copy_rows<4, true><<<grid, threads, 0, stream>>>(*args);
      break;
  }
  return static_cast<int>(cudaGetLastError());
}

extern "C" int empty_launch(cudaStream_t stream) {
  empty_kernel<<<1, 32, 0, stream>>>();
  return static_cast<int>(cudaGetLastError());
}
