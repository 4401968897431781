// y[n, M] = x[n, K] W[M, K]^T + bias, W in Tiled-CSL (formats/tiled_csl.py), on mma.sync: for cards from sm_80 on that
// are not Hopper.
//
// A block scatters the words of one tile, 128 rows and 64 columns, into a dense window in shared memory and multiplies
// it; the next tile's words are on their way meanwhile, and several blocks of a multiprocessor hide each other's waits.
// Rows of a group of 8 are taken in the order 0 4 1 5 2 6 3 7, so that a warp's 16-byte loads from the swizzled window
// meet no bank twice; a load's 8 columns are the operands of two k16 steps, x's 8 columns likewise. W is walked through
// once for every NT columns of y, a block takes an equal share of all these tiles; sums that blocks share are those of
// split_sum.cuh.
//
// Macros: NT columns of y, 8 .. 64; BLOCKS of a multiprocessor; BF16. 128 threads; x in rows of `k` columns, a multiple
// of 8, `stride` apart, likewise.

#include "tiled_csl.cuh"
#include "split_sum.cuh"

#define WINDOW (TILE_BYTES + 128)             // padding words fall behind the tile
#define GROUPS 4                              // 16-byte words a thread that are fetched ahead
#define ACC NT                                // two m16 of a warp's 32 rows, NT / 8 n8, 4 each

struct Words {  // of a tile
  uint4 q[GROUPS]; int at, end;
};

__device__ __forceinline__ void load(Words& w, const uint4* words, const int* offsets, int tile) {
  w.at = __ldg(offsets + tile) + threadIdx.x; w.end = __ldg(offsets + tile + 1);
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) ldg128_if(w.q[g], words + w.at + g * 128, w.at + g * 128 < w.end);
}

__device__ __forceinline__ void fill(u32 window, const Words& w, const uint4* words) {
#pragma unroll
  for (int i = 0; i < TILE_BYTES / 16 / 128; ++i) sts_zero(window + (i * 128 + threadIdx.x) * 16);
  __syncthreads();
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) scatter(window, w.q[g], w.at + g * 128 < w.end);
  for (int i = w.at + GROUPS * 128; i < w.end; i += 128) scatter(window, __ldg(words + i), true);
  __syncthreads();
}

__device__ __forceinline__ void mma(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." VALUES "." VALUES
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply(float (&acc)[ACC], u32 window, const u16* x, int n, int k, int stride,
                                         int first, int row, int quad, int group) {
#pragma unroll 1
  for (int part = 0; part < 2; ++part) {                   // 32 columns
    const int column = first + part * 32 + quad * 8;
    uint4 b[NT / 8];
#pragma unroll
    for (int j = 0; j < NT / 8; ++j) {
      const int col = j * 8 + group;
      b[j] = col < n && column < k ? *(const uint4*)(x + (u64)col * stride + column) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      uint4 a[2];                                          // of rows `row` and `row` + 8 of an m16
#pragma unroll
      for (int low = 0; low < 2; ++low) {
        const int r = row + m * 16 + low * 8;
        a[low] = lds128(window + r * 128 + (part * 4 + quad ^ r % 8) * 16);
      }
#pragma unroll
      for (int j = 0; j < NT / 8; ++j) {
        float* d = acc + (m * (NT / 8) + j) * 4;
        mma(d, a[0].x, a[1].x, a[0].y, a[1].y, b[j].x, b[j].y);
        mma(d, a[0].z, a[1].z, a[0].w, a[1].w, b[j].z, b[j].w);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(128, BLOCKS)
tiled_csl_mma(const uint4* words,                   // the weight's words, of 16 bytes
              const int* offsets,                   // int32 [tiles_of_w + 1], in words
              const u16* x,                         // 16-bit [n, k], rows `stride` elements apart
              const u16* bias,                      // 16-bit [m] or null
              u16* y,                               // 16-bit [n, m]
              float* sums,                          // float32 [blocks, 128 * NT]: parts of sums (split_sum.cuh)
              u64* left,                            // uint64 [blocks]: whose parts are there
              u64 ticket,
              int n, int m, int k, int stride, int k_blocks, int tiles_of_w, int all_tiles) {
  __shared__ __align__(128) unsigned char shared[WINDOW];
  const u32 window = shared_address(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const int row = warp * 32 + group % 2 * 4 + group / 2;   // in the tile: the first that this lane holds
  const Parts parts = {sums, left, ticket, 1, 0};
  const int share = all_tiles / gridDim.x, more = all_tiles % gridDim.x;
  const auto cut = [=](int b) { return b * share + min(b, more); };
  const int begin = cut(blockIdx.x);
  Words now;
  int tile = cut(blockIdx.x + 1);
  if (tile > begin) load(now, words, offsets, (tile - 1) % tiles_of_w);
  while (tile > begin) {
    const int start = (tile - 1) / k_blocks * k_blocks, stop = max(begin, start), column = start / tiles_of_w * NT;
    const bool has_end = tile == start + k_blocks;
    float acc[ACC];
#pragma unroll
    for (int i = 0; i < ACC; ++i) acc[i] = 0.f;
    while (tile-- > stop) {
      fill(window, now, words);
      if (tile > begin) load(now, words, offsets, (tile - 1) % tiles_of_w);
      multiply(acc, window, x + (u64)column * stride, n - column, k, stride, (tile - start) * 64, row, quad, group);
      __syncthreads();
    }
    ++tile;
    if (!has_end) {
      parts.store(acc, blockIdx.x);
      __syncthreads();
      if (threadIdx.x == 0) parts.announce(blockIdx.x);
      continue;
    }
    if (stop > start) parts.add(acc, start, blockIdx.x, cut, 1);
#pragma unroll
    for (int h = 0; h < 4; ++h) {                          // of the warp's 4 groups of 8 rows
      const int mine = start % tiles_of_w / k_blocks * 128 + row + h * 8;
      if (mine >= m) continue;
      const float add = bias ? to_float(bias[mine]) : 0.f;
#pragma unroll
      for (int j = 0; j < NT / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int col = column + j * 8 + quad * 2 + e;
          if (col < n) y[(u64)col * m + mine] = to_values(acc[(h / 2 * (NT / 8) + j) * 4 + h % 2 * 2 + e] + add, 0.f);
        }
    }
  }
}
