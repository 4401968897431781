// Keys and values of tokens, quantized and stored in the pages of a cache, to the bit as formats/kv_int4.py does it where they are finite; NaN stays NaN.
//
// A warp has one token's key or value of one head: lane l the channels l, l + 32, .. Sums are taken in the order of `fold` there: halves are added, which
// are a lane's own channels or another lane's, while the size is even; the rest from left to right. Where each byte of a row stands in its page is in
// `order`, int [2 (key, value), 64 tokens, row bytes].
//
// Macros: D, a multiple of 32; BITS 4 | 8 | 16; SIZE of a group; STATIC 0 | 1; KIND of the input, 0 float32, 1 bfloat16, 2 float16. Grid: 4 rows a block of
// 128 threads; rows are tokens, heads, (key, value). A slot that is no place in the pages is skipped.

#define E (D / 32)                            // channels of a lane
#define GROUPS (D / SIZE)
#define CODE_BYTES (D * BITS / 8)
#define ROW_BYTES (CODE_BYTES + (STATIC || BITS == 16 ? 0 : 4 * GROUPS))
#define MOST ((1 << BITS) - 1)
#define ALL (~0u)
#define BLOCK (D & -D)                        // of the Hadamard matrix

struct Side {  // of keys or values
  const void* x; long long token_stride, head_stride;      // in elements
  const float* channels; const u16* fixed;    // mean, scale, weight [3, heads, D] or 0; (scale, shift) [heads, GROUPS, 2]
  float half_clip; int rotate;
};

__device__ __forceinline__ u16 to_half(float v) { u16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v)); return r; }

__device__ __forceinline__ float element(const void* x, long long i) {
  if (KIND == 0) return ((const float*)x)[i];
  const u16 bits = ((const u16*)x)[i];
  return KIND == 1 ? __uint_as_float((u32)bits << 16) : half_to_float(bits);
}

struct Add { static __device__ __forceinline__ float of(float a, float b) { return __fadd_rn(a, b); } };
struct Min { static __device__ __forceinline__ float of(float a, float b) { float r; asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; } };
struct Max { static __device__ __forceinline__ float of(float a, float b) { float r; asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; } };

// Over a group of SIZE channels, the lane's first one of which is v[0], in all lanes.
template <class How> __device__ __forceinline__ float fold(const float* v, float* room) {
  float t[SIZE / 32];
#pragma unroll
  for (int j = 0; j < SIZE / 32; ++j) t[j] = v[j];
  if ((SIZE & SIZE - 1) == 0) {
#pragma unroll
    for (int half = SIZE / 64; half; half /= 2)
#pragma unroll
      for (int j = 0; j < half; ++j) t[j] = How::of(t[j], t[j + half]);
#pragma unroll
    for (int i = 16; i; i /= 2) t[0] = How::of(t[0], __shfl_xor_sync(ALL, t[0], i));
    return t[0];
  }
  const int lane = threadIdx.x % 32;
  __syncwarp();
#pragma unroll
  for (int j = 0; j < SIZE / 32; ++j) room[lane + 32 * j] = t[j];
  __syncwarp();
  int size = SIZE;
  while (size % 2 == 0) {
    size /= 2;
    for (int i = lane; i < size; i += 32) room[i] = How::of(room[i], room[i + size]);
    __syncwarp();
  }
  float total = room[0];
  for (int i = 1; i < size; ++i) total = How::of(total, room[i]);
  return total;
}

__device__ __forceinline__ void hadamard(float (&v)[E], float norm) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < BLOCK; step *= 2) {
    if (step < 32) {
#pragma unroll
      for (int j = 0; j < E; ++j) {
        const float other = __shfl_xor_sync(ALL, v[j], step);
        v[j] = lane & step ? __fsub_rn(other, v[j]) : __fadd_rn(v[j], other);
      }
    } else {
#pragma unroll
      for (int j = 0; j < E; ++j)
        if ((j & step / 32) == 0) {
          const float a = v[j], b = v[j + step / 32];
          v[j] = __fadd_rn(a, b);
          v[j + step / 32] = __fsub_rn(a, b);
        }
    }
  }
#pragma unroll
  for (int j = 0; j < E; ++j) v[j] = __fmul_rn(v[j], norm);
}

__device__ __forceinline__ float code_of(float v, float scale, float shift) {
  const float code = rintf(__fdiv_rn(__fsub_rn(v, shift), scale));
  return fminf(fmaxf(code, 0.f), (float)MOST);
}

// What float16 makes of a scale and a shift; NaN stays.
__device__ __forceinline__ void to_halves(float& scale, float& shift) {
  scale = half_to_float(to_half(Min::of(Max::of(scale, 5.9604644775390625e-8f), 65504.f)));
  shift = half_to_float(to_half(Min::of(Max::of(shift, -65504.f), 65504.f)));
}

