"""A batch of sequences on its way through the lean pass: prompts are prefilled, then every step gives each sequence one more token.

    prefill(prompts) -> step -> step -> ... -> clear

On a card steps are CUDA graphs, captured once for each number of sequences, and so are the first pieces of prompts, once for each number of prompts and each
of SIZES: a prompt is padded behind its end to the next size. Graphs read and write static tensors alone. Where rows go follows from lengths and positions on
the card, and the most probable tokens are left where the next step begins. The host need not look at a token before it launches the next step.

Padding changes no result: rows behind a prompt's end store nothing that is read, and attention is causal. A row's numbers are those of the same pass
without padding, up to the rounding of products that a library adds in another order for another number of rows.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tilepress.formats import UsageError
from tilepress.kernels import argmax  # noqa: F401 (the op)
from tilepress.kernels.arch import Path, references
from tilepress.runtime.decode.cache import cache_for
from tilepress.runtime.decode.decoder import Decoder, most_positions

CHUNK = 2048  # tokens of a prompt that are prefilled at once
# Tokens to which prompts are padded. Small passes take as long as their weights are read; of large ones a third at most is padding.
SIZES = (32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
_FEW_ROWS = 256  # of a pass that takes little longer than its weights are read: one such is faster than two
_SPARE_BYTES = 1 << 30  # that a card must have left beside what a graph of prefill keeps


class Prompt(NamedTuple):
    """A prompt to begin a sequence of the batch with."""

    sequence: int
    tokens: Tensor  # int64 [count], on any device
    most: int  # tokens that the sequence can grow to


@dataclass
class _Prefill:
    """A pass over the first pieces of so many prompts, padded to one size."""

    given: Tensor  # int64 [prompts, 2 + size], which stays where it is: a prompt's sequence, its length, its tokens
    replay: Callable[[], Tensor] | None = None  # launches its graph


def free_bytes(device: torch.device) -> int:
    """Return the bytes that torch has or can have for new tensors on a card."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


