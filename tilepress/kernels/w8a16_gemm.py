"""y = x (w * w_scale)^T + bias with int8 w and floating x: the op `tilepress::w8a16_gemm`, its reference and its CUDA kernels.

w is read as it is by sm90_w8a16_gemm.cu, up to MOST_ROWS rows of x, 128 at a time; on other cards by sm80_w8a16_gemm.cu, up to 64. For more, some
rows of w at a time are made floating (sm80_dequantize.cu) and multiplied by cuBLAS. The reference makes all of w floating; it serves CPUs, k that
is no multiple of 16, and other dtypes.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from tilepress.formats import int8
from tilepress.kernels import arch, jit, library, ptx, split_sum
from tilepress.kernels.arch import HOPPER, Path
from tilepress.kernels.jit import VARIES, Launch
from tilepress.kernels.once import Planned, gathering
from tilepress.kernels.packed import aligning, multiply_decoded
from tilepress.kernels.w8a8_gemm import KINDS, check_scales, is_settled

library.define("w8a16_gemm(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias) -> Tensor")
MOST_ROWS = 512  # of x
BLOCKS = {8: 2, 16: 2, 32: 2, 64: 1, 128: 1}  # of a multiprocessor, for so many rows of x
_MMA_BLOCKS = {8: 3, 16: 2, 32: 2, 64: 1}  # as many as registers allow
_TILE = 128
_TAKES = "w_scale* bias* kinds y* sums_left* left* ticket:8"
_FEWEST_UNITS = 4  # of a block: blocks that share rows of w add up what the others have left


def w8a16_gemm_ref(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """x floating [..., k], weight int8 [n, k], weight_scale [n, 1] or [1], bias [n] or None -> [..., n] of x's dtype."""
    return linear(x, int8.dequantize(weight, weight_scale).to(x.dtype), bias)


