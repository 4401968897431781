"""y = x W^T + bias with W in Tiled-CSL: the op `tilepress::tiled_csl_spmm`, its reference and its CUDA kernel.

On sm_90 up to 64 rows of x go through one launch of tiled_csl_spmm.cu, a few more through several; with many rows, and on other cards from
sm_80 on, W is decoded to dense (tiled_csl_decode.cu) and multiplied by cuBLAS. The reference decodes the whole weight once a call and
multiplies densely, on any device.
"""

import functools
import itertools
import math
import secrets
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from tilepress.formats import tiled_csl
from tilepress.kernels import jit, library, ptx
from tilepress.kernels.tiled_csl_decode import tiled_csl_decode

library.define(
    "tiled_csl_spmm(Tensor x, Tensor words, Tensor offsets, Tensor? cuts, Tensor? bias, int rows, int tile_rows, ScalarType value_dtype) -> Tensor"
)
COLUMNS = 64  # rows of x, columns of y as the kernel sees it, that one launch takes
_UNIT_COST = 64  # of an empty unit, in 16 bytes
MOST_ROWS = 192  # of x: beyond, decoding W to dense and cuBLAS are faster


def tiled_csl_spmm_ref(
    x: Tensor,
    words: Tensor,
    offsets: Tensor,
    cuts: Tensor | None,
    bias: Tensor | None,
    rows: int,
    tile_rows: int,
    value_dtype: torch.dtype,
) -> Tensor:
    """x [..., cols] floating, words int32, offsets int32 [tiles + 1], cuts of `make_cuts` or None, bias [rows] or None -> [..., rows] of x's
    dtype. Values are converted to x's dtype before the product."""
    packed = tiled_csl.TiledCSL(words, offsets, rows, x.shape[-1], tile_rows, value_dtype)
    _check(x, packed, bias)
    return linear(x, tiled_csl.unpack(packed).to(x.dtype), bias)


@dataclass(frozen=True)
class Configuration:
    """Macros of the kernel, and what they need."""

    tile_rows: int
    columns: int  # of y: 8, 16, 32, 64
    windows: int
    team: int
    chunk: int  # bytes
    unscatter: bool
    bfloat16: bool

    stages = 2

    @property
    def swap(self) -> bool:
        """x is operand A of wgmma where its 64 rows fill it."""
        return self.columns == 64 and self.tile_rows == 128

    @property
    def threads(self) -> int:
        return 32 * (4 + self.windows * self.team + 2)

    def shared_bytes(self, blocks: int) -> int:
        """Of a block, for a grid of so many."""
        slots = self.windows * self.tile_rows // 128
        producers = self.windows * self.team
        bars = 8 * (2 * slots + self.stages * producers)
        windows = self.windows * (128 * self.tile_rows + 1024)
        return windows + slots * 128 * self.columns + self.stages * producers * self.chunk + bars + 4 * (blocks + 1)

    @property
    def source(self) -> str:
        macros = {
            "TILE_ROWS": self.tile_rows,
            "NT": self.columns,
            "SWAP": int(self.swap),
            "WINDOWS": self.windows,
            "TEAM": self.team,
            "CHUNK": self.chunk,
            "STAGES": self.stages,
            "UNSCATTER": int(self.unscatter),
            "BF16": int(self.bfloat16),
        }
        instruction = ptx.wgmma(128 if self.swap else self.columns, "bf16" if self.bfloat16 else "f16")
        return jit.source("tiled_csl_spmm.cu", instruction, **macros)


class _Choice(NamedTuple):
    most: float  # bytes of words that nearly all tiles stay under
    windows: int  # for up to 32 columns
    windows_of_64: int
    team: int
    chunk: int
    unscatter: bool


