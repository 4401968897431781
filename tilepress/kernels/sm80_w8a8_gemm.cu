// The product of sm90_w8a8_gemm.cu on mma.sync, sm_80 and later, for any shape and alignment: exact, not tuned.
//
// A block of four warps has a tile of 64 rows of w by 64 tokens; w is operand A. 64 columns of k of both are in shared
// memory, in rows 80 bytes apart, which meet no bank twice, while the next ones are on their way in registers.
//
// Grid: row blocks times token blocks. Macros: BF16. `vectors`: whether rows of x and w can be read in 16 bytes.

#include "scales.cuh"

#define PITCH 80

struct Chunk {  // 64 columns of 64 rows: 2 x 16 bytes a thread
  uint4 q[2];

  __device__ void load(const i8* from, int row, int rows, int column, int k, bool vectors) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = row + threadIdx.x / 4 + 32 * i, c = column + threadIdx.x % 4 * 16;
      const i8* at = from + (u64)r * k + c;
      q[i] = make_uint4(0, 0, 0, 0);
      if (r >= rows) continue;
      if (vectors) {
        if (c < k) q[i] = __ldg((const uint4*)at);
      } else {
        u32 words[4] = {};
#pragma unroll
        for (int b = 0; b < 16; ++b)
          if (c + b < k) words[b / 4] |= (u32)(unsigned char)__ldg(at + b) << 8 * (b % 4);
        q[i] = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
  __device__ void store(unsigned char* to) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) *(uint4*)(to + (threadIdx.x / 4 + 32 * i) * PITCH + threadIdx.x % 4 * 16) = q[i];
  }
};

__device__ __forceinline__ void mma(int* d, const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

extern "C" __global__ void __launch_bounds__(128)
w8a8_mma(const i8* w,                               // int8 [n, k]
         const i8* x,                               // int8 [m, k]
         const void* x_scale,                       // [m] or [1], of the kind that `kinds` says (scales.cuh)
         const void* w_scale,                       // [n] or [1]
         const void* bias,                          // [n] or null
         const i8* zero_point,                      // int8 [1] or null
         const int* w_sums,                         // int32 [n]: sums of w's rows, or null
         int kinds,
         u16* y,                                    // 16-bit [m, n]
         int m, int n, int k, int vectors) {
  __shared__ __align__(16) unsigned char w_shared[64 * PITCH], x_shared[64 * PITCH];
  const int token_blocks = (m + 63) / 64, row = blockIdx.x / token_blocks * 64, token = blockIdx.x % token_blocks * 64;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, top = warp / 2 * 32 + lane / 4,
            side = warp % 2 * 32 + lane / 4;
  const u32 w_at = shared_address(w_shared) + top * PITCH + lane % 4 * 4,
            x_at = shared_address(x_shared) + side * PITCH + lane % 4 * 4;
  int sums[2][4][4] = {};
  Chunk w_next, x_next;
  w_next.load(w, row, n, 0, k, vectors);
  x_next.load(x, token, m, 0, k, vectors);
  for (int column = 0; column < k; column += 64) {
    __syncthreads();
    w_next.store(w_shared);
    x_next.store(x_shared);
    __syncthreads();
    w_next.load(w, row, n, column + 64, k, vectors);
    x_next.load(x, token, m, column + 64, k, vectors);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      u32 a[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int i = 0; i < 4; ++i) a[h][i] = lds32(w_at + (h * 16 + i % 2 * 8) * PITCH + step * 32 + i / 2 * 16);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const u32 b0 = lds32(x_at + j * 8 * PITCH + step * 32), b1 = lds32(x_at + j * 8 * PITCH + step * 32 + 16);
#pragma unroll
        for (int h = 0; h < 2; ++h) mma(sums[h][j], a[h], b0, b1);
      }
    }
  }
  const Output output = output_of(x_scale, w_scale, bias, zero_point, w_sums, kinds);
#pragma unroll
  for (int h = 0; h < 4; ++h) {                            // of the warp's 4 groups of 8 rows
    const int mine = row + top + h * 8;
    if (mine >= n) continue;
    const Output::Row r = output.row(output.bits(mine, n));
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int t = token + warp % 2 * 32 + j * 8 + lane % 4 * 2 + e;
        if (t < m)
          y[(u64)t * n + mine] = to_values(output.number<false>(sums[h / 2][j][h % 2 * 2 + e], r, output.x_scale[t]),
                                           0.f);
      }
  }
}
