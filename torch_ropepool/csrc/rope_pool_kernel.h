// The GPU kernel's body: what one thread does. Metal's and CUDA's entry points both include this.
//
// A token's work is split into heads and lanes. A lane is 2 kVec features, at the same place of
// every head: kVec rotary pairs, or features that do not turn. A threadgroup has some lanes of some
// heads, all of q, or of k, or of v, of some tokens. It makes each angle once, in the group's
// memory; a thread has one lane of one token, and strides over the group's heads.
//
// With few tokens a call takes as long as one thread. The form for that has less to find out: a
// group has all lanes of one token, and a thread one head.
#pragma once

#include "rope_pool_params.h"

// Pointers to tensors, to parameters, and to a threadgroup's memory.
#if defined(__METAL_VERSION__)
#define ROPE_POOL_DEVICE device
#define ROPE_POOL_UNIFORM constant
#define ROPE_POOL_SHARED threadgroup
#define ROPE_POOL_THREAD thread
#define ROPE_POOL_BARRIER() metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup)
#define ROPE_POOL_THREAD_FN inline
#define ROPE_POOL_RARE_FN inline
#else
#define ROPE_POOL_DEVICE
#define ROPE_POOL_UNIFORM
#define ROPE_POOL_SHARED
#define ROPE_POOL_THREAD
#define ROPE_POOL_BARRIER() __syncthreads()
#define ROPE_POOL_THREAD_FN __device__ __forceinline__
#define ROPE_POOL_RARE_FN __device__ __noinline__
#endif

// Loads and stores of data that is used once.
#if defined(__CUDA_ARCH__)
#define ROPE_POOL_LOAD_ONCE(from) __ldcs(from)
#define ROPE_POOL_STORE_ONCE(to, value) __stcs(to, value)
#else
#define ROPE_POOL_LOAD_ONCE(from) (*(from))
#define ROPE_POOL_STORE_ONCE(to, value) (*(to) = (value))
#endif

namespace rope_pool {

// float32 by its bits: as these an element is moved.
struct Float32Bits {
  typedef u32 storage;
  typedef float compute;
  static ROPE_POOL_FN float load(u32 x) { return float_of(x); }
  static ROPE_POOL_FN u32 store(float x) { return bits_of(x); }
};

// A chunk is kVec neighbours in memory, moved in one access: a single element, or 16 bytes.
template <class Bits>
struct Single {
  Bits bits;

  static ROPE_POOL_FN Single load(ROPE_POOL_DEVICE const Bits* from) {
    Single single;
    single.bits = *from;
    return single;
  }
  ROPE_POOL_FN void store(ROPE_POOL_DEVICE Bits* to) const { *to = bits; }
};

struct Quad {
  u32 words[4];

