// Encode: block quantisation of a bucket of tensors into one payload, int8 or int4; or their elements, none and bf16.
//
// Computes, for every block of a record: the scale from the block's extreme, the codes to nearest even or
// stochastically, and, where residuals are given, the same of source + factor * residual together with what the codes
// lose of it, all in one pass (docs/payload_format.md). Groups of elements are rotated first where the bucket says so.
// Shards are read in the order of the payload's rows.
//
// Memory traffic per element, bfloat16 source with blocks of 128: 2 bytes read, 1 + 2/128 (int8) or 0.5 + 2/128 (int4)
// written; with residuals in bfloat16 2 read and 2 written more. Each byte moves once.
//
// Build alone: hipcc -O3 --genco --offload-arch=gfx90a encode.hip -o encode.hsaco
//              nvcc -O3 -arch=sm_90 -cubin -x cu encode.hip -o encode.cubin
// Check alone: python -m pytest tests/kernels -k encode     (emulated on the host, and on a GPU if present)
#include "block.h"

namespace hz {

template <class Source, int BITS>
HZ_DEVICE void encode(const hz_bucket& bucket) {
  const Place at = place(bucket);
  const hz_tensor& tensor = at.tensor;
  const hz_i64 first = shard_of(bucket, at.row) * tensor.chunk;
  const int count = at.has_elements ? (int)present(tensor, first) - (int)at.element : 0;
  float x[16];
  load<Source>(pointer<const typename Source::type>(tensor.data) + first, at.element, count, x);
  if (tensor.residual) {
    float residual[16];
    if (bucket.kept_bytes == 2)
      load<Bf16>(pointer<const hz_u16>(tensor.residual) + first, at.element, count, residual);
    else
      load<Fp32>(pointer<const float>(tensor.residual) + first, at.element, count, residual);
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = add(x[i], mul(residual[i], tensor.factor));
  }
  if (bucket.rotation) hadamard(bucket, at, x, divide(1.0f, (float)bucket.rotation));
  hz_u32 words[BITS / 2];
  const float scale = encode_block<BITS>(bucket, at, x, words);
  const hz_u32 row = anew(at.row);
  hz_u8* record = record_at(bucket.checks, bucket.payload, bucket.row_bytes, bucket.inner, bucket.by_inner,
                            tensor.start, tensor.record_bytes, row);
  store_block<BITS>(record, tensor.scales, at, words, scale);
  if (bucket.checks.sums)
    check<BITS>(bucket.checks, bucket.payload, bucket.inner * bucket.row_bytes, quotient(row, bucket.by_inner), record,
                tensor.scales, at, words);
  if (tensor.left) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int code = (int)(words[i * BITS / 32] << (32 - BITS - i * BITS % 32)) >> (32 - BITS);
      const float lost = sub(x[i], mul((float)code, scale));
      // A block that is not finite keeps nothing: its codes say nothing of it.
      x[i] = (bits_of(lost) & 0x7f800000u) == 0x7f800000u ? 0.0f : lost;
    }
    if (bucket.rotation) {
      hadamard(bucket, at, x, 1.0f);
#pragma unroll
      for (int i = 0; i < 16; ++i) x[i] = (bits_of(x[i]) & 0x7f800000u) == 0x7f800000u ? 0.0f : x[i];  // an overflow
    }
    const hz_i64 begin = shard_of(bucket, row) * tensor.chunk;
    const int kept = at.has_elements ? (int)present(tensor, begin) - (int)at.element : 0;
    if (bucket.kept_bytes == 2)
      store<Bf16>(bucket, at, pointer<hz_u16>(tensor.left) + begin, (int)at.element + kept, kept, x);
    else
      store<Fp32>(bucket, at, pointer<float>(tensor.left) + begin, (int)at.element + kept, kept, x);
  }
}

// Codecs none and bf16: the bits of elements where a record has them, or bfloat16 of them.
template <class Source, int BYTES, bool CASTS = false>
HZ_DEVICE void encode_elements(const hz_bucket& bucket) {
  const Place at = place(bucket);
  const hz_tensor& tensor = at.tensor;
  const hz_i64 first = shard_of(bucket, at.row) * tensor.chunk;
  const int count = at.has_elements ? (int)present(tensor, first) - (int)at.element : 0;
  const typename Source::type* shard = pointer<const typename Source::type>(tensor.data) + first;
  Words words[BYTES];
  if constexpr (!CASTS) {
    read<BYTES>(shard, at.element, count, words);
  } else {
    float x[16];
    load<Source>(shard, at.element, count, x);
    words_of<Bf16>(x, words);
  }
  hz_u8* record = record_at(bucket.checks, bucket.payload, bucket.row_bytes, bucket.inner, bucket.by_inner,
                            tensor.start, tensor.record_bytes, at.row);
  store_elements<BYTES>(own_of<BYTES>(record, at), at, words);
  if (bucket.checks.sums)
    check_elements<BYTES>(bucket.checks, bucket.payload, bucket.inner * bucket.row_bytes,
                          quotient(at.row, bucket.by_inner), own_of<BYTES>(record, at), at, words);
}

}  // namespace hz

#define HZ_ENCODE(codec, bits, name, Source) \
  HZ_KERNEL(encode_##codec##_##name) { hz::encode<hz::Source, bits>(bucket); }
HZ_ENCODE(int8, 8, fp32, Fp32)
HZ_ENCODE(int8, 8, bf16, Bf16)
HZ_ENCODE(int8, 8, fp16, Fp16)
HZ_ENCODE(int4, 4, fp32, Fp32)
HZ_ENCODE(int4, 4, bf16, Bf16)
HZ_ENCODE(int4, 4, fp16, Fp16)
HZ_KERNEL(encode_none_8) { hz::encode_elements<hz::Bits<1>, 1>(bucket); }
HZ_KERNEL(encode_none_16) { hz::encode_elements<hz::Bits<2>, 2>(bucket); }
HZ_KERNEL(encode_none_32) { hz::encode_elements<hz::Bits<4>, 4>(bucket); }
HZ_KERNEL(encode_bf16_fp32) { hz::encode_elements<hz::Fp32, 2, true>(bucket); }
HZ_KERNEL(encode_bf16_fp16) { hz::encode_elements<hz::Fp16, 2, true>(bucket); }
