// The codecs on a processor: the same four families as the device kernels, on spans of successive blocks. Compiled
// once for each instruction set with HZ_ISA its name; library.cpp chooses among them and splits the work.
//
// Memory traffic is that of the device kernels. A block is read twice, the second time from the first-level cache.
// -ffp-contract=off: every operation is rounded by itself.
#include <type_traits>

#include "library.h"
#include "rotation.h"

namespace hz {
namespace HZ_ISA {

constexpr uint32_t buffer = 4096;     // elements of blocks that are worked on together
constexpr float magic = 12582912.0f;  // 1.5 * 2^23: what is added to it keeps no fraction, rounded to nearest even

// No templates of the standard library: one copy of each would serve all instruction sets.
HZ_INLINE int64_t between(int64_t low, int64_t x, int64_t high) { return x < low ? low : x > high ? high : x; }

struct Record {
  uint8_t* codes;
  uint8_t* scales;
};

// A record with the checksum of its part.
struct Checked : Record {
  uint64_t* sum;   // null: there is none
  uint32_t place;  // of the record in its part, in words of 32 bits
};

HZ_INLINE Checked record_at(const hz_checks& checks, uint64_t payload, int64_t row_bytes, uint32_t inner, int64_t start,
                            uint32_t bytes, uint32_t scales, uint32_t row) {
  const int64_t piece = row / inner, within = inner * start + row % inner * (int64_t)bytes;
  uint8_t* at = (uint8_t*)payload + piece * inner * row_bytes + within;
  if (!checks.sums) return {{at, at + scales}, nullptr, 0};
  const int64_t part = piece / checks.pieces;
  at += part * HZ_CHECKSUM_BYTES;
  return {{at, at + scales},
          (uint64_t*)(checks.sums + part * checks.step),
          (uint32_t)((piece % checks.pieces * inner * row_bytes + within) / 4)};
}

// Bytes from a peer's payload to the next one's.
HZ_INLINE int64_t step_of(const hz_bucket& bucket) {
  return bucket.inner * bucket.row_bytes + (bucket.checks.sums ? HZ_CHECKSUM_BYTES : 0);
}

HZ_INLINE int64_t shard_of(const hz_bucket& bucket, uint32_t row) {
  int64_t shard = 0;
  for (uint32_t axis = bucket.axes; axis-- > 0; row /= bucket.sizes[axis])
    shard += (int64_t)(row % bucket.sizes[axis]) * bucket.strides[axis];
  return shard;
}

// The next bfloat16 that is not below a number, which is not negative.
HZ_INLINE Words up_to_bf16(Floats x) { return ((Words)x + 0xffff) & 0xffff0000; }

HZ_INLINE float load_scale(const uint8_t* scales, uint32_t block) {
  return float_of((uint32_t)((const uint16_t*)scales)[block] << 16);
}

// Whether a record has its codes and its scale in 16 bytes, the scale last.
HZ_INLINE bool is_tiny(const Record& record) { return (record.scales - record.codes) % 16 != 0; }

// A scale, and behind the last one of a record, unless it is tiny, the padding.
HZ_INLINE void store_scale(uint8_t* scales, uint32_t block, uint32_t blocks, float scale, bool is_tiny) {
  ((uint16_t*)scales)[block] = (uint16_t)(bits_of(scale) >> 16);
  if (block + 1 == blocks && !is_tiny) std::memset(scales + (size_t)blocks * 2, 0, -(blocks * 2) & 15);
}

// ---- scales --------------------------------------------------------------------------------------------------------

// Magnitude bits of a block's largest positive and most negative element, found on elements as integers: the largest
// signed one is the largest positive number, the largest unsigned one the most negative, wherever there is one. `all`
// is a multiple of 16.
template <class Element, int BYTES>
HZ_INLINE void extremes(const Element* x, uint32_t all, uint32_t& positive, uint32_t& negative) {
  typedef typename std::conditional<sizeof(Element) == 2, int16_t, int32_t>::type Signed;
  typedef typename std::conditional<sizeof(Element) == 2, uint16_t, uint32_t>::type Unsigned;
  typedef Signed Above __attribute__((vector_size(BYTES)));
  typedef Unsigned Below __attribute__((vector_size(BYTES)));
  typedef long long Whole __attribute__((vector_size(BYTES)));
  constexpr uint32_t count = BYTES / sizeof(Element);
  Above above = {};
  Below below = {};
  for (uint32_t i = 0; i < all; i += count) {
    const Above bits = load<Above>(x + i);
    above = above > bits ? above : bits;
    below = below > (Below)bits ? below : (Below)bits;
  }
  const uint32_t sign = 1u << (8 * sizeof(Element) - 1), least = largest((Whole)below, Unsigned());
  positive = largest((Whole)above, Unsigned());
  negative = least >= sign ? least ^ sign : 0;
}

// The element of largest magnitude with its sign, the first of several; its bits in the element's own type.
template <class Element, int BITS>
HZ_INLINE uint32_t extreme_of(const Element* x, uint32_t all) {
  uint32_t positive, negative;
  constexpr int widest = 4 * lanes, least = 16 * sizeof(Element) < widest ? 16 * sizeof(Element) : widest;
  if (all * sizeof(Element) % widest)
    extremes<Element, least>(x, all, positive, negative);
  else
    extremes<Element, widest>(x, all, positive, negative);
  const uint32_t sign = 1u << (8 * sizeof(Element) - 1);
  if (BITS == 8) return positive > negative ? positive : negative;
  if (positive != negative || !positive) return positive > negative ? positive : negative | sign;
  for (uint32_t i = 0;; ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, x + i, sizeof(Element));
    if ((bits & ~sign) == positive) return bits;
  }
}

template <int BITS>
constexpr float highest = (1 << (BITS - 1)) - 1;
template <int BITS>
constexpr float lowest = BITS == 8 ? -highest<8> : -highest<BITS> - 1;

// Reciprocals of scales, for blocks whose quotients they give (see quotient_of) and none of which rounds to more than
// the largest code; zero for the others.
template <int BITS>
HZ_INLINE Words reciprocals_of(Floats extreme, Floats scale) {
  const Floats reciprocal = 1.0f / scale, size = magnitude(scale);
  const Ints easy = (size > broadcast(0x1p-60f)) & (size < broadcast(0x1p100f)) &
                    (magnitude(extreme * reciprocal) < broadcast(0.49f - lowest<BITS>));
  return has_fused ? (Words)reciprocal & (Words)easy : Words{};
}

// Scales of `batch` blocks from their extremes, with `reciprocals_of` them. For stochastic codes they are positive and
// rounded up: none of these is clamped.
template <class Type, int BITS>
HZ_INLINE void scales_of(const typename Type::type* extremes, float limit, bool stochastic, float* scales,
                         float* reciprocals) {
  const float level = BITS == 8 || stochastic ? highest<BITS> : lowest<BITS>;
  for (uint32_t i = 0; i < batch; i += lanes) {
    const Floats extreme = stochastic ? magnitude(Type::widen(extremes + i)) : Type::widen(extremes + i);
    Floats scale = extreme / level;
    scale = (Floats)(stochastic ? up_to_bf16(scale) : bf16_of(scale) << 16);
    scale = smaller(larger(scale, broadcast(-limit)), broadcast(limit));
    const Ints finite = magnitude(extreme) <= broadcast(0x1.fffffep127f), zero = scale == Floats{};
    const Words bits = (Words)scale & ~(Words)zero;  // -0 becomes +0
    store(scales + i, ((Words)finite & bits) | (~(Words)finite & 0x7fc00000));
    store(reciprocals + i, reciprocals_of<BITS>(extreme, (Floats)bits));
  }
}

// ---- codes ---------------------------------------------------------------------------------------------------------

HZ_INLINE Words mix(Words word) {
  word = (word ^ word >> 16) * 0x7feb352d;
  word = (word ^ word >> 15) * 0x846ca68b;
  return word ^ word >> 16;
}

// The quotient x / scale, rounded once: by division, or, EASY, from the reciprocal. A remainder that is exact corrects
// a product with it (Markstein 1990). With the 8 significant bits of a bfloat16 scale no quotient is so near to the
// middle between two float32 that what the reciprocal lacks could matter; quotients below 2^-40, whose remainders may
// not be exact, have code 0 or do not move a stochastic one.
template <bool EASY>
HZ_INLINE Floats quotient_of(Floats x, Floats scale, Floats reciprocal) {
  if (!EASY) return x / scale;
  const Floats quotient = x * reciprocal;
  return fused(fused(-quotient, scale, x), reciprocal, quotient);
}

// ---- checksums -----------------------------------------------------------------------------------------------------

// The sum of words of 32 bits, each times a number for its place, modulo 2^64. Missing bytes of the last one are zero.
static hz_u64 checksum(const hz_u8* bytes, hz_u64 count, hz_u32 place) {
  Words counting;
  for (int lane = 0; lane < lanes; ++lane) counting[lane] = lane + 1;
  Pairs sums = {};
  uint64_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes, place += lanes) {
    const Words words = load<Words>(bytes + i), weights = mix(counting + place);
    sums += products(words, weights) + products((Words)((Pairs)words >> 32), (Words)((Pairs)weights >> 32));
  }
  uint64_t sum = 0;
  for (int lane = 0; lane < lanes / 2; ++lane) sum += sums[lane];
  if (i < count) {
    uint32_t last[lanes] = {};
    std::memcpy(last, bytes + i, count - i);
    const Words weights = mix(counting + place);
    for (int lane = 0; lane < lanes; ++lane) sum += (uint64_t)last[lane] * weights[lane];
  }
  return sum;
}

