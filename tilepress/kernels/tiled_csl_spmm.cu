// y[n, M] = x[n, K] W[M, K]^T + bias, W in Tiled-CSL (formats/tiled_csl.py), on the tensor cores of sm_90a.
//
// Load as sparse, compute as dense. A block walks through units of 128 rows and 64 columns of W. Its warps have roles and hand over by mbarriers:
//
//   producers  words in global memory --bulk copy--> own ring --LDS, STS.U16--> dense window of a tile in the unit's slot
//   loader     x in global memory --TMA--> the unit's slot
//   consumers  one warpgroup: window, x --wgmma--> accumulators --> y
//   herald     tells other blocks that this one has left its part of a sum
//
// Windows are operands of wgmma as they are: 128-byte-swizzled, K-major; W's rows are m and x's are n, or, with SWAP, the other way round.
// A window is emptied by storing zeros to where the last tile was scattered (UNSCATTER), or filled with zeros. TEAM warps share a window.
//
// A block takes an equal share of bytes: units cuts[b] .. cuts[b + 1], the last one first. So it begins with rows of which the next block has the
// other part: it leaves its sums (float32) in `parts` and goes on; the next block comes to those rows at its end, adds the sums up in the order of
// blocks, and writes y. Blocks wait only for blocks of lower numbers, and results do not depend on timing. `left` needs no preparation: a block has
// left its part where it stands at `ticket`, a number that no other launch has.
//
// That they make progress rests on blocks being started in the order of their numbers. Words, offsets and cuts are read before earlier kernels of
// the stream have ended: they must not be what the kernel just before writes. A block takes up to 227 KB of shared memory and, with its warps, all registers.
//
// Macros: TILE_ROWS 64 | 128; NT columns of y, 8 .. 64; SWAP 0 | 1 (NT 64, TILE_ROWS 128); WINDOWS, a multiple of the tiles of a unit; TEAM;
// CHUNK bytes of a ring's stage; STAGES of a ring, 2; UNSCATTER 0 | 1; BF16 0 | 1. wgmma() comes from kernels/ptx.py.

#define ROWS 128
#define TILE_BYTES (TILE_ROWS * 128)
#define WINDOW (TILE_BYTES + 1024)            // padding words fall behind the tile
#define HALVES (128 / TILE_ROWS)
#define TILES HALVES                          // of a unit
#define SLOTS (WINDOWS / TILES)               // units in shared memory at once
#if SWAP                                      // x is operand A, W's window B: one m64 x 128 accumulator
#define M64 1
#define ACC 64
#else
#define M64 2                                 // 64-row pieces of the rows
#define ACC (NT / 2)                          // registers of one
#endif
#define X_BYTES (NT * 128)
#define GROUPS (CHUNK / 512)
#define CHUNK16 (CHUNK / 16)
#define FIRST_PRODUCER 4
#define PRODUCERS (WINDOWS * TEAM)
#define WARPS (FIRST_PRODUCER + PRODUCERS + 2)
#define X_AT (WINDOWS * WINDOW)
#define RING_AT (X_AT + SLOTS * X_BYTES)
#define BARS_AT (RING_AT + PRODUCERS * STAGES * CHUNK)

struct Run {  // a block's units
  int begin, end, k_blocks;
};

struct Shared {  // addresses
  u32 full, empty;            // of slots: all tiles and x are there | all consumers have read them
  u32 ring_full;              // of the stages of the rings
  u32 cuts;
};

// A producer's words: chunk after chunk of tile after tile into the stages of its ring. All lanes keep count.
struct Stream {
  const uint4* words; const int* offsets;
  u32 ring, full;
  int tiles, first_unit, place, rank;                  // how many; unit of the first, its place there; rank in the team
  int tile, at, end, stage;                            // what is copied next
  int begins, ends, later_begins, later_ends;          // of 32 tiles, one a lane, and of the 32 behind them
  u32 counts;                                          // of the stages, 16 bits each: 16-byte words, and 1 << 15 with a tile's last

