// Where each row of 16-bit numbers has its largest one: the first of those that are equal, or the first NaN, as
// torch.argmax has it.
//
// A block for each row. A thread keeps the largest number of its loads and which load that was; where in it the number
// stands is looked up at the end.
//
// Macros: BF16; VECTORS 1: rows are whole pieces of 16 bytes, and a load is one | 0: a load is a number. Grid: rows.

#define THREADS 1024
#define LOADS 4                               // on their way at once
#define ALL (~0u)
#if VECTORS
typedef uint4 Load;
#else
typedef u16 Load;
#endif
#define WIDTH ((int)sizeof(Load) / 2)          // numbers

__device__ __forceinline__ u32 largest(u32 a, u32 b) {
  u32 r;
  asm("max.NaN." VALUES "x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// Unsigned integers in the order of floats: zeros are equal, NaN comes last.
__device__ __forceinline__ u32 key_of(u16 value) {
  const float v = to_float(value);
  const int bits = __float_as_int(v + 0.f);
  return v != v ? ~0u : (u32)bits ^ (bits >> 31 | 0x80000000);
}

__device__ __forceinline__ u16 largest_of(u16 value) { return value; }
__device__ __forceinline__ u16 largest_of(const uint4& q) {
  const u32 pair = largest(largest(q.x, q.y), largest(q.z, q.w));
  return largest(pair, pair >> 16 | pair << 16);
}

// The largest key among a warp's lanes, and the least `place` of those that have it.
__device__ __forceinline__ void best_of_warp(u32& key, u32& place) {
  const u32 most = __reduce_max_sync(ALL, key);
  place = __reduce_min_sync(ALL, key == most ? place : ~0u);
  key = most;
}

extern "C" __global__ void __launch_bounds__(THREADS)
argmax(const u16* x,                                // 16-bit [rows, columns], rows `stride` elements apart
       long long stride,
       int columns,
       long long* out) {                            // int64 [rows]
  __shared__ u32 keys[32], places[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, loads = columns / WIDTH;
  const Load* row = (const Load*)(x + blockIdx.x * stride);
#if __CUDA_ARCH__ >= 900
  launch_dependents();
  wait_for_grid();
#endif
  u32 key = 0, place = ~0u;                   // less than all keys
  for (int first = threadIdx.x; first < loads; first += LOADS * THREADS) {
    Load q[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) q[i] = row[min(first + i * THREADS, loads - 1)];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const u32 mine = key_of(largest_of(q[i]));
      if (mine > key) { key = mine; place = min(first + i * THREADS, loads - 1); }
    }
  }
  best_of_warp(key, place);
  if (lane == 0) { keys[warp] = key; places[warp] = place; }
  __syncthreads();
  if (warp) return;
  key = keys[lane]; place = places[lane];
  best_of_warp(key, place);
  const bool is_it = lane < WIDTH && key_of(((const u16*)(row + place))[lane % WIDTH]) == key;
  const u32 found = __ballot_sync(ALL, is_it);
  if (lane == 0) out[blockIdx.x] = (long long)place * WIDTH + __ffs(found) - 1;
}
