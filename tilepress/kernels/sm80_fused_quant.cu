// Rows of 16-bit numbers, normalized or through an activation, to int8 codes: one pass, a row in the registers of a
// block, two numbers in each.
//
// What OP makes of a row is rounded to 16 bits where transformers' own modules round; then codes = round(value / scale
// + zero point), half to even, saturated, with the quotient rounded as a division's. Scale: given for all rows, or of
// each row absmax / 127.5 (float32's epsilon for a row of zeros), or given of each row, found so from a longer row that
// this is part of. NaN and infinities give a row the scale NaN or infinity, and so NaN in all that is multiplied with
// it; with a scale given for all rows NaN becomes the code 0, infinities saturate. Without CODES the row is stored as
// it is, in 16 bits.
//
// Several blocks share a row of which nothing has to be found: SiLU's products without CODES.
//
// Macros: OP, one of those below; CODES 0 | 1; STATIC 0: scales are found | 1: one is given | 2: one of each row is
// given; THREADS; V times 8 elements a thread; PIECES of a row, a block each; VECTORS 0 | 1: rows are read in 16 bytes,
// or element by element (any length, any alignment); BLOCKS of a multiprocessor; BF16.

#include "scales.cuh"

enum { QUANTIZE, RMS_NORM, ADD_RMS_NORM, LAYER_NORM, ADD_LAYER_NORM, SILU_MUL, RELU, GELU, GELU_TANH, GELU_NEW };
#define ADDS (OP == ADD_RMS_NORM || OP == ADD_LAYER_NORM)
#define IS_RMS (OP == RMS_NORM || OP == ADD_RMS_NORM)
#define IS_LAYER (OP == LAYER_NORM || OP == ADD_LAYER_NORM)
#define WARPS (THREADS / 32)