// Codes of a group in place of its values, and what they are of.
__device__ __forceinline__ void quantize(float* v, const float* w, float half_clip, float step, int refits, float* room, float& scale, float& shift) {
  const float low = fold<Min>(v, room), high = fold<Max>(v, room);
  const float middle = __fmul_rn(__fadd_rn(low, high), 0.5f), reach = __fmul_rn(__fsub_rn(high, low), half_clip);
  scale = __fmul_rn(reach, step); shift = __fsub_rn(middle, reach);
  to_halves(scale, shift);
  constexpr int N = SIZE / 32;
  float codes[N], wc[N], terms[N];
  const auto code = [&] {
#pragma unroll
    for (int j = 0; j < N; ++j) codes[j] = code_of(v[j], scale, shift);
  };
  const auto sum_with = [&](const float* of, const float* by) {
#pragma unroll
    for (int j = 0; j < N; ++j) terms[j] = __fmul_rn(of[j], by[j]);
    return fold<Add>(terms, room);
  };
  code();
  const float sum_w = refits ? fold<Add>(w, room) : 0.f, sum_y = refits ? sum_with(w, v) : 0.f;
  for (int i = 0; i < refits; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) wc[j] = __fmul_rn(w[j], codes[j]);
    const float sum_c = fold<Add>(wc, room), sum_cc = sum_with(wc, codes), sum_cy = sum_with(wc, v);
    const float spread = __fsub_rn(__fmul_rn(sum_w, sum_cc), __fmul_rn(sum_c, sum_c));
    const float better = __fdiv_rn(__fsub_rn(__fmul_rn(sum_w, sum_cy), __fmul_rn(sum_c, sum_y)), spread);
    if (spread > 0.f && better > 0.f && better < __int_as_float(0x7f800000)) {
      scale = better;
      shift = __fdiv_rn(__fsub_rn(sum_y, __fmul_rn(better, sum_c)), sum_w);
    }
    to_halves(scale, shift);
    code();
  }
#pragma unroll
  for (int j = 0; j < N; ++j) v[j] = codes[j];
}

extern "C" __global__ void __launch_bounds__(128)
kv_append(unsigned char* pages, const long long* slots, const int* order, const void* key, const void* value, const float* key_channels, const float* value_channels,
          const u16* key_fixed, const u16* value_fixed, long long key_token, long long key_head, long long value_token, long long value_head, float key_clip,
          float value_clip, float step, float norm, int rotate, int refits, int tokens, int heads, int num_pages) {
  __shared__ float rooms[4][(SIZE & SIZE - 1) ? SIZE : 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.x * 4 + warp;
#if __CUDA_ARCH__ >= 900
  launch_dependents();
  wait_for_grid();
#endif
  if (row >= tokens * heads * 2) return;
  const int token = row / (2 * heads), head = row / 2 % heads, is_value = row % 2;
  const long long slot = slots[token];
  if (slot < 0 || slot >= (long long)num_pages * 64) return;
  const Side side = is_value ? Side{value, value_token, value_head, value_channels, value_fixed, value_clip, 0}
                             : Side{key, key_token, key_head, key_channels, key_fixed, key_clip, rotate};
  unsigned char* page = pages + ((slot / 64) * heads + head) * (128ll * ROW_BYTES);
  const int* place = order + (is_value * 64 + slot % 64) * ROW_BYTES;
  float v[E];
#pragma unroll
  for (int j = 0; j < E; ++j) v[j] = element(side.x, token * side.token_stride + head * side.head_stride + lane + 32 * j);
  if (BITS == 16) {
#pragma unroll
    for (int j = 0; j < E; ++j) {
      u32 bits;
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(0.f), "f"(v[j]));
      page[place[2 * (lane + 32 * j)]] = bits;
      page[place[2 * (lane + 32 * j) + 1]] = bits >> 8;
    }
    return;
  }
  float w[E];
#pragma unroll
  for (int j = 0; j < E; ++j) {
    w[j] = 1.f;
    if (side.channels) {
      const float* of = side.channels + head * D + lane + 32 * j;
      v[j] = __fmul_rn(__fsub_rn(v[j], of[0]), __fdiv_rn(1.f, of[heads * D]));
      w[j] = of[2 * heads * D];
    }
  }
  if (side.rotate) hadamard(v, norm);
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    float scale, shift;
    float* mine = v + g * (SIZE / 32);
    if (STATIC) {
      scale = half_to_float(side.fixed[(head * GROUPS + g) * 2]);
      shift = half_to_float(side.fixed[(head * GROUPS + g) * 2 + 1]);
#pragma unroll
      for (int j = 0; j < SIZE / 32; ++j) mine[j] = code_of(mine[j], scale, shift);
    } else {
      quantize(mine, w + g * (SIZE / 32), side.half_clip, step, refits, rooms[warp], scale, shift);
      const u32 both = to_half(scale) | to_half(shift) << 16;
      if (lane < 4) page[place[CODE_BYTES + 4 * g + lane]] = both >> 8 * lane;
    }
  }
#pragma unroll
  for (int j = 0; j < E; ++j) {
    const u32 code = (u32)v[j];
    if (BITS == 8) {
      page[place[lane + 32 * j]] = code;
    } else {
      const u32 next = __shfl_down_sync(ALL, code, 1);
      if (lane % 2 == 0) page[place[(lane + 32 * j) / 2]] = code | next << 4;
    }
  }
}
