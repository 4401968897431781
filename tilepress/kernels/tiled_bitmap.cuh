// Tiles of formats/tiled_bitmap.py in shared memory: masks, starts, values. A warp's lanes read the values of their
// runs, each in a bank of its own. Macros: GROUP 1 | 2, WIDTH bytes of a group (1, 2, 4), INT8 0 | 1, BF16 0 | 1.
#define RUN_BITS (64 / GROUP)
#define STEP_BITS (8 / GROUP)                 // of a step: a lane's part of an m16k16 tile, four registers
#define HEADER (256 * RUN_BITS / 8 + 512)     // bytes of masks and starts
#define LINE 128
#define INT8_FACTOR (BF16 ? 64.f : 16777216.f)      // bf16: 2^133 / 2^127, fp16: 2^24

struct Run {  // what a lane still has to read of a tile
  u32 mask[RUN_BITS / 32], at;

  __device__ Run(u32 tile, int number) {
    if (GROUP == 1) {
      const uint2 both = lds64(tile + number * 8);
      mask[0] = both.x; mask[RUN_BITS / 32 - 1] = both.y;
    } else {
      mask[0] = lds32(tile + number * 4);
    }
    at = tile + HEADER + lds16(tile + 256 * RUN_BITS / 8 + number * 2);
  }

  template <int COUNT> __device__ void skip_bits() {       // up to 32
    mask[0] = GROUP == 1 ? __funnelshift_rc(mask[0], mask[RUN_BITS / 32 - 1], COUNT) : mask[0] >> COUNT;
    if (GROUP == 1) mask[RUN_BITS / 32 - 1] = COUNT == 32 ? 0 : mask[RUN_BITS / 32 - 1] >> COUNT;
  }
};

__device__ __forceinline__ void load_group(u32& v, u32 at) {
  if (WIDTH == 1) asm volatile("{.reg .u16 t; ld.shared.u8 t, [%1]; cvt.u32.u16 %0, t;}" : "+r"(v) : "r"(at));
  if (WIDTH == 2) asm volatile("ld.shared.u16 %0, [%1];" : "+r"(v) : "r"(at));
  if (WIDTH == 4) asm volatile("ld.shared.u32 %0, [%1];" : "+r"(v) : "r"(at));
}

// Two int8 values, sign and magnitude, each twice in a half of `twice`, to two 16-bit values, INT8_FACTOR times
// smaller: sign and lowest bits make a denormal, which fp16 products take as it is, and which bf16's have to be made
// larger for, or sums in float would be denormal too.
__device__ __forceinline__ u32 expand(u32 twice) {
  u32 r = twice & 0x807f807f;
#if BF16
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(r), "r"(0x7f007f00), "r"(0x80008000));      // 2^127 r - 0
#endif
  return r;
}

// Registers of operand A of a step (0 .. 7), which a lane reads after those of the steps before.
template <int STEP> __device__ __forceinline__ void read_step(u32 (&a)[4], Run& run) {
  u32 v[STEP_BITS];
#pragma unroll                                // zeros of 64 bits: one instruction for two registers
  for (int i = 0; i < STEP_BITS; i += 2)
    asm volatile("{.reg .b64 z; mov.b64 z, 0; mov.b64 {%0, %1}, z;}" : "=r"(v[i]), "=r"(v[i + 1]));
  const u32 bits = run.mask[STEP * STEP_BITS / 32] >> STEP * STEP_BITS % 32;
#pragma unroll
  for (int part = 0; part < STEP_BITS; part += 4) {
    bool has[4];                              // computed together, they become predicates in one instruction
#pragma unroll
    for (int i = 0; i < 4; ++i) has[i] = bits >> part + i & 1;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (has[i]) {
        load_group(v[part + i], run.at);
        run.at += LINE;
      }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (GROUP == 2) a[i] = INT8 ? expand(__byte_perm(v[i], 0, 0x1100)) : v[i];
    else
      a[i] = INT8 ? expand(__byte_perm(v[2 * i], v[2 * i + 1], 0x4400)) : __byte_perm(v[2 * i], v[2 * i + 1], 0x5410);
  }
  // Here, not behind the wgmma_fence, where ptxas would wait for other products first.
  asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3]));
}

template <int FIRST, int COUNT> __device__ __forceinline__ void read_steps(u32 (&a)[COUNT][4], Run& run) {
  read_step<FIRST>(a[0], run);
  if constexpr (COUNT > 1) read_step<FIRST + 1>(a[1], run);
  if constexpr (COUNT == 4) { read_step<FIRST + 2>(a[2], run); read_step<FIRST + 3>(a[3], run); }
}
