// Keys and values of sequences out of the pages of a cache, as contiguous tensors: dequantized, rotated back and
// scaled, zeros beyond a sequence's end. To the bit what kv_read.py's reference gives where it is finite; NaN stays
// NaN.
//
// Eight tokens whose codes lie together in a unit are a warp's, keys or values: it asks for all of them at once, then
// writes rows. A lane has the channels that it has in kv_rows.cuh.
//
//   warp 2 n       keys   [sequence][head][8 tokens]     n = (sequence * heads + head) * eights + eight
//   warp 2 n + 1   values
//
// Macros: those of kv_rows.cuh, KIND being that of the output. Grid: 4 warps a block of 128 threads; it depends on
// max_len, never on lengths.

#include "kv_rows.cuh"

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

extern "C" __global__ void __launch_bounds__(128)
kv_read(const unsigned char* pages,                 // uint8 [num_pages, heads, PAGE_BYTES]
        const int* block_table,                     // int32 [sequences, table_width], rows table_stride apart
        const int* seq_lens,                        // int32 [sequences]
        const float* key_channels,                  // float32 [3, heads, D] or null, as Side has them
        const float* value_channels,                // float32 [3, heads, D] or null
        const u16* key_fixed,                       // fp16 [heads, groups, 2] or null
        const u16* value_fixed,                     // fp16 [heads, groups, 2] or null
        void* key,                                  // [sequences, heads, max_len, D] of KIND
        void* value,                                // [sequences, heads, max_len, D] of KIND
        float norm, int rotate, int sequences, int heads, int max_len, long long table_stride, int table_width,
        int num_pages) {
  __shared__ float rooms[4][ROOM];
  const u32 warp = threadIdx.x / 32, number = blockIdx.x * 4 + warp, eights = (max_len + 7) / 8;
#if __CUDA_ARCH__ >= 900
  wait_for_grid();
#endif
  const u32 row = number / 2 / eights, first = number / 2 % eights * 8, sequence = row / heads;
  const int head = row % heads;
  if (sequence >= sequences) return;
  const u32 column = SMALLER(first / PAGE_TOKENS, table_width - 1),
            page = table_width ? block_table[sequence * table_stride + column] : 0;
  const int most = SMALLER(max_len, (long long)PAGE_TOKENS * table_width), length = SMALLER(seq_lens[sequence], most);
  const unsigned char* of = pages + ((long long)SMALLER(page, num_pages - 1) * heads + head) * PAGE_BYTES;
  const long long at = ((long long)row * max_len + first) * D + FIRST;
  if (number % 2)
    read<true>(of, first, length, max_len, Side{value_channels, value_fixed, 0.f, 0}, head, heads, norm, value, at,
               rooms[warp]);
  else
    read<false>(of, first, length, max_len, Side{key_channels, key_fixed, 0.f, rotate}, head, heads, norm, key, at,
                rooms[warp]);
}
