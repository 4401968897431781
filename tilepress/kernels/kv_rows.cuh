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

// COUNT folds at once, so that they wait together: each over the N / 32 channels t[i] of all lanes; the results are t[i][0]. `room`, N floats of the warp's,
// is used where N is no power of two.
template <int N, class How, int COUNT> __device__ __forceinline__ void fold(float (&t)[COUNT][N / 32], float* room) {
  if constexpr (IS_POWER(N)) {
#pragma unroll
    for (int half = N / 64; half; half /= 2)
#pragma unroll
      for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int j = 0; j < half; ++j) t[i][j] = How::of(t[i][j], t[i][j + half]);
#pragma unroll
    for (int step = 16; step; step /= 2) {
      float other[COUNT];
#pragma unroll
      for (int i = 0; i < COUNT; ++i) other[i] = __shfl_xor_sync(ALL, t[i][0], step);
#pragma unroll
      for (int i = 0; i < COUNT; ++i) t[i][0] = How::of(t[i][0], other[i]);
    }
  } else {
    for (int k = 0; k < COUNT; ++k) {
      __syncwarp();
#pragma unroll
      for (int j = 0; j < N / 32; ++j) room[LANE + 32 * j] = t[k][j];
      __syncwarp();
      int size = N;
      while (size % 2 == 0) {
        size /= 2;
        for (int i = LANE; i < size; i += 32) room[i] = How::of(room[i], room[i + size]);
        __syncwarp();
      }
      t[k][0] = room[0];
      for (int i = 1; i < size; ++i) t[k][0] = How::of(t[k][0], room[i]);
    }
  }
}

// a / b as IEEE rounds it, without the branches that a division has, for 2^-60 < |b| < 2^60 and |a| < 2^60.
__device__ __forceinline__ float divide_plain(float a, float b) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(b));
  y = __fmaf_rn(y, __fmaf_rn(-b, y, 1.f), y);
  const float q = __fmul_rn(a, y);
  return __fmaf_rn(y, __fmaf_rn(-b, q, a), q);
}
__device__ __forceinline__ bool is_plain(float v) { return fabsf(v) < 1.152921504606847e18f && fabsf(v) > 8.673617379884035e-19f; }

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

// `scale` is of float16. What is beyond 2^30 is beyond all codes.
__device__ __forceinline__ float code_of(float v, float scale, float shift) {
  const float code = rintf(divide_plain(fminf(fmaxf(__fsub_rn(v, shift), -1073741824.f), 1073741824.f), scale));
  return fminf(fmaxf(code, 0.f), (float)MOST);
}

// What float16 makes of a scale and a shift; NaN stays.
__device__ __forceinline__ void to_halves(float& scale, float& shift) {
  scale = half_to_float(to_half(Min::of(Max::of(scale, 5.9604644775390625e-8f), 65504.f)));
  shift = half_to_float(to_half(Min::of(Max::of(shift, -65504.f), 65504.f)));
}

#define OF_GROUP (SIZE / 32)                  // channels of a lane

