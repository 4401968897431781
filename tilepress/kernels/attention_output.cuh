// What becomes of a row of attention once all its tokens have been added up: a query of one head, by one warp.
//
// A row's sum stands for 2^most times what its channels and its weight say. Sinks take a share of the weight; fixed
// scales and the calibration's turn channels into numbers, their shift and mean as often as there is weight on tokens.
//
// Macros: D; VALUE_GROUPS; VALUE_STATIC; BF16; OUT8: the output is int8. attention_math.cuh comes before it.

#define PAIRS ((D / 2 + 31) / 32)             // of channels, of a lane: the pairs lane, lane + 32, ..

struct Row {
  float2 v[PAIRS];
  float most = NONE, sum = 0.f, shift = 0.f;  // log2 of a unit of weight; the weight; what all scores lack

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) v[i] = make_float2(0.f, 0.f);
  }
  // Adds a part's channels, `by` times.
  __device__ void add(const float* from, float by) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const int pair = threadIdx.x % 32 + 32 * i;
      if (pair >= D / 2) continue;
      const float2 part = *(const float2*)(from + 2 * pair);
      v[i].x += by * part.x; v[i].y += by * part.y;
    }
  }
};

struct Output {
  void* out; float* lse; const float* value_channels; const u16* value_fixed; const float *sinks, *out_scale;
  int kv_heads, group, is_capped;

  __device__ u32 code_of(float x) const {
    return x == x ? (int)rintf(fminf(fmaxf(__fdiv_rn(x, *out_scale), -128.f), 127.f)) & 255 : 0;
  }

  // Of all query heads of all queries the `at`-th.
  __device__ void write(u64 at, const Row& row) const {
    const int head = (int)(at % (u32)(kv_heads * group)), kv = head / group;
    const float left_out = is_capped ? 0.f : row.shift;    // a soft cap has had it already
    const float tokens = row.sum > 0.f || row.sum != row.sum ? row.most + log2_of(row.sum) : NONE;
    float all = tokens, share = tokens == NONE ? 0.f : 1.f;
    if (sinks) {
      const float sink = (sinks[head] - left_out) * LOG2E, higher = fmaxf(sink, tokens);
      const float of_tokens = exp2_of(tokens - higher);
      all = higher + log2_of(of_tokens + exp2_of(sink - higher));
      share = of_tokens * inverse(of_tokens + exp2_of(sink - higher));
    }
    const float by = tokens == NONE ? 0.f : share * inverse(row.sum);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const int pair = threadIdx.x % 32 + 32 * i, channel = 2 * pair;
      if (pair >= D / 2) continue;
      float x = row.v[i].x * by, y = row.v[i].y * by;
      if (VALUE_STATIC) {
        const u16* of = value_fixed + 2 * (kv * VALUE_GROUPS + channel / (D / VALUE_GROUPS));
        const float s = half_to_float(of[0]), z = half_to_float(of[1]) * share;
        x = x * s + z; y = y * s + z;
      }
      if (value_channels) {
        const float2 mean = *(const float2*)(value_channels + kv * D + channel),
                     scale = *(const float2*)(value_channels + (kv_heads + kv) * D + channel);
        x = x * scale.x + mean.x * share; y = y * scale.y + mean.y * share;
      }
#if OUT8
      ((u16*)out)[at * (D / 2) + pair] = code_of(x) | code_of(y) << 8;
#else
      ((u32*)out)[at * (D / 2) + pair] = to_values(x, y);
#endif
    }
    if (lse && threadIdx.x % 32 == 0)
      lse[at] = all == NONE ? NONE : all * 0.6931471805599453f + left_out;
  }
};
