// Tiles, the pieces in which the operators of the wire work.
//
// A tile is an even number of whole blocks of one segment of one slice, small enough to stay in the first-level cache
// from its first load to its last store. Everything happens tile by tile: kernels compose the steps of a Worker, with
// fp32 values between them. (An even number of blocks, so that a tile of INT4 codes starts at a byte for blocks of odd
// sizes too.)
#pragma once

#include "codes.h"
#include "loops.h"
#include "memory.h"
#include "parallel.h"

namespace {
namespace zeropp {

constexpr int64_t kTileNumel = 2048;                 // aimed at: 8 KiB of fp32
constexpr int64_t kMaxTileNumel = 2 * kMaxBlock;     // reached with the largest blocks
constexpr int64_t kNumelPerThread = 32768;           // PyTorch's own grain: less work is not worth a thread
constexpr int64_t kEncodeAhead = 2;                  // tiles from the one encoded to the one fetched: measured
constexpr int64_t kDecodeAhead = 4;                  // the same for decoding
constexpr int64_t kStreamBytes = int64_t{4} << 20;   // results of at least this size bypass the caches

struct Tile {
  const Part* part;
  int64_t slice;
  int64_t first;  // first element, in the part
  int64_t numel;

  bool is_last() const { return first + numel == part->numel; }
  int64_t element() const { return part->element + first; }  // in the slice

  // The same elements in another layout of the same segments. They may begin and end within that layout's blocks.
  Tile moved(const Layout& from, const Layout& to) const {
    return {to.parts + (part - from.parts), slice, first, numel};
  }
};

inline int64_t tile_numel(int64_t block) {
  return 2 * block * max(kTileNumel / (2 * block), 1);
}

// The steps of a tile, and the buffers between them. Each thread has a Worker of its own, on its stack. fp32 and bf16
// values go straight in and out of the steps. fp16 values are converted to fp32 first.
class Worker {
 public:
  // stream: results bypass the caches.
  explicit Worker(bool stream) : stream_(stream) {}

  // The tile's values, n elements of `dtype` -> scales and codes, or raw elements, in its slice's wire. Meanwhile
  // fetches memory for a later tile: the same distance behind `source`, the memory from which this tile's values are
  // made, or behind the values themselves if it is null.
  void encode(const void* values, int64_t dtype, const Tile& tile, const Layout& layout, uint8_t* wire,
              const void* source = nullptr) {
    source_ = static_cast<const char*>(source ? source : values);
    if (tile.part->bits == 0) {
      encode_raw(load(values, dtype, tile.numel), tile, layout.raw_dtype, wire);
    } else if (dtype == kBFloat16) {
      encode_quantized(static_cast<const BFloat16*>(values), tile, layout.block, wire);
    } else {
      encode_quantized(load(values, dtype, tile.numel), tile, layout.block, wire);
    }
  }

  // The tile's part of its slice's wire -> fp32 or bf16, set or added. A tile that was moved from another
  // layout may begin and end within this layout's blocks, so the loop below takes one run for each block that it
  // touches.
  template <class Update, class Out>
  void decode(const uint8_t* wire, const Tile& tile, const Layout& layout, Out* out) {
    const Part& part = *tile.part;
    if (part.bits == 0) return decode_raw<Update>(wire + part.codes, tile, layout.raw_dtype, out);
    const bool in_registers = has_nibble_loops<Out>(part, layout.block);
    const uint8_t* packed = wire + part.codes + tile.first * part.bits / 8;
    prefetch(packed + kDecodeAhead * tile.numel * part.bits / 8, tile.numel * part.bits / 8);
    const int8_t* levels = in_registers ? nullptr : load_levels(wire, tile);
    const uint8_t* scales = wire + part.scales + tile.first / layout.block * sizeof(BFloat16);
    int64_t size = layout.block - tile.first % layout.block;
    for (int64_t at = 0; at < tile.numel; at += size, size = layout.block, scales += sizeof(BFloat16)) {
      const auto scale = read_unaligned<BFloat16>(scales);
      const int64_t n = min(size, tile.numel - at);
#if defined(__AVX512BW__)
      if constexpr (sizeof *out == sizeof(BFloat16)) {
        if (in_registers) {
          decode_nibbles(packed + at / 2, n, scale, out + at);
          continue;
        }
      }
#endif
      decode_block<Update>(levels + at, n, scale, out + at);
    }
  }

