// The body of the CPU kernel. rope_pool_isa.cpp includes it once per instruction set, each time in
// a namespace of its own; so no include guard, and no include.

using One = std::integral_constant<i64, 1>;
using Two = std::integral_constant<i64, 2>;

// A token's angles, a tile of pairs at a time.
template <class Compute>
struct AngleTile {
  static constexpr i64 kPairs = 128;
  alignas(64) Compute cos[kPairs];
  alignas(64) Compute sin[kPairs];
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

// The angles of the pairs first + i * step, from `to` on. position_of(pair) is a pair's position.
template <class Compute, class Step, class PositionOf>
void fill_tile(AngleTile<Compute>& tile, i64 to, const FrequencyTable& table, i64 first, Step step,
               i64 count, Compute scaling, const PositionOf& position_of) {
  const u32* high = table.high.data() + first;
  const u32* low = table.low.data() + first;
  const i32* tail = table.tail.data() + first;
  Compute* cos = tile.cos + to;
  Compute* sin = tile.sin + to;
  ROPE_POOL_NO_DEPENDENCE
  for (i64 i = 0; i < count; ++i) {
    const i64 at = i * step;
    const Angle<Compute> angle =
        angle_at(Compute{}, position_of(first + at), {high[at], low[at], tail[at]});
    cos[i] = angle.cos * scaling;
    sin[i] = angle.sin * scaling;
  }
}

// The tile's first half is for the even pairs, and its second for the odd ones, if they are
// `split`.
template <class Compute>
void fill_tile(AngleTile<Compute>& tile, const CpuLaunch& launch, i64 token, i64 first, i64 count,
               bool split) {
  const auto scaling = static_cast<Compute>(launch.attention_scaling);
  const auto fill = [&](const auto& position_of) {
    if (split) {
      for (i64 odd = 0; odd < 2; ++odd) {
        fill_tile<Compute>(tile, odd * (tile.kPairs / 2), *launch.table, first + odd, Two{},
                           count / 2, scaling, position_of);
      }
    } else {
      fill_tile<Compute>(tile, 0, *launch.table, first, One{}, count, scaling, position_of);
    }
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
    fill([&](i64 pair) { return positions[launch.axes[pair]]; });
  }
}

// The loops over one head's pairs. `in` may be `out`, but there is no other overlap: they may run
// in any order.

// Pair i is (in[i * in_step], in[i * in_step + in_distance]).
template <class Element, class InStep, class InDistance, class OutStep, class OutDistance>
void rotate_pairs(const typename Element::storage* in, InStep in_step, InDistance in_distance,
                  typename Element::storage* out, OutStep out_step, OutDistance out_distance,
                  i64 count, const AngleTile<typename Element::compute>& tile) {
  ROPE_POOL_NO_DEPENDENCE
  for (i64 i = 0; i < count; ++i) {
    const auto rotated = rotate_stored<Element>(in[i * in_step], in[i * in_step + in_distance],
                                                tile.cos[i], tile.sin[i]);
    out[i * out_step] = rotated.first;
    out[i * out_step + out_distance] = rotated.second;
  }
}

// Half types, two neighbors in a word: nothing then has to be widened or narrowed, which costs more
// than the arithmetic.
inline u32 word_at(const u16* x) {
  u32 word;
  std::memcpy(&word, x, sizeof word);
  return word;
}
inline void set_word(u16* x, u32 word) { std::memcpy(x, &word, sizeof word); }

// What a rotation gave, as a word. bfloat16 needs no care for NaNs here: after arithmetic on
// bfloat16 they are quiet, and zero below the upper half, so rounding leaves them alone.
template <class Element>
ROPE_POOL_FN u32 rotated_word(float low, float high) {
  if constexpr (std::is_same<Element, BFloat16>::value) {
    const u32 low_bits = BFloat16::rounded(bits_of(low));
    const u32 high_bits = BFloat16::rounded(bits_of(high));
    return (low_bits >> 16) | (high_bits & 0xffff0000u);
  } else {
    return WordOf<Element>::store(low, high);
  }
}

// Pair i is (in[i], in[i + distance]); the tile is split.
template <class Element>
void rotate_halves_by_word(const u16* in, u16* out, i64 distance, i64 count,
                           const AngleTile<float>& tile) {
  using Word = WordOf<Element>;
  const float* odd_cos = tile.cos + tile.kPairs / 2;
  const float* odd_sin = tile.sin + tile.kPairs / 2;
  ROPE_POOL_NO_DEPENDENCE
  for (i64 i = 0; i < count / 2; ++i) {
    const u32 first = word_at(in + 2 * i);
    const u32 second = word_at(in + 2 * i + distance);
    const Pair<float> even = rotate(Word::low(first), Word::low(second), tile.cos[i], tile.sin[i]);
    const Pair<float> odd = rotate(Word::high(first), Word::high(second), odd_cos[i], odd_sin[i]);
    set_word(out + 2 * i, rotated_word<Element>(even.first, odd.first));
    set_word(out + 2 * i + distance, rotated_word<Element>(even.second, odd.second));
  }
}

// Pair i is (in[2 * i], in[2 * i + 1]).
template <class Element>
void rotate_neighbors_by_word(const u16* in, u16* out, i64 count, const AngleTile<float>& tile) {
  using Word = WordOf<Element>;
  ROPE_POOL_NO_DEPENDENCE
  for (i64 i = 0; i < count; ++i) {
    const u32 word = word_at(in + 2 * i);
    const Pair<float> rotated = rotate(Word::low(word), Word::high(word), tile.cos[i], tile.sin[i]);
    set_word(out + 2 * i, rotated_word<Element>(rotated.first, rotated.second));
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

template <class Storage>
constexpr bool kHasWords = std::is_same<Storage, u16>::value;

// Whether the even pairs' angles come before the odd ones', for rotate_halves_by_word.
template <class Element>
bool is_split(const RopePoolParams& p) {
  bool unit_stride = true;
  for (const RowStrides* strides : {&p.q, &p.k, &p.q_rot, &p.k_rot}) {
    unit_stride = unit_stride && strides->feature == 1;
  }
  return kHasWords<typename Element::storage> && unit_stride && p.pair_step == 1 &&
         p.num_pairs % 2 == 0;
}

// Asks for a row of the next token while this one is worked on.
template <class Storage>
void prefetch_row(const Storage* row, i64 count) {
  constexpr i64 kLine = 64 / sizeof(Storage);
  for (i64 i = 0; i < count; i += kLine) prefetch(row + i);
}

// Rotates the pairs [first, first + count) of a token's heads.
template <class Element>
void rotate_heads(const RopePoolParams& p, const typename Element::storage* in,
                  const RowStrides& in_strides, typename Element::storage* out,
                  const RowStrides& out_strides, i64 num_heads, i64 first, i64 count,
                  const AngleTile<typename Element::compute>& tile, bool split, bool has_next) {
  const bool unit_stride = in_strides.feature == 1 && out_strides.feature == 1;
  for (i64 head = 0; head < num_heads; ++head) {
    const auto* from = in + head * in_strides.head + first * p.pair_step * in_strides.feature;
    auto* to = out + head * out_strides.head + first * p.pair_step * out_strides.feature;
    if (unit_stride && has_next && first == 0) prefetch_row(from + in_strides.token, p.head_dim);
    // All but the last are the ones that the compiler vectorizes.
    if constexpr (kHasWords<typename Element::storage>) {
      if (split) {
        rotate_halves_by_word<Element>(from, to, p.pair_distance, count, tile);
        continue;
      }
      if (unit_stride && p.pair_step == 2) {
        rotate_neighbors_by_word<Element>(from, to, count, tile);
        continue;
      }
    }
    if (unit_stride && p.pair_step == 1) {
      rotate_pairs<Element>(from, One{}, p.pair_distance, to, One{}, p.pair_distance, count, tile);
    } else if (unit_stride) {
      rotate_pairs<Element>(from, Two{}, One{}, to, Two{}, One{}, count, tile);
    } else {
      rotate_pairs<Element>(
          from, p.pair_step * in_strides.feature, p.pair_distance * in_strides.feature, to,
          p.pair_step * out_strides.feature, p.pair_distance * out_strides.feature, count, tile);
    }
  }
}

template <class Element>
void rope_pool_tokens(const CpuLaunch& launch, i64 begin, i64 end) {
  using Storage = typename Element::storage;
  using Tile = AngleTile<typename Element::compute>;
  const RopePoolParams& p = launch.params;
  const i64 rotary_dim = 2 * p.num_pairs;
  const bool split = is_split<Element>(p);
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
  // Past the cache: whoever reads a pool reads far more than one call stores.
  const auto store_row = [&](const Storage* in, const RowStrides& in_strides, void* pool,
                             const PoolStrides& pool_strides, i64 slot, bool prefetches) {
    Storage* out = static_cast<Storage*>(pool) + slot / p.page_size * pool_strides.page +
                   slot % p.page_size * pool_strides.row;
    const bool unit_stride = in_strides.feature == 1 && pool_strides.feature == 1;
    for (i64 head = 0; head < p.num_kv_heads; ++head) {
      const Storage* from = in + head * in_strides.head;
      if (prefetches) prefetch_row(from + in_strides.token, p.head_dim);
      Storage* to = out + head * pool_strides.head;
      if (unit_stride) {
        stream_copy(to, from, static_cast<std::size_t>(p.head_dim) * sizeof(Storage));
      } else {
        copy_row(from, in_strides.feature, to, pool_strides.feature, p.head_dim);
      }
    }
  };

  for (i64 token = begin; token < end; ++token) {
    const bool has_next = token + 1 < end;
    const Storage* token_q = q + token * p.q.token;
    const Storage* token_k = k + token * p.k.token;
    Storage* token_q_rot = q_rot + token * p.q_rot.token;
    Storage* token_k_rot = k_rot + token * p.k_rot.token;
    for (i64 first = 0; first < p.num_pairs; first += Tile::kPairs) {
      const i64 count = std::min(Tile::kPairs, p.num_pairs - first);
      fill_tile(tile, launch, token, first, count, split);
      rotate_heads<Element>(p, token_q, p.q, token_q_rot, p.q_rot, p.num_qo_heads, first, count,
                            tile, split, has_next);
      rotate_heads<Element>(p, token_k, p.k, token_k_rot, p.k_rot, p.num_kv_heads, first, count,
                            tile, split, has_next);
    }
    copy_unrotated(token_q, p.q, token_q_rot, p.q_rot, p.num_qo_heads);
    copy_unrotated(token_k, p.k, token_k_rot, p.k_rot, p.num_kv_heads);

    const i64 slot = launch.slots.at(0, token);
    if (slot < 0) continue;
    store_row(token_k_rot, p.k_rot, launch.k_pool, p.k_pool, slot, /*prefetches=*/false);
    store_row(v + token * p.v.token, p.v, launch.v_pool, p.v_pool, slot, /*prefetches=*/has_next);
  }
  finish_streams();
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
