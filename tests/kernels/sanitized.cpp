// Calls kernels under sanitizers: reads calls from standard input, gives every buffer memory of exactly its size, and
// writes the buffers back to standard output. tests/kernels/sanitized.py writes the calls.
#include <dlfcn.h>

// All that the sources behind this file include, too: these headers ask for __x86_64__, which is then undefined.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "bucket.h"

static bool read(void* to, size_t size) { return std::fread(to, 1, size, stdin) == size; }

template <class T>
static T number() {
  T found;
  if (!read(&found, sizeof found)) std::exit(3);
  return found;
}

int main() {
  for (hz_u32 length; read(&length, sizeof length);) {
    std::string name(length, ' ');
    hz_bucket bucket;
    if (!read(&name[0], length) || !read(&bucket, sizeof bucket)) return 3;
    struct Buffer {
      char* memory;
      char* start;
      size_t size;
    };
    std::vector<Buffer> buffers(number<hz_u32>());
    for (Buffer& buffer : buffers) {
      const hz_u32 shift = number<hz_u32>();  // from a multiple of 16
      buffer.size = number<hz_u64>();
      buffer.memory = (char*)std::malloc(shift + buffer.size);
      buffer.start = buffer.memory + shift;
      if (!read(buffer.start, buffer.size)) return 3;
    }
    for (hz_u32 fields = number<hz_u32>(); fields > 0; --fields) {
      const hz_u32 field = number<hz_u32>(), index = number<hz_u32>();
      const hz_u64 address = (hz_u64)buffers[index].start;
      std::memcpy((char*)&bucket + field, &address, sizeof address);
    }
    void* kernel = dlsym(RTLD_DEFAULT, name.c_str());
    if (!kernel) return 4;
#if defined(HZ_EMULATE)
    ((void (*)(const hz_bucket*))kernel)(&bucket);
#else
    ((void (*)(const hz_bucket*, int))kernel)(&bucket, 1);
#endif
    for (Buffer& buffer : buffers) {
      std::fwrite(buffer.start, 1, buffer.size, stdout);
      std::free(buffer.memory);
    }
  }
  return 0;
}