  // n elements of `dtype` -> fp32. Returns `from` itself for elements that are fp32 already.
  const float* load(const void* from, int64_t dtype, int64_t n) {
    if (dtype == kFloat32) return static_cast<const float*>(from);
    if (dtype == kBFloat16) convert(static_cast<const BFloat16*>(from), n, values_);
    if (dtype == kFloat16) convert(static_cast<const Float16*>(from), n, values_);
    return values_;
  }

  // n values -> `dtype` in memory.
  void store(const float* values, int64_t n, int64_t dtype, void* to) {
    if (dtype == kFloat32) return write(to, values, n * sizeof *values);
    if (dtype == kBFloat16) convert(values, n, reinterpret_cast<BFloat16*>(halves_));
    if (dtype == kFloat16) convert(values, n, reinterpret_cast<Float16*>(halves_));
    write(to, halves_, 2 * n);
  }

  void write(void* to, const void* from, int64_t nbytes) {
    if (stream_) stream_copy(static_cast<uint8_t*>(to), static_cast<const uint8_t*>(from), nbytes);
    else memcpy(to, from, nbytes);
  }

 private:
  void encode_raw(const float* values, const Tile& tile, int64_t dtype, uint8_t* wire) {
    const Part& part = *tile.part;
    store(values, tile.numel, dtype, wire + part.codes + tile.first * item_size(dtype));
    if (tile.is_last()) write_zeros(wire + part.codes + part.numel * item_size(dtype), wire + part.end);
  }

  template <class In>
  void encode_quantized(const In* values, const Tile& tile, int64_t block, uint8_t* wire) {
    const Part& part = *tile.part;
    const int64_t num_blocks = encode_scales(values, tile.numel, block, part.bits);
    const int64_t nbytes = ceil_div(tile.numel * part.bits, 8);
    uint8_t* scales = wire + part.scales + tile.first / block * 2;
    uint8_t* codes = wire + part.codes + tile.first * part.bits / 8;
    encode_codes(values, tile.numel, block, part.bits, has_nibble_loops<In>(part, block));
    if (!has_nibble_loops<In>(part, block)) pack_codes(codes_, tile.numel, part.bits, packed_);
    write(scales, scales_, 2 * num_blocks);
    write(codes, part.bits < 8 ? static_cast<const void*>(packed_) : codes_, nbytes);
    if (!tile.is_last()) return;
    write_zeros(scales + 2 * num_blocks, wire + part.codes);
    write_zeros(codes + nbytes, wire + part.end);
  }

  // The scale of every block, into scales_. Returns how many. A loop of its own, so that the divisions are vectorized.
  template <class In>
  int64_t encode_scales(const In* values, int64_t n, int64_t block, int64_t bits) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += block) amax_[count++] = block_amax(values + i, min(block, n - i));
    for (int64_t b = 0; b < count; ++b) scales_[b] = encode_scale(amax_[b], bits);
    return count;
  }

  // The codes of every block, into codes_ (or packed_), while memory for a later tile is on its way.
  template <class In>
  void encode_codes(const In* values, int64_t n, int64_t block, int64_t bits, [[maybe_unused]] bool in_registers) {
    for (int64_t i = 0, b = 0; i < n; i += block, ++b) {
      const int64_t size = min(block, n - i);
      prefetch(source_ + (kEncodeAhead * n + i) * sizeof *values, size * sizeof *values);
#if defined(__AVX512BW__)
      if constexpr (sizeof *values == sizeof(BFloat16)) {
        if (in_registers) {
          encode_nibbles(values + i, size, scales_[b], packed_ + i / 2);
          continue;
        }
      }
#endif
      encode_block(values + i, size, scales_[b], bits, codes_ + i);
    }
  }

