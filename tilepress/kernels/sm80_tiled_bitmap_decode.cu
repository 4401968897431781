// W [rows, cols] from a tiled bitmap (formats/tiled_bitmap.py), sm_80 and later: a block reads a tile into shared
// memory, its warps read their runs as sm90_tiled_bitmap_spmm.cu does, put them down as rows where the tile has been,
// and the tile is written out by rows. It waits for memory more than it works: what counts is how many blocks a
// multiprocessor has.
//
// Grid: tiles. 256 threads. Dynamic shared memory: a dense tile, or the largest that the format has. Macros: those of
// tiled_bitmap.cuh.

#include "mma.cuh"
#include "tiled_bitmap.cuh"
#include "output.cuh"

#define DENSE (128 * 256)
#define BLOCKS (INT8 ? 4 : 5)                 // of a multiprocessor: as registers allow

// Two values of a row, from int8 with the row's scale.
__device__ __forceinline__ u32 scaled(u32 pair, float scale) {
  if (!INT8) return pair;
  return to_values(to_float((u16)pair) * scale, to_float((u16)(pair >> 16)) * scale);
}

extern "C" __global__ void __launch_bounds__(256, BLOCKS)
tiled_bitmap_decode(const uint4* words,             // the weight's words, of 16 bytes
                    const int* offsets,             // int32 [tiles + 1], in words
                    const u16* scale,               // 16-bit [rows] of int8 values, or null
                    u16* w,                         // 16-bit [rows, cols]
                    int rows, int cols, int k_blocks) {
  extern __shared__ __align__(16) unsigned char shared[];
  const u32 tile = shared_address(shared);
  const int rb = blockIdx.x / k_blocks, kb = blockIdx.x - rb * k_blocks, first = __ldg(offsets + blockIdx.x),
            count = __ldg(offsets + blockIdx.x + 1) - first;
  for (int i = threadIdx.x; i < count; i += 256) copy_16(tile + i * 16, words + first + i, true);
  copies_end();
  wait_for_copies<0>();
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, top = warp * 16 + lane / 4, row0 = rb * 128 + top;
  const float above = INT8 && row0 < rows ? to_float(scale[row0]) * INT8_FACTOR : 1.f,
              below = INT8 && row0 + 8 < rows ? to_float(scale[row0 + 8]) * INT8_FACTOR : 1.f;
  Run run(tile, threadIdx.x);
  u32 a[2][4][4];
  read_steps<0>(a[0], run);
  read_steps<4>(a[1], run);
  __syncthreads();                            // all have read the tile
#pragma unroll
  for (int s = 0; s < 8; ++s)
#pragma unroll
    for (int i = 0; i < 4; ++i) {             // 16-byte chunk c of row r stands at chunk c ^ (r % 8)
      const int r = top + i % 2 * 8, chunk = 2 * s + i / 2;
      *(u32*)(shared + r * 256 + (chunk ^ r % 8) * 16 + lane % 4 * 4) = scaled(a[s / 4][s % 4][i],
                                                                               i % 2 ? below : above);
    }
  __syncthreads();
  for (int i = threadIdx.x; i < DENSE / 16; i += 256) {  // 8 columns of a row
    const int r = i / 16;
    write_columns(w, rb * 128 + r, kb * 128 + i % 16 * 8, rows, cols, lds128(tile + r * 256 + (i % 16 ^ r % 8) * 16));
  }
}
