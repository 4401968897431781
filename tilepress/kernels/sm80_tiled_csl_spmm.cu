// y[n, M] = x[n, K] W[M, K]^T + bias, W in Tiled-CSL (formats/tiled_csl.py), on mma.sync and cp.async: for cards from
// sm_80 on that are not Hopper.
//
// A block scatters the words of a tile, 128 rows and 64 columns, into a dense window in shared memory, from where
// ldmatrix reads operand A, 32 rows for each of four warps. The next tile's words are on their way to registers
// meanwhile, its columns of x to one of two stages in shared memory. With two windows one is filled with zeros while
// the other is multiplied. Several blocks of a multiprocessor hide each other's waits.
//
// W is walked through once for every NT columns of y (walks.cuh); sums that blocks share are those of split_sum.cuh.
// Words, offsets and cuts are read before earlier kernels of the stream have ended (sm_90 and later): they must not be
// what a kernel writes that may still be running.
//
// Macros: NT columns of y, 8 .. 128; WINDOWS 1 | 2; GROUPS of 16 bytes of words that a thread fetches ahead; BLOCKS
// of a multiprocessor; BF16. x in rows of `k` columns, a multiple of 8, `stride` apart, likewise.

#include "mma.cuh"
#include "tiled_csl.cuh"
#include "walks.cuh"
#include "split_sum.cuh"
#include "output.cuh"

#define WINDOW (TILE_BYTES + 128)             // padding words fall behind the tile
#define THREADS 128
#define X_BYTES (NT * 128)                    // of a stage: a tile's columns
#define COUNT (NT / 2)                        // accumulators for 16 rows
#define STEPS (NT < 32 ? 4 : NT == 64 ? 1 : 2)             // unrolled: of more, too much is read ahead

struct Words {  // of a tile
  uint4 q[GROUPS]; int at, end;

  __device__ __forceinline__ void load(const uint4* words, int first, int last) {
    at = first + threadIdx.x; end = last;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) ldg128_if(q[g], words + at + g * THREADS, at + g * THREADS < end);
  }
  __device__ __forceinline__ void scatter_to(u32 window, const uint4* words) const {
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) scatter(window, q[g], at + g * THREADS < end);
    // All lanes go round equally often: stores keep their order, in which they meet no bank twice.
#pragma unroll 1
    for (int i = at + GROUPS * THREADS; i - (int)threadIdx.x < end; i += THREADS)
      scatter(window, __ldg(words + min(i, end - 1)), i < end);
  }
};

__device__ __forceinline__ void clear(u32 window) {
#pragma unroll
  for (int i = 0; i < TILE_BYTES / 16 / THREADS; ++i) sts_zero(window + (i * THREADS + threadIdx.x) * 16);
}

__device__ __forceinline__ void copy_x(u32 to, const u16* x, int column, int n, int k, int stride) {
#pragma unroll 1
  for (int i = threadIdx.x; i < NT * 8; i += THREADS) {
    const int row = i / 8, piece = i % 8, c = column + piece * 8;
    const bool ok = row < n && c < k;
    copy_16(to + row * 128 + (piece ^ row % 8) * 16, ok ? x + (u64)row * stride + c : x, ok);
  }
}

