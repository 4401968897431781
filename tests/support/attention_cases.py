"""Random cases of attention over pages, and their results in float64 from first principles: one query and one KV head at a time, over the tokens that it sees.

Nothing here knows how the ops go about it: tokens are what fake_quantize says comes back from the cache, and masks are written as their definitions read.
"""

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tilepress.formats.kv_int4 import Forms, KVFormat, fake_quantize, forms_of
from tilepress.kernels.kv_cache import op_forms

ops = torch.ops.tilepress
NOWHERE = 2**30  # in a block table, names no page
ROWS = [(4, 0, False), (4, 32, False), (4, 0, True), (8, 0, False), (8, 0, True), (16, 0, False)]  # bits, group, static


@dataclass(frozen=True)
class Drawn:
    """What a case is of: everything that an op takes."""

    seed: int
    form: Forms
    dtype: torch.dtype
    rotate: bool
    kv_heads: int
    group: int  # query heads of a KV head
    page_tokens: int
    histories: tuple[int, ...]  # tokens of each sequence before its queries
    counts: tuple[int, ...] | None  # queries of each sequence; None: one each, without cu_query_lens
    shared: int  # tokens that all sequences begin with, in the same pages
    window: int
    softcap: float
    has_sinks: bool
    has_slopes: bool
    calibrated: bool


def draw(seed: int, dims=(64, 96, 128, 256), rows=tuple(ROWS), dtypes=(torch.float32,), longest: int = 80) -> Drawn:
    """Draw a case; every choice is independent of the others but for what cannot be together."""
    of = random.Random(seed)
    dim, page = of.choice(dims), of.choice((16, 32, 64))
    key = KVFormat(dim, *of.choice(rows))
    value = key if of.random() < 0.6 else KVFormat(dim, *of.choice(rows))
    sequences = of.choice((1, 1, 2, 3, 5))
    histories = [of.choice((0, of.randint(0, 20), of.randint(0, longest), page - 1, page)) for _ in range(sequences)]
    kind = of.choice(("one", "few", "mixed", "mixed", "gaps"))
    counts = {
        "one": None,
        "few": [of.randint(1, 16) for _ in histories],
        "mixed": [of.choice((1, 1, of.randint(17, 40))) for _ in histories],
        "gaps": [of.choice((0, 1, 5)) for _ in histories],
    }[kind]
    shared = of.choice((0, 0, page, 2 * page))
    if kind == "one" and of.random() < 0.5 and not shared:
        histories[of.randrange(sequences)] = -1  # an empty sequence, whose query sees nothing
    return Drawn(
        seed,
        forms_of(key, value),
        of.choice(dtypes),
        of.random() < 0.3 and key.bits < 16,
        of.choice((1, 2, 3)),
        of.choice((1, 2, 3, 4, 5, 7, 8, 12, 16)),
        page,
        tuple(n + shared for n in histories),
        None if counts is None else tuple(counts),
        shared,
        of.choice((0, 0, 0, 1, 7, page, 33, 100)),
        of.choice((0.0, 0.0, 5.0, 30.0)),
        of.random() < 0.3,
        of.random() < 0.25,
        of.random() < 0.7,
    )


