// Exponents: codec exp, lossless for bfloat16. Encodes a bucket of tensors, decodes a payload, and sums those of peers.
//
// Signs and mantissas travel as they are, exponents as codes of 4 bits in a window that each line of 512 elements
// chooses; exponents outside of it are escapes, listed for each block of 64 lines (docs/payload_format.md). A line has
// 32 threads with 16 elements each. A workgroup encodes a whole block, 8 lines at a time, since every line must know
// how many escapes those before it have. It decodes any 8 lines: they tell where their escapes start.
//
// Memory traffic per element: 2 bytes read and 1.52 written to encode, the reverse to decode to bfloat16; a sum of k
// peers reads k * 1.52 and writes 4. Each byte moves once, but in a block whose list is too short.
//
// Build alone: hipcc -O3 --genco --offload-arch=gfx90a exponents.hip -o exponents.hsaco
//              nvcc -O3 -arch=sm_90 -cubin -x cu exponents.hip -o exponents.cubin
// Check alone: python -m pytest tests/kernels -k exp        (emulated on the host, and on a GPU if present)
#include "sum.h"

namespace hz {

constexpr hz_u32 line_elements = 512, line_threads = 32, block_lines = 64, longest_list = 512;
constexpr hz_u32 window = 14, last_base = 255 - window, escape = 15, lost = 255;

// bfloat16 with all bits of NaNs: float32 carries them, and nothing is computed.
struct Bits16 : Bf16 {
  HZ_DEVICE hz_u16 narrow(float x) { return (hz_u16)(bits_of(x) >> 16); }
};

// What lies behind the codes of a record of `lines` lines.
struct Heads {
  hz_u16* starts;  // where each line's escapes start in the list of its block
  hz_u8* bases;    // the exponent before each line's window
  hz_u8* lists;
  HZ_DEVICE Heads of(hz_u8* heads, hz_u32 lines) { return {(hz_u16*)heads, heads + 2 * lines, heads + 3 * lines}; }
};

HZ_DEVICE hz_u32 lines_of(const hz_tensor& tensor) { return (tensor.chunk + line_elements - 1) / line_elements; }

// Escapes that the list of a line's block holds.
HZ_DEVICE hz_u32 limit_of(hz_u32 line, hz_u32 chunk) {
  const hz_u32 rest = chunk - line / block_lines * block_lines * line_elements;
  return rest < longest_list ? rest : longest_list;
}

// Sum over the lanes before this one among `lanes` of a wave. `value` becomes that of all of them.
template <hz_u32 LANES>
HZ_DEVICE hz_u32 sum_before(hz_u32& value) {
  hz_u32 before = 0;
#pragma unroll
  for (hz_u32 m = 1; m < LANES; m *= 2) {
    const hz_u32 other = swap_halves(value, m);
    if (thread() & m) before += other;
    value += other;
  }
  return before;
}

// The same over the workgroup. Every thread calls it.
HZ_DEVICE hz_u32 sum_before_in_workgroup(hz_u32& value) {
  hz_u32 before = sum_before<HZ_WAVE>(value);
  HZ_SHARED hz_u32 waves[HZ_THREADS / HZ_WAVE];
  if (thread() % HZ_WAVE == 0) waves[thread() / HZ_WAVE] = value;
  barrier();
  value = 0;
  for (hz_u32 i = 0; i < HZ_THREADS / HZ_WAVE; ++i) {
    if (i < thread() / HZ_WAVE) before += waves[i];
    value += waves[i];
  }
  barrier();  // before anyone writes the next sums
  return before;
}

// The lower bytes of four halves of two words.
HZ_DEVICE hz_u32 packed(hz_u32 a, hz_u32 b) { return ((a | a >> 8) & 0xffff) | (b | b >> 8) << 16; }

// Signs and mantissas, and exponents, of up to 16 elements, zero beyond `count`.
HZ_DEVICE void load_bytes(const hz_u16* source, int count, hz_u32 (&tails)[4], hz_u32 (&exponents)[4]) {
  if (count >= 16 && (hz_u64)source % 16 == 0) {
    const Words read[2] = {((const Words*)source)[0], ((const Words*)source)[1]};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const hz_u32 a = read[i / 2].word[i % 2 * 2], b = read[i / 2].word[i % 2 * 2 + 1];
      tails[i] = packed((a >> 8 & 0x800080) | (a & 0x7f007f), (b >> 8 & 0x800080) | (b & 0x7f007f));
      exponents[i] = packed(a >> 7 & 0xff00ff, b >> 7 & 0xff00ff);
    }
    return;
  }
#pragma unroll 1
  for (int done = 0; done < 16; done += 4) {
    hz_u32 tail = 0, exponent = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const hz_u32 x = done + i < count ? source[done + i] : 0;
      tail |= ((x >> 8 & 0x80) | (x & 0x7f)) << 8 * i;
      exponent |= (x >> 7 & 0xff) << 8 * i;
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      tails[i] = tails[i + 1];
      exponents[i] = exponents[i + 1];
    }
    tails[3] = tail;
    exponents[3] = exponent;
  }
}

