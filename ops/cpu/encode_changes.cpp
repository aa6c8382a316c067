// Encode how the words of slices differ from those of a base.
#include <memory>

#include "changes.h"
#include "parallel.h"

namespace {
namespace zeropp {

// [Note: one pass] Where a payload begins is known when those before it are. A pass that only counts would read both
// shards a second time, and memory is what bounds this operator. Each thread therefore writes the payloads of its run of
// blocks behind each other, from where the run would begin if all blocks before it were whole. There is always room up to the
// next run. Afterwards payloads move to the left, in their order: few bytes, and none with one thread.
inline int64_t first_place(int64_t block, int64_t num_blocks) { return num_blocks * kEntryBytes + block * kBlockBytes; }

struct Slices {
  const uint8_t* input;
  const uint8_t* base;
  int64_t slice_bytes;
  uint8_t* wire;
  int64_t* starts;

  int64_t num_blocks() const { return num_blocks_of(slice_bytes); }
};

// Encodes block `b` of slice `k` to `place` in the slice's wire. Returns the place behind it.
inline int64_t encode_block(const Slices& slices, int64_t k, int64_t b, int64_t place, Changes& changes,
                            Payload& payload) {
  const int64_t begin = k * slices.slice_bytes + b * kBlockBytes;
  uint8_t* wire = slices.wire + k * capacity_of(slices.slice_bytes);
  const int words = words_of_block(slices.slice_bytes, b);
  find_changes(slices.input + begin, slices.base + begin, words, changes);
  classify(changes);
  const uint32_t entry = make_entry(changes.n, changes.escape_bytes(), words);
  write_unaligned(wire + b * kEntryBytes, entry);
  slices.starts[k * slices.num_blocks() + b] = place;
  if (entry == 0) return place;
  uint8_t* to = wire + place;
  if (entry == kWhole) {
    memcpy(to, slices.input + begin, 2 * words);
    memset(to + 2 * words, 0, whole_bytes(words) - 2 * words);
    return place + whole_bytes(words);
  }
  const int nbytes = write_payload(changes, words, payload);
  memcpy(to, payload.bytes, nbytes);
  return place + nbytes;
}

// Moves the payloads of a slice behind each other. Returns the bytes of its wire.
inline int64_t join_payloads(const Slices& slices, int64_t k) {
  uint8_t* wire = slices.wire + k * capacity_of(slices.slice_bytes);
  int64_t* starts = slices.starts + k * slices.num_blocks();
  int64_t place = slices.num_blocks() * kEntryBytes;
  for (int64_t b = 0; b < slices.num_blocks(); ++b) {
    const int nbytes = payload_bytes(read_unaligned<uint32_t>(wire + b * kEntryBytes), words_of_block(slices.slice_bytes, b));
    if (starts[b] != place) memmove(wire + place, wire + starts[b], nbytes);
    starts[b] = place;
    place += nbytes;
  }
  return place;
}

}  // namespace zeropp
}  // namespace

ZEROPP_KERNEL(encode_changes)(const uint8_t* input, const uint8_t* base, int64_t num_slices, int64_t slice_bytes,
                              int64_t* sizes, uint8_t* wire, int64_t* starts, void*) {
  using namespace zeropp;
  const Slices slices{input, base, slice_bytes, wire, starts};
  const int64_t num_blocks = slices.num_blocks();
  const bool ok = parallel_for(num_slices * num_blocks, 4, [&](int64_t begin, int64_t end) {
    const auto changes = std::make_unique<Changes>();
    const auto payload = std::make_unique<Payload>();
    int64_t place = 0;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t k = i / num_blocks, b = i % num_blocks;
      if (i == begin || b == 0) place = first_place(b, num_blocks);
      place = encode_block(slices, k, b, place, *changes, *payload);
    }
  });
  if (!ok) return kParallelFailed;
  for (int64_t k = 0; k < num_slices; ++k) sizes[k] = join_payloads(slices, k);
  return kOk;
}