// Adds blocks `begin` to `end` of a record, which the first-level cache still has: codes and scales, and behind the
// last ones the padding.
template <int BITS>
HZ_APART void check(Checked record, uint32_t size, uint32_t begin, uint32_t end, uint32_t blocks) {
  if (is_tiny(record)) {
    __atomic_fetch_add(record.sum, checksum(record.codes, 16, record.place), __ATOMIC_RELAXED);
    return;
  }
  const uint64_t bits = (uint64_t)size * BITS, codes = record.scales - record.codes;  // 2^32 bits may be passed
  const uint64_t codes_end = end < blocks ? end * bits / 8 : codes, from = begin * bits / 8;
  const uint32_t scales = record.place + (uint32_t)(codes / 4);
  uint64_t sum = checksum(record.codes + from, codes_end - from, record.place + (uint32_t)(from / 4));
  // From whole words: a scale has half of one.
  const uint32_t first = begin / 2 * 2, scales_end = end < blocks ? end : (blocks + 7) / 8 * 8;
  alignas(64) uint16_t halves[batch + 10];
  std::memcpy(halves, record.scales + 2 * first, 2 * (scales_end - first));
  if (begin % 2) halves[0] = 0;
  sum += checksum((const uint8_t*)halves, 2 * (scales_end - first), scales + first / 2);
  __atomic_fetch_add(record.sum, sum, __ATOMIC_RELAXED);
}

