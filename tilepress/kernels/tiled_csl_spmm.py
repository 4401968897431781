"""y = x W^T + bias with W in Tiled-CSL: the op `tilepress::tiled_csl_spmm`, its reference and its CUDA kernels.

On sm_90 one launch of sm90_tiled_csl_spmm.cu serves up to MOST_ROWS rows of x, on other cards one of sm80_tiled_csl_spmm.cu up to MMA_MOST_ROWS
(tiled_csl_mma.py). For more, W is decoded to dense (sm80_tiled_csl_decode.cu), some rows at a time, and multiplied by cuBLAS. The reference decodes
the whole weight once a call and multiplies densely, on any device.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from tilepress.formats import tiled_csl
from tilepress.kernels import arch, jit, library, ptx, split_sum, tiled_csl_mma
from tilepress.kernels.arch import Path
from tilepress.kernels.jit import VARIES, Launch
from tilepress.kernels.once import Planned
from tilepress.kernels.packed import PerWeight, aligning, check_arguments, cuts_of, decoding, multiply_decoded
from tilepress.kernels.tiled_csl_decode import kernel as tiled_csl_decode_kernel, tiled_csl_decode

library.define(
    "tiled_csl_spmm(Tensor x, Tensor words, Tensor offsets, Tensor? bias, int rows, ScalarType value_dtype) -> Tensor"
)
COLUMNS = (8, 16, 32, 64, 96, 128, 160, 192, 256)  # of y that a block of the kernel takes at once; x has them as rows
MOST_ROWS = 1536  # of x, that the kernel for sm_90 takes: with more, decoding W and cuBLAS are faster, but at 90 %
MMA_MOST_ROWS = 256  # the same of the kernel on mma.sync
_TILE_COST = 64  # of an empty tile, in 16 bytes


def tiled_csl_spmm_ref(
    x: Tensor, words: Tensor, offsets: Tensor, bias: Tensor | None, rows: int, value_dtype: torch.dtype
) -> Tensor:
    """x [..., cols] floating, words int32, offsets int32 [tiles + 1], bias [rows] or None -> [..., rows] of x's dtype. Values and bias are converted
    to x's dtype before the product. The op has no gradient: linear layers bring it (runtime/linear/packed.py)."""
    packed = tiled_csl.TiledCSL(words, offsets, rows, x.shape[-1], value_dtype)
    check_arguments(x, words, offsets, bias, rows, tiled_csl.num_tiles(rows, packed.cols))
    return linear(x, tiled_csl.unpack(packed).to(x.dtype), None if bias is None else bias.to(x.dtype))


