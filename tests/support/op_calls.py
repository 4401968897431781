"""Which of our ops a model runs."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode


class Counted(TorchDispatchMode):
    """How often each of our ops ran."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "tilepress":
            self.calls[func._schema.name.removeprefix("tilepress::")] += 1
        return func(*args, **(kwargs or {}))
