// Codes of a paged cache as factors of the tensor core, for rows of any form: which bytes of a unit a lane reads, which
// channels they are, and what they become. formats/kv_pages.py has the order of pages.
//
// Keys are the left factor of an m16n8k16 product of 16 tokens by 8 queries, values the left factor of 16 channels by 8
// queries. A lane of number 4 g + c has token g of every 8 of the keys, the channels of c; of values the tokens 2 c and
// 2 c + 1 of every 8, the channels of g. A code of 4 or 8 bits in a half is a denormal of float16, exact; powers of two
// are undone in the query and at the end. Scales of a row multiply scores and probabilities, those of groups the codes.
//
// Macros: D, a multiple of 32; UNIT 16 | 32 tokens. attention_math.cuh comes before it.

template <int BITS_, int GROUPS_, bool STATIC> struct Codes {
  static constexpr int BITS = BITS_, GROUPS = GROUPS_, SIZE = D / GROUPS_;
  static constexpr bool IS_BF16 = BITS == 16, IS_STATIC = STATIC && BITS < 16, DYNAMIC = !STATIC && BITS < 16,
                        ROW_WISE = DYNAMIC && GROUPS == 1, GROUPED = DYNAMIC && GROUPS > 1;
  static constexpr int BYTES = D * BITS / 8, SCALE_BYTES = DYNAMIC ? 4 * GROUPS : 0, ROW_BYTES = BYTES + SCALE_BYTES;
  static constexpr int WORDS = BYTES / 16;    // of a lane, of 8 tokens: D / 4 channels of one, or D / 8 of two
  static constexpr int OF_WORD = 32 / BITS;   // channels of a word of keys
  static constexpr int STEPS = D / 16;        // products of a tile
  // Scores are 2^SCORE times too small: a code is 2^-24 of itself, the query up to 2^EVEN, or 2^ODD where a code is in
  // the upper nibble.
  static constexpr int EVEN = BITS == 4 && GROUPED ? 10 : 14, ODD = BITS == 4 && !GROUPED ? 10 : EVEN;
  static constexpr int SCORE = IS_BF16 ? 0 : GROUPED ? -10 : 10;

  // Bytes of a row of keys that follow one another, in a page's 8 tokens.
  static constexpr int CHUNK = (BYTES & -BYTES) < 64 ? (BYTES & -BYTES) : 64, OF_CHUNK = CHUNK / 16;
  static __device__ __forceinline__ int key_at(int word, int lane) {       // byte, behind that of 8 tokens
    return word / OF_CHUNK * (8 * CHUNK) + lane * (CHUNK / 4) + word % OF_CHUNK * 4;
  }
  static __device__ __forceinline__ int key_channel(int word, int c) {     // the first of a word's
    return (word / OF_CHUNK * CHUNK + c * (CHUNK / 4) + word % OF_CHUNK * 4) * 8 / BITS;
  }

  // Words of values count through a pair of tokens; RUN of a lane follow one another.
  static constexpr int RUN = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1;
  static __device__ __forceinline__ int value_word(int word, int g) {
    return word / RUN * (8 * RUN) + g * RUN + word % RUN;
  }
  static __device__ __forceinline__ int value_at(int word, int lane) {
    const int of = value_word(word, lane / 4);
    return of / 4 * 64 + lane % 4 * 16 + of % 4 * 4;
  }
  // The channel that row g (`high`: g + 8) of a tile of the output is.
  static __device__ __forceinline__ int value_channel(int tile, int high, int g) {
    if (BITS == 4) return 4 * value_word(tile / 2, g) + tile % 2 * 2 + high;
    const int of = value_word(BITS == 8 ? tile : 2 * tile + high, g), quarter = of / (D / 4), rest = of % (D / 4);
    return rest / 4 * 16 + quarter * (BITS == 8 ? 8 : 4) + rest % 4 * (BITS == 8 ? 2 : 1) + (BITS == 8 ? high : 0);
  }

  // Where (scale, shift) of a row's group stand, keys' or those of row-wise values: of tokens t and, behind it, t + 8.
  static __device__ __forceinline__ int scale_at(int t, int group) {
    return (t % 8 * GROUPS + group) * (UNIT / 2) + t / 8 * 4;
  }
  // Of values in groups: two scales, two shifts of a pair of tokens, then those of the pair 8 tokens behind.
  static __device__ __forceinline__ int pair_at(int t, int group, int pair) {
    return (t / 16 * GROUPS + group) * 64 + pair * 16;
  }

  template <bool KEY> static __device__ __forceinline__ void load(u32 (&w)[WORDS], u32 at) {
    constexpr int TOGETHER = KEY ? OF_CHUNK : RUN;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < WORDS; i += TOGETHER) {
      const u32 from = at + (KEY ? key_at(i, lane) : value_at(i, lane));
      if constexpr (TOGETHER == 4) {
        const uint4 v = lds128(from);
        w[i] = v.x; w[i + 1] = v.y; w[i + 2] = v.z; w[i + 3] = v.w;
      } else if constexpr (TOGETHER == 2) {
        const uint2 v = lds64(from);
        w[i] = v.x; w[i + 1] = v.y;
      } else {
        w[i] = lds32(from);
      }
    }
  }

  // The words' part in a step: halves of a row's channels k and k + 1 (`low`) and k + 8, k + 9 (`high`), codes as they
  // are or, of groups, scaled. s and z: of groups, pairs of halves, s being 512 times the scale.
  static __device__ __forceinline__ void factors(const u32 (&w)[WORDS], int step, u32 s, u32 z, u32& low, u32& high) {
    if constexpr (BITS == 16) {
      low = w[2 * step]; high = w[2 * step + 1];
    } else if constexpr (BITS == 8) {
      low = __byte_perm(w[step], 0, 0x4140); high = __byte_perm(w[step], 0, 0x4342);
    } else {
      const u32 v = w[step / 2] >> step % 2 * 8;
      low = v & 0x000f000f; high = v & 0x00f000f0;
      if constexpr (GROUPED) {                             // 2^-24 code to 2^-9 code
        low = fma_halves(mul_halves(low, 0x78007800), s, z);
        high = fma_halves(mul_halves(high, 0x68006800), s, z);
      }
    }
  }

  static __device__ __forceinline__ u32 pack(float low, float high) {      // as factors of a product with codes
    u32 r;
    if constexpr (IS_BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
  }
  static __device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if constexpr (IS_BF16)
      asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
      asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
};
