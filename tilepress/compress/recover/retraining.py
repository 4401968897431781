"""Two ways to train what pruning left of a model until it does again what the dense model did.

`train_model` runs both models whole: every kept weight sees the gradient of the loss at the model's end. It needs about 21 bytes a parameter.
`BlockTrainer` has one decoder layer of each in memory: the pruned layer, fed with what the recovered layers before it make, is trained to give the
dense layer's output on the dense path, so that it also makes up for what came before (EBFT: Guo et al. 2024, arXiv 2402.12419, there with the layer's
own inputs). Hidden states of all windows lie on the CPU.

Both read windows of one stream of tokens, of which the end is held out to say what training brought.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from tilepress.compress.layers.layerwise import LayerByLayer
from tilepress.compress.layers.walk import Layer, Visitor, write_tensors
from tilepress.compress.prune.layer_pruning import rounded
from tilepress.compress.recover.distillation import (
    MaskedAdamW,
    SavedState,
    divergence,
    fit,
    outputs_of,
    recompute,
    relative_error,
)
from tilepress.compress.recover.settings import HELD_OUT
from tilepress.compress.recover.sharded import Spread, gathered, own
from tilepress.compress.run.plan import Plan, Progress
from tilepress.compress.run.targets import Target
from tilepress.formats import TilepressError, UsageError
from tilepress.ranks import ALONE, Ranks

Start = Callable[[Target], Tensor]  # a target's pruned weight, the way round that the model stores it
STATE = "training.safetensors"  # the state of the whole model's training, in the work folder
TENSORS = "recovered.safetensors"  # the whole model's trained tensors, there too
_DENSE = "dense"  # the teacher's stream
_CURVE = 20  # losses that the manifest keeps


@dataclass(frozen=True)
class Training:
    """Settings of the training itself."""

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
        """Return the windows of a step, [count, seqlen]."""
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
    """Return a generator seeded with a number of any size: torch takes 64 bits."""
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
        """Give the student the pruned weights."""
        for target in targets:
            weight = self.start(target)
            self.student.model.get_submodule(self.student.module_of[target.name]).weight.data.copy_(weight)

    def trained(self, train: str, inside: str = "") -> dict[str, nn.Parameter]:
        """Return the parameters to train, by stored name."""
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
        """Return the parameters under every stored name that they have: a tied output head may be stored too."""
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
    keeps_activations: Callable[[int], bool],
    folder: Path,
    identity: str,
    progress: Progress,
    spread: Spread,
) -> dict:
    """Train the whole student; its tensors, in `dtypes` by stored name, go to `folder`. Returns what the manifest says of it.

    `keeps_activations` tells whether what the way back needs may stay in so much room of a card. Ranks share the windows of a step. Each has
    both models, or its part of both where these are spread."""
    layers, ranks = pair.student.layers, spread.ranks
    progress("loading both models", 0)
    student, teacher = spread.load(pair.student, targets, pair.put), spread.load(pair.teacher)
    parameters = pair.trained(training.train)
    if not keeps_activations(_room(student, parameters, training.micro_batch * stream.held_out.shape[1])):
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
        ids, total = stream.batch(step, training.batch), torch.zeros((), device=pair.student.device)
        for part in ids[ranks.rank :: ranks.size].split(training.micro_batch):
            kl, hidden = losses_of(part)
            loss = (kl + training.hidden_loss * hidden) * (len(part) / len(ids))
            (loss * ranks.size if spread.on else loss).backward()  # a spread model's gradients are means over ranks
            total = total + loss.detach()
        return ranks.sum(total) if spread.on else _of_all(total, parameters, ranks)

    @torch.no_grad()
    def held_out() -> float:
        parts = stream.held_out.split(training.micro_batch)
        if spread.on:  # ranks run as many windows as one another, or they would wait for ever
            return sum(float(losses_of(part)[0]) * len(part) for part in parts) / stream.held
        return sum(ranks.tell(sum(float(losses_of(part)[0]) * len(part) for part in ranks.mine(parts)))) / stream.held

    def told(steps: int, loss: float) -> None:
        progress(f"step {optimizer.done} of {training.steps}, loss {loss:.4f}", steps * unit)

    unit = sum(target.elements for target in targets)
    before = held_out()
    optimizer = MaskedAdamW(parameters, training.peak_lr, training.steps)
    saved = SavedState(folder / STATE, identity, training.save_every_s, ranks)
    losses = fit(optimizer, backward, saved, told)
    _round(parameters, dtypes)
    after = held_out()
    tensors = gathered(_stored(pair.same_memory(parameters), dtypes).items(), ranks)
    if not ranks.rank:
        write_tensors(folder / TENSORS, tensors)
    return {"kl_before": before, "kl_after": after, "losses": thinned(losses)} | _counts(parameters, ranks, spread.on)


class BlockTrainer(Visitor):
    """Trains layer after layer; the last `held` windows are held out. Tensors are the trained ones by their stored names.

    The walk's hidden states are the recovered student's; a second stream is the dense teacher's."""

    doing = "recovering"
    reports = True

    def __init__(
        self, pair: Pair, targets: list[Target], held: int, training: Training, dtypes: dict[str, torch.dtype]
    ):
        self.pair, self.targets, self.held, self.training, self.dtypes = pair, targets, held, training, dtypes
        self.dtype = next(iter(dtypes.values()))

    def model(self, plan: Plan, device: str) -> LayerByLayer:
        return self.pair.student

    def start(self, model: LayerByLayer, windows: list[list[int]], streams: dict[str, list[Tensor]]) -> None:
        inside = {target.name for found in model.targets_of.values() for target in found}
        self.pair.put([target for target in self.targets if target.name not in inside])
        teacher = self.pair.teacher
        streams[_DENSE] = [teacher.embed(torch.tensor(window)).to(self.dtype) for window in windows]

    def visit(self, layer: Layer) -> tuple[dict[str, list], dict[str, Tensor]]:
        with self._loaded(layer) as parameters:
            counts = _counts(parameters)
            errors = _train_block(self, layer, parameters)
            tensors = {} if layer.ranks.rank else _stored(parameters, self.dtypes)  # all ranks have the same
            return {"layers": [{"layer": layer.path} | errors], "counts": [counts]}, tensors

    def skip(self, layer: Layer, tensors: dict[str, Tensor]) -> None:
        with self._loaded(layer) as parameters, torch.no_grad():
            for name, tensor in tensors.items():
                parameters[name].copy_(tensor)

    def finish(self, facts: dict, streams: dict[str, list[Tensor]]) -> dict:
        counts = facts.pop("counts")
        facts |= {key: sum(found[key] for found in counts) for key in counts[0]}
        worse = [told["layer"] for told in facts["layers"] if told["error_after"] >= told["error_before"]]
        facts["warnings"] += [in_vain(layer) for layer in worse]
        return facts

    def units(self, layer: Layer) -> int:
        return self.training.steps * layer.elements

    @contextmanager
    def _loaded(self, layer: Layer) -> Iterator[dict[str, nn.Parameter]]:
        """Take the dense stream through the layer, then load the pruned one; in the end its stream goes through what was made of it."""
        layer.progress(f"the dense {layer.path}", 0)
        teacher = replace(layer, model=self.pair.teacher)
        with teacher.model.loaded(layer.path):
            teacher.advance(_DENSE)
        with layer.model.loaded(layer.path):
            self.pair.put(layer.model.targets_of[layer.path])  # also if it is skipped: a recipe may count on its order
            yield self.pair.trained(self.training.train, f"{layer.path}.")
            with self.pair.autocast:
                layer.advance()


