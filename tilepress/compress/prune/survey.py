"""The survey of a dense model for an allocation, before anything is pruned: outliers, and how much the model loses by
each input's weights.

The survey walks over a few windows. For every input of a layer a variant of the hidden states branches off, computed with only that input's
weights pruned (by wanda, at the sparsity that was asked for). It runs through all later dense layers as a stream beside the others. In the
end the squared distance of each variant's states from the dense ones, every token scaled to unit length, is what those weights cost.
Time is that of half as many runs of the model over the few windows as it has inputs.
"""

from itertools import accumulate

import torch
from torch import Tensor, nn

from tilepress.compress.layers.groups import Group, stages, watch_inputs
from tilepress.compress.layers.walk import FEW_TOKENS, HIDDEN, Layer, Visitor, Walk
from tilepress.compress.prune import wanda
from tilepress.compress.prune.settings import Settings
from tilepress.compress.run.plan import Plan, Progress
from tilepress.formats.checkpoint import linear_shape
from tilepress.ranks import ALONE, Ranks

WINDOWS, TOKENS = 8, 512  # of the calibration text, at most
OUTLIER = 5.0  # times the mean of a weight's scores
CURVE = tuple(i / 50 for i in range(51))  # sparsities at which a weight's loss is measured


def survey(plan: Plan, settings: Settings, device: str, progress: Progress, ranks: Ranks = ALONE) -> dict[str, dict]:
    """Return what is known of each weight in a decoder layer that saw enough tokens, by its stored name.

    "layer" is its layer's path, "outliers" how many of its scores are OUTLIER times their mean, "curve" its local loss at each sparsity of
    CURVE, and "cost", for the allocation `auto`, the model's loss for each unit of that. Raises UsageError where the work folder holds a
    survey of something else."""
    visitor = _Survey(settings, settings.dtype or plan.targets[0].dtype, ranks)
    facts = Walk.over_text(plan, "survey", visitor, device, progress, ranks).run().facts
    return {found.pop("name"): found for found in facts["weights"]}


