// The same wire, element by element: for blocks of any size and wires at any address. A warp reads every value twice, for
// the scale and for the code. Kernels for the usual blocks and addresses are built on wire.cuh.
#pragma once

#include "wire.cuh"

namespace {
namespace zeropp {

template <class T>
__device__ T read_unaligned(const uint8_t* from) {
  T value;
  memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
__device__ void write_unaligned(uint8_t* to, T value) {
  memcpy(to, &value, sizeof value);
}

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

// Code `index` of a run of codes.
__device__ inline int8_t code_of(const uint8_t* codes, int bits, int64_t index) {
  const uint8_t byte = codes[index * bits / 8];
  const int nibble = byte >> index % 2 * 4 & 0x0F;
  return static_cast<int8_t>(bits == 8 ? byte : (nibble ^ 8) - 8);
}

// Element `index` of a part.
__device__ inline float decode_element(const uint8_t* wire, const Part& part, const Layout& layout, int64_t index) {
  if (part.bits == 0) return load_element(wire + part.codes, layout.raw_dtype, index);
  const int8_t code = code_of(wire + part.codes, static_cast<int>(part.bits), index);
  return decode(code, to_float(scale_of(wire, part, static_cast<int>(layout.block), index)));
}

// The largest magnitude among the values that `value_of(index)` gives for begin .. end - 1, in every lane.
template <class Value>
__device__ uint32_t warp_amax(const Value& value_of, int64_t begin, int64_t end) {
  uint32_t amax = 0;
  for (int64_t i = begin + lane_index(); i < end; i += kLanes) {
    amax = ::max(amax, static_cast<uint32_t>(magnitude(value_of(i))));
  }
  for (int step = kLanes / 2; step; step /= 2) amax = ::max(amax, __shfl_xor_sync(kAllLanes, amax, step));
  return amax;
}

// The two steps of a quantized tile. Codes are made byte by byte: the two in a byte may be of different blocks.
template <class Value>
__device__ void encode_scales(const Value& value_of, const Tile& tile, const Part& part, int block, uint8_t* wire) {
  const int64_t end = tile.first + tile.numel;
  for (int64_t begin = tile.first; begin < end; begin += block) {
    const uint32_t amax = warp_amax(value_of, begin, min(begin + block, end));
    const BFloat16 scale = encode_scale(amax, qmax_of(part.bits));
    if (lane_index() == 0) write_unaligned(wire + part.scales + begin / block * sizeof scale, scale);
  }
  __syncwarp();
}

template <class Value>
__device__ void encode_codes(const Value& value_of, const Tile& tile, const Part& part, int block, uint8_t* wire) {
  const auto code_at = [&](int64_t i) {
    const BFloat16 scale = scale_of(wire, part, block, i);
    return has_codes(scale) ? encode(value_of(i), to_float(scale)) : 0;
  };
  const int64_t end = tile.first + tile.numel;
  const int per_byte = 8 / static_cast<int>(part.bits);
  for (int64_t i = tile.first + lane_index() * per_byte; i < end; i += kLanes * per_byte) {
    int byte = code_at(i);
    if (part.bits == 4) byte = (byte & 0x0F) | (i + 1 < end ? code_at(i + 1) << 4 : 0);
    wire[part.codes + i / per_byte] = static_cast<uint8_t>(byte);
  }
}

// Values -> the tile's part of the wire, padding included. value_of(index): element `index` of the part.
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
    encode_scales(value_of, tile, part, block, wire);
    encode_codes(value_of, tile, part, block, wire);
    nbytes = ceil_div(part.numel * part.bits, 8);
  }
  if (!tile.is_last(part)) return;
  if (part.bits) write_zeros(wire + part.scales + ceil_div(part.numel, block) * sizeof(BFloat16), wire + part.codes);
  write_zeros(wire + part.codes + nbytes, wire + part.end);
}

}  // namespace zeropp
}  // namespace