  __device__ void look_up(int from, int& begin, int& stop) {
    const int t = from + threadIdx.x % 32, u = first_unit - t * SLOTS;
    begin = stop = 0;
    if (t < tiles) {
      const int* o = offsets + u * HALVES + place;
      begin = __ldg(o); stop = __ldg(o + 1);
      const int share = (stop - begin + 32 * TEAM - 1) / (32 * TEAM) * 32;   // of each member of the team, in whole steps
      begin = min(begin + rank * share, stop); stop = min(begin + share, stop);
    }
  }
  __device__ void start() {
    look_up(0, begins, ends);
    look_up(32, later_begins, later_ends);
    tile = stage = 0; counts = 0;
    at = __shfl_sync(~0u, begins, 0); end = __shfl_sync(~0u, ends, 0);
    for (int i = 0; i < STAGES; ++i) copy();
  }
  __device__ void copy() {
    if (tile == tiles) return;
    const int count = min(end - at, CHUNK16);
    const bool last = count == end - at;
    if (elect()) {
      expect(full + 8 * stage, count * 16);
      if (count) bulk_copy(ring + stage * CHUNK, words + at, count * 16, full + 8 * stage);
    }
    counts = counts & ~(0xffffu << 16 * stage) | (count | last << 15) << 16 * stage;
    at += count;
    stage = (stage + 1) % STAGES;
    if (last) {
      if (++tile % 32 == 0) { begins = later_begins; ends = later_ends; look_up(tile + 32, later_begins, later_ends); }
      at = __shfl_sync(~0u, begins, tile % 32); end = __shfl_sync(~0u, ends, tile % 32);
    }
  }
};

__device__ __forceinline__ void load_x(const TensorMap* x, const Run& run, u32 slots, const Shared& bars) {
  int slot = 0, k = (run.end - 1) % run.k_blocks;
  u32 phase = 1;
  for (int u = run.end; u > run.begin; --u) {
    wait(bars.empty + 8 * slot, phase);
    expect(bars.full + 8 * slot, X_BYTES);
    tma_2d(slots + slot * X_BYTES, x, k * 64, 0, bars.full + 8 * slot);
    k = k ? k - 1 : run.k_blocks - 1;
    if (++slot == SLOTS) { slot = 0; phase ^= 1; }
  }
}

__device__ __forceinline__ void fill_with_zeros(u32 window, int lane, int rank, int team) {
#pragma unroll
  for (int i = rank; i < TILE_BYTES / 512; i += team) sts_zero(window + (i * 32 + lane) * 16);
}

// Scatters every PRODUCERS-th tile of the run.
__device__ __forceinline__ void produce(Stream& stream, u32 window, u32 full, u32 empty, int team, int lane) {
  const int tiles = stream.tiles;
  int stage = 0; u32 phase = 0;
  int held = -1;            // 16-byte words of the last tile, whose places `hold` has; -1: it has not
  u32 hold[GROUPS][2];
  stream.start();
  fill_with_zeros(window, lane, stream.rank, TEAM);
  for (int t = 0; t < tiles; ++t) {
    bool first = true, last;
    do {
      wait(stream.full + 8 * stage, phase);
      const int count = stream.counts >> 16 * stage & 0x7fff;
      last = stream.counts >> 16 * stage & 0x8000;
      uint4 q[GROUPS];
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) lds128_if(q[g], stream.ring + stage * CHUNK + (g * 32 + lane) * 16, g * 32 + lane < count);
      if (first) {
        if (t) {
          wait(empty, (t - 1) & 1);
          if (UNSCATTER && held >= 0) {
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
              const bool ok = g * 32 + lane < held;
              sts16_if(window + (hold[g][0] & 0xffff), 0, ok); sts16_if(window + (hold[g][0] >> 16), 0, ok);
              sts16_if(window + (hold[g][1] & 0xffff), 0, ok); sts16_if(window + (hold[g][1] >> 16), 0, ok);
            }
          } else {
            fill_with_zeros(window, lane, UNSCATTER ? 0 : stream.rank, UNSCATTER ? 1 : TEAM);
          }
        }
        if (TEAM > 1) bar_sync(team, TEAM * 32); else __syncwarp();
      }
      // The stage can be written again once every lane has its words, not just asked for them. Offsets are even: bit 16 is never set.
      u32 all = 0;
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) all |= g * 32 + lane < count ? q[g].w : 0;
      never(all & 1 << 16);
      __syncwarp();
      stream.copy();
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        const bool ok = g * 32 + lane < count;
        sts16_if(window + (q[g].x >> 16), q[g].x, ok); sts16_if(window + (q[g].y >> 16), q[g].y, ok);
        sts16_if(window + (q[g].z >> 16), q[g].z, ok); sts16_if(window + (q[g].w >> 16), q[g].w, ok);
      }
      if (UNSCATTER) {
        held = first && last ? count : -1;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
          hold[g][0] = __byte_perm(q[g].x, q[g].y, 0x7632);
          hold[g][1] = __byte_perm(q[g].z, q[g].w, 0x7632);
        }
      }
      first = false;
      if (last) fence_async();
      __syncwarp();
      if (last && elect()) arrive(full);
      if (++stage == STAGES) { stage = 0; phase ^= 1; }
    } while (!last);
  }
}

