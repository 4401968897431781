"""INT8 linear layers, and decoder layers in which they share a quantized input.

`Int8Linear` takes the place of any linear layer. `fuse` turns decoder layers of the Llama kind into ones in which q, k and v are one GEMM,
gate and up another, both norms quantize what they make and SiLU-mul quantizes for the last GEMM: three fused ops and four GEMMs, of
which o's quantizes its input, the attention's output, by itself.
"""

from functools import cache

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from tilepress.formats.int8 import Int8Scheme
from tilepress.kernels import fused_quant, w8a8_gemm, w8a16_gemm

ops = torch.ops.tilepress
_TENSORS = ("weight", "weight_scale", "input_scale", "input_zero_point", "bias")


class Int8Linear(nn.Module):
    """y = x W^T + bias with an int8 weight and, unless the scheme is weight-only, an input quantized to int8.

    Buffers as on disk: `weight` int8 [out, in] ([1, in, out] in place of a Conv1D), `weight_scale` [out, 1] or [1], and for static
    schemes `input_scale` [1] and `input_zero_point` int8 [1].
    """

    def __init__(
        self,
        out_features: int,
        in_features: int,
        scheme: Int8Scheme,
        dtype: torch.dtype,
        bias: bool,
        transposed: bool = False,
    ):
        """Empty, on the meta device: a loader fills it."""
        super().__init__()
        self.out_features, self.in_features = out_features, in_features
        self.scheme, self.transposed = scheme, transposed

        def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        shape = (1, in_features, out_features) if transposed else (out_features, in_features)
        self.register_buffer("weight", empty(*shape, dtype=torch.int8))
        scales = (out_features, 1) if scheme.weights == "channel" else (1,)
        self.register_buffer("weight_scale", empty(*scales))
        if scheme.static:
            self.register_buffer("input_scale", empty(1))
        if scheme.asymmetric:
            self.register_buffer("input_zero_point", empty(1, dtype=torch.int8))
        self.bias = nn.Parameter(empty(out_features), requires_grad=False) if bias else None

    @property
    def mode(self) -> int:
        return fused_quant.PER_TENSOR if self.scheme.activations == "tensor-dynamic" else fused_quant.PER_TOKEN

    @property
    def static(self) -> tuple[Tensor | None, Tensor | None]:
        """Input scale and zero point; None where they are found at run time, or 0."""
        return getattr(self, "input_scale", None), getattr(self, "input_zero_point", None)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        if self.scheme.activations == "none":
            return ops.w8a16_gemm(x, self.matrix, self.weight_scale, self.bias)
        scale, zero_point = self.static
        if scale is not None:
            return self.multiply(ops.quantize_int8_static(x, scale, zero_point), scale, x.dtype)
        return self.multiply(*ops.quantize_int8(x, self.mode), x.dtype)

    def multiply(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """codes int8 [..., in_features] with their scale -> [..., out_features] of `dtype`."""
        return ops.w8a8_gemm(codes, scale, self.static[1], self.matrix, self.weight_scale, self.bias, dtype)

    @property
    def matrix(self) -> Tensor:
        """[out, in], whatever way round it is stored."""
        return self.weight[0].t() if self.transposed else self.weight

    @property
    def path(self) -> str:
        """The implementation that serves this layer where it is now."""
        device, dtype = self.weight.device, self.weight_scale.dtype
        if self.scheme.activations == "none":
            return w8a16_gemm.path(device, dtype, dtype, self.in_features)
        return w8a8_gemm.path(device, dtype, dtype, self.out_features, self.in_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, {self.scheme}"


class MergedInt8Linear(Int8Linear):
    """Several linear layers of one input as one GEMM, their outputs side by side. A state dict has them under their own names."""

    def __init__(self, linears: dict[str, Int8Linear]):
        parts, first = list(linears.values()), next(iter(linears.values()))
        scheme = Int8Scheme("channel", first.scheme.activations)  # a scale a tensor becomes one a row
        bias = any(part.bias is not None for part in parts)
        rows, dtype = sum(part.out_features for part in parts), first.weight_scale.dtype
        super().__init__(rows, first.in_features, scheme, dtype, bias)
        self.names, self.sizes = list(linears), [part.out_features for part in parts]
        self.with_bias = [part.bias is not None for part in parts]
        self.per_tensor = first.scheme.weights == "tensor"
        self.weight = torch.cat([part.weight for part in parts])
        self.weight_scale = torch.cat([part.weight_scale.expand(part.out_features, 1) for part in parts])
        if scheme.static:
            self.input_scale = first.input_scale
        if scheme.asymmetric:
            self.input_zero_point = first.input_zero_point
        if bias:
            zeros = first.weight_scale.new_zeros
            biases = [zeros(part.out_features) if part.bias is None else part.bias for part in parts]
            self.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
        self.register_state_dict_post_hook(_split)
        self.register_load_state_dict_pre_hook(_merge)


def _outer(prefix: str) -> str:
    """`a.b.qkv_proj.` -> `a.b.`"""
    return prefix[: prefix[:-1].rfind(".") + 1]


def _merge(module: MergedInt8Linear, state: dict, prefix: str, *_) -> None:
    """Puts the tensors of a state dict together as `_split` takes them apart."""
    names = [f"{_outer(prefix)}{name}." for name in module.names]
    for part in _TENSORS:
        if part == "bias" and module.bias is not None:
            zeros = [module.bias.new_zeros(size) for size in module.sizes]
            found = [state.pop(name + part, zero) for name, zero in zip(names, zeros, strict=True)]
        else:
            found = [state.pop(name + part) for name in names if name + part in state]
        if len(found) == len(names):
            if part == "weight_scale":
                found = [scale.expand(size, 1) for scale, size in zip(found, module.sizes, strict=True)]
            state[prefix + part] = found[0] if part.startswith("input") else torch.cat(found)


def _split(module: MergedInt8Linear, state: dict, prefix: str, _) -> None:
    """Takes a merged layer's tensors apart again, as copies: savers take views of one tensor for one tensor."""
    outer = _outer(prefix)
    tensors = {name: state.pop(prefix + name) for name in _TENSORS if prefix + name in state}
    first = 0
    for name, size, with_bias in zip(module.names, module.sizes, module.with_bias, strict=True):
        rows = slice(first, first + size)
        first += size
        for part, tensor in tensors.items():
            if part == "bias" and not with_bias:
                continue
            shared = part.startswith("input")
            own = tensor if shared else tensor[rows]
            if part == "weight_scale" and module.per_tensor:
                own = own[0]
            state[f"{outer}{name}.{part}"] = own.clone()


def mergeable(linears: list[nn.Module]) -> bool:
    """Whether linear layers can be one GEMM: all W8A8, of one scheme and one input scale."""
    if not all(type(linear) is Int8Linear and not linear.transposed for linear in linears):
        return False
    if len({(linear.scheme, linear.in_features) for linear in linears}) > 1 or linears[0].scheme.activations == "none":
        return False
    return all(
        a is None or torch.equal(a, b)
        for linear in linears[1:]
        for a, b in zip(linears[0].static, linear.static, strict=True)
    )


class _Slice(nn.Module):
    """Where a projection was: takes its part of what the merged one gave."""

    def __init__(self, first: int, end: int):
        super().__init__()
        self.first, self.end = first, end

    def forward(self, merged: Tensor) -> Tensor:
        return merged[..., self.first : self.end]


# Decoder layers that are: norm, attention of q, k, v, o, residual, norm, down(silu(gate) * up), residual, and nothing else.
_FUSABLE = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")


def fuse(model: nn.Module) -> int:
    """Merges projections and fuses norms and activations with quantization where a decoder layer fits; returns how many do."""
    count = 0
    for layer in list(model.modules()):
        if type(layer).__name__ in _FUSABLE and _fits(layer):
            attention, mlp = layer.self_attn, layer.mlp
            attention.qkv_proj = MergedInt8Linear(
                {name: getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj")}
            )
            first = 0
            for name, size in zip(attention.qkv_proj.names, attention.qkv_proj.sizes, strict=True):
                setattr(attention, name, _Slice(first, first + size))
                first += size
            mlp.gate_up_proj = MergedInt8Linear({name: getattr(mlp, name) for name in ("gate_proj", "up_proj")})
            del mlp.gate_proj, mlp.up_proj
            layer.__class__ = _fused_class(type(layer))
            count += 1
    return count


def _fits(layer: nn.Module) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    places = {tensor.device for tensor in (*layer.parameters(), *layer.buffers())}
    if len(places) > 1 or torch.device("meta") in places or any(hasattr(m, "_hf_hook") for m in layer.modules()):
        return False  # accelerate moves tensors and calls forward itself
    groups = [[attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]]
    return (
        isinstance(mlp.act_fn, nn.SiLU | type(ACT2FN["silu"]))
        and all(map(mergeable, groups))
        and all(mergeable([linear]) for linear in (attention.o_proj, mlp.down_proj))
    )


@cache
def _fused_class(kind: type) -> type:
    """A subclass of the layer's own class with another forward: whatever asks for an instance of it, or its attributes, finds them."""

    def forward(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
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

    def reduce(self, _protocol):
        return _empty_layer, (kind,), self.__dict__

    members = {"forward": forward, "__reduce_ex__": reduce, "__doc__": _fused_class.__doc__}
    return type(f"Int8{kind.__name__}", (kind,), members)


def _empty_layer(kind: type) -> nn.Module:
    """For unpickling: the class is made anew."""
    made = _fused_class(kind)
    return made.__new__(made)
