"""Fused kernels between two linear layers of floating inputs: ops under `tilepress::` and their references.

    rms_norm         x -> RMSNorm
    add_rms_norm     x + residual -> RMSNorm, the sum
    layer_norm       the two with LayerNorm
    add_layer_norm
    silu_mul         [gate | up] -> silu(gate) * up

All in x's dtype, with the roundings of transformers' own modules: the sum, the normalized value and the product. The siblings of kernels/fused_quant.py,
by the same kernel without its quantization: on cards from sm_80 on, for bfloat16 and float16 and rows of up to MOST_COLUMNS; the rest runs by the
references.
"""

import functools

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, silu

from tilepress.kernels import arch, fused_quant, jit, library
from tilepress.kernels.arch import Path
from tilepress.kernels.fused_quant import (
    PER_TOKEN,
    Configuration,
    check_even,
    configuration_for,
    looked_at,
    rms_norm,
    why_not,
)

library.define("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor")
library.define("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)")
library.define("layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor")
library.define("add_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor)")
library.define("silu_mul(Tensor gate_up) -> Tensor")


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., n], weight [n] -> [..., n]."""
    return rms_norm(x.contiguous(), weight, eps)


def add_rms_norm_ref(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual [..., n], weight [n] -> [..., n] and x + residual."""
    total = (x + residual).contiguous()
    return rms_norm(total, weight, eps), total


def layer_norm_ref(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x [..., n], weight, bias [n] -> [..., n]."""
    return layer_norm(x.contiguous(), weight.shape, weight, bias, eps)


def add_layer_norm_ref(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual [..., n], weight, bias [n] -> [..., n] and x + residual."""
    total = (x + residual).contiguous()
    return layer_norm(total, weight.shape, weight, bias, eps), total


def silu_mul_ref(gate_up: Tensor) -> Tensor:
    """gate_up [..., 2 n], the gate first -> [..., n]."""
    check_even(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return silu(gate.contiguous()) * up  # torch computes rows with gaps between them otherwise on a CPU


_THREADS = 128  # of a block that has a piece of a row: so few start beside any other kernel's blocks


def configuration_of(op: int, columns: int, is_full: bool) -> Configuration:
    """Return the configuration for rows of an op, for a card that is full of them or is not."""
    if op == fused_quant.SILU_MUL:
        return Configuration(_THREADS, 1, -(-columns // (8 * _THREADS)))
    return configuration_for(columns, is_full)


@functools.cache
def _kernel(chosen: Configuration, op: int, vectors: bool, dtype: torch.dtype) -> jit.Kernel:
    source = chosen.source(op, static=0, vectors=vectors, dtype=dtype, codes=False)
    return jit.Kernel("fused_quant", source, fused_quant.TAKES, chosen.threads, overlaps=True)


def path(device: torch.device, dtype: torch.dtype, columns: int) -> Path:
    """Return which implementation serves rows of a dtype on a device."""
    return Path("fused_norm", device.type, why_not(device, dtype, columns))


def _run(op: int, x: Tensor, n: int, residual=None, weight=None, bias=None, eps=0.0) -> tuple[Tensor, Tensor] | None:
    """The rows and the sum with `residual` (else anything); None where references must serve."""
    fits, _, vectors = looked_at(x, n, PER_TOKEN, None, None, residual, weight, bias)
    if not fits:
        return None
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(x)
    rows = x.numel() // x.shape[-1]
    if rows == 0:
        return out, total
    chosen = configuration_of(op, n, rows > 2 * arch.card(x.device).multiprocessors)
    _kernel(chosen, op, vectors, x.dtype)(
        x.device,
        rows * chosen.pieces,
        x.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        *(0, 0, 0),  # scale, its kind, zero point
        *(out.data_ptr(), 0, total.data_ptr()),
        n,
        jit.float_bits(eps),
    )
    return out, total


def _rms_norm_cuda(x, weight, eps):
    made = _run(fused_quant.RMS_NORM, x, x.shape[-1], weight=weight, eps=eps)
    return rms_norm_ref(x, weight, eps) if made is None else made[0]


def _add_rms_norm_cuda(x, residual, weight, eps):
    made = _run(fused_quant.ADD_RMS_NORM, x, x.shape[-1], residual, weight, eps=eps)
    return add_rms_norm_ref(x, residual, weight, eps) if made is None else made


def _layer_norm_cuda(x, weight, bias, eps):
    made = _run(fused_quant.LAYER_NORM, x, x.shape[-1], None, weight, bias, eps)
    return layer_norm_ref(x, weight, bias, eps) if made is None else made[0]


def _add_layer_norm_cuda(x, residual, weight, bias, eps):
    made = _run(fused_quant.ADD_LAYER_NORM, x, x.shape[-1], residual, weight, bias, eps)
    return add_layer_norm_ref(x, residual, weight, bias, eps) if made is None else made


def _silu_mul_cuda(gate_up):
    check_even(gate_up)
    made = _run(fused_quant.SILU_MUL, gate_up, gate_up.shape[-1] // 2)
    return silu_mul_ref(gate_up) if made is None else made[0]


REFERENCES = {
    "rms_norm": rms_norm_ref,
    "add_rms_norm": add_rms_norm_ref,
    "layer_norm": layer_norm_ref,
    "add_layer_norm": add_layer_norm_ref,
    "silu_mul": silu_mul_ref,
}
_ON_CARD = _rms_norm_cuda, _add_rms_norm_cuda, _layer_norm_cuda, _add_layer_norm_cuda, _silu_mul_cuda
for (_name, _reference), _on_card in zip(REFERENCES.items(), _ON_CARD, strict=True):
    library.impl(_name, _reference, "CPU")
    library.impl(_name, _on_card, "CUDA")


for _name in ("rms_norm", "layer_norm"):
    torch.library.register_fake(f"tilepress::{_name}", lambda x, *_: x.new_empty(x.shape))
for _name in ("add_rms_norm", "add_layer_norm"):
    torch.library.register_fake(f"tilepress::{_name}", lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape)))


@torch.library.register_fake("tilepress::silu_mul")
def _(gate_up):
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))