__device__ __forceinline__ float4* part_of(float* parts, int block, int thread) {
  return (float4*)parts + (u64)block * (M64 * ACC / 4 * 128) + thread;
}

__device__ __forceinline__ void write(float (&acc)[M64][ACC], int row0, const u16* bias, u16* y, int n, int m, int thread) {
#if SWAP
  // Registers 4 i + {0, 1} are column lane / 4 of y, rows 8 i + 2 (lane % 4) + {0, 1}; + {2, 3} the column 8 further.
#pragma unroll
  for (int i = 0; i < 16; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = row0 + i * 8 + thread % 4 * 2 + e % 2, col = thread / 32 * 16 + e / 2 * 8 + thread % 32 / 4;
      if (row < m && col < n) y[(u64)col * m + row] = to_value(acc[0][4 * i + e] + (bias ? to_float(bias[row]) : 0.f));
    }
#else
  // Of an m64: registers 4 i + {0, 1} are row lane / 4, columns 8 i + 2 (lane % 4) + {0, 1}; + {2, 3} the row 8 below.
#pragma unroll
  for (int h = 0; h < M64; ++h)
#pragma unroll
    for (int low = 0; low < 2; ++low) {
      const int row = row0 + h * 64 + thread / 32 * 16 + low * 8 + thread % 32 / 4;
      if (row < m) {
        const float b = bias ? to_float(bias[row]) : 0.f;
#pragma unroll
        for (int i = 0; i < NT / 8; ++i)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int col = i * 8 + thread % 4 * 2 + e;
            if (col < n) y[(u64)col * m + row] = to_value(acc[h][4 * i + 2 * low + e] + b);
          }
      }
    }
#endif
}

// Adds what the blocks before this one have left of row block `rb`, as soon as they say so.
__device__ __forceinline__ void add_parts(float (&acc)[M64][ACC], int rb, int me, const int* cuts, const Run& run, float* parts, u64* left, u64 ticket, int thread) {
  int b = me;
  while (cuts[b] > rb * run.k_blocks) --b;
  for (; b < me; ++b) {
    if (cuts[b] == cuts[b + 1]) continue;
    if (thread == 0) {
      while (load_acquire(left + b) != ticket) {}
      left[b] = 0;                                         // a graph launches with the same ticket again
    }
    bar_sync(1, 128);
    const float4* part = part_of(parts, b, thread);
#pragma unroll
    for (int h = 0; h < M64; ++h)
#pragma unroll
      for (int i = 0; i < ACC; i += 4) {
        const float4 v = __ldcg(part + (h * ACC + i) / 4 * 128);
        acc[h][i] += v.x; acc[h][i + 1] += v.y; acc[h][i + 2] += v.z; acc[h][i + 3] += v.w;
      }
  }
}

