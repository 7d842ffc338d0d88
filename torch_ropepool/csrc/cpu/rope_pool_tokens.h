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

// The angles of the pairs [first, first + count). position_of(pair) is a pair's position. If
// `split`, the tile's first half is for the even pairs and its second for the odd ones: both in one
// loop, so that it reads the table without gaps.
template <class Compute, class PositionOf>
void fill_tile(AngleTile<Compute>& tile, const FrequencyTable& table, i64 first, i64 count,
               bool split, Compute scaling, const PositionOf& position_of) {
  const u32* high = table.high.data() + first;
  const u32* low = table.low.data() + first;
  const i32* tail = table.tail.data() + first;
  Compute* cos = tile.cos;
  Compute* sin = tile.sin;
  const auto angle_of_pair = [=](i64 i) {
    Angle<Compute> angle = angle_at(Compute{}, position_of(first + i), {high[i], low[i], tail[i]});
    angle.cos *= scaling;
    angle.sin *= scaling;
    return angle;
  };
  if (split) {
    Compute* odd_cos = cos + tile.kPairs / 2;
    Compute* odd_sin = sin + tile.kPairs / 2;
    ROPE_POOL_NO_DEPENDENCE
    for (i64 i = 0; i < count / 2; ++i) {
      const Angle<Compute> even = angle_of_pair(2 * i);
      const Angle<Compute> odd = angle_of_pair(2 * i + 1);
      cos[i] = even.cos;
      sin[i] = even.sin;
      odd_cos[i] = odd.cos;
      odd_sin[i] = odd.sin;
    }
  } else {
    ROPE_POOL_NO_DEPENDENCE
    for (i64 i = 0; i < count; ++i) {
      const Angle<Compute> angle = angle_of_pair(i);
      cos[i] = angle.cos;
      sin[i] = angle.sin;
    }
  }
}

