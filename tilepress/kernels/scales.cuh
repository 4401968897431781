// Scales, zero points and biases of the INT8 kernels: vectors in any of three dtypes, or one number for all.

struct Numbers {
  const void* at; int kind, step;             // kind 0 float32, 1 bfloat16, 2 float16; step 0: one number

  __device__ u32 bits(int i) const { return kind == 0 ? ((const u32*)at)[i * step] : ((const u16*)at)[i * step]; }
  __device__ float number(u32 bits) const {
    return kind == 0 ? __uint_as_float(bits) : kind == 1 ? __uint_as_float(bits << 16) : half_to_float(bits);
  }
  __device__ float operator[](int i) const { return number(bits(i)); }
};

// y's numbers from integer sums: in the reference's order, each operation rounded by itself, so that both give the same
// bits.
struct Output {
  Numbers x_scale, w_scale, bias;             // bias.at may be 0
  const int* w_sums; int zero_point;          // sums of w's rows, null without a zero point; the code that stands for 0

  struct Bits { u32 scale, bias; int sum; };  // of a row, as memory has them
  struct Row { float scale, bias; int offset; };

  __device__ bool is_plain() const { return !bias.at && !w_sums; }
  __device__ Bits bits(int i, int rows) const {
    i = min(i, rows - 1);
    return {w_scale.bits(i), bias.at ? bias.bits(i) : 0, w_sums ? w_sums[i] : 0};
  }
  // Adding -0 changes nothing.
  __device__ Row row(const Bits& b) const {
    return {w_scale.number(b.scale), bias.at ? bias.number(b.bias) : -0.f, zero_point * b.sum};
  }
  // PLAIN: there is neither bias nor zero point.
  template <bool PLAIN> __device__ float number(int sum, const Row& r, float x_scale) const {
    const float y = __fmul_rn(__fmul_rn(__int2float_rn(PLAIN ? sum : sum - r.offset), x_scale), r.scale);
    return PLAIN ? y : __fadd_rn(y, r.bias);
  }
};

// From a launch's arguments: the kinds of x_scale, w_scale and bias and whether the scales are vectors, 4 bits each.
__device__ __forceinline__ Output output_of(const void* x_scale, const void* w_scale, const void* bias,
                                            const i8* zero_point, const int* w_sums, int kinds) {
  return {{x_scale, kinds & 15, kinds >> 12 & 1},
          {w_scale, kinds >> 4 & 15, kinds >> 16 & 1},
          {bias, kinds >> 8 & 15, 1},
          w_sums,
          zero_point ? *zero_point : 0};
}
