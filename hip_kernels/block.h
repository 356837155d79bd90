// What the kernel families share: where a workgroup's work lies, 16 elements a thread in and out of memory, and the
// arithmetic of a block as docs/payload_format.md fixes it.
//
// A block is shared by `lanes` successive threads of a workgroup, 16 of its elements each, so that a load of bfloat16
// and a store of int8 codes are 16 bytes wide. The longest block has 512 elements, so that every wave has it whole.
#pragma once
#include "shim.h"

namespace hz {

constexpr hz_u32 longest_block = 512;

struct alignas(16) Words {
  hz_u32 word[4];
};
struct alignas(8) Pair {
  hz_u32 word[2];
};

// ---- where ---------------------------------------------------------------------------------------------------------

// What a thread works on: a tensor's record, and in it the block and the 16 elements from `element` on.
struct Place {
  const hz_tensor& tensor;
  hz_u32 row, block, blocks, lane, element;
  bool has_elements;  // of the record; the last threads may have none
};

HZ_DEVICE hz_u32 quotient(hz_u32 number, const hz_divisor& by) {
  return (hz_u32)((hz_u64)number * by.factor >> by.shift);
}

// The last tensor whose first workgroup is this one or before: the first lanes compare four each, and the wave counts.
HZ_DEVICE hz_u32 tensor_of(const hz_u32 (&first_group)[HZ_BUCKET_GROUPS]) {
  Words firsts = {{~0u, ~0u, ~0u, ~0u}};
  if (thread() % HZ_WAVE < HZ_BUCKET_GROUPS / 4) firsts = ((const Words*)first_group)[thread() % HZ_WAVE];
  hz_u32 index = ~0u;
#pragma unroll
  for (int i = 0; i < 4; ++i) index += lanes_with(firsts.word[i] <= workgroup());
  return index;
}

// Threads share the blocks of all rows of a tensor, row by row, however few a row has: at tens of thousands of ranks a
// matrix has a few blocks in each record, and a bias one element.
HZ_DEVICE Place place(const hz_bucket& bucket) {
  const hz_u32 index = tensor_of(bucket.first_group);
  const hz_tensor& tensor = bucket.tensor[index];
  const hz_u32 together = 8 - tensor.lanes_shift;  // 2^together blocks
  const hz_u32 group = workgroup() - bucket.first_group[index];
  const hz_u32 number = (group << together) + (thread() >> tensor.lanes_shift);
  const hz_u32 row = quotient(number, tensor.by_blocks), block = number - row * tensor.blocks;
  const hz_u32 lane = thread() & ((1u << tensor.lanes_shift) - 1), element = block * bucket.block_size + lane * 16;
  return Place{tensor,
               row,
               block,
               tensor.blocks,
               lane,
               element,
               lane * 16 < bucket.block_size && element < tensor.chunk && row < bucket.rows};
}
static_assert(HZ_THREADS == 1 << 8 && HZ_BUCKET_GROUPS / 4 <= HZ_WAVE, "tensor_of() and place() count on it");

HZ_DEVICE hz_i64 shard_of(const hz_bucket& bucket, hz_u32 row) {
  hz_i64 shard = 0;
#pragma unroll 1
  for (int axis = (int)bucket.axes - 1; axis >= 0; --axis) {
    const hz_u32 before = quotient(row, bucket.by_sizes[axis]);
    shard += (hz_i64)(row - before * bucket.sizes[axis]) * bucket.strides[axis];
    row = before;
  }
  return shard;
}

// A record's address: row `row` of pieces of `inner` rows, with a checksum behind every part.
HZ_DEVICE hz_u8* record_at(const hz_checks& checks, hz_u64 payload, hz_i64 row_bytes, hz_u32 inner,
                           const hz_divisor& by_inner, hz_i64 start, hz_u32 record_bytes, hz_u32 row) {
  const hz_u32 piece = quotient(row, by_inner);
  hz_u8* first = pointer<hz_u8>(payload);
  if (checks.sums) first += (hz_i64)quotient(piece, checks.by_pieces) * HZ_CHECKSUM_BYTES;
  return first + (hz_i64)piece * inner * row_bytes + inner * start + (hz_i64)(row - piece * inner) * record_bytes;
}

// Elements that a row's record takes from the tensor: fewer than a chunk where the tensor ends.
HZ_DEVICE hz_u32 present(const hz_tensor& tensor, hz_i64 first) {
  const hz_i64 rest = tensor.numel - first;
  return rest < 0 ? 0 : rest < tensor.chunk ? (hz_u32)rest : tensor.chunk;
}

// ---- elements ------------------------------------------------------------------------------------------------------

HZ_DEVICE hz_u16 to_bf16(float x) {
  const hz_u32 bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return (hz_u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Element types: bytes, and conversion of elements that were read as words.
struct Fp32 {
  enum { bytes = 4 };
  typedef float type;
  HZ_DEVICE float widen(float x) { return x; }
  HZ_DEVICE float narrow(float x) { return x; }
};
struct Bf16 {
  enum { bytes = 2 };
  typedef hz_u16 type;
  HZ_DEVICE float widen(hz_u16 x) { return float_of((hz_u32)x << 16); }
  HZ_DEVICE hz_u16 narrow(float x) { return to_bf16(x); }
  HZ_DEVICE hz_u32 two(float low, float high) { return two_bf16(low, high); }
};
struct Fp16 {
  enum { bytes = 2 };
  typedef hz_u16 type;
  HZ_DEVICE float widen(hz_u16 x) { return from_half(x); }
  HZ_DEVICE hz_u16 narrow(float x) { return to_half(x); }
  HZ_DEVICE hz_u32 two(float low, float high) { return to_half(low) | (hz_u32)to_half(high) << 16; }
};

// Rotates registers by N. A loop over a part of them that rotates them each time indexes no register by a variable, and
// holds the temporaries of that part alone.
template <int N, class T, int COUNT>
HZ_DEVICE void rotate(T (&x)[COUNT]) {
  T first[N];
#pragma unroll
  for (int i = 0; i < N; ++i) first[i] = x[i];
#pragma unroll
  for (int i = 0; i < COUNT - N; ++i) x[i] = x[i + N];
#pragma unroll
  for (int i = 0; i < N; ++i) x[COUNT - N + i] = first[i];
}

// What changes no number that is added to it, -0 included.
HZ_DEVICE void no_sums(float (&sums)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) sums[i] = -0.0f;
}

// Elements of which only the bits matter.
template <int BYTES>
struct Bits {
  enum { bytes = BYTES };
  typedef hz_u8 type;
};
template <>
struct Bits<2> {
  enum { bytes = 2 };
  typedef hz_u16 type;
};
template <>
struct Bits<4> {
  enum { bytes = 4 };
  typedef hz_u32 type;
};

// ---- elements in memory ---------------------------------------------------------------------------------------------
//
// Each thread moves 16 elements of a shard. Shards start wherever the ones before them end, so these elements may start
// anywhere between two multiples of 16 bytes. Reads and writes are 16 bytes wide at multiples of 16 bytes all the same:
// a thread reads the vectors that its elements touch and cuts them out in registers. It writes the vectors in which its
// elements start, all but the last one it fills; what the first one lacks comes from the lane before.

// Elements of BYTES that start `shift` bytes, below 16, behind the first byte of `words`: to its beginning. In steps
// that take no further registers; what comes to stand in the last vector is of no meaning.
template <int BYTES, int COUNT>
HZ_DEVICE void cut(Words (&words)[COUNT], hz_u32 shift) {
  if (shift & 8)
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const Words one = words[i], next = words[i + 1 < COUNT ? i + 1 : i];
      words[i] = Words{{one.word[2], one.word[3], next.word[0], next.word[1]}};
    }
  if (shift & 4)
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const Words one = words[i], next = words[i + 1 < COUNT ? i + 1 : i];
      words[i] = Words{{one.word[1], one.word[2], one.word[3], next.word[0]}};
    }
  const hz_u32 bits = shift % 4 * 8;
  if (BYTES < 4)
#pragma unroll
    for (int i = 0; i + 1 < COUNT; ++i) {
      const Words one = words[i];
      words[i] = Words{{funnel(one.word[1], one.word[0], bits), funnel(one.word[2], one.word[1], bits),
                        funnel(one.word[3], one.word[2], bits), funnel(words[i + 1].word[0], one.word[3], bits)}};
    }
}

