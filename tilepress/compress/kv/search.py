"""The search of `compress kv`: mean, scale, error weight and clip of a layer's keys and values, by the error of the attention's output.

Per KV head and channel a mean and a scale are kept: scale = reach^alpha, keys' shared by the pairs that RoPE turns, so that both fold into what
is around the attention (SmoothAttention of QServe, Lin et al. 2024, arXiv 2405.04532, with a searched exponent). alpha of each KV head and clip, for keys
and for values, are those of a small grid with the least error of the attention's output on sampled queries.

Keys can be rotated by a Hadamard matrix, queries with them. Rounding errors of a rotated row are alike in all channels, so a scale a_c makes
the expected error of a score proportional to sum(k_c^2 / a_c^2) * sum(q_c^2 a_c^2), which is least at a_c = sqrt(k_c / q_c), k and q the
root mean squares: there scale = (k / q)^alpha. An error of query i's score for key t reaches its output o_i times a_it * |v_t - o_i|, a_it the
attention: of queries that look at the first token alone nothing does. So q is also tried with these squares as weights (`Search.reaching`).

Errors of 4-bit keys are fed back to channels that are rounded later (feedback.py). What is left then depends less on the directions that queries look
in, and more on how narrow a row is: so rotated keys with feedback have scale = k^alpha / q^beta, beta mostly less than alpha (`FED`).

A text's first token takes much of the attention of every later one in most trained models (an attention sink: Xiao et al. 2024, arXiv 2309.17453), so
its rounding error, unlike others, averages out nowhere; and its key and value hardly depend on the text (massive activations: Sun et al. 2024, arXiv
2402.17762). So means may be moved, by at most half a step of that row, until it lies on the grid of its own codes: it is stored exactly, and other rows find
their scales around means that are a little off. The grid has each alpha with and without, for each head.

Static ranges of keys must hold at positions that calibration never saw. RoPE turns a pair of channels and leaves its length: so the range of
both is the largest length that was seen, around 0.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from tilepress.compress.kv.attention import LayerSeen, Sample, by_pairs
from tilepress.compress.kv.feedback import feedback_for
from tilepress.formats.kv_calibration import Side
from tilepress.formats.kv_int4 import LEAST_SCALE, KVFormat, clamped_share, fake_quantize
from tilepress.kernels.kv_read import rounded
from tilepress.ranks import ALONE, Ranks

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
ROTATED_ALPHAS = (0.25, 0.5, 0.75)
FED = ((0.5, 0.1), (0.6, 0.3), (0.75, 0.25))  # (alpha, beta) of rotated keys with feedback
CLIPS = {False: (1.0, 0.95, 0.9, 0.85), True: (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)}  # by whether the format is static


class Candidate(NamedTuple):
    """The best side of a layer's keys or values in one form."""

    form: KVFormat
    rotate: bool
    side: Side
    cost: float  # relative squared error of the attention's output with this side quantized alone
    facts: dict  # of each KV head alpha, in 4 bits whether the first token is stored exactly, rotated whether queries are weighted; clip
    heads: list[float]  # what each KV head has of the cost
    feedback: Tensor | None = None  # of 4-bit keys


class _Point(NamedTuple):
    """A point of the grid."""

    alpha: float
    clip: float
    weighted: bool = False  # scales of rotated keys follow from `Search.reaching`
    exact: bool = False  # means are moved until the first token is stored exactly
    beta: float | None = None  # of rotated keys whose errors are fed back