// 1 in each of four bytes that is at least `least`, which has a byte too.
HZ_DEVICE hz_u32 reaching(hz_u32 bytes, hz_u32 least) {
  const hz_u32 high = 0x80808080u, limits = least * 0x01010101u;
  const hz_u32 difference = (bytes | high) - (limits & ~high);
  return ((bytes & ~limits) | (~(bytes ^ limits) & difference)) >> 7 & 0x01010101u;
}

// The exponent of a rank among those of a line, two bits at a time.
HZ_DEVICE hz_u32 exponent_of_rank(const hz_u32 (&exponents)[4], hz_u32 rank) {
  hz_u32 reached = 0;
#pragma unroll 1
  for (int shift = 6; shift >= 0; shift -= 2) {
    hz_u32 counts = 0;  // of elements that reach the next three values, 10 bits each
#pragma unroll
    for (hz_u32 k = 0; k < 3; ++k) {
      hz_u32 found = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) found += reaching(exponents[i], reached + ((k + 1) << shift));
      counts += (found * 0x01010101u >> 24) << 10 * k;
    }
#pragma unroll
    for (hz_u32 m = 1; m < line_threads; m *= 2) counts += swap_halves(counts, m);
    for (hz_u32 k = 0; k < 3; ++k) reached += (hz_u32)((counts >> 10 * k & 1023) >= rank) << shift;
  }
  return reached;
}

// 1 in each of four exponents that the window behind `base` has.
HZ_DEVICE hz_u32 inside(hz_u32 exponents, hz_u32 base) {
  const hz_u32 above = base < last_base ? reaching(exponents, base + window + 1) : 0;
  return reaching(exponents, base + 1) & ~above;
}

// The exponent before the window of a line. Two are tried: one that ends with the largest exponent, and one that ends
// a little above most.
HZ_DEVICE hz_u32 base_of(const hz_u32 (&exponents)[4]) {
  const hz_u32 largest = exponent_of_rank(exponents, 1), most = exponent_of_rank(exponents, 64) + 3;
  const hz_u32 first = largest > window ? largest - window : 0, room = most > window ? most - window : 0;
  const hz_u32 second = room < last_base ? room : last_base;
  hz_u32 counts = 0;  // 16 bits each
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    counts += inside(exponents[i], first) * 0x01010101u >> 24;
    counts += (inside(exponents[i], second) * 0x01010101u >> 24) << 16;
  }
#pragma unroll
  for (hz_u32 m = 1; m < line_threads; m *= 2) counts += swap_halves(counts, m);
  return counts >> 16 > (counts & 0xffff) ? second : first;
}

// Codes of four exponents, and 1 in each byte that has the code of an escape.
HZ_DEVICE hz_u32 codes_of(hz_u32 exponents, hz_u32 base, hz_u32& escaped) {
  const hz_u32 coded = inside(exponents, base) * 255;
  escaped = reaching(exponents, 1) & ~coded;
  return ((exponents & coded) - (base * 0x01010101u & coded)) | escaped * escape;
}

