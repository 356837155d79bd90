// The widest vectors that a target has, by the vector extensions of GCC and clang, with intrinsics where those compile
// to something slow. Compiled once for each instruction set, inside that set's namespace.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define HZ_INLINE static inline __attribute__((always_inline))
#define HZ_APART static __attribute__((noinline))  // what is seldom called takes no registers of a loop

namespace hz {
namespace HZ_ISA {

#if defined(__AVX512F__)
constexpr int lanes = 16;
#elif defined(__AVX2__)
constexpr int lanes = 8;
#else
constexpr int lanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * lanes)));
typedef int32_t Ints __attribute__((vector_size(4 * lanes)));
typedef uint32_t Words __attribute__((vector_size(4 * lanes)));
typedef uint64_t Pairs __attribute__((vector_size(4 * lanes)));
typedef int16_t Shorts __attribute__((vector_size(2 * lanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * lanes)));
typedef int8_t Bytes __attribute__((vector_size(lanes)));
typedef uint8_t PackedBytes __attribute__((vector_size(lanes / 2)));

template <class Vector, class Element>
HZ_INLINE Vector load(const Element* from) {
  Vector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
template <class Element, class Vector>
HZ_INLINE void store(Element* to, Vector v) {
  std::memcpy(to, &v, sizeof v);
}
HZ_INLINE float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
HZ_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
HZ_INLINE Floats broadcast(float x) { return x - Floats{}; }  // a sum with +0 would lose the sign of -0
HZ_INLINE Floats magnitude(Floats x) { return (Floats)((Words)x & 0x7fffffff); }

// Of numbers; what they make of NaN is left open.
HZ_INLINE Floats smaller(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#elif defined(__SSE2__)
  return _mm_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}
HZ_INLINE Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#elif defined(__SSE2__)
  return _mm_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

// a * b + c, rounded once. Without an instruction for it, a call for each element.
#if defined(__AVX512F__) || defined(__FMA__) || defined(__ARM_FEATURE_FMA)
constexpr bool has_fused = true;
#else
constexpr bool has_fused = false;
#endif
HZ_INLINE Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  for (int i = 0; i < lanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

// Products, of 64 bits, of the words of even index.
HZ_INLINE Pairs products(Words a, Words b) {
#if defined(__AVX512F__)
  return (Pairs)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (Pairs)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (Pairs)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return ((Pairs)a & 0xffffffff) * ((Pairs)b & 0xffffffff);
#endif
}

// Two vectors of successive elements from those of even and of odd index, and back.
HZ_INLINE void merge(Floats even, Floats odd, Floats& first, Floats& second) {
#if defined(__AVX512F__)
  const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  first = _mm512_permutex2var_ps(even, low, odd);
  second = _mm512_permutex2var_ps(even, _mm512_add_epi32(low, _mm512_set1_epi32(8)), odd);
#elif defined(__AVX2__)
  const __m256 low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
  first = _mm256_permute2f128_ps(low, high, 0x20);
  second = _mm256_permute2f128_ps(low, high, 0x31);
#else
  float merged[2 * lanes];
  for (int i = 0; i < lanes; ++i) merged[2 * i] = even[i], merged[2 * i + 1] = odd[i];
  first = load<Floats>(merged), second = load<Floats>(merged + lanes);
#endif
}
HZ_INLINE void split(Floats first, Floats second, Floats& even, Floats& odd) {
  float merged[2 * lanes];
  store(merged, first);
  store(merged + lanes, second);
  for (int i = 0; i < lanes; ++i) even[i] = merged[2 * i], odd[i] = merged[2 * i + 1];
}

// The largest of 16-bit or 32-bit integers, unsigned.
#if defined(__AVX2__)
HZ_INLINE uint32_t largest(__m128i v, uint16_t) {
  return 0xffff - (_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(v, _mm_set1_epi8(-1)))) & 0xffff);
}
HZ_INLINE uint32_t largest(__m128i v, uint32_t) {
  v = _mm_max_epu32(v, _mm_shuffle_epi32(v, 0x4e));
  return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(v, _mm_shuffle_epi32(v, 0xb1)));
}
HZ_INLINE uint32_t largest(__m256i v, uint16_t of) {
  return largest(_mm_max_epu16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)), of);
}
HZ_INLINE uint32_t largest(__m256i v, uint32_t of) {
  return largest(_mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)), of);
}
#if defined(__AVX512F__)
HZ_INLINE uint32_t largest(__m512i v, uint16_t of) {
  return largest(_mm256_max_epu16(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1)), of);
}
HZ_INLINE uint32_t largest(__m512i v, uint32_t of) {
  return largest(_mm256_max_epu32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1)), of);
}
#endif
#else
template <class Vector, class Element>
HZ_INLINE uint32_t largest(Vector v, Element) {
  Element of[sizeof v / sizeof(Element)], most = 0;
  std::memcpy(of, &v, sizeof v);
  for (Element x : of) most = x > most ? x : most;
  return most;
}
#endif

