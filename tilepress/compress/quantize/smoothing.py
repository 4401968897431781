"""Factors that move scale from activations into weights without changing what the model computes (SmoothQuant, Xiao et al. 2022, arXiv 2211.10438).

Channel j of a linear layer's input is divided by s_j and column j of its weight multiplied by it. The division is folded into what makes
the input: a norm before it (its weight and bias), or a linear layer whose output reaches it only through steps that pass a factor on
(`up_proj` to `down_proj` past the gate; `v_proj` to `o_proj` past the attention, with one factor for the heads that share a value head).

Which linear layers share factors, and into what they fold, is found in layers/groups.py.

`smooth_factors` has them from the channels' reach, with one exponent for all; `learned_factors` looks for the least noise in the outputs.
"""

import torch
from torch import Tensor

from tilepress.compress.layers.groups import Group
from tilepress.formats import int8
from tilepress.models.families import folded_norm

_STEPS, _RATE = 24, 0.17  # of the search for factors
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


def learned_factors(
    rows: Tensor, weights: Tensor, group: Group, token: Tensor, scheme: int8.Int8Scheme, weight_share: float
) -> Tensor:
    """Return factors of the producer's channels under which rounding inputs and weights adds least noise to the outputs.

    rows [n, in] and weights [out, in] float32; `token` [n] says how much a token counts.
    A token's step follows its largest channel, a row's its largest weight, and the noise of
    a step is its square over 12 in every channel: of the inputs sum_t w_t max_j(x_tj / s_j)^2 * sum_j s_j^2 |W_j|^2, of the weights
    sum_i max_j(W_ij s_j)^2 * sum_j h_j / s_j^2, with h the inputs' weighted moments. `weight_share` of the latter counts: GPTQ makes up for
    the rest. Adam's steps (Kingma & Ba 2014) on log s from alpha 0.6 on, few and bounded, so that a factor moves by e^2 at most.
    """
    token = token[:, None]
    moments, energy = (rows.square() * token).mean(0), weights.square().sum(0)
    inputs, columns = rows.abs().mul_((token / len(rows)).sqrt()), weights.abs()
    start = smooth_factors(group.shared(inputs.amax(0)), group.shared(columns.amax(0)), 0.6)
    times = 1.0
    if scheme.activations != "token":  # one step for all tokens
        inputs = rows.abs().amax(0, keepdim=True) * token.mean().sqrt()
    if scheme.weights == "tensor":  # one step for all rows
        times, columns = float(len(columns)), columns.amax(0, keepdim=True)
    logs, mean, spread = start.log(), torch.zeros_like(start), torch.zeros_like(start)
    least, best = torch.full((), torch.inf, device=rows.device), logs
    for step in range(_STEPS):
        s = group.spread(logs.exp())
        reach, channel = (inputs / s).max(1)
        reach_of_row, channel_of_row = (columns * s).max(1)
        noise, noise_of_weights = s.square() * energy, moments / s.square()
        by_inputs = reach.square().sum() * noise.sum()
        by_weights = weight_share * times * reach_of_row.square().sum() * noise_of_weights.sum()
        total = by_inputs + by_weights
        better = total < least
        least, best = torch.where(better, total, least), torch.where(better, logs, best)
        # The gradient on log s, half of it: a channel's share of the noise less its share of what sets the steps.
        of_inputs = (noise / noise.sum()).index_add(0, channel, reach.square() / -reach.square().sum())
        of_weights = (noise_of_weights / -noise_of_weights.sum()).index_add(
            0, channel_of_row, reach_of_row.square() / reach_of_row.square().sum()
        )
        gradient = group.total(by_inputs / total * of_inputs + by_weights / total * of_weights)
        mean, spread = mean.lerp(gradient, 0.2), spread.lerp(gradient.square(), 0.05)
        unbiased, size = mean / (1 - 0.8 ** (step + 1)), (spread / (1 - 0.95 ** (step + 1))).sqrt()
        logs = logs - _RATE * (1 - step / _STEPS) * unbiased / (size + 1e-3 * size.square().mean().sqrt() + 1e-12)
    return best.exp()


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
