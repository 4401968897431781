// The parts that sm80_decode_attention.cu's blocks have left of each row, added up in their order: a warp has a row.
//
// Macros: those of attention_output.cuh. Grid: four warps a block of 128 threads, for all rows.

#include "attention_math.cuh"
#include "attention_output.cuh"

extern "C" __global__ void __launch_bounds__(128)
attention_combine(const float* parts,               // float32 [splits, rows, D]
                  const float4* weights,            // float32 [splits, rows, 4], as struct Row has them
                  const int* starts,                // int32 [batch + 1] or null: rows of no sequence are zeros
                  void* out,                        // [rows, D], 16-bit or int8
                  float* lse,                       // float32 [rows] or null
                  const float* value_channels,      // float32 [3, kv_heads, D] or null
                  const u16* value_fixed,           // fp16 [kv_heads, VALUE_GROUPS, 2] or null
                  const float* sinks,               // float32 [kv_heads * group] or null
                  const float* out_scale,           // float32 [1] of int8 output, or null
                  int rows, int batch, int kv_heads, int group, int splits, int is_capped) {
  const int at = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
  wait_for_grid();
  launch_dependents();
#endif
  if (at >= rows) return;
  const int query = at / (kv_heads * group);
  const bool is_there = !starts || (query >= starts[0] && query < starts[batch]);
  Output output = {out, lse, value_channels, value_fixed, sinks, out_scale, kv_heads, group, is_capped};
  if (!is_there) output.sinks = nullptr;
  Row row;
  row.clear();
  const float4 mine = is_there && lane < splits ? weights[(u64)lane * rows + at] : make_float4(NONE, 0.f, 0.f, 0.f);
  row.most = warp_max(mine.x);
  const float by = mine.x == NONE ? 0.f : exp2_of(mine.x - row.most);
  row.sum = warp_sum(by * mine.y);
  const u32 found = __ballot_sync(ALL, mine.x != NONE);
  if (found) row.shift = __shfl_sync(ALL, mine.z, __ffs(found) - 1);
  for (int i = 0; i < splits; ++i) {
    const float factor = __shfl_sync(ALL, by, i);
    if (found >> i & 1) row.add(parts + ((u64)i * rows + at) * D, factor);
  }
  output.write(at, row);
}