__device__ __forceinline__ void consume(const Run& run, u32 windows, u32 x_slots, const Shared& bars, int me, const int* cuts, const u16* bias, u16* y,
                                        float* parts, u64* left, u64 ticket, int n, int m) {
  const int thread = threadIdx.x & 127, lane = thread & 31;
  int slot = 0;
  u32 phase = 0;
  for (int u = run.end; u > run.begin;) {
    const int rb = (u - 1) / run.k_blocks, start = rb * run.k_blocks, stop = max(run.begin, start);
    const bool has_end = u == start + run.k_blocks;
    float acc[M64][ACC];
#pragma unroll
    for (int h = 0; h < M64; ++h)
#pragma unroll
      for (int i = 0; i < ACC; ++i) acc[h][i] = 0.f;
    u32 before = 0;                                        // the barrier of the slot that the products before read
    for (; u > stop; --u) {
      const u64 w = descriptor(windows + slot * (TILES * WINDOW)), x = descriptor(x_slots + slot * X_BYTES);
      wait(bars.full + 8 * slot, phase);
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < 4; ++s) {
#if SWAP
        wgmma(acc[0], x + s * 2, w + s * 2);
#else
        wgmma(acc[0], w + s * 2, x + s * 2);
        wgmma(acc[1], w + 64 / TILE_ROWS * (WINDOW / 16) + 64 % TILE_ROWS * 8 + s * 2, x + s * 2);
#endif
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (lane == 0 && before) arrive(before);
      before = bars.empty + 8 * slot;
      if (++slot == SLOTS) { slot = 0; phase ^= 1; }
    }
    wgmma_wait<0>();
    if (lane == 0) arrive(before);
    if (has_end) {
      if (stop > start) add_parts(acc, rb, me, cuts, run, parts, left, ticket, thread);
      write(acc, rb * ROWS, bias, y, n, m, thread);
    } else {
      float4* part = part_of(parts, me, thread);
#pragma unroll
      for (int h = 0; h < M64; ++h)
#pragma unroll
        for (int i = 0; i < ACC; i += 4)
          __stcg(part + (h * ACC + i) / 4 * 128, make_float4(acc[h][i], acc[h][i + 1], acc[h][i + 2], acc[h][i + 3]));
      bar_arrive(2, 128 + 32);                             // the herald
    }
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
tiled_csl_spmm(const uint4* words, const int* offsets, const int* all_cuts, const __grid_constant__ TensorMap x, const u16* bias, u16* y,
               float* parts, u64* left, u64 ticket, int n, int m, int k_blocks) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 base = shared_address(shared);
  Shared bars;
  bars.full = base + BARS_AT; bars.empty = bars.full + 8 * SLOTS; bars.ring_full = bars.empty + 8 * SLOTS;
  bars.cuts = bars.ring_full + 8 * PRODUCERS * STAGES;
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const int* cuts = (const int*)(shared + (bars.cuts - base));
  for (int i = threadIdx.x; i <= gridDim.x; i += WARPS * 32) sts32(bars.cuts + 4 * i, __ldg(all_cuts + i));
  launch_dependents();
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; ++i) { bar_init(bars.full + 8 * i, TILES * TEAM + 1); bar_init(bars.empty + 8 * i, 4); }
    for (int i = 0; i < PRODUCERS * STAGES; ++i) bar_init(bars.ring_full + 8 * i, 1);
    fence_bar_init();
  }
  __syncthreads();
  Run run;
  run.begin = cuts[blockIdx.x]; run.end = cuts[blockIdx.x + 1];
  run.k_blocks = k_blocks;
  if (warp < FIRST_PRODUCER) {
    wait_for_grid();
    consume(run, base, base + X_AT, bars, blockIdx.x, cuts, bias, y, parts, left, ticket, n, m);
  } else if (warp < FIRST_PRODUCER + PRODUCERS) {
    const int p = warp - FIRST_PRODUCER, window = p / TEAM, slot = window / TILES, units = run.end - run.begin;
    Stream stream;
    stream.words = words; stream.offsets = offsets;
    stream.ring = base + RING_AT + p * STAGES * CHUNK; stream.full = bars.ring_full + 8 * p * STAGES;
    stream.tiles = (units - slot + SLOTS - 1) / SLOTS; stream.first_unit = run.end - 1 - slot; stream.place = window % TILES; stream.rank = p % TEAM;
    if (slot < units) produce(stream, base + window * WINDOW, bars.full + 8 * slot, bars.empty + 8 * slot, 3 + window, lane);
  } else if (warp == WARPS - 2) {
    if (lane == 0) {
      wait_for_grid();
      load_x(&x, run, base + X_AT, bars);
    }
  } else if (run.end % k_blocks && run.end > run.begin) {  // the herald: the rows at the run's end belong to the next block too
    bar_sync(2, 128 + 32);
    if (lane == 0) {
      __threadfence();
      store_release(left + blockIdx.x, ticket);
    }
  }
}
