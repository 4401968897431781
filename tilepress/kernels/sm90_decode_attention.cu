// Decode attention over a paged cache: a query head a sequence, dequantization fused, one launch of a constant grid.
// Hopper: bulk copies.
//
// Work is a flat list of units, UNIT tokens of one KV head: sequences, in each its heads, in each its tokens. Every
// block takes as many of them, in order, and so does each of its warps, whatever the lengths are, which are read on the
// device only:
//
//     sequence      0                1        2                                   a segment: one sequence and head
//     head      0   |   1    |   0 | 1 |  0      |     1      |                   a piece: what a warp has of a segment
//     units  . . . . . . . . . . . . . . . . . . . . . . . . . . .
//     warps  0      | 1      | 2      | 3      | 4      | 5      |
//     blocks 0               | 1               | 2               |
//
// A warp streams its units through a ring of its own (kv_units.cuh).
//
// Pieces of a block meet in shared memory; a warp puts together one head. If the segment goes on in the next block, it
// leaves the head in global memory. The block in which a segment of several blocks ends waits for what the others have
// left and adds it up in their order, so that results do not depend on timing. Blocks are numbered as they start, and
// wait for lower numbers only: for blocks that run or have ended. Words that are left carry the launch's ticket, so
// that whoever finds it has the word; the numbers of all launches are counted by one counter, and a launch's ticket is
// the counter's own number and how often it has counted a launch: no other launch has it, not even a graph's next
// replay. Nothing needs to be cleared.
//
// Blocks count before earlier kernels of the stream have ended: `started` must not be what a kernel writes that may
// still be running.
//
// Macros: those of kv_units.cuh; OUT8: the output is int8; LSE; PASSES over a KV head's query heads, HEADS each; WARPS
// 4 | 8 | 16; STAGES of a ring; MOST sequences; SHARED_BYTES; BLOCKS: the grid, one of 32 WARPS threads a
// multiprocessor.

#include "kv_units.cuh"

#define CHANNELS (D / 32)                     // of a head that a lane has in the end, neighbours
#define WORTH_BYTES (80 << 10)                // of pages: what a block reads while another hands over

// Shared memory
#define RING_BYTES (WARPS * STAGES * UNIT_BYTES)
// Floats of two heads of a piece; the 4 keep its writers off each other's banks.
#define PAIR (2 * D + 4)
#define PIECE (HEADS / 2 * PAIR)
#define PIECES_AT RING_BYTES
#define WEIGHTS_AT (PIECES_AT + 2 * WARPS * PIECE * 4)
#define PLACES_AT (WEIGHTS_AT + 2 * WARPS * HEADS * 8)
#define BARS_AT (PLACES_AT + 2 * WARPS * 16)
#define START_AT (BARS_AT + WARPS * STAGES * 8)
#define SUMS_AT (START_AT + 8)
#define PREFIX_AT (SUMS_AT + WARPS * 4)
static_assert((WARPS & WARPS - 1) == 0 && WARPS <= 16, "warps");
static_assert(PREFIX_AT + (MOST + 1) * 4 <= SHARED_BYTES && WARPS * 33 <= MOST + 1, "shared memory");

// a / b, where it is less than 2^20.
__device__ __forceinline__ int quotient(int a, int b) {
  const int q = (int)((float)a * inverse((float)b));       // at most one off
  return q - (q * b > a) + ((q + 1) * b <= a);
}
// Words of 16 bytes in global memory, each stored and loaded as a whole: two floats and a ticket.
struct __align__(16) Word { float2 value; u64 ticket; };
__device__ __forceinline__ void leave_word(Word* at, float low, float high, u64 ticket) {
  asm volatile(
      "{.reg .b128 w; .reg .b64 v; mov.b64 v, {%1, %2}; mov.b128 w, {v, %3}; st.relaxed.gpu.global.b128 [%0], w;}" ::
          "l"(at),
      "f"(low), "f"(high), "l"(ticket)
      : "memory");
}
__device__ __forceinline__ Word find_word(const Word* at) {
  Word found;
  asm volatile(
      "{.reg .b128 w; .reg .b64 v; ld.relaxed.gpu.global.b128 w, [%3]; mov.b128 {v, %2}, w; mov.b64 {%0, %1}, v;}"
      : "=f"(found.value.x), "=f"(found.value.y), "=l"(found.ticket)
      : "l"(at)
      : "memory");
  return found;
}
// What `at` was before.
__device__ __forceinline__ u64 count_one(u64* at) {
  u64 v;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], 1;" : "=l"(v) : "l"(at) : "memory");
  return v;
}

