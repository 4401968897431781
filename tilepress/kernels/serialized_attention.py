"""Decode attention over a contiguous cache of serialized INT4 rows, as FBGEMM's `gqa_attn_splitk` takes it (PyTorch's article on INT4 decoding
with grouped-query attention): a reference to compare with, in plain PyTorch and no op.

The cache is uint8 [batch, T, KV heads, 4 G + D / 2]: (scale, shift) of G groups, then D / 2 bytes of codes (docs/format.md, "The serialized row").
FBGEMM's kernel has one KV head, D = 128 and one or four groups; this takes any. To serve such a cache with our kernel, page it first:
formats.kv_pages.pages_from_serialized.
"""

import torch
from torch import Tensor

from tilepress.formats.kv_int4 import KVFormat, dequantize_rows, from_serialized
from tilepress.formats.kv_pages import check_serialized


def serialized_form(head_dim: int, row_bytes: int) -> KVFormat:
    """Return the format of rows of so many bytes. Raises ValueError for a size that no number of groups gives, UsageError for a head dimension that no
    format has."""
    groups, rest = divmod(row_bytes - head_dim // 2, 4)
    if groups < 1 or rest or head_dim % groups or (groups > 1 and head_dim // groups % 32):
        raise ValueError(
            f"rows of {row_bytes} bytes hold no {head_dim} channels of 4 bits: {head_dim // 2} bytes of codes, "
            f"and 4 for each group of a multiple of 32 channels"
        )
    return KVFormat(head_dim, 4, head_dim // groups)


def serialized_attention_ref(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, seq_lens: Tensor, scale: float
) -> Tensor:
    """query [batch, query heads, D] over the first seq_lens int [batch] tokens of key_cache, value_cache uint8 [batch, T, KV heads, 4 G + D / 2] -> the
    same shape and dtype; zeros where there are no tokens. Computed in float32.

    Query heads are a multiple of the KV heads, neighbours share one. Raises ValueError for shapes, dtypes and lengths that do not fit."""
    if query.dim() != 3 or not query.is_floating_point():
        raise ValueError(f"the query is {list(query.shape)} of {query.dtype}, not floating [batch, query heads, D]")
    batch, heads, dim = query.shape
    form = serialized_form(dim, key_cache.shape[-1])
    check_serialized(key_cache, value_cache, seq_lens, form)
    kv_heads = key_cache.shape[2]
    if batch != len(key_cache):
        raise ValueError(f"{batch} queries, caches of {len(key_cache)} sequences")
    if not kv_heads or heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} KV heads")
    grouped, out = query.float().unflatten(1, (kv_heads, -1)), torch.zeros_like(query, dtype=torch.float32)
    for i, length in enumerate(seq_lens.tolist()):
        if length:
            key, value = (
                dequantize_rows(*from_serialized(cache[i, :length], form.groups)) for cache in (key_cache, value_cache)
            )
            weights = (torch.einsum("hgd,thd->hgt", grouped[i], key) * scale).softmax(-1)
            out[i] = torch.einsum("hgt,thd->hgd", weights, value).flatten(0, 1)
    return out.to(query.dtype)
