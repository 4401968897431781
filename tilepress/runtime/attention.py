"""Attention over pages of quantized keys and values: what stands between the projections of a layer and its output projection.

    query, key, value -> norms of heads, RoPE, append -> one position each: decode_attention | several: kv_read, then torch's attention

Several positions that see a window of the tokens are decode_attention's too: torch's attention would look at all of them. So are those whose scores have a
soft cap or sinks, which torch's attention lacks.

The lean pass (decode/cache.py) and transformers' own attention modules (hf/paged_cache.py) both go through `PagePool`. Whatever attention sees is what
the pages hold, in prefill too: cutting a prompt otherwise changes results by rounding alone. vLLM has pages of its own (vllm/attention.py): it takes
`PackedLayer` alone.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from tilepress.formats import TilepressError
from tilepress.formats.kv_calibration import CachedLayer, KVCalibration
from tilepress.formats.kv_int4 import PAGE_TOKENS
from tilepress.kernels import decode_attention, kv_cache, kv_read, rope_append
from tilepress.kernels.arch import Path
from tilepress.kernels.kv_cache import op_forms
from tilepress.models.attention import PLAIN, Scores, attend

ops = torch.ops.tilepress


class Rope(NamedTuple):
    """The treatment of queries and keys before they are used: RMS norms over a head, then RoPE."""

    cos: Tensor  # [rows, rotary / 2]
    sin: Tensor  # [rows, rotary / 2]
    norms: tuple[Tensor | None, Tensor | None] = (None, None)  # weights [D], of queries and of keys
    eps: float = 0.0  # of both norms


class PackedLayer:
    """One layer's keys and values in pages, which are given to each call: uint8 [num_pages, KV heads, page_bytes]."""

    def __init__(self, layer: CachedLayer, refits: int, device: torch.device | str):
        self.sides, self.rotate, self.refits, self.device = layer.to(device).sides, layer.rotate, refits, device
        self.feedback = None if layer.feedback is None else layer.feedback.to(device)
        self.layer_form, (self.form, self.value_form) = layer.form, op_forms(layer.form)

    def move(self, device: torch.device) -> None:
        """Move the calibration to another device."""
        self.sides, self.device = tuple(side.to(device) for side in self.sides), device
        self.feedback = None if self.feedback is None else self.feedback.to(device)

    def append(
        self, pages: Tensor, query: Tensor, key: Tensor, value: Tensor, slots: Tensor, rope: Rope | None, fold: bool
    ) -> Tensor:
        """Store the rows key and value [rows, KV heads, D] at slots int64 [rows] (-1: nowhere), and return query [rows, heads, D].

        With `rope`, keys and queries get their norms and RoPE first. With `fold` the query comes back as `decode` wants it with `folded`: it has the keys'
        scale and rotation, rounded to its dtype once more (kernels/rope_append.py). Without `rope` nothing is folded."""
        keys, values = self.sides
        quantization = *keys, *values, *self.form, self.rotate, self.refits, *self.value_form, self.feedback
        if rope is None:
            ops.kv_append(pages, key, value, slots, *quantization)
            return query
        between = (None, None, None, *rope.norms, rope.eps, rope.cos, rope.sin, False, fold, slots)
        return ops.rope_append(pages, query, key, value, *between, *quantization)

    def decode(
        self,
        pages: Tensor,
        query: Tensor,
        table: Tensor,
        seq_lens: Tensor,
        scale: float,
        folded: bool = False,
        scores: Scores = PLAIN,
        starts: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the attention [queries, heads, D] of one query for each sequence, or those that starts int32 [sequences + 1] says, the last of its tokens.
        It is written to `out` where that is given.

        Sequences' pages are in table int32 [sequences, pages] and hold seq_lens int32 [sequences] tokens. No query is `folded` whose scores are `absolute`."""
        keys, values = self.sides
        # A folded query has the keys' channel scales and rotation already.
        rotate = self.rotate and not folded
        stored = None if folded else keys.channels, keys.fixed, *values[:2], *self.form, rotate, *self.value_form
        sinks = None if scores.sinks is None else scores.sinks.detach().float().contiguous()
        extras = starts, scores.window, scores.softcap, sinks
        asked = query.contiguous(), pages, table, seq_lens, scale, *stored
        if out is None:
            return ops.decode_attention(*asked, *extras)
        before = len(asked) - len(self.value_form)  # out stands before the arguments that have defaults
        ops.decode_attention_into(*asked[:before], out, *asked[before:], *extras)
        return out

    def prefill(
        self,
        pages: Tensor,
        query: Tensor,  # [sequences, heads, rows, D]
        table: Tensor,  # int32 [sequences, pages]
        seq_lens: Tensor,  # int32 [sequences]
        length: int,  # the largest of seq_lens
        scale: float,
        positions: Tensor | None = None,
        scores: Scores = PLAIN,
    ) -> Tensor:
        """Return the attention [sequences, heads, rows, D] of several queries for each sequence; `positions` as those of `attention`. Where the window is no
        shorter than the longest sequence, it is none."""
        if 0 < scores.window < length or scores.absolute:
            return self._by_op(pages, query, table, seq_lens, scale, positions, scores)
        return attention(query, *self.read(pages, table, seq_lens, length, query.dtype), scale, positions)

    def read(
        self, pages: Tensor, table: Tensor, seq_lens: Tensor, length: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values [sequences, KV heads, length, D] of a dtype; zeros beyond a sequence's end."""
        keys, values = self.sides
        stored = *keys[:2], *values[:2], self.layer_form.head_dim, *self.form, self.rotate
        return ops.kv_read(pages, table, seq_lens, length, *stored, dtype, *self.value_form)

    def _by_op(
        self,
        pages: Tensor,
        query: Tensor,
        table: Tensor,
        seq_lens: Tensor,
        scale: float,
        positions: Tensor | None,
        scores: Scores,
    ) -> Tensor:
        """Rows of padding are taken out for the op, and get zeros: which rows are left stays on the card."""
        (sequences, heads, rows, dim), device = query.shape, query.device
        if positions is None:
            starts = torch.arange(0, sequences * rows + 1, rows, dtype=torch.int32, device=device)
            flat = query.transpose(1, 2).flatten(0, 1)
            out = self.decode(pages, flat, table, seq_lens, scale, scores=scores, starts=starts)
            return out.unflatten(0, (sequences, rows)).transpose(1, 2)
        real = positions >= 0
        starts = torch.cat([torch.zeros(1, dtype=torch.int64, device=device), real.sum(1).cumsum(0)])
        place = torch.where(real, real.flatten().cumsum(0).view(real.shape) - 1, sequences * rows)
        packed = query.new_zeros(sequences * rows + 1, heads, dim)
        packed[place] = query.transpose(1, 2)
        out = self.decode(pages, packed[:-1], table, seq_lens, scale, scores=scores, starts=starts.int())
        out = torch.cat([out, out.new_zeros(1, heads, dim)])
        return out[place].transpose(1, 2)


class PagePool:
    """The pages of all layers, uint8 [num_pages, KV heads, page_bytes] each, and their calibration. Fixed in number, or doubling when they run out.

    Sequences that begin alike (beams) share full pages: a page is free once all its users have given it back.
    """

    def __init__(self, calibration: KVCalibration, device: torch.device | str, num_pages: int | None = None):
        self.grows, self.calibration = num_pages is None, calibration
        self.pages = [
            torch.empty(num_pages or 0, calibration.kv_heads, layer.form.page_bytes, dtype=torch.uint8, device=device)
            for layer in calibration.layers
        ]
        self.layers = [PackedLayer(layer, calibration.refits, device) for layer in calibration.layers]
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
            self.layers[layer].move(device)

    def copy(self, source: int | list[int], to: int | list[int]) -> None:
        """Copy what pages hold, in every layer, to others."""
        for pages in self.pages:
            pages[to] = pages[source]

    def append(self, layer: int, *rows, **options) -> Tensor:
        """Store a layer's rows, as `PackedLayer.append` does."""
        return self.layers[layer].append(self.pages[layer], *rows, **options)

    def decode(self, layer: int, *asked, **options) -> Tensor:
        """Return a layer's attention of one query for each sequence, as `PackedLayer.decode` does."""
        return self.layers[layer].decode(self.pages[layer], *asked, **options)

    def prefill(self, layer: int, *asked, **options) -> Tensor:
        """Return a layer's attention of several queries for each sequence, as `PackedLayer.prefill` does."""
        return self.layers[layer].prefill(self.pages[layer], *asked, **options)

    def _grow(self, count: int) -> None:
        self.free = [*range(self.total, self.total + count)][::-1] + self.free
        self.users += [0] * count
        for i, old in enumerate(self.pages):
            self.pages[i] = torch.cat([old, old.new_empty(count, *old.shape[1:])])


def paths(
    calibration: KVCalibration,
    device: torch.device,
    dtype: torch.dtype,
    fused: int,
    extras: Mapping[int, tuple[str, ...]] | None = None,
) -> dict[Path, int]:
    """Return which implementation serves how many layers over pages, of which `fused` append by rope_append, for queries of a dtype. `extras` has the
    `Scores.extras` of layers by their numbers."""
    found: dict[Path, int] = {}
    for number, layer in enumerate(calibration.layers):
        append = rope_append if number < fused else kv_cache
        asked = (extras or {}).get(number, ())
        read = kv_read.path(device, layer.form), decode_attention.path(device, layer.form, dtype, asked)
        for path in (append.path(device, layer.form), *read):
            found[path] = found.get(path, 0) + 1
    return found


def attention(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, positions: Tensor | None = None, scores: Scores = PLAIN
) -> Tensor:
    """Return causal attention [sequences, heads, rows, D] of query over keys and values [sequences, KV heads, length, D].

    Each row attends to the keys up to its own position: int64 [sequences, rows] (-1, padding: to the first key), or by default the rows are the last of
    `length` tokens."""
    rows, length, causal = query.shape[2], keys.shape[2], False
    if scores.absolute or 0 < scores.window < length:
        if positions is None:
            positions = torch.arange(length - rows, length, device=query.device)[None]
        behind = positions.clamp(min=0)[:, :, None] - torch.arange(length, device=query.device)
        mask = ((behind >= 0) & (behind < (scores.window or length)))[:, None]
        if scores.absolute:
            return attend(query, keys, values, mask, scale, scores)
    elif positions is not None:
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
