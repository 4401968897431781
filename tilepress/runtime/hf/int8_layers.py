"""Decoder layers whose norms and activations quantize for the INT8 GEMMs that follow.

In each, q, k and v are one GEMM, and so are a gate and what it gates; both norms and the activation quantize what they make, the second norm with the
residual added on the way. The attention's output is quantized by an op of its own, and the last sum is torch's. What layers are made of, the entry of
their family says (models/families.py); where our ops do not compute a norm or an activation, its module runs and its output is quantized after it.
"""

import torch
from torch import Tensor, nn

from tilepress.models.families import Family, Names, family_of, part
from tilepress.runtime.hf.subclasses import change_forward, is_changed, restore_forward
from tilepress.runtime.linear.between import Activation, Norm
from tilepress.runtime.linear.int8 import Int8Linear, MergedInt8Linear, mergeable, quantizes, without_gradient


class _Slice(nn.Module):
    """The stand-in where a projection was: takes its part of what the merged one gave."""

    def __init__(self, first: int, end: int):
        super().__init__()
        self.first, self.end = first, end

    def forward(self, merged: Tensor) -> Tensor:
        return merged[..., self.first : self.end]


class _Multiplied(Int8Linear):
    """A projection whose layer multiplies for it: gets its output and hands it on."""

    def forward(self, output: Tensor) -> Tensor:
        return output


def fuse(model: nn.Module) -> int:
    """Merge projections and fuse norms and activations with quantization where a decoder layer fits; return how many do. Dropout is left out."""
    count = 0
    for layer in list(model.modules()):
        family = family_of(layer, "layer")
        if family is None or not family.int8_layers or family.why_not(model.config.get_text_config()) is not None:
            continue
        if _stays(layer) and _fits(layer, family):
            _prepare(layer, family.names)
            layer.family = family
            change_forward(layer, forward, "Int8")
            count += 1
    return count


def take_apart(model: nn.Module) -> None:
    """Give decoder layers that `fuse` has changed their own projections and forward back; a layer's weights are copied."""
    for layer in list(model.modules()):
        if not (is_changed(layer) and "family" in vars(layer)):
            continue
        names, attention = layer.family.names, part(layer, layer.family.names.attention)
        if len(names.qkv) == 1:
            part(layer, names.merged_qkv).__class__ = Int8Linear
        else:
            for name, linear in attention.qkv_proj.split().items():
                setattr(attention, name, linear)
            del attention.qkv_proj
        if len(names.inner) > 1:
            parts = part(layer, names.merged_inner).split()
            owner, _, name = names.merged_inner.rpartition(".")
            delattr(layer.get_submodule(owner), name)
            for path in names.inner:
                owner, _, name = path.rpartition(".")
                setattr(layer.get_submodule(owner), name, parts[name])
        del layer.family
        restore_forward(layer)


def _stays(layer: nn.Module) -> bool:
    """Return whether a layer stays on one device: accelerate moves no tensors and does not call forward itself."""
    places = {tensor.device for tensor in (*layer.parameters(), *layer.buffers())}
    moved = torch.device("meta") in places or any(hasattr(m, "_hf_hook") for m in layer.modules())
    return len(places) == 1 and not moved


def _fits(layer: nn.Module, family: Family) -> bool:
    """Return whether all linear layers multiply codes, those of one input as one, and norms and activation are what the
    entry says.
    """
    names, attention = family.names, part(layer, family.names.attention)
    groups = [[getattr(attention, name) for name in names.qkv], [part(layer, path) for path in names.inner]]
    alone = [getattr(attention, names.out), part(layer, names.outer)]
    alone += [linear for group in groups if len(group) == 1 for linear in group]
    activation = Activation.of(layer, family)
    return (
        all(mergeable(group) for group in groups if len(group) > 1)
        and all(map(quantizes, alone))
        and all(Norm(part(layer, path), family.norm).fits() for path in (names.input_norm, names.mlp_norm))
        and (activation.gated or activation.op_name is not None)
    )


def _prepare(layer: nn.Module, names: Names) -> None:
    """Merges what has one input; attention, which reads its input only through q, k and v, gets their product in place of it."""
    attention = part(layer, names.attention)
    if len(names.qkv) == 1:
        part(layer, names.merged_qkv).__class__ = _Multiplied
    else:
        attention.qkv_proj = MergedInt8Linear({name: getattr(attention, name) for name in names.qkv})
        first = 0
        for name, size in zip(attention.qkv_proj.names, attention.qkv_proj.sizes, strict=True):
            setattr(attention, name, _Slice(first, first + size))
            first += size
    if len(names.inner) > 1:
        inner = {path.rpartition(".")[2]: part(layer, path) for path in names.inner}
        layer.set_submodule(names.merged_inner, MergedInt8Linear(inner))
        for path in names.inner:
            owner, _, name = path.rpartition(".")
            delattr(layer.get_submodule(owner), name)


def forward(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
    """hidden_states [batch, positions, hidden] -> the same shape, as the layer's own forward gives it."""
    family, dtype = self.family, hidden_states.dtype
    names = family.names
    qkv, inner, outer = (part(self, path) for path in (names.merged_qkv, names.merged_inner, names.outer))
    *codes, _ = Norm(part(self, names.input_norm), family.norm).codes(hidden_states, None, qkv)
    kwargs |= dict(zip(family.positional[: len(args)], args, strict=True))
    out, _ = part(self, names.attention)(without_gradient(qkv.multiply(*codes, dtype), hidden_states), **kwargs)
    if names.after_attention is not None:
        out = part(self, names.after_attention)(out)
    *codes, residual = Norm(part(self, names.mlp_norm), family.norm).codes(out, hidden_states, inner)
    out = Activation.of(self, family).into(outer, inner.multiply(*codes, dtype))
    out = without_gradient(out, residual)
    return residual + (out if names.after_mlp is None else part(self, names.after_mlp)(out))
