"""Tiled bitmap: a sparse weight as one bit for each element, or pair of elements, and the values whose bits are set.

At 50 % sparsity 16-bit values take 0.58 of dense, where Tiled-CSL's words take 1.0. `docs/format.md` is the specification with the
drawing; in short:

    tiles   128 rows x 128 columns; row blocks, then column blocks
    run     the 64 elements of a tile that one lane of a kernel's warp multiplies: its fragments of eight m16k16 products, step by step
    group   elements that share a bit and are stored together: 1, or 2 neighbouring columns
    masks   of each of the 8 x 32 runs 64 / group bits
    starts  of each run where its values begin, behind the starts: 2 bytes
    values  of a run one below the other, 128 bytes apart: in the same bank of shared memory all the way down
    offsets where each tile begins and the last one ends, in 16 bytes

The 32 runs of a warp lie in 32 different banks, so whatever lanes have a value at a place, they read it without conflict; which bank a run
gets is chosen so that a tile's columns of values are about equally high.

Any density and shape; every element whose bits are not all zero is kept, so -0.0 survives and unpack(pack(w)) is w bit for bit. INT8 codes
-127 .. 127 are stored as sign and magnitude, with a scale for each row.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilepress.formats import TilepressError, dtype_name, int8
from tilepress.formats.bank_order import assign
from tilepress.formats.layout import Form, register
from tilepress.formats.stripes import nonzeros, set_bits, stripes
from tilepress.formats.tiles import TiledLayout, offsets_from_sizes

TILE_ROWS = TILE_COLS = 128
WARPS, LANES, RUN = 8, 32, 64  # runs of a tile, elements of a run
LINE = 128  # bytes of a line of values: one of shared memory's banks after the other
GROUPS = (1, 2)
VALUE_DTYPES = (torch.bfloat16, torch.float16, torch.int8)
SCALE_DTYPES = (torch.bfloat16, torch.float16)
_STARTS = 2 * WARPS * LANES  # bytes
_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # what a group is stored as, by its bytes
_PAIRS = {1: torch.int16, 2: torch.int32}  # what two columns are moved as, by the bytes of one
_PACK_BITS = 0x0102040810204080  # times eight bytes of 0 or 1: the highest byte has them as bits
_CHUNK_ELEMENTS = 1 << 21  # looked at together


@dataclass(frozen=True)
class TiledBitmap:
    """A packed weight [rows, cols] = [out_features, in_features]."""

    words: Tensor  # int32 [4 * offsets[-1]]
    offsets: Tensor  # int32 [tiles + 1], in 16 bytes
    rows: int
    cols: int
    dtype: torch.dtype  # of the values: bfloat16, float16 or int8
    group: int
    scale: Tensor | None = None  # [rows] bfloat16 or float16, of int8 values
    transposed: bool = False  # the checkpoint without us stores [cols, rows], as Conv1D does
    layout_name = "tiled-bitmap"

    @property
    def width(self) -> int:
        """Bytes of a group's values."""
        return self.group * self.dtype.itemsize

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype of the weight that the values stand for."""
        return self.dtype if self.scale is None else self.scale.dtype

    def layout(self) -> Tensor:
        """The fields that are not tensors, as stored."""
        return layout_tensor(self.rows, self.cols, self.dtype, self.group, self.transposed)

    def beside(self) -> dict[str, Tensor]:
        """The stored tensors beside the words, by suffix."""
        found = {"_offsets": self.offsets, "_bitmap": self.layout()}
        return found if self.scale is None else found | {"_scale": self.scale}

    def to(self, device: torch.device | str) -> "TiledBitmap":
        scale = None if self.scale is None else self.scale.to(device)
        return replace(self, words=self.words.to(device), offsets=self.offsets.to(device), scale=scale)


def layout_tensor(rows: int, cols: int, dtype: torch.dtype, group: int, transposed: bool) -> Tensor:
    """int32 [7]: rows, cols, 128, 128, index of the values' dtype, group, transposed."""
    fields = [rows, cols, TILE_ROWS, TILE_COLS, VALUE_DTYPES.index(dtype), group, int(transposed)]
    return torch.tensor(fields, dtype=torch.int32)


