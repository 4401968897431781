"""What ops work out about their arguments once: checks and choices take longer than a launch, and the same arguments come again and again."""

import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor, contiguous_format

_MOST = 4096  # kinds of arguments that a thread keeps
Fact = TypeVar("Fact")


_ops: "weakref.WeakSet[Planned]" = weakref.WeakSet()


def forget_plans() -> None:
    """Forget this thread's plans of all ops: for who changes what they were made of."""
    for op in _ops:
        op._local.__dict__.clear()


class Planned:
    """An op on a card. `plan(*arguments)` checks them, chooses, and returns what runs the op for all arguments that are alike: tensors in all but their
    numbers and addresses, everything else equal. It must ask for nothing more; of addresses it may ask for their remainder by 128. What it raises is raised
    again. Each thread has plans of its own, as it has launches."""

    def __init__(self, plan: Callable[..., Callable]):
        self._plan, self._local = plan, threading.local()
        _ops.add(self)

    def __call__(self, *arguments):
        kind = tuple(
            [
                (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 128) if isinstance(x, Tensor) else x
                for x in arguments
            ]
        )
        run = self._local.__dict__.get(kind)
        return (self._planned(kind, arguments) if run is None else run)(*arguments)

    def _planned(self, kind: tuple, arguments: tuple) -> Callable:
        if len(self._local.__dict__) >= _MOST:
            self._local.__dict__.clear()
        run = self._local.__dict__[kind] = self._plan(*arguments)
        return run


def gathering(op: Callable, scattered: list[int]) -> Callable:
    """Return what runs an op with copies of some of its arguments, whose elements follow one another."""

    def run(*arguments):
        return op(*(x.clone(memory_format=contiguous_format) if i in scattered else x for i, x in enumerate(arguments)))

    return run


class OfTensors(Generic[Fact]):
    """Keeps a fact about each of some tensors while that lives, by identity: in a tenth of the time that torch.utils.weak takes."""

    def __init__(self):
        self._kept: dict[int, tuple[weakref.ref, Fact]] = {}

    def get(self, tensor: Tensor) -> Fact | None:
        kept = self._kept.get(id(tensor))
        return None if kept is None else kept[1]

    def keep(self, tensor: Tensor, fact: Fact) -> None:
        number = id(tensor)
        known = self._kept.get(number)
        forget = weakref.ref(tensor, lambda _: self._kept.pop(number, None)) if known is None else known[0]
        self._kept[number] = forget, fact
