// The one header that knows compilers. It gives the kernels, under neutral names:
//
//   HZ_WAVE                lanes of a wave: 64 on gfx9, 32 on NVIDIA, either in the emulation
//   HZ_DEVICE              an inlined device function
//   pointer                into the device's memory, from an address
//   HZ_MEMBER              an inlined device function of a structure
//   HZ_KERNEL(name)        a kernel of one argument, the hz_bucket `bucket`, for workgroups of HZ_THREADS threads
//   HZ_KERNEL_OF           the same with an argument of any type and name, for so many waves of a SIMD on AMD
//   HZ_SHARED              a variable that the threads of a workgroup share
//   barrier                no thread goes on before all of its workgroup have come to it
//   thread, workgroup      indices
//   swap_halves            what the other half of 2 * m lanes holds, where all lanes of a half hold the same
//   swap_lanes<M>          what lane ^ M holds, M 1, 2 or 4
//   lanes_with             in how many lanes of the wave something holds
//   of_lane                what a lane holds, its index modulo HZ_WAVE
//   of_lane_before         what the lane before holds; of no meaning in the first lane
//   load_wide              16 bytes at a multiple of 16; those before `begin` and from `end` on are of no meaning
//   store_to               to an address that is a multiple of the value's size
//   store_at_once          16 bytes; clang may cut those of `store_to` where another path writes some of them
//   mul, add, sub, divide  float32, each rounded to nearest even by itself: never contracted, never approximated
//   fused                  a * b + c, rounded once
//   two_quotients          quotients_of in block.h with packed instructions, where HZ_TWO_AT_ONCE is defined
//   anew                   a number of which the compiler knows nothing: what is computed from it is computed again, so
//                          that no register keeps it meanwhile; and not before another number, if there is one
//   add_atomically         to a word of 64 or 32 bits in the device's memory
//   add_shared             the same to a word of 32 bits that a workgroup shares
//   lowest_bit             index of the lowest bit that is set, of a word that is not zero
//   bits_of, float_of      float32 and its bits
//   funnel                 the word that starts so many bits, below 32, from the end of the second one of two
//   from_half, to_half     float32 and float16, this one as 16 bits
//   two_bf16               float32 to bfloat16, to nearest even; NaN that arithmetic made, or that was a bfloat16,
//                          stays some NaN
//
// Compilers: hipcc, hiprtc and bare clang for AMD; nvcc and NVRTC for NVIDIA; a host compiler with HZ_EMULATE. None of
// their headers is included: the run-time compilers have few, and define some of the standard integer types themselves.
#pragma once
#include "bucket.h"

#define HZ_THREADS 256
#define HZ_KERNEL(name) HZ_KERNEL_OF(name, hz_bucket, bucket, 8)

#if defined(HZ_EMULATE)
#include "emulation.h"

#elif defined(__CUDACC__) || defined(__CUDACC_RTC__)  // ---- NVIDIA -------------------------------------------------

#define HZ_WAVE 32
#define HZ_DEVICE static __device__ __forceinline__
#define HZ_MEMBER __device__ __forceinline__
#define HZ_SHARED __shared__
// Three workgroups on a multiprocessor leave 80 registers a thread. With 64, for four, decode_sum spills.
#define HZ_KERNEL_OF(name, Argument, argument, waves) \
  extern "C" __global__ void __launch_bounds__(HZ_THREADS, 3) name(const __grid_constant__ Argument argument)

