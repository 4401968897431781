"""The compressed form of a weight, and the layout that a command was asked to store it in."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tilepress.formats.layout import Add, Form, Layout, layout_named, layouts
from tilepress.formats.stripes import nonzeros


@dataclass
class Compressed:
    """The result of a recipe for one weight: its values [rows, cols], what the manifest says of it, small tensors
    stored beside it by name.
    """

    weight: Tensor
    record: dict
    beside: dict[str, Tensor] = field(default_factory=dict)
    layout: Layout | None = None  # of its own, in place of the recipe's


class AutoLayout(Layout):
    """Choose for each weight the layout that serves it best, by its share of zeros; for int8 codes the sparse one that
    holds them.

    Where the layouts cross is measured: docs/kernels/tiled_bitmap_spmm.md.
    """

    name = "auto"
    keeps_codes = True

    def __init__(self, scales: str | None = None, card: str = "any"):
        self.scales, self.card = scales, card  # of int8 codes: channel | tensor

    def of_codes(self, per: str) -> Layout:
        return AutoLayout(per, self.card)

    def for_card(self, card: str) -> Layout:
        return AutoLayout(self.scales, card)

    def stored_names(self, name: str) -> list[str]:
        return self._of(0.5).stored_names(name)

    def expected_bytes(self, form: Form, density: float) -> int:
        return self._of(density).expected_bytes(form, density)

    def encode(self, name: str, form: Form, weight: Tensor, record: dict, beside: dict[str, Tensor], add: Add) -> dict:
        density = 1.0 if self.scales else nonzeros(weight) / form.elements
        return self._of(density).encode(name, form, weight, record, beside, add)

    def fits(self, packed: Any, density: float) -> bool:
        return self._of(density).fits(packed, density)

    def _of(self, density: float) -> Layout:
        known = [layout.for_card(self.card) for layout in layouts().values()]
        if self.scales:  # whatever the values are
            return next(made for layout in known if (made := layout.of_codes(self.scales)) is not None)
        ranges = ((layout, layout.densities) for layout in known if layout.densities)
        return next(layout for layout, (low, high) in ranges if low < density <= high or density == low == 0)


def format_names() -> tuple[str, ...]:
    """Return what `--format` and `--to` take."""
    return ("auto", *(name for name, layout in layouts().items() if layout.offered))


def layout_for(name: str, scales: str | None = None, card: str = "any") -> Layout | None:
    """Return a layout by its name in `format_names`, for a card of PAIRS_BELOW; of int8 values with `scales` per channel or tensor, None if it has
    none."""
    layout = (AutoLayout() if name == "auto" else layout_named(name)).for_card(card)
    return layout if scales is None else layout.of_codes(scales)
