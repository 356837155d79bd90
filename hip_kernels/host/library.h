// What the instruction sets offer and the library calls: every kernel on a span of blocks.
#pragma once
#include "../bucket.h"

// name, function: the names are those of the device kernels.
#define HZ_EACH_KERNEL(DO)                                    \
  DO(encode_int8_fp32, encode<Fp32, 8>)                       \
  DO(encode_int8_bf16, encode<Bf16, 8>)                       \
  DO(encode_int8_fp16, encode<Fp16, 8>)                       \
  DO(encode_int4_fp32, encode<Fp32, 4>)                       \
  DO(encode_int4_bf16, encode<Bf16, 4>)                       \
  DO(encode_int4_fp16, encode<Fp16, 4>)                       \
  DO(decode_int8_fp32, decode<Fp32, 8>)                       \
  DO(decode_int8_bf16, decode<Bf16, 8>)                       \
  DO(decode_int8_fp16, decode<Fp16, 8>)                       \
  DO(decode_int4_fp32, decode<Fp32, 4>)                       \
  DO(decode_int4_bf16, decode<Bf16, 4>)                       \
  DO(decode_int4_fp16, decode<Fp16, 4>)                       \
  DO(decode_sum_int8, decode_sum<8>)                          \
  DO(decode_sum_int4, decode_sum<4>)                          \
  DO(decode_sum_encode_int8_int8, decode_sum_encode<8, 8>)    \
  DO(decode_sum_encode_int8_int4, decode_sum_encode<8, 4>)    \
  DO(decode_sum_encode_int4_int8, decode_sum_encode<4, 8>)    \
  DO(decode_sum_encode_int4_int4, decode_sum_encode<4, 4>)    \
  DO(encode_none_8, encode_elements<1>)                       \
  DO(encode_none_16, encode_elements<2>)                      \
  DO(encode_none_32, encode_elements<4>)                      \
  DO(encode_bf16_fp32, encode_elements<2, Fp32>)              \
  DO(encode_bf16_fp16, encode_elements<2, Fp16>)              \
  DO(decode_none_8, decode_elements<1>)                       \
  DO(decode_none_16, decode_elements<2>)                      \
  DO(decode_none_32, decode_elements<4>)                      \
  DO(decode_bf16_fp32, decode_elements<2, Fp32>)              \
  DO(decode_bf16_fp16, decode_elements<2, Fp16>)              \
  DO(decode_sum_none_fp32, decode_sum_elements<Fp32>)         \
  DO(decode_sum_none_bf16, decode_sum_elements<Bf16>)         \
  DO(decode_sum_none_fp16, decode_sum_elements<Fp16>)         \
  DO(decode_sum_encode_none_none_fp32, add_up_elements<Fp32>) \
  DO(decode_sum_encode_none_none_bf16, add_up_elements<Bf16>) \
  DO(decode_sum_encode_none_none_fp16, add_up_elements<Fp16>) \
  DO(encode_zfp_fp32, encode_zfp<Fp32>)                       \
  DO(encode_zfp_bf16, encode_zfp<Bf16>)                       \
  DO(encode_zfp_fp16, encode_zfp<Fp16>)                       \
  DO(decode_zfp_fp32, decode_zfp<Fp32>)                       \
  DO(decode_zfp_bf16, decode_zfp<Bf16>)                       \
  DO(decode_zfp_fp16, decode_zfp<Fp16>)                       \
  DO(decode_sum_zfp, decode_sum_zfp)                          \
  DO(encode_mpc_fp32, encode_mpc)                             \
  DO(decode_mpc_fp32, decode_mpc<Fp32>)                       \
  DO(decode_mpc_bf16, decode_mpc<Bf16>)                       \
  DO(decode_mpc_fp16, decode_mpc<Fp16>)

// Kernels of codec exact, on blocks of all tensors and records, and in one piece.
#define HZ_EACH_EXACT_ON_BLOCKS(DO) DO(exact_count) DO(exact_lengths) DO(exact_encode) DO(exact_decode)
#define HZ_EACH_EXACT_AT_ONCE(DO) DO(exact_table) DO(exact_starts)
#define HZ_EACH_EXACT(DO) HZ_EACH_EXACT_ON_BLOCKS(DO) HZ_EACH_EXACT_AT_ONCE(DO)

namespace hz {

// Blocks whose scales are computed together, and those of which a span has at most if they are checked.
constexpr hz_u32 batch = 16;

// Successive blocks of one tensor's record in one row.
struct Span {
  const hz_tensor* tensor;
  hz_u32 row, begin, end, blocks;
};

typedef void (*Kernel)(const hz_bucket&, const Span&);

// Successive blocks of one tensor's row in one record.
struct ExactSpan {
  const hz_exact_tensor* tensor;
  hz_u32 record, begin, end;
};

typedef void (*ExactKernel)(const hz_exact&, const ExactSpan&);

struct Kernels {
#define HZ_ENTRY(name, ...) Kernel name;
  HZ_EACH_KERNEL(HZ_ENTRY)
#undef HZ_ENTRY
#define HZ_ENTRY(name) ExactKernel name;
  HZ_EACH_EXACT(HZ_ENTRY)
#undef HZ_ENTRY
  hz_u64 (*checksum)(const hz_u8* bytes, hz_u64 count, hz_u32 place);
};

}  // namespace hz
