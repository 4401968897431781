"""SparseGPT: columns are pruned from left to right, and what a pruned element did is made up for by the columns that follow.

Frantar & Alistarh 2023 (arXiv 2301.00774), sections 3.2 to 3.4. With U the upper Cholesky factor of the inverse Hessian, pruning w_j costs
(w_j / U_jj)^2 and moves the rest of its row by -w_j / U_jj * U_j,j+1:. Masks are chosen for 128 columns at once over all rows, so a row, or
a block of columns, can keep more than another. Time is that of a factorization and a triangular inverse of [in, in] and
2 * out * in^2 / 2 multiplications; memory is three [in, in] and two [out, in] matrices in float32. Here a block gets its share of the zeros
of the whole weight, so the count is met to the element, and zeros of the source stay zeros.
"""

from torch import Tensor

from tilepress.compress.layers.moments import inverse_factor
from tilepress.compress.prune.magnitude import smallest

BLOCK = 128  # columns whose masks are chosen together


def prune(
    weight: Tensor,
    hessian: Tensor,
    zeros: int,
    stay: Tensor | None = None,
    block: int = BLOCK,
    inverse: Tensor | None = None,
) -> Tensor:
    """Return weight [out, in] float32 with `zeros` zeros, fitted to a positive definite hessian [in, in] float32.

    `stay` [out, in] marks elements that are pruned first; `inverse` is the hessian's `inverse_factor`, where the caller has it.
    Raises TilepressError for a Hessian that cannot be factored."""
    columns = weight.shape[1]
    weight = weight.clone()
    inverse = inverse_factor(hessian) if inverse is None else inverse
    fixed = [0] * columns if stay is None else stay.sum(0).tolist()
    done = 0
    for first in range(0, columns, block):
        last = min(first + block, columns)
        diagonal = inverse.diagonal()[first:last]
        scores = (weight[:, first:last] / diagonal).square()
        if stay is not None:
            scores.masked_fill_(stay[:, first:last], -1.0)
        here, later = sum(fixed[first:last]), sum(fixed[last:])
        count = max(min(round(zeros * last / columns), zeros - later) - done, here)
        count = min(max(count, 0), scores.numel())
        done += count
        cut = smallest(scores, count).t().contiguous()
        part = weight[:, first:last].t().contiguous()  # a column's elements lie together
        ahead = inverse[first:last, first:] / diagonal[:, None]
        for j in range(last - first - 1):
            part[j + 1 :].addr_(ahead[j, j + 1 : last - first], part[j] * cut[j], alpha=-1)
        weight[:, first:last] = part.masked_fill(cut, 0.0).t()
        weight[:, last:].addmm_((part * cut).t(), ahead[:, last - first :], alpha=-1)
    return weight
