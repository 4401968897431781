// y[m, n] = (x[m, k] w[n, k]^T - zero_point * sums of w's rows) * x_scale * w_scale + bias of int8 codes, on the tensor
// cores of sm_90a; exact in int32.
//
// w is wgmma's operand A, 64 rows for each consumer warpgroup, x's rows (tokens) its operand B, however few they are. A
// tile is ROWS = 64 GROUPS rows of w by TOKENS tokens; a loader warp copies both, KB times 128 columns of k at a time,
// into a ring of stages (TMA, mbarriers). Blocks walk through tiles in groups of `together` row blocks, token blocks
// outside, so that what runs at the same time shares both operands in the L2 cache.
//
// With SPLIT > 1 a cluster of so many blocks shares a tile, each a part of k, and adds up in the first one's shared
// memory. Integer sums do not depend on the order. With HALVES the last tiles, where they are for half of the blocks or
// fewer, are cut in two of 64 rows: a warpgroup has half of the tokens there.
//
// Of what is read, w alone is before earlier kernels of the stream have ended.
//
// n is a multiple of 8 and k of 16; w, x and rows of y begin at multiples of 16 bytes.
//
// Macros: GROUPS 1 | 2; TOKENS 8 .. 256; KB; STAGES; SPLIT; BLOCKS of a multiprocessor; BF16. wgmma() of TOKENS
// columns, with HALVES of half of them too, comes from kernels/ptx.py.

#include "scales.cuh"

#define ROWS (64 * GROUPS)
// Sums need registers that loaders leave: whole warpgroups have to agree on that.
#define LARGE (GROUPS == 2 && TOKENS == 256)
#define WARPS (4 * GROUPS + (LARGE ? 4 : 1))
#define W_BYTES (ROWS * 128)
#define X_BYTES (TOKENS * 128)
#define STAGE_BYTES ((W_BYTES + X_BYTES) * KB)
#define SUMS (TOKENS / 2)                                  // of a thread
#define PART_BYTES (GROUPS * 128 * SUMS * 4)               // of a block, for the first one of its cluster
#define REUSE (TOKENS >= 64)                                 // parts are large: they come where the stages were
#define CHUNK (TOKENS < 32 ? TOKENS : 32)                  // tokens that a warpgroup writes at once
#define CHUNKS (TOKENS / CHUNK)
#define CHUNK_BYTES (CHUNK * 128)
#define LATER (SPLIT == 1 && TOKENS >= 128)                // a tile is written while the next one's products run
#define HALVES (GROUPS == 2 && SPLIT == 1 && TOKENS >= 16)
#define BOX (HALVES ? 64 : ROWS)                           // rows of w that one copy brings
#define SCALES ((TOKENS + 127) / 128)                      // of tokens, that a thread brings
enum { GROUP_BARRIER = 1 };                                // named barriers, one for each warpgroup

struct Shared {
  u32 stages, parts, chunks, scales, full, empty;          // chunks: two for each warpgroup

  __device__ u32 w(int stage) const { return stages + stage * STAGE_BYTES; }
  __device__ u32 x(int stage) const { return w(stage) + W_BYTES * KB; }
};

struct Place { int row, token; bool half; };

struct Work {  // of a block, and where tile t lies; from `whole` on they are halves
  int tiles, whole, row_blocks, token_blocks, together, first_k, last_k;

  __device__ Place place(int t) const {
    const int i = HALVES && t >= whole ? whole + (t - whole) / 2 : t;
    const int group = i / (together * token_blocks), first = group * together, here = min(together, row_blocks - first),
              rest = i - first * token_blocks;
    const bool half = HALVES && t >= whole;
    return {(first + rest % here) * ROWS + (half ? (t - whole) % 2 * 64 : 0), rest / here * TOKENS, half};
  }
};

__device__ __forceinline__ Work work_of(int m, int n, int k, int together, int rank) {
  const int all = (k + 128 * KB - 1) / (128 * KB), row_blocks = (n + ROWS - 1) / ROWS,
            token_blocks = (m + TOKENS - 1) / TOKENS;
  const int tiles = row_blocks * token_blocks, blocks = gridDim.x / SPLIT, last = tiles % blocks,
            halved = HALVES && 2 * last <= blocks ? last : 0;
  return {tiles + halved,     tiles - halved,          row_blocks, token_blocks, together,
          all * rank / SPLIT, all * (rank + 1) / SPLIT};
}

