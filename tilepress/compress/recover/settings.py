"""Settings of recovery, and the memory that it takes with them."""

import re
from dataclasses import asdict, dataclass

from tilepress.compress.run.plan import Inputs
from tilepress.compress.run.targets import Target
from tilepress.formats import UsageError, check_kinds
from tilepress.formats.checkpoint import Checkpoint
from tilepress.text import Text

TRAIN = ("kept", "norms", "all")
_MICRO_TOKENS = 16384  # that run at a time unless --micro-batch says otherwise
HELD_OUT = 16  # windows at most, to say what training brought
_LAYER = re.compile(r"\.\d+\.")  # in the name of a decoder layer's tensor
KEPT_ACTIVATIONS = 4 << 30  # bytes; layers that would keep more for the way back compute it again
_MOST = 1 << 24  # steps or windows: more would take years


@dataclass(frozen=True)
class Settings:
    """Settings of a training run. Raises UsageError for a setting that makes no sense."""

    steps: int  # of training; with `blocks` for each layer
    batch: int = 16  # windows of a step
    micro_batch: int | None = None  # windows at a time; None: what 16,384 tokens hold
    lr: float | None = None  # at its peak; None: by the model's width
    hidden_loss: float = 1.0  # weight of the hidden states' error beside the divergence
    train: str = "all"  # kept | norms | all
    blocks: bool = False  # one decoder layer after the other, in the memory of one
    noise: float = 0.0  # share of input tokens that others of the text replace, for both models

    def __post_init__(self):
        check_kinds(self)
        for name, value, least in (
            ("steps", self.steps, 1),
            ("batch", self.batch, 1),
            ("micro-batch", 1 if self.micro_batch is None else self.micro_batch, 1),
        ):
            if not least <= value <= _MOST:
                raise UsageError(
                    f"--{name} {value} is too {'small' if value < least else 'many'}", f"use {least} to {_MOST:,}"
                )
        if self.lr is not None and not 0 < self.lr < 1:
            raise UsageError(f"--lr {self.lr:g} is not between 0 and 1", "leave it out, or try 0.0003")
        if not 0 <= self.hidden_loss < float("inf"):
            raise UsageError(f"--hidden-loss {self.hidden_loss:g} is no weight", "0 leaves hidden states out")
        if not 0 <= self.noise < 1:
            raise UsageError(f"--noise {self.noise:g} is no share below 1", "0.05 replaces a token in twenty")
        if self.train not in TRAIN:
            raise UsageError(f"--train {self.train} is unknown", f"choose one of {', '.join(TRAIN)}")

    def tokens(self, text: Text) -> int:
        """Return the tokens that training sees; block by block those that each layer sees."""
        return self.steps * self.batch * text.seqlen

    def windows_at_once(self, text: Text) -> int:
        """Return how many windows run at a time."""
        return self.micro_batch or max(1, min(self.batch, _MICRO_TOKENS // text.seqlen))

    def described(self, text: Text) -> dict:
        """Return the settings and the text's, as the manifest has them."""
        words = text.described() | asdict(self)
        names = "steps dataset seqlen seed batch micro_batch lr hidden_loss train blocks nsamples noise bos"
        return {name: words[name] for name in names.split() if name in words}

    def peak_lr(self, width: int) -> float:
        """Falls with the width of the model: Yang et al. 2022 (arXiv 2203.03466); the constant is measured, docs/recovery.md."""
        return self.lr or min(0.5 / width, 2e-3)


def hidden_size(checkpoint: Checkpoint, targets: list[Target]) -> int:
    config = checkpoint.text_config
    return config.get("hidden_size") or config.get("n_embd") or max(target.cols for target in targets)


def layer_count(checkpoint: Checkpoint) -> int:
    config = checkpoint.text_config
    return config.get("num_hidden_layers") or config.get("n_layer") or 1


def activation_bytes(checkpoint: Checkpoint, targets: list[Target], tokens: int, recomputed: bool) -> int:
    """Return what the way back needs of `tokens` that run at a time, about: float32 inputs and outputs of linear layers, norms and products."""
    layers = layer_count(checkpoint)
    inside = 4 * tokens * sum(2 * target.rows + target.cols for target in targets) // layers
    boundaries = 2 * 4 * tokens * hidden_size(checkpoint, targets) * layers  # of both models
    return boundaries + (inside if recomputed else inside * layers)


def keeps_activations(checkpoint: Checkpoint, targets: list[Target], tokens: int, room: int = 0) -> bool:
    """Return whether layers keep what the way back needs, or compute it again; they may fill `room` bytes."""
    return activation_bytes(checkpoint, targets, tokens, False) <= max(KEPT_ACTIVATIONS, room)


def memory_bytes(inputs: Inputs, targets: list[Target], settings: Settings, way: str, device: str) -> int:
    """Estimate the device memory of training, in bytes, for the whole model or block by block.

    Torch's own memory is left out.
    """
    checkpoint, text = inputs.checkpoint, inputs.text
    kept = sum(target.elements for target in targets)
    entries = [entry for name, entry in checkpoint.tensors.items() if name not in {t.name for t in targets}]
    parts = {entry.name for t in targets for entry in t.weight.entries}
    inside, outside = (
        sum(
            entry.nbytes // entry.dtype.itemsize
            for entry in entries
            if entry.name not in parts and entry.dtype.is_floating_point and bool(_LAYER.search(entry.name)) == within
        )
        for within in (True, False)
    )  # of other tensors, fused experts among them: in decoder layers and not
    compute = 2 if device == "cuda" else 4
    trains = 4 + 4 + 8  # the weight, its gradient, two moments
    others = trains if settings.train == "all" else 4
    casts = 2 if device == "cuda" else 0  # of autocast
    if way == "model":
        vocabulary = checkpoint.text_config.get("vocab_size") or 0
        tokens = settings.windows_at_once(text) * text.seqlen
        logits = tokens * vocabulary * 3 * compute
        rows = 4 * 4 * min(2048, tokens) * vocabulary
        keeps = keeps_activations(checkpoint, targets, tokens)
        activations = activation_bytes(checkpoint, targets, tokens, not keeps)
        weights = kept * (trains + 1 + casts + compute) + (inside + outside) * (others + casts + compute)
        return weights + activations + logits + rows
    layers = layer_count(checkpoint)
    layer = (kept * (trains + 1 + casts) + inside * (others + casts)) // layers
    activations = activation_bytes(checkpoint, targets, text.seqlen, False) // layers
    windows = min(text.nsamples, settings.steps * settings.batch) + HELD_OUT
    hidden = 3 * windows * text.seqlen * hidden_size(checkpoint, targets) * targets[0].dtype.itemsize
    return layer + outside * (4 + compute) + activations + (hidden if device == "cpu" else 0)