def from_parts(
    words: Tensor, offsets: Tensor, layout: Tensor, scale: Tensor | None = None, name: str = "weight"
) -> TiledBitmap:
    """Puts the stored tensors together and checks that their shapes and dtypes agree.

    Raises TilepressError naming `name` if they do not; what the words hold is `check`'s business.
    """
    if layout.dtype != torch.int32 or layout.shape != (7,):
        raise TilepressError(f"{name}: bitmap layout is {layout.dtype} {list(layout.shape)}, expected int32 [7]")
    rows, cols, tall, wide, dtype, group, transposed = layout.tolist()
    sound = rows >= 1 and cols >= 1 and (tall, wide) == (TILE_ROWS, TILE_COLS) and group in GROUPS
    if not sound or dtype not in range(len(VALUE_DTYPES)) or transposed not in (0, 1):
        fields = "rows, cols, tile rows, tile columns, dtype, group, transposed"
        raise TilepressError(f"{name}: bitmap layout ({fields}) = {layout.tolist()} is out of range")
    tiles = num_tiles(rows, cols)
    if words.dtype != torch.int32 or words.dim() != 1 or words.numel() % 4:
        raise TilepressError(f"{name}: words are {words.dtype} {list(words.shape)}, expected int32 in whole 16 bytes")
    if offsets.dtype != torch.int32 or offsets.shape != (tiles + 1,):
        raise TilepressError(
            f"{name}: offsets are {offsets.dtype} {list(offsets.shape)}, {rows} x {cols} needs int32 [{tiles + 1}]"
        )
    if (scale is not None) != (VALUE_DTYPES[dtype] == torch.int8):
        raise TilepressError(f"{name}: {VALUE_DTYPES[dtype]} values {'without a' if scale is None else 'with a'} scale")
    if scale is not None and (scale.shape != (rows,) or scale.dtype not in SCALE_DTYPES):
        raise TilepressError(f"{name}: the scale is {scale.dtype} {list(scale.shape)}, expected 16 bits [{rows}]")
    return TiledBitmap(words, offsets, rows, cols, VALUE_DTYPES[dtype], group, scale, bool(transposed))


@dataclass
class PackStats:
    nonzeros: int = 0
    densest_tile: int = 0  # non-zeros of the fullest tile
    slots: int = 0  # elements that the values have room for

    def add(self, other: "PackStats") -> None:
        self.nonzeros += other.nonzeros
        self.densest_tile = max(self.densest_tile, other.densest_tile)
        self.slots += other.slots


def record(packed: TiledBitmap, stats: PackStats) -> dict:
    """The manifest's entry for a packed weight."""
    described = {"shape": [packed.rows, packed.cols], "dtype": dtype_name(packed.weight_dtype)}
    described |= {"value_dtype": dtype_name(packed.dtype), "group": packed.group}
    described |= {"nonzeros": stats.nonzeros, "densest_tile": stats.densest_tile, "slots": stats.slots}
    return described | ({"transposed": True} if packed.transposed else {})