def _train_block(trainer: BlockTrainer, layer: Layer, parameters: dict[str, nn.Parameter]) -> dict[str, float]:
    """Train a loaded layer to make the dense stream's states of its inputs; return its errors on what is held out."""
    training, pair, wanted, ranks = trainer.training, trainer.pair, layer.streams[_DENSE], layer.ranks
    count = len(
        ranks.mine(layer.lengths[: len(layer.lengths) - trainer.held])
    )  # of this rank's windows; others are held out
    order = _orders(count, (training.seed << 24) + (layer.number << 12))
    optimizer = MaskedAdamW(parameters, training.peak_lr, training.steps)

    def loss_of(number: int, grad: bool) -> Tensor:
        with pair.autocast:
            out = layer.model.run(layer.path, layer.hidden[number], grad=grad)
        return relative_error(out, wanted[number].to(out.device))

    def held_out() -> float:
        total = sum(float(loss_of(number, False)) for number in range(count, len(layer.hidden)))
        return sum(ranks.tell(total)) / trainer.held

    def backward(step: int) -> Tensor:
        total = torch.zeros((), device=pair.student.device)
        for at in range(step * training.batch, (step + 1) * training.batch):
            if at % ranks.size == ranks.rank:
                loss = loss_of(order(at // ranks.size), True) / training.batch
                loss.backward()
                total = total + loss.detach()
        return _of_all(total, parameters, ranks)

    def told(steps: int, loss: float) -> None:
        what = f"{layer.path}: step {optimizer.done} of {training.steps}, error {loss:.4f}"
        layer.progress(what, steps * layer.elements)

    before = held_out()
    fit(optimizer, backward, SavedState(layer.scratch, layer.scratch.name, training.save_every_s, ranks), told)
    _round(parameters, trainer.dtypes)
    return {"error_before": before, "error_after": held_out()}


def _room(student: nn.Module, parameters: dict[str, nn.Parameter], tokens: int) -> int:
    """Return how many bytes of a card are free beside what training takes for the weights and the logits of so many tokens."""
    device = next(iter(parameters.values())).device
    if device.type != "cuda":
        return 0
    weights = 16 * sum(
        own(parameter.detach()).numel() for parameter in parameters.values()
    )  # gradients, moments, casts and masks
    logits = 12 * tokens * student.get_input_embeddings().num_embeddings
    return int(0.9 * torch.cuda.mem_get_info(device)[0]) - weights - logits


def _of_all(loss: Tensor, parameters: dict[str, nn.Parameter], ranks: Ranks) -> Tensor:
    """Add up a step's gradients over the ranks, in place; return the loss of all."""
    if ranks.size > 1:
        for parameter in parameters.values():
            if parameter.grad is None:  # an expert that got none of this rank's tokens
                parameter.grad = torch.zeros_like(parameter)
        ranks.sum_each([parameter.grad for parameter in parameters.values()])
    return ranks.sum(loss)


def _orders(count: int, seed: int) -> Callable[[int], int]:
    """Return a function for the n-th of the numbers below `count` in a random order, and then in another."""
    epochs: dict[int, list[int]] = {}

    def at(number: int) -> int:
        epoch, place = divmod(number, count)
        if epoch not in epochs:
            epochs.clear()
            epochs[epoch] = torch.randperm(count, generator=seeded(seed + epoch)).tolist()
        return epochs[epoch][place]

    return at


@torch.no_grad()
def _round(parameters: dict[str, nn.Parameter], dtypes: dict[str, torch.dtype]) -> None:
    """Round parameters to what the artifact will hold, which is what is measured and what the next layer gets; nothing that was trained becomes zero.

    Raises TilepressError for values that are not finite, or not in that dtype."""
    for name, parameter in parameters.items():
        rows = own(parameter.detach())
        if not rows.numel():  # a rank without a row of a small tensor
            continue
        if not bool(torch.isfinite(rows.to(dtypes[name])).all()):
            raise TilepressError(f"{name} has values that are not finite after training", "try a smaller --lr")
        rows.copy_(rounded(rows, dtypes[name], name))


def _stored(parameters: dict[str, nn.Parameter], dtypes: dict[str, torch.dtype]) -> dict[str, Tensor]:
    return {name: parameter.detach().to(dtypes[name]) for name, parameter in parameters.items()}


def _counts(parameters: dict[str, nn.Parameter], ranks: Ranks = ALONE, spread: bool = False) -> dict[str, int]:
    elements = sum(parameter.numel() for parameter in parameters.values())
    kept = sum(int(torch.count_nonzero(own(parameter.detach()))) for parameter in parameters.values())
    kept = sum(ranks.tell(kept)) if spread else kept
    return {"trained_parameters": kept, "zeros_held": elements - kept}


def in_vain(what: str) -> str:
    """Return the warning for what training did not bring nearer to the dense model."""
    return f"recovery did not bring {what} nearer to the dense one on text that was held out"


def thinned(losses: list[float]) -> list[float]:
    """Return at most 20 of the losses, evenly spread, the last one among them."""
    step = max(1, -(-len(losses) // _CURVE))
    return [round(loss, 6) for loss in losses[::-1][::step][::-1]]
