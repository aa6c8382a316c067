// Decode the rows of a frozen weight.
#include "frozen.h"

#include <type_traits>

namespace {
namespace zeropp {

// out <- level * scale. The scales come from memory, one for each of 32 columns, so that compilers find one loop of vectors.
inline void decode_runs(const int8_t* __restrict levels, int64_t n, const RunScales& scales, float* __restrict out) {
  alignas(64) float of_column[2 * kRun];
  for (int k = 0; k < 2 * kRun; ++k) of_column[k] = scales.at[k / kRun];
  int64_t i = 0;
  for (; i + 2 * kRun <= n; i += 2 * kRun) {
    for (int k = 0; k < 2 * kRun; ++k) out[i + k] = decode(levels[i + k], of_column[k]);
  }
  for (; i < n; ++i) out[i] = decode(levels[i], of_column[i % (2 * kRun)]);
}

#if defined(__AVX512BW__)
// The 16 levels times each scale of an INT4 block, as bf16: [Note: nibbles in registers] in loops.h.
inline __m512i level_table(const RunScales& scales) {
  const __m512 levels = level_floats();
  const auto rounded = [&](float scale) {
    const __m512i bits = _mm512_castps_si512(_mm512_mul_ps(levels, _mm512_set1_ps(scale)));
    const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7FFF)));
  };
  // The upper halves, of the words of the one and then of the other: words 1, 3 .. 63.
  const __m512i pairs = _mm512_setr_epi32(0x30001, 0x70005, 0xB0009, 0xF000D, 0x130011, 0x170015, 0x1B0019, 0x1F001D, 0x230021,
                                          0x270025, 0x2B0029, 0x2F002D, 0x330031, 0x370035, 0x3B0039, 0x3F003D);
  return _mm512_permutex2var_epi16(rounded(scales.at[0]), pairs, rounded(scales.at[1]));
}

// 32 codes at a time. An index has the code in its low four bits, and above them a bit that says which scale it takes.
inline void decode_levels(const uint8_t* __restrict in, int64_t n, const RunScales& scales, BFloat16* __restrict out) {
  const __m512i table = level_table(scales), is_code = _mm512_set1_epi32(0x000F000F);
  const __m512i second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(0x00100010), 1);
  int64_t i = 0;
  for (; i + 2 * kRun <= n; i += 2 * kRun) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i / 2)));
    const __m512i codes = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
    const __m512i indices = _mm512_ternarylogic_epi32(codes, is_code, second, 0xEA);  // (codes & is_code) | second
    _mm512_storeu_si512(out + i, _mm512_permutexvar_epi16(indices, table));
  }
  for (; i < n; ++i) Set::apply(out[i], frozen_level_of(in[i / 2] >> i % 2 * 4) * scales.at[i / kRun % 2]);
}
#endif

// One row: Out is float, BFloat16 or Float16.
template <class Out>
void unpack_row(const uint8_t* codes, const uint8_t* scales, const FrozenRows& shape, Out* out) {
  alignas(64) float values[kMaxBlock];
  alignas(64) int8_t buffer[kMaxBlock];
  for (int64_t b = 0; b < shape.num_blocks(); ++b) {
    const int64_t n = shape.block_size(b);
    const RunScales block_scales = run_scales(load_scale(scales, b), shape.bits);
#if defined(__AVX512BW__)
    if constexpr (std::is_same_v<Out, BFloat16>) {
      if (shape.bits == 4) {
        decode_levels(codes + b * shape.block / 2, n, block_scales, out + b * shape.block);
        continue;
      }
    }
#endif
    decode_runs(load_levels(codes, shape, b, buffer), n, block_scales, values);
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