// Up to 16 elements of a shard of so many BYTES each, from `element` on; zeros beyond `count`.
template <int BYTES>
HZ_DEVICE void read(const void* shard, hz_u32 element, int count, Words (&words)[BYTES]) {
  const hz_u32 shift = (hz_u64)shard % 16;
  if (count > 0) {
    const Words* first = (const Words*)((const hz_u8*)shard + (hz_u64)element * BYTES - shift);
    // Threads with fewer elements read their last vector again: no address lies beyond it.
    const int end = (int)shift + (count < 16 ? count : 16) * BYTES, last = (end - 1) / 16;
    Words touched[BYTES + 1];
#pragma unroll
    for (int i = 0; i <= BYTES; ++i) {
      const int vector = i < last ? i : last;
      if (i < BYTES || shift)
        touched[i] = load_wide(first + vector, vector ? 0 : shift, vector < last ? 16 : end - last * 16);
    }
    if (shift) cut<BYTES>(touched, shift);
#pragma unroll
    for (int i = 0; i < BYTES; ++i) words[i] = touched[i];
  }
  if (count < 16)
#pragma unroll
    for (int i = 0; i < 4 * BYTES; ++i) {
      const int bits = (count > 0 ? count * BYTES * 8 : 0) - i * 32;
      words[i / 4].word[i % 4] &= bits >= 32 ? ~0u : bits > 0 ? (1u << bits) - 1 : 0;
    }
}

