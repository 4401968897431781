"""A pruned decoder layer is trained, by itself and for a few steps, to give the dense layer's outputs.

The solvers fit one linear layer at a time to its own outputs. What the linear layers of a decoder layer can make up for together, through
softmax and activation, they do not see; gradients of the layer's output do (EBFT: Guo et al. 2024, arXiv 2402.12419). Masks stay. Inputs
come from the pruned layers before, and targets from the dense model, so a layer also makes up for those before it. The error of a token is
relative to its size in the residual stream. The end of the text is held out, and a layer that training does not improve there keeps what
the solver gave it.

Memory is the layer in float32 four times, its masks, and what the way back needs of TOKENS tokens (on a CPU: of a window).
"""

import math

import torch
from torch import Tensor, nn

from tilepress.compress.layers.walk import Layer
from tilepress.compress.layers.windows import apart, run_together, together
from tilepress.compress.recover.distillation import MaskedAdamW, relative_error, same_every_time

BATCH = 8  # windows of a step
TOKENS = {"cuda": 16384}  # of windows that run together; on a CPU each runs alone
HELD_OUT = 8  # windows at most, and a sixteenth of the text
PEAK = 0.5  # divided by the hidden size: the learning rate at its peak


def refit(layer: Layer, module: nn.Module, wanted: list[Tensor], steps: int) -> tuple[dict, dict[str, Tensor]]:
    """Train the weights of a loaded layer's targets that are not zero; return facts, and weights in float32 by module path.

    `wanted` are the outputs for the layer's hidden states. The module is as it was afterwards; no weights are returned where training did
    not help."""
    ranks, count = layer.ranks, _trained_on(layer)
    inputs, wanted = apart(layer.hidden), apart(wanted)
    parameters = {path: layer.model.model.get_submodule(path).weight for path in layer.names}
    kept = {path: parameter.detach().clone() for path, parameter in parameters.items()}
    room = TOKENS.get(layer.model.device.type, 0)
    room = room if room and run_together(layer.model, layer.path, layer.probe) else 0

    def loss_of(numbers: list[int], grad: bool) -> Tensor:
        hidden = torch.cat([inputs[i] for i in numbers])
        with torch.autocast("cuda", torch.bfloat16, enabled=layer.model.device.type == "cuda"):
            out = layer.model.run(layer.path, hidden, grad=grad)
        return relative_error(out, torch.cat([wanted[i] for i in numbers]).to(out.device))

    def error() -> float:
        """Return the mean error of the windows that are held out, or of all where none are."""
        every = range(count if count < len(inputs) else 0, len(inputs))
        found = sum(float(loss_of([i], False)) for i in every)
        found, windows = (sum(of) for of in zip(*ranks.tell((found, len(every))), strict=True))
        return found / windows

    module.float()
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    before = error()
    optimizer = MaskedAdamW(parameters, PEAK / inputs[0].shape[-1], steps)
    share = -(-BATCH // ranks.size)
    generator = torch.Generator().manual_seed(layer.number)
    order: list[int] = []
    with same_every_time():
        for _ in range(steps):
            while len(order) < share:
                order += torch.randperm(count, generator=generator).tolist()
            step, order = order[:share], order[share:]
            for numbers in together([inputs[i].shape[1] for i in step], room):
                loss = loss_of([step[number] for number in numbers], True)
                (loss * (len(numbers) / share / ranks.size)).backward()
            if ranks.size > 1:
                for parameter in parameters.values():
                    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                ranks.sum_each([parameter.grad for parameter in parameters.values()])
            optimizer.step()
            layer.progress(f"refitting {layer.path}", 0)
    after = error()
    found = {path: parameter.detach().clone() for path, parameter in parameters.items()}
    for path, parameter in parameters.items():
        parameter.requires_grad_(False)
        parameter.data.copy_(kept[path])
    module.to(layer.model.dtype)
    helped = math.isfinite(after) and after < before
    told = {"layer": layer.path, "error_before": round(before, 6), "error_after": round(after, 6)}
    return told, found if helped else {}


def _trained_on(layer: Layer) -> int:
    """Return how many of this rank's windows are trained on; others are held out."""
    windows = len(layer.lengths)
    held = min(HELD_OUT, windows // 16)
    return len(layer.ranks.mine(layer.lengths[: windows - held if windows - held >= layer.ranks.size else windows]))