@dataclass(frozen=True)
class Configuration:
    """Macros of the kernel, and what they need."""

    columns: int  # of y: one of COLUMNS
    windows: int
    team: int
    chunk: int  # bytes
    unscatter: bool
    bfloat16: bool

    @property
    def consumers(self) -> int:
        return 1 if self.columns <= 64 else 2

    @property
    def x_slots(self) -> int:
        return self.windows if self.consumers == 1 else _X_SLOTS[self.columns]

    @property
    def swap(self) -> bool:
        """x is operand A of wgmma where its 64 rows fill it."""
        return self.columns == 64

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a consumer's and of another thread, 0 for equal shares."""
        return (160, 96) if self.columns == 256 else (0, 0)

    @property
    def threads(self) -> int:
        warps = 4 * self.consumers + self.windows * self.team
        return 32 * (warps + 2 if self.consumers == 1 else (warps + 4) // 4 * 4)

    def shared_bytes(self, grid: int) -> int:
        """Return the dynamic shared memory of a block in a launch of so many, in bytes."""
        bars = 2 * (self.windows + (self.x_slots if self.consumers == 2 else 0))
        cuts = grid + 1 if self.consumers == 2 else 0
        return self.windows * (128 * 128 + 1024) + self.x_slots * 128 * self.columns + 8 * bars + 4 * cuts

    def source(self, grid: int) -> str:
        """Return the source for a launch of so many blocks."""
        macros = {
            "NT": self.columns,
            "CONSUMERS": self.consumers,
            "SWAP": int(self.swap),
            "WINDOWS": self.windows,
            "TEAM": self.team,
            "CHUNK": self.chunk,
            "X_SLOTS": self.x_slots,
            "UNSCATTER": int(self.unscatter),
            "CONSUMER_REGISTERS": self.registers[0],
            "PRODUCER_REGISTERS": self.registers[1],
            "GRID": grid,
            "BF16": int(self.bfloat16),
        }
        columns = 128 if self.swap else self.columns if self.columns <= 192 else self.columns // 2
        return jit.source("sm90_tiled_csl_spmm.cu", ptx.wgmma(columns, "bf16" if self.bfloat16 else "f16"), **macros)


class _Choice(NamedTuple):
    most: float  # bytes of words that nearly all tiles stay under
    windows: int
    team: int
    chunk: int
    unscatter: bool


# Measured on an H200: docs/kernels/tiled_csl_spmm.md. A chunk should hold a member's share of a tile, so that a window is emptied by what is known of it.
_FEW = (
    _Choice(2048, 10, 1, 2048, True),
    _Choice(3584, 8, 1, 3584, True),
    _Choice(7168, 7, 2, 3584, True),
    _Choice(10496, 5, 2, 5120, True),
    _Choice(14336, 7, 2, 3584, False),
    _Choice(math.inf, 6, 3, 3072, False),
)
_32 = (*_FEW[:2], _Choice(7168, 6, 3, 2560, True), *_FEW[3:])
_SWAPPED = (
    _Choice(2048, 7, 1, 2048, True),
    _Choice(3584, 7, 1, 3584, True),
    _Choice(7168, 5, 2, 3584, True),
    _Choice(11264, 5, 2, 5120, True),
    _Choice(math.inf, 6, 2, 3584, False),
)
_MANY = (_Choice(3584, 7, 1, 3584, True), _Choice(7168, 7, 1, 3584, False), _Choice(math.inf, 7, 1, 4608, False))
_MOST = (_Choice(math.inf, 7, 1, 3584, False),)
_TABLE = {8: _FEW, 16: _FEW, 32: _32, 64: _SWAPPED, 96: _MANY, 128: _MANY, 160: _MANY, 192: _MOST, 256: _MOST}
_X_SLOTS = {96: 6, 128: 4, 160: 5, 192: 4, 256: 3}


def configuration(density: float, columns: int, dtype: torch.dtype) -> Configuration:
    """Return the configuration for a weight with this share of words, and one of COLUMNS."""
    mean = 256 * tiled_csl.TILE_ROWS * density  # bytes of a tile's words
    tile = mean + 4 * mean**0.5  # and two standard deviations of a random tile
    chosen = next(choice for choice in _TABLE[columns] if tile <= choice.most)
    bfloat16 = dtype == torch.bfloat16
    return Configuration(columns, chosen.windows, chosen.team, chosen.chunk, chosen.unscatter, bfloat16)


def columns_for(n: int, rows: int, cols: int, grid: int) -> int:
    """Return which of COLUMNS takes n rows of x soonest: a tile costs about as much as 80 columns and its own, and the blocks that share a row block
    add up what the others have left, one after the other."""
    if n <= 64:
        return next(columns for columns in COLUMNS if n <= columns)
    k_blocks = -(-cols // tiled_csl.TILE_COLS)

    def cost(columns: int) -> float:
        tiles = tiled_csl.num_tiles(rows, cols) * -(-n // columns) / grid  # of a block
        return tiles * (columns + 80) + (k_blocks - 1) // tiles * 3 * columns

    return min(COLUMNS[4:], key=cost)


def make_cuts(offsets: Tensor, parts: int) -> Tensor:
    """Return where the runs of a weight's tiles begin that `parts` blocks take, equal in bytes: int32 [parts + 1, 2] on the CPU, tiles and their offsets. Waits
    for the device."""
    return cuts_of(offsets.cpu(), _TILE_COST, parts)


_cuts_of = PerWeight(lambda offsets, parts: jit.ByValue.of(make_cuts(offsets, parts)))


def blocks(device: torch.device) -> int:
    """Return how many blocks the kernel for sm_90 is launched with: one for each multiprocessor."""
    return arch.card(device).multiprocessors


@functools.cache
def _kernel(chosen: Configuration, grid: int) -> jit.Kernel:
    cuts = "cuts& " if chosen.consumers == 1 else ""
    takes = f"words* offsets* {cuts}x& bias* y* sums* left* ticket:8 n m k_blocks tiles_of_w all_tiles successors_wait"
    shared_bytes = chosen.shared_bytes(grid)
    return jit.Kernel("tiled_csl_spmm", chosen.source(grid), takes, chosen.threads, shared_bytes, overlaps=True)


@functools.lru_cache(maxsize=4096)
def _planned(
    n: int, words: int, rows: int, cols: int, dtype: torch.dtype, grid: int
) -> tuple[Configuration, jit.Kernel]:
    """Return configuration and kernel for n rows of x and a weight of so many words."""
    chosen = configuration(words / (rows * cols), columns_for(n, rows, cols, grid), dtype)
    return chosen, _kernel(chosen, grid)


def _plan(
    x: Tensor, words: Tensor, offsets: Tensor, bias: Tensor | None, rows: int, value_dtype: torch.dtype
) -> Callable:
    if jit.why_not(x.device) is not None:
        return tiled_csl_spmm_ref
    packed = tiled_csl.TiledCSL(words, offsets, rows, x.shape[-1], value_dtype)
    check_arguments(x, words, offsets, bias, rows, tiled_csl.num_tiles(rows, packed.cols))
    n, out = x.numel() // max(1, packed.cols), jit.like((*x.shape[:-1], rows), x.dtype, x.device)
    if out.numel() == 0:
        return lambda *_: jit.empty_like(out)
    if bias is not None and bias.dtype != x.dtype:
        return lambda x, words, offsets, bias, *rest: _cuda(x, words, offsets, bias.to(x.dtype), *rest)
    kernel = _kernel_for(n, x.device, x.dtype, value_dtype)
    if kernel is None:
        return _decoding
    return (_multiplying if kernel == "tiled_csl_spmm" else tiled_csl_mma.multiplying)(out, x, packed, bias)


_cuda = Planned(_plan)


def _kernel_for(n: int, device: torch.device, dtype: torch.dtype, value_dtype: torch.dtype) -> str | None:
    """Return which kernel takes n rows of x, or None for decoding and cuBLAS."""
    kernel = arch.kernel_for("tiled_csl_spmm", device)
    most = MOST_ROWS if kernel == "tiled_csl_spmm" else MMA_MOST_ROWS
    return kernel if dtype == value_dtype and n <= most else None


def _multiplying(out: Tensor, x: Tensor, packed: tiled_csl.TiledCSL, bias: Tensor | None) -> Callable:
    """Return what runs the op for arguments like these, in one launch."""
    flat, align = aligning(x)
    n, rows, cols, grid = len(flat), packed.rows, packed.cols, blocks(x.device)
    chosen, kernel = _planned(n, packed.words.numel(), rows, cols, packed.dtype, grid)
    reads_cuts = chosen.consumers == 1  # else equal numbers of tiles
    scratch = split_sum.scratch(x.device, grid, chosen.consumers, tiled_csl.TILE_ROWS, chosen.columns)
    of_x, tiles = jit.TensorMaps(flat, chosen.columns, 64).__getitem__, packed.offsets.numel() - 1
    numbers = n, rows, -(-cols // tiled_csl.TILE_COLS), tiles, tiles * -(-n // chosen.columns)
    optional = [*([VARIES] if reads_cuts else []), VARIES, 0 if bias is None else VARIES]
    args = VARIES, VARIES, *optional, VARIES, VARIES, VARIES, VARIES, *numbers, VARIES
    launch = Launch(kernel, x.device, grid, args)

    def run(x: Tensor, words: Tensor, offsets: Tensor, bias: Tensor | None, *_) -> Tensor:
        x, y = align(x), jit.empty_like(out)
        # Waits for the device once, also where the kernel takes equal numbers of tiles.
        cuts = _cuts_of(words, offsets, grid)
        given = [words.data_ptr(), offsets.data_ptr()]
        if reads_cuts:
            given.append(cuts)
        given.append(of_x(x.data_ptr()))
        if bias is not None:
            given.append(bias.data_ptr())
        _memory, *left = scratch()
        launch(*given, y.data_ptr(), *left, jit.successors_wait)
        return y

    return run


def _plan_decoding(
    x: Tensor, words: Tensor, offsets: Tensor, bias: Tensor | None, rows: int, value_dtype: torch.dtype
) -> Callable:
    packed = tiled_csl.TiledCSL(words, offsets, rows, x.shape[-1], value_dtype)
    if x.dtype != value_dtype:
        return _converting
    k_blocks = -(-packed.cols // tiled_csl.TILE_COLS)

    def launch_of(n: int) -> Launch:
        tiles = tiled_csl.num_tiles(n, packed.cols)
        return Launch(tiled_csl_decode_kernel(), x.device, tiles, (VARIES, VARIES, VARIES, n, packed.cols, k_blocks))

    out = jit.like((*x.shape[:-1], rows), x.dtype, x.device)
    run = decoding(out, x, (tiled_csl.TILE_ROWS, tiled_csl.TILE_COLS), launch_of)
    return lambda x, words, offsets, bias, *_: run(x, words, offsets, None, bias)


_decoding = Planned(_plan_decoding)


def _converting(x: Tensor, words: Tensor, offsets: Tensor, bias, rows: int, value_dtype: torch.dtype) -> Tensor:
    """Decode W for x of another dtype, which the weight is converted to."""
    packed = tiled_csl.TiledCSL(words, offsets, rows, x.shape[-1], value_dtype)
    return _multiply_decoded(x.reshape(-1, packed.cols), packed, bias).view(*x.shape[:-1], rows)


def _multiply_decoded(x: Tensor, packed: tiled_csl.TiledCSL, bias: Tensor | None) -> Tensor:
    def decode(tiles: slice, first: int, last: int) -> Tensor:
        return tiled_csl_decode(packed.words, packed.offsets[tiles], last - first, packed.cols, packed.dtype)

    return multiply_decoded(x, bias, packed.rows, (tiled_csl.TILE_ROWS, tiled_csl.TILE_COLS), decode)


library.impl("tiled_csl_spmm", tiled_csl_spmm_ref, "CPU")
library.impl("tiled_csl_spmm", _cuda, "CUDA")


@torch.library.register_fake("tilepress::tiled_csl_spmm")
def _(x, words, offsets, bias, rows, value_dtype):
    return x.new_empty(*x.shape[:-1], rows)


def path(device: torch.device, dtype: torch.dtype, value_dtype: torch.dtype, n: int = 1) -> Path:
    """Return which implementation serves n rows of x of a dtype on a device."""
    why = jit.why_not(device)
    if why is not None:
        return Path("tiled_csl_spmm", device.type, why)
    kernel = _kernel_for(n, device, dtype, value_dtype)
    return Path(kernel, "cuda") if kernel else Path("tiled_csl_decode", "cuda", decodes=True)


tiled_csl_spmm = torch.ops.tilepress.tiled_csl_spmm
