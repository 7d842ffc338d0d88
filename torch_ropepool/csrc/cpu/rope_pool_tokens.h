// The body of the CPU kernel. rope_pool_isa.cpp includes it once per instruction set, each time in
// a namespace of its own; so no include guard, and no include.

using One = std::integral_constant<i64, 1>;
using Two = std::integral_constant<i64, 2>;

// A token's angles, a tile of pairs at a time.
template <class Compute>
struct AngleTile {
  static constexpr i64 kPairs = 128;
  Compute cos[kPairs];
  Compute sin[kPairs];
};

inline Angle<float> angle_at(float, i64 position, Frequency frequency) {
  return angle_of(phase_of(position, frequency));
}
// The same for a position that is known to fit, without a branch in the loop.
inline Angle<float> angle_at(float, i32 position, Frequency frequency) {
  return angle_of(phase32(position, frequency.high, frequency.low));
}
inline Angle<double> angle_at(double, i64 position, Frequency frequency) {
  return angle_of(phase64(position, frequency));
}

// position_of(i) is the position that pair first + i takes.
template <class Compute, class PositionOf>
void fill_tile(AngleTile<Compute>& tile, const FrequencyTable& table, i64 first, i64 count,
               Compute scaling, const PositionOf& position_of) {
  const u32* high = table.high.data() + first;
  const u32* low = table.low.data() + first;
  const i32* tail = table.tail.data() + first;
  for (i64 i = 0; i < count; ++i) {
    const Angle<Compute> angle = angle_at(Compute{}, position_of(i), {high[i], low[i], tail[i]});
    tile.cos[i] = angle.cos * scaling;
    tile.sin[i] = angle.sin * scaling;
  }
}

template <class Compute>
void fill_tile(AngleTile<Compute>& tile, const CpuLaunch& launch, i64 token, i64 first, i64 count) {
  const auto scaling = static_cast<Compute>(launch.attention_scaling);
  const auto fill = [&](const auto& position_of) {
    fill_tile<Compute>(tile, *launch.table, first, count, scaling, position_of);
  };
  if (launch.axes == nullptr) {
    const i64 position = launch.positions.at(0, token);
    if constexpr (std::is_same<Compute, float>::value) {
      const i32 position32 = static_cast<i32>(position);
      if (position32 == position) return fill([=](i64) { return position32; });
    }
    fill([=](i64) { return position; });
  } else {
    const i64 positions[3] = {launch.positions.at(0, token), launch.positions.at(1, token),
                              launch.positions.at(2, token)};
    fill([&](i64 i) { return positions[launch.axes[first + i]]; });
  }
}