// Pairs of values. Sums and products are rounded once, as those of float32 that are rounded to 16 bits are: they fit
// float32, or are far from a tie.
__device__ __forceinline__ float low(u32 pair) { return to_float((u16)pair); }
__device__ __forceinline__ float high(u32 pair) {
  return BF16 ? __uint_as_float(pair & 0xffff0000) : to_float((u16)(pair >> 16));
}
__device__ __forceinline__ u32 fused(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn." VALUES "x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
__device__ __forceinline__ u32 product(u32 a, u32 b) { return fused(a, b, 0x80008000); }
__device__ __forceinline__ u32 sum(u32 a, u32 b) { return fused(a, BF16 ? 0x3f803f80 : 0x3c003c00, b); }
__device__ __forceinline__ u32 largest(u32 a, u32 b) {
  u32 r;
  asm("max.NaN." VALUES "x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ float rounded(float v) { return to_float((u16)to_values(v, 0.f)); }

struct Affine;

struct Row {  // a thread's part of a row: V times 8 elements, zeros beyond the row's end
  u32 pairs[V][4];

  static __device__ __forceinline__ int at(int part, int i) {
    if (PIECES > 1) part += blockIdx.x % PIECES * V;
    return VECTORS ? (part * THREADS + threadIdx.x) * 8 + i : (part * 8 + i) * THREADS + threadIdx.x;
  }

  static __device__ __forceinline__ void load(u32 (&to)[4], const u16* from, int part, int n) {
    if (VECTORS) {
      uint4 q = make_uint4(0, 0, 0, 0);
      if (at(part, 0) < n) q = *(const uint4*)(from + at(part, 0));
      to[0] = q.x; to[1] = q.y; to[2] = q.z; to[3] = q.w;
    } else {
#pragma unroll
      for (int i = 0; i < 8; i += 2)
        to[i / 2] = (at(part, i) < n ? from[at(part, i)] : 0) | (at(part, i + 1) < n ? from[at(part, i + 1)] : 0) << 16;
    }
  }
  __device__ __forceinline__ void load(const u16* from, int n) {
#pragma unroll
    for (int part = 0; part < V; ++part) load(pairs[part], from, part, n);
  }
  __device__ __forceinline__ void store(u16* to, int n) const {
#pragma unroll
    for (int part = 0; part < V; ++part) {
      const u32* p = pairs[part];
      if (VECTORS) {
        if (at(part, 0) < n) *(uint4*)(to + at(part, 0)) = make_uint4(p[0], p[1], p[2], p[3]);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (at(part, i) < n) to[at(part, i)] = p[i / 2] >> i % 2 * 16;
      }
    }
  }
  // pair = f(pair, those of other rows)
  template <class F> __device__ __forceinline__ void each(F f) {
#pragma unroll
    for (int part = 0; part < V; ++part)
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[part][i] = f(pairs[part][i]);
  }
  template <class F> __device__ __forceinline__ void each(const Row& other, F f) {
#pragma unroll
    for (int part = 0; part < V; ++part)
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[part][i] = f(pairs[part][i], other.pairs[part][i]);
  }
  template <class F> __device__ __forceinline__ void each(Affine& of, F f) {
#pragma unroll
    for (int part = 0; part < V; ++part) {
      if (V > 1) of.load(part);
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[part][i] = f(pairs[part][i], of.w[i], of.b[i]);
    }
  }
  // The sum of f(value) over the thread's elements of the row.
  template <class F> __device__ __forceinline__ float total(int n, F f) const {
    float sum = 0.f;
#pragma unroll
    for (int part = 0; part < V; ++part)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (at(part, VECTORS ? 0 : 2 * i) < n) sum += f(low(pairs[part][i]));
        if (at(part, VECTORS ? 0 : 2 * i + 1) < n) sum += f(high(pairs[part][i]));
      }
    return sum;
  }
  __device__ __forceinline__ float most() const {
    u32 found = 0;
#pragma unroll
    for (int part = 0; part < V; ++part)
#pragma unroll
      for (int i = 0; i < 4; ++i) found = largest(found, pairs[part][i] & 0x7fff7fff);
    return low(largest(found, found >> 16));
  }
};

struct Affine {  // weight and bias, brought a part of a row at a time; one that is alone early
  const u16 *weight, *bias; int n;
  u32 w[4], b[4] = {};

  __device__ __forceinline__ void load(int part) {
    Row::load(w, weight, part, n);
    if (bias) Row::load(b, bias, part, n);
  }
};

struct Sum { static __device__ __forceinline__ float of(float a, float b) { return a + b; } };
struct Max {
  static __device__ __forceinline__ float of(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
  }
};

// Over the block's threads, in all of them; what is reduced is at least 0, or a sum. `place`: each call has 32 floats
// of its own.
template <class How> __device__ __forceinline__ float all(float v, float* place) {
#pragma unroll
  for (int i = 16; i; i /= 2) v = How::of(v, __shfl_xor_sync(~0u, v, i));
  if (WARPS == 1) return v;
  if (threadIdx.x % 32 == 0) place[threadIdx.x / 32] = v;
  __syncthreads();
  v = threadIdx.x % 32 < WARPS ? place[threadIdx.x % 32] : 0.f;
#pragma unroll
  for (int i = 16; i; i /= 2) v = How::of(v, __shfl_xor_sync(~0u, v, i));
  return v;
}

// round(x / scale + zero_point), the quotient correctly rounded (Markstein): the reciprocal is, and the remainder is
// exact. With one scale that is given, quotients far beyond the codes are only as far beyond them, infinities too: else
// their remainder were NaN.
__device__ __forceinline__ int code(float x, float scale, float reciprocal, float zero_point) {
  float q = __fmul_rn(x, reciprocal);
  if (STATIC == 1) q = fminf(fmaxf(q, -1e4f), 1e4f);
  q = __fmaf_rn(__fmaf_rn(-q, scale, x), reciprocal, q);
  return __float2int_rn(STATIC == 1 ? __fadd_rn(q, zero_point) : q);
}
// Two codes, saturated, in the low bytes, and c's low half above them.
__device__ __forceinline__ u32 packed(int first, int second, u32 c) {
  u32 r;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(second), "r"(first), "r"(c));
  return r;
}

// SCALED: both the values and the scale are multiplied by `factor` before, a power of two.
template <bool SCALED>
__device__ __forceinline__ void write_codes(const Row& row, i8* to, int n, float scale, float factor,
                                            float zero_point) {
  if (SCALED) scale *= factor;
  const float reciprocal = __frcp_rn(scale);
  const auto of = [&](float v) { return code(SCALED ? v * factor : v, scale, reciprocal, zero_point); };
#pragma unroll
  for (int part = 0; part < V; ++part) {
    const u32* p = row.pairs[part];
    if (VECTORS && Row::at(part, 0) >= n) continue;
    u32 words[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      words[i] = packed(of(low(p[2 * i])), of(high(p[2 * i])),
                        packed(of(low(p[2 * i + 1])), of(high(p[2 * i + 1])), 0));
    if (VECTORS) {
      *(uint2*)(to + Row::at(part, 0)) = make_uint2(words[0], words[1]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (Row::at(part, i) < n) to[Row::at(part, i)] = words[i / 4] >> i % 4 * 8;
    }
  }
}

// x / (1 + e^-y).
__device__ __forceinline__ float sigmoid_product(float x, float y) { return __fdividef(x, 1.f + __expf(-y)); }

__device__ __forceinline__ float activation(float x) {
  constexpr float ROOT = 0.79788456080286535588f, CUBE = 0.044715f;       // root of 2 / pi
  if (OP == RELU) return x > 0.f || x != x ? x : 0.f;
  if (OP == GELU) return x * 0.5f * (1.f + erff(x * 0.70710678118654752440f));
  // (1 + tanh(u)) / 2 = sigmoid(2 u).
  if (OP == GELU_TANH) return sigmoid_product(x, 2.f * ROOT * (x + CUBE * x * x * x));
  if (OP == GELU_NEW) {                       // transformers' NewGELUActivation: a module of many operations
    const float inner = rounded(ROOT * rounded(x + rounded(CUBE * rounded(rounded(x * x) * x))));
    return rounded(0.5f * x) * rounded(1.f + rounded(sigmoid_product(2.f, 2.f * inner) - 1.f));
  }
  return sigmoid_product(x, x);               // SiLU
}
__device__ __forceinline__ u32 activated(u32 pair) { return to_values(activation(low(pair)), activation(high(pair))); }

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
fused_quant(const u16* x,                           // 16-bit [rows, n], SILU_MUL: [rows, 2 n]
            const u16* residual,                    // 16-bit [rows, n], of what adds
            const u16* weight,                      // 16-bit [n], of norms
            const u16* bias,                        // 16-bit [n], of LAYER_NORM
            const void* scale,                      // [1] or [rows] of scale_kind, null where scales are found
            int scale_kind,
            const i8* zero_point,                   // int8 [1] or null
            i8* codes,                              // int8 [rows, n], without CODES 16-bit
            float* scales,                          // float32 [rows] or [1]
            u16* total,                             // 16-bit [rows, n]: x + residual
            int n, float eps) {
  __shared__ float places[3][32];
#if __CUDA_ARCH__ >= 900
  // Rows: a product behind this can load its weights, on multiprocessors that are free or have room.
  const bool are_few = gridDim.x <= 32 * PIECES;
  if (are_few) launch_dependents();
  if (are_few && (IS_RMS || IS_LAYER))
    for (int i = threadIdx.x * 64; i < n; i += THREADS * 64) prefetch_line(weight + i);
  wait_for_grid();
#endif
  const u64 mine = (u64)(blockIdx.x / PIECES) * n;
  Row row, other;                             // other: residual, or `up`
  row.load(x + mine * (OP == SILU_MUL ? 2 : 1), n);
  if (ADDS) other.load(residual + mine, n);
  if (OP == SILU_MUL) other.load(x + 2 * mine + n, n);
  Affine affine = {weight, IS_LAYER ? bias : nullptr, n};
  if (V == 1 && (IS_RMS || IS_LAYER)) affine.load(0);
#if __CUDA_ARCH__ >= 900
  if (!are_few) launch_dependents();          // earlier, the next kernel's blocks would be in the way of this one's
#endif
  if (ADDS) {
    row.each(other, sum);
    row.store(total + mine, n);
  }
  if (OP == SILU_MUL) row.each(other, [](u32 gate, u32 up) { return product(activated(gate), up); });
  if (OP >= RELU) row.each(activated);
  if (IS_RMS) {
    const float inverse = rsqrtf(all<Sum>(row.total(n, [](float v) { return v * v; }), places[0]) / n + eps);
    row.each(affine,
             [=](u32 pair, u32 w, u32) { return product(to_values(low(pair) * inverse, high(pair) * inverse), w); });
  }
  if (IS_LAYER) {
    const float mean = all<Sum>(row.total(n, [](float v) { return v; }), places[0]) / n;
    const float inverse = rsqrtf(
        all<Sum>(row.total(n, [=](float v) { return (v - mean) * (v - mean); }), places[1]) / n + eps);
    row.each(affine, [=](u32 pair, u32 w, u32 b) {
      return to_values((low(pair) - mean) * inverse * low(w) + low(b),
                       (high(pair) - mean) * inverse * high(w) + high(b));
    });
  }
  if (!CODES) return row.store((u16*)codes + mine, n);
  float by, zero = 0.f;
  if (STATIC) {
    by = Numbers{scale, scale_kind, STATIC - 1}[blockIdx.x];
    if (zero_point) zero = *zero_point;
  } else {
    by = all<Max>(row.most(), places[2]) / 127.5f;
    if (by == 0.f) by = 1.1920928955078125e-7f;
  }
  if (threadIdx.x == 0 && (STATIC != 1 || blockIdx.x == 0)) scales[blockIdx.x] = by;
  if (by > 1e-30f && by < 1e30f) write_codes<false>(row, codes + mine, n, by, 1.f, zero);
  // Reciprocals or remainders were not normal.
  else write_codes<true>(row, codes + mine, n, by, by > 1.f ? 0x1p-64f : 0x1p64f, zero);
}
