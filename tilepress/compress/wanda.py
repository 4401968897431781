"""Wanda: in every row the elements with the smallest |weight| times the norm of their input are pruned; nothing else changes.

Sun, Liu, Bair & Kolter 2023 (arXiv 2306.11695), section 3. Costs a sort of the weight, and of the text only the norms of the inputs.
"""

import torch
from torch import Tensor

from tilepress.compress.magnitude import smallest


def prune(weight: Tensor, norms: Tensor, zeros: int) -> Tensor:
    """weight [out, in] without `zeros` of its elements, `norms` [in]: as many in each row, the remainder one each in the rows where that costs least."""
    scores = weight.float().abs() * norms
    each, more = divmod(zeros, weight.shape[0])
    ranks = scores.argsort(dim=1, stable=True).argsort(dim=1)
    cut = ranks < each
    if more:
        next_ones = ranks == each
        cut |= next_ones & smallest(scores[next_ones], more)[:, None]
    return torch.where(cut, torch.zeros((), dtype=weight.dtype, device=weight.device), weight)
