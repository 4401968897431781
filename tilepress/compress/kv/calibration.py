"""The walk of `compress kv`: each layer's queries, keys and values over calibration text, and the scales that serve them best.

Every rotation that may be chosen is searched in each layer. Whether the model's keys are rotated is decided in the end, by the error of the
attention's output summed over layers. Under a budget every form is searched for each layer's keys and values, and all are decided in the end (budget.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilepress.compress.kv.attention import AttentionShape, LayerSeen, Watch, rotary_dim
from tilepress.compress.kv.budget import Option, assign
from tilepress.compress.kv.fold import Folds, learned, pair_of, passes
from tilepress.compress.kv.search import Candidate, Search, candidates, choose
from tilepress.compress.layers.layerwise import LayerByLayer
from tilepress.compress.layers.walk import HIDDEN, Found, Layer, Visitor, Walk
from tilepress.compress.run.plan import Plan, Progress
from tilepress.compress.run.targets import Target, find_targets
from tilepress.formats import UsageError, dtype_name
from tilepress.formats.artifact import disk_errors, write_atomic
from tilepress.formats.checkpoint import Checkpoint
from tilepress.formats.kv_calibration import FOLDER, CachedLayer, KVCalibration, Side, to_files, weights_hash
from tilepress.formats.kv_int4 import KVFormat, forms_of
from tilepress.ranks import ALONE, Ranks

SAMPLED_WINDOWS = 8  # whose keys and values the search looks at
TOGETHER = {"cpu": 1, "cuda": 1 << 24}  # numbers of keys that are looked at together: a card waits for each launch


@dataclass(frozen=True)
class Settings:
    """The settings of a recipe that concern calibration."""

    shape: AttentionShape
    forms: tuple[KVFormat, ...]  # which are tried
    rotations: tuple[bool, ...]  # which are tried
    budget: float | None = None  # mean bits of a number; None: the one form serves all layers
    alike: bool = False  # a layer's keys and values have one form
    folds: bool = False  # values are stored times a matrix that is folded into the weights
    feeds_back: bool = True  # errors of 4-bit keys
    units: int = 1  # that a layer counts in progress


def calibrate(plan: Plan, settings: Settings, device: str, progress: Progress, ranks: Ranks = ALONE) -> Folds:
    """Run the model over the text and leave the sidecar's files in the work folder; return what has to be folded into weights.

    Raises UsageError for a model whose attention cannot be looked at, and where the work folder holds a calibration of something else;
    TilepressError naming the layer for keys that are not finite.
    """
    source, shape = Checkpoint(plan.source), settings.shape
    targets, _ = find_targets(source, (), plan.trust_remote_code, quantized=True)
    visitor = (_Search if settings.budget is None else _BudgetSearch)(settings, targets)
    found = Walk.over_text(plan, "kv", visitor, device, progress, ranks).run()
    folds = Folds(found)
    if ranks.rank:
        ranks.wait()
        return folds
    facts = {key: value for key, value in found.facts.items() if key not in _CHOICES}
    layers, refits = tuple(visitor.layers(found)), max(form.refits for form in settings.forms)
    calibration = KVCalibration(shape.kv_heads, layers, refits, facts)
    with disk_errors(plan.work / FOLDER):
        (plan.work / FOLDER).mkdir(exist_ok=True)
    for name, content in to_files(calibration, weights_hash(source, folds.apply)).items():
        write_atomic(plan.work / name, content, plan.work)
    ranks.wait()
    return folds


class _Search(Visitor):
    """Searches the sides of each layer's keys and values, once for every rotation that is tried."""

    def __init__(self, settings: Settings, targets: list[Target]):
        self.settings, self.targets, self.dtype = settings, targets, targets[0].dtype
        self.shape = settings.shape

    def choose(self, windows: list[list[int]], dataset: str, ranks: int = 1) -> list[list[int]]:
        tokens = sum(map(len, windows))
        if tokens < self.shape.head_dim:
            raise UsageError(f"{dataset} gave {tokens} tokens: too few to calibrate on", "give more text")
        return windows

    def compute_dtype(self, device: str) -> torch.dtype:
        return self.dtype if device != "cpu" else torch.float32

    def start(self, model: LayerByLayer, windows: list[list[int]], streams: dict[str, list[Tensor]]) -> None:
        streams[HIDDEN][:] = [h.to(model.device) for h in streams[HIDDEN]]
        self.shape = replace(self.shape, rotary_dim=rotary_dim(model, self.shape))
        self.watch = Watch(model, self.shape)

    def visit(self, layer: Layer) -> tuple[dict[str, list], dict[str, Tensor]]:
        search, found, tensors = self._search(layer)
        for rotate in self.settings.rotations:
            *chosen, facts = choose(search, self.settings.forms[0], rotate)
            found[_key(rotate)] = [{"layer": layer.number} | facts | self._fold_told(search)]
            for what, one in zip(_SIDES, chosen, strict=True):
                tensors |= _tensors(f"{_key(rotate)}.{layer.number}.{what}", one)
        return found, {} if layer.ranks.rank else tensors  # every rank has them

    def _search(self, layer: Layer) -> tuple[Search, dict[str, list], dict[str, Tensor]]:
        """Return the search of a layer, whose values are folded if they may be, and the facts and tensors of the fold."""
        probed = replace(layer, streams={HIDDEN: [layer.probe]})
        seen = self.watch.layer(layer, SAMPLED_WINDOWS)
        pair = self._fold(probed, seen) if self.settings.folds else None
        tensors = {f"{layer.number}.fold": seen.fold} if pair else {}
        facts = {"folds": [[layer.names[path] for path in pair or ()]]} if self.settings.folds else {}
        together = TOGETHER.get(self.watch.model.device.type, 1)
        return Search(seen, together, layer.ranks, self.settings.feeds_back), facts, tensors

    def _fold(self, layer: Layer, seen: LayerSeen) -> tuple[str, str] | None:
        """Fold a layer's values and return the paths of the modules that take the fold; None for a layer that does not let it through."""
        with layer.model.loaded(layer.path):
            pair = pair_of(layer, self.shape)
            if pair is None:
                return None
            groups = self.settings.forms[0].groups if self.settings.budget is None else 1
            made = lambda: learned(torch.cat([x for s in seen.samples for x in s.value], 1), groups).cpu()  # noqa: E731
            fold = layer.ranks.first(made).to(layer.model.device)
            modules = [layer.model.model.get_submodule(path) for path in pair]
            if not layer.ranks.first(lambda: passes(layer, *modules, fold)):
                return None
        seen.fold_values(fold, layer.ranks)
        return pair

    def _fold_told(self, search: Search) -> dict:
        return {"value_folded": search.seen.fold is not None} if self.settings.folds else {}

    def finish(self, facts: dict, streams: dict[str, list[Tensor]]) -> dict:
        reports = {rotate: facts.pop(_key(rotate)) for rotate in self.settings.rotations}
        rotates = min(reports, key=lambda rotate: sum(told["output_error"] ** 2 for told in reports[rotate]))
        return {"rotates": rotates} | _folds(facts) | self._told(facts) | {"report": reports[rotates]}

    def _told(self, facts: dict) -> dict:
        """Return what the sidecar tells of the model and the text."""
        shape, pairs = self.shape, "neighbours" if self.shape.interleaved else "halves"
        found = {"model_dtype": dtype_name(self.dtype), "query_heads": shape.heads}
        found |= {"rotary_dim": shape.rotary_dim, "rope_pairs": pairs if shape.rotary_dim else "none"}
        return found | {key: facts[key] for key in ("windows", "tokens", "computed_in", "device", "warnings")}

    def layers(self, found: Found) -> Iterator[CachedLayer]:
        """Yield the layers with the chosen rotation."""
        rotates = found.facts["rotates"]
        for told in found.facts["report"]:
            stem = f"{_key(rotates)}.{told['layer']}"
            sides = (_side(found, f"{stem}.{what}", told[f"{what}_clip"]) for what in _SIDES)
            yield CachedLayer(*sides, self.settings.forms[0], rotates, found.get(f"{stem}.key.feedback"))

    def units(self, layer: Layer) -> int:
        return self.settings.units


