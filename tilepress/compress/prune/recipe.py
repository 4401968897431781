"""Unstructured pruning of every linear weight: the recipe behind `tilepress compress prune`.

`magnitude` needs no text. `sparsity` is then the share of zeros: per weight (`layer`), per output row (`row`), or over all of them together (`global`). The
baseline of the field: Han et al. 2015 (arXiv 1506.02626); uniform per layer is what published comparisons mean by "magnitude".
`wanda`, `sparsegpt` and `admm` look at calibration text (layer_pruning.py), and `sparsity` is the share of zeros of all weights together, laid out by
an allocation.
The count of zeros is round(sparsity * elements), met to the element; a weight that has more zeros already keeps them.
"""

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tilepress.compress.layers.walk import CALIBRATION, Found, Walk, wait_for_walk
from tilepress.compress.prune import expectation, memory as pruning_memory
from tilepress.compress.prune.allocation import ALLOCATIONS, allocate, read_allocation
from tilepress.compress.prune.layer_pruning import LayerPruner
from tilepress.compress.prune.magnitude import Histogram, Threshold, layer_threshold, prune, prune_rows
from tilepress.compress.prune.settings import METHODS as CALIBRATING, REFITTING, Settings
from tilepress.compress.run.encode import Compressed, format_names, layout_for
from tilepress.compress.run.plan import Inputs, ModelCard, Plan, Progress, Recipe, source_mtime
from tilepress.compress.run.targets import (
    EXPERTS_SEE,
    LeftAlone,
    Target,
    check_experts,
    check_patterns,
    check_value_dtypes,
)
from tilepress.formats import UsageError, check_kinds, dtype_name
from tilepress.formats.artifact import write_atomic
from tilepress.formats.checkpoint import Checkpoint
from tilepress.formats.layout import Layout
from tilepress.formats.tiled_bitmap import PAIRS_BELOW
from tilepress.ranks import ALONE, Ranks
from tilepress.text import Text

SCOPES = ("layer", "row", "global")
METHODS = ("magnitude", *CALIBRATING)
VALUE_DTYPES = ("auto", "int8")


