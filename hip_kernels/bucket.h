// What one call of a kernel works on: a bucket of tensors, its payload, and the order of its rows. The device kernels,
// their emulation and the host library all take this structure; hzero/codecs/backends.py fills it. Codec exact has one
// of its own, which hzero/codecs/exact.py fills. Words and formats: docs/payload_format.md.
#pragma once

#define HZ_BUCKET_TENSORS 38  // kernel arguments hold at most 4 KiB; larger buckets take several calls
#define HZ_BUCKET_GROUPS 40   // the same, rounded up to vectors of 16 bytes
#define HZ_BUCKET_AXES 6
#define HZ_CHECKSUM_BYTES 16  // behind each part of a payload that has checksums
#define HZ_BUCKET_VERSION 13  // of this structure and its meaning: the host library tells it, so no old build is called

typedef unsigned char hz_u8;
typedef unsigned short hz_u16;
typedef unsigned int hz_u32;
typedef unsigned long long hz_u64;
typedef long long hz_i64;

// A number to divide by: n / d is n * factor >> shift, in 64 bits, for every n below 2^31. The host finds both, so that
// no thread divides.
struct hz_divisor {
  hz_u32 factor, shift;
};

struct hz_tensor {
  hz_u64 data;       // address of the shards in order: what is encoded, or where decoded elements and sums go
  hz_u64 residual;   // address of residuals added before encoding, or of float32 that sums start from; 0: none
  hz_u64 left;       // address for what encoding lost; 0: not wanted. It may be that of the residuals
  hz_i64 numel;      // elements at data; further ones count as +0
  hz_i64 start;      // bytes that the records of the tensors before take in a row of the payload
  hz_i64 out_start;  // the same for the payload written by decode_sum_encode
  hz_u32 chunk;      // elements of one shard, below 2^31
  hz_u32 blocks;     // of a shard
  hz_u32 scales;     // where the scales start in a record, in bytes
  hz_u32 out_scales;
  hz_u32 record_bytes;
  hz_u32 out_record_bytes;
  hz_u32 first_block;    // blocks of the tensors before in a row: columns of stochastic rounding count from here
  float factor;          // of the residual
  hz_u32 lanes_shift;    // 2^lanes_shift threads share a block, each with 16 of its elements; device kernels only
  hz_divisor by_blocks;  // device kernels only
};

// Where the checksums of a payload are. Kernels add to them, so they start at zero, or at what is to be added.
struct hz_checks {
  hz_u64 sums;    // address of the first part's; 0: the payload has none
  hz_i64 step;    // bytes from one to the next
  hz_u32 pieces;  // successive pieces of the payload that are one part
  hz_divisor by_pieces;
};

struct alignas(16) hz_bucket {
  hz_u64 payload;      // address, a multiple of 16 (on a processor, of 4)
  hz_u64 out_payload;  // address of the payload written by decode_sum_encode, likewise
  hz_i64 row_bytes;    // of one row of the payload
  hz_i64 out_row_bytes;
  hz_checks checks;      // of the payload: those behind its parts where it is written, elsewhere of what is read
  hz_checks out_checks;  // of the payload written by decode_sum_encode
  hz_u32 outer;          // pieces of the payload; the peers of a sum
  hz_u32 inner;          // rows of a piece
  hz_u32 out_inner;
  hz_divisor by_inner, by_out_inner;
  hz_u32 block_size;  // elements that share a scale, a multiple of 16 to 512; in codecs without scales those that are
                      // worked on together
  float limit;        // largest scale to be written
  hz_u32 stochastic;  // 0: to nearest even. Otherwise scales are rounded up, so that no code is clamped
  hz_u32 key;         // of stochastic rounding, made from the seed
  hz_u32 rotation;    // elements that are rotated together, 64 or 128, which divide a block; 0: none
  hz_u32 rate;        // bits of a value in codec zfp
  hz_u32 dimension;   // distance of the values that codec mpc subtracts
  hz_u32 kept_bytes;  // of a residual that encoding adds, and of what it leaves: 4, or 2 in bfloat16
  hz_u32 axes;
  hz_u32 sizes[HZ_BUCKET_AXES];    // row (i, j, ..) is shard i * strides[0] + j * strides[1] + ..
  hz_u32 strides[HZ_BUCKET_AXES];  // in shards
  hz_divisor by_sizes[HZ_BUCKET_AXES];
  hz_u32 tensors;
  hz_u32 rows;                                       // that threads share: all, of sums those of a piece; device
                                                     // kernels only
  hz_u32 workgroups;                                 // device kernels only
  alignas(16) hz_u32 first_group[HZ_BUCKET_GROUPS];  // workgroups of the tensors before, 2^32 - 1 behind the last;
                                                     // device kernels only
  hz_tensor tensor[HZ_BUCKET_TENSORS];
};

// ---- codec exact
// -----------------------------------------------------------------------------------------------------

#define HZ_EXACT_ROWS 384     // records of a call; a longer message takes several calls
#define HZ_EXACT_LANE 256     // weights of a lane, at most
#define HZ_EXACT_LANES 64     // of a block
#define HZ_EXACT_BLOCK 16384  // weights of a block
#define HZ_EXACT_ESCAPE 15    // ones before the bits of a weight
#define HZ_EXACT_CLASSES 64   // of old weights, each with a parameter
#define HZ_EXACT_PARAMETERS 16
#define HZ_EXACT_BINS 112  // of changes, see exact_bin
#define HZ_EXACT_CHECK 32  // places in the head of a record
#define HZ_EXACT_WORDS 36
#define HZ_EXACT_STARTS 48

struct hz_exact_tensor {
  hz_u64 old;          // address of the old weights: of one row, or of row 0, whose weights decoding replaces
  hz_u64 fresh;        // address of the new weights of one row, to encode
  hz_i64 step;         // weights from a row to the next one
  hz_u32 numel;        // weights at `fresh`; further ones of the row are unchanged
  hz_u32 chunk;        // weights of a row, below 2^31
  hz_u32 first_block;  // blocks, lanes and weights of the tensors before in a row
  hz_u32 first_lane;
  hz_u32 first_place;    // modulo 2^32
  hz_u32 blocks;         // of a row
  hz_divisor by_blocks;  // device kernels only
};

struct alignas(16) hz_exact {
  hz_u64 message;        // address of the records, a multiple of 16; of a single one to write
  hz_u64 sums;           // address of the checks of what is decoded, one word for each record, or of the counts of
                         // changes, HZ_EXACT_BINS words for each class. Kernels add to both
  hz_i64 record_bytes;   // of a record, or of its head alone
  hz_u32 lane_bytes;     // place of the lanes' numbers of words in a record
  hz_u32 head;           // bytes of the head
  hz_u32 blocks;         // of a row, in all calls
  hz_u32 shift, offset;  // the class of a weight is its magnitude >> shift, minus offset, clamped
  hz_u32 records, tensors;
  alignas(16) hz_u32 first_group[HZ_BUCKET_GROUPS];  // as in hz_bucket
  hz_u32 rows[HZ_EXACT_ROWS];                        // the row of the tensors that each record has
  hz_exact_tensor tensor[HZ_BUCKET_TENSORS];
};
static_assert(sizeof(hz_exact) <= 4096, "kernel arguments hold at most 4 KiB");
