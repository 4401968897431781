"""Rows and pages of the attention cache: golden bytes, a reader written from docs/format.md, arithmetic against numpy in float64."""

import itertools
import struct

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard as scipy_hadamard
from support.feedback import random_feedback

from tilepress.formats import UsageError
from tilepress.formats.kv_int4 import (
    Forms,
    KVFormat,
    UnlikeForms,
    dequantize_rows,
    fake_quantize,
    feedback_matrix,
    feedback_words,
    feeds_forward,
    from_channels,
    from_serialized,
    hadamard,
    quantize_rows,
    row_bytes,
    split_row,
    to_channels,
    to_serialized,
)
from tilepress.formats.kv_pages import page_order, pages_from_serialized, read_pages, serialized_from_pages, write_pages

FORMS = [
    KVFormat(128),
    KVFormat(128, 4, 64),
    KVFormat(128, 4, 32),
    KVFormat(128, 4, 0, True),
    KVFormat(64),
    KVFormat(64, 4, 32),
    KVFormat(96, 4, 32),
    KVFormat(256),
    KVFormat(128, 8),
    KVFormat(64, 8, 0, True),
    KVFormat(128, 16),
    KVFormat(32, 16),
]


def test_sizes():
    assert KVFormat(128).row_bytes == 68 and KVFormat(128, 4, 32).row_bytes == 80
    assert KVFormat(128, 4, 0, True).row_bytes == 64 and KVFormat(64).row_bytes == 36
    assert KVFormat(128, 8).row_bytes == 132 and KVFormat(128, 16).row_bytes == 256
    assert all(form.page_bytes % 16 == 0 for form in FORMS)


def test_golden_bytes_of_the_serialized_row():
    """One group and four, as docs/format.md prints them: channel d has code d mod 16."""
    codes = (torch.arange(32) % 16).to(torch.uint8)
    row = to_serialized(codes, torch.tensor([[0.5, -1.0]], dtype=torch.float16))
    assert bytes(row.tolist()).hex(" ", 4) == "003800bc 10325476 98badcfe 10325476 98badcfe"
    codes = (torch.arange(128) % 16).to(torch.uint8)
    scales = torch.tensor([[0.5, -1.0], [1.0, 0.0], [2.0, 3.0], [0.25, -0.125]], dtype=torch.float16)
    row = bytes(to_serialized(codes, scales).tolist())
    assert row[:16].hex(" ", 4) == "003800bc 003c0000 00400042 003400b0" and len(row) == 80
    assert row[16:] == bytes.fromhex("1032547698badcfe") * 8
    back = from_serialized(torch.tensor(list(row), dtype=torch.uint8), 4)
    assert torch.equal(back[0], codes) and torch.equal(back[1], scales)


def golden_cache(groups: int) -> torch.Tensor:
    """Rows written from the specification, uint8 [batch 3, T 70, heads 2, 4 groups + 64] of D = 128: group g has s = (g + 1) / 4 and z = g - 1.5, channel d
    of token t, head h of sequence b has code (d + t + 3 h + 5 b) mod 16. Of 70, 3 and 0 tokens; poison stands beyond."""
    scales = struct.pack(f"<{2 * groups}e", *(x for g in range(groups) for x in ((g + 1) / 4, g - 1.5)))
    rows = (
        scales + bytes((first + d) % 16 | (first + d + 1) % 16 << 4 for d in range(0, 128, 2))
        for first in (t + 3 * h + 5 * b for b in range(3) for t in range(70) for h in range(2))
    )
    cache = torch.tensor(list(b"".join(rows)), dtype=torch.uint8).view(3, 70, 2, -1)
    cache[1, 3:], cache[2] = 0xFF, 0xFF
    return cache


