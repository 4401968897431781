// Attention over a paged cache on mma.sync and cp.async, sm_80 and later: several queries a sequence, windows, soft
// caps, sinks, ALiBi, keys and values of any form.
//
// Rows are the queries of the heads that share a KV head, token after token: row r is token r / group, head r % group.
// A block has ROWS of them, of one sequence, and one of `splits` equal parts of the units, UNIT tokens each, that these
// rows see. Its warps are ROW_WARPS by TOKEN_WARPS: those with the same tokens fill one ring of units together, and
// each multiplies them with its own TILES of 8 rows; every TOKEN_WARPS-th unit is a warp's.
//
//   units          0   1   2   3   4   5   6 | 7   8   9  ..         | a part: a block's
//   token warp     0   1   2   3   0   1   2 | 0   1   2
//
// At the end the warps' pieces meet in shared memory. Where there is one part, they are written as they are wanted;
// otherwise each part goes to global memory for attention_combine, which adds them in their order. Nothing waits for
// another block, and nothing about lengths is known to the host: a captured graph stays valid.
//
// Macros: D, a multiple of 32; KEY_BITS, KEY_GROUPS, KEY_STATIC, and the same of VALUE; PAGE_TOKENS 16 | 32 | 64;
// TILES; ROW_WARPS; TOKEN_WARPS; STAGES of a ring; BF16: of queries; ROTATE 0 | 1; OUT8; SHARED_BYTES.
// Grid: tiles * kv_heads * splits blocks, of ROW_WARPS * TOKEN_WARPS warps.

#define UNIT (PAGE_TOKENS < 32 ? PAGE_TOKENS : 32)

#include "attention_math.cuh"
#include "kv_codes.cuh"
#include "attention_output.cuh"

typedef Codes<KEY_BITS, KEY_GROUPS, KEY_STATIC> Key;
typedef Codes<VALUE_BITS, VALUE_GROUPS, VALUE_STATIC> Value;

#define WARPS (ROW_WARPS * TOKEN_WARPS)
#define ROWS (8 * TILES * ROW_WARPS)
#define UNITS_OF_PAGE (PAGE_TOKENS / UNIT)
#define UNIT_BYTES (UNIT * (Key::ROW_BYTES + Value::ROW_BYTES))
#define VALUES_AT (UNIT * Key::BYTES)
#define KEY_SCALES_AT (UNIT * (Key::BYTES + Value::BYTES))
#define VALUE_SCALES_AT (KEY_SCALES_AT + UNIT * Key::SCALE_BYTES)
#define RING_BYTES (STAGES * UNIT_BYTES)      // of the warps with the same tokens
#define PITCH (D + 4)                         // floats of a row of a piece
#define WEIGHTS_AT (TOKEN_WARPS * ROWS * PITCH * 4)        // behind the pieces, which stand where rings have been
#define LEAST 4                               // units of a part for each of its warps: below, fewer parts are used
#define BLOCK (D & -D)                        // of the Hadamard matrix
// A running maximum may be so much too small (log2): probabilities up to 2^(MARGIN + LIFT). As large as float16 allows:
// what is far below the largest must not vanish. Row-wise it is multiplied by scales, up to 511 of 4 bits and 63 of 8.
#define MARGIN 2.f
#define LIFT (Value::ROW_WISE ? Value::BITS == 4 ? 5.f : 8.f : Value::IS_BF16 ? 2.f : 12.f)
static_assert(TOKEN_WARPS * RING_BYTES <= SHARED_BYTES && WEIGHTS_AT + TOKEN_WARPS * ROWS * 16 <= SHARED_BYTES,
              "shared memory");

