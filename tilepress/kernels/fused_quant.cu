// Rows of 16-bit numbers, normalized or through an activation, to int8 codes: one pass, a row in the registers of a block.
//
// What OP makes of a row is rounded to 16 bits where transformers' own modules round; then codes = round(value / scale + zero point), half to even, saturated,
// with the quotient rounded as a division's. Scale: given for all rows, or of each row absmax / 127.5 (float32's epsilon for a row of zeros). NaN and
// infinities give a row the scale NaN or infinity, and so NaN in all that is multiplied with it; with a given scale NaN becomes the code 0, infinities
// saturate.
//
// Macros: OP, one of those below; STATIC 0 | 1; THREADS; V times 8 elements a thread; VECTORS 0 | 1: rows are read in 16 bytes, or element by element (any length,
// any alignment); BLOCKS of a multiprocessor; AHEAD 0 | 1: a block loads the next row before it works on one; BF16. With AHEAD a block takes every so many rows, else one.

#include "scales.cuh"

enum { QUANTIZE, RMS_NORM, ADD_RMS_NORM, LAYER_NORM, ADD_LAYER_NORM, SILU_MUL, RELU, GELU, GELU_TANH, GELU_NEW };
#define ADDS (OP == ADD_RMS_NORM || OP == ADD_LAYER_NORM)
#define IS_RMS (OP == RMS_NORM || OP == ADD_RMS_NORM)
#define IS_LAYER (OP == LAYER_NORM || OP == ADD_LAYER_NORM)
#define GATED (OP == SILU_MUL)
#define WARPS (THREADS / 32)

__device__ __forceinline__ float rounded(float v) { return to_float((u16)to_values(v, 0.f)); }

struct Raw {  // a thread's part of a row: V times 8 elements of 16 bits, zeros beyond the row's end
  u32 pairs[V][4];

  static __device__ __forceinline__ int at(int part, int i) { return VECTORS ? (part * THREADS + threadIdx.x) * 8 + i : (part * 8 + i) * THREADS + threadIdx.x; }

  __device__ __forceinline__ void load(const u16* from, int n) {
#pragma unroll
    for (int part = 0; part < V; ++part) {
      if (VECTORS) {
        uint4 q = make_uint4(0, 0, 0, 0);
        if (at(part, 0) < n) q = *(const uint4*)(from + at(part, 0));
        pairs[part][0] = q.x; pairs[part][1] = q.y; pairs[part][2] = q.z; pairs[part][3] = q.w;
      } else {
#pragma unroll
        for (int i = 0; i < 8; i += 2)
          pairs[part][i / 2] = (at(part, i) < n ? from[at(part, i)] : 0) | (at(part, i + 1) < n ? from[at(part, i + 1)] : 0) << 16;
      }
    }
  }
  __device__ __forceinline__ float operator()(int part, int i) const { return to_float((u16)(pairs[part][i / 2] >> i % 2 * 16)); }
};

struct Row {  // the same as float32
  float v[V][8];

  __device__ __forceinline__ void store(u16* to, int n) const {
#pragma unroll
    for (int part = 0; part < V; ++part) {
      const float* f = v[part];
      if (VECTORS) {
        if (Raw::at(part, 0) < n)
          *(uint4*)(to + Raw::at(part, 0)) = make_uint4(to_values(f[0], f[1]), to_values(f[2], f[3]), to_values(f[4], f[5]), to_values(f[6], f[7]));
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (Raw::at(part, i) < n) to[Raw::at(part, i)] = to_values(f[i], 0.f);
      }
    }
  }
  // v = f(v, part, i)
  template <class F> __device__ __forceinline__ void each(F f) {
#pragma unroll
    for (int part = 0; part < V; ++part)
#pragma unroll
      for (int i = 0; i < 8; ++i) v[part][i] = f(v[part][i], part, i);
  }
  // f(.. f(start, v, place in the row) .., v, place)
  template <class F> __device__ __forceinline__ float reduce(float start, F f) const {
#pragma unroll
    for (int part = 0; part < V; ++part)
#pragma unroll
      for (int i = 0; i < 8; ++i) start = f(start, v[part][i], Raw::at(part, i));
    return start;
  }
};

struct Sum { static __device__ __forceinline__ float of(float a, float b) { return a + b; } };
struct Max { static __device__ __forceinline__ float of(float a, float b) { float r; asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; } };

// Over the block's threads, in all of them; what is reduced is at least 0, or a sum. `place`: each call has 32 floats of its own.
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

// x / scale, correctly rounded (Markstein): the reciprocal is, and the remainder is exact. Not for scales whose reciprocal is not normal. Quotients
// far beyond the codes are only as far beyond them, infinities with a given scale too: with one of their row they do not come here.
__device__ __forceinline__ float divided(float x, float scale, float reciprocal) {
  float q = __fmul_rn(x, reciprocal);
  if (STATIC) q = fminf(fmaxf(q, -1e4f), 1e4f);
  return __fmaf_rn(__fmaf_rn(-q, scale, x), reciprocal, q);
}
__device__ __forceinline__ u32 code(float v) { int r; asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(r) : "f"(v)); return r & 255; }

