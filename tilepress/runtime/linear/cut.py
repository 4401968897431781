"""A part of a linear layer as a layer of its own: a range of its rows (outputs) and columns (inputs).

Numbers are taken as they are; nothing is packed or quantized again. The layer may be in memory, in files that are read a
range at a time, or among tensors that another loader hands over.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tilepress.formats import TilepressError
from tilepress.formats.int8 import Int8Scheme
from tilepress.formats.layout import Span, layout_of
from tilepress.runtime.linear.packed import PackedLinear, packed_linear

VERIFY = "`tilepress verify DIR` lists every finding"


@dataclass(frozen=True)
class Whole:
    """A linear layer of which ranges are read: `read("weight_scale", slice(0, 64))`; without ranges a whole tensor."""

    name: str
    shape: tuple[int, int]  # features out, in
    bias: bool
    read: Callable[..., Tensor]
    packed: Any = None  # as its layout puts it together; the tensors may be empty. None: dense
    scheme: Int8Scheme | None = None  # of INT8

    @classmethod
    def of(cls, name: str, linear: nn.Module) -> "Whole":
        """Return a layer that is in memory."""

        def read(part: str, *index: slice) -> Tensor:
            return getattr(linear, part)[index]

        packed = linear.packed if isinstance(linear, PackedLinear) else None
        shape = linear.out_features, linear.in_features
        return cls(name, shape, linear.bias is not None, read, packed, getattr(linear, "scheme", None))


class Trimmed(nn.Module):
    """A packed layer whose tiles cover a part that does not begin and end where tiles do: inputs beside it are zeros, outputs beside it left out."""

    def __init__(self, linear: PackedLinear, rows: tuple[int, int], cols: tuple[int, int]):
        """`rows` and `cols`: first and end of the part among the layer's features."""
        super().__init__()
        self.linears, self.rows = nn.ModuleList([linear]), rows
        self.beside = cols[0], linear.in_features - cols[1]
        self.in_features, self.out_features = cols[1] - cols[0], rows[1] - rows[0]

    @property
    def weight(self) -> Tensor:
        return self.linears[0].weight

    def forward(self, x: Tensor) -> Tensor:
        x = pad(x, self.beside) if any(self.beside) else x
        return self.linears[0](x)[..., slice(*self.rows)]


@dataclass(frozen=True)
class Piece:
    """A layer on a device that has at least the part that was asked for: a packed weight is cut where its tiles are."""

    linear: nn.Module  # nn.Linear or a PackedLinear
    rows: Span  # the part, counted within `linear`
    cols: Span

    @classmethod
    def of(
        cls,
        whole: Whole,
        rows: Span | None,
        cols: Span | None,
        dtype: torch.dtype,
        device: torch.device,
        bias: bool = True,
    ) -> "Piece":
        """Read rows and columns (None: all) of a layer for a model of some dtype; without `bias` it gets none.

        Raises TilepressError, with the layer's name, for stored tensors that cannot be cut safely.
        """
        asked = rows or (0, whole.shape[0]), cols or (0, whole.shape[1])
        has_bias, covered = whole.bias and bias, asked
        if whole.packed is None:
            height, width = (end - first for first, end in asked)
            made = nn.Linear(width, height, bias=has_bias, device="meta")
            weight = whole.read("weight", *(slice(*span) for span in asked))
            made.weight = nn.Parameter(_own(weight, dtype, device), requires_grad=False)
        else:
            try:
                packed, covered = layout_of(whole.packed).slice(whole.packed, whole.read, *asked, device)
            except TilepressError as error:
                raise TilepressError(f"{whole.name}: {error.message}", error.hint) from error
            made = packed_linear(packed, dtype if has_bias else None, dtype, whole.scheme)
            if (problem := made.check_bounds()) is not None:
                raise TilepressError(f"{whole.name}: {problem}", VERIFY)
        if has_bias:
            values = _own(whole.read("bias", slice(*covered[0])), dtype, device)
            made.bias = nn.Parameter(values, requires_grad=False)
        inside = [(first - top, end - top) for (first, end), (top, _) in zip(asked, covered, strict=True)]
        return cls(made, *inside)

    def trimmed(self) -> nn.Module:
        """Return a layer of exactly the part."""
        linear = self.linear
        exact = self.rows == (0, linear.out_features) and self.cols == (0, linear.in_features)
        return linear if exact else Trimmed(linear, self.rows, self.cols)


def cut(whole: Whole, rows: Span | None, cols: Span | None, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return exactly those rows and columns (None: all) of a layer; arguments and errors as those of `Piece.of`."""
    return Piece.of(whole, rows, cols, dtype, device).trimmed()


def _own(values: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return values in memory of their own."""
    return values.to(device, dtype, copy=True).contiguous()
