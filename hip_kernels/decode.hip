// Decode: elements of a bucket of tensors from one payload, int8 or int4.
//
// Computes code * scale in float32, rotated back where the bucket says so, rounded to the type of the elements. Shards
// are written where they stand in the tensors, whatever the order of the payload's rows.
//
// Memory traffic per element, bfloat16 target with blocks of 128: 1 + 2/128 bytes read (int8) or 0.5 + 2/128 (int4), 2
// written. Each byte moves once.
//
// Build alone: hipcc -O3 --genco --offload-arch=gfx90a decode.hip -o decode.hsaco
//              nvcc -O3 -arch=sm_90 -cubin -x cu decode.hip -o decode.cubin
// Check alone: python -m pytest tests/kernels -k decode     (emulated on the host, and on a GPU if present)
#include "block.h"

namespace hz {

template <class Target, int BITS>
HZ_DEVICE void decode(const hz_bucket& bucket) {
  const Place at = place(bucket);
  const hz_tensor& tensor = at.tensor;
  hz_u8* record = record_at(bucket.checks, bucket.payload, bucket.row_bytes, bucket.inner, bucket.by_inner,
                            tensor.start, tensor.record_bytes, at.row);
  float x[16];
  hz_u32 words[BITS / 2];
  no_sums(x);
  const float unit = unit_of<BITS>(load_scale(record + tensor.scales, at));
  if (at.has_elements) {
    load_codes<BITS>(record, tensor.scales, at.element / 16, words, x);
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = mul(x[i], unit);
  }
  if (bucket.checks.sums)
    check<BITS>(bucket.checks, bucket.payload, bucket.inner * bucket.row_bytes, quotient(at.row, bucket.by_inner),
                record, tensor.scales, at, words);
  if (bucket.rotation) hadamard(bucket, at, x, 1.0f);
  const hz_i64 first = shard_of(bucket, at.row) * tensor.chunk;
  const int count = at.has_elements ? (int)(tensor.chunk - at.element) : 0;
  store<Target>(bucket, at, pointer<typename Target::type>(tensor.data) + first, (int)tensor.chunk, count, x);
}

// Codecs none and bf16: the elements of a record, or bfloat16 ones as another type.
template <class Target, int BYTES, bool CASTS = false>
HZ_DEVICE void decode_elements(const hz_bucket& bucket) {
  const Place at = place(bucket);
  const hz_tensor& tensor = at.tensor;
  hz_u8* record = record_at(bucket.checks, bucket.payload, bucket.row_bytes, bucket.inner, bucket.by_inner,
                            tensor.start, tensor.record_bytes, at.row);
  Words words[BYTES];
  load_elements<BYTES>(own_of<BYTES>(record, at), at, words);
  if (bucket.checks.sums)
    check_elements<BYTES>(bucket.checks, bucket.payload, bucket.inner * bucket.row_bytes,
                          quotient(at.row, bucket.by_inner), own_of<BYTES>(record, at), at, words);
  typename Target::type* shard = pointer<typename Target::type>(tensor.data) + shard_of(bucket, at.row) * tensor.chunk;
  const int count = at.has_elements ? (int)(tensor.chunk - at.element) : 0;
  if constexpr (CASTS) {
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = element_of<Bf16>(words, i);
    store<Target>(bucket, at, shard, (int)tensor.chunk, count, x);
  } else {
    write<BYTES>(bucket, at, shard, (int)tensor.chunk, count, words);
  }
}

}  // namespace hz

#define HZ_DECODE(codec, bits, name, Target) \
  HZ_KERNEL(decode_##codec##_##name) { hz::decode<hz::Target, bits>(bucket); }
HZ_DECODE(int8, 8, fp32, Fp32)
HZ_DECODE(int8, 8, bf16, Bf16)
HZ_DECODE(int8, 8, fp16, Fp16)
HZ_DECODE(int4, 4, fp32, Fp32)
HZ_DECODE(int4, 4, bf16, Bf16)
HZ_DECODE(int4, 4, fp16, Fp16)
HZ_KERNEL(decode_none_8) { hz::decode_elements<hz::Bits<1>, 1>(bucket); }
HZ_KERNEL(decode_none_16) { hz::decode_elements<hz::Bits<2>, 2>(bucket); }
HZ_KERNEL(decode_none_32) { hz::decode_elements<hz::Bits<4>, 4>(bucket); }
HZ_KERNEL(decode_bf16_fp32) { hz::decode_elements<hz::Fp32, 2, true>(bucket); }
HZ_KERNEL(decode_bf16_fp16) { hz::decode_elements<hz::Fp16, 2, true>(bucket); }
