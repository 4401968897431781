"""Pruning with calibration text, one decoder layer in memory at a time: what wanda, SparseGPT and ADMM are given, and in which order.

Within a layer the linear layers are pruned in the order in which they run. Those that read one input share its moments. The next ones see
what the pruned ones before them make of the text, and the next layer gets the pruned layer's outputs, so every weight is fitted to the inputs
that it will have. With `catch_up` a second stream of hidden states, the dense model's, tells what its outputs should have been.
Memory is the embeddings, two copies of a layer, the moments of one input (of all experts' at once), the solver's matrices, and the hidden
states of all windows in the model's dtype, with `catch_up` twice; all of it on the device. A CPU takes as much as the hidden states once
more, and some layers' inputs (stream.py).
"""

import copy
import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from tilepress.compress.layers.groups import Group, stages, watch_inputs
from tilepress.compress.layers.layerwise import LayerByLayer
from tilepress.compress.layers.moments import Moments, inverse_factor
from tilepress.compress.layers.stream import Stream
from tilepress.compress.layers.walk import FEW_TOKENS, HIDDEN, Layer, Visitor
from tilepress.compress.layers.windows import apart, run_together, together
from tilepress.compress.prune import admm, sparsegpt, wanda
from tilepress.compress.prune.magnitude import layer_threshold, prune as prune_magnitude
from tilepress.compress.prune.refit import refit
from tilepress.compress.prune.settings import Settings
from tilepress.formats.checkpoint import linear_shape
from tilepress.formats.stripes import converted
from tilepress.models.experts import count_of, counting_tokens
from tilepress.ranks import Ranks, dealt

_DENSE = "dense"  # the stream of the dense model
_AT_ONCE = {"cuda": 8192}  # tokens of windows that run together; a CPU gains nothing by it
_LOOKED_AT, _TOGETHER = 4096, 256  # tokens whose logits are compared in the end, and how many at a time


