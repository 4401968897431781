"""The time that a run takes: seconds of each stage."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


class Stages:
    """Seconds by stage. While a stage runs within another one, that one's clock stands; what a card does in a stage is waited for at its end."""

    def __init__(self, device: torch.device | str):
        self.device = torch.device(device)
        self.seconds: dict[str, float] = {}
        self._running: list[str] = []
        self._since = 0.0

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        self._settle()
        self._running.append(name)
        try:
            yield
        finally:
            self._settle()
            self._running.pop()

    def each(self, name: str, items: Iterable) -> Iterator:
        """The items; making them is a stage, what is done with them between is not."""
        found, end = iter(items), object()
        while True:
            with self.of(name):
                item = next(found, end)
            if item is end:
                return
            yield item

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if self._running:
            add(self.seconds, {self._running[-1]: now - self._since})
        self._since = now


def add(total: dict[str, float], found: dict[str, float]) -> None:
    """Sums up, stage by stage."""
    for name, seconds in found.items():
        total[name] = total.get(name, 0.0) + seconds
