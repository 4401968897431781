// Rows of the paged cache, one token's key or value of one head, in a warp: a lane has the E channels from FIRST on.
// Where a byte stands in its page is `page_order` of formats/kv_pages.py in closed form.
//
// Keys and values may have forms of their own. So this file, and kv_quantize.cuh or kv_dequantize.cuh behind it, stand
// in a namespace `of_keys` and, with UNLIKE, once more in `of_values`: BITS, SIZE and STATIC are keys' the first time.
//
// Macros: D, a multiple of 32; KEY_BITS, VALUE_BITS 4 | 8 | 16; KEY_SIZE, VALUE_SIZE of a group; KEY_STATIC,
// VALUE_STATIC 0 | 1; UNLIKE 0 | 1; PAGE_TOKENS 16 | 32 | 64; KIND of the input, 0 float32, 1 bfloat16, 2 float16. Rows
// begin at multiples of E elements where E is a power of two.

#ifndef BITS
#define BITS KEY_BITS
#define SIZE KEY_SIZE
#define STATIC KEY_STATIC
#else
#undef BITS
#undef SIZE
#undef STATIC
#define BITS VALUE_BITS
#define SIZE VALUE_SIZE
#define STATIC VALUE_STATIC
#endif

#define E (D / 32)                            // channels of a lane
#define LANE ((int)(threadIdx.x % 32))
#define FIRST (E * LANE)
#define GROUPS (D / SIZE)
#define CODE_BYTES (D * BITS / 8)
#define SCALE_BYTES (STATIC || BITS == 16 ? 0 : 4 * GROUPS)
#define KEY_CODE_BYTES (D * KEY_BITS / 8)
#define KEY_SCALE_BYTES (KEY_STATIC || KEY_BITS == 16 ? 0 : 4 * (D / KEY_SIZE))
#define VALUE_CODE_BYTES (D * VALUE_BITS / 8)
#define VALUE_SCALE_BYTES (VALUE_STATIC || VALUE_BITS == 16 ? 0 : 4 * (D / VALUE_SIZE))
#define TOKEN_BYTES (KEY_CODE_BYTES + VALUE_CODE_BYTES + KEY_SCALE_BYTES + VALUE_SCALE_BYTES)
#define UNIT SMALLER(PAGE_TOKENS, 32)         // tokens whose codes and scales lie together
#define UNIT_BYTES (UNIT * TOKEN_BYTES)       // keys and values
#define PAGE_BYTES (PAGE_TOKENS * (long long)TOKEN_BYTES)
#define MOST ((1 << BITS) - 1)
#define ALL (~0u)
#define BLOCK (D & -D)                        // of the Hadamard matrix
#define IS_POWER(n) (((n) & (n) - 1) == 0)
#define SMALLER(a, b) ((a) < (b) ? (a) : (b))
#define PARTS (IS_POWER(D) ? 1 : E)           // a lane's channels are of one group, or of one each
#define SPLITS_BYTES (BITS == 4 && E % 2)     // between lanes
#define ROOM (IS_POWER(D) && E % 2 == 0 ? 1 : D)  // floats of shared memory that a warp needs

__device__ __forceinline__ u16 to_half(float v) { u16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v)); return r; }
__device__ __forceinline__ u16 to_bfloat(float v) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(0.f), "f"(v));
  return (u16)r;
}
__device__ __forceinline__ float from_bfloat(u16 v) { return __uint_as_float((u32)v << 16); }
__device__ __forceinline__ float rounded(float v) {  // to the input's dtype
  return KIND == 0 ? v : KIND == 1 ? from_bfloat(to_bfloat(v)) : half_to_float(to_half(v));
}

