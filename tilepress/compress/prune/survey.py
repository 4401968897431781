"""What an allocation wants to know of a dense model before anything is pruned: outliers, and how much the model loses by each input's weights.

One walk over a few windows. For every input of a layer a variant of the hidden states branches off, computed with only that input's weights pruned
(wanda, at the
sparsity that was asked for), and runs through all later dense layers beside the others. At the end the squared distance of each variant's states from
the dense ones,
every token scaled to unit length, is what those weights cost. Time is that of half as many runs of the model over the few windows as it has inputs.
All states are written to the work folder every minute, and a stopped survey goes on from there.
"""

import time
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from torch import Tensor

from tilepress.compress.layers.layerwise import LayerByLayer
from tilepress.compress.layers.walk import PROBE_TOKENS, compute_dtype
from tilepress.compress.prune import wanda
from tilepress.compress.prune.allocation import CURVE, OUTLIER
from tilepress.compress.prune.layer_pruning import FEW_TOKENS, stages, watch_inputs
from tilepress.compress.quantize.smoothing import Group, find_groups
from tilepress.compress.recover.distillation import write_tensors
from tilepress.compress.run.plan import Plan, Progress
from tilepress.formats.artifact import to_json, write_atomic
from tilepress.formats.checkpoint import Checkpoint, linear_shape, read_json
from tilepress.text import check_vocabulary

if TYPE_CHECKING:
    from tilepress.compress.prune.recipe import Prune

WINDOWS, TOKENS = 8, 512  # of the calibration text, at most
SAVE_EVERY_S = 60.0  # at the end of a layer


@dataclass
class _State:
    """What is known after so many layers: of each weight so far, the dense model's hidden states and those of every variant."""

    layers: int
    found: dict[str, dict]
    hidden: list[Tensor]
    variants: list[tuple[list[str], list[Tensor]]]  # names of what is pruned, hidden states


