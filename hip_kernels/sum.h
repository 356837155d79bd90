// The sum over peers that decode_sum and decode_sum_encode share.
#pragma once
#include "block.h"

namespace hz {

// Adds 16 elements of this thread of all peers; those beyond the record are zero, or NaN where the whole block is.
template <int BITS>
HZ_DEVICE void add_peers(const hz_bucket& bucket, const Place& at, float (&sums)[16]) {
  const hz_u8* record = record_at(bucket.checks, bucket.payload, bucket.row_bytes, bucket.inner, bucket.by_inner,
                                  at.tensor.start, at.tensor.record_bytes, at.row);
  const hz_i64 piece_bytes = bucket.inner * bucket.row_bytes;
  const hz_i64 step = piece_bytes + (bucket.checks.sums ? HZ_CHECKSUM_BYTES : 0);
  // Each thread of a block reads the scale of another peer, for all of them.
  const hz_u32 lanes = 1u << at.tensor.lanes_shift;
  hz_u32 scales = 0;
#pragma unroll 1  // two at a time would take more than 64 registers; not measured
  for (hz_u32 peer = 0; peer < bucket.outer; ++peer, record += step) {
    hz_u32 words[BITS / 2];
    const hz_u32 turn = peer & (lanes - 1);
    if (!turn && at.row < bucket.rows && peer + at.lane < bucket.outer)
      scales = ((const hz_u16*)(record + at.lane * step + at.tensor.scales))[at.block];
    const float unit = unit_of<BITS>(float_of(of_lane(scales, thread() - at.lane + turn) << 16));
    if (at.has_elements) {
      float codes[16];
      load_codes<BITS>(record, at.tensor.scales, at.element / 16, words, codes);
#pragma unroll
      for (int i = 0; i < 16; ++i) sums[i] = add(sums[i], mul(codes[i], unit));
    }
    if (bucket.checks.sums)
      check<BITS>(bucket.checks, bucket.payload, piece_bytes, peer, record, at.tensor.scales, at, words);
  }
}

// The same of elements, the records of codecs none and bf16.
template <class Type>
HZ_DEVICE void add_elements(const hz_bucket& bucket, const Place& at, float (&sums)[16]) {
  const Words* own = own_of<Type::bytes>(record_at(bucket.checks, bucket.payload, bucket.row_bytes, bucket.inner,
                                                   bucket.by_inner, at.tensor.start, at.tensor.record_bytes, at.row),
                                         at);
  const hz_i64 piece_bytes = bucket.inner * bucket.row_bytes;
  const hz_i64 step = piece_bytes + (bucket.checks.sums ? HZ_CHECKSUM_BYTES : 0);
  hz_u32 peer = 0;
#pragma unroll 1
  do {  // there is one at least; a loop that may have none keeps the sums twice
    Words words[Type::bytes];
    load_elements<Type::bytes>(own, at, words);
    if (bucket.checks.sums)
      check_elements<Type::bytes>(bucket.checks, bucket.payload, piece_bytes, peer, own, at, words);
#pragma unroll
    for (int i = 0; i < 16; ++i) sums[i] = add(sums[i], element_of<Type>(words, i));
    own += step / 16;
  } while (++peer < bucket.outer);
}

}  // namespace hz
