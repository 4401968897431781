"""The attention kernel for all cards: what its blocks have on each, that it compiles there, and on a card what random cases (test_attention_cases.py) do
not reach: long sequences, pieces of prompts, graphs, parts put together.
"""

import itertools

import numpy as np
import pytest
import torch
from support.attention_cases import Case, Drawn
from support.cards import take_for_older
from support.kernel_costs import cost

from tilepress.formats.kv_int4 import KVFormat, UnlikeForms, forms_of
from tilepress.kernels import arch, decode_attention_mma as mma, jit

gpu = pytest.mark.gpu
BF16 = torch.bfloat16
ROWS = [(4, 0, False), (4, 32, False), (4, 0, True), (8, 0, False), (16, 0, False)]


@pytest.mark.parametrize("card", arch.CARDS, ids=lambda card: card.target)
def test_blocks_fit_every_card(card):
    for dim, key, value, size, rows in itertools.product(mma.HEAD_DIMS, ROWS, ROWS, (16, 32, 64), (1, 8, 9, 33, 9999)):
        form = forms_of(KVFormat(dim, *key), KVFormat(dim, *value))
        chosen = mma.configuration_for(form, size, BF16, rows, card)
        assert chosen.shared_bytes <= card.block_shared_bytes and chosen.stages >= 2 and chosen.token_warps >= 1
        assert chosen.rows >= min(rows, 64 if dim <= 128 else 32), (form, chosen)
        assert chosen.tiles * dim <= 256  # a row's sums stay registers