def survey(
    plan: Plan, recipe: "Prune", windows: list[list[int]], device: str, identity: str, progress: Progress
) -> dict[str, dict]:
    """Of each weight in a decoder layer that saw enough tokens: {"layer", "outliers", "curve"} and, for `auto`, "cost" (see allocation.py).

    Looks at some of the calibration text's `windows`. Goes on from what a stopped survey of the same `identity` left in the work folder."""
    checkpoint = Checkpoint(plan.source)
    windows = [window[:TOKENS] for window in windows[:: max(len(windows) // WINDOWS, 1)][:WINDOWS]]
    dtype = recipe.dtype or plan.targets[0].dtype
    model = LayerByLayer(
        checkpoint, plan.targets, device, compute_dtype(dtype, device), recipe.dtype, plan.trust_remote_code
    )
    check_vocabulary(windows, model.model)
    hidden = [model.embed(torch.tensor(window)).to(dtype) for window in windows]
    model.embed(torch.zeros(min(PROBE_TOKENS, *map(len, windows)), dtype=torch.long))
    files = [plan.work / f"survey-{identity[:16]}-{number:04d}" for number in range(len(model.layers) + 1)]
    state = _restored(files) or _State(0, {}, hidden, [])
    del hidden
    saved = time.monotonic()
    for number, layer in enumerate(model.layers):
        progress(f"surveying {layer}", 0)
        if number >= state.layers:
            with model.loaded(layer):
                for _, states in state.variants:
                    states[:] = _run(model, layer, states)
                state.hidden = _survey_layer(model, layer, state.hidden, recipe, state.found, state.variants)
            state.layers += 1
            if time.monotonic() - saved >= SAVE_EVERY_S:
                _save(state, files)
                saved = time.monotonic()
        progress(f"surveying {layer}", sum(target.elements for target in model.targets_of[layer]))
    at = min(range(len(CURVE)), key=lambda i: abs(CURVE[i] - recipe.sparsity))
    for names, states in state.variants:
        local = sum(state.found[name]["curve"][at] for name in names)
        cost = _distance(states, state.hidden) / local if local else 0.0
        for name in names:
            state.found[name]["cost"] = cost
    return state.found


def _save(state: _State, files: list[Path]) -> None:
    """As a pair of files in place of the last one; facts come second."""
    tensors = {f"dense.{i}": h for i, h in enumerate(state.hidden)}
    tensors |= {f"{v}.{i}": h for v, (_, states) in enumerate(state.variants) for i, h in enumerate(states)}
    facts = {"found": state.found, "variants": [names for names, _ in state.variants]}
    file = files[state.layers]
    write_tensors(file.with_suffix(".safetensors"), tensors)
    write_atomic(file.with_suffix(".json"), to_json(facts), file.parent)
    for before in files[: state.layers]:
        before.with_suffix(".json").unlink(missing_ok=True)
        before.with_suffix(".safetensors").unlink(missing_ok=True)


def _restored(files: list[Path]) -> _State | None:
    layers = max((i for i, file in enumerate(files) if file.with_suffix(".json").exists()), default=None)
    if layers is None:
        return None
    facts = read_json(files[layers].with_suffix(".json"))
    tensors = load_file(files[layers].with_suffix(".safetensors"))

    def states(key: str | int) -> list[Tensor]:
        return [tensors[f"{key}.{i}"] for i in range(sum(name.startswith("dense.") for name in tensors))]

    variants = [(names, states(v)) for v, names in enumerate(facts["variants"])]
    return _State(layers, facts["found"], states("dense"), variants)


def _survey_layer(
    model: LayerByLayer, layer: str, hidden: list[Tensor], recipe: "Prune", found: dict, variants: list
) -> list[Tensor]:
    """Adds the layer's weights to `found` and its variants to `variants`; returns its outputs."""
    names = {model.module_of[target.name]: target.name for target in model.targets_of[layer]}
    module = model.model.get_submodule(layer)
    probe = min(hidden, key=lambda h: h.shape[1])[:, :PROBE_TOKENS]
    groups = find_groups(module, layer, set(names), model.head_dim, lambda: model.run(layer, probe), fold=False)
    modules = dict(module.named_modules(prefix=layer))
    squares: dict[str, Tensor] = {}
    tokens: dict[str, int] = {}

    def see(path: str, x: Tensor) -> None:
        x = x.reshape(-1, x.shape[-1]).float()
        squares[path] = squares.get(path, 0) + x.square().sum(0)
        tokens[path] = tokens.get(path, 0) + len(x)

    firsts = [group.linears[0] for group in groups]
    with watch_inputs(modules, firsts, see):
        outputs = _run(model, layer, hidden)
    for stage in stages(groups):
        seen = [group for group in stage if tokens.get(group.linears[0], 0) >= FEW_TOKENS]
        for group in seen:
            norms = (squares[group.linears[0]] / tokens[group.linears[0]]).sqrt()
            _describe(group, norms, modules, names, layer, found)
        if recipe.allocation == "auto" and seen:
            kept = {}
            for group in seen:
                norms = (squares[group.linears[0]] / tokens[group.linears[0]]).sqrt()
                for path in group.linears:
                    weight = modules[path].weight
                    kept[path] = weight.data.clone()
                    turned = weight.data.t() if linear_shape(modules[path])[2] else weight.data
                    turned.copy_(wanda.prune(turned.contiguous(), norms, recipe.count(turned.numel())))
            variants.append(([names[path] for path in kept], _run(model, layer, hidden)))
            for path, weight in kept.items():
                modules[path].weight.data.copy_(weight)
    return outputs


def _describe(group: Group, norms: Tensor, modules: dict, names: dict[str, str], layer: str, found: dict) -> None:
    for path in group.linears:
        weight = modules[path].weight.detach().float()
        scores = (weight.t() if linear_shape(modules[path])[2] else weight).abs() * norms
        ends = [round(part * (scores.numel() - 1)) + 1 for part in CURVE]
        # Sums of pieces: a card's cumsum is not the same every time.
        pieces = scores.square().flatten().sort().values.tensor_split(ends)[:-1]
        losses = accumulate(float(piece.sum(dtype=torch.float64)) for piece in pieces)
        found[names[path]] = {
            "layer": layer,
            "outliers": int((scores > OUTLIER * scores.mean()).sum()),
            "curve": [0.0, *list(losses)[1:]],
        }


def _run(model: LayerByLayer, layer: str, hidden: list[Tensor]) -> list[Tensor]:
    return [model.run(layer, h).to(h.dtype).cpu() for h in hidden]


def _distance(states: list[Tensor], dense: list[Tensor]) -> float:
    """The mean squared distance of tokens scaled to unit length."""
    total = tokens = 0
    for one, other in zip(states, dense, strict=True):
        one, other = (torch.nn.functional.normalize(x.float(), dim=-1) for x in (one, other))
        total += float((one - other).square().sum())
        tokens += one.shape[1]
    return total / tokens