class Search:
    """The sampled windows of a layer, and what its attention gives on them.

    Ranks have some of the windows each, and every error is of all.
    Windows of a length are worked on together where their keys are `together` numbers or fewer."""

    def __init__(self, seen: LayerSeen, together: int = 1, ranks: Ranks = ALONE, feeds_back: bool = True):
        self.seen, self._found, self.samples, self.ranks = seen, {}, seen.together(together), ranks
        self.feeds_back = feeds_back  # errors of 4-bit keys
        self.weights = [weights(sample, seen) for sample in self.samples]
        self.exact = [attend(sample, seen, given) for given, sample in zip(self.weights, self.samples, strict=True)]
        shares = [share for given in self.weights for share in given[..., 0].mean((1, 2, 3))]
        first = self._mean(shares)  # of the attention that queries give the first token
        self.first_attention = float(first)
        powers = [power for out in self.exact for power in out.square().sum((1, 2, 3, 4)).tolist()]
        self.power = max(self._total(sum(powers)), 1e-30)

    @cached_property
    def reaching(self) -> Tensor:
        """Return the power of queries, weighted by how much of a rounding error of each key that a sampled query meets reaches its output: [KV heads, D].

        The first token is left out: where it takes much attention it is stored exactly."""
        powers = torch.zeros_like(self.seen.query_power)
        for sample, met in zip(self.samples, self._met, strict=True):
            of_windows = torch.einsum("whgn,whgnd->whd", met, sample.query.square())
            for power in of_windows:  # one by one: sums do not depend on which came together
                powers += power
        return self.ranks.sum(powers)

    @cached_property
    def moments(self) -> Tensor:
        """Return the second moments of queries, weighted as in `reaching`: [KV heads, D, D] float64."""
        size = self.seen.shape.head_dim
        total = torch.zeros(*self.seen.query_power.shape, size, dtype=torch.float64, device=self.seen.longest.device)
        for sample, met in zip(self.samples, self._met, strict=True):
            for weight, query in zip(met, sample.query, strict=True):
                total += torch.einsum("hgnd,hgne->hde", weight[..., None] * query, query)
        return self.ranks.sum(total)

    @cached_property
    def _met(self) -> list[Tensor]:
        """Return how much of the errors that each sampled query meets reaches its output: [windows, KV heads, queries per KV head, n] of each sample."""
        found = []
        for sample, given, out in zip(self.samples, self.weights, self.exact, strict=True):
            off = torch.einsum("whgnd,whtd->whgnt", out, sample.value) * -2
            off += sample.value.square().sum(-1)[:, :, None, None] + out.square().sum(-1)[..., None]
            cap = self.seen.scores.softcap  # beneath it an error reaches the weights by its slope
            slope = 1 - (self.seen.scores.capped(raw_scores(sample, self.seen)) / cap).square() if cap else 1.0
            met = (given * slope).square() * off.clamp(min=0)
            met[..., 0] = 0
            found.append(met.sum(-1))
        return found

    def errors(self, **quantized: list[Tensor]) -> Tensor:
        """Return the squared error of each KV head's outputs with keys, values or both of the samples replaced: [KV heads] float64.

        Nothing waits for the card. They are relative to the power of all heads' outputs, and add up to the layer's."""
        return self.ranks.sum(self._own_errors(**quantized))

    def _own_errors(self, **quantized: list[Tensor]) -> Tensor:
        """Return the part of `errors` that comes from this rank's windows."""
        off = torch.zeros(self.seen.shape.kv_heads, dtype=torch.float64, device=self.seen.longest.device)
        for i, (sample, given, out) in enumerate(zip(self.samples, self.weights, self.exact, strict=True)):
            replaced = sample._replace(**{what: rows[i] for what, rows in quantized.items()})
            found = attend(replaced, self.seen, None if "key" in quantized else given)
            found = (found - out).square().sum((2, 3, 4), dtype=torch.float64)
            for window in found:  # one by one: sums do not depend on which came together
                off += window
        return off / self.power

    def error(self, **quantized: list[Tensor]) -> float:
        """Return the relative squared error of the layer's outputs."""
        return float(self.errors(**quantized).sum())

    def back(self, what: str, form: KVFormat, side: Side, rotate: bool, feedback: Tensor | None = None) -> list[Tensor]:
        """Return the samples' keys or values [windows, heads, tokens, D] float32 as they come back from the cache."""
        turned = rotate and what == "key"
        rows = (self.seen.stored(what, getattr(sample, what)).transpose(1, 2) for sample in self.samples)
        found = (rounded(x, form, *side, turned, form.refits, feedback).transpose(1, 2) for x in rows)
        return [self.seen.unstored(what, x) for x in found]

    def best(self, what: str, form: KVFormat, rotate: bool) -> Candidate:
        """Return the side whose heads have the least output error on the grid, searched once; values are never rotated."""
        wanted = what, form, rotate and what == "key"
        if wanted not in self._found:
            self._found[wanted] = self._best(*wanted)
        return self._found[wanted]

    def _best(self, what: str, form: KVFormat, rotate: bool) -> Candidate:
        if form.bits == 16:
            errors = self.errors(**{what: self.back(what, form, Side(None), False)})
            return Candidate(form, False, Side(None), float(errors.sum()), {}, errors.tolist())
        feeds_back = self.feeds_back and what == "key" and form.bits == 4
        sides = self._grid(what, form, rotate, feeds_back)
        fed = {}
        if feeds_back and rotate:  # moved means and clips change no scale
            fed = {
                point: feedback_for(self.moments, side.channels[1], True)
                for point, side in sides.items()
                if point.clip == 1.0
            }
            fed = {point: fed[point._replace(clip=1.0, exact=False)] for point in sides}
        errors = [
            self._own_errors(**{what: self.back(what, form, side, rotate, fed.get(p))}) for p, side in sides.items()
        ]
        costs = dict(zip(sides, self.ranks.sum(torch.stack(errors)).cpu(), strict=True))
        by_clip = {clip: [point for point in costs if point.clip == clip] for clip in CLIPS[form.static]}
        least = {clip: torch.stack([costs[point] for point in points]).min(0) for clip, points in by_clip.items()}
        clip = min(least, key=lambda clip: float(least[clip].values.sum()))
        points = [by_clip[clip][i] for i in least[clip].indices.tolist()]  # of each head
        channels = torch.stack([sides[point].channels[:, head] for head, point in enumerate(points)], 1)
        fixed = torch.stack([sides[p].fixed[head] for head, p in enumerate(points)]) if form.static else None
        side, errors = Side(channels, fixed, clip), least[clip].values
        feedback = torch.stack([fed[point][head] for head, point in enumerate(points)]) if fed else None
        if feeds_back and not rotate:
            feedback, errors = self._with_feedback(form, side, errors)
        facts = {f"{what}_alpha": [point.alpha for point in points], f"{what}_clip": clip}
        if form.bits == 4:
            facts[f"{what}_first_exact"] = [point.exact for point in points]
        if fed:
            facts[f"{what}_beta"] = [point.beta for point in points]
        elif rotate:
            facts[f"{what}_weighted"] = [point.weighted for point in points]
        return Candidate(form, rotate, side, float(errors.sum()), facts, errors.tolist(), feedback)

    def _grid(self, what: str, form: KVFormat, rotate: bool, feeds_back: bool) -> dict[_Point, Side]:
        """Return the sides that are tried."""
        sides = {}
        for clip in CLIPS[form.static]:
            if rotate and feeds_back:
                for alpha, beta in FED:
                    side = rotated_side(self.seen, self.reaching, alpha, clip, self._mean, beta)
                    sides[_Point(alpha, clip, True, beta=beta)] = side
            elif rotate:
                for weighted, alpha in itertools.product((False, True), ROTATED_ALPHAS):
                    queries = self.reaching if weighted else self.seen.query_power
                    sides[_Point(alpha, clip, weighted)] = rotated_side(self.seen, queries, alpha, clip, self._mean)
            else:
                for alpha in ALPHAS:
                    sides[_Point(alpha, clip)] = plain_side(self.seen, what, form, alpha, clip, self._mean)
        if form.bits == 4:
            sides |= {
                point._replace(exact=True): on_grid(self.seen.first(what), form, side, rotate)
                for point, side in sides.items()
                if point.clip == 1.0 or form.static
            }
        return sides

    def _with_feedback(self, form: KVFormat, side: Side, errors: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the feedback of keys that are not rotated, 0 for heads that do better without, and all heads' errors."""
        feedback = feedback_for(self.moments, side.channels[1], False)
        fed = self.errors(key=self.back("key", form, side, False, feedback)).cpu()
        better = fed < errors
        return feedback * better.to(feedback.device)[:, None, None, None], torch.minimum(fed, errors)

    def told(self, what: str, chosen: Candidate) -> dict:
        """Return what the manifest says of the rounding of keys or values."""
        exact = [getattr(sample, what) for sample in self.samples]
        back = self.back(what, chosen.form, chosen.side, chosen.rotate, chosen.feedback)
        pairs = list(zip(back, exact, strict=True))
        off = self._total(sum(off for found, x in pairs for off in (found - x).square().sum((1, 2, 3)).tolist()))
        power = self._total(sum(power for x in exact for power in x.square().sum((1, 2, 3)).tolist()))
        facts = {f"{what}_error": (off / max(power, 1e-30)) ** 0.5}
        if chosen.form.static:
            side = chosen.side
            windows = (self.seen.stored(what, window) for x in exact for window in x)
            shares = [clamped_share(x.transpose(0, 1), chosen.form, side.channels, side.fixed) for x in windows]
            facts[f"{what}_overflow"] = self._total(sum(shares)) / self._total(len(shares))
        return facts

    def _total(self, number: float) -> float:
        """Add up the ranks' numbers."""
        return sum(self.ranks.tell(number))

    def _mean(self, of_windows: list[Tensor]) -> Tensor:
        """Return the mean of what each sampled window gives, the other ranks' too; on a rank without any of what is there."""
        if self.ranks.size == 1:
            return _mean(of_windows)
        totals = self.ranks.tell((len(of_windows), sum(of_windows).cpu() if of_windows else 0.0))
        count = sum(windows for windows, _ in totals)
        return (sum(total for _, total in totals) / count).to(self.ranks.device)


def choose(search: Search, form: KVFormat, rotate: bool) -> tuple[Candidate, Candidate, dict]:
    """Return the keys and values with the least output error on the grid, and what the manifest says of them."""
    chosen = {what: search.best(what, form, rotate) for what in ("key", "value")}
    facts = chosen["key"].facts | chosen["value"].facts
    back = {what: search.back(what, form, found.side, rotate, found.feedback) for what, found in chosen.items()}
    errors = search.errors(**back)
    facts |= {"output_error": float(errors.sum()) ** 0.5, "head_errors": errors.sqrt().tolist()}
    for what, found in chosen.items():
        facts |= search.told(what, found)
    facts["first_attention"] = search.first_attention
    return chosen["key"], chosen["value"], facts


def candidates(search: Search, what: str, forms: Sequence[KVFormat], rotations: tuple[bool, ...]) -> list[Candidate]:
    """Return the best side of a layer's keys or values in each form, keys of dynamic 4-bit ones with the better of `rotations`.

    `facts` are those of the manifest."""
    found = []
    for form in forms:
        turned = rotations if what == "key" and form.bits == 4 and not form.static else (False,)
        chosen = min((search.best(what, form, rotate) for rotate in turned), key=lambda candidate: candidate.cost)
        found.append(chosen._replace(facts=chosen.facts | search.told(what, chosen)))
    return found


def attend(sample: Sample, seen: LayerSeen, given: Tensor | None = None) -> Tensor:
    """Return causal softmax attention of the samples' queries, whose `given` weights may be known: [windows, KV heads, queries per KV head, n, D]."""
    given = weights(sample, seen) if given is None else given
    return torch.einsum("whgnt,whtd->whgnd", given, sample.value)


def weights(sample: Sample, seen: LayerSeen) -> Tensor:
    """Return the attention that the sample's queries give each token: [windows, KV heads, queries per KV head, n, tokens] float32."""
    behind = sample.positions[..., None] - torch.arange(sample.key.shape[2], device=sample.key.device)
    window = seen.scores.window or sample.key.shape[2]
    is_seen = (behind >= 0) & (behind < window)
    return seen.scores.weights(raw_scores(sample, seen), is_seen[:, None, None])


def raw_scores(sample: Sample, seen: LayerSeen) -> Tensor:
    """Return the scores of the sample's queries as their products and the scale give them: [windows, KV heads, queries per KV head, n, tokens]."""
    return torch.einsum("whgnd,whtd->whgnt", sample.query, sample.key) * seen.scaling


Mean = Callable[[list[Tensor]], Tensor]  # of what each sampled window gives, those of all ranks


def _mean(of_windows: list[Tensor]) -> Tensor:
    return torch.stack(of_windows).mean(0)


def plain_side(seen: LayerSeen, what: str, form: KVFormat, alpha: float, clip: float, mean_of: Mean = _mean) -> Side:
    """Return the side of rows that are not rotated at one point of the grid."""
    low, high = _range(seen, what, form)
    mean = (low + high) / 2 if form.static else (getattr(seen, what).total / seen.tokens).float()
    reach = torch.maximum(high - mean, mean - low).clamp(min=1e-6)
    reach = by_pairs(reach, seen.shape, torch.amax) if what == "key" else reach
    scale = _to_units(seen, what, mean, reach**alpha, mean_of)
    weight = scale.square() * (seen.query_power.float() if what == "key" else seen.value_weight)
    channels = torch.stack([mean, scale, weight / weight.mean(-1, keepdim=True).clamp(min=1e-30)])
    return Side(channels, _static_scales(low, high, channels, form, clip) if form.static else None, clip)


def rotated_side(
    seen: LayerSeen, queries: Tensor, alpha: float, clip: float, mean_of: Mean = _mean, beta: float | None = None
) -> Side:
    """Return the side of rotated keys at one point of the grid, for queries of a power [KV heads, D]; beta is alpha unless given."""
    mean = (seen.key.total / seen.tokens).float()
    variance = seen.key.power - seen.tokens * mean.double().square()
    keys, queries = (by_pairs(x, seen.shape, torch.sum).clamp(min=1e-12) for x in (variance, queries))
    if beta is None:
        reach = (keys / queries).sqrt().float() ** alpha
    else:  # in units of their means, so that none leaves float32
        keys, queries = (x / x.mean(-1, keepdim=True) for x in (keys, queries))
        reach = (keys.sqrt() ** alpha / queries.sqrt() ** beta).float()
    scale = _to_units(seen, "key", mean, reach, mean_of)
    return Side(torch.stack([mean, scale, torch.ones_like(scale)]), None, clip)


def _to_units(seen: LayerSeen, what: str, mean: Tensor, scale: Tensor, mean_of: Mean) -> Tensor:
    """Return the scale times a number for each head that makes its values about 1, far from the ends of float16."""
    windows = (seen.stored(what, window) for sample in seen.samples for window in getattr(sample, what))
    powers = [((window - mean[:, None]) / scale[:, None]).square().mean((1, 2)) for window in windows]
    return scale * mean_of(powers).sqrt().clamp(min=1e-6)[:, None]


def on_grid(row: Tensor, form: KVFormat, side: Side, rotate: bool) -> Side:
    """Return the side with means moved so that `row` [KV heads, D] float32 comes back exactly, but for float16 scales.

    Its scale and shift are those of its extremes, which a refit leaves where they are once all codes are exact: so the clip has to be 1."""
    channels = side.channels.clone()
    channels[0] += row - fake_quantize(row[None], form, channels, side.fixed, side.clip, rotate, 0)[0]
    return side._replace(channels=channels)


def _range(seen: LayerSeen, what: str, form: KVFormat) -> tuple[Tensor, Tensor]:
    """Return the least and the largest value of each channel: [KV heads, D] each."""
    ranges = getattr(seen, what)
    if what == "value" or not form.static:
        return ranges.low, ranges.high
    turns = torch.arange(ranges.low.shape[-1], device=ranges.low.device) < seen.shape.rotary_dim
    return torch.where(turns, -seen.longest, ranges.low), torch.where(turns, seen.longest, ranges.high)


def _static_scales(low: Tensor, high: Tensor, channels: Tensor, form: KVFormat, clip: float) -> Tensor:
    """Return (scale, shift) of each group: float16 [KV heads, groups, 2]."""
    below, above = (((x - channels[0]) / channels[1]).unflatten(-1, (form.groups, -1)) for x in (low, high))
    below, above = below.amin(-1), above.amax(-1)
    middle, half = (below + above) / 2, (above - below) / 2 * clip
    return torch.stack([(2 * half / form.max_code).clamp(min=LEAST_SCALE), middle - half], -1).half()
