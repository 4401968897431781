// Rows of the paged cache, one token's key or value of one head, in a warp: a lane has the E channels from FIRST on. To the bit as formats/kv_int4.py
// quantizes them where they are finite; NaN stays NaN.
//
// Sums are taken in the order of `fold` there: halves are added, which are another lane's or a lane's own channels, while the size is even; the rest from
// left to right. Where a byte stands in its page is `page_order` there, in closed form. Loads come first and stores are what a slot decides, so that a row's
// reads are under way together.
//
// Macros: D, a multiple of 32; BITS 4 | 8 | 16; SIZE of a group; STATIC 0 | 1; KIND of the input, 0 float32, 1 bfloat16, 2 float16. Rows begin at multiples of
// E elements where E is a power of two.

#define E (D / 32)                            // channels of a lane
#define LANE ((int)(threadIdx.x % 32))
#define FIRST (E * LANE)
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
#define SMALLER(a, b) ((a) < (b) ? (a) : (b))
#define PARTS (IS_POWER(D) ? 1 : E)           // a lane's channels are of one group, or of one each
#define SPLITS_BYTES (BITS == 4 && E % 2)     // between lanes
#define ROOM (IS_POWER(D) && !SPLITS_BYTES ? 1 : D)  // floats of shared memory that a warp needs

__device__ __forceinline__ u16 to_half(float v) { u16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v)); return r; }
__device__ __forceinline__ u16 to_bfloat(float v) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(0.f), "f"(v)); return (u16)r; }
__device__ __forceinline__ float from_bfloat(u16 v) { return __uint_as_float((u32)v << 16); }

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

struct Add { static __device__ __forceinline__ float of(float a, float b) { return __fadd_rn(a, b); } };
struct Min { static __device__ __forceinline__ float of(float a, float b) { float r; asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; } };
struct Max { static __device__ __forceinline__ float of(float a, float b) { float r; asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; } };

// COUNT folds at once, so that they wait together: each over the groups of N channels; a lane gets those of its channels. Two lanes that add the same share
// the work: each sends the half of its sums that the other one goes on with. `room` is of ROOM floats.
template <int N, class How, int COUNT> __device__ __forceinline__ void fold(float (&t)[COUNT][E], float (&result)[COUNT][PARTS], float* room) {
  if constexpr (IS_POWER(D)) {
    int kept = E;
#pragma unroll
    for (int step = N / E / 2; step; step /= 2) {
      const bool shares = kept > 1, upper = LANE & step;
      if (shares) kept /= 2;
      float other[COUNT][E];
#pragma unroll
      for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int j = 0; j < kept; ++j) {
          const float low = t[i][j], high = shares ? t[i][j + kept] : low;
          t[i][j] = upper ? high : low;
          other[i][j] = __shfl_xor_sync(ALL, upper ? low : high, step);
        }
#pragma unroll
      for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int j = 0; j < kept; ++j) t[i][j] = How::of(t[i][j], other[i][j]);
    }
#pragma unroll
    for (int step = N / E / 2, half = E / 2; half; step /= 2, half /= 2) {
      if (!step) kept /= 2;
      float other[COUNT][E];
#pragma unroll
      for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int j = 0; j < kept; ++j) other[i][j] = step ? __shfl_xor_sync(ALL, t[i][j], step) : t[i][j + kept];
#pragma unroll
      for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int j = 0; j < kept; ++j) t[i][j] = How::of(t[i][j], other[i][j]);
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) result[i][0] = t[i][0];
  } else {
    for (int k = 0; k < COUNT; ++k) {
      __syncwarp();
#pragma unroll
      for (int j = 0; j < E; ++j) room[FIRST + j] = t[k][j];
      __syncwarp();
      int size = N;
      while (size % 2 == 0) {
        size /= 2;
        for (int i = LANE; i < D / N * size; i += 32) { float* of = room + i / size * N + i % size; *of = How::of(*of, of[size]); }
        __syncwarp();
      }
#pragma unroll
      for (int j = 0; j < PARTS; ++j) {
        const float* of = room + (FIRST + j) / N * N;
        result[k][j] = of[0];
        for (int i = 1; i < size; ++i) result[k][j] = How::of(result[k][j], of[i]);
      }
    }
  }
}

// The least of all lanes' channels, NaN if there is one: as integers floats have the same order, with NaN before all.
__device__ __forceinline__ float least(const float (&v)[E]) {
  float low = v[0];
#pragma unroll
  for (int j = 1; j < E; ++j) low = Min::of(low, v[j]);
  int key = __float_as_int(low);
  key = low != low ? 1 << 31 : key ^ (key >> 31 & 0x7fffffff);
  key = __reduce_min_sync(ALL, key);
  return __int_as_float(key ^ (key >> 31 & 0x7fffffff));
}

