"""Factors that move scale from activations into weights without changing what the model computes (SmoothQuant, Xiao et al. 2022, arXiv 2211.10438).

Channel j of a linear layer's input is divided by s_j and column j of its weight multiplied by it. The division is folded into what makes
the input: a norm before it (its weight and bias), or a linear layer whose output reaches it only through steps that pass a factor on
(`up_proj` to `down_proj` past the gate; `v_proj` to `o_proj` past the attention, with one factor for the heads that share a value head).

Which linear layers share factors, and into what they fold, is found in layers/groups.py.
"""

import torch
from torch import Tensor

from tilepress.formats import int8
from tilepress.models.families import folded_norm

ALPHAS = tuple(i / 10 for i in range(11))  # `auto` tries these, and leaving the group as it is


def exact_factors(factors: Tensor, weight: Tensor, dtype: torch.dtype, offset: float = 0.0) -> Tensor:
    """The factors that a norm's weight, rounded to `dtype` after the division, really carries: columns scaled by them undo the rounding.

    `weight` is the norm's, before the fold; the norm multiplies by it plus `offset`. A channel that it multiplies by 0 keeps its factor.
    """
    before, after = weight.float() + offset, folded_norm(weight.float(), factors, offset).to(dtype).float() + offset
    return torch.where((after != 0) & (before != 0), before / after, factors)


def smooth_factors(inputs: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """s_j = max|x_j|^alpha / max|w_j|^(1 - alpha), with geometric mean 1 over live channels, kept in 1e-4..1e4; 1 where a channel is always zero."""
    s = inputs.clamp(min=1e-12).double() ** alpha / weights.clamp(min=1e-12).double() ** (1 - alpha)
    live = (inputs > 0) & (weights > 0)
    if not bool(live.any()):
        return torch.ones_like(inputs, dtype=torch.float32)
    s = s / s[live].log().mean().exp()
    return torch.where(live, s, torch.ones_like(s)).clamp(1e-4, 1e4).float()


def output_error(rows: Tensor, weights: list[Tensor], quantized_rows: Tensor, quantized: list[Tensor]) -> list[float]:
    """Relative Frobenius error of each linear layer's output: rows [n, in], weights [out, in] float32."""
    found = []
    for weight, other in zip(weights, quantized, strict=True):
        exact = rows @ weight.t()
        off = float((quantized_rows @ other.t() - exact).norm())
        found.append(off / max(float(exact.norm()), 1e-30))
    return found


def quantized_weight(weight: Tensor, scheme: int8.Int8Scheme, dtype: torch.dtype) -> Tensor:
    """float32 weight [out, in] as it comes back from INT8."""
    scale = int8.weight_scale(weight, scheme.weights, dtype)
    return int8.dequantize(int8.quantize(weight, scale), scale.float())
