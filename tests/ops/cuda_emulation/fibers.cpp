// Fibers and where they meet: the half of the emulation that is not in cuda_runtime.h.
#include <cuda_runtime.h>

#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <ucontext.h>
#include <vector>

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {
namespace {

constexpr size_t kStackBytes = 64 << 10;

// ucontext makes a stack; from then on setjmp and longjmp switch, which unlike swapcontext cost no system call.
struct Fiber {
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  jmp_buf state;
  bool started = false;
  bool done = false;
};

// A lane comes to meeting m + 2 only when all have left meeting m: two sets of values are enough.
struct Warp {
  uint32_t values[2][kLanes];
  const char* place;
  int arrived = 0;
  int meeting = 0;
};

std::vector<Fiber> fibers;
std::vector<Warp> warps;
int current, num_threads, at_barrier, barrier, progress;
jmp_buf scheduler;
void (*body)(void*);
void* context;

[[noreturn]] void fail(const char* what, const char* place) {
  fprintf(stderr, "CUDA emulation: %s: %s (block %u, %u; thread %d)\n", what, place, blockIdx.x, blockIdx.y, current);
  abort();
}

void yield() {
  if (!_setjmp(fibers[current].state)) _longjmp(scheduler, 1);
}

void fiber_main() {
  for (;;) {  // one round for each block
    body(context);
    fibers[current].done = true;
    ++progress;
    yield();
  }
}

void start(Fiber& fiber) {
  ucontext_t begin;
  getcontext(&begin);
  begin.uc_stack.ss_sp = fiber.stack.get();
  begin.uc_stack.ss_size = kStackBytes;
  begin.uc_link = nullptr;
  makecontext(&begin, fiber_main, 0);
  fiber.started = true;
  setcontext(&begin);
}

void resume(int thread) {
  current = thread;
  threadIdx = dim3(thread, 0, 0);
  if (_setjmp(scheduler)) return;
  if (fibers[thread].started) _longjmp(fibers[thread].state, 1);
  start(fibers[thread]);
}

// Resumes every fiber that is not done. Returns how many are left.
int run_round() {
  int left = 0;
  for (int thread = 0; thread < num_threads; ++thread) {
    if (!fibers[thread].done) resume(thread);
    left += !fibers[thread].done;
  }
  return left;
}

void run_block() {
  for (int thread = 0; thread < num_threads; ++thread) fibers[thread].done = false;
  warps.assign(num_threads / kLanes, Warp{});
  at_barrier = barrier = 0;
  for (int before = progress; run_round(); before = progress) {
    if (progress != before) continue;
    for (const Warp& warp : warps) {
      if (warp.arrived) fail("some lanes of a warp never come to a meeting", warp.place);
    }
    fail("some threads never come to a barrier", "__syncthreads");
  }
}

}  // namespace

const uint32_t* exchange(uint32_t value, const char* place) {
  Warp& warp = warps[current / kLanes];
  const int meeting = warp.meeting;
  if (warp.arrived == 0) warp.place = place;
  if (strcmp(warp.place, place) != 0) fail("lanes of a warp meet at different places", place);
  warp.values[meeting % 2][current % kLanes] = value;
  if (++warp.arrived == kLanes) {
    warp.arrived = 0;
    ++warp.meeting;
    ++progress;
  }
  while (warp.meeting == meeting) yield();
  return warp.values[meeting % 2];
}

void wait_for_block() {
  const int mine = barrier;
  if (++at_barrier == num_threads) {
    at_barrier = 0;
    ++barrier;
    ++progress;
  }
  while (barrier == mine) yield();
}

void run_grid(dim3 grid, dim3 block, void (*kernel)(void*), void* arguments) {
  num_threads = static_cast<int>(block.x);
  while (static_cast<int>(fibers.size()) < num_threads) fibers.emplace_back();
  gridDim = grid;
  blockDim = block;
  body = kernel;
  context = arguments;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = dim3(x, y, z);
        run_block();
      }
    }
  }
}

}  // namespace emulation
