// y[n, M] = x[n, K] W[M, K]^T + bias, W in Tiled-CSL (formats/tiled_csl.py), on the tensor cores of sm_90a.
//
// Load as sparse, compute as dense. A block walks through tiles of W, 128 rows and 64 columns each. Its warps have
// roles and hand over by mbarriers:
//
//   producers  words in global memory --LDG--> registers --STS.U16--> dense window of a tile in shared memory
//   loader     64 columns of x in global memory --TMA--> a slot in shared memory
//   consumers  one or two warpgroups: window, x --wgmma--> accumulators --> y
//   herald     tells other blocks that this one has left its part of a sum
//
// Windows are operands of wgmma as they are: 128-byte-swizzled, K-major; W's rows are m and x's are n, or, with SWAP,
// the other way round. A window is emptied by storing zeros to where the last tile was scattered (UNSCATTER), or filled
// with zeros. TEAM warps share a window. With one consumer x has a slot beside each window and is handed over with it;
// two consumers, for more columns of y, get x from slots of its own.
//
// W is walked through once for every NT columns of y. Of all these tiles a block takes equal shares: with one
// consumer, where NT columns are all, of bytes, else of tiles; sums that blocks share are those of split_sum.cuh.
//
// Words and offsets are read before earlier kernels of the stream have ended: they must not be what a kernel writes
// that may still be running. A block's first words are on their way to the L2 cache before their offsets are known. A
// block takes up to 227 KB of shared memory and, with its warps, all registers.
//
// Macros: NT columns of y, 8 .. 256; CONSUMERS 1 | 2; SWAP 0 | 1 (one consumer, NT 64); WINDOWS; TEAM; CHUNK bytes of
// words that a lane's registers take for a warp, a multiple of 512; X_SLOTS, WINDOWS with one consumer; UNSCATTER 0 |
// 1; CONSUMER_REGISTERS and PRODUCER_REGISTERS, 0 for as many as all warps have; GRID: its blocks; BF16 0 | 1. wgmma()
// of NT / PIECES columns (with SWAP 128) comes from kernels/ptx.py.

#include "tiled_csl.cuh"
#include "split_sum.cuh"
#include "output.cuh"

#define ROWS 128
#define WINDOW (TILE_BYTES + 1024)            // padding words fall behind the tile
#if SWAP                                      // x is operand A, W's window B: one m64 x 128 accumulator
#define M64 1
#define OF_M64 64
#else
#define M64 (2 / CONSUMERS)                   // 64-row pieces of a consumer's rows
#define OF_M64 (NT / 2)                       // accumulators of one
#endif
#define ACC (M64 * OF_M64)
#define PIECES (NT > 192 ? 2 : 1)             // wgmma instructions for NT columns
#define OWN_X (CONSUMERS > 1)                 // x has slots of its own
#define X_BYTES (NT * 128)
#define GROUPS (CHUNK / 512)
#define CHUNK16 (CHUNK / 16)
#define FIRST_PRODUCER (4 * CONSUMERS)
#define LOADER (FIRST_PRODUCER + WINDOWS * TEAM)
#define WARPS (OWN_X ? (LOADER + 4) / 4 * 4 : LOADER + 2)      // whole warpgroups, or the herald
#define X_AT (WINDOWS * WINDOW)
#define BARS_AT (X_AT + X_SLOTS * X_BYTES)
// All warps meet once, when mbarriers and cuts are there. Each role waits at a barrier of its own, in one place, as
// compute-sanitizer's synccheck asks; consumers make the mbarriers, all warps the cuts, which consumers read.
// Barrier 0 is left alone: synccheck takes it for one of the whole block.
enum { LOADER_READY = 14, CONSUMERS_READY = 15 };
// Other named barriers, those of consumers and of teams the first of several.
enum { HERALD_BARRIER = 1, CONSUMER_BARRIER = 2, TEAM_BARRIER = CONSUMER_BARRIER + CONSUMERS,
       PRODUCERS_READY = TEAM_BARRIER + (TEAM > 1 ? WINDOWS : 0) };
static_assert(PRODUCERS_READY < LOADER_READY, "16 named barriers");

#if OWN_X
#define CUTS_PARAMETER
#else
// Where blocks' runs begin, which are equal in bytes: tiles, and their first words, in 16 bytes. An argument of the
// launch: there at once.
struct Cuts {
  struct { int tile, word; } at[GRID + 1];
};
#define CUTS_PARAMETER const __grid_constant__ Cuts cuts,
#endif

struct Run {  // a block's tiles, numbered through all walks, as row blocks are; of W: tiles of a row, row blocks
  int begin, end, k_blocks, row_blocks;

  __device__ int walk(int row_block) const { return OWN_X ? row_block / row_blocks : 0; }
};