// COUNT neighbours as memory has them, of a KIND: asked for at once, looked at later.
template <int COUNT, int OF = KIND> struct Raw {
  static constexpr int BYTES = OF ? 2 : 4;
  static constexpr bool PACKED = IS_POWER(COUNT) && COUNT * BYTES >= 4;
  static constexpr int WORDS = PACKED ? COUNT * BYTES / 4 : COUNT;
  u32 words[WORDS];

  __device__ __forceinline__ void load(const void* x, long long at) {
    const u32* from = (const u32*)((const char*)x + at * BYTES);
    if constexpr (!PACKED) {
#pragma unroll
      for (int j = 0; j < COUNT; ++j) words[j] = OF ? ((const u16*)x)[at + j] : from[j];
    } else if constexpr (WORDS == 1) {
      words[0] = from[0];
    } else if constexpr (WORDS == 2) {
      const uint2 w = *(const uint2*)from;
      words[0] = w.x; words[1] = w.y;
    } else {
#pragma unroll
      for (int j = 0; j < WORDS; j += 4) {
        const uint4 w = *(const uint4*)(from + j);
        words[j] = w.x; words[j + 1] = w.y; words[j + 2] = w.z; words[j + 3] = w.w;
      }
    }
  }
  __device__ __forceinline__ float operator[](int j) const {
    if (OF == 0) return __uint_as_float(words[j]);
    const u16 bits = PACKED ? words[j / 2] >> 16 * (j % 2) : words[j];
    return OF == 1 ? from_bfloat(bits) : half_to_float(bits);
  }
};

__device__ __forceinline__ void hadamard(float (&v)[E], float norm, float* room) {
#pragma unroll
  for (int step = 1; step < BLOCK; step *= 2) {
    if (!IS_POWER(D)) {
      __syncwarp();
#pragma unroll
      for (int j = 0; j < E; ++j) room[FIRST + j] = v[j];
      __syncwarp();
    }
    float other[E];
#pragma unroll
    for (int j = 0; j < E; ++j)
      other[j] = !IS_POWER(D) ? room[FIRST + j ^ step] : step < E ? v[j ^ step] : __shfl_xor_sync(ALL, v[j], step / E);
#pragma unroll
    for (int j = 0; j < E; ++j) v[j] = FIRST + j & step ? __fsub_rn(other[j], v[j]) : __fadd_rn(v[j], other[j]);
  }
#pragma unroll
  for (int j = 0; j < E; ++j) v[j] = __fmul_rn(v[j], norm);
}

struct Side {  // of keys or values
  // Mean, scale, weight [3, heads, D] or 0; (scale, shift) [heads, GROUPS, 2].
  const float* channels; const u16* fixed;
  float half_clip; int rotate;
};

struct Calibration {  // a head's, of this lane's channels
  Raw<E, 0> mean, scale, weight;
  float fixed[2][PARTS];

  __device__ __forceinline__ void load(const Side& side, int head, int heads) {
#pragma unroll
    for (int j = 0; j < Raw<E, 0>::WORDS; ++j) {
      mean.words[j] = 0;
      scale.words[j] = weight.words[j] = __float_as_uint(1.f);
    }
    if (side.channels) {
      const int at = head * D + FIRST;
      mean.load(side.channels, at);
      scale.load(side.channels, heads * D + at);
      weight.load(side.channels, 2 * heads * D + at);
    }
    if (STATIC && BITS < 16)
#pragma unroll
      for (int p = 0; p < PARTS; ++p) {
        const u16* of = side.fixed + 2 * (head * GROUPS + (FIRST + p) / SIZE);
        fixed[0][p] = half_to_float(of[0]); fixed[1][p] = half_to_float(of[1]);
      }
  }
};

template <int BYTES> __device__ __forceinline__ void put(unsigned char* to, u64 bytes) {
  if (BYTES == 1) *to = bytes;
  if (BYTES == 2) *(u16*)to = bytes;
  if (BYTES == 4) *(u32*)to = bytes;
  if (BYTES == 8) *(u64*)to = bytes;
}

struct Place {  // of a row in the pages
  unsigned char* page; int token; bool is_value, is_there;

