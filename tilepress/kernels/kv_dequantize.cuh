// Rows of kv_rows.cuh, which stands before it, out of a page: eight tokens whose codes lie together in a unit, in a
// warp, which asks for all of them at once, then writes rows.

template <int BYTES> __device__ __forceinline__ void get(const unsigned char* from, u32* words) {
  if (BYTES == 1) words[0] = *from;
  if (BYTES == 2) words[0] = *(const u16*)from;
  if (BYTES == 4) words[0] = *(const u32*)from;
  if (BYTES == 8) { const uint2 w = *(const uint2*)from; words[0] = w.x; words[1] = w.y; }
#pragma unroll
  for (int i = 0; i < BYTES / 16; ++i) {
    const uint4 w = ((const uint4*)from)[i];
    words[4 * i] = w.x; words[4 * i + 1] = w.y; words[4 * i + 2] = w.z; words[4 * i + 3] = w.w;
  }
}

// Codes of 8 tokens as memory has them. A lane's channels of a key are neighbours; of values four are, of a pair of
// tokens. Where D is no power of two each channel is asked for.
template <bool IS_VALUE> struct Codes {
  static constexpr bool EACH = !IS_POWER(D), PAIRS = IS_VALUE && !EACH;
  static constexpr int NEAR = SMALLER(E, 4);  // channels of a pair that follow one another
  // Asked for at once.
  static constexpr int BYTES = EACH ? (BITS + 7) / 8 : PAIRS ? (BITS == 4 ? 4 : BITS * NEAR / 4) : (E * BITS + 7) / 8;
  static constexpr int WORDS = (BYTES + 3) / 4, COUNT = EACH ? E : PAIRS ? E / NEAR : 1;
  u32 words[PAIRS ? 4 : 8][COUNT * WORDS];

  __device__ __forceinline__ void load(const Place& first) {
#pragma unroll
    for (int i = 0; i < (PAIRS ? 4 : 8); ++i) {
      Place place = first;
      place.token += PAIRS ? 2 * i : i;
#pragma unroll
      for (int j = 0; j < COUNT; ++j) {
        const int channel = EACH ? FIRST + j : PAIRS ? (BITS == 4 ? FIRST / 4 * 4 : FIRST) + 4 * j : FIRST;
        get<BYTES>(IS_VALUE ? place.value_byte(channel) : place.key_byte(channel * BITS / 8), words[i] + j * WORDS);
      }
    }
  }
  // The number that token i has in channel FIRST + j before its scale.
  __device__ __forceinline__ float number(int i, int j) const {
    // Where 4 bits stand that share what was asked for with other lanes'.
    const int low = (FIRST + j) % (PAIRS ? 4 : 2) * 4;
    const int bit = EACH             ? j * 32 + (BITS == 4 ? low : 0)
                    : !PAIRS         ? j * BITS + (E * BITS < 8 ? low : 0)
                    : BITS == 4      ? j / 4 * 32 + i % 2 * 16 + (E < 4 ? low : j % 4 * 4)
                                     : j / 4 * WORDS * 32 + j % 4 * 2 * BITS + i % 2 * BITS;
    const u32 code = words[PAIRS ? i / 2 : i][bit / 32] >> bit % 32 & (BITS == 16 ? 0xffff : MOST);
    return BITS == 16 ? from_bfloat(code) : (float)code;
  }
};

template <bool IS_VALUE>
__device__ __forceinline__ void read(const unsigned char* page, int first, int length, int max_len, const Side& side,
                                     int head, int heads, float norm, void* out, long long at, float* room) {
  constexpr bool HAS_SCALES = SCALE_BYTES > 0;
  Codes<IS_VALUE> codes;
  u32 scales[8][PARTS];
  Calibration calibration;
  if (first < length) {
    const Place place((unsigned char*)page, (u32)first % PAGE_TOKENS, IS_VALUE);
    codes.load(place);
    if (HAS_SCALES)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        Place of = place;
        of.token += i;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) scales[i][p] = of.load_scale((FIRST + p) / SIZE);
      }
    calibration.load(side, head, heads);
  }
#if __CUDA_ARCH__ >= 900
  launch_dependents();                        // earlier, the next kernel's blocks would be in the way of this one's
#endif
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (first + i >= max_len) return;
    float v[E];
    if (first + i < length) {
#pragma unroll
      for (int j = 0; j < E; ++j) {
        v[j] = codes.number(i, j);
        if (BITS < 16) {
          const int p = j % PARTS;
          const float scale = HAS_SCALES ? half_to_float((u16)scales[i][p]) : calibration.fixed[0][p];
          const float shift = HAS_SCALES ? half_to_float((u16)(scales[i][p] >> 16)) : calibration.fixed[1][p];
          v[j] = __fadd_rn(__fmul_rn(v[j], scale), shift);
        }
      }
      if (!IS_VALUE && side.rotate) hadamard(v, norm, room);
      if (side.channels)
#pragma unroll
        for (int j = 0; j < E; ++j) v[j] = __fadd_rn(__fmul_rn(v[j], calibration.scale[j]), calibration.mean[j]);
    } else {
#pragma unroll
      for (int j = 0; j < E; ++j) v[j] = 0.f;
    }
    store_numbers(out, at + i * D, v);
  }
}
