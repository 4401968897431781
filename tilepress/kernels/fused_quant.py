"""What stands between two INT8 GEMMs, fused with the quantization of its result: ops under `tilepress::` and their references.

    quantize_int8            x -> codes, scale                        per token or per tensor, scale found at run time
    quantize_int8_static     x -> codes                               with a calibrated scale and zero point
    rms_norm_int8            x -> RMSNorm -> codes, scale
    add_rms_norm_int8        x + residual -> codes, scale, the sum    the residual stream stays in x's dtype
    silu_mul_int8            [gate | up] -> silu(gate) * up -> codes, scale

`mode` is 0 per token, 1 per tensor; with `scale` given (static) it does not matter and a copy of `scale` is returned. Codes are int8 of
x's shape, scales float32 [..., 1] or [1]. Roundings are those of transformers' own modules: the sum, the normalized value and
the product are rounded to x's dtype before they are quantized. The quantization rules are formats/int8.py's.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu

from tilepress.formats import int8
from tilepress.kernels import library

PER_TOKEN, PER_TENSOR = 0, 1

library.define("quantize_int8(Tensor x, int mode) -> (Tensor, Tensor)")
library.define("quantize_int8_static(Tensor x, Tensor scale, Tensor? zero_point) -> Tensor")
library.define(
    "rms_norm_int8(Tensor x, Tensor weight, float eps, int mode, Tensor? scale, Tensor? zero_point) -> (Tensor, Tensor)"
)
library.define(
    "add_rms_norm_int8(Tensor x, Tensor residual, Tensor weight, float eps, int mode, Tensor? scale, Tensor? zero_point) "
    "-> (Tensor, Tensor, Tensor)"
)
library.define("silu_mul_int8(Tensor gate_up, int mode, Tensor? scale, Tensor? zero_point) -> (Tensor, Tensor)")


def quantize_int8_ref(x: Tensor, mode: int) -> tuple[Tensor, Tensor]:
    """x [..., n] floating -> codes int8 [..., n], scale float32 [..., 1] (mode 0) or [1] (mode 1)."""
    scale = int8.dynamic_scale(x, mode == PER_TOKEN)
    return int8.quantize(x, scale), scale


def quantize_int8_static_ref(x: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """x [..., n], scale [1], zero_point int8 [1] or None -> codes int8 [..., n]."""
    return int8.quantize(x, scale, zero_point)


def _quantize(x: Tensor, mode: int, scale: Tensor | None, zero_point: Tensor | None) -> tuple[Tensor, Tensor]:
    if scale is None:
        return quantize_int8_ref(x, mode)
    return int8.quantize(x, scale, zero_point), scale.float().clone()


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normal.to(x.dtype)


def rms_norm_int8_ref(x, weight, eps, mode, scale, zero_point) -> tuple[Tensor, Tensor]:
    """x [..., n], weight [n] -> codes int8 [..., n], scale."""
    return _quantize(_rms_norm(x, weight, eps), mode, scale, zero_point)


def add_rms_norm_int8_ref(x, residual, weight, eps, mode, scale, zero_point) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual [..., n], weight [n] -> codes int8 [..., n], scale, x + residual."""
    total = x + residual
    return *_quantize(_rms_norm(total, weight, eps), mode, scale, zero_point), total


def silu_mul_int8_ref(gate_up, mode, scale, zero_point) -> tuple[Tensor, Tensor]:
    """gate_up [..., 2 n], the gate first -> codes int8 [..., n], scale."""
    gate, up = gate_up.chunk(2, -1)
    return _quantize(silu(gate) * up, mode, scale, zero_point)


_REFERENCES = {
    "quantize_int8": quantize_int8_ref,
    "quantize_int8_static": quantize_int8_static_ref,
    "rms_norm_int8": rms_norm_int8_ref,
    "add_rms_norm_int8": add_rms_norm_int8_ref,
    "silu_mul_int8": silu_mul_int8_ref,
}
for _name, _reference in _REFERENCES.items():
    for _key in ("CPU", "CUDA"):
        library.impl(_name, _reference, _key)


def _scale_like(x: Tensor, mode: int, scale: Tensor | None = None) -> Tensor:
    shape = (1,) if mode == PER_TENSOR else (*x.shape[:-1], 1)
    return x.new_empty(shape if scale is None else scale.shape, dtype=torch.float32)


@torch.library.register_fake("tilepress::quantize_int8")
def _(x, mode):
    return x.new_empty(x.shape, dtype=torch.int8), _scale_like(x, mode)


@torch.library.register_fake("tilepress::quantize_int8_static")
def _(x, scale, zero_point):
    return x.new_empty(x.shape, dtype=torch.int8)


@torch.library.register_fake("tilepress::rms_norm_int8")
def _(x, weight, eps, mode, scale, zero_point):
    return x.new_empty(x.shape, dtype=torch.int8), _scale_like(x, mode, scale)


@torch.library.register_fake("tilepress::add_rms_norm_int8")
def _(x, residual, weight, eps, mode, scale, zero_point):
    return x.new_empty(x.shape, dtype=torch.int8), _scale_like(x, mode, scale), torch.empty_like(x)


@torch.library.register_fake("tilepress::silu_mul_int8")
def _(gate_up, mode, scale, zero_point):
    half = gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2), dtype=torch.int8)
    return half, _scale_like(half, mode, scale)