namespace hz {
template <class T>
HZ_DEVICE T* pointer(hz_u64 address) {
  return (T*)address;
}
HZ_DEVICE hz_u32 thread() { return threadIdx.x; }
HZ_DEVICE hz_u32 workgroup() { return blockIdx.x; }
HZ_DEVICE hz_u32 swap_halves(hz_u32 value, hz_u32 m) { return __shfl_xor_sync(0xffffffffu, value, m); }
template <int M>
HZ_DEVICE hz_u32 swap_lanes(hz_u32 value) {
  return __shfl_xor_sync(0xffffffffu, value, M);
}
HZ_DEVICE hz_u32 anew(hz_u32 number, hz_u32 behind = 0) {
  asm volatile("" : "+r"(number) : "r"(behind));
  return number;
}
HZ_DEVICE hz_u32 lanes_with(bool holds) { return __popc(__ballot_sync(0xffffffffu, holds)); }
HZ_DEVICE hz_u32 of_lane(hz_u32 value, hz_u32 lane) { return __shfl_sync(0xffffffffu, value, lane); }
HZ_DEVICE hz_u32 of_lane_before(hz_u32 value) { return __shfl_up_sync(0xffffffffu, value, 1); }
HZ_DEVICE void add_atomically(hz_u64* to, hz_u64 value) { atomicAdd(to, value); }
HZ_DEVICE void add_atomically(hz_u32* to, hz_u32 value) { atomicAdd(to, value); }
HZ_DEVICE void add_shared(hz_u32* to, hz_u32 value) { atomicAdd(to, value); }
HZ_DEVICE void barrier() { __syncthreads(); }
HZ_DEVICE hz_u32 lowest_bit(hz_u32 word) { return __ffs(word) - 1; }
HZ_DEVICE hz_u32 funnel(hz_u32 high, hz_u32 low, hz_u32 bits) { return __funnelshift_r(low, high, bits); }
HZ_DEVICE hz_u32 bits_of(float x) { return __float_as_uint(x); }
HZ_DEVICE float float_of(hz_u32 bits) { return __uint_as_float(bits); }
HZ_DEVICE float mul(float a, float b) { return __fmul_rn(a, b); }
HZ_DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
HZ_DEVICE float sub(float a, float b) { return __fsub_rn(a, b); }
HZ_DEVICE float divide(float a, float b) { return __fdiv_rn(a, b); }
HZ_DEVICE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
HZ_DEVICE float round_down(float x) { return floorf(x); }
HZ_DEVICE float clamp(float x, float low, float high) { return fminf(fmaxf(x, low), high); }
HZ_DEVICE float from_half(hz_u16 bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
HZ_DEVICE hz_u16 to_half(float x) {
  hz_u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
HZ_DEVICE hz_u32 two_bf16(float low, float high) {
#if __CUDA_ARCH__ >= 800
  hz_u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
#else
  const hz_u32 a = low == low ? bits_of(low) : 0x7fc00000u, b = high == high ? bits_of(high) : 0x7fc00000u;
  return (a + 0x7fff + (a >> 16 & 1)) >> 16 | ((b + 0x7fff + (b >> 16 & 1)) & 0xffff0000u);
#endif
}
}  // namespace hz

#else  // ---- AMD ---------------------------------------------------------------------------------------------------

#if defined(__AMDGCN__) && !defined(__GFX9__)
#error "the kernels are written for the 64 lanes of gfx9 (MI50 to MI300)"
#endif
#define HZ_WAVE 64
#define HZ_DEVICE static inline __attribute__((device, always_inline))
#define HZ_MEMBER __attribute__((device, always_inline))
#define HZ_SHARED __attribute__((shared))
// With 8 waves per SIMD each has 64 vector registers. Without this number a compiler may take more, and a wave is lost.
#define HZ_KERNEL_OF(name, Argument, argument, waves)                                                               \
  extern "C"                                                                                                        \
      __attribute__((global, amdgpu_flat_work_group_size(HZ_THREADS, HZ_THREADS), amdgpu_waves_per_eu(waves))) void \
      name(const Argument argument)

namespace hz {
#pragma clang fp contract(off)
// Through the global address space: the compiler infers it from here on, and need not emit the slower flat accesses.
template <class T>
HZ_DEVICE T* pointer(hz_u64 address) {
  return (T*)(__attribute__((address_space(1))) T*)address;
}
HZ_DEVICE hz_u32 thread() { return __builtin_amdgcn_workitem_id_x(); }
HZ_DEVICE hz_u32 workgroup() { return __builtin_amdgcn_workgroup_id_x(); }
// Within a row of 16 lanes by DPP, which costs no trip to the crossbar.
template <int CONTROL>
HZ_DEVICE hz_u32 dpp(hz_u32 value) {
  return __builtin_amdgcn_update_dpp(0, value, CONTROL, 0xf, 0xf, true);
}
HZ_DEVICE hz_u32 crossbar(hz_u32 value, hz_u32 lane) { return __builtin_amdgcn_ds_bpermute(lane * 4, value); }
HZ_DEVICE hz_u32 anew(hz_u32 number, hz_u32 behind = 0) {
  asm volatile("" : "+v"(number) : "v"(behind));
  return number;
}
HZ_DEVICE hz_u32 lanes_with(bool holds) {
  return __builtin_popcountll(__builtin_amdgcn_uicmp((hz_u32)holds, 0u, 33));  // 33: not equal
}
HZ_DEVICE hz_u32 of_lane(hz_u32 value, hz_u32 lane) { return crossbar(value, lane); }
HZ_DEVICE hz_u32 of_lane_before(hz_u32 value) { return dpp<0x138>(value); }  // wave_shr 1
HZ_DEVICE void add_atomically(hz_u64* to, hz_u64 value) {
  __hip_atomic_fetch_add(to, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
HZ_DEVICE void add_atomically(hz_u32* to, hz_u32 value) {
  __hip_atomic_fetch_add(to, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
HZ_DEVICE void add_shared(hz_u32* to, hz_u32 value) {
  __hip_atomic_fetch_add(to, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
HZ_DEVICE void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
HZ_DEVICE hz_u32 lowest_bit(hz_u32 word) { return __builtin_ctz(word); }
HZ_DEVICE hz_u32 bits_of(float x) { return __builtin_bit_cast(hz_u32, x); }
HZ_DEVICE float float_of(hz_u32 bits) { return __builtin_bit_cast(float, bits); }
HZ_DEVICE float mul(float a, float b) { return a * b; }
HZ_DEVICE float add(float a, float b) { return a + b; }
HZ_DEVICE float sub(float a, float b) { return a - b; }
HZ_DEVICE float divide(float a, float b) { return a / b; }
HZ_DEVICE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#if defined(__gfx90a__) || defined(__gfx940__) || defined(__gfx941__) || defined(__gfx942__) || defined(__gfx950__)
#define HZ_TWO_AT_ONCE
// Written out: compilers pack nothing whose results clamp() takes.
HZ_DEVICE void two_quotients(float& a, float& b, float scale, float reciprocal) {
  typedef float Two __attribute__((ext_vector_type(2)));
  const Two x = {a, b}, by = {scale, reciprocal};
  Two quotient, rest;
  asm("v_pk_mul_f32 %0, %1, %2 op_sel:[0,1] op_sel_hi:[1,1]" : "=v"(quotient) : "v"(x), "v"(by));
  asm("v_pk_fma_f32 %0, %1, %2, %3 op_sel_hi:[1,0,1] neg_lo:[1,0,0] neg_hi:[1,0,0]"
      : "=v"(rest)
      : "v"(quotient), "v"(by), "v"(x));
  asm("v_pk_fma_f32 %0, %1, %2, %3 op_sel:[0,1,0] op_sel_hi:[1,1,1]"
      : "=v"(quotient)
      : "v"(rest), "v"(by), "v"(quotient));
  a = quotient.x;
  b = quotient.y;
}
#endif
HZ_DEVICE float round_down(float x) { return __builtin_floorf(x); }
HZ_DEVICE float clamp(float x, float low, float high) { return __builtin_amdgcn_fmed3f(x, low, high); }
HZ_DEVICE float from_half(hz_u16 bits) { return (float)__builtin_bit_cast(_Float16, bits); }
HZ_DEVICE hz_u16 to_half(float x) { return __builtin_bit_cast(hz_u16, (_Float16)x); }
HZ_DEVICE hz_u32 funnel(hz_u32 high, hz_u32 low, hz_u32 bits) { return __builtin_amdgcn_alignbit(high, low, bits); }
// Without a test for NaN. Rounding carries into the sign of those whose lower half is almost full; arithmetic makes
// 0x7fc00000, and hands on others, those of bfloat16, whose lower half is zero.
HZ_DEVICE hz_u32 two_bf16(float low, float high) {
  const hz_u32 a = bits_of(low), b = bits_of(high);
  return __builtin_amdgcn_perm(b + 0x7fff + (b >> 16 & 1), a + 0x7fff + (a >> 16 & 1), 0x07060302);
}
}  // namespace hz
#endif

#if !defined(HZ_EMULATE)
namespace hz {
template <class Vector>
HZ_DEVICE Vector load_wide(const Vector* from, hz_u32 begin, hz_u32 end) {
  return *from;
}
template <class T>
HZ_DEVICE void store_to(T* to, T value) {
  *to = value;
}
template <class Vector>
HZ_DEVICE void store_at_once(Vector* to, Vector value) {
#ifdef __clang__
  typedef hz_u32 Whole __attribute__((ext_vector_type(4), may_alias));
  *(Whole*)to = __builtin_bit_cast(Whole, value);
#else
  *to = value;
#endif
}
}  // namespace hz
#endif

#if HZ_WAVE == 64
namespace hz {
HZ_DEVICE hz_u32 swap_halves(hz_u32 value, hz_u32 m) {
  switch (m) {
    case 1: return dpp<0xb1>(value);                                // quad_perm 1 0 3 2
    case 2: return dpp<0x4e>(value);                                // quad_perm 2 3 0 1
    case 4: return dpp<0x141>(value);                               // row_half_mirror
    case 8: return dpp<0x140>(value);                               // row_mirror
    default: return crossbar(value, anew(thread()) % HZ_WAVE ^ m);  // in a loop it would keep a register for each m
  }
}
template <int M>
HZ_DEVICE hz_u32 swap_lanes(hz_u32 value) {
  if (M == 1) return dpp<0xb1>(value);
  if (M == 2) return dpp<0x4e>(value);
  return dpp<0x1b>(dpp<0x141>(value));  // row_half_mirror is lane ^ 7, quad_perm 3 2 1 0 lane ^ 3
}
}  // namespace hz
#endif
