"""The work that decode benchmarks time: the pass over one batch of a model, from a prompt through steps, and where the
time of a step goes.

The pass is a `Batch` (runtime/decode/batch.py), which `generate(custom_generate=tilepress.decode)` runs too. Models that the lean pass does not know are
timed by their own forward pass, on a CPU alone.
"""

import math
import time
from dataclasses import dataclass

import torch
from torch import nn

from tilepress.runtime.decode.batch import Batch
from tilepress.runtime.decode.decoder import why_not
from tilepress.runtime.loader import paths as paths_of

PROFILED_STEPS = 3


class OwnPass:
    """The model's own forward pass with its own cache, in place of a Batch, for models that the lean pass does not know: timed on a CPU alone."""

    cache = None

    def __init__(self, model: nn.Module, why: str):
        self.model, self.device, self._why = model, next(model.parameters()).device, why
        self.clear()

    def prefill(self, sequence: int, prompt: torch.Tensor, most: int) -> torch.Tensor:
        return self._pass(prompt[None].to(self.device))

    def copy(self, sequence: int, to: int, most: int) -> None:
        """Do nothing: the first step copies the cache as often as it needs."""

    def step(self, count: int) -> torch.Tensor:
        if len(self.tokens) < count:
            self._past.batch_repeat_interleave(count)
            self.tokens = self.tokens.repeat(count)
        return self._pass(self.tokens[:, None])

    def clear(self) -> None:
        self._past, self.tokens = None, None

    @torch.inference_mode()
    def _pass(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.model(ids, past_key_values=self._past, use_cache=True)
        self._past, logits = found.past_key_values, found.logits[:, -1]
        self.tokens = logits.argmax(-1)
        return logits

    def paths(self) -> dict[str, int]:
        return {f"transformers' own forward pass ({self._why})": 1} | paths_of(self.model, "cache")


def pass_of(model: nn.Module, batch: int, max_len: int, cache: str, chunk: int) -> Batch | OwnPass:
    """Return the lean pass over a model, or its own where the lean pass does not know it; arguments as those of Batch."""
    if (why := why_not(model, max_len)) is not None:
        return OwnPass(model, why)
    return Batch(model, batch, max_len, cache, chunk=chunk)


@dataclass(frozen=True)
class Case:
    """A case to time: a pass, the prompt int64 [context] of every sequence, how many sequences, and for how many tokens
    each has room.
    """

    timed: Batch | OwnPass
    prompt: torch.Tensor
    batch: int
    most: int

    def start(self) -> float:
        """Bring all sequences to run, and return the seconds to the first token."""
        self.together()
        started = time.perf_counter()
        self.timed.prefill(0, self.prompt, self.most)
        self.timed.tokens[0].item()
        seconds = time.perf_counter() - started
        for sequence in range(1, self.batch):
            self.timed.copy(0, sequence, self.most)
        return seconds

    def together(self) -> None:
        """Wait for the card, and for all ranks."""
        self.wait()
        if (group := getattr(self.timed.model, "tensor_parallel", None)) is not None:
            group.least(0)

    def wait(self) -> None:
        if self.timed.device.type == "cuda":
            torch.cuda.synchronize(self.timed.device)

    def run(self, steps: int) -> tuple[float, float]:
        """Return the seconds to the first token, and those of a step of the whole batch."""
        ttft = self.start()
        self.together()
        started = time.perf_counter()
        for _ in range(steps):
            self.timed.step(self.batch)
        self.wait()
        seconds = (time.perf_counter() - started) / steps
        self.timed.clear()
        return ttft, seconds

    def shares_of_a_step(self) -> list[dict]:
        """Return the kernels of a decode step (operators on a CPU) with microseconds and share of them all, the longest first.

        A kernel that starts while others still run, and waits for them, has what it takes beyond their end.
        """
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        self.start()
        self.timed.step(self.batch)
        self.wait()
        on_card = self.timed.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if on_card else ProfilerActivity.CPU]) as found:
            for _ in range(PROFILED_STEPS):
                self.timed.step(self.batch)
            self.wait()
        self.timed.clear()
        if on_card:
            kernels = [event for event in found.events() if event.device_type == DeviceType.CUDA]
            times = times_without_overlap([(e.name, e.time_range.start, e.time_range.end) for e in kernels])
        else:
            times = {event.key: event.self_cpu_time_total for event in found.key_averages()}
        total = sum(times.values())
        rows = sorted(((name, us) for name, us in times.items() if us > 0), key=lambda item: -item[1])
        return [{"kernel": name, "us": us / PROFILED_STEPS, "share": us / total} for name, us in rows]


def times_without_overlap(spans: list[tuple[str, float, float]]) -> dict[str, float]:
    """Return sums by name of spans (name, begin, end), each counted from the latest end of those that end before it."""
    times: dict[str, float] = {}
    until = -math.inf
    for name, begin, end in sorted(spans, key=lambda span: span[2]):
        times[name] = times.get(name, 0.0) + end - max(begin, until)
        until = max(until, end)
    return times