def test_there_are_tiles_for_all_queries():
    for seed in range(300):
        of = np.random.default_rng(seed)
        counts, group, rows = (
            of.integers(0, 90, of.integers(1, 9)),
            int(of.integers(1, 17)),
            int(of.choice([8, 16, 64])),
        )
        needed = sum(-(-int(n) * group // rows) for n in counts)
        assert needed <= mma.tiles_for(len(counts), int(counts.sum()), group, rows, True)
        assert len(counts) * -(-group // rows) == mma.tiles_for(len(counts), len(counts), group, rows, False)


def test_few_sequences_are_cut_into_parts_and_many_are_not():
    chosen = mma.configuration_for(KVFormat(128), 64, BF16, 4, arch.HOPPER)
    assert mma.splits_for(8, 8192, 1, chosen, 132) > 8 and mma.splits_for(4096, 8192, 1, chosen, 132) == 1
    assert mma.splits_for(1, 64, 1, chosen, 132) == 1 and mma.splits_for(1, 1 << 20, 1, chosen, 132) == 32
    assert mma.splits_for(4096, 65536, 1, chosen, 132) > 1  # lengths may differ


COMPILED = [  # each card, each form, the most registers
    ("sm_80", KVFormat(128), 4, 64),
    ("sm_80", KVFormat(256, 4, 32), 32, 16),
    ("sm_86", KVFormat(128, 4, 32), 64, 64),
    ("sm_89", UnlikeForms(KVFormat(96, 8), KVFormat(96, 4, 32)), 16, 32),
    ("sm_90a", KVFormat(128, 16), 64, 64),
    ("sm_100a", KVFormat(64, 8, 0, True), 64, 16),
    ("sm_120a", KVFormat(256, 16), 8, 64),
]


@pytest.mark.thorough
@pytest.mark.skipif(jit.missing() is not None, reason="needs cuda-core")
@pytest.mark.parametrize("target,form,rows,size", COMPILED, ids=lambda x: getattr(x, "name", str(x)))
def test_it_compiles_without_spills(target, form, rows, size):
    card = next(card for card in arch.CARDS if card.target == target)
    chosen = mma.configuration_for(form, size, BF16, rows, card, form.key.bits == 4, rows == 16)
    for name, source in (
        ("decode_attention_mma", mma.source(chosen)),
        ("attention_combine", mma.combine_source(chosen)),
    ):
        found = cost(jit.compile_cubin(name, source, target)[1])
        assert found["spills"] == found["stack"] == 0, found


def drawn(form, histories, counts=None, group=4, page=64, **options) -> Drawn:
    plain = {"shared": 0, "window": 0, "softcap": 0.0, "has_sinks": False, "has_slopes": False, "calibrated": True}
    return Drawn(7, form, BF16, False, 2, group, page, tuple(histories), counts and tuple(counts), **plain | options)


def check(case: Case, found) -> None:
    """Compare with attention in float64 computed on the card: the oracle of random cases takes a query at a time."""
    out, row = found.double(), 0
    for (key, value), length, count in zip(case.tokens, case.lengths, case.counts, strict=True):
        key, value = (torch.from_numpy(x).cuda().repeat_interleave(case.drawn.group, 1) for x in (key, value))
        query = case.query_there[row : row + count].double()
        at, place = torch.arange(length - count, length)[:, None].cuda(), torch.arange(length).cuda()
        hidden = (place > at) | ((at - place >= case.drawn.window) if case.drawn.window else False)
        scores = torch.einsum("qhd,thd->hqt", query, key) * case.scale
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        expected = torch.einsum("hqt,thd->qhd", weights, value)
        error = float((out[row : row + count] - expected).norm() / expected.norm())
        assert error < 5e-3, f"{length} tokens, {count} queries: {error}"
        row += count


LONG = [
    ([9000, 1, 700, 0, 4000], None),
    ([9000, 1, 700, 0, 4000], [4, 16, 1, 7, 8]),
    ([3000, 500, 0], [512, 1, 700]),
    ([33_000], [16]),
    ([50 + i * 7 % 90 for i in range(300)], None),
]


@gpu
@pytest.mark.parametrize("histories,counts", LONG, ids=lambda x: str(x)[:20])
@pytest.mark.parametrize("dim,row", itertools.product((64, 128, 256), ROWS), ids=str)
def test_long_sequences_and_pieces_of_prompts(dim, row, histories, counts, monkeypatch):
    take_for_older(monkeypatch)
    case = Case(drawn(KVFormat(dim, *row), histories, counts), "cuda")
    found, _ = case.run()
    check(case, found)
    for _ in range(3):
        assert torch.equal(found, case.run()[0])


@gpu
@pytest.mark.parametrize("window", [1, 64, 1000, 4096])
@pytest.mark.parametrize("page", [16, 32, 64])
def test_windows_over_long_sequences(window, page):
    case = Case(drawn(KVFormat(128), [9000, 300, 4096], [1, 4, 300], page=page, window=window), "cuda")
    check(case, case.run()[0])


@gpu
def test_the_older_kernel_gives_what_hoppers_gives(monkeypatch):
    case = Case(drawn(KVFormat(128), [9000, 1, 700, 64, 4000]), "cuda")
    best = case.run()
    take_for_older(monkeypatch)
    for mine, other in zip(case.run(), best, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-3)
    step = (torch.tensor([float(best[0].abs().max()) / 100], device="cuda"),)
    codes = case.run("decode_attention_int8", *step)
    assert int((codes.float() - (best[0].float() / step[0]).round()).abs().max()) <= 2


@gpu
@pytest.mark.parametrize("counts", [None, (4, 1, 300, 2)], ids=["one each", "several"])
def test_graphs_follow_the_lengths(counts, monkeypatch):
    take_for_older(monkeypatch)
    most = [3000, 200, 1, 700]
    case = Case(drawn(KVFormat(128), most, counts), "cuda")
    lens = case.arguments[2]
    full = lens.clone()
    case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [case.run() for _ in range(3)]
    for lengths in (full.tolist(), [9, 1, 1, 1], [3000, 0, 0, 0], [0, 0, 0, 0], [64, 200, 1, 65], full.tolist()):
        lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        expected = case.run()
        for results in found:
            assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True)), lengths
    check(case, found[0][0])


@gpu
def test_parts_of_a_sequence_are_put_together(monkeypatch):
    """Parts weigh by their log-sum-exp; a sink is in one of them."""
    take_for_older(monkeypatch)
    whole = Case(drawn(KVFormat(128), [640, 1280], has_sinks=True), "cuda")
    out, lse = whole.run()
    table, lens = whole.arguments[1:3]
    parts = []
    for first, last, sinks in ((0, 5, None), (5, table.shape[1], whole.options[-2])):
        size = (lens - 64 * first).clamp(0, 64 * (last - first)).int()
        arguments = whole.arguments[0], table[:, first:last].contiguous(), size, *whole.arguments[3:]
        options = *whole.options[:-2], sinks, whole.options[-1]
        parts.append(torch.ops.tilepress.decode_attention_lse(whole.query_there, *arguments, *options))
    together = torch.logaddexp(parts[0][1], parts[1][1])
    mixed = sum(o.float() * (part - together).exp()[..., None] for o, part in parts)
    torch.testing.assert_close(together, lse, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(mixed, out.float(), rtol=2e-2, atol=5e-3)


@gpu
def test_wild_tables_lengths_and_queries_stay_in_memory(monkeypatch):
    take_for_older(monkeypatch)
    case = Case(drawn(KVFormat(128), [100, 100], [3, 3]), "cuda")
    table, lens = case.arguments[1:3]
    starts = case.options[3]
    table.fill_(2**30)
    case.run()
    table.fill_(-1)
    lens.copy_(torch.tensor([10_000, -5]))
    assert not bool(case.run()[0][3:].any())
    starts.copy_(torch.tensor([0, -9, 99]))
    case.run()
    starts.copy_(torch.tensor([0, 1, 2]))  # queries that are no sequence's are zeros
    out, lse = case.run()
    assert not bool(out[2:].any()) and bool(torch.isneginf(lse[2:]).all())
    torch.cuda.synchronize()
