// Codec exact on a processor, on spans of blocks of 64 lanes. Decoding takes the lanes of a row of weights side by
// side, where a target has vectors with a shift for each lane. Part of codec.cpp, compiled once for each instruction
// set.
#pragma once

namespace hz {
namespace HZ_ISA {

// Bits in the order of their values as signed numbers, and back: the same operation.
HZ_INLINE uint16_t ordered(uint16_t bits) { return bits ^ ((int16_t)bits >> 15 & 0x7fff); }
HZ_INLINE uint16_t zigzag(uint16_t fresh, uint16_t old) {
  const uint16_t change = ordered(fresh) - ordered(old);
  return (uint16_t)(change << 1) ^ (uint16_t)((int16_t)change >> 15);
}
HZ_INLINE uint16_t moved(uint16_t old, uint16_t z) { return ordered(ordered(old) + (z >> 1 ^ -(z & 1))); }
HZ_INLINE uint32_t class_of(uint16_t bits, const hz_exact& exact) {
  return (uint32_t)between(0, (int32_t)((bits & 0x7fffu) >> exact.shift) - (int32_t)exact.offset, HZ_EXACT_CLASSES - 1);
}

// Sixteen-bit numbers of two vectors of words: those of even index, and those of odd index.
constexpr uint32_t row_part = 2 * lanes;
typedef uint16_t Sixteens __attribute__((vector_size(4 * lanes)));
typedef int16_t SignedSixteens __attribute__((vector_size(4 * lanes)));
HZ_INLINE Sixteens ordered(Sixteens bits) { return bits ^ ((Sixteens)((SignedSixteens)bits >> 15) >> 1); }

HZ_INLINE Sixteens zigzag(Sixteens fresh, Sixteens old) {
  const Sixteens change = ordered(fresh) - ordered(old);
  return change << 1 ^ (Sixteens)((SignedSixteens)change >> 15);
}

// Where vectors have a lane: those of even and of odd index of `row_part` lanes follow each other.
HZ_INLINE uint32_t place_of(uint32_t lane) { return (lane / row_part * 2 + lane % 2) * lanes + lane % row_part / 2; }

struct Block {
  uint32_t size, lanes;  // weights, lanes
  uint64_t first;        // of its weights in the tensor's row
};

HZ_INLINE Block block_of(const hz_exact_tensor& tensor, uint32_t block) {
  const uint64_t first = (uint64_t)block * HZ_EXACT_BLOCK;
  const uint32_t size = (uint32_t)between(0, tensor.chunk - (int64_t)first, HZ_EXACT_BLOCK);
  return {size, (size + HZ_EXACT_LANE - 1) / HZ_EXACT_LANE, first};
}

HZ_INLINE void parameters_of(const uint8_t* record, uint8_t* parameters) {
  for (int i = 0; i < HZ_EXACT_CLASSES / 2; ++i)
    parameters[2 * i] = record[i] & 15, parameters[2 * i + 1] = record[i] >> 4;
}

// The part of weights from `place` on in a row's check. A lane of vectors adds up its numbers, and these sums, so that
// its number i of n counts n - i times.
static uint32_t check_of(const uint16_t* bits, uint32_t count, uint32_t place) {
  Words sums[2] = {}, sums_of_sums[2] = {};
  const uint32_t rows = count / row_part;
  for (uint32_t row = 0; row < rows; ++row) {
    const Words both = load<Words>(bits + row * row_part);
    sums[0] += both & 0xffff, sums[1] += both >> 16;
    sums_of_sums[0] += sums[0], sums_of_sums[1] += sums[1];
  }
  uint32_t check = 0;
  for (uint32_t lane = 0; lane < row_part; ++lane) {
    const uint32_t sum = sums[lane % 2][lane / 2], later = rows * sum - sums_of_sums[lane % 2][lane / 2];
    check += (2 * (place + lane) + 1) * sum + 2 * row_part * later;
  }
  for (uint32_t i = rows * row_part; i < count; ++i) check += (2 * (place + i) + 1) * bits[i];
  return check;
}

// ---- decode --------------------------------------------------------------------------------------------------------

// What is left of a record's stream from a block's first word on. Bytes behind it count as zero.
struct Stream {
  const uint8_t* bytes;
  uint64_t size;
};

HZ_INLINE uint64_t window_at(const Stream& stream, uint32_t bit) {
  const uint64_t byte = bit / 8;
  uint64_t window = 0;
  if (byte + 8 <= stream.size)
    std::memcpy(&window, stream.bytes + byte, 8);
  else if (byte < stream.size)
    std::memcpy(&window, stream.bytes + byte, stream.size - byte);
  return window >> bit % 8;
}

// Changes of successive weights, one after the other; the last row may be short.
HZ_APART void changes_by_weight(const hz_exact& exact, const uint8_t* parameters, const Stream& stream,
                                const uint16_t* old, uint32_t count, uint32_t row_lanes, uint32_t* bits,
                                uint16_t* changes) {
  for (uint32_t i = 0; i < count; old += row_lanes, i += row_lanes, changes += row_lanes)
    for (uint32_t lane = 0; lane < row_lanes && i + lane < count; ++lane) {
      const uint32_t parameter = parameters[class_of(old[lane], exact)];
      const uint64_t window = window_at(stream, bits[lane]);
      const uint32_t ones = (uint32_t)__builtin_ctz(~(uint32_t)window | 1u << HZ_EXACT_ESCAPE);
      if (ones == HZ_EXACT_ESCAPE) {
        changes[lane] = zigzag((uint16_t)(window >> HZ_EXACT_ESCAPE), old[lane]);
        bits[lane] += HZ_EXACT_ESCAPE + 16;
      } else {
        const uint32_t low = (uint32_t)(window >> (ones + 1)) & ((1u << parameter) - 1);
        changes[lane] = (uint16_t)(ones << parameter | low);
        bits[lane] += ones + 1 + parameter;
      }
    }
}

#if defined(__AVX512F__) || defined(__AVX2__)
constexpr uint32_t few_lanes = 4;  // are decoded one by one

// Shifts by any number below 2^32; 32 and more leave zero.
#if defined(__AVX512F__)
HZ_INLINE Words up(Words x, Words by) { return (Words)_mm512_sllv_epi32((__m512i)x, (__m512i)by); }
HZ_INLINE Words down(Words x, Words by) { return (Words)_mm512_srlv_epi32((__m512i)x, (__m512i)by); }
#else
HZ_INLINE Words up(Words x, Words by) { return (Words)_mm256_sllv_epi32((__m256i)x, (__m256i)by); }
HZ_INLINE Words down(Words x, Words by) { return (Words)_mm256_srlv_epi32((__m256i)x, (__m256i)by); }
#endif

// Parameters by class.
struct Table {
#if defined(__AVX512F__)
  __m512i low, high;
  explicit Table(const uint8_t* record) {
    uint8_t bytes[HZ_EXACT_CLASSES];
    parameters_of(record, bytes);
    low = _mm512_cvtepu8_epi16(load<__m256i>(bytes)), high = _mm512_cvtepu8_epi16(load<__m256i>(bytes + 32));
  }
  Sixteens of(Sixteens classes) const { return (Sixteens)_mm512_permutex2var_epi16(low, (__m512i)classes, high); }
#else
  __m256i words;
  explicit Table(const uint8_t* record) : words(load<__m256i>(record)) {}
  Words of_words(Words classes) const {
    const __m256i eight = _mm256_permutevar8x32_epi32(words, (__m256i)(classes >> 3));
    return down((Words)eight, classes << 2 & 28) & 15;
  }
  Sixteens of(Sixteens classes) const {
    const Words both = (Words)classes;
    return (Sixteens)(of_words(both & 0xffff) | of_words(both >> 16) << 16);
  }
#endif
};

HZ_INLINE Sixteens classes_of(Sixteens bits, const hz_exact& exact) {
  const Sixteens size = (bits & 0x7fff) >> (uint16_t)exact.shift;
#if defined(__AVX512F__)
  const __m512i above = _mm512_subs_epu16((__m512i)size, _mm512_set1_epi16((int16_t)exact.offset));
  return (Sixteens)_mm512_min_epu16(above, _mm512_set1_epi16(HZ_EXACT_CLASSES - 1));
#else
  const __m256i above = _mm256_subs_epu16((__m256i)size, _mm256_set1_epi16((int16_t)exact.offset));
  return (Sixteens)_mm256_min_epu16(above, _mm256_set1_epi16(HZ_EXACT_CLASSES - 1));
#endif
}

// The next bits of the lanes of a vector, at least 57 of each, and how many there are.
struct Windows {
  Words low, high, bits;
};

HZ_INLINE Windows windows_at(const Stream& stream, Words bits) {
  const Words bytes = bits >> 3, rest = bits & 7;
  Words low, high;
#if defined(__AVX512F__)
  const __mmask16 inside = _mm512_cmple_epu32_mask(
      (__m512i)bytes, _mm512_set1_epi32((int32_t)between(0, (int64_t)stream.size - 8, 1 << 30)));
  if (inside == 0xffff && stream.size >= 8) {
    const __m512i first = _mm512_i32gather_epi64(_mm512_castsi512_si256((__m512i)bytes), stream.bytes, 1),
                  second = _mm512_i32gather_epi64(_mm512_extracti64x4_epi64((__m512i)bytes, 1), stream.bytes, 1);
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    low = (Words)_mm512_permutex2var_epi32(first, even, second);
    high = (Words)_mm512_permutex2var_epi32(first, _mm512_add_epi32(even, _mm512_set1_epi32(1)), second);
  }
#else
  const __m256i most = _mm256_set1_epi32((int32_t)between(0, (int64_t)stream.size - 8, 1 << 30));
  if (!_mm256_movemask_epi8(_mm256_cmpgt_epi32((__m256i)bytes, most)) && stream.size >= 8) {
    const __m256i first =
        _mm256_i32gather_epi64((const long long*)stream.bytes, _mm256_castsi256_si128((__m256i)bytes), 1);
    const __m256i second =
        _mm256_i32gather_epi64((const long long*)stream.bytes, _mm256_extracti128_si256((__m256i)bytes, 1), 1);
    const __m256 a = _mm256_castsi256_ps(first), b = _mm256_castsi256_ps(second);
    low = (Words)_mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)), 0xd8);
    high = (Words)_mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd)), 0xd8);
  }
