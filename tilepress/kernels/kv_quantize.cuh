// Quantizes rows of kv_rows.cuh, which stands before it, and stores them: to the bit as formats/kv_int4.py does where
// they are finite; NaN stays NaN.
//
// Extremes and a refit's sums are of integers, in any order. Loads come first and stores are what a slot decides, so
// that a row's reads are under way together.
//
// Macros, beside those of kv_rows.cuh: CHANNELS 0: neither side is calibrated by channels; ROTATE 0 | 1: keys are;
// REFITS of scales, where they are of dynamic 4 bits; FEEDBACK 0 | 1: of errors of 4-bit keys.

#define REFITTED (BITS == 4 && !STATIC ? REFITS : 0)

struct Min {
  static __device__ __forceinline__ float of(float a, float b) {
    float r;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
  }
};
struct Max {
  static __device__ __forceinline__ float of(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
  }
};

struct Sum {
  static constexpr int NONE = 0;
  static __device__ __forceinline__ int of(int a, int b) { return a + b; }
  static __device__ __forceinline__ int of_warp(int a) { return __reduce_add_sync(ALL, a); }
};
struct Least {
  static constexpr int NONE = 0x7fffffff;
  static __device__ __forceinline__ int of(int a, int b) { return min(a, b); }
  static __device__ __forceinline__ int of_warp(int a) { return __reduce_min_sync(ALL, a); }
};

// COUNT sums or minima at once, so that they wait together: of lanes' parts, each over the groups that its channels are
// of.
template <class How, int COUNT> __device__ __forceinline__ void over_groups(int (&t)[COUNT][PARTS]) {
  if constexpr (GROUPS == 1) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
#pragma unroll
      for (int p = 1; p < PARTS; ++p) t[i][0] = How::of(t[i][0], t[i][p]);
      t[i][0] = How::of_warp(t[i][0]);
#pragma unroll
      for (int p = 1; p < PARTS; ++p) t[i][p] = t[i][0];
    }
  } else if constexpr (PARTS == 1) {
#pragma unroll
    for (int step = SIZE / E / 2; step; step /= 2) {
      int other[COUNT];
#pragma unroll
      for (int i = 0; i < COUNT; ++i) other[i] = __shfl_xor_sync(ALL, t[i][0], step);
#pragma unroll
      for (int i = 0; i < COUNT; ++i) t[i][0] = How::of(t[i][0], other[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      int found[PARTS];
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        int mine = How::NONE;
#pragma unroll
        for (int p = 0; p < PARTS; ++p)
          if ((FIRST + p) / SIZE == g) mine = How::of(mine, t[i][p]);
        mine = How::of_warp(mine);
#pragma unroll
        for (int p = 0; p < PARTS; ++p)
          if ((FIRST + p) / SIZE == g) found[p] = mine;
      }
#pragma unroll
      for (int p = 0; p < PARTS; ++p) t[i][p] = found[p];
    }
  }
}

// Integers in the order of floats, with NaN before all.
__device__ __forceinline__ int ordered(float v) {
  const int bits = __float_as_int(v);
  return v != v ? 1 << 31 : bits ^ (bits >> 31 & 0x7fffffff);
}
__device__ __forceinline__ float from_ordered(int key) { return __int_as_float(key ^ (key >> 31 & 0x7fffffff)); }

// a / b as IEEE rounds it, without the branches that a division has, for 2^-60 < |b| < 2^60 and |a| < 2^60; `y` is
// reciprocal(b).
__device__ __forceinline__ float reciprocal(float b) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(b));
  return __fmaf_rn(y, __fmaf_rn(-b, y, 1.f), y);
}
__device__ __forceinline__ float quotient(float a, float b, float y) {
  const float q = __fmul_rn(a, y);
  return __fmaf_rn(y, __fmaf_rn(-b, q, a), q);
}
__device__ __forceinline__ bool is_plain(float v) {
  return fabsf(v) < 1.152921504606847e18f && fabsf(v) > 8.673617379884035e-19f;
}

// v * 2^LOG to the nearest integer, below 2^22.
template <int LOG = 0>
__device__ __forceinline__ int whole(float v) {
  return __float_as_int(__fmaf_rn(v, 1 << LOG, 12582912.f)) - 0x4b400000;
}

