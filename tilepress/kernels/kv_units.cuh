// A unit of a paged cache, UNIT tokens of one KV head in shared memory, against its query heads, by one warp: an online
// softmax over products of the tensor core.
//
// Keys are the left factor of an m16n8k16 product, 8 query heads the right one, so that codes enter the tensor core as
// they lie in the page: a code of 4 or 8 bits in a half is a denormal of float16, exact; powers of two are undone in
// the query and at the end. Scales of a row multiply scores and probabilities (row-wise), or codes (groups). Fixed
// scales are folded into query and output.
//
// Macros: D 64 | 128; BITS 4 | 8 | 16; GROUPS of scales; STATIC 0 | 1; TILES of 8 query heads that share a unit; BF16:
// of the query; ROTATE 0 | 1; UNIT 32 | 64, or 16 of 16 bits.

#include "attention_math.cuh"

#define CODE_BYTES (D * BITS / 8)
#define DYNAMIC (!STATIC && BITS < 16)
#define ROW_WISE (DYNAMIC && GROUPS == 1)
#define GROUPED (DYNAMIC && GROUPS > 1)
#define ROW_BYTES (CODE_BYTES + (DYNAMIC ? 4 * GROUPS : 0))
#define UNIT_BYTES (2 * UNIT * ROW_BYTES)
#define UNITS_OF_PAGE (64 / UNIT)
// Tokens whose planes follow one another: keys' codes, values' codes, keys' scales, values' scales.
#define RUN (UNIT < 32 ? UNIT : 32)
#define RUNS (UNIT / RUN)
#define TILES_OF_RUN (RUN / 16)
#define RUN_BYTES (2 * RUN * ROW_BYTES)
#define VALUES_AT (RUN * CODE_BYTES)
#define KEY_SCALES_AT (2 * RUN * CODE_BYTES)
#define VALUE_SCALES_AT (KEY_SCALES_AT + RUN * 4 * GROUPS)
#define WORDS (CODE_BYTES / 16)               // of a lane, of 8 tokens
#define HEADS (8 * TILES)
// A running maximum may be so much too small (log2): probabilities up to 2^(MARGIN + LIFT).
#define MARGIN 2.f
// As large as float16 allows: what is far below the largest must not vanish. Row-wise it is multiplied by scales, up to
// 511 of 4 bits and 63 of 8.
#define LIFT (ROW_WISE ? BITS == 4 ? 5.f : 8.f : BITS == 16 ? 2.f : 12.f)

// Codes in halves are CODE times a float16 denormal's step of 2^-24, those in the upper nibble 16 times as much. The
// query carries up to 2^14 / 2^10.
#if BITS == 4 && !GROUPED
#define EVEN 14
#define ODD 10
#define LOW_STEP 16777216.f
#define HIGH_STEP 1048576.f
#elif BITS == 8
#define EVEN 14
#define ODD 14
#define LOW_STEP 16777216.f
#define HIGH_STEP 16777216.f
#else
#define EVEN 10
#define ODD 10
#define LOW_STEP 1.f
#define HIGH_STEP 1.f
#endif
#define SCORE (GROUPED ? -10 : 10)            // scores are 2^SCORE times too small