// The same of the records of all peers.
template <int BITS>
HZ_APART void check_peers(const hz_bucket& bucket, Checked record, const Span& span) {
  for (uint32_t peer = 0; peer < bucket.outer; ++peer) {
    check<BITS>(record, bucket.block_size, span.begin, span.end, span.blocks);
    record.codes += step_of(bucket), record.scales += step_of(bucket);
    record.sum = (uint64_t*)((uint8_t*)record.sum + bucket.checks.step);
  }
}

// Integers in the low bits of words that stand for a vector's codes. `noise`: 16 bits for each element of the block;
// null to round to nearest.
template <class Type, int BITS, bool EASY>
HZ_INLINE Words rounded(const typename Type::type* x, uint32_t i, Floats scale, Floats reciprocal,
                        const uint16_t* noise) {
  if (EASY && sizeof(*x) == 2 && !noise) {
    // With at most 11 significant bits in x and 8 in the scale, a quotient that is not in the middle between two codes
    // is at least 2^-13 from it. So it may be rounded to a multiple of 2^-15 first, which is what 384 leaves room for;
    // that takes away what the reciprocal lacks, and leaves those in the middle there.
    const Floats coarse = fused(Type::widen(x + i), reciprocal, broadcast(384.0f));
    return (Words)((BITS == 8 ? coarse : smaller(coarse, broadcast(384.0f + highest<BITS>))) + (magic - 384.0f));
  }
  Floats quotient = quotient_of<EASY>(Type::widen(x + i), scale, reciprocal);
  if (noise) {
    const Ints bits = (Ints)load_halves(noise + i);
    const Floats moved = quotient + (__builtin_convertvector(bits, Floats) + 0.5f) * 0x1p-16f;
    const Floats nearest = (moved + magic) - magic;
    quotient = nearest + __builtin_convertvector(nearest > moved, Floats);  // a comparison that holds is -1
  }
  if (!EASY || noise) quotient = larger(quotient, broadcast(noise ? -highest<BITS> : lowest<BITS>));
  if (!EASY || noise || BITS < 8) quotient = smaller(quotient, broadcast(highest<BITS>));
  return (Words)(quotient + magic);
}

