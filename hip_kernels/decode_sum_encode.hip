// Decode, sum and encode: the work of a rank between two hops of a reduce-scatter, in one pass.
//
// Sums the payloads of several peers as decode_sum does and encodes the sums from registers as encode does, for the
// next hop: another codec, but the same block size. Rows keep their order; the payload written has its
// own pieces (`out_inner` rows each). Both payloads are rotated alike, if they are, and so is the sum.
//
// Memory traffic per element of the sum, k peers with blocks of 128, from int8 to int4: k * (1 + 2/128) bytes read,
// 0.5 + 2/128 written. Each byte moves once.
//
// Build alone: hipcc -O3 --genco --offload-arch=gfx90a decode_sum_encode.hip -o decode_sum_encode.hsaco
//              nvcc -O3 -arch=sm_90 -cubin -x cu decode_sum_encode.hip -o decode_sum_encode.cubin
// Check alone: python -m pytest tests/kernels -k sum_encode (emulated on the host, and on a GPU if present)
#include "sum.h"

namespace hz {

template <int BITS, int OUT_BITS>
HZ_DEVICE void decode_sum_encode(const hz_bucket& bucket) {
  const Place at = place(bucket);
  float sums[16];
  no_sums(sums);
  add_peers<BITS>(bucket, at, sums);
  hz_u32 words[OUT_BITS / 2];
  const float scale = encode_block<OUT_BITS>(bucket, at, sums, words);
  const hz_u32 row = anew(at.row);
  hz_u8* record = record_at(bucket.out_checks, bucket.out_payload, bucket.out_row_bytes, bucket.out_inner,
                            bucket.by_out_inner, at.tensor.out_start, at.tensor.out_record_bytes, row);
  store_block<OUT_BITS>(record, at.tensor.out_scales, at, words, scale);
  if (bucket.out_checks.sums)
    check<OUT_BITS>(bucket.out_checks, bucket.out_payload, bucket.out_inner * bucket.out_row_bytes,
                    quotient(row, bucket.by_out_inner), record, at.tensor.out_scales, at, words);
}

// Codec none: the sum, rounded once. It may be written where the first peer's payload was.
template <class Type>
HZ_DEVICE void add_up_elements(const hz_bucket& bucket) {
  const Place at = place(bucket);
  float sums[16];
  no_sums(sums);
  add_elements<Type>(bucket, at, sums);
  const hz_u32 row = anew(at.row);
  hz_u8* record = record_at(bucket.out_checks, bucket.out_payload, bucket.out_row_bytes, bucket.out_inner,
                            bucket.by_out_inner, at.tensor.out_start, at.tensor.out_record_bytes, row);
  const hz_u32 rest = at.has_elements ? at.tensor.chunk - at.element : 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    sums[i] = sums[i] == sums[i] ? sums[i] : float_of(0x7fc00000u);  // the only NaN that a sum becomes
    sums[i] = i < (int)(rest < 16 ? rest : 16) ? sums[i] : 0.0f;     // -0 is no padding
  }
  Words words[Type::bytes];
  words_of<Type>(sums, words);
  store_elements<Type::bytes>(own_of<Type::bytes>(record, at), at, words);
  if (bucket.out_checks.sums)
    check_elements<Type::bytes>(bucket.out_checks, bucket.out_payload, bucket.out_inner * bucket.out_row_bytes,
                                quotient(row, bucket.by_out_inner), own_of<Type::bytes>(record, at), at, words);
}

}  // namespace hz

#define HZ_SUM(codec, bits, out, out_bits) \
  HZ_KERNEL(decode_sum_encode_##codec##_##out) { hz::decode_sum_encode<bits, out_bits>(bucket); }
HZ_SUM(int8, 8, int8, 8)
HZ_SUM(int8, 8, int4, 4)
HZ_SUM(int4, 4, int8, 8)
HZ_SUM(int4, 4, int4, 4)
HZ_KERNEL(decode_sum_encode_none_none_fp32) { hz::add_up_elements<hz::Fp32>(bucket); }
HZ_KERNEL(decode_sum_encode_none_none_bf16) { hz::add_up_elements<hz::Bf16>(bucket); }
HZ_KERNEL(decode_sum_encode_none_none_fp16) { hz::add_up_elements<hz::Fp16>(bucket); }
