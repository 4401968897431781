"""The steps between the products of a decoder layer: norms and activations, as the linear layer behind them wants its
input.

A layer that multiplies int8 codes gets them from the norm or activation itself where there is such an op (kernels/fused_quant.py), other layers get
floating numbers (kernels/fused_norm.py). Norms of 1 + w round once, after the product; the ops round before it. So such norms run by their own
modules, and so do gates of activations other than SiLU: every number is then the model's own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from tilepress.kernels import fused_norm, fused_quant
from tilepress.kernels.arch import Path
from tilepress.models import families
from tilepress.models.families import Family, part
from tilepress.runtime.linear.int8 import Int8Linear, quantized

ops = torch.ops.tilepress
_OPS = {"relu": "relu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_new"}  # of activation_int8


def takes_codes(linear: nn.Module) -> bool:
    """Return whether a layer multiplies int8 codes, and so can get them from what makes its input."""
    return isinstance(linear, Int8Linear) and linear.scheme.activations != "none"


def quantizes_by(linear: Int8Linear, columns: int, device: torch.device, dtype: torch.dtype) -> Path:
    """The implementation that gives a layer its codes."""
    one_scale = linear.mode == fused_quant.PER_TENSOR and linear.static[0] is None
    return fused_quant.path(device, dtype, columns, one_scale)


@dataclass(frozen=True)
class Norm:
    """A norm of hidden states [..., hidden] by its module; `style` is that of its family's entry."""

    module: nn.Module
    style: str

    @property
    def has_ops(self) -> bool:
        """Return whether our ops compute what the module does."""
        return self.style != families.RMS_PLUS_ONE

    def fits(self) -> bool:
        """Return whether the module is what the entry says."""
        module = self.module
        plain = type(module) is nn.LayerNorm and module.weight is not None and module.bias is not None
        return plain or self.style != families.LAYER

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and the sum."""
        if not self.has_ops:
            total = x if residual is None else x + residual
            return self.module(total), total
        if residual is None:
            normal = ops.layer_norm if self.style == families.LAYER else ops.rms_norm
            return normal(x, *self._rest), x
        normal = ops.add_layer_norm if self.style == families.LAYER else ops.add_rms_norm
        return normal(x, residual, *self._rest)

    def codes(self, x: Tensor, residual: Tensor | None, linear: Int8Linear) -> tuple[Tensor, Tensor, Tensor]:
        """The same quantized for a layer: codes, scale, and the sum."""
        if not self.has_ops:
            normal, total = self(x, residual)
            return *quantized(normal, linear.mode, *linear.static), total
        if residual is None:
            normal = ops.layer_norm_int8 if self.style == families.LAYER else ops.rms_norm_int8
            return *normal(x, *self._rest, linear.mode, *linear.static), x
        normal = ops.add_layer_norm_int8 if self.style == families.LAYER else ops.add_rms_norm_int8
        return normal(x, residual, *self._rest, linear.mode, *linear.static)

    def into(self, linear: nn.Module, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return a linear layer's output for the norm of x + residual, and that sum."""
        if takes_codes(linear):
            *codes, total = self.codes(x, residual, linear)
            return linear.multiply(*codes, x.dtype), total
        normal, total = self(x, residual)
        return linear(normal), total

    def paths(self, linear: nn.Module | None, device: torch.device, dtype: torch.dtype) -> Iterator[Path | str]:
        """The implementations that serve the norm before a linear layer; None: one that takes floating numbers."""
        columns = len(self.module.weight)
        if not self.has_ops:
            yield f"torch norm on {device.type}"
        if takes_codes(linear):
            yield quantizes_by(linear, columns, device, dtype)
        elif self.has_ops:
            yield fused_norm.path(device, dtype, columns)

    @property
    def _rest(self) -> tuple:
        module = self.module
        if self.style == families.LAYER:
            return module.weight, module.bias, module.eps
        return module.weight, module.variance_epsilon


@dataclass(frozen=True)
class Activation:
    """The activation between the products of an MLP; `gated`: of the first half of its input, times the other half."""

    function: Callable[[Tensor], Tensor]
    gated: bool

    @classmethod
    def of(cls, layer: nn.Module, family: Family) -> "Activation":
        """Return the activation of a decoder layer."""
        return cls(part(layer, family.names.activation), family.gated)

    @property
    def is_silu_gate(self) -> bool:
        """Return whether silu_mul computes it."""
        return self.gated and isinstance(self.function, nn.SiLU | type(ACT2FN["silu"]))

    @property
    def op_name(self) -> str | None:
        """The name that ops.activation_int8 has for the activation, if it knows one."""
        names = (ours for theirs, ours in _OPS.items() if type(self.function) is type(ACT2FN[theirs]))
        return None if self.gated else next(names, None)

    def __call__(self, inner: Tensor) -> Tensor:
        """inner [..., n], or [..., 2 n] of a gate and what it gates -> [..., n]."""
        if self.is_silu_gate:
            return ops.silu_mul(inner)
        if not self.gated:
            return self.function(inner)
        gate, up = inner.chunk(2, -1)
        return self.function(gate.contiguous()) * up

    def into(self, linear: nn.Module, inner: Tensor) -> Tensor:
        """Return a linear layer's output for the activation of its input."""
        if not takes_codes(linear):
            return linear(self(inner))
        if self.is_silu_gate:
            made = partial(ops.silu_mul_int8, inner)
        elif self.op_name is not None:
            made = partial(ops.activation_int8, inner, self.op_name)
        else:
            made = partial(quantized, self(inner))
        return linear.multiply(*linear.codes(made), inner.dtype)

    def paths(self, linear: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[Path | str]:
        """The implementations that serve the activation before a linear layer."""
        columns = getattr(linear, "in_features", 0)  # a module around a linear layer may not tell
        if takes_codes(linear):
            if not self.is_silu_gate and self.op_name is None:
                yield f"torch activation on {device.type}"
            yield quantizes_by(linear, columns, device, dtype)
        else:
            yield fused_norm.path(device, dtype, columns) if self.is_silu_gate else f"torch activation on {device.type}"
