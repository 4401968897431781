"""The host's side of sm80_tiled_bitmap_spmm.cu: products with tiled bitmaps on every card from sm_80 on that is not Hopper.

A block has a ring of stages in shared memory, each with a tile of W and 128 columns of x. How many blocks share a multiprocessor, and how long their
rings are, follows from a weight's largest tile and from the shared memory that the card has (arch.py).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tilepress.formats.tiled_bitmap import TILE_COLS, TILE_ROWS, TiledBitmap
from tilepress.kernels import arch, jit, split_sum
from tilepress.kernels.jit import VARIES, Launch
from tilepress.kernels.packed import aligning
from tilepress.kernels.tiled_bitmap_decode import macros

# Columns of y that a block takes at once, and the most blocks of a multiprocessor then: with more, the compiler has too few registers to read ahead.
BLOCKS = {8: 4, 16: 4, 32: 4, 64: 3, 128: 2}
MOST_BLOCKS = max(BLOCKS.values())
_TAKES = "words* offsets* cuts* x* scale* bias* y* sums* left* ticket:8 n m k stride k_blocks units tiles walks tile_bytes successors_wait"
_STAGES = (4, 3, 2)
_WIDE_TILES = 24  # of a multiprocessor, for blocks of two row blocks
_FEWEST_TILES = 1.5  # of a block: blocks that share a row block add up what the others have left


@dataclass(frozen=True)
class Configuration:
    """What a kernel is compiled for."""

    columns: int  # of y, one of BLOCKS
    pairs: int  # row blocks that a block multiplies at once, with the same x: 2 for 128 columns of large weights
    stages: int
    blocks: int  # of a multiprocessor
    dtype: torch.dtype  # of x
    value_dtype: torch.dtype
    group: int
    row_groups = 2  # of 16 rows, of a warp: x is read once for both

    @property
    def part(self) -> int:
        """Steps of a tile that the compiler sees at once, 0 for one that is read while another is multiplied."""
        return 0 if self.columns == 128 else 4

    @property
    def threads(self) -> int:
        return 32 * self.pairs * TILE_ROWS // 16 // self.row_groups

    @property
    def source(self) -> str:
        own = {
            "NT": self.columns,
            "PAIRS": self.pairs,
            "GROUPS_OF_ROWS": self.row_groups,
            "STAGES": self.stages,
            "PART": self.part,
            "BLOCKS": self.blocks,
        }
        return jit.source("sm80_tiled_bitmap_spmm.cu", **own, **macros(self.dtype, self.value_dtype, self.group))

    def shared_bytes(self, tile_bytes: int) -> int:
        """Return the dynamic shared memory of a block, in bytes."""
        return self.stages * (self.pairs * tile_bytes + 2 * TILE_COLS * self.columns)


class Plan(NamedTuple):
    """The launch that multiplies a weight."""

    chosen: Configuration
    walks: int  # over W, each for so many columns of y
    grid: int


@functools.lru_cache(maxsize=4096)
def plan(
    n: int, tiles: int, tile_bytes: int, card: arch.Card, dtype: torch.dtype, value_dtype: torch.dtype, group: int
) -> Plan:
    """Choose for n rows of x and a weight of so many tiles, the largest of which has `tile_bytes`: as few walks over W as there is shared memory for, then
    as many blocks as have tiles enough, with the longest rings that fit."""
    wanted = next((columns for columns in BLOCKS if n <= columns), max(BLOCKS))
    for columns in [c for c in reversed(BLOCKS) if c <= wanted]:
        walks = -(-n // columns)
        shapes = [(1, blocks) for blocks in range(BLOCKS[columns], 0, -1)]
        if columns == 128 and tiles * walks >= _WIDE_TILES * card.multiprocessors:
            shapes.insert(0, (2, 1))
        for pairs, blocks in shapes:
            room = min(card.block_shared_bytes, card.shared_bytes // blocks - arch.RESERVED_BYTES)
            if blocks > 1 and tiles * walks < _FEWEST_TILES * blocks * card.multiprocessors:
                continue
            for stages in _STAGES:
                chosen = Configuration(columns, pairs, stages, blocks, dtype, value_dtype, group)
                if chosen.shared_bytes(tile_bytes) <= room:
                    grid = max(1, min(card.multiprocessors * blocks, tiles * walks // pairs) // walks)
                    return Plan(chosen, walks, grid * walks)
    raise AssertionError(f"tiles of {tile_bytes} bytes")  # the largest that there are fit every card


@functools.cache
def kernel(chosen: Configuration, tile_bytes: int) -> jit.Kernel:
    shared_bytes = chosen.shared_bytes(tile_bytes)
    return jit.Kernel("tiled_bitmap_mma", chosen.source, _TAKES, chosen.threads, shared_bytes, overlaps=True)


def multiplying(out: Tensor, x: Tensor, packed: TiledBitmap, bias: Tensor | None, facts_of: Callable) -> Callable:
    """Return what runs the op for arguments like these, in one launch. `facts_of(words, offsets, multiprocessors)` tells `tile_bytes` of a weight and
    `runs`, where the runs of so many blocks begin."""
    flat, align = aligning(x)  # zeros beyond packed.cols
    n, rows, device, card = len(flat), packed.rows, x.device, arch.card(x.device)
    tiles, k_blocks = packed.offsets.numel() - 1, -(-packed.cols // TILE_COLS)
    launches: dict[int, tuple] = {}  # by the bytes of a weight's largest tile

    def launching(tile_bytes: int) -> tuple[Launch, Callable, int | None]:
        """The launch, the memory for sums, and the number of blocks whose runs the kernel reads, if it does."""
        chosen, walks, grid = plan(n, tiles, tile_bytes, card, x.dtype, packed.dtype, packed.group)
        reads_cuts = walks == chosen.pairs == 1 and grid % card.multiprocessors == 0  # else equal numbers of units
        units = -(-tiles // k_blocks // chosen.pairs) * k_blocks
        optional = [0 if t is None else VARIES for t in (packed.scale, bias)]
        args = (
            *(VARIES, VARIES, VARIES if reads_cuts else 0, VARIES, *optional, VARIES, VARIES, VARIES, VARIES),
            *(n, rows, flat.shape[1], flat.stride(0), k_blocks, units, tiles, walks, tile_bytes, VARIES),
        )
        launch = Launch(kernel(chosen, tile_bytes), device, grid, args)
        scratch = split_sum.scratch(device, grid, chosen.threads // 128, chosen.pairs * TILE_ROWS, chosen.columns)
        return launch, scratch, grid if reads_cuts else None

    def run(x: Tensor, words: Tensor, offsets: Tensor, scale: Tensor | None, bias: Tensor | None, *_) -> Tensor:
        x, y, facts = align(x), jit.empty_like(out), facts_of(words, offsets, card.multiprocessors)
        found = launches.get(facts.tile_bytes)
        if found is None:
            found = launches[facts.tile_bytes] = launching(facts.tile_bytes)
        launch, scratch, grid = found
        numbers = [words.data_ptr(), offsets.data_ptr()]
        if grid is not None:
            numbers.append(facts.runs[grid].data_ptr())
        numbers += [t.data_ptr() for t in (x, scale, bias) if t is not None]
        _memory, *left = scratch()
        launch(*numbers, y.data_ptr(), *left, jit.successors_wait)
        return y

    return run
