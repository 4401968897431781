// int8 codes as 16-bit values, and the output of products with them.

#define FACTOR (BF16 ? 64.f : 512.f)          // values are so many times too small

// Two codes, each 128 more in the low byte of a half, to values FACTOR times smaller: such a half is a denormal, or
// next to them, and linear in the code.
__device__ __forceinline__ u32 expand(u32 halves) {
  u32 r;
#if BF16
  // 2^-133 (code + 128) 2^127 - 2.
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(halves), "r"(0x7f007f00), "r"(0xc000c000));
#else
  // 2^-24 (code + 128) 2^15 - 1/4.
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(halves), "r"(0x78007800), "r"(0xb400b400));
#endif
  return r;
}

// 16 rows of y from `row` on: a warp's part of an m64 accumulator, times w's scales and FACTOR, and the bias.
template <int COUNT>
__device__ __forceinline__ void write_scaled(const float (&sums)[COUNT], int row, const void* w_scale, const void* bias,
                                             int kinds, u16* y, int m, int n) {
  const Numbers scale = {w_scale, kinds >> 4 & 15, kinds >> 16 & 1}, offset = {bias, kinds >> 8 & 15, 1};
  const int mine = min(row + (int)threadIdx.x % 32 / 4, n - 1), below = min(mine + 8, n - 1);
  const float s = scale[mine] * FACTOR, below_s = scale[below] * FACTOR, b = bias ? offset[mine] : 0.f,
              below_b = bias ? offset[below] : 0.f;
  write_m64(sums, row, y, m, n,
            [=](float sum, bool is_below, int) { return is_below ? sum * below_s + below_b : sum * s + b; });
}