def slots_of(columns: int) -> int:
    """Return how many slots fit a block's part of a multiprocessor's shared memory."""
    return min(12, (HOPPER.shared_bytes // BLOCKS[columns] - arch.RESERVED_BYTES) // _slot_bytes(columns))


def _slot_bytes(columns: int) -> int:
    return _TILE * _TILE + 2 * _TILE * columns + 16


def source(columns: int, dtype: torch.dtype) -> str:
    macros = {
        "NT": columns,
        "SLOTS": slots_of(columns),
        "BLOCKS": BLOCKS[columns],
        "BF16": int(dtype == torch.bfloat16),
    }
    return jit.source("sm90_w8a16_gemm.cu", ptx.wgmma(columns, "bf16" if macros["BF16"] else "f16", True), **macros)


@functools.cache
def _kernel(columns: int, dtype: torch.dtype) -> jit.Kernel:
    shared_bytes = slots_of(columns) * _slot_bytes(columns)
    takes = f"w& x& {_TAKES} m n k_blocks units"
    return jit.Kernel("w8a16_gemm", source(columns, dtype), takes, 288, shared_bytes, overlaps=True)


def mma_source(columns: int, dtype: torch.dtype) -> str:
    return jit.source("sm80_w8a16_gemm.cu", NT=columns, BLOCKS=_MMA_BLOCKS[columns], BF16=int(dtype == torch.bfloat16))


@functools.cache
def _mma_kernel(columns: int, dtype: torch.dtype) -> jit.Kernel:
    takes = f"w* x* {_TAKES} m n k stride k_blocks units"
    return jit.Kernel("w8a16_mma", mma_source(columns, dtype), takes, 256, 8 * _TILE * columns, overlaps=True)


def dequantize_source(dtype: torch.dtype) -> str:
    return jit.source("sm80_dequantize.cu", BF16=int(dtype == torch.bfloat16))


@functools.cache
def _dequantize_kernel(dtype: torch.dtype) -> jit.Kernel:
    return jit.Kernel("dequantize", dequantize_source(dtype), "codes* scale* kinds w* rows cols", 256)


def _served(device: torch.device, x_dtype: torch.dtype, scale_dtype: torch.dtype, k: int) -> bool:
    return (
        jit.why_not(device) is None
        and x_dtype in (torch.bfloat16, torch.float16)
        and scale_dtype in KINDS
        and k % 16 == 0
    )


def _uses_wgmma(device: torch.device) -> bool:
    return arch.kernel_for("w8a16_gemm", device) == "w8a16_gemm"


def _most_rows(device: torch.device) -> int:
    return MOST_ROWS if _uses_wgmma(device) else max(_MMA_BLOCKS)


def _plan(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Callable:
    n, k = weight.shape
    if not _served(x.device, x.dtype, weight_scale.dtype, k) or (bias is not None and bias.dtype not in KINDS):
        return w8a16_gemm_ref
    if x.shape[-1] != k or weight.dtype != torch.int8:
        raise ValueError(f"{x.dtype} {list(x.shape)} times {weight.dtype} {list(weight.shape)}")
    check_scales(x, weight, (("weight_scale", weight_scale, n),), bias, n)
    m, out = x.numel() // k, jit.like((*x.shape[:-1], n), x.dtype, x.device)
    if out.numel() == 0:
        return lambda *_: jit.empty_like(out)
    scattered = [i for i, t in ((2, weight_scale), (3, bias)) if t is not None and not t.is_contiguous()]
    # A copy of a weight is not settled.
    if scattered := scattered + [1] * (not weight.is_contiguous() or weight.data_ptr() % 16 > 0):
        return gathering(_cuda, scattered)
    if m > _most_rows(x.device):
        return lambda *arguments: _multiply_dequantized(*arguments).view(out.shape)
    return _multiplying(out, x, weight, weight_scale, bias)


_cuda = Planned(_plan)


def _multiplying(out: Tensor, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Callable:
    """Return what runs the op for arguments like these, by as many launches as there are kernels for their rows."""
    flat, align = aligning(x)
    some = [_multiplying_some(rows, weight, scale, bias) for rows in flat.split(max(BLOCKS))]
    of_x, of_y = (max(BLOCKS) * t.stride(0) * t.itemsize for t in (flat, out.new_empty(0, len(weight))))

    def run(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        x, y, alone = align(x), jit.empty_like(out), not is_settled(weight)
        numbers = [scale.data_ptr()] if bias is None else [scale.data_ptr(), bias.data_ptr()]
        matrix, rows, made = weight.data_ptr(), x.data_ptr(), y.data_ptr()
        for i, launch in enumerate(some):
            launch(matrix, rows + i * of_x, numbers, made + i * of_y, alone)
        return y

    return run


def _multiplying_some(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Callable:
    """Return what multiplies rows of x [m, k] for which there is a kernel: given addresses of the weight, x, scale and bias, y; and whether it runs alone."""
    (m, k), n = x.shape, len(weight)
    columns = next(columns for columns in BLOCKS if m <= columns)
    k_blocks = -(-k // _TILE)
    units = -(-n // _TILE) * k_blocks
    uses_wgmma = _uses_wgmma(x.device)
    blocks = (BLOCKS if uses_wgmma else _MMA_BLOCKS)[columns] * arch.card(x.device).multiprocessors
    grid = max(1, min(blocks, units // _FEWEST_UNITS))
    scratch = split_sum.scratch(x.device, grid, 2, _TILE, columns)
    args = VARIES, VARIES, VARIES, 0 if bias is None else VARIES, _kinds(scale, bias), *(VARIES,) * 4
    if uses_wgmma:
        of_weight = jit.TensorMaps(weight, _TILE, 128).__getitem__
        of_x = jit.TensorMaps(x, columns, 64).__getitem__
        launch = Launch(_kernel(columns, x.dtype), x.device, grid, (*args, m, n, k_blocks, units))
    else:
        of_weight = of_x = int  # addresses as they are
        launch = Launch(_mma_kernel(columns, x.dtype), x.device, grid, (*args, m, n, k, x.stride(0), k_blocks, units))

    def run(weight: int, x: int, numbers: list[int], y: int, alone: bool) -> None:
        _memory, *left = scratch()
        launch(of_weight(weight), of_x(x), *numbers, y, *left, alone=alone)

    return run


def _kinds(scale: Tensor, bias: Tensor | None) -> int:
    return KINDS[scale.dtype] << 4 | (0 if bias is None else KINDS[bias.dtype] << 8) | (scale.numel() > 1) << 16


def _multiply_dequantized(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    k = weight.shape[1]
    x = x.reshape(-1, k)

    def decode(_tiles: slice, first: int, last: int) -> Tensor:
        rows = last - first
        dense = torch.empty(rows, k, dtype=x.dtype, device=x.device)
        own = scale[first:last] if scale.numel() > 1 else scale
        grid = min(-(-rows * k // 16 // 256), 16 * arch.card(x.device).multiprocessors)
        _dequantize_kernel(x.dtype)(
            x.device, grid, weight[first:last].data_ptr(), own.data_ptr(), _kinds(own, None), dense.data_ptr(), rows, k
        )
        return dense

    return multiply_decoded(x, bias, len(weight), (_TILE, _TILE), decode)


library.impl("w8a16_gemm", w8a16_gemm_ref, "CPU")
library.impl("w8a16_gemm", _cuda, "CUDA")


@torch.library.register_fake("tilepress::w8a16_gemm")
def _(x, weight, weight_scale, bias):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def path(device: torch.device, dtype: torch.dtype, scale_dtype: torch.dtype, k: int, m: int = 1) -> Path:
    """Return which implementation serves m rows of x, of k columns and a dtype, on a device."""
    if not _served(device, dtype, scale_dtype, k):
        return Path("w8a16_gemm", device.type, jit.why_not(device) or "", "dequantize")
    if m > _most_rows(device):
        return Path("dequantize", "cuda", decodes=True)
    return Path(arch.kernel_for("w8a16_gemm", device), "cuda")