@pytest.mark.parametrize("form", [KVFormat(128), KVFormat(128, 4, 32)], ids=str)
def test_a_contiguous_serialized_cache_becomes_pages_and_comes_back(form):
    keys, lengths = golden_cache(form.groups), torch.tensor([70, 3, 0])
    golden = [*["003400be", "003800b8", "003a0038", "003c003e"][: form.groups], "badcfe10", "32547698"]
    assert bytes(keys[1, 2, 1].tolist()).hex(" ", 4).split()[: len(golden)] == golden
    values = keys.flip(2)  # of the other head
    pages, table, seq_lens = pages_from_serialized(keys, values, lengths, form)
    assert pages.shape == (3, 2, form.page_bytes) and table.dtype == seq_lens.dtype == torch.int32
    assert table.tolist() == [[0, 1], [2, 0], [0, 0]] and seq_lens.tolist() == [70, 3, 0]
    for b, length in enumerate((70, 3, 0)):
        for which, rows in enumerate(read_pages(pages, table[b], length, form)):
            codes, scales = split_row(rows, form)
            assert codes.shape == (length, 2, 128) and scales.shape == (length, 2, form.groups, 2)
            d, t, h = (torch.arange(n) for n in (128, length, 2))
            expected = (d + t[:, None, None] + 3 * (h if which == 0 else 1 - h)[:, None] + 5 * b) % 16
            assert torch.equal(codes.long(), expected)
            g = torch.arange(form.groups)
            assert torch.equal(scales.float(), torch.stack([(g + 1) / 4, g - 1.5], -1).expand_as(scales))
    order = torch.stack(page_order(form))
    assert not bool(pages[1][:, order[:, 6:].flatten()].any()) and not bool(pages[2][:, order[:, 3:].flatten()].any())
    for back, cache in zip(serialized_from_pages(pages, table, seq_lens, 75, form), (keys, values), strict=True):
        assert back.shape == (3, 75, *cache.shape[2:]) and torch.equal(back[0, :70], cache[0])
        assert torch.equal(back[1, :3], cache[1, :3])
        assert not bool(back[0, 70:].any()) and not bool(back[1, 3:].any()) and not bool(back[2].any())


def test_serialized_caches_without_tokens():
    empty = torch.zeros(2, 0, 1, 68, dtype=torch.uint8)
    pages, table, _ = pages_from_serialized(empty, empty, torch.tensor([0, 0]), KVFormat(128))
    assert pages.shape == (0, 1, KVFormat(128).page_bytes) and table.shape == (2, 0)


@pytest.mark.parametrize(
    "keys,values,lengths,form,message",
    [
        (
            (2, 9, 1, 68),
            (2, 9, 1, 68),
            [9, 9],
            KVFormat(128, 4, 32),
            r"\[2, 9, 1, 68\] of torch.uint8 .* uint8 \[batch, T, heads, 80\]",
        ),
        ((2, 9, 68), (2, 9, 68), [9, 9], KVFormat(128), r"\[2, 9, 68\]"),
        ((2, 9, 1, 68), (2, 8, 1, 68), [8, 8], KVFormat(128), r"\[2, 9, 1, 68\], the value cache \[2, 8, 1, 68\]"),
        ((2, 9, 1, 68), (2, 9, 1, 68), [9, 10], KVFormat(128), "9 .. 10, the cache has room for 9"),
        ((2, 9, 1, 68), (2, 9, 1, 68), [-1, 3], KVFormat(128), "-1 .. 3"),
        ((2, 9, 1, 68), (2, 9, 1, 68), [9], KVFormat(128), r"lengths \[1\] of torch.int64 for 2 sequences"),
        ((2, 9, 1, 68), (2, 9, 1, 68), [9.0, 9.0], KVFormat(128), "of torch.float32"),
        ((2, 9, 1, 64), (2, 9, 1, 64), [9, 9], KVFormat(128, 4, 0, True), "int4 static"),
        ((2, 9, 1, 132), (2, 9, 1, 132), [9, 9], KVFormat(128, 8), "int8 dynamic"),
    ],
)
def test_serialized_caches_that_do_not_fit(keys, values, lengths, form, message):
    caches = (torch.zeros(shape, dtype=torch.uint8) for shape in (keys, values))
    with pytest.raises(ValueError, match=message):
        pages_from_serialized(*caches, torch.tensor(lengths), form)