// Chosen among values: a choice among places would need them in memory.
HZ_DEVICE hz_u32 word_of(const Words& vector, hz_u32 index) {
  const hz_u32 a = vector.word[0], b = vector.word[1], c = vector.word[2], d = vector.word[3];
  const hz_u32 low = index & 1 ? b : a, high = index & 1 ? d : c;
  return index & 2 ? high : low;
}

// Bytes `begin` to 16, or 0 to `end`, of a vector of elements of BYTES, in as few accesses as their addresses allow.
template <int BYTES>
HZ_DEVICE void store_from(hz_u8* to, const Words& vector, hz_u32 begin) {
  hz_u32 at = begin;
  if (BYTES < 2 && at & 1) {
    store_to((hz_u8*)(to + at), (hz_u8)(word_of(vector, at / 4) >> at % 4 * 8));
    at += 1;
  }
  if (BYTES < 4 && at & 2) {
    store_to((hz_u16*)(to + at), (hz_u16)(word_of(vector, at / 4) >> 16));
    at += 2;
  }
  if (at & 4) {
    store_to((hz_u32*)(to + at), word_of(vector, at / 4));
    at += 4;
  }
  if (at == 8) store_to((Pair*)(to + 8), Pair{{vector.word[2], vector.word[3]}});
}
template <int BYTES>
HZ_DEVICE void store_until(hz_u8* to, const Words& vector, hz_u32 end) {
  if (end & 8) store_to((Pair*)to, Pair{{vector.word[0], vector.word[1]}});
  if (end & 4) store_to((hz_u32*)(to + (end & 8)), word_of(vector, end / 4 & 2));
  if (BYTES < 4 && end & 2) store_to((hz_u16*)(to + (end & 12)), (hz_u16)word_of(vector, end / 4));
  if (BYTES < 2 && end & 1) store_to((hz_u8*)(to + (end & 14)), (hz_u8)(word_of(vector, end / 4) >> (end & 2) * 8));
}

// Writes up to 16 elements of a shard, those of the thread's place: `count` are left of its `whole` ones. Every thread
// of the workgroup calls it.
template <int BYTES>
HZ_DEVICE void write(const hz_bucket& bucket, const Place& at, void* shard, int whole, int count,
                     Words (&words)[BYTES]) {
  const hz_u32 shift = (hz_u64)shard % 16;
  hz_u8* const first = (hz_u8*)shard + (hz_u64)at.element * BYTES - shift;
  Words moved[BYTES + 2];
  if (shift || at.tensor.chunk % (16 / BYTES))  // the same in all threads of a wave, which may have several shards
#pragma unroll
    for (int i = 0; i < 4; ++i) moved[0].word[i] = of_lane_before(words[BYTES - 1].word[i]);
  if (!shift) {
    if (count >= 16)
#pragma unroll
      for (int i = 0; i < BYTES; ++i) store_to((Words*)first + i, words[i]);
  } else if (count >= 16) {
#pragma unroll
    for (int i = 0; i < BYTES; ++i) moved[i + 1] = words[i];
    moved[BYTES + 1] = Words{{0, 0, 0, 0}};
    cut<BYTES>(moved, 16 - shift);
    // The next block is the next thread's if all that share a block have elements.
    const hz_u32 lanes = bucket.block_size / 16;
    const bool runs_on = at.blocks > 1 && lanes == 1u << at.tensor.lanes_shift;
    if (thread() % HZ_WAVE && count != whole && (at.lane || runs_on))
      // Successive registers, which kernels with elements of four bytes do not have.
      BYTES < 4 ? store_at_once((Words*)first, moved[0]) : store_to((Words*)first, moved[0]);
    else
      store_from<BYTES>(first, moved[0], shift);
#pragma unroll
    for (int i = 1; i < BYTES; ++i) store_to((Words*)first + i, moved[i]);
    // The next thread fills up the last vector if it has 16 elements too.
    if (count < 32 || (thread() + 1) % HZ_WAVE == 0 || (at.lane + 1 == lanes && !runs_on))
      store_until<BYTES>(first + 16 * BYTES, moved[BYTES], shift);
  }
  if (count > 0 && count < 16) {
#pragma unroll 1
    for (int done = 0; done < 16; done += 16 / BYTES) {
#pragma unroll
      for (int i = 0; i < 16 / BYTES; ++i) {
        hz_u8* const to = first + shift + (done + i) * BYTES;
        const hz_u32 word = words[0].word[i * BYTES / 4] >> i * BYTES % 4 * 8;
        if (done + i >= count) continue;
        if (BYTES == 4)
          store_to((hz_u32*)to, word);
        else if (BYTES == 2)
          store_to((hz_u16*)to, (hz_u16)word);
        else
          store_to(to, (hz_u8)word);
      }
      if (BYTES > 1) rotate<1>(words);
    }
  }
}

