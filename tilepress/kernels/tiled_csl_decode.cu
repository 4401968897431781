// W [rows, cols] from Tiled-CSL (formats/tiled_csl.py), sm_80 and later: a block rebuilds 128 rows and 64 columns in shared memory and writes them out.
//
// Macros: TILE_ROWS 64 | 128; BF16 (not used: values are copied). Grid: row blocks x column blocks, columns first. 256 threads.

#define THREADS 256
#define HALVES (128 / TILE_ROWS)
#define WINDOW (TILE_ROWS * 128 + 128)  // padding words fall behind the tile

extern "C" __global__ void __launch_bounds__(THREADS)
tiled_csl_decode(const uint4* words, const int* offsets, u16* w, int rows, int cols, int k_blocks) {
  __shared__ __align__(16) unsigned char window[HALVES * WINDOW];
  const u32 base = shared_address(window);
  const int unit = blockIdx.x, rb = unit / k_blocks, kb = unit - rb * k_blocks;
  for (int i = threadIdx.x; i < HALVES * WINDOW / 16; i += THREADS) sts_zero(base + 16 * i);
  __syncthreads();
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
    const int end = __ldg(offsets + unit * HALVES + half + 1);
    const u32 tile = base + half * WINDOW;
    for (int first = __ldg(offsets + unit * HALVES + half); first < end; first += THREADS) {
      const int i = first + threadIdx.x;
      if (i < end) {
        const uint4 q = __ldg(words + i);
        sts16(tile + (q.x >> 16), q.x); sts16(tile + (q.y >> 16), q.y); sts16(tile + (q.z >> 16), q.z); sts16(tile + (q.w >> 16), q.w);
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 128 * 8; i += THREADS) {  // 8 columns of a row
    const int r = i / 8, row = rb * 128 + r, col = kb * 64 + i % 8 * 8;
    if (row >= rows || col >= cols) continue;
    const uint4 q = lds128(base + r / TILE_ROWS * WINDOW + r % TILE_ROWS * 128 + (i % 8 ^ r % 8) * 16);
    u16* to = w + (u64)row * cols + col;
    if (cols % 8 == 0) {
      *(uint4*)to = q;
    } else {
      const u32 pairs[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
      for (int c = 0; c < 8; ++c)
        if (col + c < cols) to[c] = pairs[c / 2] >> 16 * (c % 2);
    }
  }
}
