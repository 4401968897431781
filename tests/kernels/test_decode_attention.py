"""Decode attention on a card against attention in float64 over what formats/kv_int4.py says the cache holds; its references against each other."""

import itertools

import pytest
import torch
from support.kernel_costs import cost

from tilepress.formats.kv_int4 import KVFormat, fake_quantize
from tilepress.kernels import arch, decode_attention, jit, kv_cache  # noqa: F401
from tilepress.kernels.decode_attention import Configuration

ops = torch.ops.tilepress
gpu = pytest.mark.gpu
FORMS = [
    *(
        KVFormat(dim, bits, 0, static)
        for dim in (64, 128)
        for bits, static in ((4, False), (4, True), (8, False), (8, True))
    ),
    *(
        KVFormat(64, 4, 32),
        KVFormat(128, 4, 32),
        KVFormat(128, 4, 64),
        KVFormat(128, 4, 32, True),
        KVFormat(64, 16),
        KVFormat(128, 16),
    ),
]


def calibrated(form: KVFormat, heads: int, seed: int):
    """Mean, scale and weight of channels; (scale, shift) of static formats."""
    generator = torch.Generator().manual_seed(seed)
    if form.bits == 16:
        return None, None
    channels = torch.rand(3, heads, form.head_dim, generator=generator) + 0.5
    steps = torch.rand(heads, form.groups, 1, generator=generator) + 8
    fixed = torch.cat([steps / form.max_code, -steps / 2], -1).half()
    return channels, fixed if form.static else None