// Element `i` of such words as float32.
template <class Type>
HZ_DEVICE float element_of(const Words (&words)[Type::bytes], int i) {
  const hz_u32 word = words[i * Type::bytes / 16].word[i * Type::bytes / 4 % 4];
  return Type::bytes == 4 ? float_of(word) : Type::widen((typename Type::type)(word >> i * Type::bytes % 4 * 8));
}

// 16 elements as words. EXACT: each NaN becomes the one of docs/payload_format.md; otherwise those that arithmetic
// made, or that were of this type, some NaN.
template <class Type, bool EXACT = true>
HZ_DEVICE void words_of(const float (&x)[16], Words (&words)[Type::bytes]) {
#pragma unroll
  for (int i = 0; i < 4 * Type::bytes; ++i) {
    hz_u32& word = words[i / 4].word[i % 4];
    if constexpr (Type::bytes == 4)
      word = bits_of(x[i]);
    else if constexpr (EXACT)
      word = Type::narrow(x[2 * i]) | (hz_u32)Type::narrow(x[2 * i + 1]) << 16;
    else
      word = Type::two(x[2 * i], x[2 * i + 1]);
  }
}

// Up to 16 elements as float32, +0 beyond `count`.
template <class Type>
HZ_DEVICE void load(const typename Type::type* shard, hz_u32 element, int count, float (&x)[16]) {
  Words words[Type::bytes];
  read<Type::bytes>(shard, element, count, words);
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = element_of<Type>(words, i);
}

template <class Type>
HZ_DEVICE void store(const hz_bucket& bucket, const Place& at, typename Type::type* shard, int whole, int count,
                     float (&x)[16]) {
  Words words[Type::bytes];
  words_of<Type, false>(x, words);
  write<Type::bytes>(bucket, at, shard, whole, count, words);
}

// The same from a record of elements and to one, which is padded to 16 bytes: whole ones, zeros behind the last
// element. `own` is where the thread's 16 elements start.
template <int BYTES>
HZ_DEVICE Words* own_of(hz_u8* record, const Place& at) {
  return (Words*)record + (hz_u64)(at.element / 16) * BYTES;
}

template <int BYTES>
HZ_DEVICE void load_elements(const Words* own, const Place& at, Words (&words)[BYTES]) {
  const hz_u32 rest = at.has_elements ? at.tensor.chunk - at.element : 0;
#pragma unroll
  for (int i = 0; i < BYTES; ++i)
    words[i] = i * (16 / BYTES) < (int)(rest < 16 ? rest : 16) ? own[i] : Words{{0, 0, 0, 0}};
}

template <int BYTES>
HZ_DEVICE void store_elements(Words* own, const Place& at, const Words (&words)[BYTES]) {
  const hz_u32 rest = at.has_elements ? at.tensor.chunk - at.element : 0;
#pragma unroll
  for (int i = 0; i < BYTES; ++i)
    if (i * (16 / BYTES) < (int)(rest < 16 ? rest : 16)) own[i] = words[i];
}

// ---- rotation ------------------------------------------------------------------------------------------------------

template <int DISTANCE>
HZ_DEVICE void butterflies(float (&x)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i)
    if (!(i & DISTANCE)) {
      const float a = x[i], b = x[i + DISTANCE];
      x[i] = add(a, b);
      x[i + DISTANCE] = sub(a, b);
    }
}

