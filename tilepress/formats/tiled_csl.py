"""Tiled-CSL: a sparse weight as one 32-bit word per non-zero, tile by tile, ordered for shared memory ahead of time.

The kernel loads a tile's words and scatters their values into a dense window in shared memory ("load as sparse, compute as
dense", Flash-LLM, VLDB 2024). `docs/format.md` is the specification with the drawing; in short:

    word    value (16 bits, low) | byte offset of the value in the window (high)
    window  128 rows of 128 bytes (64 columns); the 16-byte chunk of columns 8j..8j+7 of row r stands at chunk j ^ (r % 8)
    padding value 0, offset behind the window (one of 32 words, one a bank)
    tiles   128 rows x 64 columns; row blocks, then column blocks
    offsets first word of each tile and the end of the last, in units of 4 words (16 bytes)

One window serves every batch size and card: it is at once the 128-byte-swizzled K-major operand that wgmma reads, and what ldmatrix reads
for mma.sync without bank conflicts.

Any density works; every element whose bits are not all zero is kept, so -0.0 survives and unpack(pack(w)) is w bit for bit.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilepress.formats import TilepressError, dtype_name
from tilepress.formats.bank_order import BANKS, Placement, plan
from tilepress.formats.layout import Form, register
from tilepress.formats.stripes import infinity, stripes
from tilepress.formats.tiles import TiledLayout, offsets_from_sizes

TILE_ROWS, TILE_COLS = 128, 64  # the taller a tile, the more evenly its banks are filled
WINDOW = TILE_ROWS * TILE_COLS  # elements
DUMP = 2 * BANKS  # elements behind a window that padding hits
VALUE_DTYPES = (torch.bfloat16, torch.float16)
_CHUNK_ELEMENTS = 1 << 20  # elements ordered at once: small enough for the cache, large enough to hide Python


@dataclass(frozen=True)
class TiledCSL:
    """A packed weight [rows, cols] = [out_features, in_features]."""

    words: Tensor  # int32 [4 * offsets[-1]], value | offset << 16
    offsets: Tensor  # int32 [tiles + 1], in 16 bytes
    rows: int
    cols: int
    dtype: torch.dtype  # of the values: bfloat16 or float16
    transposed: bool = False  # the checkpoint without us stores [cols, rows], as Conv1D does
    layout_name = "tiled-csl"

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype of the weight that the values stand for."""
        return self.dtype

    def layout(self) -> Tensor:
        """The fields that are not tensors, as stored: int32 [5] (rows, cols, 128, index of the dtype, transposed)."""
        return layout_tensor(self.rows, self.cols, self.dtype, self.transposed)

    def beside(self) -> dict[str, Tensor]:
        """The stored tensors beside the words, by suffix."""
        return {"_offsets": self.offsets, "_layout": self.layout()}

    def to(self, device: torch.device | str) -> "TiledCSL":
        return replace(self, words=self.words.to(device), offsets=self.offsets.to(device))


def layout_tensor(rows: int, cols: int, dtype: torch.dtype, transposed: bool) -> Tensor:
    return torch.tensor([rows, cols, TILE_ROWS, VALUE_DTYPES.index(dtype), int(transposed)], dtype=torch.int32)


def from_parts(words: Tensor, offsets: Tensor, layout: Tensor, name: str = "weight") -> TiledCSL:
    """Puts the three stored tensors together and checks that their shapes and dtypes agree.

    Raises TilepressError naming `name` if they do not; what the words hold is `check`'s business.
    """
    if layout.dtype != torch.int32 or layout.shape != (5,):
        raise TilepressError(f"{name}: layout is {layout.dtype} {list(layout.shape)}, expected int32 [5]")
    rows, cols, tile_rows, dtype, transposed = layout.tolist()
    if (
        rows < 1
        or cols < 1
        or tile_rows != TILE_ROWS
        or dtype not in range(len(VALUE_DTYPES))
        or transposed not in (0, 1)
    ):
        raise TilepressError(
            f"{name}: layout (rows, cols, tile_rows, dtype, transposed) = {layout.tolist()} is out of range"
        )
    tiles = num_tiles(rows, cols)
    if offsets.dtype != torch.int32 or offsets.shape != (tiles + 1,):
        raise TilepressError(
            f"{name}: {list(offsets.shape)} offsets of {offsets.dtype}, expected int32 [{tiles + 1}] for {rows} x {cols}"
        )
    if words.dtype != torch.int32 or words.dim() != 1 or words.numel() % BANKS:
        raise TilepressError(
            f"{name}: words are {words.dtype} {list(words.shape)}, expected int32 [a multiple of {BANKS}]"
        )
    return TiledCSL(words, offsets, rows, cols, VALUE_DTYPES[dtype], bool(transposed))