#if BITS == 16
#define FACTORS "bf16"
#else
#define FACTORS "f16"
#endif
__device__ __forceinline__ u32 to_factors(float low, float high) {
  u32 r;
  asm("cvt.rn." FACTORS "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." FACTORS "." FACTORS
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// A lane's words of 8 tokens' codes, keys or values; formats/kv_pages.py has the order of pages.
template <bool KEY> __device__ __forceinline__ void load_words(u32 (&w)[WORDS], u32 at) {
  const int lane = threadIdx.x % 32;
  if (CODE_BYTES == 32) {
    const uint2 v = lds64(at + (KEY ? lane * 8 : lane / 8 * 64 + lane % 4 * 16 + lane / 4 % 2 * 8));
    w[0] = v.x; w[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < WORDS / 4; ++i) {
      const uint4 v = lds128(at + i * 512 + lane * 16);
      w[4 * i] = v.x; w[4 * i + 1] = v.y; w[4 * i + 2] = v.z; w[4 * i + 3] = v.w;
    }
  }
}

// The channel of the output that register 0 of an even tile t belongs to; registers 0 and 2 of tiles t and t + 1 have
// four neighbours.
__device__ __forceinline__ int channel_of(int t) {
  const int g = threadIdx.x % 32 / 4;
  if (D == 128) return 16 * g + 2 * t;
  return BITS == 4   ? 8 * g + 2 * t
         : BITS == 8 ? 16 * (g % 4) + 8 * (g / 4) + 2 * t
                     : 16 * (g % 4) + 4 * (g / 4) + 4 * t;
}

// The first of 8 channels of keys, the j-th that a lane has.
__device__ __forceinline__ int key_channel(int j) {
  const int c = threadIdx.x % 4;
  return BITS == 4 ? c * (D / 4) + j * 8 : BITS == 8 ? j / 2 * 64 + c * 16 + j % 2 * 8 : j * 32 + c * 8;
}

// Of 8 query heads. `q` are right factors of head lane / 4, the rest is of heads 2 (lane % 4) + {0, 1}.
struct Query { u32 q[D / 8]; float sum[2], factor[2], margin[2]; };   // a score times `factor` is in log2 units
struct State { float o[D / 16][4], top[2], limit[2], offset[2], sum[2], shift[2]; };

__device__ __forceinline__ u32 low_codes(u32 v) {
#if GROUPED
  return mul_halves(v & 0x000f000f, 0x78007800);           // 2^-24 code to 2^-9 code
#else
  return v & 0x000f000f;
#endif
}
__device__ __forceinline__ u32 high_codes(u32 v) {
#if GROUPED
  return mul_halves(v & 0x00f000f0, 0x68006800);
#else
  return v & 0x00f000f0;
#endif
}

// Keys of 16 tokens, words x of the first 8 and y of the others, with a query head's.
__device__ __forceinline__ void multiply_keys(float (&s)[4], const u32 (&x)[WORDS], const u32 (&y)[WORDS],
                                              u32 first_scale, u32 second_scale, const Query& query) {
#if GROUPED
  const u32 sx = mul_halves(__byte_perm(first_scale, 0, 0x1010), 0x60006000), zx = __byte_perm(first_scale, 0, 0x3232);
  const u32 sy = mul_halves(__byte_perm(second_scale, 0, 0x1010), 0x60006000),
            zy = __byte_perm(second_scale, 0, 0x3232);
#endif
#pragma unroll
  for (int w = 0; w < WORDS; ++w) {
#if BITS == 16
    if (w % 2 == 0) mma(s, x[w], y[w], x[w + 1], y[w + 1], query.q[w], query.q[w + 1]);
#elif BITS == 8
    mma(s, __byte_perm(x[w], 0, 0x4140), __byte_perm(y[w], 0, 0x4140), __byte_perm(x[w], 0, 0x4342),
        __byte_perm(y[w], 0, 0x4342), query.q[2 * w], query.q[2 * w + 1]);
#else
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 a = x[w] >> 8 * i, b = y[w] >> 8 * i;
#if GROUPED
      mma(s, fma_halves(low_codes(a), sx, zx), fma_halves(low_codes(b), sy, zy), fma_halves(high_codes(a), sx, zx),
          fma_halves(high_codes(b), sy, zy), query.q[4 * w + 2 * i], query.q[4 * w + 2 * i + 1]);
#else
      mma(s, low_codes(a), low_codes(b), high_codes(a), high_codes(b), query.q[4 * w + 2 * i],
          query.q[4 * w + 2 * i + 1]);
#endif
    }
#endif
  }
}

// Values of 16 tokens times their probabilities.
__device__ __forceinline__ void multiply_values(float (&o)[D / 16][4], const u32 (&x)[WORDS], const u32 (&y)[WORDS],
                                                const uint4& scales, u32 p0, u32 p1) {
#if GROUPED
  const u32 sx = mul_halves(scales.x, 0x60006000), zx = scales.y, sy = mul_halves(scales.z, 0x60006000), zy = scales.w;
#endif
#pragma unroll
  for (int w = 0; w < WORDS; ++w) {
#if BITS == 16
    if (w % 2 == 0) mma(o[w / 2], x[w], x[w + 1], y[w], y[w + 1], p0, p1);
#elif BITS == 8
    mma(o[w], __byte_perm(x[w], 0, 0x4140), __byte_perm(x[w], 0, 0x4342), __byte_perm(y[w], 0, 0x4140),
        __byte_perm(y[w], 0, 0x4342), p0, p1);
#else
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 a = x[w] >> 8 * i, b = y[w] >> 8 * i;
#if GROUPED
      mma(o[2 * w + i], fma_halves(low_codes(a), sx, zx), fma_halves(high_codes(a), sx, zx),
          fma_halves(low_codes(b), sy, zy), fma_halves(high_codes(b), sy, zy), p0, p1);
#else
      mma(o[2 * w + i], low_codes(a), high_codes(a), low_codes(b), high_codes(b), p0, p1);
#endif
    }
#endif
  }
}

