// y[n, M] = x[n, K] W[M, K]^T + bias, W as tiled bitmap (formats/tiled_bitmap.py), on the tensor cores of sm_90a.
//
// A block walks through units of W: the tiles, 128 rows and 128 columns each, of PAIRS row blocks, one below the other.
// Its warps have roles and hand over by mbarriers:
//
//   loader     a unit's tiles, 128 columns of x in global memory --bulk copies, TMA--> a slot in shared memory
//   consumers  for each tile two warpgroups, 64 rows each: values in the slot --LDS--> operand A in registers, x in the
//   slot as operand B --wgmma-->
//              accumulators --> y
//
// While wgmma multiplies PART steps of a tile, a warpgroup reads the values of the next ones. Up to 64 columns, several
// blocks share a multiprocessor.
//
// W is walked through once for every NT columns of y. Of a walk's units a block takes cuts[b] .. cuts[b + 1], equal
// shares of work, or, without cuts, of units; sums that blocks share are those of split_sum.cuh. With several walks,
// neighbouring blocks take the same units in different ones at about the same time, and all but one find W in the L2
// cache. Blocks are numbered by walks, and in a walk by units: `number` below.
//
// Words, offsets and cuts are read before earlier kernels of the stream have ended: they must not be what a kernel
// writes that may still be running.
//
// Macros: NT columns of y, 8 .. 128; PAIRS 1 | 2; PART 1 | 2 | 4; BLOCKS of a multiprocessor; CONSUMER_REGISTERS and
// LOADER_REGISTERS, 0 for as many as all warps have; those of tiled_bitmap.cuh. wgmma() of NT columns comes from
// kernels/ptx.py.

#include "tiled_bitmap.cuh"
#include "split_sum.cuh"
#include "output.cuh"

#define ROWS 128
#define CONSUMERS (8 * PAIRS)                 // warps
#define WARPS (CONSUMERS + (LOADER_REGISTERS ? 4 : 1))    // setmaxnreg is for whole warpgroups
#define X_BYTES (NT * 256)
enum { GROUP_BARRIER = 1 };                   // named barriers, one for each warpgroup

struct Slots {  // of shared memory: x, tiles, mbarriers
  u32 x, tiles, tile_bytes, full, empty;      // a slot has PAIRS tiles
  int count;
};

struct Size {  // of W: units of a row, blocks of PAIRS rows of tiles, which are numbered through all walks, tiles
  int k_blocks, blocks, tiles; bool one_walk;

  __device__ int walk(int block) const { return one_walk ? 0 : block / blocks; }
  // Of a unit in a block, or -1 for the row block that is not there.
  __device__ int tile(int block, int unit, int pair) const {
    const int tile = ((block - walk(block) * blocks) * PAIRS + pair) * k_blocks + unit - block * k_blocks;
    return tile < tiles ? tile : -1;
  }
};

// A block's: units; for one row block, where its last unit's words begin and end.
struct Share { int begin, end, first, last; };

struct Extent {  // of a tile among the words
  int first = 0, count = 0;

  __device__ void look_up(const int* offsets, int tile) {
    if (tile < 0) { count = 0; return; }
    first = __ldg(offsets + tile); count = __ldg(offsets + tile + 1) - first;
  }
};

