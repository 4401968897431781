"""Pieces of CUDA source that are easier to write in Python: wgmma instructions, whose operands are listed register by register."""


def wgmma(n: int, dtype: str) -> str:
    """`wgmma(float (&d)[n / 2], u64 a, u64 b)`: d += a b for an m64nNk16 tile, both operands K-major in shared memory.

    `dtype` is f16 or bf16; n a multiple of 8 up to 256."""
    count = n // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return (
        f"__device__ __forceinline__ void wgmma(float (&d)[{count}], u64 a, u64 b) {{\n"
        f'  asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} {{{registers}}}, %{count}, %{count + 1}, 1, 1, 1, 0, 0;"\n'
        f'               : {operands} : "l"(a), "l"(b));\n}}\n'
    )


def wgmma_a(n: int, dtype: str) -> str:
    """`wgmma_a(float (&d)[n / 2], u32 (&a)[4], u64 b)`: the same for an m64nNk16 tile whose operand A is in registers."""
    count = n // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return (
        f"__device__ __forceinline__ void wgmma_a(float (&d)[{count}], const u32 (&a)[4], u64 b) {{\n"
        f'  asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} {{{registers}}}, '
        f'{{%{count}, %{count + 1}, %{count + 2}, %{count + 3}}}, %{count + 4}, 1, 1, 1, 0;"\n'
        f'               : {operands} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));\n}}\n'
    )
