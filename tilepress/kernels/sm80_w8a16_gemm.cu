// y[m, n] = x[m, k] (w[n, k] * w_scale)^T + bias with int8 w and 16-bit x, on mma.sync, sm_80 and later: for few
// tokens.
//
// A unit is 128 rows of w by 128 of its columns. Each of eight warps reads 16 rows straight into registers, 16 bytes a
// lane from each of two rows, and makes them operand A; x comes through a ring in shared memory. The 16 columns of k
// that a lane has are taken in whatever order is convenient, by w and x alike. All units are one row, of which every
// block takes an equal share, last one first; sums that blocks share are those of split_sum.cuh.
//
// Of what is read, w of a block's first unit alone is before earlier kernels of the stream have ended (sm_90).
//
// Macros: NT tokens, 8 .. 64; BLOCKS of a multiprocessor; BF16. 256 threads. k is a multiple of 16; rows of x are
// `stride` apart, a multiple of 8, and 16-byte aligned.

#include "mma.cuh"
#include "scales.cuh"
#include "split_sum.cuh"
#include "output.cuh"
#include "codes.cuh"

#define STAGES 4
#define X_BYTES (NT * 256)                    // of a stage: 128 columns

struct Weights {  // of a unit: of two rows of a warp's 16 two times 16 columns
  uint4 q[2][2];

  __device__ __forceinline__ void load(const i8* w, int row, int column, int n, int k) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        const int r = row + below * 8, c = column + half * 64;
        q[half][below] = make_uint4(0, 0, 0, 0);
        ldg128_if(q[half][below], w + (u64)r * k + c, r < n && c < k);
      }
  }
};

__device__ __forceinline__ void copy_x(u32 to, const u16* x, int column, int m, int k, int stride) {
#pragma unroll
  for (int i = threadIdx.x; i < NT * 16; i += 256) {
    const int token = i / 16, c = column + i % 16 * 8;
    const bool ok = token < m && c < k;
    copy_16(to + token * 256 + (i % 16 ^ token % 2) * 16, ok ? x + (u64)token * stride + c : x, ok);
  }
}

__device__ __forceinline__ void multiply(float (&sums)[NT / 2], const Weights& w, u32 x) {
  const int token = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    u32 a[4][4];                              // of four k16 steps
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      const u32 words[4] = {w.q[half][below].x, w.q[half][below].y, w.q[half][below].z, w.q[half][below].w};
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const u32 codes = words[s] ^ 0x80808080;
        a[s][below] = expand(__byte_perm(codes, 0, 0x4140));
        a[s][2 + below] = expand(__byte_perm(codes, 0, 0x4342));
      }
    }
#pragma unroll
    for (int j = 0; j < NT / 8; ++j) {
      const u32 at = x + (j * 8 + token) * 256;
      const int piece = half * 8 + quad * 2;
      const uint4 first = lds128(at + (piece ^ token % 2) * 16), second = lds128(at + (piece + 1 ^ token % 2) * 16);
      mma(sums + 4 * j, a[0], first.x, first.y);
      mma(sums + 4 * j, a[1], first.z, first.w);
      mma(sums + 4 * j, a[2], second.x, second.y);
      mma(sums + 4 * j, a[3], second.z, second.w);
    }
  }
}

extern "C" __global__ void __launch_bounds__(256, BLOCKS)
w8a16_mma(const i8* w,                              // int8 [n, k]
          const u16* x,                             // 16-bit [m, k], rows `stride` elements apart
          const void* w_scale,                      // [n] or [1], of the kind that `kinds` says (scales.cuh)
          const void* bias,                         // [n] of the kind that `kinds` says, or null
          int kinds,
          u16* y,                                   // 16-bit [m, n]
          float* sums_left,                         // float32 [blocks, 128 * NT]: parts of sums (split_sum.cuh)
          u64* left,                                // uint64 [blocks, 2]: whose parts are there
          u64 ticket,
          int m, int n, int k, int stride, int k_blocks, int units) {
  extern __shared__ __align__(128) unsigned char memory[];
  const u32 ring = shared_address(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, top = warp * 16 + lane / 4;
  const Parts parts = {sums_left, left, ticket, 2, (int)threadIdx.x / 128};
  const int share = units / gridDim.x, more = units % gridDim.x;
  const auto cut = [=](int b) { return b * share + min(b, more); };
  const int begin = cut(blockIdx.x);
  int unit = cut(blockIdx.x + 1);
  const auto load = [&](Weights& to, int u) {
    if (u > begin) to.load(w, (u - 1) / k_blocks * 128 + top, (u - 1) % k_blocks * 128 + lane % 4 * 16, n, k);
  };
  const auto bring = [&](int stage, int u) {
    if (u > begin) copy_x(ring + stage * X_BYTES, x, (u - 1) % k_blocks * 128, m, k, stride);
    copies_end();
  };
  Weights now, next;
  load(now, unit);
#if __CUDA_ARCH__ >= 900
  launch_dependents();
  wait_for_grid();
#endif
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) bring(i, unit - i);
  int stage = 0;
  while (unit > begin) {
    const int start = (unit - 1) / k_blocks * k_blocks, stop = max(begin, start);
    const bool has_end = unit == start + k_blocks;
    float sums[NT / 2];
#pragma unroll
    for (int i = 0; i < NT / 2; ++i) sums[i] = 0.f;
    for (; unit > stop; --unit) {
      load(next, unit - 1);
      wait_for_copies<STAGES - 2>();
      __syncthreads();                        // x is there for all, and all have read the stage before
      bring((stage + STAGES - 1) % STAGES, unit - STAGES + 1);
      multiply(sums, now, ring + stage * X_BYTES);
      stage = (stage + 1) % STAGES;
      now = next;
    }
    if (!has_end) {
      parts.store(sums, blockIdx.x);
      bar_sync(1 + parts.mine, 128);
      if (threadIdx.x % 128 == 0) parts.announce(blockIdx.x);
      continue;
    }
    if (stop > start) parts.add(sums, start, blockIdx.x, cut, 1 + parts.mine);
    write_scaled(sums, start / k_blocks * 128 + warp * 16, w_scale, bias, kinds, y, m, n);
  }
}