#endif
  else {
    for (int lane = 0; lane < lanes; ++lane) {
      const uint64_t window = window_at(stream, bytes[lane] * 8);
      low[lane] = (uint32_t)window, high[lane] = (uint32_t)(window >> 32);
    }
  }
  return {down(low, rest) | up(high, 32 - rest), down(high, rest), 64 - rest};
}

HZ_INLINE bool any_bit(Words x, uint32_t bit) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)x, _mm512_set1_epi32(1 << bit));
#else
  return _mm256_movemask_ps((__m256)(x << (31 - bit)));
#endif
}

// What `zigzag` gives, in words.
HZ_INLINE Words zigzags(Words fresh, Words old) {
  const Words a = fresh ^ ((0 - (fresh >> 15)) & 0x7fff), b = old ^ ((0 - (old >> 15)) & 0x7fff);
  const Words change = (a - b) & 0xffff;
  return (change << 1 ^ (0 - (change >> 15))) & 0xffff;
}

// Changes of `rows` rows of two vectors of lanes from one window of each lane; what `changes_by_weight` does, side by
// side. If a window had too few bits, which one row never needs, it returns false, and `bits` are as before.
HZ_INLINE bool changes_by_lane(const hz_exact& exact, const Table& table, const Stream& stream, const uint16_t* old,
                               uint32_t rows, uint32_t row_lanes, Words* bits, uint16_t* changes) {
  Windows windows[2];
  Words place[2] = {bits[0], bits[1]}, left[2];
  for (int half = 0; half < 2; ++half) {
    windows[half] = windows_at(stream, place[half]);
    left[half] = windows[half].bits;
  }
  for (uint32_t row = 0; row < rows; ++row) {
    const Sixteens before = load<Sixteens>(old + row * row_lanes);
    const Words both = (Words)table.of(classes_of(before, exact));
    const Words parameters[2] = {both & 0xffff, both >> 16};
    Words change[2], length[2], ones[2];
    bool escaped = false;
    for (int half = 0; half < 2; ++half) {
      const Words low = windows[half].low, parameter = parameters[half];
      ones[half] = low ^ (low + 1);  // up to the lowest bit that is zero
      const Words exponent = (Words) __builtin_convertvector((Ints)ones[half], Floats) >> 23, shift = exponent - 126;
      change[half] = (down(low, shift) & ~up(Words{} + ~0u, parameter)) | up(exponent - 127, parameter);
      length[half] = shift + parameter;
    }
    if (__builtin_expect(any_bit(ones[0] | ones[1], HZ_EXACT_ESCAPE), 0)) {
      for (int half = 0; half < 2; ++half) {
        const Words far = (Words)((ones[half] & 1u << HZ_EXACT_ESCAPE) != 0), low = windows[half].low;
        const Words weights = (Words)before >> 16 * half & 0xffff;
        change[half] = (far & zigzags(low >> HZ_EXACT_ESCAPE & 0xffff, weights)) | (~far & change[half]);
        length[half] = (far & (HZ_EXACT_ESCAPE + 16)) | (~far & length[half]);
      }
      escaped = true;
    }
    for (int half = 0; half < 2; ++half) {
      windows[half].low = down(windows[half].low, length[half]) | up(windows[half].high, 32 - length[half]);
      windows[half].high = down(windows[half].high, length[half]);
      left[half] -= length[half];
    }
    if (__builtin_expect(escaped, 0)) {  // an escape takes half a window: look again
      if (any_bit(left[0] | left[1], 31)) return false;
      for (int half = 0; half < 2; ++half) {
        place[half] += windows[half].bits - left[half];
        windows[half] = windows_at(stream, place[half]);
        left[half] = windows[half].bits;
      }
    }
    store(changes + row * HZ_EXACT_LANES, (change[0] & 0xffff) | change[1] << 16);
  }
  if (any_bit(left[0] | left[1], 31)) return false;
  for (int half = 0; half < 2; ++half) bits[half] = place[half] + windows[half].bits - left[half];
  return true;
}
#endif

