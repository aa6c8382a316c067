// Memory that is fetched early, and results that are written past the caches.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {
namespace zeropp {

// Asks for the cache lines of `nbytes` bytes. The address need not exist: a prefetch never faults.
inline void prefetch(const void* from, int64_t nbytes) {
  for (int64_t i = 0; i < nbytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i);
}

// Copies past the caches. An ordinary store first reads the line that it overwrites and pushes out data that is still
// needed, which a result larger than the caches does in vain.
inline void stream_copy(uint8_t* to, const uint8_t* from, int64_t nbytes) {
#if defined(__AVX512F__)
  using Line = __m512i;
  const auto stream = [](void* at, Line line) { _mm512_stream_si512(static_cast<Line*>(at), line); };
#elif defined(__AVX2__)
  using Line = __m256i;
  const auto stream = [](void* at, Line line) { _mm256_stream_si256(static_cast<Line*>(at), line); };
#elif defined(__SSE2__)
  using Line = __m128i;
  const auto stream = [](void* at, Line line) { _mm_stream_si128(static_cast<Line*>(at), line); };
#endif
  int64_t i = 0;
#if defined(__SSE2__)
  const int64_t head = -reinterpret_cast<intptr_t>(to) & (sizeof(Line) - 1);  // streaming stores must be aligned
  if (head < nbytes) {
    memcpy(to, from, head);
    for (i = head; i + static_cast<int64_t>(sizeof(Line)) <= nbytes; i += sizeof(Line)) {
      Line line;
      memcpy(&line, from + i, sizeof line);
      stream(to + i, line);
    }
  }
#endif
  memcpy(to + i, from + i, nbytes - i);
}

// Makes streaming stores visible to other threads. Neither locks nor the end of a thread order them.
inline void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace zeropp
}  // namespace
