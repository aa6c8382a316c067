// Bring the words of slices up to date by their changes.
#include "changes_apply.h"
#include "parallel.h"

namespace {
namespace zeropp {

// Finds where the payloads of a slice begin. False if the table does not fit the size of the slice's wire.
inline bool find_payloads(const uint8_t* wire, int64_t size, int64_t slice_bytes, int64_t* starts) {
  const int64_t num_blocks = num_blocks_of(slice_bytes);
  int64_t place = num_blocks * kEntryBytes;
  for (int64_t b = 0; b < num_blocks; ++b) {
    const int nbytes = payload_bytes(read_unaligned<uint32_t>(wire + b * kEntryBytes), words_of_block(slice_bytes, b));
    if (nbytes < 0) return false;
    starts[b] = place;
    place += nbytes;
  }
  return place == size;
}

// failed = the lower of both, but for 0.
inline void report(int64_t* failed, int64_t code) {
  int64_t now = __atomic_load_n(failed, __ATOMIC_RELAXED);
  while ((now == 0 || code < now) &&
         !__atomic_compare_exchange_n(failed, &now, code, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

}  // namespace zeropp
}  // namespace

ZEROPP_KERNEL(apply_changes)(const uint8_t* wire, const int64_t* offsets, const int64_t* sizes, uint8_t* base,
                             int64_t wire_bytes, int64_t num_slices, int64_t slice_bytes, int64_t* failed,
                             int64_t* starts, void*) {
  using namespace zeropp;
  const int64_t num_blocks = num_blocks_of(slice_bytes);
  for (int64_t k = 0; k < num_slices; ++k) {
    const bool fits = holds_table(offsets[k], sizes[k], wire_bytes, slice_bytes) &&
                      find_payloads(wire + offsets[k], sizes[k], slice_bytes, starts + k * num_blocks);
    failed[k] = fits ? 0 : kBadSize;
  }
  const bool ok = parallel_for(num_slices * num_blocks, 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t k = i / num_blocks, b = i % num_blocks;
      if (__atomic_load_n(failed + k, __ATOMIC_RELAXED) == kBadSize) continue;
      const uint8_t* from = wire + offsets[k];
      const uint32_t entry = read_unaligned<uint32_t>(from + b * kEntryBytes);
      uint8_t* words = base + k * slice_bytes + b * kBlockBytes;
      if (!apply_payload(entry, from + starts[i], words_of_block(slice_bytes, b), words)) {
        report(failed + k, kBadSize + 1 + b);
      }
    }
  });
  return ok ? kOk : kParallelFailed;
}
