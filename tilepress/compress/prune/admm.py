"""ADMM on a layer's reconstruction error, then the kept weights refitted on their mask: the solver of ALPS.

Meng, Behdin, Wang & Mazumder 2024 (arXiv 2406.07831), sections 3.1 to 3.3. The weight and its copy with the wanted zeros are driven together
under a growing penalty, so the mask is chosen with all columns in view, where SparseGPT sees 128. Afterwards preconditioned conjugate
gradients, projected to the mask, find the best values on it. Columns are scaled to a unit diagonal first, as there. It starts from
SparseGPT's result, which it never makes worse. An eigendecomposition of [in, in], and two products [out, in] x [in, in] an iteration;
memory is three [in, in] and seven [out, in] matrices in float32.
"""

from functools import cached_property

import torch
from torch import Tensor

from tilepress.compress.prune import sparsegpt
from tilepress.compress.prune.magnitude import smallest

ITERATIONS = 60
REFINEMENTS = 12  # steps of conjugate gradients
_PENALTY = 0.1  # of the unit diagonal, at the start
_EVERY = 3  # iterations between changes of the penalty


class Scaled:
    """A hessian [in, in] scaled to a unit diagonal, for all weights that read its input; factored when it is asked for."""

    def __init__(self, hessian: Tensor):
        self.scale = hessian.diagonal().sqrt()
        self.unit = hessian / self.scale / self.scale[:, None]

    @cached_property
    def eigen(self) -> tuple[Tensor, Tensor]:
        """Its eigenvalues [in] and, in columns, eigenvectors."""
        return torch.linalg.eigh(self.unit)


def prune(
    weight: Tensor,
    hessian: Tensor,
    zeros: int,
    stay: Tensor | None = None,
    iterations: int = ITERATIONS,
    inverse: Tensor | None = None,
    scaled: Scaled | None = None,
) -> Tensor:
    """Return weight [out, in] float32 with `zeros` zeros, fitted to a positive definite hessian [in, in] float32.

    `stay` [out, in] marks elements that are pruned first; `inverse` is the hessian's `inverse_factor`, and `scaled` what is Scaled of it,
    where the caller has them. Raises TilepressError for a Hessian that cannot be factored."""
    first = sparsegpt.prune(weight, hessian, zeros, stay, inverse=inverse)
    scaled = scaled or Scaled(hessian)
    scale, unit = scaled.scale, scaled.unit
    exact = weight * scale
    start = refit(exact, unit, first * scale, first != 0)
    found = _search(exact, scaled, start, zeros, stay, iterations)
    found = refit(exact, unit, found, found != 0)
    better = error(exact, unit, found) < error(exact, unit, start)
    return (found if better else start) / scale


def _search(exact: Tensor, scaled: Scaled, start: Tensor, zeros: int, stay: Tensor | None, iterations: int) -> Tensor:
    values, vectors = scaled.eigen
    pulled = (exact @ vectors) * values
    sparse, dual, penalty = start, torch.zeros_like(exact), _PENALTY
    mask, kept = start != 0, max(exact.numel() - zeros, 1)
    for step in range(1, iterations + 1):
        full = ((pulled + (penalty * sparse - dual) @ vectors) / (values + penalty)) @ vectors.t()
        proposal = full + dual / penalty
        scores = proposal.abs()
        if stay is not None:
            scores.masked_fill_(stay, -1.0)
        sparse = proposal.masked_fill(smallest(scores, zeros), 0.0)
        dual = dual + penalty * (full - sparse)
        if step % _EVERY == 0:
            moved = int(((sparse != 0) & ~mask).sum()) / kept
            mask = sparse != 0
            if not moved and step > _EVERY:
                break
            penalty *= 1.3 if moved > 0.1 else 1.2 if moved > 0.005 else 1.1
    return sparse


def refit(exact: Tensor, hessian: Tensor, start: Tensor, mask: Tensor, steps: int = REFINEMENTS) -> Tensor:
    """Return the weight on `mask` closest to `exact` in the hessian's norm: all [out, in], a system for each row.

    Conjugate gradients, with the hessian's diagonal as preconditioner."""
    diagonal = hessian.diagonal()
    found = start * mask
    residual = ((exact - found) @ hessian) * mask
    scaled = residual / diagonal
    direction, length = scaled, (residual * scaled).sum(1, keepdim=True)
    for _ in range(steps):
        image = (direction @ hessian) * mask
        step = length / (direction * image).sum(1, keepdim=True).clamp(min=1e-30)
        found = found + step * direction
        residual = residual - step * image
        scaled = residual / diagonal
        before, length = length, (residual * scaled).sum(1, keepdim=True)
        direction = scaled + length / before.clamp(min=1e-30) * direction
    return found


def error(exact: Tensor, hessian: Tensor, weight: Tensor) -> float:
    """Return the mean squared error of the outputs, summed over them."""
    difference = exact - weight
    return float(((difference @ hessian) * difference).sum(dtype=torch.float64))