class LayerPruner(Visitor):
    """Prunes layer by layer; the pruned model runs on. Tensors are the pruned weights [out, in] by their stored names."""

    def __init__(self, settings: Settings, zeros: dict[str, int], dtype: torch.dtype):
        """`zeros` is how many zeros each weight is to have, by its stored name."""
        self.settings, self.zeros, self.dtype = settings, zeros, dtype
        self.all_experts = settings.all_experts

    def start(self, model: LayerByLayer, windows: list[list[int]], streams: dict[str, list[Tensor]]) -> None:
        self.windows = windows
        hidden = [h.to(model.device) for h in streams[HIDDEN]]
        parts = together([h.shape[1] for h in hidden], _AT_ONCE.get(model.device.type, 0))
        streams[HIDDEN][:] = [torch.cat([hidden[i] for i in part]) for part in parts]
        if self.settings.catch_up and self.settings.method != "wanda":
            streams[_DENSE] = list(streams[HIDDEN])

    def visit(self, layer: Layer) -> tuple[dict[str, list], dict[str, Tensor]]:
        model = layer.model
        found: dict = {"pruned": [], "warnings": []}
        tensors: dict[str, Tensor] = {}
        if not layer.number:
            found["warnings"] += [f"{name} is in no decoder layer: pruned by magnitude" for name in model.outside]
        with model.loaded(layer.path) as module:
            pruned, dense = _streams(layer, module)
            in_order, modules = stages(layer.groups(module)), dict(module.named_modules(prefix=layer.path))
            pruned.find_ends(layer.probe)
            roots: list[Tensor] = []
            if dense:
                sizes = [_sizes(h, dense.run(i)) for i, h in enumerate(dense.hidden)]
                found["stream"] = [{"layer": layer.path, "massive": _massive(sizes, layer.ranks)}]
                roots = [_roots(of_window) for of_window in sizes]
            for number, stage in enumerate(in_order):
                with counting_tokens(modules, model.device) as routed:
                    moments = self._observe(pruned, dense, in_order, number, roots)
                tensors |= self._prune_stage(layer, stage, moments, modules, found)
                if self.all_experts:
                    _tell_routed(found["pruned"], stage, {path: layer.ranks.sum(n) for path, n in routed.items()})
                del moments
            if dense and not (in_order and _pairs(in_order[-1])):
                dense.advance()
            if self.settings.refit and layer.names:
                del pruned  # with outputs of parts that change now
                found["refitted"] = [self._refit(layer, module, modules, tensors)]
                layer.advance()
            else:
                pruned.advance()
                del pruned
            del dense, modules
        if _DENSE in layer.streams and layer.path == model.layers[-1] and not layer.ranks.rank:
            found["cost"] = _cost(layer, self.windows)
        return found, tensors

    def finish(self, facts: dict, streams: dict[str, list[Tensor]]) -> dict:
        for cost in facts.pop("cost", []):
            facts["cost"] = cost
        return facts

    def skip(self, layer: Layer, tensors: dict[str, Tensor]) -> None:
        with layer.model.loaded(layer.path) as module:
            pruned, dense = _streams(layer, module)
            for name, weight in tensors.items():
                _put(pruned.modules[layer.model.module_of[name]], weight)
            pruned.advance()
            if dense:
                dense.advance()
            del pruned, dense

    def _observe(
        self, pruned: Stream, dense: Stream | None, in_order: list[list[Group]], number: int, roots: list[Tensor]
    ) -> dict[str, Moments]:
        """Return the moments of a stage's inputs, by the first linear layer that reads each.

        The last stage takes the dense stream through the layer. `roots` of each window weigh tokens of inputs that no norm makes."""
        stage, coming = in_order[number], in_order[number + 1 :]
        firsts = [group.linears[0] for group in stage]
        normed = {group.linears[0] for group in stage if group.normed or not _pairs(stage)}
        cross = dense is not None and _pairs(stage)
        moments = {path: Moments(linear_shape(pruned.modules[path])[1], cross) for path in firsts}
        wanted: dict[str, Tensor] = {}
        pruned.settle(_linears(in_order[number:]))
        if cross:
            dense.settle(_linears(in_order[-1:]))
            until = dense.after(firsts[0], coming[0][0].linears[0]) if coming else None

        def see(window: int, path: str, x: Tensor) -> None:
            weighed = roots and path not in normed and x.numel() == len(roots[window]) * x.shape[-1]
            moments[path].add(x, path, wanted.get(path), roots[window] if weighed else None)
            pruned.saw(path, window, x)

        for i in range(len(pruned.hidden)):
            if cross:
                with watch_inputs(dense.modules, firsts, wanted.__setitem__, until):
                    # A run that is to stop may not: an expert that gets no token of the window does not run.
                    (dense.run if until else dense.advance_one)(i)
            with watch_inputs(pruned.modules, firsts, partial(see, i), firsts[0] if len(firsts) == 1 else None):
                pruned.run(i)
        return moments

    def _prune_stage(
        self, layer: Layer, stage: list[Group], moments: dict[str, Moments], modules: dict[str, nn.Module], found: dict
    ) -> dict[str, Tensor]:
        """Prune the linear layers of a stage in place, each on the rank that owns it; return this rank's weights by their stored names."""
        ranks, names = layer.ranks, layer.names
        owner = _owners(stage, modules, ranks.size)
        for group in stage:  # all before the first is solved: a rank that solves would keep the others waiting
            owning = {owner[path] for path in group.linears}
            moments[group.linears[0]].reduce(ranks, owning.pop() if len(owning) == 1 else None)
        made: dict[str, Tensor] = {}
        told: dict[str, tuple[dict, str]] = {}
        for group in stage:
            of_group, own = moments.pop(group.linears[0]), [path for path in group.linears if owner[path] == ranks.rank]
            for path, weight, *facts in self._prune_group(group, own, of_group, modules, names) if own else ():
                _put(modules[path], weight)
                made[names[path]], told[path] = weight.cpu(), tuple(facts)
        told = {path: facts for of_rank in ranks.tell(told) for path, facts in of_rank.items()}
        for path in (path for group in stage for path in group.linears):
            if ranks.size > 1:
                weight = modules[path].weight.data
                shared = ranks.share(weight.to(self.dtype).contiguous(), owner[path])
                weight.copy_(shared)
            facts, warning = told[path]
            found["pruned"].append(facts)
            found["warnings"] += [warning] if warning else []
        return made

    def _refit(
        self, layer: Layer, module: nn.Module, modules: dict[str, nn.Module], tensors: dict[str, Tensor]
    ) -> dict:
        """Train what the solvers left of the layer, in place and in this rank's `tensors`; return what that brought."""
        told, weights = refit(layer, module, layer.streams[_DENSE], self.settings.refit)
        for path, weight in weights.items():
            name = layer.names[path]
            made = rounded(_turned(modules[path], weight), self.dtype, name).contiguous()
            _put(modules[path], made)
            if name in tensors:
                tensors[name] = made.cpu()
        return told

    def _prune_group(
        self, group: Group, paths: list[str], moments: Moments, modules: dict[str, nn.Module], names: dict[str, str]
    ) -> Iterator[tuple[str, Tensor, dict, str]]:
        """Yield each path of some linear layers of one input with its pruned weight, its facts and what there is to warn of."""
        few = moments.tokens < FEW_TOKENS
        settings = self.settings
        solver = None if few else Solver(settings, moments, group.linears[0])
        for path in paths:
            name, module = names[path], modules[path]
            weight = _turned(module, module.weight.detach()).contiguous()
            zeros, warning = self.zeros[name], ""
            if few:
                pruned, _ = prune_magnitude(weight, layer_threshold(weight, zeros, name))
                warning = f"{name} saw only {moments.tokens} tokens: pruned by magnitude"
            else:
                pruned, error = solver.prune(weight.float(), zeros)
            pruned = rounded(pruned, self.dtype, name).contiguous()
            made = int((pruned == 0).sum())
            told = {"name": name, "method": "magnitude" if few else settings.method, "zeros": made}
            told |= {"sparsity": made / weight.numel(), "tokens": moments.tokens}
            yield path, pruned, told | ({} if few else {"output_error": round(error, 6)}), warning