  static ROPE_POOL_FN Quad load(ROPE_POOL_DEVICE const void* from) {
    uint4 words = ROPE_POOL_LOAD_ONCE((ROPE_POOL_DEVICE const uint4*)from);
    Quad quad;
    quad.words[0] = words.x;
    quad.words[1] = words.y;
    quad.words[2] = words.z;
    quad.words[3] = words.w;
    return quad;
  }
  ROPE_POOL_FN void store(ROPE_POOL_DEVICE void* to) const {
    uint4 quad;
    quad.x = words[0];
    quad.y = words[1];
    quad.z = words[2];
    quad.w = words[3];
    ROPE_POOL_STORE_ONCE((ROPE_POOL_DEVICE uint4*)to, quad);
  }
};

template <class Bits, int kVec>
struct ChunkOf {
  typedef Quad type;
};
template <class Bits>
struct ChunkOf<Bits, 1> {
  typedef Single<Bits> type;
};

// A lane of one head. Half-split: pair i is the i-th element of either chunk. Interleaved: pairs
// are neighbours, the first chunk's before the second's.
template <class Bits, int kVec>
struct Lane {
  typedef typename ChunkOf<Bits, kVec>::type Chunk;
  Chunk first;
  Chunk second;
};

// The angles of a lane's pairs.
template <int kVec>
struct LaneAngles {
  float cos[kVec];
  float sin[kVec];
};

// Turns a lane, by the number of its pairs: one, or four of 32 bits, or eight of 16.
template <class Element, int kVec>
struct Turn;

template <class Element>
struct Turn<Element, 1> {
  typedef typename Element::storage Bits;
  static ROPE_POOL_FN Lane<Bits, 1> apply(Lane<Bits, 1> lane, bool, LaneAngles<1> by) {
    Pair<Bits> pair =
        rotate_stored<Element>(lane.first.bits, lane.second.bits, by.cos[0], by.sin[0]);
    lane.first.bits = pair.first;
    lane.second.bits = pair.second;
    return lane;
  }
};

template <class Element>
struct Turn<Element, 4> {
  static ROPE_POOL_FN Lane<u32, 4> apply(Lane<u32, 4> lane, bool interleaved, LaneAngles<4> by) {
    return interleaved ? neighbours(lane, by) : across(lane, by);
  }
  static ROPE_POOL_FN Lane<u32, 4> across(Lane<u32, 4> lane, LaneAngles<4> by) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Pair<u32> pair =
          rotate_stored<Element>(lane.first.words[i], lane.second.words[i], by.cos[i], by.sin[i]);
      lane.first.words[i] = pair.first;
      lane.second.words[i] = pair.second;
    }
    return lane;
  }
  static ROPE_POOL_FN Quad neighbours(Quad quad, float cos0, float sin0, float cos1, float sin1) {
    Pair<u32> pair0 = rotate_stored<Element>(quad.words[0], quad.words[1], cos0, sin0);
    Pair<u32> pair1 = rotate_stored<Element>(quad.words[2], quad.words[3], cos1, sin1);
    quad.words[0] = pair0.first;
    quad.words[1] = pair0.second;
    quad.words[2] = pair1.first;
    quad.words[3] = pair1.second;
    return quad;
  }
  static ROPE_POOL_FN Lane<u32, 4> neighbours(Lane<u32, 4> lane, LaneAngles<4> by) {
    lane.first = neighbours(lane.first, by.cos[0], by.sin[0], by.cos[1], by.sin[1]);
    lane.second = neighbours(lane.second, by.cos[2], by.sin[2], by.cos[3], by.sin[3]);
    return lane;
  }
};

template <class Element>
struct Turn<Element, 8> {
  typedef WordOf<Element> Word;
  static ROPE_POOL_FN Lane<u16, 8> apply(Lane<u16, 8> lane, bool interleaved, LaneAngles<8> by) {
    return interleaved ? neighbours(lane, by) : across(lane, by);
  }
  static ROPE_POOL_FN Lane<u16, 8> across(Lane<u16, 8> lane, LaneAngles<8> by) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 first = lane.first.words[i];
      u32 second = lane.second.words[i];
      Pair<float> low = rotate(Word::low(first), Word::low(second), by.cos[2 * i], by.sin[2 * i]);
      Pair<float> high =
          rotate(Word::high(first), Word::high(second), by.cos[2 * i + 1], by.sin[2 * i + 1]);
      lane.first.words[i] = Word::store(low.first, high.first);
      lane.second.words[i] = Word::store(low.second, high.second);
    }
    return lane;
  }
  static ROPE_POOL_FN u32 neighbours(u32 word, float cos, float sin) {
    Pair<float> pair = rotate(Word::low(word), Word::high(word), cos, sin);
    return Word::store(pair.first, pair.second);
  }
  static ROPE_POOL_FN Lane<u16, 8> neighbours(Lane<u16, 8> lane, LaneAngles<8> by) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      lane.first.words[i] = neighbours(lane.first.words[i], by.cos[i], by.sin[i]);
      lane.second.words[i] = neighbours(lane.second.words[i], by.cos[i + 4], by.sin[i + 4]);
    }
    return lane;
  }
};