class _BudgetSearch(_Search):
    """Searches the sides of each layer's keys and values in every form, and assigns forms under the budget.

    What a form costs is the squared error of the attention's output times the layer's weight: how much of such an error reaches the layer's output. On
    SmolLM2-135M that is within a factor of 2 of what the model's Fisher information says of the divergence, in most layers; without the weight, of 4."""

    def visit(self, layer: Layer) -> tuple[dict[str, list], dict[str, Tensor]]:
        window = layer.hidden[0]
        search, folds, tensors = self._search(layer)
        found = {"layer": layer.number, "first_attention": search.first_attention} | self._fold_told(search)
        rounded = {}
        for what in _SIDES:
            tried = candidates(search, what, self.settings.forms, self.settings.rotations)
            found[what] = [
                {"rotate": one.rotate, "cost": one.cost, "heads": one.heads, "clip": one.side.clip, "facts": one.facts}
                for one in tried
            ]
            for i, one in enumerate(tried):
                tensors |= _tensors(f"{layer.number}.{what}.{i}", one)
            usual = tried[self.settings.forms.index(KVFormat(self.shape.head_dim))]
            rounded[what] = search.back(what, usual.form, usual.side, usual.rotate, usual.feedback)
        error = max(search.error(**rounded), 1e-30)
        if not layer.ranks.rank:
            seen_first = {what: rows[0][0] for what, rows in rounded.items()}
            found["weight"] = self.watch.change(layer, window, **seen_first) / error
        return {"tried": layer.ranks.tell([found])[0]} | folds, {} if layer.ranks.rank else tensors

    def finish(self, facts: dict, streams: dict[str, list[Tensor]]) -> dict:
        tried, forms = facts.pop("tried"), self.settings.forms
        report, chosen = [], []
        for layer, picks in zip(tried, self._assigned(tried), strict=True):
            one = {what: layer[what][i] for what, i in zip(_SIDES, picks, strict=True)}
            chosen.append({what: side | {"form": i} for (what, side), i in zip(one.items(), picks, strict=True)})
            names = {f"{what}_format": forms[i].name for what, i in zip(_SIDES, picks, strict=True)}
            error = (
                sum(side["cost"] for side in one.values()) ** 0.5
            )  # keys' and values' errors know nothing of each other
            heads = [sum(both) ** 0.5 for both in zip(*(side["heads"] for side in one.values()), strict=True)]
            told = {"layer": layer["layer"]} | names | {"output_error": error, "head_errors": heads}
            told |= one["key"]["facts"] | one["value"]["facts"]
            told |= {name: layer[name] for name in ("first_attention", "value_folded") if name in layer}
            report.append(told)
        return (
            {"chosen": chosen} | _folds(facts) | self._told(facts) | {"budget": self.settings.budget, "report": report}
        )

    def _assigned(self, tried: list[dict]) -> list[tuple[int, int]]:
        """Return which form each layer's keys and values have."""
        sizes, head_dim = [form.row_bytes for form in self.settings.forms], self.shape.head_dim
        budget_bytes = self.settings.budget / 8 * head_dim * 2 * len(tried)
        costs = [[[one["cost"] * layer["weight"] for one in layer[what]] for what in _SIDES] for layer in tried]
        if self.settings.alike:
            both = [[sum(pair) for pair in zip(*of_layer, strict=True)] for of_layer in costs]
            sides = [[Option(2 * size, cost) for size, cost in zip(sizes, each, strict=True)] for each in both]
            return [(i, i) for i in assign(sides, budget_bytes)]
        every = [each for of_layer in costs for each in of_layer]
        sides = [[Option(size, cost) for size, cost in zip(sizes, each, strict=True)] for each in every]
        flat = assign(sides, budget_bytes)
        return list(zip(flat[::2], flat[1::2], strict=True))

    def layers(self, found: Found) -> Iterator[CachedLayer]:
        """Yield the layers with the chosen forms."""
        for number, one in enumerate(found.facts["chosen"]):
            sides = (_side(found, f"{number}.{what}.{one[what]['form']}", one[what]["clip"]) for what in _SIDES)
            form = forms_of(*(self.settings.forms[one[what]["form"]] for what in _SIDES))
            feedback = found.get(f"{number}.key.{one['key']['form']}.feedback")
            yield CachedLayer(*sides, form, one["key"]["rotate"], feedback)


_SIDES = ("key", "value")
_CHOICES = ("rotates", "chosen", "folds")  # facts of a walk that are not the sidecar's


def _key(rotate: bool) -> str:
    return "hadamard" if rotate else "none"


def _folds(facts: dict) -> dict:
    return {"folds": facts["folds"]} if "folds" in facts else {}


def _tensors(stem: str, chosen: Candidate) -> dict[str, Tensor]:
    """Return what is kept of keys or values."""
    parts = {"channels": chosen.side.channels, "fixed": chosen.side.fixed, "feedback": chosen.feedback}
    return {f"{stem}.{part}": tensor for part, tensor in parts.items() if tensor is not None}


def _side(found: Found, stem: str, clip: float) -> Side:
    return Side(found.get(f"{stem}.channels"), found.get(f"{stem}.fixed"), clip)
