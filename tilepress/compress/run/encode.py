"""How a compressed weight becomes tensors of a shard, a class for each layout: what it will store, and writing it.

A new layout is a class here and a module in `formats/`; plan, writer and recipes do not change.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from tilepress.compress.run.targets import Target
from tilepress.formats import TilepressError, dtype_name, int8, tiled_bitmap, tiled_csl

Add = Callable[[str, tuple[int, ...], Iterable[Tensor]], int]  # ShardWriter.add
_ROWS = 1024  # of a weight looked at together


@dataclass
class Compressed:
    """What a recipe makes of a weight: its values [rows, cols], what the manifest says of it, small tensors stored beside it by name."""

    weight: Tensor
    record: dict
    beside: dict[str, Tensor] = field(default_factory=dict)


class Layout:
    """How a weight is stored: what it will take, and writing it."""

    name: str

    def stored_names(self, name: str) -> list[str]:
        """The tensors that store a weight."""
        raise NotImplementedError

    def expected_bytes(self, target: Target, dtype: torch.dtype, density: float) -> int:
        """About what the tensors of a target take, with values of `dtype` of which a share is not zero."""
        raise NotImplementedError

    def encode(self, target: Target, dtype: torch.dtype, made: Compressed, add: Add) -> dict:
        """Stores a compressed target by calling `add` for each tensor; returns its record of the manifest."""
        raise NotImplementedError


class DenseLayout(Layout):
    """An ordinary tensor, the way round that the source stores it."""

    name = "dense"

    def stored_names(self, name: str) -> list[str]:
        return [name]

    def expected_bytes(self, target: Target, dtype: torch.dtype, density: float) -> int:
        return target.elements * dtype.itemsize

    def encode(self, target: Target, dtype: torch.dtype, made: Compressed, add: Add) -> dict:
        stored = made.weight.t() if target.transposed else made.weight
        nbytes = add(target.name, tuple(stored.shape), stored.split(_ROWS))
        shape = {"shape": list(stored.shape), "dtype": dtype_name(made.weight.dtype)}
        return shape | {"nonzeros": _nonzeros(made.weight), "bytes": nbytes, "layout": self.name} | made.record


class _SparseLayout(Layout):
    """Words, which are streamed a few row blocks at a time, and all that is stored beside them, which is known with them."""

    module: ModuleType  # of the format

    def stored_names(self, name: str) -> list[str]:
        return [name + suffix for suffix in self.module.SUFFIXES]

    def encode(self, target: Target, dtype: torch.dtype, made: Compressed, add: Add) -> dict:
        stripes, packed_with, record = self.start(target, dtype, made)
        sizes, stats = [], self.module.PackStats()

        def words_of() -> Iterator[Tensor]:
            for words, counts, found in stripes:
                sizes.append(counts.cpu())
                stats.add(found)
                yield words

        nbytes = add(target.name, (-1,), words_of())
        packed = packed_with(self.module.offsets_from_sizes(torch.cat(sizes)))
        for suffix, part in packed.beside().items():
            nbytes += add(target.name + suffix, tuple(part.shape), [part])
        return self.module.record(packed, stats) | {"bytes": nbytes, "layout": self.name} | record

    def start(self, target: Target, dtype: torch.dtype, made: Compressed) -> tuple[Iterator, Callable, dict]:
        """Stripes of words, what makes the packed weight without its words from their offsets, and the record."""
        raise NotImplementedError


class TiledCSLLayout(_SparseLayout):
    """Words, offsets and layout of formats/tiled_csl.py."""

    name, module = "tiled-csl", tiled_csl

    def expected_bytes(self, target: Target, dtype: torch.dtype, density: float) -> int:
        tiles = tiled_csl.num_tiles(target.rows, target.cols)
        return int(4 * (target.elements * density + 15.5 * tiles)) + 4 * (tiles + 6)

    def start(self, target: Target, dtype: torch.dtype, made: Compressed) -> tuple[Iterator, Callable, dict]:
        shape = target.rows, target.cols, made.weight.dtype, target.transposed
        stripes = tiled_csl.pack_stripes(made.weight, target.name)
        return stripes, lambda offsets: tiled_csl.TiledCSL(offsets[:0], offsets, *shape), made.record


@dataclass(frozen=True)
class TiledBitmapLayout(_SparseLayout):
    """Words, offsets and layout of formats/tiled_bitmap.py, of the weight as it is or of its int8 codes, with their scales."""

    scales: str | None = None  # of int8 codes: channel | tensor

    name, module = "tiled-bitmap", tiled_bitmap

    def stored_names(self, name: str) -> list[str]:
        scale = [name + suffix for suffix in tiled_bitmap.OPTIONAL_SUFFIXES]
        return super().stored_names(name) + (scale if self.scales else [])

    def expected_bytes(self, target: Target, dtype: torch.dtype, density: float) -> int:
        tiles = tiled_bitmap.num_tiles(target.rows, target.cols)
        values = torch.int8 if self.scales else dtype
        group = tiled_bitmap.best_group(density, values)
        stored = 1 - (1 - density) ** group  # of the groups
        lines = 1.04 * stored * target.elements * values.itemsize + 64 * tiles
        scales = target.rows * dtype.itemsize if self.scales else 0
        return int(tiles * tiled_bitmap.header_bytes(group) + lines) + 4 * (tiles + 8) + scales

    def start(self, target: Target, dtype: torch.dtype, made: Compressed) -> tuple[Iterator, Callable, dict]:
        values, scale, record = made.weight, None, made.record
        if self.scales:
            values, scale, error = self._codes(target, dtype, made.weight)
            pruned = record.get("error", 0.0)  # zeros and codes err in different places: squares add up
            record = record | {"error": round(math.hypot(pruned, error * math.sqrt(1 - pruned**2)), 8)}
        nonzeros = _nonzeros(values)
        if "zeros" in record:  # some that are left became the code 0
            record = record | {"zeros": values.numel() - nonzeros}
        group = tiled_bitmap.best_group(nonzeros / values.numel(), values.dtype)
        shape = target.rows, target.cols, values.dtype, group, scale, target.transposed
        stripes = tiled_bitmap.pack_stripes(values, group, target.name)
        return stripes, lambda offsets: tiled_bitmap.TiledBitmap(offsets[:0], offsets, *shape), record

    def _codes(self, target: Target, dtype: torch.dtype, weight: Tensor) -> tuple[Tensor, Tensor, float]:
        """int8 codes [rows, cols], their scales [rows], and their error relative to the weight."""
        codes = _Codes(weight, self.scales, dtype, target.name)
        values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        for first, rows in codes:
            values[first : first + len(rows)] = rows
        return values, codes.scale.reshape(-1).expand(len(weight)).contiguous().cpu(), codes.error


class AutoLayout(Layout):
    """For each weight the layout that serves it best, by its share of zeros."""

    name = "auto"

    def __init__(self, scales: str | None = None):
        self.scales = scales  # of int8 codes: channel | tensor

    def stored_names(self, name: str) -> list[str]:
        return self._of(0.5).stored_names(name)

    def expected_bytes(self, target: Target, dtype: torch.dtype, density: float) -> int:
        return self._of(density).expected_bytes(target, dtype, density)

    def encode(self, target: Target, dtype: torch.dtype, made: Compressed, add: Add) -> dict:
        density = 1.0 if self.scales else _nonzeros(made.weight) / target.elements
        return self._of(density).encode(target, dtype, made, add)

    def _of(self, density: float) -> Layout:
        """Where the layouts cross is measured: docs/kernels/tiled_bitmap_spmm.md."""
        if self.scales:  # whatever the values are
            return TiledBitmapLayout(self.scales)
        if density > DENSE_FROM:
            return LAYOUTS["dense"]
        return LAYOUTS["tiled-bitmap" if density > BITMAP_FROM else "tiled-csl"]


class Int8Layout(Layout):
    """int8 codes with the scales of formats/int8.py; of a Conv1D as [1, in, out], which no loader takes for its weight."""

    name = "int8"

    def __init__(self, scheme: int8.Int8Scheme):
        self.scheme = scheme

    def stored_names(self, name: str) -> list[str]:
        scale, input_scale, zero_point = int8.part_names(name)
        static = [input_scale] if self.scheme.static else []
        return [name, scale, *static, *([zero_point] if self.scheme.asymmetric else [])]

    def expected_bytes(self, target: Target, dtype: torch.dtype, density: float) -> int:
        scales = (target.rows if self.scheme.weights == "channel" else 1) + self.scheme.static
        return target.elements + scales * dtype.itemsize + self.scheme.asymmetric

    def encode(self, target: Target, dtype: torch.dtype, made: Compressed, add: Add) -> dict:
        codes, shape = _Codes(made.weight, self.scheme.weights, dtype, target.name), (target.rows, target.cols)
        if target.transposed:
            values = torch.empty(shape, dtype=torch.int8, device=made.weight.device)
            for first, rows in codes:
                values[first : first + len(rows)] = rows
            nbytes = add(target.name, (1, *shape[::-1]), values.t().split(_ROWS))
        else:
            nbytes = add(target.name, shape, (rows for _, rows in codes))
        for name, part in (made.beside | {int8.part_names(target.name)[0]: codes.scale}).items():
            nbytes += add(name, tuple(part.shape), [part])
        return {
            "bytes": nbytes,
            "layout": self.name,
            **made.record,
            "shape": list(shape),
            "dtype": dtype_name(codes.scale.dtype),
            "nonzeros": codes.nonzeros,
            "error": round(codes.error, 8),
        } | ({"transposed": True} if target.transposed else {})


class _Codes:
    """A weight's int8 codes, some rows after the other as (first row, codes), and what is known of them after the last."""

    def __init__(self, weight: Tensor, per: str, dtype: torch.dtype, name: str):
        """The scale is that of `int8.weight_scale`. Raises TilepressError for values that are not finite: scales would mean nothing."""
        for _ in converted(weight, weight.dtype, name):
            pass
        self.weight, self.scale = weight, int8.weight_scale(weight, per, dtype)
        self.nonzeros, self._signal, self._noise = 0, 0.0, 0.0

    @property
    def error(self) -> float:
        """Frobenius norm of what rounding changed, relative to the weight's."""
        return (self._noise / self._signal) ** 0.5 if self._signal else 0.0

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        for first in range(0, len(self.weight), _ROWS):
            rows = self.weight[first : first + _ROWS].float()
            scale = self.scale if self.scale.dim() == 1 else self.scale[first : first + _ROWS]
            codes = int8.quantize(rows, scale)
            self._signal += float(rows.square().sum(dtype=torch.float64))
            self._noise += float((int8.dequantize(codes, scale.float()) - rows).square().sum(dtype=torch.float64))
            self.nonzeros += int(torch.count_nonzero(codes))
            yield first, codes


def _nonzeros(weight: Tensor) -> int:
    return sum(int(torch.count_nonzero(piece)) for piece in weight.split(_ROWS))


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
