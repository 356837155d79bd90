// Codec exp on a processor: the kernels of exponents.hip on spans of blocks, to encode, or of lines. Part of codec.cpp,
// compiled once for each instruction set. Loops over the 512 elements of a line are such that compilers vectorise them.
#pragma once

namespace hz {
namespace HZ_ISA {

constexpr uint32_t line_elements = 512, block_lines = 64, longest_list = 512;
constexpr int window = 14, last_base = 255 - window, escape = 15, lost = 255;

// A record: signs and mantissas, codes, and for each line where its escapes start and the exponent before its window.
struct ExponentRecord {
  uint8_t *tails, *codes, *starts, *bases, *lists;
  uint32_t chunk, lines;

  ExponentRecord(const hz_bucket& bucket, const hz_tensor& tensor, uint32_t row, uint32_t peer = 0) {
    const Record record =
        record_at(bucket.checks, bucket.payload + peer * bucket.inner * bucket.row_bytes, bucket.row_bytes,
                  bucket.inner, tensor.start, tensor.record_bytes, tensor.scales, row);
    chunk = tensor.chunk;
    lines = (chunk + line_elements - 1) / line_elements;
    tails = record.codes;
    codes = tails + (chunk + 15) / 16 * 16;
    starts = record.scales;
    bases = starts + (size_t)2 * lines;
    lists = bases + lines;
  }
  uint32_t limit(uint32_t line) const {
    return (uint32_t)between(0, chunk - line / block_lines * block_lines * line_elements, longest_list);
  }
  uint8_t* list(uint32_t line) const { return lists + (size_t)(line / block_lines) * longest_list; }
};

// The exponent before the window of a line. Two are tried: one that ends with the largest exponent, and one that ends
// a little above most.
HZ_INLINE uint32_t base_of(const uint8_t* exponents) {
  uint8_t largest = 0, smallest = 255;  // as numbers from 0, so that exponent 0 is the largest
  for (uint32_t i = 0; i < line_elements; ++i) {
    const uint8_t above = exponents[i] - 1;
    largest = exponents[i] > largest ? exponents[i] : largest;
    smallest = above < smallest ? above : smallest;
  }
  const uint32_t first = largest > window ? largest - window : 0;
  if (smallest >= first) return first;  // it has all
  uint16_t counts[4][256] = {};
  for (uint32_t i = 0; i < line_elements; i += 4)
    for (uint32_t k = 0; k < 4; ++k) ++counts[k][exponents[i + k]];
  uint32_t reaching[258] = {};  // elements of at least an exponent
  for (uint32_t e = 256; e-- > 0;)
    reaching[e] = reaching[e + 1] + counts[0][e] + counts[1][e] + counts[2][e] + counts[3][e];
  uint32_t most = 255;
  while (most && reaching[most] < 64) --most;
  const uint32_t second = (uint32_t)between(0, (int64_t)most + 3 - window, last_base);
  const uint32_t in_first = reaching[first + 1] - reaching[first + window + 1];
  return reaching[second + 1] - reaching[second + window + 1] > in_first ? second : first;
}

static void encode_exponents(const hz_bucket& bucket, const Span& span) {
  const hz_tensor& tensor = *span.tensor;
  const int64_t first = shard_of(bucket, span.row) * tensor.chunk;
  const int64_t present = between(0, tensor.numel - first, tensor.chunk);
  const uint16_t* source = (const uint16_t*)tensor.data + first;
  const ExponentRecord record(bucket, tensor, span.row);
  alignas(64) uint16_t padded[line_elements];
  alignas(64) uint8_t tails[line_elements], exponents[line_elements], codes[line_elements], pairs[line_elements / 2];
  for (uint32_t block = span.begin; block < span.end; ++block) {
    const uint32_t begin = block * block_lines, end = (uint32_t)between(0, begin + block_lines, record.lines);
    const uint32_t limit = record.limit(begin);
    uint8_t* list = record.list(begin);
    uint32_t escapes = 0;
    for (uint32_t line = begin; line < end; ++line) {
      const int64_t at = (int64_t)line * line_elements;
      const uint32_t count = (uint32_t)between(0, tensor.chunk - at, line_elements);
      const int64_t here = between(0, present - at, line_elements);
      const uint16_t* x = source + at;
      if (here < line_elements) {
        std::memset(padded, 0, sizeof padded);
        if (here) std::memcpy(padded, x, here * 2);
        x = padded;
      }
      for (uint32_t i = 0; i < line_elements; ++i) {
        tails[i] = (uint8_t)((x[i] >> 8 & 0x80) | (x[i] & 0x7f));
        exponents[i] = (uint8_t)(x[i] >> 7);
      }
      const uint8_t base = (uint8_t)base_of(exponents);
      for (uint32_t i = 0; i < line_elements; ++i) {
        const uint8_t above = exponents[i] - base, below = above - 1, inside = below < window ? above : escape;
        codes[i] = exponents[i] ? inside : 0;
      }
      uint8_t highest = 0;
      for (uint32_t i = 0; i < line_elements; ++i) highest = codes[i] > highest ? codes[i] : highest;
      for (uint32_t i = 0; i < line_elements / 2; ++i) pairs[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
      const uint16_t start = (uint16_t)escapes;
      if (highest == escape)
        for (uint32_t i = 0; i < line_elements; ++i)
          if (codes[i] == escape) {
            if (escapes < limit) list[escapes] = exponents[i];
            ++escapes;
          }
      std::memcpy(record.tails + at, tails, count);
      std::memcpy(record.codes + at / 2, pairs, (count + 1) / 2);
      std::memcpy(record.starts + (size_t)2 * line, &start, 2);
      record.bases[line] = base;
    }
    if (escapes <= limit) {
      std::memset(list + escapes, 0, limit - escapes);
    } else {
      const size_t at = (size_t)begin * line_elements, count = (size_t)between(0, tensor.chunk - (int64_t)at, 32768);
      std::memset(record.tails + at, 0xff, count);
      std::memset(record.codes + at / 2, 0xff, count / 2);
      if (count % 2) record.codes[(at + count) / 2] = 0x0f;
      std::memset(record.starts + (size_t)2 * begin, 0xff, (size_t)2 * (end - begin));
      std::memset(record.bases + begin, lost, end - begin);
      std::memset(list, lost, limit);
    }
    if (end < record.lines) continue;
    // Padding of the three parts.
    std::memset(record.tails + tensor.chunk, 0, -tensor.chunk & 15);
    std::memset(record.codes + (tensor.chunk + 1) / 2, 0, -((tensor.chunk + 1) / 2) & 15);
    std::memset(list + limit, 0, -(uintptr_t)(list + limit - record.tails) & 15);
  }
}

// The bits of a line; what is beyond its `count` elements has no meaning.
HZ_INLINE void read_line(const ExponentRecord& record, uint32_t line, uint32_t count, uint16_t* bits) {
  alignas(64) uint8_t tails[line_elements], exponents[line_elements], pairs[line_elements / 2];
  std::memcpy(tails, record.tails + (size_t)line * line_elements, count);
  std::memcpy(pairs, record.codes + (size_t)line * line_elements / 2, (count + 1) / 2);
  if (count < line_elements) {
    std::memset(tails + count, 0, line_elements - count);
    std::memset(pairs + (count + 1) / 2, 0, (line_elements - count) / 2);
  }
  const uint8_t base = record.bases[line];
  uint8_t any = 0;
  for (uint32_t i = 0; i < line_elements / 2; ++i) {
    const uint8_t low = pairs[i] & 15, high = pairs[i] >> 4;
    exponents[2 * i] = low ? (uint8_t)(base + low) : 0;
    exponents[2 * i + 1] = high ? (uint8_t)(base + high) : 0;
    any |= (low == escape) | (high == escape);
  }
  if (any) {
    const uint32_t limit = record.limit(line);
    const uint8_t* list = record.list(line);
    uint16_t start;
    std::memcpy(&start, record.starts + (size_t)2 * line, 2);
    uint32_t place = start;
    for (uint32_t i = 0; i < count; ++i)
      if ((pairs[i / 2] >> i % 2 * 4 & 15) == escape) {
        exponents[i] = place < limit ? list[place] : lost;
        ++place;
      }
  }
  for (uint32_t i = 0; i < line_elements; ++i)
    bits[i] = (uint16_t)((tails[i] & 0x80) << 8 | exponents[i] << 7 | (tails[i] & 0x7f));
}

// Elements of a line as another type; bfloat16 as it is.
HZ_INLINE void convert(const uint16_t* bits, uint32_t i, uint16_t* to, Bf16) { std::memcpy(to, bits + i, 2 * lanes); }
template <class Element, class Type>
HZ_INLINE void convert(const uint16_t* bits, uint32_t i, Element* to, Type) {
  Type::narrow(to, Bf16::widen(bits + i));
}

template <class Type>
static void decode_exponents(const hz_bucket& bucket, const Span& span) {
  typedef typename Type::type Element;
  const hz_tensor& tensor = *span.tensor;
  const ExponentRecord record(bucket, tensor, span.row);
  Element* target = (Element*)tensor.data + shard_of(bucket, span.row) * tensor.chunk;
  alignas(64) uint16_t bits[line_elements];
  alignas(64) Element padded[line_elements];
  for (uint32_t line = span.begin; line < span.end; ++line) {
    const int64_t at = (int64_t)line * line_elements;
    const uint32_t count = (uint32_t)between(0, tensor.chunk - at, line_elements);
    read_line(record, line, count, bits);
    Element* to = count < line_elements ? padded : target + at;
    for (uint32_t i = 0; i < line_elements; i += lanes) convert(bits, i, to + i, Type());
    if (count < line_elements) std::memcpy(target + at, padded, count * sizeof(Element));
  }
}

static void decode_sum_exponents(const hz_bucket& bucket, const Span& span) {
  const hz_tensor& tensor = *span.tensor;
  alignas(64) uint16_t bits[line_elements];
  alignas(64) float sums[line_elements];
  for (uint32_t line = span.begin; line < span.end; ++line) {
    const int64_t at = (int64_t)line * line_elements, place = span.row * (int64_t)tensor.chunk + at;
    const uint32_t count = (uint32_t)between(0, tensor.chunk - at, line_elements);
    // What is added to -0 stays as it is.
    for (uint32_t i = 0; i < line_elements; ++i) sums[i] = -0.0f;
    if (tensor.residual) std::memcpy(sums, (const float*)tensor.residual + place, count * sizeof(float));
    for (uint32_t peer = 0; peer < bucket.outer; ++peer) {
      read_line(ExponentRecord(bucket, tensor, span.row, peer), line, count, bits);
      for (uint32_t i = 0; i < line_elements; i += lanes)
        store(sums + i, load<Floats>(sums + i) + Bf16::widen(bits + i));
    }
    std::memcpy((float*)tensor.data + place, sums, count * sizeof(float));
  }
}

}  // namespace HZ_ISA
}  // namespace hz
