"""Several linear layers of one input as one product: q, k and v; a gate and what it gates.

    dense   one matrix of all rows, for one cuBLAS call
    packed  what the layout's own module makes of them (`PackedLinear.merged`)

The layers that were merged get views of the merged tensors in place of their own: nothing is held twice, and they serve as before. Where layers are
of different kinds, or rows that are no multiple of a tile's stand before others, each multiplies alone.
"""

import torch
from torch import Tensor, nn

from tilepress.runtime.linear.packed import PackedLinear, biases, one_weight


class _Dense(nn.Module):
    """x W^T + bias."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight, requires_grad=False), None
        if bias is not None:
            self.bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class _Separate(nn.Module):
    """Linear layers that run one after the other, their outputs side by side."""

    def __init__(self, linears: list[nn.Module]):
        super().__init__()
        self.linears = nn.ModuleList(linears)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x) for linear in self.linears], -1)


def merge(linears: list[nn.Module]) -> nn.Module:
    """A module that gives their outputs side by side, [..., in] -> [..., sum of out]; the layers share its memory."""
    if len(linears) == 1:
        return linears[0]
    kinds = {type(linear) for linear in linears}
    known = kinds == {nn.Linear} or isinstance(linears[0], PackedLinear)
    if not known or len(kinds) > 1 or len({_place(linear) for linear in linears}) > 1:
        return _Separate(linears)
    first = linears[0]
    if kinds == {nn.Linear}:
        return _Dense(one_weight(linears), biases(linears))
    made = first.merged(linears[1:])
    return _Separate(linears) if made is None else made


def _place(linear: nn.Module) -> tuple:
    return linear.weight.device, linear.weight.dtype, getattr(linear, "in_features", None)