template <class Compute>
void fill_tile(AngleTile<Compute>& tile, const CpuLaunch& launch, i64 token, i64 first, i64 count,
               bool split) {
  const auto scaling = static_cast<Compute>(launch.attention_scaling);
  const auto fill = [&](const auto& position_of) {
    fill_tile<Compute>(tile, *launch.table, first, count, split, scaling, position_of);
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
template <class Element, class InStep, class InDistance, class OutStep, class OutDistance,
          class Count>
void rotate_pairs(const typename Element::storage* in, InStep in_step, InDistance in_distance,
                  typename Element::storage* out, OutStep out_step, OutDistance out_distance,
                  Count count, const AngleTile<typename Element::compute>& tile) {
  const i64 end = count;
  ROPE_POOL_NO_DEPENDENCE
  for (i64 i = 0; i < end; ++i) {
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
template <class Element, class Count>
void rotate_halves_by_word(const u16* in, u16* out, i64 distance, Count count,
                           const AngleTile<float>& tile) {
  using Word = WordOf<Element>;
  const float* odd_cos = tile.cos + tile.kPairs / 2;
  const float* odd_sin = tile.sin + tile.kPairs / 2;
  const i64 end = count / 2;
  ROPE_POOL_NO_DEPENDENCE
  for (i64 i = 0; i < end; ++i) {
    const u32 first = word_at(in + 2 * i);
    const u32 second = word_at(in + 2 * i + distance);
    const Pair<float> even = rotate(Word::low(first), Word::low(second), tile.cos[i], tile.sin[i]);
    const Pair<float> odd = rotate(Word::high(first), Word::high(second), odd_cos[i], odd_sin[i]);
    set_word(out + 2 * i, rotated_word<Element>(even.first, odd.first));
    set_word(out + 2 * i + distance, rotated_word<Element>(even.second, odd.second));
  }
}

// Pair i is (in[2 * i], in[2 * i + 1]).
template <class Element, class Count>
void rotate_neighbors_by_word(const u16* in, u16* out, Count count, const AngleTile<float>& tile) {
  using Word = WordOf<Element>;
  const i64 end = count;
  ROPE_POOL_NO_DEPENDENCE
  for (i64 i = 0; i < end; ++i) {
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

#if ROPE_POOL_STREAMS
// Copies block by block where all blocks are aligned.
template <class Block>
bool stream_blocks(char* to, const char* from, std::size_t size) {
  if (reinterpret_cast<std::uintptr_t>(to) % Block::kBytes != 0 || size % Block::kBytes != 0) {
    return false;
  }
  for (std::size_t at = 0; at < size; at += Block::kBytes) Block::copy(to + at, from + at);
  return true;
}
#endif

// `to` does not overlap `from`. Call finish_streams before another thread may read what was copied.
template <class Storage>
void stream_row(const Storage* from, Storage* to, i64 count) {
#if ROPE_POOL_STREAMS
  const auto* bytes = reinterpret_cast<const char*>(from);
  const std::size_t size = static_cast<std::size_t>(count) * sizeof(Storage);
  if (stream_blocks<Stream>(reinterpret_cast<char*>(to), bytes, size)) return;
  if (stream_blocks<Stream16>(reinterpret_cast<char*>(to), bytes, size)) return;
#endif
  copy_row(from, 1, to, 1, count);
}

// Asks for a row of a token to come while this one is worked on.
template <class Storage>
ROPE_POOL_FN void prefetch_row(const Storage* row, i64 count) {
  constexpr i64 kLine = 64 / sizeof(Storage);
  for (i64 i = 0; i < count; i += kLine) ROPE_POOL_PREFETCH(row + i);
}

// Rotates the pairs [first, first + count) of a token's heads. `ahead`: asks for the heads of the
// token so many later, unless 0.
template <class Element>
void rotate_heads(const RopePoolParams& p, const typename Element::storage* in,
                  const RowStrides& in_strides, typename Element::storage* out,
                  const RowStrides& out_strides, i64 num_heads, i64 first, i64 count,
                  const AngleTile<typename Element::compute>& tile, bool split, i64 ahead) {
  using Storage = typename Element::storage;
  const bool unit_stride = in_strides.feature == 1 && out_strides.feature == 1;
  in += first * p.pair_step * in_strides.feature;
  out += first * p.pair_step * out_strides.feature;
  const bool prefetches = unit_stride && ahead > 0 && first == 0;
  const auto each_head = [&](const auto& rotate_head) {
    for (i64 head = 0; head < num_heads; ++head) {
      const Storage* from = in + head * in_strides.head;
      if (prefetches) prefetch_row(from + ahead * in_strides.token, p.head_dim);
      rotate_head(from, out + head * out_strides.head);
    }
  };
  // All but the last are the ones that the compiler vectorizes.
  const auto each_head_of = [&](auto constant) {
    if constexpr (kHasWords<Storage>) {
      if (split) {
        return each_head([&](const Storage* from, Storage* to) {
          rotate_halves_by_word<Element>(from, to, p.pair_distance, constant, tile);
        });
      }
      if (unit_stride && p.pair_step == 2) {
        return each_head([&](const Storage* from, Storage* to) {
          rotate_neighbors_by_word<Element>(from, to, constant, tile);
        });
      }
    }
    if (unit_stride && p.pair_step == 1) {
      each_head([&](const Storage* from, Storage* to) {
        rotate_pairs<Element>(from, One{}, p.pair_distance, to, One{}, p.pair_distance, constant,
                              tile);
      });
    } else if (unit_stride) {
      each_head([&](const Storage* from, Storage* to) {
        rotate_pairs<Element>(from, Two{}, One{}, to, Two{}, One{}, constant, tile);
      });
    } else {
      each_head([&](const Storage* from, Storage* to) {
        rotate_pairs<Element>(
            from, p.pair_step * in_strides.feature, p.pair_distance * in_strides.feature, to,
            p.pair_step * out_strides.feature, p.pair_distance * out_strides.feature, count, tile);
      });
    }
  };
  // The usual counts as constants: these loops have no rest, and what is the same for all heads
  // stays in registers.
  if (count == 64) {
    each_head_of(std::integral_constant<i64, 64>{});
  } else if (count == 32) {
    each_head_of(std::integral_constant<i64, 32>{});
  } else {
    each_head_of(count);
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
  const auto row_at = [&](void* pool, const PoolStrides& strides, i64 slot) {
    return static_cast<Storage*>(pool) + slot / p.page_size * strides.page +
           slot % p.page_size * strides.row;
  };
  // Past the cache: whoever reads a pool reads far more than one call stores.
  const auto store_head = [&](const Storage* in, const RowStrides& in_strides, Storage* out,
                              const PoolStrides& pool_strides, i64 head) {
    in += head * in_strides.head;
    out += head * pool_strides.head;
    if (in_strides.feature == 1 && pool_strides.feature == 1) {
      stream_row(in, out, p.head_dim);
    } else {
      copy_row(in, in_strides.feature, out, pool_strides.feature, p.head_dim);
    }
  };

  // Slots are anywhere, so a pool row is mostly on a page whose address the processor has to look
  // up. It does so for several at once, but not while a token's rotation is between them.
  constexpr i64 kLookups = 8;
  // From a token that is worked on to one that is asked for.
  constexpr i64 kAheadBytes = 12 * 1024;
  const i64 token_bytes = (p.num_qo_heads + 2 * p.num_kv_heads) * p.head_dim * i64{sizeof(Storage)};
  const i64 ahead_of_most = (kAheadBytes + token_bytes - 1) / token_bytes;
  for (i64 token = begin; token < end; ++token) {
    if ((token - begin) % kLookups == 0) {
      for (i64 later = token; later < std::min(token + kLookups, end); ++later) {
        const i64 slot = launch.slots.at(0, later);
        if (slot < 0) continue;
        ROPE_POOL_PREFETCH(row_at(launch.k_pool, p.k_pool, slot));
        ROPE_POOL_PREFETCH(row_at(launch.v_pool, p.v_pool, slot));
      }
    }
    const i64 ahead = token + ahead_of_most < end ? ahead_of_most : 0;
    const Storage* token_q = q + token * p.q.token;
    const Storage* token_k = k + token * p.k.token;
    const Storage* token_v = v + token * p.v.token;
    Storage* token_q_rot = q_rot + token * p.q_rot.token;
    Storage* token_k_rot = k_rot + token * p.k_rot.token;
    copy_unrotated(token_q, p.q, token_q_rot, p.q_rot, p.num_qo_heads);
    copy_unrotated(token_k, p.k, token_k_rot, p.k_rot, p.num_kv_heads);

    const i64 slot = launch.slots.at(0, token);
    Storage* k_row = slot < 0 ? nullptr : row_at(launch.k_pool, p.k_pool, slot);
    Storage* v_row = slot < 0 ? nullptr : row_at(launch.v_pool, p.v_pool, slot);

    for (i64 first = 0; first < p.num_pairs; first += Tile::kPairs) {
      const i64 count = std::min(Tile::kPairs, p.num_pairs - first);
      const bool is_last = first + count == p.num_pairs;
      fill_tile(tile, launch, token, first, count, split);
      // The stores of pool rows between rotations: all at once they would hold up the loads.
      for (i64 head = 0; head < p.num_kv_heads; ++head) {
        rotate_heads<Element>(p, token_k + head * p.k.head, p.k, token_k_rot + head * p.k_rot.head,
                              p.k_rot, 1, first, count, tile, split, ahead);
        const i64 q_begin = head * p.num_qo_heads / p.num_kv_heads;
        const i64 q_end = (head + 1) * p.num_qo_heads / p.num_kv_heads;
        rotate_heads<Element>(p, token_q + q_begin * p.q.head, p.q,
                              token_q_rot + q_begin * p.q_rot.head, p.q_rot, q_end - q_begin, first,
                              count, tile, split, ahead);
        if (is_last && slot >= 0) {
          if (ahead > 0) prefetch_row(token_v + head * p.v.head + ahead * p.v.token, p.head_dim);
          store_head(token_k_rot, p.k_rot, k_row, p.k_pool, head);
          store_head(token_v, p.v, v_row, p.v_pool, head);
        }
      }
    }
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
