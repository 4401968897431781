"""Attention over pages of quantized keys and values: what stands between the projections of a layer and its output projection.

    query, key, value -> norms of heads, RoPE, append -> one position each: decode_attention | several: kv_read, then torch's attention

The lean pass (decode/cache.py) and transformers' own attention modules (hf/paged_cache.py) both go through `PagePool`. Whatever attention sees is what
the pages hold, in prefill too: cutting a prompt otherwise changes results by rounding alone.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from tilepress.formats import TilepressError
from tilepress.formats.kv_calibration import KVCalibration
from tilepress.formats.kv_int4 import PAGE_TOKENS
from tilepress.kernels import decode_attention, kv_cache, kv_read, rope_append
from tilepress.kernels.arch import Path

ops = torch.ops.tilepress


class Rope(NamedTuple):
    """The treatment of queries and keys before they are used: RMS norms over a head, then RoPE."""

    cos: Tensor  # [rows, rotary / 2]
    sin: Tensor  # [rows, rotary / 2]
    norms: tuple[Tensor | None, Tensor | None] = (None, None)  # weights [D], of queries and of keys
    eps: float = 0.0  # of both norms


class PagePool:
    """The pages of all layers, uint8 [num_pages, KV heads, page_bytes] each, and their calibration. Fixed in number, or doubling when they run out.

    Sequences that begin alike (beams) share full pages: a page is free once all its users have given it back.
    """

    def __init__(self, calibration: KVCalibration, device: torch.device | str, num_pages: int | None = None):
        self.grows, self.calibration, form = num_pages is None, calibration, calibration.form
        self.pages = [
            torch.empty(num_pages or 0, calibration.kv_heads, form.page_bytes, dtype=torch.uint8, device=device)
            for _ in calibration.layers
        ]
        self.sides = [tuple(side.to(device) for side in sides) for sides in calibration.layers]
        self.free = list(range(num_pages or 0))[::-1]
        self.users = [0] * (num_pages or 0)

    @property
    def total(self) -> int:
        return self.pages[0].shape[0]

    def take(self, count: int) -> list[int]:
        """Return the numbers of `count` free pages. Raises TilepressError, and takes nothing, if there are not so many."""
        if count > len(self.free):
            lacking = count - len(self.free)
            if not self.grows:
                raise TilepressError(
                    f"the cache needs {self.total + lacking} pages of {PAGE_TOKENS} tokens, it has {self.total}",
                    "make it with more num_pages, or give it fewer and shorter sequences",
                )
            self._grow(max(lacking, self.total))
        taken = [self.free.pop() for _ in range(count)]
        for page in taken:
            self.users[page] = 1
        return taken

    def share(self, pages: list[int]) -> None:
        """Count one more user for each page."""
        for page in pages:
            self.users[page] += 1

    def give(self, pages: list[int]) -> None:
        """Take pages back from one user."""
        for page in pages:
            self.users[page] -= 1
            if not self.users[page]:
                self.free.append(page)

    def move(self, layer: int, device: torch.device) -> None:
        """Move a layer's pages and calibration to where its keys are, if they lie elsewhere."""
        if self.pages[layer].device != device:
            self.pages[layer] = self.pages[layer].to(device)
            self.sides[layer] = tuple(side.to(device) for side in self.sides[layer])

    def copy(self, source: int | list[int], to: int | list[int]) -> None:
        """Copy what pages hold, in every layer, to others."""
        for pages in self.pages:
            pages[to] = pages[source]

    def append(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, slots: Tensor, rope: Rope | None, fold: bool
    ) -> Tensor:
        """Store the rows key and value [rows, KV heads, D] at slots int64 [rows] (-1: nowhere), and return query [rows, heads, D].

        With `rope`, keys and queries get their norms and RoPE first. With `fold` the query comes back as `decode` wants it with `folded`: it has the keys'
        scale and rotation, rounded to its dtype once more (kernels/rope_append.py). Without `rope` nothing is folded."""
        (keys, values), form, calibration = self.sides[layer], self.calibration.form, self.calibration
        quantization = *keys, *values, form.bits, form.group_size, form.static, calibration.rotate, calibration.refits
        if rope is None:
            ops.kv_append(self.pages[layer], key, value, slots, *quantization)
            return query
        between = (None, None, None, *rope.norms, rope.eps, rope.cos, rope.sin, False, fold, slots)
        return ops.rope_append(self.pages[layer], query, key, value, *between, *quantization)

    def decode(
        self, layer: int, query: Tensor, table: Tensor, seq_lens: Tensor, scale: float, folded: bool = False
    ) -> Tensor:
        """Return the attention [sequences, heads, D] of one query for each sequence, whose pages are in table int32 [sequences, pages] and hold
        seq_lens int32 [sequences] tokens."""
        keys, values, *form = self._reading(layer)
        if folded:  # the query has the keys' channel scales and rotation already
            keys, form[-1] = (None, keys[1]), False
        given = self.pages[layer], table, seq_lens, scale
        return ops.decode_attention(query.contiguous(), *given, *keys, *values, *form)

    def prefill(
        self,
        layer: int,
        query: Tensor,  # [sequences, heads, rows, D]
        table: Tensor,  # int32 [sequences, pages]
        seq_lens: Tensor,  # int32 [sequences]
        length: int,  # the largest of seq_lens
        scale: float,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Return the attention [sequences, heads, rows, D] of several queries for each sequence; `positions` as those of `attention`."""
        keys, values, *form = self._reading(layer)
        given = self.pages[layer], table, seq_lens, length, *keys, *values, query.shape[-1]
        return attention(query, *ops.kv_read(*given, *form, query.dtype), scale, positions)

    def _reading(self, layer: int) -> tuple:
        """Calibration of a layer's keys, of its values, and the format's numbers, as ops that read take them."""
        (keys, values), form = self.sides[layer], self.calibration.form
        return keys[:2], values[:2], form.bits, form.group_size, form.static, self.calibration.rotate

    def _grow(self, count: int) -> None:
        self.free = [*range(self.total, self.total + count)][::-1] + self.free
        self.users += [0] * count
        for i, old in enumerate(self.pages):
            self.pages[i] = torch.cat([old, old.new_empty(count, *old.shape[1:])])


def paths(calibration: KVCalibration, device: torch.device, dtype: torch.dtype, fused: int) -> dict[Path, int]:
    """Return which implementation serves how many layers over pages, of which `fused` append by rope_append, for queries of a dtype."""
    layers = len(calibration.layers)
    found = {rope_append.path(device): fused, kv_cache.path(device): layers - fused, kv_read.path(device): layers}
    found |= {decode_attention.path(device, calibration.form, dtype): layers}
    return {name: count for name, count in found.items() if count}


def attention(query: Tensor, keys: Tensor, values: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
    """Return causal attention [sequences, heads, rows, D] of query over keys and values [sequences, KV heads, length, D].

    Each row attends to the keys up to its own position: int64 [sequences, rows] (-1, padding: to the first key), or by default the rows are the last of
    `length` tokens."""
    rows, length, causal = query.shape[2], keys.shape[2], False
    if positions is not None:
        mask = (torch.arange(length, device=query.device) <= positions.clamp(min=0)[:, :, None])[:, None]
    elif rows == length:
        mask, causal = None, True
    elif query.is_cuda:  # a mask of numbers would keep torch from its fast kernels
        mask = causal_lower_right(rows, length)
    else:
        mask = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
    grouped = query.shape[1] != keys.shape[1]
    return scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )
