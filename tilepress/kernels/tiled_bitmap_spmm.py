"""y = x W^T + bias with W as a tiled bitmap: the op `tilepress::tiled_bitmap_spmm`, its reference and its CUDA kernels.

On sm_90 one launch of sm90_tiled_bitmap_spmm.cu serves up to MOST_ROWS rows of x. For more, for x of another dtype than W's, and on other cards
from sm_80 on, W is decoded to dense (sm80_tiled_bitmap_decode.cu), some rows at a time, and multiplied by cuBLAS. The reference decodes the whole
weight once a call, on any device; a card runs it for scales that are not of 16 bits.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from tilepress.formats import tiled_bitmap
from tilepress.formats.tiled_bitmap import TILE_COLS, TILE_ROWS, TiledBitmap
from tilepress.kernels import arch, jit, library, ptx, split_sum
from tilepress.kernels.arch import HOPPER, Path
from tilepress.kernels.packed import PerWeight, aligned, check_arguments, cuts_of, multiply_decoded
from tilepress.kernels.tiled_bitmap_decode import macros, tiled_bitmap_decode

library.define(
    "tiled_bitmap_spmm(Tensor x, Tensor words, Tensor offsets, Tensor? scale, Tensor? bias, int rows, ScalarType value_dtype, int group) -> Tensor"
)
COLUMNS = (8, 16, 32, 64, 128)  # of y that a block of the kernel takes at once; x has them as rows
# Rows of x that the kernel for sm_90 takes, by group: with more, decoding W and cuBLAS are faster.
MOST_ROWS = {1: 1536, 2: 2048}
_TAKES = "words* offsets* all_cuts* x& scale* bias* y* sums* left* ticket:8 n m k_blocks units tiles walks tile_bytes slot_count successors_wait"
_MOST_SLOTS, _MOST_BLOCKS = 12, 3
_MOST_WALKS = max(MOST_ROWS.values()) // COLUMNS[-1]
_FEWEST_TILES = 3  # of a block: blocks that share a row block add up what the others have left
_WIDE_TILES = 24  # of a multiprocessor, for blocks of two row blocks
_TILE_COST = 768  # of a tile's products, in 16 bytes


def tiled_bitmap_spmm_ref(
    x: Tensor,
    words: Tensor,
    offsets: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    rows: int,
    value_dtype: torch.dtype,
    group: int,
) -> Tensor:
    """x [..., cols] floating, words int32, offsets int32 [tiles + 1], scale [rows] of int8 values, bias [rows] or None -> [..., rows] of x's dtype.
    Values and bias are converted to x's dtype before the product, int8 ones multiplied as they are and scaled after it. The
    op has no gradient: linear layers bring it (runtime/linear/packed.py)."""
    packed = TiledBitmap(words, offsets, rows, x.shape[-1], value_dtype, group, scale)
    _check(x, packed, bias)
    if scale is None:
        return linear(x, tiled_bitmap.unpack(packed).to(x.dtype), None if bias is None else bias.to(x.dtype))
    y = linear(x.float(), tiled_bitmap.unpack_values(packed).float()) * scale.float()
    return (y if bias is None else y + bias.to(x.dtype).float()).to(x.dtype)


@dataclass(frozen=True)
class Configuration:
    """Macros of the kernel, and what they need."""

    columns: int  # of y: one of COLUMNS
    pairs: int  # row blocks that a block multiplies at once: 2 for 128 columns of large weights, where 8 warps would read too slowly
    dtype: torch.dtype  # of x
    value_dtype: torch.dtype
    group: int

    @property
    def most_blocks(self) -> int:
        """The most CTAs that a multiprocessor holds at once."""
        return {8: 3, 16: 3, 32: 2, 64: 2, 128: 1}[self.columns]

    @property
    def fewest_slots(self) -> int:
        """Fewest slots of one block of several. Fewer blocks, and registers that they leave to the next kernel, are worth more to a model than to a
        product alone."""
        return 4 if self.columns <= 16 else 2

    @property
    def part(self) -> int:
        """Steps of a tile that are read while as many are multiplied: as registers allow."""
        if self.columns <= 16:
            return 4
        return 1 if self.pairs == 2 and self.group * self.value_dtype.itemsize == 4 else 2

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a consumer's and of another thread, 0 for equal shares."""
        return (112, 32) if self.pairs == 2 else (0, 0)

    @property
    def threads(self) -> int:
        return 32 * (8 * self.pairs + (4 if self.pairs == 2 else 1))

    @property
    def source(self) -> str:
        own = {
            "NT": self.columns,
            "PAIRS": self.pairs,
            "PART": self.part,
            "BLOCKS": self.most_blocks,
            "CONSUMER_REGISTERS": self.registers[0],
            "LOADER_REGISTERS": self.registers[1],
        }
        product = ptx.wgmma(self.columns, "bf16" if self.dtype == torch.bfloat16 else "f16", from_registers=True)
        return jit.source(
            "sm90_tiled_bitmap_spmm.cu", product, **own, **macros(self.dtype, self.value_dtype, self.group)
        )

    def slot_bytes(self, tile_bytes: int) -> int:
        return self.pairs * tile_bytes + 256 * self.columns + 16


