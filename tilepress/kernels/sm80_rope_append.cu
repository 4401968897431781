// Queries, keys and values of tokens as projections give them: biases, RMS norm of queries and keys over a head, RoPE;
// keys and values go into the pages of a cache, as kv_quantize.cuh does it, queries into a tensor. To the bit what
// rope_append.py's reference gives where it is finite.
//
// A warp for each row: it asks for all that the row needs, then computes. Rows of keys and values, which take longest,
// are spread among those of queries.
//
// Macros: those of kv_quantize.cuh; HEADS of the queries; KV_HEADS; ROTARY channels of D are rotated; INTERLEAVED 0:
// channel i with i + ROTARY / 2, 1: with its neighbour; WIDE 0: cosines of KIND, each step is rounded to it, 1: in
// float32, the result is rounded. BIASES, NORMS 0: none of them; FOLD 1: queries get the keys' scale and rotation.
// WARPS of a block. Grid: WARPS rows a block.

namespace of_keys {
#include "kv_rows.cuh"
#include "kv_quantize.cuh"
}
#if UNLIKE
namespace of_values {
#include "kv_rows.cuh"
#include "kv_quantize.cuh"
}
#endif
using namespace of_keys;

#define HALF (ROTARY / 2)
#define ANGLES (INTERLEAVED ? (E + 1) / 2 : E)  // of a lane's channels
// A lane's channels turn together, with those of one other lane or with each other, and its angles are neighbours.
#define REGULAR (IS_POWER(D) && (!INTERLEAVED || E > 1) && HALF % ANGLES == 0)
#undef ROOM
#define ROOM (REGULAR && E % 2 == 0 ? 1 : D)

// The sum of a row: halves are added, which are another lane's or a lane's own channels, while the size is even; the
// rest from left to right. Two lanes that add the same share the work: each sends the half of its sums that the other
// one goes on with. `room` is of ROOM floats.
__device__ __forceinline__ float fold(float (&t)[E], float* room) {
  if constexpr (IS_POWER(D)) {
    int kept = E;
#pragma unroll
    for (int step = 16; step; step /= 2) {
      const bool shares = kept > 1, upper = LANE & step;
      if (shares) kept /= 2;
#pragma unroll
      for (int j = 0; j < kept; ++j) {
        const float low = t[j], high = shares ? t[j + kept] : low;
        t[j] = __fadd_rn(upper ? high : low, __shfl_xor_sync(ALL, upper ? low : high, step));
      }
    }
#pragma unroll
    for (int step = 16, half = E / 2; half; step /= 2, half /= 2) {
      if (!step) kept /= 2;
#pragma unroll
      for (int j = 0; j < kept; ++j) t[j] = __fadd_rn(t[j], step ? __shfl_xor_sync(ALL, t[j], step) : t[j + kept]);
    }
    return t[0];
  } else {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < E; ++j) room[FIRST + j] = t[j];
    __syncwarp();
    int size = D;
    while (size % 2 == 0) {
      size /= 2;
      for (int i = LANE; i < size; i += 32) room[i] = __fadd_rn(room[i], room[i + size]);
      __syncwarp();
    }
    float sum = room[0];
    for (int i = 1; i < size; ++i) sum = __fadd_rn(sum, room[i]);
    return sum;
  }
}

// Strides in elements; [heads, D] or 0; [D] or 0.
struct Row { const void* x; long long token_stride, head_stride; const void* bias; const void* norm; };

__device__ __forceinline__ float between(float v) { return WIDE ? v : rounded(v); }

// Where channel i of the rotated ones has its cosine.
__device__ __forceinline__ int angle(int i) { return INTERLEAVED ? i / 2 : i < HALF ? i : i - HALF; }

struct Angles {  // cosines or sines of a lane's channels
  Raw<ANGLES, WIDE ? 0 : KIND> near;
  Raw<1, WIDE ? 0 : KIND> each[REGULAR ? 1 : E];

  __device__ __forceinline__ void load(const void* x, long long row) {
    if constexpr (REGULAR) {
      if (FIRST < ROTARY) near.load(x, row + angle(FIRST));
    } else {
#pragma unroll
      for (int j = 0; j < E; ++j)
        if (FIRST + j < ROTARY) each[j].load(x, row + angle(FIRST + j));
    }
  }
  __device__ __forceinline__ float operator[](int j) const {
    return REGULAR ? near[INTERLEAVED ? j / 2 : j] : each[REGULAR ? 0 : j][0];
  }
};

__device__ __forceinline__ void rope(float (&v)[E], const Angles& cosines, const Angles& sines, float* room) {
  float partner[E];
  if constexpr (REGULAR) {
#pragma unroll
    for (int j = 0; j < E; ++j)
      partner[j] = INTERLEAVED ? v[j ^ 1] : __shfl_sync(ALL, v[j], FIRST < HALF ? LANE + HALF / E : LANE - HALF / E);
  } else {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < E; ++j) room[FIRST + j] = v[j];
    __syncwarp();
#pragma unroll
    for (int j = 0; j < E; ++j) {
      const int i = FIRST + j;
      if (i < ROTARY) partner[j] = room[INTERLEAVED ? i ^ 1 : i < HALF ? i + HALF : i - HALF];
    }
  }