// Replaces weights by new ones, `changes` apart.
HZ_INLINE void move_all(uint16_t* weights, const uint16_t* changes, uint32_t count) {
  uint32_t i = 0;
  for (; i + row_part <= count; i += row_part) {
    const Sixteens z = load<Sixteens>(changes + i), before = ordered(load<Sixteens>(weights + i));
    store(weights + i, ordered(before + (z >> 1 ^ -(z & 1))));
  }
  for (; i < count; ++i) weights[i] = moved(weights[i], changes[i]);
}

// Successive rows of weights that are decoded before the weights change: their codes fill about half of a window.
constexpr uint32_t most_rows = 32;

static void decode_exact_block(const hz_exact& exact, const uint8_t* record, const uint8_t* parameters, Stream stream,
                               const uint8_t* words, const Block& block, uint16_t* weights) {
  uint32_t bits[HZ_EXACT_LANES] = {}, before = 0, at = 0;
  for (uint32_t lane = 0; lane < block.lanes; before += words[lane++]) bits[lane] = 32 * before;
  alignas(64) uint16_t changes[most_rows * HZ_EXACT_LANES];
#if defined(__AVX512F__) || defined(__AVX2__)
  if (block.lanes > few_lanes) {
    const Table table(record);
    // Bits of lanes in the order in which vectors have them.
    Words by_vector[HZ_EXACT_LANES / lanes];
    for (uint32_t lane = 0; lane < HZ_EXACT_LANES; ++lane) ((uint32_t*)by_vector)[place_of(lane)] = bits[lane];
    // A copy of a short block's weights may be read beyond them.
    alignas(64) uint16_t copy[HZ_EXACT_BLOCK + row_part];
    const uint16_t* old = weights;
    if (block.lanes < HZ_EXACT_LANES) {
      std::memcpy(copy, weights, 2 * block.size);
      std::memset(copy + block.size, 0, 2 * row_part);
      old = copy;
    }
    const uint32_t most = before ? (uint32_t)between(1, block.size / before, most_rows) : most_rows;
    uint32_t rows;
    for (; (rows = (uint32_t)between(0, (block.size - at) / block.lanes, most)) > 0; at += rows * block.lanes) {
      for (uint32_t first = 0; first < block.lanes; first += row_part)
        for (uint32_t done = 0, some = rows; done < rows;) {
          if (changes_by_lane(exact, table, stream, old + at + done * block.lanes + first, some, block.lanes,
                              by_vector + first / lanes, changes + done * HZ_EXACT_LANES + first))
            done += some, some = rows - done;
          else
            some = (some + 1) / 2;
        }
      if (block.lanes < HZ_EXACT_LANES)
        for (uint32_t row = 1; row < rows; ++row)
          std::memmove(changes + row * block.lanes, changes + row * HZ_EXACT_LANES, 2 * block.lanes);
      move_all(weights + at, changes, rows * block.lanes);
    }
    for (uint32_t lane = 0; lane < HZ_EXACT_LANES; ++lane) bits[lane] = ((uint32_t*)by_vector)[place_of(lane)];
  }
#else
  (void)record;
#endif
  while (at < block.size) {
    const uint32_t count = (uint32_t)between(0, block.size - at, most_rows * block.lanes);
    changes_by_weight(exact, parameters, stream, weights + at, count, block.lanes, bits, changes);
    move_all(weights + at, changes, count);
    at += count;
  }
}