@dataclass(frozen=True)
class Prune(Recipe):
    """Prune the linear weights and store what is left: the recipe of `tilepress compress prune`.

    Raises UsageError for a sparsity out of range, an unknown choice, or two that contradict each other."""

    sparsity: float  # share of weights that become zero, in [0, 1)
    scope: str = "layer"  # layer | row | global: where magnitude keeps the sparsity
    method: str = "magnitude"  # magnitude | wanda | sparsegpt | admm; the last three read text
    format: str = "auto"  # auto | tiled-csl | tiled-bitmap | dense
    value_dtype: str = "auto"  # of stored values: auto, the weight's | int8
    dtype: torch.dtype | None = None  # cast floating tensors to it first
    ignore: tuple[str, ...] = ("lm_head",)  # layers left dense: names, globs or re:REGEX
    allocation: str = "uniform"  # uniform | owl | auto: of methods that read text
    damping: float = 0.01  # of sparsegpt and admm: share of the mean diagonal that is added to it
    card: str = "any"  # any | h100 | h200: the card that will run it decides how bitmaps are grouped
    experts: str = "routed"  # routed | all: which tokens of the text the experts of a mixture are fitted to
    refit: int = 0  # steps in which each pruned decoder layer is trained to give the dense one's outputs

    command = "compress prune"
    together = True

    @property
    def calibrates(self) -> bool:
        return self.method != "magnitude"

    needs_text = calibrates

    @property
    def refuses_text(self) -> str | None:
        return None if self.calibrates else "--method magnitude reads no text"

    @property
    def calibrating(self) -> Settings:
        """The settings that pruning with text reads."""
        shown_all = self.experts == "all"
        return Settings(
            self.method,
            self.sparsity,
            self.allocation,
            self.damping,
            self.dtype,
            all_experts=shown_all,
            refit=self.refit,
        )

    def passes(self, text: Text | None) -> int:
        """A global threshold needs one more look at the targets (or two in float32), a calibration too, and an allocation another."""
        return 1 + (self.scope == "global" or self.calibrates) + (self.calibrates and self.allocation != "uniform")

    def __post_init__(self):
        check_kinds(self)
        expectation.check(self.sparsity)
        for value, choices, flag in (
            (self.scope, SCOPES, "scope"),
            (self.method, METHODS, "method"),
            (self.format, format_names(), "format"),
            (self.value_dtype, VALUE_DTYPES, "value-dtype"),
            (self.allocation, ALLOCATIONS, "allocation"),
            (self.card, PAIRS_BELOW, "card"),
            (self.experts, EXPERTS_SEE, "experts"),
        ):
            if value not in choices:
                raise UsageError(f"--{flag} {value} is unknown", f"choose one of {', '.join(choices)}")
        if self.value_dtype == "int8" and layout_for(self.format, "channel") is None:
            raise UsageError(f"--format {self.format} has no int8 values", "choose --format tiled-bitmap")
        if self.calibrates and self.scope != "layer":
            raise UsageError(
                f"--scope {self.scope} is of --method magnitude", f"--allocation lays out the zeros of {self.method}"
            )
        if not self.calibrates and self.allocation != "uniform":
            raise UsageError(
                f"--allocation {self.allocation} needs a method that reads text",
                "add --method sparsegpt (or wanda, admm)",
            )
        if not self.calibrates and self.experts == "all":
            raise UsageError("--experts all, but --method magnitude reads no text", "leave it out, or choose a method")
        if not 0 <= self.refit <= 1 << 20:
            raise UsageError(f"--refit {self.refit} is no number of steps", "200 is usual, 0 leaves it out")
        if self.refit and self.method not in REFITTING:
            raise UsageError(
                f"--refit trains what {' or '.join(REFITTING)} left", f"add --method {REFITTING[-1]}, or leave it out"
            )
        if not 0 < self.damping <= 1:
            raise UsageError(f"--damping {self.damping:g} is not in (0, 1]", "0.01 is usual")
        check_patterns(self.ignore)

    def settings(self, text: Text | None) -> dict:
        chosen = {
            "sparsity": self.sparsity,
            "scope": self.scope,
            "method": self.method,
            "format": self.format,
            "value_dtype": self.value_dtype,
            "ignore": list(self.ignore),
            "dtype": None if self.dtype is None else dtype_name(self.dtype),
        }
        if self.card != "any":
            chosen["card"] = self.card
        if self.calibrates:
            del chosen["scope"]
            chosen |= {"allocation": self.allocation, "damping": self.damping} | text.described()
        if self.refit:
            chosen["refit"] = self.refit
        if self.experts != "routed":
            chosen["experts"] = self.experts
        return chosen

    def warnings(self) -> list[str]:
        found = expectation.warning(self.method, self.sparsity)
        return [found] if found else []

    def layout(self, target: Target) -> Layout:
        return layout_for(self.format, "channel" if self.value_dtype == "int8" else None, self.card)

    def expected_density(self, inputs: Inputs) -> float:
        return 1 - self.sparsity

    def count(self, elements: int) -> int:
        """Return how many of so many elements are pruned."""
        return round(self.sparsity * elements)

    def check(self, inputs: Inputs, targets: list[Target], left_alone: list[LeftAlone]) -> None:
        check_experts(self.experts, targets)
        if layout_for(self.format).packed:
            check_value_dtypes({target.name: self.dtype or target.dtype for target in targets})

    def peak_bytes(self, inputs: Inputs, targets: list[Target]) -> int:
        writing = super().peak_bytes(inputs, targets)
        if not self.calibrates:
            return writing
        return max(writing, pruning_memory.peak_bytes(self.calibrating, inputs, targets))

    def prepare(self, plan: Plan, rank: int, device: str, progress: Progress, ranks: Ranks = ALONE) -> dict | None:
        """Return, for `global`, the threshold over all targets, for methods that calibrate the pruned weights; else
        nothing.

        Each shard's histogram, and each layer's pruned weights, are files."""
        if self.calibrates:
            apart = ranks.size == 1  # ranks that do not speak to each other: the first works for all
            if rank and apart and not wait_for_walk(plan.work, progress):
                return None
            if not rank or not apart:
                self._prune_layers(plan, device, progress, ranks)
            found = Found(plan.work)
            methods = {item["name"]: item["method"] for item in found.facts["pruned"]}
            return {"pruned": found, "methods": methods, "zeros": read_allocation(plan).zeros}
        if self.scope != "global":
            return {}
        dtypes = {self.dtype or target.dtype for target in plan.targets}
        wide = dtypes not in ({torch.bfloat16}, {torch.float16})
        count = self.count(sum(target.elements for target in plan.targets))
        files = self._histograms(plan, device, progress, wide, None)
        key, ties = _sum(files, wide, None).locate(count)
        last = key
        if wide:
            files = self._histograms(plan, device, progress, wide, key)
            last, ties = _sum(files, wide, key).locate(ties)
            key = key << 16 | last
        quota = {}
        for shard, path in zip(plan.shards, files, strict=True):
            quota[shard.number] = min(ties, int(np.load(path)[last]))
            ties -= quota[shard.number]
        return {
            "key": key,
            "wide": wide,
            "ties": quota,
            "ties_left": {},
            "shard": {job.target.name: shard.number for shard in plan.shards for job in shard.jobs if job.target},
        }

    def _prune_layers(self, plan: Plan, device: str, progress: Progress, ranks: Ranks) -> None:
        zeros = allocate(plan, self.calibrating, device, progress, ranks).zeros
        visitor = LayerPruner(self.calibrating, zeros, self.dtype or plan.targets[0].dtype)
        Walk.over_text(plan, CALIBRATION, visitor, device, progress, ranks).run()

    def _histograms(self, plan: Plan, device: str, progress: Progress, wide: bool, prefix: int | None) -> list[Path]:
        checkpoint, work, files = Checkpoint(plan.source), plan.work, []
        for shard in plan.shards:
            path = (
                work
                / f"magnitudes-{'all' if prefix is None else prefix}-{shard.number:05d}-{source_mtime(plan, shard)}.npy"
            )
            if path.exists():
                progress(shard.output, shard.elements if prefix is None else 0)
            else:
                counts = Histogram(wide, prefix)
                for job in shard.jobs:
                    if job.target:
                        progress(f"magnitudes of {job.target.name}", 0)
                        weight = checkpoint.dense(job.weight, device)
                        counts.add(weight.to(self.dtype or weight.dtype), job.target.name)
                        progress(job.target.name, job.target.elements if prefix is None else 0)
                buffer = io.BytesIO()
                np.save(buffer, counts.counts.numpy())
                write_atomic(path, buffer.getvalue(), work)
            files.append(path)
        return files

    def transform(self, target: Target, weight: Tensor, state: dict) -> Compressed:
        if self.calibrates:
            return self._calibrated(target, weight, state)
        if self.scope == "row":
            pruned, stats = prune_rows(weight, self.count(target.cols), target.name)
        elif self.scope == "global":
            shard = state["shard"][target.name]
            # Recovery asks for a weight more than once.
            ties = state["ties_left"].setdefault(target.name, state["ties"][shard])
            pruned, stats = prune(weight, Threshold(state["key"], ties, state["wide"]))
            state["ties"][shard] = min(state["ties"][shard], ties - stats.ties)
        else:
            pruned, stats = prune(weight, layer_threshold(weight, self.count(target.elements), target.name))
        return Compressed(pruned, {"zeros": stats.zeros, "error": round(stats.error, 6)})

    def _calibrated(self, target: Target, weight: Tensor, state: dict) -> Compressed:
        """The weight as calibration left it; one that is in no decoder layer is pruned by magnitude."""
        method = state["methods"].get(target.name)
        if method is None:
            pruned, stats = prune(weight, layer_threshold(weight, state["zeros"][target.name], target.name))
            return Compressed(pruned, {"zeros": stats.zeros, "error": round(stats.error, 6), "method": "magnitude"})
        pruned = state["pruned"].get(target.name).to(weight.device)
        whole = float(torch.linalg.vector_norm(weight, dtype=torch.float32))
        moved = float(torch.linalg.vector_norm(pruned.float() - weight.float()))
        record = {"zeros": int((pruned == 0).sum()), "error": round(moved / whole, 6) if whole else 0.0}
        if method == "magnitude":
            return Compressed(pruned, record | {"method": method})
        return Compressed(pruned, record | ({"refitted": True} if method in REFITTING else {}))

    def describe(self, plan: Plan, tensors: list[dict]) -> dict:
        if not self.calibrates:
            return {}
        found = read_allocation(plan)
        return {"calibration": Found(plan.work).facts, "allocation": {"chosen": found.chosen} | found.facts}

    @classmethod
    def model_card(cls, manifest: dict, steps: list[dict]) -> ModelCard:
        """Describe how the zeros were chosen, and warn unless the model was trained around them since."""
        number = next(i for i, step in enumerate(steps) if cls.made(step))
        method, sparsity = (steps[number]["settings"][key] for key in ("method", "sparsity"))
        told = []
        if "allocation" in manifest:
            seen = manifest["calibration"]
            told.append(
                f"Pruned by {method} on {seen['tokens']:,} tokens in {seen['windows']} windows, allocation {manifest['allocation']['chosen']}; "
                "the sparsity and the output error of every weight are in `tilepress.json`."
            )
        recovered = any(expectation.trained(step) for step in steps[: number + 1])
        if not recovered and (warned := expectation.warning(method, sparsity)):
            told.append(f"**Warning**: {warned}.")
        return ModelCard(paragraphs=tuple(told))


def _sum(files: list[Path], wide: bool, prefix: int | None) -> Histogram:
    total = Histogram(wide, prefix)
    for path in files:
        total.counts += torch.from_numpy(np.load(path))
    return total