  // Do [Note: nibbles in registers] loops take this part? Blocks of an odd size do not all start at a byte.
  template <class T>
  static bool has_nibble_loops([[maybe_unused]] const Part& part, [[maybe_unused]] int64_t block) {
#if defined(__AVX512BW__)
    return sizeof(T) == sizeof(BFloat16) && part.bits == 4 && block % 2 == 0;
#else
    return false;
#endif
  }

  // The levels of the tile's codes, as bytes. Codes are unpacked from an element whose code begins at a byte: a tile that was
  // moved from another layout may begin in between.
  const int8_t* load_levels(const uint8_t* wire, const Tile& tile) {
    const Part& part = *tile.part;
    if (part.bits == 8) return reinterpret_cast<const int8_t*>(wire + part.codes) + tile.first;
    const int64_t lead = tile.first % kCodesAtAByte;
    unpack_levels(wire + part.codes + (tile.first - lead) * part.bits / 8, lead + tile.numel, part.bits, codes_);
    return codes_ + lead;
  }

  template <class Update, class Out>
  void decode_raw(const uint8_t* from, const Tile& tile, int64_t dtype, Out* out) {
    const void* elements = aligned(from + tile.first * item_size(dtype), tile.numel, dtype);
    if (dtype == kBFloat16) update<Update>(static_cast<const BFloat16*>(elements), tile.numel, out);
    else update<Update>(load(elements, dtype, tile.numel), tile.numel, out);
  }

  // n elements of `dtype`, copied if they must be: a wire buffer may begin anywhere, floats in memory may not.
  const void* aligned(const uint8_t* from, int64_t n, int64_t dtype) {
    const int64_t size = item_size(dtype);
    if (reinterpret_cast<uintptr_t>(from) % size == 0) return from;
    void* copy = dtype == kFloat32 ? static_cast<void*>(values_) : halves_;
    memcpy(copy, from, n * size);
    return copy;
  }

  static void write_zeros(uint8_t* from, uint8_t* to) { memset(from, 0, to - from); }

  const bool stream_;
  const char* source_;
  alignas(64) float values_[kMaxTileNumel];
  alignas(64) uint16_t halves_[kMaxTileNumel];
  alignas(64) uint32_t amax_[kMaxTileNumel];
  alignas(64) BFloat16 scales_[kMaxTileNumel];
  alignas(64) int8_t codes_[kMaxTileNumel + kCodesAtAByte];
  alignas(64) uint8_t packed_[packed_bytes(kMaxTileNumel, 7)];  // 8-bit codes are not packed
};

// Runs body(tile, worker) for every tile of `num_slices` slices, in threads. `result_bytes` is the size of all that the
// bodies write. Tiles of all parts of all slices are numbered one after the other, and each thread takes a range of the
// numbers.
template <class Body>
int for_each_tile(const Layout& layout, int64_t num_slices, int64_t result_bytes, const Body& body) {
  const int64_t step = tile_numel(layout.block);
  int64_t per_slice = 0;
  for (int64_t p = 0; p < layout.num_parts; ++p) per_slice += ceil_div(layout.parts[p].numel, step);

  const auto run = [&](int64_t begin, int64_t end) {
    Worker worker(result_bytes >= kStreamBytes);
    for (int64_t slice = begin / per_slice; slice * per_slice < end; ++slice) {
      int64_t index = slice * per_slice;
      for (const Part* part = layout.parts; part != layout.parts + layout.num_parts; ++part) {
        const int64_t count = ceil_div(part->numel, step);
        for (int64_t t = max(begin - index, 0); t < min(count, end - index); ++t) {
          body(Tile{part, slice, t * step, min(step, part->numel - t * step)}, worker);
        }
        index += count;
      }
    }
    stream_fence();
  };
  return parallel_for(num_slices * per_slice, kNumelPerThread / step + 1, run) ? kOk : kParallelFailed;
}

}  // namespace zeropp
}  // namespace