__device__ __forceinline__ void to_codes(u32 (&codes)[E], const float (&v)[E], const float (&scale)[PARTS],
                                         const float (&shift)[PARTS]) {
  float y[PARTS], top[PARTS];
#pragma unroll
  for (int p = 0; p < PARTS; ++p) { y[p] = reciprocal(scale[p]); top[p] = __fmul_rn(scale[p], MOST); }
#pragma unroll
  for (int j = 0; j < E; ++j) {
    const int p = j % PARTS;
    codes[j] = whole(quotient(fminf(fmaxf(__fsub_rn(v[j], shift[p]), 0.f), top[p]), scale[p], y[p]));
  }
}

// Weights as whole numbers up to 64, a group's largest at least 32 (if it is not below 2^-100), or 1 each; and their
// sums.
struct Importance {
  int w[E], sum[1][PARTS];

  __device__ __forceinline__ Importance() {
#pragma unroll
    for (int j = 0; j < E; ++j) w[j] = 1;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) sum[0][p] = SIZE;
  }
  __device__ __forceinline__ void load(const Raw<E, 0>& weight) {
    int least[1][PARTS];                      // positive floats have the order of their bits
#pragma unroll
    for (int p = 0; p < PARTS; ++p) least[0][p] = 0;
#pragma unroll
    for (int j = 0; j < E; ++j) least[0][j % PARTS] = min(least[0][j % PARTS], -(int)(weight.words[j] & 0x7fffffff));
    over_groups<Least>(least);
#pragma unroll
    for (int p = 0; p < PARTS; ++p) sum[0][p] = 0;
#pragma unroll
    for (int j = 0; j < E; ++j) {
      const int exponent = max(-least[0][j % PARTS] >> 23, 27);
      w[j] = whole(__fmul_rn(weight[j], __int_as_float(259 - exponent << 23)));
      sum[0][j % PARTS] += w[j];
    }
    over_groups<Sum>(sum);
  }
};

// Scales and shifts of a row's groups: its extremes', refitted to the codes that they give. The constants are those of
// formats/kv_int4.py.
struct Scales {
  float scale[PARTS], shift[PARTS];

  __device__ __forceinline__ void set(int p, float s, float z) {  // what float16 can round; NaN stays
    scale[p] = Min::of(Max::of(s, 5.9604644775390625e-8f), 65504.f);
    shift[p] = Min::of(Max::of(z, -65504.f), 65504.f);
  }
  __device__ __forceinline__ void round() {
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      scale[p] = half_to_float(to_half(scale[p]));
      shift[p] = half_to_float(to_half(shift[p]));
    }
  }

  __device__ __forceinline__ void of_extremes(const float (&v)[E], float half_clip) {
    int ends[2][PARTS];                       // least, and the negative of the largest
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      float low = v[p], high = -v[p];
#pragma unroll
      for (int j = p + PARTS; j < E; j += PARTS) { low = Min::of(low, v[j]); high = Min::of(high, -v[j]); }
      ends[0][p] = ordered(low); ends[1][p] = ordered(high);
    }
    over_groups<Least>(ends);
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      const float low = from_ordered(ends[0][p]), high = -from_ordered(ends[1][p]);
      const float middle = __fmul_rn(__fadd_rn(low, high), 0.5f), reach = __fmul_rn(__fsub_rn(high, low), half_clip);
      set(p, __fmul_rn(reach, (float)(2. / MOST)), __fsub_rn(middle, reach));
    }
  }

  __device__ __forceinline__ void refit(const float (&v)[E], const Importance& importance) {
    constexpr int LOG = SIZE <= 256 ? 12 : SIZE <= 512 ? 11 : 10, STEP = 1 << LOG, FAR = 2, STRETCH = 2;
    static_assert(SIZE <= 1024, "sums of 31 bits");
    // Of weights times codes; that times codes; of weights times errors; that times codes.
    int sums[4][PARTS];
    float inverse[PARTS];
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      inverse[p] = quotient(1.f, scale[p], reciprocal(scale[p]));
      sums[0][p] = sums[1][p] = sums[2][p] = sums[3][p] = 0;
    }
