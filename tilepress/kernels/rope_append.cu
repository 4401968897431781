// Queries, keys and values of tokens as projections give them: biases, RMS norm of queries and keys over a head, RoPE; keys and values go into the pages of a
// cache, as kv_rows.cuh does it, queries into a tensor. To the bit what rope_append.py's reference gives where it is finite.
//
// A warp for each row: it asks for all that the row needs, then computes. Rows of keys and values take longest and come first.
//
// Macros: those of kv_rows.cuh; HEADS of the queries; KV_HEADS; ROTARY channels of D are rotated; INTERLEAVED 0: channel i with i + ROTARY / 2, 1: with its
// neighbour; WIDE 0: cosines of KIND, each step is rounded to it, 1: in float32, the result is rounded. Grid: 4 rows a block of 128 threads; rows are tokens,
// KV_HEADS, (key, value), then tokens, HEADS.

#include "kv_rows.cuh"

#define HALF (ROTARY / 2)
#define SWAPS (HALF % 32 == 0)                // partners are in one lane
#define SHUFFLES (INTERLEAVED || (HALF < 32 && IS_POWER(HALF)))
#define ROOM (IS_POWER(D) && IS_POWER(SIZE) && (SHUFFLES || SWAPS) ? 1 : D)

struct Row { const void* x; long long token_stride, head_stride; const void* bias; const void* norm; };  // strides in elements; [heads, D] or 0; [D] or 0

__device__ __forceinline__ float rounded(float v) { return KIND == 0 ? v : KIND == 1 ? from_bfloat(to_bfloat(v)) : half_to_float(to_half(v)); }
__device__ __forceinline__ float between(float v) { return WIDE ? v : rounded(v); }

// Where channel i of the rotated ones has its cosine.
__device__ __forceinline__ int angle(int i) { return INTERLEAVED ? i / 2 : i < HALF ? i : i - HALF; }

__device__ __forceinline__ void rope(float (&v)[E], const float (&cosines)[E], const float (&sines)[E], float* room) {
  float partner[E];
  if constexpr (SHUFFLES) {
#pragma unroll
    for (int j = 0; j < E; ++j)
      if (32 * j < ROTARY) partner[j] = __shfl_xor_sync(ALL, v[j], INTERLEAVED ? 1 : HALF);
  } else if constexpr (SWAPS) {
#pragma unroll
    for (int j = 0; j < ROTARY / 32; ++j) partner[j] = v[j < HALF / 32 ? j + HALF / 32 : j - HALF / 32];
  } else {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < E; ++j) room[LANE + 32 * j] = v[j];
    __syncwarp();
#pragma unroll
    for (int j = 0; j < E; ++j) {
      const int i = LANE + 32 * j;
      if (i < ROTARY) partner[j] = room[i < HALF ? i + HALF : i - HALF];
    }
  }
#pragma unroll
  for (int j = 0; j < E; ++j) {
    const int i = LANE + 32 * j;
    if (i >= ROTARY) continue;
    const bool is_first = INTERLEAVED ? i % 2 == 0 : i < HALF;
    const float straight = between(__fmul_rn(v[j], cosines[j])), turned = between(__fmul_rn(is_first ? -partner[j] : partner[j], sines[j]));
    v[j] = rounded(__fadd_rn(straight, turned));
  }
}

