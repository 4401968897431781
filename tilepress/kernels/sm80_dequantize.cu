// w[rows, cols] = codes * scale, int8 to 16 bits, as formats/int8.py's dequantize rounds it. 16 columns a thread, a
// multiple of which cols is. Macros: BF16.

#include "scales.cuh"

extern "C" __global__ void __launch_bounds__(256)
dequantize(const i8* codes,                         // int8 [rows, cols]
           const void* scale,                       // [rows] or [1], of the kind that `kinds` says (scales.cuh)
           int kinds,
           u16* w,                                  // 16-bit [rows, cols]
           int rows, int cols) {
  const Numbers scales = {scale, kinds >> 4 & 15, kinds >> 16 & 1};
  const int of_row = cols / 16;
  for (u64 i = (u64)blockIdx.x * 256 + threadIdx.x; i < (u64)rows * of_row; i += (u64)gridDim.x * 256) {
    const float s = scales[(int)(i / of_row)];
    const uint4 q = __ldg((const uint4*)codes + i);
    const u32 words[4] = {q.x, q.y, q.z, q.w};
    u32 out[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const u32 word = words[j / 2] >> j % 2 * 16;
      out[j] = to_values((float)(i8)word * s, (float)(i8)(word >> 8) * s);
    }
    ((uint4*)w)[2 * i] = make_uint4(out[0], out[1], out[2], out[3]);
    ((uint4*)w)[2 * i + 1] = make_uint4(out[4], out[5], out[6], out[7]);
  }
}