// Scores of places that hold no token go; so does what could turn a probability of 0 into NaN.
__device__ __forceinline__ void mask(float (&s)[TILES][UNIT / 16][4], u32 unit, int valid) {
  const int lane = threadIdx.x % 32, g = lane / 4;
#pragma unroll
  for (int n = 0; n < TILES; ++n)
#pragma unroll
    for (int t = 0; t < UNIT / 16; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (t * 16 + i / 2 * 8 + g >= valid) s[n][t][i] = __int_as_float(0xff800000);
  __syncwarp();
#if ROW_WISE
#pragma unroll
  for (int r = 0; r < RUNS; ++r)
    if (r * 32 + lane >= valid) sts32(unit + r * RUN_BYTES + VALUE_SCALES_AT + lane % 8 * 16 + lane / 8 * 4, 0);
#elif GROUPED
  for (int k = 0; k < 2 * GROUPS * RUNS; ++k)               // scale and shift: a half each in their pair of tokens
    if (k / (2 * GROUPS) * 32 + lane >= valid)
      sts16_if(unit + k / (2 * GROUPS) * RUN_BYTES + VALUE_SCALES_AT + lane / 16 * (GROUPS * 64) + k / 2 % GROUPS * 64 +
                   lane % 8 / 2 * 16 + lane / 8 % 2 * 8 + k % 2 * 4 + lane % 2 * 2,
               0, true);
#elif BITS == 16
  for (int t = valid / 8; t < UNIT / 8; ++t) {
    const int token = t * 8 + lane % 4 * 2;
    const u32 keep = (token < valid ? 0xffff : 0) | (token + 1 < valid ? 0xffff0000 : 0);
    for (int i = 0; i < WORDS; ++i) {
      const u32 at = unit + t / (RUN / 8) * RUN_BYTES + VALUES_AT + t % (RUN / 8) * 8 * CODE_BYTES + i / 4 * 512 +
                     lane * 16 + i % 4 * 4;
      sts32(at, lds32(at) & keep);
    }
  }
#endif
  fence_async();                                           // before the next copy into the unit
  __syncwarp();
}

// UNIT tokens of one KV head against its query heads, by one warp.
__device__ __forceinline__ void attend(u32 unit, int valid, const Query (&query)[TILES], State (&state)[TILES]) {
  const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  float s[TILES][UNIT / 16][4];
  u32 scales[4 * RUNS] = {};                               // of a lane's token of every 8
  const auto load_scales = [&](u32 at) {
#pragma unroll
    for (int r = 0; r < RUNS; ++r) {
      const uint4 v = lds128(at + r * RUN_BYTES);
      scales[4 * r] = v.x; scales[4 * r + 1] = v.y; scales[4 * r + 2] = v.z; scales[4 * r + 3] = v.w;
    }
  };
  const auto tile_at = [&](int t) -> u32 {
    return unit + t / TILES_OF_RUN * RUN_BYTES + t % TILES_OF_RUN * 16 * CODE_BYTES;
  };
  if (DYNAMIC) load_scales(unit + KEY_SCALES_AT + g * 16 * GROUPS + c * GROUPS / 4 * 16);
#pragma unroll
  for (int t = 0; t < UNIT / 16; ++t) {
    u32 x[WORDS], y[WORDS];
    load_words<true>(x, tile_at(t));
    load_words<true>(y, tile_at(t) + 8 * CODE_BYTES);
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      float (&mine)[4] = s[n][t];
      mine[0] = mine[1] = mine[2] = mine[3] = 0.f;
      multiply_keys(mine, x, y, scales[2 * t], scales[2 * t + 1], query[n]);
      if (ROW_WISE) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          mine[i] = mine[i] * low_half(scales[2 * t + i / 2]) + high_half(scales[2 * t + i / 2]) * query[n].sum[i % 2];
      }
    }
  }
  if (valid < UNIT) mask(s, unit, valid);
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
      const float higher = fmaxf(warp_max(top[k], 4), st.top[k]),
                  shrink = exp2_of((st.top[k] - higher) * query[n].factor[k]);
#pragma unroll
      for (int t = 0; t < D / 16; ++t) { st.o[t][k] *= shrink; st.o[t][k + 2] *= shrink; }
      st.sum[k] *= shrink; st.shift[k] *= shrink;
      st.top[k] = higher; st.limit[k] = higher + query[n].margin[k]; st.offset[k] = LIFT - higher * query[n].factor[k];
    }
  }
  if (ROW_WISE) load_scales(unit + VALUE_SCALES_AT + g * 16);