class Plan(NamedTuple):
    """The launch that multiplies a weight."""

    kernel: jit.Kernel
    chosen: Configuration
    walks: int  # over W, each for so many columns of y
    grid: int
    slots: int


class _Facts(NamedTuple):
    """Facts about a weight that are worked out once."""

    tile_bytes: int  # of its largest tile, in whole lines
    runs: dict[int, Tensor]  # of so many blocks


def _facts(offsets: Tensor, multiprocessors: int) -> _Facts:
    here = offsets.cpu()
    largest = -(-int((here[1:] - here[:-1]).max()) // 8) * 128
    grids = [multiprocessors * count for count in range(1, _MOST_BLOCKS + 1)]
    return _Facts(largest, {grid: runs_of(here, grid).to(offsets.device) for grid in grids})


def runs_of(offsets: Tensor, blocks: int, tile_cost: int = _TILE_COST) -> Tensor:
    """Return what the kernel reads of so many blocks' runs, int32: the tile that each one's begins with, and the end; from the next multiple of 4
    on, four numbers of each: its first tile, its end, where the words of its last tile begin and end."""
    begins = cuts_of(offsets, tile_cost, blocks)[:, 0]
    first, end = begins[:-1], begins[1:]
    each = torch.stack([first, end, offsets[(end - 1).clamp(min=0)], offsets[end]], 1).int()
    return torch.cat([begins, begins.new_zeros(-(blocks + 1) % 4), each.flatten()])


_facts_of = PerWeight(_facts)


def _room(blocks: int) -> int:
    """Return the shared memory of each of so many blocks of a multiprocessor, in bytes."""
    return HOPPER.block_shared_bytes // blocks - (arch.RESERVED_BYTES if blocks > 1 else 0)


def blocks_for(chosen: Configuration, tiles: int, tile_bytes: int, multiprocessors: int) -> tuple[int, int]:
    """Blocks of a multiprocessor, and slots of each: as many blocks as have a few slots and tiles each."""
    for blocks in range(chosen.most_blocks, 0, -1):
        room = _room(blocks) - 4 * (max(multiprocessors * blocks, _MOST_WALKS) + 1)
        slots = min(_MOST_SLOTS, room // chosen.slot_bytes(tile_bytes))
        if blocks == 1 or (slots >= chosen.fewest_slots and tiles >= _FEWEST_TILES * blocks * multiprocessors):
            break
    return blocks, slots


@functools.lru_cache(maxsize=4096)
def _planned(
    n: int, tiles: int, tile_bytes: int, multiprocessors: int, dtype: torch.dtype, value_dtype: torch.dtype, group: int
) -> Plan:
    columns = next((columns for columns in COLUMNS if n <= columns), COLUMNS[-1])
    walks = -(-n // columns)
    wide = columns == 128 and tiles * walks >= _WIDE_TILES * multiprocessors
    chosen = Configuration(columns, 2 if wide else 1, dtype, value_dtype, group)
    blocks, slots = blocks_for(chosen, tiles * walks, tile_bytes, multiprocessors)
    grid = max(1, multiprocessors * blocks // walks) * walks
    kernel = _kernel(chosen, _room(blocks))
    return Plan(kernel, chosen, walks, grid, slots)


@functools.cache
def _kernel(chosen: Configuration, shared: int) -> jit.Kernel:
    return jit.Kernel("tiled_bitmap_spmm", chosen.source, _TAKES, chosen.threads, shared, overlaps=True)


def _cuda(
    x: Tensor,
    words: Tensor,
    offsets: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    rows: int,
    value_dtype: torch.dtype,
    group: int,
) -> Tensor:
    wide_scale = scale is not None and scale.dtype not in tiled_bitmap.SCALE_DTYPES
    if jit.why_not(x.device) is not None or wide_scale:
        return tiled_bitmap_spmm_ref(x, words, offsets, scale, bias, rows, value_dtype, group)
    packed = TiledBitmap(words, offsets, rows, x.shape[-1], value_dtype, group, scale)
    _check(x, packed, bias)
    flat = x.reshape(-1, packed.cols)
    if bias is not None:
        bias = bias.to(x.dtype)
    if len(flat) == 0:
        y = x.new_empty(0, rows)
    elif _uses_kernel(len(flat), x.device, x.dtype, packed.weight_dtype, group):
        y = _multiply(aligned(flat), packed, bias)
    else:
        y = _multiply_decoded(flat, packed, bias)
    return y.view(*x.shape[:-1], rows)


def _check(x: Tensor, packed: TiledBitmap, bias: Tensor | None) -> None:
    tiles = tiled_bitmap.num_tiles(packed.rows, packed.cols)
    check_arguments(x, packed.words, packed.offsets, bias, packed.rows, tiles, packed.scale)
    known = packed.dtype in tiled_bitmap.VALUE_DTYPES and packed.group in tiled_bitmap.GROUPS
    if not known or (packed.scale is None) == (packed.dtype == torch.int8):
        raise ValueError(f"{packed.dtype} values in groups of {packed.group}, scale {packed.scale is not None}")


def _uses_kernel(n: int, device: torch.device, dtype: torch.dtype, weight_dtype: torch.dtype, group: int) -> bool:
    """Return whether one launch takes n rows of x, or decoding and cuBLAS do."""
    is_here = arch.kernel_for("tiled_bitmap_spmm", device) is not None
    return is_here and dtype == weight_dtype and n <= MOST_ROWS[group]


def _multiply(x: Tensor, packed: TiledBitmap, bias: Tensor | None) -> Tensor:
    """x as kernels/packed.py aligns it -> [n, rows], in one launch."""
    n, multiprocessors = len(x), arch.card(x.device).multiprocessors
    y = torch.empty(n, packed.rows, dtype=x.dtype, device=x.device)
    facts = _facts_of(packed.words, packed.offsets, multiprocessors)
    tiles, k_blocks = packed.offsets.numel() - 1, -(-packed.cols // TILE_COLS)
    plan = _planned(n, tiles, facts.tile_bytes, multiprocessors, x.dtype, packed.dtype, packed.group)
    columns, pairs = plan.chosen.columns, plan.chosen.pairs
    _memory, sums, left, ticket = split_sum.scratch(x.device, plan.grid, 2 * pairs, pairs * TILE_ROWS, columns)
    plan.kernel(
        x.device,
        plan.grid,
        packed.words.data_ptr(),
        packed.offsets.data_ptr(),
        facts.runs[plan.grid].data_ptr() if plan.walks == pairs == 1 else 0,  # 0: equal numbers of units
        jit.tensor_map(x, columns, 64),
        0 if packed.scale is None else packed.scale.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        sums,
        left,
        ticket,
        n,
        packed.rows,
        k_blocks,
        -(-tiles // k_blocks // pairs) * k_blocks,
        tiles,
        plan.walks,
        facts.tile_bytes,
        plan.slots,
        jit.successors_wait,
    )
    return y


def _multiply_decoded(x: Tensor, packed: TiledBitmap, bias: Tensor | None) -> Tensor:
    def decode(tiles: slice, first: int, last: int) -> Tensor:
        scale = None if packed.scale is None else packed.scale[first:last]
        # Codes whose product with a scale would be rounded to the scale's dtype are decoded unscaled.
        exact = scale is not None and scale.dtype != x.dtype
        of_codes = torch.ones_like(scale) if exact else scale
        shape = last - first, packed.cols
        dense = tiled_bitmap_decode(packed.words, packed.offsets[tiles], of_codes, *shape, packed.dtype, packed.group)
        return dense.to(x.dtype) * scale.to(x.dtype)[:, None] if exact else dense

    return multiply_decoded(x, bias, packed.rows, (TILE_ROWS, TILE_COLS), decode)


library.impl("tiled_bitmap_spmm", tiled_bitmap_spmm_ref, "CPU")
library.impl("tiled_bitmap_spmm", _cuda, "CUDA")


@torch.library.register_fake("tilepress::tiled_bitmap_spmm")
def _(x, words, offsets, scale, bias, rows, value_dtype, group):
    return x.new_empty(*x.shape[:-1], rows)


def path(device: torch.device, dtype: torch.dtype, weight_dtype: torch.dtype, n: int = 1, group: int = 1) -> Path:
    """Return which implementation serves n rows of x of a dtype on a device."""
    why = jit.why_not(device)
    if why is not None or weight_dtype not in tiled_bitmap.SCALE_DTYPES:
        return Path("tiled_bitmap_spmm", device.type, why or "")
    if _uses_kernel(n, device, dtype, weight_dtype, group):
        return Path("tiled_bitmap_spmm", "cuda")
    return Path("tiled_bitmap_decode", "cuda", decodes=True)


tiled_bitmap_spmm = torch.ops.tilepress.tiled_bitmap_spmm
