// Rows of the paged cache, one token's key or value of one head, in a warp: lane l has the channels l, l + 32, .. To the bit as formats/kv_int4.py
// quantizes them where they are finite; NaN stays NaN.
//
// Sums are taken in the order of `fold` there: halves are added, which are a lane's own channels or another lane's, while the size is even; the rest from
// left to right. Where a byte stands in its page is `page_order` there, in closed form. Loads come first and stores are what a slot decides, so that a row's
// reads are under way together.
//
// Macros: D, a multiple of 32; BITS 4 | 8 | 16; SIZE of a group; STATIC 0 | 1; KIND of the input, 0 float32, 1 bfloat16, 2 float16.

#define E (D / 32)                            // channels of a lane
#define GROUPS (D / SIZE)
#define CODE_BYTES (D * BITS / 8)
#define SCALE_BYTES (STATIC || BITS == 16 ? 0 : 4 * GROUPS)
#define ROW_BYTES (CODE_BYTES + SCALE_BYTES)
#define UNIT_BYTES (64 * ROW_BYTES)           // keys and values of 32 tokens
#define PAGE_BYTES (2ll * UNIT_BYTES)
#define MOST ((1 << BITS) - 1)
#define ALL (~0u)
#define BLOCK (D & -D)                        // of the Hadamard matrix
#define IS_POWER(n) (((n) & (n) - 1) == 0)
#define LANE ((int)threadIdx.x % 32)

__device__ __forceinline__ u16 to_half(float v) { u16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v)); return r; }
__device__ __forceinline__ u16 to_bfloat(float v) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(0.f), "f"(v)); return (u16)r; }
__device__ __forceinline__ float from_bfloat(u16 v) { return __uint_as_float((u32)v << 16); }

__device__ __forceinline__ float element(const void* x, long long i) {
  if (KIND == 0) return ((const float*)x)[i];
  const u16 bits = ((const u16*)x)[i];
  return KIND == 1 ? from_bfloat(bits) : half_to_float(bits);
}

struct Add { static __device__ __forceinline__ float of(float a, float b) { return __fadd_rn(a, b); } };
struct Min { static __device__ __forceinline__ float of(float a, float b) { float r; asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; } };
struct Max { static __device__ __forceinline__ float of(float a, float b) { float r; asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; } };

// Over N channels, the lane's first one of which is v[0], in all lanes. `room`, N floats of the warp's, is used where N is no power of two.
template <int N, class How> __device__ __forceinline__ float fold(const float* v, float* room) {
  float t[N / 32];
#pragma unroll
  for (int j = 0; j < N / 32; ++j) t[j] = v[j];
  if (IS_POWER(N)) {
#pragma unroll
    for (int half = N / 64; half; half /= 2)
#pragma unroll
      for (int j = 0; j < half; ++j) t[j] = How::of(t[j], t[j + half]);
#pragma unroll
    for (int i = 16; i; i /= 2) t[0] = How::of(t[0], __shfl_xor_sync(ALL, t[0], i));
    return t[0];
  }
  __syncwarp();
#pragma unroll
  for (int j = 0; j < N / 32; ++j) room[LANE + 32 * j] = t[j];
  __syncwarp();
  int size = N;
  while (size % 2 == 0) {
    size /= 2;
    for (int i = LANE; i < size; i += 32) room[i] = How::of(room[i], room[i + size]);
    __syncwarp();
  }
  float total = room[0];
  for (int i = 1; i < size; ++i) total = How::of(total, room[i]);
  return total;
}