def test_serialized_caches_of_another_dtype_and_pages_that_are_too_short():
    form = KVFormat(128)
    with pytest.raises(ValueError, match=r"of torch.int8 "):
        pages_from_serialized(*2 * [torch.zeros(1, 9, 1, 68, dtype=torch.int8)], torch.tensor([9]), form)
    pages, table = torch.zeros(2, 1, form.page_bytes, dtype=torch.uint8), torch.tensor([[0]])
    with pytest.raises(ValueError, match="65 .. 65, the cache has room for 64"):
        serialized_from_pages(pages, table, torch.tensor([65]), 64, form)
    with pytest.raises(IndexError, match="65 tokens"):
        serialized_from_pages(pages, table, torch.tensor([65]), 70, form)


UNLIKE = [
    UnlikeForms(KVFormat(64, 4, 32), KVFormat(64)),
    UnlikeForms(KVFormat(128, 8), KVFormat(128, 4, 32)),
    UnlikeForms(KVFormat(128, 4, 0, True), KVFormat(128, 16)),
]


def place(both: Forms, value: bool, token: int, byte: int, size: int = 32) -> int:
    """The place of a row's byte in its page of units of `size` tokens, written from docs/format.md."""
    unit, t = divmod(token, size)
    form = both.value if value else both.key
    key_codes, value_codes = (side.head_dim * side.bits // 8 for side in (both.key, both.value))
    codes = value_codes if value else key_codes
    scales = form.row_bytes - codes
    start = unit * size * (both.key.row_bytes + both.value.row_bytes)
    if byte < codes:
        if not value:
            chunk = next(c for c in (64, 32, 16) if codes % c == 0)
            part, inside = divmod(byte, chunk)
            return start + (t // 8) * 8 * codes + part * 8 * chunk + (t % 8) * chunk + inside
        start += size * key_codes + (t // 8) * 8 * codes
        pair, which = (t % 8) // 2, t % 2
        if form.bits == 4:
            halfword, low = divmod(byte, 2)
            g, word = divmod(halfword, 4)
            return start + 2 * (((g * 4 + pair) * 4 + word) * 2 + which) + low
        if form.bits == 8:
            g, channel = divmod(byte, 16)
            half, rest = divmod(channel, 8)
            word, d = divmod(rest, 2)
            return start + (((half * (form.head_dim // 16) + g) * 4 + pair) * 4 + word) * 4 + 2 * d + which
        channel, low = divmod(byte, 2)
        g, inside = divmod(channel, 16)
        quarter, word = divmod(inside, 4)
        return start + 2 * ((((quarter * (form.head_dim // 16) + g) * 4 + pair) * 4 + word) * 2 + which) + low
    group, inside = divmod(byte - codes, 4)
    start += size * (key_codes + value_codes) + (size * (both.key.row_bytes - key_codes) if value else 0)
    if not value or form.groups == 1:
        return start + ((t % 8) * form.groups + group) * (size // 2) + (t // 8) * 4 + inside
    shift, low = divmod(inside, 2)
    sixteen, rest = divmod(t, 16)
    x, rest = divmod(rest, 8)
    pair, which = divmod(rest, 2)
    return start + sixteen * 16 * scales + ((((group * 4 + pair) * 2 + x) * 2 + shift) * 2 + which) * 2 + low


@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("form", [*FORMS, *UNLIKE], ids=str)
def test_pages_are_as_documented(form, size):
    order = page_order(form, size)
    assert sorted(torch.cat([places.flatten() for places in order]).tolist()) == list(
        range(form.page_bytes * size // 64)
    )
    for value in (False, True):
        for token in [token for token in (0, 1, 7, 8, 15, 19, 31, 32, 63) if token < size]:
            row = form.value if value else form.key
            expected = [place(form, value, token, byte, min(size, 32)) for byte in range(row.row_bytes)]
            assert order[int(value)][token].tolist() == expected, (value, token)


@pytest.mark.parametrize("form", [*FORMS, *UNLIKE], ids=str)
def test_rows_come_back_from_pages_bit_for_bit(form):
    generator = torch.Generator().manual_seed(0)
    pages = torch.full((5, 3, form.page_bytes), 0xAB, dtype=torch.uint8)
    table, length = torch.tensor([3, 0, 4]), 150
    rows = [
        torch.randint(0, 256, (length, 3, row.row_bytes), generator=generator, dtype=torch.uint8)
        for row in (form.key, form.value)
    ]
    slots = table[torch.arange(length) // 64] * 64 + torch.arange(length) % 64
    for part in torch.randperm(length, generator=generator).split(37):  # in any order, a few at a time
        write_pages(pages, slots[part], rows[0][part], rows[1][part], form)
    key, value = read_pages(pages, table, length, form)
    assert torch.equal(key, rows[0]) and torch.equal(value, rows[1])
    assert bool((pages[[1, 2]] == 0xAB).all())


def test_skipped_slots_and_slots_beyond_the_pages():
    form = KVFormat(32)
    pages, rows = (
        torch.zeros(2, 1, form.page_bytes, dtype=torch.uint8),
        torch.ones(2, 1, form.row_bytes, dtype=torch.uint8),
    )
    write_pages(pages, torch.tensor([-1, -1]), rows, rows, form)
    assert not bool(pages.any())
    with pytest.raises(IndexError, match="slots 0 .. 128 are beyond 2 pages"):
        write_pages(pages, torch.tensor([0, 128]), rows, rows, form)
    assert not bool(pages.any())
    for table in ([2], [-1]):
        with pytest.raises(IndexError, match="block table"):
            read_pages(pages, torch.tensor(table), 3, form)


@pytest.mark.parametrize("form", [form for form in FORMS if form.bits < 16 and not form.static], ids=str)
def test_rows_by_their_extremes_against_numpy(form):
    y = torch.randn(20, 2, form.head_dim, generator=torch.Generator().manual_seed(0))
    codes, scales = quantize_rows(y, form)
    grouped = y.double().numpy().reshape(20, 2, form.groups, -1)
    low, high = grouped.min(-1), grouped.max(-1)
    assert np.allclose(scales[..., 0].double().numpy(), (high - low) / form.max_code, rtol=1e-3)
    assert np.allclose(scales[..., 1].double().numpy(), low, rtol=1e-3)
    s, z = (scales[..., i].double().numpy()[..., None] for i in (0, 1))
    expected = np.clip(np.round((grouped - z) / s), 0, form.max_code).reshape(codes.shape)
    assert np.abs(codes.numpy() - expected).max() <= 1 and (codes.numpy() != expected).mean() < 1e-3  # ties in float32
    back = dequantize_rows(codes, scales).double().numpy().reshape(grouped.shape)
    assert np.abs(back - grouped).max() <= 0.51 * s.max() + 1e-3 * np.abs(z).max()
    packed = split_row(row_bytes(codes, scales, form.bits), form)
    assert torch.equal(packed[0], codes) and torch.equal(packed[1], scales)


@pytest.mark.parametrize("form", [KVFormat(128), KVFormat(64, 4, 32)], ids=str)
def test_a_refit_goes_twice_as_far_as_least_squares_and_lowers_the_weighted_error(form):
    generator = torch.Generator().manual_seed(1)
    y, weight = (
        torch.randn(200, 1, form.head_dim, generator=generator),
        torch.rand(1, form.head_dim, generator=generator) + 0.1,
    )

    def errors(refits, weight=weight):
        codes, scales = quantize_rows(y, form, weight, clip=0.95, refits=refits)
        return ((dequantize_rows(codes, scales) - y).square() * weight).sum(-1), codes, scales

    before, _, _ = errors(0)
    after, _, scales = errors(1)
    assert float(after.sum()) < 0.97 * float(before.sum()) and float(errors(2)[0].sum()) < float(after.sum())
    for scaled in (weight * 1e-20, weight * 3e20):  # only their ratios matter
        assert (errors(1, scaled)[2] - scales).abs().max() < 0.02
    for row, group in itertools.product(range(3), range(form.groups)):
        part = slice(group * form.head_dim // form.groups, (group + 1) * form.head_dim // form.groups)
        x, w = y[row, 0, part].double().numpy(), weight[0, part].double().numpy() ** 0.5
        step = 0.95 * (x.max() - x.min()) / 15
        start = np.array([step, (x.max() + x.min()) / 2 - 7.5 * step])
        c = np.clip(np.floor(np.round((x - start[1]) / step * 4096) / 4096 + 0.5), 0, 15)  # errors count in parts
        fitted = np.linalg.lstsq(np.stack([c, np.ones_like(c)], 1) * w[:, None], x * w, rcond=None)[0]
        assert np.allclose(scales[row, 0, group].double().numpy(), start + 2 * (fitted - start), rtol=2e-3, atol=2e-3)


def test_one_refit_is_as_good_as_two_by_plain_least_squares():
    """Squared errors of normal, Laplace and uniform rows, by extremes and drawn together."""
    torch.manual_seed(0)
    for form, clip in itertools.product((KVFormat(64), KVFormat(128)), (1.0, 0.95)):
        size = 2000, 1, form.head_dim
        for y in (torch.randn(size), torch.distributions.Laplace(0.0, 1.0).sample(size), torch.rand(size)):
            low, high = y.amin(-1, keepdim=True).double(), y.amax(-1, keepdim=True).double()
            s, z = (high - low) * clip / 15, (high + low) / 2 - (high - low) / 2 * clip
            for _ in range(2):
                c = ((y - z) / s).round().clamp(0, 15)
                off = c - c.mean(-1, keepdim=True)
                s = (off * y).sum(-1, keepdim=True) / off.square().sum(-1, keepdim=True)
                z = y.mean(-1, keepdim=True) - s * c.mean(-1, keepdim=True)
            plain = (((y - z) / s).round().clamp(0, 15) * s + z - y).square().sum()
            ours = (fake_quantize(y, form, None, None, clip, False, 1) - y).square().sum()
            assert float(ours) < 1.02 * float(plain)


def test_rows_without_spread_and_beyond_float16():
    form = KVFormat(32)
    for x in (torch.zeros(1, 1, 32), torch.full((1, 1, 32), 3.0), torch.full((1, 1, 32), -1e-7)):
        back = fake_quantize(x, form, None, None, 1.0, False, 2)
        torch.testing.assert_close(back, x, rtol=1e-3, atol=1e-6)
    # Two numbers, which are exact; a weight of nearly nothing, and of nothing
    one = torch.ones(1, 1, 32).index_fill_(2, torch.tensor(3), -2.0)
    for weight in (None, torch.full((1, 32), 1e-38), torch.zeros(1, 32)):
        codes, scales = quantize_rows(one, form, weight, refits=2)
        torch.testing.assert_close(dequantize_rows(codes, scales), one, rtol=1e-3, atol=1e-3)
    wide = torch.linspace(-1e6, 1e6, 32).view(1, 1, 32)
    assert bool(torch.isfinite(fake_quantize(wide, form, None, None, 1.0, False, 2)).all())
    channels = torch.stack([torch.zeros(1, 32), torch.full((1, 32), 1e5), torch.ones(1, 32)])
    torch.testing.assert_close(fake_quantize(wide, form, channels, None, 1.0, False, 0), wide, rtol=0.1, atol=7e4)


def test_channels_and_rotation_are_undone():
    generator = torch.Generator().manual_seed(0)
    for dim in (32, 64, 96, 128):
        x = torch.randn(7, 2, dim, generator=generator)
        channels = torch.rand(3, 2, dim, generator=generator) + 0.5
        for rotate in (False, True):
            torch.testing.assert_close(
                from_channels(to_channels(x, channels, rotate), channels, rotate), x, rtol=1e-5, atol=1e-5
            )
        size = dim & -dim
        matrix = torch.block_diag(
            *[torch.tensor(scipy_hadamard(size), dtype=torch.float64) / size**0.5] * (dim // size)
        )
        torch.testing.assert_close(hadamard(x).double(), x.double() @ matrix.T, rtol=1e-5, atol=1e-5)


def test_static_codes_saturate():
    form = KVFormat(32, 4, 0, True)
    y = torch.tensor([-100.0, 0.0, 1.0, 2.0, 100.0] + [0.5] * 27).view(1, 1, 32)
    codes, scales = quantize_rows(y, form, fixed=torch.tensor([[[0.25, 0.0]]], dtype=torch.float16))
    assert scales is None and codes[0, 0, :6].tolist() == [0, 0, 4, 8, 15, 2]


@pytest.mark.parametrize(
    "args,message",
    [
        ((100,), "no multiple of 32"),
        ((16,), "no multiple of 32"),
        ((1056,), "no multiple of 32 up to 1024"),
        ((128, 5), "--bits 5"),
        ((128, 4, 48), "groups of 48"),
        ((96, 4, 64), "groups of 64"),
        ((128, 8, 32), "one group"),
    ],
)
def test_forms_that_do_not_fit(args, message):
    with pytest.raises(UsageError) as error:
        KVFormat(*args)
    assert message in error.value.message and error.value.hint


@pytest.mark.parametrize("form", [KVFormat(64), KVFormat(64, 4, 32), KVFormat(96), KVFormat(128, 4, 0, True)], ids=str)
def test_errors_are_fed_back_as_the_page_says(form):
    """Row by row and channel by channel, in numpy's float32."""
    heads, dim, words = 2, form.head_dim, random_feedback(2, form.head_dim)
    matrix = words.numpy().transpose(0, 2, 1, 3).reshape(heads, dim, dim).astype(np.int64)
    y = torch.randn(9, heads, dim, generator=torch.Generator().manual_seed(3))
    fixed = torch.tensor([0.5, -3.75]).half().expand(heads, 1, 2) if form.static else None
    codes, scales = quantize_rows(y, form, None, fixed, 0.9, form.refits, words)
    plain, same = quantize_rows(y, form, None, fixed, 0.9, form.refits)
    assert form.static or torch.equal(scales, same)  # scales know nothing of it
    pairs = (fixed.expand(9, heads, 1, 2) if form.static else scales).float().numpy()
    for row, head in itertools.product(range(9), range(heads)):
        scale, shift = (pairs[row, head, :, i].repeat(dim // form.groups) for i in range(2))
        place, step, expected = (y[row, head].numpy() - shift) / scale, scale.max(), []
        for block in np.split(np.arange(dim), 8):
            code = np.clip(np.rint(place[block]), 0, 15)
            off = (place[block] - code) * (scale[block] / step * np.float32(128))
            parts = np.clip(np.rint(off), -127, 127).astype(np.int64)
            place += (matrix[head][:, block] @ parts).astype(np.float32) * (step / scale * np.float32(2**-13))
            expected += code.tolist()
        assert codes[row, head].tolist() == expected
    assert not torch.equal(codes, plain)


def test_feedback_as_words_and_back():
    words = random_feedback(3, 96)
    assert torch.equal(feedback_words(feedback_matrix(words)), words) and feeds_forward(words)
    for row, column in ((0, 0), (11, 0), (12, 13), (0, 95)):
        matrix = feedback_matrix(words).clone()
        matrix[1, row, column] = 1
        assert not feeds_forward(feedback_words(matrix))