__device__ __forceinline__ u32 bytes_of(const Place& at) { return STAGE_BYTES - (at.half ? W_BYTES / 2 * KB : 0); }

__device__ __forceinline__ void load(const TensorMap* w, const TensorMap* x, const Shared& shared, const Work& work) {
  const auto copy_w = [&](int stage, const Place& at, int k) {
#pragma unroll
    for (int b = 0; b < KB; ++b)
#pragma unroll
      for (int row = 0; row < ROWS; row += BOX)
        if (row == 0 || !at.half)
          tma_2d(shared.w(stage) + b * W_BYTES + row * 128, w, (k * KB + b) * 128, at.row + row,
                 shared.full + 8 * stage);
  };
  const auto copy_x = [&](int stage, const Place& at, int k) {
#pragma unroll
    for (int b = 0; b < KB; ++b)
      tma_2d(shared.x(stage) + b * X_BYTES, x, (k * KB + b) * 128, at.token, shared.full + 8 * stage);
  };
  const int start = blockIdx.x / SPLIT;
  const Place at = work.place(start);
  // Stages that w may fill before earlier kernels have ended.
  const int early = min(STAGES, work.last_k - work.first_k);
  for (int i = 0; i < early; ++i) {
    expect(shared.full + 8 * i, bytes_of(at));
    copy_w(i, at, work.first_k + i);
  }
  wait_for_grid();
  for (int i = 0; i < early; ++i) copy_x(i, at, work.first_k + i);
  Position p;
  int done = 0;
  for (int t = start; t < work.tiles; t += gridDim.x / SPLIT) {
    const Place place = work.place(t);
    for (int k = work.first_k; k < work.last_k; ++k, p.next(STAGES), ++done) {
      if (done < early) continue;
      wait(shared.empty + 8 * p.slot, p.phase ^ 1);
      expect(shared.full + 8 * p.slot, bytes_of(place));
      copy_w(p.slot, place, k);
      copy_x(p.slot, place, k);
    }
  }
}

__device__ __forceinline__ void release(u32 empty) {
  if (threadIdx.x % 32 == 0) arrive(empty);
}

// Sums of 64 rows, whose first one is `w_at` bytes from w's in a stage, and tokens, which begin at `x_at`.
// `meanwhile(i)` is called while the products of step i run, for i = 0 .. CHUNKS - 1 even where the steps are fewer.
template <int COUNT, class F>
__device__ __forceinline__ void multiply(int (&sums)[COUNT], const Shared& shared, Position& p, int w_at, int x_at,
                                         int steps, F meanwhile) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) sums[i] = 0;
  int before = -1;                                         // stage that wgmma may still read
  for (int i = 0; i < steps; ++i, p.next(STAGES)) {
    wait(shared.full + 8 * p.slot, p.phase);
    const u64 a = descriptor(shared.w(p.slot) + w_at), b = descriptor(shared.x(p.slot) + x_at);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4 * KB; ++j)
      wgmma(sums, a + j / 4 * (W_BYTES / 16) + j % 4 * 2, b + j / 4 * (X_BYTES / 16) + j % 4 * 2);
    wgmma_commit();
    meanwhile(i);
    wgmma_wait<1>();
    if (before >= 0) release(shared.empty + 8 * before);
    before = p.slot;
  }
  wgmma_wait<0>();
  if (before >= 0) release(shared.empty + 8 * before);
  for (int i = steps; i < CHUNKS; ++i) meanwhile(i);
}

// What every warp of a block waits for before its cluster's parts are exchanged: all blocks are there (they have
// arrived at the kernel's start), and with REUSE have read their stages. Two more calls follow: cluster_arrive when a
// block's part is in the first one's memory, cluster_wait there.
__device__ __forceinline__ void before_parts() {
  cluster_wait();
  if (REUSE) { cluster_arrive(); cluster_wait(); }
}

