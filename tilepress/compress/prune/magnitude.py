"""Magnitude selection, exact to the element, in memory that does not grow with the model.

A magnitude is compared through its bits: without the sign they order as the magnitude does. 16-bit dtypes have 32768 of them,
so one histogram finds the k-th smallest exactly; float32 (or a mixture of dtypes) takes two, of the high and the low half.
Elements equal to the threshold are pruned in the order of [out_features, in_features] until the count is met, so that the result
is exact and the same every time. Zeros, of either sign, become +0.0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tilepress.formats import TilepressError

_BINS = 1 << 15
_LOW_BINS = 1 << 16
_CHUNK = 1 << 20  # elements looked at together: small enough for the cache
_ON_A_CARD = 1 << 26  # more on a card, where the host waits for a few sums of each piece


@dataclass(frozen=True)
class Threshold:
    """Prune every magnitude below `key`, and the first `ties` that equal it."""

    key: int
    ties: int
    wide: bool  # keys are those of float32


def keys(x: Tensor, wide: bool) -> Tensor:
    """Return magnitudes as integers that sort alike: int16 for a 16-bit dtype unless `wide`, else int32 of the float32 value."""
    if x.dtype.itemsize == 2 and not wide:
        return x.view(torch.int16) & 0x7FFF
    return x.float().view(torch.int32) & 0x7FFFFFFF


def _damaged(name: str) -> TilepressError:
    how = "the checkpoint is damaged, or overflowed when it was converted to this dtype"
    return TilepressError(f"{name} has non-finite values", how)


def _pieces(weight: Tensor):
    step = max(1, (_ON_A_CARD if weight.is_cuda else _CHUNK) // max(weight.shape[1], 1))
    for first in range(0, weight.shape[0], step):
        yield first, weight[first : first + step].contiguous()


class Histogram:
    """Counts of magnitudes over any number of weights; `level` 1 counts the low halves within the bin `prefix` of level 0."""

    def __init__(self, wide: bool, prefix: int | None = None):
        self.wide, self.prefix = wide, prefix
        self.counts = torch.zeros(_BINS if prefix is None else _LOW_BINS, dtype=torch.int64)

    def add(self, weight: Tensor, name: str) -> None:
        """Count a weight [rows, cols]. Raises TilepressError naming it if it holds a non-finite value."""
        before = self.counts.clone()
        for _, piece in _pieces(weight):
            key = keys(piece, self.wide).view(-1)
            if not self.wide:
                found = torch.bincount(key, minlength=_BINS)
            elif self.prefix is None:
                found = torch.bincount(key >> 16, minlength=_BINS)
            else:
                found = torch.bincount(key[key >> 16 == self.prefix] & 0xFFFF, minlength=_LOW_BINS)
            self.counts += found.cpu()
        infinite = 0x7C00 if weight.dtype == torch.float16 and not self.wide else 0x7F80
        if self.prefix is None and bool((self.counts[infinite:] != before[infinite:]).any()):
            raise _damaged(name)

    def locate(self, count: int) -> tuple[int, int]:
        """Return the bin that holds the `count`-th smallest (from 1), and how many of that bin belong to the smallest `count`."""
        if count == 0:
            return 0, 0
        ends = torch.cumsum(self.counts, 0)
        at = int(torch.searchsorted(ends, count))
        return at, count - (int(ends[at - 1]) if at else 0)


def layer_threshold(weight: Tensor, count: int, name: str) -> Threshold:
    """Return the threshold that prunes exactly `count` elements of one weight [rows, cols]."""
    wide = weight.dtype.itemsize != 2
    coarse = Histogram(wide)
    coarse.add(weight, name)
    key, ties = coarse.locate(count)
    if wide and count:
        fine = Histogram(wide, key)
        fine.add(weight, name)
        low, ties = fine.locate(ties)
        key = key << 16 | low
    return Threshold(key, ties, wide)


@dataclass
class PruneStats:
    zeros: int = 0
    ties: int = 0  # elements pruned that equal the threshold
    lost: float = 0.0  # sum of squares pruned
    total: float = 0.0  # sum of squares before

    @property
    def error(self) -> float:
        """Frobenius norm of what was pruned, relative to the weight's."""
        return (self.lost / self.total) ** 0.5 if self.total else 0.0


def prune(weight: Tensor, threshold: Threshold) -> tuple[Tensor, PruneStats]:
    """Return a copy of weight [rows, cols] without the elements that the threshold names."""
    out, stats = torch.empty_like(weight), PruneStats()
    for first, piece in _pieces(weight):
        key = keys(piece, threshold.wide)
        cut = key < max(threshold.key, 1)
        if threshold.ties > stats.ties and threshold.key:
            equal = (key == threshold.key).view(-1).nonzero().squeeze(1)[: threshold.ties - stats.ties]
            cut.view(-1)[equal] = True
            stats.ties += equal.numel()
        _finish(piece, cut, out[first : first + piece.shape[0]], stats)
    return out, stats


def prune_rows(weight: Tensor, count: int, name: str) -> tuple[Tensor, PruneStats]:
    """Return a copy of weight [rows, cols] without the `count` smallest elements of every row; ties by column."""
    out, stats = torch.empty_like(weight), PruneStats()
    for first, piece in _pieces(weight):
        if not bool(torch.isfinite(piece).all()):
            raise _damaged(name)
        key = keys(piece, False).to(torch.int32)
        cut = key == 0
        if count:
            limit = key.kthvalue(count, dim=1, keepdim=True).values
            below, equal = key < limit, key == limit
            cut |= below | (equal & (equal.cumsum(1) <= count - below.sum(1, keepdim=True)))
        _finish(piece, cut, out[first : first + piece.shape[0]], stats)
    return out, stats


def smallest(scores: Tensor, count: int) -> Tensor:
    """Mark exactly the `count` smallest of scores of any shape; of equal ones the first."""
    flat = scores.reshape(-1)
    if not count:
        return torch.zeros_like(scores, dtype=torch.bool)
    limit = _kth(flat, count)
    cut, equal = flat < limit, flat == limit
    ties = equal.nonzero().squeeze(1)[: count - int(cut.sum())]
    cut[ties] = True
    return cut.view(scores.shape)


def _kth(flat: Tensor, count: int) -> Tensor:
    """Return the `count`-th smallest value; a card's own kthvalue is slow on long vectors."""
    return flat.kthvalue(count).values if flat.device.type == "cpu" else flat.sort().values[count - 1]


def _finish(piece: Tensor, cut: Tensor, out: Tensor, stats: PruneStats) -> None:
    out.copy_(piece).masked_fill_(cut, 0.0)
    stats.zeros += int(torch.count_nonzero(cut))
    total = torch.linalg.vector_norm(piece, dtype=torch.float32).double() ** 2
    kept = torch.linalg.vector_norm(out, dtype=torch.float32).double() ** 2
    stats.total += float(total)
    stats.lost += max(0.0, float(total - kept))
