"""Two ways to train what pruning left of a model until it does again what the dense model did.

`train_model` runs both models whole: every kept weight sees the gradient of the loss at the model's end. It needs about 21 bytes a parameter.
`train_blocks` has one decoder layer of each in memory: the pruned layer, fed with what the recovered layers before it make, is trained to give the
dense layer's output on the dense path, so that it also makes up for what came before (EBFT: Guo et al. 2024, arXiv 2402.12419, there with the layer's
own inputs). Hidden states of all windows lie on the CPU.

Both read windows of one stream of tokens, of which the end is held out to say what training brought.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from tilepress.compress.layers.layerwise import LayerByLayer
from tilepress.compress.prune.layer_pruning import rounded
from tilepress.compress.recover.distillation import (
    MaskedAdamW,
    SavedState,
    divergence,
    fit,
    outputs_of,
    recompute,
    relative_error,
    write_tensors,
)
from tilepress.compress.recover.settings import HELD_OUT
from tilepress.compress.run.plan import Progress
from tilepress.compress.run.targets import Target
from tilepress.formats import TilepressError, UsageError

Start = Callable[[Target], Tensor]  # a target's pruned weight, the way round that the model stores it
STATE = "training.safetensors"  # of the whole model, in the work folder
_CURVE = 20  # losses that the manifest keeps


@dataclass(frozen=True)
class Training:
    """What of the settings concerns the training itself."""

    steps: int
    batch: int  # windows of a step
    micro_batch: int  # windows at a time
    peak_lr: float
    hidden_loss: float  # weight of the hidden states' error beside the divergence
    train: str  # kept | norms | all
    seed: int
    save_every_s: float


class Stream:
    """Windows [seqlen] of a token stream, cut anew from another offset and in another order whenever all were seen.

    Which windows a step gets depends on the seed and the step alone. The stream's end is held out.
    """

    def __init__(self, ids: list[int], start: list[int], seqlen: int, seed: int, noise: float = 0.0):
        """`start`: what the tokenizer puts before a text; `noise`: the share of tokens that others of the text replace, not in the held-out end.

        Raises UsageError for a text of less than two windows."""
        self.start = torch.tensor(start, dtype=torch.long)
        self.span, self.seed, self.noise = seqlen - len(start), seed, noise
        whole = len(ids) // self.span
        if whole < 2:
            raise UsageError(
                f"the text has {len(ids):,} tokens: recovery with windows of {seqlen} needs at least {2 * self.span:,}",
                "give more text (--dataset) or a smaller --seqlen",
            )
        self.held = min(HELD_OUT, max(1, whole // 32))
        stream = torch.tensor(ids, dtype=torch.long)
        self.ids, end = stream[: len(ids) - self.held * self.span], stream[len(ids) - self.held * self.span :]
        self.held_out = self._with_start(end.view(self.held, self.span))
        self.per_epoch = max(len(self.ids) // self.span - 1, 1)
        self._slack = min(self.span, len(self.ids) - self.per_epoch * self.span + 1)
        self._epoch: tuple[int, Tensor] | None = None

    def batch(self, step: int, count: int) -> Tensor:
        """[count, seqlen]"""
        starts = torch.stack([self._first(number) for number in range(step * count, (step + 1) * count)])
        at = starts.to(self.ids.device)[:, None] + torch.arange(self.span, device=self.ids.device)
        rows = self.ids[at]
        if self.noise:
            generator = seeded((self.seed << 32) + step)
            replaced = torch.rand(rows.shape, generator=generator) < self.noise
            others = torch.randint(len(self.ids), rows.shape, generator=generator)
            rows = torch.where(replaced.to(rows.device), self.ids[others.to(rows.device)], rows)
        return self._with_start(rows)

    def to(self, device: torch.device) -> "Stream":
        self.start, self.ids, self.held_out = (t.to(device) for t in (self.start, self.ids, self.held_out))
        return self

    def _first(self, number: int) -> Tensor:
        epoch, place = divmod(number, self.per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            generator = seeded((self.seed << 24) + epoch)
            offset = torch.randint(self._slack, (1,), generator=generator)
            self._epoch = epoch, offset + self.span * torch.randperm(self.per_epoch, generator=generator)
        return self._epoch[1][place]

    def _with_start(self, rows: Tensor) -> Tensor:
        return torch.cat([self.start.expand(len(rows), -1), rows], 1)


def seeded(number: int) -> torch.Generator:
    """Of a number of any size: torch takes 64 bits."""
    return torch.Generator().manual_seed(number % (1 << 64))


@dataclass
class Pair:
    """The model that is trained, in float32, and the dense one, in the dtype that it computes in."""

    student: LayerByLayer
    teacher: LayerByLayer
    start: Start

    @property
    def autocast(self):
        """bfloat16 products on a card; on the CPU everything is in float32."""
        card = self.student.device.type == "cuda"
        return torch.autocast("cuda", torch.bfloat16) if card else nullcontext()

    def put(self, targets: list[Target]) -> None:
        """Gives the student the pruned weights."""
        for target in targets:
            weight = self.start(target)
            self.student.model.get_submodule(self.student.module_of[target.name]).weight.data.copy_(weight)

    def trained(self, train: str, inside: str = "") -> dict[str, nn.Parameter]:
        """The parameters to train, by stored name."""
        student, found = self.student, {}
        targets = {f"{path}.weight" for path in student.module_of.values()}
        for path, parameter in student.model.named_parameters():
            stored = student.stored.get(path)
            kept, small = path in targets, parameter.dim() < 2
            chosen = kept or train == "all" or (small and train == "norms")
            if stored and chosen and path.startswith(inside) and parameter.device.type != "meta":
                found[stored] = parameter.requires_grad_(True)
        return found

    def same_memory(self, parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """The parameters under every stored name that they have: a tied output head may be stored too."""
        names = {id(parameter): name for name, parameter in parameters.items()}
        for path, parameter in self.student.model.named_parameters(remove_duplicate=False):
            stored = self.student.stored.get(path)
            if stored and id(parameter) in names:
                parameters = parameters | {stored: parameter}
        return parameters


def train_model(
    pair: Pair,
    targets: list[Target],
    stream: Stream,
    training: Training,
    dtypes: dict[str, torch.dtype],
    keeps_activations: bool,
    folder: Path,
    identity: str,
    progress: Progress,
) -> dict:
    """Trains the whole student; its tensors, in `dtypes` by stored name, go to `folder`. Returns what the manifest says of it."""
    layers = pair.student.layers
    progress("loading both models", 0)
    student, teacher = pair.student.load_all(), pair.teacher.load_all()
    pair.put(targets)
    parameters = pair.trained(training.train)
    if not keeps_activations:
        for layer in layers:
            recompute(student.get_submodule(layer))

    def losses_of(ids: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), outputs_of(teacher, layers) as wanted:
            expected = teacher(ids, use_cache=False).logits.flatten(0, 1)
        with pair.autocast, outputs_of(student, layers) as found:
            logits = student(ids, use_cache=False).logits.flatten(0, 1)
        hidden = torch.stack([relative_error(*both) for both in zip(found, wanted, strict=True)]).mean()
        return divergence(logits, expected), hidden

    def backward(step: int) -> Tensor:
        ids, total = stream.batch(step, training.batch), 0.0
        for part in ids.split(training.micro_batch):
            kl, hidden = losses_of(part)
            loss = (kl + training.hidden_loss * hidden) * (len(part) / len(ids))
            loss.backward()
            total = total + loss.detach()
        return total

    @torch.no_grad()
    def held_out() -> float:
        parts = stream.held_out.split(training.micro_batch)
        return sum(float(losses_of(part)[0]) * len(part) for part in parts) / stream.held

    def told(steps: int, loss: float) -> None:
        progress(f"step {optimizer.done} of {training.steps}, loss {loss:.4f}", steps * unit)

    unit = sum(target.elements for target in targets)
    before = held_out()
    optimizer = MaskedAdamW(parameters, training.peak_lr, training.steps)
    saved = SavedState(folder / STATE, identity, training.save_every_s)
    losses = fit(optimizer, backward, saved, told)
    _round(parameters, dtypes)
    after = held_out()
    write_tensors(folder / "recovered-0.safetensors", _stored(pair.same_memory(parameters), dtypes))
    return {"kl_before": before, "kl_after": after, "losses": thinned(losses)} | _counts(parameters)


def train_blocks(
    pair: Pair,
    targets: list[Target],
    windows: list[Tensor],
    held: int,
    training: Training,
    dtypes: dict[str, torch.dtype],
    folder: Path,
    identity: str,
    progress: Progress,
) -> dict:
    """Trains layer after layer on `windows` [tokens], the last `held` of them held out; each layer's tensors are a file in `folder`."""
    student, teacher = pair.student, pair.teacher
    inside = {target.name for found in student.targets_of.values() for target in found}
    pair.put([target for target in targets if target.name not in inside])
    stored = next(iter(dtypes.values()))
    wanted = [teacher.embed(window).to(stored) for window in windows]
    hidden = [student.embed(window).to(stored) for window in windows]
    facts, counts = [], {"trained_parameters": 0, "zeros_held": 0}
    for number, layer in enumerate(student.layers):
        progress(f"the dense {layer}", 0)
        with teacher.loaded(layer):
            wanted = [teacher.run(layer, h).to(stored).cpu() for h in wanted]
        file = folder / f"recovered-{number}.safetensors"
        with student.loaded(layer) as module:
            pair.put(student.targets_of[layer])  # of a finished layer too: a recipe may count on its order
            parameters = pair.trained(training.train, f"{layer}.")
            found = _counts(parameters)
            counts = {key: counts[key] + found[key] for key in counts}
            saved = SavedState(folder / f"training-{number}.safetensors", f"{identity} {number}", training.save_every_s)
            told = _finished(file, saved.identity)
            if told is None:
                block = _Block(pair, layer, hidden, wanted, held)
                told = _train_block(block, number, parameters, training, dtypes, saved, progress)
                told = {key: value.hex() for key, value in told.items()} | {"identity": saved.identity}
                write_tensors(file, _stored(parameters, dtypes), told)
                saved.path.unlink(missing_ok=True)
            else:
                progress(f"{layer} is done", training.steps * sum(t.elements for t in student.targets_of[layer]))
                with torch.no_grad():
                    for name, tensor in load_file(file).items():
                        parameters[name].copy_(tensor)
            del parameters
            hidden = [_run(pair, layer, h).to(stored).cpu() for h in hidden]
            del module
        facts.append({"layer": layer} | {key: float.fromhex(told[key]) for key in ("error_before", "error_after")})
    return {"layers": facts} | counts


