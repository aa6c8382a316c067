// Tiles: each warp finds the elements that it works on.
//
// [Note: tiles] A tile is a run of whole blocks of one part of one slice, for one warp. One launch works on all parts
// of all slices, so a warp has to find its tile by its number, in the table of parts. With tiles of 2^s blocks,
//
//     first_tile(p) = floor(first_block(p) / 2^s) + p
//
// leaves part p as many numbers as it has tiles, or one more, whatever the sizes are. So there is no second table, and
// no kernel that computes one. A warp whose number belongs to no tile has nothing to do. There are at most two such
// warps per part.
#pragma once

#include "rows.cuh"

namespace {
namespace zeropp {

constexpr int kWarps = 4;  // in a thread block
constexpr int kThreads = kWarps * kLanes;

struct Tiling {
  int block;
  int log2_blocks;  // a tile has 2^log2_blocks blocks
  int num_tiles;    // numbers that may belong to a tile, in one slice

  ZEROPP_HD int tile_numel() const { return block << log2_blocks; }
};

struct Tile {
  int part;       // index
  int64_t first;  // first element, in the part
  int numel;      // 0: the number belongs to no tile

  __device__ bool is_last(const Part& of) const { return first + numel == of.numel; }
};

// Finds the tile of a number. Lanes look for the last part that begins at or before the number, at 32 places at a time: two
// rounds for up to 1024 parts, as many for two parts as for 32.
__device__ __forceinline__ Tile find_tile(const Layout& layout, const Tiling& tiling, int number) {
  const auto first_tile = [&](int part) {
    return static_cast<int>(layout.parts[part].first_block >> tiling.log2_blocks) + part;
  };
  int part = 0, count = static_cast<int>(layout.num_parts);  // it is among `count` parts from this one on
  do {
    const int stride = (count + kLanes - 1) >> 5, ahead = lane_index() * stride;
    const uint32_t begun = __ballot_sync(kAllLanes, ahead < count && first_tile(part + ahead) <= number);
    const int skipped = (__popc(begun) - 1) * stride;
    part += skipped;
    count = ::min(count - skipped, stride);
  } while (count > 1);
  const int64_t first = static_cast<int64_t>(number - first_tile(part)) * tiling.tile_numel();
  const int64_t left = max(layout.parts[part].numel - first, 0);
  return {part, first, static_cast<int>(min(left, tiling.tile_numel()))};
}

// Runs body(tile, slice) for this warp's tile. Slices are spread over the grid's rows. A loop over slices would cost
// registers, in which the compiler would keep all that is the same for every slice.
template <class Body>
__device__ __forceinline__ void for_my_tile(const Layout& layout, const Tiling& tiling, int64_t num_slices, Body body) {
  const int number = blockIdx.x * kWarps + threadIdx.x / kLanes;
  const uint32_t slice = blockIdx.z * gridDim.y + blockIdx.y;  // of 32 bits, as registers are scarce
  if (number >= tiling.num_tiles || slice >= num_slices) return;
  const Tile tile = find_tile(layout, tiling, number);
  if (tile.numel) body(tile, slice);
}

}  // namespace zeropp
}  // namespace
