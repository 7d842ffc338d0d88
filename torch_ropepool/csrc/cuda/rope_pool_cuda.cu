// The CUDA backend of the ops: kernels and their launch on torch's current stream.
#include <cuda_runtime.h>

#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../gpu_tables.h"
#include "../rope_pool_kernel.h"
#include "../rope_pool_ops.h"

namespace rope_pool {
namespace {

constexpr int kGroupsPerProcessor = 16;  // at least: leaves a thread 64 registers

template <class Bits, class Params>
struct CudaArgs {
  RopePoolTensors<Bits> tensors;
  u32 num_tokens;
  u32 heads_per_thread;
  Params params;
};

// Asks for all of a kernel's arguments at once. They are in constant memory, which is cold at each
// launch; a thread that comes to its lines one after the other waits for each.
template <class Args>
__device__ void fetch_arguments(const Args& args) {
  constexpr u32 kLineBytes = 64;
  constexpr u32 kLines = (sizeof(Args) + kLineBytes - 1) / kLineBytes;
  const u32 line = threadIdx.x % kLines;
  const u32 word = reinterpret_cast<const u32*>(&args)[line * (kLineBytes / sizeof(u32))];
  if (word == 0xffffffffu) __nanosleep(0);  // does nothing, but without a use there is no load
}

// The grid is tokens x lanes x heads: only its first dimension may be large.
template <class Element, int kVec, bool kFewTokens, class Params>
__global__ void __launch_bounds__(ROPE_POOL_THREADS_PER_GROUP, kGroupsPerProcessor)
    rope_pool(const __grid_constant__ CudaArgs<typename Element::storage, Params> args) {
  __shared__ alignas(16) float angles[ROPE_POOL_ANGLES(kVec)];
  if (kFewTokens) fetch_arguments(args);
  ThreadPosition at;
  at.token = kFewTokens ? blockIdx.x : blockIdx.x * blockDim.z + threadIdx.z;
  at.lane = kFewTokens ? threadIdx.x : blockIdx.y * blockDim.x + threadIdx.x;
  at.group = blockIdx.z;
  at.token_in_group = kFewTokens ? 0 : threadIdx.z;
  at.lane_in_group = threadIdx.x;
  at.head_in_group = threadIdx.y;
  at.lanes_per_group = blockDim.x;
  at.heads_per_group = blockDim.y;
  at.heads_per_thread = kFewTokens ? 1 : args.heads_per_thread;
  rope_pool_thread<Element, kVec, kFewTokens>(args.tensors, args.params, args.num_tokens, at,
                                              angles);
}

void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string("rope_pool_fused: ") + what +
                           " failed: " + cudaGetErrorString(status));
}

class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ == device) return;
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
    changed_ = true;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// What cannot be done while torch's stream records a CUDA graph: memory of our own, copied to by a
// stream of our own. The graph will not hold these steps.
void* upload(const std::vector<u32>& words) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
  void* memory = nullptr;
  cudaStream_t stream = nullptr;
  cudaError_t status = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (status == cudaSuccess) {
    const std::size_t size = words.size() * sizeof(u32);
    status = cudaMalloc(&memory, size);
    if (status == cudaSuccess) {
      status = cudaMemcpyAsync(memory, words.data(), size, cudaMemcpyHostToDevice, stream);
    }
    if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
    if (status != cudaSuccess && memory != nullptr) cudaFree(memory);
    cudaStreamDestroy(stream);
  }
  cudaThreadExchangeStreamCaptureMode(&mode);
  check_cuda(status, "making a table of frequencies");
  return memory;
}

// The table in GPU memory. It is never freed: graphs hold its address. So many are kept; beyond
// that, `temporary` holds it for the call, in torch's memory.
const void* device_table(const std::shared_ptr<const FrequencyTable>& table, const TensorView& like,
                         OwnedTensor& temporary) {
  struct Entry {
    std::shared_ptr<const FrequencyTable> table;
    int device = 0;
    const void* memory = nullptr;
    bool is(const FrequencyTable& other, int other_device) const {
      return device == other_device && table != nullptr &&
             (table.get() == &other ||
              (table->high == other.high && table->low == other.low && table->tail == other.tail));
    }
  };
  constexpr std::size_t kMaxEntries = 1024;
  static std::mutex mutex;
  static std::vector<Entry> entries;
  thread_local Entry last;

  if (last.is(*table, like.device_index)) return last.memory;
  const std::lock_guard<std::mutex> lock(mutex);
  for (const Entry& entry : entries) {
    if (!entry.is(*table, like.device_index)) continue;
    last = entry;
    return last.memory;
  }
  const std::vector<u32> words = table_words(*table);
  if (entries.size() == kMaxEntries) {
    temporary = device_tensor(words.data(), words.size() * sizeof(u32), like);
    return view_of(temporary.get(), "table").data;
  }
  entries.push_back({table, like.device_index, upload(words)});
  last = entries.back();
  return last.memory;
}