#pragma unroll
    for (int j = 0; j < E; ++j) {
      const int p = j % PARTS;
      const float place = fminf(fmaxf(__fmul_rn(__fsub_rn(v[j], shift[p]), inverse[p]), (float)-FAR),
                                (float)(MOST + FAR));
      const int found = whole<LOG>(place);
      const int code = min(max(found + STEP / 2 >> LOG, 0), MOST);
      const int weighted = importance.w[j] * code, error = importance.w[j] * (found - STEP * code);
      sums[0][p] += weighted; sums[1][p] += weighted * code;
      sums[2][p] += error; sums[3][p] += error * code;
    }
    over_groups<Sum>(sums);
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      const float sum_w = importance.sum[0][p], sum_c = sums[0][p], sum_cc = sums[1][p], sum_e = sums[2][p],
                  sum_ec = sums[3][p];
      const float spread = __fsub_rn(__fmul_rn(sum_w, sum_cc), __fmul_rn(sum_c, sum_c)), y = reciprocal(spread);
      const float slope = __fsub_rn(__fmul_rn(sum_w, sum_ec), __fmul_rn(sum_c, sum_e)),
                  level = __fsub_rn(__fmul_rn(sum_cc, sum_e), __fmul_rn(sum_c, sum_ec));
      const float stretch = __fadd_rn(1.f, __fmul_rn(quotient(slope, spread, y), (float)STRETCH / STEP));
      const float move = __fmul_rn(quotient(level, spread, y), (float)STRETCH / STEP);
      if (spread > 0.f && stretch > 0.f)
        set(p, __fmul_rn(scale[p], stretch), __fadd_rn(shift[p], __fmul_rn(scale[p], move)));
    }
  }
};

// Four lanes with four elements each, of 8 or 16 bits: lane i's get to be the i-th ones of each lane, in the lanes'
// order.
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

// Codes, or bfloat16.
__device__ __forceinline__ void store_row(const Place& place, const u32 (&numbers)[E], u32* room) {
  const auto word = [&](int j, int count) -> u64 {
    u64 found = 0;
#pragma unroll
    for (int i = 0; i < count; ++i) found |= (u64)numbers[j + i] << BITS * i;
    return found;
  };
  // Channels whose bytes follow one another.
  constexpr int OF_KEYS = SMALLER(E & -E, 64 / BITS), OF_VALUES = BITS == 4 ? SMALLER(E & -E, 4) : 1;
  if constexpr (SPLITS_BYTES) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < E; ++j) room[FIRST + j] = numbers[j];
    __syncwarp();
    for (int i = LANE; i < D / 2; i += 32)
      put<1>(place.is_value ? place.value_byte(2 * i) : place.key_byte(i), room[2 * i] | room[2 * i + 1] << 4);
  } else if (!place.is_value) {
#pragma unroll
    for (int j = 0; j < E; j += OF_KEYS)
      put<OF_KEYS * BITS / 8>(place.key_byte((FIRST + j) * BITS / 8), word(j, OF_KEYS));
  } else if (BITS > 4 && E == 4) {            // so that lanes side by side store side by side
    const u64 four = exchanged(word(0, 4));
#pragma unroll
    for (int j = 0; j < 4; ++j) put<BITS / 8>(place.value_byte(LANE / 4 * 16 + 4 * j + LANE % 4), four >> BITS * j);
  } else {
#pragma unroll
    for (int j = 0; j < E; j += OF_VALUES) put<OF_VALUES * BITS / 8>(place.value_byte(FIRST + j), word(j, OF_VALUES));
  }
}

// Error feedback: channels are coded in eight blocks, a block being those of four lanes, and each block's errors move
// the channels behind it. Other channels are moved by 0, so that all lanes do the same. The constants are those of
// formats/kv_int4.py. A warp waits for seven blocks in turn, so each does as little as it can, in steps of the row's
// scales; what is multiplied with is asked for before the row is known.
#define FEEDBACK_ROOM (FEEDBACK && !IS_POWER(D) ? D / 16 : 1)  // floats of shared memory: two blocks' errors

