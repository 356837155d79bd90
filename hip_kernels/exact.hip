// Codec exact: weights of 16 bits as changes from the old ones, in lanes of 256 weights and blocks of 64 lanes.
//
// A thread has one lane, from its first weight to its last one: codes have any number of bits, so that a weight's place
// is known only when those before it are decoded. Successive threads have successive weights. Four blocks make
// a workgroup. No thread waits for another one while it decodes or encodes.
//
// Memory traffic per weight of `exact_decode`: 2 bytes read, 2 written, and the code, 0.2 to 0.6 bytes. A thread reads
// its codes 16 bytes at a time.
//
// Encoding starts five kernels, since a lane's place depends on all lanes before it:
//   exact_count    how often each class of weights has which change, and the check
//   exact_table    the parameter of each class, from these counts
//   exact_lengths  the lanes' numbers of words, and their sum in each block
//   exact_starts   the first word of each block
//   exact_encode   the codes
//
// Build alone: hipcc -O3 --genco --offload-arch=gfx90a exact.hip -o exact.hsaco
//              nvcc -O3 -arch=sm_90 -cubin -x cu exact.hip -o exact.cubin
// Check alone: python -m pytest tests/codecs/test_exact.py     (emulated on the host, and on a GPU if present)
#include "block.h"

namespace hz {

// ---- where ---------------------------------------------------------------------------------------------------------

// The lane of a thread.
struct Lane {
  const hz_exact_tensor& tensor;
  hz_u32 record, block, number, lanes;  // its number in the block, and how many that has
  hz_u32 first, size;                   // the block's first weight in the tensor's row, and how many it has
  bool record_is_there, there;          // the last threads may have none
};

HZ_DEVICE Lane lane_of(const hz_exact& exact) {
  const hz_u32 index = tensor_of(exact.first_group);
  const hz_exact_tensor& tensor = exact.tensor[index];
  const hz_u32 count = (workgroup() - exact.first_group[index]) * (HZ_THREADS / HZ_EXACT_LANES);
  const hz_u32 number = count + thread() / HZ_EXACT_LANES, lane = thread() % HZ_EXACT_LANES;
  const hz_u32 record = quotient(number, tensor.by_blocks), block = number - record * tensor.blocks;
  const hz_u32 first = block * HZ_EXACT_BLOCK, rest = tensor.chunk - first;
  const hz_u32 size = rest < HZ_EXACT_BLOCK ? rest : HZ_EXACT_BLOCK, lanes = (size + HZ_EXACT_LANE - 1) / HZ_EXACT_LANE;
  return Lane{
      tensor, record, block, lane, lanes, first, size, record < exact.records, record < exact.records && lane < lanes};
}

HZ_DEVICE hz_u8* record_at(const hz_exact& exact, const Lane& at) {
  return pointer<hz_u8>(exact.message) + (at.record_is_there ? at.record : 0) * exact.record_bytes;
}
HZ_DEVICE hz_u8* words_of(const hz_exact& exact, const Lane& at, hz_u8* record) {
  return record + exact.lane_bytes + at.tensor.first_lane + at.block * HZ_EXACT_LANES;
}
HZ_DEVICE hz_u32* start_of(const Lane& at, hz_u8* record) {
  return (hz_u32*)(record + HZ_EXACT_STARTS) + at.tensor.first_block + at.block;
}

HZ_DEVICE hz_u32 sum_of_wave(hz_u32 value) {
#pragma unroll
  for (hz_u32 m = 1; m < HZ_WAVE; m *= 2) value += of_lane(value, (thread() % HZ_WAVE) ^ m);
  return value;
}

// The sum of the values of the lanes of a wave up to this one.
HZ_DEVICE hz_u32 sum_to_here(hz_u32 value) {
  const hz_u32 lane = thread() % HZ_WAVE;
#pragma unroll
  for (hz_u32 m = 1; m < HZ_WAVE; m *= 2) {
    const hz_u32 before = of_lane(value, lane - m);
    if (lane >= m) value += before;
  }
  return value;
}

// Words of the lanes before in the block. A wave of 32 lanes, which has half a block, reads the numbers of all 64.
HZ_DEVICE hz_u32 words_before(const Lane& at, const hz_u8* words) {
  hz_u32 before = 0, found = 0;
#pragma unroll
  for (hz_u32 first = 0; first < HZ_EXACT_LANES; first += HZ_WAVE) {
    const hz_u32 lane = first + thread() % HZ_WAVE;
    const hz_u32 value = at.record_is_there && lane < at.lanes ? words[lane] : 0, sum = before + sum_to_here(value);
    if (lane == at.number) found = sum - value;
    before = of_lane(sum, HZ_WAVE - 1);
  }
  return found;
}

// ---- weights -------------------------------------------------------------------------------------------------------

// Bits in the order of their values, and back: the same operation. What is above 16 bits is of no meaning.
HZ_DEVICE hz_u32 ordered(hz_u32 bits) { return bits ^ ((hz_u32)((int)(bits << 16) >> 31) & 0x7fff); }

HZ_DEVICE hz_u32 class_of(const hz_exact& exact, hz_u32 bits) {
  const int above = (int)((bits & 0x7fff) >> exact.shift) - (int)exact.offset;
  return above < 0 ? 0 : above < HZ_EXACT_CLASSES - 1 ? above : HZ_EXACT_CLASSES - 1;
}

HZ_DEVICE hz_u32 parameter_of(const hz_exact& exact, const hz_u8* record, hz_u32 bits) {
  const hz_u32 index = class_of(exact, bits);
  return (hz_u32)record[index / 2] >> index % 2 * 4 & 15;
}

HZ_DEVICE hz_u32 change_of(hz_u32 fresh, hz_u32 old) {
  const hz_u32 change = (ordered(fresh) - ordered(old)) << 16;
  return (change << 1 ^ (hz_u32)((int)change >> 31)) >> 16;
}

// Sums up a lane's part of a check: its weights, each times an odd number for its place.
struct Check {
  hz_u32 sum, sums, count;
  HZ_MEMBER void add(hz_u32 bits) {
    sum += bits;
    sums += sum;
    ++count;
  }
  // A weight counted once in each sum from its own on, so more often the earlier it is.
  HZ_MEMBER hz_u32 of(const Lane& at) const {
    const hz_u32 place = at.tensor.first_place + at.first + at.number;
    return (2 * place + 1) * sum + 2 * at.lanes * (count * sum - sums);
  }
};

// ---- decode --------------------------------------------------------------------------------------------------------

// A lane's codes. Words behind the record count as zero.
struct LaneCodes {
  const Words* vectors;
  hz_u32 words, next;      // of the record; the next one to read
  Words ahead;             // the next one first
  hz_u32 low, high, bits;  // two words, and how many of their bits are done, below 32