#pragma unroll
  for (int j = 0; j < E; ++j) {
    const int i = FIRST + j;
    if (i >= ROTARY) continue;
    const bool is_first = INTERLEAVED ? i % 2 == 0 : i < HALF;
    const float straight = between(__fmul_rn(v[j], cosines[j])),
                turned = between(__fmul_rn(is_first ? -partner[j] : partner[j], sines[j]));
    v[j] = rounded(__fadd_rn(straight, turned));
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
rope_append(unsigned char* pages,                   // uint8 [num_pages, KV_HEADS, PAGE_BYTES]
            const long long* slots,                 // int64 [tokens]
            const float* key_channels,              // float32 [3, KV_HEADS, D] or null, as Side has them
            const float* value_channels,            // float32 [3, KV_HEADS, D] or null
            const u16* key_fixed,                   // fp16 [KV_HEADS, groups, 2] or null
            const u16* value_fixed,                 // fp16 [KV_HEADS, groups, 2] or null
            const u32* key_feedback,                // int8 [KV_HEADS, D / 4, D, 4] or null, with FEEDBACK
            float key_clip, float value_clip,       // halves of them
            float norm, int tokens, int num_pages,
            void* out,                              // [tokens, HEADS, D] of KIND
            const void* query,                      // [tokens, HEADS, D] of KIND, strides in elements
            const void* key,                        // [tokens, KV_HEADS, D] of KIND
            const void* value,                      // [tokens, KV_HEADS, D] of KIND
            long long query_token, long long query_head, long long key_token, long long key_head,
            long long value_token, long long value_head,
            const void* query_bias,                 // [HEADS * D] of KIND, with BIASES, or null
            const void* key_bias,                   // [KV_HEADS * D] of KIND or null
            const void* value_bias,                 // [KV_HEADS * D] of KIND or null
            const void* query_norm,                 // [D] of KIND, with NORMS, or null
            const void* key_norm,                   // [D] of KIND or null
            float eps,
            const void* cosines,                    // [tokens, HALF], float32 or of KIND
            const void* sines,                      // [tokens, HALF], likewise
            long long cosine_token, long long sine_token) {
  __shared__ __align__(16) float rooms[WARPS][ROOM > FEEDBACK_ROOM ? ROOM : FEEDBACK_ROOM];
  float* room = rooms[threadIdx.x / 32];
  constexpr u32 ROWS = HEADS + 2 * KV_HEADS;  // of a token
  const u32 row = blockIdx.x * WARPS + threadIdx.x / 32, number = row % ROWS;
  const int token = row / ROWS, before = number * (2 * KV_HEADS) / ROWS;  // rows of keys and values
  const bool is_query = (number + 1) * (2 * KV_HEADS) / ROWS == before, is_value = !is_query && before % 2;
  const int head = is_query ? number - before : before / 2, kv_head = is_query ? head / (HEADS / KV_HEADS) : head;
  Feedback feedback;                          // is no kernel's before this one
  if (FEEDBACK && key_feedback && !is_query && !is_value) feedback.load(key_feedback, head);
#if __CUDA_ARCH__ >= 900
  wait_for_grid();
#endif
  if (token >= tokens) return;
  const Row of = is_query   ? Row{query, query_token, query_head, BIASES ? query_bias : 0, NORMS ? query_norm : 0}
                 : is_value ? Row{value, value_token, value_head, BIASES ? value_bias : 0, 0}
                            : Row{key, key_token, key_head, BIASES ? key_bias : 0, NORMS ? key_norm : 0};
  const Side side = is_value ? Side{CHANNELS ? value_channels : 0, value_fixed, value_clip, 0}
                             : Side{CHANNELS ? key_channels : 0, key_fixed, key_clip, ROTATE};
  const long long at = token * of.token_stride + head * of.head_stride;

  const long long slot = slots[token];
#if UNLIKE
  if (is_value) {
    const of_values::Side own{CHANNELS ? value_channels : 0, value_fixed, value_clip, 0};
    of_values::Feedback none;
    const of_values::Place place(pages, num_pages, slot, head, KV_HEADS, true);
    of_values::append_row(value, at, of.bias, head * D, own, none, head, KV_HEADS, place, norm, room);
    return;
  }
#endif
  Raw<E> raw, bias, weight;
  Angles cosine, sine;
  raw.load(of.x, at + FIRST);
  if (of.bias) bias.load(of.bias, head * D + FIRST);
  if (of.norm) weight.load(of.norm, FIRST);
  if (!is_value) {
    cosine.load(cosines, token * cosine_token);
    sine.load(sines, token * sine_token);
  }
  Calibration calibration;
  if (!is_query || FOLD) calibration.load(side, kv_head, KV_HEADS);
#if __CUDA_ARCH__ >= 900
  launch_dependents();                        // earlier, the next kernel's blocks would be in the way of this one's
#endif

  float v[E];
#pragma unroll
  for (int j = 0; j < E; ++j) v[j] = of.bias ? rounded(__fadd_rn(raw[j], bias[j])) : raw[j];
  if (of.norm) {
    float squares[E];
#pragma unroll
    for (int j = 0; j < E; ++j) squares[j] = __fmul_rn(v[j], v[j]);
    const float mean = __fmul_rn(fold(squares, room), (float)(1. / D)),
                inverse = __fdiv_rn(1.f, __fsqrt_rn(__fadd_rn(mean, eps)));
#pragma unroll
    for (int j = 0; j < E; ++j) v[j] = rounded(__fmul_rn(weight[j], rounded(__fmul_rn(v[j], inverse))));
  }
  if (!is_value) rope(v, cosine, sine, room);
  if (!is_query) {
    append(v, side, calibration, feedback, Place(pages, num_pages, slot, head, KV_HEADS, is_value), norm, room);
    return;
  }
  if (KEY_BITS < 16 && FOLD) {
    if (side.channels)
#pragma unroll
      for (int j = 0; j < E; ++j) v[j] = __fmul_rn(v[j], calibration.scale[j]);
    if (ROTATE) hadamard(v, norm, room);
  }
  store_numbers(out, ((long long)token * HEADS + head) * D + FIRST, v);
}
