// Add up slices that several ranks sent, add the residual of earlier calls, and encode. The error becomes the new
// residual.
#include "launch.cuh"
#include "rotate.cuh"
#include "sum.cuh"

namespace {
namespace zeropp {

constexpr int kFeedbackVector = 8;

// How the residual is used and renewed.
struct Feedback {
  bool rotate;
  float decay;    // the new residual is keep * old + decay * error, or the error alone for a decay of 1
  float keep;
  float rescale;  // factor of the old residual before it is used

  __device__ float mixed(float old, float error) const { return decay == 1.0f ? error : old * keep + error * decay; }
};

// The residual of a tile; zeros for blocks whose scale is not finite.
template <int V>
__device__ __forceinline__ void load_residual(const TileMemory<const uint8_t>& from, float rescale, Staging& staging,
                                              float (&values)[kPerLane]) {
  clear(values);
  with_bits(from.part.bits, [&](auto bits) {
    constexpr int kBits = decltype(bits)::value;
    auto fetched = fetch_blocks<kBits>(from.blocks(kBits));
    if (!is_finite(fetched.scale)) fetched.scale.bits = 0;
    add_blocks<kBits, V>(fetched, from.log2_block, staging, values);
  });
  if (rescale == 1.0f) return;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) values[i] *= rescale;
}

__global__ void __launch_bounds__(kThreads, 4)
quantize_with_feedback_rows(Tiling tiling, int64_t num_sums, Sources sources, Feedback feedback,
                            Wires<uint8_t> residual, Wires<uint8_t> wire) {
  constexpr int V = kFeedbackVector;
  __shared__ Staging staging[kWarps];
  for_my_tile(wire.layout, tiling, num_sums, [&](const Tile& tile, int64_t index) {
    Staging& mine = staging[threadIdx.x / kLanes];
    const TileMemory<uint8_t> to = wire.memory(tile, index), kept = residual.memory(tile, index);
    float values[kPerLane], old[kPerLane];
    sources.sum_rows<V>(tile, index, mine, values);
    if (to.part.bits == 0) return encode_tile<V>(values, to, wire.layout.raw_dtype, mine);
    if (feedback.rotate) rotate_rows<V>(tile.numel, values);
    load_residual<V>({kept.wire, kept.part, tile, kept.log2_block}, feedback.rescale, mine, old);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) values[i] += old[i];
    with_bits(to.part.bits, [&](auto bits) {
      constexpr int kBits = decltype(bits)::value;
      encode_blocks<kBits, V>(values, to.blocks(kBits), to.num_scales(), mine);
      subtract_encoded<kBits, V>(to.log2_block, mine, values);
    });
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) values[i] = feedback.mixed(old[i], values[i]);
    encode_quantized<V>(values, kept, mine);
  });
}

__global__ void __launch_bounds__(kThreads)
quantize_with_feedback_elements(Tiling tiling, int64_t num_sums, Sources sources, Feedback feedback,
                                Wires<uint8_t> residual, Wires<uint8_t> wire) {
  for_my_tile(wire.layout, tiling, num_sums, [&](const Tile& tile, int64_t index) {
    const Part &part = wire.part(tile), &kept = residual.part(tile), &source = sources.layout.parts[tile.part];
    const auto sum_of = [&](int64_t i) { return sources.sum_element(source, index, i); };
    if (part.bits == 0) return encode_elements(sum_of, tile, part, wire.layout, wire.slice(index));
    const auto old_of = [&](int64_t i) {
      const BFloat16 scale = scale_of(residual.slice(index), kept, tiling.block, i);
      if (!is_finite(scale)) return 0.0f;
      return decode_element(residual.slice(index), kept, residual.layout, i) * feedback.rescale;
    };
    const auto value_of = [&](int64_t i) {
      return (feedback.rotate ? rotated_element(sum_of, part, i) : sum_of(i)) + old_of(i);
    };
    encode_elements(value_of, tile, part, wire.layout, wire.slice(index));
    const auto residual_of = [&](int64_t i) {
      return feedback.mixed(old_of(i), value_of(i) - decode_element(wire.slice(index), part, wire.layout, i));
    };
    encode_elements(residual_of, tile, kept, residual.layout, residual.slice(index));
  });
}

}  // namespace zeropp
}  // namespace

ZEROPP_KERNEL(quantize_with_feedback)(const uint8_t* wire, const ZeroppLayout* layout, const ZeroppLayout* out_layout,
                                      const ZeroppLayout* residual_layout, int64_t num_sources, const float* initial,
                                      int64_t rotate, float decay, float rescale, uint8_t* residual, int64_t num_slices,
                                      uint8_t* out, void* stream) {
  using namespace zeropp;
  const Sources sources{wire, *layout, initial, num_sources, num_slices, log2_floor(layout->block)};
  const Feedback feedback{rotate != 0, decay, 1.0f - decay, rescale};
  const bool rows = has_row_blocks(*layout, wire) && has_row_blocks(*out_layout, out) &&
                    has_row_blocks(*residual_layout, residual);
  const auto kernel = rows ? quantize_with_feedback_rows : quantize_with_feedback_elements;
  return launch_tiles(kernel, tiling_of(*out_layout), num_slices, stream, sources, feedback,
                      wires_of(residual, *residual_layout), wires_of(out, *out_layout));
}