template <class Type, int BITS, bool EASY>
HZ_INLINE void codes_of(const typename Type::type* x, uint32_t all, float scale, float reciprocal,
                        const uint16_t* noise, uint8_t* codes) {
  const Floats divisor = broadcast(scale), factor = broadcast(reciprocal);
  uint32_t i = 0;
  for (; i + 2 * lanes <= all; i += 2 * lanes)
    Codes<BITS>::pack(codes + i * BITS / 8, rounded<Type, BITS, EASY>(x, i, divisor, factor, noise),
                      rounded<Type, BITS, EASY>(x, i + lanes, divisor, factor, noise));
  for (; i < all; i += lanes)
    Codes<BITS>::pack(codes + i * BITS / 8, rounded<Type, BITS, EASY>(x, i, divisor, factor, noise));
}

// Codes of one block.
template <class Type, int BITS>
HZ_INLINE void codes_of(const typename Type::type* x, uint32_t all, float scale, float reciprocal,
                        const uint16_t* noise, uint8_t* codes) {
  if (reciprocal != 0.0f && !noise)
    codes_of<Type, BITS, true>(x, all, scale, reciprocal, nullptr, codes);
  else if (reciprocal != 0.0f)
    codes_of<Type, BITS, true>(x, all, scale, reciprocal, noise, codes);
  else if (scale > 0.0f || scale < 0.0f)
    codes_of<Type, BITS, false>(x, all, scale, 0.0f, noise, codes);
  else  // zero or NaN
    std::memset(codes, 0, all * BITS / 8);
}

// 16 bits for stochastic rounding of each element of a block, two from one word. `column` is even.
HZ_INLINE void noise_of(uint32_t key, uint32_t column, uint32_t all, uint16_t* noise) {
  Words counting;
  for (int lane = 0; lane < lanes; ++lane) counting[lane] = column / 2 + lane;
  for (uint32_t i = 0; i < all; i += 2 * lanes, counting += lanes) store(noise + i, mix(counting ^ key));
}

// What is not finite becomes zero.
HZ_INLINE Words or_zero(Floats x) { return (Words)x & (Words)(magnitude(x) <= broadcast(0x1.fffffep127f)); }

struct Rounding {
  bool stochastic;
  uint32_t key, first_block;  // of the row, of the tensor
};

HZ_INLINE Rounding rounding_of(const hz_bucket& bucket, const hz_tensor& tensor, uint32_t row) {
  return {bucket.stochastic != 0, bucket.stochastic ? mix(Words{} + (row ^ bucket.key))[0] : 0, tensor.first_block};
}

