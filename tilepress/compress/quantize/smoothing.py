"""Moving scale from activations into weights without changing what the model computes (SmoothQuant, Xiao et al. 2022, arXiv 2211.10438).

Channel j of a linear layer's input is divided by s_j and column j of its weight multiplied by it. The division is folded into what makes
the input: a norm before it (its weight and bias), or a linear layer whose output reaches it only through steps that pass a factor on
(`up_proj` to `down_proj` past the gate; `v_proj` to `o_proj` past the attention, with one factor for the heads that share a value head).

Whether a fold leaves the function alone is not believed but tried, on the layer at hand: random powers of two, which are exact in every
floating dtype, must leave the layer's output as it was. So an architecture needs no table of its norms, only to pass the trial. Pairs of
linear layers, and norms of 1 + w, are proposed by the entries of families (models/families.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tilepress.compress.layers.layerwise import linears_run
from tilepress.formats import int8
from tilepress.formats.checkpoint import linear_shape
from tilepress.models.experts import SeparateExperts
from tilepress.models.families import EXPERTS, FOLDS, folded_norm, norm_offset

ALPHAS = tuple(i / 10 for i in range(11))  # that `auto` tries, beside leaving the group as it is


@dataclass(frozen=True)
class Group:
    """Linear layers that read one input, and what makes that input. All names are module paths."""

    linears: tuple[str, ...]
    producer: str | None  # a norm or a linear layer, or None if a factor cannot be folded into anything
    reason: str = ""  # why not
    repeat: tuple[int, int] = (1, 1)  # (heads that share a value head, their size): input -> producer's output channel

    def shared(self, per_input: Tensor) -> Tensor:
        """A quantity of the input channels as one of the producer's output channels: the largest of those that share one."""
        times, size = self.repeat
        return per_input.reshape(-1, times, size).amax(1).reshape(-1)

    def spread(self, per_output: Tensor) -> Tensor:
        """Factors of the producer's output channels as those of the input channels."""
        times, size = self.repeat
        return per_output.reshape(-1, 1, size).expand(-1, times, size).reshape(-1)


def find_groups(layer: nn.Module, prefix: str, targets: set[str], head_dim: int, run, fold: bool) -> list[Group]:
    """The input groups of a loaded decoder layer in the order they run; `run()` is a short forward pass of it.

    `targets` are the module paths that are quantized. With `fold` every group's producer is looked for and tried. Experts of a
    mixture (SeparateExperts) that the short run did not reach are listed all the same.
    """
    outputs: list[tuple[str, Tensor]] = []

    def hook(path: str):
        return lambda _, args, out: outputs.append((path, out)) if isinstance(out, Tensor) else None

    modules = dict(layer.named_modules(prefix=prefix))
    norms = [path for path, module in modules.items() if _is_norm(module)]
    hooks = [modules[path].register_forward_hook(hook(path)) for path in norms]
    try:
        inputs = linears_run(layer, prefix, run)
    finally:
        for handle in hooks:
            handle.remove()
    by_input: dict[tuple, list[str]] = {}
    for path, x in inputs.items():
        if path in targets:
            by_input.setdefault((x.data_ptr(), x.numel()), []).append(path)
    groups = []
    for key, linears in by_input.items():
        width = linear_shape(modules[linears[0]])[1]
        made = (path for path, out in outputs if (out.data_ptr(), out.numel()) == key)
        norm = next((path for path in made if modules[path].weight.numel() == width), None)
        groups.append(_candidate(modules, tuple(linears), norm, targets, head_dim))
    groups += _unreached_experts(modules, targets, {path for group in groups for path in group.linears})
    if not fold:
        return groups
    return [group if group.producer is None else _tried(group, layer, modules, run) for group in groups]


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 1 and not list(module.children())


def _candidate(modules: dict, linears: tuple[str, ...], norm: str | None, targets: set[str], head_dim: int) -> Group:
    if norm is not None:
        return Group(linears, norm)
    stem, _, name = linears[0].rpartition(".")
    producer = next((f"{stem}.{p}" for n, p in FOLDS if n == name and f"{stem}.{p}" in modules), None)
    if producer is None:
        return Group(linears, None, "its input comes neither from a norm nor from a linear layer that a factor passes")
    if producer not in targets:
        return Group(linears, None, f"{_last(producer)} before it is not quantized")
    wide, narrow = linear_shape(modules[linears[0]])[1], linear_shape(modules[producer])[0]
    if wide == narrow:
        return Group(linears, producer)
    if narrow % head_dim or wide % narrow:
        return Group(linears, None, f"{_last(producer)} before it has {narrow} outputs for {wide} inputs")
    return Group(linears, producer, repeat=(wide // narrow, head_dim))


def _unreached_experts(modules: dict, targets: set[str], seen: set[str]) -> list[Group]:
    found = []
    for path, module in modules.items():
        if isinstance(module, SeparateExperts):
            gate, up, down = next(names for names in EXPERTS if names[0] == module.gate)
            for number in range(module.num_experts):
                for names in ((gate, up), (down,)):
                    linears = tuple(f"{path}.{number}.{name}" for name in names)
                    missing = [name for name in linears if name in targets and name not in seen]
                    if missing:
                        found.append(Group(tuple(missing), None, "the trial's tokens did not reach this expert"))
    return found


def _tried(group: Group, layer: nn.Module, modules: dict[str, nn.Module], run) -> Group:
    """The group as it is if a fold of random powers of two leaves the layer's output alone, else without its producer.

    "Alone" is measured against what the layer adds to its input, token by token: a residual stream may hold values that dwarf it. What
    two equal runs differ by (there are such kernels) does not count.
    """
    channels = linear_shape(modules[group.linears[0]])[1] // group.repeat[0]
    exponents = torch.randint(-2, 3, (channels,), generator=torch.Generator().manual_seed(0))
    factors = torch.pow(2.0, exponents.float())
    inputs: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0].float()))
    before, again = run().float(), run().float()
    handle.remove()
    norm = modules[group.producer].weight if _is_norm(modules[group.producer]) else None
    kept = None if norm is None else norm.clone()  # 1 + w has no exact way back
    apply(group, modules, factors)
    after = run().float()
    apply(group, modules, 1 / factors)
    if norm is not None:
        norm.data.copy_(kept)
    added = (before - inputs[0]).abs().amax(-1, keepdim=True)
    allowed = 1e-5 * added + 4 * (before - again).abs().amax(-1, keepdim=True)
    if bool(((after - before).abs() <= allowed).all()):
        return group
    return Group(group.linears, None, f"{_last(group.producer)} before it is also used elsewhere or not only scaled")


@torch.no_grad()
def apply(group: Group, modules: dict[str, nn.Module], factors: Tensor) -> None:
    """Divides the producer's output channels by `factors` and multiplies the columns of the group's weights, in place."""
    producer = modules[group.producer]
    factors = factors.to(producer.weight.device)
    if _is_norm(producer):
        producer.weight.copy_(folded_norm(producer.weight.float(), factors, norm_offset(producer)))
    else:
        rows = factors if linear_shape(producer)[2] else factors[:, None]
        producer.weight.copy_(producer.weight.float() / rows)
    if getattr(producer, "bias", None) is not None:
        producer.bias.copy_(producer.bias.float() / factors)
    columns = group.spread(factors)
    for path in group.linears:
        linear = modules[path]
        linear.weight.copy_(linear.weight.float() * (columns[:, None] if linear_shape(linear)[2] else columns))


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
