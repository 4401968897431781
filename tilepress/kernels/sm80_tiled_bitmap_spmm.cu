// y[n, M] = x[n, K] W[M, K]^T + bias, W as tiled bitmap (formats/tiled_bitmap.py), on mma.sync and cp.async: for cards
// from sm_80 on that are not Hopper.
//
// A block walks through units of W: the tiles, 128 rows and 128 columns each, of PAIRS row blocks, one below the other.
// STAGES of them stand in shared memory, each with 128 columns of x, and all but the one that is multiplied are on
// their way. A warp has 16 * GROUPS_OF_ROWS rows of a tile: a lane reads the values of its runs straight into the
// registers that mma.sync takes as operand A, which are those of wgmma; ldmatrix reads x as operand B, once for all of
// a warp's rows. Several blocks of a multiprocessor hide each other's waits.
//
//   global --cp.async--> tile, x in a stage --LDS, LDSM--> A, B --mma.sync--> accumulators --> y
//
// W is walked through once for every NT columns of y (walks.cuh); sums that blocks share are those of split_sum.cuh.
// Words, offsets and cuts are read before earlier kernels of the stream have ended (sm_90 and later): they must not be
// what a kernel writes that may still be running.
//
// Macros: NT columns of y, 8 .. 128; PAIRS 1 | 2; GROUPS_OF_ROWS 1 | 2; STAGES; PART 2 | 4, steps that are unrolled, or
// 0: each is read before the one ahead of it is multiplied; BLOCKS of a multiprocessor; those of tiled_bitmap.cuh. x in
// rows of `k` columns, a multiple of 8, `stride` apart, likewise.

#include "mma.cuh"
#include "tiled_bitmap.cuh"
#include "walks.cuh"
#include "split_sum.cuh"
#include "output.cuh"

#define TILE_WARPS (8 / GROUPS_OF_ROWS)
#define WARPS (PAIRS * TILE_WARPS)
#define THREADS (32 * WARPS)
#define X_BYTES (NT * 256)                    // of a stage
#define COUNT (NT / 2)                        // accumulators for 16 rows

// Words are read once, or by neighbours in other walks too: first to leave the L2 cache, or not.
__device__ __forceinline__ void copy_words(u32 to, const uint4* from, int count, bool again) {
  for (int i = threadIdx.x; i < count; i += THREADS)
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to + i * 16), "l"(from + i),
                 "l"(again ? 0x1000000000000000ull : EVICT_FIRST)
                 : "memory");
}

__device__ __forceinline__ void copy_x(u32 to, const u16* x, int column, int n, int k, int stride) {
#pragma unroll 2
  for (int i = threadIdx.x; i < NT * 16; i += THREADS) {
    const int row = i / 16, piece = i % 16, c = column + piece * 8;
    const bool ok = row < n && c < k;
    copy_16(to + row * 256 + (piece ^ row % 8) * 16, ok ? x + (u64)row * stride + c : x, ok);
  }
}

// A step's product. `x`: where this lane's row of x for ldmatrix stands, in the step's 16 columns; `odd` is the step's.
template <bool ODD = false>
__device__ __forceinline__ void multiply(float (&acc)[GROUPS_OF_ROWS][COUNT], const u32 (&a)[GROUPS_OF_ROWS][4], u32 x,
                                         u32 (&b)[4]) {
  if (NT == 8) {                              // a load is of two steps
    if (!ODD) load_matrices(b, x);
#pragma unroll
    for (int g = 0; g < GROUPS_OF_ROWS; ++g) mma(acc[g], a[g], b[ODD * 2], b[ODD * 2 + 1]);
  } else {
#pragma unroll
    for (int j = 0; j < NT / 8; j += 2) {
      load_matrices(b, x + j * 8 * 256);
#pragma unroll
      for (int g = 0; g < GROUPS_OF_ROWS; ++g) {
        mma(acc[g] + 4 * j, a[g], b[0], b[1]);
        mma(acc[g] + 4 * j + 4, a[g], b[2], b[3]);
      }
    }
  }
}

