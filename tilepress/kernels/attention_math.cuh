// Numbers of a softmax, in powers of two, and pairs of halves.

#define ALL (~0u)
#define LOG2E 1.4426950408889634f
#define NONE __int_as_float(0xff800000)       // minus infinity: the log2 of no weight

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_of(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float power_of_two(int e) { return __uint_as_float((u32)(127 + e) << 23); }
__device__ __forceinline__ u32 mul_halves(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ u32 fma_halves(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
__device__ __forceinline__ float low_half(u32 v) { return half_to_float((u16)v); }
__device__ __forceinline__ float high_half(u32 v) { return half_to_float((u16)(v >> 16)); }
__device__ __forceinline__ float warp_max(float x, int from = 1, int to = 32) {
#pragma unroll
  for (int i = from; i < to; i *= 2) x = fmaxf(x, __shfl_xor_sync(ALL, x, i));
  return x;
}
__device__ __forceinline__ float warp_sum(float x, int from = 1, int to = 32) {
#pragma unroll
  for (int i = from; i < to; i *= 2) x += __shfl_xor_sync(ALL, x, i);
  return x;
}
