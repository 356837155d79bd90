// Runs the device source on the host, thread by thread, so that a test without a GPU covers what a GPU would run.
//
// Each thread of a workgroup is a fiber. A fiber runs to an exchange between the lanes of a wave, or to a barrier of
// the workgroup. There it waits until all lanes have come to one; if some have not but to something else, the GPU's
// behaviour is undefined and the emulation aborts with a message. HZ_WAVE is 64 or 32. For tests alone: about a
// thousand times slower than the host library.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>

#ifndef HZ_WAVE
#error "HZ_EMULATE needs HZ_WAVE: 64 or 32"
#endif
#define HZ_DEVICE static inline
#define HZ_MEMBER inline
#define HZ_SHARED static
#define HZ_KERNEL_OF(name, Argument, argument, waves)                   \
  static void name##_thread(const Argument& argument);                  \
  extern "C" void name(const Argument* argument, hz_u32 workgroups) {   \
    hz::emulation::launch(#name, name##_thread, *argument, workgroups); \
  }                                                                     \
  static void name##_thread(const Argument& argument)

namespace hz {
namespace emulation {

enum class State { exchanges, waits, is_done };

struct Fiber {
  ucontext_t context;
  State state;
  hz_u32 value;  // what it offers to the other lanes
};

struct Workgroup {
  static constexpr size_t stack_bytes = 64 << 10;
  const char* kernel;
  std::function<void()> body;
  hz_u32 index, current;
  ucontext_t scheduler;
  Fiber fibers[HZ_THREADS];
  std::unique_ptr<char[]> stacks{new char[stack_bytes * HZ_THREADS]};
};

inline Workgroup* group = nullptr;
inline uint64_t accesses[17];  // to elements, by bytes

inline void entry() {
  group->body();
  group->fibers[group->current].state = State::is_done;
  swapcontext(&group->fibers[group->current].context, &group->scheduler);
}

inline void stop(State state = State::exchanges) {
  Fiber& fiber = group->fibers[group->current];
  fiber.state = state;
  swapcontext(&fiber.context, &group->scheduler);
}

// Runs each lane of a wave to where it stops next; all must have come to the same.
inline State advance(hz_u32 first) {
  static const char* const names[] = {"exchanges with its wave", "waits for its workgroup", "is done"};
  for (hz_u32 i = first; i < first + HZ_WAVE; ++i) {
    group->current = i;
    swapcontext(&group->scheduler, &group->fibers[i].context);
  }
  const State state = group->fibers[first].state;
  for (hz_u32 i = first + 1; i < first + HZ_WAVE; ++i)
    if (group->fibers[i].state != state) {
      std::fprintf(stderr, "emulation: %s, workgroup %u: divergence in a wave: thread %u %s, thread %u %s\n",
                   group->kernel, group->index, first, names[(int)state], i, names[(int)group->fibers[i].state]);
      std::abort();
    }
  return state;
}

inline void run() {
  for (hz_u32 i = 0; i < HZ_THREADS; ++i) {
    Fiber& fiber = group->fibers[i];
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = group->stacks.get() + i * Workgroup::stack_bytes;
    fiber.context.uc_stack.ss_size = Workgroup::stack_bytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, entry, 0);
  }
  for (State all = State::waits; all == State::waits;)
    for (hz_u32 first = 0; first < HZ_THREADS; first += HZ_WAVE) {
      State state;
      while ((state = advance(first)) == State::exchanges) {
      }
      if (first && state != all) {
        std::fprintf(stderr, "emulation: %s, workgroup %u: not all waves come to a barrier\n", group->kernel,
                     group->index);
        std::abort();
      }
      all = state;
    }
}

template <class Argument>
void launch(const char* kernel, void (*body)(const Argument&), const Argument& argument, hz_u32 workgroups) {
  std::unique_ptr<Workgroup> own(new Workgroup);
  group = own.get();
  group->kernel = kernel;
  group->body = [&, body] { body(argument); };
  for (group->index = 0; group->index < workgroups; ++group->index) run();
  group = nullptr;
}

// Every lane offers a value, then reads that of the lane `source`. Values stay until all have read: a lane offers again
// only after its whole wave has stopped once more.
inline hz_u32 exchange(hz_u32 value, hz_u32 source) {
  Fiber& fiber = group->fibers[group->current];
  fiber.value = value;
  stop();
  hz_u32 read = group->fibers[group->current / HZ_WAVE * HZ_WAVE + source % HZ_WAVE].value;
  stop();
  return read;
}

// In how many lanes of the wave something holds.
inline hz_u32 count(bool holds) {
  Fiber* const wave = group->fibers + group->current / HZ_WAVE * HZ_WAVE;
  group->fibers[group->current].value = holds;
  stop();
  hz_u32 found = 0;
  for (int lane = 0; lane < HZ_WAVE; ++lane) found += wave[lane].value;
  stop();
  return found;
}

}  // namespace emulation

extern "C" __attribute__((used)) inline uint64_t* hz_accesses() { return emulation::accesses; }

template <class T>
HZ_DEVICE T* pointer(hz_u64 address) {
  return (T*)address;
}
HZ_DEVICE hz_u32 anew(hz_u32 number, hz_u32 = 0) { return number; }
HZ_DEVICE hz_u32 thread() { return emulation::group->current; }
HZ_DEVICE hz_u32 workgroup() { return emulation::group->index; }
#if HZ_WAVE == 64
// The DPP controls that shim.h uses, as the CDNA2 instruction set defines them.
template <int CONTROL>
HZ_DEVICE hz_u32 dpp(hz_u32 value) {
  hz_u32 lane = thread() % HZ_WAVE, source;
  if (CONTROL < 0x100)
    source = lane / 4 * 4 + (CONTROL >> lane % 4 * 2) % 4;
  else if (CONTROL == 0x140)
    source = lane / 16 * 16 + 15 - lane % 16;
  else if (CONTROL == 0x141)
    source = lane / 8 * 8 + 7 - lane % 8;
  else if (CONTROL == 0x138)
    source = lane - 1;
  else
    std::abort();
  return emulation::exchange(value, source);
}
HZ_DEVICE hz_u32 crossbar(hz_u32 value, hz_u32 lane) { return emulation::exchange(value, lane); }
#else
HZ_DEVICE hz_u32 swap_halves(hz_u32 value, hz_u32 m) { return emulation::exchange(value, thread() % HZ_WAVE ^ m); }
template <int M>
HZ_DEVICE hz_u32 swap_lanes(hz_u32 value) {
  return emulation::exchange(value, thread() % HZ_WAVE ^ M);
}
#endif
HZ_DEVICE hz_u32 lanes_with(bool holds) { return emulation::count(holds); }
HZ_DEVICE hz_u32 of_lane(hz_u32 value, hz_u32 lane) { return emulation::exchange(value, lane); }
HZ_DEVICE hz_u32 of_lane_before(hz_u32 value) { return emulation::exchange(value, thread() - 1); }
// Accesses to elements are counted by their width. Bytes that must be of no meaning are none that memory holds.
template <class Vector>
HZ_DEVICE Vector load_wide(const Vector* from, hz_u32 begin, hz_u32 end) {
  Vector vector;
  std::memset(&vector, 0xa5, sizeof vector);
  std::memcpy((char*)&vector + begin, (const char*)from + begin, end - begin);
  emulation::accesses[sizeof vector] += 1;
  return vector;
}
template <class T>
HZ_DEVICE void store_to(T* to, T value) {
  *to = value;
  emulation::accesses[sizeof value] += 1;
}
template <class Vector>
HZ_DEVICE void store_at_once(Vector* to, Vector value) {
  store_to(to, value);
}
HZ_DEVICE void add_atomically(hz_u64* to, hz_u64 value) { *to += value; }
HZ_DEVICE void add_atomically(hz_u32* to, hz_u32 value) { *to += value; }
HZ_DEVICE void add_shared(hz_u32* to, hz_u32 value) { *to += value; }
HZ_DEVICE void barrier() { emulation::stop(emulation::State::waits); }
HZ_DEVICE hz_u32 lowest_bit(hz_u32 word) { return (hz_u32)__builtin_ctz(word); }
HZ_DEVICE hz_u32 bits_of(float x) {
  hz_u32 bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
HZ_DEVICE float float_of(hz_u32 bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
// What arithmetic makes: with the 32 lanes of NVIDIA, its one NaN.
HZ_DEVICE float made(float x) { return HZ_WAVE == 32 && x != x ? float_of(0x7fffffff) : x; }
// Compiled with -ffp-contract=off.
HZ_DEVICE float mul(float a, float b) { return made(a * b); }
HZ_DEVICE float add(float a, float b) { return made(a + b); }
HZ_DEVICE float sub(float a, float b) { return made(a - b); }
HZ_DEVICE float divide(float a, float b) { return made(a / b); }
HZ_DEVICE float fused(float a, float b, float c) { return made(std::fma(a, b, c)); }
HZ_DEVICE float round_down(float x) { return std::floor(x); }
HZ_DEVICE float clamp(float x, float low, float high) { return std::fmin(std::fmax(x, low), high); }
HZ_DEVICE hz_u32 funnel(hz_u32 high, hz_u32 low, hz_u32 bits) { return (hz_u32)(((hz_u64)high << 32 | low) >> bits); }
HZ_DEVICE hz_u32 two_bf16(float low, float high) {
  hz_u32 a = bits_of(low), b = bits_of(high);
  if (HZ_WAVE == 32 && low != low) a = 0x7fff0000;
  if (HZ_WAVE == 32 && high != high) b = 0x7fff0000;
  return (a + 0x7fff + (a >> 16 & 1)) >> 16 | ((b + 0x7fff + (b >> 16 & 1)) & 0xffff0000);
}
HZ_DEVICE float from_half(hz_u16 bits) {
  _Float16 half;
  std::memcpy(&half, &bits, 2);
  return (float)half;
}
HZ_DEVICE hz_u16 to_half(float x) {
  _Float16 half = (_Float16)x;
  hz_u16 bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
}  // namespace hz