struct Bars {  // mbarriers, by address: of windows and of slots of x
  u32 full, empty, x_full, x_empty;
};

struct Chunk {  // 16-byte words of a tile, as many as a warp takes at once
  int at, count; bool first, last;
};

// A producer's words: chunk after chunk of every WINDOWS-th tile. All lanes keep count.
struct Stream {
  const uint4* words; const int* offsets;
  int tiles, first_tile, tiles_of_w, rank;             // how many; the first, counted down from there; rank in the team
  int tile, at, end; bool first;                       // what comes next
  int begins, ends, later_begins, later_ends;          // of 32 tiles, one a lane, and of the 32 behind them

  __device__ void look_up(int from, int& begin, int& stop) {
    const int t = from + threadIdx.x % 32;
    begin = stop = 0;
    if (t < tiles) {
      const int number = first_tile - t * WINDOWS;
      const int* o = offsets + (OWN_X ? number % tiles_of_w : number);
      begin = __ldg(o); stop = __ldg(o + 1);
      // Of each member of the team, in whole steps.
      const int share = (stop - begin + 32 * TEAM - 1) / (32 * TEAM) * 32;
      begin = min(begin + rank * share, stop); stop = min(begin + share, stop);
    }
  }
  __device__ void start() {
    look_up(0, begins, ends);
    look_up(32, later_begins, later_ends);
    tile = 0; first = true;
    at = __shfl_sync(~0u, begins, 0); end = __shfl_sync(~0u, ends, 0);
  }
  __device__ Chunk next() {
    const int count = min(end - at, CHUNK16);
    const Chunk chunk = {at, count, first, count == end - at};
    at += count;
    first = chunk.last;
    if (chunk.last) {
      if (++tile % 32 == 0) { begins = later_begins; ends = later_ends; look_up(tile + 32, later_begins, later_ends); }
      at = __shfl_sync(~0u, begins, tile % 32); end = __shfl_sync(~0u, ends, tile % 32);
    }
    return chunk;
  }
};

__device__ __forceinline__ void fill_with_zeros(u32 window, int lane, int rank, int team) {
#pragma unroll
  for (int i = rank; i < TILE_BYTES / 512; i += team) sts_zero(window + (i * 32 + lane) * 16);
}

// Scatters every WINDOWS-th tile of the run. While a chunk is scattered the next one is on its way.
__device__ __forceinline__ void produce(Stream& stream, u32 window, u32 full, u32 empty, int team, int lane) {
  uint4 even[GROUPS], odd[GROUPS];
  int held = -1;            // 16-byte words of the last tile, whose places `hold` has; -1: it has not
  u32 hold[GROUPS][2];
  int t = 0;
  const auto load = [&](uint4(&q)[GROUPS], const Chunk& chunk) {
#pragma unroll
    for (int g = 0; g < GROUPS; ++g)
      ldg128_if(q[g], stream.words + chunk.at + g * 32 + lane, g * 32 + lane < chunk.count);
  };
  const auto empty_window = [&] {
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
  };
  stream.start();
  Chunk first = stream.next(), second;                     // empty behind the last tile
  load(even, first);
  fill_with_zeros(window, lane, stream.rank, TEAM);
  bar_arrive(CONSUMERS_READY, WARPS * 32);
  bar_sync(PRODUCERS_READY, LOADER * 32);
  const auto step = [&](const uint4 (&q)[GROUPS], const Chunk& now, uint4 (&others)[GROUPS], Chunk& next) {
    arrived(q[0].x);
    next = stream.next();
    load(others, next);
    if (now.first) {
      if (t) empty_window();
      if (TEAM > 1) bar_sync(team, TEAM * 32); else __syncwarp();
    }
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) scatter(window, q[g], g * 32 + lane < now.count);
    if (UNSCATTER) {
      held = now.first && now.last ? now.count : -1;
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        hold[g][0] = __byte_perm(q[g].x, q[g].y, 0x7632);
        hold[g][1] = __byte_perm(q[g].z, q[g].w, 0x7632);
      }
    }
    if (now.last) {
      fence_async();
      __syncwarp();
      if (elect()) arrive(full);
      ++t;
    }
  };
  while (true) {
    step(even, first, odd, second);
    if (t == stream.tiles) break;
    step(odd, second, even, first);
    if (t == stream.tiles) break;
  }
}

__device__ __forceinline__ void load_x(const TensorMap* x, const Run& run, u32 slots, const Bars& bars) {
  int row_block = (run.end - 1) / run.k_blocks;            // counted: a division for each tile would hold x up
  int slot = 0;
  u32 phase = 1;
  wait_for_grid();
  for (int tile = run.end; tile-- > run.begin;) {
    if (tile < row_block * run.k_blocks) --row_block;
    wait(bars.x_empty + 8 * slot, phase);
    expect(bars.x_full + 8 * slot, X_BYTES);
    tma_2d(slots + slot * X_BYTES, x, (tile - row_block * run.k_blocks) * 64, run.walk(row_block) * NT,
           bars.x_full + 8 * slot);
    if (++slot == X_SLOTS) { slot = 0; phase ^= 1; }
  }
}