// a / b as IEEE rounds it, without the branches that a division has, for 2^-60 < |b| < 2^60 and |a| < 2^60; `y` is reciprocal(b).
__device__ __forceinline__ float reciprocal(float b) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(b));
  return __fmaf_rn(y, __fmaf_rn(-b, y, 1.f), y);
}
__device__ __forceinline__ float quotient(float a, float b, float y) {
  const float q = __fmul_rn(a, y);
  return __fmaf_rn(y, __fmaf_rn(-b, q, a), q);
}
__device__ __forceinline__ bool is_plain(float v) { return fabsf(v) < 1.152921504606847e18f && fabsf(v) > 8.673617379884035e-19f; }

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
    for (int j = 0; j < E; ++j) other[j] = !IS_POWER(D) ? room[FIRST + j ^ step] : step < E ? v[j ^ step] : __shfl_xor_sync(ALL, v[j], step / E);
#pragma unroll
    for (int j = 0; j < E; ++j) v[j] = FIRST + j & step ? __fsub_rn(other[j], v[j]) : __fadd_rn(v[j], other[j]);
  }
#pragma unroll
  for (int j = 0; j < E; ++j) v[j] = __fmul_rn(v[j], norm);
}

// `scale` is of float16, `y` its reciprocal. What is beyond 2^30 is beyond all codes.
__device__ __forceinline__ float code_of(float v, float scale, float y, float shift) {
  const float code = rintf(quotient(fminf(fmaxf(__fsub_rn(v, shift), -1073741824.f), 1073741824.f), scale, y));
  return fminf(fmaxf(code, 0.f), (float)MOST);
}

__device__ __forceinline__ void to_codes(float (&codes)[E], const float (&v)[E], const float (&scale)[PARTS], const float (&shift)[PARTS]) {
  float y[PARTS];
#pragma unroll
  for (int p = 0; p < PARTS; ++p) y[p] = reciprocal(scale[p]);
#pragma unroll
  for (int j = 0; j < E; ++j) codes[j] = code_of(v[j], scale[j % PARTS], y[j % PARTS], shift[j % PARTS]);
}

// What float16 makes of a scale and a shift; NaN stays.
__device__ __forceinline__ void to_halves(float& scale, float& shift) {
  scale = half_to_float(to_half(Min::of(Max::of(scale, 5.9604644775390625e-8f), 65504.f)));
  shift = half_to_float(to_half(Min::of(Max::of(shift, -65504.f), 65504.f)));
}

// Codes of a row in place of its values, and what they are of: the scale and shift of each part.
__device__ __forceinline__ void quantize(float (&v)[E], const float (&w)[E], float half_clip, float step, int refits, float* room, float (&scale)[PARTS], float (&shift)[PARTS]) {
  float ends[2][E], end[2][PARTS];            // least, and the negative of the largest
#pragma unroll
  for (int j = 0; j < E; ++j) { ends[0][j] = v[j]; ends[1][j] = -v[j]; }
  if constexpr (IS_POWER(D) && GROUPS == 1) {
    end[0][0] = least(ends[0]); end[1][0] = least(ends[1]);
  } else {
    fold<SIZE, Min>(ends, end, room);
  }
#pragma unroll
  for (int p = 0; p < PARTS; ++p) {
    const float low = end[0][p], high = -end[1][p];
    const float middle = __fmul_rn(__fadd_rn(low, high), 0.5f), reach = __fmul_rn(__fsub_rn(high, low), half_clip);
    scale[p] = __fmul_rn(reach, step); shift[p] = __fsub_rn(middle, reach);
    to_halves(scale[p], shift[p]);
  }
  float codes[E];
  to_codes(codes, v, scale, shift);
  float of_values[2][E], of_value[2][PARTS];  // sums of weights, and of weights times values
  if (refits) {
#pragma unroll
    for (int j = 0; j < E; ++j) { of_values[0][j] = w[j]; of_values[1][j] = __fmul_rn(w[j], v[j]); }
    fold<SIZE, Add>(of_values, of_value, room);
  }
  for (int i = 0; i < refits; ++i) {
    float sums[3][E], sum[3][PARTS];          // of weights times codes; that times codes; times values
#pragma unroll
    for (int j = 0; j < E; ++j) {
      sums[0][j] = __fmul_rn(w[j], codes[j]);
      sums[1][j] = __fmul_rn(sums[0][j], codes[j]); sums[2][j] = __fmul_rn(sums[0][j], v[j]);
    }
    fold<SIZE, Add>(sums, sum, room);
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      const float sum_w = of_value[0][p], sum_y = of_value[1][p], sum_c = sum[0][p], sum_cc = sum[1][p], sum_cy = sum[2][p];
      const float spread = __fsub_rn(__fmul_rn(sum_w, sum_cc), __fmul_rn(sum_c, sum_c)), slope = __fsub_rn(__fmul_rn(sum_w, sum_cy), __fmul_rn(sum_c, sum_y));
      float better = quotient(slope, spread, reciprocal(spread)), left = __fsub_rn(sum_y, __fmul_rn(better, sum_c)), rest = quotient(left, sum_w, reciprocal(sum_w));
      if (!(is_plain(spread) && is_plain(slope) && is_plain(sum_w) && is_plain(left))) {
        better = __fdiv_rn(slope, spread);
        rest = __fdiv_rn(__fsub_rn(sum_y, __fmul_rn(better, sum_c)), sum_w);
      }
      if (spread > 0.f && better > 0.f && better < __int_as_float(0x7f800000)) { scale[p] = better; shift[p] = rest; }
      to_halves(scale[p], shift[p]);
    }
    to_codes(codes, v, scale, shift);
  }
