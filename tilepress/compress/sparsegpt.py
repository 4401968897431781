"""SparseGPT: columns are pruned from left to right, and what a pruned element did is made up for by the columns that follow.

Frantar & Alistarh 2023 (arXiv 2301.00774), sections 3.2 to 3.4. With U the upper Cholesky factor of the inverse Hessian, pruning w_j costs (w_j /
U_jj)^2 and moves the
rest of its row by -w_j / U_jj * U_j,j+1:. Masks are chosen for 128 columns at once over all rows, so a row, or a block of columns, can keep more than another.
Time is that of two factorizations of [in, in] and 2 * out * in^2 / 2 multiplications; memory three [in, in] and two [out, in] matrices in float32.
Here a block gets its share of the zeros of the whole weight, so the count is met to the element, and zeros of the source stay zeros.
"""

import torch
from torch import Tensor

from tilepress.compress.magnitude import smallest
from tilepress.compress.moments import cholesky

BLOCK = 128  # columns whose masks are chosen together


def prune(weight: Tensor, hessian: Tensor, zeros: int, stay: Tensor | None = None, block: int = BLOCK) -> Tensor:
    """weight [out, in] float32 with `zeros` zeros, fitted to a positive definite hessian [in, in] float32; `stay` [out, in] marks elements that are
    pruned first.

    Raises TilepressError for a Hessian that cannot be factored."""
    columns = weight.shape[1]
    weight = weight.clone()
    inverse = cholesky(torch.cholesky_inverse(cholesky(hessian))).t().contiguous()
    done = 0
    for first in range(0, columns, block):
        last = min(first + block, columns)
        part, upper = weight[:, first:last].clone(), inverse[first:last, first:last]
        scores = (part / upper.diagonal()).square()
        count = round(zeros * last / columns) - done
        if stay is not None:
            scores[stay[:, first:last]] = -1.0
            here, later = int(stay[:, first:last].sum()), int(stay[:, last:].sum())
            count = max(min(count, zeros - done - later), here)
        count = min(max(count, 0), part.numel())
        done += count
        cut = smallest(scores, count)
        errors = torch.empty_like(part)
        for j in range(last - first):
            error = torch.where(cut[:, j], part[:, j], 0.0) / upper[j, j]
            part[:, j:] -= torch.outer(error, upper[j, j:])
            errors[:, j] = error
        weight[:, first:last] = part.masked_fill_(cut, 0.0)
        weight[:, last:] -= errors @ inverse[first:last, last:]
    return weight
