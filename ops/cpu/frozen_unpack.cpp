// Decode the rows of a frozen weight.
#include "frozen.h"

#include <type_traits>

namespace {
namespace zeropp {

// One row: Out is float, BFloat16 or Float16.
template <class Out>
void unpack_row(const uint8_t* codes, const uint8_t* scales, const FrozenRows& shape, Out* out) {
  alignas(64) float values[kMaxBlock];
  alignas(64) int8_t unpacked[kMaxBlock];
  for (int64_t b = 0; b < shape.num_blocks(); ++b) {
    const int64_t n = shape.block_size(b);
    const BFloat16 scale = load_scale(scales, b);
#if defined(__AVX512BW__)
    if constexpr (std::is_same_v<Out, BFloat16>) {
      if (shape.bits == 4) {
        decode_nibbles(codes + b * shape.block / 2, n, scale, out + b * shape.block);
        continue;
      }
    }
#endif
    decode_block<Set>(load_codes(codes, shape, b, unpacked), n, scale, values);
    convert(values, n, out + b * shape.block);
  }
}

}  // namespace zeropp
}  // namespace

ZEROPP_KERNEL(frozen_unpack)(const uint8_t* codes, const uint8_t* scales, int64_t columns, int64_t bits, int64_t block,
                             int64_t dtype, int64_t rows, void* out, void*) {
  using namespace zeropp;
  const FrozenRows shape{rows, columns, block, bits};
  return for_each_row(shape, [&](int64_t row) {
    const auto unpack = [&](auto* typed) {
      const uint8_t* row_scales = scales + row * shape.num_blocks() * sizeof(BFloat16);
      unpack_row(codes + row * shape.code_bytes(), row_scales, shape, typed + row * columns);
    };
    if (dtype == kFloat32) unpack(static_cast<float*>(out));
    else if (dtype == kBFloat16) unpack(static_cast<BFloat16*>(out));
    else unpack(static_cast<Float16*>(out));
  });
}
