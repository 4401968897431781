"""The cache's ops against attention in float64, on rows as the formats (tests/formats/test_kv_int4.py) give them back."""

import itertools

import pytest
import torch
from support.feedback import random_feedback
from support.kernel_costs import cost

from tilepress.formats.kv_int4 import KVFormat, UnlikeForms, fake_quantize
from tilepress.kernels import decode_attention, jit, kv_cache, kv_read, rope_append  # noqa: F401
from tilepress.kernels.once import forget_plans

ops = torch.ops.tilepress
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FORMS = [
    KVFormat(128),
    KVFormat(64, 4, 32),
    KVFormat(64, 4, 0, True),
    KVFormat(128, 8),
    KVFormat(64, 8, 0, True),
    KVFormat(64, 16),
]


def sides(form, heads, device, seed=0):
    """Channels, (scale, shift) of static formats and clip, for keys or values."""
    generator = torch.Generator().manual_seed(seed)
    if form.bits == 16:
        return None, None, 1.0
    channels = torch.rand(3, heads, form.head_dim, generator=generator) + 0.5
    fixed = torch.tensor([8.0 / form.max_code, -4.0], dtype=torch.float16).expand(heads, form.groups, 2).contiguous()
    return channels.to(device), fixed.to(device) if form.static else None, 0.95