template <int STEP = 0>
__device__ __forceinline__ void read(u32 (&a)[GROUPS_OF_ROWS][4], Run (&run)[GROUPS_OF_ROWS]) {
#pragma unroll
  for (int g = 0; g < GROUPS_OF_ROWS; ++g) read_step<STEP>(a[g], run[g]);
}

template <int COUNT_OF_STEPS> __device__ __forceinline__ void skip(Run (&run)[GROUPS_OF_ROWS]) {
#pragma unroll
  for (int g = 0; g < GROUPS_OF_ROWS; ++g) run[g].skip_bits<COUNT_OF_STEPS * STEP_BITS>();
}

// Steps of a part, from STEP on.
template <int STEP>
__device__ __forceinline__ void multiply_part(float (&acc)[GROUPS_OF_ROWS][COUNT], Run (&run)[GROUPS_OF_ROWS], u32 x,
                                              u32 (&b)[4]) {
  u32 a[GROUPS_OF_ROWS][4];
  read<STEP>(a, run);
  multiply<STEP % 2>(acc, a, x ^ STEP * 32, b);
  if constexpr (STEP + 1 < PART) multiply_part<STEP + 1>(acc, run, x, b);
}

__device__ __forceinline__ void multiply_tile(float (&acc)[GROUPS_OF_ROWS][COUNT], Run (&run)[GROUPS_OF_ROWS], u32 x) {
  u32 b[4];
#if PART
#pragma unroll 1                              // else the compiler reads further ahead than there are registers
  for (int i = 0; i < 8 / PART; ++i) {
    multiply_part<0>(acc, run, x ^ i * PART * 32, b);
    skip<PART>(run);
  }
#else
  u32 a[2][GROUPS_OF_ROWS][4];
  read(a[0], run);
  skip<1>(run);
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    read(a[1], run);
    skip<1>(run);
    multiply(acc, a[0], x ^ i * 64, b);
    if (i < 3) read(a[0], run);
    skip<1>(run);
    multiply<true>(acc, a[1], x ^ i * 64 ^ 32, b);
  }
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
tiled_bitmap_mma(const uint4* words,                // the weight's words, of 16 bytes
                 const int* offsets,                // int32 [tiles + 1], in words
                 const int* cuts,                   // int32 [blocks + 1], or null
                 const u16* x,                      // 16-bit [n, k], rows `stride` elements apart
                 const u16* scale,                  // 16-bit [m] of int8 values, or null
                 const u16* bias,                   // 16-bit [m] or null
                 u16* y,                            // 16-bit [n, m]
                 float* sums,                       // float32 [blocks, PAIRS * 128 * NT]: parts of sums
                 u64* left,                         // uint64 [blocks, WARPS / 4]: whose parts are there
                 u64 ticket,
                 int n, int m, int k, int stride, int k_blocks, int units, int tiles, int walks,
                 int tile_bytes, int successors_wait) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 base = shared_address(shared);    // x of all stages, then their tiles
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pair = warp / TILE_WARPS;
  const Runs cut(cuts, walks, units);
  const int number = cut.mine(walks), begin = cut(number);
  const Parts parts = {sums, left, ticket, WARPS / 4, warp / 4};
  int unit = cut(number + 1);
#if __CUDA_ARCH__ >= 900
  if (successors_wait) launch_dependents();
#endif
  if (unit == begin) {
#if __CUDA_ARCH__ >= 900
    wait_for_grid(!successors_wait);
#endif
    return;
  }
  Cursor next(unit - 1, units, k_blocks);     // the one that is asked for next
  int first[PAIRS], end[PAIRS];               // of its tiles' words
  const auto look_up = [&] {
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
      const int tile = (next.tile - next.column) * PAIRS + p * k_blocks + next.column;
      first[p] = end[p] = 0;
      if (PAIRS > 1 && tile >= tiles) continue;            // there is no such row block
      first[p] = __ldg(offsets + tile); end[p] = __ldg(offsets + tile + 1);
    }
  };
  look_up();
  const u32 all_tiles = base + STAGES * X_BYTES;
  const auto bring_words = [&](int stage, int after) {     // of the unit ahead of `after`: `next`
    if (after <= begin) return;
#pragma unroll
    for (int p = 0; p < PAIRS; ++p)
      copy_words(all_tiles + (stage * PAIRS + p) * tile_bytes, words + first[p], end[p] - first[p], walks > 1);
  };
  const auto bring_x = [&](int stage, int after) {
    if (after > begin) {
      const int row = next.walk * NT;
      copy_x(base + stage * X_BYTES, x + (u64)row * stride, next.column * 128, n - row, k, stride);
      if (after - 1 > begin) {                // offsets are here when the next tile is asked for
        next.back(units, k_blocks);
        look_up();
      }
    }
    copies_end();
  };
  bring_words(0, unit);
