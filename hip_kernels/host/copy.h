// Codecs none and bf16 on a processor: elements copied, converted or summed, on spans of successive ones. Included by
// codec.cpp.
#pragma once

namespace hz {
namespace HZ_ISA {

// Adds a span's bytes to the checksum of its part; the last one counts the padding.
HZ_INLINE void check_elements(const Checked& record, size_t from, size_t bytes) {
  if (record.sum)
    __atomic_fetch_add(record.sum, checksum(record.codes + from, bytes, record.place + (uint32_t)(from / 4)),
                       __ATOMIC_RELAXED);
}

// What a span covers: elements from `at` on, of which `count` are in the chunk, and bytes of their record with padding.
struct Stretch {
  int64_t at;
  uint32_t count;
  size_t from, bytes;
};

template <int BYTES>
HZ_INLINE Stretch stretch_of(const hz_bucket& bucket, const Span& span) {
  const int64_t at = (int64_t)span.begin * bucket.block_size;
  const uint32_t count =
      (uint32_t)between(0, span.tensor->chunk - at, (int64_t)(span.end - span.begin) * bucket.block_size);
  return {at, count, (size_t)at * BYTES, ((size_t)count * BYTES + 15) & ~(size_t)15};
}

HZ_INLINE Checked record_of(const hz_bucket& bucket, const Span& span) {
  return record_at(bucket.checks, bucket.payload, bucket.row_bytes, bucket.inner, span.tensor->start,
                   span.tensor->record_bytes, 0, span.row);
}

// Vectors of one type as another's, `padded` where the last one is not whole; NaNs have the bits that
// docs/payload_format.md fixes.
template <class From, class To>
HZ_INLINE void convert(const typename From::type* from, typename To::type* to, uint32_t count) {
  uint32_t i = 0;
  for (; i < count; i += lanes) {
    alignas(64) typename From::type in[lanes] = {};
    alignas(64) typename To::type out[lanes];
    const bool whole = i + lanes <= count;
    if (!whole) std::memcpy(in, from + i, (count - i) * sizeof(in[0]));
    const Floats x = From::widen(whole ? from + i : in);
    const Words number = (Words)(x == x);
    To::narrow(whole ? to + i : out, (Floats)(((Words)x & number) | (~number & 0x7fc00000)));
    if (!whole) std::memcpy(to + i, out, (count - i) * sizeof(out[0]));
  }
}

template <int BYTES, class Source = void>
static void encode_elements(const hz_bucket& bucket, const Span& span) {
  const hz_tensor& tensor = *span.tensor;
  const Stretch own = stretch_of<BYTES>(bucket, span);
  const Checked record = record_of(bucket, span);
  const int64_t first = shard_of(bucket, span.row) * tensor.chunk + own.at;
  const size_t here = (size_t)between(0, tensor.numel - first, own.count);
  uint8_t* to = record.codes + own.from;
  if constexpr (std::is_void<Source>::value)
    std::memcpy(to, (const uint8_t*)tensor.data + first * BYTES, here * BYTES);
  else
    convert<Source, Bf16>((const typename Source::type*)tensor.data + first, (uint16_t*)to, (uint32_t)here);
  std::memset(to + here * BYTES, 0, own.bytes - here * BYTES);
  check_elements(record, own.from, own.bytes);
}

template <int BYTES, class Target = void>
static void decode_elements(const hz_bucket& bucket, const Span& span) {
  const hz_tensor& tensor = *span.tensor;
  const Stretch own = stretch_of<BYTES>(bucket, span);
  const Checked record = record_of(bucket, span);
  check_elements(record, own.from, own.bytes);
  const int64_t first = shard_of(bucket, span.row) * tensor.chunk + own.at;
  const uint8_t* from = record.codes + own.from;
  if constexpr (std::is_void<Target>::value)
    std::memcpy((uint8_t*)tensor.data + first * BYTES, from, (size_t)own.count * BYTES);
  else
    convert<Bf16, Target>((const uint16_t*)from, (typename Target::type*)tensor.data + first, own.count);
}

// Adds up to `buffer` elements of all peers, in their order, to `sums`, or starts them.
template <class Type>
HZ_INLINE void add_elements(const hz_bucket& bucket, Checked record, int64_t at, uint32_t count, bool starts,
                            float* sums) {
  typedef typename Type::type Element;
  const size_t from = (size_t)at * sizeof(Element), bytes = (count * sizeof(Element) + 15) & ~(size_t)15;
  for (uint32_t peer = 0; peer < bucket.outer; ++peer) {
    check_elements(record, from, bytes);
    const Element* x = (const Element*)(record.codes + from);
    uint32_t i = 0;
    for (; i + lanes <= count; i += lanes)
      store(sums + i, starts ? Type::widen(x + i) : load<Floats>(sums + i) + Type::widen(x + i));
    if (i < count) {
      alignas(64) Element last[lanes] = {};
      alignas(64) float total[lanes] = {};
      std::memcpy(last, x + i, (count - i) * sizeof(Element));
      if (!starts) std::memcpy(total, sums + i, (count - i) * sizeof(float));
      store(total, starts ? Type::widen(last) : load<Floats>(total) + Type::widen(last));
      std::memcpy(sums + i, total, (count - i) * sizeof(float));
    }
    starts = false;
    record.codes += step_of(bucket);
    record.sum = record.sum ? (uint64_t*)((uint8_t*)record.sum + bucket.checks.step) : nullptr;
  }
}

template <class Type>
static void decode_sum_elements(const hz_bucket& bucket, const Span& span) {
  const hz_tensor& tensor = *span.tensor;
  const Stretch own = stretch_of<sizeof(typename Type::type)>(bucket, span);
  const Checked record = record_of(bucket, span);
  const int64_t first = span.row * (int64_t)tensor.chunk + own.at;
  for (uint32_t done = 0; done < own.count; done += buffer) {  // so that sums stay in the first-level cache
    const uint32_t count = own.count - done < buffer ? own.count - done : buffer;
    float* sums = (float*)tensor.data + first + done;
    if (tensor.residual) std::memmove(sums, (const float*)tensor.residual + first + done, count * sizeof(float));
    add_elements<Type>(bucket, record, own.at + done, count, !tensor.residual, sums);
  }
}

// Codec none: the sum, rounded once. It may be written where the first peer's payload was.
template <class Type>
static void add_up_elements(const hz_bucket& bucket, const Span& span) {
  typedef typename Type::type Element;
  const hz_tensor& tensor = *span.tensor;
  const Stretch own = stretch_of<sizeof(Element)>(bucket, span);
  const Checked record = record_of(bucket, span);
  const Checked written = record_at(bucket.out_checks, bucket.out_payload, bucket.out_row_bytes, bucket.out_inner,
                                    tensor.out_start, tensor.out_record_bytes, 0, span.row);
  alignas(64) float sums[buffer];
  for (uint32_t done = 0; done < own.count; done += buffer) {
    const uint32_t count = own.count - done < buffer ? own.count - done : buffer;
    add_elements<Type>(bucket, record, own.at + done, count, true, sums);
    convert<Fp32, Type>(sums, (Element*)(written.codes + own.from) + done, count);
  }
  std::memset(written.codes + own.from + own.count * sizeof(Element), 0, own.bytes - own.count * sizeof(Element));
  check_elements(written, own.from, own.bytes);
}

}  // namespace HZ_ISA
}  // namespace hz