template <class Bits>
struct RopePoolTensors {
  ROPE_POOL_DEVICE const Bits* q;            // [num_tokens, num_qo_heads, head_dim]
  ROPE_POOL_DEVICE const Bits* k;            // [num_tokens, num_kv_heads, head_dim]
  ROPE_POOL_DEVICE const Bits* v;            // [num_tokens, num_kv_heads, head_dim]
  ROPE_POOL_DEVICE const void* positions;    // [num_tokens], or [3, num_tokens]
  ROPE_POOL_DEVICE const void* slots;        // [num_tokens]
  ROPE_POOL_DEVICE Bits* k_pool;             // [num_pages, page_size, num_kv_heads, head_dim]
  ROPE_POOL_DEVICE Bits* v_pool;             // [num_pages, page_size, num_kv_heads, head_dim]
  ROPE_POOL_DEVICE Bits* q_rot;              // [num_tokens, num_qo_heads, head_dim], may be q
  ROPE_POOL_DEVICE Bits* k_rot;              // [num_tokens, num_kv_heads, head_dim], may be k
  ROPE_POOL_DEVICE const void* frequencies;  // u32 [3, num_pairs]: high, low, tail; or inv_freq
};

// Where a thread is. Token and lane may lie beyond the last.
struct ThreadPosition {
  u32 token;
  u32 lane;
  u32 group;           // of the token's
  u32 token_in_group;  //
  u32 lane_in_group;   //
  u32 head_in_group;   //
  u32 lanes_per_group;
  u32 heads_per_group;  // at a time
  u32 heads_per_thread;
};

// An index of 32 bits times a stride: in 64 bits, or in as many as are known to be enough.
ROPE_POOL_FN i64 times(u32 index, i64 stride) { return (i64)((u64)index * (u64)stride); }
ROPE_POOL_FN u32 times(u32 index, u32 stride) { return index * stride; }

// An offset in elements: of 64 bits it is that, of 32 bits it counts chunks.
template <int kVec>
ROPE_POOL_FN i64 elements(i64 offset) {
  return offset;
}
template <int kVec>
ROPE_POOL_FN u64 elements(u32 offset) {
  return (u64)offset * (u64)kVec;
}

// An index on its way from memory, in words. Making one value of them waits for them, so that comes
// last.
struct Index {
  u32 low;
  u32 high;
};

// `offset` counts words.
ROPE_POOL_FN Index load_index(ROPE_POOL_DEVICE const void* data, u32 is_int64, i64 offset) {
  ROPE_POOL_DEVICE const u32* words = (ROPE_POOL_DEVICE const u32*)data + offset;
  Index index;
  index.low = words[0];
  if (is_int64 != 0u) index.high = words[1];
  return index;
}

ROPE_POOL_FN i64 value_of(Index index, u32 is_int64) {
  return is_int64 != 0u ? (i64)((u64)index.high << 32 | index.low) : (i64)(i32)index.low;
}

// A token's positions: one, or a row of three with mrope.
struct Positions {
  Index axis[3];
};

template <class Bits>
ROPE_POOL_FN Positions load_positions(RopePoolTensors<Bits> t, ROPE_POOL_UNIFORM const GpuParams& p,
                                      u32 token) {
  i64 offset = times(token, p.positions_stride);
  Positions positions;
  positions.axis[0] = load_index(t.positions, p.positions_are_int64, offset);
  if (p.has_mrope != 0u) {
    i64 step = p.positions_axis_stride;
    positions.axis[1] = load_index(t.positions, p.positions_are_int64, offset + step);
    positions.axis[2] = load_index(t.positions, p.positions_are_int64, offset + 2 * step);
  }
  return positions;
}

template <class Bits>
ROPE_POOL_FN Positions load_positions(RopePoolTensors<Bits> t,
                                      ROPE_POOL_UNIFORM const CommonParams& p, u32 token) {
  Positions positions;
  positions.axis[0] =
      load_index(t.positions, p.positions_are_int64, (i64)times(token, p.positions_stride));
  return positions;
}

ROPE_POOL_FN i64 position_of(Positions positions, ROPE_POOL_UNIFORM const CommonParams& p, u32) {
  return value_of(positions.axis[0], p.positions_are_int64);
}

