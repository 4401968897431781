"""Pruning with calibration text, one decoder layer in memory at a time: what wanda, SparseGPT and ADMM are given, and in which order.

Within a layer the linear layers are pruned in the order in which they run. Those that read one input share its moments; the next ones see what the pruned
ones before them make of the text, and the next layer gets the pruned layer's outputs. So every weight is fitted to the inputs that it will have; with
`catch_up` a second
stream of hidden states, the dense model's, tells what its outputs should have been. Memory is the embeddings, two copies of a layer, the moments of
one input (of all experts' at once), the
solver's matrices, and the hidden states of all windows in the model's dtype, with `catch_up` twice; all of it on the device, and on a CPU as much as the
hidden states once more, and some layers' inputs (stream.py).
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from tilepress.compress.layers.layerwise import LayerByLayer
from tilepress.compress.layers.moments import Moments, inverse_factor
from tilepress.compress.layers.stream import Stream
from tilepress.compress.layers.walk import PROBE_TOKENS, Visitor
from tilepress.compress.prune import admm, sparsegpt, wanda
from tilepress.compress.prune.magnitude import layer_threshold, prune as prune_magnitude
from tilepress.compress.quantize.smoothing import Group, find_groups
from tilepress.compress.run.encode import converted
from tilepress.formats import TilepressError
from tilepress.formats.checkpoint import linear_shape

METHODS = ("wanda", "sparsegpt", "admm")
REFITTING = ("sparsegpt", "admm")  # give kept weights other values
FEW_TOKENS = 128  # an expert that saw fewer is pruned by magnitude


@dataclass(frozen=True)
class Settings:
    """What of a recipe concerns this pass. `zeros` is a weight's count by its stored name."""

    method: str
    zeros: dict[str, int]
    damping: float
    catch_up: float = 0.5  # share of the difference between dense and pruned inputs that weights make up for; 0 needs no second stream


class LayerPruner(Visitor):
    """Prunes layer by layer; the pruned model runs on. Tensors are the pruned weights [out, in] by their stored names."""

    def __init__(self, settings: Settings, dtype: torch.dtype):
        self.settings, self.dtype = settings, dtype
        self._dense: list[Tensor] = []  # hidden states of the dense model

    def start(self, model: LayerByLayer, hidden: list[Tensor]) -> None:
        hidden[:] = [h.to(model.device) for h in hidden]
        self._dense = list(hidden) if self.settings.catch_up and self.settings.method != "wanda" else []

    def visit(self, model: LayerByLayer, layer: str, hidden: list[Tensor]) -> tuple[dict, dict[str, Tensor]]:
        names = {model.module_of[target.name]: target.name for target in model.targets_of[layer]}
        found: dict = {"pruned": [], "warnings": []}
        tensors: dict[str, Tensor] = {}
        if layer == model.layers[0]:
            found["warnings"] += [f"{name} is in no decoder layer: pruned by magnitude" for name in model.outside]
        with model.loaded(layer) as module:
            pruned, dense = self._streams(model, layer, module, hidden)
            probe = min(hidden, key=lambda h: h.shape[1])[:, :PROBE_TOKENS]
            groups = find_groups(module, layer, set(names), model.head_dim, lambda: model.run(layer, probe), fold=False)
            unused = sorted(set(names) - {path for group in groups for path in group.linears})
            if unused:
                raise TilepressError(f"the model does not run {unused[0]}", f"leave it alone: --ignore {unused[0]}")
            in_order, modules = stages(groups), dict(module.named_modules(prefix=layer))
            pruned.find_ends(probe)
            for number, stage in enumerate(in_order):
                moments = self._observe(pruned, dense, in_order, number)
                for group in stage:
                    self._prune_group(group, moments[group.linears[0]], modules, names, found, tensors)
                del moments
            pruned.advance()
            if dense and not (in_order and _pairs(in_order[-1])):
                dense.advance()
            del pruned, dense, modules
        return found, tensors

    def skip(self, model: LayerByLayer, layer: str, hidden: list[Tensor], tensors: dict[str, Tensor]) -> None:
        with model.loaded(layer) as module:
            pruned, dense = self._streams(model, layer, module, hidden)
            for name, weight in tensors.items():
                _put(pruned.modules[model.module_of[name]], weight)
            pruned.advance()
            if dense:
                dense.advance()
            del pruned, dense

    def _streams(
        self, model: LayerByLayer, layer: str, module: nn.Module, hidden: list[Tensor]
    ) -> tuple[Stream, Stream | None]:
        """The model that is pruned and, if it is followed, the dense one."""
        dense = Stream(model, layer, copy.deepcopy(module), self._dense) if self._dense else None
        return Stream(model, layer, module, hidden), dense

    def _observe(
        self, pruned: Stream, dense: Stream | None, in_order: list[list[Group]], number: int
    ) -> dict[str, Moments]:
        """The moments of a stage's inputs, by the first linear layer that reads each; the last stage takes the dense stream through the layer."""
        stage, coming = in_order[number], in_order[number + 1 :]
        firsts = [group.linears[0] for group in stage]
        cross = dense is not None and _pairs(stage)
        moments = {path: Moments(linear_shape(pruned.modules[path])[1], cross) for path in firsts}
        wanted: dict[str, Tensor] = {}
        pruned.settle(_linears(in_order[number:]))
        if cross:
            dense.settle(_linears(in_order[-1:]))
            until = dense.after(firsts[0], coming[0][0].linears[0]) if coming else None

        def see(window: int, path: str, x: Tensor) -> None:
            moments[path].add(x, path, wanted.get(path))
            pruned.saw(path, window, x)

        for i in range(len(pruned.hidden)):
            if cross:
                with watch_inputs(dense.modules, firsts, wanted.__setitem__, until):
                    # A run that is to stop may not: an expert that gets no token of the window does not run.
                    (dense.run if until else dense.advance_one)(i)
            with watch_inputs(pruned.modules, firsts, partial(see, i), firsts[0] if len(firsts) == 1 else None):
                pruned.run(i)
        return moments

    def _prune_group(
        self,
        group: Group,
        moments: Moments,
        modules: dict[str, nn.Module],
        names: dict[str, str],
        found: dict,
        tensors: dict[str, Tensor],
    ) -> None:
        """Prunes the linear layers of one input, in place."""
        few = moments.tokens < FEW_TOKENS
        settings = self.settings
        solver = (
            None if few else Solver(settings.method, moments, settings.damping, settings.catch_up, group.linears[0])
        )
        for path in group.linears:
            name, module = names[path], modules[path]
            weight = module.weight.detach()
            weight = (weight.t() if linear_shape(module)[2] else weight).contiguous()
            zeros = settings.zeros[name]
            if few:
                pruned, _ = prune_magnitude(weight, layer_threshold(weight, zeros, name))
                found["warnings"].append(f"{name} saw only {moments.tokens} tokens: pruned by magnitude")
                error = None
            else:
                pruned, error = solver.prune(weight.float(), zeros)
            pruned = rounded(pruned, self.dtype, name)
            _put(module, pruned)
            tensors[name] = pruned.cpu().contiguous()
            made = int((pruned == 0).sum())
            found["pruned"].append(
                {
                    "name": name,
                    "method": "magnitude" if few else settings.method,
                    "zeros": made,
                    "sparsity": made / weight.numel(),
                    "tokens": moments.tokens,
                }
                | ({} if error is None else {"output_error": round(error, 6)})
            )