// The same between the threads of a group, each with 16 of its elements.
template <int M>
HZ_DEVICE void butterflies_of_lanes(float (&x)[16], bool is_whole) {
  // Half at a time where an exchange takes two steps: sixteen side by side take more registers than the rest of the
  // kernel.
#pragma unroll M == 4 ? 1 : 2
  for (int done = 0; done < 16; done += 8) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float other = float_of(swap_lanes<M>(bits_of(x[i])));
      const float turned = thread() & M ? sub(other, x[i]) : add(x[i], other);
      x[i] = is_whole ? turned : x[i];
    }
    rotate<8>(x);
  }
}

// Rotates the groups of all blocks that consist of such groups: a Walsh-Hadamard transform, the nearest elements first.
// Every thread of the workgroup calls it; those without elements have numbers of no meaning.
HZ_DEVICE void hadamard(const hz_bucket& bucket, const Place& at, float (&x)[16], float factor) {
  const hz_u32 chunk = at.tensor.chunk;
  const bool is_whole = at.element < (chunk % bucket.rotation ? chunk / bucket.block_size * bucket.block_size : chunk);
  if (is_whole) {
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = mul(x[i], factor);
    butterflies<1>(x);
    butterflies<2>(x);
    butterflies<4>(x);
    butterflies<8>(x);
  }
  butterflies_of_lanes<1>(x, is_whole);
  butterflies_of_lanes<2>(x, is_whole);
  if (bucket.rotation == 128) butterflies_of_lanes<4>(x, is_whole);
}

// ---- codes ---------------------------------------------------------------------------------------------------------

// The codes of BITS bits: those of int8 are symmetric.
template <int BITS>
struct Codes {
  enum { highest = (1 << (BITS - 1)) - 1, lowest = BITS == 8 ? -highest : -highest - 1 };
};

// The 16 codes of vector `vector` of a record; `all` vectors in it. Writes the padding after the last one too.
template <int BITS>
HZ_DEVICE void store_codes(hz_u8* record, hz_u32 vector, hz_u32 all, const hz_u32 (&words)[BITS / 2]) {
  if constexpr (BITS == 8) {
    Words whole;
#pragma unroll
    for (int i = 0; i < 4; ++i) whole.word[i] = words[i];
    ((Words*)record)[vector] = whole;
  } else {
    Pair pair = {{words[0], words[1]}};
    ((Pair*)record)[vector] = pair;
    if (vector + 1 == all && vector % 2 == 0) ((Pair*)record)[vector + 1] = Pair{{0, 0}};
  }
}

// Whether a record has its codes and its scale in 16 bytes, the scale last.
HZ_DEVICE bool is_tiny(hz_u32 scales) { return scales % 16 != 0; }

// 16 codes of a record, packed, and as float32 times 2^(8 - BITS): each in the high bits of a byte, from which one
// instruction converts. Decoding multiplies by `unit_of` the scale instead, which has the same product.
template <int BITS>
HZ_DEVICE void load_codes(const hz_u8* record, hz_u32 scales, hz_u32 vector, hz_u32 (&words)[BITS / 2],
                          float (&codes)[16]) {
  if constexpr (BITS == 8) {
    const Words whole = ((const Words*)record)[vector];
#pragma unroll
    for (int i = 0; i < BITS / 2; ++i) words[i] = whole.word[i];
  } else {
    const Pair pair = ((const Pair*)record)[vector];
    words[0] = pair.word[0];
    words[1] = pair.word[1];
  }
  if (is_tiny(scales) && vector == 6 / BITS) words[BITS / 2 - 1] &= 0xffffu;  // the scale is no codes
  constexpr int of_byte = 8 / BITS;
  constexpr hz_u32 highest = (0x100 - (1 << (8 - BITS))) * 0x01010101u;
#pragma unroll
  for (int word = 0; word < BITS / 2; ++word)
#pragma unroll
    for (int place = 0; place < of_byte; ++place) {
      const hz_u32 bytes = BITS == 8 ? words[word] : anew(words[word] << (8 - BITS - place * BITS) & highest);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        codes[word * 32 / BITS + i * of_byte + place] = (float)((int)(bytes << (24 - 8 * i)) >> 24);
    }
}

// Exact even for the smallest scale, 2^-133.
template <int BITS>
HZ_DEVICE float unit_of(float scale) {
  return BITS == 8 ? scale : mul(scale, 1.0f / (1 << (8 - BITS)));
}

HZ_DEVICE float as_bf16(float x) { return float_of((hz_u32)to_bf16(x) << 16); }