@dataclass
class _Block:
    """A decoder layer with its inputs and what they should become; the last `held` of them are not trained on."""

    pair: Pair
    layer: str
    hidden: list[Tensor]
    wanted: list[Tensor]
    held: int

    def loss(self, number: int, grad: bool) -> Tensor:
        out = _run(self.pair, self.layer, self.hidden[number], grad)
        return relative_error(out, self.wanted[number].to(out.device))

    def held_out(self) -> float:
        numbers = range(len(self.hidden) - self.held, len(self.hidden))
        return sum(float(self.loss(number, False)) for number in numbers) / self.held


def _run(pair: Pair, layer: str, hidden: Tensor, grad: bool = False) -> Tensor:
    with pair.autocast:
        return pair.student.run(layer, hidden, grad=grad)


def _train_block(
    block: _Block,
    number: int,
    parameters: dict[str, nn.Parameter],
    training: Training,
    dtypes: dict[str, torch.dtype],
    saved: SavedState,
    progress: Progress,
) -> dict[str, float]:
    count = len(block.hidden) - block.held
    order = _orders(count, (training.seed << 24) + (number << 12))
    units = sum(target.elements for target in block.pair.student.targets_of[block.layer])
    optimizer = MaskedAdamW(parameters, training.peak_lr, training.steps)

    def backward(step: int) -> Tensor:
        total = 0.0
        for at in range(step * training.batch, (step + 1) * training.batch):
            loss = block.loss(order(at), True) / training.batch
            loss.backward()
            total = total + loss.detach()
        return total

    def told(steps: int, loss: float) -> None:
        progress(f"{block.layer}: step {optimizer.done} of {training.steps}, error {loss:.4f}", steps * units)

    before = block.held_out()
    fit(optimizer, backward, saved, told)
    _round(parameters, dtypes)
    return {"error_before": before, "error_after": block.held_out()}


