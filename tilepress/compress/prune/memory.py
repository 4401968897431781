"""Memory that pruning with calibration text takes on a CPU, estimated from the headers alone for `--dry-run`.

Three times in a run may be the highest: when an allocation surveys the dense model (survey.py), when layers are pruned (layer_pruning.py),
and when the result is written. Each is a sum of what is held together there, and the largest of what comes one after the other. With
bfloat16 matrix units oneDNN also compiles and keeps a kernel for every number of tokens that an expert gets.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from tilepress.compress.layers.stream import KEPT_BYTES
from tilepress.compress.layers.walk import compute_dtype
from tilepress.compress.prune.settings import Settings
from tilepress.compress.prune.survey import TOKENS, WINDOWS
from tilepress.compress.recover.settings import hidden_size
from tilepress.compress.run.plan import Inputs
from tilepress.compress.run.targets import Target
from tilepress.formats.checkpoint import Checkpoint
from tilepress.models.experts import EXPERT_WEIGHT
from tilepress.models.families import ONE_PRODUCT

# Float32 matrices [in, in] and [out, in] that a method holds at once for a weight, moments among them, measured.
_SQUARES = {"wanda": 4, "sparsegpt": 8, "admm": 9}
_RECTANGLES = {"wanda": 6.5, "sparsegpt": 7.5, "admm": 14}
_MARGIN = 1.1  # for what freed memory leaves in pieces
_SURVEYED = 28  # bytes an element when a surveyed weight is sorted
_KERNEL_BYTES, _MOST_KERNELS = 800_000, 1024  # of oneDNN's: one, and how many it keeps
_LEADERS = {name: names[0] for names in ONE_PRODUCT for name in names[1:]}  # read the same input


@dataclass
class _Layer:
    """A decoder layer as its weights' names tell it."""

    prefix: str
    targets: list[Target] = field(default_factory=list)
    elements: int = 0  # of all its tensors

    @property
    def stages(self) -> list[list[Target]]:
        """Weights that are worked on together: those that read one input, of all experts at once."""
        names = {target.name for target in self.targets}
        found: dict[str, list[Target]] = {}
        for target in self.targets:
            module, linear, _ = target.name.rsplit(".", 2)
            leader = _LEADERS.get(linear, linear)
            linear = leader if f"{module}.{leader}.weight" in names else linear
            expert = EXPERT_WEIGHT.match(target.name)
            found.setdefault(f"{expert['path'] if expert else module}.{linear}", []).append(target)
        return list(found.values())

    def children(self, width: int) -> int:
        """Count its parts whose output may be as wide as the hidden states."""
        parts = {target.name[len(self.prefix) :].split(".")[0]: target for target in self.targets}
        return sum(
            target.name != f"{self.prefix}{name}.weight" or target.rows == width for name, target in parts.items()
        )


def peak_bytes(settings: Settings, inputs: Inputs, targets: list[Target]) -> int:
    """Return about how many bytes a run takes beside torch itself."""
    checkpoint, text = inputs.checkpoint, inputs.text
    dtype = settings.dtype or targets[0].dtype
    compute = compute_dtype(dtype, "cpu").itemsize
    width, layers = hidden_size(checkpoint, targets), _layers(checkpoint, targets)
    inside = [target for layer in layers for target in layer.targets]
    widest = max(target.cols for target in targets)
    largest = max((target.elements for target in inside), default=0)
    outside = compute * _outside(checkpoint, targets, layers)
    layer = compute * _most(layer.elements for layer in layers)

    streams = 1 if settings.method == "wanda" else 2
    tokens = text.nsamples * text.seqlen
    kept = compute * max(_most(layer.children(width) for layer in layers) - 1, 0)
    hidden = streams * tokens * width * (dtype.itemsize + kept)
    inputs = min(KEPT_BYTES, tokens * widest * compute)
    squares, rectangles = _SQUARES[settings.method], _RECTANGLES[settings.method]
    solver = 4 * _most(squares * t.cols**2 + rectangles * t.elements for t in inside) + (compute < 4) * 4 * largest
    experts = _most(_moments(stage) for layer in layers for stage in layer.stages)
    results = dtype.itemsize * _most(sum(t.elements for t in layer.targets) for layer in layers)
    window = 6 * 4 * text.seqlen * widest + 4 * compute * _scores(checkpoint) * text.seqlen**2
    if experts and compute == 2:
        window += _KERNEL_BYTES * min(_MOST_KERNELS, 2 * text.seqlen + 128)
    pruning = outside + streams * layer + hidden + inputs + solver + experts + results + window

    states = min(WINDOWS, text.nsamples) * min(TOKENS, text.seqlen) * width * dtype.itemsize
    variants = sum(len(layer.stages) for layer in layers) if settings.allocation == "auto" else 0
    clones = compute * _most(sum(t.elements for t in stage) for layer in layers for stage in layer.stages)
    surveying = outside + layer + clones + _SURVEYED * largest + (variants + 3) * states + window
    writing = (2 * dtype.itemsize + 12) * largest
    return int(_MARGIN * max(pruning, surveying if settings.allocation != "uniform" else 0, writing))


def _scores(checkpoint: Checkpoint) -> int:
    """Return how many scores of a pair of tokens a model writes out: its heads, or none where torch's fused attention runs."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    config = checkpoint.text_config
    known = getattr(transformers, NAMES.get(config.get("model_type"), ""), None)
    is_fused = known is None or known._supports_sdpa
    return 0 if is_fused else config.get("num_attention_heads") or config.get("n_head") or config.get("n_heads") or 0


def _most(values: Iterable[float]) -> float:
    return max(values, default=0)


def _layers(checkpoint: Checkpoint, targets: list[Target]) -> list[_Layer]:
    found: dict[str, _Layer] = {}
    for target in targets:
        if prefix := _prefix(target.name):
            layer = found.setdefault(prefix, _Layer(prefix))
            layer.targets.append(target)
            layer.elements += target.elements
    for name, elements in _others(checkpoint, targets):
        if _prefix(name) in found:
            found[_prefix(name)].elements += elements
    return list(found.values())


def _prefix(name: str) -> str:
    """Return a name up to its first number: `model.layers.3.`"""
    number = re.search(r"\.\d+\.", name)
    return name[: number.end()] if number else ""


def _moments(stage: list[Target]) -> int:
    """Bytes of the moments of experts' inputs; what a single weight needs is counted with the solver."""
    inputs = {}
    for target in stage:
        if expert := EXPERT_WEIGHT.match(target.name):
            inputs[expert["path"], expert["number"]] = 4 * target.cols**2
    return sum(inputs.values())


def _outside(checkpoint: Checkpoint, targets: list[Target], layers: list[_Layer]) -> int:
    """Elements that stay in memory: those of all tensors in no layer but the output head, which does not run."""
    stacks = {_stack(layer.prefix) for layer in layers}  # of layers, of which some may have no target
    others = _others(checkpoint, targets)
    return sum(
        n
        for name, n in others
        if not ((_prefix(name) and _stack(_prefix(name)) in stacks) or name.endswith("lm_head.weight"))
    )


def _stack(prefix: str) -> str:
    """Return what the prefixes of all its layers begin with: `model.layers.`"""
    return re.sub(r"\d+\.$", "", prefix)


def _others(checkpoint: Checkpoint, targets: list[Target]) -> list[tuple[str, int]]:
    """Return the stored tensors that are no target's, and their elements."""
    theirs = {entry.name for target in targets for entry in target.weight.entries}
    return [(name, math.prod(e.shape)) for name, e in checkpoint.tensors.items() if name not in theirs]
