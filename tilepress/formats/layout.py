"""The protocol of layouts, ways to store a weight, and their registry by name.

A layout is one file: it packs a matrix into stored tensors, checks and unpacks them, and says what may be cut off or put
together without packing again. Commands ask the layout of a weight and never its name. Those that this package has are
listed below; a package of its own adds layouts by entry points in the group `tilepress.layouts`, each a module that calls
`register`. What runs a packed weight is registered on the side of the runtime (runtime/linear/packed.py).
"""

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import Tensor

from tilepress.formats import TilepressError

Add = Callable[[str, tuple[int, ...], Iterable[Tensor]], int]  # ShardWriter.add
Span = tuple[int, int]  # first and end
_BUILT_IN = ("tiled-csl", "tiled-bitmap", "int8", "int8-packed", "dense")  # each in the module of its name


@dataclass(frozen=True)
class Form:
    """The matrix that a weight stands for: [rows, cols] = [out_features, in_features] values of a dtype.

    `transposed`: without us it is stored [cols, rows], as Conv1D does.
    """

    rows: int
    cols: int
    dtype: torch.dtype
    transposed: bool = False

    @property
    def elements(self) -> int:
        return self.rows * self.cols


class Layout:
    """One way to store a weight. `packed` is the layout's own object, made by `assemble` of the stored tensors."""

    name: str  # in manifests, and what `--format` and `--to` take
    title: str  # in a model card: "12 as Tiled-CSL"
    suffixes: tuple[str, ...] = ("",)  # the tensors that store weight NAME: NAME + suffix
    optional_suffixes: tuple[str, ...] = ()
    described_by: str | None = None  # suffix of the small tensor without which `form` does not know
    packed = True  # the model's own module does not run it
    sparse = True  # zeros are not stored
    offered = True  # `--format` and `--to` take its name
    matrix_of_codes = False  # it is a matrix of int8 codes
    keeps_codes = False  # it can hold int8 codes with their scales
    densities: Span | None = None  # shares of non-zeros, above the first up to the second, where `auto` takes it
    tile: tuple[int, int] | None = None  # rows and columns that are packed together

    def applies(self, config: dict) -> bool:
        """Return whether a checkpoint with this config.json may have weights of this layout."""
        return True

    def weight_name(self, name: str) -> str:
        """Return the name of the weight whose first tensor is `name`."""
        return name

    def parts(self, name: str, tensors: Mapping[str, Any]) -> tuple[str, ...] | None:
        """Return the stored tensors of the weight whose first one is `name`, that one first, or None if they are not those of this layout."""
        wanted = tuple(name + suffix for suffix in self.suffixes)
        optional = tuple(name + suffix for suffix in self.optional_suffixes if name + suffix in tensors)
        return wanted + optional if all(part in tensors for part in wanted) else None

    def holds_codes(self, name: str, parts: Iterable[str]) -> bool:
        """Return whether the values of a weight with these stored tensors are int8 codes with a scale."""
        return False

    def of_codes(self, per: str) -> "Layout | None":
        """Return the layout that stores int8 codes with scales per `channel` or `tensor`, or None if there is none."""
        return None

    def for_card(self, card: str) -> "Layout":
        """Return the layout as it serves one kind of card best, for layouts that have such a choice."""
        return self

    def stored_names(self, name: str) -> list[str]:
        """Return the names of the tensors that `encode` stores."""
        return [name + suffix for suffix in self.suffixes]

    def expected_bytes(self, form: Form, density: float) -> int:
        """Return about how many bytes a weight takes, of whose elements a share of `density` is not zero."""
        raise NotImplementedError

    def encode(self, name: str, form: Form, weight: Tensor, record: dict, beside: dict[str, Tensor], add: Add) -> dict:
        """Store a weight [rows, cols] by calling `add` for each of its tensors, and return its record of the manifest.

        `record` is what the recipe says of it, `beside` what it found of its inputs, by stored name. A layout that `keeps_codes`
        takes int8 codes, with their scale [rows] in `beside`.
        """
        raise NotImplementedError

    def fits(self, packed: Any, density: float) -> bool:
        """Return whether a packed weight of that share of non-zeros is stored as this layout stores it; its tensors may be empty."""
        return True

    def assemble(self, name: str, parts: dict[str, Tensor]) -> Any:
        """Return the packed weight of stored tensors by name; all but the one of `described_by` may be on the meta device.

        Raises TilepressError where their shapes and dtypes do not agree.
        """
        raise NotImplementedError

    def form(self, packed: Any) -> Form:
        """Return what a packed weight stands for, without reading more than `described_by`."""
        return Form(packed.rows, packed.cols, packed.weight_dtype, packed.transposed)

    def examine(self, packed: Any) -> tuple[dict, list[str]]:
        """Return what the manifest records of a packed weight, counted anew, and what is wrong with it."""
        raise NotImplementedError

    def problem(self, packed: Any) -> str | None:
        """Return what would make running or unpacking it unsafe, or None."""
        return None

    def matrix(self, packed: Any) -> Tensor:
        """Return the dense weight [rows, cols] on the device of its tensors."""
        raise NotImplementedError

    def codes(self, packed: Any) -> tuple[Tensor, Tensor]:
        """Return int8 codes [rows, cols] and their scale [rows, 1] or [1] of a weight that holds codes."""
        raise NotImplementedError

    def slice(
        self, packed: Any, read: Callable[..., Tensor], rows: Span, cols: Span, device: torch.device
    ) -> tuple[Any, tuple[Span, Span]]:
        """Return a part as a packed weight on a device, and the rows and columns that it covers, at least those asked for.

        The tensors of `packed` may be empty: `read(part, *ranges)` reads a range of one by the name that a layer's module
        gives it, "weight" + its suffix. Nothing is packed again.
        """
        raise NotImplementedError

    def concat(self, packed: list, words: Callable[[], Tensor]) -> Any | None:
        """Return packed weights of one input as one, the rows of the later below, or None where tiles do not meet.

        `words()` gives their first tensors one behind the other.
        """
        return None


_registered: dict[str, Layout] = {}


def register(layout: Layout) -> None:
    """Make a layout known by its name."""
    _registered[layout.name] = layout


@functools.cache
def _load_all() -> None:
    for name in _BUILT_IN:
        importlib.import_module(f"tilepress.formats.{name.replace('-', '_')}")
    for entry in entry_points(group="tilepress.layouts"):
        entry.load()


def layouts() -> dict[str, Layout]:
    """Return every layout by name, those of this package first."""
    _load_all()
    return {name: _registered[name] for name in (*_BUILT_IN, *_registered)}


def layout_named(name: str) -> Layout:
    """Return a layout by its name. Raises TilepressError for one that is not registered."""
    _load_all()
    try:
        return _registered[name]
    except KeyError:
        raise TilepressError(
            f"layout {name!r} is unknown",
            f"upgrade tilepress, or import what registers it; known: {', '.join(layouts())}",
        ) from None


def layout_of(packed: Any) -> Layout:
    """Return the layout of a packed weight, which names it."""
    return layout_named(packed.layout_name)


def side_suffixes() -> list[str]:
    """Return the suffixes of tensors that stand beside others, in the order that files have."""
    found = (s for layout in layouts().values() for s in (*layout.suffixes[1:], *layout.optional_suffixes))
    return list(dict.fromkeys(found))