def num_tiles(rows: int, cols: int) -> int:
    return -(-rows // TILE_ROWS) * -(-cols // TILE_COLS)


def header_bytes(group: int) -> int:
    """Size of a tile's masks and starts, in bytes."""
    return WARPS * LANES * RUN // group // 8 + _STARTS


def largest_tile(group: int, dtype: torch.dtype) -> int:
    """Bytes of a tile without zeros; no tile has more."""
    return header_bytes(group) + TILE_ROWS * TILE_COLS * dtype.itemsize


PAIRS_BELOW = {  # the share of non-zeros below which pairs are faster: of 16-bit values, of INT8 codes
    "any": (0.17, 1.0),  # where they are no slower on any card that was measured: otherwise fewer bytes decide
    "h100": (0.17, 0.45),
    "h200": (0.24, 1.0),
}


def best_group(density: float, dtype: torch.dtype, card: str = "any") -> int:
    """Return the group for a card of PAIRS_BELOW. Pairs take half of the reads and instructions, and up to 1.5 times the bytes, which cost more
    on a card with less bandwidth: docs/kernels/tiled_bitmap_spmm.md has the measurements."""
    return 2 if density <= PAIRS_BELOW[card][dtype == torch.int8] else 1


def card_named(name: str) -> str:
    """Return the key of PAIRS_BELOW for a device's name, such as "NVIDIA H100 80GB HBM3"."""
    return next((card for card in PAIRS_BELOW if card.upper() in name.split()), "any")


def pack(values: Tensor, group: int | None = None, scale: Tensor | None = None, name: str = "weight") -> TiledBitmap:
    """Pack a bfloat16 or float16 weight [rows, cols], or int8 codes with their scale [rows]; without a `group` the best one where it lies.

    Raises TilepressError naming `name` for another dtype, a non-finite value or the code -128.
    """
    if group is None:
        card = card_named(torch.cuda.get_device_name(values.device)) if values.is_cuda else "any"
        group = best_group(float((values != 0).sum()) / max(values.numel(), 1), values.dtype, card)
    if (scale is None) == (values.dtype == torch.int8) or (scale is not None and scale.shape != values.shape[:1]):
        raise TilepressError(
            f"{name}: {dtype_name(values.dtype)} values with a scale of {None if scale is None else list(scale.shape)}"
        )
    packed = list(pack_stripes(values, group, name))
    offsets = offsets_from_sizes(torch.cat([sizes for _, sizes, _ in packed]))
    words = torch.cat([words for words, _, _ in packed])
    return TiledBitmap(words, offsets, *values.shape, values.dtype, group, scale)


def pack_stripes(values: Tensor, group: int, name: str = "weight") -> Iterator[tuple[Tensor, Tensor, PackStats]]:
    """Packs a few row blocks at a time, in file order: yields (words, size of each tile in 16 bytes, statistics), so that memory stays small."""
    if values.dtype not in VALUE_DTYPES or values.dim() != 2 or not values.numel():
        raise TilepressError(
            f"{name}: the bitmap stores 2-D bfloat16, float16 or int8 values, not {values.dtype} {list(values.shape)}",
            "convert it first: --dtype bfloat16, or leave it dense: --ignore " + name,
        )
    if group not in GROUPS:
        raise TilepressError(f"{name}: groups of {group} are not stored", f"choose one of {GROUPS}")
    for stripe in stripes(values, TILE_ROWS, TILE_COLS, _CHUNK_ELEMENTS, name):
        if values.dtype == torch.int8:
            stripe = (stripe.abs() | (stripe & -128)).view(torch.uint8)
        yield _pack_tiles(_to_runs(stripe), group)


def _to_runs(stripe: Tensor) -> Tensor:
    """Dense [128 a, 128 b] -> [tiles, 256 runs, 64]: by warp (16 rows), lane (row of 8, two columns of 8), step (16 columns), half of it, row or the
    one 8 below, column."""
    rows, cols = stripe.shape
    pairs = stripe.contiguous().view(_PAIRS[stripe.element_size()])
    #                                       warp  low row      step low pair
    split = pairs.view(rows // TILE_ROWS, WARPS, 2, 8, cols // TILE_COLS, 8, 2, 4)
    runs = split.permute(0, 4, 1, 3, 7, 5, 6, 2).contiguous()
    return runs.view(_UNITS[stripe.element_size()]).view(-1, WARPS * LANES, RUN)


def _from_runs(runs: Tensor, col_blocks: int) -> Tensor:
    split = runs.view(_PAIRS[runs.element_size()]).view(-1, col_blocks, WARPS, 8, 4, 8, 2, 2)
    stripe = split.permute(0, 2, 7, 3, 1, 5, 6, 4).contiguous()
    return stripe.view(runs.dtype).view(-1, col_blocks * TILE_COLS)


def _pack_tiles(runs: Tensor, group: int) -> tuple[Tensor, Tensor, PackStats]:
    """[T, 256, 64] -> (words, size of each tile in 16 bytes int32 [T], statistics)."""
    tiles, device, width = len(runs), runs.device, group * runs.element_size()
    units = runs.reshape(tiles, -1).view(_UNITS[width]).view(tiles, WARPS * LANES, RUN // group)
    bits = units != 0
    counts = bits.sum(2, dtype=torch.int32)
    column, line, lines = assign(counts.view(tiles, WARPS, LANES), LINE // width)
    header = header_bytes(group)
    sizes = (header + lines * LINE) // 16
    base = torch.cumsum(sizes.long(), 0) - sizes  # of each tile, in 16 bytes
    words = torch.zeros(4 * int(sizes.sum()), dtype=torch.int32, device=device)

    starts = torch.where(counts > 0, line * LINE + column * width, 0)
    masks = (bits.view(torch.int64) * _PACK_BITS >> 56).to(torch.uint8).view(tiles, -1)
    head = torch.cat([masks, starts.to(torch.int16).view(torch.uint8)], 1).view(torch.int32)
    words[4 * base[:, None] + torch.arange(header // 4, device=device)] = head

    stored = set_bits(bits)
    place = _places(counts, base[:, None] * 16 + header + starts, width, stored)
    words.view(_UNITS[width]).scatter_(0, place, units.view(-1).index_select(0, stored))

    nonzeros = counts.sum(1) if group == 1 else (runs != 0).sum((1, 2))
    stats = PackStats(int(nonzeros.sum()), int(nonzeros.max()), int(lines.sum()) * LINE // runs.element_size())
    return words, sizes, stats


@dataclass(frozen=True)
class _Tiles:
    """Some tiles of a packed weight, looked at run by run."""

    words: Tensor  # of these tiles alone
    bits: Tensor  # bool [T, 256, 64 / group]
    counts: Tensor  # of a run's groups: int64 [T, 256]
    starts: Tensor  # in bytes: int64 [T, 256]
    lines: Tensor  # of a tile's values: int64 [T]
    first: Tensor  # byte of each tile's values among the words: int64 [T]

    def places(self, width: int) -> Tensor:
        """The place of each stored group among the words seen as groups, in the order of the bits: int64."""
        return _places(self.counts, self.first[:, None] + self.starts, width, set_bits(self.bits))

    def groups(self, width: int) -> Tensor:
        """[T, 256, 64 / group], zeros where nothing is stored."""
        stored = self.words.view(_UNITS[width])
        groups = torch.zeros(self.bits.shape, dtype=stored.dtype, device=stored.device)
        return groups.masked_scatter_(self.bits, stored.index_select(0, self.places(width)))


def _places(counts: Tensor, begins: Tensor, width: int, stored: Tensor) -> Tensor:
    """Return where the stored groups go, as int64 indices of groups.

    A run has `counts` groups [T, 256], one a line below the other from byte `begins` [T, 256] on.
    """
    step, counts = LINE // width, counts.view(-1).long()
    top = begins.view(-1) // width - step * (counts.cumsum(0) - counts)  # less the lines of all groups before the run
    place = torch.arange(0, step * stored.numel(), step, device=stored.device)
    return place.add_(top.repeat_interleave(counts, output_size=stored.numel()))


@functools.cache
def _bits_of_bytes(device: torch.device) -> Tensor:
    """Eight bytes of 0 or 1 for each byte: int64 [256]."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    return bits.to(torch.uint8).view(torch.int64).squeeze(1)


def _look(packed: TiledBitmap, first: int, last: int) -> _Tiles:
    header, device = header_bytes(packed.group), packed.words.device
    begin, end = int(packed.offsets[first]), int(packed.offsets[last])
    words, base = packed.words[4 * begin : 4 * end], packed.offsets[first : last + 1].long() - begin
    head = words[4 * base[:-1, None] + torch.arange(header // 4, device=device)].view(torch.uint8)
    masks, starts = head[:, :-_STARTS], head[:, -_STARTS:].contiguous().view(torch.int16).long() & 0xFFFF
    bits = _bits_of_bytes(device).index_select(0, masks.reshape(-1).int()).view(torch.bool)
    bits = bits.view(last - first, WARPS * LANES, RUN // packed.group)
    lines = ((base[1:] - base[:-1]) * 16 - header) // LINE
    return _Tiles(words, bits, bits.sum(2), starts, lines, base[:-1] * 16 + header)


def _stripes(packed: TiledBitmap) -> Iterator[tuple[int, int]]:
    """(first, last) of tiles looked at together: whole row blocks."""
    tiles, per_block = packed.offsets.numel() - 1, -(-packed.cols // TILE_COLS)
    room = _CHUNK_ELEMENTS * (16 if packed.words.is_cuda else 1)
    step = max(1, room // (per_block * TILE_ROWS * TILE_COLS)) * per_block
    for first in range(0, tiles, step):
        yield first, min(first + step, tiles)


def unpack_values(packed: TiledBitmap) -> Tensor:
    """The stored values as a dense matrix [rows, cols] of their dtype, on the words' device."""
    out = torch.empty(packed.rows, packed.cols, dtype=packed.dtype, device=packed.words.device)
    per_block = -(-packed.cols // TILE_COLS)
    for first, last in _stripes(packed):
        groups = _look(packed, first, last).groups(packed.width)
        stripe = _from_runs(groups.view(_UNITS[packed.dtype.itemsize]), per_block)
        if packed.dtype == torch.int8:
            magnitude = (stripe & 127).to(torch.int8)
            stripe = torch.where(stripe > 127, -magnitude, magnitude)
        top = first // per_block * TILE_ROWS
        out[top : top + len(stripe)] = stripe[: packed.rows - top, : packed.cols].view(packed.dtype)
    return out


def unpack(packed: TiledBitmap) -> Tensor:
    """The dense weight [rows, cols] on the words' device; int8 codes times their scale, in the scale's dtype."""
    values = unpack_values(packed)
    return values if packed.scale is None else (values.float() * packed.scale.float()[:, None]).to(packed.scale.dtype)


def check_offsets(packed: TiledBitmap) -> str | None:
    """Return what is wrong with a packed weight's offsets, or None.

    They go from 0, every tile masks, starts and whole lines, to the end of the words.
    """
    offsets, header = packed.offsets, header_bytes(packed.group)
    if int(offsets[0]) != 0 or int(offsets[-1]) * 4 != packed.words.numel():
        return f"offsets run from {int(offsets[0])} to {int(offsets[-1])}, expected 0 to {packed.words.numel() // 4}"
    sizes = (offsets[1:].long() - offsets[:-1]) * 16
    wrong = (sizes < header) | ((sizes - header) % LINE != 0) | (sizes > largest_tile(packed.group, packed.dtype))
    if bool(wrong.any()):
        tile = int(wrong.nonzero()[0])
        most = largest_tile(packed.group, packed.dtype)
        return f"tile {tile} has {int(sizes[tile])} bytes, not {header} to {most} in whole lines of {LINE}"
    return None


def _outside(found: _Tiles, width: int) -> Tensor:
    """Runs whose values do not lie in their tile: bool [T, 256]."""
    end = found.starts + (found.counts - 1) * LINE + width
    return (found.counts > 0) & ((found.starts % width != 0) | (end > found.lines[:, None] * LINE))


def check_bounds(packed: TiledBitmap) -> str | None:
    """Return what would make decoding wrong or unsafe, or None: offsets in order, every run in its tile, scales that
    are some. `check` looks closer.
    """
    problem = check_offsets(packed) or _check_scale(packed)
    for first, last in _stripes(packed) if problem is None else ():
        wrong = _outside(_look(packed, first, last), packed.width).any(1)
        if bool(wrong.any()):
            return f"a run of tile {first + int(wrong.nonzero()[0])} points outside the tile"
    return problem


def _check_scale(packed: TiledBitmap) -> str | None:
    sound = packed.scale is None or bool((torch.isfinite(packed.scale) & (packed.scale > 0)).all())
    return None if sound else "a scale is not a positive number"


def check(packed: TiledBitmap) -> tuple[list[str], PackStats]:
    """List every defect of a packed weight, and its statistics recounted, a few row blocks at a time."""
    problem = check_offsets(packed)
    if problem:
        return [problem], PackStats()
    stats, problems, width, device = PackStats(), [], packed.width, packed.words.device
    per_block = -(-packed.cols // TILE_COLS)
    if problem := _check_scale(packed):
        problems.append(problem)
    for first, last in _stripes(packed):
        where = f"tiles {first} to {last - 1}"
        found = _look(packed, first, last)
        if bool(_outside(found, width).any()):
            problems.append(f"{where}: {int(_outside(found, width).sum())} runs point outside their tile")
            continue
        stored, place, groups = found.words.view(_UNITS[width]), found.places(width), found.groups(width)
        elements = groups.view(_UNITS[packed.dtype.itemsize])
        banks = torch.where(
            found.counts > 0, found.starts % LINE // 4, 32 + torch.arange(WARPS * LANES, device=device) % LANES
        )
        banks = banks.view(-1, LANES).sort(1).values
        header = header_bytes(packed.group)
        taken = torch.zeros(stored.numel(), dtype=torch.bool, device=device)
        taken[place] = True
        taken[(found.first[:, None] - header) // width + torch.arange(header // width, device=device)] = True
        values = _from_runs(elements, per_block)
        top = first // per_block * TILE_ROWS
        inside = torch.zeros(values.shape, dtype=torch.bool, device=device)
        inside[: packed.rows - top, : packed.cols] = True
        for count, what in (
            (place.numel() - torch.unique(place).numel(), "values belong to two runs"),
            (int((groups[found.bits] == 0).sum()), "stored groups are zero"),
            (int((stored[~taken] != 0).sum()), "places that no run has are not zero"),
            (int((banks[:, 1:] == banks[:, :-1]).sum()), "runs share a bank with another of their warp"),
            (int(((found.counts == 0) & (found.starts != 0)).sum()), "empty runs begin somewhere"),
            (int((~_sound(values, packed.dtype)).sum()), "values are not finite, or a zero with a sign"),
            (int(((values != 0) & ~inside).sum()), f"values lie outside {packed.rows} x {packed.cols}"),
        ):
            if count:
                problems.append(f"{where}: {count} {what}")
        nonzeros = (elements.view(last - first, -1) != 0).sum(1)
        lines = int(found.lines.sum())
        stats.add(PackStats(int(nonzeros.sum()), int(nonzeros.max()), lines * LINE // packed.dtype.itemsize))
    return problems, stats


def _sound(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values != 128 if dtype == torch.int8 else torch.isfinite(values.view(dtype))


@dataclass(frozen=True)
class TiledBitmapLayout(TiledLayout):
    """Words, offsets and layout under NAME, NAME_offsets and NAME_bitmap; of int8 codes also their scales, NAME_scale."""

    scales: str | None = None  # store int8 codes with scales per channel | tensor, else the values
    card: str = "any"  # one of PAIRS_BELOW: the card that will run it

    name, title, module = "tiled-bitmap", "tiled bitmaps", sys.modules[__name__]
    suffixes, optional_suffixes, described_by = ("", "_offsets", "_bitmap"), ("_scale",), "_bitmap"
    tile = (TILE_ROWS, TILE_COLS)
    keeps_codes = True
    densities = (0.12, 0.85)

    def holds_codes(self, name: str, parts: Iterable[str]) -> bool:
        return f"{name}_scale" in parts

    def of_codes(self, per: str) -> "TiledBitmapLayout":
        return replace(self, scales=per)

    def for_card(self, card: str) -> "TiledBitmapLayout":
        return replace(self, card=card)

    def stored_names(self, name: str) -> list[str]:
        return super().stored_names(name) + ([f"{name}_scale"] if self.scales else [])

    def expected_bytes(self, form: Form, density: float) -> int:
        tiles = num_tiles(form.rows, form.cols)
        values = torch.int8 if self.scales else form.dtype
        group = best_group(density, values, self.card)
        stored = 1 - (1 - density) ** group  # of the groups
        lines = 1.04 * stored * form.elements * values.itemsize + 64 * tiles
        scales = form.rows * form.dtype.itemsize if self.scales else 0
        return int(tiles * header_bytes(group) + lines) + 4 * (tiles + 8) + scales

    def fits(self, packed: TiledBitmap, density: float) -> bool:
        return packed.group == best_group(density, packed.dtype, self.card)

    def start(
        self, name: str, form: Form, weight: Tensor, record: dict, beside: dict[str, Tensor]
    ) -> tuple[Iterator, Callable, dict]:
        values, scale = weight, None
        if weight.dtype == torch.int8:
            scale = beside[f"{name}_scale"].contiguous().cpu()
        elif self.scales:
            codes = int8.Codes(weight, self.scales, form.dtype, name)
            values, scale = codes.all(), codes.scale.reshape(-1).expand(form.rows).contiguous().cpu()
            pruned = record.get("error", 0.0)  # zeros and codes err in different places: squares add up
            record = record | {"error": round(math.hypot(pruned, codes.error * math.sqrt(1 - pruned**2)), 8)}
        stored = nonzeros(values)
        if "zeros" in record:  # some that are left became the code 0
            record = record | {"zeros": values.numel() - stored}
        group = best_group(stored / values.numel(), values.dtype, self.card)
        shape = form.rows, form.cols, values.dtype, group, scale, form.transposed
        return pack_stripes(values, group, name), lambda offsets: TiledBitmap(offsets[:0], offsets, *shape), record

    def codes(self, packed: TiledBitmap) -> tuple[Tensor, Tensor]:
        return unpack_values(packed), packed.scale[:, None]


register(TiledBitmapLayout())
