"""Attention over the paged cache in PyTorch: what every kernel of kernels/decode_attention.py is compared with, and what runs where none serves.

Queries are cut into tiles of one sequence each, pages are taken some columns of the block table at a time, and the softmax is online. How many tiles and
columns there are follows from shapes, never from lengths on a card: nothing waits for it, and a graph stays valid when lengths change.

The calibration of a value x = mean + scale * (code * s + z) needs no work per stored element: the keys' scale multiplies the query, their mean
shifts all scores of a query alike and cancels in the softmax (not beneath a soft cap, and a sink is compared with the whole score), the values' scale
multiplies the output and their mean is added to it once, as often as there is weight on tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilepress.formats.kv_int4 import Forms, hadamard
from tilepress.formats.kv_pages import check_pages, check_table, gather_pages
from tilepress.kernels.kv_cache import forms_for, value_form, values_of

_ROWS = 64  # queries of a tile, at most
_AT_ONCE = 1 << 24  # numbers of keys, values or scores


class Cache(NamedTuple):
    """The cache that queries attend to, and how: the ops' arguments behind the query."""

    pages: Tensor  # uint8 [num_pages, KV heads, page_bytes]: the bytes say whether a page has 16, 32 or 64 tokens
    block_table: Tensor  # int [sequences, most pages]; sequences may share pages
    seq_lens: Tensor  # int [sequences]: tokens, those of the queries among them
    scale: float
    key_channels: Tensor | None  # float32 [3, KV heads, D], as the calibration has them
    key_fixed: Tensor | None  # float16 [KV heads, groups, 2]
    value_channels: Tensor | None
    value_fixed: Tensor | None
    bits: int
    group_size: int
    static: bool
    rotate: bool
    value_bits: int = 0  # 0: values are stored as keys are
    value_group_size: int = 0
    value_static: bool = False
    # int [sequences + 1]: the queries of a sequence are its last tokens, rows cu_query_lens[i] .. cu_query_lens[i + 1]. None: one each.
    cu_query_lens: Tensor | None = None
    window: int = 0  # a query sees so many tokens, itself among them; 0: all up to itself
    softcap: float = 0.0  # scores are softcap * tanh(score / softcap); 0: as they are
    sinks: Tensor | None = None  # float32 [query heads]: a score more in the softmax's sum, of a token without a value
    slopes: Tensor | None = (
        None  # float32 [query heads], ALiBi's: scores have slope * (key's place - query's place) added
    )

    @property
    def extras(self) -> tuple[str, ...]:
        """What these arguments ask for beyond one query a sequence over all tokens of pages of 64, in words."""
        asked = {
            "several queries": self.cu_query_lens is not None,
            "a window": self.window > 0,
            "a soft cap": self.softcap > 0,
            "sinks": self.sinks is not None,
            "ALiBi": self.slopes is not None,
        }
        return tuple(name for name, is_asked in asked.items() if is_asked)

    def form_for(self, query: Tensor) -> Forms:
        """Return how the pages store rows. Raises ValueError for queries of other sequences or heads."""
        (rows, heads, dim), kv_heads = query.shape, self.pages.shape[1]
        lengths, tables = len(self.seq_lens), len(self.block_table)
        if not lengths == tables or (self.cu_query_lens is None and rows != lengths):
            raise ValueError(f"{rows} queries, {lengths} lengths and block tables of {tables} sequences")
        if self.cu_query_lens is not None and self.cu_query_lens.shape != (lengths + 1,):
            raise ValueError(f"cu_query_lens {list(self.cu_query_lens.shape)} for {lengths} sequences: one number more")
        if not kv_heads or heads % kv_heads:
            raise ValueError(f"{heads} query heads are no multiple of {kv_heads} KV heads")
        if self.window < 0 or not self.softcap >= 0:
            raise ValueError(f"a window of {self.window} and a soft cap of {self.softcap}: 0 is none")
        for name, of_heads in (("sinks", self.sinks), ("slopes", self.slopes)):
            if of_heads is not None and (of_heads.shape != (heads,) or of_heads.dtype != torch.float32):
                raise ValueError(f"{name} {list(of_heads.shape)} of {of_heads.dtype}: float32 [{heads}]")
        return forms_for(dim, self.bits, self.group_size, self.static, *value_form(self))


class _Tiles(NamedTuple):
    """Queries in tiles of one sequence each, some of them empty."""

    sequence: Tensor  # int64 [tiles]
    index: Tensor  # int64 [tiles, rows]: which query; as many as there are where there is none
    position: Tensor  # int64 [tiles, rows]: its place in its sequence
    counts: Tensor  # int64 [sequences]: queries of each