// Codes of a row in place of its values, and what they are of, each group with its scale and shift.
__device__ __forceinline__ void quantize(float (&v)[E], const float (&w)[E], float half_clip, float step, int refits, float* room, float (&scale)[GROUPS], float (&shift)[GROUPS]) {
  float ends[2 * GROUPS][OF_GROUP];           // least, and the negative of the largest
#pragma unroll
  for (int j = 0; j < E; ++j) { ends[j / OF_GROUP][j % OF_GROUP] = v[j]; ends[GROUPS + j / OF_GROUP][j % OF_GROUP] = -v[j]; }
  fold<SIZE, Min>(ends, room);
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    const float low = ends[g][0], high = -ends[GROUPS + g][0];
    const float middle = __fmul_rn(__fadd_rn(low, high), 0.5f), reach = __fmul_rn(__fsub_rn(high, low), half_clip);
    scale[g] = __fmul_rn(reach, step); shift[g] = __fsub_rn(middle, reach);
    to_halves(scale[g], shift[g]);
  }
  float codes[E];
  const auto code = [&] {
#pragma unroll
    for (int j = 0; j < E; ++j) codes[j] = code_of(v[j], scale[j / OF_GROUP], shift[j / OF_GROUP]);
  };
  code();
  float of_values[2 * GROUPS][OF_GROUP];      // sums of weights, and of weights times values
  if (refits) {
#pragma unroll
    for (int j = 0; j < E; ++j) { of_values[j / OF_GROUP][j % OF_GROUP] = w[j]; of_values[GROUPS + j / OF_GROUP][j % OF_GROUP] = __fmul_rn(w[j], v[j]); }
    fold<SIZE, Add>(of_values, room);
  }
  for (int i = 0; i < refits; ++i) {
    float sums[3 * GROUPS][OF_GROUP];         // of weights times codes; that times codes; times values
#pragma unroll
    for (int j = 0; j < E; ++j) {
      const int g = j / OF_GROUP, k = j % OF_GROUP;
      const float wc = __fmul_rn(w[j], codes[j]);
      sums[g][k] = wc; sums[GROUPS + g][k] = __fmul_rn(wc, codes[j]); sums[2 * GROUPS + g][k] = __fmul_rn(wc, v[j]);
    }
    fold<SIZE, Add>(sums, room);
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      const float sum_w = of_values[g][0], sum_y = of_values[GROUPS + g][0], sum_c = sums[g][0], sum_cc = sums[GROUPS + g][0], sum_cy = sums[2 * GROUPS + g][0];
      const float spread = __fsub_rn(__fmul_rn(sum_w, sum_cc), __fmul_rn(sum_c, sum_c)), slope = __fsub_rn(__fmul_rn(sum_w, sum_cy), __fmul_rn(sum_c, sum_y));
      float better, rest;
      if (is_plain(spread) && is_plain(slope) && is_plain(sum_w)) {                  // the same in all lanes
        better = divide_plain(slope, spread);
        rest = __fsub_rn(sum_y, __fmul_rn(better, sum_c));
        rest = is_plain(rest) ? divide_plain(rest, sum_w) : __fdiv_rn(rest, sum_w);
      } else {
        better = __fdiv_rn(slope, spread);
        rest = __fdiv_rn(__fsub_rn(sum_y, __fmul_rn(better, sum_c)), sum_w);
      }
      if (spread > 0.f && better > 0.f && better < __int_as_float(0x7f800000)) { scale[g] = better; shift[g] = rest; }
      to_halves(scale[g], shift[g]);
    }
    code();
  }
#pragma unroll
  for (int j = 0; j < E; ++j) v[j] = codes[j];
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
  if (side.channels) {
    bool plain = true;
#pragma unroll
    for (int j = 0; j < E; ++j) plain &= is_plain(of.scale[j]);
    plain = __all_sync(ALL, plain);
#pragma unroll
    for (int j = 0; j < E; ++j) v[j] = __fmul_rn(__fsub_rn(v[j], of.mean[j]), plain ? divide_plain(1.f, of.scale[j]) : __fdiv_rn(1.f, of.scale[j]));
  }
  if (side.rotate) hadamard(v, norm);
#pragma unroll
  for (int j = 0; j < E; ++j) v[j] = __fadd_rn(v[j], 0.f);  // no -0, as in the reference
  if (STATIC) {
#pragma unroll
    for (int j = 0; j < E; ++j) v[j] = code_of(v[j], half_to_float(of.fixed[j / OF_GROUP][0]), half_to_float(of.fixed[j / OF_GROUP][1]));
  } else {
    float scale[GROUPS], shift[GROUPS];
    quantize(v, of.weight, side.half_clip, step, refits, room, scale, shift);
    if (place.is_there)
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) place.store_scale(g, to_half(scale[g]) | to_half(shift[g]) << 16);
  }
  if (place.is_there) store_codes(place, v);
}