#pragma unroll
  for (int t = 0; t < UNIT / 16; ++t) {
    u32 x[WORDS], y[WORDS];
    load_words<false>(x, tile_at(t) + VALUES_AT);
    load_words<false>(y, tile_at(t) + VALUES_AT + 8 * CODE_BYTES);
    uint4 of_groups = {};
    if (GROUPED)
      of_groups = lds128(unit + t / TILES_OF_RUN * RUN_BYTES + VALUE_SCALES_AT + t % TILES_OF_RUN * GROUPS * 64 +
                         g * GROUPS / 8 * 64 + c * 16);
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      State& st = state[n];
      float p[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p[i] = exp2_of(s[n][t][i] * query[n].factor[i % 2] + st.offset[i % 2]);
        st.sum[i % 2] += p[i];
        if (ROW_WISE) {
          st.shift[i % 2] += p[i] * high_half(scales[2 * t + i / 2]);
          p[i] *= low_half(scales[2 * t + i / 2]);
        }
      }
      multiply_values(st.o, x, y, of_groups, transpose(to_factors(p[0], p[1])), transpose(to_factors(p[2], p[3])));
    }
  }
}

__device__ __forceinline__ void hadamard(float (&v)[D / 4]) {
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int step = 1; step < D / 4; step *= 2)
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
  for (int k = 0; k < D / 4; ++k) v[k] *= D == 64 ? 0.125f : 0.08838834764831845f;
}

// From a lane's channels of head lane / 4, two in each of `raw`, as memory has them: times the keys' calibrated scale,
// rotated, times their fixed scale.
__device__ __forceinline__ Query prepare(const u32 (&raw)[D / 8], const float* channels, const u16* fixed,
                                         float scale) {
  Query query;
  float v[D / 4];
#pragma unroll
  for (int k = 0; k < D / 4; ++k) v[k] = to_float((u16)(raw[k / 2] >> 16 * (k % 2)));
  if (channels) {
#pragma unroll
    for (int k = 0; k < D / 4; k += 4) {
      const float4 by = *(const float4*)(channels + key_channel(k / 8) + k % 8);
      v[k] *= by.x; v[k + 1] *= by.y; v[k + 2] *= by.z; v[k + 3] *= by.w;
    }
  }
  if (ROTATE) hadamard(v);
  if (STATIC) {
#pragma unroll
    for (int k = 0; k < D / 4; ++k) v[k] *= half_to_float(fixed[2 * (key_channel(k / 8) * GROUPS / D)]);
  }
#if BITS == 16
#pragma unroll
  for (int k = 0; k < D / 8; ++k) query.q[k] = to_factors(v[2 * k], v[2 * k + 1]);
  query.sum[0] = query.sum[1] = 0.f;
  query.factor[0] = query.factor[1] = scale * LOG2E;
#else
  float most = 0.f, sum = 0.f;
#pragma unroll
  for (int k = 0; k < D / 4; ++k) most = fmaxf(most, fabsf(v[k]));
  most = warp_max(most, 1, 4);
  const int e = min(max((int)(__float_as_uint(most) >> 23) - 126, -100), 100);       // |q| < 2^e
  const float even = power_of_two(EVEN - e), odd = power_of_two(ODD - e);
#pragma unroll
  for (int k = 0; k < D / 8; ++k) {
    if (BITS == 8) {
      query.q[k] = to_factors(v[2 * k] * even, v[2 * k + 1] * even);
    } else {  // a word of 8 codes gives channels (0, 4), (1, 5), (2, 6), (3, 7)
      const int first = k / 4 * 8 + k % 4;
      const float by = k % 2 ? odd : even;
      query.q[k] = to_factors(v[first] * by, v[first + 4] * by);
    }
    // Of what is multiplied.
    sum += (low_half(query.q[k]) + high_half(query.q[k])) * (BITS == 8 || k % 2 == 0 ? 1.f : power_of_two(EVEN - ODD));
  }
  sum = warp_sum(sum, 1, 4) * power_of_two(-SCORE - EVEN);
  const float factor = scale * LOG2E * power_of_two(SCORE + e);
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const int lane = 4 * (threadIdx.x % 4 * 2 + k);
    query.sum[k] = __shfl_sync(ALL, sum, lane);
    query.factor[k] = __shfl_sync(ALL, factor, lane);
  }
#endif
  query.margin[0] = MARGIN * inverse(query.factor[0]); query.margin[1] = MARGIN * inverse(query.factor[1]);
  return query;
}