class _Survey(Visitor):
    """Measures the weights of the dense model. The stream of a variant has the name of its first pruned weight."""

    doing = "surveying"
    keeps_streams = True  # running all variants again would cost what the survey costs

    def __init__(self, settings: Settings, dtype: torch.dtype, ranks: Ranks = ALONE):
        self.settings, self.dtype, self.ranks = settings, dtype, ranks
        self.all_experts = settings.all_experts

    def choose(self, windows: list[list[int]], dataset: str, ranks: int = 1) -> list[list[int]]:
        count = max(WINDOWS, ranks)
        return [window[:TOKENS] for window in windows[:: max(len(windows) // count, 1)][:count]]

    def visit(self, layer: Layer) -> tuple[dict[str, list], dict[str, Tensor]]:
        with layer.model.loaded(layer.path) as module:
            for stream in layer.streams.keys() - {HIDDEN}:
                layer.advance(stream, _at_once(layer))
            return self._survey_layer(layer, module), {}

    def finish(self, facts: dict, streams: dict[str, list[Tensor]]) -> dict:
        found = {weight["name"]: weight for weight in facts["weights"]}
        at = min(range(len(CURVE)), key=lambda i: abs(CURVE[i] - self.settings.sparsity))
        for names in facts["variants"]:
            local = sum(found[name]["curve"][at] for name in names)
            distance = _distance(streams[names[0]], streams[HIDDEN], self.ranks)
            cost = distance / local if local else 0.0
            for name in names:
                found[name]["cost"] = cost
        return facts

    def _survey_layer(self, layer: Layer, module: nn.Module) -> dict[str, list]:
        """Return facts of the layer's weights and variants; adds the variants' streams and takes the dense one through the layer."""
        names, modules = layer.names, dict(module.named_modules(prefix=layer.path))
        groups = layer.groups(module)
        squares: dict[str, Tensor] = {}
        tokens: dict[str, int] = {}

        def see(path: str, x: Tensor) -> None:
            x = x.reshape(-1, x.shape[-1]).float()
            squares[path] = squares.get(path, 0) + x.square().sum(0)
            tokens[path] = tokens.get(path, 0) + len(x)

        with watch_inputs(modules, [group.linears[0] for group in groups], see):
            outputs = list(layer.outputs(at_once=_at_once(layer)))
        ranks = layer.ranks
        for path in (group.linears[0] for group in groups) if ranks.size > 1 else ():
            if seen := int(ranks.sum(torch.tensor(tokens.get(path, 0), device=ranks.device))):
                width = linear_shape(modules[path])[1]
                squares[path] = ranks.sum(squares.get(path, torch.zeros(width, device=ranks.device)))
                tokens[path] = seen
        norms = {path: (squares[path] / tokens[path]).sqrt() for path in squares if tokens[path] >= FEW_TOKENS}
        seen_by = {path: group.linears[0] for group in groups if group.linears[0] in norms for path in group.linears}
        mine = ranks.mine(list(seen_by))
        told = ranks.tell({path: _describe(modules[path], norms[seen_by[path]]) for path in mine})
        facts_of = {path: facts for of_rank in told for path, facts in of_rank.items()}
        weights, variants = [], []
        for stage in stages(groups):
            seen = [group for group in stage if group.linears[0] in norms]
            for group in seen:
                for path in group.linears:
                    weights.append({"name": names[path], "layer": layer.path} | facts_of[path])
            if self.settings.allocation == "auto" and seen:
                pruned = [names[path] for group in seen for path in group.linears]
                variants.append(pruned)
                layer.streams[pruned[0]] = self._variant(layer, modules, seen, norms)
        layer.hidden[:] = outputs
        return {"weights": weights, "variants": variants}

    def _variant(
        self, layer: Layer, modules: dict[str, nn.Module], groups: list[Group], norms: dict[str, Tensor]
    ) -> list[Tensor]:
        """Return the layer's outputs with the groups' weights pruned."""
        kept = {}
        for group in groups:
            for path in group.linears:
                weight = modules[path].weight.data
                kept[path] = weight.clone()
                turned = weight.t() if linear_shape(modules[path])[2] else weight
                pruned = wanda.prune(turned.contiguous(), norms[group.linears[0]], self.settings.count(turned.numel()))
                turned.copy_(pruned)
        outputs = list(layer.outputs(at_once=_at_once(layer)))
        for path, weight in kept.items():
            modules[path].weight.data.copy_(weight)
        return outputs


def _at_once(layer: Layer) -> int:
    """Return how many tokens run together: a card waits for launches."""
    return WINDOWS * TOKENS if layer.model.device.type == "cuda" else 0


def _describe(linear: nn.Module, norms: Tensor) -> dict:
    """Return outliers and curve of a linear layer's weight, given the root mean square of each channel of its input [in]."""
    weight = linear.weight.detach().float()
    scores = (weight.t() if linear_shape(linear)[2] else weight).abs() * norms
    ends = [round(part * (scores.numel() - 1)) + 1 for part in CURVE]
    # Sums of pieces: a card's cumsum is not the same every time.
    pieces = scores.square().flatten().sort().values.tensor_split(ends)[:-1]
    losses = accumulate(float(piece.sum(dtype=torch.float64)) for piece in pieces)
    outliers = int((scores > OUTLIER * scores.mean()).sum())
    return {"outliers": outliers, "curve": [0.0, *list(losses)[1:]]}


def _distance(states: list[Tensor], dense: list[Tensor], ranks: Ranks) -> float:
    """Return the mean squared distance of tokens scaled to unit length."""
    total = tokens = 0
    for one, other in zip(states, dense, strict=True):
        one, other = (torch.nn.functional.normalize(x.float(), dim=-1) for x in (one, other))
        total += float((one - other).square().sum())
        tokens += one.shape[1]
    total, tokens = ranks.sum(torch.tensor([total, tokens], dtype=torch.float64, device=ranks.device)).tolist()
    return total / tokens