// Units in order, shared out to COUNT as evenly as it goes: `each`, and `more` in all. `rate`: shares a unit, nearly.
template <int COUNT> struct Shares {
  int each, more;
  float rate;

  __device__ int begin(int share) const { return share * each + share * more / COUNT; }
  __device__ int of(int unit) const {                      // where none is empty
    const int share = (int)((float)unit * rate);           // at most one off
    return share - (begin(share) > unit) + (begin(share + 1) <= unit);
  }
};
// Of blocks: at least a unit for each warp, since who has less hands over more. Where segments are equally long, of
// `units`, shares may be a little longer to begin and end with segments: then less is handed over. A lane tries to cut
// a segment into so many shares, or so many segments to a share.
__device__ __forceinline__ Shares<BLOCKS> shares_of(int total, int units, int segments) {
  const int even = max((total + BLOCKS - 1) / BLOCKS, WARPS), count = threadIdx.x % 32 + 1;
  const int whole = units < even ? count * units : (int)((float)units * inverse((float)count) + 0.5f);
  const bool fits = units < even ? whole >= even && whole - units < even
                                 : whole >= even && whole * count == units && (count + 1) * even > units;
  const u32 found = __ballot_sync(ALL, fits && units * segments == total && (whole - even) * UNIT_BYTES <= WORTH_BYTES);
  if (found == 0 && total <= BLOCKS * WARPS) return {WARPS, 0, inverse((float)WARPS)};
  if (found == 0) return {total / BLOCKS, total % BLOCKS, BLOCKS * inverse((float)total)};
  const int share = __shfl_sync(ALL, whole, __ffs(found) - 1);
  return {share, 0, inverse((float)share)};
}

struct Place { int sequence, head, unit, units; };   // a unit: its segment, its number in it, how many that has

struct __align__(4 * CHANNELS) Channels {     // of a head
  float of[CHANNELS];

  __device__ void scale(float by) {
#pragma unroll
    for (int k = 0; k < CHANNELS; ++k) of[k] *= by;
  }
  __device__ void add(float by, const Channels& other) {
#pragma unroll
    for (int k = 0; k < CHANNELS; ++k) of[k] += by * other.of[k];
  }
};

// What a block leaves of a segment that goes on: heads' channels relative to the sum of their weights, and that sum's
// log2.
struct Part {
  Word channels[HEADS][CHANNELS / 2][32], log[HEADS];

  __device__ void leave(int head, const Channels& v, float of_weights, u64 ticket) {
#pragma unroll
    for (int k = 0; k < CHANNELS / 2; ++k)
      leave_word(&channels[head][k][threadIdx.x % 32], v.of[2 * k], v.of[2 * k + 1], ticket);
    if (threadIdx.x % 32 == 0) leave_word(&log[head], of_weights, 0.f, ticket);
  }
};

struct Sum {                                  // of parts of a head; at first, of one
  Channels channels;
  float most, weight = 1.f;                   // of the parts: the largest log2, and all relative to it