// To bfloat16, to nearest even; the upper half of the result is zero. Takes no NaN.
HZ_INLINE Words bf16_of(Floats x) {
  const Words bits = (Words)x;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// A vector of halves as words.
HZ_INLINE Words load_halves(const uint16_t* from) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu16_epi32(load<__m256i>(from));
#else
  return __builtin_convertvector(load<Halves>(from), Words);
#endif
}

// Element types: storage, and a vector of them from and to float32.
struct Fp32 {
  typedef float type;
  HZ_INLINE Floats widen(const float* from) { return load<Floats>(from); }
  HZ_INLINE void narrow(float* to, Floats x) { store(to, x); }
  HZ_INLINE float nan() { return float_of(0x7fc00000); }
};
struct Bf16 {
  typedef uint16_t type;
  HZ_INLINE Floats widen(const uint16_t* from) { return (Floats)(load_halves(from) << 16); }
  HZ_INLINE void narrow(uint16_t* to, Floats x) { store(to, __builtin_convertvector(bf16_of(x), Halves)); }
  HZ_INLINE uint16_t nan() { return 0x7fc0; }
};
struct Fp16 {
  typedef uint16_t type;
#if defined(__AVX512F__)
  HZ_INLINE Floats widen(const uint16_t* from) { return _mm512_cvtph_ps(load<__m256i>(from)); }
  HZ_INLINE void narrow(uint16_t* to, Floats x) { store(to, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
#elif defined(__F16C__)
  HZ_INLINE Floats widen(const uint16_t* from) { return _mm256_cvtph_ps(load<__m128i>(from)); }
  HZ_INLINE void narrow(uint16_t* to, Floats x) { store(to, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
#else
  HZ_INLINE Floats widen(const uint16_t* from) {
    const Words half = __builtin_convertvector(load<Halves>(from), Words), size = half & 0x7fff;
    const Words bits = (Words)((Floats)(size << 13) * 0x1p112f), special = (Words)(size >= 0x7c00) & 0x7f800000;
    return (Floats)(bits | special | (half & 0x8000) << 16);
  }
  HZ_INLINE void narrow(uint16_t* to, Floats x) {
    const Words bits = (Words)x & 0x7fffffff;
    // Normal: round away 13 bits. Subnormal: half a unit in the last place of 0.5 is theirs. Beyond: infinity.
    const Words normal = ((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112 << 10);
    const Words subnormal = (Words)((Floats)bits + 0.5f) - 0x3f000000;
    const Words small = (Words)(bits < 0x38800000), large = (Words)(bits >= 0x477ff000);
    const Words nan = (Words)(bits > 0x7f800000) & 0x200;
    const Words half = (small & subnormal) | (~small & ~large & normal) | (large & 0x7c00) | nan;
    store(to, __builtin_convertvector(half | ((Words)x >> 16 & 0x8000), Halves));
  }
#endif
  HZ_INLINE uint16_t nan() { return 0x7e00; }
};

#if defined(__AVX512F__)
// The lower 16 bits of each word of two vectors.
HZ_INLINE __m512i low_halves(Words first, Words second) {
  const __m512i even = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26, 24,
                                        22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  return _mm512_permutex2var_epi16((__m512i)first, even, (__m512i)second);
}
#endif

// A vector of codes between payload and float32. `pack` takes them as integers in the low bits of words.
template <int BITS>
struct Codes;
template <>
struct Codes<8> {
  HZ_INLINE void pack(uint8_t* to, Words codes) {
#if defined(__AVX512F__)
    // Not vpmovdb, which takes tens of cycles to memory on some processors (Zen 4).
    const __m512i first = _mm512_set1_epi32(0x0c080400),
                  order = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
    const __m512i bytes = _mm512_shuffle_epi8((__m512i)codes, first);
    store(to, _mm512_castsi512_si128(_mm512_permutexvar_epi32(order, bytes)));
#else
    store(to, __builtin_convertvector(__builtin_convertvector((Ints)codes, Shorts), Bytes));
#endif
  }
  HZ_INLINE void pack(uint8_t* to, Words first, Words second) {
#if defined(__AVX512F__)
    const __m512i even = _mm512_set1_epi64(0x0e0c0a0806040200), order = _mm512_set_epi64(0, 0, 0, 0, 6, 4, 2, 0);
    const __m512i bytes = _mm512_shuffle_epi8(low_halves(first, second), even);
    store(to, _mm512_castsi512_si256(_mm512_permutexvar_epi64(order, bytes)));
#else
    pack(to, first);
    pack(to + lanes, second);
#endif
  }
  HZ_INLINE Floats unpack(const uint8_t* from) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from)));
#else
    const Shorts codes = __builtin_convertvector(load<Bytes>(from), Shorts);
    return __builtin_convertvector(__builtin_convertvector(codes, Ints), Floats);
#endif
  }
};
template <>
struct Codes<4> {
  HZ_INLINE void pack(uint8_t* to, Words codes) {
    // Two codes stand in each 64 bits; the pair goes to the lowest 8 of them.
    const Pairs pairs = (Pairs)(codes & 15);
#if defined(__AVX512F__)
    const __m512i first = _mm512_set1_epi32(0x08000800),
                  order = _mm512_set_epi64(0, 0, 0, 0, 0, 0, 0, 0x0018001000080000);
    const __m512i bytes = _mm512_shuffle_epi8((__m512i)(pairs | pairs >> 28), first);
    _mm_storel_epi64((__m128i*)to, _mm512_castsi512_si128(_mm512_permutexvar_epi16(order, bytes)));
#else
    const Words words = (Words)(pairs | pairs >> 28);
    for (int i = 0; i < lanes / 2; ++i) to[i] = (uint8_t)words[2 * i];
#endif
  }
  HZ_INLINE void pack(uint8_t* to, Words first, Words second) {
#if defined(__AVX512F__)
    // Pairs of 16-bit codes: one plus sixteen times the other.
    const __m512i codes = _mm512_and_si512(low_halves(first, second), _mm512_set1_epi32(0x000f000f));
    const __m512i sums = _mm512_madd_epi16(codes, _mm512_set1_epi32(0x00100001));
    Codes<8>::pack(to, (Words)sums);
#else
    pack(to, first);
    pack(to + lanes / 2, second);
#endif
  }
  HZ_INLINE Floats unpack(const uint8_t* from) {
#if defined(__AVX512F__)
    const Pairs bytes = (Pairs)_mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i*)from));
#else
    const Pairs bytes = __builtin_convertvector(load<PackedBytes>(from), Pairs);
#endif
    // Each code to the top of its 32 bits, and down again with its sign.
    return __builtin_convertvector((Ints)(bytes << 28 | bytes << 56) >> 28, Floats);
  }
  // Twice as many: those of even and of odd index.
  HZ_INLINE void unpack(const uint8_t* from, Floats& even, Floats& odd) {
#if defined(__AVX512F__)
    const __m512 values = _mm512_set_ps(-1, -2, -3, -4, -5, -6, -7, -8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i bytes = _mm512_cvtepu8_epi32(load<__m128i>(from));
    even = _mm512_permutexvar_ps(bytes, values);
    odd = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), values);
#else
    typedef uint8_t Unsigned __attribute__((vector_size(lanes)));
    const Words bytes = __builtin_convertvector(__builtin_convertvector(load<Unsigned>(from), Halves), Words);
    even = __builtin_convertvector((Ints)(bytes << 28) >> 28, Floats);
    odd = __builtin_convertvector((Ints)(bytes << 24) >> 28, Floats);
#endif
  }
};

}  // namespace HZ_ISA
}  // namespace hz
