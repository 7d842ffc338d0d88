// Ops of the real ones' signatures that do less: `empty` nothing at all, and each `copy_N` the same
// reads and writes without turning anything, which is the floor of a call. benchmarks/cpu_peers.py
// defines their schemas, from the real ones, and builds this.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

namespace stable = torch::stable::detail;
using i64 = std::int64_t;

struct DeleteTensor {
  void operator()(AtenTensorHandle tensor) const { aoti_torch_delete_tensor_object(tensor); }
};
using OwnedTensor = std::unique_ptr<AtenTensorOpaque, DeleteTensor>;
using Arguments = std::array<OwnedTensor, 7>;  // q, k, v, positions, slots, k_pool, v_pool

void require(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}

// Takes all arguments off the stack, as any op has to.
Arguments take_arguments(StableIValue* stack) {
  Arguments tensors;
  for (std::size_t i = 0; i < tensors.size(); ++i)
    tensors[i].reset(stable::to<AtenTensorHandle>(stack[i]));
  OwnedTensor inv_freq(stable::to<std::optional<AtenTensorHandle>>(stack[11]).value_or(nullptr));
  (void)stable::to<std::optional<double>>(stack[10]);
  (void)stable::to<std::optional<i64>>(stack[13]);
  (void)stable::to<std::optional<i64>>(stack[15]);
  (void)stable::to<std::optional<std::vector<i64>>>(stack[16]);
  return tensors;
}

OwnedTensor empty_like(const OwnedTensor& tensor) {
  i64 ndim = 0, *sizes = nullptr, *strides = nullptr;
  std::int32_t dtype = 0, device_type = 0, device = 0;
  aoti_torch_get_dim(tensor.get(), &ndim);
  aoti_torch_get_sizes(tensor.get(), &sizes);
  aoti_torch_get_strides(tensor.get(), &strides);
  aoti_torch_get_dtype(tensor.get(), &dtype);
  aoti_torch_get_device_type(tensor.get(), &device_type);
  aoti_torch_get_device_index(tensor.get(), &device);
  AtenTensorHandle output = nullptr;
  require(aoti_torch_empty_strided(ndim, sizes, strides, dtype, device_type, device, &output) ==
              AOTI_TORCH_SUCCESS,
          "no memory for an output");
  return OwnedTensor(output);
}

// ---- The copy

#if defined(__AVX512F__)
using Block = __m512i;
inline void stream(void* to, Block block) { _mm512_stream_si512(static_cast<Block*>(to), block); }
#elif defined(__AVX__)
using Block = __m256i;
inline void stream(void* to, Block block) { _mm256_stream_si256(static_cast<Block*>(to), block); }
#elif defined(__SSE2__)
using Block = __m128i;
inline void stream(void* to, Block block) { _mm_stream_si128(static_cast<Block*>(to), block); }
#else
typedef int Block __attribute__((vector_size(16)));
inline void stream(void* to, Block block) { *static_cast<Block*>(to) = block; }
#endif

constexpr i64 kLine = 64;  // every row is whole cache lines

// Bits of a variant.
constexpr int kStreamOutputs = 1, kStreamPools = 2, kPrefetch = 4, kSplit = 8, kVariants = 16;

struct Copy {
  const char *q, *k, *v;  // [num_tokens, q_bytes], the others [num_tokens, kv_bytes]
  char *q_out, *k_out, *k_pool, *v_pool;  // as q, as k, [pool_size, kv_bytes]
  const i64* slots;                       // [num_tokens]
  i64 num_tokens, q_bytes, kv_bytes;
};

template <bool kStream>
inline void store(char* to, Block block) {
  if (kStream)
    stream(to, block);
  else
    *reinterpret_cast<Block*>(to) = block;
}

// One row to one place or two. In place `out` is `from`: the empty asm keeps the store.
template <bool kOut, bool kPool, bool kStreamOut, bool kStreamPool, bool kAhead>
inline void move_row(const char* from, char* out, char* pool, i64 bytes) {
  for (i64 line = 0; line < bytes; line += kLine) {
    if (kAhead) __builtin_prefetch(from + line + bytes);  // the next token's
    for (i64 i = line; i < line + kLine; i += static_cast<i64>(sizeof(Block))) {
      Block block = *reinterpret_cast<const Block*>(from + i);
      asm volatile("" : "+m"(*const_cast<char*>(from + i)));
      if (kOut) store<kStreamOut>(out + i, block);
      if (kPool) store<kStreamPool>(pool + i, block);
    }
  }
}

