"""GPTQ: columns are rounded from the one with the largest inputs on, and each error is made up for by the columns that follow.

Frantar et al. 2022 (arXiv 2210.17323). With U the upper Cholesky factor of the inverse Hessian, rounding column j off by e moves the columns
behind it by -e / U_jj * U_j,j+1:. Scales stay those of rounding to the nearest code. Time is that of a factorization of [in, in] and
out * in^2 multiplications; memory is three [in, in] and two [out, in] matrices in float32.
"""

import math

import torch
from torch import Tensor

from tilepress.compress.layers.moments import inverse_factor
from tilepress.formats import int8

BLOCK = 128  # columns whose errors reach the later ones together
# Added to the Hessian's diagonal, as a share of its mean: more where few tokens say little of directions that hardly occur in them.
DAMPING, DAMPING_OF_FEW, MOST_DAMPING = 0.1, 0.5, 0.5


class Rounding:
    """The rounding of all weights that read one input, from its second moments [in, in] float32."""

    def __init__(self, hessian: Tensor, name: str, tokens: float = math.inf):
        """`name` is told in the TilepressError for moments that cannot be factored; `tokens` is how many they are of."""
        self.order = hessian.diagonal().argsort(descending=True, stable=True)
        ordered = hessian[self.order][:, self.order]
        damping = min(DAMPING + DAMPING_OF_FEW * len(ordered) / tokens, MOST_DAMPING)
        ordered.diagonal().add_((damping * ordered.diagonal().mean()).clamp(min=1e-12))
        self.inverse = inverse_factor(ordered, f"the input of {name}")

    def codes(self, weight: Tensor, scale: Tensor) -> Tensor:
        """Return int8 codes [out, in] for a weight [out, in] float32 and its scale [out, 1] or [1]."""
        # In units of the scales, columns one behind the other: four launches a column, and each waits for the last.
        left = (weight / scale.float().reshape(-1, 1))[:, self.order].t().contiguous()
        codes, errors = torch.empty_like(left), torch.empty_like(left[:BLOCK])
        for first in range(0, len(left), BLOCK):
            part = left[first : first + BLOCK]
            end = first + len(part)
            ahead = self.inverse[first:end, first:] / self.inverse.diagonal()[first:end, None]
            inside, off = ahead[:, : len(part)], errors[: len(part)]
            columns = zip(part.unbind(), codes[first:end].unbind(), off.unbind(), inside.unbind(), strict=True)
            for j, (column, code, error, following) in enumerate(columns):
                torch.sub(column, torch.round(column, out=code).clamp_(int8.QMIN, int8.QMAX), out=error)
                part[j + 1 :].addr_(following[j + 1 :], error, alpha=-1)
            left[end:].addmm_(ahead[:, len(part) :].t(), off, alpha=-1)
        found = torch.empty_like(codes)
        found[self.order] = codes
        return found.t().to(torch.int8).contiguous()