static void exact_decode(const hz_exact& exact, const ExactSpan& span) {
  const hz_exact_tensor& tensor = *span.tensor;
  const uint8_t* record = (const uint8_t*)exact.message + span.record * exact.record_bytes;
  uint16_t* row = (uint16_t*)tensor.old + exact.rows[span.record] * tensor.step;
  const uint64_t stream = (exact.record_bytes - exact.head) / 4;  // words
  uint8_t parameters[HZ_EXACT_CLASSES];
  parameters_of(record, parameters);
  uint32_t check = 0;
  for (uint32_t index = span.begin; index < span.end; ++index) {
    const Block block = block_of(tensor, index);
    uint32_t start;
    std::memcpy(&start, record + HZ_EXACT_STARTS + 4 * (size_t)(tensor.first_block + index), 4);
    const uint64_t first = start < stream ? start : stream;
    const uint8_t* words = record + exact.lane_bytes + tensor.first_lane + (size_t)index * HZ_EXACT_LANES;
    decode_exact_block(exact, record, parameters, {record + exact.head + 4 * first, 4 * (stream - first)}, words, block,
                       row + block.first);
    check += check_of(row + block.first, block.size, tensor.first_place + (uint32_t)block.first);
  }
  __atomic_fetch_add((uint32_t*)exact.sums + span.record, check, __ATOMIC_RELAXED);
}

