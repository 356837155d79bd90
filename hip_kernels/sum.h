// The sum over peers that decode_sum and decode_sum_encode share.
#pragma once
#include "block.h"

namespace hz {

// Sums 16 elements of this thread over the peers; those beyond the record are zero, or NaN
// where the whole block is.
template <int BITS>
HZ_DEVICE void sum_of_peers(const hz_bucket& bucket, const Place& at, float (&sums)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) sums[i] = 0.0f;
  if (!at.has_elements) return;
  const hz_u8* record =
      record_at(bucket.payload, bucket.row_bytes, bucket.inner, at.tensor.start, at.tensor.record_bytes, at.row);
#pragma unroll 2
  for (hz_u32 peer = 0; peer < bucket.outer; ++peer) {
    const float scale = load_scale(record + at.tensor.scales, at.block, bucket.scale_bytes);
    float codes[16];
    load_codes<BITS>(record, at.element / 16, codes);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float part = mul(codes[i], scale);
      sums[i] = peer == 0 ? part : add(sums[i], part);
    }
    record += bucket.inner * bucket.row_bytes;
  }
}

}  // namespace hz
