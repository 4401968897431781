"""y = x W^T + bias with W as a tiled bitmap: the op `tilepress::tiled_bitmap_spmm`, its reference and its CUDA kernels.

On sm_90 one launch of sm90_tiled_bitmap_spmm.cu serves up to MOST_ROWS rows of x, and for 16-bit values with a bit an element one of
sm90_tiled_bitmap_prefill.cu many rows (tiled_bitmap_prefill.py); on other cards one of sm80_tiled_bitmap_spmm.cu serves up to MMA_MOST_ROWS
(tiled_bitmap_mma.py). For more, and for x of another dtype than W's, W is decoded to dense (sm80_tiled_bitmap_decode.cu), some rows at a time, and
multiplied by cuBLAS. The reference decodes the whole weight once a call, on any device; a card runs it for scales that are not of 16 bits.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from tilepress.formats import tiled_bitmap
from tilepress.formats.tiled_bitmap import TILE_COLS, TILE_ROWS, TiledBitmap
from tilepress.kernels import arch, jit, library, ptx, split_sum, tiled_bitmap_mma, tiled_bitmap_prefill
from tilepress.kernels.arch import HOPPER, Path
from tilepress.kernels.jit import VARIES, Launch
from tilepress.kernels.once import Planned
from tilepress.kernels.packed import PerWeight, aligning, check_arguments, cuts_of, decoding, multiply_decoded
from tilepress.kernels.tiled_bitmap_decode import kernel as tiled_bitmap_decode_kernel, macros, tiled_bitmap_decode

library.define(
    "tiled_bitmap_spmm(Tensor x, Tensor words, Tensor offsets, Tensor? scale, Tensor? bias, int rows, ScalarType value_dtype, int group) -> Tensor"
)
COLUMNS = (8, 16, 32, 64, 128)  # of y that a block of the kernel takes at once; x has them as rows
# Rows of x that the kernel for sm_90 takes, by group: with more, decoding W and cuBLAS are faster.
MOST_ROWS = {1: 1536, 2: 2048}
MMA_MOST_ROWS = {1: 256, 2: 256}  # the same of the kernel on mma.sync
_TAKES = "words* offsets* all_cuts* x& scale* bias* y* sums* left* ticket:8 n m k_blocks units tiles walks tile_bytes slot_count successors_wait"
_MOST_SLOTS = 12
_MOST_BLOCKS = tiled_bitmap_mma.MOST_BLOCKS  # of a multiprocessor, of either kernel
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


def _tile_bytes(words: Tensor, offsets: Tensor) -> int:
    return _facts_of(words, offsets, arch.card(offsets.device).multiprocessors).tile_bytes


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


def _plan(
    x: Tensor,
    words: Tensor,
    offsets: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    rows: int,
    value_dtype: torch.dtype,
    group: int,
) -> Callable:
    wide_scale = scale is not None and scale.dtype not in tiled_bitmap.SCALE_DTYPES
    if jit.why_not(x.device) is not None or wide_scale:
        return tiled_bitmap_spmm_ref
    packed = TiledBitmap(words, offsets, rows, x.shape[-1], value_dtype, group, scale)
    _check(x, packed, bias)
    n, out = x.numel() // max(1, packed.cols), jit.like((*x.shape[:-1], rows), x.dtype, x.device)
    if out.numel() == 0:
        return lambda *_: jit.empty_like(out)
    if bias is not None and bias.dtype != x.dtype:
        return lambda x, words, offsets, scale, bias, *rest: _cuda(x, words, offsets, scale, bias.to(x.dtype), *rest)
    if tiled_bitmap_prefill.serves(n, x.device, x.dtype, packed):
        return tiled_bitmap_prefill.multiplying(out, x, packed, bias, _tile_bytes)
    served_by = _kernel_for(n, x.device, x.dtype, packed.weight_dtype, group)
    if served_by is None:
        return _decoding
    if served_by == "tiled_bitmap_mma":
        return tiled_bitmap_mma.multiplying(out, x, packed, bias, _facts_of)
    return _multiplying(out, x, packed, bias)


_cuda = Planned(_plan)


def _check(x: Tensor, packed: TiledBitmap, bias: Tensor | None) -> None:
    tiles = tiled_bitmap.num_tiles(packed.rows, packed.cols)
    check_arguments(x, packed.words, packed.offsets, bias, packed.rows, tiles, packed.scale)
    known = packed.dtype in tiled_bitmap.VALUE_DTYPES and packed.group in tiled_bitmap.GROUPS
    if not known or (packed.scale is None) == (packed.dtype == torch.int8):
        raise ValueError(f"{packed.dtype} values in groups of {packed.group}, scale {packed.scale is not None}")


def _kernel_for(n: int, device: torch.device, dtype: torch.dtype, weight_dtype: torch.dtype, group: int) -> str | None:
    """Return which kernel takes n rows of x, or None for decoding and cuBLAS."""
    kernel = arch.kernel_for("tiled_bitmap_spmm", device)
    most = MOST_ROWS if kernel == "tiled_bitmap_spmm" else MMA_MOST_ROWS
    return kernel if dtype == weight_dtype and n <= most[group] else None


def _multiplying(out: Tensor, x: Tensor, packed: TiledBitmap, bias: Tensor | None) -> Callable:
    """Return what runs the op for arguments like these, in one launch."""
    flat, align = aligning(x)
    n, rows, dtype, group = len(flat), packed.rows, packed.dtype, packed.group
    tiles, k_blocks = packed.offsets.numel() - 1, -(-packed.cols // TILE_COLS)
    device, multiprocessors = x.device, arch.card(x.device).multiprocessors
    launches: dict[int, tuple] = {}  # by the bytes of a weight's largest tile

    def launching(tile_bytes: int) -> tuple[Launch, Callable, Callable, int | None]:
        """The launch, the maps of x, the memory for sums, and the number of blocks whose runs of tiles the kernel reads, if it does."""
        plan = _planned(n, tiles, tile_bytes, multiprocessors, x.dtype, dtype, group)
        columns, pairs = plan.chosen.columns, plan.chosen.pairs
        reads_runs = plan.walks == pairs == 1  # else equal numbers of units
        optional = [0 if t is None else VARIES for t in (packed.scale, bias)]
        units = -(-tiles // k_blocks // pairs) * k_blocks
        args = (
            *(VARIES, VARIES, VARIES if reads_runs else 0, VARIES, *optional, VARIES, VARIES, VARIES, VARIES),
            *(n, rows, k_blocks, units, tiles, plan.walks, tile_bytes, plan.slots, VARIES),
        )
        launch = Launch(plan.kernel, device, plan.grid, args)
        scratch = split_sum.scratch(device, plan.grid, 2 * pairs, pairs * TILE_ROWS, columns)
        return launch, jit.TensorMaps(flat, columns, 64).__getitem__, scratch, plan.grid if reads_runs else None

    def run(x: Tensor, words: Tensor, offsets: Tensor, scale: Tensor | None, bias: Tensor | None, *_) -> Tensor:
        x, y, facts = align(x), jit.empty_like(out), _facts_of(words, offsets, multiprocessors)
        found = launches.get(facts.tile_bytes)
        if found is None:
            found = launches[facts.tile_bytes] = launching(facts.tile_bytes)
        launch, of_x, scratch, grid = found
        numbers = [words.data_ptr(), offsets.data_ptr()]
        if grid is not None:
            numbers.append(facts.runs[grid].data_ptr())
        numbers.append(of_x(x.data_ptr()))
        numbers += [t.data_ptr() for t in (scale, bias) if t is not None]
        _memory, *left = scratch()
        launch(*numbers, y.data_ptr(), *left, jit.successors_wait)
        return y

    return run


def _plan_decoding(
    x: Tensor,
    words: Tensor,
    offsets: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    rows: int,
    value_dtype: torch.dtype,
    group: int,
) -> Callable:
    packed = TiledBitmap(words, offsets, rows, x.shape[-1], value_dtype, group, scale)
    if x.dtype != packed.weight_dtype:
        return _converting
    kernel, k_blocks = tiled_bitmap_decode_kernel(x.dtype, value_dtype, group), -(-packed.cols // TILE_COLS)
    varying = VARIES, VARIES, 0 if scale is None else VARIES, VARIES

    def launch_of(n: int) -> Launch:
        return Launch(kernel, x.device, tiled_bitmap.num_tiles(n, packed.cols), (*varying, n, packed.cols, k_blocks))

    out = jit.like((*x.shape[:-1], rows), x.dtype, x.device)
    run = decoding(out, x, (TILE_ROWS, TILE_COLS), launch_of)
    return lambda x, words, offsets, scale, bias, *_: run(x, words, offsets, scale, bias)


_decoding = Planned(_plan_decoding)


def _converting(x: Tensor, words, offsets, scale, bias, rows: int, value_dtype: torch.dtype, group: int) -> Tensor:
    """Decode W for x of another dtype, which the weight is converted to."""
    packed = TiledBitmap(words, offsets, rows, x.shape[-1], value_dtype, group, scale)
    return _multiply_decoded(x.reshape(-1, packed.cols), packed, bias).view(*x.shape[:-1], rows)


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
    kernel = _kernel_for(n, device, dtype, weight_dtype, group)
    return Path(kernel, "cuda") if kernel else Path("tiled_bitmap_decode", "cuda", decodes=True)


tiled_bitmap_spmm = torch.ops.tilepress.tiled_bitmap_spmm
