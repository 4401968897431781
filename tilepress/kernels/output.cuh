// Rows of y [n, m] from accumulators, and of W [rows, cols] decoded.

// Writes 16 rows of a column of y. Lane l of four has rows 2l, 2l + 1 in `low` and the same of the 8 rows below in
// `high`: exchanged with the lane beside it, each has 4 rows, 8 bytes.
__device__ __forceinline__ void write_rows(u16* y, int row, int m, u32 low, u32 high, bool ok) {
  const bool odd = threadIdx.x & 1;
  const u32 other = __shfl_xor_sync(~0u, odd ? low : high, 1), first = odd ? other : low, second = odd ? high : other;
  row += (threadIdx.x & 2) * 2 + odd * 8;
  if (!ok) return;
  if (m % 4 == 0) {
    if (row < m) stg64(y + row, first, second);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (row + i < m) y[row + i] = (i < 2 ? first : second) >> 16 * (i % 2);
  }
}

__device__ __forceinline__ float bias_of(const u16* bias, int row, int m) {
  return bias && row < m ? to_float(bias[row]) : 0.f;
}

// 16 rows of y from `row` on, and all columns, from a warp's part of an m64 accumulator: registers 4 i + {0, 1} are row
// lane / 4, columns 8 i + 2 (lane % 4) + {0, 1}; + {2, 3} the row 8 below. `finish(sum, below, column)` is the value of
// one.
template <int COUNT, class T, class F>
__device__ __forceinline__ void write_m64(const T (&acc)[COUNT], int row, u16* y, int n, int m, F finish) {
#pragma unroll
  for (int i = 0; i < COUNT / 4; ++i) {
    const T* a = acc + 4 * i;
    const int col = i * 8 + threadIdx.x % 32 / 4, mine = i * 8 + threadIdx.x % 4 * 2;
    const u32 low = transpose(to_values(finish(a[0], false, mine), finish(a[1], false, mine + 1)));
    const u32 high = transpose(to_values(finish(a[2], true, mine), finish(a[3], true, mine + 1)));
    write_rows(y + (u64)col * m, row, m, low, high, col < n);
  }
}

// 8 columns of a row of W.
__device__ __forceinline__ void write_columns(u16* w, int row, int col, int rows, int cols, uint4 q) {
  if (row >= rows || col >= cols) return;
  u16* to = w + (u64)row * cols + col;
  if (cols % 8 == 0) {
    *(uint4*)to = q;
  } else {
    const u32 pairs[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int c = 0; c < 8; ++c)
      if (col + c < cols) to[c] = pairs[c / 2] >> 16 * (c % 2);
  }
}
