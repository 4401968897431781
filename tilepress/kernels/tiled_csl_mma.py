"""y = x W^T + bias with W in Tiled-CSL on mma.sync: what serves few rows of x on cards from sm_80 on that are not Hopper.

It was run on an H200 only; its speed on other cards is not known.
"""

import functools

import torch
from torch import Tensor

from tilepress.formats.tiled_csl import TILE_COLS, TILE_ROWS, TiledCSL
from tilepress.kernels import jit, split_sum

MOST_ROWS = 64  # of x: beyond, W is decoded once rather than read again
# Of a multiprocessor, for so many columns of y at once: as many as registers allow.
BLOCKS = {8: 6, 16: 6, 32: 4, 64: 2}
_FEWEST_TILES = 8  # of a block: blocks that share a row block add up one after the other
_THREADS = 128


def source(columns: int, dtype: torch.dtype) -> str:
    macros = {"NT": columns, "BLOCKS": BLOCKS[columns], "BF16": int(dtype == torch.bfloat16)}
    return jit.source("tiled_csl_mma.cu", **macros)


@functools.cache
def _kernel(columns: int, dtype: torch.dtype) -> jit.Kernel:
    return jit.Kernel("tiled_csl_mma", source(columns, dtype), _THREADS)


def multiply(x: Tensor, packed: TiledCSL, bias: Tensor | None) -> Tensor:
    """x [n, packed.cols rounded up to 8, zeros there] of the values' dtype, 16-byte aligned rows -> y [n, rows], in one launch."""
    n, rows = len(x), packed.rows
    y = torch.empty(n, rows, dtype=x.dtype, device=x.device)
    columns = next(c for c in BLOCKS if n <= c or c == 64)
    tiles = packed.offsets.numel() - 1
    all_tiles = tiles * -(-n // columns)
    most = jit.multiprocessors(x.device) * BLOCKS[columns]
    grid = max(1, min(most, all_tiles // _FEWEST_TILES))
    _memory, sums, left, ticket = split_sum.scratch(x.device, grid, 1, TILE_ROWS, columns)
    _kernel(columns, x.dtype)(
        x.device,
        grid,
        packed.words.data_ptr(),
        packed.offsets.data_ptr(),
        x.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        sums,
        left,
        ticket,
        n,
        rows,
        x.shape[1],
        x.stride(0),
        -(-packed.cols // TILE_COLS),
        tiles,
        all_tiles,
    )
    return y
