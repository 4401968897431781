"""Attention over the contiguous INT4 cache of FBGEMM: against float64 on values made by hand, and against paged attention."""

import struct

import pytest
import torch

from tilepress.formats import UsageError
from tilepress.formats.kv_int4 import KVFormat
from tilepress.formats.kv_pages import pages_from_serialized
from tilepress.kernels.decode_attention import decode_attention_ref
from tilepress.kernels.serialized_attention import serialized_attention_ref, serialized_form

LENGTHS = [1, 64, 65, 130, 0]


def cache(form: KVFormat, heads: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as FBGEMM writes them, uint8 [batch, T, heads, row], with 0xFF (NaN, as scales) beyond each length, and their values in float64."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), 135, heads)
    codes = torch.randint(0, 16, (*shape, form.head_dim), generator=generator)
    pairs = (
        torch.rand(*shape, form.groups, 2, generator=generator) * torch.tensor([0.3, 1.0]) + torch.tensor([0.05, -2.5])
    ).half()
    values = (codes.unflatten(-1, (form.groups, -1)) * pairs[..., :1].double() + pairs[..., 1:].double()).flatten(-2)
    packed = codes[..., ::2] + 16 * codes[..., 1::2]
    rows = b"".join(
        struct.pack(f"<{2 * form.groups}e", *pair) + bytes(row)
        for pair, row in zip(pairs.view(-1, 2 * form.groups).tolist(), packed.flatten(0, 2).tolist(), strict=True)
    )
    stored = torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(*shape, form.row_bytes).clone()
    for i, length in enumerate(LENGTHS):
        stored[i, length:] = 0xFF
    return stored, values


@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize(
    "form,heads", [(KVFormat(128), 1), (KVFormat(128, 4, 32), 1), (KVFormat(64, 4, 32), 3)], ids=str
)
def test_attention_over_serialized_rows(form, heads, group):
    (keys, key), (values, value) = cache(form, heads, 0), cache(form, heads, 1)
    query = torch.randn(len(LENGTHS), heads * group, form.head_dim, generator=torch.Generator().manual_seed(2))
    scale, lengths = form.head_dim**-0.5, torch.tensor(LENGTHS)
    found = serialized_attention_ref(query, keys, values, lengths, scale)
    for i, n in enumerate(LENGTHS[:-1]):
        grouped = query[i].double().view(heads, group, -1)
        weights = (grouped @ key[i, :n].permute(1, 2, 0) * scale).softmax(-1)
        expected = (weights @ value[i, :n].transpose(0, 1)).reshape(heads * group, -1)
        torch.testing.assert_close(found[i].double(), expected, rtol=1e-5, atol=1e-5)
    assert not bool(found[-1].any())
    paged = pages_from_serialized(keys, values, lengths, form)
    shape = (None, None, None, None, 4, form.group_size, False, False)
    torch.testing.assert_close(found, decode_attention_ref(query, *paged, scale, *shape), rtol=1e-5, atol=1e-5)
    rounded = serialized_attention_ref(query.bfloat16(), keys, values, lengths.int(), scale)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), found, rtol=2e-2, atol=2e-2)


def test_forms_of_rows():
    assert serialized_form(128, 68) == KVFormat(128) and serialized_form(128, 80) == KVFormat(128, 4, 32)
    assert serialized_form(128, 72) == KVFormat(128, 4, 64) and serialized_form(64, 36) == KVFormat(64)
    for dim, size in ((128, 64), (128, 69), (128, 76), (128, 96), (128, 40), (64, 68)):
        with pytest.raises(ValueError, match=f"rows of {size} bytes hold no {dim} channels"):
            serialized_form(dim, size)
    with pytest.raises(UsageError, match="head dimension 48"):
        serialized_form(48, 28)


@pytest.mark.parametrize(
    "query,keys,message",
    [
        (torch.zeros(2, 8, 128), torch.zeros(2, 9, 1, 68), r"\[2, 9, 1, 68\] of torch.float32"),
        (torch.zeros(2, 8, 128), torch.zeros(2, 9, 1, 70, dtype=torch.uint8), "rows of 70 bytes"),
        (torch.zeros(2, 8, 128), torch.zeros(2, 9, 3, 68, dtype=torch.uint8), "8 query heads are no multiple of 3"),
        (torch.zeros(3, 8, 128), torch.zeros(2, 9, 1, 68, dtype=torch.uint8), "3 queries, caches of 2"),
        (torch.zeros(2, 8, 1, 128), torch.zeros(2, 9, 1, 68, dtype=torch.uint8), r"the query is \[2, 8, 1, 128\]"),
        (torch.zeros(2, 8, 128).int(), torch.zeros(2, 9, 1, 68, dtype=torch.uint8), "torch.int32"),
    ],
)
def test_what_does_not_fit(query, keys, message):
    with pytest.raises(ValueError, match=message):
        serialized_attention_ref(query, keys, keys, torch.tensor([9, 9]), 0.1)