  // Waits for parts, BATCH at once.
  template <int BATCH> __device__ __forceinline__ void add(const Part* parts, int count, int head, u64 ticket) {
    const int lane = threadIdx.x % 32;
    for (; count > 0; parts += BATCH, count -= BATCH) {
      Word found[BATCH][CHANNELS / 2], log;
      const auto part = [&](int k) -> const Part* {        // beyond the last one, that one again, times 0
        return (const Part*)((const char*)parts + (u32)min(k, count - 1) * (u32)sizeof(Part));
      };
      for (bool are_there = false; !are_there;) {          // all loads first, then a look at them
#pragma unroll
        for (int k = 0; k < BATCH; ++k)
#pragma unroll
          for (int i = 0; i < CHANNELS / 2; ++i) found[k][i] = find_word(&part(k)->channels[head][i][lane]);
        log = find_word(&part(lane % BATCH)->log[head]);
        are_there = log.ticket == ticket;
#pragma unroll
        for (int k = 0; k < BATCH; ++k)
#pragma unroll
          for (int i = 0; i < CHANNELS / 2; ++i) are_there &= found[k][i].ticket == ticket;
        are_there = __all_sync(ALL, are_there);
      }
      if (lane % BATCH >= count) log.value.x = __int_as_float(0xff800000);
      const float higher = fmaxf(most, warp_max(log.value.x, 1, BATCH)), shrink = exp2_of(most - higher),
                  by = exp2_of(log.value.x - higher);
      most = higher; weight = weight * shrink + warp_sum(by, 1, BATCH); channels.scale(shrink);
#pragma unroll
      for (int k = 0; k < BATCH; ++k) {
        const float f = BATCH == 1 ? by : __shfl_sync(ALL, by, k);       // 0 of what is no part
#pragma unroll
        for (int i = 0; i < CHANNELS / 2; ++i) {
          channels.of[2 * i] += f * found[k][i].value.x;
          channels.of[2 * i + 1] += f * found[k][i].value.y;
        }
      }
    }
  }
};

// What is written of a segment.
struct Output {
  const u16* query; void* out; float* lse;
  const float *key_channels, *value_channels; const u16 *key_fixed, *value_fixed; const float* out_scale;
  int kv_heads, group; float scale;

  __device__ int kv_head(int head) const { return head / PASSES; }
  __device__ int first_of(int head) const { return head % PASSES * HEADS; }
  __device__ int heads_of(int head) const { return min(HEADS, group - first_of(head)); }
  // The number of a query head among all of all sequences.
  __device__ u64 row(int sequence, int head, int i) const {
    return (u64)sequence * kv_heads * group + kv_head(head) * group + first_of(head) + i;
  }

  __device__ u32 code_of(float x) const {
    return x == x ? (int)rintf(fminf(fmaxf(__fdiv_rn(x, *out_scale), -128.f), 127.f)) & 255 : 0;
  }

  // Head i, and the log2 of the sum of its weights.
  __device__ void write(int sequence, int head, int i, Channels v, float weight) const {
    const int lane = threadIdx.x % 32, kv = kv_head(head);
    const u64 to = row(sequence, head, i);
    const int at = lane * CHANNELS;
    if (STATIC) {
      const u16* of = value_fixed + 2 * (kv * GROUPS + at * GROUPS / D);
      const float s = half_to_float(of[0]), z = half_to_float(of[1]);
#pragma unroll
      for (int k = 0; k < CHANNELS; ++k) v.of[k] = v.of[k] * s + z;
    }
    if (value_channels) {
      const Channels mean = *(const Channels*)(value_channels + kv * D + at),
                     by = *(const Channels*)(value_channels + (kv_heads + kv) * D + at);
#pragma unroll
      for (int k = 0; k < CHANNELS; ++k) v.of[k] = v.of[k] * by.of[k] + mean.of[k];
    }
    u32 words[CHANNELS / 2];
#pragma unroll
    for (int k = 0; k < CHANNELS / 2; ++k) {
#if OUT8
      const u32 low = code_of(v.of[2 * k]), high = code_of(v.of[2 * k + 1]);
      ((u16*)out)[(to * D + at) / 2 + k] = low | high << 8;
#else
      words[k] = to_values(v.of[2 * k], v.of[2 * k + 1]);
#endif
    }
#if !OUT8
    u32* const target = (u32*)out + (to * D + at) / 2;
    if (CHANNELS == 4) stg64(target, words[0], words[CHANNELS / 2 - 1]); else *target = words[0];
#endif
#if LSE
    float shift = 0.f;                                     // of all scores: by the keys' mean and fixed shift
    for (int d = lane; d < D; d += 32) {
      float of = key_channels ? key_channels[kv * D + d] : 0.f;
      if (STATIC)
        of += half_to_float(key_fixed[2 * (kv * GROUPS + d * GROUPS / D) + 1]) *
              (key_channels ? key_channels[(kv_heads + kv) * D + d] : 1.f);
      shift += to_float(query[to * D + d]) * of;
    }
    shift = warp_sum(shift) * scale;
    if (lane == 0) lse[to] = weight * 0.6931471805599453f + shift;
#endif
  }