// The next bfloat16 that is not below a number, which is not negative.
HZ_DEVICE float up_to_bf16(float x) { return float_of((bits_of(x) + 0xffffu) & 0xffff0000u); }

// A block's scale, which its first thread reads for all of them. Every thread of the workgroup calls it.
HZ_DEVICE float load_scale(const hz_u8* scales, const Place& at) {
  hz_u32 bits = 0;
  if (at.has_elements && !at.lane) bits = (hz_u32)((const hz_u16*)scales)[at.block] << 16;
  return float_of(of_lane(bits, thread() - at.lane));
}

// Where the scales end that a block writes and adds to a checksum: its own, behind the last one of a record the
// padding. The thread of a block's first elements does so, of a tiny record that of the last ones, which writes the
// codes beside it.
HZ_DEVICE hz_u32 scales_end(const Place& at, hz_u32 scales) {
  if (is_tiny(scales)) return at.element + 16 >= at.tensor.chunk ? 1 : 0;
  return at.lane ? 0 : at.block + 1 == at.blocks ? (at.blocks + 7) / 8 * 8 : at.block + 1;
}

HZ_DEVICE hz_u32 mix(hz_u32 word) {
  word = (word ^ word >> 16) * 0x7feb352du;
  word = (word ^ word >> 15) * 0x846ca68bu;
  return word ^ word >> 16;
}

struct Largest {
  HZ_DEVICE hz_u32 of(hz_u32 a, hz_u32 b) { return a > b ? a : b; }
};
struct Smallest {
  HZ_DEVICE hz_u32 of(hz_u32 a, hz_u32 b) { return a < b ? a : b; }
};

// ---- checksums -----------------------------------------------------------------------------------------------------

// Where a part of a payload starts that has a piece, and its number.
HZ_DEVICE hz_u64 part_of(const hz_checks& checks, hz_u64 payload, hz_i64 piece_bytes, hz_u32 piece, hz_u32& part) {
  part = quotient(piece, checks.by_pieces);
  return payload + part * (checks.pieces * piece_bytes + HZ_CHECKSUM_BYTES);
}

// Adds a thread's sum to the checksum of a part, if it has elements. Whole waves call it: if all of a wave have the
// same part, one thread adds for all.
HZ_DEVICE void add_up(const hz_checks& checks, const Place& at, hz_u32 part, hz_u64 sum) {
  hz_u32 least = at.has_elements ? part : ~0u, most = at.has_elements ? part : 0;
#pragma unroll
  for (hz_u32 m = 1; m < HZ_WAVE; m *= 2) {
    least = Smallest::of(least, swap_halves(least, m));
    most = Largest::of(most, swap_halves(most, m));
  }
  if (least != most) {
    if (at.has_elements) add_atomically(pointer<hz_u64>(checks.sums + part * checks.step), sum);
    return;
  }
#pragma unroll
  for (hz_u32 m = 1; m < HZ_WAVE; m *= 2) {
    const hz_u32 low = swap_halves((hz_u32)sum, m), high = swap_halves((hz_u32)(sum >> 32), m);
    sum += (hz_u64)high << 32 | low;
  }
  if (thread() % HZ_WAVE == 0) add_atomically(pointer<hz_u64>(checks.sums + most * checks.step), sum);
}

// Adds what this thread has of a record, its codes and, if it is the first of a block, the scale, to the checksum of
// the part that has piece `piece` (docs/payload_format.md); the last ones count the padding too.
template <int BITS>
HZ_DEVICE void check(const hz_checks& checks, hz_u64 payload, hz_i64 piece_bytes, hz_u32 piece, const hz_u8* record,
                     hz_u32 scales, const Place& at, const hz_u32 (&words)[BITS / 2]) {
  hz_u32 part;
  const hz_u64 start = part_of(checks, payload, piece_bytes, piece, part);
  const hz_u32 first = 1 + (hz_u32)(((hz_u64)record - start) / 4);  // words count from 1
  hz_u64 sum = 0;
  if (at.has_elements) {
    const hz_u32 place = at.element / 16 * (BITS / 2);
#pragma unroll
    for (int i = 0; i < BITS / 2; ++i) sum += (hz_u64)words[i] * mix(first + place + i);
    const hz_u32 rest = at.tensor.chunk - at.element;
    if (BITS < 8 && rest <= 16)
#pragma unroll 1
      for (hz_u32 i = BITS / 2; (place + i) % 4; ++i) {
        const hz_u32 word = ((const hz_u32*)record)[place + i];
        sum += (hz_u64)((place + i) % 4 == 3 && is_tiny(scales) ? word & 0xffffu : word) * mix(first + place + i);
      }
    const hz_u32 end = scales / 2 + scales_end(at, scales);
#pragma unroll 1
    for (hz_u32 i = scales / 2 + at.block; i < end; ++i)
      sum += ((hz_u64)((const hz_u16*)record)[i] << i % 2 * 16) * mix(first + i / 2);
  }
  add_up(checks, at, part, sum);
}