  HZ_MEMBER hz_u32 word() {
    if (next % 4 == 0) ahead = next < words ? vectors[next / 4] : Words{{0, 0, 0, 0}};
    const hz_u32 first = ahead.word[0];
    ahead = Words{{ahead.word[1], ahead.word[2], ahead.word[3], 0}};
    ++next;
    return first;
  }
  HZ_MEMBER void start(const hz_u8* stream, hz_u32 count, hz_u32 first) {
    vectors = (const Words*)stream;
    words = count;
    next = first & ~3u;
    bits = 0;
    low = word();
    high = word();
    for (hz_u32 i = 0; i < first % 4; ++i) low = high, high = word();
  }
  HZ_MEMBER void skip(hz_u32 count) {
    bits += count;
    if (bits < 32) return;
    bits -= 32;
    low = high;
    high = word();
  }
  // The new bits of a weight.
  HZ_MEMBER hz_u32 weight(hz_u32 old, hz_u32 parameter) {
    const hz_u32 window = funnel(high, low, bits);
    const hz_u32 ones = lowest_bit(~window | 1u << HZ_EXACT_ESCAPE);
    const hz_u32 z = ones << parameter | (window >> (ones + 1) & ((1u << parameter) - 1));
    const hz_u32 near = ordered(ordered(old) + ((z & 0xffff) >> 1 ^ (0 - (z & 1))));
    const bool far = ones == HZ_EXACT_ESCAPE;
    skip(far ? HZ_EXACT_ESCAPE + 16 : ones + 1 + parameter);
    return (far ? window >> HZ_EXACT_ESCAPE : near) & 0xffff;
  }
};

HZ_DEVICE void exact_decode(const hz_exact& exact) {
  const Lane at = lane_of(exact);
  hz_u8* record = record_at(exact, at);
  const hz_u32 before = words_before(at, words_of(exact, at, record));
  Check check = {0, 0, 0};
  if (at.there) {
    const hz_u32 stream = (hz_u32)((exact.record_bytes - exact.head) / 4), start = *start_of(at, record);
    LaneCodes codes;
    codes.start(record + exact.head, stream, (start < stream ? start : stream) + before);
    hz_u16* weights = pointer<hz_u16>(at.tensor.old) + exact.rows[at.record] * at.tensor.step + at.first;
    // Old weights and parameters of four at a time, so that their loads are under way together.
    constexpr hz_u32 together = 4;
    hz_u32 place = at.number;
#pragma unroll 1
    for (; place + (together - 1) * at.lanes < at.size; place += together * at.lanes) {
      hz_u32 old[together], parameters[together];
#pragma unroll
      for (hz_u32 i = 0; i < together; ++i) old[i] = weights[place + i * at.lanes];
#pragma unroll
      for (hz_u32 i = 0; i < together; ++i) parameters[i] = parameter_of(exact, record, old[i]);
#pragma unroll
      for (hz_u32 i = 0; i < together; ++i) {
        const hz_u32 fresh = codes.weight(old[i], parameters[i]);
        check.add(fresh);
        weights[place + i * at.lanes] = (hz_u16)fresh;
      }
    }
#pragma unroll 1
    for (; place < at.size; place += at.lanes) {
      const hz_u32 old = weights[place], fresh = codes.weight(old, parameter_of(exact, record, old));
      check.add(fresh);
      weights[place] = (hz_u16)fresh;
    }
  }
  const hz_u32 sum = sum_of_wave(at.there ? check.of(at) : 0);
  if (at.there && thread() % HZ_WAVE == 0) add_atomically(pointer<hz_u32>(exact.sums) + at.record, sum);
}

// ---- encode --------------------------------------------------------------------------------------------------------

// Calls `each` with the old and the new bits of a lane's weights; those that a shard lacks are unchanged.
template <class Each>
HZ_DEVICE void for_weights(const Lane& at, Each each) {
  const hz_u16 *olds = pointer<hz_u16>(at.tensor.old) + at.first, *fresh = pointer<hz_u16>(at.tensor.fresh) + at.first;
  const hz_u32 end = at.tensor.numel > at.first ? at.tensor.numel - at.first : 0;
#pragma unroll 1
  for (hz_u32 place = at.number; place < at.size; place += at.lanes) {
    const hz_u32 old = olds[place];
    each(old, place < end ? fresh[place] : old);
  }
}

// As in host/exact.h.
HZ_DEVICE hz_u32 exact_bin(hz_u32 z) { return z < 8 ? z : (bits_of((float)(int)z) >> 20) - 1032; }

HZ_DEVICE void exact_count(const hz_exact& exact) {
  HZ_SHARED hz_u32 counts[HZ_EXACT_CLASSES * HZ_EXACT_BINS];
  const Lane at = lane_of(exact);
  for (hz_u32 i = thread(); i < HZ_EXACT_CLASSES * HZ_EXACT_BINS; i += HZ_THREADS) counts[i] = 0;
  barrier();
  Check check = {0, 0, 0};
  if (at.there)
    for_weights(at, [&](hz_u32 old, hz_u32 fresh) {
      add_shared(counts + class_of(exact, old) * HZ_EXACT_BINS + exact_bin(change_of(fresh, old)), 1);
      check.add(fresh);
    });
  const hz_u32 sum = sum_of_wave(at.there ? check.of(at) : 0);
  if (at.there && thread() % HZ_WAVE == 0) add_atomically(pointer<hz_u32>(exact.message + HZ_EXACT_CHECK), sum);
  barrier();
  for (hz_u32 i = thread(); i < HZ_EXACT_CLASSES * HZ_EXACT_BINS; i += HZ_THREADS)
    if (counts[i]) add_atomically(pointer<hz_u32>(exact.sums) + i, counts[i]);
}

// The parameter with the fewest bits for the changes of a class, the smallest of several.
HZ_DEVICE hz_u32 best_parameter(const hz_u32* counts) {
  hz_u32 best = 0;
  hz_u64 least = ~0ull;
#pragma unroll 1
  for (hz_u32 parameter = 0; parameter < HZ_EXACT_PARAMETERS; ++parameter) {
    hz_u64 cost = 0;
#pragma unroll 1
    for (hz_u32 bin = 0; bin < HZ_EXACT_BINS; ++bin) {
      const hz_u32 shift = bin < 16 ? 0 : bin / 8 - 1, highest = bin - 8 * shift;
      const hz_u32 quotient = shift > parameter ? HZ_EXACT_ESCAPE : highest >> (parameter - shift);
      const hz_u32 length = quotient < HZ_EXACT_ESCAPE ? quotient + 1 + parameter : HZ_EXACT_ESCAPE + 16;
      cost += (hz_u64)counts[bin] * length;
    }
    if (cost < least) best = parameter;
    if (cost < least) least = cost;
  }
  return best;
}

HZ_DEVICE void exact_table(const hz_exact& exact) {
  const hz_u32* counts = pointer<hz_u32>(exact.sums) + thread() * 2 * HZ_EXACT_BINS;
  if (thread() < HZ_EXACT_CLASSES / 2)
    pointer<hz_u8>(exact.message)[thread()] =
        (hz_u8)(best_parameter(counts) | best_parameter(counts + HZ_EXACT_BINS) << 4);
}

HZ_DEVICE void exact_lengths(const hz_exact& exact) {
  const Lane at = lane_of(exact);
  hz_u8* head = record_at(exact, at);
  hz_u32 bits = 0;
  if (at.there)
    for_weights(at, [&](hz_u32 old, hz_u32 fresh) {
      const hz_u32 parameter = parameter_of(exact, head, old), quotient = change_of(fresh, old) >> parameter;
      bits += quotient < HZ_EXACT_ESCAPE ? quotient + 1 + parameter : HZ_EXACT_ESCAPE + 16;
    });
  const hz_u32 words = (bits + 31) / 32, sum = sum_of_wave(words);
  if (at.there) words_of(exact, at, head)[at.number] = (hz_u8)words;
  if (at.there && thread() % HZ_WAVE == 0) add_atomically(start_of(at, head), sum);
}

// One wave, each lane of it with successive blocks.
HZ_DEVICE void exact_starts(const hz_exact& exact) {
  if (thread() >= HZ_WAVE) return;
  hz_u32* starts = pointer<hz_u32>(exact.message + HZ_EXACT_STARTS);
  const hz_u32 some = (exact.blocks + HZ_WAVE - 1) / HZ_WAVE, first = thread() * some;
  const hz_u32 end = first + some < exact.blocks ? first + some : exact.blocks;
  hz_u32 words = 0;
  for (hz_u32 i = first; i < end; ++i) words += starts[i];
  const hz_u32 all = sum_to_here(words);
  hz_u32 before = all - words;
  for (hz_u32 i = first; i < end; ++i) {
    const hz_u32 of_block = starts[i];
    starts[i] = before;
    before += of_block;
  }
  if (thread() == HZ_WAVE - 1) *pointer<hz_u32>(exact.message + HZ_EXACT_WORDS) = all;
}

HZ_DEVICE void exact_encode(const hz_exact& exact) {
  const Lane at = lane_of(exact);
  hz_u8* record = record_at(exact, at);
  const hz_u32 before = words_before(at, words_of(exact, at, record));
  if (!at.there) return;
  const hz_u32 room = (hz_u32)((exact.record_bytes - exact.head) / 4);
  hz_u32* stream = (hz_u32*)(record + exact.head);
  hz_u32 place = *start_of(at, record) + before, word = 0, filled = 0;
  for_weights(at, [&](hz_u32 old, hz_u32 fresh) {
    const hz_u32 parameter = parameter_of(exact, record, old), z = change_of(fresh, old), quotient = z >> parameter;
    const bool far = quotient >= HZ_EXACT_ESCAPE;
    const hz_u32 ones = far ? HZ_EXACT_ESCAPE : quotient;
    const hz_u32 rest = far ? fresh : (z & ((1u << parameter) - 1)) << 1;
    const hz_u32 code = ((1u << ones) - 1) | rest << ones, length = far ? HZ_EXACT_ESCAPE + 16 : ones + 1 + parameter;
    word |= code << filled;
    filled += length;
    if (filled < 32) return;
    if (place < room) stream[place] = word;
    ++place;
    filled -= 32;
    word = filled ? code >> (length - filled) : 0;
  });
  if (filled && place < room) stream[place] = word;
}

}  // namespace hz

HZ_KERNEL_OF(exact_count, hz_exact, exact, 2) { hz::exact_count(exact); }
HZ_KERNEL_OF(exact_table, hz_exact, exact, 8) { hz::exact_table(exact); }
HZ_KERNEL_OF(exact_lengths, hz_exact, exact, 8) { hz::exact_lengths(exact); }
HZ_KERNEL_OF(exact_starts, hz_exact, exact, 8) { hz::exact_starts(exact); }
HZ_KERNEL_OF(exact_encode, hz_exact, exact, 8) { hz::exact_encode(exact); }
HZ_KERNEL_OF(exact_decode, hz_exact, exact, 8) { hz::exact_decode(exact); }