  __device__ void write_nothing(int sequence) const {
    const int rows = kv_heads * group;
    u16* to = (u16*)out + (u64)sequence * rows * (OUT8 ? D / 2 : D);
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * (OUT8 ? D / 2 : D); i += WARPS * 32) to[i] = 0;
    if (LSE)
      for (int i = threadIdx.x; i < rows; i += WARPS * 32) lse[(u64)sequence * rows + i] = __int_as_float(0xff800000);
  }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
decode_attention(const u16* query,                  // 16-bit [batch, kv_heads * group, D]
                 const unsigned char* pages,        // uint8 [num_pages, kv_heads, page bytes]
                 const int* table,                  // int32 [batch, table_pages], rows table_stride apart
                 const int* lens,                   // int32 [batch]
                 void* out,                         // [batch, kv_heads * group, D], 16-bit or int8
                 float* lse,                        // float32 [batch, kv_heads * group] or null
                 Part* parts,                       // [BLOCKS]: what blocks leave for each other
                 u64* started,                      // uint64 [1]: counts the blocks of all launches
                 u64 ticket,
                 const float* key_channels,         // float32 [3, kv_heads, D] or null
                 const u16* key_fixed,              // fp16 [kv_heads, GROUPS, 2] or null
                 const float* value_channels,       // float32 [3, kv_heads, D] or null
                 const u16* value_fixed,            // fp16 [kv_heads, GROUPS, 2] or null
                 const float* out_scale,            // float32 [1] of int8 output, or null
                 int batch, int kv_heads, int group, int table_stride, int table_pages, int num_pages, float scale) {
  extern __shared__ __align__(128) unsigned char memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const u32 shared = shared_address(memory), ring = shared + warp * STAGES * UNIT_BYTES,
            bars = shared + BARS_AT + warp * STAGES * 8;
  float* const pieces = (float*)(memory + PIECES_AT);
  float2* const weights = (float2*)(memory + WEIGHTS_AT);  // [piece][head]: maximum (log2), sum of probabilities
  // Of each piece: sequence, head, first and last unit of the segment.
  int4* const places = (int4*)(memory + PLACES_AT);
  const auto channels_of = [&](int piece, int head) -> Channels {
    return *(const Channels*)(pieces + piece * PIECE + head / 2 * PAIR + head % 2 * D + lane * CHANNELS);
  };
  const Output output = {query,       out,       lse,      key_channels, value_channels, key_fixed,
                         value_fixed, out_scale, kv_heads, group,        scale};
  const int heads = kv_heads * PASSES;
  u64 before;
  if (threadIdx.x == 0) before = count_one(started);
  if (lane == 0) {
    for (int i = 0; i < STAGES; ++i) bar_init(bars + i * 8, 1);
    fence_bar_init();
    fence_async();
  }
  if (lane < 2) places[2 * warp + lane] = make_int4(-1, -1, -1, -1);
  if (blockIdx.x == 0 && warp == 0) {                      // what every block looks at first
    if (32 * lane < batch) prefetch_line(lens + 32 * lane);
    if (32 * lane < table_pages) prefetch_line(table + 32 * lane);
  }
  wait_for_grid();

  const int early = ldg32(lens + min(lane, batch - 1));    // on its way while the block learns its number
  if (threadIdx.x == 0) sts64(shared + START_AT, before);
  __syncthreads();
  // Only now: numbers of the next launch come behind those of this one.
  launch_dependents();
  before = *(const u64*)(memory + START_AT);
  const int number = before % BLOCKS;
  ticket += before / BLOCKS;

  // Units of all sequences before each. Few sequences are added up by each warp for itself, without further barriers.
  const auto clamped = [&](int length) -> int { return min(max(length, 0), table_pages * 64); };
  const auto length_of = [&](int b) -> int { return clamped(lens[b]); };
  const auto units_of = [&](int length) -> int { return (clamped(length) + UNIT - 1) / UNIT; };
  const auto scan = [&](int v) -> int {
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
      const int before = __shfl_up_sync(ALL, v, i);
      if (lane >= i) v += before;
    }
    return v;
  };
  int* prefix = (int*)(memory + PREFIX_AT);
  if (batch <= 32) {
    prefix += warp * 33;
    const int v = scan(lane < batch ? units_of(early) : 0);
    if (lane < batch) prefix[lane + 1] = v;
    if (lane == 0) prefix[0] = 0;
    __syncwarp();
  } else {
    int* const sums = (int*)(memory + SUMS_AT);
    const int each = (batch + WARPS * 32 - 1) / (WARPS * 32), from = min((int)threadIdx.x * each, batch),
              to = min(from + each, batch);
    int sum = 0;
#pragma unroll 1                              // one or two
    for (int b = from; b < to; ++b) sum += units_of(lens[b]);
    const int v = scan(sum);
    if (lane == 31) sums[warp] = v;
    __syncthreads();
    int units = v - sum + __reduce_add_sync(ALL, lane < warp ? sums[lane] : 0);
#pragma unroll 1
    for (int b = from; b < to; ++b) { prefix[b] = units; units += units_of(lens[b]); }
    if (to == batch && from < batch) prefix[batch] = units;
    __syncthreads();
  }
  const auto write_empty = [&]() {                         // sequences
    for (int b = number; b < batch; b += BLOCKS)
      if (prefix[b] == prefix[b + 1]) output.write_nothing(b);
  };
  const int total = prefix[batch] * heads;
  const Shares<BLOCKS> blocks = shares_of(total, prefix[1], batch * heads);
  const int block_first = blocks.begin(number), block_end = min(blocks.begin(number + 1), total);
  if (block_first >= block_end) { write_empty(); return; }
  const Shares<WARPS> warps = {(block_end - block_first) / WARPS, (block_end - block_first) % WARPS, 0.f};
  const int first = block_first + warps.begin(warp), count = block_first + warps.begin(warp + 1) - first;

  const auto find = [&](int u) -> Place {
    int low = 0, high = batch;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (prefix[middle] * heads <= u) low = middle; else high = middle;
    }
    const int units = prefix[low + 1] - prefix[low], in = u - prefix[low] * heads;
    const int head = quotient(in, units);
    return {low, head, in - head * units, units};
  };
  const auto page_of = [&](const Place& p) -> u32 {
    return table[(u64)p.sequence * table_stride + p.unit / UNITS_OF_PAGE];
  };
  // Where a unit stands: UNIT tokens of a head of a page.
  const auto where = [&](const Place& p, u32 page) -> u32 {
    return (min(page, (u32)num_pages - 1) * kv_heads + output.kv_head(p.head)) * UNITS_OF_PAGE + p.unit % UNITS_OF_PAGE;
  };
  const auto copy = [&](int slot, u32 unit) {
    if (lane) return;
    const u32 to = ring + slot * UNIT_BYTES, bar = bars + slot * 8;
    expect(bar, UNIT_BYTES);
    if (UNIT >= 32) {
      bulk_copy(to, pages + (u64)unit * UNIT_BYTES, UNIT_BYTES, bar, false);
    } else {                                               // half of 32 tokens, whose values stand behind all keys
      const unsigned char* from = pages + (u64)(unit / 2) * (2 * UNIT_BYTES) + unit % 2 * VALUES_AT;
      bulk_copy(to, from, VALUES_AT, bar, false);
      bulk_copy(to + VALUES_AT, from + 2 * VALUES_AT, VALUES_AT, bar, false);
    }
  };
  u32 raw[TILES][D / 8];
  const auto load_query = [&](const Place& p) {
    const int mine = output.heads_of(p.head);
    const u16* const head = query + output.row(p.sequence, p.head, g) * D;
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int j = 0; j < D / 32; ++j) {
        uint4 v = {};
        if (n * 8 + g < mine) v = __ldg((const uint4*)(head + n * 8 * D + key_channel(j)));
        raw[n][4 * j] = v.x; raw[n][4 * j + 1] = v.y; raw[n][4 * j + 2] = v.z; raw[n][4 * j + 3] = v.w;
      }
  };

  const auto where_is = [&](int u) -> u32 {
    const Place p = find(min(u, total - 1));
    return where(p, page_of(p));
  };
  const Place mine = find(min(first + lane, total - 1));
  const u32 page = page_of(mine);
  Place at = {__shfl_sync(ALL, mine.sequence, 0), __shfl_sync(ALL, mine.head, 0), __shfl_sync(ALL, mine.unit, 0),
              __shfl_sync(ALL, mine.units, 0)};
  load_query(at);                                          // behind the pages it would wait for them
  int length = length_of(at.sequence);
  u32 next = where(mine, page);
  for (int j = 0; j < STAGES; ++j)
    if (j < count) copy(j, __shfl_sync(ALL, next, j));
  write_empty();
  u32 later = count > 32 ? where_is(first + 32 + lane) : 0;
  Position ready;
  for (int j = 0; j < count;) {
    const int n = min(at.units - at.unit, count - j), kv = output.kv_head(at.head);
    Query q[TILES];
    State state[TILES];
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      q[t] = prepare(raw[t], key_channels ? key_channels + (kv_heads + kv) * D : nullptr, key_fixed + 2 * kv * GROUPS,
                     scale);
      State& st = state[t];
#pragma unroll
      for (int i = 0; i < D / 16; ++i) st.o[i][0] = st.o[i][1] = st.o[i][2] = st.o[i][3] = 0.f;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        st.top[k] = st.limit[k] = __int_as_float(0xff800000);
        st.offset[k] = st.sum[k] = st.shift[k] = 0.f;
      }
    }
    Place following = {at.sequence, at.head + 1, 0, at.units};
    int following_length = length;
    if (j + n < count) {
      if (following.head == heads) {
        following.head = 0;
        do {
          ++following.sequence;
          following.units = prefix[following.sequence + 1] - prefix[following.sequence];
        } while (following.units == 0);
        following_length = length_of(following.sequence);
      }
      load_query(following);
    }
    for (int i = 0; i < n; ++i, ++j) {
      wait(bars + ready.slot * 8, ready.phase);
      attend(ring + ready.slot * UNIT_BYTES, min(length - (at.unit + i) * UNIT, UNIT), q, state);
      __syncwarp();
      const int ahead = j + STAGES;
      if (ahead < count) {
        if (ahead % 32 == 0) { next = later; later = where_is(first + ahead + 32 + lane); }
        copy(ready.slot, __shfl_sync(ALL, next, ahead % 32));
      }
      ready.next(STAGES);
    }

    // The piece, to shared memory: a warp keeps at most two, its first one and its last one.
    const bool whole = at.unit == 0 && n == at.units;
    const int piece = 2 * warp + (whole || j == count);
    const int mine = output.heads_of(at.head);
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      const State& st = state[t];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float sum = warp_sum(st.sum[k], 4), shift = warp_sum(st.shift[k], 4);
        const int head = t * 8 + 2 * c + k;
        float* to = pieces + piece * PIECE + head / 2 * PAIR + k * D;
