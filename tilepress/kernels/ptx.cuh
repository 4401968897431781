// What the kernels need of PTX: shared memory by address, mbarriers, TMA, wgmma, programmatic launches. No header of
// CUDA's is needed. What sm_80 lacks is there only from sm_90 on.
typedef unsigned int u32; typedef unsigned short u16; typedef unsigned long long u64; typedef signed char i8;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void sts_zero(u32 a) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(a), "r"(0) : "memory");
}
__device__ __forceinline__ uint4 lds128(u32 a) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(a)
               : "memory");
  return v;
}
__device__ __forceinline__ uint2 lds64(u32 a) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a) : "memory");
  return v;
}
__device__ __forceinline__ u32 lds32(u32 a) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a) : "memory");
  return v;
}
__device__ __forceinline__ u32 lds16(u32 a) {
  u32 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=r"(v) : "r"(a) : "memory");
  return v;
}
__device__ __forceinline__ void sts32(u32 a, u32 v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory");
}
__device__ __forceinline__ void sts64(u32 a, u64 v) {
  asm volatile("st.shared.u64 [%0], %1;" ::"r"(a), "l"(v) : "memory");
}
__device__ __forceinline__ void sts16_if(u32 a, u32 v, bool ok) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p st.shared.u16 [%0], %1;}" ::"r"(a), "h"((u16)v), "r"((u32)ok)
               : "memory");
}
__device__ __forceinline__ u32 ldg32(const void* p) {
  u32 v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
#define EVICT_FIRST 0x12F0000000000000ull      // a policy of the L2 cache, cutlass's
// Past the L1 cache, first to leave the L2 cache.
__device__ __forceinline__ void ldg128_if(uint4& v, const void* p, bool ok) {
  asm volatile(
      "{.reg .pred p; setp.ne.u32 p, %5, 0; "
      "@p ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %6;}"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p), "r"((u32)ok), "l"(EVICT_FIRST));
}
// Waits for a word from global memory. The compiler counts the loads of a loop together, so a use of one waits for all
// that have been asked for: wait for what is needed next, and only then ask for more.
__device__ __forceinline__ void arrived(u32 word) {
  asm volatile("{.reg .pred p; setp.eq.u32 p, %0, 0xffffffff; @p nanosleep.u32 0;}" ::"r"(word) : "memory");
}
__device__ __forceinline__ void stg64(void* p, u32 a, u32 b) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(a), "r"(b) : "memory");
}
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Between blocks
__device__ __forceinline__ u64 load_acquire(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_release(u64* p, u64 v) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ bool elect() {
  u32 is;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(is));
  return is;
}

// Two 8 x 8 matrices of 16-bit values, transposed: lane l's registers have row l / 4, columns 2 (l % 4) + {0, 1}; lanes
// 0 .. 7 say where the first one's columns go, lanes 8 .. 15 the second one's.
__device__ __forceinline__ void store_transposed(u32 a, u32 first, u32 second) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared::cta.b16 [%0], {%1, %2};" ::"r"(a), "r"(first), "r"(second)
               : "memory");
}

// mbarriers
__device__ __forceinline__ void bar_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void fence_bar_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait(u32 bar, u32 phase) {
  asm volatile(
      "{.reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra DONE; bra AGAIN; DONE: }" ::
          "r"(bar),
      "r"(phase)
      : "memory");
}

struct Position {  // in a ring of slots, each with an mbarrier, which is in `phase` of 0 and 1 by turns
  int slot = 0;
  u32 phase = 0;

  __device__ void next(int count) {
    if (++slot == count) { slot = 0; phase ^= 1; }
  }
};

// Copies of boxes by TMA; they complete on an mbarrier.
struct __align__(64) TensorMap { u64 opaque[16]; };
__device__ __forceinline__ void tma_2d(u32 to, const void* map, int column, int row, u32 bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(bar) : "memory");
}
// To the same place in each of the cluster's blocks that a bit of `blocks` stands for; completes on each one's
// mbarrier.
__device__ __forceinline__ void tma_2d_to_all(u32 to, const void* map, int column, int row, u32 bar, int blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(bar), "h"((u16)blocks)
      : "memory");
}
// 16-byte aligned; `again`: others will read it too (cutlass's policy, evict normal).
__device__ __forceinline__ void bulk_copy(u32 to, const void* from, u32 bytes, u32 bar, bool again) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(bar), "l"(again ? 0x1000000000000000ull : EVICT_FIRST)
      : "memory");
}
// Ahead of their use, of a TMA's map, and of bytes to the L2 cache: a multiple of 16, aligned to 16.
__device__ __forceinline__ void prefetch_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Of 128 bytes.
__device__ __forceinline__ void prefetch_line(const void* of) { asm volatile("prefetch.global.L2 [%0];" ::"l"(of)); }
__device__ __forceinline__ void prefetch_bytes(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(from), "r"(bytes), "l"(EVICT_FIRST)
               : "memory");
}
// Stores before it are seen by wgmma and copies.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Clusters of blocks
__device__ __forceinline__ u32 rank_in_cluster() {
  u32 r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ __forceinline__ u32 address_in(u32 a, u32 rank) {
  u32 r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(rank));
  return r;
}
__device__ __forceinline__ void store_in_cluster(u32 a, int x, int y, int z, int w) {  // an address of address_in
  asm volatile("st.shared::cluster.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
__device__ __forceinline__ void arrive_in_cluster(u32 bar) {  // at an mbarrier by an address of address_in
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// wgmma
// K-major rows of 128 bytes, 128-byte swizzle, 8 rows every 1024 bytes.
__device__ __forceinline__ u64 descriptor(u32 a) {
  return (u64)((a & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Registers of a thread, a multiple of 8, called by all of a warpgroup; 0 leaves them.
template <int N>
__device__ __forceinline__ void take_registers() {
  if constexpr (N > 0) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void give_registers() {
  if constexpr (N > 0) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// Programmatic dependent launch: the next kernel of the stream may start; wait until the one before is done and its
// writes are seen.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void wait_for_grid() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Where a kernel says late that the next may start (jit.py: `successors_wait`).
__device__ __forceinline__ void wait_for_grid(bool launch_next) {
  wait_for_grid();
  if (launch_next) launch_dependents();
}
#endif

// 16-bit values
// An 8 x 8 matrix, two values of row lane / 4 in each lane: transposed.
__device__ __forceinline__ u32 transpose(u32 v) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}
__device__ __forceinline__ float half_to_float(u16 v) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v));
  return r;
}
#if BF16
#define VALUES "bf16"
__device__ __forceinline__ u32 to_values(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float to_float(u16 v) { return __uint_as_float((u32)v << 16); }
#else
#define VALUES "f16"
__device__ __forceinline__ u32 to_values(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float to_float(u16 v) { return half_to_float(v); }
#endif
