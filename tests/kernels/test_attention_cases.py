"""Attention over pages against float64 for whatever the op takes, drawn at random: queries, pages, forms, windows, soft caps, sinks, ALiBi, shared tables.

TILEPRESS_TEST_CASES says how many cases run on a card; `make test-gpu-long` asks for 10 000.
"""

import os

import numpy as np
import pytest
import torch
from support.attention_cases import Case, draw
from support.cards import take_for_older

from tilepress.kernels import attention_ref, decode_attention, kv_cache  # noqa: F401

BATCHES = 12  # of quick cases, so that a failure names few
QUICK = 16  # of a batch
# Each kind of rows is a kernel to compile: many cases shall not be many compilations.
ON_CARD_DIMS, ON_CARD_ROWS = (64, 128, 128, 256), ((4, 0, False), (4, 32, False), (8, 0, False), (16, 0, False))
ON_CARD = int(os.environ.get("TILEPRESS_TEST_CASES", "200"))


def check(case: Case, out, lse, tolerance: float) -> None:
    expected, exact_lse = case.exact()
    out, lse = out.double().cpu().numpy(), lse.double().cpu().numpy()
    norm = np.linalg.norm(expected, axis=-1)
    apart = np.linalg.norm(out - expected, axis=-1) / np.where(norm > 0, norm, 1)
    assert (apart <= tolerance).all(), f"{case.drawn}: {apart.max()}"
    assert np.array_equal(np.isinf(lse), np.isinf(exact_lse)), case.drawn
    with np.errstate(invalid="ignore"):
        apart = np.nan_to_num(np.abs(lse - exact_lse))
    assert (apart <= tolerance * (3 + np.abs(np.nan_to_num(exact_lse, neginf=0)))).all(), f"{case.drawn}: {apart.max()}"


@pytest.mark.parametrize("batch", range(BATCHES))
def test_the_reference_is_float64s_attention(batch, monkeypatch):
    if batch % 2:  # a column of pages at a time, tiles of few queries
        monkeypatch.setattr(attention_ref, "_AT_ONCE", 1)
        monkeypatch.setattr(attention_ref, "_ROWS", 3)
    for seed in range(batch * QUICK, (batch + 1) * QUICK):
        case = Case(draw(seed))
        check(case, *case.run(), 1e-4)


def test_nothing_waits_for_a_card():
    """A tensor without numbers refuses to tell one."""
    for seed in range(40):
        case = Case(draw(seed))
        there = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in (*case.arguments, *case.options)]
        out, lse = attention_ref.attend(case.query.to("meta"), attention_ref.Cache(*there))
        assert out.shape == case.query.shape and lse.shape == case.query.shape[:2]


@pytest.mark.parametrize(
    "change,message",
    [
        ({"cu_query_lens": torch.zeros(2, dtype=torch.int32)}, "cu_query_lens .2. for 2 sequences"),
        ({"window": -1}, "a window of -1"),
        ({"softcap": float("nan")}, "a soft cap of nan"),
        ({"sinks": torch.zeros(3)}, "sinks .3. of torch.float32: float32 .4."),
        ({"slopes": torch.zeros(4, dtype=torch.float64)}, "slopes"),
        ({"pages": torch.zeros(3, 2, 36 * 2 * 48, dtype=torch.uint8)}, "do not hold"),
    ],
)
def test_arguments_that_do_not_fit(change, message):
    cache = attention_ref.Cache(
        torch.zeros(3, 2, 36 * 2 * 16, dtype=torch.uint8),
        torch.zeros(2, 1, dtype=torch.int32),
        torch.ones(2, dtype=torch.int32),
        0.1,
        *(None,) * 4,
        *(4, 0, False, False),
    )
    query = torch.zeros(2, 4, 64)
    assert torch.ops.tilepress.decode_attention(query, *cache).shape == query.shape
    with pytest.raises(ValueError, match=message):
        torch.ops.tilepress.decode_attention(query, *cache._replace(**change))


@pytest.mark.parametrize("name", ["decode_attention", "decode_attention_lse", "decode_attention_int8"])
def test_opcheck_of_all_arguments(name):
    case = next(
        case for case in (Case(draw(seed)) for seed in range(99)) if len(case.drawn.histories) > 2 and case.drawn.counts
    )
    more = (torch.tensor([0.01]),) if name.endswith("int8") else ()
    torch.library.opcheck(
        getattr(torch.ops.tilepress, name).default, (case.query, *case.arguments, *more, *case.options)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("forced", [False, True], ids=["the best kernel", "the one for all cards"])
@pytest.mark.parametrize("part", range(20))
def test_a_card_gives_float64s_attention(part, forced, monkeypatch):
    if forced:
        take_for_older(monkeypatch)
    for seed in range(part, ON_CARD, 20):
        case = Case(draw(1000 + seed, ON_CARD_DIMS, ON_CARD_ROWS, (torch.bfloat16, torch.float16), 600), "cuda")
        out, lse = case.run()
        check(case, out, lse, 1.5e-2)
        assert torch.equal(out, case.run()[0]), case.drawn