def _side(
    form: KVFormat, heads: int, generator: torch.Generator, calibrated: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Mean, scale and weight of channels; (scale, shift) of a static format."""
    if form.bits == 16:
        return None, None
    channels = torch.rand(3, heads, form.head_dim, generator=generator) + 0.5
    steps = torch.rand(heads, form.groups, 1, generator=generator) + 8
    fixed = torch.cat([steps / form.max_code, -steps / 2], -1).half()
    return channels if calibrated else None, fixed if form.static else None


class Case:
    """A drawn case in memory. Places without a token are 0xFF bytes, NaN in scales and in 16 bits; so are pages that no window reaches any more, which
    tables name as they name what they do not use: by a number that is no page."""

    def __init__(self, drawn: Drawn, device: str = "cpu"):
        self.drawn, form, heads, size = drawn, drawn.form, drawn.kv_heads, drawn.page_tokens
        generator = torch.Generator().manual_seed(drawn.seed)
        counts = drawn.counts or (1,) * len(drawn.histories)
        self.lengths = [history + count for history, count in zip(drawn.histories, counts, strict=True)]
        self.counts = counts
        dim = form.head_dim
        sides = [_side(row, heads, generator, drawn.calibrated) for row in (form.key, form.value)]
        low = [
            max(0, history - drawn.window + 1) if drawn.window else 0 for history in drawn.histories
        ]  # the first token that a query sees
        pages = [-(-length // size) for length in self.lengths]
        common = drawn.shared // size
        numbers = torch.randperm(common + sum(pages) + 3, generator=generator)
        memory = torch.full(
            (len(numbers), heads, size * (form.key.row_bytes + form.value.row_bytes)), 0xFF, dtype=torch.uint8
        )
        table = torch.full((len(pages), max([1, *pages])), NOWHERE, dtype=torch.int32)
        prefix = [torch.randn(drawn.shared, heads, dim, generator=generator) for _ in range(2)]
        used, self.tokens = common, []
        for i, length in enumerate(self.lengths):
            own = max(0, pages[i] - common)
            table[i, : pages[i]] = torch.cat([numbers[:common], numbers[used : used + own]])[: pages[i]].int()
            used += own
            rows = [
                torch.cat([part, torch.randn(length - drawn.shared, heads, dim, generator=generator)])
                for part in prefix
            ]
            first = low[i] // size * size  # of a page that is still there
            place = torch.arange(first, length)
            slots = table[i].long()[place // size] * size + place % size
            table[i, : first // size] = NOWHERE
            (key_form, value_form), ((kc, kf), (vc, vf)) = op_forms(form), sides
            quantization = kc, kf, 1.0, vc, vf, 1.0, *key_form, drawn.rotate, 0, *value_form
            if length > first:
                ops.kv_append(memory, rows[0][first:], rows[1][first:], slots, *quantization)
            of_sides = ((rows[0], form.key, sides[0], drawn.rotate), (rows[1], form.value, sides[1], False))
            self.tokens.append(
                [fake_quantize(x, row, *side, 1.0, turn, 0).double().numpy() for x, row, side, turn in of_sides]
            )
        query_heads = heads * drawn.group
        self.query = torch.randn(sum(counts), query_heads, dim, generator=generator).to(drawn.dtype)
        self.scale = 1.3 * dim**-0.5
        self.sinks = torch.randn(query_heads, generator=generator) * 2 if drawn.has_sinks else None
        self.slopes = 2.0 ** -torch.linspace(0.5, 8, query_heads) if drawn.has_slopes else None
        starts = None if drawn.counts is None else torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
        lens = torch.tensor(self.lengths, dtype=torch.int32)
        (key_form, value_form), ((kc, kf), (vc, vf)) = op_forms(form), sides
        before = memory, table, lens, self.scale, kc, kf, vc, vf, *key_form, drawn.rotate
        after = *value_form, starts, drawn.window, drawn.softcap, self.sinks, self.slopes

        def moved(arguments):
            return tuple(x.to(device) if isinstance(x, Tensor) else x for x in arguments)

        self.arguments, self.options, self.query_there = moved(before), moved(after), self.query.to(device)

    def run(self, name: str = "decode_attention_lse", *more):
        return getattr(ops, name)(self.query_there, *self.arguments, *more, *self.options)

    def exact(self) -> tuple[np.ndarray, np.ndarray]:
        """The output [queries, heads, D] and the log-sum-exp [queries, heads] in float64."""
        drawn, query = self.drawn, self.query.double().numpy()
        out, lse = np.zeros_like(query), np.full(query.shape[:2], -np.inf)
        row = 0
        for (key, value), length, count in zip(self.tokens, self.lengths, self.counts, strict=True):
            for at in range(length - count, length):
                seen = [j for j in range(length) if j <= at and (not drawn.window or at - j < drawn.window)]
                for of in range(drawn.kv_heads):
                    heads = slice(of * drawn.group, (of + 1) * drawn.group)
                    scores = query[row, heads] @ key[seen, of].T * self.scale
                    if drawn.softcap:
                        scores = drawn.softcap * np.tanh(scores / drawn.softcap)
                    if self.slopes is not None:
                        distance = np.array(seen, dtype=float) - at
                        scores = scores + self.slopes[heads].double().numpy()[:, None] * distance
                    if self.sinks is not None:
                        scores = np.concatenate([scores, self.sinks[heads].double().numpy()[:, None]], 1)
                    if not scores.shape[1]:
                        continue
                    top = scores.max(1, keepdims=True)
                    weights = np.exp(scores - top)
                    total = weights.sum(1, keepdims=True)
                    lse[row, heads] = (top + np.log(total))[:, 0]
                    out[row, heads] = (weights / total)[:, : len(seen)] @ value[seen, of]
                row += 1
        return out, lse