// The same of what this thread has of a record of elements.
template <int BYTES>
HZ_DEVICE void check_elements(const hz_checks& checks, hz_u64 payload, hz_i64 piece_bytes, hz_u32 piece,
                              const Words* own, const Place& at, const Words (&words)[BYTES]) {
  hz_u32 part;
  const hz_u64 start = part_of(checks, payload, piece_bytes, piece, part);
  hz_u32 first = 1 + (hz_u32)(((hz_u64)own - start) / 4);
  hz_u64 sum = 0;
#pragma unroll
  for (int i = 0; i < BYTES; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) sum += (hz_u64)words[i].word[j] * mix(first + j);  // those behind the record are 0
    first = anew(first + 4, (hz_u32)sum);  // sixteen products side by side take too many registers
  }
  add_up(checks, at, part, at.has_elements ? sum : 0);
}

// ---- the arithmetic of a block -------------------------------------------------------------------------------------

// The largest or smallest value over the `lanes` threads that share a block. Every thread of the workgroup calls it.
template <class Choice>
HZ_DEVICE hz_u32 over_lanes(hz_u32 value, hz_u32 lanes) {
#pragma unroll
  for (hz_u32 m = 1; m < longest_block / 16; m *= 2)
    if (m < lanes) value = Choice::of(value, swap_halves(value, m));
  return value;
}

// A block's scale. For stochastic codes it is positive and rounded up: none of them is clamped.
template <int BITS>
HZ_DEVICE float scale_of(const float (&x)[16], hz_u32 lane, hz_u32 lanes, float limit, bool stochastic) {
  hz_u32 magnitude = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) magnitude = Largest::of(magnitude, bits_of(x[i]) & 0x7fffffffu);
  const hz_u32 extreme = over_lanes<Largest>(magnitude, lanes);
  float scale;
  if (BITS == 8 || stochastic) {
    scale = divide(float_of(extreme), (float)Codes<BITS>::highest);
  } else {
    // The first of those that reach the magnitude gives the sign: the smallest of index and sign, in this order.
    hz_u32 sign = 2 * longest_block;
#pragma unroll
    for (int i = 15; i >= 0; --i)
      if ((bits_of(x[i]) & 0x7fffffffu) == extreme) sign = i * 2 + (bits_of(x[i]) >> 31);
    sign = over_lanes<Smallest>(sign + lane * 32, lanes);
    scale = mul(float_of(extreme | sign << 31), 1.0f / Codes<BITS>::lowest);
  }
  scale = clamp(stochastic ? up_to_bf16(scale) : as_bf16(scale), -limit, limit);
  if (extreme >= 0x7f800000u) return float_of(0x7fc00000u);
  return scale == 0.0f ? 0.0f : scale;
}

// A number whose lowest bits are those of `quotient` rounded to nearest even, as an integer: 1.5 * 2^23 leaves no
// fraction. Exact for magnitudes below 2^22.
HZ_DEVICE float rounded(float quotient) { return add(quotient, 12582912.0f); }

// Two of x / scale, each rounded once, from the reciprocal of the scale: a remainder that is exact corrects a product
// with it (Markstein 1990). With the 8 significant bits of a bfloat16 scale no quotient is so near to the middle
// between two float32 that what the reciprocal lacks could matter; quotients below 2^-40, whose remainders may not be
// exact, have code 0 and do not move a stochastic one.
HZ_DEVICE void quotients_of(float& a, float& b, float scale, float reciprocal) {
#ifdef HZ_TWO_AT_ONCE
  two_quotients(a, b, scale, reciprocal);
#else
  const float first = mul(a, reciprocal), second = mul(b, reciprocal);
  a = fused(fused(-first, scale, a), reciprocal, first);
  b = fused(fused(-second, scale, b), reciprocal, second);
#endif
}

// Noise of stochastic rounding, from 16 bits of a hash: these and a half, exact in float32.
HZ_DEVICE float with_noise(float quotient, hz_u32 bits) {
  return round_down(add(quotient, fused((float)bits, 0x1p-16f, 0x1p-17f)));
}