template <int kVariant>
void copy_tokens(const Copy& c, i64 begin, i64 end) {
  constexpr bool kOut = kVariant & kStreamOutputs, kPool = kVariant & kStreamPools;
  constexpr bool kAhead = kVariant & kPrefetch;
  for (i64 token = begin; token < end; ++token) {
    const i64 q = token * c.q_bytes, kv = token * c.kv_bytes, row = c.slots[token] * c.kv_bytes;
    if (kAhead && token + 1 < end) {
      const i64 next = c.slots[token + 1] * c.kv_bytes;
      for (i64 line = 0; line < c.kv_bytes; line += kLine) {
        __builtin_prefetch(c.k_pool + next + line, 1);
        __builtin_prefetch(c.v_pool + next + line, 1);
      }
    }
    move_row<true, false, kOut, kPool, kAhead>(c.q + q, c.q_out + q, nullptr, c.q_bytes);
    move_row<true, true, kOut, kPool, kAhead>(c.k + kv, c.k_out + kv, c.k_pool + row, c.kv_bytes);
    move_row<false, true, kOut, kPool, kAhead>(c.v + kv, nullptr, c.v_pool + row, c.kv_bytes);
  }
#if defined(__SSE2__)
  if (kOut || kPool) _mm_sfence();
#endif
}

template <int kVariant>
void copy(const Arguments& tensors, const OwnedTensor& q_out, const OwnedTensor& k_out) {
  const auto data = [](const OwnedTensor& tensor) {
    void* pointer = nullptr;
    aoti_torch_get_data_ptr(tensor.get(), &pointer);
    return static_cast<char*>(pointer);
  };
  const auto sizes = [](const OwnedTensor& tensor) {
    i64* sizes = nullptr;
    aoti_torch_get_sizes(tensor.get(), &sizes);
    return sizes;
  };
  std::int32_t dtype = 0;
  aoti_torch_get_dtype(tensors[0].get(), &dtype);
  const i64 itemsize = dtype == aoti_torch_dtype_float32() ? 4 : 2;
  const i64 *q_sizes = sizes(tensors[0]), *k_sizes = sizes(tensors[1]);
  const Copy c{data(tensors[0]),
               data(tensors[1]),
               data(tensors[2]),
               data(q_out),
               data(k_out),
               data(tensors[5]),
               data(tensors[6]),
               reinterpret_cast<const i64*>(data(tensors[4])),
               q_sizes[0],
               q_sizes[1] * q_sizes[2] * itemsize,
               k_sizes[1] * k_sizes[2] * itemsize};
  require(c.q_bytes % kLine == 0 && c.kv_bytes % kLine == 0, "rows must be whole cache lines");
  if (kVariant & kSplit)
    torch::stable::parallel_for(0, c.num_tokens, 1,
                                [&](i64 begin, i64 end) { copy_tokens<kVariant>(c, begin, end); });
  else
    copy_tokens<kVariant>(c, 0, c.num_tokens);
}

// ---- The ops

constexpr int kEmpty = -1;  // instead of a variant

template <int kVariant>
void fresh(StableIValue* stack, std::uint64_t, std::uint64_t) {
  auto tensors = take_arguments(stack);
  auto q_out = empty_like(tensors[0]), k_out = empty_like(tensors[1]);
  if constexpr (kVariant != kEmpty) copy<kVariant>(tensors, q_out, k_out);
  stack[0] = stable::from(q_out.release());
  stack[1] = stable::from(k_out.release());
  stack[2] = stable::from(tensors[5].release());
  stack[3] = stable::from(tensors[6].release());
}

template <int kVariant>
void in_place(StableIValue* stack, std::uint64_t, std::uint64_t) {
  const auto tensors = take_arguments(stack);
  if constexpr (kVariant != kEmpty) copy<kVariant>(tensors, tensors[0], tensors[1]);
}

template <int kVariant = 0, class Library>
void register_copies(Library& m) {
  if constexpr (kVariant < kVariants) {
    const std::string name = "copy_" + std::to_string(kVariant);
    m.impl(name.c_str(), &fresh<kVariant>);
    m.impl((name + "_").c_str(), &in_place<kVariant>);
    register_copies<kVariant + 1>(m);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ropepool_bench, CPU, m) {
  m.impl("empty", &fresh<kEmpty>);
  m.impl("empty_", &in_place<kEmpty>);
  register_copies(m);
}
