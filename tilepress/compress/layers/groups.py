"""Groups of linear layers that read one tensor, in the order in which a decoder layer runs them.

A short forward pass shows which linear layers share an input. They share statistics, scales and solver matrices too.

For smoothing a group also needs its producer: a norm or a linear layer whose output channels can be divided by factors that the group's
columns are multiplied by. Whether such a fold leaves the layer's function alone is not believed but tried: random powers of two, which are
exact in every floating dtype, must leave the layer's output as it was. So an architecture needs no table of its norms, only to pass the
trial. Pairs of linear layers, and norms of 1 + w, are proposed by the entries of families (models/families.py).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tilepress.formats.checkpoint import linear_shape
from tilepress.models.experts import SeparateExperts
from tilepress.models.families import EXPERTS, FOLDS, folded_norm, norm_offset


@dataclass(frozen=True)
class Group:
    """Linear layers that read one input, and what makes that input. All names are module paths."""

    linears: tuple[str, ...]
    producer: str | None  # a norm or a linear layer, or None if a factor cannot be folded into anything
    reason: str = ""  # why there is no producer
    repeat: tuple[int, int] = (1, 1)  # (heads that share a value head, their size): input -> producer's output channel
    normed: bool = False  # a norm makes the input, so its tokens are of one size

    def shared(self, per_input: Tensor) -> Tensor:
        """Reduce a quantity [in] of the input channels to the producer's output channels: the largest of those that share one."""
        times, size = self.repeat
        return per_input.reshape(-1, times, size).amax(1).reshape(-1)

    def total(self, per_input: Tensor) -> Tensor:
        """Add up a quantity [in] of the input channels that share one of the producer's output channels."""
        times, size = self.repeat
        return per_input.reshape(-1, times, size).sum(1).reshape(-1)

    def spread(self, per_output: Tensor) -> Tensor:
        """Return the factors [in] of the input channels for those of the producer's output channels."""
        times, size = self.repeat
        return per_output.reshape(-1, 1, size).expand(-1, times, size).reshape(-1)


def find_groups(
    layer: nn.Module, prefix: str, targets: set[str], head_dim: int, run: Callable[[], Tensor], fold: bool
) -> list[Group]:
    """Return the groups of a loaded decoder layer in the order they run; `run()` is a short forward pass of it.

    `targets` are the module paths that are worked on. With `fold` every group's producer is tried, else it is only proposed. Experts of
    a mixture (SeparateExperts) that the short run did not reach are listed all the same.
    """
    outputs: list[tuple[str, Tensor]] = []
    inputs: dict[str, Tensor] = {}

    def hook(path: str):
        return lambda _, args, out: outputs.append((path, out)) if isinstance(out, Tensor) else None

    modules = dict(layer.named_modules(prefix=prefix))
    hooks = [module.register_forward_hook(hook(path)) for path, module in modules.items() if _is_norm(module)]
    with watch_inputs(modules, [path for path, module in modules.items() if linear_shape(module)], inputs.setdefault):
        run()
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
        return Group(linears, norm, normed=True)
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
    """Return the group as it is if a fold of random powers of two leaves the layer's output alone, else without its producer.

    A difference is measured against what the layer adds to its input, token by token: a residual stream may hold values that dwarf it.
    Some kernels give other values in every run; by how much two equal runs differ does not count.
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
    return Group(
        group.linears,
        None,
        f"{_last(group.producer)} before it is also used elsewhere or not only scaled",
        normed=group.normed,
    )


@torch.no_grad()
def apply(group: Group, modules: dict[str, nn.Module], factors: Tensor) -> None:
    """Divide the producer's output channels by `factors` and multiply the columns of the group's weights, in place."""
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


def stages(groups: list[Group]) -> list[list[Group]]:
    """Return groups in the order they run, those of a layer's experts together by kind: one pass serves them all."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        path = group.linears[0]
        kind = path.rpartition(".")[2] if ".experts." in path else path
        found.setdefault(kind, []).append(group)
    return list(found.values())


class _Reached(BaseException):
    """The run came to the linear layer at which it stops: no error, so nothing that handles errors handles it."""


class watch_inputs:
    """Show the inputs of some linear layers while the layer around them runs; it runs no further than `until`, one of its linear layers.

    This is a class because Python 3.12 keeps an exception that a generator suppresses, with its frames, until garbage is collected: layers
    and moments would stay in memory."""

    def __init__(
        self,
        modules: dict[str, nn.Module],
        paths: list[str],
        see: Callable[[str, Tensor], object],
        until: str | None = None,
    ):
        self._handles = [modules[path].register_forward_pre_hook(_shown_to(see, path)) for path in paths]
        self._handles += [modules[until].register_forward_pre_hook(_stop)] if until else []

    def __enter__(self) -> None:
        pass

    def __exit__(self, _type, raised: BaseException | None, _traceback) -> bool:
        for handle in self._handles:
            handle.remove()
        return isinstance(raised, _Reached)


def _shown_to(see: Callable[[str, Tensor], object], path: str):
    def show(_, args) -> None:  # what a hook returns would replace the input
        see(path, args[0])

    return show


def _stop(*_) -> None:
    raise _Reached