ROPE_POOL_FN i64 position_of(Positions positions, ROPE_POOL_UNIFORM const GpuParams& p, i64 pair) {
  i64 first = value_of(positions.axis[0], p.positions_are_int64);
  if (p.has_mrope == 0u) return first;
  i64 axis = mrope_axis(pair, p.mrope_section[0], p.mrope_section[1], p.mrope_section[2],
                        p.mrope_interleaved != 0u);
  i64 second = value_of(positions.axis[1], p.positions_are_int64);
  i64 third = value_of(positions.axis[2], p.positions_are_int64);
  return axis == 0 ? first : (axis == 1 ? second : third);
}

// u32 [3, num_pairs]. Pair is of num_pairs' type.
template <class Count>
ROPE_POOL_FN Frequency table_entry(ROPE_POOL_DEVICE const void* frequencies, Count num_pairs,
                                   Count pair) {
  ROPE_POOL_DEVICE const u32* table = (ROPE_POOL_DEVICE const u32*)frequencies + pair;
  Frequency f;
  f.high = table[0];
  f.low = table[num_pairs];
  f.tail = (i32)table[2 * num_pairs];
  return f;
}

ROPE_POOL_FN Frequency load_frequency(ROPE_POOL_DEVICE const void* frequencies,
                                      ROPE_POOL_UNIFORM const CommonParams& p, u32 pair) {
  return table_entry(frequencies, p.num_pairs, pair);
}

// Of the table, where there is one.
ROPE_POOL_FN Frequency load_frequency(ROPE_POOL_DEVICE const void* frequencies,
                                      ROPE_POOL_UNIFORM const GpuParams& p, i64 pair) {
  Frequency f;
  if (p.inv_freq_itemsize == 0u) f = table_entry(frequencies, p.num_pairs, pair);
  return f;
}

// Long, and seldom wanted: kept apart from what every call runs through.
ROPE_POOL_RARE_FN Frequency frequency_at(ROPE_POOL_DEVICE const void* inv_freq, u32 itemsize,
                                         i64 offset) {
#if !defined(__METAL_VERSION__)
  if (itemsize == 8u) return frequency_of(((const double*)inv_freq)[offset]);
#endif
  return frequency_of(float_of(((ROPE_POOL_DEVICE const u32*)inv_freq)[offset]));
}

ROPE_POOL_FN Angle<float> scaled_angle(i64 position, Frequency f, float scaling) {
  Angle<float> angle = angle_of(phase_of(position, f));
  angle.cos *= scaling;
  angle.sin *= scaling;
  return angle;
}

ROPE_POOL_FN Angle<float> angle_from(i64 position, Frequency f, ROPE_POOL_DEVICE const void*,
                                     ROPE_POOL_UNIFORM const CommonParams& p, u32) {
  return scaled_angle(position, f, p.attention_scaling);
}

ROPE_POOL_THREAD_FN Angle<float> angle_from(i64 position, Frequency f,
                                            ROPE_POOL_DEVICE const void* frequencies,
                                            ROPE_POOL_UNIFORM const GpuParams& p, i64 pair) {
  if (p.inv_freq_itemsize != 0u) {
    f = frequency_at(frequencies, p.inv_freq_itemsize, pair * p.inv_freq_stride);
  }
  return scaled_angle(position, f, p.attention_scaling);
}

// kCount neighbours in a threadgroup's memory.
template <int kCount>
ROPE_POOL_FN void read_angles(ROPE_POOL_SHARED const float* from, ROPE_POOL_THREAD float* to) {
#pragma unroll
  for (int i = 0; i < kCount; i += kCount < 4 ? 1 : 4) {
    if (kCount < 4) {
      to[i] = from[i];
    } else {
      float4 four = *(ROPE_POOL_SHARED const float4*)(from + i);
      to[i] = four.x;
      to[i + 1] = four.y;
      to[i + 2] = four.z;
      to[i + 3] = four.w;
    }
  }
}