// Encodes up to `batch` blocks of `size` elements, the last one of `last`; nothing that matters follows up to
// a multiple of 16. Scales are found for all of them first, so that no block waits for the divisions of its own.
template <class Type, int BITS>
HZ_INLINE void encode_blocks(const typename Type::type* x, uint32_t count, uint32_t last, uint32_t block,
                             uint32_t blocks, const hz_bucket& bucket, Rounding rounding, Checked record,
                             float* scales) {
  typedef typename Type::type Element;
  const uint32_t size = bucket.block_size;
  alignas(64) Element extremes[batch] = {};
  alignas(64) float reciprocals[batch];
  alignas(64) uint16_t noise[512];
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t bits = extreme_of<Element, BITS>(x + i * size, ((i + 1 < count ? size : last) + 15) & ~15u);
    std::memcpy(extremes + i, &bits, sizeof(Element));
  }
  scales_of<Type, BITS>(extremes, bucket.limit, rounding.stochastic, scales, reciprocals);
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t all = ((i + 1 < count ? size : last) + 15) & ~15u, column = (block + i) * size;
    if (rounding.stochastic) noise_of(rounding.key, rounding.first_block * size + column, all, noise);
    uint8_t* codes = record.codes + (size_t)column * BITS / 8;
    codes_of<Type, BITS>(x + i * size, all, scales[i], reciprocals[i], rounding.stochastic ? noise : nullptr, codes);
    if (BITS < 8 && block + i + 1 == blocks) std::memset(codes + all * BITS / 8, 0, -((column + all) * BITS / 8) & 15);
    store_scale(record.scales, block + i, blocks, scales[i], is_tiny(record));
  }
  if (record.sum) check<BITS>(record, size, block, block + count, blocks);
}

// ---- residuals -----------------------------------------------------------------------------------------------------

HZ_INLINE void add_residuals(const hz_bucket& bucket, const hz_tensor& tensor, int64_t at, uint32_t count,
                             float* sums) {
  if (bucket.kept_bytes == 2) {
    const uint16_t* residual = (const uint16_t*)tensor.residual + at;
    for (uint32_t i = 0; i < count; ++i) sums[i] += float_of((uint32_t)residual[i] << 16) * tensor.factor;
  } else {
    const float* residual = (const float*)tensor.residual + at;
    for (uint32_t i = 0; i < count; ++i) sums[i] += residual[i] * tensor.factor;
  }
}

// Keeps what was lost: numbers that are finite, up to a multiple of 16 of them.
HZ_INLINE void keep(const hz_bucket& bucket, const hz_tensor& tensor, int64_t at, uint32_t count, const float* lost) {
  if (bucket.kept_bytes == 2) {
    alignas(64) uint16_t kept[buffer];
    for (uint32_t i = 0; i < count; i += lanes) Bf16::narrow(kept + i, load<Floats>(lost + i));
    std::memcpy((uint16_t*)tensor.left + at, kept, count * sizeof(uint16_t));
  } else {
    std::memcpy((float*)tensor.left + at, lost, count * sizeof(float));
  }
}

// ---- the four families, on blocks `begin` to `end` of a row's record ------------------------------------------------

