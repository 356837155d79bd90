// The host library: C functions named after the device kernels, `void NAME(const hz_bucket*, int threads)`. They choose
// the widest instruction set that the processor has and split the blocks of a bucket over threads.
#include "library.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

#ifndef HZ_BUILD_ID
#define HZ_BUILD_ID "unknown"
#endif

namespace hz {

#if defined(__x86_64__)
namespace avx512 {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
#endif
namespace baseline {
extern const Kernels kernels;
}

struct InstructionSet {
  const char* name;
  const Kernels* kernels;
  bool (*is_there)();
};

#if defined(__x86_64__)
// Whether processor and kernel have AVX2, FMA and, with `avx512`, its F, BW, DQ and VL. With AVX2 there is F16C.
// What Zig links, as in wheels, answers no to every question of __builtin_cpu_supports.
static bool has_vectors(bool avx512) {
  unsigned a, b, c, d, saved, high;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_FMA)) return false;
  asm("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  const unsigned registers = avx512 ? 0xe6 : 0x6;  // what the kernel saves of them
  const unsigned wanted = bit_AVX2 | (avx512 ? bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL : 0);
  return (saved & registers) == registers && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & wanted) == wanted;
}
#endif

// Widest first. What is asked of the processor is what CMakeLists.txt lets the compiler use.
static const InstructionSet instruction_sets[] = {
#if defined(__x86_64__)
    {"avx512", &avx512::kernels, [] { return has_vectors(true); }},
    {"avx2", &avx2::kernels, [] { return has_vectors(false); }},
#endif
    {"baseline", &baseline::kernels, [] { return true; }},
};

static const InstructionSet* current = [] {
  const InstructionSet* set = instruction_sets;
  while (!set->is_there()) ++set;
  return set;
}();

// Elements that are worth a thread of their own: starting one takes as long as some 64 Ki of them.
constexpr hz_u64 elements_a_thread = 256 << 10;
// Blocks of codec exact take a few times longer.
constexpr hz_u64 exact_blocks_a_thread = 4;

static void do_blocks(const hz_bucket& bucket, hz_u32 rows, Kernel kernel, hz_u64 begin, hz_u64 end) {
  hz_u64 before = 0;
  for (hz_u32 t = 0; t < bucket.tensors && before < end; ++t) {
    const hz_tensor& tensor = bucket.tensor[t];
    const hz_u32 blocks = (tensor.chunk + bucket.block_size - 1) / bucket.block_size;
    const hz_u64 mine = (hz_u64)blocks * rows;
    hz_u64 at = std::max(begin, before) - before;
    const hz_u64 last = std::min(end, before + mine) - before;
    while (at < last) {
      const hz_u32 row = (hz_u32)(at / blocks), first = (hz_u32)(at % blocks);
      const hz_u32 most = bucket.checks.sums || bucket.out_checks.sums ? batch : blocks;
      const hz_u32 until = (hz_u32)std::min<hz_u64>({blocks, first + (last - at), (hz_u64)first + most});
      kernel(bucket, Span{&tensor, row, first, until, blocks});
      at += until - first;
    }
    before += mine;
  }
}

static void do_blocks(const hz_exact& exact, ExactKernel kernel, hz_u64 begin, hz_u64 end) {
  hz_u64 before = 0;
  for (hz_u32 t = 0; t < exact.tensors && before < end; ++t) {
    const hz_u32 blocks = exact.tensor[t].blocks;
    const hz_u64 mine = (hz_u64)blocks * exact.records;
    const hz_u64 last = std::min(end, before + mine) - before;
    for (hz_u64 at = std::max(begin, before) - before; at < last;) {
      const hz_u32 record = (hz_u32)(at / blocks), first = (hz_u32)(at % blocks);
      const hz_u32 until = (hz_u32)std::min<hz_u64>(blocks, first + (last - at));
      kernel(exact, ExactSpan{&exact.tensor[t], record, first, until});
      at += until - first;
    }
    before += mine;
  }
}

// Calls `work` on parts of the numbers below `count`, on as many threads as these are worth.
template <class Work>
static void share(hz_u64 count, hz_u64 worth, int threads, const Work& work) {
  const hz_u64 parts = std::max<hz_u64>(1, std::min<hz_u64>(threads, worth));
  // Threads end with the call: nothing is left that a fork of the process could lose.
  std::vector<std::thread> others;
  hz_u64 started = 1;
  try {
    others.reserve(parts);
    for (; started < parts; ++started)
      others.emplace_back([&, k = started] { work(count * k / parts, count * (k + 1) / parts); });
  } catch (const std::exception&) {  // no more threads to be had: the rest is done here
  }
  work(0, count / parts);
  work(count * started / parts, count);
  for (std::thread& other : others) other.join();
}