// The page of a slot. 64-bit division is slow on a GPU, so it is the last resort.
ROPE_POOL_FN i64 page_of(i64 slot, i64 pool_size, i64 page_size) {
  if (page_size == pool_size) return 0;
  bool is_short = (((u64)slot | (u64)page_size) >> 32) == 0u;
  return is_short ? (i64)((u32)slot / (u32)page_size) : slot / page_size;
}

// Where a lane's two chunks are in every head.
template <class Offset>
struct LaneFeatures {
  Offset first;
  Offset distance;
  bool turns;
};

// In features.
template <int kVec>
ROPE_POOL_FN LaneFeatures<i64> lane_features(ROPE_POOL_UNIFORM const GpuParams& p, u32 lane) {
  i64 first_pair = times(lane, (i64)kVec);
  LaneFeatures<i64> f;
  f.turns = first_pair < p.num_pairs;
  bool apart = f.turns && p.interleaved == 0u;
  f.first = apart ? first_pair : 2 * first_pair;
  f.distance = apart ? p.num_pairs : kVec;
  if (f.first + f.distance >= p.head_dim) f.distance = 0;  // an odd head_dim's last: done twice
  return f;
}

// In chunks.
template <int kVec>
ROPE_POOL_FN LaneFeatures<u32> lane_features(ROPE_POOL_UNIFORM const CommonParams& p, u32 lane) {
  u32 turning = p.num_pairs / (u32)kVec;
  LaneFeatures<u32> f;
  f.turns = lane < turning;
  f.first = f.turns ? lane : 2u * lane;
  f.distance = f.turns ? turning : 1u;
  return f;
}

// A lane of one token's heads in a tensor.
template <class Pointer, class Offset>
struct Heads {
  Pointer tensor;  // null: there is none
  Offset first;
  Offset head_stride;
  Offset distance;  // between the lane's chunks
};

template <int kVec, class Pointer>
ROPE_POOL_FN Heads<Pointer, i64> heads_at(Pointer tensor, i64 token, i64 head_stride,
                                          i64 feature_stride, LaneFeatures<i64> f) {
  i64 stride = kVec > 1 ? 1 : feature_stride;
  Heads<Pointer, i64> heads;
  heads.tensor = tensor;
  heads.first = token + f.first * stride;
  heads.head_stride = head_stride;
  heads.distance = f.distance * stride;
  return heads;
}

template <int kVec, class Pointer>
ROPE_POOL_FN Heads<Pointer, u32> heads_at(Pointer tensor, u32 token, u32 head_stride,
                                          LaneFeatures<u32> f) {
  Heads<Pointer, u32> heads;
  heads.tensor = tensor;
  heads.first = token + f.first;
  heads.head_stride = head_stride;
  heads.distance = f.distance;
  return heads;
}

// A token's heads of q, k or v; of q_rot or k_rot; and of a pool's row.

template <int kVec, class Pointer>
ROPE_POOL_FN Heads<Pointer, i64> heads_in(Pointer tensor, ROPE_POOL_UNIFORM const GpuHeads& h,
                                          u32 token, LaneFeatures<i64> f) {
  return heads_at<kVec>(tensor, times(token, h.in.token), h.in.head, h.in.feature, f);
}
template <int kVec, class Pointer>
ROPE_POOL_FN Heads<Pointer, u32> heads_in(Pointer tensor, ROPE_POOL_UNIFORM const CommonHeads& h,
                                          u32 token, LaneFeatures<u32> f) {
  return heads_at<kVec>(tensor, times(token, h.in_token), h.in_head, f);
}

template <int kVec, class Pointer>
ROPE_POOL_FN Heads<Pointer, i64> heads_out(Pointer tensor, ROPE_POOL_UNIFORM const GpuHeads& h,
                                           u32 token, LaneFeatures<i64> f) {
  return heads_at<kVec>(tensor, times(token, h.out.token), h.out.head, h.out.feature, f);
}
template <int kVec, class Pointer>
ROPE_POOL_FN Heads<Pointer, u32> heads_out(Pointer tensor, ROPE_POOL_UNIFORM const CommonHeads& h,
                                           u32 token, LaneFeatures<u32> f) {
  return heads_at<kVec>(tensor, times(token, h.out_token), h.out_head, f);
}

