// Sums that several blocks share: every block takes a run of tiles, or units of them, last one first, and those of a
// row block follow one another. A block whose run ends inside a row block leaves its sums (float32) and goes on; the
// block that has the row block's last tile adds them up, in the order of blocks, so that results do not depend on
// timing. Blocks are numbered by their runs and wait only for lower numbers, of lower blockIdx: progress rests on
// blocks being started in that order. `left` needs no preparation: a part has been left where it stands at `ticket`, a
// number that no other launch has.

struct Parts {
  float* sums; u64* left; u64 ticket;
  int of_block, mine;  // a block leaves so many, one for each 128 threads; this one

  __device__ int number(int block) const { return block * of_block + mine; }
  template <int COUNT>
  __device__ float4* at(int block) const {
    return (float4*)sums + (u64)number(block) * (COUNT / 4 * 128) + threadIdx.x % 128;
  }

  // By one lane, behind a barrier with those who have stored the part.
  __device__ void announce(int block) const { store_release(left + number(block), ticket); }

  template <int COUNT> __device__ __forceinline__ void store(const float (&acc)[COUNT], int block) const {
    float4* part = at<COUNT>(block);
#pragma unroll
    for (int i = 0; i < COUNT; i += 4)
      __stcg(part + i / 4 * 128, make_float4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3]));
  }

  // Adds what the blocks before `block` have left of the row block whose first tile is `start`, as soon as they say so.
  // Block b's run is cut(b) .. cut(b + 1), and none of them is empty; `barrier` is a named barrier for the 128 threads.
  template <int COUNT, class F>
  __device__ __forceinline__ void add(float (&acc)[COUNT], int start, int block, F cut, int barrier) const {
    int first = await(start, block, cut, barrier);
    constexpr int BATCH = COUNT <= 8 ? 4 : COUNT <= 16 ? 2 : 1;    // parts on their way at once
    for (; first < block; first += BATCH) {
      float4 part[BATCH][COUNT / 4];
#pragma unroll
      for (int j = 0; j < BATCH; ++j)
#pragma unroll
        for (int i = 0; i < COUNT / 4; ++i)
          part[j][i] = first + j < block ? __ldcg(at<COUNT>(first + j) + i * 128) : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int j = 0; j < BATCH; ++j)
#pragma unroll
        for (int i = 0; i < COUNT / 4; ++i) {
          acc[4 * i] += part[j][i].x;
          acc[4 * i + 1] += part[j][i].y;
          acc[4 * i + 2] += part[j][i].z;
          acc[4 * i + 3] += part[j][i].w;
        }
    }
  }

  // The same in PIECES, one after the other, where there are no registers for all sums of a part at once.
  template <int PIECES, int COUNT, class F>
  __device__ __forceinline__ void add_pieces(float (&acc)[COUNT], int start, int block, F cut, int barrier) const {
    const int first = await(start, block, cut, barrier);
    constexpr int BATCH = COUNT <= 8 ? 4 : COUNT <= 16 ? 2 : 1;    // parts on their way at once
    constexpr int SUMS = COUNT / 4 / PIECES;               // of a piece, by four
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece)
      for (int from = first; from < block; from += BATCH) {
        float4 part[BATCH][SUMS];
#pragma unroll
        for (int j = 0; j < BATCH; ++j)
#pragma unroll
          for (int i = 0; i < SUMS; ++i)
            part[j][i] = from + j < block ? __ldcg(at<COUNT>(from + j) + (piece * SUMS + i) * 128)
                                          : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int j = 0; j < BATCH; ++j)
#pragma unroll
          for (int i = 0; i < SUMS; ++i) {
            float* sum = acc + 4 * (piece * SUMS + i);
            sum[0] += part[j][i].x;
            sum[1] += part[j][i].y;
            sum[2] += part[j][i].z;
            sum[3] += part[j][i].w;
          }
      }
  }

 private:
  // Returns the first block that has left a part, once all have.
  template <class F> __device__ __forceinline__ int await(int start, int block, F cut, int barrier) const {
    int first = block;
    while (true) {                                         // a lane looks at one of 32 blocks
      const u32 begins = __ballot_sync(~0u, cut(max(first - (int)threadIdx.x % 32, 0)) <= start);
      if (begins) { first -= __ffs(begins) - 1; break; }
      first -= 32;
    }
    for (int b = first + threadIdx.x % 128; b < block; b += 128) {
      while (load_acquire(left + number(b)) != ticket) {}
      left[number(b)] = 0;                                 // a graph launches with the same ticket again
    }
    bar_sync(barrier, 128);
    return first;
  }
};