// Signs and mantissas of 16 elements, and their codes.
HZ_DEVICE void store_elements(hz_u8* record, hz_u8* codes, hz_u32 element, hz_u32 chunk, const hz_u32 (&tails)[4],
                              const hz_u32 (&words)[2]) {
  *(Words*)(record + element) = Words{{tails[0], tails[1], tails[2], tails[3]}};
  store_codes<4>(codes, element / 16, (chunk + 15) / 16, words);
}

HZ_DEVICE void encode_exponents(const hz_bucket& bucket) {
  const Place at = place(bucket);
  const hz_tensor& tensor = at.tensor;
  const hz_u32 chunk = tensor.chunk, lines = lines_of(tensor);
  // All threads have the same block: without what depends on them, the compiler knows it.
  const hz_u32 first_line = (at.block - thread() / bucket.lanes) * block_lines;
  const hz_u32 limit = limit_of(first_line, chunk), rest = lines - first_line;
  const hz_u32 mine = rest < block_lines ? rest : block_lines;
  const hz_i64 first = shard_of(bucket, at.row) * chunk;
  const int here = (int)present(tensor, first);
  const hz_u16* source = pointer<const hz_u16>(tensor.data) + first;
  hz_u8* record = record_at(bucket.checks, bucket.payload, bucket.row_bytes, bucket.inner, tensor.start,
                            tensor.record_bytes, at.row);
  hz_u8* codes = record + (chunk + 15) / 16 * 16;
  const Heads heads = Heads::of(record + tensor.scales, lines);
  hz_u8* list = heads.lists + first_line / block_lines * longest_list;
  hz_u32 escapes = 0;
#pragma unroll 1
  for (hz_u32 done = 0; done < mine; done += HZ_THREADS / line_threads) {
    const hz_u32 element = (first_line + done) * line_elements + thread() * 16, line = element / line_elements;
    hz_u32 tails[4], exponents[4], escaped[4], words[2] = {0, 0}, own = 0;
    load_bytes(source + element, element < chunk ? here - (int)element : 0, tails, exponents);
    const hz_u32 base = base_of(exponents);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const hz_u32 codes = codes_of(exponents[i], base, escaped[i]), pairs = (codes | codes >> 4) & 0xff00ff;
      words[i / 2] |= ((pairs | pairs >> 8) & 0xffff) << i % 2 * 16;
      own += escaped[i] * 0x01010101u >> 24;
    }
    hz_u32 all = own;
    hz_u32 place = escapes + sum_before_in_workgroup(all);
    escapes += all;
    if (element < chunk) {
      store_elements(record, codes, element, chunk, tails, words);
      if (thread() % line_threads == 0) {
        heads.starts[line] = (hz_u16)place;
        heads.bases[line] = (hz_u8)base;
      }
    }
    if (own == 0) continue;
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
      if (escaped[0] & 1) {
        if (place < limit) list[place] = (hz_u8)exponents[0];
        ++place;
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        exponents[k] = exponents[k] >> 8 | exponents[(k + 1) % 4] << 24;
        escaped[k] = escaped[k] >> 8 | escaped[(k + 1) % 4] << 24;
      }
    }
  }
  const bool is_lost = escapes > limit;
  barrier();  // the list may be written again, by other threads
  for (hz_u32 i = (is_lost ? 0 : escapes) + thread(); i < limit; i += HZ_THREADS) list[i] = is_lost ? lost : 0;
  const hz_u32 padding = (hz_u32)(16 - (list + limit - record) % 16) % 16;
  if (rest == mine && thread() < padding) list[limit + thread()] = 0;
  if (!is_lost) return;
#pragma unroll 1
  for (hz_u32 element = first_line * line_elements + thread() * 16;
       element < chunk && element < (first_line + mine) * line_elements; element += HZ_THREADS * 16) {
    hz_u32 tails[4] = {0, 0, 0, 0}, words[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (element + i < chunk) {
        tails[i / 4] |= lost << i % 4 * 8;
        words[i / 8] |= escape << i % 8 * 4;
      }
    store_elements(record, codes, element, chunk, tails, words);
    if (thread() % line_threads == 0) {
      heads.starts[element / line_elements] = 0xffff;
      heads.bases[element / line_elements] = lost;
    }
  }
}