// Words of as many units as there are slots are asked for before earlier kernels have ended, x of them then, all others
// as slots become empty.
__device__ __forceinline__ void load(const uint4* words, const int* offsets, const TensorMap* x, const Slots& slots,
                                     const Share& run, const Size& w, bool again) {
  const int begin = run.begin, end = run.end;
  Position at;
  int of_words = (end - 1) / w.k_blocks, of_x = of_words;  // blocks, counted: divisions would hold copies up
  Extent now[PAIRS], later[PAIRS];
#pragma unroll
  for (int p = 0; p < PAIRS; ++p)
    if (run.last < 0) now[p].look_up(offsets, w.tile(of_words, end - 1, p));
    else now[p] = {run.first, run.last - run.first};
  const auto copy_words = [&](int unit) {
    const u32 full = slots.full + 8 * at.slot;
    u32 bytes = X_BYTES;
    const int next = max(unit - 1, begin);
    if (next < of_words * w.k_blocks) --of_words;
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
      later[p].look_up(offsets, w.tile(of_words, next, p));
      bytes += now[p].count * 16;
    }
    expect(full, bytes);
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
      if (now[p].count)
        bulk_copy(slots.tiles + (at.slot * PAIRS + p) * slots.tile_bytes, words + now[p].first, now[p].count * 16, full,
                  again);
      now[p] = later[p];
    }
  };
  const auto copy_x = [&](int unit, int slot) {
    if (unit < of_x * w.k_blocks) --of_x;
    const int column = (unit - of_x * w.k_blocks) * 128, row = w.walk(of_x) * NT;
    const u32 to = slots.x + slot * X_BYTES, full = slots.full + 8 * slot;
    tma_2d(to, x, column, row, full);
    tma_2d(to + X_BYTES / 2, x, column + 64, row, full);
  };
  int unit = end;
  for (; unit > begin && end - unit < slots.count; at.next(slots.count)) copy_words(--unit);
  wait_for_grid();
  for (int slot = 0; slot < end - unit; ++slot) copy_x(end - 1 - slot, slot);
  for (; unit > begin; at.next(slots.count)) {
    --unit;
    wait(slots.empty + 8 * at.slot, at.phase ^ 1);
    copy_words(unit);
    copy_x(unit, at.slot);
  }
}

// PART after PART of a tile: read, then multiply, while the next part is read.
template <int FIRST>
__device__ __forceinline__ void multiply(float (&acc)[NT / 2], u32 (&a)[2][PART][4], Run& run, u64 x, u32& before) {
  u32 (&mine)[PART][4] = a[FIRST / PART % 2];
  read_steps<FIRST>(mine, run);
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < PART; ++s) wgmma(acc, mine[s], x + (FIRST + s) / 4 * (X_BYTES / 2 / 16) + (FIRST + s) % 4 * 2);
  wgmma_commit();
  wgmma_wait<1>();
  if (FIRST == 0 && threadIdx.x % 32 == 0 && before) arrive(before);
  if constexpr (FIRST + PART < 8) multiply<FIRST + PART>(acc, a, run, x, before);
}