__device__ __forceinline__ void hadamard(float (&v)[E], float norm) {
#pragma unroll
  for (int step = 1; step < BLOCK; step *= 2) {
    if (step < 32) {
#pragma unroll
      for (int j = 0; j < E; ++j) {
        const float other = __shfl_xor_sync(ALL, v[j], step);
        v[j] = LANE & step ? __fsub_rn(other, v[j]) : __fadd_rn(v[j], other);
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
  const float low = fold<SIZE, Min>(v, room), high = fold<SIZE, Max>(v, room);
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
    return fold<SIZE, Add>(terms, room);
  };
  code();
  const float sum_w = refits ? fold<SIZE, Add>(w, room) : 0.f, sum_y = refits ? sum_with(w, v) : 0.f;
  for (int i = 0; i < refits; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) wc[j] = __fmul_rn(w[j], codes[j]);
    const float sum_c = fold<SIZE, Add>(wc, room), sum_cc = sum_with(wc, codes), sum_cy = sum_with(wc, v);
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

struct Side {  // of keys or values
  const float* channels; const u16* fixed;    // mean, scale, weight [3, heads, D] or 0; (scale, shift) [heads, GROUPS, 2]
  float half_clip; int rotate;
};

struct Calibration {  // a head's, of this lane's channels
  float mean[E], scale[E], weight[E];
  u16 fixed[STATIC ? GROUPS : 1][2];

  __device__ __forceinline__ void load(const Side& side, int head, int heads) {
#pragma unroll
    for (int j = 0; j < E; ++j) {
      const float* of = side.channels + head * D + LANE + 32 * j;
      mean[j] = side.channels ? of[0] : 0.f;
      scale[j] = side.channels ? of[heads * D] : 1.f;
      weight[j] = side.channels ? of[2 * heads * D] : 1.f;
    }
    if (STATIC && BITS < 16)
#pragma unroll
      for (int i = 0; i < 2 * GROUPS; ++i) fixed[i / 2][i % 2] = side.fixed[head * GROUPS * 2 + i];
  }
};

struct Place {  // of a row in the pages
  unsigned char* page; int token; bool is_value, is_there;

  __device__ __forceinline__ Place(unsigned char* pages, int num_pages, long long slot, int head, int heads, bool is_value)
      : page(pages + (slot / 64 * heads + head) * PAGE_BYTES), token(slot % 64), is_value(is_value), is_there(slot >= 0 && slot < num_pages * 64ll) {
    page += token / 32 * UNIT_BYTES;
    token %= 32;
  }
  __device__ __forceinline__ int eight() const { return token / 8 * 8 * CODE_BYTES; }
  __device__ __forceinline__ unsigned char* key_byte(int i) const {
    constexpr int CHUNK = (CODE_BYTES & -CODE_BYTES) < 64 ? CODE_BYTES & -CODE_BYTES : 64;
    return page + eight() + (i / CHUNK * 8 + token % 8) * CHUNK + i % CHUNK;
  }
  __device__ __forceinline__ unsigned char* value_byte(int channel) const {  // the one that the channel begins in
    const int g = channel / 16, pair = token % 8 / 2, second = token % 2;
    unsigned char* codes = page + 32 * CODE_BYTES + eight();
    if (BITS == 4) return codes + ((g * 4 + pair) * 4 + channel / 4 % 4) * 4 + second * 2 + channel / 2 % 2;
    if (BITS == 8) return codes + ((channel / 8 % 2 * (D / 16) + g) * 4 + pair) * 16 + channel % 8 * 2 + second;
    return codes + ((channel / 4 % 4 * (D / 16) + g) * 4 + pair) * 16 + channel % 4 * 4 + second * 2;
  }
  __device__ __forceinline__ void store_scale(int g, u32 both) const {  // scale and shift
    unsigned char* scales = page + 64 * CODE_BYTES + is_value * 32 * SCALE_BYTES;
    if (is_value && GROUPS > 1) {
      scales += (((token / 16 * GROUPS + g) * 4 + token % 8 / 2) * 2 + token / 8 % 2) * 8 + token % 2 * 2;
      if (LANE < 2) *(u16*)(scales + LANE * 4) = both >> LANE * 16;
    } else if (LANE == 0) {
      *(u32*)(scales + ((token % 8 * GROUPS + g) * 4 + token / 8) * 4) = both;
    }
  }
};

// Four bytes of four lanes that are `step` apart: byte b of lane i goes to byte i of lane b.
__device__ __forceinline__ u32 transpose_bytes(u32 word, int step) {
  u32 other = __shfl_xor_sync(ALL, word, step);
  word = __byte_perm(word, other, LANE & step ? 0x3715 : 0x6240);
  other = __shfl_xor_sync(ALL, word, 2 * step);
  return __byte_perm(word, other, LANE & 2 * step ? 0x3276 : 0x5410);
}

__device__ __forceinline__ void store_codes(const Place& place, const float (&v)[E]) {
#pragma unroll
  for (int first = 0; first < E; first += 4) {
    u32 word = 0;                             // a channel of 32 in each byte
#pragma unroll
    for (int i = 0; i < 4; ++i) word |= first + i < E ? (u32)v[first + i] << 8 * i : 0;
    if (BITS == 8 && place.is_value) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (first + i < E) *place.value_byte(32 * (first + i) + LANE) = word >> 8 * i;
      continue;
    }
    constexpr int STEP = BITS == 4 ? 2 : 1;   // lanes for a byte
    if (BITS == 4) {
      const u32 other = __shfl_xor_sync(ALL, word, 1);
      word = LANE % 2 ? other | word << 4 : word | other << 4;
    }
    word = transpose_bytes(word, STEP);       // 4 bytes in a row
    const int j = first + LANE / STEP % 4, channel = 32 * j + LANE / (4 * STEP) * (4 * STEP);
    if (j >= E) continue;
    if (place.is_value) *(u16*)place.value_byte(channel + LANE % 2 * 4) = word >> LANE % 2 * 16;
    else if (LANE % STEP == 0) *(u32*)place.key_byte(channel * BITS / 8) = word;
  }
}

// Quantizes a row and stores it, if its place is there.
__device__ __forceinline__ void append(float (&v)[E], const Side& side, const Calibration& of, const Place& place, float step, float norm, int refits, float* room) {
  if (BITS == 16) {
#pragma unroll
    for (int j = 0; j < E; ++j)
      if (place.is_there) *(u16*)(place.is_value ? place.value_byte(LANE + 32 * j) : place.key_byte(2 * (LANE + 32 * j))) = to_bfloat(v[j]);
    return;
  }
  if (side.channels)
#pragma unroll
    for (int j = 0; j < E; ++j) v[j] = __fmul_rn(__fsub_rn(v[j], of.mean[j]), __fdiv_rn(1.f, of.scale[j]));
  if (side.rotate) hadamard(v, norm);
#pragma unroll
  for (int j = 0; j < E; ++j) v[j] = __fadd_rn(v[j], 0.f);  // no -0, as in the reference
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    float scale, shift;
    float* mine = v + g * (SIZE / 32);
    if (STATIC) {
      scale = half_to_float(of.fixed[g][0]);
      shift = half_to_float(of.fixed[g][1]);
#pragma unroll
      for (int j = 0; j < SIZE / 32; ++j) mine[j] = code_of(mine[j], scale, shift);
    } else {
      quantize(mine, of.weight + g * (SIZE / 32), side.half_clip, step, refits, room, scale, shift);
      if (place.is_there) place.store_scale(g, to_half(scale) | to_half(shift) << 16);
    }
  }
  if (place.is_there) store_codes(place, v);
}
