"""The layouts of sparse weights by name: modules with the same functions on what they pack (`pack`, `unpack`, `check`, `record`, …)."""

from types import ModuleType

from tilepress.formats import tiled_bitmap, tiled_csl
from tilepress.formats.tiled_bitmap import TiledBitmap
from tilepress.formats.tiled_csl import TiledCSL

Packed = TiledCSL | TiledBitmap
MODULES: dict[str, ModuleType] = {"tiled-csl": tiled_csl, "tiled-bitmap": tiled_bitmap}
SIDE_SUFFIXES = (
    "_offsets",
    "_layout",
    "_bitmap",
    "_scale",
)  # of the stored tensors beside the words, in the order that files have


def module_of(packed: Packed) -> ModuleType:
    return tiled_csl if isinstance(packed, TiledCSL) else tiled_bitmap


def part_names(name: str, layout: str, present) -> tuple[str, ...] | None:
    """The stored tensors of weight `name` in a sparse layout, words first, if all are `present`."""
    module = MODULES[layout]
    names = tuple(name + suffix for suffix in module.SUFFIXES)
    optional = tuple(name + suffix for suffix in module.OPTIONAL_SUFFIXES if name + suffix in present)
    return names + optional if all(part in present for part in names) else None