#pragma unroll
  for (int j = 0; j < E; ++j) v[j] = codes[j];
}

struct Side {  // of keys or values
  const float* channels; const u16* fixed;    // mean, scale, weight [3, heads, D] or 0; (scale, shift) [heads, GROUPS, 2]
  float half_clip; int rotate;
};

struct Calibration {  // a head's, of this lane's channels
  Raw<E, 0> mean, scale, weight;
  float fixed[2][PARTS];

  __device__ __forceinline__ void load(const Side& side, int head, int heads) {
#pragma unroll
    for (int j = 0; j < Raw<E, 0>::WORDS; ++j) { mean.words[j] = 0; scale.words[j] = weight.words[j] = __float_as_uint(1.f); }
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

  __device__ __forceinline__ Place(unsigned char* pages, int num_pages, long long slot, int head, int heads, bool is_value)
      : page(pages + (slot / 64 * heads + head) * PAGE_BYTES), token(slot % 64), is_value(is_value), is_there(slot >= 0 && slot < num_pages * 64ll) {
    page += token / 32 * UNIT_BYTES;
    token %= 32;
  }
  __device__ __forceinline__ Place(unsigned char* page, u32 token, bool is_value)  // of a token in its page
      : page(page + token / 32 * UNIT_BYTES), token(token % 32), is_value(is_value), is_there(true) {}
  __device__ __forceinline__ int eight() const { return token / 8 * 8 * CODE_BYTES; }
  __device__ __forceinline__ unsigned char* key_byte(int i) const {
    constexpr int CHUNK = SMALLER(CODE_BYTES & -CODE_BYTES, 64);
    return page + eight() + (i / CHUNK * 8 + token % 8) * CHUNK + i % CHUNK;
  }
  __device__ __forceinline__ unsigned char* value_byte(int channel) const {  // the one that the channel begins in
    const int g = channel / 16, pair = token % 8 / 2, second = token % 2;
    unsigned char* codes = page + 32 * CODE_BYTES + eight();
    if (BITS == 4) return codes + ((g * 4 + pair) * 4 + channel / 4 % 4) * 4 + second * 2 + channel / 2 % 2;
    if (BITS == 8) return codes + ((channel / 8 % 2 * (D / 16) + g) * 4 + pair) * 16 + channel % 8 * 2 + second;
    return codes + ((channel / 4 % 4 * (D / 16) + g) * 4 + pair) * 16 + channel % 4 * 4 + second * 2;
  }
  // A group's scale; the shift follows it, but in values of several groups another token's scale stands between.
  __device__ __forceinline__ unsigned char* scale_byte(int g) const {
    unsigned char* scales = page + 64 * CODE_BYTES + is_value * 32 * SCALE_BYTES;
    if (is_value && GROUPS > 1) return scales + (((token / 16 * GROUPS + g) * 4 + token % 8 / 2) * 2 + token / 8 % 2) * 8 + token % 2 * 2;
    return scales + ((token % 8 * GROUPS + g) * 4 + token / 8) * 4;
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

// Four lanes with four elements each, of 8 or 16 bits: lane i's get to be the i-th ones of each lane, in the lanes' order.
__device__ __forceinline__ u64 exchanged(u64 mine) {
  const auto halves = [](u32 word) -> u32 {   // of neighbours
    const u32 other = __shfl_xor_sync(ALL, word, 1);
    return LANE % 2 ? other >> 16 | word & 0xffff0000 : word & 0xffff | other << 16;
  };
  if (BITS == 16) {
    const u32 low = mine, high = mine >> 32, other = __shfl_xor_sync(ALL, LANE & 2 ? low : high, 2);
    return halves(LANE & 2 ? other : low) | (u64)halves(LANE & 2 ? high : other) << 32;
  }
  u32 word = mine;
  u32 other = __shfl_xor_sync(ALL, word, 1);
  word = __byte_perm(word, other, LANE & 1 ? 0x3715 : 0x6240);
  other = __shfl_xor_sync(ALL, word, 2);
  return __byte_perm(word, other, LANE & 2 ? 0x3276 : 0x5410);
}

// Codes, or values of 16 bits.
__device__ __forceinline__ void store_row(const Place& place, const float (&v)[E], float* room) {
  const auto word = [&](int j, int count) -> u64 {
    u64 found = 0;
#pragma unroll
    for (int i = 0; i < count; ++i) found |= (u64)(BITS == 16 ? to_bfloat(v[j + i]) : (u32)v[j + i]) << BITS * i;
    return found;
  };
  constexpr int OF_KEYS = SMALLER(E & -E, 64 / BITS), OF_VALUES = BITS == 4 ? SMALLER(E & -E, 4) : 1;  // channels whose bytes follow one another
  if constexpr (SPLITS_BYTES) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < E; ++j) room[FIRST + j] = v[j];
    __syncwarp();
    for (int i = LANE; i < D / 2; i += 32) put<1>(place.is_value ? place.value_byte(2 * i) : place.key_byte(i), (u32)room[2 * i] | (u32)room[2 * i + 1] << 4);
  } else if (!place.is_value) {
#pragma unroll
    for (int j = 0; j < E; j += OF_KEYS) put<OF_KEYS * BITS / 8>(place.key_byte((FIRST + j) * BITS / 8), word(j, OF_KEYS));
  } else if (BITS > 4 && E == 4) {            // so that lanes side by side store side by side
    const u64 four = exchanged(word(0, 4));
#pragma unroll
    for (int j = 0; j < 4; ++j) put<BITS / 8>(place.value_byte(LANE / 4 * 16 + 4 * j + LANE % 4), four >> BITS * j);
  } else {
#pragma unroll
    for (int j = 0; j < E; j += OF_VALUES) put<OF_VALUES * BITS / 8>(place.value_byte(FIRST + j), word(j, OF_VALUES));
  }
}

// Quantizes a row and stores it, if its place is there.
__device__ __forceinline__ void append(float (&v)[E], const Side& side, const Calibration& of, const Place& place, float step, float norm, int refits, float* room) {
  if (BITS < 16) {
    if (side.channels) {
      bool plain = true;
#pragma unroll
      for (int j = 0; j < E; ++j) plain &= is_plain(of.scale[j]);
      plain = __all_sync(ALL, plain);
#pragma unroll
      for (int j = 0; j < E; ++j)
        v[j] = __fmul_rn(__fsub_rn(v[j], of.mean[j]), plain ? quotient(1.f, of.scale[j], reciprocal(of.scale[j])) : __fdiv_rn(1.f, of.scale[j]));
    }
    if (side.rotate) hadamard(v, norm, room);
#pragma unroll
    for (int j = 0; j < E; ++j) v[j] = __fadd_rn(v[j], 0.f);  // no -0, as in the reference
    if (STATIC) {
      to_codes(v, v, of.fixed[0], of.fixed[1]);
    } else {
      float weight[E], scale[PARTS], shift[PARTS];
#pragma unroll
      for (int j = 0; j < E; ++j) weight[j] = of.weight[j];
      quantize(v, weight, side.half_clip, step, refits, room, scale, shift);
#pragma unroll
      for (int p = 0; p < PARTS; ++p)
        if (place.is_there && (FIRST + p) % SIZE == 0) place.store_scale((FIRST + p) / SIZE, to_half(scale[p]), to_half(shift[p]));
    }
  }
  if (place.is_there) store_row(place, v, room);
}

// A lane's channels of a row of KIND, from element `at` on.
__device__ __forceinline__ void store_numbers(void* out, long long at, const float (&v)[E]) {
  constexpr int BYTES = KIND ? 2 : 4, TOGETHER = SMALLER(E & -E, 8 / BYTES);
#pragma unroll
  for (int j = 0; j < E; j += TOGETHER) {
    u64 word = 0;
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) word |= (u64)(KIND == 0 ? __float_as_uint(v[j + i]) : KIND == 1 ? to_bfloat(v[j + i]) : to_half(v[j + i])) << 8 * BYTES * i;
    put<TOGETHER * BYTES>((unsigned char*)out + (at + j) * BYTES, word);
  }
}
