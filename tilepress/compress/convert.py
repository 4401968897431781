"""Changing the layout of weights without changing a value: the recipe behind `tilepress convert`.

To `dense`: the packed weights become ordinary tensors again, bit for bit, and the folder loads anywhere. To `tiled-csl`: a
checkpoint that some other tool pruned (zeros stored densely) becomes an artifact.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilepress.compress.plan import Plan, Progress
from tilepress.compress.targets import LeftAlone, Target, check_patterns, check_value_dtypes
from tilepress.formats import UsageError
from tilepress.formats.checkpoint import Checkpoint

LAYOUTS = ("dense", "tiled-csl")


@dataclass(frozen=True)
class ConvertRecipe:
    """Settings of `convert`. Raises UsageError for an unknown layout."""

    layout: str  # dense | tiled-csl
    ignore: tuple[str, ...] = ("lm_head",)

    command = "convert"
    passes = 1
    dtype: torch.dtype | None = None

    def __post_init__(self):
        if self.layout not in LAYOUTS:
            raise UsageError(f"--to {self.layout} is unknown", f"choose one of {', '.join(LAYOUTS)}")
        check_patterns(self.ignore)

    def settings(self) -> dict:
        return {"to": self.layout} | ({"ignore": list(self.ignore)} if self.layout != "dense" else {})

    def expected_density(self) -> float:
        return 1.0

    def check(self, targets: list[Target]) -> None:
        if self.layout == "tiled-csl":
            check_value_dtypes({target.name: target.dtype for target in targets})

    def prepare(self, plan: Plan, work: Path, device: str, progress: Progress) -> dict:
        return {}

    def transform(self, target: Target, weight: Tensor, state: dict) -> tuple[Tensor, dict]:
        return weight, {"error": 0.0}


def packed_targets(checkpoint: Checkpoint) -> tuple[list[Target], list[LeftAlone]]:
    """Every packed weight as a target: what `--to dense` converts. Needs no model class, so it works for any architecture."""
    targets, left = [], []
    for weight in checkpoint.weights.values():
        if weight.layout == "dense":
            left.append(LeftAlone(weight.name, "already dense"))
        else:
            packed = checkpoint.packed_shape(weight)
            targets.append(Target(weight, packed.rows, packed.cols, packed.dtype, packed.transposed))
    if not targets:
        raise UsageError(f"{checkpoint.path.name} has no packed weight", "it is dense already")
    return targets, left