// Codes of 16 elements, packed, of a scale whose reciprocal gives quotients. `key` is the one of the first two
// elements.
template <int BITS, bool STOCHASTIC>
HZ_DEVICE void easy_codes(const float (&x)[16], float scale, float reciprocal, hz_u32 key, hz_u32 (&words)[BITS / 2]) {
  const float high = Codes<BITS>::highest, low = STOCHASTIC ? -high : (float)Codes<BITS>::lowest;
  const hz_u32 mask = (1u << BITS) - 1;
#pragma unroll
  for (int i = 0; i < BITS / 2; ++i) words[i] = 0;
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    float a = x[i], b = x[i + 1];
    quotients_of(a, b, scale, reciprocal);
    if (STOCHASTIC) {
      const hz_u32 noise = mix(key ^ i / 2);  // columns of a thread start at a multiple of 16
      a = with_noise(a, noise & 0xffff);
      b = with_noise(b, noise >> 16);
    }
    words[i * BITS / 32] |= (bits_of(rounded(clamp(a, low, high))) & mask) << (i * BITS % 32);
    words[i * BITS / 32] |= (bits_of(rounded(clamp(b, low, high))) & mask) << ((i + 1) * BITS % 32);
  }
}

// Codes of 16 elements, packed. `row_key` and `column` are those of stochastic rounding.
template <int BITS>
HZ_DEVICE void codes_of(float (&x)[16], float scale, bool stochastic, hz_u32 row_key, hz_u32 column,
                        hz_u32 (&words)[BITS / 2]) {
  const float high = Codes<BITS>::highest, low = stochastic ? -high : (float)Codes<BITS>::lowest;
  const hz_u32 mask = (1u << BITS) - 1;
  const float size = scale < 0.0f ? -scale : scale;
  const bool easy = size > 0x1p-60f && size < 0x1p100f;
  const float reciprocal = divide(1.0f, easy ? scale : 1.0f);
#pragma unroll
  for (int i = 0; i < BITS / 2; ++i) words[i] = 0;
  if (easy && !stochastic) return easy_codes<BITS, false>(x, scale, reciprocal, 0, words);
  if (easy) return easy_codes<BITS, true>(x, scale, reciprocal, row_key ^ column / 2, words);
  const bool empty = scale == 0.0f || scale != scale;
  const float divisor = empty ? 1.0f : scale;
  // A word at a time: sixteen divisions side by side would take more registers than the rest of the kernel.
  constexpr int some = 32 / BITS;
#pragma unroll 1
  for (int done = 0; done < 16; done += some) {
    hz_u32 word = 0, noise = 0;
#pragma unroll
    for (int i = 0; i < some; ++i) {
      float quotient = empty ? 0.0f : divide(x[i], divisor);
      if (stochastic) {
        if (i % 2 == 0) noise = mix(row_key ^ (column + i) / 2);  // of two elements
        quotient = with_noise(quotient, i % 2 ? noise >> 16 : noise & 0xffff);
      }
      word |= (bits_of(rounded(clamp(quotient, low, high))) & mask) << (i * BITS);
    }
    column += some;
    rotate<some>(x);
#pragma unroll
    for (int i = 0; i + 1 < BITS / 2; ++i) words[i] = words[i + 1];
    words[BITS / 2 - 1] = word;
  }
}

// Encodes a block from the 16 elements that each of its lanes holds: their codes, and the scale. Every thread of the
// workgroup calls it; those without elements hold zeros.
template <int BITS>
HZ_DEVICE float encode_block(const hz_bucket& bucket, const Place& at, float (&x)[16], hz_u32 (&words)[BITS / 2]) {
  const bool stochastic = bucket.stochastic != 0;
  const float scale = scale_of<BITS>(x, at.lane, 1u << at.tensor.lanes_shift, bucket.limit, stochastic);
  const hz_u32 column = at.tensor.first_block * bucket.block_size + at.element;
  codes_of<BITS>(x, scale, stochastic, stochastic ? mix(at.row ^ bucket.key) : 0, column, words);
  return scale;
}

template <int BITS>
HZ_DEVICE void store_block(hz_u8* record, hz_u32 scales, const Place& at, const hz_u32 (&words)[BITS / 2],
                           float scale) {
  if (!at.has_elements) return;
  store_codes<BITS>(record, at.element / 16, (at.tensor.chunk + 15) / 16, words);
  const hz_u32 end = scales_end(at, scales);
  for (hz_u32 i = at.block; i < end; ++i)
    ((hz_u16*)(record + scales))[i] = i == at.block ? (hz_u16)(bits_of(scale) >> 16) : 0;
}

}  // namespace hz
