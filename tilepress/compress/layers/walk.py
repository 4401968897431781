"""A walk through a model's decoder layers with calibration text, one layer in memory at a time, that a stopped run continues.

What is done with a layer is a `Visitor`'s business; what it finds (facts and tensors) is a pair of files in the work folder. When the last layer is
done they become
two: the facts, which go to the manifest, and the tensors, which `Recipe.transform` looks up.
"""

import hashlib
import json
import time
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from tilepress.compress.layers.layerwise import LayerByLayer
from tilepress.compress.run.plan import Plan, Progress, source_mtime
from tilepress.formats import TilepressError, UsageError, dtype_name
from tilepress.formats.artifact import to_json, write_atomic
from tilepress.formats.checkpoint import MANIFEST_NAME, Checkpoint, read_json
from tilepress.text import Text, check_vocabulary, load_tokenizer

FACTS = "calibration.json"  # in the work folder
PROBE_TOKENS = 32  # of the short runs that find groups and try folds


class Visitor(Protocol):
    """Looks at a layer, and leaves the layer's outputs in place of its inputs, `hidden` (a list of [1, tokens, hidden] in the model's dtype,
    at first on the CPU)."""

    dtype: torch.dtype  # of hidden states between layers

    def start(self, model: LayerByLayer, hidden: list[Tensor]) -> None:
        """Before the first layer."""

    def visit(self, model: LayerByLayer, layer: str, hidden: list[Tensor]) -> tuple[dict, dict[str, Tensor]]:
        """Facts, each a list that the manifest's lists are made of, and tensors."""

    def skip(self, model: LayerByLayer, layer: str, hidden: list[Tensor], tensors: dict[str, Tensor]) -> None:
        """A layer that was visited before the run was stopped."""


class Found:
    """What a finished walk left in a folder; tensors are read when they are asked for. Picklable."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return type(self), (self.folder,)

    @cached_property
    def facts(self) -> dict:
        """Windows, tokens, warnings and what the visitor found; and what it was made from, as `identity`."""
        return read_json(self.folder / FACTS)

    @cached_property
    def _files(self) -> dict[str, "safe_open"]:
        files = [safe_open(self.folder / name, framework="pt") for name in self.facts["layers"]]
        return {key: file for file in files for key in file.keys()}  # noqa: SIM118

    def get(self, key: str) -> Tensor | None:
        return self._files[key].get_tensor(key) if key in self._files else None


def walk(
    plan: Plan,
    text: Text,
    visitor: Visitor,
    device: str,
    progress: Progress,
    stored_dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Takes a visitor through all layers; finds finished ones, or all of them, in the work folder.

    Raises UsageError for a text without tokens or an architecture that cannot be run layer by layer."""
    checkpoint = Checkpoint(plan.source)
    windows = text.windows(load_tokenizer(checkpoint.path, trust_remote_code))
    compute = compute_dtype(visitor.dtype, device)
    identity = identity_of(plan, windows, device, compute)
    if (plan.work / FACTS).exists():
        check_identity(Found(plan.work).facts.get("identity"), identity, plan, text)
        return
    tokens, wanted = sum(map(len, windows)), text.nsamples * text.seqlen
    facts: dict = {"identity": identity, "windows": len(windows), "tokens": tokens, "warnings": []}
    if tokens < wanted:
        facts["warnings"].append(f"{text.dataset} gave {tokens:,} tokens of the {wanted:,} asked for")
    facts |= {"computed_in": dtype_name(compute), "device": torch.device(device).type}
    model = LayerByLayer(checkpoint, plan.targets, device, compute, stored_dtype, trust_remote_code)
    check_vocabulary(windows, model.model)
    files = [plan.work / f"layer-{identity[:16]}-{i:04d}" for i in range(len(model.layers))]
    last = max(i for i, file in enumerate(files) if i == 0 or not file.with_suffix(".json").exists())
    hidden = [model.embed(torch.tensor(window)).to(visitor.dtype) for window in windows]
    model.embed(torch.zeros(min(PROBE_TOKENS, *map(len, windows)), dtype=torch.long))  # for the probes
    visitor.start(model, hidden)
    for number, (layer, file) in enumerate(zip(model.layers, files, strict=True)):
        progress(f"calibrating {layer}", 0)
        tensors_file, facts_file = file.with_suffix(".safetensors"), file.with_suffix(".json")
        if not facts_file.exists():
            found, tensors = visitor.visit(model, layer, hidden)
            write_atomic(tensors_file, save(tensors), plan.work)
            write_atomic(facts_file, to_json(found), plan.work)
        elif number < last:
            visitor.skip(model, layer, hidden, load_file(tensors_file))
        progress(f"calibrating {layer}", sum(target.elements for target in model.targets_of[layer]))
    for file in files:
        for key, values in read_json(file.with_suffix(".json")).items():
            facts.setdefault(key, []).extend(values)
    facts["layers"] = [file.with_suffix(".safetensors").name for file in files]
    write_atomic(plan.work / FACTS, to_json(facts), plan.work)


def identity_of(plan: Plan, windows: list[list[int]], device: str, compute: torch.dtype) -> str:
    """Of what is found out about a model: its weights, the settings, the tokens, and what computes."""
    sources = [[shard.source, source_mtime(plan, shard)] for shard in plan.shards]
    made_from = [plan.fingerprint, windows, sources, torch.device(device).type, dtype_name(compute)]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()


def check_identity(found: str | None, wanted: str, plan: Plan, text: Text) -> None:
    """Raises UsageError if what is in the work folder was made from something else."""
    if found != wanted:
        raise UsageError(
            f"the weights, the text of {text.dataset} or the kind of device have changed since {plan.output} was calibrated",
            "start again with --overwrite",
        )


def manifest_facts(work: Path) -> dict:
    """What the manifest keeps. The identity holds times of files: the same run elsewhere would give other bytes."""
    return {key: value for key, value in Found(work).facts.items() if key not in ("identity", "layers")}


def check_inside(model: LayerByLayer) -> None:
    """Raises UsageError for targets that are in no decoder layer."""
    if model.outside:
        names = [name.removesuffix(".weight") for name in model.outside]
        raise UsageError(
            f"{', '.join(names[:3])} stand in no decoder layer and cannot be calibrated",
            "leave them alone: " + " ".join(f"--ignore {name}" for name in names[:3]),
        )


def wait_for_walk(work: Path, progress: Progress, patience_s: float = 1800.0, every_s: float = 1.0) -> bool:
    """Another rank's wait until rank 0 is through; False if the whole artifact is complete by then.

    Raises TilepressError when nothing has happened for so long."""
    changed, seen = time.monotonic(), None
    while not (work / FACTS).exists():
        if (work.parent / MANIFEST_NAME).exists():
            return False
        progress("waiting for the calibration of rank 0", 0)
        files = sorted(path.name for path in work.glob("*"))
        if files != seen:
            changed, seen = time.monotonic(), files
        if time.monotonic() - changed > patience_s:
            raise TilepressError(
                f"rank 0 has written nothing to {work} for {patience_s / 60:.0f} minutes",
                "look at rank 0, then start again",
            )
        time.sleep(every_s)
    return True


def compute_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """The model's own on a card and on CPUs with bfloat16 matrix units; else float32, which is many times faster there."""
    native = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)() and dtype == torch.bfloat16
    return dtype if device != "cpu" or native else torch.float32