static void run(const hz_bucket& bucket, hz_u32 rows, Kernel kernel, int threads) {
  hz_u64 blocks = 0;
  for (hz_u32 t = 0; t < bucket.tensors; ++t)
    blocks += (hz_u64)rows * ((bucket.tensor[t].chunk + bucket.block_size - 1) / bucket.block_size);
  share(blocks, blocks * bucket.block_size / elements_a_thread, threads,
        [&](hz_u64 begin, hz_u64 end) { do_blocks(bucket, rows, kernel, begin, end); });
}

static void run(const hz_exact& exact, ExactKernel kernel, int threads) {
  hz_u64 blocks = 0;
  for (hz_u32 t = 0; t < exact.tensors; ++t) blocks += (hz_u64)exact.records * exact.tensor[t].blocks;
  share(blocks, blocks / exact_blocks_a_thread, threads,
        [&](hz_u64 begin, hz_u64 end) { do_blocks(exact, kernel, begin, end); });
}

}  // namespace hz

#define HZ_EXPORT extern "C" __attribute__((visibility("default")))

#define HZ_ENTRY(name, ...)                                                                                    \
  HZ_EXPORT void name(const hz_bucket* bucket, int threads) {                                                  \
    const hz_u32 rows = std::strncmp(#name, "decode_sum", 10) ? bucket->outer * bucket->inner : bucket->inner; \
    hz::run(*bucket, rows, hz::current->kernels->name, threads);                                               \
  }
HZ_EACH_KERNEL(HZ_ENTRY)
#undef HZ_ENTRY

#define HZ_ENTRY(name) \
  HZ_EXPORT void name(const hz_exact* exact, int threads) { hz::run(*exact, hz::current->kernels->name, threads); }
HZ_EACH_EXACT_ON_BLOCKS(HZ_ENTRY)
#undef HZ_ENTRY

#define HZ_ENTRY(name) \
  HZ_EXPORT void name(const hz_exact* exact, int) { hz::current->kernels->name(*exact, {nullptr, 0, 0, 0}); }
HZ_EACH_EXACT_AT_ONCE(HZ_ENTRY)
#undef HZ_ENTRY

// Checksums of `parts` of so many bytes, `step` bytes apart: for payloads that no kernel with checksums makes or takes.
HZ_EXPORT void hz_checksums(const hz_u8* first, hz_u64 parts, hz_u64 bytes, hz_u64 step, hz_u64* sums) {
  for (hz_u64 i = 0; i < parts; ++i) sums[i] = hz::current->kernels->checksum(first + i * step, bytes, 0);
}

// One checksum for each group of buffers, as if they followed each other, each padded to whole words.
HZ_EXPORT void hz_fingerprints(const hz_u8* const* buffers, const hz_u64* bytes, const hz_u64* counts, hz_u64 groups,
                               hz_u64* sums) {
  for (hz_u64 group = 0; group < groups; ++group) {
    hz_u64 place = 0;
    sums[group] = 0;
    for (hz_u64 i = 0; i < counts[group]; ++i, ++buffers, ++bytes) {
      sums[group] += hz::current->kernels->checksum(*buffers, *bytes, (hz_u32)place);
      place += (*bytes + 3) / 4;
    }
  }
}

HZ_EXPORT int hz_bucket_version() { return HZ_BUCKET_VERSION; }
HZ_EXPORT int hz_bucket_bytes() { return (int)sizeof(hz_bucket); }

// What it was built from: CMakeLists.txt hashes the sources.
HZ_EXPORT const char* hz_build_id() { return HZ_BUILD_ID; }

// The instruction set in use.
HZ_EXPORT const char* hz_instruction_set() { return hz::current->name; }

// Changes it: to test each, and to compare them. Returns 0 where there is none of that name or the processor lacks it.
HZ_EXPORT int hz_use_instruction_set(const char* name) {
  for (const hz::InstructionSet& set : hz::instruction_sets)
    if (!std::strcmp(set.name, name) && set.is_there()) {
      hz::current = &set;
      return 1;
    }
  return 0;
}