def filled(form, lengths, heads, device, rotate, seed=0):
    """Pages with sequences of these lengths: pages, table, lengths, keys and values as they come back, in float64."""
    generator = torch.Generator().manual_seed(seed)
    most = max(-(-n // 64) for n in lengths) or 1
    numbers = torch.randperm(most * len(lengths) + 2, generator=generator)
    table = numbers[: most * len(lengths)].view(len(lengths), most)
    pages = torch.full(
        (len(numbers), heads, form.page_bytes), 0xFF, dtype=torch.uint8, device=device
    )  # NaN where nothing is
    key_side, value_side = sides(form, heads, device, 1), sides(form, heads, device, 2)
    exact = []
    for i, n in enumerate(lengths):
        k, v = (torch.randn(n, heads, form.head_dim, generator=generator).to(device) for _ in range(2))
        slots = (table[i][torch.arange(n) // 64] * 64 + torch.arange(n) % 64).to(device)
        shape = (form.bits, form.group_size, form.static, rotate, 2)
        ops.kv_append(pages, k, v, slots, *key_side, *value_side, *shape)
        back = [
            fake_quantize(x, form, *side, r, 2).double()
            for x, side, r in ((k, key_side, rotate), (v, value_side, False))
        ]
        exact.append(back)
    return (
        pages,
        table.int().to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        exact,
        key_side,
        value_side,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize(
    "form,rotate", [*((form, False) for form in FORMS), (FORMS[0], True), (FORMS[1], True)], ids=str
)
def test_decode_attention_against_float64(form, group, rotate, device):
    heads, lengths = 2, [1, 63, 64, 65, 200, 0]
    pages, table, seq_lens, exact, key_side, value_side = filled(form, lengths, heads, device, rotate)
    query = torch.randn(len(lengths), heads * group, form.head_dim, generator=torch.Generator().manual_seed(5)).to(
        device
    )
    scale = form.head_dim**-0.5
    args = (
        pages,
        table,
        seq_lens,
        scale,
        *key_side[:2],
        *value_side[:2],
        form.bits,
        form.group_size,
        form.static,
        rotate,
    )
    out = ops.decode_attention(query, *args)
    for i, n in enumerate(lengths):
        if not n:
            assert not bool(out[i].any())
            continue
        key, value = (x.repeat_interleave(group, 1) for x in exact[i])
        weights = (torch.einsum("hd,thd->ht", query[i].double(), key) * scale).softmax(-1)
        torch.testing.assert_close(out[i].double(), torch.einsum("ht,thd->hd", weights, value), rtol=1e-4, atol=1e-4)
    assert ops.decode_attention(query.bfloat16(), *args).dtype == torch.bfloat16


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_reading_back_gives_the_values(form, device):
    lengths = [70, 0, 5]
    pages, table, seq_lens, exact, key_side, value_side = filled(form, lengths, 3, device, False)
    args = (
        pages,
        table,
        seq_lens,
        70,
        *key_side[:2],
        *value_side[:2],
        form.head_dim,
        form.bits,
        form.group_size,
        form.static,
    )
    key, value = ops.kv_read(*args, False, torch.float32)
    assert key.shape == value.shape == (3, 3, 70, form.head_dim)
    for i, n in enumerate(lengths):
        for found, expected in zip((key, value), exact[i], strict=True):
            torch.testing.assert_close(found[i, :, :n].double(), expected.transpose(0, 1), rtol=1e-6, atol=1e-6)
            assert not bool(found[i, :, n:].any())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "form",
    [
        UnlikeForms(KVFormat(64, 4, 32), KVFormat(64)),
        UnlikeForms(KVFormat(64, 8), KVFormat(64, 4, 0, True)),
        UnlikeForms(KVFormat(128, 4, 0, True), KVFormat(128, 16)),
        UnlikeForms(KVFormat(128, 16), KVFormat(128, 4, 64)),
    ],
    ids=lambda form: form.name,
)
def test_keys_in_one_form_and_values_in_another(form, device):
    """Append, read back and attention, through the ops: against rows of each form, and attention in float64."""
    generator, heads, length, dim = torch.Generator().manual_seed(0), 2, 70, form.head_dim
    key, value = (torch.randn(length, heads, dim, generator=generator).to(device) for _ in range(2))
    rotate = form.key.bits == 4 and not form.key.static
    given = [sides(side, heads, device, seed) for seed, side in enumerate((form.key, form.value))]
    numbers, others = kv_cache.op_forms(form)
    pages = torch.full((3, heads, form.page_bytes), 0xFF, dtype=torch.uint8, device=device)
    slots = (torch.arange(length) + 64).to(device)  # pages 1 and 2
    ops.kv_append(pages, key, value, slots, *given[0], *given[1], *numbers, rotate, 1, *others)
    exact = [
        fake_quantize(x, one, *side, turned, 1)
        for x, one, side, turned in ((key, form.key, given[0], rotate), (value, form.value, given[1], False))
    ]
    table, seq_lens = torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    table, seq_lens, stored = table.to(device), seq_lens.to(device), (*given[0][:2], *given[1][:2])
    back = ops.kv_read(pages, table, seq_lens, length, *stored, dim, *numbers, rotate, torch.float32, *others)
    for found, expected in zip(back, exact, strict=True):
        torch.testing.assert_close(found[0], expected.transpose(0, 1), rtol=1e-6, atol=1e-6)
    query = torch.randn(1, 2 * heads, dim, generator=generator).to(device)
    out = ops.decode_attention(query, pages, table, seq_lens, dim**-0.5, *stored, *numbers, rotate, *others)
    key, value = (x.double().repeat_interleave(2, 1) for x in exact)
    weights = (torch.einsum("hd,thd->ht", query[0].double(), key) * dim**-0.5).softmax(-1)
    torch.testing.assert_close(out[0].double(), torch.einsum("ht,thd->hd", weights, value), rtol=1e-4, atol=1e-4)


def test_feedback_that_does_not_fit_is_refused():
    form, rows = KVFormat(64), torch.zeros(1, 2, 64)
    pages, none = torch.zeros(1, 2, form.page_bytes, dtype=torch.uint8), (None, None, 1.0) * 2
    for fed in (random_feedback(1, 64), random_feedback(2, 64).short(), random_feedback(2, 32)):
        with pytest.raises(ValueError, match="feedback"):
            ops.kv_append(pages, rows, rows, torch.tensor([0]), *none, 4, 0, False, False, 0, 0, 0, False, fed)
    pages = torch.zeros(1, 2, KVFormat(64, 8).page_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="of 4-bit ones"):
        ops.kv_append(
            pages, rows, rows, torch.tensor([0]), *none, 8, 0, False, False, 0, 0, 0, False, random_feedback(2, 64)
        )


def test_a_values_form_without_its_bits_is_refused():
    form = KVFormat(64)
    pages, rows = torch.zeros(1, 1, form.page_bytes, dtype=torch.uint8), torch.zeros(1, 1, 64)
    with pytest.raises(ValueError, match="without value_bits"):
        ops.kv_append(pages, rows, rows, torch.tensor([0]), *(None, None, 1.0) * 2, 4, 0, False, False, 0, 0, 32)


APPENDED = [
    *FORMS,
    *(
        KVFormat(dim, 4, size)
        for dim, size in ((32, 0), (96, 0), (96, 32), (128, 32), (128, 64), (160, 0), (256, 64), (512, 0), (1024, 0))
    ),
    *(KVFormat(96, 8), KVFormat(256, 16), KVFormat(128, 4, 64, True)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", APPENDED, ids=str)
def test_pages_are_the_same_on_a_card(form, dtype):
    """Every byte: with and without calibration, rotated, refitted, clipped, errors fed back; strided inputs, slots that are left out."""
    generator, heads, tokens = torch.Generator().manual_seed(0), 3, 150
    k, v = (torch.randn(heads, tokens, form.head_dim, generator=generator).to(dtype).transpose(0, 1) for _ in range(2))
    k[3], v[5, 1], k[7, 2, :5] = 0, 2.5, 300  # rows of zeros, of one number, outliers
    slots = torch.randperm(5 * 64, generator=generator)[:tokens]
    slots[::7] = -1
    blank = torch.full((5, heads, form.page_bytes), 0xA5, dtype=torch.uint8)
    key_side, value_side = sides(form, heads, "cpu", 1), sides(form, heads, "cpu", 2)
    plain = None, key_side[1], 1.0
    rotates = form.bits == 4 and not form.static
    feedback = (random_feedback(heads, form.head_dim, most) if form.bits == 4 else None for most in (20, 127))
    for rotate, refits, left, right, fed in (
        (False, 0, plain, plain, None),
        (False, 1, plain, plain, None),
        (False, 2, key_side, value_side, None),
        (rotates, 3, key_side, value_side, None),
        (rotates, 1, key_side, value_side, next(feedback)),
        (False, 0, plain, plain, next(feedback)),
    ):
        args = k, v, slots, *left, *right, form.bits, form.group_size, form.static, rotate, refits, 0, 0, False, fed
        expected, found = blank.clone(), blank.cuda()
        ops.kv_append(expected, *args)
        ops.kv_append(found, *(a.cuda() if isinstance(a, torch.Tensor) else a for a in args))
        wrong = int((found.cpu() != expected).sum())
        assert wrong == 0, (rotate, refits, wrong)


def read_arguments(form, lengths, max_len, calibrated, rotate, dtype):
    """Arguments of kv_read over pages of random bytes, which hold every number that can be stored."""
    generator, heads = torch.Generator().manual_seed(0), 3
    pages = torch.randint(0, 256, (7, heads, form.page_bytes), generator=generator, dtype=torch.uint8)
    table = torch.stack([torch.randperm(7, generator=generator)[:3] for _ in lengths]).int()
    both = []
    for seed in (1, 2):
        channels, fixed, _ = sides(form, heads, "cpu", seed)
        both += [channels if calibrated else None, fixed]
    shape = form.head_dim, form.bits, form.group_size, form.static, rotate, dtype
    return pages, table, torch.tensor(lengths, dtype=torch.int32), max_len, *both, *shape


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", APPENDED, ids=str)
def test_what_is_read_back_is_the_same_on_a_card(form, dtype):
    """Every bit; what is not a number is none on either."""
    for calibrated, rotate, max_len in ((False, False, 192), (True, False, 195), (True, True, 192), (False, True, 333)):
        args = read_arguments(form, [70, 0, 5, 129, 192, 64], max_len, calibrated, rotate, dtype)
        on_card = [a.cuda() if isinstance(a, torch.Tensor) else a for a in args]
        for expected, found in zip(ops.kv_read(*args), ops.kv_read(*on_card), strict=True):
            found, bits = found.cpu(), torch.int32 if dtype == torch.float32 else torch.int16
            same = (found.view(bits) == expected.view(bits)) | (found.isnan() & expected.isnan())
            assert same.all(), (calibrated, rotate, max_len, int((~same).sum()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rounding_is_what_the_cache_gives_back(form, device):
    """Of keys and of values, calibrated or not: every bit of `fake_quantize` on a CPU."""
    x = torch.randn(2, 50, 3, form.head_dim, generator=torch.Generator().manual_seed(0)).transpose(0, 1)
    rotates, four = form.bits == 4 and not form.static, form.bits == 4
    for side, rotate, fed in (
        (sides(form, 3, "cpu"), False, None),
        (sides(form, 3, "cpu"), rotates, random_feedback(3, form.head_dim) if four else None),
        ((None, sides(form, 3, "cpu")[1], 0.8), False, None),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            rows = x.to(dtype)
            expected = fake_quantize(rows, form, *side, rotate, form.refits, fed)
            moved, given = [t if t is None else t.to(device) for t in (*side[:2], fed)], side[2]
            back = kv_read.rounded(rows.to(device), form, *moved[:2], given, rotate, form.refits, moved[2])
            assert back.dtype == torch.float32 and torch.equal(back.cpu(), expected)


UNLIKE = [
    UnlikeForms(KVFormat(64), KVFormat(64, 4, 32)),
    UnlikeForms(KVFormat(128, 4, 32), KVFormat(128, 4, 0, True)),
    UnlikeForms(KVFormat(128, 4, 0, True), KVFormat(128)),
    UnlikeForms(KVFormat(64, 8), KVFormat(64)),
    UnlikeForms(KVFormat(64, 4, 32), KVFormat(64, 8, 0, True)),
    UnlikeForms(KVFormat(128, 16), KVFormat(128, 4, 64)),
    UnlikeForms(KVFormat(96, 4, 32), KVFormat(96, 16)),
    UnlikeForms(KVFormat(32), KVFormat(32, 8)),
    UnlikeForms(KVFormat(256, 4, 64), KVFormat(256)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 16])
@pytest.mark.parametrize("form", UNLIKE, ids=lambda form: form.name)
def test_unlike_forms_are_the_same_on_a_card(form, size, monkeypatch):
    """Appended, after RoPE too, and read back: every bit. Until this has passed on a card, references serve (`kv_cache.UNLIKE`)."""
    monkeypatch.setattr(kv_cache, "UNLIKE", None)
    forget_plans()
    generator, heads, dim = torch.Generator().manual_seed(0), 2, form.head_dim
    key, value = torch.randn(2, 100, heads, dim, generator=generator).bfloat16()
    query, bias = torch.randn(100, 2 * heads, dim, generator=generator).bfloat16(), torch.randn(heads * dim).bfloat16()
    angles = torch.rand(100, dim // 2, generator=generator)
    slots, page_bytes = torch.randperm(8 * size, generator=generator)[:100], size * form.page_bytes // 64
    pages = torch.full((8, heads, page_bytes), 0xA5, dtype=torch.uint8)
    given = [sides(side, heads, "cpu", seed) for seed, side in enumerate((form.key, form.value))]
    numbers, others = kv_cache.op_forms(form)
    rotate = form.key.bits == 4 and not form.key.static
    fed = random_feedback(heads, dim) if form.key.bits == 4 else None
    how = *given[0], *given[1], *numbers, rotate, 1, *others, fed
    between = (None, None, bias, None, None, 1e-6, angles.cos().bfloat16(), angles.sin().bfloat16(), False, True)
    table, lengths = torch.arange(8, dtype=torch.int32)[None], torch.tensor([8 * size - 3], dtype=torch.int32)
    stored = *given[0][:2], *given[1][:2], dim, *numbers, rotate, torch.bfloat16, *others
    found = []
    for device in ("cpu", "cuda"):

        def there(arguments, device=device):
            return [x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments]

        appended, turned = (pages.clone().to(device) for _ in range(2))
        ops.kv_append(appended, *there((key, value, slots, *how)))
        queries = ops.rope_append(turned, *there((query, key, value, *between, slots, *how)))
        read = ops.kv_read(turned, *there((table, lengths, 8 * size, *stored)))
        found.append([x.cpu() for x in (appended, turned, queries, *read)])
    forget_plans()
    for expected, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_shorter_pages_on_a_card(form, size):
    """Appended to and read back bit for bit as on a CPU."""
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 100, 3, form.head_dim, generator=generator)
    slots, page_bytes = torch.randperm(9 * size, generator=generator)[:100], 2 * size * form.row_bytes
    pages = torch.full((9, 3, page_bytes), 0xFF, dtype=torch.uint8)
    key_side, value_side = sides(form, 3, "cpu", 1), sides(form, 3, "cpu", 2)
    shape = form.bits, form.group_size, form.static
    table, lengths = torch.arange(9, dtype=torch.int32)[None], torch.tensor([9 * size - 3], dtype=torch.int32)
    found = []
    for device in ("cpu", "cuda"):
        there = pages.to(device)
        sided = [x.to(device) if isinstance(x, torch.Tensor) else x for x in (*key_side, *value_side)]
        ops.kv_append(there, key.to(device), value.to(device), slots.to(device), *sided, *shape, False, 2)
        both = (*sided[:2], *sided[3:5])
        read = (table.to(device), lengths.to(device), 9 * size, *both, form.head_dim, *shape, False, torch.float32)
        found.append((there.cpu(), *(x.cpu() for x in ops.kv_read(there, *read))))
    for expected, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_lengths_and_tables_beyond_are_cut_on_a_card():
    """They are cut as decode_attention does: nobody looks at them on the host."""
    form = KVFormat(64)
    args = read_arguments(form, [1000, 192, -3], 100, False, False, torch.bfloat16)
    args[1][1] = torch.tensor([-1, 99, 6])
    valid = list(args)
    valid[1] = args[1].clamp(min=0)
    valid[1][1], valid[2] = 6, torch.tensor([100, 100, 0], dtype=torch.int32)
    found = ops.kv_read(*(a.cuda() if isinstance(a, torch.Tensor) else a for a in args))
    for expected, mine in zip(ops.kv_read(*valid), found, strict=True):
        torch.testing.assert_close(mine.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_a_graph_reads_what_lengths_and_tables_say_at_replay():
    form = KVFormat(128)
    args = [
        a.cuda() if isinstance(a, torch.Tensor) else a
        for a in read_arguments(form, [70, 0, 129], 192, True, True, torch.bfloat16)
    ]
    ops.kv_read(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.kv_read(*args)
    args[1].copy_(args[1].roll(1, 0))
    args[2].copy_(torch.tensor([3, 192, 64]))
    graph.replay()
    for mine, expected in zip(captured, ops.kv_read(*args), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", [KVFormat(64), KVFormat(64, 4, 32), KVFormat(64, 8), KVFormat(64, 16)], ids=str)
def test_a_key_that_is_not_finite_does_not_become_a_number(form, device):
    key, value = torch.randn(3, 1, 64), torch.randn(3, 1, 64)
    key[1, 0, 5] = torch.nan
    pages = torch.zeros(1, 1, form.page_bytes, dtype=torch.uint8, device=device)
    shape = form.bits, form.group_size, form.static
    slots = torch.arange(3, device=device)
    ops.kv_append(pages, key.to(device), value.to(device), slots, None, None, 1.0, None, None, 1.0, *shape, False, 2)
    table, lengths = (torch.tensor(t, dtype=torch.int32, device=device) for t in ([[0]], [3]))
    keys, values = ops.kv_read(pages, table, lengths, 3, None, None, None, None, 64, *shape, False, torch.float32)
    assert keys[0, 0, 1, 5].isnan() and keys[0, 0, [0, 2]].isfinite().all() and values.isfinite().all()


@pytest.mark.gpu
def test_slots_beyond_the_pages_are_skipped_on_a_card():
    form = KVFormat(64)
    pages = torch.full((2, 1, form.page_bytes), 7, dtype=torch.uint8, device="cuda")
    guard = pages.clone()
    rows, slots = torch.randn(3, 1, 64, device="cuda"), torch.tensor([128, -5, 1 << 40], device="cuda")
    ops.kv_append(pages, rows, rows, slots, None, None, 1.0, None, None, 1.0, 4, 0, False, False, 0)
    assert torch.equal(pages, guard)


@pytest.mark.thorough
@pytest.mark.skipif(jit.missing() is not None, reason="needs cuda-core")
def test_appending_compiles_for_both_architectures():
    forms = KVFormat(128), KVFormat(64, 4, 32), KVFormat(128, 8), *UNLIKE[:3]
    for arch, form in itertools.product(("sm_80", "sm_90a"), forms):
        for feedback in {False, form.key.bits == 4}:
            source = kv_cache.append_source(form, torch.bfloat16, kv_cache.Steps(True, True, 1, feedback))
            found = cost(jit.compile_cubin("kv_append", source, arch)[1])
            assert found["spills"] == found["stack"] == 0, (arch, form, found)


@pytest.mark.thorough
@pytest.mark.skipif(jit.missing() is not None, reason="needs cuda-core")
def test_reading_back_compiles_for_both_architectures():
    forms = KVFormat(128), KVFormat(64, 4, 32), KVFormat(128, 8), KVFormat(128, 16), KVFormat(160), *UNLIKE[:3]
    for arch, form in itertools.product(("sm_80", "sm_90a"), forms):
        found = cost(jit.compile_cubin("kv_read", kv_read.source(form, torch.bfloat16), arch)[1])
        assert found["spills"] == found["stack"] == 0, (arch, form, found)
        assert form.head_dim != 128 or found["registers"] <= 56, (arch, form, found)  # warps enough to hide latency


def calls():
    for form in (KVFormat(64, 4, 32), KVFormat(64, 8, 0, True), KVFormat(64, 16)):
        pages, table, seq_lens, _, key_side, value_side = filled(form, [3, 66], 2, "cpu", False)
        k, shape = torch.randn(2, 2, 64), (form.bits, form.group_size, form.static)
        slots = torch.tensor([int(table[0, 0]) * 64 + 3, -1])
        yield "kv_append", (pages, k, k + 1, slots, *key_side, *value_side, *shape, False, 2)
        both = (*key_side[:2], *value_side[:2])
        yield "kv_read", (pages, table, seq_lens, 66, *both, 64, *shape, False, torch.bfloat16)
        yield "decode_attention", (torch.randn(2, 4, 64), pages, table, seq_lens, 0.1, *both, *shape, False)


@pytest.mark.parametrize("name,args", calls())
def test_opcheck(name, args):
    torch.library.opcheck(getattr(ops, name).default, args)


def test_appending_in_a_compiled_function_gives_the_same_bytes():
    name, (pages, *rest) = next(calls())
    assert name == "kv_append"
    one, other = pages.clone(), pages.clone()
    ops.kv_append(one, *rest)
    torch._dynamo.reset()
    torch.compile(lambda p, k, v: ops.kv_append(p, k, v, *rest[2:]), backend="aot_eager", fullgraph=True)(
        other, *rest[:2]
    )
    assert torch.equal(one, other) and not torch.equal(one, pages)


def test_scales_other_than_the_roots_of_the_dimension():
    form = KVFormat(64)
    pages, table, seq_lens, exact, key_side, value_side = filled(form, [50], 1, "cpu", False)
    query = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(1))
    out = ops.decode_attention(query, pages, table, seq_lens, 0.7, *key_side[:2], *value_side[:2], 4, 0, False, False)
    key, value = (x[:, 0] for x in exact[0])
    torch.testing.assert_close(
        out[0, 0].double(), (0.7 * key @ query[0, 0].double()).softmax(0) @ value, rtol=1e-4, atol=1e-4
    )


def test_what_would_be_read_or_written_elsewhere_is_refused():
    form = KVFormat(64)
    pages, table, seq_lens, _, key_side, value_side = filled(form, [3], 2, "cpu", False)
    both, shape, rows = (*key_side[:2], *value_side[:2]), (4, 0, False), torch.randn(1, 2, 64)

    def append(slot, rows=rows, bits=4):
        ops.kv_append(pages, rows, rows, torch.tensor([slot]), *key_side, *value_side, bits, 0, False, False, 0)

    for slot in (-2, 64 * len(pages)):
        with pytest.raises(IndexError, match="are beyond"):
            append(slot)
    with pytest.raises(ValueError, match="do not hold"):
        append(0, rows[:, :1])
    with pytest.raises(ValueError, match="do not hold"):
        append(0, bits=8)
    query = torch.randn(1, 2, 64)
    for bad, lengths in ((table, [100]), (table, [-1]), (table * 0 - 1, [3]), (table * 0 + len(pages), [3])):
        with pytest.raises(IndexError):
            ops.decode_attention(query, pages, bad, torch.tensor(lengths, dtype=torch.int32), 0.1, *both, *shape, False)
        with pytest.raises(IndexError):
            ops.kv_read(
                pages, bad, torch.tensor(lengths, dtype=torch.int32), 100, *both, 64, *shape, False, torch.float32
            )
    with pytest.raises(IndexError, match="more than the 2"):
        ops.kv_read(pages, table, seq_lens, 2, *both, 64, *shape, False, torch.float32)
    with pytest.raises(ValueError, match="of 2 heads of 64 channels"):
        ops.kv_read(pages, table, seq_lens, 3, both[0][:, :1], *both[1:], 64, *shape, False, torch.float32)
    with pytest.raises(ValueError, match="2 queries, 1 lengths"):
        ops.decode_attention(query.expand(2, 2, 64), pages, table, seq_lens, 0.1, *both, *shape, False)


def test_heads_that_do_not_divide():
    form = KVFormat(64)
    pages, table, seq_lens, _, key_side, value_side = filled(form, [3], 2, "cpu", False)
    with pytest.raises(ValueError, match="no multiple"):
        args = (pages, table, seq_lens, 0.1, *key_side[:2], *value_side[:2], 4, 0, False, False)
        ops.decode_attention(torch.randn(1, 3, 64), *args)