__device__ __forceinline__ void write_codes(const Row& row, i8* to, int n, float scale, float zero_point) {
  const float reciprocal = __frcp_rn(scale);
  const bool plain = scale > 1e-36f && scale < 1e36f;
  const auto of = [&](float v) { return code(__fadd_rn(plain ? divided(v, scale, reciprocal) : __fdiv_rn(v, scale), zero_point)); };
#pragma unroll
  for (int part = 0; part < V; ++part) {
    if (VECTORS) {
      if (Raw::at(part, 0) >= n) continue;
      const float* f = row.v[part];
      *(uint2*)(to + Raw::at(part, 0)) = make_uint2(of(f[0]) | of(f[1]) << 8 | of(f[2]) << 16 | of(f[3]) << 24, of(f[4]) | of(f[5]) << 8 | of(f[6]) << 16 | of(f[7]) << 24);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (Raw::at(part, i) < n) to[Raw::at(part, i)] = of(row.v[part][i]);
    }
  }
}

__device__ __forceinline__ float activation(float x) {
  if (OP == RELU) return x > 0.f || x != x ? x : 0.f;
  if (OP == GELU) return x * 0.5f * (1.f + erff(x * 0.70710678118654752440f));
  if (OP == GELU_TANH) return 0.5f * x * (1.f + tanhf(0.79788456080286535588f * (x + 0.044715f * x * x * x)));
  if (OP == GELU_NEW) {                       // transformers' NewGELUActivation: a module of many operations
    const float inner = rounded(0.79788456080286535588f * rounded(x + rounded(0.044715f * rounded(rounded(x * x) * x))));
    return rounded(0.5f * x) * rounded(1.f + rounded(tanhf(inner)));
  }
  return x / (1.f + __expf(-x));              // SiLU
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
fused_quant(const u16* x, const u16* residual, const u16* weight, const u16* bias, const void* scale, int scale_kind, const i8* zero_point, i8* codes,
            float* scales, u16* total, int rows, int n, float eps) {
  __shared__ float places[2][3][32];
  Raw factor, offset;
  const auto load_factors = [&] {
    if (IS_RMS || IS_LAYER) factor.load(weight, n);
    if (IS_LAYER) offset.load(bias, n);
  };
  if (V == 1) load_factors();                 // more would not fit beside the row
#if __CUDA_ARCH__ >= 900
  launch_dependents();
  wait_for_grid();
#endif
  float given = 0.f, zero = 0.f;
  if (STATIC) {
    given = Numbers{scale, scale_kind, 0}[0];
    if (zero_point) zero = *zero_point;
    if (threadIdx.x == 0 && blockIdx.x == 0) scales[0] = given;
  }
  const auto bring = [&](Raw& raw, Raw& other, int r) {
    const u64 at = (u64)r * n;
    raw.load(x + at * (GATED ? 2 : 1), n);
    if (ADDS || GATED) other.load(ADDS ? residual + at : x + 2 * at + n, n);
  };
  Raw raw, other;
  bring(raw, other, blockIdx.x);
  for (int r = blockIdx.x, turn = 0; r < rows; r += gridDim.x, turn ^= 1) {
    Raw next, next_other;
    if (AHEAD && r + (int)gridDim.x < rows) bring(next, next_other, r + gridDim.x);
    float (*place)[32] = places[turn];        // by turns: some warps may still read those of the row before
    const u64 mine = (u64)r * n;
    Row row;
    row.each([&](float, int p, int i) { return raw(p, i); });
    if (ADDS) {
      row.each([&](float v, int p, int i) { return rounded(v + other(p, i)); });
      row.store(total + mine, n);
    }
    if (GATED) row.each([&](float v, int p, int i) { return rounded(rounded(activation(v)) * other(p, i)); });
    if (OP >= RELU) row.each([&](float v, int, int) { return rounded(activation(v)); });
    if (IS_RMS) {
      const float squares = all<Sum>(row.reduce(0.f, [](float s, float v, int) { return s + v * v; }), place[0]);
      const float inverse = rsqrtf(squares / n + eps);
      if (V > 1) load_factors();
      row.each([&](float v, int p, int i) { return rounded(rounded(v * inverse) * factor(p, i)); });
    }
    if (IS_LAYER) {
      const float mean = all<Sum>(row.reduce(0.f, [](float s, float v, int) { return s + v; }), place[0]) / n;
      const float squares = all<Sum>(row.reduce(0.f, [=](float s, float v, int at) { return at < n ? s + (v - mean) * (v - mean) : s; }), place[1]);
      const float inverse = rsqrtf(squares / n + eps);
      if (V > 1) load_factors();
      row.each([&](float v, int p, int i) { return rounded((v - mean) * inverse * factor(p, i) + offset(p, i)); });
    }
    float by = given;
    if (!STATIC) {
      by = all<Max>(row.reduce(0.f, [=](float m, float v, int at) { return at < n ? Max::of(m, fabsf(v)) : m; }), place[2]) / 127.5f;
      if (by == 0.f) by = 1.1920928955078125e-7f;
      if (threadIdx.x == 0) scales[r] = by;
    }
    write_codes(row, codes + mine, n, by, zero);
    if (!AHEAD) return;                       // there are as many blocks as rows
    raw = next;
    other = next_other;
  }
}
