"""Wanda: in every row the elements with the smallest |weight| times the norm of their input are pruned; nothing else changes.

Sun, Liu, Bair & Kolter 2023 (arXiv 2306.11695), section 3. Costs a sort of the weight, and of the text only the norms of the inputs.
Here zeros of the source count: a row that has more of them than its share keeps them, and the other rows give up less.
"""

import torch
from torch import Tensor

from tilepress.compress.prune.magnitude import smallest


def prune(weight: Tensor, norms: Tensor, zeros: int) -> Tensor:
    """Return weight [out, in] with exactly `zeros` zeros, or with those that it has if they are more; `norms` [in].

    Every row gets as many, and the remainder goes one each to the rows where that costs least; no row has fewer than before."""
    had = weight == 0
    had_by_row = had.sum(1)
    scores = (weight.float().abs() * norms).masked_fill_(had, -1.0)
    scores, order = scores.sort(dim=1, stable=True)
    level, more = _level(had_by_row, zeros, weight.shape[1])
    by_row = had_by_row.clamp(min=level)
    if more:
        rows = (had_by_row <= level).nonzero().squeeze(1)
        by_row[rows] += smallest(scores[rows, level], more)
    first = torch.arange(weight.shape[1], device=weight.device) < by_row[:, None]
    return weight.masked_fill(torch.zeros_like(had).scatter_(1, order, first), 0.0)


def _level(had: Tensor, zeros: int, columns: int) -> tuple[int, int]:
    """Return the most that every row [rows] with fewer zeros can be filled up to, and how many of `zeros` are left then.

    What is left is less than one for each such row."""
    grows = torch.bincount(had, minlength=columns + 1)[:columns].cumsum(0).tolist()  # from each level to the next
    level, left = 0, max(zeros - int(had.sum()), 0)
    while level < columns and left >= grows[level]:
        left -= grows[level]
        level += 1
    return level, left
