"""The host's side of sm80_tiled_csl_spmm.cu: products with Tiled-CSL on every card from sm_80 on that is not Hopper.

A block has one or two windows in shared memory, where a tile becomes dense, and two stages of x. How many blocks share a multiprocessor follows from
the shared memory that the card has (arch.py), how many words a thread fetches ahead from a weight's density.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tilepress.formats.tiled_csl import TILE_COLS, TILE_ROWS, TiledCSL
from tilepress.kernels import arch, jit, split_sum
from tilepress.kernels.jit import VARIES, Launch
from tilepress.kernels.packed import PerWeight, aligning, cuts_of

# Columns of y that a block takes at once, and the most blocks of a multiprocessor then, as registers allow.
BLOCKS = {8: 6, 16: 6, 32: 3, 64: 3, 128: 2}
GROUPS = (2, 4, 6, 8)  # of 16 bytes of words, that a thread fetches ahead: a tile with 60 % zeros
_THREADS = 128
_TAKES = "words* offsets* cuts* x* bias* y* sums* left* ticket:8 n m k stride k_blocks tiles walks successors_wait"
_FEWEST_TILES = 4  # of a block: blocks that share a row block add up what the others have left
_MANY_BLOCKS = 6  # hide each other's waits better than a second window does
_TILE_COST = 512  # of an empty tile, in 16 bytes


@dataclass(frozen=True)
class Configuration:
    """What a kernel is compiled for."""

    columns: int  # of y, one of BLOCKS
    windows: int
    groups: int  # one of GROUPS
    blocks: int  # of a multiprocessor
    bfloat16: bool
    threads = _THREADS

    @property
    def source(self) -> str:
        macros = {"NT": self.columns, "WINDOWS": self.windows, "GROUPS": self.groups, "BLOCKS": self.blocks}
        return jit.source("sm80_tiled_csl_spmm.cu", **macros, BF16=int(self.bfloat16))

    @property
    def shared_bytes(self) -> int:
        """The dynamic shared memory of a block."""
        return self.windows * (2 * TILE_ROWS * TILE_COLS + 128) + 2 * 2 * TILE_COLS * self.columns


class Plan(NamedTuple):
    """The launch that multiplies a weight."""

    chosen: Configuration
    walks: int  # over W, each for so many columns of y
    grid: int


def groups_for(words: int, tiles: int) -> int:
    """Return which of GROUPS holds nearly all tiles of a weight of so many words, spread evenly."""
    mean = 4 * words / tiles  # bytes
    tile = mean + 4 * mean**0.5
    return next((groups for groups in GROUPS if tile <= 16 * _THREADS * groups), max(GROUPS))


@functools.lru_cache(maxsize=4096)
def plan(n: int, words: int, tiles: int, card: arch.Card, dtype: torch.dtype) -> Plan:
    """Choose for n rows of x and a weight of so many words and tiles: as many blocks as there are tiles enough for, with two windows each, or one where more
    blocks have room for that alone, or enough of them hide each other's waits."""
    columns = next((columns for columns in BLOCKS if n <= columns), max(BLOCKS))
    walks, groups = -(-n // columns), groups_for(words, tiles)
    found = {}
    for windows in (2, 1):
        for blocks in range(BLOCKS[columns], 0, -1):
            chosen = Configuration(columns, windows, groups, blocks, dtype == torch.bfloat16)
            room = min(card.block_shared_bytes, card.shared_bytes // blocks - arch.RESERVED_BYTES)
            enough = blocks == 1 or tiles * walks >= _FEWEST_TILES * blocks * card.multiprocessors
            if enough and chosen.shared_bytes <= room:
                found[windows] = chosen
                break
    chosen = found[2] if found[2].blocks == found[1].blocks < _MANY_BLOCKS else found[1]
    grid = max(1, min(card.multiprocessors * chosen.blocks, tiles * walks) // walks)
    return Plan(chosen, walks, grid * walks)


@functools.cache
def kernel(chosen: Configuration) -> jit.Kernel:
    return jit.Kernel("tiled_csl_mma", chosen.source, _TAKES, chosen.threads, chosen.shared_bytes, overlaps=True)


def _runs(offsets: Tensor, multiprocessors: int) -> dict[int, Tensor]:
    """Where the runs of tiles begin that so many blocks take, equal in bytes: int32 [blocks + 1]."""
    here, grids = offsets.cpu(), [multiprocessors * blocks for blocks in range(1, max(BLOCKS.values()) + 1)]
    return {grid: cuts_of(here, _TILE_COST, grid)[:, 0].contiguous().to(offsets.device) for grid in grids}


_runs_of = PerWeight(_runs)


def multiplying(out: Tensor, x: Tensor, packed: TiledCSL, bias: Tensor | None) -> Callable:
    """Return what runs the op for arguments like these, in one launch."""
    flat, align = aligning(x)  # zeros beyond packed.cols
    n, rows, device, card = len(flat), packed.rows, x.device, arch.card(x.device)
    tiles, k_blocks = packed.offsets.numel() - 1, -(-packed.cols // TILE_COLS)
    chosen, walks, grid = plan(n, packed.words.numel(), tiles, card, x.dtype)
    reads_cuts = walks == 1 and grid % card.multiprocessors == 0  # else equal numbers of tiles
    scratch = split_sum.scratch(device, grid, 1, TILE_ROWS, chosen.columns)
    args = (
        *(VARIES, VARIES, VARIES if reads_cuts else 0, VARIES, 0 if bias is None else VARIES, *(VARIES,) * 4),
        *(n, rows, flat.shape[1], flat.stride(0), k_blocks, tiles, walks, VARIES),
    )
    launch = Launch(kernel(chosen), device, grid, args)

    def run(x: Tensor, words: Tensor, offsets: Tensor, bias: Tensor | None, *_) -> Tensor:
        x, y = align(x), jit.empty_like(out)
        # Waits for the device once, also where the kernel takes equal numbers of tiles.
        runs = _runs_of(words, offsets, card.multiprocessors)
        numbers = [words.data_ptr(), offsets.data_ptr()]
        if reads_cuts:
            numbers.append(runs[grid].data_ptr())
        numbers += [t.data_ptr() for t in (x, bias) if t is not None]
        _memory, *left = scratch()
        launch(*numbers, y.data_ptr(), *left, jit.successors_wait)
        return y

    return run