// `window` and `x`: this lane's rows for ldmatrix; `of_a` and `of_b`: where their first 16 columns stand.
__device__ __forceinline__ void multiply(float (&acc)[2][COUNT], u32 window, u32 of_a, u32 x, u32 of_b) {
  u32 b[4];
#pragma unroll STEPS
  for (int step = 0; step < 4; ++step) {
    u32 a[2][4];
    load_matrices(a[0], window + (of_a ^ step * 32));
    load_matrices(a[1], window + (of_a ^ step * 32) + 16 * 128);
    if (NT == 8) {                            // a load of x is of two steps
      if (step % 2 == 0) load_matrices(b, x + (of_b ^ step * 32));
#pragma unroll
      for (int g = 0; g < 2; ++g) mma(acc[g], a[g], b[step % 2 * 2], b[step % 2 * 2 + 1]);
    } else {
#pragma unroll
      for (int j = 0; j < NT / 8; j += 2) {
        load_matrices(b, x + (of_b ^ step * 32) + j * 8 * 128);
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          mma(acc[g] + 4 * j, a[g], b[0], b[1]);
          mma(acc[g] + 4 * j + 4, a[g], b[2], b[3]);
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
tiled_csl_mma(const uint4* words,                   // the weight's words, of 16 bytes
              const int* offsets,                   // int32 [tiles + 1], in words
              const int* cuts,                      // int32 [blocks + 1], or null
              const u16* x,                         // 16-bit [n, k], rows `stride` elements apart
              const u16* bias,                      // 16-bit [m] or null
              u16* y,                               // 16-bit [n, m]
              float* sums,                          // float32 [blocks, 128 * NT]: parts of sums
              u64* left,                            // uint64 [blocks]: whose parts are there
              u64 ticket,
              int n, int m, int k, int stride, int k_blocks, int tiles, int walks, int successors_wait) {
  extern __shared__ __align__(128) unsigned char shared[];
  const u32 windows = shared_address(shared), stages = windows + WINDOWS * WINDOW;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Runs cut(cuts, walks, tiles);
  const int number = cut.mine(walks), begin = cut(number);
  const Parts parts = {sums, left, ticket, 1, 0};
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
  Cursor next(unit - 1, tiles, k_blocks);     // the one that is asked for next
  int first = __ldg(offsets + next.tile), end = __ldg(offsets + next.tile + 1);
  Words now;
  int x_column = 0, x_row = 0;                // of the tile whose words were asked for last
  const auto load_words = [&](int after) {    // of the tile ahead of `after`
    if (after <= begin) return;
    now.load(words, first, end);
    x_column = next.column * 64; x_row = next.walk * NT;
    if (after - 1 > begin) {                  // offsets are here when the next tile is asked for
      next.back(tiles, k_blocks);
      first = __ldg(offsets + next.tile); end = __ldg(offsets + next.tile + 1);
    }
  };
  const auto bring_x = [&](int stage, int after) {
    if (after > begin)
      copy_x(stages + stage * X_BYTES, x + (u64)x_row * stride, x_column, n - x_row, k, stride);
    copies_end();
  };
  load_words(unit);
  clear(windows);
#if __CUDA_ARCH__ >= 900
  wait_for_grid(!successors_wait);
#endif
  bring_x(0, unit);
  __syncthreads();
  now.scatter_to(windows, words);
  load_words(unit - 1);
  bring_x(1, unit - 1);
  wait_for_copies<1>();
  __syncthreads();

  // Matrices of ldmatrix: of A 8 rows, the next 8, and both again, half a step on; of B two halves of a step, then 8
  // more columns of y, or the next step.
  const int row_a = warp * 32 + lane % 16, half_a = lane / 16;
  const int row_b = NT == 8 ? lane % 8 : lane / 16 * 8 + lane % 8, half_b = NT == 8 ? lane / 8 : lane / 8 % 2;
  const u32 of_a = (half_a ^ row_a % 8) * 16, of_b = (half_b ^ row_b % 8) * 16;
  int stage = 0;
  while (unit > begin) {
    const int start = (unit - 1) / k_blocks * k_blocks, stop = max(begin, start);
    const bool has_end = unit == start + k_blocks;
    float acc[2][COUNT];
#pragma unroll
    for (int g = 0; g < 2; ++g)
#pragma unroll
      for (int i = 0; i < COUNT; ++i) acc[g][i] = 0.f;
    for (; unit > stop; --unit) {
      const u32 x_of_lane = stages + stage * X_BYTES + row_b * 128;
      const u32 window = windows + (WINDOWS == 2 ? stage * WINDOW : 0);
      const u32 other = windows + (WINDOWS == 2 ? (stage ^ 1) * WINDOW : 0);
      if (WINDOWS == 2) clear(other);
      multiply(acc, window + row_a * 128, of_a, x_of_lane, of_b);
      __syncthreads();                        // the window has been read, the other is empty
      if (unit - 1 > begin) {
        if (WINDOWS == 1) {
          clear(window);
          __syncthreads();
        }
        now.scatter_to(other, words);
        load_words(unit - 2);
      }
      bring_x(stage, unit - 2);
      wait_for_copies<1>();
      __syncthreads();                        // the next tile and its x are there
      stage ^= 1;
    }
    float (&all)[2 * COUNT] = (float (&)[2 * COUNT])acc;
    if (!has_end) {
      parts.store(all, number);
      __syncthreads();
      if (threadIdx.x == 0) parts.announce(number);
      continue;
    }
    if (stop > start) parts.add_pieces<(NT + 15) / 16>(all, start, number, cut, 1);
    const int walk = start / tiles, column = walk * NT;
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const int top = (start - walk * tiles) / k_blocks * 128 + warp * 32 + g * 16;
      const float b = bias_of(bias, top + lane / 4, m), below_b = bias_of(bias, top + lane / 4 + 8, m);
      write_m64(acc[g], top, y + (u64)column * m, n - column, m,
                [=](float sum, bool is_below, int) { return sum + (is_below ? below_b : b); });
    }
  }
}