# A ring's stage should hold a member's share of a tile. Measured on an H200: docs/kernels/tiled_csl_spmm.md.
_TABLE = {
    128: (
        _Choice(3584, 8, 7, 1, 3584, True),
        _Choice(7168, 6, 5, 2, 3584, True),
        _Choice(11264, 5, 4, 2, 5632, True),
        _Choice(math.inf, 4, 4, 2, 7168, False),
    ),
    64: (
        _Choice(3584, 12, 10, 1, 3584, True),
        _Choice(5632, 8, 8, 1, 5632, True),
        _Choice(math.inf, 8, 8, 1, 7168, False),
    ),
}


def configuration(tile_rows: int, density: float, columns: int, dtype: torch.dtype) -> Configuration:
    """For a weight with this share of words and so many columns of y, at most 64."""
    mean = 256 * tile_rows * density  # bytes of a tile's words
    tile = mean + 4 * mean**0.5  # and two standard deviations of a random tile
    chosen = next(choice for choice in _TABLE[tile_rows] if tile <= choice.most)
    n = next(n for n in (8, 16, 32, 64) if columns <= n)
    windows = chosen.windows_of_64 if n == 64 else chosen.windows
    return Configuration(tile_rows, n, windows, chosen.team, chosen.chunk, chosen.unscatter, dtype == torch.bfloat16)


