"""Statistics of a linear layer's input over the calibration text, and the static range that an observer makes of it.

Ranges: `minmax` covers everything; `percentile` leaves out the share 1 - p of the values (half of it on each side where the range is
asymmetric); `mse` takes the range with the least mean squared rounding and clipping error, on a grid. The last two look at a histogram of
all values by their leading 18 bits (sign, exponent and 9 bits of the mantissa: bins at most 0.2 % wide).
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilepress.formats import TilepressError, UsageError, check_kinds
from tilepress.formats.int8 import QMAX, QMIN
from tilepress.ranks import Ranks

OBSERVERS = ("minmax", "percentile", "mse")
PERCENTILES = (99.9, 99.9999)  # the least and the greatest that --percentile takes
_SHIFT = 14
_BINS = 1 << (32 - _SHIFT)
_GRID = 48  # ranges that mse tries first, from the full one down to 1 %
_RANGES = 16  # looked at together
HISTOGRAM_BYTES = 8 * _BINS


@dataclass(frozen=True)
class Observer:
    """The method that chooses a static range. Raises UsageError for an unknown name or a percentile out of range."""

    name: str = "mse"
    percentile: float = 99.999

    def __post_init__(self):
        check_kinds(self)
        if self.name not in OBSERVERS:
            raise UsageError(f"--observer {self.name} is unknown", f"choose one of {', '.join(OBSERVERS)}")
        low, high = PERCENTILES
        if not low <= self.percentile <= high:
            raise UsageError(f"--percentile {self.percentile:g} is not in {low}..{high}", "99.999 is usual")

    def range(self, histogram: Tensor, low: float, high: float, asymmetric: bool) -> tuple[float, float]:
        """(low, high) to cover, from the histogram of `InputStats` and the extremes; symmetric ranges are (-r, r)."""
        if self.name == "minmax" or not high > low:
            return (low, high) if asymmetric else (-max(-low, high), max(-low, high))
        values, counts = occupied(histogram)
        values.clamp_(low, high)
        choose = _percentile if self.name == "percentile" else _least_error
        return choose(values, counts, self, low, high, asymmetric)


@dataclass
class InputStats:
    """Statistics of one input [tokens, channels]; memory is two rows, up to twice `max_rows` sampled rows and the
    histogram.
    """

    max_rows: int
    seed: int
    tokens: int = 0
    low: Tensor | None = None  # [channels] float32
    high: Tensor | None = None
    histogram: Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.int64))
    _rows: list[Tensor] = field(default_factory=list)
    _beside: list[Tensor] = field(default_factory=list)
    _keys: list[Tensor] = field(default_factory=list)
    _bound: float = math.inf  # the largest key of a full sample

    def add(
        self,
        x: Tensor,
        name: str,
        counting: bool = True,
        lengths: Sequence[int] | None = None,
        beside: Tensor | None = None,
        places: Sequence[int] | None = None,
    ) -> None:
        """x [..., channels], which may be several tensors of `lengths` rows, seen as if they came one by one; what stands `beside` each row,
        [rows], is sampled with it. `places` are those of each tensor's first row in the whole text, by which rows are drawn: that of a row
        among all that were seen unless ranks share the text.

        Raises TilepressError naming the layer if a value is not finite."""
        x = x.detach().reshape(-1, x.shape[-1])
        if not len(x):
            return
        x = x.float()
        low, high = x.amin(0), x.amax(0)
        if not bool(torch.isfinite(torch.stack([low, high])).all()):
            raise TilepressError(
                f"the input of {name} is not finite during calibration",
                "the checkpoint overflows in its own dtype: try --dtype bfloat16, or check it with `tilepress eval perplexity`",
            )
        self.low = low if self.low is None else torch.minimum(self.low, low)
        self.high = high if self.high is None else torch.maximum(self.high, high)
        if counting:
            codes = (x.reshape(-1).view(torch.int32) >> _SHIFT) & (_BINS - 1)
            self.histogram = self.histogram.to(x.device)
            self.histogram += torch.bincount(codes, minlength=_BINS)
        lengths = lengths or [len(x)]
        if places is None:
            places = [self.tokens + before for before in itertools.accumulate(lengths[:-1], initial=0)]
        self._sample(x, lengths, places, x.new_zeros(len(x)) if beside is None else beside)
        self.tokens += len(x)

    def _sample(self, x: Tensor, lengths: Sequence[int], places: Sequence[int], beside: Tensor) -> None:
        """A uniform sample of all rows, the same for the same order of tensors: the rows with the smallest of random keys stay."""
        keys = torch.cat(
            [
                torch.rand(length, generator=torch.Generator().manual_seed(self.seed + place))
                for length, place in zip(lengths, places, strict=True)
            ]
        )
        chosen = (keys < self._bound).nonzero().squeeze(1)  # others would not stay
        if len(chosen) > self.max_rows:
            chosen = chosen[keys[chosen].argsort()[: self.max_rows]].sort().values
        where = chosen.to(x.device)
        self._rows.append(x[where])
        self._beside.append(beside[where])
        self._keys.append(keys[chosen])
        if sum(map(len, self._rows)) > 2 * self.max_rows:
            self._trim()

    def _trim(self) -> None:
        """Leave one tensor of the rows that stay; nothing is to be done where there is."""
        if len(self._rows) == 1 and len(self._rows[0]) <= self.max_rows:
            return
        rows, beside, keys = torch.cat(self._rows), torch.cat(self._beside), torch.cat(self._keys)
        chosen = keys.argsort()[: self.max_rows].sort().values
        where = chosen.to(rows.device)
        self._rows, self._beside, self._keys = [rows[where]], [beside[where]], [keys[chosen]]
        if len(chosen) == self.max_rows:
            self._bound = float(keys[chosen].max())

    def reduce(self, ranks: Ranks, owner: int) -> None:
        """Make these the statistics of what all ranks saw, on the rank `owner`; the others keep the number of tokens, and no rows."""
        if ranks.size == 1:
            return
        seen = [int(count) for count in ranks.gather(torch.tensor([self.tokens], device=ranks.device))]
        self.tokens = sum(seen)
        if not self.tokens:
            return
        own = bool(self._rows)
        if own:
            self._trim()
        channels = int(ranks.largest(torch.tensor(len(self.low) if own else 0, device=ranks.device)))
        blank = torch.full((channels,), -math.inf, device=ranks.device)
        self.high = ranks.largest(self.high.clone() if own else blank.clone())
        self.low = -ranks.largest(-self.low if own else blank)
        self.histogram = ranks.sum_for(self.histogram.to(ranks.device), owner)
        # Every rank knows which rows stay; each puts its own into a sample of zeros, and these are added up.
        every = ranks.tell(self._keys[0] if own else torch.empty(0))
        before, keys = sum(map(len, every[: ranks.rank])), torch.cat(every)
        chosen = keys.argsort()[: self.max_rows].sort().values
        sample = torch.zeros(len(chosen), channels + 1, device=ranks.device)
        here = ((chosen >= before) & (chosen < before + len(every[ranks.rank]))).nonzero().squeeze(1)
        if len(here):
            where = (chosen[here] - before).to(ranks.device)
            sample[here.to(ranks.device)] = torch.cat([self._rows[0], self._beside[0][:, None]], 1)[where]
        sample, chosen = ranks.sum_for(sample, owner), chosen if ranks.rank == owner else chosen[:0]
        sample = sample[: len(chosen)]
        self._rows, self._beside, self._keys = [sample[:, :-1].contiguous()], [sample[:, -1].clone()], [keys[chosen]]

    def divide(self, columns: Tensor) -> None:
        """Take it that every input had been divided by columns [channels], all positive; the histogram is of inputs as they were."""
        self.low, self.high = self.low / columns, self.high / columns
        self._rows = [rows / columns for rows in self._rows]

    @property
    def rows(self) -> Tensor:
        """The sampled rows [at most max_rows, channels] float32."""
        self._trim()
        return self._rows[0]

    @property
    def beside(self) -> Tensor:
        """What stood beside each of the sampled rows [at most max_rows] float32."""
        self._trim()
        return self._beside[0]


def occupied(histogram: Tensor) -> tuple[Tensor, Tensor]:
    """The values (float32 bin centres) and counts (float64) of the bins that hold any, where the histogram is."""
    bins = histogram.nonzero().squeeze(1)
    first = (bins << _SHIFT).to(torch.int32)
    values = (first + (1 << (_SHIFT - 1))).view(torch.float32)
    values[bins % (_BINS // 2) == 0] = 0.0  # zeros themselves
    return values, histogram[bins].double()


def clipped_share(histogram: Tensor, low: float, high: float) -> float:
    """The share of values outside of [low, high]."""
    values, counts = occupied(histogram)
    return float(counts[(values < low) | (values > high)].sum() / counts.sum())


def _percentile(values, counts, observer, low, high, asymmetric) -> tuple[float, float]:
    outside = (1 - observer.percentile / 100) * float(counts.sum())
    if not asymmetric:
        magnitudes, order = values.abs().sort()
        reach = float(_cut(magnitudes, counts[order], outside))
        return -reach, reach
    order = values.argsort()
    high = float(_cut(values[order], counts[order], outside / 2))
    low = -float(_cut(-values[order.flip(0)], counts[order.flip(0)], outside / 2))
    return low, high


def _cut(ascending: Tensor, counts: Tensor, outside: float) -> Tensor:
    """The value above which at most `outside` of the counts lie."""
    above = counts.flip(0).cumsum(0).flip(0) - counts
    return ascending[int((above <= outside).nonzero()[0])]


def _least_error(values, counts, observer, low, high, asymmetric) -> tuple[float, float]:
    """The best of a grid of ranges, then of a finer one around it.

    An asymmetric range starts with both ends scaled alike and then moves one end at a time until neither gets better.
    """
    grid = torch.logspace(0, -2, _GRID, dtype=torch.float64)
    fine = torch.linspace(float(grid[1] / grid[0]), float(grid[0] / grid[1]), 9, dtype=torch.float64)

    def best_of(lows: Tensor, highs: Tensor) -> tuple[float, float]:
        lows, highs = torch.broadcast_tensors(lows.clamp(min=low), highs.clamp(max=high))
        best = int(
            quantization_errors(values, counts, lows.to(values.device), highs.to(values.device), asymmetric).argmin()
        )
        return float(lows[best]), float(highs[best])

    if not asymmetric:
        low, high = -max(-low, high), max(-low, high)
        reach = best_of(low * grid, high * grid)[1]
        return best_of(-reach * fine, reach * fine)
    low, high = min(low, 0.0), max(high, 0.0)
    best = best_of(low * grid, high * grid)
    for factors in (torch.cat([torch.ones(1, dtype=torch.float64), grid]), fine):
        before = None
        while best != before:
            before = best
            around = (low, high) if factors is not fine else best
            best = best_of(
                torch.cat([torch.tensor([best[0]]).double(), around[0] * factors]), torch.tensor(best[1]).double()
            )
            best = best_of(
                torch.tensor(best[0]).double(), torch.cat([torch.tensor([best[1]]).double(), around[1] * factors])
            )
    return best


def quantization_errors(values: Tensor, counts: Tensor, lows: Tensor, highs: Tensor, asymmetric: bool) -> Tensor:
    """The sum of squared errors of INT8 codes for each of some ranges, over weighted values: [n], [n], [r], [r] -> [r] float64."""
    if asymmetric:
        scales = ((highs - lows) / (QMAX - QMIN)).clamp(min=1e-30)
        zeros = (QMIN - lows / scales).round()
    else:
        scales, zeros = (highs / QMAX).clamp(min=1e-30), torch.zeros_like(highs)
    found = []
    for scale, zero in zip(scales[:, None].float().split(_RANGES), zeros[:, None].float().split(_RANGES), strict=True):
        codes = (values / scale).round_().add_(zero).clamp_(QMIN, QMAX).sub_(zero)
        found.append(codes.mul_(scale).sub_(values).square_().double() @ counts)
    return torch.cat(found)
