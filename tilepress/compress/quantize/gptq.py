"""GPTQ: columns are rounded from the one with the largest inputs on, and each error is made up for by the columns that follow.

Frantar et al. 2022 (arXiv 2210.17323). With U the upper Cholesky factor of the inverse Hessian, rounding column j off by e moves the columns
behind it by -e / U_jj * U_j,j+1:. Scales stay those of rounding to the nearest code. Time is that of a factorization of [in, in] and
out * in^2 multiplications; memory is three [in, in] and two [out, in] matrices in float32.
"""

import torch
from torch import Tensor

from tilepress.compress.layers.moments import inverse_factor
from tilepress.formats import int8

BLOCK = 128  # columns whose errors reach the later ones together
DAMPING = 0.01  # added to the Hessian's diagonal, as a share of its mean


class Rounding:
    """The rounding of all weights that read one input, from its second moments [in, in] float32."""

    def __init__(self, hessian: Tensor, name: str):
        """`name` is told in the TilepressError for moments that cannot be factored."""
        self.order = hessian.diagonal().argsort(descending=True, stable=True)
        ordered = hessian[self.order][:, self.order]
        ordered.diagonal().add_(max(DAMPING * float(ordered.diagonal().mean()), 1e-12))
        self.inverse = inverse_factor(ordered, f"the input of {name}")

    def codes(self, weight: Tensor, scale: Tensor) -> Tensor:
        """Return int8 codes [out, in] for a weight [out, in] float32 and its scale [out, 1] or [1]."""
        columns = weight[:, self.order].t().contiguous()  # a column's elements lie together
        scale, codes = scale.float().reshape(-1), torch.empty_like(columns)
        for first in range(0, len(columns), BLOCK):
            last = min(first + BLOCK, len(columns))
            part, errors = columns[first:last], torch.empty_like(columns[first:last])
            ahead = self.inverse[first:last, first:] / self.inverse.diagonal()[first:last, None]
            for j in range(last - first):
                # What int8.quantize does to finite values, in few launches.
                codes[first + j] = (part[j] / scale).round_().clamp_(int8.QMIN, int8.QMAX)
                errors[j] = part[j] - codes[first + j] * scale
                part[j + 1 :].addr_(ahead[j, j + 1 : last - first], errors[j], alpha=-1)
            columns[last:].addmm_(ahead[:, last - first :].t(), errors, alpha=-1)
        found = torch.empty_like(codes)
        found[self.order] = codes
        return found.t().to(torch.int8).contiguous()
