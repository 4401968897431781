"""A model's hidden states on their way through one decoder layer, which runs over them several times.

The layer runs for each of its inputs that is looked at, and once more for its outputs. Parts of it that have nothing left to prune need not
run every time: on the CPU their outputs are kept for as long as the layer is worked on. A part that ends in a linear layer need not run for
that either, once that layer's input was looked at. Outputs take as much memory as the hidden states, inputs up to KEPT_BYTES; a card would
rather run.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from tilepress.compress.layers.layerwise import LayerByLayer
from tilepress.formats.checkpoint import linear_shape

KEPT_BYTES = 1 << 30  # at most, for the inputs of one linear layer


class Stream:
    """The hidden states [1, tokens, hidden] of every window, in a list that `advance` changes, before a loaded layer or a twin of it."""

    def __init__(self, model: LayerByLayer, layer: str, module: nn.Module, hidden: list[Tensor]):
        self.model, self.layer, self.module, self.hidden = model, layer, module, hidden
        self.modules = dict(module.named_modules(prefix=layer))
        self._settled: list[str] = []
        self._kept: dict[tuple[str, int], Tensor | tuple] = {}  # outputs of settled children, by window
        # The child whose output a linear layer's is, and what follows in the child's tuple.
        self._ends: dict[str, tuple[str, tuple | None]] = {}
        # What is left of a child's run once that linear layer's input was seen, by window.
        self._rest: dict[tuple[str, int], Callable[[], Tensor | tuple]] = {}

    @property
    def _children(self) -> list[str]:
        """The layer's children that have linear layers; none on a card, where nothing is kept."""
        return [
            f"{self.layer}.{name}"
            for name, child in self.module.named_children()
            if self.model.device.type == "cpu" and any(linear_shape(inner) for inner in child.modules())
        ]

    def settle(self, changing: set[str]) -> None:
        """Take it that the layer's children without any of these linear layers give the same in every run from now on."""
        self._settled = [child for child in self._children if not any(_within(path, child) for path in changing)]

    def find_ends(self, probe: Tensor) -> None:
        """Run the layer on hidden states to see which of its children end in a linear layer."""
        children = self._children
        if not children:
            return
        linears = [path for path, module in self.modules.items() if linear_shape(module)]
        calls: dict[str, list[tuple]] = {path: [] for path in {*children, *linears}}

        def keeper(path: str):
            return lambda _, args, out: calls[path].append((args, out))

        handles = [self.modules[path].register_forward_hook(keeper(path)) for path in calls]
        try:
            self.model.run(self.layer, probe, self.module)
        finally:
            for handle in handles:
                handle.remove()
        once = {path: found[0] for path, found in calls.items() if len(found) == 1}
        for child in set(children) & set(once):
            out = once[child][1]
            if not _is_like(out, probe):
                continue
            first, rest = (out[0], out[1:]) if isinstance(out, tuple) else (out, None)
            for path in set(linears) & set(once):
                (x, *_), last = once[path]
                # Equal too: what the child did to it in place afterwards would be missing.
                if _within(path, child) and last is first and torch.equal(self.modules[path](x), first):
                    self._ends[path] = child, rest

    def saw(self, path: str, window: int, x: Tensor) -> None:
        """Keep the input of a linear layer in which a child ends: from there the child can be run again while nothing else of it changes."""
        if path in self._ends and x.untyped_storage().nbytes() * len(self.hidden) <= KEPT_BYTES:
            child, rest = self._ends[path]
            self._rest[child, window] = partial(_finish, self.modules[path], x, rest)

    def after(self, path: str, following: str) -> str:
        """Return where to stop a run that is to see the input of `path`.

        That is there, or at the `following` linear layer if a settled child is complete by then."""
        complete = any(_within(path, child) and not _within(following, child) for child in self._settled)
        return following if complete else path

    def run(self, window: int) -> Tensor:
        """Return the layer's output for a window."""
        hidden = self.hidden[window]
        with self._reusing(window, hidden):
            return self.model.run(self.layer, hidden, self.module)

    def advance_one(self, window: int) -> None:
        self.hidden[window] = self.run(window).to(self.hidden[window].dtype)
        for child in self._settled:
            self._kept.pop((child, window), None)

    def advance(self) -> None:
        """Put the layer's outputs in place of its inputs; the layer changes no more."""
        self.settle(set())
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
                finish = self._rest.pop(key, None)
                out = forward(*args, **kwargs) if finish is None else finish()
                if not _is_like(out, hidden):
                    return out
                self._kept[key] = out
            out = self._kept[key]
            return (out[0].clone(), *out[1:]) if isinstance(out, tuple) else out.clone()  # the layer may write into it

        return once


def _finish(linear: nn.Module, x: Tensor, rest: tuple | None) -> Tensor | tuple:
    out = linear(x)
    return out if rest is None else (out, *rest)


def _within(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")


def _is_like(out, hidden: Tensor) -> bool:
    """Return whether an output is a tensor of the hidden states' shape, alone or in a tuple of nothing else."""
    first, *rest = out if isinstance(out, tuple) else (out,)
    return isinstance(first, Tensor) and first.shape == hidden.shape and all(other is None for other in rest)
