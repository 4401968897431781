"""Many rows of x times a tiled bitmap on sm_90: launches of sm90_tiled_bitmap_prefill.cu for the op `tiled_bitmap_spmm`, whose other kernels and
whose reference stand in tiled_bitmap_spmm.py.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tilepress.formats.tiled_bitmap import TILE_COLS, TILE_ROWS, TiledBitmap
from tilepress.kernels import arch, jit, ptx, split_sum
from tilepress.kernels.arch import HOPPER
from tilepress.kernels.jit import VARIES, Launch
from tilepress.kernels.packed import aligning
from tilepress.kernels.tiled_bitmap_decode import macros

COLUMNS = (192, 256)  # of y that a cluster takes at once; x has them as rows
FEWEST_ROWS = 129  # of x; fewer are one walk of the kernel for few
_MOST_X_BYTES = 16 << 20  # of x in the L2 cache: of larger ones nothing was timed
RANKS = 2  # blocks of a cluster, each with a row block
_CONSUMERS = 2  # warpgroups of a block
THREADS = 128 * (_CONSUMERS + 1)
REGISTERS = (216, 72)  # of a consumer's thread and of another
_WALK_COST = 64  # columns whose products take as long as reading a tile does
_FEWEST_X, _MOST_X, _MOST_TILES = 4, 6, 6  # slots: of 64 columns of x, of tiles
_TAKES = "words* offsets* x& scale* bias* y* sums* left* ticket:8 n m k_blocks units tiles walks tile_bytes tile_slots x_slots successors_wait"


@dataclass(frozen=True)
class Configuration:
    """Macros of the kernel."""

    columns: int  # of y: one of COLUMNS
    dtype: torch.dtype  # of x
    value_dtype: torch.dtype
    group: int

    @property
    def source(self) -> str:
        own = {"NT": self.columns, "CONSUMER_REGISTERS": REGISTERS[0], "LOADER_REGISTERS": REGISTERS[1]}
        product = ptx.wgmma(self.columns, "bf16" if self.dtype == torch.bfloat16 else "f16", from_registers=True)
        own |= macros(self.dtype, self.value_dtype, self.group)
        return jit.source("sm90_tiled_bitmap_prefill.cu", product, **own)


def serves(n: int, device: torch.device, dtype: torch.dtype, packed: TiledBitmap) -> bool:
    """Return whether the kernel takes n rows of x: where it was timed and is faster, that is of 16-bit values and a bit an element."""
    is_known = dtype == packed.dtype and packed.group == 1
    if not is_known or n < FEWEST_ROWS or n * packed.cols * dtype.itemsize > _MOST_X_BYTES:
        return False
    return jit.why_not(device) is None and arch.kernel_for("tiled_bitmap_prefill", device) is not None


class Plan(NamedTuple):
    """How a launch divides its work."""

    columns: int
    walks: int  # over W, each for so many columns of y
    clusters: int  # of all walks


def plan(n: int, multiprocessors: int) -> Plan:
    """Return how n rows of x are multiplied soonest."""
    columns = min(COLUMNS, key=lambda columns: -(-n // columns) * (columns + _WALK_COST))
    walks = -(-n // columns)
    return Plan(columns, walks, max(1, multiprocessors // RANKS // walks) * walks)


def slots_for(columns: int, clusters: int, tile_bytes: int) -> tuple[int, int]:
    """Return how many slots of tiles and of x fit a block: of x as many as leave room for three tiles, but no fewer than a tile and the next need."""
    for of_x in range(_MOST_X, _FEWEST_X - 1, -1):
        room = HOPPER.block_shared_bytes - of_x * (128 * columns + 16) - 4 * (clusters + 1)
        tiles = room // (tile_bytes + 16)
        if tiles >= 3:
            break
    return min(tiles, _MOST_TILES), of_x


@functools.cache
def _kernel(chosen: Configuration) -> jit.Kernel:
    shared = HOPPER.block_shared_bytes
    return jit.Kernel("tiled_bitmap_prefill", chosen.source, _TAKES, THREADS, shared, overlaps=True)


def multiplying(out: Tensor, x: Tensor, packed: TiledBitmap, bias: Tensor | None, tile_bytes_of: Callable) -> Callable:
    """Return what runs the op for arguments like these, in one launch; `tile_bytes_of(words, offsets)` are those of the weight's largest tile."""
    flat, align = aligning(x)
    n, rows, tiles = len(flat), packed.rows, packed.offsets.numel() - 1
    columns, walks, clusters = plan(n, arch.card(x.device).multiprocessors)
    kernel = _kernel(Configuration(columns, x.dtype, packed.dtype, packed.group))
    k_blocks = -(-packed.cols // TILE_COLS)
    units = -(-tiles // k_blocks // RANKS) * k_blocks
    optional = [0 if t is None else VARIES for t in (packed.scale, bias)]
    sizes = n, rows, k_blocks, units, tiles, walks
    args = (VARIES,) * 3 + (*optional, *(VARIES,) * 4, *sizes, *(VARIES,) * 4)
    launch = Launch(kernel, x.device, clusters * RANKS, args)
    scratch = split_sum.scratch(x.device, clusters, RANKS * _CONSUMERS, RANKS * TILE_ROWS, columns)
    of_x = jit.TensorMaps(flat, columns // RANKS, 64).__getitem__

    def run(x: Tensor, words: Tensor, offsets: Tensor, scale: Tensor | None, bias: Tensor | None, *_) -> Tensor:
        x, y, tile_bytes = align(x), jit.empty_like(out), tile_bytes_of(words, offsets)
        given = [words.data_ptr(), offsets.data_ptr(), of_x(x.data_ptr())]
        given += [t.data_ptr() for t in (scale, bias) if t is not None]
        _memory, *left = scratch()
        slots = slots_for(columns, clusters, tile_bytes)
        launch(*given, y.data_ptr(), *left, tile_bytes, *slots, jit.successors_wait)
        return y

    return run
