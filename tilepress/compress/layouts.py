"""How a compressed weight becomes tensors of a shard, a class for each layout: what it will store, and writing it.

A shard's tensors are written in the order of their element sizes, so a weight's parts come at different times: an `Encoder` is asked
for one stored tensor after the other and keeps between them only what is small. A new layout is a class here and a module in
`formats/`; plan, writer and recipes do not change.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tilepress.compress.targets import Target
from tilepress.formats import TilepressError, dtype_name, int8, tiled_csl
from tilepress.formats.artifact import PlannedTensor

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

    def encoder(self, target: Target, dtype: torch.dtype, load: Load) -> Encoder: ...


class DenseLayout:
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


class TiledCSLLayout:
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


class _TiledCSL:
    """The words come first; offsets and layout are known with them."""

    def __init__(self, target: Target, load: Load):
        self.target, self.load, self.record = target, load, {}
        self.beside: dict[str, Tensor] = {}

    def write(self, name: str, add: Add) -> None:
        if name in self.beside:
            values = self.beside.pop(name)
            self.record["bytes"] += add(name, tuple(values.shape), [values])
            return
        target, made = self.target, self.load()
        sizes, stats = [], tiled_csl.PackStats()

        def stripes() -> Iterator[Tensor]:
            for words, counts, found in tiled_csl.pack_stripes(made.weight, target.name):
                sizes.append(counts.cpu())
                stats.add(found)
                yield words

        nbytes = add(name, (-1,), stripes())
        shape = (target.rows, target.cols, made.weight.dtype, target.transposed)
        parts = (tiled_csl.offsets_from_sizes(torch.cat(sizes)), tiled_csl.layout_tensor(*shape))
        self.beside = {name + suffix: part for suffix, part in zip(tiled_csl.SUFFIXES[1:], parts, strict=True)}
        self.record = tiled_csl.record(*shape, stats) | {"bytes": nbytes} | made.record


class Int8Layout:
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


LAYOUTS = {layout.name: layout for layout in (DenseLayout(), TiledCSLLayout())}
