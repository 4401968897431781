// Reads n 16-byte words and keeps nothing: what a card's memory gives a kernel that only reads. 512 threads, sm_80 and
// later.

extern "C" __global__ void __launch_bounds__(512, 2)
read_bandwidth(const uint4* words,                  // [n] of 16 bytes
               u32* never,                          // uint32 [1]
               u64 n) {
  u32 all = 0;
  const u64 step = (u64)gridDim.x * 512;
  u64 i = (u64)blockIdx.x * 512 + threadIdx.x;
  for (; i + 7 * step < n; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k)
      ldg128_if(v[k], words + i + k * step, true);
#pragma unroll
    for (int k = 0; k < 8; ++k) all ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  if (all == 0x12345678) *never = all;
}