template <class Type, int BITS>
static void encode(const hz_bucket& bucket, const Span& span) {
  typedef typename Type::type Element;
  const hz_tensor& tensor = *span.tensor;
  const uint32_t size = bucket.block_size;
  const int64_t first = shard_of(bucket, span.row) * tensor.chunk;
  const int64_t present = between(0, tensor.numel - first, tensor.chunk);
  const Checked record = record_at(bucket.checks, bucket.payload, bucket.row_bytes, bucket.inner, tensor.start,
                                   tensor.record_bytes, tensor.scales, span.row);
  const Rounding rounding = rounding_of(bucket, tensor, span.row);
  alignas(64) Element padded[buffer];
  alignas(64) float sums[buffer], scales[batch];
  uint32_t count;
  for (uint32_t block = span.begin; block < span.end; block += count) {
    const int64_t at = (int64_t)block * size;
    const Element* x = (const Element*)tensor.data + first + at;
    // A batch of whole blocks; what is cut short, rotated, or has residuals goes through a buffer.
    const bool plain = !tensor.residual && !tensor.left && !bucket.rotation;
    const int64_t whole = between(0, present - at, plain ? (int64_t)size * batch : buffer) / size;
    count = (uint32_t)between(0, between(0, whole, batch), span.end - block);
    if (count && plain) {
      encode_blocks<Type, BITS>(x, count, size, block, span.blocks, bucket, rounding, record, scales);
      continue;
    }
    count = count ? count : 1;
    const uint32_t length = (uint32_t)between(0, tensor.chunk - at, count * size), all = (length + 15) & ~15u;
    const uint32_t here = (uint32_t)between(0, present - at, length);
    if (here) std::memcpy(padded, x, here * sizeof(Element));
    std::memset(padded + here, 0, (all - here) * sizeof(Element));
    if (plain) {
      encode_blocks<Type, BITS>(padded, count, length - (count - 1) * size, block, span.blocks, bucket, rounding,
                                record, scales);
      continue;
    }
    for (uint32_t i = 0; i < all; i += lanes) store(sums + i, Type::widen(padded + i));
    if (tensor.residual) add_residuals(bucket, tensor, first + at, here, sums);
    if (bucket.rotation) hadamard(bucket, sums, length, 1.0f / bucket.rotation);
    encode_blocks<Fp32, BITS>(sums, count, length - (count - 1) * size, block, span.blocks, bucket, rounding, record,
                              scales);
    if (!tensor.left) continue;
    for (uint32_t i = 0; i < all; i += lanes) {
      const Floats codes = Codes<BITS>::unpack(record.codes + (at + i) * BITS / 8);
      // A block that is not finite keeps nothing: its codes say nothing of it.
      store(sums + i, or_zero(load<Floats>(sums + i) - codes * scales[i / size]));
    }
    if (bucket.rotation) {
      hadamard(bucket, sums, length, 1.0f);
      for (uint32_t i = 0; i < all; i += lanes) store(sums + i, or_zero(load<Floats>(sums + i)));  // an overflow
    }
    keep(bucket, tensor, first + at, here, sums);
  }
}

template <class Type, int BITS>
static void decode(const hz_bucket& bucket, const Span& span) {
  typedef typename Type::type Element;
  const hz_tensor& tensor = *span.tensor;
  const Checked record = record_at(bucket.checks, bucket.payload, bucket.row_bytes, bucket.inner, tensor.start,
                                   tensor.record_bytes, tensor.scales, span.row);
  if (record.sum) check<BITS>(record, bucket.block_size, span.begin, span.end, span.blocks);
  Element* target = (Element*)tensor.data + shard_of(bucket, span.row) * tensor.chunk;
  alignas(64) Element padded[buffer];
  alignas(64) float values[buffer];
  for (uint32_t block = span.begin; block < span.end; ++block) {
    const int64_t at = (int64_t)block * bucket.block_size;
    const uint32_t count = (uint32_t)between(0, tensor.chunk - at, bucket.block_size), whole = count & ~15u;
    const uint8_t* codes = record.codes + at * BITS / 8;
    const float scale = load_scale(record.scales, block);
    Element* to = target + at;
    if (bucket.rotation) {
      const uint32_t all = (count + 15) & ~15u;
      for (uint32_t i = 0; i < all; i += lanes) store(values + i, Codes<BITS>::unpack(codes + i * BITS / 8) * scale);
      hadamard(bucket, values, count, 1.0f);
      for (uint32_t i = 0; i < all; i += lanes) {
        const Floats value = load<Floats>(values + i);
        const Words number = (Words)(value == value);  // bits of a NaN would be carried on into its sign
        Type::narrow(padded + i, (Floats)(((Words)value & number) | (~number & 0x7fc00000)));
      }
      std::memcpy(to, padded, count * sizeof(Element));
      continue;
    }
    if (scale != scale) {
      for (uint32_t i = 0; i < count; ++i) to[i] = Type::nan();
      continue;
    }
    for (uint32_t i = 0; i < whole; i += lanes) Type::narrow(to + i, Codes<BITS>::unpack(codes + i * BITS / 8) * scale);
    if (whole == count) continue;
    for (uint32_t i = 0; i < 16; i += lanes)
      Type::narrow(padded + i, Codes<BITS>::unpack(codes + (whole + i) * BITS / 8) * scale);
    std::memcpy(to + whole, padded, (count - whole) * sizeof(Element));
  }
}