template <int kVec, class Pointer>
ROPE_POOL_FN Heads<Pointer, i64> heads_of_row(Pointer pool, ROPE_POOL_UNIFORM const GpuParams& p,
                                              ROPE_POOL_UNIFORM const GpuHeads& h, i64 row,
                                              LaneFeatures<i64> f) {
  i64 page = page_of(row, p.pool_size, p.page_size);
  i64 offset = page * h.pool.page + (row - page * p.page_size) * h.pool.row;
  return heads_at<kVec>(pool, offset, h.pool.head, h.pool.feature, f);
}
template <int kVec, class Pointer>
ROPE_POOL_FN Heads<Pointer, u32> heads_of_row(Pointer pool, ROPE_POOL_UNIFORM const CommonParams&,
                                              ROPE_POOL_UNIFORM const CommonHeads& h, i64 row,
                                              LaneFeatures<u32> f) {
  return heads_at<kVec>(pool, times((u32)row, h.pool_row), h.pool_head, f);
}

ROPE_POOL_FN bool is_interleaved(ROPE_POOL_UNIFORM const GpuParams& p) {
  return p.interleaved != 0u;
}
ROPE_POOL_FN bool is_interleaved(ROPE_POOL_UNIFORM const CommonParams&) { return false; }

// The types that go with a kind of parameters.
template <class Params>
struct GpuTypes;
template <>
struct GpuTypes<GpuParams> {
  typedef GpuHeads Heads;
  typedef i64 Offset;
};
template <>
struct GpuTypes<CommonParams> {
  typedef CommonHeads Heads;
  typedef u32 Offset;
};

template <class Bits, int kVec, class Offset>
ROPE_POOL_FN Lane<Bits, kVec> load_lane(Heads<ROPE_POOL_DEVICE const Bits*, Offset> heads,
                                        u32 head) {
  typedef typename ChunkOf<Bits, kVec>::type Chunk;
  Offset at = heads.first + times(head, heads.head_stride);
  Lane<Bits, kVec> lane;
  lane.first = Chunk::load(heads.tensor + elements<kVec>(at));
  lane.second = Chunk::load(heads.tensor + elements<kVec>(at + heads.distance));
  return lane;
}

template <class Bits, int kVec, class Offset>
ROPE_POOL_FN void store_lane(Lane<Bits, kVec> lane, Heads<ROPE_POOL_DEVICE Bits*, Offset> heads,
                             u32 head) {
  if (heads.tensor == 0) return;
  Offset at = heads.first + times(head, heads.head_stride);
  lane.first.store(heads.tensor + elements<kVec>(at));
  lane.second.store(heads.tensor + elements<kVec>(at + heads.distance));
}