class Batch:
    """Room for `sequences` of up to `max_len` tokens each, and the pass over them. Of a model that ranks share, each rank has a batch and makes the same
    calls in the same order.

    `cache` is one of cache.CACHES, of `num_pages` pages of 64 tokens (by default what all sequences can need). `graphs`: whether steps and first pieces of
    prompts are CUDA graphs, by default wherever kernels serve the whole step. Raises UsageError for sizes that the model does not have and for graphs that
    cannot be, ValueError for a model that the lean pass does not know (decoder.why_not)."""

    def __init__(
        self,
        model: nn.Module,
        sequences: int,
        max_len: int,
        cache: str = "auto",
        num_pages: int | None = None,
        chunk: int = CHUNK,
        graphs: bool | None = None,
    ):
        positions = most_positions(model) or max_len
        if sequences < 1 or not 2 <= max_len <= positions or not isinstance(chunk, int) or chunk < 1:
            raise UsageError(
                f"{sequences} sequences of {max_len} tokens in pieces of {chunk!r}, for a model of {positions} positions",
                f"use at least one sequence, 2 to {positions} tokens and pieces of at least one",
            )
        self.max_len, self.chunk = max_len, chunk
        self.decoder = Decoder(model, max_len)
        # A model may keep its batch (generation.py). The batch does not keep the model, whose memory then is free when the user lets go of it.
        self.model = self.decoder.model = weakref.proxy(model)
        self.device = self.decoder.device
        with torch.inference_mode():
            self.cache = cache_for(self.decoder, cache, sequences, max_len, num_pages)
            self.tokens = torch.zeros(
                sequences, dtype=torch.int64, device=self.device
            )  # that the next step begins with
            self.positions = torch.full_like(self.tokens, -1)  # where they go; -1: no sequence
        self._served = self.decoder.paths() | self.cache.paths(self.decoder)
        captures = self.device.type == "cuda" and not references(self._served)
        if graphs and not captures:
            raise UsageError("CUDA graphs need a card, and kernels for the whole step", "leave graphs out")
        self._captures = captures if graphs is None else graphs
        self._pads = captures  # without graphs too, so that those change no bit
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None  # one graph runs at a time
        self._graphs: dict[int, Callable[[], Tensor]] = {}  # launch a step of so many sequences, and return its logits
        self._prefills: dict[tuple[int, int], _Prefill] = {}  # by number of prompts and size

    def __reduce__(self):
        """Leave nothing of a batch in copies and pickles of a model that keeps it: graphs and pages are this process's."""
        return type(None), ()

    @property
    def sequences(self) -> int:
        return len(self.tokens)

    def prefill(self, sequence: int, prompt: Tensor, most: int) -> Tensor:
        """Begin a sequence of up to `most` tokens with the tokens `prompt` int64 [count], and return the logits [1, vocabulary] behind them.

        Raises as `prefill_all` does."""
        return self.prefill_all([Prompt(sequence, prompt, most)])

    @torch.inference_mode()
    def prefill_all(self, prompts: list[Prompt]) -> Tensor:
        """Begin a sequence with each prompt, and return the logits [prompts, vocabulary] behind them. Where kernels serve the whole step, prompts of about
        the same length are prefilled together, as many as have `chunk` tokens, and a few short ones whatever their lengths.

        Raises UsageError for a sequence that is empty or longer than the batch has room for, TilepressError if the cache has not enough pages."""
        for _, tokens, most in prompts:
            if not 0 < len(tokens) <= most <= self.max_len:
                raise UsageError(
                    f"a prompt of {len(tokens)} tokens, {most} with the new ones, and room for {self.max_len}",
                    "give at least one token, and a batch with a larger max_len or fewer new tokens",
                )
        for prompt in prompts:
            self.cache.begin(prompt.sequence, prompt.most)
        found: dict[int, Tensor] = {}
        for size, some in self._together(prompts):
            if size is None:
                found |= {prompt.sequence: self._in_pieces(prompt, 0) for prompt in some}
                continue
            for prompt, logits in zip(some, self._first_pieces(some, size).split(1), strict=True):
                is_all = len(prompt.tokens) <= self.chunk
                found[prompt.sequence] = logits if is_all else self._in_pieces(prompt, self.chunk)
        return torch.cat([found[prompt.sequence] for prompt in prompts])

    def _together(self, prompts: list[Prompt]) -> Iterator[tuple[int | None, list[Prompt]]]:
        """Yield prompts whose first pieces are one pass, and the size to which they are padded, None for prompts that are not. A few short ones are padded
        to the next size among the others, and go with these."""
        by_size: dict[int | None, list[Prompt]] = {}
        for prompt in prompts:
            by_size.setdefault(self._size_for(min(len(prompt.tokens), self.chunk)), []).append(prompt)
        if None in by_size:
            yield None, by_size.pop(None)
        sizes, shorter = sorted(by_size), []
        for size, larger in zip_longest(sizes, sizes[1:]):
            some = shorter + by_size[size]
            if larger and (len(some) + len(by_size[larger])) * larger <= min(_FEW_ROWS, self.chunk):
                shorter = some
                continue
            shorter, count = [], max(1, self.chunk // size)
            yield from ((size, some[first : first + count]) for first in range(0, len(some), count))

    def _size_for(self, tokens: int) -> int | None:
        """Return the size to which a piece is padded: one of SIZES, or what a sequence has room for. None where it runs as it is."""
        if not self._pads:
            return None
        size = next((size for size in SIZES if size >= tokens), None)
        return None if size is None else min(size, self.max_len)

    def _in_pieces(self, prompt: Prompt, start: int) -> Tensor:
        """Run a prompt's tokens from `start` on without padding, and return the logits [1, vocabulary] behind the last."""
        count = len(prompt.tokens)
        for first in range(start, count, self.chunk):
            piece = prompt.tokens[first : first + self.chunk].to(self.device)
            step = self.cache.prefilling(prompt.sequence, first, len(piece))
            logits = self.decoder.forward(piece, step.positions, self.cache, step, slice(-1, None))
        self.tokens[prompt.sequence : prompt.sequence + 1] = torch.ops.tilepress.argmax(logits)
        self.positions[prompt.sequence] = count
        return logits

    def _first_pieces(self, prompts: list[Prompt], size: int) -> Tensor:
        """Run the first pieces of prompts, padded to a size, and return the logits [prompts, vocabulary] behind them.

        What is asked for once runs op by op. The second time it does so too, and is captured then: in this thread everything that it needs is compiled,
        loaded and planned."""
        given = torch.zeros(len(prompts), 2 + size, dtype=torch.int64, device="cpu")  # token 0 is in every vocabulary
        for row, prompt in zip(given, prompts, strict=True):
            piece = prompt.tokens[: self.chunk]
            row[0], row[1], row[2 : 2 + len(piece)] = prompt.sequence, len(piece), piece
        known = self._prefills.get((len(prompts), size))
        if known is None:
            known = self._prefills[len(prompts), size] = _Prefill(given.to(self.device))
            return self._begin(known.given)
        # The memory is not pinned: it has been read when this returns, though the card may still be busy.
        known.given.copy_(given, non_blocking=True)
        if known.replay is not None:
            return known.replay().clone()
        logits = self._begin(known.given)
        if self._captures and self._has_room(given[:, 2:].numel()):
            known.replay = self._capture(lambda: self._begin(known.given))
        return logits

    def _begin(self, given: Tensor) -> Tensor:
        """The pass over first pieces, as _Prefill has them. Everything is read from `given` and written to the batch's own tensors."""
        sequences, lengths, tokens = given[:, 0], given[:, 1], given[:, 2:]
        step = self.cache.beginning(sequences, lengths, tokens.shape[1])
        last = torch.arange(len(given), device=self.device) * tokens.shape[1] + lengths - 1
        logits = self.decoder.forward(tokens.flatten(), step.positions, self.cache, step, last)
        self.tokens.index_copy_(0, sequences, torch.ops.tilepress.argmax(logits))
        self.positions.index_copy_(0, sequences, lengths)
        return logits

    def _has_room(self, rows: int) -> bool:
        """Return whether the card holds what a pass over so many rows keeps as a graph. Ranks agree."""
        has = free_bytes(self.device) >= _SPARE_BYTES + rows * self.decoder.bytes_of_a_row
        group = getattr(self.model, "tensor_parallel", None)
        return has if group is None else bool(group.least(int(has)))

    @torch.inference_mode()
    def copy(self, sequence: int, to: int, most: int) -> None:
        """Begin a sequence with what another one of as many tokens holds, in place of a prefill."""
        self.cache.begin(to, most)
        self.cache.copy(sequence, to)
        self.tokens[to], self.positions[to] = self.tokens[sequence], self.positions[sequence]

    @torch.inference_mode()
    def feed(self, tokens: Tensor) -> None:
        """Set the tokens int64 [count] that the next step of the first sequences begins with, in place of the most probable ones."""
        self.tokens[: len(tokens)].copy_(tokens)

    @torch.inference_mode()
    def step(self, count: int) -> Tensor:
        """Advance the first `count` sequences by a token, and return their logits [count, vocabulary], which the next step overwrites. `tokens` has the most
        probable ones then."""
        if not self._captures:
            return self._advance(count)
        if count not in self._graphs:
            self._graphs[count] = self._captured(count)
        return self._graphs[count]()

    @torch.inference_mode()
    def clear(self) -> None:
        """End all sequences and give their pages back."""
        self.positions.fill_(-1)
        for sequence in range(self.sequences):
            self.cache.end(sequence)

    def _advance(self, count: int) -> Tensor:
        """Everything is read from and written to the batch's own tensors."""
        tokens, positions = self.tokens[:count], self.positions[:count]
        logits = self.decoder.forward(tokens, positions, self.cache, self.cache.decoding(positions))
        runs = positions >= 0
        tokens.copy_(torch.where(runs, torch.ops.tilepress.argmax(logits), tokens))
        positions.add_(runs)
        return logits

    def _captured(self, count: int) -> Callable[[], Tensor]:
        """Capture a step. It runs before with no sequence anywhere, so that kernels are compiled and memory is found."""
        positions = self.positions.clone()
        self.positions.fill_(-1)
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device), torch.cuda.stream(side):
            for _ in range(2):
                self._advance(count)
        torch.cuda.current_stream(self.device).wait_stream(side)
        replay = self._capture(lambda: self._advance(count))
        self.positions.copy_(positions)
        return replay

    def _capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Capture what `run` launches, without running it. Return what launches it and returns the tensor that `run` did, which each launch overwrites."""
        graph = torch.cuda.CUDAGraph()
        # Beside ranks a thread of torch's own looks after collectives, by calls that a capture of all threads would not allow.
        mode = "global" if getattr(self.model, "tensor_parallel", None) is None else "thread_local"
        with torch.cuda.device(self.device), torch.cuda.graph(graph, pool=self._pool, capture_error_mode=mode):
            found = run()

        def replay() -> Tensor:
            graph.replay()
            return found

        return replay

    def paths(self) -> dict[Path | str, int]:
        """Return which implementation serves how many parts of a step, and how steps and prompts are launched."""
        graph, alone = "a CUDA graph for each size", "launched op by op"
        steps = f"{graph} of batch" if self._captures else alone
        prompts = f"{graph} of padded prompts, up to {SIZES[-1]} tokens" if self._captures else alone
        return self._served | {f"decode steps: {steps}": 1, f"prefill: {prompts}": 1}