  __device__ __forceinline__ Place(unsigned char* pages, int num_pages, long long slot, int head, int heads,
                                   bool is_value)
      : page(pages + (slot / PAGE_TOKENS * heads + head) * PAGE_BYTES),
        token(slot % PAGE_TOKENS),
        is_value(is_value),
        is_there(slot >= 0 && slot < num_pages * (long long)PAGE_TOKENS) {
    page += token / UNIT * UNIT_BYTES;
    token %= UNIT;
  }
  __device__ __forceinline__ Place(unsigned char* page, u32 token, bool is_value)  // of a token in its page
      : page(page + token / UNIT * UNIT_BYTES), token(token % UNIT), is_value(is_value), is_there(true) {}
  __device__ __forceinline__ int eight() const { return token / 8 * 8 * CODE_BYTES; }
  __device__ __forceinline__ unsigned char* key_byte(int i) const {
    constexpr int CHUNK = SMALLER(CODE_BYTES & -CODE_BYTES, 64);
    return page + eight() + (i / CHUNK * 8 + token % 8) * CHUNK + i % CHUNK;
  }
  __device__ __forceinline__ unsigned char* value_byte(int channel) const {  // the one that the channel begins in
    const int g = channel / 16, pair = token % 8 / 2, second = token % 2;
    unsigned char* codes = page + UNIT * KEY_CODE_BYTES + eight();
    if (BITS == 4) return codes + ((g * 4 + pair) * 4 + channel / 4 % 4) * 4 + second * 2 + channel / 2 % 2;
    if (BITS == 8) return codes + ((channel / 8 % 2 * (D / 16) + g) * 4 + pair) * 16 + channel % 8 * 2 + second;
    return codes + ((channel / 4 % 4 * (D / 16) + g) * 4 + pair) * 16 + channel % 4 * 4 + second * 2;
  }
  // A group's scale; the shift follows it, but in values of several groups another token's scale stands between.
  __device__ __forceinline__ unsigned char* scale_byte(int g) const {
    unsigned char* scales = page + UNIT * (KEY_CODE_BYTES + VALUE_CODE_BYTES) + is_value * UNIT * KEY_SCALE_BYTES;
    if (is_value && GROUPS > 1)
      return scales + (((token / 16 * GROUPS + g) * 4 + token % 8 / 2) * 2 + token / 8 % 2) * 8 + token % 2 * 2;
    return scales + ((token % 8 * GROUPS + g) * (UNIT / 8) + token / 8) * 4;
  }
  __device__ __forceinline__ void store_scale(int g, u16 scale, u16 shift) const {
    unsigned char* to = scale_byte(g);
    if (is_value && GROUPS > 1) {
      put<2>(to, scale); put<2>(to + 4, shift);
    } else {
      put<4>(to, scale | (u32)shift << 16);
    }
  }
  __device__ __forceinline__ u32 load_scale(int g) const {  // the shift is the upper half
    const unsigned char* from = scale_byte(g);
    return is_value && GROUPS > 1 ? *(const u16*)from | (u32)*(const u16*)(from + 4) << 16 : *(const u32*)from;
  }
};

// A lane's channels of a row of KIND, from element `at` on.
__device__ __forceinline__ void store_numbers(void* out, long long at, const float (&v)[E]) {
  constexpr int BYTES = KIND ? 2 : 4, TOGETHER = SMALLER(E & -E, 8 / BYTES);
#pragma unroll
  for (int j = 0; j < E; j += TOGETHER) {
    u64 word = 0;
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i)
      word |= (u64)(KIND == 0   ? __float_as_uint(v[j + i])
                    : KIND == 1 ? to_bfloat(v[j + i])
                                : to_half(v[j + i]))
              << 8 * BYTES * i;
    put<TOGETHER * BYTES>((unsigned char*)out + (at + j) * BYTES, word);
  }
}
