// The rotation of elements before they are coded, on a processor (docs/payload_format.md).
#pragma once
#include "vector.h"

namespace hz {
namespace HZ_ISA {

// One round of butterflies between neighbours in a vector: a + b in the lower lane of a pair, a - b in the other one.
template <int DISTANCE>
HZ_INLINE Floats butterflies(Floats x) {
  Floats other;
  Words signs;
  for (int lane = 0; lane < lanes; ++lane)
    other[lane] = x[lane ^ DISTANCE], signs[lane] = lane & DISTANCE ? 1u << 31 : 0;
  return other + (Floats)((Words)x ^ signs);
}

// Rotates the groups of `count` elements, times `factor`, in all blocks that consist of such groups: a Walsh-Hadamard
// transform, the nearest elements first.
HZ_INLINE void hadamard(const hz_bucket& bucket, float* x, uint32_t count, float factor) {
  const uint32_t size = bucket.rotation, whole = count % size ? count / bucket.block_size * bucket.block_size : count;
  for (const float* end = x + whole; x < end; x += size) {
    for (uint32_t i = 0; i < size; i += lanes) {
      Floats v = load<Floats>(x + i) * factor;
      v = butterflies<2>(butterflies<1>(v));
      if (lanes > 4) v = butterflies<4 % lanes>(v);
      if (lanes > 8) v = butterflies<8 % lanes>(v);
      store(x + i, v);
    }
    for (uint32_t distance = lanes; distance < size; distance *= 2)
      for (uint32_t first = 0; first < size; first += 2 * distance)
        for (uint32_t i = first; i < first + distance; i += lanes) {
          const Floats a = load<Floats>(x + i), b = load<Floats>(x + i + distance);
          store(x + i, a + b);
          store(x + i + distance, a - b);
        }
  }
}

}  // namespace HZ_ISA
}  // namespace hz
