"""The decode loop: requests wait in a queue, get a place, are prefilled in pieces, and decode together, each until it ends; others take its place.

    submit -> queue -> [ a piece of one prompt's prefill | a decode step of all that run ] ... -> Completion

A request begins when a place is free and the cache has pages for its prompt and all its new tokens: it never waits for memory in the middle. A decode
step covers the first 1, 2, 4, 8 ... places. On a card it is a CUDA graph, made once for each of these sizes: the step reads and writes static tensors,
also the tokens that the next step begins with, so that the next replay is on its way before the host has looked at what this one gave.
"""

import itertools
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tilepress.formats import UsageError
from tilepress.formats.kv_int4 import PAGE_TOKENS
from tilepress.kernels.arch import Path
from tilepress.runtime.decode import sampling
from tilepress.runtime.decode.backends import backend_for
from tilepress.runtime.decode.decoder import most_positions
from tilepress.runtime.decode.sampling import GREEDY, Sampling


@dataclass(frozen=True)
class Request:
    """A prompt and how to go on. Generation ends behind one of `stop`, which is part of the result, or `max_new_tokens`. Raises UsageError if empty."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    stop: frozenset[int] = frozenset()
    sampling: Sampling = GREEDY

    def __post_init__(self):
        if not self.prompt or self.max_new_tokens < 1:
            raise UsageError(
                f"a prompt of {len(self.prompt)} tokens and {self.max_new_tokens} new ones: nothing to generate",
                "give at least one token and ask for at least one",
            )

    @property
    def most(self) -> int:
        """Tokens with all that may be generated."""
        return len(self.prompt) + self.max_new_tokens


@dataclass
class Completion:
    """What came of a request: `tokens` are the new ones, `finish` is None while it runs, then `stop` or `length`."""

    number: int
    request: Request
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None

    def add(self, token: int) -> None:
        self.tokens.append(token)
        if token in self.request.stop:
            self.finish = "stop"
        elif len(self.tokens) == self.request.max_new_tokens:
            self.finish = "length"


@dataclass
class _Running:
    """A request at a place; its prompt is in the cache up to `filled`."""

    completion: Completion
    place: int
    filled: int = 0


class _Seen:
    """Tokens on their way to the host, and whose they are."""

    def __init__(self, tokens: Tensor, running: list[_Running]):
        self.running, self._event = running, None
        if tokens.is_cuda:
            self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._tokens.copy_(tokens, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._tokens = tokens.clone()

    def tolist(self) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        return self._tokens.tolist()


class Engine:
    """Generates for many requests at once with a model of tilepress.load, or any transformers causal language model. Of a model that ranks share
    (runtime/sharding.py) each rank has an engine, with the same requests and steps in the same order.

    `places` sequences run together, of up to `max_len` tokens each; `cache` is one of backends.CACHES, of `num_pages` pages of 64 tokens (by default what
    all places need). `chunk` tokens of a prompt are prefilled between two decode steps. `graphs` None: CUDA graphs where they are."""

    def __init__(
        self,
        model: nn.Module,
        places: int = 8,
        max_len: int = 2048,
        cache: str = "auto",
        num_pages: int | None = None,
        chunk: int = 1024,
        graphs: bool | None = None,
    ):
        positions = most_positions(model) or max_len
        if places < 1 or not 2 <= max_len <= positions or chunk < 1:
            raise UsageError(
                f"{places} places for {max_len} tokens each, prefilled by {chunk}, with a model for {positions}",
                f"use at least one place, 2 to {positions} tokens and pieces of at least one",
            )
        self.model, self.places, self.max_len, self.chunk = model, places, max_len, chunk
        self.device = next(model.parameters()).device
        self.backend = backend_for(model, places, max_len, cache, num_pages)
        self.graphs = self.backend.captures if graphs is None else graphs
        if self.graphs and not self.backend.captures:
            raise UsageError("CUDA graphs need a card, and kernels for the whole step", "leave graphs out")
        self.waiting: deque[Completion] = deque()
        self.filling: deque[_Running] = deque()
        self.running: dict[int, _Running] = {}  # by place: those that decode
        self._free = set(range(places))
        self._seen: deque[_Seen] = deque()
        self._numbers = itertools.count()
        self._captured: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        with torch.inference_mode():
            # Of each place: its last token, where that goes (-1: nothing runs there), and how its tokens are drawn.
            self.tokens = torch.zeros(places, dtype=torch.int64, device=self.device)
            self.positions = torch.full_like(self.tokens, -1)
            self.temperature = torch.zeros(places, device=self.device)
            self.top_k, self.top_p = torch.zeros_like(self.tokens), torch.ones_like(self.temperature)
            self.uniforms = torch.zeros(places, max_len, device=self.device)

    def submit(self, request: Request) -> Completion:
        """Queues a request. Raises UsageError for one that can never run here."""
        vocabulary = self.model.config.get_text_config().vocab_size
        if request.most > self.max_len:
            raise UsageError(
                f"{len(request.prompt)} tokens and {request.max_new_tokens} new ones are more than {self.max_len}",
                "make the engine with a larger max_len, or shorten the request",
            )
        if not all(0 <= token < vocabulary for token in request.prompt):
            raise UsageError(
                f"the prompt has tokens beyond the vocabulary of {vocabulary}", "use the model's tokenizer"
            )
        pool = getattr(self.backend.cache, "pool", None)
        if pool is not None and -(-request.most // PAGE_TOKENS) > pool.total:
            raise UsageError(
                f"{request.most} tokens need more than the cache's {pool.total} pages", "give it more num_pages"
            )
        completion = Completion(next(self._numbers), request)
        self.waiting.append(completion)
        return completion

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.filling or self.running or self._seen)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """One piece of one prompt's prefill and one decode step; returns what ended."""
        self.fill()
        launched = bool(self.running)
        if launched:
            self._decode()
        ended: list[Completion] = []
        # On a card the step just launched runs while the tokens of those before are looked at.
        while len(self._seen) > (self.device.type == "cuda" and launched):
            ended += self._look(self._seen.popleft())
        return ended

    def clear(self) -> None:
        """Ends all requests where they are: what waits or runs gets no more tokens."""
        while self._seen:
            self._seen.popleft().tolist()
        for one in [*self.filling, *self.running.values()]:
            self._end(one)
        self.waiting.clear()
        self.filling.clear()

    def run(self, requests: list[Request]) -> list[Completion]:
        """All of them, in their order."""
        completions = [self.submit(request) for request in requests]
        while any(completion.finish is None for completion in completions):
            self.step()
        return completions

    @torch.inference_mode()
    def fill(self) -> None:
        """One piece of one prompt's prefill alone."""
        self._begin()
        if self.filling:
            self._prefill(self.filling[0])

    def fork(self, one: Completion, request: Request) -> Completion:
        """A greedy request with the prompt of one that runs, begun with a copy of its keys and values in place of a prefill. Raises UsageError where there
        is no such thing, or no place."""
        source = next((running for running in self.running.values() if running.completion is one), None)
        copies = getattr(self.backend.cache, "copy", None)
        alike = request.prompt == one.request.prompt and request.sampling.greedy and one.request.sampling.greedy
        if source is None or copies is None or not alike or not one.tokens or request.most != one.request.most:
            raise UsageError("only a running request is copied, to one of its prompt and length", "submit it instead")
        if not self._free or not self.backend.fits(request.most):
            raise UsageError(f"{self.places} places are taken, or all pages", "make the engine with more")
        completion = Completion(next(self._numbers), request)
        with torch.inference_mode():
            place = min(self._free)
            self._free.remove(place)
            self.backend.begin(place, request.most)
            copies(source.place, place)
            self.temperature[place] = 0
            self.tokens[place], self.positions[place] = one.tokens[0], len(request.prompt)
        completion.add(one.tokens[0])
        self.running[place] = _Running(completion, place, len(request.prompt))
        return completion

    def _begin(self) -> None:
        while self.waiting and self._free and self.backend.fits(self.waiting[0].request.most):
            completion = self.waiting.popleft()
            place = min(self._free)
            self._free.remove(place)
            self.backend.begin(place, completion.request.most)
            self.filling.append(_Running(completion, place))

    def _prefill(self, one: _Running) -> None:
        request, place = one.completion.request, one.place
        piece = request.prompt[one.filled : one.filled + self.chunk]
        logits = self.backend.prefill(place, torch.tensor(piece, device=self.device), one.filled)
        one.filled += len(piece)
        if one.filled < len(request.prompt):
            return
        self.filling.popleft()
        how, last = request.sampling, len(request.prompt) - 1
        self.temperature[place], self.top_k[place], self.top_p[place] = how.temperature, how.top_k, how.top_p
        if not how.greedy:
            drawn = how.uniforms(request.max_new_tokens)
            self.uniforms[place, last : last + len(drawn)] = drawn.to(self.device)
        self.positions[place] = last
        at = slice(place, place + 1)
        self.tokens[at] = self._chosen(logits, at, not how.greedy)
        self.positions[place] += 1
        self.running[place] = one
        self._seen.append(_Seen(self.tokens[at], [one]))

    def _decode(self) -> None:
        rows, samples = self.rows_for(max(self.running) + 1), self._samples()
        self.launch(rows, samples)
        self._seen.append(_Seen(self.tokens[:rows], [self.running.get(place) for place in range(rows)]))

    def _samples(self) -> bool:
        return any(not one.completion.request.sampling.greedy for one in self.running.values())

    def rows_for(self, count: int) -> int:
        """The size of a step for so many places."""
        return min(1 << (count - 1).bit_length(), self.places)

    def launch(self, rows: int, samples: bool = False) -> None:
        """A decode step of the first places, as a graph where there are graphs."""
        if not self.graphs:
            return self._advance(rows, samples)
        if (rows, samples) not in self._captured:
            self._capture(rows, samples)
        return self._captured[rows, samples].replay()

    def _advance(self, rows: int, samples: bool) -> None:
        """Everything is read from and written to the engine's own tensors."""
        tokens, positions = self.tokens[:rows], self.positions[:rows]
        chosen = self._chosen(self.backend.decode(tokens, positions), slice(rows), samples)
        runs = positions >= 0
        tokens.copy_(torch.where(runs, chosen, tokens))
        positions.add_(runs)

    def _chosen(self, logits: Tensor, places: slice, samples: bool) -> Tensor:
        """The next token of each of these places."""
        if not samples:
            return sampling.greedy(logits)
        drawn = self.uniforms[places].gather(1, self.positions[places].clamp(min=0)[:, None])[:, 0]
        return sampling.sample(logits, self.temperature[places], self.top_k[places], self.top_p[places], drawn)

    def _capture(self, rows: int, samples: bool) -> None:
        """First run as they will be, with nothing at any place: kernels are compiled and memory is found."""
        positions = self.positions.clone()
        self.positions.fill_(-1)
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device), torch.cuda.stream(side):
            for _ in range(2):
                self._advance(rows, samples)
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        pool = next((g.pool() for g in self._captured.values()), None)
        # Beside ranks a thread of torch's own looks after collectives, by calls that a capture of all threads would take amiss.
        mode = "global" if getattr(self.model, "tensor_parallel", None) is None else "thread_local"
        with torch.cuda.device(self.device), torch.cuda.graph(graph, pool=pool, capture_error_mode=mode):
            self._advance(rows, samples)
        self.positions.copy_(positions)
        self._captured[rows, samples] = graph

    def _look(self, seen: _Seen) -> list[Completion]:
        ended = []
        for token, one in zip(seen.tolist(), seen.running, strict=True):
            if one is None or one.completion.finish is not None:
                continue
            one.completion.add(token)
            if one.completion.finish is not None:
                self._end(one)
                ended.append(one.completion)
        return ended

    def _end(self, one: _Running) -> None:
        self.running.pop(one.place, None)
        with torch.inference_mode():
            self.positions[one.place] = -1
        self.backend.end(one.place)
        self._free.add(one.place)

    def paths(self) -> dict[Path | str, int]:
        """Which implementation serves how many parts of a decode step, and how it is launched."""
        how = "a CUDA graph for each size of batch" if self.graphs else "launched op by op"
        return self.backend.paths() | {f"decode steps: {how}": 1}


def generate(model: nn.Module, prompts: list[list[int]], max_new_tokens: int, **options) -> list[list[int]]:
    """New tokens of each prompt, greedy unless `sampling` (a Sampling; each prompt gets its seed plus its number) is among the options. `stop` are token
    ids, by default the model's own; the rest goes to Engine."""
    how = options.pop("sampling", GREEDY)
    stop = options.pop("stop", None)
    if stop is None:
        found = model.generation_config.eos_token_id
        stop = [] if found is None else [found] if isinstance(found, int) else found
    requests = [
        Request(
            tuple(prompt),
            max_new_tokens,
            frozenset(stop),
            Sampling(how.temperature, how.top_k, how.top_p, how.seed + number),
        )
        for number, prompt in enumerate(prompts)
    ]
    options.setdefault("places", min(len(prompts), 16))
    options.setdefault("max_len", max(request.most for request in requests))
    return [completion.tokens for completion in Engine(model, **options).run(requests)]
