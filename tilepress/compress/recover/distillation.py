"""Training with zeros that stay: what recovery of a whole model and of a single block share.

The loss is the Kullback-Leibler divergence of the student's next-token distribution from the dense model's (Hinton et al. 2015, arXiv
1503.02531, temperature 1, every position of every window, no labels) plus the relative error of the hidden states after each decoder layer
(SquareHead: Kurtic et al. 2023, arXiv 2310.06927, section 3), here normalized token by token, so that the few tokens with enormous
activations do not drown the others. AdamW without decay (a pull to zero is not a pull to the dense model), linear warm-up, cosine to zero.

Weights are float32 while they train, with two moments of the same size. A zero is held, whatever tensor it is in, by multiplying gradients and, after
each step, weights by a mask of the starting weight's non-zeros: it never changes, to the bit. State is written every few minutes; a run that goes on
from it does the same arithmetic as one that was never stopped.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tilepress.compress.layers.walk import metadata_of, write_tensors
from tilepress.compress.recover.sharded import gathered, like, own
from tilepress.formats import TilepressError
from tilepress.ranks import ALONE, Ranks

_ROWS = 2048  # of logits in float32 at a time
_LOOK_EVERY = 10  # steps between looks at the loss: each waits for the device
WARM_UP = 0.05  # of the steps
CLIP_NORM = 1.0


class _Divergence(torch.autograd.Function):
    """Mean KL(teacher || student); its gradient, (softmax(student) - softmax(teacher)) / rows, is made on the way in the student's dtype."""

    @staticmethod
    def forward(ctx, student: Tensor, teacher: Tensor) -> Tensor:
        total, grad = student.new_zeros((), dtype=torch.float32), torch.empty_like(student)
        for first in range(0, len(student), _ROWS):
            part = slice(first, first + _ROWS)
            q, p = torch.log_softmax(student[part].float(), -1), torch.log_softmax(teacher[part].float(), -1)
            expected = p.exp()
            total += (expected * p.sub_(q)).sum()
            grad[part] = q.exp_().sub_(expected).div_(len(student))
        ctx.save_for_backward(grad)
        return total / len(student)

    @staticmethod
    def backward(ctx, outer: Tensor):
        (grad,) = ctx.saved_tensors
        return grad * outer.to(grad.dtype), None


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean KL(teacher || student) over rows of logits [n, vocabulary], nats, float32; differentiable in `student`."""
    return _Divergence.apply(student, teacher)


def relative_error(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean over tokens of |student - teacher|^2 / |teacher|^2: hidden states [..., hidden] -> float32 scalar."""
    teacher = teacher.float()
    return ((student.float() - teacher).square().sum(-1) / teacher.square().sum(-1).clamp(min=1e-12)).mean()


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return the rate of step 0, 1, …: up in a line over the first twentieth, then down a half cosine to zero."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return peak * (step + 1) / warm
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm + 1) / (steps - warm + 1)))


