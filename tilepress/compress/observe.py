"""What a linear layer's input looked like over the calibration text, and the static range that an observer makes of it.

Ranges: `minmax` covers everything; `percentile` leaves out the share 1 - p of the values (half of it on each side where the range is
asymmetric); `mse` takes the range with the least mean squared rounding and clipping error, on a grid. The last two look at a histogram of
all values by their leading 18 bits (sign, exponent and 9 bits of the mantissa: bins at most 0.2 % wide).
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilepress.formats import TilepressError, UsageError
from tilepress.formats.int8 import QMAX, QMIN

OBSERVERS = ("minmax", "percentile", "mse")
PERCENTILES = (99.9, 99.9999)  # the least and the greatest that --percentile takes
_SHIFT = 14
_BINS = 1 << (32 - _SHIFT)
_GRID = 80  # ranges that mse tries, from the full one down to 1 %


@dataclass(frozen=True)
class Observer:
    """How a static range is chosen. Raises UsageError for an unknown name or a percentile out of range."""

    name: str = "mse"
    percentile: float = 99.999

    def __post_init__(self):
        if self.name not in OBSERVERS:
            raise UsageError(f"--observer {self.name} is unknown", f"choose one of {', '.join(OBSERVERS)}")
        low, high = PERCENTILES
        if not low <= self.percentile <= high:
            raise UsageError(f"--percentile {self.percentile:g} is not in {low}..{high}", "99.999 is usual")

    def range(self, histogram: Tensor, low: float, high: float, asymmetric: bool) -> tuple[float, float]:
        """(low, high) to cover, from a histogram of `counts` and the extremes; symmetric ranges are (-r, r)."""
        if self.name == "minmax" or not high > low:
            return (low, high) if asymmetric else (-max(-low, high), max(-low, high))
        values, counts = occupied(histogram)
        values.clamp_(low, high)
        choose = _percentile if self.name == "percentile" else _least_error
        return choose(values, counts, self, low, high, asymmetric)


@dataclass
class InputStats:
    """What was seen of one input [tokens, channels]; memory is two rows, `max_rows` sampled rows and the histogram."""

    max_rows: int
    seed: int
    tokens: int = 0
    low: Tensor | None = None  # [channels] float32
    high: Tensor | None = None
    histogram: Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.int64))
    _rows: list[Tensor] = field(default_factory=list)
    _keys: list[Tensor] = field(default_factory=list)

    def add(self, x: Tensor, name: str, counting: bool = True) -> None:
        """x [..., channels]. Raises TilepressError naming the layer if a value is not finite."""
        x = x.detach().reshape(-1, x.shape[-1])
        if not len(x):
            return
        x = x.float()
        low, high = x.amin(0), x.amax(0)
        if not bool(torch.isfinite(low).all() and torch.isfinite(high).all()):
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
        self._sample(x)
        self.tokens += len(x)

    def _sample(self, x: Tensor) -> None:
        """A uniform sample of all rows, the same for the same order of calls: the rows with the smallest of random keys stay."""
        keys = torch.rand(len(x), generator=torch.Generator().manual_seed(self.seed + self.tokens))
        chosen = keys.argsort()[: self.max_rows].sort().values
        self._rows.append(x[chosen.to(x.device)])
        self._keys.append(keys[chosen])
        if sum(map(len, self._rows)) > 2 * self.max_rows:
            self._trim()

    def _trim(self) -> None:
        rows, keys = torch.cat(self._rows), torch.cat(self._keys)
        chosen = keys.argsort()[: self.max_rows].sort().values
        self._rows, self._keys = [rows[chosen.to(rows.device)]], [keys[chosen]]

    @property
    def rows(self) -> Tensor:
        """The sampled rows [at most max_rows, channels] float32."""
        self._trim()
        return self._rows[0]


def occupied(histogram: Tensor) -> tuple[Tensor, Tensor]:
    """The values (float64 bin centres) and counts of the bins that hold any."""
    bins = histogram.nonzero().squeeze(1)
    first = (bins << _SHIFT).to(torch.int32)
    values = (first + (1 << (_SHIFT - 1))).view(torch.float32).double()
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
    """Symmetric: the best of the grid. Asymmetric: the best with both ends scaled alike, then one end at a time until neither moves."""
    tried: dict[tuple[float, float], float] = {}

    def error(ends: tuple[float, float]) -> float:
        if ends not in tried:
            tried[ends] = quantization_error(values, counts, *ends, asymmetric)
        return tried[ends]

    if not asymmetric:
        full = max(-low, high)
        return min(((-full * f, full * f) for f in torch.logspace(0, -2, _GRID).tolist()), key=error)
    factors = torch.logspace(0, -2, _GRID // 2).tolist()
    low, high = min(low, 0.0), max(high, 0.0)
    best, before = min(((low * f, high * f) for f in factors), key=error), None
    while best != before:
        before = best
        best = min([best, *((low * f, best[1]) for f in factors if low)], key=error)
        best = min([best, *((best[0], high * f) for f in factors if high)], key=error)
    return best


def quantization_error(values: Tensor, counts: Tensor, low: float, high: float, asymmetric: bool) -> float:
    """Sum of squared errors of INT8 codes that cover [low, high], over weighted values."""
    if asymmetric:
        scale = (high - low) / (QMAX - QMIN)
        zero = round(QMIN - low / scale)
        back = ((values / scale).round_().add_(zero).clamp_(QMIN, QMAX) - zero) * scale
    else:
        scale = high / QMAX
        back = (values / scale).round_().clamp_(QMIN, QMAX) * scale
    return float((back.sub_(values).square_() * counts).sum())