__device__ __forceinline__ void copy_async(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
// Of the warps with the same tokens.
__device__ __forceinline__ void meet(int of_tokens) {
  if (ROW_WARPS == 1) __syncwarp(); else bar_sync(1 + of_tokens, ROW_WARPS * 32);
}

// What is asked for beyond the product of queries and keys.
struct Extras {
  const float* slopes; float softcap; int window;
  __device__ bool change_scores() const { return slopes || softcap > 0.f; }
};

// Of 8 rows: `q` are right factors of row lane / 4, the rest is of rows 2 (lane % 4) + {0, 1}. A score times `raw` is
// in log2 units, and times `factor` once Extras have changed it. A row sees tokens from `from` to before `to`.
struct Query { u32 q[D / 8]; float sum[2], raw[2], factor[2], margin[2], shift[2], slope[2]; int from[2], to[2]; };
struct State { float o[D / 16][4], top[2], limit[2], offset[2], sum[2], shift[2]; };

__device__ __forceinline__ void hadamard(float (&v)[D / 4]) {
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int step = 1; step < BLOCK / 4; step *= 2)
#pragma unroll
    for (int k = 0; k < D / 4; ++k)
      if ((k & step) == 0) {
        const float a = v[k], b = v[k + step];
        v[k] = a + b;
        v[k + step] = a - b;
      }
#pragma unroll
  for (int step = 1; step < 4; step *= 2)
#pragma unroll
    for (int k = 0; k < D / 4; ++k) {
      const float other = __shfl_xor_sync(ALL, v[k], step);
      v[k] = c & step ? other - v[k] : v[k] + other;
    }
#pragma unroll
  for (int k = 0; k < D / 4; ++k)
    v[k] *= BLOCK == 32 ? 0.17677669529663687f : BLOCK == 64 ? 0.125f : BLOCK == 128 ? 0.08838834764831845f : 0.0625f;
}

// Row lane / 4 of a query tile, `from` its first channel in memory or null where there is no row: times the keys'
// calibrated scale, rotated, times their fixed scale.
__device__ __forceinline__ void prepare(Query& query, const u16* from, const float* channels, int kv_heads,
                                        const u16* fixed, float scale) {
  const int c = threadIdx.x % 4;
  float v[D / 4], shift = 0.f;
#pragma unroll
  for (int w = 0; w < Key::WORDS; ++w)
#pragma unroll
    for (int j = 0; j < Key::OF_WORD; j += 2) {
      const int channel = Key::key_channel(w, c) + j, k = w * Key::OF_WORD + j;
      const u32 pair = from ? __ldg((const u32*)(from + channel)) : 0;
      v[k] = to_float((u16)pair); v[k + 1] = to_float((u16)(pair >> 16));
      if (channels) {
        const float2 mean = *(const float2*)(channels + channel),
                     by = *(const float2*)(channels + kv_heads * D + channel);
        shift += v[k] * mean.x + v[k + 1] * mean.y;
        v[k] *= by.x; v[k + 1] *= by.y;
      }
    }
  if (ROTATE) hadamard(v);
  if (Key::IS_STATIC) {
#pragma unroll
    for (int k = 0; k < D / 4; ++k) {
      const u16* of = fixed + 2 * ((Key::key_channel(k / Key::OF_WORD, c) + k % Key::OF_WORD) / Key::SIZE);
      shift += v[k] * half_to_float(of[1]);
      v[k] *= half_to_float(of[0]);
    }
  }
  shift = warp_sum(shift, 1, 4) * scale;
  float sum = 0.f, factor = scale * LOG2E;
  if (Key::IS_BF16) {
#pragma unroll
    for (int k = 0; k < D / 8; ++k) query.q[k] = Key::pack(v[2 * k], v[2 * k + 1]);
  } else {
    float most = 0.f;
#pragma unroll
    for (int k = 0; k < D / 4; ++k) most = fmaxf(most, fabsf(v[k]));
    most = warp_max(most, 1, 4);
    const int e = min(max((int)(__float_as_uint(most) >> 23) - 126, -100), 100);     // |q| < 2^e
    const float even = power_of_two(Key::EVEN - e), odd = power_of_two(Key::ODD - e);
#pragma unroll
    for (int k = 0; k < D / 8; ++k) {
      // A word of 8 codes gives channels (0, 4), (1, 5), (2, 6), (3, 7), one of 4 codes (0, 1), (2, 3).
      const int first = Key::BITS == 4 ? k / 4 * 8 + k % 4 : 2 * k, second = first + (Key::BITS == 4 ? 4 : 1);
      const float by = Key::BITS == 4 && k % 2 ? odd : even;
      query.q[k] = Key::pack(v[first] * by, v[second] * by);
      const float lifted = Key::BITS == 4 && k % 2 ? power_of_two(Key::EVEN - Key::ODD) : 1.f;
      sum += (low_half(query.q[k]) + high_half(query.q[k])) * lifted;      // of what is multiplied
    }
    sum = warp_sum(sum, 1, 4) * power_of_two(-Key::SCORE - Key::EVEN);
    factor *= power_of_two(Key::SCORE + e);
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const int lane = 4 * (threadIdx.x % 4 * 2 + k);
    query.sum[k] = __shfl_sync(ALL, sum, lane);
    query.raw[k] = __shfl_sync(ALL, factor, lane);
    query.shift[k] = __shfl_sync(ALL, shift, lane);
  }
}

