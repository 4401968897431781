"""How a compressed weight becomes tensors of a shard, a class for each layout: what it will store, and writing it.

A shard's tensors are written in the order of their element sizes, so a weight's parts come at different times: an `Encoder` is asked
for one stored tensor after the other and keeps between them only what is small. A new layout is a class here and a module in
`formats/`; plan, writer and recipes do not change.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from tilepress.compress.run.targets import Target
from tilepress.formats import TilepressError, dtype_name, int8, tiled_bitmap, tiled_csl
from tilepress.formats.artifact import PlannedTensor
from tilepress.formats.sparse import Packed

Add = Callable[[str, tuple[int, ...], Iterable[Tensor]], int]  # ShardWriter.add
_ROWS = 1024  # of a weight looked at together


@dataclass
class Compressed:
    """What a recipe makes of a weight: its values [rows, cols], what the manifest says of it, small tensors stored beside it by name."""

    weight: Tensor
    record: dict
    beside: dict[str, Tensor] = field(default_factory=dict)


Load = Callable[[], Compressed]


class Encoder(Protocol):
    record: dict  # of the manifest, complete once every tensor is written

    def write(self, name: str, add: Add) -> None: ...


class Layout(Protocol):
    name: str

    def planned(self, target: Target, dtype: torch.dtype) -> list[PlannedTensor]:
        """The tensors of a target with the most elements that each can have."""

    def expected_bytes(self, target: Target, dtype: torch.dtype, density: float) -> int: ...

    def settled(self, target: Target, dtype: torch.dtype, load: Load) -> "Layout":
        """The layout that a target gets, once that depends on its values: `planned` and `encoder` are asked of it."""
        return self

    def encoder(self, target: Target, dtype: torch.dtype, load: Load) -> Encoder: ...


class DenseLayout(Layout):
    """An ordinary tensor, the way round that the source stores it."""

    name = "dense"

    def planned(self, target: Target, dtype: torch.dtype) -> list[PlannedTensor]:
        return [PlannedTensor(target.name, dtype, target.elements, 2)]

    def expected_bytes(self, target: Target, dtype: torch.dtype, density: float) -> int:
        return target.elements * dtype.itemsize

    def encoder(self, target: Target, dtype: torch.dtype, load: Load) -> "_Dense":
        return _Dense(target, load)


class _Dense:
    def __init__(self, target: Target, load: Load):
        self.target, self.load, self.record = target, load, {}

    def write(self, name: str, add: Add) -> None:
        made = self.load()
        stored = made.weight.t() if self.target.transposed else made.weight
        nbytes = add(name, tuple(stored.shape), stored.split(_ROWS))
        nonzeros = sum(int(torch.count_nonzero(piece)) for piece in made.weight.split(_ROWS))
        shape = {"shape": list(stored.shape), "dtype": dtype_name(made.weight.dtype)}
        self.record = shape | {"nonzeros": nonzeros, "bytes": nbytes} | made.record


class TiledCSLLayout(Layout):
    """Words, offsets and layout of formats/tiled_csl.py; words are streamed a few row blocks at a time."""

    name = "tiled-csl"

    def planned(self, target: Target, dtype: torch.dtype) -> list[PlannedTensor]:
        tiles = tiled_csl.num_tiles(target.rows, target.cols)
        most = (target.elements + 31 * tiles, tiles + 1, 5)
        return [
            PlannedTensor(target.name + suffix, torch.int32, n)
            for suffix, n in zip(tiled_csl.SUFFIXES, most, strict=True)
        ]

    def expected_bytes(self, target: Target, dtype: torch.dtype, density: float) -> int:
        tiles = tiled_csl.num_tiles(target.rows, target.cols)
        return int(4 * (target.elements * density + 15.5 * tiles)) + 4 * (tiles + 6)

    def encoder(self, target: Target, dtype: torch.dtype, load: Load) -> "_TiledCSL":
        return _TiledCSL(target, load)


class _Sparse:
    """The words come first; all that is stored beside them is known with them."""

    module: ModuleType  # of the format

    def __init__(self, target: Target, load: Load):
        self.target, self.load, self.record = target, load, {}
        self.beside: dict[str, Tensor] = {}

    def write(self, name: str, add: Add) -> None:
        if name in self.beside:
            values = self.beside.pop(name)
            self.record["bytes"] += add(name, tuple(values.shape), [values])
            return
        made = self.load()
        stripes, packed_with = self.start(made)
        sizes, stats = [], self.module.PackStats()

        def words_of() -> Iterator[Tensor]:
            for words, counts, found in stripes:
                sizes.append(counts.cpu())
                stats.add(found)
                yield words

        nbytes = add(name, (-1,), words_of())
        packed = packed_with(self.module.offsets_from_sizes(torch.cat(sizes)))
        self.beside = {name + suffix: part for suffix, part in packed.beside().items()}
        self.record = self.module.record(packed, stats) | {"bytes": nbytes} | made.record

    def start(self, made: Compressed) -> tuple[Iterator, Callable[[Tensor], Packed]]:
        """Stripes of words, and the packed weight without its words from the offsets that they add up to. May add to the record."""
        raise NotImplementedError


class _TiledCSL(_Sparse):
    module = tiled_csl

    def start(self, made: Compressed) -> tuple[Iterator, Callable[[Tensor], Packed]]:
        target, stripes = self.target, tiled_csl.pack_stripes(made.weight, self.target.name)
        shape = target.rows, target.cols, made.weight.dtype, target.transposed
        return stripes, lambda offsets: tiled_csl.TiledCSL(offsets[:0], offsets, *shape)


@dataclass(frozen=True)
class TiledBitmapLayout(Layout):
    """Words, offsets and layout of formats/tiled_bitmap.py, of the weight as it is or of its int8 codes, with their scales."""

    scales: str | None = None  # of int8 codes: channel | tensor

    name = "tiled-bitmap"

    def planned(self, target: Target, dtype: torch.dtype) -> list[PlannedTensor]:
        tiles = tiled_bitmap.num_tiles(target.rows, target.cols)
        values = torch.int8 if self.scales else dtype
        most = (tiles * tiled_bitmap.largest_tile(1, values) // 4, tiles + 1, 7)
        found = [
            PlannedTensor(target.name + suffix, torch.int32, n)
            for suffix, n in zip(tiled_bitmap.SUFFIXES, most, strict=True)
        ]
        if self.scales:
            found.append(PlannedTensor(target.name + tiled_bitmap.OPTIONAL_SUFFIXES[0], dtype, target.rows))
        return found

    def expected_bytes(self, target: Target, dtype: torch.dtype, density: float) -> int:
        tiles = tiled_bitmap.num_tiles(target.rows, target.cols)
        values = torch.int8 if self.scales else dtype
        group = tiled_bitmap.best_group(density, values)
        stored = 1 - (1 - density) ** group  # of the groups
        lines = 1.04 * stored * target.elements * values.itemsize + 64 * tiles
        scales = target.rows * dtype.itemsize if self.scales else 0
        return int(tiles * tiled_bitmap.header_bytes(group) + lines) + 4 * (tiles + 8) + scales

    def encoder(self, target: Target, dtype: torch.dtype, load: Load) -> "_TiledBitmap":
        return _TiledBitmap(target, dtype, load, self.scales)


class _TiledBitmap(_Sparse):
    module = tiled_bitmap

    def __init__(self, target: Target, dtype: torch.dtype, load: Load, scales: str | None):
        super().__init__(target, load)
        self.dtype, self.scales = dtype, scales

    def start(self, made: Compressed) -> tuple[Iterator, Callable[[Tensor], Packed]]:
        target, values, scale = self.target, made.weight, None
        if self.scales:
            values, scale, error = self._codes(made.weight)
            pruned = made.record.get("error", 0.0)  # zeros and codes err in different places: squares add up
            made.record = made.record | {"error": round(math.hypot(pruned, error * math.sqrt(1 - pruned**2)), 8)}
        nonzeros = int(torch.count_nonzero(values))
        if "zeros" in made.record:  # some that are left became the code 0
            made.record = made.record | {"zeros": values.numel() - nonzeros}
        group = tiled_bitmap.best_group(nonzeros / values.numel(), values.dtype)
        shape = target.rows, target.cols, values.dtype, group, scale, target.transposed
        stripes = tiled_bitmap.pack_stripes(values, group, target.name)
        return stripes, lambda offsets: tiled_bitmap.TiledBitmap(offsets[:0], offsets, *shape)

    def _codes(self, weight: Tensor) -> tuple[Tensor, Tensor, float]:
        """int8 codes [rows, cols], their scales [rows], and their error relative to the weight."""
        for _ in converted(weight, weight.dtype, self.target.name):
            pass  # looks at every value: scales of a weight that is not finite mean nothing
        scale = int8.weight_scale(weight, self.scales, self.dtype)
        codes, signal, noise = torch.empty(weight.shape, dtype=torch.int8, device=weight.device), 0.0, 0.0
        for first in range(0, len(weight), _ROWS):
            rows = weight[first : first + _ROWS].float()
            of_rows = scale if scale.dim() == 1 else scale[first : first + _ROWS]
            codes[first : first + _ROWS] = found = int8.quantize(rows, of_rows)
            signal += float(rows.square().sum(dtype=torch.float64))
            noise += float((int8.dequantize(found, of_rows.float()) - rows).square().sum(dtype=torch.float64))
        scales = scale.reshape(-1).expand(len(weight)).contiguous().cpu()
        return codes, scales, (noise / signal) ** 0.5 if signal else 0.0


class AutoLayout(Layout):
    """For each weight the layout that serves it best, by its share of zeros."""

    name = "auto"

    def __init__(self, scales: str | None = None):
        self.scales = scales  # of int8 codes: channel | tensor

    def planned(self, target: Target, dtype: torch.dtype) -> list[PlannedTensor]:
        return self._of(0.5).planned(target, dtype)

    def expected_bytes(self, target: Target, dtype: torch.dtype, density: float) -> int:
        return self._of(density).expected_bytes(target, dtype, density)

    def settled(self, target: Target, dtype: torch.dtype, load: Load) -> Layout:
        if self.scales:  # whatever the values are
            return self._of(1.0)
        weight = load().weight
        nonzeros = sum(int(torch.count_nonzero(piece)) for piece in weight.split(_ROWS))
        return self._of(nonzeros / target.elements)

    def _of(self, density: float) -> Layout:
        """Where the layouts cross is measured: docs/kernels/tiled_bitmap_spmm.md."""
        if self.scales:
            return TiledBitmapLayout(self.scales)
        if density > DENSE_FROM:
            return LAYOUTS["dense"]
        return LAYOUTS["tiled-bitmap" if density > BITMAP_FROM else "tiled-csl"]


class Int8Layout(Layout):
    """int8 codes with the scales of formats/int8.py; of a Conv1D as [1, in, out], which no loader takes for its weight."""

    name = "int8"

    def __init__(self, scheme: int8.Int8Scheme):
        self.scheme = scheme

    def planned(self, target: Target, dtype: torch.dtype) -> list[PlannedTensor]:
        scale, input_scale, zero_point = int8.part_names(target.name)
        channel = self.scheme.weights == "channel"
        found = [
            PlannedTensor(target.name, torch.int8, target.elements, 3 if target.transposed else 2),
            PlannedTensor(scale, dtype, target.rows if channel else 1, 2 if channel else 1),
        ]
        if self.scheme.static:
            found.append(PlannedTensor(input_scale, dtype, 1))
        if self.scheme.asymmetric:
            found.append(PlannedTensor(zero_point, torch.int8, 1))
        return found

    def expected_bytes(self, target: Target, dtype: torch.dtype, density: float) -> int:
        return sum(tensor.max_nbytes for tensor in self.planned(target, dtype))

    def encoder(self, target: Target, dtype: torch.dtype, load: Load) -> "_Int8":
        return _Int8(target, dtype, load, self.scheme)


class _Int8:
    """The scale comes first and is kept; the weight is read again when its turn comes."""

    def __init__(self, target: Target, dtype: torch.dtype, load: Load, scheme: int8.Int8Scheme):
        self.target, self.dtype, self.load, self.scheme = target, dtype, load, scheme
        self.beside: dict[str, Tensor] = {}
        self.scale: Tensor | None = None
        self.record: dict = {"bytes": 0}

    def write(self, name: str, add: Add) -> None:
        target = self.target
        if self.scale is None:
            made = self.load()
            for _ in converted(made.weight, made.weight.dtype, target.name):
                pass  # looks at every value: scales of a weight that is not finite mean nothing
            self.scale = int8.weight_scale(made.weight, self.scheme.weights, self.dtype)
            self.beside = made.beside | {int8.part_names(target.name)[0]: self.scale}
            self.record |= made.record
        if name in self.beside:
            values = self.beside[name]
            self.record["bytes"] += add(name, tuple(values.shape), [values])
            return
        weight, shape = self.load().weight, (target.rows, target.cols)
        if target.transposed:
            codes = torch.empty(shape, dtype=torch.int8, device=weight.device)
            for first, rows in self._codes(weight):
                codes[first : first + len(rows)] = rows
            shape, pieces = (1, *shape[::-1]), codes.t().split(_ROWS)
        else:
            pieces = (rows for _, rows in self._codes(weight))
        self.record["bytes"] += add(name, shape, pieces)
        self.record |= {
            "shape": [target.rows, target.cols],
            "dtype": dtype_name(self.scale.dtype),
            "nonzeros": self.nonzeros,
            "error": round((self.noise / self.signal) ** 0.5, 8) if self.signal else 0.0,
        } | ({"transposed": True} if target.transposed else {})

    def _codes(self, weight: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(first row, codes of some rows) one after the other; sums up what the record says of them."""
        self.signal = self.noise = 0.0
        self.nonzeros = 0
        for first in range(0, len(weight), _ROWS):
            rows = weight[first : first + _ROWS].float()
            scale = self.scale if self.scale.dim() == 1 else self.scale[first : first + _ROWS]
            codes = int8.quantize(rows, scale)
            self.signal += float(rows.square().sum(dtype=torch.float64))
            self.noise += float((int8.dequantize(codes, scale.float()) - rows).square().sum(dtype=torch.float64))
            self.nonzeros += int(torch.count_nonzero(codes))
            yield first, codes


