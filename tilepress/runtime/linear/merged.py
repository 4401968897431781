"""Several linear layers of one input as one product: q, k and v; a gate and what it gates.

    dense         one matrix of all rows, for one cuBLAS call
    Tiled-CSL     tiles are stored row block by row block: words follow words, offsets go on where the last ones ended
    tiled bitmap  the same
    INT8          runtime/int8.py merges what is quantized alike

The layers that were merged get views of the merged tensors in place of their own: nothing is held twice, and they serve as before. Where layers are
of different kinds, or rows that are no multiple of a tile's stand before others, each multiplies alone.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from tilepress.formats.sparse import module_of
from tilepress.runtime.linear.int8 import Int8Linear, MergedInt8Linear, mergeable
from tilepress.runtime.linear.sparse import SparseLinear, sparse_linear


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
    """Each by itself, the outputs side by side."""

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
    if len(kinds) > 1 or len({_place(linear) for linear in linears}) > 1:
        return _Separate(linears)
    first = linears[0]
    if type(first) is nn.Linear:
        return _Dense(_one_weight(linears), _biases(linears))
    if isinstance(first, SparseLinear):
        return _merge_sparse(linears) or _Separate(linears)
    if mergeable(linears) or _weight_only(linears):
        return _merge_int8(linears)
    return _Separate(linears)


def _place(linear: nn.Module) -> tuple:
    return linear.weight.device, linear.weight.dtype, getattr(linear, "in_features", None)


def _merge_sparse(linears: list[SparseLinear]) -> SparseLinear | None:
    packed = [linear.packed for linear in linears]
    form, first = module_of(packed[0]), packed[0]
    kinds = {(type(p), p.dtype, getattr(p, "group", None), p.weight_dtype, p.transposed) for p in packed}
    if len(kinds) > 1 or first.transposed or any(p.rows % form.TILE_ROWS for p in packed[:-1]):
        return None
    offsets, last = [first.offsets[:1]], 0
    for p in packed:
        offsets.append(p.offsets[1:] + last)
        last += p.words.numel() // 4
    if last >= 1 << 31:
        return None
    words = _one_weight(linears)
    rows = sum(p.rows for p in packed)
    merged = replace(first, words=words, offsets=torch.cat(offsets), rows=rows)
    if getattr(first, "scale", None) is not None:
        merged = replace(merged, scale=torch.cat([p.scale for p in packed]))
    bias = _biases(linears)
    made = sparse_linear(merged, bias is not None, None if bias is None else bias.dtype)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def _weight_only(linears: list[nn.Module]) -> bool:
    return all(type(x) is Int8Linear and x.scheme.activations == "none" and not x.transposed for x in linears)


def _merge_int8(linears: list[Int8Linear]) -> MergedInt8Linear:
    made = MergedInt8Linear({str(i): linear for i, linear in enumerate(linears)})
    for linear, part in zip(linears, made.weight.split(made.sizes), strict=True):
        linear.weight = part
    return made


def _biases(linears: list[nn.Module]) -> Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    dtype, device = next((x.bias.dtype, x.bias.device) for x in linears if x.bias is not None)
    return torch.cat(
        [torch.zeros(x.out_features, dtype=dtype, device=device) if x.bias is None else x.bias for x in linears]
    ).detach()


def _one_weight(linears: list[nn.Module]) -> Tensor:
    """Their weights one below the other; they become views of it. Nothing is copied where they lie so already."""
    parts = [linear.weight.detach() for linear in linears]
    first, ends = parts[0], [part.data_ptr() + part.nbytes for part in parts]
    follow = all(end == part.data_ptr() for end, part in zip(ends, parts[1:], strict=False))
    if follow and len({part.untyped_storage().data_ptr() for part in parts}) == 1:
        return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
    whole = torch.cat(parts)
    for linear, part in zip(linears, whole.split([len(part) for part in parts]), strict=True):
        if isinstance(linear.weight, nn.Parameter):
            linear.weight.data = part
        else:
            linear.weight = part
    return whole