#pragma unroll
        for (int i = 0; i < D / 16; i += 2)
          *(float4*)(to + channel_of(i)) = make_float4(
              st.o[i][k] * LOW_STEP + shift, st.o[i][k + 2] * HIGH_STEP + shift, st.o[i + 1][k] * LOW_STEP + shift,
              st.o[i + 1][k + 2] * HIGH_STEP + shift);
        if (g == 0) weights[piece * HEADS + head] = make_float2(-st.offset[k], sum);
      }
    }
    if (whole) {
      __syncwarp();
      for (int i = 0; i < mine; ++i) {
        const float2 w = weights[piece * HEADS + i];
        Channels v = channels_of(piece, i);
        v.scale(inverse(w.y));
        output.write(at.sequence, at.head, i, v, w.x + log2_of(w.y));
      }
      __syncwarp();
    } else if (lane == 0) {
      const int start = first + j - n - at.unit;
      places[piece] = make_int4(at.sequence, at.head, start, start + at.units);
    }
    at = following;
    length = following_length;
  }
  __syncthreads();

  // Pieces of the block: a warp takes a head of a segment, the next warp the next one. The last segment comes first,
  // since others may wait for it.
  const int piece = lane % (2 * WARPS), start_of = places[piece].z;
  u32 left = __ballot_sync(ALL, start_of >= 0) & ((1ull << 2 * WARPS) - 1);
  for (int turn = warp; left;) {
    const int4 segment = places[31 - __clz(left)];         // sequence, head, first and last unit
    const u32 members = __ballot_sync(ALL, start_of == segment.z) & left;
    left &= ~members;
    const bool is_member = start_of == segment.z;
    const int of_segment = output.heads_of(segment.y);
    for (; turn < of_segment; turn += WARPS) {
      // warps' last pieces, and the first one of the warp in which the segment ends.
      Channels of[WARPS + 1];
      const int end = __ffs(members & 0x55555555) - 1;
#pragma unroll
      for (int k = 0; k < WARPS; ++k) of[k] = members >> 2 * k & 2 ? channels_of(2 * k + 1, turn) : Channels{};
      of[WARPS] = end >= 0 ? channels_of(end, turn) : Channels{};
      const float2 w = is_member ? weights[piece * HEADS + turn] : make_float2(__int_as_float(0xff800000), 0.f);
      const float most = warp_max(w.x, 1, 2 * WARPS), by = exp2_of(w.x - most), sum = warp_sum(by * w.y, 1, 2 * WARPS);
      Channels v = {};
#pragma unroll
      for (int k = 0; k <= WARPS; ++k) v.add(__shfl_sync(ALL, by, k < WARPS ? 2 * k + 1 : end & 31), of[k]);
      v.scale(inverse(sum));
      Sum all = {v, most + log2_of(sum)};
      if (segment.w > block_end) {
        parts[number].leave(turn, all.channels, all.most, ticket);
        continue;
      }
      if (segment.z < block_first) {
        const int from = blocks.of(segment.z), count = number - from;
        if (count == 1) all.add<1>(parts + from, count, turn, ticket);
        else if (count <= 4) all.add<4>(parts + from, count, turn, ticket);
        else if (count <= 8) all.add<8>(parts + from, count, turn, ticket);
        else all.add<16>(parts + from, count, turn, ticket);
        all.channels.scale(inverse(all.weight));
      }
      output.write(segment.x, segment.y, turn, all.channels, all.most + log2_of(all.weight));
    }
    turn -= of_segment;
  }
}