extern "C" __global__ void __launch_bounds__(128)
rope_append(unsigned char* pages,             // [num_pages, KV_HEADS, PAGE_BYTES]
            const long long* slots,           // [tokens]
            const float* key_channels, const float* value_channels, const u16* key_fixed, const u16* value_fixed,  // of Side
            float key_clip, float value_clip,  // halves of them
            float step, float norm, int rotate, int refits, int tokens, int num_pages,
            void* out,                        // [tokens, HEADS, D] of KIND
            const void* query, const void* key, const void* value,  // [tokens, HEADS | KV_HEADS, D] of KIND, strides in elements
            long long query_token, long long query_head, long long key_token, long long key_head, long long value_token, long long value_head,
            const void* query_bias, const void* key_bias, const void* value_bias, const void* query_norm, const void* key_norm,  // of Row, of KIND
            float eps, const void* cosines, const void* sines,  // [tokens, HALF], float32 or of KIND
            long long cosine_token, long long sine_token, int fold_scale) {
  __shared__ float rooms[4][ROOM];
  const int warp = threadIdx.x / 32, row = blockIdx.x * 4 + warp, kv_rows = tokens * (2 * KV_HEADS);
  float* room = rooms[warp];
#if __CUDA_ARCH__ >= 900
  launch_dependents();
  wait_for_grid();
#endif
  if (row >= kv_rows + tokens * HEADS) return;
  const bool is_query = row >= kv_rows, is_value = !is_query && row % 2;
  const int token = is_query ? (row - kv_rows) / HEADS : row / (2 * KV_HEADS);
  const int head = is_query ? (row - kv_rows) % HEADS : row / 2 % KV_HEADS, kv_head = is_query ? head / (HEADS / KV_HEADS) : head;
  const Row of = is_query   ? Row{query, query_token, query_head, query_bias, query_norm}
                 : is_value ? Row{value, value_token, value_head, value_bias, 0}
                            : Row{key, key_token, key_head, key_bias, key_norm};
  const Side side = is_value ? Side{value_channels, value_fixed, value_clip, 0} : Side{key_channels, key_fixed, key_clip, rotate};
  const long long at = token * of.token_stride + head * of.head_stride;

  const long long slot = slots[token];
  float v[E], bias[E], weight[E], cosine[E], sine[E];
#pragma unroll
  for (int j = 0; j < E; ++j) {
    const int i = LANE + 32 * j;
    v[j] = element(of.x, at + i);
    bias[j] = of.bias ? element(of.bias, head * D + i) : -0.f;  // which changes nothing, not even a zero's sign
    weight[j] = of.norm ? element(of.norm, i) : 0.f;
    if (i < ROTARY && !is_value) {
      const long long c = token * cosine_token + angle(i), s = token * sine_token + angle(i);
      cosine[j] = WIDE ? ((const float*)cosines)[c] : element(cosines, c);
      sine[j] = WIDE ? ((const float*)sines)[s] : element(sines, s);
    }
  }
  Calibration calibration;
  if (!is_query || fold_scale) calibration.load(side, kv_head, KV_HEADS);

#pragma unroll
  for (int j = 0; j < E; ++j) v[j] = rounded(__fadd_rn(v[j], bias[j]));
  if (of.norm) {
    float squares[1][E];
#pragma unroll
    for (int j = 0; j < E; ++j) squares[0][j] = __fmul_rn(v[j], v[j]);
    fold<D, Add>(squares, room);
    const float mean = __fmul_rn(squares[0][0], (float)(1. / D)), inverse = __fdiv_rn(1.f, __fsqrt_rn(__fadd_rn(mean, eps)));
#pragma unroll
    for (int j = 0; j < E; ++j) v[j] = rounded(__fmul_rn(weight[j], rounded(__fmul_rn(v[j], inverse))));
  }
  if (!is_value) rope(v, cosine, sine, room);
  if (!is_query) {
    append(v, side, calibration, Place(pages, num_pages, slot, head, KV_HEADS, is_value), step, norm, refits, room);
    return;
  }
  if (BITS < 16 && fold_scale) {
    if (side.channels)
#pragma unroll
      for (int j = 0; j < E; ++j) v[j] = __fmul_rn(v[j], calibration.scale[j]);
    if (rotate) hadamard(v, norm);
  }
#pragma unroll
  for (int j = 0; j < E; ++j) {
    const long long i = ((long long)token * HEADS + head) * D + LANE + 32 * j;
    if (KIND == 0) ((float*)out)[i] = v[j];
    else ((u16*)out)[i] = KIND == 1 ? to_bfloat(v[j]) : to_half(v[j]);
  }
}