def make_cuts(offsets: Tensor, rows: int, cols: int, tile_rows: int, parts: int) -> Tensor:
    """Where the runs of a weight's tiles begin that `parts` blocks take, equal in bytes: int32 [parts + 1], in units of 128 rows and 64 columns,
    on the offsets' device. Waits for the device."""
    units = -(-rows // 128) * -(-cols // 64)
    ends = offsets.long().cpu()[128 // tile_rows :: 128 // tile_rows] + _UNIT_COST * torch.arange(1, units + 1)
    inner = torch.searchsorted(ends, ends[-1] * torch.arange(1, parts) // parts) + 1
    edges = torch.tensor([0]), inner.clamp(max=units), torch.tensor([units])
    return torch.cat(edges).to(offsets.device, torch.int32)


def blocks(device: torch.device) -> int:
    """How many the kernel is launched with: one for each multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _kernel(chosen: Configuration, grid: int) -> jit.Kernel:
    return jit.Kernel("tiled_csl_spmm", chosen.source, chosen.threads, chosen.shared_bytes(grid), overlaps=True)


_tickets = itertools.count(secrets.randbits(62))


def _cuda(
    x: Tensor,
    words: Tensor,
    offsets: Tensor,
    cuts: Tensor | None,
    bias: Tensor | None,
    rows: int,
    tile_rows: int,
    value_dtype: torch.dtype,
) -> Tensor:
    if _why_not(x.device):
        return tiled_csl_spmm_ref(x, words, offsets, cuts, bias, rows, tile_rows, value_dtype)
    packed = tiled_csl.TiledCSL(words, offsets, rows, x.shape[-1], tile_rows, value_dtype)
    _check(x, packed, bias)
    flat = x.reshape(-1, packed.cols)
    if not _serves(len(flat), x.device, x.dtype, value_dtype) or (bias is not None and bias.dtype != value_dtype):
        dense = tiled_csl_decode(words, offsets, rows, packed.cols, tile_rows, value_dtype)
        return linear(x, dense.to(x.dtype), bias)
    return _multiply(flat, packed, cuts, bias).view(*x.shape[:-1], rows)


def _check(x: Tensor, packed: tiled_csl.TiledCSL, bias: Tensor | None) -> None:
    """Raises ValueError for arguments with which the kernels would read or write elsewhere."""
    words, offsets = packed.words, packed.offsets
    tiles = tiled_csl.num_tiles(packed.rows, packed.cols, packed.tile_rows)
    if offsets.shape != (tiles + 1,) or words.dtype != torch.int32 or offsets.dtype != torch.int32:
        raise ValueError(
            f"{offsets.numel()} offsets are not those of {packed.rows} x {packed.cols}, which has {tiles} tiles"
        )
    if not (words.is_contiguous() and offsets.is_contiguous()) or (words.is_cuda and words.data_ptr() % 16):
        raise ValueError("words and offsets must be contiguous, on a card words must begin at a multiple of 16 bytes")
    if bias is not None and (bias.shape != (packed.rows,) or not bias.is_contiguous()):
        raise ValueError(f"a bias of {list(bias.shape)} for {packed.rows} rows")
    if any(t is not None and t.device != x.device for t in (words, offsets, bias)):
        raise ValueError("the arguments are on several devices")


def _serves(n: int, device: torch.device, dtype: torch.dtype, value_dtype: torch.dtype) -> bool:
    """Whether the kernel, and not decoding and cuBLAS, takes n rows of x."""
    return n <= MOST_ROWS and dtype == value_dtype and _is_hopper(device)


def _multiply(x: Tensor, packed: tiled_csl.TiledCSL, cuts: Tensor | None, bias: Tensor | None) -> Tensor:
    """x [n, cols]: a launch for every 64 rows of x."""
    n, rows, cols, grid = len(x), packed.rows, packed.cols, blocks(x.device)
    y = torch.empty(n, rows, dtype=x.dtype, device=x.device)
    if cuts is None:
        cuts = make_cuts(packed.offsets, rows, cols, packed.tile_rows, grid)
    if cuts.shape != (grid + 1,) or cuts.device != x.device:
        raise ValueError(f"cuts for {cuts.numel() - 1} blocks on {cuts.device}, not for {grid} on {x.device}")
    if cols % 8:  # rows that the copy engine can find
        x = pad(x, (0, -cols % 8))
    if x.stride(1) != 1 or x.stride(0) % 8 or x.stride(0) < x.shape[1] or x.data_ptr() % 16:
        x = x.new_empty(x.shape).copy_(x)
    density, flags = packed.words.numel() / (rows * cols), -(-8 * grid // 256) * 256
    for first in range(0, n, COLUMNS):
        part = x[first : first + COLUMNS]
        chosen = configuration(packed.tile_rows, density, len(part), packed.dtype)
        scratch = torch.empty(flags + grid * 128 * chosen.columns * 4, dtype=torch.uint8, device=x.device)
        _kernel(chosen, grid)(
            x.device,
            grid,
            packed.words.data_ptr(),
            packed.offsets.data_ptr(),
            cuts.data_ptr(),
            jit.tensor_map(part, chosen.columns, 64),
            0 if bias is None else bias.data_ptr(),
            y.data_ptr() + first * y.stride(0) * y.element_size(),
            scratch.data_ptr() + flags,
            scratch.data_ptr(),
            next(_tickets),
            len(part),
            rows,
            -(-cols // 64),
        )
    return y


def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def _why_not(device: torch.device) -> str | None:
    """Why the reference serves a device, or None."""
    if device.type != "cuda":
        return ""
    if torch.cuda.get_device_capability(device)[0] < 8:
        return " (the card is older than sm_80)"
    return f" ({jit.missing()})" if jit.missing() else None


library.impl("tiled_csl_spmm", tiled_csl_spmm_ref, "CPU")
library.impl("tiled_csl_spmm", _cuda, "CUDA")


@torch.library.register_fake("tilepress::tiled_csl_spmm")
def _(x, words, offsets, cuts, bias, rows, tile_rows, value_dtype):
    return x.new_empty(*x.shape[:-1], rows)


def path(device: torch.device, dtype: torch.dtype, value_dtype: torch.dtype, n: int = 1) -> str:
    """Which implementation serves n rows of x of a dtype on a device: what results report."""
    why = _why_not(device)
    if why is not None:
        return f"tiled_csl_spmm reference on {device.type}{why}"
    kernel = _serves(n, device, dtype, value_dtype)
    return "tiled_csl_spmm kernel on cuda" if kernel else "tiled_csl_decode kernel and cuBLAS on cuda"


tiled_csl_spmm = torch.ops.tilepress.tiled_csl_spmm
