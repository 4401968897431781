"""The walk of `compress kv`: each layer's queries, keys and values over calibration text, and the scales that serve them best.

Every rotation that may be chosen is searched in each layer. Whether the model's keys are rotated is decided in the end, by the error of the
attention's output summed over layers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilepress.compress.kv.attention import AttentionShape, Watch, rotary_dim
from tilepress.compress.kv.search import choose
from tilepress.compress.layers.layerwise import LayerByLayer
from tilepress.compress.layers.walk import Found, Layer, Visitor, Walk
from tilepress.compress.run.plan import Plan, Progress
from tilepress.compress.run.targets import Target, find_targets
from tilepress.formats import UsageError, dtype_name
from tilepress.formats.artifact import disk_errors, write_atomic
from tilepress.formats.checkpoint import Checkpoint
from tilepress.formats.kv_calibration import FOLDER, KVCalibration, Side, to_files, weights_hash
from tilepress.formats.kv_int4 import KVFormat

SAMPLED_WINDOWS = 8  # whose keys and values the search looks at


@dataclass(frozen=True)
class Settings:
    """The settings of a recipe that concern calibration."""

    shape: AttentionShape
    form: KVFormat
    rotations: tuple[bool, ...]  # which are tried


def calibrate(plan: Plan, settings: Settings, device: str, progress: Progress) -> None:
    """Run the model over the text and leave the sidecar's files in the work folder.

    Raises UsageError for a model whose attention cannot be looked at, and where the work folder holds a calibration of something else;
    TilepressError naming the layer for keys that are not finite.
    """
    source, shape, form = Checkpoint(plan.source), settings.shape, settings.form
    targets, _ = find_targets(source, (), plan.trust_remote_code, quantized=True)
    found = Walk.over_text(plan, "kv", _Search(settings, targets), device, progress).run()
    rotates, facts = found.facts["rotates"], {key: value for key, value in found.facts.items() if key != "rotates"}
    calibration = KVCalibration(form, shape.kv_heads, tuple(_sides(found)), rotates, form.refits, facts)
    with disk_errors(plan.work / FOLDER):
        (plan.work / FOLDER).mkdir(exist_ok=True)
    for name, content in to_files(calibration, weights_hash(source)).items():
        write_atomic(plan.work / name, content, plan.work)


class _Search(Visitor):
    """Searches the sides of each layer's keys and values, once for every rotation that is tried."""

    def __init__(self, settings: Settings, targets: list[Target]):
        self.settings, self.targets, self.dtype = settings, targets, targets[0].dtype
        self.shape = settings.shape

    def choose(self, windows: list[list[int]], dataset: str) -> list[list[int]]:
        tokens = sum(map(len, windows))
        if tokens < self.shape.head_dim:
            raise UsageError(f"{dataset} gave {tokens} tokens: too few to calibrate on", "give more text")
        return windows

    def compute_dtype(self, device: str) -> torch.dtype:
        return self.dtype if device != "cpu" else torch.float32

    def start(self, model: LayerByLayer, windows: list[list[int]], streams: dict[str, list[Tensor]]) -> None:
        self.shape = replace(self.shape, rotary_dim=rotary_dim(model, self.shape))
        self.watch = Watch(model, self.shape)

    def visit(self, layer: Layer) -> tuple[dict[str, list], dict[str, Tensor]]:
        seen = self.watch.layer(layer, SAMPLED_WINDOWS)
        found, tensors = {}, {}
        for rotate in self.settings.rotations:
            *sides, facts = choose(seen, self.settings.form, rotate)
            found[_key(rotate)] = [{"layer": layer.number} | facts]
            for what, side in zip(("key", "value"), sides, strict=True):
                for part, tensor in zip(("channels", "fixed"), side[:2], strict=True):
                    if tensor is not None:
                        tensors[f"{_key(rotate)}.{layer.number}.{what}.{part}"] = tensor
        return found, tensors

    def finish(self, facts: dict, streams: dict[str, list[Tensor]]) -> dict:
        reports = {rotate: facts.pop(_key(rotate)) for rotate in self.settings.rotations}
        rotates = min(reports, key=lambda rotate: sum(told["output_error"] ** 2 for told in reports[rotate]))
        shape, pairs = self.shape, "neighbours" if self.shape.interleaved else "halves"
        found = {"rotates": rotates, "model_dtype": dtype_name(self.dtype), "query_heads": shape.heads}
        found |= {"rotary_dim": shape.rotary_dim, "rope_pairs": pairs if shape.rotary_dim else "none"}
        order = ("windows", "tokens", "computed_in", "device", "warnings")
        return found | {key: facts[key] for key in order} | {"report": reports[rotates]}

    def units(self, layer: Layer) -> int:
        return 1


def _key(rotate: bool) -> str:
    return "hadamard" if rotate else "none"


def _sides(found: Found) -> Iterator[tuple[Side, Side]]:
    """Yield each layer's keys' and values' side with the chosen rotation."""
    for told in found.facts["report"]:
        stems = {what: f"{_key(found.facts['rotates'])}.{told['layer']}.{what}" for what in ("key", "value")}
        yield tuple(
            Side(found.get(f"{stem}.channels"), found.get(f"{stem}.fixed"), told[f"{what}_clip"])
            for what, stem in stems.items()
        )