// Scores of a tile of 16 tokens from `token` on, as the soft cap and the slopes want them, in log2 units.
__device__ __forceinline__ void change(float (&s)[4], int token, const Query& query, const Extras& extras) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int k = i % 2;
    float x = s[i] * query.raw[k];
    if (extras.softcap > 0.f) {
      // tanh(y) = 1 - 2 / (1 + e^2y)
      const float y = (x + query.shift[k] * LOG2E) * __fdividef(2.f, extras.softcap);
      x = extras.softcap * LOG2E * (1.f - 2.f * inverse(1.f + exp2_of(y)));
    }
    const int behind = query.to[k] - 1 - (token + i / 2 * 8 + (int)threadIdx.x % 32 / 4);
    s[i] = x - query.slope[k] * (float)behind;
  }
}

// A unit of tokens from `first` on against a warp's rows. Where it is an `edge`, some rows do not see all of it, and
// what is before `low` or from `high` on holds no token that anybody sees, but perhaps NaN.
__device__ __forceinline__ void attend(u32 unit, int first, bool edge, int low, int high, const Extras& extras,
                                       const Query (&query)[TILES], State (&state)[TILES]) {
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  float s[TILES][UNIT / 16][4];
#pragma unroll
  for (int t = 0; t < UNIT / 16; ++t) {
    u32 x[Key::WORDS], y[Key::WORDS];
    Key::load<true>(x, unit + t * 16 * Key::BYTES);
    Key::load<true>(y, unit + (t * 16 + 8) * Key::BYTES);
#pragma unroll
    for (int n = 0; n < TILES; ++n) s[n][t][0] = s[n][t][1] = s[n][t][2] = s[n][t][3] = 0.f;
    u32 sx = 0, zx = 0, sy = 0, zy = 0;
#pragma unroll
    for (int step = 0; step < Key::STEPS; ++step) {
      if constexpr (Key::GROUPED) {
        if (step % (2 * Key::OF_CHUNK) == 0) {             // a lane's channels of a chunk are of one group
          const int group = Key::key_channel(step / 2, c) / Key::SIZE;
          const uint2 of = lds64(unit + KEY_SCALES_AT + Key::scale_at(t * 16 + g, group));
          sx = mul_halves(__byte_perm(of.x, 0, 0x1010), 0x60006000); zx = __byte_perm(of.x, 0, 0x3232);
          sy = mul_halves(__byte_perm(of.y, 0, 0x1010), 0x60006000); zy = __byte_perm(of.y, 0, 0x3232);
        }
      }
      u32 a0, a1, a2, a3;
      Key::factors(x, step, sx, zx, a0, a2);
      Key::factors(y, step, sy, zy, a1, a3);
#pragma unroll
      for (int n = 0; n < TILES; ++n) Key::mma(s[n][t], a0, a1, a2, a3, query[n].q[2 * step], query[n].q[2 * step + 1]);
    }
    if constexpr (Key::ROW_WISE) {
      const uint2 of = lds64(unit + KEY_SCALES_AT + Key::scale_at(t * 16 + g, 0));
#pragma unroll
      for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 scale = i < 2 ? of.x : of.y;
          s[n][t][i] = s[n][t][i] * low_half(scale) + high_half(scale) * query[n].sum[i % 2];
        }
    }
    if (extras.change_scores())
#pragma unroll
      for (int n = 0; n < TILES; ++n) change(s[n][t], first + t * 16, query[n], extras);
    if (edge)
#pragma unroll
      for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = first + t * 16 + i / 2 * 8 + g;
          if (token < query[n].from[i % 2] || token >= query[n].to[i % 2]) s[n][t][i] = NONE;
        }
  }
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    State& st = state[n];
    float top[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      top[k] = fmaxf(s[n][0][k], s[n][0][k + 2]);
#pragma unroll
      for (int t = 1; t < UNIT / 16; ++t) top[k] = fmaxf(top[k], fmaxf(s[n][t][k], s[n][t][k + 2]));
    }
    if (!__any_sync(ALL, top[0] > st.limit[0] || top[1] > st.limit[1])) continue;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float higher = fmaxf(warp_max(top[k], 4), st.top[k]);
      // A row that has seen nothing yet stays as it is.
      const float shrink = higher == st.top[k] ? 1.f : exp2_of((st.top[k] - higher) * query[n].factor[k]);
