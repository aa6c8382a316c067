// Bring the words of slices up to date by their changes: check the table and find payloads, then apply them. A damaged block is
// reported on the GPU, and the host waits for nothing.
#include "changes.cuh"

namespace {
namespace zeropp {

__global__ void __launch_bounds__(kChangeThreads)
check_tables(const uint8_t* wire, const int64_t* offsets, const int64_t* sizes, int64_t wire_bytes, int64_t slice_bytes,
             int64_t* failed, int64_t* starts) {
  const int64_t slice = blockIdx.x, size = sizes[slice];
  bool fits = holds_table(offsets[slice], size, wire_bytes, slice_bytes);
  if (fits) {
    fits = find_payloads(wire + offsets[slice], slice_bytes, starts + slice * num_blocks_of(slice_bytes)) == size;
  }
  if (threadIdx.x == 0) failed[slice] = fits ? 0 : kBadSize;
}

// failed = the lower of both, but for 0.
__device__ inline void report(int64_t* failed, int64_t code) {
  using Unsigned = unsigned long long;
  Unsigned now = static_cast<Unsigned>(*failed);
  while (now == 0 || static_cast<Unsigned>(code) < now) {
    const Unsigned before = atomicCAS(reinterpret_cast<Unsigned*>(failed), now, static_cast<Unsigned>(code));
    if (before == now) return;
    now = before;
  }
}

// Shared memory of a block that is decoded.
struct Decoding {
  uint32_t payload[kPayloadWords];
  uint32_t bitmap[kChangeThreads];          // of changed words: thread t holds those of its words
  uint32_t escapes_before[kChangeThreads];  // before change 32 i, at index i
  uint32_t wide_before[kChangeThreads];
  uint32_t sums[kChangeThreads / kLanes];
  uint16_t positions[kBlockWords];
  int is_damaged;
};

// Counts escapes, which later are found by their ranks. Returns the bytes that they take.
__device__ inline int count_escapes(const Sections& at, int n, Decoding& shared, int& num_escapes) {
  const int first = 32 * threadIdx.x;
  uint32_t escapes = 0, wide = 0;
  if (first < n) {
    escapes = bits_at(shared.payload, 8 * at.escapes + first) & low_ones(n - first);
    wide = escapes & bits_at(shared.payload, 8 * at.details + first);
  }
  const Prefix escape_prefix = block_prefix(__popc(escapes), shared.sums);
  const Prefix wide_prefix = block_prefix(__popc(wide), shared.sums);
  shared.escapes_before[threadIdx.x] = escape_prefix.before;
  shared.wide_before[threadIdx.x] = wide_prefix.before;
  num_escapes = escape_prefix.all;
  return escape_prefix.all + wide_prefix.all;
}

// The ones of this thread among the high parts -> positions, in shared memory. A position that no 16 bits hold is behind any block.
__device__ inline void find_positions(const Sections& at, uint32_t ones, int index, Decoding& shared) {
  for (; ones; ones &= ones - 1, ++index) {
    const int one = 32 * threadIdx.x + 31 - __clz(ones & (~ones + 1));
    const uint32_t high = static_cast<uint32_t>(one - index) << at.width;
    const uint32_t low = at.width ? bits_at(shared.payload, 8 * at.lows + index * at.width) & low_ones(at.width) : 0;
    shared.positions[index] = static_cast<uint16_t>(::min(static_cast<int>(high | low), 0xFFFF));
  }
}

// Makes the bitmap of changed words. All threads return whether positions rise and stay in the block.
__device__ inline bool find_changes(const Sections& at, int n, int words, Decoding& shared) {
  const int left = at.escapes - 4 * static_cast<int>(threadIdx.x);
  const uint32_t ones = left > 0 ? shared.payload[threadIdx.x] & low_ones(8 * left) : 0;
  shared.bitmap[threadIdx.x] = at.is_bitmap ? ones : 0;
  if (threadIdx.x == 0) shared.is_damaged = 0;
  const Prefix prefix = block_prefix(__popc(ones), shared.sums);
  if (static_cast<int>(prefix.all) != n) return false;
  if (at.is_bitmap) {
    const int in_block = words - 32 * static_cast<int>(threadIdx.x);
    if (ones & ~low_ones(::max(in_block, 0))) shared.is_damaged = 1;
  } else {
    find_positions(at, ones, prefix.before, shared);
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += kChangeThreads) {
      const int position = shared.positions[i];
      const bool rises = i == 0 || shared.positions[i - 1] < position;
      if (position < words && rises) atomicOr(shared.bitmap + position / 32, 1u << position % 32);
      else shared.is_damaged = 1;
    }
  }
  __syncthreads();
  return !shared.is_damaged;
}

// The step of change `index`.
__device__ inline int step_of(const Sections& at, int num_escapes, int index, const Decoding& shared) {
  const uint32_t upto = low_ones(index % 32);  // the changes before this one, among 32
  const uint32_t escapes = bits_at(shared.payload, 8 * at.escapes + index / 32 * 32);
  const uint32_t details = bits_at(shared.payload, 8 * at.details + index / 32 * 32);
  const bool escape = escapes >> index % 32 & 1, detail = details >> index % 32 & 1;
  if (!escape) return detail ? -1 : 1;
  const int low_byte = at.low_bytes + shared.escapes_before[index / 32] + __popc(escapes & upto);
  const uint32_t low = byte_at(shared.payload, low_byte);
  if (!detail) return static_cast<int8_t>(low);
  const int high_byte = at.low_bytes + num_escapes + shared.wide_before[index / 32] + __popc(escapes & details & upto);
  return static_cast<int>(low | byte_at(shared.payload, high_byte) << 8);
}

// Changes this thread's words.
__device__ inline void change_words(const Sections& at, int num_escapes, const BlockOfWords<uint8_t>& base,
                                    Decoding& shared) {
  const uint32_t changed = shared.bitmap[threadIdx.x];
  int index = block_prefix(__popc(changed), shared.sums).before;
#pragma unroll
  for (int group = 0; group < kPerThread / kGroup; ++group) {
    const uint32_t mine = changed >> kGroup * group & 0xFF;
    if (mine == 0) continue;
    const int first = threadIdx.x * kPerThread + group * kGroup;
    Words<4> values = base.load(first);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (!(mine >> i & 1)) continue;
      const auto old_word = static_cast<uint16_t>(values.at[i / 2] >> 16 * (i % 2));
      const auto moved = static_cast<uint16_t>(ordered(old_word) + step_of(at, num_escapes, index++, shared));
      const uint32_t kept = values.at[i / 2] & (i % 2 ? 0x0000FFFF : 0xFFFF0000);
      values.at[i / 2] = kept | static_cast<uint32_t>(unordered(moved)) << 16 * (i % 2);
    }
    base.store(first, values);
  }
}

