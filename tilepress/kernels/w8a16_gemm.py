"""y = x (w * w_scale)^T + bias with int8 w and floating x: the op `tilepress::w8a16_gemm`, its reference and its CUDA kernels.

w is read as it is by sm90_w8a16_gemm.cu, up to MOST_ROWS rows of x, 128 at a time; on other cards by sm80_w8a16_gemm.cu, up to 64. For more, some
rows of w at a time are made floating (sm80_dequantize.cu) and multiplied by cuBLAS. The reference makes all of w floating; it serves CPUs, k that
is no multiple of 16, and other dtypes.
"""

import functools

import torch
from torch import Tensor
from torch.nn.functional import linear

from tilepress.formats import int8
from tilepress.kernels import arch, jit, library, ptx, split_sum
from tilepress.kernels.arch import HOPPER, Path
from tilepress.kernels.packed import aligned, multiply_decoded
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


def _cuda(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    n, k = weight.shape
    if not _served(x.device, x.dtype, weight_scale.dtype, k) or (bias is not None and bias.dtype not in KINDS):
        return w8a16_gemm_ref(x, weight, weight_scale, bias)
    if x.shape[-1] != k or weight.dtype != torch.int8:
        raise ValueError(f"{x.dtype} {list(x.shape)} times {weight.dtype} {list(weight.shape)}")
    check_scales(x, weight, (("weight_scale", weight_scale, n),), bias, n)
    flat, is_ready = x.reshape(-1, k), is_settled(weight)
    if not weight.is_contiguous() or weight.data_ptr() % 16:
        weight, is_ready = weight.clone(memory_format=torch.contiguous_format), False
    scale, bias = weight_scale.reshape(-1).contiguous(), None if bias is None else bias.contiguous()
    if len(flat) == 0 or n == 0:
        y = x.new_empty(len(flat), n)
    elif len(flat) <= _most_rows(x.device):
        y = _multiply(aligned(flat), weight, scale, bias, is_ready)
    else:
        y = _multiply_dequantized(flat, weight, scale, bias)
    return y.view(*x.shape[:-1], n)


def _multiply(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, is_ready: bool) -> Tensor:
    """`is_ready`: no kernel still writes the weight."""
    y = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    for rows, out in zip(x.split(max(BLOCKS)), y.split(max(BLOCKS)), strict=True):
        _multiply_some(rows, weight, scale, bias, is_ready, out)
    return y


def _multiply_some(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, is_ready: bool, y: Tensor) -> None:
    """Rows of x for which there is a kernel, to y."""
    (m, k), n = x.shape, len(weight)
    columns = next(columns for columns in BLOCKS if m <= columns)
    k_blocks = -(-k // _TILE)
    units = -(-n // _TILE) * k_blocks
    uses_wgmma = _uses_wgmma(x.device)
    blocks = (BLOCKS if uses_wgmma else _MMA_BLOCKS)[columns] * arch.card(x.device).multiprocessors
    grid = max(1, min(blocks, units // _FEWEST_UNITS))
    _memory, sums, left, ticket = split_sum.scratch(x.device, grid, 2, _TILE, columns)
    numbers = (
        scale.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        _kinds(scale, bias),
        y.data_ptr(),
        sums,
        left,
        ticket,
    )
    if uses_wgmma:
        maps = jit.tensor_map(weight, _TILE, 128), jit.tensor_map(x, columns, 64)
        _kernel(columns, x.dtype)(x.device, grid, *maps, *numbers, m, n, k_blocks, units, alone=not is_ready)
    else:
        matrices = weight.data_ptr(), x.data_ptr()
        sizes = m, n, k, x.stride(0), k_blocks, units
        _mma_kernel(columns, x.dtype)(x.device, grid, *matrices, *numbers, *sizes, alone=not is_ready)


def _kinds(scale: Tensor, bias: Tensor | None) -> int:
    return KINDS[scale.dtype] << 4 | (0 if bias is None else KINDS[bias.dtype] << 8) | (scale.numel() > 1) << 16


def _multiply_dequantized(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    k = weight.shape[1]

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