struct Feedback {
  // A block's errors are E words, each of which a lane multiplies for E channels; AHEAD blocks are in registers.
  static constexpr int BLOCKS = 8, AHEAD = E <= 2 ? BLOCKS - 1 : E <= 4 ? 3 : E <= 8, ERROR_PARTS = 128, ONE = 64;
  static constexpr float TO_WHOLE = 12582912.f;  // a float has this and whole numbers below 2^22 in its lower bits
  const u32* words = 0;                       // of the head
  Raw<E, 0> ahead[AHEAD ? AHEAD : 1][AHEAD ? E : 1];

  __device__ __forceinline__ void load(int block, int i) {
    ahead[AHEAD ? block % AHEAD : 0][AHEAD ? i : 0].load(words, (block * E + i) * D + FIRST);
  }
  __device__ __forceinline__ void load(const u32* of_heads, int head) {
    words = of_heads + (long long)head * (D * D / 4);
#pragma unroll
    for (int block = 0; block < AHEAD; ++block)
#pragma unroll
      for (int i = 0; i < E; ++i) load(block, i);
  }

  // The errors of a block's channels, four in a word, for every lane.
  static __device__ __forceinline__ void share(u32 (&words)[E], const u32 (&mine)[E], int block, u32* room) {
    if constexpr (!IS_POWER(D)) {
      signed char* errors = (signed char*)(room + block % 2 * E);
      if (LANE / 4 == block)
#pragma unroll
        for (int j = 0; j < E; ++j) errors[LANE % 4 * E + j] = mine[j];
      __syncwarp();
#pragma unroll
      for (int i = 0; i < E; ++i) words[i] = ((const u32*)errors)[i];
    } else if constexpr (E >= 4) {
#pragma unroll
      for (int i = 0; i < E; ++i) {           // the word i of the block is of lane i / (E / 4)
        const int j = i % (E / 4) * 4;
        const u32 four = __byte_perm(__byte_perm(mine[j], mine[j + 1], 0x0040),
                                     __byte_perm(mine[j + 2], mine[j + 3], 0x0040), 0x5410);
        words[i] = __shfl_sync(ALL, four, block * 4 + i / (E / 4));
      }
    } else {
      const u32 own = E == 1 ? mine[0] : __byte_perm(mine[0], mine[E - 1], 0x0040);
      u32 of[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) of[i] = __shfl_sync(ALL, own, block * 4 + i);
      if constexpr (E == 1) {
        words[0] = __byte_perm(__byte_perm(of[0], of[1], 0x0040), __byte_perm(of[2], of[3], 0x0040), 0x5410);
      } else {
        words[0] = __byte_perm(of[0], of[1], 0x5410);
        words[E - 1] = __byte_perm(of[2], of[3], 0x5410);
      }
    }
  }

  // Codes of v; `room` is of FEEDBACK_ROOM words.
  __device__ __forceinline__ void to_codes(u32 (&codes)[E], const float (&v)[E], const float (&scale)[PARTS],
                                           const float (&shift)[PARTS], u32* room) {
    int largest = 0;                          // positive floats have the order of their bits
#pragma unroll
    for (int p = 0; p < PARTS; ++p) largest = max(largest, __float_as_int(scale[p]));
    const float step = __int_as_float(__reduce_max_sync(ALL, largest)), to_step = reciprocal(step);
    float place[E], parts[PARTS], back[PARTS];
#pragma unroll
    for (int p = 0; p < PARTS; ++p) {
      const float y = reciprocal(scale[p]);
      parts[p] = __fmul_rn(quotient(scale[p], step, to_step), (float)ERROR_PARTS);
      back[p] = __fmul_rn(quotient(step, scale[p], y), 1.f / (ERROR_PARTS * ONE));
#pragma unroll
      for (int j = p; j < E; j += PARTS) place[j] = quotient(__fsub_rn(v[j], shift[p]), scale[p], y);
    }
    if (!IS_POWER(D)) __syncwarp();
#pragma unroll
    for (int block = 0; block < BLOCKS - 1; ++block) {
      u32 mine[E], of_block[E];
      int moved[E];
#pragma unroll
      for (int j = 0; j < E; ++j) {
        const float code = __fsub_rn(__fadd_rn(fminf(fmaxf(place[j], 0.f), MOST), TO_WHOLE), TO_WHOLE);
        const float error = __fmul_rn(__fsub_rn(place[j], code), parts[j % PARTS]), most = ERROR_PARTS - 1;
        mine[j] = __float_as_uint(__fadd_rn(fminf(fmaxf(error, -most), most), TO_WHOLE));  // its lowest byte
        moved[j] = __float_as_int(TO_WHOLE);
      }
      share(of_block, mine, block, room);
#pragma unroll
      for (int i = 0; i < E; ++i) {
        if (!AHEAD) load(block, i);
        const Raw<E, 0>& by = ahead[AHEAD ? block % AHEAD : 0][AHEAD ? i : 0];
#pragma unroll
        for (int j = 0; j < E; ++j) moved[j] = __dp4a((int)by.words[j], (int)of_block[i], moved[j]);
        if (AHEAD && block + AHEAD < BLOCKS - 1) load(block + AHEAD, i);
      }
#pragma unroll
      for (int j = 0; j < E; ++j)
        place[j] = __fadd_rn(place[j], __fmul_rn(__fsub_rn(__int_as_float(moved[j]), TO_WHOLE), back[j % PARTS]));
    }
#pragma unroll
    for (int j = 0; j < E; ++j) codes[j] = whole(fminf(fmaxf(place[j], 0.f), MOST));
  }
};

