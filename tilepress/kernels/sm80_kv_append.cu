// Keys and values of tokens, quantized and stored in the pages of a cache: a warp for each row, as kv_quantize.cuh does
// it.
//
// Macros: those of kv_quantize.cuh. Grid: 4 rows a block of 128 threads; rows are tokens, heads, (key, value). A slot
// that is no place in the pages is skipped.

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

extern "C" __global__ void __launch_bounds__(128)
kv_append(unsigned char* pages,                     // uint8 [num_pages, heads, PAGE_BYTES]
          const long long* slots,                   // int64 [tokens]
          const float* key_channels,                // float32 [3, heads, D] or null, as Side has them
          const float* value_channels,              // float32 [3, heads, D] or null
          const u16* key_fixed,                     // fp16 [heads, groups, 2] or null
          const u16* value_fixed,                   // fp16 [heads, groups, 2] or null
          const u32* key_feedback,                  // int8 [heads, D / 4, D, 4] or null, with FEEDBACK
          float key_clip, float value_clip,         // halves of them
          float norm, int tokens, int num_pages,
          const void* key,                          // [tokens, heads, D] of KIND, strides in elements
          const void* value,                        // [tokens, heads, D] of KIND
          long long key_token, long long key_head, long long value_token, long long value_head, int heads) {
  __shared__ __align__(16) float rooms[4][ROOM > FEEDBACK_ROOM ? ROOM : FEEDBACK_ROOM];
  const int warp = threadIdx.x / 32, row = blockIdx.x * 4 + warp;
  const int token = row / (2 * heads), head = row / 2 % heads, is_value = row % 2;
  of_keys::Feedback feedback;                 // is no kernel's before this one
  if (FEEDBACK && key_feedback && !is_value) feedback.load(key_feedback, head);
#if __CUDA_ARCH__ >= 900
  wait_for_grid();
#endif
  if (row >= tokens * heads * 2) return;
  const long long slot = slots[token];
  const long long at = is_value ? token * value_token + head * value_head : token * key_token + head * key_head;
#if UNLIKE
  if (is_value) {
    const of_values::Side side{CHANNELS ? value_channels : 0, value_fixed, value_clip, 0};
    of_values::Feedback none;
    const of_values::Place place(pages, num_pages, slot, head, heads, true);
    of_values::append_row(value, at, 0, 0, side, none, head, heads, place, norm, rooms[warp]);
    return;
  }
#endif
  const of_keys::Side side = is_value ? of_keys::Side{CHANNELS ? value_channels : 0, value_fixed, value_clip, 0}
                                      : of_keys::Side{CHANNELS ? key_channels : 0, key_fixed, key_clip, ROTATE};
  const of_keys::Place place(pages, num_pages, slot, head, heads, is_value);
  of_keys::append_row(is_value ? value : key, at, 0, 0, side, feedback, head, heads, place, norm, rooms[warp]);
}
