// y[n, M] = x[n, K] W[M, K]^T + bias, W as tiled bitmap (formats/tiled_bitmap.py), for many rows of x, on the tensor
// cores of sm_90a.
//
// Two blocks on neighbouring multiprocessors, a cluster, walk through units of W: two tiles of 128 rows and 128
// columns, one below the other, one for each block. Both need the same part of x: each copies half of it, to both of
// them, so that x comes from the L2 cache once for 256 rows of W. A block's warps have roles and hand over by
// mbarriers:
//
//   words      a tile in global memory --bulk copy--> a slot in shared memory
//   x          64 columns of x, half of the rows --TMA, multicast--> the same slot of both blocks
//   consumers  two warpgroups, 64 rows of W each: values in a tile's slot --LDS--> operand A in registers, x in its
//              slot as operand B --wgmma--> accumulators of NT columns --> y
//
// With accumulators of 256 columns a tile's values are read once for 256 rows of x: reading them is what
// sm90_tiled_bitmap_spmm.cu, which has at most 128, is limited by. While wgmma multiplies one half of a tile, a
// warpgroup reads the values of the next.
//
// W is walked through once for every NT columns of y. Clusters of a walk take equal numbers of units, and sums that
// clusters share are those of split_sum.cuh. Neighbouring clusters take the same units in different walks at about the
// same time, and all but one find W in the L2 cache. Clusters are numbered by walks, and in a walk by units: `number`.
//
// Words and offsets are read before earlier kernels of the stream have ended: they must not be what a kernel writes
// that may still be running.
//
// Macros: NT columns of y, 192 | 256; those of tiled_bitmap.cuh. wgmma() of NT columns comes from kernels/ptx.py.

#include "tiled_bitmap.cuh"
#include "split_sum.cuh"
#include "output.cuh"

#define ROWS 128
#define RANKS 2                               // blocks of a cluster
#define CONSUMERS 8                           // warps
enum { WORDS = CONSUMERS, X, WARPS = CONSUMERS + 4 };      // the warps behind them; setmaxnreg is for whole warpgroups
#define X_BYTES (NT * 128)                    // of 64 columns of x
enum { GROUP_BARRIER = 1 };                   // named barriers, one for each warpgroup

struct Ring {  // of slots in shared memory
  u32 at, bytes, full, empty;                 // slots, of so many bytes; mbarriers
  int count;

  __device__ u32 slot(const Position& p) const { return at + p.slot * bytes; }
  __device__ void wait_full(const Position& p) const { wait(full + 8 * p.slot, p.phase); }
  __device__ void wait_empty(const Position& p) const { wait(empty + 8 * p.slot, p.phase ^ 1); }
};

struct Size {  // of W: units of a row, blocks of two rows of tiles, which are numbered through all walks, tiles
  int k_blocks, blocks, tiles;

  __device__ int walk(int block) const { return block / blocks; }
  // Of a unit in a block, or -1 for the row block that is not there.
  __device__ int tile(int block, int unit, int rank) const {
    const int tile = ((block - walk(block) * blocks) * RANKS + rank) * k_blocks + unit - block * k_blocks;
    return tile < tiles ? tile : -1;
  }
};

struct Share { int begin, end; };             // a cluster's units

__device__ __forceinline__ void load_words(const uint4* words, const int* offsets, const Ring& tiles, const Share& run,
                                           const Size& w, int rank) {
  Position at;
  int block = (run.end - 1) / w.k_blocks, tile = w.tile(block, run.end - 1, rank), first = 0, end = 0;
  if (tile >= 0) { first = __ldg(offsets + tile); end = __ldg(offsets + tile + 1); }
  for (int unit = run.end; unit-- > run.begin;) {
    const bool is_there = tile >= 0;
    const int begin = first, count = end - first;
    if (unit > run.begin) {  // the next one's place, on its way while a slot is waited for
      if (unit - 1 < block * w.k_blocks) --block;
      tile = w.tile(block, unit - 1, rank);
      if (tile >= 0) { first = __ldg(offsets + tile); end = __ldg(offsets + tile + 1); }
    }
    if (!is_there) continue;
    tiles.wait_empty(at);
    expect(tiles.full + 8 * at.slot, count * 16);
    bulk_copy(tiles.slot(at), words + begin, count * 16, tiles.full + 8 * at.slot, true);
    at.next(tiles.count);
  }
}

