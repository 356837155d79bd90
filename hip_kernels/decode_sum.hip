// Decode and sum: the payloads of several peers, int8 or int4, summed in float32 in the order of the peers.
//
// The bucket's `outer` counts the peers. Each element starts from peer 0's value, or from a sum that exists; the others
// are added one by one, each product and each sum rounded by itself, so that the result does not depend on where it is
// computed.
// Rotated ones are rotated back once they are summed, before a sum that exists is added.
//
// Memory traffic per element of the sum, k peers with blocks of 128: k * (1 + 2/128) bytes read (int8) or k * (0.5 +
// 2/128) (int4), 4 written, and 4 read where a sum exists. Each byte moves once.
//
// Build alone: hipcc -O3 --genco --offload-arch=gfx90a decode_sum.hip -o decode_sum.hsaco
//              nvcc -O3 -arch=sm_90 -cubin -x cu decode_sum.hip -o decode_sum.cubin
// Check alone: python -m pytest tests/kernels -k decode_sum (emulated on the host, and on a GPU if present)
#include "sum.h"

namespace hz {

template <int BITS>
HZ_DEVICE void decode_sum(const hz_bucket& bucket) {
  const Place at = place(bucket);
  float sums[16];
  no_sums(sums);
  const hz_i64 first = (hz_i64)at.row * at.tensor.chunk;
  const int count = at.has_elements ? (int)(at.tensor.chunk - at.element) : 0;
  const float* before = pointer<const float>(at.tensor.residual);
  if (before && !bucket.rotation) load<Fp32>(before + first, at.element, count, sums);
  add_peers<BITS>(bucket, at, sums);
  if (bucket.rotation) {
    hadamard(bucket, at, sums, 1.0f);
    if (before) {
      float own[16];
      load<Fp32>(before + first, at.element, count, own);
#pragma unroll
      for (int i = 0; i < 16; ++i) sums[i] = add(own[i], sums[i]);
    }
  }
  store<Fp32>(bucket, at, pointer<float>(at.tensor.data) + first, (int)at.tensor.chunk, count, sums);
}

// Codecs none and bf16.
template <class Type>
HZ_DEVICE void decode_sum_elements(const hz_bucket& bucket) {
  const Place at = place(bucket);
  float sums[16];
  no_sums(sums);
  const int count = at.has_elements ? (int)(at.tensor.chunk - at.element) : 0;
  if (at.tensor.residual)
    load<Fp32>(pointer<const float>(at.tensor.residual) + (hz_i64)at.row * at.tensor.chunk, at.element, count, sums);
  add_elements<Type>(bucket, at, sums);
  const hz_i64 first = (hz_i64)anew(at.row) * at.tensor.chunk;
  store<Fp32>(bucket, at, pointer<float>(at.tensor.data) + first, (int)at.tensor.chunk, count, sums);
}

}  // namespace hz

HZ_KERNEL(decode_sum_int8) { hz::decode_sum<8>(bucket); }
HZ_KERNEL(decode_sum_int4) { hz::decode_sum<4>(bucket); }
HZ_KERNEL(decode_sum_none_fp32) { hz::decode_sum_elements<hz::Fp32>(bucket); }
HZ_KERNEL(decode_sum_none_bf16) { hz::decode_sum_elements<hz::Bf16>(bucket); }
HZ_KERNEL(decode_sum_none_fp16) { hz::decode_sum_elements<hz::Fp16>(bucket); }
