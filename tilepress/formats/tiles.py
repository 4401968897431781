"""Words shared by layouts of tiles: words of tile after tile, row block by row block, with the offsets where each tile
begins.

A part of whole tiles is therefore some ranges of words, and weights whose rows end where tiles do follow one another.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tilepress.formats import TilepressError
from tilepress.formats.layout import Add, Form, Layout, Span

_VERIFY = "`tilepress verify DIR` lists every finding"


def offsets_from_sizes(sizes: Tensor) -> Tensor:
    """Return int32 [tiles + 1], where each tile begins and the last one ends, from their sizes [tiles]; all in 16 bytes.

    Raises TilepressError where int32 does not reach (32 GiB).
    """
    ends = torch.cumsum(sizes.long(), 0)
    if ends.numel() and int(ends[-1]) > 2**31 - 1:
        raise TilepressError(f"a packed weight of {int(ends[-1]) * 16} bytes exceeds the format's 32 GiB")
    return torch.cat([ends.new_zeros(1), ends]).to(torch.int32)


class TiledLayout(Layout):
    """A layout of tiles. `module` packs and unpacks them, and its packed weights have `words` and `offsets`, in 16 bytes."""

    module: ModuleType

    def start(
        self, name: str, form: Form, weight: Tensor, record: dict, beside: dict[str, Tensor]
    ) -> tuple[Iterator, Callable, dict]:
        """Return stripes of words, what makes the packed weight without words from its offsets, and the recipe's record."""
        raise NotImplementedError

    def encode(self, name: str, form: Form, weight: Tensor, record: dict, beside: dict[str, Tensor], add: Add) -> dict:
        """Words are streamed a few row blocks at a time; all that is stored beside them is known with them."""
        stripes, packed_with, record = self.start(name, form, weight, record, beside)
        sizes, stats = [], self.module.PackStats()

        def words_of() -> Iterator[Tensor]:
            for words, counts, found in stripes:
                sizes.append(counts.cpu())
                stats.add(found)
                yield words

        nbytes = add(name, (-1,), words_of())
        packed = packed_with(offsets_from_sizes(torch.cat(sizes)))
        for suffix, part in packed.beside().items():
            nbytes += add(name + suffix, tuple(part.shape), [part])
        return self.module.record(packed, stats) | {"bytes": nbytes, "layout": self.name} | record

    def assemble(self, name: str, parts: dict[str, Tensor]) -> Any:
        return self.module.from_parts(*parts.values(), name=name)

    def examine(self, packed: Any) -> tuple[dict, list[str]]:
        problems, stats = self.module.check(packed)
        return self.module.record(packed, stats), problems

    def problem(self, packed: Any) -> str | None:
        return self.module.check_bounds(packed)

    def matrix(self, packed: Any) -> Tensor:
        return self.module.unpack(packed)

    def slice(
        self, packed: Any, read: Callable[..., Tensor], rows: Span, cols: Span, device: torch.device
    ) -> tuple[Any, tuple[Span, Span]]:
        """The part is that of all tiles that it touches: rows are one range of words, columns one in each row block.

        Raises TilepressError for offsets that do not rise from 0 to the end of the words.
        """
        offsets, words = read("weight_offsets").cpu().long(), packed.words.shape[0]
        if int(offsets[0]) != 0 or int(offsets[-1]) * 4 != words or bool((offsets[1:] < offsets[:-1]).any()):
            raise TilepressError(f"offsets do not rise from 0 to {words // 4}", _VERIFY)
        down, across = (
            (first // side, -(-end // side)) for (first, end), side in zip((rows, cols), self.tile, strict=True)
        )
        per_block = -(-packed.cols // self.tile[1])
        if across == (0, per_block):
            ranges = [(down[0] * per_block, down[1] * per_block)]
        else:
            ranges = [(block * per_block + across[0], block * per_block + across[1]) for block in range(*down)]
        sizes = torch.cat([offsets[first + 1 : end + 1] - offsets[first:end] for first, end in ranges])
        own = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        made = torch.empty(4 * int(own[-1]), dtype=torch.int32, device=device)
        at = 0
        for first, end in ranges:
            piece = read("weight", slice(4 * int(offsets[first]), 4 * int(offsets[end])))
            made[at : at + len(piece)] = piece
            at += len(piece)
        covered = tuple(
            (first * side, min(end * side, size))
            for (first, end), side, size in zip((down, across), self.tile, (packed.rows, packed.cols), strict=True)
        )
        height, width = (end - first for first, end in covered)
        part = replace(packed, words=made, offsets=own.int().to(device), rows=height, cols=width)
        if getattr(packed, "scale", None) is not None:
            scale = read("weight_scale", slice(*covered[0]))
            part = replace(part, scale=scale.to(device, copy=True).contiguous())
        return part, covered

    def concat(self, packed: list, words: Callable[[], Tensor]) -> Any | None:
        first = packed[0]
        kinds = {(type(p), p.dtype, getattr(p, "group", None), p.weight_dtype, p.transposed) for p in packed}
        if len(kinds) > 1 or first.transposed or any(p.rows % self.tile[0] for p in packed[:-1]):
            return None
        offsets, last = [first.offsets[:1]], 0
        for p in packed:
            offsets.append(p.offsets[1:] + last)
            last += p.words.numel() // 4
        if last >= 1 << 31:
            return None
        merged = replace(first, words=words(), offsets=torch.cat(offsets), rows=sum(p.rows for p in packed))
        if getattr(first, "scale", None) is not None:
            merged = replace(merged, scale=torch.cat([p.scale for p in packed]))
        return merged