__device__ __forceinline__ void load_x(const TensorMap* x, const Ring& slots, const Share& run, const Size& w,
                                       int rank) {
  Position at;
  int block = (run.end - 1) / w.k_blocks;
  for (int unit = run.end; unit-- > run.begin;) {
    if (unit < block * w.k_blocks) --block;
    const int column = (unit - block * w.k_blocks) * 128, row = w.walk(block) * NT + rank * (NT / RANKS);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      slots.wait_empty(at);                                // in both blocks
      expect(slots.full + 8 * at.slot, X_BYTES);           // half of it from the other one
      const u32 to = slots.slot(at) + rank * (X_BYTES / RANKS), full = slots.full + 8 * at.slot;
      tma_2d_to_all(to, x, column + half * 64, row, full, (1 << RANKS) - 1);
      at.next(slots.count);
    }
  }
}

// What consumers know between two halves of a tile.
struct Progress {
  Position tile, x;
  u32 before;                                 // mbarrier of the slot of x that wgmma may still read, or 0

  // By a warp whose products of that slot have ended: both blocks' copies wait for it.
  __device__ void give_back() {
    if (threadIdx.x % 32 < RANKS && before) arrive_in_cluster(address_in(before, threadIdx.x % 32));
    before = 0;
  }
};

template <int HALF>
__device__ __forceinline__ void multiply(float (&acc)[NT / 2], u32 (&a)[4][4], Run& run, const Ring& tiles,
                                         const Ring& xs, Progress& at) {
  read_steps<4 * HALF>(a, run);
  if (HALF) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(tiles.empty + 8 * at.tile.slot);
  }
  xs.wait_full(at.x);
  const u64 x = descriptor(xs.slot(at.x));
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < 4; ++s) wgmma(acc, a[s], x + s * 2);
  wgmma_commit();
  wgmma_wait<1>();
  at.give_back();
  at.before = xs.empty + 8 * at.x.slot;
  at.x.next(xs.count);
}

template <class F>
__device__ __forceinline__ void consume(const Ring& tiles, const Ring& xs, const Parts& parts, int number, int rank,
                                        F cut, const u16* scale, const u16* bias, u16* y, int n, int m, const Size& w) {
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32, begin = cut(number), end = cut(number + 1);
  Progress at;
  at.before = 0;
  int block = (end - 1) / w.k_blocks;
  for (int unit = end; unit > begin; --block) {
    const int start = block * w.k_blocks, stop = max(begin, start);
    if (w.tile(block, start, rank) < 0) {                  // the other block's x comes here, too
      for (; unit > stop; --unit)
        for (int half = 0; half < 2; ++half) {
          xs.wait_full(at.x);
          at.before = xs.empty + 8 * at.x.slot;
          at.give_back();
          at.x.next(xs.count);
        }
      continue;
    }
    const bool has_end = unit == start + w.k_blocks;
    float acc[NT / 2];
#pragma unroll
    for (int i = 0; i < NT / 2; ++i) acc[i] = 0.f;
    u32 a[2][4][4];
    for (; unit > stop; --unit) {
      tiles.wait_full(at.tile);
      Run run(tiles.slot(at.tile), threadIdx.x);
      multiply<0>(acc, a[0], run, tiles, xs, at);
      multiply<1>(acc, a[1], run, tiles, xs, at);
      at.tile.next(tiles.count);
    }
    wgmma_wait<0>();
    at.give_back();
    if (has_end) {
      if (stop > start) parts.add(acc, start, number, cut, GROUP_BARRIER + group);
      const int walk = w.walk(block), column = walk * NT;
      const int row = ((block - walk * w.blocks) * RANKS + rank) * ROWS + threadIdx.x / 32 * 16, mine = row + lane / 4;
      const float b = bias_of(bias, mine, m), below = bias_of(bias, mine + 8, m);
      const float s = INT8 ? bias_of(scale, mine, m) * INT8_FACTOR : 1.f,
                  below_s = INT8 ? bias_of(scale, mine + 8, m) * INT8_FACTOR : 1.f;
      write_m64(acc, row, y + (u64)column * m, n - column, m, [=](float sum, bool is_below, int) {
        if (INT8) sum *= is_below ? below_s : s;
        return sum + (is_below ? below : b);
      });
    } else {
      parts.store(acc, number);
      bar_sync(GROUP_BARRIER + group, 128);
      if (threadIdx.x % 128 == 0) parts.announce(number);
    }
  }
}

