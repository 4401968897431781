"""A model's hidden states on their way through one decoder layer, which runs over them several times.

It runs for each of its inputs that is looked at, and once more for its outputs. Parts of the layer that have nothing left to prune need not run every
time: on the CPU their outputs are kept, for as long as the layer is worked on. That takes as much memory as the hidden states; a card would rather run.
"""

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn

from tilepress.compress.layerwise import LayerByLayer
from tilepress.formats.checkpoint import linear_shape


class Stream:
    """`hidden` [1, tokens, hidden] of every window, in a list that `advance` changes; `module` is the loaded layer or a twin of it."""

    def __init__(self, model: LayerByLayer, layer: str, module: nn.Module, hidden: list[Tensor]):
        self.model, self.layer, self.module, self.hidden = model, layer, module, hidden
        self.modules = dict(module.named_modules(prefix=layer))
        self._settled: list[str] = []
        self._kept: dict[tuple[str, int], Tensor | tuple] = {}  # outputs of settled children, by window

    def settle(self, changing: set[str]) -> None:
        """From now on the layer's children without any of these linear layers give the same in every run."""
        self._settled = [
            f"{self.layer}.{name}"
            for name, child in self.module.named_children()
            if self.model.device.type == "cpu"
            and any(linear_shape(inner) for inner in child.modules())
            and not any(_within(path, f"{self.layer}.{name}") for path in changing)
        ]

    def after(self, path: str, following: str) -> str:
        """Where to stop a run that is to see the input of `path`: there, or at the `following` linear layer if a settled child is complete by then."""
        complete = any(_within(path, child) and not _within(following, child) for child in self._settled)
        return following if complete else path

    def run(self, window: int) -> Tensor:
        """The layer's output for a window."""
        hidden = self.hidden[window]
        with self._reusing(window, hidden):
            return self.model.run(self.layer, hidden, self.module)

    def advance_one(self, window: int) -> None:
        self.hidden[window] = self.run(window).to(self.hidden[window].dtype)

    def advance(self) -> None:
        """Puts the layer's outputs in place of its inputs."""
        for window in range(len(self.hidden)):
            self.advance_one(window)

    @contextlib.contextmanager
    def _reusing(self, window: int, hidden: Tensor) -> Iterator[None]:
        for path in self._settled:
            child = self.modules[path]
            child.forward = self._once(child.forward, (path, window), hidden)
        try:
            yield
        finally:
            for path in self._settled:
                del self.modules[path].forward

    def _once(self, forward, key: tuple[str, int], hidden: Tensor):
        def once(*args, **kwargs):
            if key not in self._kept:
                out = forward(*args, **kwargs)
                if not _is_like(out, hidden):
                    return out
                self._kept[key] = out
            out = self._kept[key]
            return (out[0].clone(), *out[1:]) if isinstance(out, tuple) else out.clone()  # the layer may write into it

        return once


def _within(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")


def _is_like(out, hidden: Tensor) -> bool:
    """Whether an output is a tensor of the hidden states' shape, alone or in a tuple of nothing else."""
    first, *rest = out if isinstance(out, tuple) else (out,)
    return isinstance(first, Tensor) and first.shape == hidden.shape and all(other is None for other in rest)