// ---- encode --------------------------------------------------------------------------------------------------------

// New weights of a block; those that a shard lacks are the old ones.
HZ_INLINE const uint16_t* fresh_of(const hz_exact_tensor& tensor, const Block& block, uint16_t* padded) {
  const int64_t there = between(0, (int64_t)tensor.numel - (int64_t)block.first, block.size);
  const uint16_t* fresh = (const uint16_t*)tensor.fresh + block.first;
  if (there == block.size) return fresh;
  if (there) std::memcpy(padded, fresh, 2 * there);
  std::memcpy(padded + there, (const uint16_t*)tensor.old + block.first + there, 2 * (block.size - there));
  return padded;
}

// Changes below 8 have bins of their own; of larger ones their highest four bits count, which cost as much: below the
// parameters that these leave quotients for, there are escapes.
HZ_INLINE uint32_t exact_bin(uint32_t z) {
  const uint32_t bits = bits_of((float)(int32_t)z) >> 20;
  return z < 8 ? z : bits - 1032;
}

HZ_INLINE Words bins_of(Words z) {
  const Words few = (Words)(z < 8), many = ((Words) __builtin_convertvector((Ints)z, Floats) >> 20) - 1032;
  return (few & z) | (~few & many);
}

// Successive weights often have the same class and change: two sets of counts wait less for each other.
HZ_INLINE void count_changes(const hz_exact& exact, const uint16_t* old, const uint16_t* fresh, uint32_t count,
                             uint32_t (&counts)[2][HZ_EXACT_CLASSES * HZ_EXACT_BINS]) {
  uint32_t i = 0;
#if defined(__AVX512F__) || defined(__AVX2__)
  for (; i + row_part <= count; i += row_part) {
    const Sixteens before = load<Sixteens>(old + i), z = zigzag(load<Sixteens>(fresh + i), before);
    const Words bins = bins_of((Words)z & 0xffff) | bins_of((Words)z >> 16) << 16;
    alignas(64) uint16_t places[row_part];
    store(places, classes_of(before, exact) * HZ_EXACT_BINS + (Sixteens)bins);
    for (uint32_t k = 0; k < row_part; ++k) ++counts[k % 2][places[k]];
  }
#endif
  for (; i < count; ++i) ++counts[i % 2][class_of(old[i], exact) * HZ_EXACT_BINS + exact_bin(zigzag(fresh[i], old[i]))];
}