extern "C" __global__ void __cluster_dims__(RANKS, 1, 1) __launch_bounds__(WARPS * 32, 1)
tiled_bitmap_prefill(const uint4* words,            // the weight's words, of 16 bytes
                     const int* offsets,            // int32 [tiles + 1], in words
                     const __grid_constant__ TensorMap x,  // of x, 16-bit [n, K]
                     const u16* scale,              // 16-bit [m] of int8 values, or null
                     const u16* bias,               // 16-bit [m] or null
                     u16* y,                        // 16-bit [n, m]
                     float* sums,                   // float32 [clusters, 256 * NT]: parts of sums
                     u64* left,                     // uint64 [clusters, 4]: whose parts are there
                     u64 ticket,
                     int n, int m, int k_blocks, int units, int tiles, int walks, int tile_bytes, int tile_slots,
                     int x_slots, int successors_wait) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 base = shared_address(shared);
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), rank = rank_in_cluster();
  const int all = gridDim.x / RANKS, clusters = all / walks, cluster = blockIdx.x / RANKS;  // `clusters` of a walk
  const int number = cluster % walks * clusters + cluster / walks;
  const Size w = {k_blocks, (m + RANKS * ROWS - 1) / (RANKS * ROWS), tiles};
  Ring xs = {base, X_BYTES, 0, 0, x_slots}, held = {base + x_slots * X_BYTES, (u32)tile_bytes, 0, 0, tile_slots};
  xs.full = held.at + tile_slots * tile_bytes; xs.empty = xs.full + 8 * x_slots;
  held.full = xs.empty + 8 * x_slots; held.empty = held.full + 8 * tile_slots;
  int* const cuts = (int*)(shared + (held.empty + 8 * tile_slots - base));
  const auto equal = [=](int i) -> int {
    return i / clusters * units + i % clusters * (units / clusters) + min(i % clusters, units % clusters);
  };
  if (successors_wait) launch_dependents();
  const Share run = {equal(number), equal(number + 1)};
  if (threadIdx.x == WORDS * 32) {
    for (int i = 0; i < x_slots; ++i) {
      bar_init(xs.full + 8 * i, 1);
      bar_init(xs.empty + 8 * i, RANKS * CONSUMERS);
    }
    for (int i = 0; i < tile_slots; ++i) {
      bar_init(held.full + 8 * i, 1);
      bar_init(held.empty + 8 * i, CONSUMERS);
    }
    fence_bar_init();
  }
  for (int i = threadIdx.x; i <= all; i += WARPS * 32) cuts[i] = equal(i);
  __syncwarp();
  cluster_arrive();
  cluster_wait();                                          // both blocks' mbarriers are there, and this one's cuts
  if (warp < CONSUMERS) {
    take_registers<CONSUMER_REGISTERS>();
    wait_for_grid(!successors_wait);
    const Parts parts = {sums, left, ticket, RANKS * CONSUMERS / 4, rank * CONSUMERS / 4 + warp / 4};
    consume(held, xs, parts, number, rank, [=](int c) { return cuts[c]; }, scale, bias, y, n, m, w);
  } else {
    give_registers<LOADER_REGISTERS>();
    if (threadIdx.x == WORDS * 32) {
      if (run.end > run.begin) load_words(words, offsets, held, run, w, rank);
    } else if (threadIdx.x == X * 32) {
      wait_for_grid();
      if (run.end > run.begin) load_x(&x, xs, run, w, rank);
    }
    __syncwarp();
  }
  cluster_arrive();
  cluster_wait();                                          // the other block still arrives at this one's mbarriers
}