// sum + code * scale, each rounded; EASY where products are exact, as they are unless they overflow.
template <bool EASY>
HZ_INLINE Floats added(Floats sum, Floats codes, Floats scale) {
  return EASY ? fused(codes, scale, sum) : sum + codes * scale;
}

// Adds a block of PEERS peers, in their order, to `sums`, or starts them.
template <int BITS, int PEERS, bool EASY>
HZ_INLINE void add_peers(const uint8_t* codes, const Floats* scales, int64_t step, uint32_t all, bool starts,
                         float* sums) {
  uint32_t i = 0;
  if (BITS == 4)
    for (; i + 2 * lanes <= all; i += 2 * lanes) {
      Floats even, odd, first, second;
      Codes<4>::unpack(codes + i / 2, even, odd);
      if (starts) {
        even = even * scales[0], odd = odd * scales[0];
      } else {
        split(load<Floats>(sums + i), load<Floats>(sums + i + lanes), first, second);
        even = added<EASY>(first, even, scales[0]), odd = added<EASY>(second, odd, scales[0]);
      }
      for (int k = 1; k < PEERS; ++k) {
        Codes<4>::unpack(codes + k * step + i / 2, first, second);
        even = added<EASY>(even, first, scales[k]), odd = added<EASY>(odd, second, scales[k]);
      }
      merge(even, odd, first, second);
      store(sums + i, first);
      store(sums + i + lanes, second);
    }
  for (; i < all; i += lanes) {
    Floats sum = Codes<BITS>::unpack(codes + i * BITS / 8);
    sum = starts ? sum * scales[0] : added<EASY>(load<Floats>(sums + i), sum, scales[0]);
    for (int k = 1; k < PEERS; ++k)
      sum = added<EASY>(sum, Codes<BITS>::unpack(codes + k * step + i * BITS / 8), scales[k]);
    store(sums + i, sum);
  }
}

template <int BITS, int PEERS>
HZ_INLINE void add_peers(Record first, int64_t step, uint32_t block, uint32_t size, uint32_t all, bool starts,
                         float* sums) {
  const uint8_t* codes = first.codes + (int64_t)block * size * BITS / 8;
  Floats scales[PEERS];
  uint32_t largest_scale = 0;
  for (int k = 0; k < PEERS; ++k) {
    const float scale = load_scale(first.scales + k * step, block);
    const uint32_t bits = bits_of(scale) & 0x7fffffff;
    scales[k] = broadcast(scale);
    largest_scale = largest_scale > bits ? largest_scale : bits;
  }
  if (has_fused && largest_scale < 247u << 23)  // 2^120: no product overflows
    add_peers<BITS, PEERS, true>(codes, scales, step, all, starts, sums);
  else
    add_peers<BITS, PEERS, false>(codes, scales, step, all, starts, sums);
}

// Sums `count` elements of one block over the peers, in their order, or `adds` them to sums that are there. What
// follows up to a multiple of 16 is zero, or NaN where the whole block is.
template <int BITS>
HZ_INLINE void sum_block(const hz_bucket& bucket, Record first, int64_t step, uint32_t block, uint32_t count, bool adds,
                         float* sums) {
  const uint32_t all = (count + 15) & ~15u, size = bucket.block_size;
  uint32_t peer = 0;
  // Four at a time, so that partial sums seldom go through memory.
  for (; peer + 4 <= bucket.outer; peer += 4, first.codes += 4 * step, first.scales += 4 * step)
    add_peers<BITS, 4>(first, step, block, size, all, peer == 0 && !adds, sums);
  for (; peer < bucket.outer; ++peer, first.codes += step, first.scales += step)
    add_peers<BITS, 1>(first, step, block, size, all, peer == 0 && !adds, sums);
}