#if __CUDA_ARCH__ >= 900
  wait_for_grid(!successors_wait);
#endif
  bring_x(0, unit);
#pragma unroll
  for (int i = 1; i < STAGES - 1; ++i) { bring_words(i, unit - i); bring_x(i, unit - i); }

  // Matrices of ldmatrix: two halves of a step, then 8 more columns of y, or the next step.
  const int of_row = NT == 8 ? lane % 8 : lane / 16 * 8 + lane % 8, half = NT == 8 ? lane / 8 : lane / 8 % 2;
  const u32 of_x = of_row * 256 + (half ^ of_row % 8) * 16;
  int stage = 0;
  while (unit > begin) {
    const int start = (unit - 1) / k_blocks * k_blocks, stop = max(begin, start);
    const bool has_end = unit == start + k_blocks;
    const int walk = start / units, row_block = (start - walk * units) / k_blocks * PAIRS + pair;
    const bool is_there = row_block * 128 < m;
    float acc[GROUPS_OF_ROWS][COUNT];
#pragma unroll
    for (int g = 0; g < GROUPS_OF_ROWS; ++g)
#pragma unroll
      for (int i = 0; i < COUNT; ++i) acc[g][i] = 0.f;
    for (; unit > stop; --unit) {
      wait_for_copies<STAGES - 2>();
      __syncthreads();                        // a stage is there for all, and all have read the one before
      const int free = stage == 0 ? STAGES - 1 : stage - 1;
      bring_words(free, unit - STAGES + 1); bring_x(free, unit - STAGES + 1);
      const int now = stage;
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      if (PAIRS > 1 && !is_there) continue;
      const u32 tile = all_tiles + (now * PAIRS + pair) * tile_bytes;
#if GROUPS_OF_ROWS == 2
      Run run[2] = {Run(tile, warp % 4 * 64 + lane), Run(tile, warp % 4 * 64 + 32 + lane)};
#else
      Run run[1] = {Run(tile, threadIdx.x % 256)};
#endif
      multiply_tile(acc, run, base + now * X_BYTES + of_x);
    }
    float (&all)[GROUPS_OF_ROWS * COUNT] = (float (&)[GROUPS_OF_ROWS * COUNT])acc;
    if (!has_end) {
      parts.store(all, number);
      bar_sync(1 + parts.mine, 128);
      if (threadIdx.x % 128 == 0) parts.announce(number);
      continue;
    }
    if (stop > start) parts.add_pieces<1>(all, start, number, cut, 1 + parts.mine);
    const int column = walk * NT;
#pragma unroll
    for (int g = 0; g < GROUPS_OF_ROWS; ++g) {
      const int top = row_block * 128 + (warp % TILE_WARPS * GROUPS_OF_ROWS + g) * 16, mine = top + lane / 4;
      const float b = bias_of(bias, mine, m), below_b = bias_of(bias, mine + 8, m);
      const float s = INT8 ? bias_of(scale, mine, m) * INT8_FACTOR : 1.f,
                  below_s = INT8 ? bias_of(scale, mine + 8, m) * INT8_FACTOR : 1.f;
      write_m64(acc[g], top, y + (u64)column * m, n - column, m, [=](float sum, bool is_below, int) {
        if (INT8) sum *= is_below ? below_s : s;
        return sum + (is_below ? below_b : b);
      });
    }
  }
}
