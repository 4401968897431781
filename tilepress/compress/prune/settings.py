"""Settings that pruning with calibration text reads from a recipe: the allocation, the survey, the solvers and the
estimate of memory read it.
"""

from dataclasses import dataclass

import torch

METHODS = ("wanda", "sparsegpt", "admm")
REFITTING = ("sparsegpt", "admm")  # give kept weights other values


@dataclass(frozen=True)
class Settings:
    """Settings of a recipe that calibrates; its recipe has checked them."""

    method: str  # one of METHODS
    sparsity: float  # of all targets together
    allocation: str = "uniform"
    damping: float = 0.01  # of REFITTING methods: the share of the mean diagonal that is added to it
    dtype: torch.dtype | None = None  # of the result, if it is not the source's
    catch_up: float = (
        0.5  # share of what dense and pruned inputs differ by that weights make up for; 0: no second stream
    )

    all_experts: bool = False  # whether experts of a mixture are fitted to every token
    refit: int = 0  # steps in which a pruned decoder layer is trained to give the dense one's outputs

    def count(self, elements: int) -> int:
        """Return how many of so many elements are pruned."""
        return round(self.sparsity * elements)