def _tell_routed(pruned: list[dict], stage: list[Group], counts: dict[str, Tensor]) -> None:
    """Add to the facts of a stage's weights, the last ones, how many tokens the router gave each expert."""
    paths = [path for group in stage for path in group.linears]
    for path, told in zip(paths, pruned[-len(paths) :], strict=True):
        if (routed := count_of(path, counts)) is not None:
            told["routed"] = routed


def _owners(stage: list[Group], modules: dict[str, nn.Module], size: int) -> dict[str, int]:
    """Return the rank that solves each linear layer: one for those of an input, which share its factors, where there are inputs enough."""
    pieces = [group.linears for group in stage]
    if len(pieces) < size:
        pieces = [(path,) for linears in pieces for path in linears]

    def cost(path: str) -> float:
        rows, cols, _ = linear_shape(modules[path])
        return rows * cols**2

    owners = dealt([sum(map(cost, linears)) for linears in pieces], size)
    return {path: rank for linears, rank in zip(pieces, owners, strict=True) for path in linears}


class Solver:
    """Prunes the weights that read one input."""

    def __init__(self, settings: Settings, moments: Moments, name: str):
        self.settings, self.moments = settings, moments
        if settings.method != "wanda":
            self.hessian = moments.hessian(settings.damping)
            self.inverse = inverse_factor(self.hessian, f"the input of {name}")
            self.scaled = admm.Scaled(self.hessian) if settings.method == "admm" else None

    def prune(self, weight: Tensor, zeros: int) -> tuple[Tensor, float]:
        """Return the weight [out, in] float32 pruned, and the error of its outputs relative to the unpruned weight's, on the same inputs."""
        if self.settings.method == "wanda":
            pruned = wanda.prune(weight, self.moments.norms, zeros)
            hessian = self.moments.hessian(0.0)
        else:
            hessian = self.hessian
            stay = weight == 0
            target = self.moments.target(weight, self.inverse, self.settings.catch_up)
            solve = partial(admm.prune, scaled=self.scaled) if self.scaled else sparsegpt.prune
            pruned = solve(target, hessian, zeros, stay, inverse=self.inverse)
        whole = admm.error(weight, hessian, torch.zeros_like(weight))
        left = max(admm.error(weight, hessian, pruned), 0.0)
        return pruned, (left / whole) ** 0.5 if whole > 0 else 0.0