class Case:
    """Sequences in shuffled pages; every place without a token is NaN, entries of the table that are not used name no page."""

    def __init__(self, form: KVFormat, lengths: list[int], heads: int, device: str, rotate=False, plain=False, seed=0):
        self.form, self.lengths, self.rotate, self.device = form, lengths, rotate, device
        generator = torch.Generator(device).manual_seed(seed)
        sides = [(None, None) if plain else calibrated(form, heads, seed + i) for i in (1, 2)]
        sides = [tuple(None if t is None else t.to(device) for t in side) for side in sides]
        counts = [-(-n // 64) for n in lengths]
        numbers = torch.randperm(sum(counts) + 3, generator=generator, device=device)
        self.table = torch.full((len(lengths), max(1, *counts)), 2**30, dtype=torch.int32, device=device)
        self.pages = torch.full((len(numbers), heads, form.page_bytes), 0xFF, dtype=torch.uint8, device=device)
        self.sequences, used = [], 0
        for i, n in enumerate(lengths):
            mine = numbers[used : used + counts[i]]
            used += counts[i]
            self.table[i, : counts[i]] = mine.int()
            place = torch.arange(n, device=device)
            slots = mine[place // 64] * 64 + place % 64
            key, value = (torch.randn(n, heads, form.head_dim, generator=generator, device=device) for _ in range(2))
            shape = form.bits, form.group_size, form.static
            (kc, kf), (vc, vf) = sides
            ops.kv_append(self.pages, key, value, slots, kc, kf, 1.0, vc, vf, 1.0, *shape, rotate, 0)
            self.sequences.append(
                [
                    fake_quantize(x, form, *side, 1.0, r, 0)
                    for x, side, r in ((key, sides[0], rotate), (value, sides[1], False))
                ]
            )
        self.lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.scale = 1.3 * form.head_dim**-0.5
        self.tail = (*sides[0], *sides[1], form.bits, form.group_size, form.static, rotate)

    def query(self, group: int, dtype: torch.dtype, seed=9) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        shape = len(self.lengths), self.pages.shape[1] * group, self.form.head_dim
        return torch.randn(shape, generator=generator, device=self.device).to(dtype)

    def run(self, query: torch.Tensor, name="decode_attention", *more):
        return getattr(ops, name)(query, self.pages, self.table, self.lens, self.scale, *self.tail, *more)

    def exact(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp in float64."""
        heads = self.pages.shape[1]
        grouped = query.double().unflatten(1, (heads, -1))
        out, lse = torch.zeros_like(grouped), grouped.new_full(grouped.shape[:3], -torch.inf)
        for i, (key, value) in enumerate(self.sequences):
            if self.lengths[i]:
                scores = torch.einsum("hgd,thd->hgt", grouped[i], key.double()) * self.scale
                out[i] = torch.einsum("hgt,thd->hgd", scores.softmax(-1), value.double())
                lse[i] = scores.logsumexp(-1)
        return out.flatten(1, 2), lse.flatten(1, 2)

    def check(self, query: torch.Tensor, found: torch.Tensor) -> None:
        expected, _ = self.exact(query)
        assert found.dtype == query.dtype and found.shape == query.shape
        for i, n in enumerate(self.lengths):
            if not n:
                assert not bool(found[i].any())
                continue
            error = float((found[i].double() - expected[i]).norm() / expected[i].norm())
            assert error < 5e-3, f"{self.form.name}, {n} tokens: {error}"


LENGTHS = [1, 63, 64, 65, 0, 200, 31, 1000, 33, 0]


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group", [1, 4, 5, 8, 13, 16, 40])
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f"{f.head_dim} {f.name}")
def test_attention_is_that_of_float64(form, group, dtype):
    case = Case(form, LENGTHS, 2, "cuda")
    query = case.query(group, dtype)
    found = case.run(query)
    case.check(query, found)
    assert torch.equal(found, case.run(query))


@gpu
@pytest.mark.parametrize("form", [f for f in FORMS if f.bits == 4], ids=lambda f: f"{f.head_dim} {f.name}")
def test_keys_that_are_rotated(form):
    case = Case(form, LENGTHS, 2, "cuda", rotate=True)
    query = case.query(4, torch.bfloat16)
    case.check(query, case.run(query))


@gpu
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f"{f.head_dim} {f.name}")
def test_log_sum_exp_and_int8(form):
    for rotate, group in itertools.product((False, form.bits == 4), (4, 12)):
        case = Case(form, LENGTHS, 2, "cuda", rotate)
        query = case.query(group, torch.bfloat16)
        out, lse = case.run(query, "decode_attention_lse")
        expected, exact_lse = case.exact(query)
        case.check(query, out)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=2e-3, atol=1e-2)
        step = torch.tensor([float(expected.abs().max()) / 100], device="cuda")
        codes = case.run(query, "decode_attention_int8", step)
        assert codes.dtype == torch.int8
        apart = (codes.double() - (expected / step.double()).round().clamp(-128, 127)).abs()
        assert float(apart.max()) <= 1 and float((apart > 0).double().mean()) < 0.2


@gpu
@pytest.mark.parametrize(
    "form", [KVFormat(128), KVFormat(64, 4, 32), KVFormat(128, 8), KVFormat(64, 16)], ids=lambda f: f.name
)
@pytest.mark.parametrize(
    "lengths,heads,group",
    [
        ([9000, 1, 9, 4000, 0, 3], 1, 8),
        ([70_000], 1, 4),
        ([3000, 9000, 700] * 7, 2, 3),
        ([33_000], 8, 4),
        ([50] * 700, 2, 2),
        ([i * 7 % 150 for i in range(1500)], 1, 1),
        ([0], 2, 4),
    ],
    ids=lambda x: str(x)[:20],
)
def test_lengths(form, lengths, heads, group):
    """Apart by a factor of thousands, long, many, none."""
    case = Case(form, lengths, heads, "cuda")
    query = case.query(group, torch.bfloat16)
    found = case.run(query)
    case.check(query, found)
    for _ in range(3):
        assert torch.equal(found, case.run(query))


@gpu
@pytest.mark.parametrize(
    "form", [KVFormat(128), KVFormat(128, 4, 0, True), KVFormat(64, 8)], ids=lambda f: f"{f.head_dim} {f.name}"
)
def test_units_of_64_tokens(form, monkeypatch):
    """Which many tokens are otherwise needed for."""
    monkeypatch.setattr(decode_attention, "_MANY", 0)
    assert decode_attention.shape_for(form, 1, 1) == (8, 64)
    case = Case(form, [9000, 1, 63, 64, 65, 0, 700] * 3, 2, "cuda")
    query = case.query(5, torch.bfloat16)
    case.check(query, case.run(query))


@gpu
@pytest.mark.parametrize("form", [KVFormat(128), KVFormat(128, 8), KVFormat(64, 4, 32)], ids=lambda f: f.name)
@pytest.mark.parametrize("size", [0.02, 1.0])
def test_what_is_far_below_a_sink_counts(form, size):
    """The first token takes 95 % of the weight and has values near 0: the output is that of thousands of others, each of a weight near 1e-5."""
    case = Case(form, [0], 1, "cuda", plain=True)
    tokens, dim = 4096, form.head_dim
    generator = torch.Generator("cuda").manual_seed(3)
    query = torch.randn(1, 1, dim, generator=generator, device="cuda").bfloat16()
    key, value = torch.randn(2, tokens, 1, dim, generator=generator, device="cuda") * size
    key *= 0.1 / size
    value[0] *= 0.05
    value += 0.5 * size
    strength = torch.log(torch.tensor(19.0 * tokens)) / case.scale
    key[0] = query[0].float() * (strength / query.float().square().sum())
    case.lengths, case.table = [tokens], torch.arange(tokens // 64, dtype=torch.int32, device="cuda")[None]
    case.pages = torch.zeros(tokens // 64, 1, form.page_bytes, dtype=torch.uint8, device="cuda")
    shape = form.bits, form.group_size, form.static
    slots = torch.arange(tokens, device="cuda")
    ops.kv_append(case.pages, key, value, slots, None, None, 1.0, None, None, 1.0, *shape, False, 0)
    case.sequences = [[fake_quantize(x, form, None, None, 1.0, False, 0) for x in (key, value)]]
    case.lens = torch.tensor([tokens], dtype=torch.int32, device="cuda")
    case.tail = (None, None, None, None, *shape, False)
    expected, _ = case.exact(query)
    error = (case.run(query).double() - expected).norm() / expected.norm()
    assert float(error) < 1e-2, float(error)


@gpu
def test_a_million_tokens():
    case = Case(KVFormat(64), [1_050_000, 5], 1, "cuda", plain=True)
    query = case.query(2, torch.float16)
    case.check(query, case.run(query))


@gpu
@pytest.mark.parametrize("form", [KVFormat(128), KVFormat(128, 16)], ids=lambda f: f.name)
def test_graphs_follow_the_lengths(form):
    """Lengths that shrink, grow and become none between replays; the same bits as a launch outside of a graph."""
    most = [3000, 200, 1, 700]
    case = Case(form, most, 4, "cuda")
    query = case.query(4, torch.bfloat16)
    case.run(query)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [case.run(query) for _ in range(3)]
    for lengths in (most, [1, 1, 1, 1], [3000, 0, 0, 0], [0, 0, 0, 0], [64, 200, 1, 65], most, [2999, 199, 0, 3], most):
        case.lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        expected = case.run(query)
        assert all(torch.equal(out, expected) for out in found), lengths
        case.lengths = lengths
        sequences = case.sequences
        case.sequences = [[x[:n] for x in pair] for pair, n in zip(sequences, lengths, strict=True)]
        case.check(query, expected)
        case.sequences = sequences


@gpu
@pytest.mark.parametrize("spare", [True, False], ids=["a counter of its own", "a counter that replays clear"])
def test_replays_do_not_take_what_others_have_left(spare, monkeypatch):
    """Segments of many blocks, again and again in the same memory, each time with another query."""
    case = Case(KVFormat(128), [9000, 70, 5000], 2, "cuda")
    queries = [case.query(4, torch.bfloat16, seed) for seed in range(20)]
    expected = [case.run(query) for query in queries]
    if not spare:
        monkeypatch.setitem(decode_attention._spare, 0, [])
    query, graph = torch.empty_like(queries[0]), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [case.run(query) for _ in range(3)]
    for i in range(200):
        query.copy_(queries[i % 20])
        graph.replay()
        assert all(torch.equal(out, expected[i % 20]) for out in found), i


@gpu
def test_streams_do_not_meet():
    case = Case(KVFormat(128), [5000, 300, 4000], 8, "cuda")
    queries = [case.query(4, torch.bfloat16, seed) for seed in range(4)]
    expected = [case.run(query) for query in queries]
    streams = [torch.cuda.Stream() for _ in queries]
    torch.cuda.synchronize()
    for _ in range(50):
        found = []
        for query, stream in zip(queries, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(case.run(query))
        torch.cuda.synchronize()
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@gpu
def test_wild_tables_and_lengths_stay_in_the_pages():
    case = Case(KVFormat(128), [100, 100], 2, "cuda")
    query = case.query(4, torch.bfloat16)
    case.table.fill_(2**30)
    case.run(query)
    case.table.fill_(-1)
    case.lens.copy_(torch.tensor([10_000, -5]))
    assert not bool(case.run(query)[1].any())
    torch.cuda.synchronize()


@gpu
def test_arguments_are_checked_on_a_card():
    case = Case(KVFormat(64), [3], 2, "cuda")
    with pytest.raises(ValueError, match="no multiple"):
        case.run(case.query(1, torch.bfloat16)[:, :1].contiguous())
    with pytest.raises(ValueError, match="2 queries, 1 lengths"):
        case.run(case.query(1, torch.bfloat16).expand(2, 2, 64))
    assert not decode_attention.path(case.pages.device, case.form).is_reference
    assert "heads of 32" in decode_attention.path(case.pages.device, KVFormat(32)).why


@gpu
def test_what_no_kernel_takes_is_attended_to_by_the_reference():
    """A pool without pages, pages at an odd address, queries with other strides, no sequence."""
    case = Case(KVFormat(64), [30, 70], 2, "cuda")
    query = case.query(4, torch.bfloat16)
    expected = case.run(query)
    moved = query.transpose(0, 1).contiguous().transpose(0, 1)
    out = case.run(moved)
    assert torch.equal(out, expected) and out.is_contiguous()
    shifted = torch.empty(case.pages.numel() + 8, dtype=torch.uint8, device="cuda")[8:].view(case.pages.shape)
    case.pages = shifted.copy_(case.pages)
    case.table %= 2**30
    torch.testing.assert_close(case.run(query), expected, rtol=2e-2, atol=2e-2)
    case.pages = case.pages[:0].clone()
    assert not bool(case.run(query).any())
    case.table, case.lens = case.table[:0], case.lens[:0]
    assert case.run(query[:0]).shape == (0, 8, 64)


@gpu
def test_the_first_call_may_be_in_a_graph_of_the_compiler():
    """A counter of blocks must not lie in a graph's memory: the warm-up of reduce-overhead allocates there."""
    case = Case(KVFormat(128), [3000, 7], 2, "cuda")
    query = case.query(4, torch.bfloat16)
    expected = case.run(query * 2)
    decode_attention._counters.clear()
    decode_attention._spare.clear()
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: case.run(q * 2) + 0, mode="reduce-overhead")
    for _ in range(5):
        assert torch.equal(compiled(query), expected)


@gpu
def test_in_a_compiled_function():
    case = Case(KVFormat(128, 4, 32), [100, 7], 2, "cuda")
    query = case.query(4, torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: case.run(q * 2), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(query), case.run(query * 2))


@pytest.mark.parametrize(
    "form", [KVFormat(64, 4, 32), KVFormat(64, 8, 0, True), KVFormat(32, 16)], ids=lambda f: f.name
)
def test_references_agree_with_float64(form):
    case = Case(form, [3, 66, 0], 2, "cpu", rotate=form.bits == 4)
    query = case.query(3, torch.float32)
    expected, exact_lse = case.exact(query)
    out, lse = case.run(query, "decode_attention_lse")
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-4, atol=1e-4)
    codes = case.run(query, "decode_attention_int8", torch.tensor([0.01]))
    torch.testing.assert_close(codes.double(), (expected / 0.01).round().clamp(-128, 127), rtol=0, atol=1)


@pytest.mark.parametrize(
    "device,dtype", [("cpu", torch.float32), pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("starts", [None, [0, 1, 66, 66]], ids=["one query each", "several"])
def test_output_into_memory_that_is_given(starts, device, dtype):
    """Memory on either side of it stays as it was; memory that kernels cannot write, for it begins anywhere, gets the same numbers."""
    case = Case(KVFormat(64, 4, 32), [3, 66, 0], 2, device)
    more = () if starts is None else (0, 0, False, torch.tensor(starts, dtype=torch.int32, device=device))
    query = case.query(4, dtype)
    if starts is not None:
        query = query[:1].expand(66, -1, -1).contiguous()
    expected = case.run(query, "decode_attention", *more)
    for first in (1, 0):
        room = torch.full((len(query) * 512 + 16,), 7.0, dtype=dtype, device=device)
        out = room[8 * first + 1 - first :][: query.numel()].view(query.shape)
        assert case.run(query, "decode_attention_into", out, *more) is None
        assert torch.equal(out, expected)
        assert (room != 7).sum() <= query.numel() and bool((room[-7:] == 7).all())
    with pytest.raises(ValueError, match="into"):
        case.run(query, "decode_attention_into", out[:, :1], *more)


@pytest.mark.parametrize(
    "name,more",
    [
        ("decode_attention_lse", ()),
        ("decode_attention_int8", (torch.tensor([0.1]),)),
        ("decode_attention_into", (torch.zeros(2, 4, 64),)),
    ],
)
def test_opcheck(name, more):
    case = Case(KVFormat(64, 4, 32), [3, 66], 2, "cpu")
    args = case.query(2, torch.float32), case.pages, case.table % 2**30, case.lens, 0.1, *case.tail, *more
    torch.library.opcheck(getattr(ops, name).default, args)


@pytest.mark.thorough
@pytest.mark.skipif(jit.missing() is not None, reason="needs cuda-core")
def test_it_compiles_without_spills():
    for form, tiles, tokens in (
        (KVFormat(128), 1, 1 << 20),
        (KVFormat(128, 4, 32), 1, 0),
        (KVFormat(128, 8), 2, 0),
        (KVFormat(64, 16), 1, 0),
    ):
        rotate, shape = form.groups == 1 and form.bits == 4, decode_attention.shape_for(form, tiles, tokens)
        chosen = Configuration(form, torch.bfloat16, tiles, tiles, rotate, tiles == 2, tiles == 1, 132, *shape)
        found = cost(jit.compile_cubin("decode_attention", decode_attention.source(chosen), "sm_90a")[1])
        assert found["spills"] == found["stack"] == 0, (form, found)


def test_blocks_have_the_shared_memory_that_they_need():
    for form, tiles, tokens in itertools.product(FORMS, (1, 2), (0, 1 << 20)):
        shape = decode_attention.shape_for(form, tiles, tokens)
        assert (
            Configuration(form, torch.bfloat16, tiles, 1, False, False, False, 132, *shape).shared_bytes
            <= arch.HOPPER.block_shared_bytes
        )