def _tiles_of(queries: int, lengths: Tensor, cu_query_lens: Tensor | None) -> _Tiles:
    batch, device = len(lengths), lengths.device
    if cu_query_lens is None:
        each = torch.arange(batch, device=device)
        return _Tiles(each, each[:, None], lengths[:, None] - 1, torch.ones_like(lengths))
    starts = cu_query_lens.long().clamp(0, queries).cummax(0).values
    counts, rows = starts.diff(), max(1, min(_ROWS, queries // batch))
    blocks = -(-counts // rows)
    ends = blocks.cumsum(0)
    tile = torch.arange(batch + queries // rows, device=device)  # every sequence may have one that is not full
    sequence = torch.searchsorted(ends, tile, right=True)
    is_there, sequence = sequence < batch, sequence.clamp(max=batch - 1)
    first = starts[sequence] + (tile - (ends - blocks)[sequence]) * rows
    index, end = first[:, None] + torch.arange(rows, device=device), starts[1:][sequence][:, None]
    position = lengths[sequence][:, None] - end + index
    return _Tiles(sequence, torch.where(is_there[:, None] & (index < end), index, queries), position, counts)


def attend(query: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
    """The output in float32 and the log-sum-exp: see `decode_attention_ref`.

    On a card lengths and tables are not checked: a length beyond its block table is cut, a number that is no page is the last page's."""
    form = cache.form_for(query)
    (queries, heads, dim), kv_heads, device = query.shape, cache.pages.shape[1], query.device
    size, width = check_pages(cache.pages, kv_heads, form), cache.block_table.shape[1]
    if not len(cache.seq_lens):
        return query.new_zeros(query.shape, dtype=torch.float32), query.new_zeros(query.shape[:2], dtype=torch.float32)
    lengths = cache.seq_lens.long()
    if device.type != "cpu":
        lengths = lengths.clamp(0, width * size if len(cache.pages) else 0)
    tiles = _tiles_of(queries, lengths, cache.cu_query_lens)
    low = (lengths - tiles.counts - cache.window + 1).clamp(min=0) if cache.window else torch.zeros_like(lengths)
    first, columns = low // size, width
    if cache.window:  # a host knows how many pages the queries' windows reach into
        most = 1 if cache.cu_query_lens is None else queries
        columns = min(columns, (cache.window + most - 2 + 2 * size - 1) // size)
    if device.type == "cpu":
        check_table(cache.block_table, cache.seq_lens.tolist(), len(cache.pages), size, first.tolist())
        columns = min(columns, int((-(-lengths // size) - first).max()))

    padded = torch.cat([query, query.new_zeros(1, heads, dim)]).float()
    grouped = padded[tiles.index].unflatten(2, (kv_heads, -1))  # [tiles, rows, KV heads, group, D]
    folded, shift = grouped, grouped.new_zeros(())
    if cache.key_channels is not None:
        folded = grouped * cache.key_channels[1][:, None]
        shift = torch.einsum("trkgd,kd->trkg", grouped, cache.key_channels[0]) * cache.scale
    if cache.rotate:
        folded = hadamard(folded)
    top = grouped.new_full(grouped.shape[:4], -torch.inf)
    total, mixed = torch.zeros_like(top), torch.zeros_like(grouped)
    numbers = len(tiles.sequence) * size * max(2 * kv_heads * dim, tiles.index.shape[1] * heads)
    step = max(1, _AT_ONCE // numbers)
    for column in range(0, columns, step):
        column = first[:, None] + torch.arange(column, min(column + step, columns), device=device)
        page = cache.block_table.long().gather(1, column.clamp(max=width - 1)).clamp(0, len(cache.pages) - 1)
        place = (column[..., None] * size + torch.arange(size, device=device)).flatten(1)
        key, value = (
            values_of(rows, side, fixed)
            for rows, side, fixed in zip(
                gather_pages(cache.pages, page, form),
                (form.key, form.value),
                (cache.key_fixed, cache.value_fixed),
                strict=True,
            )
        )
        used = (place >= low[:, None]) & (place < lengths[:, None])
        value = value.masked_fill(~used[..., None, None], 0.0)  # what holds no token may be anything
        if cache.cu_query_lens is not None:
            key, value, place, used = (x[tiles.sequence] for x in (key, value, place, used))
        behind = tiles.position[..., None] - place[:, None]  # [tiles, rows, places]
        visible = used[:, None] & (behind >= 0)
        if cache.window:
            visible &= behind < cache.window
        scores = torch.einsum("trkgd,tnkd->trkgn", folded, key) * cache.scale
        if cache.softcap:
            scores = torch.tanh((scores + shift[..., None]) / cache.softcap) * cache.softcap
        if cache.slopes is not None:
            scores = scores - cache.slopes.view(kv_heads, -1, 1) * behind[:, :, None, None]
        scores = scores.masked_fill(~visible[:, :, None, None], -torch.inf)
        higher = torch.maximum(top, scores.amax(-1))
        base = higher.masked_fill(higher == -torch.inf, 0.0)
        weights, shrink = torch.exp(scores - base[..., None]), torch.exp(top - base)
        total = total * shrink + weights.sum(-1)
        mixed = mixed * shrink[..., None] + torch.einsum("trkgn,tnkd->trkgd", weights, value)
        top = higher

    left_out = 0.0 if cache.softcap else shift  # of the scores
    lse = top + total.log()  # of tokens
    lse_of_all = lse
    if cache.sinks is not None:
        lse_of_all = torch.logaddexp(lse, (cache.sinks.view(kv_heads, -1) - left_out).expand_as(lse))
    share = torch.exp(lse - lse_of_all).masked_fill(lse == -torch.inf, 0.0)  # of the weight that is on tokens
    mixed = mixed * (share / total.clamp(min=torch.finfo(torch.float32).tiny))[..., None]
    if cache.value_channels is not None:
        mixed = mixed * cache.value_channels[1][:, None] + cache.value_channels[0][:, None] * share[..., None]
    out = mixed.new_zeros(queries + 1, heads, dim)
    out[tiles.index] = mixed.flatten(2, 3)
    of_all = lse.new_full((queries + 1, heads), -torch.inf)
    of_all[tiles.index] = (lse_of_all + left_out).flatten(2)
    return out[:queries], of_all[:queries]