__device__ __forceinline__ void write(const float (&acc)[ACC], int row0, const u16* bias, u16* y, int n, int m,
                                      int thread) {
  const int lane = thread % 32;
#if SWAP
  // Registers 4 i + {0, 1} are column lane / 4 of y, rows 8 i + 2 (lane % 4) + {0, 1}; + {2, 3} the column 8 further.
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    const int row = row0 + i * 8, mine = row + lane % 4 * 2;
    const float b[4] = {bias_of(bias, mine, m), bias_of(bias, mine + 1, m), bias_of(bias, mine + 8, m),
                        bias_of(bias, mine + 9, m)};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float* a = acc + 4 * i + 2 * e;
      const int col = thread / 32 * 16 + e * 8 + lane / 4;
      write_rows(y + (u64)col * m, row, m, to_values(a[0] + b[0], a[1] + b[1]), to_values(a[4] + b[2], a[5] + b[3]),
                 col < n);
    }
  }
#else
#pragma unroll
  for (int h = 0; h < M64; ++h) {
    const int row = row0 + h * 64 + thread / 32 * 16;
    const float b = bias_of(bias, row + lane / 4, m), below = bias_of(bias, row + lane / 4 + 8, m);
    write_m64((const float (&)[OF_M64])acc[h * OF_M64], row, y, n, m,
              [=](float sum, bool is_below, int) { return sum + (is_below ? below : b); });
  }
#endif
}

__device__ __forceinline__ void multiply(float (&acc)[ACC], u64 w, u64 x) {
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < 4; ++s) {
#if SWAP
    wgmma(acc, x + s * 2, w + s * 2);
#else
    constexpr int count = ACC / (M64 * PIECES);            // accumulators of an instruction
#pragma unroll
    for (int i = 0; i < M64 * PIECES; ++i)
      wgmma((float (&)[count])acc[i * count], w + i / PIECES * 512 + s * 2,
            x + i % PIECES * (X_BYTES / PIECES / 16) + s * 2);
#endif
  }
  wgmma_commit();
}