def _orders(count: int, seed: int) -> Callable[[int], int]:
    """Numbers below `count` in a random order, and then in another: the n-th of them."""
    epochs: dict[int, list[int]] = {}

    def at(number: int) -> int:
        epoch, place = divmod(number, count)
        if epoch not in epochs:
            epochs.clear()
            epochs[epoch] = torch.randperm(count, generator=seeded(seed + epoch)).tolist()
        return epochs[epoch][place]

    return at


def _finished(file: Path, identity: str) -> dict[str, str] | None:
    try:
        with safe_open(file, framework="pt") as opened:
            told = opened.metadata() or {}
    except (OSError, SafetensorError):
        return None
    return told if told.get("identity") == identity else None


@torch.no_grad()
def _round(parameters: dict[str, nn.Parameter], dtypes: dict[str, torch.dtype]) -> None:
    """To what the artifact will hold, which is what is measured and what the next layer gets; nothing that was trained becomes zero.

    Raises TilepressError for values that are not finite, or not in that dtype."""
    for name, parameter in parameters.items():
        if not bool(torch.isfinite(parameter.to(dtypes[name])).all()):
            raise TilepressError(f"{name} has values that are not finite after training", "try a smaller --lr")
        parameter.copy_(rounded(parameter, dtypes[name], name))


def _stored(parameters: dict[str, nn.Parameter], dtypes: dict[str, torch.dtype]) -> dict[str, Tensor]:
    return {name: parameter.detach().to(dtypes[name]) for name, parameter in parameters.items()}


def _counts(parameters: dict[str, nn.Parameter]) -> dict[str, int]:
    elements = sum(parameter.numel() for parameter in parameters.values())
    kept = sum(int(torch.count_nonzero(parameter)) for parameter in parameters.values())
    return {"trained_parameters": kept, "zeros_held": elements - kept}


def thinned(losses: list[float]) -> list[float]:
    """At most 20 of them, evenly spread, the last one among them."""
    step = max(1, -(-len(losses) // _CURVE))
    return [round(loss, 6) for loss in losses[::-1][::step][::-1]]
