// Codec mpc on a processor, on spans of chunks of 1024 words, to decode, or of whole records, to encode: where the
// words of a chunk go depends on those before. Part of codec.cpp, compiled once for each instruction set.
#pragma once

namespace hz {
namespace HZ_ISA {

constexpr uint32_t mpc_chunk = 1024, mpc_bitmap = mpc_chunk / 32, mpc_header = 16;

// Squares of 32 by 32 bits with rows and columns exchanged; column 0 is the highest bit.
HZ_INLINE void transpose(uint32_t* words) {
  uint32_t mask = 0x0000ffff;
  for (uint32_t distance = 16; distance; distance >>= 1, mask ^= mask << distance)
    for (uint32_t i = 0; i < 32; i += 2 * distance)
      for (uint32_t k = i; k < i + distance; ++k) {
        const uint32_t moved = (words[k] ^ words[k + distance] >> distance) & mask;
        words[k] ^= moved;
        words[k + distance] ^= moved << distance;
      }
}

HZ_INLINE uint32_t chunks_of(uint32_t numel) { return (numel + mpc_chunk - 1) / mpc_chunk; }

static void encode_mpc(const hz_bucket& bucket, const Span& span) {
  const hz_tensor& tensor = *span.tensor;
  const int64_t first = shard_of(bucket, span.row) * tensor.chunk;
  const int64_t present = between(0, tensor.numel - first, tensor.chunk);
  uint8_t* record = record_at(bucket.checks, bucket.payload, bucket.row_bytes, bucket.inner, tensor.start,
                              tensor.record_bytes, tensor.scales, span.row)
                        .codes;
  const uint32_t chunks = chunks_of(tensor.chunk), distance = bucket.dimension;
  uint8_t *bitmaps = record + mpc_header, *to = bitmaps + (size_t)chunks * 4 * mpc_bitmap;
  // The words before a chunk count as zero.
  alignas(64) uint32_t padded[32 + mpc_chunk] = {}, planes[mpc_chunk], kept[mpc_chunk];
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t at = (int64_t)chunk * mpc_chunk;
    const uint32_t length = (uint32_t)between(0, tensor.chunk - at, mpc_chunk);
    const uint32_t here = (uint32_t)between(0, present - at, length);
    uint32_t* words = padded + 32;
    if (here) std::memcpy(words, (const float*)tensor.data + first + at, 4 * here);
    std::memset(words + here, 0, 4 * (mpc_chunk - here));
    for (uint32_t i = 0; i < mpc_chunk; ++i) planes[i] = words[(int64_t)i] - words[(int64_t)i - distance];
    std::memset(planes + length, 0, 4 * (mpc_chunk - length));
    for (uint32_t i = 0; i < mpc_chunk; i += 32) transpose(planes + i);
    uint32_t bitmap[mpc_bitmap] = {}, count = 0, before = 0;
    for (uint32_t i = 0; i < mpc_chunk; ++i) {
      const uint32_t left = planes[i] - before;
      before = planes[i];
      bitmap[i / 32] |= (uint32_t)(left != 0) << i % 32;
      kept[count] = left;
      count += left != 0;
    }
    std::memcpy(bitmaps + (size_t)chunk * sizeof bitmap, bitmap, sizeof bitmap);
    std::memcpy(to, kept, (size_t)4 * count);
    to += (size_t)4 * count;
  }
  const uint64_t used = ((uint64_t)(to - record) + 15) / 16 * 16;
  std::memset(record, 0, mpc_header);
  std::memcpy(record, &used, 8);
  std::memset(to, 0, record + tensor.record_bytes - to);
}

// Words as elements of another type; float32 as it is, NaNs with all their bits.
HZ_INLINE void convert(const uint32_t* words, float* to, Fp32) { std::memcpy(to, words, 4 * lanes); }
template <class Type>
HZ_INLINE void convert(const uint32_t* words, typename Type::type* to, Type) {
  const Floats value = load<Floats>(words);
  const Words number = (Words)(value == value);  // bits of a NaN would be carried on into its sign
  Type::narrow(to, (Floats)(((Words)value & number) | (~number & 0x7fc00000)));
}

template <class Type>
static void decode_mpc(const hz_bucket& bucket, const Span& span) {
  typedef typename Type::type Element;
  const hz_tensor& tensor = *span.tensor;
  const uint8_t* record = record_at(bucket.checks, bucket.payload, bucket.row_bytes, bucket.inner, tensor.start,
                                    tensor.record_bytes, tensor.scales, span.row)
                              .codes;
  Element* target = (Element*)tensor.data + shard_of(bucket, span.row) * tensor.chunk;
  const uint32_t chunks = chunks_of(tensor.chunk), distance = bucket.dimension;
  const uint8_t *bitmaps = record + mpc_header, *from = bitmaps + (size_t)chunks * 4 * mpc_bitmap;
  const uint64_t room = (record + tensor.record_bytes - from) / 4;
  uint64_t place = 0;
  uint32_t bitmap[mpc_bitmap];
  for (uint32_t chunk = 0; chunk < span.begin; ++chunk) {
    std::memcpy(bitmap, bitmaps + (size_t)chunk * sizeof bitmap, sizeof bitmap);
    for (uint32_t bits : bitmap) place += (uint32_t)__builtin_popcount(bits);
  }
  alignas(64) uint32_t padded[32 + mpc_chunk] = {};
  alignas(64) Element elements[mpc_chunk];
  for (uint32_t chunk = span.begin; chunk < span.end; ++chunk) {
    const int64_t at = (int64_t)chunk * mpc_chunk;
    const uint32_t length = (uint32_t)between(0, tensor.chunk - at, mpc_chunk);
    uint32_t *words = padded + 32, before = 0;
    std::memcpy(bitmap, bitmaps + (size_t)chunk * sizeof bitmap, sizeof bitmap);
    for (uint32_t i = 0; i < mpc_chunk; ++i) {
      if (bitmap[i / 32] >> i % 32 & 1) {
        // In bytes that no encoder writes, more words may be kept than the record has.
        uint32_t word;
        std::memcpy(&word, from + 4 * (place < room ? place : room - 1), 4);
        ++place;
        before += word;
      }
      words[i] = before;
    }
    for (uint32_t i = 0; i < mpc_chunk; i += 32) transpose(words + i);
    for (uint32_t i = 0; i < mpc_chunk; ++i) words[(int64_t)i] += words[(int64_t)i - distance];
    for (uint32_t i = 0; i < mpc_chunk; i += lanes) convert(words + i, elements + i, Type());
    std::memcpy(target + at, elements, length * sizeof(Element));
  }
}

}  // namespace HZ_ISA
}  // namespace hz