template <class F>
__device__ __forceinline__ void consume(const Slots& slots, const Parts& parts, int number, F cut, const u16* scale,
                                        const u16* bias, u16* y, int n, int m, const Size& w) {
  const int warp = threadIdx.x / 32 % 8, pair = parts.mine / 2, lane = threadIdx.x % 32, begin = cut(number),
            end = cut(number + 1);
  Position at;
  int block = (end - 1) / w.k_blocks;
  for (int unit = end; unit > begin; --block) {
    const int start = block * w.k_blocks, stop = max(begin, start);
    if (PAIRS > 1 && w.tile(block, start, pair) < 0) {
      for (; unit > stop; --unit) {
        wait(slots.full + 8 * at.slot, at.phase);
        if (lane == 0) arrive(slots.empty + 8 * at.slot);
        at.next(slots.count);
      }
      continue;
    }
    const bool has_end = unit == start + w.k_blocks;
    float acc[NT / 2];
#pragma unroll
    for (int i = 0; i < NT / 2; ++i) acc[i] = 0.f;
    // `before`: barrier of the unit before, which wgmma may still read.
    u32 a[2][PART][4], before = 0;
    for (; unit > stop; --unit) {
      wait(slots.full + 8 * at.slot, at.phase);
      Run run(slots.tiles + (at.slot * PAIRS + pair) * slots.tile_bytes, threadIdx.x % 256);
      multiply<0>(acc, a, run, descriptor(slots.x + at.slot * X_BYTES), before);
      before = slots.empty + 8 * at.slot;
      at.next(slots.count);
    }
    wgmma_wait<0>();
    if (lane == 0) arrive(before);
    if (has_end) {
      if (stop > start) parts.add(acc, start, number, cut, GROUP_BARRIER + parts.mine);
      const int walk = w.walk(block), column = walk * NT;
      const int row = ((block - walk * w.blocks) * PAIRS + pair) * ROWS + warp * 16, mine = row + lane / 4;
      const float b = bias_of(bias, mine, m), below = bias_of(bias, mine + 8, m);
      const float s = INT8 ? bias_of(scale, mine, m) * INT8_FACTOR : 1.f,
                  below_s = INT8 ? bias_of(scale, mine + 8, m) * INT8_FACTOR : 1.f;
      write_m64(acc, row, y + (u64)column * m, n - column, m, [=](float sum, bool is_below, int) {
        if (INT8) sum *= is_below ? below_s : s;
        return sum + (is_below ? below : b);
      });
    } else {
      parts.store(acc, number);
      bar_sync(GROUP_BARRIER + parts.mine, 128);
      if (threadIdx.x % 128 == 0) parts.announce(number);
    }
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)
tiled_bitmap_spmm(const uint4* words,               // the weight's words, of 16 bytes
                  const int* offsets,               // int32 [tiles + 1], in words
                  const int* all_cuts,              // int32: cuts [blocks + 1], Share [blocks]; or null
                  const __grid_constant__ TensorMap x,  // of x, 16-bit [n, K]
                  const u16* scale,                 // 16-bit [m] of int8 values, or null
                  const u16* bias,                  // 16-bit [m] or null
                  u16* y,                           // 16-bit [n, m]
                  float* sums,                      // float32 [blocks, PAIRS * 128 * NT]: parts of sums
                  u64* left,                        // uint64 [blocks, 2 PAIRS]: whose parts are there
                  u64 ticket,
                  int n, int m, int k_blocks, int units, int tiles, int walks, int tile_bytes, int slot_count,
                  int successors_wait) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 base = shared_address(shared);
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
  const Size w = {k_blocks, (m + PAIRS * ROWS - 1) / (PAIRS * ROWS), tiles, walks == 1};
  const int blocks = w.one_walk ? gridDim.x : gridDim.x / walks;           // of a walk
  const int number = w.one_walk ? blockIdx.x : blockIdx.x % walks * blocks + blockIdx.x / walks;
  Slots slots;
  slots.count = slot_count; slots.tile_bytes = tile_bytes;
  slots.x = base; slots.tiles = base + slot_count * X_BYTES;
  slots.full = slots.tiles + slot_count * PAIRS * tile_bytes; slots.empty = slots.full + 8 * slot_count;
  const auto equal = [=](int i) -> int {
    return i / blocks * units + i % blocks * (units / blocks) + min(i % blocks, units % blocks);
  };
  if (successors_wait) launch_dependents();
  if (warp < CONSUMERS) {
    int* cuts = (int*)(shared + (slots.empty + 8 * slot_count - base));
    for (int i = threadIdx.x; i <= gridDim.x; i += CONSUMERS * 32) cuts[i] = all_cuts ? __ldg(all_cuts + i) : equal(i);
    bar_sync(0, WARPS * 32);
    take_registers<CONSUMER_REGISTERS>();
    wait_for_grid(!successors_wait);
    const Parts parts = {sums, left, ticket, CONSUMERS / 4, warp / 4};
    consume(slots, parts, number, [=](int b) { return cuts[b]; }, scale, bias, y, n, m, w);
  } else {
    // Its words are asked for as soon as it is there: nobody else is waited for.
    Share run;
    if (threadIdx.x == 32 * CONSUMERS) {
      if (all_cuts) *(int4*)&run = __ldg((const int4*)(all_cuts + (gridDim.x + 4) / 4 * 4) + number);
      else run = {equal(number), equal(number + 1), 0, -1};
      for (int i = 0; i < slot_count; ++i) {
        bar_init(slots.full + 8 * i, 1);
        bar_init(slots.empty + 8 * i, CONSUMERS);
      }
      fence_bar_init();
    }
    __syncwarp();
    bar_arrive(0, WARPS * 32);
    give_registers<LOADER_REGISTERS>();
    if (threadIdx.x == 32 * CONSUMERS && run.end > run.begin) load(words, offsets, &x, slots, run, w, walks > 1);
  }
}
