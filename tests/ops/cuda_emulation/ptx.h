// The functions of ops/cuda/ptx.cuh, in C++. Included before any kernel; the guard keeps the original out.
#pragma once
#define ZEROPP_PTX

#include <cuda_runtime.h>

#include <vector>

#include "../../../ops/format.h"

namespace {
namespace zeropp {

template <class T>
inline uint32_t round_bits(float value) {
  if (value != value) return 0x7FFF;  // as the instruction does
  T rounded;
  assign(rounded, value);
  return rounded.bits;
}

inline uint32_t round_pair(float low, float high, BFloat16) {
  return round_bits<BFloat16>(low) | round_bits<BFloat16>(high) << 16;
}

inline uint32_t round_pair(float low, float high, Float16) {
  return round_bits<Float16>(low) | round_bits<Float16>(high) << 16;
}

// A few units in the last place off, as the hardware's may be.
inline float approximate_root(float value) {
  const float root = std::sqrt(value);
  return root == 0.0f ? root : float_of(bits_of(root) + 3);
}

inline void widen_pair(uint32_t pair, float& low, float& high, Float16) {
  low = to_float(Float16{static_cast<uint16_t>(pair)});
  high = to_float(Float16{static_cast<uint16_t>(pair >> 16)});
}

inline float half_of(uint32_t pair, int index) { return float_of(index ? pair & 0xFFFF0000 : pair << 16); }

// The hardware adds the products in an order of its own and, within an instruction, to more than 24 bits: a tolerance
// covers both.
inline void multiply_tile(const uint32_t (&a)[4], const uint32_t (&b)[2], float (&sums)[4]) {
  float rows[16][16], columns[16][8];
  const auto all = [](uint32_t mine, const char* place, uint32_t* copy) {
    memcpy(copy, emulation::exchange(mine, place), emulation::kLanes * sizeof *copy);
  };
  for (int i = 0; i < 4; ++i) {
    uint32_t pairs[emulation::kLanes];
    all(a[i], EMULATION_PLACE, pairs);
    for (int lane = 0; lane < emulation::kLanes; ++lane) {
      for (int k = 0; k < 2; ++k) {
        rows[lane / 4 + i % 2 * 8][lane % 4 * 2 + i / 2 * 8 + k] = half_of(pairs[lane], k);
      }
    }
  }
  for (int i = 0; i < 2; ++i) {
    uint32_t pairs[emulation::kLanes];
    all(b[i], EMULATION_PLACE, pairs);
    for (int lane = 0; lane < emulation::kLanes; ++lane) {
      for (int k = 0; k < 2; ++k) columns[lane % 4 * 2 + i * 8 + k][lane / 4] = half_of(pairs[lane], k);
    }
  }
  const int group = EMULATION_LANE / 4, pair = EMULATION_LANE % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    double sum = sums[i];
    for (int k = 0; k < 16; ++k) sum += static_cast<double>(rows[group + i / 2 * 8][k]) * columns[k][pair + i % 2];
    sums[i] = static_cast<float>(sum);
  }
}

// Copies that a lane has begun, in groups. They land as late as they may: when they are waited for. Until then the shared memory
// holds a pattern, so a lane that reads too early reads garbage.
struct Copy {
  void* to;
  const void* from;
};

inline std::vector<std::vector<Copy>>& copies_of_lane() {
  static std::vector<std::vector<Copy>> of_lanes[1024];
  auto& groups = of_lanes[threadIdx.x];
  if (groups.empty()) groups.emplace_back();
  return groups;
}

inline void begin_copy(void* shared, const void* global) {
  memset(shared, 0xA5, 16);
  copies_of_lane().back().push_back({shared, global});
}

inline void end_copies() { copies_of_lane().emplace_back(); }

template <int n>
inline void wait_for_copies() {
  auto& groups = copies_of_lane();
  const size_t open = 1;  // the group that has not ended is not waited for
  while (groups.size() > n + open) {
    for (const Copy& copy : groups.front()) memcpy(copy.to, copy.from, 16);
    groups.erase(groups.begin());
  }
}

#define ZEROPP_LAUNCHED_SHARED(name) alignas(16) static uint8_t name[227 << 10]

}  // namespace zeropp
}  // namespace
