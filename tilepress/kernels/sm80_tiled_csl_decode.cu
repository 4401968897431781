// W [rows, cols] from Tiled-CSL (formats/tiled_csl.py), sm_80 and later: a block rebuilds 128 rows and 64 columns in
// shared memory and writes them out.
//
// Grid: row blocks x column blocks, columns first. 256 threads.

#include "tiled_csl.cuh"
#include "output.cuh"

#define THREADS 256
#define WINDOW (TILE_BYTES + 128)  // padding words fall behind the tile

extern "C" __global__ void __launch_bounds__(THREADS)
tiled_csl_decode(const uint4* words,                // the weight's words, of 16 bytes
                 const int* offsets,                // int32 [tiles + 1], in words
                 u16* w,                            // 16-bit [rows, cols]
                 int rows, int cols, int k_blocks) {
  __shared__ __align__(16) unsigned char shared[WINDOW];
  const u32 window = shared_address(shared);
  const int tile = blockIdx.x, rb = tile / k_blocks, kb = tile - rb * k_blocks, end = __ldg(offsets + tile + 1);
  for (int i = threadIdx.x; i < WINDOW / 16; i += THREADS) sts_zero(window + 16 * i);
  __syncthreads();
  for (int first = __ldg(offsets + tile); first < end; first += THREADS) {
    const int i = first + threadIdx.x;
    if (i < end) scatter(window, __ldg(words + i), true);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < TILE_BYTES / 16; i += THREADS) {  // 8 columns of a row
    const int r = i / 8;
    write_columns(w, rb * 128 + r, kb * 64 + i % 8 * 8, rows, cols, lds128(window + r * 128 + (i % 8 ^ r % 8) * 16));
  }
}
