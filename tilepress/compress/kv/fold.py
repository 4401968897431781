"""A matrix for each KV head that values are stored times, folded into `v_proj` and `o_proj`: attention only adds values up, so the model stays the same.

A row's rounding error follows its extremes, and comes back through the inverse. Principal components with lambda^-POWER in front (half of whitening is
best for errors alike in all channels), spread by a Hadamard matrix, make rows even. Then gradient steps over rotations lower the mean square of
the rows' reach: Hadamard makes rows normal, which is not the narrowest that text allows.

Whether a layer lets a fold through (no norm or gate between the two) is tried on the loaded layer, as in layers/groups.py.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tilepress.compress.kv.attention import AttentionShape
from tilepress.compress.layers.walk import Found, Layer
from tilepress.compress.run.targets import Target
from tilepress.formats import UsageError
from tilepress.formats.checkpoint import Checkpoint
from tilepress.formats.kv_int4 import hadamard
from tilepress.models.families import VALUE_FOLDS

POWER = 0.2
STEPS, RATE, ROWS = 60, 0.01, 4096  # of the rotations' descent; rows of each head that it looks at
_SAME = 0.05  # of what a layer adds to a token: a fold changes it by rounding alone, by less than this
_FULL = 0.9  # share of non-zeros from which on weights are not pruned


def find_pairs(checkpoint: Checkpoint, targets: Iterable[Target]) -> list[Target]:
    """Return the weights that make values and those that read what attention gives, of the same modules.

    Raises UsageError where there are none, or they are packed or pruned."""
    by_name = {target.name: target for target in targets}
    found = []
    for name in by_name:
        for out, value in VALUE_FOLDS:
            other = name.removesuffix(f"{out}.weight") + f"{value}.weight"
            if name.endswith(f".{out}.weight") and other in by_name:
                found += [by_name[other], by_name[name]]
    if not found:
        raise UsageError(
            f"--fold-values: {checkpoint.name} has no values and outputs in linear layers of their own", "leave it out"
        )
    told = {record["name"]: record for record in (checkpoint.manifest or {}).get("tensors", ())}
    for target in found:
        if (
            target.weight.is_packed
            or told.get(target.name, {}).get("nonzeros", target.elements) < _FULL * target.elements
        ):
            raise UsageError(
                f"--fold-values: {target.name} is packed or pruned, and a fold would fill its zeros",
                "leave it out, or fold the dense model's values before it is pruned or quantized",
            )
    return found


@torch.enable_grad()
def learned(values: Tensor, groups: int = 1) -> Tensor:
    """Return a matrix for each head that values [KV heads, rows, D] float32 are best stored times, in rows of so many groups: [KV heads, D, D]."""
    size = values.shape[-1]
    rows = (values - values.mean(1, keepdim=True))[:, :: max(values.shape[1] // ROWS, 1)]
    moments = (rows.mT.double() @ rows.double()) / rows.shape[1]
    powers, components = torch.linalg.eigh(moments)
    powers = powers.clamp(min=powers.amax(-1, keepdim=True).clamp(min=1e-30) * 1e-6)
    start = (powers.pow(-POWER)[..., None] * components.mT).flip(-2)
    # Dealt to the blocks of the Hadamard matrix, so that each has large and small ones.
    start = start.unflatten(-2, (size & -size, -1)).transpose(-3, -2).flatten(-3, -2)
    start = hadamard(start.mT.float()).mT
    spread = rows @ start.mT
    unit = spread.square().mean((1, 2)).sqrt()[:, None, None].clamp(min=1e-30)
    start, spread = start / unit, spread / unit
    free = torch.zeros(len(values), size, size, device=values.device, requires_grad=True)
    steps = torch.optim.Adam([free], lr=RATE)
    for step in range(STEPS):
        turned = (spread @ _rotation(free).mT).unflatten(-1, (groups, -1))
        reach = turned.amax(-1) - turned.amin(-1)
        steps.zero_grad()
        reach.square().mean((1, 2)).log().sum().backward()
        steps.step()
        steps.param_groups[0]["lr"] = RATE * (1 - (step + 1) / STEPS)
    return (_rotation(free) @ start).detach()


def _rotation(free: Tensor) -> Tensor:
    return torch.matrix_exp(free - free.mT)


def folded_values(weight: Tensor, fold: Tensor) -> Tensor:
    """Return the rows of a weight [KV heads * D, …], or a bias, that make values, so that they make values as they are stored."""
    heads, size, _ = fold.shape
    return (fold.to(weight.dtype) @ weight.reshape(heads, size, -1)).reshape(weight.shape)


def folded_outputs(weight: Tensor, fold: Tensor) -> Tensor:
    """Return a weight [out, heads * D] that reads sums of values, so that it reads those of stored ones."""
    heads, size, _ = fold.shape
    back = torch.linalg.inv(fold.double()).to(weight)
    return torch.einsum("okte,ked->oktd", weight.reshape(len(weight), heads, -1, size), back).reshape(weight.shape)


def passes(layer: Layer, value: nn.Module, out: nn.Module, fold: Tensor) -> bool:
    """Return whether a loaded layer stays the same under a fold, which is left in its modules."""
    probe, run = layer.probe, layer.model.run
    before = run(layer.path, probe).float()
    for tensor in (value.weight, value.bias):
        if tensor is not None:
            tensor.data.copy_(folded_values(tensor.float(), fold))
    out.weight.data.copy_(folded_outputs(out.weight.float(), fold))
    off = (run(layer.path, probe).float() - before).square().sum(-1)
    added = (before - probe.to(before)).square().sum(-1).clamp(min=1e-30)
    return float((off / added).median()) < _SAME**2


def pair_of(layer: Layer, shape: AttentionShape) -> tuple[str, str] | None:
    """Return the paths of a layer's modules that make values and read attention, None where they are not of the shape that a fold needs."""
    for out, value in VALUE_FOLDS:
        found = {path.rpartition(".")[2]: path for path in layer.names}
        if out in found and value in found:
            module = layer.model.model.get_submodule
            wide, narrow = module(found[out]), module(found[value])
            linear = all(isinstance(each, nn.Linear) for each in (wide, narrow))
            sizes = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
            if linear and (wide.in_features, narrow.out_features) == sizes:
                return found[value], found[out]
    return None


class Folds:
    """The folds that a walk found, by the stored names of weights. Picklable."""

    def __init__(self, found: Found):
        self._found, self._of = found, {}
        for number, names in enumerate(found.facts.get("folds", ())):
            for name, way in zip(names, (folded_values, folded_outputs), strict=False):
                self._of[name] = (f"{number}.fold", way)
                if way is folded_values:
                    self._of[name.removesuffix("weight") + "bias"] = (f"{number}.fold", way)

    def apply(self, name: str, tensor: Tensor) -> Tensor:
        """Return a stored tensor [out, in], or a bias, with its fold, in its dtype; on the CPU and in float64, so that a run gives the same everywhere."""
        if name not in self._of:
            return tensor
        key, way = self._of[name]
        return way(tensor.double().cpu(), self._found.get(key).double()).to(tensor)
