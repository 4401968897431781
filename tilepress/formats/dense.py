"""An ordinary tensor, as the model without us stores it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilepress.formats import dtype_name
from tilepress.formats.layout import Add, Form, Layout, Span, register
from tilepress.formats.stripes import nonzeros

_ROWS = 1024  # of a weight written together


@dataclass(frozen=True)
class Dense:
    """A tensor of any shape."""

    tensor: Tensor
    layout_name = "dense"


class DenseLayout(Layout):
    """One tensor, the way round that the source stores it."""

    name, title = "dense", "ordinary tensors"
    packed = sparse = False
    densities = (0.85, 1.0)  # from there a bitmap saves less than 7 % of the bytes, and time for single tokens only

    def expected_bytes(self, form: Form, density: float) -> int:
        return form.elements * form.dtype.itemsize

    def encode(self, name: str, form: Form, weight: Tensor, record: dict, beside: dict[str, Tensor], add: Add) -> dict:
        stored = weight.t() if form.transposed else weight
        nbytes = add(name, tuple(stored.shape), stored.split(_ROWS))
        shape = {"shape": list(stored.shape), "dtype": dtype_name(weight.dtype)}
        return shape | {"nonzeros": nonzeros(weight), "bytes": nbytes, "layout": self.name} | record

    def assemble(self, name: str, parts: dict[str, Tensor]) -> Dense:
        return Dense(*parts.values())

    def form(self, packed: Dense) -> Form:
        return Form(*packed.tensor.shape, packed.tensor.dtype)

    def examine(self, packed: Dense) -> tuple[dict, list[str]]:
        tensor = packed.tensor
        pieces = tensor.reshape(-1).split(1 << 22)
        damaged = tensor.is_floating_point() and not all(bool(torch.isfinite(p.float()).all()) for p in pieces)
        found = {"shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype)}
        return found | {"nonzeros": nonzeros(tensor)}, ["non-finite values"] if damaged else []

    def matrix(self, packed: Dense) -> Tensor:
        return packed.tensor

    def slice(
        self, packed: Dense, read: Callable[..., Tensor], rows: Span, cols: Span, device: torch.device
    ) -> tuple[Dense, tuple[Span, Span]]:
        return Dense(read("weight", slice(*rows), slice(*cols)).to(device, copy=True).contiguous()), (rows, cols)


register(DenseLayout())