static void exact_count(const hz_exact& exact, const ExactSpan& span) {
  const hz_exact_tensor& tensor = *span.tensor;
  uint32_t counts[2][HZ_EXACT_CLASSES * HZ_EXACT_BINS] = {}, check = 0;
  uint16_t padded[HZ_EXACT_BLOCK];
  for (uint32_t index = span.begin; index < span.end; ++index) {
    const Block block = block_of(tensor, index);
    const uint16_t *old = (const uint16_t*)tensor.old + block.first, *fresh = fresh_of(tensor, block, padded);
    count_changes(exact, old, fresh, block.size, counts);
    check += check_of(fresh, block.size, tensor.first_place + (uint32_t)block.first);
  }
  for (uint32_t i = 0; i < HZ_EXACT_CLASSES * HZ_EXACT_BINS; ++i)
    if (counts[0][i] + counts[1][i])
      __atomic_fetch_add((uint32_t*)exact.sums + i, counts[0][i] + counts[1][i], __ATOMIC_RELAXED);
  __atomic_fetch_add((uint32_t*)(exact.message + HZ_EXACT_CHECK), check, __ATOMIC_RELAXED);
}

// The parameter of each class from the counts.
static void exact_table(const hz_exact& exact, const ExactSpan&) {
  const uint32_t* counts = (const uint32_t*)exact.sums;
  for (uint32_t index = 0; index < HZ_EXACT_CLASSES; ++index, counts += HZ_EXACT_BINS) {
    uint32_t best = 0;
    uint64_t least = ~0ull;
    for (uint32_t parameter = 0; parameter < HZ_EXACT_PARAMETERS; ++parameter) {
      uint64_t cost = 0;
      for (uint32_t bin = 0; bin < HZ_EXACT_BINS; ++bin) {
        const uint32_t shift = bin < 16 ? 0 : bin / 8 - 1, highest = bin - 8 * shift;
        const uint32_t quotient = shift > parameter ? HZ_EXACT_ESCAPE : highest >> (parameter - shift);
        cost += (uint64_t)counts[bin] * (quotient < HZ_EXACT_ESCAPE ? quotient + 1 + parameter : HZ_EXACT_ESCAPE + 16);
      }
      if (cost < least) least = cost, best = parameter;
    }
    uint8_t& pair = ((uint8_t*)exact.message)[index / 2];
    pair = index % 2 ? (uint8_t)(pair | best << 4) : (uint8_t)best;
  }
}

