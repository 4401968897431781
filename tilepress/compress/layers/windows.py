"""Windows that run through a layer together: a card waits for launches where each runs alone.

What a layer gets beside the hidden states was recorded for one window (layerwise.py). It serves several of one length where the layer gives
for them what it gives for each; that is tried, not believed.
"""

import torch
from torch import Tensor

from tilepress.compress.layers.layerwise import LayerByLayer


def together(lengths: list[int], tokens: int) -> list[list[int]]:
    """Return the numbers of windows of these lengths, those of one length that follow each other together, as many as `tokens` holds."""
    found: list[list[int]] = []
    for number, length in enumerate(lengths):
        if found and lengths[found[-1][0]] == length and (len(found[-1]) + 1) * length <= tokens:
            found[-1].append(number)
        else:
            found.append([number])
    return found


def apart(stream: list[Tensor]) -> list[Tensor]:
    """Return the windows [1, tokens, hidden] of a stream in which several may be together, as views."""
    return [window[None] for hidden in stream for window in hidden]


def run_together(model: LayerByLayer, layer: str, probe: Tensor) -> bool:
    """Return whether a loaded layer gives of two windows at once what it gives of each; `probe` is one, [1, tokens, hidden]."""
    both = torch.cat([probe[:1], probe[:1].flip(1)])
    try:
        found = model.run(layer, both).float()
    except Exception:  # whatever an architecture raises for it
        return False
    each = torch.cat([model.run(layer, part[None]) for part in both]).float()
    near = 0.05 * each.abs() + 0.02 * each.abs().mean()
    return found.shape == each.shape and bool(((found - each).abs() <= near).all())