template <int BITS>
static void decode_sum(const hz_bucket& bucket, const Span& span) {
  const hz_tensor& tensor = *span.tensor;
  const Checked first = record_at(bucket.checks, bucket.payload, bucket.row_bytes, bucket.inner, tensor.start,
                                  tensor.record_bytes, tensor.scales, span.row);
  if (first.sum) check_peers<BITS>(bucket, first, span);
  const int64_t step = step_of(bucket);
  alignas(64) float padded[buffer];
  for (uint32_t block = span.begin; block < span.end; ++block) {
    const int64_t at = (int64_t)block * bucket.block_size;
    const uint32_t count = (uint32_t)between(0, tensor.chunk - at, bucket.block_size);
    const int64_t place = span.row * (int64_t)tensor.chunk + at;
    float* target = (float*)tensor.data + place;
    float* sums = count % 16 ? padded : target;
    const float* before = tensor.residual ? (const float*)tensor.residual + place : nullptr;
    if (bucket.rotation) {
      sum_block<BITS>(bucket, first, step, block, count, false, padded);
      hadamard(bucket, padded, count, 1.0f);
      for (uint32_t i = 0; i < count; ++i) target[i] = before ? before[i] + padded[i] : padded[i];
      continue;
    }
    if (before && before != sums) std::memcpy(sums, before, count * sizeof(float));
    if (before) std::memset(sums + count, 0, (-count & 15) * sizeof(float));
    sum_block<BITS>(bucket, first, step, block, count, before != nullptr, sums);
    if (count % 16) std::memcpy(target, padded, count * sizeof(float));
  }
}

template <int BITS, int OUT_BITS>
static void decode_sum_encode(const hz_bucket& bucket, const Span& span) {
  const hz_tensor& tensor = *span.tensor;
  const uint32_t size = bucket.block_size;
  const Checked first = record_at(bucket.checks, bucket.payload, bucket.row_bytes, bucket.inner, tensor.start,
                                  tensor.record_bytes, tensor.scales, span.row);
  const Checked record = record_at(bucket.out_checks, bucket.out_payload, bucket.out_row_bytes, bucket.out_inner,
                                   tensor.out_start, tensor.out_record_bytes, tensor.out_scales, span.row);
  if (first.sum) check_peers<BITS>(bucket, first, span);
  const int64_t step = step_of(bucket);
  const Rounding rounding = rounding_of(bucket, tensor, span.row);
  alignas(64) float sums[buffer], scales[batch];
  uint32_t count;
  for (uint32_t block = span.begin; block < span.end; block += count) {
    count = (uint32_t)between(1, buffer / size, batch);
    count = (uint32_t)between(0, count, span.end - block);
    uint32_t length = 0;
    for (uint32_t i = 0; i < count; ++i) {
      length = (uint32_t)between(0, tensor.chunk - (int64_t)(block + i) * size, size);
      sum_block<BITS>(bucket, first, step, block + i, length, false, sums + i * size);
      std::memset(sums + i * size + length, 0,
                  (-length & 15) * sizeof(float));  // a tiny record's scale was among the codes
    }
    encode_blocks<Fp32, OUT_BITS>(sums, count, length, block, span.blocks, bucket, rounding, record, scales);
  }
}

}  // namespace HZ_ISA
}  // namespace hz

#include "copy.h"
#include "exact.h"
#include "mpc.h"
#include "zfp.h"

namespace hz {
namespace HZ_ISA {

extern const Kernels kernels;
const Kernels kernels = {
#define HZ_ENTRY(name, ...) __VA_ARGS__,
    HZ_EACH_KERNEL(HZ_ENTRY)
#undef HZ_ENTRY
#define HZ_ENTRY(name) name,
        HZ_EACH_EXACT(HZ_ENTRY)
#undef HZ_ENTRY
            checksum,
};

}  // namespace HZ_ISA
}  // namespace hz
