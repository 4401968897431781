"""What ops with many arguments find out about them once: a check takes longer than a launch, and the same arguments come again and again."""

from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor

_MOST = 4096  # kinds of arguments that are kept
Found = TypeVar("Found")


class Once(Generic[Found]):
    """Keeps what `look(*arguments)` returns for arguments that are alike: tensors in all but their numbers and addresses, everything else equal. `look` must
    ask for nothing more; of addresses it may ask for their remainder by 32. What it raises is raised again."""

    def __init__(self, look: Callable[..., Found]):
        self._look, self._found = look, {}

    def __call__(self, *arguments) -> Found:
        kind = tuple(
            [
                (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 32) if isinstance(x, Tensor) else x
                for x in arguments
            ]
        )
        found = self._found.get(kind)
        if found is None:
            if len(self._found) >= _MOST:
                self._found.clear()
            found = self._found[kind] = self._look(*arguments)
        return found
