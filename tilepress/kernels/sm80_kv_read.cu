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

namespace of_keys {
#include "kv_rows.cuh"
#include "kv_dequantize.cuh"
}
#if UNLIKE
namespace of_values {
#include "kv_rows.cuh"
#include "kv_dequantize.cuh"
}
#else
namespace of_values = of_keys;
#endif

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
    of_values::read<true>(of, first, length, max_len, {value_channels, value_fixed, 0.f, 0}, head, heads, norm,
                          value, at, rooms[warp]);
  else
    of_keys::read<false>(of, first, length, max_len, {key_channels, key_fixed, 0.f, rotate}, head, heads, norm, key,
                         at, rooms[warp]);
}