// One head's pairs: (in[i * step], in[i * step + distance]). `in` may be `out`, but there is no
// other overlap: the loop may run in any order.
template <class Element, class InStep, class InDistance, class OutStep, class OutDistance>
void rotate_pairs(const typename Element::storage* in, InStep in_step, InDistance in_distance,
                  typename Element::storage* out, OutStep out_step, OutDistance out_distance,
                  i64 count, const typename Element::compute* cos,
                  const typename Element::compute* sin) {
  ROPE_POOL_NO_DEPENDENCE
  for (i64 i = 0; i < count; ++i) {
    const auto rotated =
        rotate_stored<Element>(in[i * in_step], in[i * in_step + in_distance], cos[i], sin[i]);
    out[i * out_step] = rotated.first;
    out[i * out_step + out_distance] = rotated.second;
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

// Rotates the pairs [first, first + count) of a token's heads.
template <class Element>
void rotate_heads(const RopePoolParams& p, const typename Element::storage* in,
                  const RowStrides& in_strides, typename Element::storage* out,
                  const RowStrides& out_strides, i64 num_heads, i64 first, i64 count,
                  const AngleTile<typename Element::compute>& tile) {
  const bool unit_stride = in_strides.feature == 1 && out_strides.feature == 1;
  for (i64 head = 0; head < num_heads; ++head) {
    const auto* from = in + head * in_strides.head + first * p.pair_step * in_strides.feature;
    auto* to = out + head * out_strides.head + first * p.pair_step * out_strides.feature;
    // The first two are the ones that the compiler vectorizes.
    if (unit_stride && p.pair_step == 1) {
      rotate_pairs<Element>(from, One{}, p.pair_distance, to, One{}, p.pair_distance, count,
                            tile.cos, tile.sin);
    } else if (unit_stride) {
      rotate_pairs<Element>(from, Two{}, One{}, to, Two{}, One{}, count, tile.cos, tile.sin);
    } else {
      rotate_pairs<Element>(from, p.pair_step * in_strides.feature,
                            p.pair_distance * in_strides.feature, to,
                            p.pair_step * out_strides.feature,
                            p.pair_distance * out_strides.feature, count, tile.cos, tile.sin);
    }
  }
}

template <class Element>
void rope_pool_tokens(const CpuLaunch& launch, i64 begin, i64 end) {
  using Storage = typename Element::storage;
  using Tile = AngleTile<typename Element::compute>;
  const RopePoolParams& p = launch.params;
  const i64 rotary_dim = 2 * p.num_pairs;
  Tile tile;

  const auto* q = static_cast<const Storage*>(launch.q);
  const auto* k = static_cast<const Storage*>(launch.k);
  const auto* v = static_cast<const Storage*>(launch.v);
  auto* q_rot = static_cast<Storage*>(launch.q_rot);
  auto* k_rot = static_cast<Storage*>(launch.k_rot);

  const auto copy_unrotated = [&](const Storage* in, const RowStrides& in_strides, Storage* out,
                                  const RowStrides& out_strides, i64 num_heads) {
    if (rotary_dim == p.head_dim || in == out) return;
    for (i64 head = 0; head < num_heads; ++head) {
      copy_row(in + head * in_strides.head + rotary_dim * in_strides.feature, in_strides.feature,
               out + head * out_strides.head + rotary_dim * out_strides.feature,
               out_strides.feature, p.head_dim - rotary_dim);
    }
  };
  const auto store_row = [&](const Storage* in, const RowStrides& in_strides, void* pool,
                             const PoolStrides& pool_strides, i64 slot) {
    Storage* out = static_cast<Storage*>(pool) + slot / p.page_size * pool_strides.page +
                   slot % p.page_size * pool_strides.row;
    for (i64 head = 0; head < p.num_kv_heads; ++head) {
      copy_row(in + head * in_strides.head, in_strides.feature, out + head * pool_strides.head,
               pool_strides.feature, p.head_dim);
    }
  };

  for (i64 token = begin; token < end; ++token) {
    const Storage* token_q = q + token * p.q.token;
    const Storage* token_k = k + token * p.k.token;
    Storage* token_q_rot = q_rot + token * p.q_rot.token;
    Storage* token_k_rot = k_rot + token * p.k_rot.token;
    for (i64 first = 0; first < p.num_pairs; first += Tile::kPairs) {
      const i64 count = std::min(Tile::kPairs, p.num_pairs - first);
      fill_tile(tile, launch, token, first, count);
      rotate_heads<Element>(p, token_q, p.q, token_q_rot, p.q_rot, p.num_qo_heads, first, count,
                            tile);
      rotate_heads<Element>(p, token_k, p.k, token_k_rot, p.k_rot, p.num_kv_heads, first, count,
                            tile);
    }
    copy_unrotated(token_q, p.q, token_q_rot, p.q_rot, p.num_qo_heads);
    copy_unrotated(token_k, p.k, token_k_rot, p.k_rot, p.num_kv_heads);

    const i64 slot = launch.slots.at(0, token);
    if (slot < 0) continue;
    store_row(token_k_rot, p.k_rot, launch.k_pool, p.k_pool, slot);
    store_row(v + token * p.v.token, p.v, launch.v_pool, p.v_pool, slot);
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