class Solver:
    """Prunes the weights that read one input."""

    def __init__(self, method: str, moments: Moments, damping: float, catch_up: float, name: str = "the matrix"):
        self.method, self.moments, self.damping, self.catch_up = method, moments, damping, catch_up
        if method != "wanda":
            self.hessian = moments.hessian(damping)
            self.inverse = inverse_factor(self.hessian, f"the input of {name}")

    def prune(self, weight: Tensor, zeros: int) -> tuple[Tensor, float]:
        """The weight [out, in] float32 pruned, and the error of its outputs relative to those of the unpruned one, on the same inputs."""
        if self.method == "wanda":
            pruned = wanda.prune(weight, self.moments.norms, zeros)
            hessian = self.moments.hessian(0.0)
        else:
            hessian = self.hessian
            stay = weight == 0
            target = self.moments.target(weight, self.inverse, self.catch_up)
            solve = sparsegpt.prune if self.method == "sparsegpt" else admm.prune
            pruned = solve(target, hessian, zeros, stay, inverse=self.inverse)
        whole = admm.error(weight, hessian, torch.zeros_like(weight))
        left = max(admm.error(weight, hessian, pruned), 0.0)
        return pruned, (left / whole) ** 0.5 if whole > 0 else 0.0


def _linears(in_order: list[list[Group]]) -> set[str]:
    return {path for stage in in_order for group in stage for path in group.linears}


def _pairs(stage: list[Group]) -> bool:
    """Whether the dense model's tokens come in the order of the pruned one's: not to experts, which its router chooses otherwise."""
    return ".experts." not in stage[0].linears[0]


def rounded(weight: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """In the dtype of the result, kept elements never rounded to zero. Raises TilepressError naming a weight that does not fit it."""
    result = torch.cat(list(converted(weight, dtype, name))).view(weight.shape)
    lost = (result == 0) & (weight != 0)
    if bool(lost.any()):
        least = torch.finfo(dtype).smallest_normal
        result = torch.where(lost, torch.copysign(torch.full_like(weight, least), weight).to(dtype), result)
    return result


def _put(module: nn.Module, weight: Tensor) -> None:
    module.weight.data.copy_(weight.t() if linear_shape(module)[2] else weight)