#pragma unroll
      for (int t = 0; t < D / 16; ++t) { st.o[t][k] *= shrink; st.o[t][k + 2] *= shrink; }
      st.sum[k] *= shrink; st.shift[k] *= shrink;
      st.top[k] = higher; st.limit[k] = higher + query[n].margin[k];
      st.offset[k] = higher == NONE ? 0.f : LIFT - higher * query[n].factor[k];
    }
  }
#pragma unroll
  for (int t = 0; t < UNIT / 16; ++t) {
    u32 x[Value::WORDS], y[Value::WORDS];
    Value::load<false>(x, unit + VALUES_AT + t * 16 * Value::BYTES);
    Value::load<false>(y, unit + VALUES_AT + (t * 16 + 8) * Value::BYTES);
    // Which halves of a pair's words hold tokens, of the first 8 and of the others.
    u32 keep_x = ALL, keep_y = ALL;
    if (edge && !Value::IS_STATIC) {
      const auto keep = [&](int token) -> u32 { return token >= low && token < high ? 0xffff : 0; };
      const int pair = first + t * 16 + 2 * c;
      keep_x = keep(pair) | keep(pair + 1) << 16; keep_y = keep(pair + 8) | keep(pair + 9) << 16;
      if constexpr (Value::IS_BF16)
#pragma unroll
        for (int i = 0; i < Value::WORDS; ++i) { x[i] &= keep_x; y[i] &= keep_y; }
    }
    uint2 of_rows = {};
    if constexpr (Value::ROW_WISE) {
      of_rows = lds64(unit + VALUE_SCALES_AT + Value::scale_at(t * 16 + g, 0));
      if (edge) {
        const int token = first + t * 16 + g;
        if (token < low || token >= high) of_rows.x = 0;
        if (token + 8 < low || token + 8 >= high) of_rows.y = 0;
      }
    }
    u32 p[TILES][2];
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      State& st = state[n];
      float weight[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weight[i] = exp2_of(s[n][t][i] * query[n].factor[i % 2] + st.offset[i % 2]);
        st.sum[i % 2] += weight[i];
        if constexpr (Value::ROW_WISE) {
          const u32 scale = i < 2 ? of_rows.x : of_rows.y;
          st.shift[i % 2] += weight[i] * high_half(scale);
          weight[i] *= low_half(scale);
        }
      }
      p[n][0] = transpose(Value::pack(weight[0], weight[1]));
      p[n][1] = transpose(Value::pack(weight[2], weight[3]));
    }
    u32 sx = 0, zx = 0, sy = 0, zy = 0;