def converted(tensor: Tensor, dtype: torch.dtype, name: str) -> Iterator[Tensor]:
    """The elements in order, in pieces, converted. Raises TilepressError naming a tensor with values that are not finite, before or after."""
    for piece in tensor.reshape(-1).split(1 << 22):
        other = piece.to(dtype)
        if piece.is_floating_point() and not bool(torch.isfinite(other.float()).all()):
            if bool(torch.isfinite(piece.float()).all()):
                hint = "convert with --dtype bfloat16, which has float32's range"
                raise TilepressError(f"{name} has values beyond {dtype_name(dtype)}", hint)
            raise TilepressError(
                f"{name} has non-finite values", "the checkpoint is damaged, or overflowed in training"
            )
        yield other


DENSE_FROM = (
    0.85  # share of non-zeros from which a bitmap saves less than 7 % of the bytes, and time for single tokens only
)
BITMAP_FROM = 0.12  # and from which it is faster than Tiled-CSL, on most shapes; on the largest from about 0.06
FORMATS = ("auto", "tiled-csl", "tiled-bitmap", "dense")  # what --format and --to take
LAYOUTS = {layout.name: layout for layout in (DenseLayout(), TiledCSLLayout(), TiledBitmapLayout())}


def layout_for(name: str, scales: str | None = None) -> Layout:
    """By its name in FORMATS; with int8 values and `scales` per channel or tensor."""
    if name == "auto":
        return AutoLayout(scales)
    return TiledBitmapLayout(scales) if name == "tiled-bitmap" else LAYOUTS[name]
