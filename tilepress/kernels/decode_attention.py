"""Decode attention over the paged cache: one query per sequence attends to all its tokens.

The calibration of a value x = mean + scale * (code * s + z) needs no work per stored element: the keys' scale multiplies the query, their mean
shifts all scores of a query alike and cancels in the softmax, the values' scale multiplies the output and their mean is added to it once.
"""

import torch
from torch import Tensor

from tilepress.formats import int8
from tilepress.formats.kv_int4 import KVFormat, hadamard, read_pages
from tilepress.kernels import library
from tilepress.kernels.kv_cache import values_of

_ARGUMENTS = (
    "Tensor query, Tensor pages, Tensor block_table, Tensor seq_lens, float scale, Tensor? key_channels, Tensor? key_fixed, "
    "Tensor? value_channels, Tensor? value_fixed, int bits, int group_size, bool static, bool rotate"
)
library.define(f"decode_attention({_ARGUMENTS}) -> Tensor")
library.define(f"decode_attention_lse({_ARGUMENTS}) -> (Tensor, Tensor)")
library.define(f"decode_attention_int8({_ARGUMENTS}, Tensor out_scale) -> Tensor")


def _attend(
    query: Tensor,
    pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    key_channels: Tensor | None,
    key_fixed: Tensor | None,
    value_channels: Tensor | None,
    value_fixed: Tensor | None,
    bits: int,
    group_size: int,
    static: bool,
    rotate: bool,
) -> tuple[Tensor, Tensor]:
    """The output in float32 and the log-sum-exp."""
    batch, heads, dim = query.shape
    kv_heads = pages.shape[1]
    if not batch == len(seq_lens) == len(block_table):
        raise ValueError(f"{batch} queries, {len(seq_lens)} lengths and block tables of {len(block_table)} sequences")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} KV heads")
    form, out = KVFormat(dim, bits, group_size, static), torch.zeros_like(query, dtype=torch.float32)
    lse = out.new_full((batch, heads), -torch.inf)
    grouped = query.float().view(batch, kv_heads, -1, dim)
    folded = grouped if key_channels is None else grouped * key_channels[1][:, None]
    if rotate:
        folded = hadamard(folded)
    for i, length in enumerate(seq_lens.tolist()):
        if not length:
            continue
        key, value = (
            values_of(rows, form, fixed)
            for rows, fixed in zip(
                read_pages(pages, block_table[i], length, form), (key_fixed, value_fixed), strict=True
            )
        )
        scores = torch.einsum("hgd,thd->hgt", folded[i], key) * scale
        mixed = torch.einsum("hgt,thd->hgd", scores.softmax(-1), value)
        if value_channels is not None:
            mixed = mixed * value_channels[1][:, None] + value_channels[0][:, None]
        out[i] = mixed.reshape(heads, dim)
        shift = 0.0 if key_channels is None else torch.einsum("hgd,hd->hg", grouped[i], key_channels[0]) * scale
        lse[i] = (scores.logsumexp(-1) + shift).reshape(heads)
    return out, lse


def decode_attention_ref(query: Tensor, *args) -> Tensor:
    """query [batch, query heads, D] over seq_lens int [batch] tokens in pages (formats/kv_int4.py) listed in block_table int [batch, most] -> the
    same shape and dtype; zeros where there are no tokens.

    key_channels, value_channels float32 [3, heads, D] and key_fixed, value_fixed float16 [heads, groups, 2] are the calibration's. Query heads are a
    multiple of the pages' heads, neighbours share one (GQA). Computed in float32. Raises ValueError for shapes that do not fit, IndexError for
    lengths and tables beyond the pages."""
    return _attend(query, *args)[0].to(query.dtype)


def decode_attention_lse_ref(query: Tensor, *args) -> tuple[Tensor, Tensor]:
    """The same, and float32 [batch, query heads]: the natural logarithm of the sum of the exponentials of all scores, -inf where there are none.
    With it, attention over parts of a sequence can be put together."""
    out, lse = _attend(query, *args)
    return out.to(query.dtype), lse


def decode_attention_int8_ref(query: Tensor, *args) -> Tensor:
    """The output as int8 codes of `out_scale` [1], the last argument: what a W8A8 projection takes."""
    *args, out_scale = args
    return int8.quantize(_attend(query, *args)[0], out_scale.float())


REFERENCES = {
    "decode_attention": decode_attention_ref,
    "decode_attention_lse": decode_attention_lse_ref,
    "decode_attention_int8": decode_attention_int8_ref,
}
for _name, _reference in REFERENCES.items():
    for _key in ("CPU", "CUDA"):
        library.impl(_name, _reference, _key)


@torch.library.register_fake("tilepress::decode_attention")
def _(query, *_):
    return torch.empty_like(query)


@torch.library.register_fake("tilepress::decode_attention_lse")
def _(query, *_):
    return torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)


@torch.library.register_fake("tilepress::decode_attention_int8")
def _(query, *_):
    return torch.empty_like(query, dtype=torch.int8)


def path(device: torch.device, form: KVFormat) -> str:
    """Which implementation serves a device: what results report."""
    return f"decode_attention reference ({form.name}) on {device.type}"