// The parameters of a record, one by one and for vectors.
struct Parameters {
  uint8_t of[HZ_EXACT_CLASSES];
#if defined(__AVX512F__) || defined(__AVX2__)
  Table table;
  explicit Parameters(const uint8_t* record) : table(record) { parameters_of(record, of); }
#else
  explicit Parameters(const uint8_t* record) { parameters_of(record, of); }
#endif
};

// Codes of up to 64 weights and their numbers of bits, at the places that vectors have; no bits where none is.
HZ_INLINE void codes_of(const hz_exact& exact, const Parameters& parameters, const uint16_t* old, const uint16_t* fresh,
                        uint32_t count, uint32_t* codes, uint32_t* lengths) {
  uint32_t i = 0;
#if defined(__AVX512F__) || defined(__AVX2__)
  for (; i + row_part <= count; i += row_part) {
    const Sixteens before = load<Sixteens>(old + i), after = load<Sixteens>(fresh + i);
    const Words zs = (Words)zigzag(after, before), all = (Words)parameters.table.of(classes_of(before, exact));
    for (int half = 0; half < 2; ++half) {
      const Words z = zs >> 16 * half & 0xffff, parameter = all >> 16 * half & 0xffff, quotient = down(z, parameter);
      const Words ones = ~up(Words{} + ~0u, quotient), low = z & ~up(Words{} + ~0u, parameter);
      const Words far = (Words)(quotient >= HZ_EXACT_ESCAPE), escape = ((Words)after >> 16 * half & 0xffff)
                                                                       << HZ_EXACT_ESCAPE;
      store(codes + i + half * lanes,
            (far & (escape | ((1u << HZ_EXACT_ESCAPE) - 1))) | (~far & (ones | up(low, quotient + 1))));
      store(lengths + i + half * lanes, (far & (HZ_EXACT_ESCAPE + 16)) | (~far & (quotient + 1 + parameter)));
    }
  }
#endif
  for (; i < count; ++i) {
    const uint32_t z = zigzag(fresh[i], old[i]), parameter = parameters.of[class_of(old[i], exact)];
    const uint32_t quotient = z >> parameter, place = place_of(i);
    if (quotient < HZ_EXACT_ESCAPE) {
      codes[place] = ((1u << quotient) - 1) | (z & ((1u << parameter) - 1)) << (quotient + 1);
      lengths[place] = quotient + 1 + parameter;
    } else {
      codes[place] = ((1u << HZ_EXACT_ESCAPE) - 1) | (uint32_t)fresh[i] << HZ_EXACT_ESCAPE;
      lengths[place] = HZ_EXACT_ESCAPE + 16;
    }
  }
  for (; i < HZ_EXACT_LANES; ++i) lengths[place_of(i)] = 0;
}