// Adds what the cluster's blocks have summed up; only the first one goes on with it.
__device__ __forceinline__ void add_up(int (&sums)[SUMS], u32 parts, int rank) {
  before_parts();
  if (rank > 0) {
    const u32 to = address_in(parts + (rank - 1) * PART_BYTES + threadIdx.x * 16, 0);
#pragma unroll
    for (int i = 0; i < SUMS; i += 4)
      store_in_cluster(to + i * GROUPS * 512, sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
  }
  cluster_arrive();
  if (rank > 0) return;
  cluster_wait();
#pragma unroll
  for (int r = 0; r < SPLIT - 1; ++r)
#pragma unroll
    for (int i = 0; i < SUMS; i += 4) {
      const uint4 more = lds128(parts + r * PART_BYTES + threadIdx.x * 16 + i * GROUPS * 512);
      sums[i] += more.x; sums[i + 1] += more.y; sums[i + 2] += more.z; sums[i + 3] += more.w;
    }
}

// What a thread needs to write its part of a tile, asked for before the products.
struct Ends {
  Output::Bits above, below;
  u32 scales[SCALES];

  __device__ Ends(const Output& output, int row, int token, int n, int m) {
    above = output.bits(row, n);
    below = output.bits(row + 8, n);
#pragma unroll
    for (int i = 0; i < SCALES; ++i)
      scales[i] = output.x_scale.bits(min(token + i * 128 + (int)threadIdx.x % 128, m - 1));
  }
};

struct Tile {  // y of a warpgroup's 64 rows, which still has to be written
  u32 above[TOKENS / 8], below[TOKENS / 8];                // of the thread's two rows, two tokens each
  u16* y; int tokens = 0, rows;                            // y is that of the first row and token

  // `scales`: room for TOKENS numbers.
  __device__ __forceinline__ void fill(const int (&sums)[SUMS], const Output& output, const Ends& ends, u32 scales,
                                       int barrier) {
#pragma unroll
    for (int i = 0; i < SCALES; ++i)
      if (i * 128 + threadIdx.x % 128 < TOKENS)
        sts32(scales + (i * 128 + threadIdx.x % 128) * 4, __float_as_uint(output.x_scale.number(ends.scales[i])));
    bar_sync(barrier, 128);
    if (output.is_plain()) scale<true>(sums, output, output.row(ends.above), output.row(ends.below), scales);
    else scale<false>(sums, output, output.row(ends.above), output.row(ends.below), scales);
  }
  template <bool PLAIN>
  __device__ __forceinline__ void scale(const int (&sums)[SUMS], const Output& output, const Output::Row& row,
                                        const Output::Row& row8, u32 scales) {
#pragma unroll
    for (int j = 0; j < TOKENS / 8; ++j) {
      const int* sum = sums + j * 4;
      const uint2 both = lds64(scales + (j * 8 + threadIdx.x % 4 * 2) * 4);
      const float left = __uint_as_float(both.x), right = __uint_as_float(both.y);
      above[j] = to_values(output.number<PLAIN>(sum[0], row, left), output.number<PLAIN>(sum[1], row, right));
      below[j] = to_values(output.number<PLAIN>(sum[2], row8, left), output.number<PLAIN>(sum[3], row8, right));
    }
  }
  // A chunk of tokens: transposed in shared memory, and from there in rows of 128 bytes to y.
  __device__ __forceinline__ void write(int chunk, u32 chunks, int n, int barrier) const {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    if (chunk * CHUNK >= tokens) return;
    const u32 at = chunks + chunk % 2 * CHUNK_BYTES;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
      if (c == chunk)
#pragma unroll
        for (int j = 0; j < CHUNK / 8; ++j) {
          // Of lanes 0 .. 15: rows of two 8 x 8 matrices.
          const int token = j * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
          store_transposed(at + token * 128 + (piece ^ token % 8) * 16, above[c * (CHUNK / 8) + j],
                           below[c * (CHUNK / 8) + j]);
        }
    bar_sync(barrier, 128);
#pragma unroll
    for (int i = thread; i < CHUNK * 8; i += 128) {
      const int token = i / 8, row = i % 8 * 8;
      if (chunk * CHUNK + token < tokens && row < rows)
        *(uint4*)(y + (u64)(chunk * CHUNK + token) * n + row) = lds128(at + token * 128 + (i ^ token) % 8 * 16);
    }
  }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)
#if REUSE && (SPLIT - 1) * PART_BYTES > STAGES * STAGE_BYTES
#error the stages are too few for the parts
#endif
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
w8a8_gemm(const __grid_constant__ TensorMap w,      // of w, int8 [n, k]
          const __grid_constant__ TensorMap x,      // of x, int8 [m, k]
          const void* x_scale,                      // [m] or [1], of the kind that `kinds` says (scales.cuh)
          const void* w_scale,                      // [n] or [1]
          const void* bias,                         // [n] or null
          const i8* zero_point,                     // int8 [1] or null
          const int* w_sums,                        // int32 [n]: sums of w's rows, or null
          int kinds,
          u16* y,                                   // 16-bit [m, n]
          int m, int n, int k, int together) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 ring = shared_address(memory), end = ring + STAGES * STAGE_BYTES, parts = REUSE ? ring : end,
            chunks = end + (REUSE ? 0 : (SPLIT - 1) * PART_BYTES), scales = chunks + GROUPS * 2 * CHUNK_BYTES,
            full = scales + GROUPS * TOKENS * 4;
  const Shared shared = {ring, parts, chunks, scales, full, full + 8 * STAGES};
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), rank = SPLIT > 1 ? rank_in_cluster() : 0;
  launch_dependents();
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) { bar_init(shared.full + 8 * i, 1); bar_init(shared.empty + 8 * i, 4 * GROUPS); }
    fence_bar_init();
  }
  __syncthreads();
  if (SPLIT > 1) cluster_arrive();
  const Work work = work_of(m, n, k, together, rank);
  if (warp >= 4 * GROUPS) {
    give_registers<LARGE ? 40 : 0>();
    if (threadIdx.x == 128 * GROUPS) load(&w, &x, shared, work);
    __syncwarp();
    if (SPLIT > 1) {
      before_parts();
      cluster_arrive();
      if (rank == 0) cluster_wait();
    }
    return;
  }
  take_registers<LARGE ? 232 : 0>();
  const int group = warp / 4;
  Position p;
  Tile tile;
  const u32 chunks_here = shared.chunks + group * 2 * CHUNK_BYTES;
  const auto write = [&](int chunk) { tile.write(chunk, chunks_here, n, GROUP_BARRIER + group); };
  const auto write_before = [&](int chunk) { if (LATER) write(chunk); };
  wait_for_grid();
  const Output output = output_of(x_scale, w_scale, bias, zero_point, w_sums, kinds);
  for (int t = blockIdx.x / SPLIT; t < work.tiles; t += gridDim.x / SPLIT) {
    Place place = work.place(t);
    if (place.half) place.token += group * (TOKENS / 2);
    else place.row += group * 64;
    const Ends ends(output, place.row + warp % 4 * 16 + threadIdx.x % 32 / 4, place.token, n, m);
    int sums[SUMS];
#if HALVES
    if (place.half)
      multiply((int (&)[SUMS / 2]) sums, shared, p, 0, group * (X_BYTES / 2), work.last_k - work.first_k, write_before);
    else
#endif
    multiply(sums, shared, p, group * 8192, 0, work.last_k - work.first_k, write_before);
    if (SPLIT > 1) {
      add_up(sums, shared.parts, rank);
      if (rank > 0) return;
    }
    tile.fill(sums, output, ends, shared.scales + group * TOKENS * 4, GROUP_BARRIER + group);
    tile.y = y + (u64)place.token * n + place.row;
    tile.tokens = min(m - place.token, place.half ? TOKENS / 2 : TOKENS);
    tile.rows = n - place.row;
    if (!LATER)
      for (int c = 0; c < CHUNKS; ++c) write(c);
  }
  if (LATER)
    for (int c = 0; c < CHUNKS; ++c) write(c);
}
