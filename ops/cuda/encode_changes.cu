// Encode how the words of slices differ from those of a base: count, find where payloads begin, write. The host waits for nothing:
// sizes stay on the GPU.
#include "changes.cuh"

namespace {
namespace zeropp {

// Runs body(position, step) for each change among this thread's words, in their order.
template <class Body>
__device__ __forceinline__ void for_each_change(const BlockOfWords<const uint8_t>& input,
                                                const BlockOfWords<const uint8_t>& base, const Body& body) {
#pragma unroll
  for (int group = 0; group < kPerThread / kGroup; ++group) {
    const int first = threadIdx.x * kPerThread + group * kGroup;
    if (first >= input.words) return;
    const Words<4> news = input.load(first), olds = base.load(first);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const auto new_word = static_cast<uint16_t>(news.at[i / 2] >> 16 * (i % 2));
      const auto old_word = static_cast<uint16_t>(olds.at[i / 2] >> 16 * (i % 2));
      if (new_word != old_word) body(first + i, static_cast<int16_t>(ordered(new_word) - ordered(old_word)));
    }
  }
}

__device__ __forceinline__ bool is_escape(int step) { return step != 1 && step != -1; }
__device__ __forceinline__ bool is_wide(int step) { return step < -128 || step > 127; }

// The changes of a thread: how many, with low bytes in the upper half; and how many have high bytes.
struct Counts {
  uint32_t changes_and_escapes, wide;
};

__device__ __forceinline__ Counts count_changes(const BlockOfWords<const uint8_t>& input,
                                                const BlockOfWords<const uint8_t>& base) {
  Counts counts{0, 0};
  for_each_change(input, base, [&](int, int step) {
    counts.changes_and_escapes += is_escape(step) ? 0x10001 : 1;
    counts.wide += is_wide(step);
  });
  return counts;
}

__global__ void __launch_bounds__(kChangeThreads)
count_blocks(const uint8_t* inputs, const uint8_t* bases, int64_t slice_bytes, uint8_t* wire) {
  __shared__ uint32_t sums[kChangeThreads / kLanes];
  const int64_t num_blocks = num_blocks_of(slice_bytes), slice = blockIdx.x / num_blocks, b = blockIdx.x % num_blocks;
  const BlockOfWords<const uint8_t> input(inputs, slice_bytes, slice, b), base(bases, slice_bytes, slice, b);
  const Counts counts = count_changes(input, base);
  const uint32_t both = block_prefix(counts.changes_and_escapes, sums).all;
  const uint32_t wide = block_prefix(counts.wide, sums).all;
  if (threadIdx.x) return;
  const uint32_t entry = make_entry(both & 0xFFFF, (both >> 16) + wide, input.words);
  write_unaligned(wire + slice * capacity_of(slice_bytes) + b * kEntryBytes, entry);
}

__global__ void __launch_bounds__(kChangeThreads)
find_sizes(const uint8_t* wire, int64_t slice_bytes, int64_t* sizes, int64_t* starts) {
  const int64_t slice = blockIdx.x;
  const int64_t size = find_payloads(wire + slice * capacity_of(slice_bytes), slice_bytes,
                                     starts + slice * num_blocks_of(slice_bytes));
  if (threadIdx.x == 0) sizes[slice] = size;
}

// ORs `value` into shared memory, which begins as zeros.
__device__ __forceinline__ void put_bits(uint32_t* words, int bit, uint32_t value) {
  const int shift = bit % 32;
  atomicOr(words + bit / 32, value << shift);
  if (shift && value >> (32 - shift)) atomicOr(words + bit / 32 + 1, value >> (32 - shift));
}

__device__ inline void write_payload(const BlockOfWords<const uint8_t>& input,
                                     const BlockOfWords<const uint8_t>& base, const Sections& at, int num_escapes,
                                     Counts before, uint32_t* payload) {
  int index = before.changes_and_escapes & 0xFFFF, low_byte = at.low_bytes + (before.changes_and_escapes >> 16);
  int high_byte = at.low_bytes + num_escapes + before.wide;
  for_each_change(input, base, [&](int position, int step) {
    put_bits(payload, at.is_bitmap ? position : (position >> at.width) + index, 1);
    if (at.width) put_bits(payload, 8 * at.lows + index * at.width, position & low_ones(at.width));
    if (is_escape(step)) put_bits(payload, 8 * at.escapes + index, 1);
    if (is_wide(step) || step == -1) put_bits(payload, 8 * at.details + index, 1);
    if (is_escape(step)) put_bits(payload, 8 * low_byte++, step & 0xFF);
    if (is_wide(step)) put_bits(payload, 8 * high_byte++, step >> 8 & 0xFF);
    ++index;
  });
}

__device__ inline void write_whole(const BlockOfWords<const uint8_t>& input, uint8_t* to) {
  for (int i = threadIdx.x; i < whole_bytes(input.words); i += kChangeThreads) {
    to[i] = i < 2 * input.words ? input.bytes[i] : 0;
  }
}

__global__ void __launch_bounds__(kChangeThreads)
write_blocks(const uint8_t* inputs, const uint8_t* bases, int64_t slice_bytes, uint8_t* wires, const int64_t* starts) {
  __shared__ uint32_t sums[kChangeThreads / kLanes];
  __shared__ uint32_t payload[kPayloadWords];
  const int64_t num_blocks = num_blocks_of(slice_bytes), slice = blockIdx.x / num_blocks, b = blockIdx.x % num_blocks;
  const BlockOfWords<const uint8_t> input(inputs, slice_bytes, slice, b), base(bases, slice_bytes, slice, b);
  uint8_t* wire = wires + slice * capacity_of(slice_bytes);
  const uint32_t entry = load_entry(wire, b);
  if (entry == 0) return;
  uint8_t* to = wire + starts[blockIdx.x];
  if (entry == kWhole) return write_whole(input, to);
  const Sections at(count_of(entry), input.words);
  const int nbytes = at.nbytes(escape_bytes_of(entry));
  for (int i = threadIdx.x; i < nbytes / 4; i += kChangeThreads) payload[i] = 0;
  const Counts counts = count_changes(input, base);
  const Prefix both = block_prefix(counts.changes_and_escapes, sums), wide = block_prefix(counts.wide, sums);
  write_payload(input, base, at, both.all >> 16, {both.before, wide.before}, payload);
  __syncthreads();
  copy_from_shared(payload, nbytes, to);
}

}  // namespace zeropp
}  // namespace

ZEROPP_KERNEL(encode_changes)(const uint8_t* input, const uint8_t* base, int64_t num_slices, int64_t slice_bytes,
                              int64_t* sizes, uint8_t* wire, int64_t* starts, void* stream) {
  using namespace zeropp;
  const dim3 slices(static_cast<unsigned>(num_slices));
  const dim3 blocks(static_cast<unsigned>(num_slices * num_blocks_of(slice_bytes)));
  int status = kOk;
  if (slice_bytes) status = launch(count_blocks, blocks, kChangeThreads, stream, input, base, slice_bytes, wire);
  if (!status) status = launch(find_sizes, slices, kChangeThreads, stream, wire, slice_bytes, sizes, starts);
  if (status || !slice_bytes) return status;
  return launch(write_blocks, blocks, kChangeThreads, stream, input, base, slice_bytes, wire, starts);
}