def _streams(layer: Layer, module: nn.Module) -> tuple[Stream, Stream | None]:
    """Return the loaded layer's stream of the model that is pruned and, where the walk has it, the dense model's.

    Windows that are together part for good where the layer does not take them so."""
    if layer.hidden[0].shape[0] > 1 and not run_together(layer.model, layer.path, layer.probe):
        for stream in layer.streams.values():
            stream[:] = apart(stream)
    hidden = layer.streams.get(_DENSE)
    dense = Stream(layer.model, layer.path, copy.deepcopy(module), hidden) if hidden else None
    return Stream(layer.model, layer.path, module, layer.hidden), dense


def _sizes(before: Tensor, after: Tensor) -> Tensor:
    """Return the mean square of each token [tokens] in the residual stream, before or after the layer, whichever is larger."""
    return torch.maximum(*(h.float().square().mean(-1).reshape(-1) for h in (before, after.to(before.device))))


def _roots(sizes: Tensor) -> Tensor:
    """Return for each token [tokens] of a mean square a power of two near the fourth root of its reciprocal.

    What a linear layer adds for it then counts by its size, not by its square: else an attention sink's tokens, a million times others, are
    all that counts, and that size is what damping goes by. By equal shares they would count too little, since all others attend to them."""
    return torch.exp2((-0.25 * sizes.clamp(min=1e-20).log2()).round())


def _massive(sizes: list[Tensor], ranks: Ranks) -> float:
    """Return how many times as large as a usual token of its window the largest is."""
    times = torch.stack([(of_window.max() / of_window.median().clamp(min=1e-20)).sqrt() for of_window in sizes])
    return round(max(ranks.tell(float(times.max()))), 1)


def _cost(layer: Layer, windows: list[list[int]]) -> list[dict]:
    """Return what pruning costs at the end of the text: the divergence from the dense model's logits in nats, and the perplexity over its.

    Nothing for a model without a head."""
    tokens, kl, rise = 0, 0.0, 0.0
    streams = apart(layer.hidden), apart(layer.streams[_DENSE])
    for pruned, dense, window in reversed([*zip(*streams, windows, strict=True)]):
        for first in range(0, len(window) - 1 if tokens < _LOOKED_AT else 0, _TOGETHER):
            following = torch.tensor(window[first + 1 : first + 1 + _TOGETHER], device=layer.model.device)
            part = slice(first, first + len(following))
            logits = [layer.model.logits(h[:, part]) for h in (dense, pruned)]
            if logits[0] is None:
                return []
            exact, other = (of[0].float().log_softmax(-1) for of in logits)
            kl += float((exact.exp() * (exact - other)).sum())
            rise += float((exact - other).gather(1, following[:, None]).sum())
            tokens += len(following)
    return [{"tokens": tokens, "kl": kl / tokens, "perplexity": math.exp(rise / tokens)}] if tokens else []


def _linears(in_order: list[list[Group]]) -> set[str]:
    return {path for stage in in_order for group in stage for path in group.linears}


def _pairs(stage: list[Group]) -> bool:
    """Return whether the dense model's tokens come in the order of the pruned one's: not to experts, which its router may choose otherwise."""
    return ".experts." not in stage[0].linears[0]


def rounded(weight: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return a weight in the dtype of the result, with kept elements never rounded to zero.

    Raises TilepressError naming a weight that does not fit the dtype."""
    result = torch.cat(list(converted(weight, dtype, name))).view(weight.shape)
    lost = (result == 0) & (weight != 0)
    if bool(lost.any()):
        least = torch.finfo(dtype).smallest_normal
        result = torch.where(lost, torch.copysign(torch.full_like(weight, least), weight).to(dtype), result)
    return result


def _put(module: nn.Module, weight: Tensor) -> None:
    module.weight.data.copy_(_turned(module, weight))


def _turned(module: nn.Module, weight: Tensor) -> Tensor:
    """Return a linear layer's weight [out, in] the way round that the module has it, or back."""
    return weight.t() if linear_shape(module)[2] else weight