__device__ inline void read_whole(const uint8_t* from, const BlockOfWords<uint8_t>& base) {
  for (int i = threadIdx.x; i < 2 * base.words; i += kChangeThreads) base.bytes[i] = from[i];
}

__global__ void __launch_bounds__(kChangeThreads)
apply_blocks(const uint8_t* wires, const int64_t* offsets, uint8_t* bases, int64_t slice_bytes, int64_t* failed,
             const int64_t* starts) {
  __shared__ Decoding shared;
  const int64_t num_blocks = num_blocks_of(slice_bytes), slice = blockIdx.x / num_blocks, b = blockIdx.x % num_blocks;
  if (failed[slice] == kBadSize) return;
  const uint8_t* wire = wires + offsets[slice];
  const uint32_t entry = load_entry(wire, b);
  if (entry == 0) return;
  const BlockOfWords<uint8_t> base(bases, slice_bytes, slice, b);
  if (entry == kWhole) return read_whole(wire + starts[blockIdx.x], base);
  const int n = count_of(entry);
  const Sections at(n, base.words);
  copy_to_shared(wire + starts[blockIdx.x], at.nbytes(escape_bytes_of(entry)), shared.payload);
  __syncthreads();
  int num_escapes = 0;
  bool is_good = count_escapes(at, n, shared, num_escapes) == escape_bytes_of(entry);
  is_good = is_good && find_changes(at, n, base.words, shared);
  if (is_good) change_words(at, num_escapes, base, shared);
  else if (threadIdx.x == 0) report(failed + slice, kBadSize + 1 + b);
}

}  // namespace zeropp
}  // namespace

ZEROPP_KERNEL(apply_changes)(const uint8_t* wire, const int64_t* offsets, const int64_t* sizes, uint8_t* base,
                             int64_t wire_bytes, int64_t num_slices, int64_t slice_bytes, int64_t* failed,
                             int64_t* starts, void* stream) {
  using namespace zeropp;
  const dim3 slices(static_cast<unsigned>(num_slices));
  const dim3 blocks(static_cast<unsigned>(num_slices * num_blocks_of(slice_bytes)));
  const int status = launch(check_tables, slices, kChangeThreads, stream, wire, offsets, sizes, wire_bytes, slice_bytes,
                            failed, starts);
  if (status || !slice_bytes) return status;
  return launch(apply_blocks, blocks, kChangeThreads, stream, wire, offsets, base, slice_bytes, failed, starts);
}
