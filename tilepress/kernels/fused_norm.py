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
from collections.abc import Callable

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
from tilepress.kernels.jit import VARIES, Launch
from tilepress.kernels.once import Planned, gathering

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


def _planned(op: int, reference: Callable, takes: str) -> Planned:
    """An op on a card, by the names of its arguments in their order. Tensors come in the kernel's order."""
    names = takes.split()

    def plan(*arguments) -> Callable:
        given = dict.fromkeys(_BESIDE) | dict(zip(names, arguments, strict=True))
        x, residual = given["x"], given["residual"]
        if op == fused_quant.SILU_MUL:
            check_even(x)
        n, rows = x.shape[-1] // (1 + (op == fused_quant.SILU_MUL)), x.numel() // max(1, x.shape[-1])
        fits, _, vectors = looked_at(x, n, PER_TOKEN, None, None, *map(given.get, _BESIDE))
        if not fits or rows == 0:
            return reference
        if scattered := [i for i in jit.tensors_of(arguments) if not arguments[i].is_contiguous()]:
            return gathering(planned, scattered)
        likes = [jit.like((*x.shape[:-1], n), x.dtype, x.device)] * (1 if residual is None else 2)
        chosen = configuration_of(op, n, rows > 2 * arch.card(x.device).multiprocessors)
        varies = [0 if given[name] is None else VARIES for name in ("x", *_BESIDE)]
        outputs = VARIES, 0, 0 if residual is None else VARIES  # rows, scales, the sum
        args = *varies, 0, 0, 0, *outputs, n, jit.float_bits(given.get("eps", 0.0))  # no scale, its kind, zero point
        launch = Launch(_kernel(chosen, op, vectors, x.dtype), x.device, rows * chosen.pieces, args)
        return jit.filling(launch, [*jit.tensors_of(arguments), *(~i for i in range(len(likes)))], likes, len(likes))

    planned = Planned(plan)
    return planned


_BESIDE = "residual", "weight", "bias"
_OPS = {  # the kernel's number, the reference, the arguments
    "rms_norm": (fused_quant.RMS_NORM, rms_norm_ref, "x weight eps"),
    "add_rms_norm": (fused_quant.ADD_RMS_NORM, add_rms_norm_ref, "x residual weight eps"),
    "layer_norm": (fused_quant.LAYER_NORM, layer_norm_ref, "x weight bias eps"),
    "add_layer_norm": (fused_quant.ADD_LAYER_NORM, add_layer_norm_ref, "x residual weight bias eps"),
    "silu_mul": (fused_quant.SILU_MUL, silu_mul_ref, "x"),
}
REFERENCES = {name: reference for name, (_, reference, _) in _OPS.items()}
ON_CARD = {name: _planned(*parts) for name, parts in _OPS.items()}
for _name, _reference in REFERENCES.items():
    library.impl(_name, _reference, "CPU")
    library.impl(_name, ON_CARD[_name], "CUDA")


for _name in ("rms_norm", "layer_norm"):
    torch.library.register_fake(f"tilepress::{_name}", lambda x, *_: x.new_empty(x.shape))
for _name in ("add_rms_norm", "add_layer_norm"):
    torch.library.register_fake(f"tilepress::{_name}", lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape)))


@torch.library.register_fake("tilepress::silu_mul")
def _(gate_up):
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))