class MaskedAdamW:
    """AdamW over named float32 parameters; they keep the zeros that they have now."""

    def __init__(self, parameters: dict[str, nn.Parameter], peak: float, steps: int):
        self.parameters, self.peak, self.steps, self.done = parameters, peak, steps, 0
        self._masked, self._masks = [], []
        for parameter in parameters.values():
            mask = own(parameter.detach()) != 0
            if not bool(mask.all()):
                self._masked.append(parameter)
                self._masks.append(mask)
        fused = all(parameter.is_cuda for parameter in parameters.values())
        self._adam = torch.optim.AdamW(
            parameters.values(), lr=peak, betas=(0.9, 0.98), weight_decay=0.0, fused=fused, foreach=not fused
        )

    def step(self) -> None:
        """Take a step with the gradients as they are, and drop them."""
        self._hold([parameter.grad for parameter in self._masked])
        nn.utils.clip_grad_norm_(self.parameters.values(), CLIP_NORM, foreach=True)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate(self.done, self.steps, self.peak)
        self._adam.step()
        self._hold([parameter.data for parameter in self._masked])
        self._adam.zero_grad(set_to_none=True)
        self.done += 1

    def _hold(self, tensors: list[Tensor | None]) -> None:
        for tensor, mask in zip(tensors, self._masks, strict=True):
            if tensor is not None:
                own(tensor).mul_(mask)

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that a step depends on beside the text."""
        found = {}
        for name, parameter in self.parameters.items():
            state = self._adam.state.get(parameter, {})
            found[f"weight:{name}"] = parameter.detach()
            found |= {f"{key}:{name}": state[key] for key in ("exp_avg", "exp_avg_sq", "step") if key in state}
        return found

    def load(self, names: set[str], read: Callable[[str], Tensor], done: int) -> None:
        """Go back to what `tensors` gave: their names, and a function that reads the whole of one."""
        self.done = done
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(like(read(f"weight:{name}"), parameter))
                keys = [key for key in ("exp_avg", "exp_avg_sq", "step") if f"{key}:{name}" in names]
                if state := {key: read(f"{key}:{name}") for key in keys}:
                    for key in ("exp_avg", "exp_avg_sq"):
                        state[key] = like(state[key], parameter)
                    if parameter.is_cuda:
                        state["step"] = state["step"].to(parameter.device)
                    self._adam.state[parameter] = state


class SavedState:
    """A file with the state of training, replaced every so many seconds; one of another identity counts as none."""

    def __init__(self, path: Path, identity: str, every_s: float, ranks: Ranks = ALONE):
        """Ranks that train together are in one state, which the first of them writes, by its clock."""
        self.path, self.identity, self.every_s, self.ranks = path, identity, every_s, ranks
        self._written = time.monotonic()

    def restore(self, optimizer: MaskedAdamW) -> list[float]:
        """Bring the optimizer to where the file is, if there is one; return the losses until then."""
        told = self.ranks.first(lambda: metadata_of(self.path))
        if told.get("identity") != self.identity:
            return []
        with safe_open(self.path, framework="pt") as file:
            optimizer.load(set(file.keys()), file.get_tensor, int(told["done"]))
        return [float.fromhex(loss) for loss in told["losses"].split()]

    def keep(self, optimizer: MaskedAdamW, losses: list[float]) -> None:
        if not self.ranks.first(lambda: time.monotonic() - self._written >= self.every_s):
            return
        told = {"identity": self.identity, "done": str(optimizer.done)}
        told["losses"] = " ".join(loss.hex() for loss in losses)
        tensors = gathered(optimizer.tensors().items(), self.ranks)
        if not self.ranks.rank:
            write_tensors(self.path, tensors, told)
        self._written = time.monotonic()


def fit(
    optimizer: MaskedAdamW, backward: Callable[[int], Tensor], saved: SavedState, progress: Callable[[int, float], None]
) -> list[float]:
    """Train to the end: `backward(step)` leaves gradients and returns the loss; `progress(steps done since the last call, loss)`.

    Returns a loss for each tenth step and the last, the mean of those since the one before. Raises TilepressError for one that is not finite.
    """
    losses = saved.restore(optimizer)
    if optimizer.done:
        progress(optimizer.done, losses[-1])
    pending: list[Tensor] = []
    while optimizer.done < optimizer.steps:
        pending.append(backward(optimizer.done).detach())
        optimizer.step()
        if optimizer.done % _LOOK_EVERY == 0 or optimizer.done == optimizer.steps:
            loss = float(torch.stack(pending).mean())
            if not math.isfinite(loss):
                raise TilepressError(
                    f"the loss is {loss} at step {optimizer.done} of {optimizer.steps}",
                    "try a smaller --lr; if it is the first step, check both models with `tilepress verify`",
                )
            losses.append(loss)
            progress(len(pending), loss)
            pending.clear()
            saved.keep(optimizer, losses)
    return losses


def recompute(module: nn.Module) -> None:
    """Let a decoder layer keep its input alone and compute the rest again on the way back (Chen et al. 2016, arXiv 1604.06174)."""
    forward = module.forward

    def run(*args, **kwargs):
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    module.forward = run


@contextlib.contextmanager
def outputs_of(model: nn.Module, layers: list[str]) -> Iterator[list[Tensor]]:
    """Collect the outputs of the layers in order, from each forward pass inside the context."""
    found: list[Tensor] = []

    def keep(_, args, output) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)

    handles = [model.get_submodule(path).register_forward_hook(keep) for path in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def same_every_time() -> Iterator[None]:
    """Use kernels whose sums have one order, where torch has them: on a card the backward pass of attention would differ from run to run.

    cuDNN's attention has none, so flash attention runs in its place."""
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled
