"""Second moments of a linear layer's input over calibration text: what wanda, SparseGPT and ADMM know about it.

H = sum of x x' over tokens, [in, in] in float32. A layer that is to give W x for the dense model's inputs x while it gets the pruned model's
z needs the cross moments C = sum of x z' too: the least squares target of the weight is then (W C + damping W) (H + damping)^-1 in place of W
(GPTAQ, Li et al. 2025, arXiv 2504.02692, derives the same for quantization). Memory is one [in, in] matrix, or two.
"""

import contextlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilepress.formats import TilepressError
from tilepress.ranks import Ranks

_BLOCKS = 8  # of columns: the lower triangle is not computed
_DAMPINGS = 4  # tried, each ten times the last


@dataclass
class Moments:
    """Moments of one input with so many channels; with `cross` those of the dense model's input with it, too."""

    width: int
    cross: bool = False
    tokens: int = 0
    _sum: Tensor | None = field(default=None, repr=False)
    _difference: Tensor | None = field(default=None, repr=False)  # C - H

    def add(self, x: Tensor, name: str, dense: Tensor | None = None, roots: Tensor | None = None) -> None:
        """Add x [..., channels], with `dense` of the same shape for cross moments, every token times its one of `roots` [tokens].

        Roots that are powers of two leave products as exact as they are. Raises TilepressError naming the layer if a value is not finite."""
        given = x.detach().reshape(-1, self.width)
        if not len(given):
            return
        if roots is not None:
            given = given * roots.to(given.dtype)[:, None]
        x = _filled_up(given).float()
        if self._sum is None:
            self._sum = x.new_zeros(self.width, self.width)
            self._difference = torch.zeros_like(self._sum) if self.cross else None
        step = -(-self.width // _BLOCKS)
        with exact_products(given):
            for first in range(0, self.width, step):
                self._sum[first : first + step, first:].addmm_(x[:, first : first + step].t(), x[:, first:])
            if self.cross:
                dense = dense.detach().reshape(-1, self.width)
                dense = dense if roots is None else dense * roots.to(dense.dtype)[:, None]
                if x.device.type == "cpu":  # bfloat16 matrix units: rounded relative to the difference itself
                    self._difference += (dense - given).t().contiguous() @ given
                else:
                    self._difference.addmm_((dense.float() - x).t(), x)
        self.tokens += len(given)
        if not bool(torch.isfinite(self._sum.diagonal()).all()):
            raise TilepressError(
                f"the input of {name} is not finite during calibration",
                "the checkpoint overflows in its own dtype: try --dtype bfloat16, or check it with `tilepress eval perplexity`",
            )

    def reduce(self, ranks: Ranks, owner: int | None = None) -> None:
        """Make these the moments of all ranks' tokens; with an `owner` on that rank alone, while the others keep but their number."""
        if ranks.size == 1:
            return
        self.tokens = int(ranks.sum(torch.tensor(self.tokens, device=ranks.device)))
        for name in ("_sum", *(["_difference"] if self.cross else [])):
            found = getattr(self, name)
            if self.tokens:
                found = torch.zeros(self.width, self.width, device=ranks.device) if found is None else found
                found = ranks.sum(found) if owner is None else ranks.sum_for(found, owner)
            setattr(self, name, found if owner in (None, ranks.rank) else None)

    def scale(self, factor: float) -> None:
        """Take it that every input had been multiplied by the root of a factor."""
        if factor != 1.0:
            for matrix in (self._sum, self._difference):
                if matrix is not None:
                    matrix.mul_(factor)

    def divide(self, columns: Tensor) -> None:
        """Take it that every input had been divided by columns [channels]."""
        for matrix in (self._sum, self._difference):
            if matrix is not None:
                matrix.div_(columns[:, None]).div_(columns)

    @property
    def norms(self) -> Tensor:
        """The root mean square of each channel [in]."""
        return (self._sum.diagonal() / self.tokens).sqrt()

    def hessian(self, damping: float) -> Tensor:
        """Return H / tokens, symmetric, with `damping` times its mean on the diagonal: positive definite also with dead channels or few tokens."""
        upper = self._sum.triu() / self.tokens
        found = upper + upper.triu(1).t()
        found.diagonal().add_(max(damping * float(self._sum.diagonal().mean()) / self.tokens, 1e-12))
        return found

    def target(self, weight: Tensor, inverse: Tensor, share: float) -> Tensor:
        """Return what the weight [out, in] should be on the pruned model's inputs to give the dense model's outputs.

        `inverse` is the `inverse_factor` of `hessian`. Of the difference between the two models' inputs the `share` is made up for."""
        if not self.cross or not share:
            return weight
        return weight + share / self.tokens * (weight @ self._difference @ inverse.t() @ inverse)


def _filled_up(x: Tensor) -> Tensor:
    """Fill x [tokens, channels] in bfloat16 on a CPU up with zeros to 64 tokens or a higher power of two.

    oneDNN compiles and keeps a kernel of nearly a megabyte for every number of tokens, and experts get any number."""
    if x.device.type != "cpu" or x.dtype != torch.bfloat16:
        return x
    return torch.nn.functional.pad(x, (0, 0, 0, (1 << max(6, (len(x) - 1).bit_length())) - len(x)))


def cholesky(matrix: Tensor, name: str = "the matrix") -> Tensor:
    """Return the lower factor of a positive definite matrix, with more on its diagonal if rounding made it indefinite.

    Raises TilepressError if ten times more, three times over, does not help."""
    more = 0.0
    for _ in range(_DAMPINGS):
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if not int(failed):
            return factor
        more = 10 * more or 0.01 * float(matrix.diagonal().mean())
        matrix = matrix.clone()
        matrix.diagonal().add_(more)
    raise TilepressError(f"the second moments of {name} are not positive definite", "give more text, or --damping 0.1")


def inverse_factor(matrix: Tensor, name: str = "the matrix") -> Tensor:
    """Return the upper U with U' U the inverse of a positive definite matrix; raises as `cholesky` does.

    From one factorization: if the matrix with rows and columns reversed is L L', then L^-1 reversed is U."""
    lower = cholesky(matrix.flip(0, 1), name)
    identity = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
    return torch.linalg.solve_triangular(lower, identity, upper=False).flip(0, 1)


@contextlib.contextmanager
def exact_products(x: Tensor):
    """Use faster units for float32 products of values that x's dtype holds exactly; sums are float32 either way.

    These are TensorFloat-32 on a card for bfloat16 and float16, and bfloat16 matrix units on a CPU for bfloat16."""
    on_card = x.device.type == "cuda"
    if x.dtype not in ((torch.bfloat16, torch.float16) if on_card else (torch.bfloat16,)):
        yield
        return
    units, name, value = (
        (torch.backends.cuda.matmul, "allow_tf32", True)
        if on_card
        else (torch.backends.mkldnn.matmul, "fp32_precision", "bf16")
    )
    before = getattr(units, name)
    setattr(units, name, value)
    try:
        yield
    finally:
        setattr(units, name, before)
