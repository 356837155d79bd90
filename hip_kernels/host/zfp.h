// Codec zfp on a processor, on spans of groups: 16 blocks of four values, which take `rate` words of 64 bits. Part of
// codec.cpp, compiled once for each instruction set. Blocks depend on nothing, but the bits of one are found one by
// one.
#pragma once

namespace hz {
namespace HZ_ISA {

constexpr uint32_t zfp_group = 64, zfp_head = 9, zfp_tiny = 28;  // the last as in hzero/codecs/zfp.py
constexpr uint32_t negabinary = 0xaaaaaaaa;

// Bits in their order, the first one lowest: those of a block, 96 at most.
struct Bits {
  uint64_t low = 0, high = 0;
  uint32_t count = 0;

  inline __attribute__((always_inline)) void put(uint64_t bits,
                                                 uint32_t more) {  // fewer than 64; what is beyond 128 is dropped
    if (count < 64) {
      low |= bits << count;
      if (count) high |= bits >> (64 - count);
    } else if (count < 128) {
      high |= bits << (count - 64);
    }
    count += more;
  }
  inline __attribute__((always_inline)) uint32_t take(uint32_t less) {  // from the front, fewer than 32
    const uint32_t bits = (uint32_t)low & ((1u << less) - 1);
    if (less) {
      low = low >> less | high << (64 - less);
      high >>= less;
      count -= less;
    }
    return bits;
  }
};

// The bits of four finite values, or of a block that is zero or lost.
HZ_INLINE Bits zfp_bits(const float* values, uint32_t rate) {
  Bits bits;
  uint32_t largest = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t exponent = bits_of(values[i]) >> 23 & 255;
    largest = exponent > largest ? exponent : largest;
  }
  if (largest == 255) bits.put(1, zfp_head);
  if (largest == 255 || largest <= zfp_tiny) return bits;
  bits.put(1 | (largest + 1) << 1, zfp_head);
  const float factor = float_of((283 - largest) << 23);
  int32_t x = (int32_t)(values[0] * factor), y = (int32_t)(values[1] * factor), z = (int32_t)(values[2] * factor),
          w = (int32_t)(values[3] * factor);
  x = (x + w) >> 1, w -= x;
  z = (z + y) >> 1, y -= z;
  x = (x + z) >> 1, z -= x;
  w = (w + y) >> 1, y -= w;
  w += y >> 1, y -= w >> 1;
  const uint32_t digits[4] = {((uint32_t)x + negabinary) ^ negabinary, ((uint32_t)y + negabinary) ^ negabinary,
                              ((uint32_t)z + negabinary) ^ negabinary, ((uint32_t)w + negabinary) ^ negabinary};
  uint32_t seen = 0;
  for (uint32_t k = 32; k-- > 0 && bits.count < 4 * rate;) {
    uint32_t plane =
        (digits[0] >> k & 1) | (digits[1] >> k & 1) << 1 | (digits[2] >> k & 1) << 2 | (digits[3] >> k & 1) << 3;
    bits.put(plane & ((1u << seen) - 1), seen);
    plane >>= seen;
    while (seen < 4) {
      if (!plane) {
        bits.put(0, 1);  // no further value has a bit in this plane
        break;
      }
      // 1, a 0 for each value that is passed over, and a 1 unless only the last value is left.
      const uint32_t zeros = (uint32_t)__builtin_ctz(plane), ends = seen + zeros < 3;
      bits.put(1 | ends << (1 + zeros), 1 + zeros + ends);
      seen += 1 + zeros;
      plane >>= 1 + zeros;
    }
  }
  return bits;
}

// Four values from the bits of a block.
HZ_INLINE void zfp_values(Bits bits, uint32_t rate, float* values) {
  bits.count = 4 * rate;
  const uint32_t some = bits.take(1), exponent = bits.take(8);
  if (!some || !exponent) {
    for (int i = 0; i < 4; ++i) values[i] = some ? float_of(0x7fc00000) : 0.0f;
    return;
  }
  uint32_t digits[4] = {};
  uint32_t seen = 0;
  for (uint32_t k = 32; k-- > 0 && bits.count;) {
    uint32_t plane = bits.take(seen < bits.count ? seen : bits.count);
    while (seen < 4 && bits.count && bits.take(1)) {
      while (seen < 3 && bits.count && !bits.take(1)) ++seen;
      plane |= 1u << seen++;
    }
    for (int i = 0; i < 4; ++i) digits[i] |= (plane >> i & 1) << k;
  }
  // Unsigned, which wraps; shifts to the right are those of signed numbers.
  uint32_t x = (digits[0] ^ negabinary) - negabinary, y = (digits[1] ^ negabinary) - negabinary,
           z = (digits[2] ^ negabinary) - negabinary, w = (digits[3] ^ negabinary) - negabinary;
  y += (uint32_t)((int32_t)w >> 1), w -= (uint32_t)((int32_t)y >> 1);
  y += w, w = (w << 1) - y;
  z += x, x = (x << 1) - z;
  y += z, z = (z << 1) - y;
  w += x, x = (x << 1) - w;
  // The unit, 2^(exponent - 157): in two factors, the first of which is normal and keeps every bit.
  const float first = float_of((exponent < 31 ? 1 : exponent - 30) << 23);
  const float second = exponent < 31 ? float_of((exponent + 96) << 23) : 1.0f;
  const uint32_t found[4] = {x, y, z, w};
  const float unit = first * second;
  for (int i = 0; i < 4; ++i) values[i] = (float)(int32_t)found[i] * unit;
}

// What zfp takes for the values that a last block lacks.
HZ_INLINE void zfp_fill(float* values, uint32_t here) {
  if (here == 1) values[1] = values[0];
  if (here <= 2) values[2] = values[1];
  values[3] = values[0];
}

template <class Type>
static void encode_zfp(const hz_bucket& bucket, const Span& span) {
  typedef typename Type::type Element;
  const hz_tensor& tensor = *span.tensor;
  const int64_t first = shard_of(bucket, span.row) * tensor.chunk;
  const int64_t present = between(0, tensor.numel - first, tensor.chunk);
  const Record record = record_at(bucket.checks, bucket.payload, bucket.row_bytes, bucket.inner, tensor.start,
                                  tensor.record_bytes, tensor.scales, span.row);
  alignas(64) Element padded[zfp_group];
  alignas(64) float values[zfp_group], decoded[zfp_group];
  const uint32_t bytes = 8 * bucket.rate;
  for (uint32_t group = span.begin; group < span.end; ++group) {
    const int64_t at = (int64_t)group * zfp_group;
    const uint32_t length = (uint32_t)between(0, tensor.chunk - at, zfp_group);
    const uint32_t here = (uint32_t)between(0, present - at, length);
    std::memset(padded, 0, sizeof padded);
    if (here) std::memcpy(padded, (const Element*)tensor.data + first + at, here * sizeof(Element));
    for (uint32_t i = 0; i < zfp_group; i += lanes) store(values + i, Type::widen(padded + i));
    if (tensor.residual && here) add_residuals(bucket, tensor, first + at, here, values);
    if (length % 4) zfp_fill(values + length / 4 * 4, length % 4);
    uint8_t packed[8 * 24 + 16] = {};
    const uint32_t blocks = (length + 3) / 4;
    for (uint32_t block = 0; block < blocks; ++block) {
      const Bits bits = zfp_bits(values + 4 * block, bucket.rate);
      if (tensor.left) zfp_values(bits, bucket.rate, decoded + 4 * block);
      // 4 * rate bits from a multiple of 4 bits on: whole bytes, or half a byte later.
      const uint32_t start = 4 * bucket.rate * block, shift = start % 8, count = 4 * bucket.rate;
      const uint64_t low = count < 64 ? bits.low & ((1ull << count) - 1) : bits.low;
      const uint64_t high = count > 64 ? bits.high & ((1ull << (count - 64)) - 1) : 0;
      uint64_t words[2];
      std::memcpy(words, packed + start / 8, 16);
      words[0] |= low << shift;
      words[1] |= high << shift | (shift ? low >> (64 - shift) : 0);
      std::memcpy(packed + start / 8, words, 16);
    }
    const uint32_t from = group * bytes;
    const uint32_t rest = tensor.record_bytes - from, taken = rest < bytes ? rest : bytes;
    std::memcpy(record.codes + from, packed, taken);
    if (group + 1 == span.blocks) std::memset(record.codes + from + taken, 0, rest - taken);
    if (!tensor.left) continue;
    for (uint32_t i = 0; i < zfp_group; i += lanes)
      store(values + i, or_zero(load<Floats>(values + i) - load<Floats>(decoded + i)));
    keep(bucket, tensor, first + at, here, values);
  }
}

// The values of a group; what is beyond its `count` elements has no meaning.
HZ_INLINE void zfp_read(const uint8_t* record, uint32_t record_bytes, uint32_t group, uint32_t count, uint32_t rate,
                        float* values) {
  uint8_t packed[8 * 24 + 16];
  const uint32_t from = group * 8 * rate;
  std::memcpy(packed, record + from, between(0, (int64_t)record_bytes - from, 8 * rate));
  for (uint32_t block = 0; 4 * block < count; ++block) {
    const uint32_t start = 4 * rate * block, shift = start % 8;
    uint64_t words[2];
    std::memcpy(words, packed + start / 8, 16);
    Bits bits;
    bits.low = words[0] >> shift | (shift ? words[1] << (64 - shift) : 0);
    bits.high = words[1] >> shift;
    zfp_values(bits, rate, values + 4 * block);
  }
}

template <class Type>
static void decode_zfp(const hz_bucket& bucket, const Span& span) {
  typedef typename Type::type Element;
  const hz_tensor& tensor = *span.tensor;
  const Record record = record_at(bucket.checks, bucket.payload, bucket.row_bytes, bucket.inner, tensor.start,
                                  tensor.record_bytes, tensor.scales, span.row);
  Element* target = (Element*)tensor.data + shard_of(bucket, span.row) * tensor.chunk;
  alignas(64) float values[zfp_group] = {};
  alignas(64) Element padded[zfp_group];
  for (uint32_t group = span.begin; group < span.end; ++group) {
    const int64_t at = (int64_t)group * zfp_group;
    const uint32_t count = (uint32_t)between(0, tensor.chunk - at, zfp_group);
    zfp_read(record.codes, tensor.record_bytes, group, count, bucket.rate, values);
    for (uint32_t i = 0; i < zfp_group; i += lanes) Type::narrow(padded + i, load<Floats>(values + i));
    std::memcpy(target + at, padded, count * sizeof(Element));
  }
}

static void decode_sum_zfp(const hz_bucket& bucket, const Span& span) {
  const hz_tensor& tensor = *span.tensor;
  const Record first = record_at(bucket.checks, bucket.payload, bucket.row_bytes, bucket.inner, tensor.start,
                                 tensor.record_bytes, tensor.scales, span.row);
  alignas(64) float values[zfp_group] = {}, sums[zfp_group];
  for (uint32_t group = span.begin; group < span.end; ++group) {
    const int64_t at = (int64_t)group * zfp_group, place = span.row * (int64_t)tensor.chunk + at;
    const uint32_t count = (uint32_t)between(0, tensor.chunk - at, zfp_group);
    for (uint32_t i = 0; i < zfp_group; ++i) sums[i] = -0.0f;  // what is added to -0 stays as it is
    if (tensor.residual) std::memcpy(sums, (const float*)tensor.residual + place, count * sizeof(float));
    for (uint32_t peer = 0; peer < bucket.outer; ++peer) {
      zfp_read(first.codes + peer * (int64_t)bucket.inner * bucket.row_bytes, tensor.record_bytes, group, count,
               bucket.rate, values);
      for (uint32_t i = 0; i < zfp_group; i += lanes)
        store(sums + i, load<Floats>(sums + i) + load<Floats>(values + i));
    }
    std::memcpy((float*)tensor.data + place, sums, count * sizeof(float));
  }
}

}  // namespace HZ_ISA
}  // namespace hz