@dataclass
class PackStats:
    """Statistics of packing: summed over tiles, except `densest_tile`."""

    nonzeros: int = 0
    densest_tile: int = 0  # most non-zeros in one tile
    wavefronts: int = 0  # shared-memory wavefronts to scatter every tile once

    def add(self, other: "PackStats") -> None:
        self.nonzeros += other.nonzeros
        self.densest_tile = max(self.densest_tile, other.densest_tile)
        self.wavefronts += other.wavefronts

    @property
    def wavefronts_per_32(self) -> float:
        """Wavefronts per 32 non-zeros; 1.0 is the least possible with full steps."""
        return 32 * self.wavefronts / self.nonzeros if self.nonzeros else 0.0


def record(packed: TiledCSL, stats: PackStats) -> dict:
    """The manifest's entry for a packed weight."""
    described = {"shape": [packed.rows, packed.cols], "dtype": dtype_name(packed.dtype)}
    described |= {"nonzeros": stats.nonzeros, "densest_tile": stats.densest_tile, "wavefronts": stats.wavefronts}
    return described | ({"transposed": True} if packed.transposed else {})


def num_tiles(rows: int, cols: int) -> int:
    return -(-rows // TILE_ROWS) * -(-cols // TILE_COLS)


def pack(weight: Tensor, name: str = "weight") -> TiledCSL:
    """Packs a bfloat16 or float16 weight [rows, cols] on its device.

    Raises TilepressError naming `name` for another dtype or a non-finite value.
    """
    packed = list(pack_stripes(weight, name))
    sizes = torch.cat([sizes for _, sizes, _ in packed])
    return TiledCSL(
        torch.cat([words for words, _, _ in packed]), offsets_from_sizes(sizes), *weight.shape, weight.dtype
    )


def pack_stripes(weight: Tensor, name: str = "weight") -> Iterator[tuple[Tensor, Tensor, PackStats]]:
    """Packs a few row blocks at a time, in file order: yields (words, size of each tile in 16 bytes, statistics), so that memory stays small."""
    if weight.dtype not in VALUE_DTYPES or weight.dim() != 2:
        raise TilepressError(
            f"{name}: Tiled-CSL stores 2-D bfloat16 or float16 weights, not {weight.dtype} {list(weight.shape)}",
            "convert it first: --dtype bfloat16, or leave it dense: --ignore " + name,
        )
    for stripe in stripes(weight, TILE_ROWS, TILE_COLS, _CHUNK_ELEMENTS, name):
        yield _pack_tiles(_to_windows(stripe))


def _chunk_of_row(device: torch.device) -> Tensor:
    eight = torch.arange(8, device=device)
    return eight[:, None] ^ eight[None]


def _to_windows(stripe: Tensor) -> Tensor:
    """Dense [128 a, 64 b] -> windows as int32 [tiles, 128, 32]: two neighbouring columns are one word, one bank."""
    rows, cols = stripe.shape
    chunks = stripe.view(torch.int32).view(rows // TILE_ROWS, TILE_ROWS // 8, 8, cols // TILE_COLS, 8, 4)
    chunks = chunks.permute(0, 3, 1, 2, 4, 5)
    eight = torch.arange(8, device=stripe.device)[:, None]
    return chunks[:, :, :, eight, _chunk_of_row(stripe.device)].reshape(-1, TILE_ROWS, BANKS)


def _pack_tiles(windows: Tensor) -> tuple[Tensor, Tensor, PackStats]:
    """int32 [T, 128, 32] -> (words, size of each tile in 16 bytes int32 [T], statistics)."""
    tiles = len(windows)
    device = windows.device
    banks = windows.transpose(1, 2).contiguous()  # [T, 32, 128]
    low, high = banks & 0xFFFF, (banks >> 16) & 0xFFFF
    pair, single = (low != 0) & (high != 0), (low != 0) ^ (high != 0)
    pairs, singles = pair.sum(2, dtype=torch.int32), single.sum(2, dtype=torch.int32)
    bank_plan = plan(singles, pairs)
    place = Placement(bank_plan)

    sizes = bank_plan.full_steps * 32 + 4 * bank_plan.lanes
    steps = bank_plan.full_steps + 4 * (bank_plan.lanes > 0)
    bank = torch.arange(BANKS, device=device)
    # The tile's first word, and the column of the first step in `crowd`, of each (tile, bank).
    base = (torch.cumsum(sizes.long(), 0) - sizes)[:, None].expand(tiles, BANKS).reshape(-1)
    column = (torch.cumsum(steps.long(), 0) - steps)[:, None].mul(BANKS).add(bank).reshape(-1)
    words = torch.empty(int(sizes.sum()), dtype=torch.int32, device=device)
    # Distinct words each step finds in each bank: what the store costs.
    crowd = torch.zeros(int(steps.sum()) * BANKS, dtype=torch.int16, device=device)

    def rank_in_bank(at: Tensor, counts: Tensor) -> Tensor:
        first = torch.cumsum(counts.view(-1), 0, dtype=torch.int32) - counts.view(-1)
        return torch.arange(at.numel(), dtype=torch.int32, device=device) - first.index_select(0, at)

    def put(at: Tensor, word: Tensor, step: Tensor, item: Tensor, cost: Tensor) -> None:
        words[base.index_select(0, at) + word] = item
        crowd.index_add_(0, column.index_select(0, at) + (step << 5), cost)

    def ones(at: Tensor) -> Tensor:
        return torch.ones(at.numel(), dtype=torch.int16, device=device)

    shift = TILE_ROWS.bit_length() - 1

    def offset_bits(index: Tensor, at: Tensor) -> Tensor:
        return ((index & (TILE_ROWS - 1)) << 23) | ((at & (BANKS - 1)) << 18)

    index = pair.view(-1).nonzero().squeeze(1).to(torch.int32)
    at = index >> shift
    word, step, high_word, high_step = place.pair_words(at, rank_in_bank(at, pairs))
    bits = offset_bits(index, at)
    put(at, word, step, low.view(-1).index_select(0, index) | bits, ones(at))
    put(
        at,
        high_word,
        high_step,
        high.view(-1).index_select(0, index) | bits | (2 << 16),
        (high_step != step).to(torch.int16),
    )

    index = single.view(-1).nonzero().squeeze(1).to(torch.int32)
    at = index >> shift
    word, step = place.words(at, rank_in_bank(at, singles) + (2 * pairs).view(-1).index_select(0, at))
    upper = high.view(-1).index_select(0, index)
    bits = offset_bits(index, at) | ((upper != 0).to(torch.int32) << 17)
    put(at, word, step, low.view(-1).index_select(0, index) | upper | bits, ones(at))

    pads = bank_plan.pads.view(-1)
    at = torch.arange(pads.numel(), dtype=torch.int32, device=device).repeat_interleave(pads)
    word, step = place.words(at, rank_in_bank(at, pads) + (bank_plan.count.view(-1) - pads).index_select(0, at))
    cell = column.index_select(0, at) + (step << 5)
    first_of_word = torch.ones_like(at, dtype=torch.int16)
    if at.numel() > 1:  # padding of one bank is one word: a step pays for it once
        order = torch.argsort(cell, stable=True)
        first_of_word[order[1:]] = (cell[order][1:] != cell[order][:-1]).to(torch.int16)
    put(at, word, step, (TILE_ROWS << 23) | ((at & (BANKS - 1)) << 18), first_of_word)

    nonzeros = (singles + 2 * pairs).sum(1)
    stats = PackStats(
        int(nonzeros.sum()), int(nonzeros.max()), int(crowd.view(-1, BANKS).amax(1).sum()) if crowd.numel() else 0
    )
    return words, sizes // 4, stats


def unpack(packed: TiledCSL) -> Tensor:
    """The dense weight [rows, cols] on the words' device; allocates it and one buffer of its size."""
    rows, cols = packed.rows, packed.cols
    out = torch.empty(rows, cols, dtype=torch.int16, device=packed.words.device)
    ends = packed.offsets.tolist()
    per_block = -(-cols // TILE_COLS)
    blocks = max(1, _CHUNK_ELEMENTS * (64 if packed.words.is_cuda else 4) // (per_block * WINDOW))
    for first in range(0, len(ends) - 1, blocks * per_block):
        last = min(first + blocks * per_block, len(ends) - 1)
        words = packed.words[4 * ends[first] : 4 * ends[last]]
        top = first // per_block * TILE_ROWS
        stripe = _from_windows(_scatter(words, packed.offsets[first : last + 1]), cols)
        out[top : top + stripe.shape[0]] = stripe[: rows - top, :cols]
    return out.view(packed.dtype)


def _scatter(words: Tensor, offsets: Tensor) -> Tensor:
    """Words of whole tiles -> windows int16 [T, 128 * 64]; padding falls behind each window and is cut off."""
    stride = WINDOW + DUMP
    tiles = offsets.numel() - 1
    start = torch.arange(0, tiles * stride, stride, dtype=torch.int32, device=words.device)
    start = start.repeat_interleave((offsets[1:] - offsets[:-1]) * 4, output_size=words.numel())
    windows = torch.zeros(tiles * stride, dtype=torch.int16, device=words.device)
    windows.index_put_((((words >> 17) & 0x7FFF) + start,), words.to(torch.int16))
    return windows.view(tiles, stride)[:, :-DUMP]


def _from_windows(windows: Tensor, cols: int) -> Tensor:
    kb = -(-cols // TILE_COLS)
    chunks = windows.reshape(-1, kb, TILE_ROWS // 8, 8, 8, 8).view(torch.int64)
    chunks = chunks.permute(0, 2, 3, 1, 4, 5)  # block, group of 8 rows, row, column block, chunk, 8 bytes
    out = torch.empty(chunks.shape, dtype=torch.int64, device=windows.device)
    for row, order in enumerate(_chunk_of_row(windows.device)):
        out[:, :, row] = chunks[:, :, row].index_select(3, order)
    return out.view(torch.int16).view(-1, kb * TILE_COLS)


def check_offsets(offsets: Tensor, num_words: int) -> str | None:
    """Return what is wrong with a packed weight's offsets, or None.

    They go from 0, never falling, whole 128-byte lines, to the end of the words.
    """
    if int(offsets[0]) != 0 or int(offsets[-1]) * 4 != num_words:
        return f"offsets run from {int(offsets[0])} to {int(offsets[-1])}, expected 0 to {num_words // 4}"
    steps = offsets[1:] - offsets[:-1]
    if bool((steps < 0).any()):
        return f"offsets fall after tile {int((steps < 0).nonzero()[0])}"
    if bool((offsets % (BANKS // 4)).any()):
        return "offsets are no multiples of 8 (128 bytes)"
    return None


def check_bounds(packed: TiledCSL) -> str | None:
    """Return what would make decoding wrong or unsafe, or None: offsets in order, and every word in its window or the
    padding behind it.

    One pass over the words; `check` looks closer.
    """
    problem = check_offsets(packed.offsets, packed.words.numel())
    if problem or not packed.words.numel():
        return problem
    window = 2 * WINDOW
    for words in packed.words.split(_CHUNK_ELEMENTS * 8):
        offset = (words >> 16) & 0xFFFF
        outside = (offset >= window) & (((words & 0xFFFF) != 0) | (offset >= window + 4 * BANKS))
        if bool((outside | ((offset & 1) != 0)).any()):
            return "a word points outside its tile"
    return None


def check(packed: TiledCSL) -> tuple[list[str], PackStats]:
    """List every defect of a packed weight, and its statistics recounted from the words alone, a few tiles at a time."""
    problem = check_offsets(packed.offsets, packed.words.numel())
    if problem:
        return [problem], PackStats()
    stats, problems = PackStats(), []
    kb, window, tiles = -(-packed.cols // TILE_COLS), 2 * WINDOW, packed.offsets.numel() - 1
    chunk = max(1, _CHUNK_ELEMENTS // WINDOW)
    for first in range(0, tiles, chunk):
        offsets = packed.offsets[first : first + chunk + 1]
        words = packed.words[4 * int(offsets[0]) : 4 * int(offsets[-1])]
        tile = torch.arange(offsets.numel() - 1, device=words.device).repeat_interleave(
            (offsets[1:] - offsets[:-1]).long() * 4
        )
        value, offset = words & 0xFFFF, (words >> 16) & 0xFFFF
        item = offset < window
        padding = (value == 0) & (offset >= window) & (offset < window + 4 * BANKS) & (offset % 4 == 0)
        row, chunk_col = offset >> 7, ((offset >> 4) & 7) ^ ((offset >> 7) & 7)
        number = first + tile
        row = number // kb * TILE_ROWS + row
        col = number % kb * TILE_COLS + chunk_col * 8 + (offset >> 1 & 7)
        exponent = infinity(packed.dtype)
        for what, bad in (
            ("is neither an item nor padding", ~item & ~padding),
            ("has an odd offset", item & (offset % 2 == 1)),
            ("stores a zero", item & (value == 0)),
            ("is not finite", item & (value & exponent == exponent)),
            (f"lies outside {packed.rows} x {packed.cols}", item & ((row >= packed.rows) | (col >= packed.cols))),
        ):
            if bool(bad.any()):
                at = int(bad.nonzero()[0])
                problems.append(
                    f"{int(bad.sum())} words, the first in tile {int(number[at])}: word {int(words[at]) & 0xFFFFFFFF:#010x} {what}"
                )
        place = tile[item] * (window // 2) + (offset[item] >> 1)
        nonzeros = torch.bincount(tile[item], minlength=1)
        if place.numel() != torch.unique(place).numel():
            problems.append(f"tiles {first} to {first + offsets.numel() - 2}: two words hold the same element")
        stats.add(PackStats(int(item.sum()), int(nonzeros.max()), _wavefronts(words, offsets)))
    return problems, stats


def _wavefronts(words: Tensor, offsets: Tensor) -> int:
    """Replays the stores of a warp: for each step the most distinct words that any bank gets, summed."""
    sizes = (offsets[1:] - offsets[:-1]).long() * 4
    loads = (sizes + 127) // 128
    steps = torch.full((int(loads.sum()) * 128,), -1, dtype=torch.int32, device=words.device)
    shift = (torch.cumsum(loads, 0) - loads) * 128 - (torch.cumsum(sizes, 0) - sizes)
    at = torch.arange(words.numel(), device=words.device) + shift.repeat_interleave(sizes)
    steps[at] = (words >> 18) & 0x3FFF  # the 32-bit word of the window
    steps = steps.view(-1, 32, 4).transpose(1, 2).reshape(-1, 32).sort(1).values
    distinct = torch.ones_like(steps)
    distinct[:, 1:] = steps[:, 1:] != steps[:, :-1]
    distinct *= steps >= 0
    crowd = torch.zeros_like(steps).scatter_add_(1, (steps & (BANKS - 1)).long(), distinct)
    return int(crowd.amax(1).sum()) if crowd.numel() else 0


class TiledCSLLayout(TiledLayout):
    """Words, offsets and layout under NAME, NAME_offsets and NAME_layout."""

    name, title, module = "tiled-csl", "Tiled-CSL", sys.modules[__name__]
    suffixes, described_by = ("", "_offsets", "_layout"), "_layout"
    tile = (TILE_ROWS, TILE_COLS)
    densities = (0.0, 0.12)  # above, a bitmap is faster on most shapes; on the largest from about 0.06

    def expected_bytes(self, form: Form, density: float) -> int:
        tiles = num_tiles(form.rows, form.cols)
        return int(4 * (form.elements * density + 15.5 * tiles)) + 4 * (tiles + 6)

    def start(
        self, name: str, form: Form, weight: Tensor, record: dict, beside: dict[str, Tensor]
    ) -> tuple[Iterator, Callable, dict]:
        shape = form.rows, form.cols, weight.dtype, form.transposed
        return pack_stripes(weight, name), lambda offsets: TiledCSL(offsets[:0], offsets, *shape), record


register(TiledCSLLayout())