template <class F>
__device__ __forceinline__ void consume(const Run& run, u32 windows, u32 x_slots, const Bars& bars, const Parts& parts,
                                        F cut, const u16* bias, u16* y, int n, int m) {
  const int consumer = parts.mine, thread = threadIdx.x & 127, lane = thread & 31;
  int slot = 0, x_slot = 0;
  u32 phase = 0, x_phase = 0;
  int row_block = (run.end - 1) / run.k_blocks;
  for (int tile = run.end; tile > run.begin; --row_block) {
    const int start = row_block * run.k_blocks, stop = max(run.begin, start);
    const bool has_end = tile == start + run.k_blocks;
    float acc[ACC];
#pragma unroll
    for (int i = 0; i < ACC; ++i) acc[i] = 0.f;
    u32 before = 0, x_before = 0;                          // barriers of what the products before read
    const auto give_back = [&] {
      if (lane == 0 && before) {
        arrive(before);
        if (OWN_X) arrive(x_before);
      }
    };
    for (; tile > stop; --tile) {
      wait(bars.full + 8 * slot, phase);
      if (OWN_X) wait(bars.x_full + 8 * x_slot, x_phase); else x_slot = slot;
      multiply(acc, descriptor(windows + slot * WINDOW + consumer * (M64 * 64 * 128)),
               descriptor(x_slots + x_slot * X_BYTES));
      wgmma_wait<1>();
      give_back();
      before = bars.empty + 8 * slot; x_before = bars.x_empty + 8 * x_slot;
      if (++slot == WINDOWS) { slot = 0; phase ^= 1; }
      if (OWN_X && ++x_slot == X_SLOTS) { x_slot = 0; x_phase ^= 1; }
    }
    wgmma_wait<0>();
    give_back();
    if (has_end) {
      if (stop > start) parts.add(acc, start, blockIdx.x, cut, CONSUMER_BARRIER + consumer);
      const int walk = run.walk(row_block), column = walk * NT,
                row = (row_block - walk * run.row_blocks) * ROWS + consumer * (M64 * 64);
      write(acc, row, bias, y + (u64)column * m, n - column, m, thread);
    } else {
      parts.store(acc, blockIdx.x);
      if (CONSUMERS == 1) {
        bar_arrive(HERALD_BARRIER, 128 + 32);              // the herald waits for the memory, not the consumer
      } else {
        bar_sync(CONSUMER_BARRIER + consumer, 128);
        if (thread == 0) parts.announce(blockIdx.x);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
tiled_csl_spmm(const uint4* words,                  // the weight's words, of 16 bytes
               const int* offsets,                  // int32 [tiles_of_w + 1], in words
               CUTS_PARAMETER                       // with one consumer: where blocks' runs begin
               const __grid_constant__ TensorMap x, // of x, 16-bit [n, K]
               const u16* bias,                     // 16-bit [m] or null
               u16* y,                              // 16-bit [n, m]
               float* sums,                         // float32 [GRID, 128 * NT]: parts of sums (split_sum.cuh)
               u64* left,                           // uint64 [GRID, CONSUMERS]: whose parts are there
               u64 ticket,
               int n, int m, int k_blocks, int tiles_of_w, int all_tiles, int successors_wait) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 base = shared_address(shared);
  Bars bars;
  bars.full = base + BARS_AT; bars.empty = bars.full + 8 * WINDOWS;
  bars.x_full = OWN_X ? bars.empty + 8 * WINDOWS : bars.full;
  bars.x_empty = OWN_X ? bars.x_full + 8 * X_SLOTS : bars.empty;
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
#if OWN_X
  // In shared memory, to spare consumers registers.
  int* const cuts = (int*)(shared + BARS_AT + 16 * (WINDOWS + X_SLOTS));
  const auto equal = [=](int b) { return b * (all_tiles / GRID) + min(b, all_tiles % GRID); };
  const auto cut = [=](int b) { return cuts[b]; };
  for (int b = threadIdx.x; b <= GRID; b += WARPS * 32) cuts[b] = equal(b);
#else
  const auto equal = [&](int b) { return cuts.at[b].tile; };
  const auto& cut = equal;
#endif
  if (successors_wait) launch_dependents();
  const Run run = {equal(blockIdx.x), equal(blockIdx.x + 1), k_blocks, (m + ROWS - 1) / ROWS};
  const Parts parts = {sums, left, ticket, CONSUMERS, warp < FIRST_PRODUCER ? warp / 4 : 0};
  if (warp < FIRST_PRODUCER) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < WINDOWS; ++i) {
        bar_init(bars.full + 8 * i, TEAM + !OWN_X);
        bar_init(bars.empty + 8 * i, 4 * CONSUMERS);
      }
      for (int i = 0; i < OWN_X * X_SLOTS; ++i) {
        bar_init(bars.x_full + 8 * i, 1);
        bar_init(bars.x_empty + 8 * i, 4 * CONSUMERS);
      }
      fence_bar_init();
    }
    bar_arrive(PRODUCERS_READY, LOADER * 32);
    bar_arrive(LOADER_READY, (WARPS - LOADER + FIRST_PRODUCER) * 32);
    bar_sync(CONSUMERS_READY, WARPS * 32);
    take_registers<CONSUMER_REGISTERS>();
    wait_for_grid(!successors_wait);
    consume(run, base, base + X_AT, bars, parts, cut, bias, y, n, m);
    return;
  }
  give_registers<PRODUCER_REGISTERS>();
  if (warp < LOADER) {
    const int p = warp - FIRST_PRODUCER, window = p / TEAM,
              tiles = (run.end - run.begin - window + WINDOWS - 1) / WINDOWS;
    Stream stream;
    stream.words = words; stream.offsets = offsets;
    stream.tiles = tiles;
    stream.first_tile = run.end - 1 - window;
    stream.tiles_of_w = tiles_of_w;
    stream.rank = p % TEAM;
    if (tiles > 0) {
      produce(stream, base + window * WINDOW, bars.full + 8 * window, bars.empty + 8 * window, TEAM_BARRIER + window,
              lane);
    } else {                                               // nothing to wait for
      bar_arrive(CONSUMERS_READY, WARPS * 32);
      bar_arrive(PRODUCERS_READY, LOADER * 32);
    }
    return;
  }
  if (warp == LOADER && lane == 0) {
#if !OWN_X
    const int words_end = cuts.at[blockIdx.x + 1].word,
              ahead = min(words_end - cuts.at[blockIdx.x].word, WINDOWS * TEAM * CHUNK16);
    if (ahead) prefetch_bytes(words + words_end - ahead, ahead * 16);
#endif
    prefetch_map(&x);
  }
  bar_arrive(CONSUMERS_READY, WARPS * 32);
  bar_sync(LOADER_READY, (WARPS - LOADER + FIRST_PRODUCER) * 32);
  if (warp == LOADER) {
    if (lane == 0) load_x(&x, run, base + X_AT, bars);
  } else if (CONSUMERS == 1 && run.end % k_blocks && run.end > run.begin) {
    // The herald: the rows at the run's end belong to the next block too.
    bar_sync(HERALD_BARRIER, 128 + 32);
    if (lane == 0) parts.announce(blockIdx.x);
  }
}
