"""A batch of sequences on its way through the lean pass: each prompt is prefilled alone, then every step gives each sequence one more token.

    prefill(0, prompt), prefill(1, prompt) ... -> step -> step -> ... -> clear

On a card a step is a CUDA graph, captured once for each number of sequences. It reads and writes static tensors alone: where rows go follows from positions
on the card, and it leaves the most probable tokens where the next step begins. The host need not look at a token before it launches the next step.
"""

import weakref

import torch
from torch import Tensor, nn

from tilepress.formats import UsageError
from tilepress.kernels import argmax  # noqa: F401 (the op)
from tilepress.kernels.arch import Path, references
from tilepress.runtime.decode.cache import cache_for
from tilepress.runtime.decode.decoder import Decoder, most_positions

CHUNK = 2048  # tokens of a prompt that are prefilled at once


class Batch:
    """Room for `sequences` of up to `max_len` tokens each, and the pass over them. Of a model that ranks share, each rank has a batch and makes the same
    calls in the same order.

    `cache` is one of cache.CACHES, of `num_pages` pages of 64 tokens (by default what all sequences can need). `graphs`: whether steps are CUDA graphs, by
    default wherever kernels serve the whole step. Raises UsageError for sizes that the model does not have and for graphs that cannot be, ValueError for a
    model that the lean pass does not know (decoder.why_not)."""

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
        self._served = self.decoder.paths() | self.cache.paths(self.decoder.dtype, self.decoder.turns is not None)
        captures = self.device.type == "cuda" and not references(self._served)
        if graphs and not captures:
            raise UsageError("CUDA graphs need a card, and kernels for the whole step", "leave graphs out")
        self._captures = captures if graphs is None else graphs
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # and the logits, by number of sequences

    def __reduce__(self):
        """Leave nothing of a batch in copies and pickles of a model that keeps it: graphs and pages are this process's."""
        return type(None), ()

    @property
    def sequences(self) -> int:
        return len(self.tokens)

    @torch.inference_mode()
    def prefill(self, sequence: int, prompt: Tensor, most: int) -> Tensor:
        """Begin a sequence of up to `most` tokens with the tokens `prompt` int64 [count], and return the logits [1, vocabulary] behind them.

        Raises UsageError for a sequence that is empty or longer than the batch has room for, TilepressError if the cache has not enough pages."""
        count = len(prompt)
        if not 0 < count <= most <= self.max_len:
            raise UsageError(
                f"a prompt of {count} tokens, {most} with the new ones, and room for {self.max_len}",
                "give at least one token, and a batch with a larger max_len or fewer new tokens",
            )
        self.cache.begin(sequence, most)
        for first in range(0, count, self.chunk):
            piece = prompt[first : first + self.chunk].to(self.device)
            step = self.cache.prefilling(sequence, first, len(piece))
            logits = self.decoder.forward(piece, step.positions, self.cache, step, slice(-1, None))
        self.tokens[sequence : sequence + 1] = torch.ops.tilepress.argmax(logits)
        self.positions[sequence] = count
        return logits

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
        graph, logits = self._graphs[count]
        graph.replay()
        return logits

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

    def _captured(self, count: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture a step. It runs before with no sequence anywhere, so that kernels are compiled and memory is found."""
        positions = self.positions.clone()
        self.positions.fill_(-1)
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device), torch.cuda.stream(side):
            for _ in range(2):
                self._advance(count)
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        pool = next((graph.pool() for graph, _ in self._graphs.values()), None)
        # Beside ranks a thread of torch's own looks after collectives, by calls that a capture of all threads would not allow.
        mode = "global" if getattr(self.model, "tensor_parallel", None) is None else "thread_local"
        with torch.cuda.device(self.device), torch.cuda.graph(graph, pool=pool, capture_error_mode=mode):
            logits = self._advance(count)
        self.positions.copy_(positions)
        return graph, logits

    def paths(self) -> dict[Path | str, int]:
        """Return which implementation serves how many parts of a step, and how steps are launched."""
        how = "a CUDA graph for each size of batch" if self._captures else "launched op by op"
        return self._served | {f"decode steps: {how}": 1}
