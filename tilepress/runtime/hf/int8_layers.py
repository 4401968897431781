"""Decoder layers whose norms and activations quantize for the INT8 GEMMs that follow.

In each, q, k and v are one GEMM, and so are a gate and what it gates; both norms and the activation quantize what they make, the second norm with the residual
added on the way. The attention's output is quantized by an op of its own, and the last sum is torch's.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from tilepress.runtime.hf.subclasses import change_forward
from tilepress.runtime.linear.int8 import Int8Linear, MergedInt8Linear, mergeable, quantizes

ops = torch.ops.tilepress


class _Slice(nn.Module):
    """Where a projection was: takes its part of what the merged one gave."""

    def __init__(self, first: int, end: int):
        super().__init__()
        self.first, self.end = first, end

    def forward(self, merged: Tensor) -> Tensor:
        return merged[..., self.first : self.end]


class _Multiplied(Int8Linear):
    """A projection whose layer multiplies for it: gets its output and hands it on."""

    def forward(self, output: Tensor) -> Tensor:
        return output


def _merge_attention(attention: nn.Module) -> None:
    attention.qkv_proj = MergedInt8Linear({name: getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj")})
    first = 0
    for name, size in zip(attention.qkv_proj.names, attention.qkv_proj.sizes, strict=True):
        setattr(attention, name, _Slice(first, first + size))
        first += size


@dataclass(frozen=True)
class _Family:
    """Decoder layers of one kind: those that `fits`, after `prepare`, run `forward` in place of their own."""

    fits: Callable[[nn.Module], bool]
    prepare: Callable[[nn.Module], None]
    forward: Callable[..., Tensor]


def _llama_fits(layer: nn.Module) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    groups = [[attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]]
    return (
        isinstance(mlp.act_fn, nn.SiLU | type(ACT2FN["silu"]))
        and all(map(mergeable, groups))
        and all(mergeable([linear]) for linear in (attention.o_proj, mlp.down_proj))
    )


def _prepare_llama(layer: nn.Module) -> None:
    _merge_attention(layer.self_attn)
    mlp = layer.mlp
    mlp.gate_up_proj = MergedInt8Linear({name: getattr(mlp, name) for name in ("gate_proj", "up_proj")})
    del mlp.gate_proj, mlp.up_proj


def _llama(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
    qkv, gate_up, down = self.self_attn.qkv_proj, self.mlp.gate_up_proj, self.mlp.down_proj
    norm, dtype = self.input_layernorm, hidden_states.dtype
    codes = ops.rms_norm_int8(hidden_states, norm.weight, norm.variance_epsilon, qkv.mode, *qkv.static)
    # Attention reads its input only through q, k and v, which are slices of this product.
    out, _ = self.self_attn(qkv.multiply(*codes, dtype), *args, **kwargs)
    norm = self.post_attention_layernorm
    *codes, hidden_states = ops.add_rms_norm_int8(
        out, hidden_states, norm.weight, norm.variance_epsilon, gate_up.mode, *gate_up.static
    )
    codes = ops.silu_mul_int8(gate_up.multiply(*codes, dtype), down.mode, *down.static)
    return hidden_states + down.multiply(*codes, dtype)


def _activation(module: Callable) -> str | None:
    """What ops.activation_int8 calls a model's activation, if it knows it."""
    names = {"relu": "relu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_new"}
    return next((ours for theirs, ours in names.items() if type(module) is type(ACT2FN[theirs])), None)


def _is_plain(norm: nn.Module) -> bool:
    return type(norm) is nn.LayerNorm and norm.weight is not None and norm.bias is not None


def _opt_fits(layer: nn.Module) -> bool:
    attention = layer.self_attn
    return (
        layer.do_layer_norm_before
        and all(map(_is_plain, (layer.self_attn_layer_norm, layer.final_layer_norm)))
        and _activation(layer.activation_fn) is not None
        and mergeable([attention.q_proj, attention.k_proj, attention.v_proj])
        and all(map(quantizes, (attention.out_proj, layer.fc1, layer.fc2)))
    )


def _prepare_opt(layer: nn.Module) -> None:
    _merge_attention(layer.self_attn)


def _opt(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
    qkv, inner, outer = self.self_attn.qkv_proj, self.fc1, self.fc2
    norm, dtype = self.self_attn_layer_norm, hidden_states.dtype
    codes = ops.layer_norm_int8(hidden_states, norm.weight, norm.bias, norm.eps, qkv.mode, *qkv.static)
    if args:
        kwargs["attention_mask"] = args[0]
    out, _ = self.self_attn(qkv.multiply(*codes, dtype), **kwargs)
    return _finish(self.final_layer_norm, inner, _activation(self.activation_fn), outer, out, hidden_states)


def _finish(norm, inner, activation: str, outer, out: Tensor, residual: Tensor) -> Tensor:
    """From the attention's output to the layer's."""
    dtype = residual.dtype
    *codes, residual = ops.add_layer_norm_int8(
        out, residual, norm.weight, norm.bias, norm.eps, inner.mode, *inner.static
    )
    codes = ops.activation_int8(inner.multiply(*codes, dtype), activation, outer.mode, *outer.static)
    return residual + outer.multiply(*codes, dtype)


def _gpt2_fits(layer: nn.Module) -> bool:
    return (
        all(map(_is_plain, (layer.ln_1, layer.ln_2)))
        and not hasattr(layer, "crossattention")
        and _activation(layer.mlp.act) is not None
        and all(map(quantizes, (layer.attn.c_attn, layer.attn.c_proj, layer.mlp.c_fc, layer.mlp.c_proj)))
    )


def _prepare_gpt2(layer: nn.Module) -> None:
    layer.attn.c_attn.__class__ = _Multiplied


def _gpt2(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
    qkv, norm = self.attn.c_attn, self.ln_1
    codes = ops.layer_norm_int8(hidden_states, norm.weight, norm.bias, norm.eps, qkv.mode, *qkv.static)
    out, _ = self.attn(qkv.multiply(*codes, hidden_states.dtype), *args, **kwargs)
    return _finish(self.ln_2, self.mlp.c_fc, _activation(self.mlp.act), self.mlp.c_proj, out, hidden_states)


_LLAMA = _Family(_llama_fits, _prepare_llama, _llama)
_FAMILIES = {  # by the names of their classes
    **dict.fromkeys(("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"), _LLAMA),
    "OPTDecoderLayer": _Family(_opt_fits, _prepare_opt, _opt),
    "GPT2Block": _Family(_gpt2_fits, _prepare_gpt2, _gpt2),
}


def fuse(model: nn.Module) -> int:
    """Merges projections and fuses norms and activations with quantization where a decoder layer fits; returns how many do. Dropout is left out."""
    count = 0
    for layer in list(model.modules()):
        family = _FAMILIES.get(type(layer).__name__)
        if family is not None and _stays(layer) and family.fits(layer):
            family.prepare(layer)
            change_forward(layer, family.forward, "Int8")
            count += 1
    return count


def _stays(layer: nn.Module) -> bool:
    """On one device, and not where accelerate moves tensors and calls forward itself."""
    places = {tensor.device for tensor in (*layer.parameters(), *layer.buffers())}
    moved = torch.device("meta") in places or any(hasattr(m, "_hf_hook") for m in layer.modules())
    return len(places) == 1 and not moved
