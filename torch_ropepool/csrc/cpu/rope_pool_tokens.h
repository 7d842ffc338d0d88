// The body of the CPU kernel. rope_pool_isa.cpp includes it once per instruction set, each time in
// a namespace of its own; so no include guard, and no include.

// cos and sin of a token's angles, for pairs [first, first + count).
template <class Compute>
struct AngleTile {
  static constexpr i64 kPairs = 128;
  Compute cos[kPairs];
  Compute sin[kPairs];
};

inline void fill_angles(AngleTile<float>& tile, i64 position, const FrequencyTable& table,
                        i64 first, i64 count) {
  const u32* high = table.high.data() + first;
  const u32* low = table.low.data() + first;
  const i32* tail = table.tail.data() + first;
  const i32 position32 = static_cast<i32>(position);
  if (position32 == position) {
    for (i64 i = 0; i < count; ++i) {
      const Angle<float> angle = angle_of(phase32(position32, high[i], low[i]));
      tile.cos[i] = angle.cos;
      tile.sin[i] = angle.sin;
    }
  } else {
    for (i64 i = 0; i < count; ++i) {
      const u64 phase = phase64(position, {high[i], low[i], tail[i]});
      const Angle<float> angle = angle_of(static_cast<u32>(phase >> 32));
      tile.cos[i] = angle.cos;
      tile.sin[i] = angle.sin;
    }
  }
}

inline void fill_angles(AngleTile<double>& tile, i64 position, const FrequencyTable& table,
                        i64 first, i64 count) {
  for (i64 i = 0; i < count; ++i) {
    const Frequency frequency = {table.high[first + i], table.low[first + i],
                                 table.tail[first + i]};
    const Angle<double> angle = angle_of(phase64(position, frequency));
    tile.cos[i] = angle.cos;
    tile.sin[i] = angle.sin;
  }
}

// One head's pairs. `in` may be `out`, but no other overlap: the loop may run in any order.
template <class Element>
void rotate_row(const typename Element::storage* in, i64 in_stride, typename Element::storage* out,
                i64 out_stride, i64 half, i64 count, const typename Element::compute* cos,
                const typename Element::compute* sin) {
  if (in_stride == 1 && out_stride == 1) {  // the compiler vectorizes this one
    ROPE_POOL_NO_DEPENDENCE
    for (i64 i = 0; i < count; ++i) {
      const Pair<Element> rotated = rotate<Element>(in[i], in[half + i], cos[i], sin[i]);
      out[i] = rotated.first;
      out[half + i] = rotated.second;
    }
  } else {
    for (i64 i = 0; i < count; ++i) {
      const Pair<Element> rotated =
          rotate<Element>(in[i * in_stride], in[(half + i) * in_stride], cos[i], sin[i]);
      out[i * out_stride] = rotated.first;
      out[(half + i) * out_stride] = rotated.second;
    }
  }
}

template <class Storage>
void copy_row(const Storage* in, i64 in_stride, Storage* out, i64 out_stride, i64 count) {
  if (in_stride == 1 && out_stride == 1) {
    std::memcpy(out, in, static_cast<std::size_t>(count) * sizeof(Storage));
  } else {
    for (i64 i = 0; i < count; ++i) out[i * out_stride] = in[i * in_stride];
  }
}

template <class Element>
void rope_pool_tokens(const CpuLaunch& launch, i64 begin, i64 end) {
  using Storage = typename Element::storage;
  using Tile = AngleTile<typename Element::compute>;
  const RopePoolParams& p = launch.params;
  const i64 half = p.head_dim / 2;
  Tile tile;

  const auto rotate_heads = [&](const void* in, const RowStrides& in_strides, void* out,
                                const RowStrides& out_strides, i64 num_heads, i64 token, i64 first,
                                i64 count) {
    const Storage* from =
        static_cast<const Storage*>(in) + token * in_strides.token + first * in_strides.feature;
    Storage* to =
        static_cast<Storage*>(out) + token * out_strides.token + first * out_strides.feature;
    for (i64 head = 0; head < num_heads; ++head) {
      rotate_row<Element>(from + head * in_strides.head, in_strides.feature,
                          to + head * out_strides.head, out_strides.feature, half, count, tile.cos,
                          tile.sin);
    }
  };
  const auto store_heads = [&](const void* in, const RowStrides& in_strides, i64 token, void* pool,
                               const RowStrides& pool_strides, i64 slot) {
    const Storage* from = static_cast<const Storage*>(in) + token * in_strides.token;
    Storage* to = static_cast<Storage*>(pool) + slot * pool_strides.token;
    for (i64 head = 0; head < p.num_kv_heads; ++head) {
      copy_row(from + head * in_strides.head, in_strides.feature, to + head * pool_strides.head,
               pool_strides.feature, p.head_dim);
    }
  };

  for (i64 token = begin; token < end; ++token) {
    const i64 position = launch.positions[token];
    for (i64 first = 0; first < half; first += Tile::kPairs) {
      const i64 count = std::min(Tile::kPairs, half - first);
      fill_angles(tile, position, *launch.table, first, count);
      rotate_heads(launch.q, p.q, launch.q_rot, p.q_rot, p.num_qo_heads, token, first, count);
      rotate_heads(launch.k, p.k, launch.k_rot, p.k_rot, p.num_kv_heads, token, first, count);
    }
    const i64 slot = launch.slots[token];
    if (slot < 0) continue;
    store_heads(launch.k_rot, p.k_rot, token, launch.k_pool, p.k_pool, slot);
    store_heads(launch.v, p.v, token, launch.v_pool, p.v_pool, slot);
  }
}

inline RopePoolTokens kernel_for(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return rope_pool_tokens<Float16>;
    case DType::kBFloat16:
      return rope_pool_tokens<BFloat16>;
    case DType::kFloat64:
      return rope_pool_tokens<Float64>;
    default:
      return rope_pool_tokens<Float32>;
  }
}
