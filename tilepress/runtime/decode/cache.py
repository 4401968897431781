"""The attention caches of the decode loop: places for sequences, with static tensors that a CUDA graph can keep.

`PagedSequences` holds pages of 4, 8 or 16 bits (formats/kv_int4.py) in one pool, attended to by the kernels; a place gets the pages of its whole sequence
when that begins, so that a block table stays as it is while it runs. `ContiguousSequences` holds keys and values [places, KV heads, max_len, D] in the
model's dtype for torch's own attention.

A `Step` says where the rows of a pass go: `decoding` makes it of positions by tensor operations alone, `prefilling` for a piece of one sequence.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from tilepress.formats.kv_calibration import KVCalibration
from tilepress.formats.kv_int4 import PAGE_TOKENS
from tilepress.kernels import decode_attention, kv_cache, kv_read, rope_append
from tilepress.kernels.arch import Path
from tilepress.runtime.hf.paged_cache import PagePool

ops = torch.ops.tilepress


class Step(NamedTuple):
    """The rows of a pass: one of each of the first places, or `first` .. of one place, which then holds `length` tokens."""

    positions: Tensor  # int64 [rows], -1: nothing stands there
    slots: Tensor  # int64 [rows]: where in the pages; contiguous: which place
    table: Tensor | None  # int32 [sequences, pages]
    seq_lens: Tensor  # int32 [sequences], with this pass's rows
    length: int | None  # of prefill


class PagedSequences:
    """`places` sequences of up to `max_len` tokens; `num_pages` for all of them, by default as many as they can need."""

    def __init__(
        self, calibration: KVCalibration, device: torch.device, places: int, max_len: int, num_pages: int | None = None
    ):
        most = -(-max_len // PAGE_TOKENS)
        self.calibration, self.device = calibration, device
        self.pool = PagePool(calibration, device, places * most if num_pages is None else num_pages)
        self.table = torch.zeros(places, most, dtype=torch.int32, device=device)
        self.held: list[list[int]] = [[] for _ in range(places)]

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of so many can begin now."""
        return -(-tokens // PAGE_TOKENS) <= len(self.pool.free)

    def begin(self, place: int, tokens: int) -> None:
        """Pages for a sequence of up to so many. Raises TilepressError if there are not enough."""
        self.held[place] = self.pool.take(-(-tokens // PAGE_TOKENS))
        row = torch.tensor(self.held[place], dtype=torch.int32)
        self.table[place, : len(row)] = row.to(self.device)

    def end(self, place: int) -> None:
        self.pool.give(self.held[place])
        self.held[place] = []

    def copy(self, place: int, to: int) -> None:
        """The rows of one sequence to another that has begun with as many pages."""
        for pages in self.pool.pages:
            pages[self.held[to]] = pages[self.held[place]]

    def decoding(self, positions: Tensor) -> Step:
        """One row of each of the first places; a place with position -1 stores nothing and attends to nothing."""
        table, at = self.table[: len(positions)], positions.clamp(min=0)
        page = table.gather(1, (at // PAGE_TOKENS)[:, None])[:, 0].long()
        slots = torch.where(positions < 0, positions, page * PAGE_TOKENS + at % PAGE_TOKENS)
        return Step(positions, slots, table, (positions + 1).int(), None)

    def prefilling(self, place: int, first: int, count: int) -> Step:
        positions = torch.arange(first, first + count, device=self.device)
        table = self.table[place : place + 1]
        slots = table[0].long()[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
        seq_lens = torch.tensor([first + count], dtype=torch.int32, device=self.device)
        return Step(positions, slots, table, seq_lens, first + count)

    def attend(self, number: int, query: Tensor, key: Tensor, value: Tensor, turns, layer, step: Step) -> Tensor:
        """query [rows, heads, D], key and value [rows, KV heads, D] of layer `number` as projections give them; turns are cos and sin [rows, rotary / 2]
        or None; layer is a decoder.Layer. Appends, and returns [rows, heads, D]."""
        (keys, values), form = self.pool.sides[number], self.calibration.form
        pages, calibration, decodes = self.pool.pages[number], self.calibration, step.length is None
        quantization = (*keys, *values, form.bits, form.group_size, form.static)
        quantization += calibration.rotate, calibration.refits
        folded = decodes and turns is not None
        if turns is None:
            ops.kv_append(pages, key, value, step.slots, *quantization)
        else:
            between = (None, None, None, *layer.head_norms, layer.head_eps, *turns, False, folded, step.slots)
            query = ops.rope_append(pages, query, key, value, *between, *quantization)
        sides, shape = (*keys[:2], *values[:2]), (form.bits, form.group_size, form.static)
        if decodes:
            rotate = calibration.rotate and not folded
            sides = (None, *sides[1:]) if folded else sides
            query = query.contiguous()
            return ops.decode_attention(query, pages, step.table, step.seq_lens, layer.scale, *sides, *shape, rotate)
        read = (pages, step.table, step.seq_lens, step.length, *sides, query.shape[-1], *shape, calibration.rotate)
        return _causal(query, *ops.kv_read(*read, query.dtype), layer.scale)

    @property
    def bytes_per_token(self) -> int:
        return self.calibration.bytes_per_token

    @property
    def name(self) -> str:
        return f"{self.calibration.form.name}, paged"

    def paths(self, dtype: torch.dtype, turns: bool) -> dict[Path | str, int]:
        first = rope_append.path(self.device) if turns else kv_cache.path(self.device)
        attention = decode_attention.path(self.device, self.calibration.form, dtype)
        return dict.fromkeys((first, kv_read.path(self.device), attention), len(self.pool.pages))


class ContiguousSequences:
    """`places` sequences of up to `max_len` tokens each, always held. torch's attention reads all `max_len` in every decode step."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype, device, places: int, max_len: int):
        shape = layers, 2, places, kv_heads, max_len, head_dim
        self.memory, self.device = torch.zeros(shape, dtype=dtype, device=device), device

    def fits(self, tokens: int) -> bool:
        return True

    def begin(self, place: int, tokens: int) -> None:
        pass

    def end(self, place: int) -> None:
        pass

    def copy(self, place: int, to: int) -> None:
        self.memory[:, :, to] = self.memory[:, :, place]

    def decoding(self, positions: Tensor) -> Step:
        """A place with position -1 writes where a sequence writes before it reads: at the end."""
        return Step(positions, torch.arange(len(positions), device=self.device), None, (positions + 1).int(), None)

    def prefilling(self, place: int, first: int, count: int) -> Step:
        positions = torch.arange(first, first + count, device=self.device)
        return Step(positions, torch.full_like(positions, place), None, positions[-1:].int() + 1, first + count)

    def attend(self, number: int, query: Tensor, key: Tensor, value: Tensor, turns, layer, step: Step) -> Tensor:
        """As that of PagedSequences."""
        if turns is not None:
            pairs = zip((query, key), layer.head_norms, strict=True)
            normal = [x if norm is None else rope_append.normalized(x, norm, layer.head_eps) for x, norm in pairs]
            query, key = (rope_append.turned(x, *turns) for x in normal)
        keys, values = self.memory[number]
        at = step.positions % keys.shape[2]
        keys[step.slots, :, at], values[step.slots, :, at] = key, value
        if step.length is not None:
            place = step.slots[:1]
            return _causal(query, *(x[place, :, : step.length] for x in (keys, values)), layer.scale)
        seen = torch.arange(keys.shape[2], device=self.device) <= step.positions.clamp(min=0)[:, None]
        mask, rows = seen[:, None, None], len(query)
        # Query heads that share a KV head as rows of one: with a mask torch has no fast kernel for groups.
        grouped = query.unflatten(1, (key.shape[1], -1))
        found = scaled_dot_product_attention(grouped, keys[:rows], values[:rows], attn_mask=mask, scale=layer.scale)
        return found.flatten(1, 2)

    @property
    def bytes_per_token(self) -> int:
        layers, _, _, heads, _, dim = self.memory.shape
        return 2 * layers * heads * dim * self.memory.element_size()

    @property
    def name(self) -> str:
        return f"{str(self.memory.dtype).removeprefix('torch.')}, contiguous"

    def paths(self, dtype: torch.dtype, turns: bool) -> dict[Path | str, int]:
        return {f"torch attention on {self.device.type}": len(self.memory)}


def _causal(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """query [rows, heads, D], the last of keys and values [1, KV heads, length, D] -> [rows, heads, D]."""
    rows, length = len(query), keys.shape[2]
    query = query.transpose(0, 1)[None]
    if rows == length:
        mask = None
    elif query.is_cuda:  # a mask of numbers would keep torch from its fast kernels
        mask = causal_lower_right(rows, length)
    else:
        mask = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
    gqa = query.shape[1] != keys.shape[1]
    out = scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=gqa
    )
    return out[0].transpose(0, 1)
