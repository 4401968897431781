// Keys and values of tokens, quantized and stored in the pages of a cache: a warp for each row, as kv_quantize.cuh does
// it.
//
// Macros: those of kv_quantize.cuh. Grid: 4 rows a block of 128 threads; rows are tokens, heads, (key, value). A slot
// that is no place in the pages is skipped.

#include "kv_rows.cuh"
#include "kv_quantize.cuh"

extern "C" __global__ void __launch_bounds__(128)
kv_append(unsigned char* pages,                     // uint8 [num_pages, heads, PAGE_BYTES]
          const long long* slots,                   // int64 [tokens]
          const float* key_channels,                // float32 [3, heads, D] or null, as Side has them
          const float* value_channels,              // float32 [3, heads, D] or null
          const u16* key_fixed,                     // fp16 [heads, groups, 2] or null
          const u16* value_fixed,                   // fp16 [heads, groups, 2] or null
          const u32* key_feedback,                  // int8 [heads, D / 4, D, 4] or null, with FEEDBACK
          float key_clip, float value_clip,         // halves of them
          float step, float norm, int tokens, int num_pages,
          const void* key,                          // [tokens, heads, D] of KIND, strides in elements
          const void* value,                        // [tokens, heads, D] of KIND
          long long key_token, long long key_head, long long value_token, long long value_head, int heads) {
  __shared__ __align__(16) float rooms[4][ROOM > FEEDBACK_ROOM ? ROOM : FEEDBACK_ROOM];
  const int warp = threadIdx.x / 32, row = blockIdx.x * 4 + warp;
#if __CUDA_ARCH__ >= 900
  wait_for_grid();
#endif
  if (row >= tokens * heads * 2) return;
  const int token = row / (2 * heads), head = row / 2 % heads, is_value = row % 2;
  const long long slot = slots[token];
  const Side side = is_value ? Side{CHANNELS ? value_channels : 0, value_fixed, value_clip, 0, 0}
                             : Side{CHANNELS ? key_channels : 0, key_fixed, key_clip, ROTATE,
                                    FEEDBACK ? key_feedback : 0};
  const long long at = is_value ? token * value_token + head * value_head : token * key_token + head * key_head;
  Raw<E> raw;
  raw.load(is_value ? value : key, at + FIRST);
  Calibration calibration;
  calibration.load(side, head, heads);
  Feedback feedback;
  if (FEEDBACK) feedback.load(side, head);
#if __CUDA_ARCH__ >= 900
  launch_dependents();                        // earlier, the next kernel's blocks would be in the way of this one's
#endif
  float v[E];
#pragma unroll
  for (int j = 0; j < E; ++j) v[j] = raw[j];
  append(v, side, calibration, feedback, Place(pages, num_pages, slot, head, heads, is_value), step, norm, rooms[warp]);
}