// Every thread of a group comes here. `shared`: the group's memory, 2 floats for each of its pairs
// of each of its tokens. A slot that is negative, or not below pool_size, is not stored.
// kFewTokens: at.token is a token, at.lane is one of its lanes and of the group's, and
// heads_per_thread is 1.
template <class Element, int kVec, bool kFewTokens, class Bits, class Params>
ROPE_POOL_THREAD_FN void rope_pool_thread(RopePoolTensors<Bits> t,
                                          ROPE_POOL_UNIFORM const Params& p, u32 num_tokens,
                                          ThreadPosition at, ROPE_POOL_SHARED float* shared) {
  typedef typename GpuTypes<Params>::Offset Offset;
  bool is_v = at.group >= p.heads[2].first_group;
  bool is_q = at.group < p.heads[1].first_group;
  ROPE_POOL_UNIFORM const typename GpuTypes<Params>::Heads& h = p.heads[is_v ? 2 : (is_q ? 0 : 1)];
  u32 first_head = (at.group - h.first_group) * at.heads_per_group * at.heads_per_thread;
  u32 end_head = first_head + at.heads_per_group * at.heads_per_thread;
  end_head = !kFewTokens && end_head < h.num_heads ? end_head : h.num_heads;
  u32 head = first_head + at.head_in_group;
  bool is_token = kFewTokens || at.token < num_tokens;
  bool is_lane = kFewTokens || (is_token && times(at.lane, (Offset)(2 * kVec)) < p.head_dim);
  bool has_work = is_lane && head < end_head;

  // First everything that can be asked of memory at once: slot, position, frequency, a head.
  Index slot;
  if (has_work && !is_q) {
    slot = load_index(t.slots, p.slots_are_int64, times(at.token, p.slots_stride));
  }
  // Angles are dealt out to the token's threads.
  u32 share = at.head_in_group * at.lanes_per_group + at.lane_in_group;
  u32 shares = at.heads_per_group * at.lanes_per_group;
  u32 pairs_per_group = at.lanes_per_group * kVec;
  Offset first_pair = times(at.lane - at.lane_in_group, (Offset)kVec);
  Offset pairs_left = is_token && !is_v && first_pair < p.num_pairs ? p.num_pairs - first_pair : 0;
  u32 num_angles = pairs_left < (Offset)pairs_per_group ? (u32)pairs_left : pairs_per_group;
  Positions positions;
  Frequency frequency;
  if (share < num_angles) {
    positions = load_positions(t, p, at.token);
    frequency = load_frequency(t.frequencies, p, first_pair + share);
  }
  LaneFeatures<Offset> f = lane_features<kVec>(p, at.lane);
  Heads<ROPE_POOL_DEVICE const Bits*, Offset> in =
      heads_in<kVec>(is_v ? t.v : (is_q ? t.q : t.k), h, at.token, f);
  Lane<Bits, kVec> lane;
  if (has_work) lane = load_lane<Bits, kVec>(in, head);

  // Where the results go, while that is on its way.
  Heads<ROPE_POOL_DEVICE Bits*, Offset> out;
  Heads<ROPE_POOL_DEVICE Bits*, Offset> pool;
  out.tensor = 0;
  pool.tensor = 0;
  if (!is_v && (f.turns || p.keeps_unturned == 0u)) {
    out = heads_out<kVec>(is_q ? t.q_rot : t.k_rot, h, at.token, f);
  }
  i64 row = has_work && !is_q ? value_of(slot, p.slots_are_int64) : -1;
  if (row >= 0 && row < p.pool_size) {
    pool = heads_of_row<kVec>(is_v ? t.v_pool : t.k_pool, p, h, row, f);
  }

  LaneAngles<kVec> angles;
  if (!is_v) {
    ROPE_POOL_SHARED float* cos = shared + at.token_in_group * pairs_per_group * 2u;
    ROPE_POOL_SHARED float* sin = cos + pairs_per_group;
    for (u32 i = share; i < num_angles;) {
      Offset pair = first_pair + i;
      Angle<float> angle =
          angle_from(position_of(positions, p, pair), frequency, t.frequencies, p, pair);
      cos[i] = angle.cos;
      sin[i] = angle.sin;
      i += shares;
      if (i < num_angles) frequency = load_frequency(t.frequencies, p, first_pair + i);
    }
    ROPE_POOL_BARRIER();
    if (has_work && f.turns) {
      read_angles<kVec>(cos + at.lane_in_group * kVec, angles.cos);
      read_angles<kVec>(sin + at.lane_in_group * kVec, angles.sin);
    }
  }
  if (!has_work) return;

  // The next head's loads go ahead of this one's stores, which the compiler may not do by itself:
  // q_rot may be q.
  for (;;) {
    u32 next_head = head + at.heads_per_group;
    bool has_next = !kFewTokens && next_head < end_head;
    Lane<Bits, kVec> next;
    if (has_next) next = load_lane<Bits, kVec>(in, next_head);
    if (!is_v && f.turns) lane = Turn<Element, kVec>::apply(lane, is_interleaved(p), angles);
    store_lane(lane, out, head);
    store_lane(lane, pool, head);
    if (!has_next) break;
    lane = next;
    head = next_head;
  }
}

}  // namespace rope_pool