template <class Element, int kVec, bool kFewTokens, class Params>
void launch_kernel(const RopePoolArgs& args, const TensorView& q_rot, const TensorView& k_rot,
                   const GpuPlan& plan, const Params& params, const void* frequencies) {
  using Bits = typename Element::storage;
  CudaArgs<Bits, Params> kernel_args{};
  kernel_args.tensors = {static_cast<const Bits*>(args.q.data),
                         static_cast<const Bits*>(args.k.data),
                         static_cast<const Bits*>(args.v.data),
                         args.positions.data,
                         args.slots.data,
                         static_cast<Bits*>(args.k_pool.data),
                         static_cast<Bits*>(args.v_pool.data),
                         static_cast<Bits*>(q_rot.data),
                         static_cast<Bits*>(k_rot.data),
                         frequencies};
  kernel_args.params = params;
  kernel_args.num_tokens = static_cast<u32>(plan.num_tokens);
  kernel_args.heads_per_thread = static_cast<u32>(plan.heads_per_thread);

  if (plan.lane_groups > 0xffff || plan.head_groups > 0xffff) {
    throw std::invalid_argument("rope_pool_fused: too many heads or features for a GPU");
  }
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(args.q.device_index, &stream));
  const dim3 grid(static_cast<unsigned>(plan.token_groups), static_cast<unsigned>(plan.lane_groups),
                  static_cast<unsigned>(plan.head_groups));
  const dim3 group(static_cast<unsigned>(plan.lanes_per_group),
                   static_cast<unsigned>(plan.heads_per_group),
                   static_cast<unsigned>(plan.tokens_per_group));
  rope_pool<Element, kVec, kFewTokens, Params>
      <<<grid, group, 0, static_cast<cudaStream_t>(stream)>>>(kernel_args);
  check_cuda(cudaGetLastError(), "the kernel's launch");
}

template <class Element, int kVec>
void launch_kernel(const RopePoolArgs& args, const TensorView& q_rot, const TensorView& k_rot,
                   const GpuPlan& plan, const void* frequencies) {
  switch (plan.form) {
    case GpuForm::kElements:
      return launch_kernel<Element, 1, false>(args, q_rot, k_rot, plan, plan.params, frequencies);
    case GpuForm::kChunks:
      return launch_kernel<Element, kVec, false>(args, q_rot, k_rot, plan, plan.params,
                                                 frequencies);
    case GpuForm::kCommon:
      return launch_kernel<Element, kVec, false>(args, q_rot, k_rot, plan, plan.common_params,
                                                 frequencies);
    case GpuForm::kFewTokens:
      return launch_kernel<Element, kVec, true>(args, q_rot, k_rot, plan, plan.common_params,
                                                frequencies);
  }
}

struct Cuda {
  static constexpr bool kAllowsFloat64 = false;
  static constexpr bool kAllowsFloat64InvFreq = true;
  // For an H200's 132 processors; measured: fewer leave it idle, more make angles more often.
  static constexpr i64 kEnoughGroups = 24 * 132;

  template <class BeforeWrite>
  static void launch(RopePoolArgs& args, const TensorView& q_rot, const TensorView& k_rot,
                     const BeforeWrite& before_write) {
    const auto table = has_device_inv_freq(args) ? nullptr : table_of(args);
    if (args.num_tokens() == 0) return before_write();
    const OwnedTensor other_slots = look_at_slots_if_asked(args);

    const DeviceGuard guard(args.q.device_index);
    OwnedTensor temporary;
    const void* frequencies =
        table == nullptr ? args.inv_freq->data : device_table(table, args.q, temporary);
    const GpuPlan plan = gpu_plan_of(args, q_rot, k_rot, kEnoughGroups);
    before_write();
    switch (args.q.dtype) {
      case DType::kFloat16:
        return launch_kernel<Float16, 8>(args, q_rot, k_rot, plan, frequencies);
      case DType::kBFloat16:
        return launch_kernel<BFloat16, 8>(args, q_rot, k_rot, plan, frequencies);
      default:
        return launch_kernel<Float32Bits, 4>(args, q_rot, k_rot, plan, frequencies);
    }
  }
};

}  // namespace
}  // namespace rope_pool

// The package version that this library was built as.
extern "C" __attribute__((visibility("default"))) const char* rope_pool_version() {
  return ROPE_POOL_VERSION;
}

STABLE_TORCH_LIBRARY_IMPL(ropepool, CUDA, m) {
  rope_pool::RopePoolOps<rope_pool::Cuda>::register_kernels(m);
}
