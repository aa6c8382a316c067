// The wire element by element, for blocks of any size and wires at any address. A warp reads every value twice: for the
// scale and for the code. The faster kernels for the usual blocks and addresses are built on wire.cuh.
#pragma once

#include "wire.cuh"

namespace {
namespace zeropp {

__device__ inline float load_element(const void* from, int64_t dtype, int64_t index) {
  return with_dtype(dtype, [&](auto type) {
    return to_float(read_unaligned<decltype(type)>(static_cast<const uint8_t*>(from) + index * sizeof type));
  });
}

__device__ inline void store_element(void* to, int64_t dtype, int64_t index, float value) {
  with_dtype(dtype, [&](auto type) {
    assign(type, value);
    write_unaligned(static_cast<uint8_t*>(to) + index * sizeof type, type);
  });
}

__device__ inline BFloat16 scale_of(const uint8_t* wire, const Part& part, int block, int64_t index) {
  return read_unaligned<BFloat16>(wire + part.scales + index / block * sizeof(BFloat16));
}

// Code `index` of a run of codes. It may lie in two bytes.
__device__ inline int8_t code_of(const uint8_t* codes, int bits, int64_t index) {
  const uint8_t* from = codes + index * bits / 8;
  const int shift = static_cast<int>(index * bits % 8), sign = 1 << (bits - 1);
  const int bytes = from[0] | (shift + bits > 8 ? from[1] << 8 : 0);
  return static_cast<int8_t>(((bytes >> shift & (2 * sign - 1)) ^ sign) - sign);
}

// Element `index` of a part, decoded.
__device__ inline float decode_element(const uint8_t* wire, const Part& part, const Layout& layout, int64_t index) {
  if (part.bits == 0) return load_element(wire + part.codes, layout.raw_dtype, index);
  const int8_t code = code_of(wire + part.codes, static_cast<int>(part.bits), index);
  const BFloat16 scale = scale_of(wire, part, static_cast<int>(layout.block), index);
  return decode(static_cast<int8_t>(level_of(code, part.bits)), to_float(scale));
}

// The largest magnitude among value_of(begin) .. value_of(end - 1). Every lane gets it.
template <class Value>
__device__ uint32_t warp_amax(const Value& value_of, int64_t begin, int64_t end) {
  uint32_t amax = 0;
  for (int64_t i = begin + lane_index(); i < end; i += kLanes) {
    amax = ::max(amax, static_cast<uint32_t>(magnitude(value_of(i))));
  }
  for (int step = kLanes / 2; step; step /= 2) amax = ::max(amax, __shfl_xor_sync(kAllLanes, amax, step));
  return amax;
}

// ---- Encode a tile, in three steps. New scales wait in shared memory until the codes are made: `value_of` may read
// the very wire that is written, and then it still needs the old scales.

template <class Value>
__device__ void find_scales(const Value& value_of, const Tile& tile, const Part& part, int block, BFloat16* scales) {
  const int64_t end = tile.first + tile.numel;
  for (int64_t begin = tile.first; begin < end; begin += block) {
    const BFloat16 scale = encode_scale(warp_amax(value_of, begin, min(begin + block, end)), part.bits);
    if (lane_index() == 0) scales[(begin - tile.first) / block] = scale;
  }
  __syncwarp();
}

// A lane makes all codes that share bytes: the codes of one byte, which may belong to different blocks, or 8 codes if
// codes lie in two bytes.
template <class Value>
__device__ void encode_codes(const Value& value_of, const Tile& tile, const Part& part, int block,
                             const BFloat16* scales, uint8_t* codes) {
  const auto code_at = [&](int64_t i) -> uint32_t {
    const BFloat16 scale = scales[(i - tile.first) / block];
    if (!has_codes(scale)) return 0;
    const int8_t steps = encode(value_of(i), step_of(scale, part.bits));
    return has_roots(part.bits) ? root_of(steps) : steps;
  };
  const int bits = static_cast<int>(part.bits), run = 8 % bits ? 8 : 8 / bits;
  const int64_t end = tile.first + tile.numel;
  for (int64_t first = tile.first + lane_index() * run; first < end; first += kLanes * run) {
    const int count = static_cast<int>(min(run, end - first));
    uint64_t word = 0;
    for (int i = 0; i < count; ++i) {
      word |= static_cast<uint64_t>(code_at(first + i) & ((1 << bits) - 1)) << bits * i;
    }
    for (int byte = 0; 8 * byte < bits * count; ++byte) {
      codes[first * bits / 8 + byte] = static_cast<uint8_t>(word >> 8 * byte);
    }
  }
  __syncwarp();
}

template <class Value>
__device__ void encode_tile_codes(const Value& value_of, const Tile& tile, const Part& part, int block, uint8_t* wire) {
  __shared__ BFloat16 staged[kWarps][kTileNumel];  // no tile has more blocks
  BFloat16* scales = staged[threadIdx.x / kLanes];
  find_scales(value_of, tile, part, block, scales);
  encode_codes(value_of, tile, part, block, scales, wire + part.codes);
  uint8_t* to = wire + part.scales + tile.first / block * sizeof(BFloat16);
  for (int b = lane_index(); b < ceil_div(tile.numel, block); b += kLanes) {
    write_unaligned(to + b * sizeof(BFloat16), scales[b]);
  }
  __syncwarp();  // the shared memory is free again, and the tile there to be read
}

// Values -> the tile's part of the wire, padding included. value_of(index) is element `index` of the part.
template <class Value>
__device__ void encode_elements(const Value& value_of, const Tile& tile, const Part& part, const Layout& layout,
                                uint8_t* wire) {
  const int block = static_cast<int>(layout.block);
  int64_t nbytes = part.numel * item_size(layout.raw_dtype);
  if (part.bits == 0) {
    for (int64_t i = tile.first + lane_index(); i < tile.first + tile.numel; i += kLanes) {
      store_element(wire + part.codes, layout.raw_dtype, i, value_of(i));
    }
  } else {
    encode_tile_codes(value_of, tile, part, block, wire);
    nbytes = ceil_div(part.numel * part.bits, 8);
  }
  if (!tile.is_last(part)) return;
  if (part.bits) write_zeros(wire + part.scales + ceil_div(part.numel, block) * sizeof(BFloat16), wire + part.codes);
  write_zeros(wire + part.codes + nbytes, wire + part.end);
}

}  // namespace zeropp
}  // namespace
