"""The attention caches of the lean pass: room for a batch of sequences, in static tensors that a CUDA graph can keep.

`PagedSequences` holds pages of 4, 8 or 16 bits (formats/kv_pages.py), attended to by kernels. A sequence gets the pages of its whole length when it begins, so
that a block table stays as it is while the sequence grows. `ContiguousSequences` holds keys and values in the model's dtype for torch's own attention.

A `Step` says where the rows of a pass go. `decoding` makes it of positions, `beginning` of the lengths of several prompts, both by tensor operations alone,
as a CUDA graph needs it; `prefilling` makes it for a piece of one sequence.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tilepress.formats import UsageError
from tilepress.formats.kv_calibration import KVCalibration, uncalibrated
from tilepress.formats.kv_int4 import PAGE_TOKENS, KVFormat
from tilepress.kernels import decode_attention, rope_append
from tilepress.kernels.arch import Path
from tilepress.models.attention import attend
from tilepress.runtime import attention
from tilepress.runtime.attention import PagePool, Rope
from tilepress.runtime.decode.decoder import Decoder

CACHES = ("auto", "calibrated", "bfloat16", "contiguous")


class Step(NamedTuple):
    """The rows of a pass: the next token of each of the first sequences, or in prefill as many rows of each of some sequences."""

    positions: Tensor  # int64 [rows], -1: nothing stands there
    slots: Tensor  # int64 [rows]: where in the pages, -1: nowhere; contiguous: which sequence
    table: Tensor | None  # int32 [sequences, pages]; None: contiguous
    seq_lens: Tensor  # int32 [sequences], with this pass's rows
    length: int | None  # tokens of each sequence after its rows of prefill, with padding; None: decoding


class PagedSequences:
    """Room for `sequences` of up to `max_len` tokens, in `num_pages` pages for all of them: by default as many as they can need."""

    def __init__(
        self,
        calibration: KVCalibration,
        device: torch.device,
        sequences: int,
        max_len: int,
        num_pages: int | None = None,
    ):
        most = -(-max_len // PAGE_TOKENS)
        self.calibration, self.device = calibration, device
        self.pool = PagePool(calibration, device, sequences * most if num_pages is None else num_pages)
        self.table = torch.zeros(sequences, most, dtype=torch.int32, device=device)
        self.held: list[list[int]] = [[] for _ in range(sequences)]

    def begin(self, sequence: int, tokens: int) -> None:
        """Take pages for a sequence of up to so many tokens. Raises TilepressError if there are not enough."""
        self.held[sequence] = self.pool.take(-(-tokens // PAGE_TOKENS))
        row = torch.tensor(self.held[sequence], dtype=torch.int32)
        self.table[sequence, : len(row)] = row.to(self.device)

    def end(self, sequence: int) -> None:
        """Give a sequence's pages back."""
        self.pool.give(self.held[sequence])
        self.held[sequence] = []

    def copy(self, sequence: int, to: int) -> None:
        """Copy what a sequence holds to another one that has begun with as many pages."""
        self.pool.copy(self.held[sequence], self.held[to])

    def decoding(self, positions: Tensor) -> Step:
        """Return the step of one token for each of the first sequences; one with position -1 stores nothing and attends to nothing."""
        table, at = self.table[: len(positions)], positions.clamp(min=0)
        page = table.gather(1, (at // PAGE_TOKENS)[:, None])[:, 0].long()
        slots = torch.where(positions < 0, positions, page * PAGE_TOKENS + at % PAGE_TOKENS)
        return Step(positions, slots, table, (positions + 1).int(), None)

    def prefilling(self, sequence: int, first: int, count: int) -> Step:
        """Return the step of `count` tokens of one sequence from position `first` on."""
        positions = torch.arange(first, first + count, device=self.device)
        table = self.table[sequence : sequence + 1]
        slots = table[0].long()[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
        seq_lens = torch.tensor([first + count], dtype=torch.int32, device=self.device)
        return Step(positions, slots, table, seq_lens, first + count)

    def beginning(self, sequences: Tensor, lengths: Tensor, size: int) -> Step:
        """Return the step of the first `lengths` int64 [count] tokens of some sequences int64 [count], in `size` rows each: rows behind a sequence's end
        store nothing, and attend to its tokens and zeros."""
        at = torch.arange(size, device=self.device)
        table, is_behind = self.table[sequences], at >= lengths[:, None]
        slots = table.long()[:, at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS
        positions, slots = (x.masked_fill(is_behind, -1).flatten() for x in (at.expand_as(slots), slots))
        return Step(positions, slots, table, lengths.int(), size)

    def attend(self, number: int, query: Tensor, key: Tensor, value: Tensor, turns, layer, step: Step) -> Tensor:
        """Append the rows of layer `number` and return their attention [rows, heads, D].

        query [rows, heads, D], key and value [rows, KV heads, D] are as projections give them; turns are cos and sin [rows, rotary / 2] or None; layer is a
        decoder.Layer."""
        rope = None if turns is None else Rope(*turns, layer.head_norms, layer.head_eps)
        folded = step.length is None and rope is not None and not layer.scores.absolute
        query = self.pool.append(number, query, key, value, step.slots, rope, folded)
        if step.length is None:
            return self.pool.decode(number, query, step.table, step.seq_lens, layer.scale, folded, layer.scores)
        query = query.unflatten(0, (len(step.table), -1)).transpose(1, 2)
        # Rows behind a sequence's end are the causal mask's business, except for the op, whose rows are a sequence's last.
        by_op = layer.scores.absolute or 0 < layer.scores.window < step.length
        positions = step.positions.view(len(query), -1) if by_op else None
        how = step.length, layer.scale, positions, layer.scores
        found = self.pool.prefill(number, query, step.table, step.seq_lens, *how)
        return found.transpose(1, 2).flatten(0, 1)

    @property
    def bytes_per_token(self) -> int:
        return self.calibration.bytes_per_token

    @property
    def name(self) -> str:
        return f"{self.calibration.name}, paged"

    def paths(self, decoder: Decoder) -> dict[Path | str, int]:
        """Return which implementation serves how many layers of a pass."""
        fused = 0 if decoder.turns is None else len(decoder.layers)
        extras = {number: layer.scores.extras for number, layer in enumerate(decoder.layers)}
        return attention.paths(self.calibration, self.device, decoder.dtype, fused, extras)


class ContiguousSequences:
    """Room for `sequences` of up to `max_len` tokens each, always held. torch's attention reads all `max_len` in every decode step."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype, device, sequences: int, max_len: int):
        shape = layers, 2, sequences, kv_heads, max_len, head_dim
        self.memory, self.device = torch.zeros(shape, dtype=dtype, device=device), device

    def begin(self, sequence: int, tokens: int) -> None:
        """Nothing is to be taken: each sequence has its own memory."""

    def end(self, sequence: int) -> None:
        """Nothing is to be given back."""

    def copy(self, sequence: int, to: int) -> None:
        """Copy what a sequence holds to another one."""
        self.memory[:, :, to] = self.memory[:, :, sequence]

    def decoding(self, positions: Tensor) -> Step:
        """Return the step of one token for each of the first sequences. One with position -1 stores at the end, where a sequence writes before it reads."""
        return Step(positions, torch.arange(len(positions), device=self.device), None, (positions + 1).int(), None)

    def prefilling(self, sequence: int, first: int, count: int) -> Step:
        """Return the step of `count` tokens of one sequence from position `first` on."""
        positions = torch.arange(first, first + count, device=self.device)
        return Step(positions, torch.full_like(positions, sequence), None, positions[-1:].int() + 1, first + count)

    def beginning(self, sequences: Tensor, lengths: Tensor, size: int) -> Step:
        """Return the step of the first `lengths` int64 [count] tokens of some sequences int64 [count], in `size` rows each. What rows behind a sequence's
        end store is written again before it is read."""
        positions = torch.arange(size, device=self.device).repeat(len(sequences))
        return Step(positions, sequences[:, None].expand(-1, size).flatten(), None, lengths.int(), size)

    def attend(self, number: int, query: Tensor, key: Tensor, value: Tensor, turns, layer, step: Step) -> Tensor:
        """Append the rows of layer `number` and return their attention: as PagedSequences.attend does."""
        if turns is not None:
            pairs = zip((query, key), layer.head_norms, strict=True)
            normal = [x if norm is None else rope_append.normalized(x, norm, layer.head_eps) for x, norm in pairs]
            query, key = (rope_append.turned(x, *turns) for x in normal)
        keys, values = self.memory[number]
        at = step.positions % keys.shape[2]
        keys[step.slots, :, at], values[step.slots, :, at] = key, value
        if step.length is not None:
            sequences = step.slots.unflatten(0, (len(step.seq_lens), -1))[:, 0]
            held = (x[sequences, :, : step.length] for x in (keys, values))
            query = query.unflatten(0, (len(sequences), -1)).transpose(1, 2)
            return attention.attention(query, *held, layer.scale, None, layer.scores).transpose(1, 2).flatten(0, 1)
        behind = step.positions.clamp(min=0)[:, None] - torch.arange(keys.shape[2], device=self.device)
        seen = (behind >= 0) & (behind < layer.scores.window) if layer.scores.window else behind >= 0
        mask, rows = seen[:, None, None], len(query)
        if layer.scores.absolute:
            whole = query[:, :, None], keys[:rows], values[:rows]
            return attend(*whole, mask, layer.scale, layer.scores)[:, :, 0]
        # Query heads that share a KV head are rows of one head here: with a mask torch has no fast kernel for groups.
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

    def paths(self, decoder: Decoder) -> dict[Path | str, int]:
        """Return which implementation serves how many layers."""
        return {f"torch attention on {self.device.type}": len(self.memory)}


def cache_for(
    decoder: Decoder, name: str, sequences: int, max_len: int, num_pages: int | None = None
) -> PagedSequences | ContiguousSequences:
    """Make the cache of that name (one of CACHES) for a batch.

    `auto` is the model's calibrated cache, else pages of bfloat16 for a model of that dtype, else contiguous memory. Raises UsageError for an unknown
    name, and for `calibrated` where the model has no calibration."""
    if name not in CACHES:
        raise UsageError(f"the cache {name!r} is unknown", f"choose one of {', '.join(CACHES)}")
    state = getattr(decoder.model, "kv_state", None)
    calibration = state.calibration if state is not None and state.mode == "cache" else None
    if name == "calibrated" and calibration is None:
        raise UsageError("the model has no calibrated cache", "make one: `tilepress compress kv`")
    if name == "bfloat16" or (
        name == "auto" and calibration is None and pages_serve(decoder.head_dim, decoder.dtype, decoder.device)
    ):
        calibration = uncalibrated(KVFormat(decoder.head_dim, 16), decoder.kv_heads, len(decoder.layers))
    if name == "contiguous" or calibration is None:
        size = len(decoder.layers), decoder.kv_heads, decoder.head_dim
        return ContiguousSequences(*size, decoder.dtype, decoder.device, sequences, max_len)
    return PagedSequences(calibration, decoder.device, sequences, max_len, num_pages)


def pages_serve(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether pages of bfloat16 lose nothing for a model of a dtype, and on a card have a kernel."""
    if dtype != torch.bfloat16 or head_dim % 32:
        return False
    return device.type != "cuda" or decode_attention.why_not(device, KVFormat(head_dim, 16), dtype) is None
