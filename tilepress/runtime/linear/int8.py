"""INT8 linear layers: `Int8Linear` takes the place of any linear layer, `MergedInt8Linear` of several that have one input."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from tilepress.formats import TilepressError
from tilepress.formats.int8 import Int8Scheme, Int8Weight
from tilepress.formats.int8_packed import Int8PackedWeight, from_words, to_words
from tilepress.formats.layout import layout_of
from tilepress.kernels import fused_quant, w8a8_gemm, w8a16_gemm
from tilepress.kernels.arch import Path
from tilepress.runtime.linear.packed import PackedLinear, product, register

ops = torch.ops.tilepress
_VERIFY = "`tilepress verify DIR` lists every finding"
_TENSORS = ("weight", "weight_scale", "input_scale", "input_zero_point", "bias")


class Int8Linear(PackedLinear):
    """y = x W^T + bias with an int8 weight and, unless the scheme is weight-only, an input quantized to int8.

    Buffers as on disk: `weight` int8 [out, in] ([1, in, out] in place of a Conv1D), `weight_scale` [out, 1] or [1], and for static
    schemes `input_scale` [1] and `input_zero_point` int8 [1]. Of a weight that is stored in words of four codes
    (formats/int8_packed.py) `lay_out` makes `weight`; a state dict has the words.
    """

    def __init__(
        self,
        out_features: int,
        in_features: int,
        scheme: Int8Scheme,
        dtype: torch.dtype,
        bias: bool,
        transposed: bool = False,
        words: bool = False,
    ):
        """Empty, on the meta device: a loader fills it. `words`: the weight is stored four codes a word."""
        super().__init__()
        self.out_features, self.in_features = out_features, in_features
        self.scheme, self.transposed, self.words = scheme, transposed, words

        def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        shape = (1, in_features, out_features) if transposed else (out_features, in_features)
        if words:
            self.register_buffer("weight_packed", empty(out_features, -(-in_features // 4), dtype=torch.int32))
            self.register_buffer("weight_shape", empty(2, dtype=torch.int64))
            self.register_state_dict_post_hook(_to_words)
            self.register_load_state_dict_pre_hook(_from_words)
        else:
            self.register_buffer("weight", empty(*shape, dtype=torch.int8))
        scales = (out_features, 1) if scheme.weights == "channel" else (1,)
        self.register_buffer("weight_scale", empty(*scales))
        if scheme.static:
            self.register_buffer("input_scale", empty(1))
        if scheme.asymmetric:
            self.register_buffer("input_zero_point", empty(1, dtype=torch.int8))
        self.bias = nn.Parameter(empty(out_features), requires_grad=False) if bias else None

    @classmethod
    def of(
        cls, packed: Int8Weight, bias: torch.dtype | None, dtype: torch.dtype, scheme: Int8Scheme | None = None
    ) -> "Int8Linear":
        """Tensors that are not on the meta device are taken over. Raises TilepressError without a scheme."""
        if scheme is None:
            raise TilepressError(f"{packed.name} is int8, but config.json has no scheme for it", _VERIFY)
        form, words = layout_of(packed).form(packed), isinstance(packed, Int8PackedWeight)
        made = cls(form.rows, form.cols, scheme, dtype, bias is not None, form.transposed, words)
        for name, part in packed.parts.items():
            if not part.is_meta:
                setattr(made, name, part.to(dtype) if part.is_floating_point() else part)
            elif part.shape == ():  # other writers' way to store one number
                made.register_buffer(name, getattr(made, name).reshape(()))
        return made

    @property
    def packed(self) -> Int8Weight:
        parts = dict(self.named_buffers(recurse=False))
        if "weight_packed" in parts:
            return Int8PackedWeight("weight", parts)
        parts.pop("weight_shape", None)
        return Int8Weight("weight", parts)

    @property
    def mode(self) -> int:
        return fused_quant.PER_TENSOR if self.scheme.activations == "tensor-dynamic" else fused_quant.PER_TOKEN

    @property
    def static(self) -> tuple[Tensor | None, Tensor | None]:
        """Input scale and zero point; None where they are found at run time, or 0."""
        buffers = self._buffers  # a module takes microseconds to say that it lacks an attribute
        return buffers.get("input_scale"), buffers.get("input_zero_point")

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]; x gets a gradient where activations are not quantized."""
        if self.scheme.activations == "none":
            return product(self, lambda x: ops.w8a16_gemm(x, self.matrix, self.weight_scale, self.bias), x)
        return without_gradient(self.multiply(*self.codes(partial(quantized, x)), x.dtype), x)

    def codes(self, quantize: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Codes and scale for `multiply`, by what makes them of a mode, an input scale and a zero point."""
        return quantize(self.mode, *self.static)

    def multiply(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """codes int8 [..., in_features] with their scale -> [..., out_features] of `dtype`."""
        return ops.w8a8_gemm(codes, scale, self.static[1], self.matrix, self.weight_scale, self.bias, dtype)

    @property
    def matrix(self) -> Tensor:
        """[out, in], whatever way round it is stored."""
        return self.weight[0].t() if self.transposed else self.weight

    def merged(self, others: list["Int8Linear"]) -> "MergedInt8Linear | None":
        linears = [self, *others]
        weight_only = all(
            type(x) is Int8Linear and x.scheme.activations == "none" and not x.transposed for x in linears
        )
        if not (weight_only or mergeable(linears)):
            return None
        made = MergedInt8Linear({str(i): linear for i, linear in enumerate(linears)})
        for linear, part in zip(linears, made.weight.split(made.sizes), strict=True):
            linear.weight = part
        return made

    def lay_out(self) -> None:
        """Unpack words, and give `matrix` rows that follow one another in memory, as kernels read them; shapes stay."""
        if "weight_packed" in self._buffers:
            codes = from_words(self.weight_packed, self.in_features)
            del self.weight_packed
            self.register_buffer("weight", codes)
            return
        if self.transposed and not self.weight.is_meta:
            self.weight = self.weight.transpose(1, 2).contiguous().transpose(1, 2)

    @property
    def path(self) -> Path:
        """The implementation that serves this layer where it is now."""
        device, dtype = self.weight.device, self.weight_scale.dtype
        if self.scheme.activations == "none":
            return w8a16_gemm.path(device, dtype, dtype, self.in_features)
        return w8a8_gemm.path(device, dtype, dtype, self.out_features, self.in_features)

    def path_for(self, dtype: torch.dtype, n: int = 1) -> Path:
        return self.path

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.scheme}"


def quantized(x: Tensor, mode: int, scale: Tensor | None, zero_point: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [..., n] as int8 codes of its shape and their scale, for `Int8Linear.multiply`; a scale that is given is returned."""
    if scale is None:
        return ops.quantize_int8(x, mode)
    return ops.quantize_int8_static(x, scale, zero_point), scale


class _Rounded(torch.autograd.Function):
    """What was computed from rounded codes of x: as it is forwards, and no way back."""

    @staticmethod
    def forward(ctx, y: Tensor, x: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad: Tensor):
        raise TilepressError(
            "activations that are quantized to int8 have no gradient: their rounding is flat",
            "train the model that it was made from, a sparse artifact or one of INT8 weights alone",
        )


def without_gradient(y: Tensor, x: Tensor) -> Tensor:
    """Return y, which codes of x made. Where a gradient of x is asked for, the backward pass through y raises TilepressError."""
    return _Rounded.apply(y, x) if torch.is_grad_enabled() and x.requires_grad else y


def _to_words(module: Int8Linear, state: dict, prefix: str, *_) -> None:
    if (codes := state.pop(f"{prefix}weight", None)) is not None:
        state[f"{prefix}weight_packed"] = to_words(codes)


def _from_words(module: Int8Linear, state: dict, prefix: str, *_) -> None:
    if "weight" in module._buffers and (words := state.pop(f"{prefix}weight_packed", None)) is not None:
        state[f"{prefix}weight"] = from_words(words, module.in_features)


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

    def split(self) -> dict[str, Int8Linear]:
        """Return the layers that were merged, by name, with copies of their tensors."""
        state, scheme = (
            self.state_dict(),
            Int8Scheme("tensor" if self.per_tensor else "channel", self.scheme.activations),
        )
        linears, dtype = {}, self.weight_scale.dtype
        for name, size, with_bias in zip(self.names, self.sizes, self.with_bias, strict=True):
            linears[name] = made = Int8Linear(size, self.in_features, scheme, dtype, with_bias)
            own = {part.removeprefix(f"{name}."): t for part, t in state.items() if part.startswith(f"{name}.")}
            made.load_state_dict(own, assign=True)
            made.requires_grad_(False)
        return linears


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


def quantizes(linear: nn.Module) -> bool:
    """Return whether a layer multiplies codes, and so can take them from what makes its input."""
    return type(linear) is Int8Linear and linear.scheme.activations != "none"


def mergeable(linears: list[nn.Module]) -> bool:
    """Return whether linear layers can be one GEMM: all W8A8, of one scheme and one input scale."""
    if not all(quantizes(linear) and not linear.transposed for linear in linears):
        return False
    if len({(linear.scheme, linear.in_features) for linear in linears}) > 1:
        return False
    return all(
        a is None or torch.equal(a, b)
        for linear in linears[1:]
        for a, b in zip(linears[0].static, linear.static, strict=True)
    )


register("int8", Int8Linear)
register("int8-packed", Int8Linear)
