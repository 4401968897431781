// Scales, zero points and biases of the INT8 kernels: vectors in any of three dtypes, or one number for all.

struct Numbers {
  const void* at; int kind, step;             // kind 0 float32, 1 bfloat16, 2 float16; step 0: one number

  __device__ float operator[](int i) const {
    i *= step;
    if (kind == 0) return ((const float*)at)[i];
    const u16 bits = ((const u16*)at)[i];
    return kind == 1 ? __uint_as_float((u32)bits << 16) : half_to_float(bits);
  }
};

// y's numbers from integer sums: in the reference's order, each operation rounded by itself, so that both give the same bits.
struct Output {
  Numbers x_scale, w_scale, bias;             // bias.at may be 0
  const i8* zero_point; const int* w_sums;    // zero_point may be 0: the numbers that x's codes have in place of 0, and w's rows summed up

  struct Row { float scale, bias; int offset; };   // no bias: -0, which changes no number that it is added to

  __device__ Row row(int i, int rows) const {
    i = min(i, rows - 1);
    return {w_scale[i], bias.at ? bias[i] : -0.f, zero_point ? *zero_point * w_sums[i] : 0};
  }
  __device__ float number(int sum, const Row& r, float x_scale) const {
    return __fadd_rn(__fmul_rn(__fmul_rn(__int2float_rn(sum - r.offset), x_scale), r.scale), r.bias);
  }
};

// From a launch's arguments: the kinds of x_scale, w_scale and bias and whether the scales are vectors, 4 bits each.
__device__ __forceinline__ Output output_of(const void* x_scale, const void* w_scale, const void* bias, const i8* zero_point, const int* w_sums, int kinds) {
  return {{x_scale, kinds & 15, kinds >> 12 & 1}, {w_scale, kinds >> 4 & 15, kinds >> 16 & 1}, {bias, kinds >> 8 & 15, 1}, zero_point, w_sums};
}