#pragma unroll
    for (int step = 0; step < Value::STEPS; ++step) {
      if constexpr (Value::GROUPED) {
        if (step % (2 * Value::RUN) == 0) {                // a lane's channels of a run are of one group
          const int group = Value::value_channel(step, 0, g) / Value::SIZE;
          const uint4 of = lds128(unit + VALUE_SCALES_AT + Value::pair_at(t * 16, group, c));
          sx = mul_halves(of.x & keep_x, 0x60006000); zx = of.y & keep_x;
          sy = mul_halves(of.z & keep_y, 0x60006000); zy = of.w & keep_y;
        }
      }
      u32 a0, a1, a2, a3;
      Value::factors(x, step, sx, zx, a0, a1);
      Value::factors(y, step, sy, zy, a2, a3);
#pragma unroll
      for (int n = 0; n < TILES; ++n) Value::mma(state[n].o[step], a0, a1, a2, a3, p[n][0], p[n][1]);
    }
  }
}

struct Place { int sequence, tile, first, count, length; };    // of a tile: its queries are those from `first` on

// Which tile a block has: sequences' tiles follow one another, as many as their queries need.
__device__ __forceinline__ Place find(int tile, const int* starts, const int* lens, int batch, int queries, int group) {
  if (!starts) {
    const int each = (group + ROWS - 1) / ROWS, sequence = tile / each;
    if (sequence >= batch) return {-1, 0, 0, 0, 0};
    return {sequence, tile % each, sequence, 1, lens[sequence]};
  }
  const int lane = threadIdx.x % 32;
  for (int base = 0; base < batch; base += 32) {
    const int mine = base + lane, first = min(max(starts[min(mine, batch)], 0), queries);
    const int count = max(min(max(starts[min(mine + 1, batch)], 0), queries) - first, 0);
    const int tiles = (count * group + ROWS - 1) / ROWS;
    int end = tiles;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
      const int before = __shfl_up_sync(ALL, end, i);
      if (lane >= i) end += before;
    }
    const u32 found = __ballot_sync(ALL, tile < end);
    if (found) {
      const int of = __ffs(found) - 1, sequence = base + of;
      return {sequence, tile - __shfl_sync(ALL, end - tiles, of), __shfl_sync(ALL, first, of),
              __shfl_sync(ALL, count, of), lens[sequence]};
    }
    tile -= __shfl_sync(ALL, end, 31);
  }
  return {-1, 0, 0, 0, 0};
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
decode_attention_mma(const u16* query,              // 16-bit [queries, kv_heads * group, D]
                     const unsigned char* pages,    // uint8 [num_pages, kv_heads, page bytes]
                     const int* table,              // int32 [batch, table_pages], rows table_stride apart
                     const int* lens,               // int32 [batch]
                     const int* starts,             // int32 [batch + 1]: cu_query_lens, or null: one query each
                     void* out,                     // [queries, kv_heads * group, D], 16-bit or int8
                     float* lse,                    // float32 [queries, kv_heads * group] or null
                     float* parts,                  // float32 [splits, queries * kv_heads * group, D]
                     float4* weights,               // float32 [splits, queries * kv_heads * group, 4]
                     const float* key_channels,     // float32 [3, kv_heads, D] or null
                     const u16* key_fixed,          // fp16 [kv_heads, KEY_GROUPS, 2] or null
                     const float* value_channels,   // float32 [3, kv_heads, D] or null
                     const u16* value_fixed,        // fp16 [kv_heads, VALUE_GROUPS, 2] or null
                     const float* sinks,            // float32 [kv_heads * group] or null
                     const float* slopes,           // float32 [kv_heads * group] or null
                     const float* out_scale,        // float32 [1] of int8 output, or null
                     int queries, int batch, int kv_heads, int group, int table_stride, int table_pages, int num_pages,
                     int tiles, int splits, int window, float softcap, float scale) {
  extern __shared__ __align__(128) unsigned char memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int of_rows = warp % ROW_WARPS, of_tokens = warp / ROW_WARPS;
#if __CUDA_ARCH__ >= 900
  wait_for_grid();
#endif
  const int split = blockIdx.x / tiles % splits, kv = blockIdx.x / tiles / splits, heads = kv_heads * group;
  const Output output = {out, lse, value_channels, value_fixed, sinks, out_scale, kv_heads, group, softcap > 0.f};
  const u64 all_rows = (u64)queries * heads;
  if (starts && splits == 1 && blockIdx.x % tiles == 0) {  // queries of no sequence, of which nobody else knows
    Row nothing;
    nothing.clear();
    Output without = output;
    without.sinks = nullptr;
    const int ahead = min(max(starts[0], 0), queries), behind = min(max(starts[batch], ahead), queries);
    for (int i = warp; i < (queries - behind + ahead) * group; i += WARPS) {
      const int query = i < ahead * group ? i / group : i / group - ahead + behind;
      without.write((u64)query * heads + kv * group + i % group, nothing);
    }
  }
  const Place place = find(blockIdx.x % tiles, starts, lens, batch, queries, group);
  if (place.sequence < 0) return;
  const int length = min(max(place.length, 0), table_pages * PAGE_TOKENS), before = length - place.count;
  const int rows = min(ROWS, place.count * group - place.tile * ROWS), first_row = place.tile * ROWS;
  // A query's row among all heads of all queries.
  const auto row_at = [&](int r) -> u64 {
    return (u64)(place.first + (first_row + r) / group) * heads + kv * group + (first_row + r) % group;
  };
  // The tokens that the rows see, of which each sees a part.
  const int first_place = before + first_row / group, last_place = before + (first_row + rows - 1) / group;
  const int low = window ? max(first_place - window + 1, 0) : 0, high = last_place + 1;
  const int least = max(first_place + 1, 0), seen_by_all = window ? max(last_place - window + 1, 0) : 0;
  const int first_unit = low / UNIT, units = max((high + UNIT - 1) / UNIT - first_unit, 0);
  const int share = max((units + splits - 1) / splits, LEAST * TOKEN_WARPS);
  const int begin = first_unit + min(split * share, units), end = first_unit + min((split + 1) * share, units);

  if (begin == end && splits > 1) {
    for (int r = threadIdx.x; r < rows; r += WARPS * 32)
      weights[split * all_rows + row_at(r)] = make_float4(NONE, 0.f, 0.f, 0.f);
    return;
  }

  Query q[TILES];
  State state[TILES];
  const Extras extras = {slopes, softcap, window};
  const int count = max(end - begin - of_tokens + TOKEN_WARPS - 1, 0) / TOKEN_WARPS;
  const u32 ring = shared_address(memory) + of_tokens * RING_BYTES;
  const int* const of_table = table + (u64)place.sequence * table_stride;
  const auto page_of = [&](int j) -> u32 {
    const int unit = begin + of_tokens + min(j, count - 1) * TOKEN_WARPS;
    return min((u32)__ldg(of_table + unit / UNITS_OF_PAGE), (u32)num_pages - 1);
  };
  const auto copy = [&](int j, u32 page) {
    const int unit = begin + of_tokens + j * TOKEN_WARPS;
    const unsigned char* from =
        pages + (((u64)page * kv_heads + kv) * UNITS_OF_PAGE + unit % UNITS_OF_PAGE) * UNIT_BYTES;
    const u32 to = ring + j % STAGES * UNIT_BYTES;
#pragma unroll
    for (int i = 0; i < UNIT_BYTES; i += ROW_WARPS * 512) {
      const int at = i + (of_rows * 32 + lane) * 16;
      if (at < UNIT_BYTES) copy_async(to + at, from + at);
    }
  };
  u32 next = 0;
  if (count > 0) {
#pragma unroll
    for (int j = 0; j < STAGES - 1; ++j) {
      if (j < count) copy(j, page_of(j));
      commit_copies();
    }
    next = page_of(STAGES - 1);
  }
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    const int tile = (of_rows * TILES + n) * 8;
    prepare(q[n], tile + g < rows ? query + row_at(tile + g) * D : nullptr,
            key_channels ? key_channels + kv * D : nullptr, kv_heads, key_fixed + 2 * kv * KEY_GROUPS, scale);
    State& st = state[n];
#pragma unroll
    for (int i = 0; i < D / 16; ++i) st.o[i][0] = st.o[i][1] = st.o[i][2] = st.o[i][3] = 0.f;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int r = min(tile + 2 * c + k, rows - 1), token = before + (first_row + r) / group;
      q[n].to[k] = token + 1;
      q[n].from[k] = window ? token - window + 1 : 0;
      q[n].slope[k] = slopes ? slopes[kv * group + (first_row + r) % group] * LOG2E : 0.f;
      q[n].factor[k] = extras.change_scores() ? 1.f : q[n].raw[k];
      q[n].margin[k] = MARGIN * inverse(q[n].factor[k]);
      st.top[k] = st.limit[k] = NONE;
      st.offset[k] = st.sum[k] = st.shift[k] = 0.f;
    }
  }
  for (int j = 0; j < count; ++j) {
    wait_for_copies<STAGES - 2>();
    meet(of_tokens);                                       // the unit is there, and the one before it has been read
    if (j + STAGES - 1 < count) {
      copy(j + STAGES - 1, next);
      next = page_of(j + STAGES);
    }
    commit_copies();
    const int first = (begin + of_tokens + j * TOKEN_WARPS) * UNIT;
    const bool edge = first < seen_by_all || first + UNIT > least;
    if (of_rows * TILES * 8 < rows)                        // others only fill the ring
      attend(ring + j % STAGES * UNIT_BYTES, first, edge, low, high, extras, q, state);
  }
  __syncthreads();                                         // rings become pieces