// Writes the lanes' numbers of words, and for each block the sum of them.
static void exact_lengths(const hz_exact& exact, const ExactSpan& span) {
  const hz_exact_tensor& tensor = *span.tensor;
  uint8_t* head = (uint8_t*)exact.message;
  uint16_t padded[HZ_EXACT_BLOCK];
  alignas(64) uint32_t codes[HZ_EXACT_LANES], lengths[HZ_EXACT_LANES];
  const Parameters parameters(head);
  for (uint32_t index = span.begin; index < span.end; ++index) {
    const Block block = block_of(tensor, index);
    const uint16_t *old = (const uint16_t*)tensor.old + block.first, *fresh = fresh_of(tensor, block, padded);
    uint32_t bits[HZ_EXACT_LANES] = {}, all = 0;
    for (uint32_t at = 0; at < block.size; at += block.lanes) {
      const uint32_t count = (uint32_t)between(0, block.size - at, block.lanes);
      codes_of(exact, parameters, old + at, fresh + at, count, codes, lengths);
      for (uint32_t place = 0; place < HZ_EXACT_LANES; ++place) bits[place] += lengths[place];
    }
    uint8_t* words = head + exact.lane_bytes + tensor.first_lane + (size_t)index * HZ_EXACT_LANES;
    for (uint32_t lane = 0; lane < block.lanes; ++lane)
      all += words[lane] = (uint8_t)((bits[place_of(lane)] + 31) / 32);
    std::memcpy(head + HZ_EXACT_STARTS + 4 * (size_t)(tensor.first_block + index), &all, 4);
  }
}

// The first word of each block from the sums, and the number of all words.
static void exact_starts(const hz_exact& exact, const ExactSpan&) {
  uint32_t* starts = (uint32_t*)(exact.message + HZ_EXACT_STARTS);
  uint32_t before = 0;
  for (uint32_t block = 0; block < exact.blocks; ++block) {
    const uint32_t words = starts[block];
    starts[block] = before;
    before += words;
  }
  *(uint32_t*)(exact.message + HZ_EXACT_WORDS) = before;
}

static void exact_encode(const hz_exact& exact, const ExactSpan& span) {
  const hz_exact_tensor& tensor = *span.tensor;
  uint8_t* record = (uint8_t*)exact.message;
  uint16_t padded[HZ_EXACT_BLOCK];
  alignas(64) uint32_t codes[HZ_EXACT_LANES], lengths[HZ_EXACT_LANES];
  const Parameters parameters(record);
  const uint64_t room = (exact.record_bytes - exact.head) / 4;
  uint32_t* const stream = (uint32_t*)(record + exact.head);
  for (uint32_t index = span.begin; index < span.end; ++index) {
    const Block block = block_of(tensor, index);
    const uint16_t *old = (const uint16_t*)tensor.old + block.first, *fresh = fresh_of(tensor, block, padded);
    const uint8_t* words = record + exact.lane_bytes + tensor.first_lane + (size_t)index * HZ_EXACT_LANES;
    uint32_t start;
    std::memcpy(&start, record + HZ_EXACT_STARTS + 4 * (size_t)(tensor.first_block + index), 4);
    uint64_t at[HZ_EXACT_LANES], pending[HZ_EXACT_LANES] = {}, first = start;
    uint8_t filled[HZ_EXACT_LANES] = {};
    for (uint32_t lane = 0; lane < block.lanes; first += words[lane++]) at[lane] = first;
    for (uint32_t from = 0; from < block.size; from += block.lanes) {
      const uint32_t count = (uint32_t)between(0, block.size - from, block.lanes);
      codes_of(exact, parameters, old + from, fresh + from, count, codes, lengths);
      for (uint32_t lane = 0; lane < count; ++lane) {
        pending[lane] |= (uint64_t)codes[place_of(lane)] << filled[lane];
        filled[lane] = (uint8_t)(filled[lane] + lengths[place_of(lane)]);
        if (filled[lane] < 32) continue;
        if (at[lane] < room) stream[at[lane]] = (uint32_t)pending[lane];
        ++at[lane], pending[lane] >>= 32, filled[lane] -= 32;
      }
    }
    for (uint32_t lane = 0; lane < block.lanes; ++lane)
      if (filled[lane] && at[lane] < room) stream[at[lane]] = (uint32_t)pending[lane];
  }
}

}  // namespace HZ_ISA
}  // namespace hz
