"""Pieces of CUDA source that are easier to write in Python: wgmma instructions, whose operands are listed register by register."""


def wgmma(n: int, dtype: str, from_registers: bool = False) -> str:
    """`wgmma(float (&d)[n / 2], u64 a, u64 b)`: d += a b for an m64nNk16 tile, both operands K-major in shared memory, or with
    `const u32 (&a)[4]` operand A in registers.

    `dtype` is f16 or bf16; n a multiple of 8 up to 256."""
    count = n // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    if from_registers:
        kind, a, b = "const u32 (&a)[4]", [f"%{count + i}" for i in range(4)], f"%{count + 4}"
        place, inputs, transposes = f"{{{', '.join(a)}}}", '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])', "0"
    else:
        kind, place, b = "u64 a", f"%{count}", f"%{count + 1}"
        inputs, transposes = '"l"(a)', "0, 0"
    return (
        f"__device__ __forceinline__ void wgmma(float (&d)[{count}], {kind}, u64 b) {{\n"
        f'  asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} {{{registers}}}, {place}, {b}, 1, 1, 1, {transposes};"\n'
        f'               : {operands} : {inputs}, "l"(b));\n}}\n'
    )


def wgmma_int8(n: int) -> str:
    """`wgmma(int (&d)[n / 2], u64 a, u64 b)`: d += a b for an m64nNk32 tile of int8, both operands K-major in shared memory."""
    count = n // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+r"(d[{i}])' for i in range(count))
    return (
        f"__device__ __forceinline__ void wgmma(int (&d)[{count}], u64 a, u64 b) {{\n"
        f'  asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k32.s32.s8.s8 {{{registers}}}, %{count}, %{count + 1}, 1;"\n'
        f'               : {operands} : "l"(a), "l"(b));\n}}\n'
    )