// Quantizes a row and stores it, if its place is there.
__device__ __forceinline__ void append(float (&v)[E], const Side& side, const Calibration& of, Feedback& feedback,
                                       const Place& place, float norm, float* room) {
  u32 numbers[E];
  if (BITS == 16) {
#pragma unroll
    for (int j = 0; j < E; ++j) numbers[j] = to_bfloat(v[j]);
  } else {
    Importance importance;
    if (side.channels) {
      if (REFITTED) importance.load(of.weight);
      bool plain = true;
#pragma unroll
      for (int j = 0; j < E; ++j) plain &= is_plain(of.scale[j]);
      plain = __all_sync(ALL, plain);
#pragma unroll
      for (int j = 0; j < E; ++j)
        v[j] = __fmul_rn(__fsub_rn(v[j], of.mean[j]),
                         plain ? quotient(1.f, of.scale[j], reciprocal(of.scale[j])) : __fdiv_rn(1.f, of.scale[j]));
    }
    if (side.rotate) hadamard(v, norm, room);
#pragma unroll
    for (int j = 0; j < E; ++j) v[j] = __fadd_rn(v[j], 0.f);  // no -0, as in the reference
    const auto round = [&](const float (&scale)[PARTS], const float (&shift)[PARTS]) {
      if (FEEDBACK && BITS == 4 && feedback.words) feedback.to_codes(numbers, v, scale, shift, (u32*)room);
      else to_codes(numbers, v, scale, shift);
    };
    if (STATIC) {
      round(of.fixed[0], of.fixed[1]);
    } else {
      Scales scales;
      scales.of_extremes(v, side.half_clip);
#pragma unroll
      for (int i = 0; i < REFITTED; ++i) scales.refit(v, importance);
      scales.round();
      round(scales.scale, scales.shift);
#pragma unroll
      for (int p = 0; p < PARTS; ++p)
        if (place.is_there && (FIRST + p) % SIZE == 0)
          place.store_scale((FIRST + p) / SIZE, to_half(scales.scale[p]), to_half(scales.shift[p]));
    }
  }
  if (place.is_there) store_row(place, numbers, (u32*)room);
}

// A row of memory, from element `at` on, quantized and stored; its bias is at `bias_at`, or 0.
__device__ __forceinline__ void append_row(const void* x, long long at, const void* bias, int bias_at, const Side& side,
                                           Feedback& feedback, int head, int heads, const Place& place, float norm,
                                           float* room) {
  Raw<E> raw, added;
  raw.load(x, at + FIRST);
  if (bias) added.load(bias, bias_at + FIRST);
  Calibration calibration;
  calibration.load(side, head, heads);
#if __CUDA_ARCH__ >= 900
  launch_dependents();                        // earlier, the next kernel's blocks would be in the way of this one's
#endif
  float v[E];
#pragma unroll
  for (int j = 0; j < E; ++j) v[j] = bias ? rounded(__fadd_rn(raw[j], added[j])) : raw[j];
  append(v, side, calibration, feedback, place, norm, room);
}
