"""How a compressed weight becomes tensors of a shard, a class for each layout: what it will store, and writing it.

A new layout is a class here and a module in `formats/`; plan, writer and recipes do not change.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from tilepress.compress.targets import Target
from tilepress.formats import dtype_name, tiled_csl
from tilepress.formats.artifact import PlannedTensor

Add = Callable[[str, tuple[int, ...], Iterable[Tensor]], int]  # ShardWriter.add


class Dense:
    """An ordinary tensor, the way round that the source stores it."""

    name = "dense"

    @staticmethod
    def planned(target: Target, dtype: torch.dtype) -> list[PlannedTensor]:
        """The tensors of a target, the first of them large, with the most elements that each can have."""
        return [PlannedTensor(target.name, dtype, target.elements, 2)]

    @staticmethod
    def expected_bytes(target: Target, dtype: torch.dtype, density: float) -> int:
        return target.elements * dtype.itemsize

    @staticmethod
    def write(target: Target, weight: Tensor, add: Add) -> tuple[dict, dict[str, Tensor]]:
        """Writes the first planned tensor of a weight [rows, cols]; returns its manifest record and the other tensors."""
        stored = weight.t() if target.transposed else weight
        nbytes = add(target.name, tuple(stored.shape), stored.split(1024))
        nonzeros = sum(int(torch.count_nonzero(piece)) for piece in weight.split(1024))
        return {
            "shape": list(stored.shape),
            "dtype": dtype_name(weight.dtype),
            "nonzeros": nonzeros,
            "bytes": nbytes,
        }, {}


class TiledCSLLayout:
    """Words, offsets and layout of formats/tiled_csl.py; words are streamed a few row blocks at a time."""

    name = "tiled-csl"

    @staticmethod
    def planned(target: Target, dtype: torch.dtype) -> list[PlannedTensor]:
        tiles = tiled_csl.num_tiles(target.rows, target.cols, 64)
        most = (target.elements + 31 * tiles, tiles + 1, 5)
        return [
            PlannedTensor(target.name + suffix, torch.int32, n)
            for suffix, n in zip(tiled_csl.SUFFIXES, most, strict=True)
        ]

    @staticmethod
    def expected_bytes(target: Target, dtype: torch.dtype, density: float) -> int:
        tiles = tiled_csl.num_tiles(target.rows, target.cols, tiled_csl.default_tile_rows(density))
        return int(4 * (target.elements * density + 15.5 * tiles)) + 4 * (tiles + 6)

    @staticmethod
    def write(target: Target, weight: Tensor, add: Add) -> tuple[dict, dict[str, Tensor]]:
        tile_rows = tiled_csl.default_tile_rows(tiled_csl.density(weight))
        sizes, stats = [], tiled_csl.PackStats()

        def stripes() -> Iterator[Tensor]:
            for words, counts, found in tiled_csl.pack_stripes(weight, tile_rows, target.name):
                sizes.append(counts.cpu())
                stats.add(found)
                yield words

        nbytes = add(target.name, (-1,), stripes())
        shape = (target.rows, target.cols, tile_rows, weight.dtype, target.transposed)
        side = (tiled_csl.offsets_from_sizes(torch.cat(sizes)), tiled_csl.layout_tensor(*shape))
        record = tiled_csl.record(*shape, stats) | {"bytes": nbytes}
        return record, {
            target.name + suffix: tensor for suffix, tensor in zip(tiled_csl.SUFFIXES[1:], side, strict=True)
        }


LAYOUTS = {layout.name: layout for layout in (Dense, TiledCSLLayout)}
