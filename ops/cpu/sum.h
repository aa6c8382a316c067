// The sum of several sources, which two kernels share.
#pragma once

#include "tile.h"

namespace {
namespace zeropp {

// Slices that several ranks sent, and the values that their sums start from.
struct Sources {
  const uint8_t* wire;  // [num_sources, num_sums, nbytes]
  const Layout& layout;
  const float* initial;  // [num_sums, numel], or null: start from source 0
  int64_t num_sources;
  int64_t num_sums;

  // initial + source 0 + source 1 + ..., in that order, for a tile of this layout.
  void sum(const Tile& tile, Worker& worker, float* out) const {
    const uint8_t* from = wire + tile.slice * layout.nbytes;
    int64_t source = 0;
    if (initial) {
      const float* first = initial + tile.slice * layout.numel + tile.element();
      prefetch(first + tile.numel, tile.numel * sizeof *first);
      memcpy(out, first, tile.numel * sizeof *out);
    } else {
      worker.decode<Set>(from, tile, layout, out);
      source = 1;
    }
    for (; source < num_sources; ++source) {
      worker.decode<Add>(from + source * num_sums * layout.nbytes, tile, layout, out);
    }
  }
};

}  // namespace zeropp
}  // namespace