#if __CUDA_ARCH__ >= 900
  launch_dependents();
#endif
  float* const pieces = (float*)memory + of_tokens * ROWS * PITCH;
  float4* const of_pieces = (float4*)(memory + WEIGHTS_AT);
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    const State& st = state[n];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float sum = warp_sum(st.sum[k], 4), shift = warp_sum(st.shift[k], 4);
      const int row = (of_rows * TILES + n) * 8 + 2 * c + k;
      float* to = pieces + row * PITCH;
#pragma unroll
      for (int t = 0; t < D / 16; ++t)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float step = Value::IS_BF16 || Value::GROUPED ? 1.f : Value::BITS == 4 && h ? 1048576.f : 16777216.f;
          to[Value::value_channel(t, h, g)] = st.o[t][k + 2 * h] * step + shift;
        }
      const float most = sum == 0.f ? NONE : -st.offset[k];
      if (g == 0) of_pieces[of_tokens * ROWS + row] = make_float4(most, sum, q[n].shift[k], 0.f);
    }
  }
  __syncthreads();
  for (int r = warp; r < rows; r += WARPS) {
    Row row;
    row.clear();
    float4 of[TOKEN_WARPS];
#pragma unroll
    for (int i = 0; i < TOKEN_WARPS; ++i) {
      of[i] = of_pieces[i * ROWS + r];
      row.most = fmaxf(row.most, of[i].x);
    }
    row.shift = of[0].z;
#pragma unroll
    for (int i = 0; i < TOKEN_WARPS; ++i) {
      if (of[i].x == NONE) continue;
      const float by = exp2_of(of[i].x - row.most);
      row.add((const float*)memory + (i * ROWS + r) * PITCH, by);
      row.sum += by * of[i].y;
    }
    if (splits == 1) {
      output.write(row_at(r), row);
      continue;
    }
    const u64 at = split * all_rows + row_at(r);
    if (lane == 0) weights[at] = make_float4(row.most, row.sum, row.shift, 0.f);
    if (row.most != NONE)
#pragma unroll
      for (int i = 0; i < PAIRS; ++i)
        if (lane + 32 * i < D / 2) *(float2*)(parts + at * D + 2 * (lane + 32 * i)) = row.v[i];
  }
}
