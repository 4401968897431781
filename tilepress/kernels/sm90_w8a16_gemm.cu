// y[m, n] = x[m, k] (w[n, k] * w_scale)^T + bias with int8 w and 16-bit x, on the tensor cores of sm_90a: for few
// tokens, as fast as w can be read.
//
// A unit is 128 rows of w by 128 of its columns. A loader warp copies units and x's columns to slots in shared memory
// (TMA, mbarriers); two consumer warpgroups, 64 rows each, make values of the codes, wgmma's operand A in registers,
// with x in the slot as operand B. All units are one row, of which every block takes an equal share, last one first;
// sums that blocks share are those of split_sum.cuh.
//
// Of what is read, w alone is before earlier kernels of the stream have ended.
//
// Macros: NT tokens, 8 .. 128; SLOTS; BLOCKS of a multiprocessor; BF16. 288 threads. k is a multiple of 16. wgmma() of
// NT columns comes from kernels/ptx.py.

#include "scales.cuh"
#include "split_sum.cuh"
#include "output.cuh"
#include "codes.cuh"

#define X_BYTES (NT * 256)
#define W_BYTES (128 * 128)
// Steps of 16 columns that are read, then multiplied while the next ones are read.
#define PART 4
enum { GROUP_BARRIER = 1 };                                // named barriers, one for each warpgroup

struct Slots {
  u32 x, w, full, empty;

  __device__ u32 x_of(int slot) const { return x + slot * X_BYTES; }
  __device__ u32 w_of(int slot) const { return w + slot * W_BYTES; }
};

// w of as many units as there are slots is asked for before earlier kernels have ended, x of them then, all others as
// slots become empty.
__device__ __forceinline__ void load(const TensorMap* w, const TensorMap* x, const Slots& slots, int begin, int end,
                                     int k_blocks) {
  const auto copy_w = [&](int slot, int unit) {
    expect(slots.full + 8 * slot, W_BYTES + X_BYTES);
    tma_2d(slots.w_of(slot), w, unit % k_blocks * 128, unit / k_blocks * 128, slots.full + 8 * slot);
  };
  const auto copy_x = [&](int slot, int unit) {
    const int column = unit % k_blocks * 128;
    tma_2d(slots.x_of(slot), x, column, 0, slots.full + 8 * slot);
    tma_2d(slots.x_of(slot) + X_BYTES / 2, x, column + 64, 0, slots.full + 8 * slot);
  };
  const int early = min(SLOTS, end - begin);
  for (int i = 0; i < early; ++i) copy_w(i, end - 1 - i);
  wait_for_grid();
  for (int i = 0; i < early; ++i) copy_x(i, end - 1 - i);
  Position at;
  for (int i = 0; i < end - begin; ++i, at.next(SLOTS)) {
    if (i < early) continue;
    wait(slots.empty + 8 * at.slot, at.phase ^ 1);
    copy_w(at.slot, end - 1 - i);
    copy_x(at.slot, end - 1 - i);
  }
}

// Operand A of steps FIRST .. FIRST + PART - 1. `codes`: the thread's first two of a row; the row's 16-byte piece p
// stands at p ^ (row % 8).
template <int FIRST> __device__ __forceinline__ void read_steps(u32 (&a)[PART][4], u32 codes) {
#pragma unroll
  for (int s = 0; s < PART; ++s) {
    const u32 at = codes ^ (FIRST + s) * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      a[s][i] = expand(__byte_perm(lds16(at + i % 2 * 1024 + i / 2 * 8), 0, 0x4140) ^ 0x00800080);
  }
}

template <int FIRST>
__device__ __forceinline__ void multiply(float (&sums)[NT / 2], u32 (&a)[2][PART][4], u32 codes, u64 x, u32& before) {
  u32 (&mine)[PART][4] = a[FIRST / PART % 2];
  read_steps<FIRST>(mine, codes);
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < PART; ++s) wgmma(sums, mine[s], x + (FIRST + s) / 4 * (X_BYTES / 2 / 16) + (FIRST + s) % 4 * 2);
  wgmma_commit();
  wgmma_wait<1>();
  if (FIRST == 0 && threadIdx.x % 32 == 0 && before) arrive(before);
  if constexpr (FIRST + PART < 8) multiply<FIRST + PART>(sums, a, codes, x, before);
}

extern "C" __global__ void __launch_bounds__(288, BLOCKS)
w8a16_gemm(const __grid_constant__ TensorMap w,     // of w, int8 [n, k]
           const __grid_constant__ TensorMap x,     // of x, 16-bit [m, k]
           const void* w_scale,                     // [n] or [1], of the kind that `kinds` says (scales.cuh)
           const void* bias,                        // [n] of the kind that `kinds` says, or null
           int kinds,
           u16* y,                                  // 16-bit [m, n]
           float* sums_left,                        // float32 [blocks, 128 * NT]: parts of sums (split_sum.cuh)
           u64* left,                               // uint64 [blocks, 2]: whose parts are there
           u64 ticket,
           int m, int n, int k_blocks, int units) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 base = shared_address(memory), bars = base + SLOTS * (X_BYTES + W_BYTES);
  const Slots slots = {base, base + SLOTS * X_BYTES, bars, bars + 8 * SLOTS};
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, share = units / gridDim.x,
            more = units % gridDim.x;
  const auto cut = [=](int b) { return b * share + min(b, more); };
  launch_dependents();
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; ++i) { bar_init(slots.full + 8 * i, 1); bar_init(slots.empty + 8 * i, 8); }
    fence_bar_init();
  }
  __syncthreads();
  const int begin = cut(blockIdx.x), end = cut(blockIdx.x + 1);
  if (warp == 8) {
    if (lane == 0) load(&w, &x, slots, begin, end, k_blocks);
    return;
  }
  wait_for_grid();
  const Parts parts = {sums_left, left, ticket, 2, warp / 4};
  const u32 codes = slots.w + (warp * 16 + lane / 4) * 128 + lane / 4 * 16 + lane % 4 * 2;
  Position at;
  for (int unit = end; unit > begin;) {
    const int start = (unit - 1) / k_blocks * k_blocks, stop = max(begin, start);
    const bool has_end = unit == start + k_blocks;
    float sums[NT / 2];
#pragma unroll
    for (int i = 0; i < NT / 2; ++i) sums[i] = 0.f;
    // `before`: barrier of the unit before, which wgmma may still read.
    u32 a[2][PART][4], before = 0;
    for (; unit > stop; --unit, at.next(SLOTS)) {
      wait(slots.full + 8 * at.slot, at.phase);
      multiply<0>(sums, a, codes + at.slot * W_BYTES, descriptor(slots.x_of(at.slot)), before);
      before = slots.empty + 8 * at.slot;
    }
    wgmma_wait<0>();
    if (lane == 0) arrive(before);
    if (!has_end) {
      parts.store(sums, blockIdx.x);
      bar_sync(GROUP_BARRIER + parts.mine, 128);
      if (threadIdx.x % 128 == 0) parts.announce(blockIdx.x);
      continue;
    }
    if (stop > start) parts.add(sums, start, blockIdx.x, cut, GROUP_BARRIER + parts.mine);
    write_scaled(sums, start / k_blocks * 128 + warp * 16, w_scale, bias, kinds, y, m, n);
  }
}