// 16 elements of this thread; where it has none, what it gives has no meaning. Every thread of the workgroup calls it.
HZ_DEVICE void read_elements(hz_u8* record, const Place& at, float (&x)[16]) {
  const hz_u32 lines = at.blocks;
  hz_u32 words[2] = {0, 0}, escapes = 0, start = 0, base = 0;
  Words tails = {{0, 0, 0, 0}};
  const Heads heads = Heads::of(record + at.tensor.scales, lines);
  if (at.has_elements) {
    const Pair pair = ((const Pair*)(record + (at.tensor.chunk + 15) / 16 * 16))[at.element / 16];
    tails = *(const Words*)(record + at.element);
    words[0] = pair.word[0];
    words[1] = pair.word[1];
    start = heads.starts[at.block];
    base = heads.bases[at.block];
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const hz_u32 pairs = words[i] & words[i] >> 1;
    escapes += (pairs & pairs >> 2 & 0x11111111u) * 0x11111111u >> 28;
  }
  const hz_u32 limit = limit_of(at.block, at.tensor.chunk);
  const hz_u8* list = heads.lists + at.block / block_lines * longest_list;
  hz_u32 index = start + sum_before<line_threads>(escapes);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const hz_u32 code = words[i / 8] >> i % 8 * 4 & 15, tail = tails.word[i / 4] >> i % 4 * 8;
    hz_u32 exponent = code == 0 ? 0 : (base + code) & 0xff;
    if (code == escape) {
      exponent = index < limit ? list[index] : lost;
      ++index;
    }
    x[i] = float_of((tail & 0x80) << 24 | exponent << 23 | (tail & 0x7f) << 16);
  }
}

template <class Target>
HZ_DEVICE void decode_exponents(const hz_bucket& bucket) {
  const Place at = place(bucket);
  float x[16];
  read_elements(record_at(bucket.checks, bucket.payload, bucket.row_bytes, bucket.inner, at.tensor.start,
                          at.tensor.record_bytes, at.row),
                at, x);
  if (!at.has_elements) return;
  const hz_i64 first = shard_of(bucket, at.row) * at.tensor.chunk + at.element;
  store<Target>(pointer<typename Target::type>(at.tensor.data) + first, (int)(at.tensor.chunk - at.element), x);
}

HZ_DEVICE void decode_sum_exponents(const hz_bucket& bucket) {
  const Place at = place(bucket);
  float x[16], sums[16];
  no_sums(sums);
  const hz_i64 first = (hz_i64)at.row * at.tensor.chunk + at.element;
  const int count = at.has_elements ? (int)(at.tensor.chunk - at.element) : 0;
  if (at.tensor.residual) load<Fp32>(pointer<const float>(at.tensor.residual) + first, count, sums);
  hz_u8* record = record_at(bucket.checks, bucket.payload, bucket.row_bytes, bucket.inner, at.tensor.start,
                            at.tensor.record_bytes, at.row);
#pragma unroll 1
  for (hz_u32 peer = 0; peer < bucket.outer; ++peer, record += bucket.inner * bucket.row_bytes) {
    read_elements(record, at, x);
#pragma unroll
    for (int i = 0; i < 16; ++i) sums[i] = add(sums[i], x[i]);
  }
  if (at.has_elements) store<Fp32>(pointer<float>(at.tensor.data) + first, count, sums);
}

}  // namespace hz

HZ_KERNEL(encode_exp_bf16) { hz::encode_exponents(bucket); }
HZ_KERNEL(decode_exp_fp32) { hz::decode_exponents<hz::Fp32>(bucket); }
HZ_KERNEL(decode_exp_bf16) { hz::decode_exponents<hz::Bits16>(bucket); }
HZ_KERNEL(decode_exp_fp16) { hz::decode_exponents<hz::Fp16>(bucket); }
HZ_KERNEL(decode_sum_exp) { hz::decode_sum_exponents(bucket); }
