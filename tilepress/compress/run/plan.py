"""The plan of a run, made from the headers alone: recipes, shards, sizes."""

import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilepress.compress.run.encode import Compressed
from tilepress.compress.run.targets import LeftAlone, Target, find_targets
from tilepress.formats import UsageError, dtype_name
from tilepress.formats.artifact import WORK_FOLDER, sha256_file
from tilepress.formats.checkpoint import FORMAT_VERSION, INDEX_NAME, MANIFEST_NAME, PICKLE_SUFFIXES, Checkpoint, Weight
from tilepress.formats.kv_calibration import CONFIG_KEY, FOLDER as KV_FOLDER
from tilepress.formats.layout import Layout, layout_named
from tilepress.models.meta import check_fit
from tilepress.ranks import ALONE, Ranks
from tilepress.text import Text

OURS = "`tilepress.load(DIR)`, or from_pretrained after `import tilepress.hf`,"  # in a model card
Progress = Callable[[str, int], None]  # (what is at hand, elements done since the last call)
_HEADER_BYTES = 160  # of a tensor in a shard's header and in the index, beside its name
_WEIGHT_SUFFIXES = (
    *PICKLE_SUFFIXES,
    ".h5",
    ".msgpack",
    ".onnx",
    ".onnx_data",
    ".gguf",
    ".tflite",
    ".ot",
    ".pkl",
    ".npz",
)


@dataclass(frozen=True)
class Inputs:
    """The inputs of a recipe: the checkpoint, and the text if it reads any."""

    checkpoint: Checkpoint
    text: Text | None = None  # to calibrate or to train with, its `seqlen` settled
    trust_remote_code: bool = False


@dataclass(frozen=True)
class ModelCard:
    """A recipe's part of a model card: rows of the table, and paragraphs below it."""

    rows: tuple[str, ...] = ()
    paragraphs: tuple[str, ...] = ()


class Recipe:
    """The treatment of each target by a command, and the words for its results.

    Picklable; everything that changes the result is in `settings`.
    """

    command: str  # as in `tilepress compress prune`
    ignore: tuple[str, ...] = ()  # patterns of layers that are left alone
    dtype: torch.dtype | None = None  # cast every floating tensor to it first
    links: bool = False  # the weights' files stay as they are: hard links where the disk has them, else copies
    alone: bool = False  # ranks that do not speak to each other cannot share it
    together: bool = False  # ranks that do calibrate together
    needs_text: bool = False
    takes_random: bool = False  # random tokens serve it, in place of text

    @property
    def refuses_text(self) -> str | None:
        """Why text would have no effect, or None where it has one."""
        return None if self.needs_text else f"`{self.command}` reads no text"

    def settled(self) -> "Recipe":
        """Return the recipe with what it names by hub id found on the disk."""
        return self

    def after(self, model: Checkpoint) -> "Recipe":
        """Return the recipe as a step of a stack that starts from `model`."""
        return self

    def reads(self) -> tuple[Path, ...]:
        """Return the folders beside the model that a run reads, and so may not write."""
        return ()

    def find_targets(self, inputs: Inputs) -> tuple[list[Target], list[LeftAlone]]:
        """Return what it works on, and what it leaves alone with the reasons."""
        return find_targets(inputs.checkpoint, self.ignore, inputs.trust_remote_code)

    def layout(self, target: Target) -> Layout:
        """Return the layout of a target in the result."""
        raise NotImplementedError

    def settings(self, text: Text | None) -> dict:
        """Return what the manifest says of the recipe and the text that it reads."""
        raise NotImplementedError

    def check(self, inputs: Inputs, targets: list[Target], left_alone: list[LeftAlone]) -> None:
        """Raise UsageError before the work starts for what cannot be done."""

    def expected_density(self, inputs: Inputs) -> float:
        """Return the share of non-zeros that the result's targets will have, about."""
        return 1.0

    def expected_bytes(self, target: Target, density: float, text: Text | None) -> int:
        """Return about how many bytes a target takes in the result, of whose elements a share of `density` is not zero."""
        return self.layout(target).expected_bytes(target.form(self.dtype), density)

    def peak_bytes(self, inputs: Inputs, targets: list[Target]) -> int:
        """Return the anonymous memory of a run, about."""
        return 2 * max(t.elements * (self.dtype or t.dtype).itemsize for t in targets)

    def passes(self, text: Text | None) -> int:
        """Return how often the targets are read: more than once if `prepare` reads them too."""
        return 1

    def work_units(self, plan: "Plan", rank: int, world_size: int) -> int:
        """Return what progress is counted to: elements of the rank's targets, and of all for each pass of `prepare`."""
        once, mine = (
            sum(shard.elements for shard in shards) for shards in (plan.shards, plan.shards[rank::world_size])
        )
        return mine + (self.passes(plan.text) - 1) * once

    def warnings(self) -> list[str]:
        """Return what speaks against these settings, to be said before the work starts."""
        return []

    def foreseen(self, inputs: Inputs) -> dict:
        """Return further facts for a plan that is only looked at."""
        return {}

    def prepare(self, plan: "Plan", rank: int, device: str, progress: Progress, ranks: Ranks = ALONE) -> dict | None:
        """Look at the whole model once, where a recipe has to; what it finds out goes to `transform` and `copy`.

        Its files are in `plan.work`, so a resumed run finds them and ranks share them. `ranks` that speak to each other do it together;
        of others the first does it, and they wait. None if other ranks have completed the artifact.
        """
        return {}

    def keeps_codes(self, target: Target) -> bool:
        """Return whether a target's int8 codes and scale go as they are to a layout that keeps them, past `transform`."""
        return False

    def transform(self, target: Target, weight: Tensor, state: dict) -> Compressed:
        """Compress a target [rows, cols]. The writer asks once for each target of a shard."""
        raise NotImplementedError

    def copy(self, name: str, tensor: Tensor, state: dict) -> Compressed:
        """Return a stored tensor that is no target's as the result has it."""
        return Compressed(tensor, {})

    def describe(self, plan: "Plan", tensors: list[dict]) -> dict:
        """Return further keys of the manifest, from the records of its tensors and what `prepare` left in the work folder."""
        return {}

    @classmethod
    def made(cls, step: dict) -> bool:
        """Return whether a step of an artifact's history, its `command` and `settings`, is of this recipe."""
        return step["command"] == cls.command

    @classmethod
    def model_card(cls, manifest: dict, steps: list[dict]) -> ModelCard:
        """Return what a model card says of this recipe: `steps` are those that made the artifact, the newest first, each with
        `command` and `settings`; one of them at least is of this recipe."""
        return ModelCard()

    def extra_files(self, plan: "Plan") -> dict[str, bytes]:
        """Return further files of the artifact by name, once every shard is done."""
        return {}

    def result_config(self, config: dict, tensors: list[dict], left_alone: list[LeftAlone]) -> dict:
        """Return `config.json` of the result, from the source's: with `quantization_config` exactly if a weight is packed or INT8."""
        config = {k: v for k, v in config.items() if k not in ("quantization_config", CONFIG_KEY)}
        if self.dtype is not None:
            config["dtype"] = dtype_name(self.dtype)
            config.pop("torch_dtype", None)
        quantization = self.quantization_config(tensors, left_alone)
        return config if quantization is None else config | {"quantization_config": quantization}

    def quantization_config(self, tensors: list[dict], left_alone: list[LeftAlone]) -> dict | None:
        """Return `config.json`'s `quantization_config` for a result with these manifest records; None for a dense one."""
        dtypes = sorted({tensor["dtype"] for tensor in tensors if layout_named(tensor["layout"]).packed})
        if not dtypes:
            return None
        return {"quant_method": "tilepress", "format_version": FORMAT_VERSION, "value_dtypes": dtypes}


@dataclass(frozen=True)
class Job:
    """One weight of a shard; `target` is None where it is only copied."""

    weight: Weight
    target: Target | None


@dataclass(frozen=True)
class Shard:
    number: int
    source: str  # file name in the source; the first of its weights' files
    output: str  # file name in the artifact
    jobs: tuple[Job, ...]

    @property
    def elements(self) -> int:
        return sum(job.target.elements for job in self.jobs if job.target)


@dataclass(frozen=True)
class Remote:
    """The addresses of a run's model and output that are in stores; None for a folder."""

    source: str | None
    output: str | None


@dataclass(frozen=True)
class Plan:
    """Everything about a run that the headers tell."""

    source: Path
    name: str  # of the source: hub id or folder
    output: Path
    recipe: Recipe
    shards: tuple[Shard, ...]
    left_alone: tuple[LeftAlone, ...]
    text: Text | None
    trust_remote_code: bool
    fingerprint: str
    source_bytes: int
    expected_bytes: int  # of the result's shards
    scratch_bytes: int  # of the largest of them, which is there twice while its streams are joined
    peak_bytes: int  # anonymous memory, about, without what torch itself takes
    remote: Remote | None = None  # addresses that `source` and `output` stand for

    @property
    def shard_room_bytes(self) -> int:
        """Scratch that a worker takes whose shards come from a store or go there: a shard as it was, and twice as it becomes."""
        stored = max((sum(job.weight.nbytes for job in shard.jobs) for shard in self.shards), default=0)
        return stored + 2 * self.scratch_bytes

    @property
    def targets(self) -> list[Target]:
        return [job.target for shard in self.shards for job in shard.jobs if job.target]

    @property
    def work(self) -> Path:
        return self.output / WORK_FOLDER

    @property
    def place(self) -> Path | str:
        """The folder or address that the result goes to, as the user gave it."""
        return (self.remote and self.remote.output) or self.output

    @property
    def settings(self) -> dict:
        return self.recipe.settings(self.text)

    def to_json(self) -> dict:
        """Return what is known before the run: layers, sizes in bytes, what is left alone and why, and what the recipe foresees."""
        inputs = Inputs(Checkpoint(self.source), self.text, self.trust_remote_code)
        density = self.recipe.expected_density(inputs)
        return {
            "source_bytes": self.source_bytes,
            "disk_bytes": self.expected_bytes,
            "peak_memory_bytes": self.peak_bytes,
            "shards": len(self.shards),
            "layers": [
                {"name": t.name, "rows": t.rows, "cols": t.cols, "bytes": t.weight.nbytes}
                | {"disk_bytes": self.recipe.expected_bytes(t, density, self.text)}
                for t in self.targets
            ],
            "left_alone": {item.name: item.reason for item in self.left_alone},
        } | self.recipe.foreseen(inputs)


def make_plan(inputs: Inputs, output: Path, recipe: Recipe) -> Plan:
    """Find the targets, check them, and lay out the run. Raises UsageError for what the recipe cannot do with this model."""
    checkpoint, recipe = inputs.checkpoint, recipe.settled()
    targets, left_alone = recipe.find_targets(inputs)
    check_fit(checkpoint, inputs.trust_remote_code)
    recipe.check(inputs, targets, left_alone)
    by_name = {target.name: target for target in targets}
    dropped = {item.name for item in left_alone if item.dropped}
    by_file: dict[str, list[Job]] = {name: [] for name in checkpoint.shards}
    for name, weight in checkpoint.weights.items():
        if name not in dropped:
            by_file[weight.file].append(Job(weight, by_name.get(name)))
    files = [name for name in checkpoint.shards if by_file[name]]
    shards = tuple(
        Shard(i, name, f"model-{i + 1:05d}-of-{len(files):05d}.safetensors", tuple(by_file[name]))
        for i, name in enumerate(files)
    )
    density = recipe.expected_density(inputs)
    identity = {
        "format_version": FORMAT_VERSION,
        "command": recipe.command,
        "settings": recipe.settings(inputs.text),
        "config": checkpoint.config,
        "targets": [target.name for target in targets],
        "source": [[e.name, e.file, str(e.dtype), e.shape] for e in checkpoint.tensors.values()],
    }
    sizes = [sum(_expected_bytes(job, recipe, density, inputs.text) for job in shard.jobs) for shard in shards]
    return Plan(
        checkpoint.path,
        checkpoint.name,
        output,
        recipe,
        shards,
        tuple(left_alone),
        inputs.text,
        inputs.trust_remote_code,
        hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest(),
        sum(e.nbytes for e in checkpoint.tensors.values()),
        sum(sizes) + sum((checkpoint.path / path).stat().st_size for path in other_files(checkpoint.path)),
        max(sizes, default=0),
        recipe.peak_bytes(inputs, targets) + (128 << 20),
    )


def _expected_bytes(job: Job, recipe: Recipe, density: float, text: Text | None) -> int:
    if recipe.links:
        return 0
    if job.target is None:
        names = [entry.name for entry in job.weight.entries]
        nbytes = sum(math.prod(e.shape) * _cast(e.dtype, recipe).itemsize for e in job.weight.entries)
    else:
        names = recipe.layout(job.target).stored_names(job.target.name)
        nbytes = recipe.expected_bytes(job.target, density, text)
    return nbytes + sum(_HEADER_BYTES + 2 * len(name) for name in names)


def _cast(dtype: torch.dtype, recipe: Recipe) -> torch.dtype:
    return recipe.dtype if recipe.dtype and dtype.is_floating_point else dtype


def done_record(plan: Plan, shard: Shard, hashed: bool = False) -> dict | None:
    """The record of a finished shard of this plan, or None.

    None too if its source has changed, or the shard is not there in its full size (`hashed`: with the bytes that were written).
    """
    path = plan.output / shard.output
    try:
        record = json.loads((plan.work / f"{shard.output}.done.json").read_text())
        expected = (plan.fingerprint, source_mtime(plan, shard), path.stat().st_size)
        if (record["fingerprint"], record["source_mtime_ns"], record["file"]["bytes"]) != expected:
            return None
        sound = not hashed or sha256_file(path) == record["file"]["sha256"]
        return record if sound and record.keys() >= {"source", "weight_map", "tensors"} else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def source_mtime(plan: Plan, shard: Shard) -> int:
    return (plan.source / shard.source).stat().st_mtime_ns


def other_files(source: Path) -> list[Path]:
    """Files beside the weights that belong to a model, relative to its folder: tokenizer, licence, code, sidecars.

    Not weights in other formats, not hidden files, not folders that are checkpoints of their own. Raises UsageError for a link to
    a file that is not the model's (an artifact is published, and the file behind the link was perhaps not meant to be), and
    for a name that is no text.
    """
    found, own_folders = [], (source.resolve(), *_hub_blobs(source))
    for folder, names, files in os.walk(source):
        here = Path(folder).relative_to(source)
        own = ("config.json", MANIFEST_NAME, INDEX_NAME) if here == Path() else ()
        checkpoints = [n for n in names if any((Path(folder) / n / m).exists() for m in ("config.json", WORK_FOLDER))]
        sidecar = [KV_FOLDER] if here == Path() else []  # of these very weights: changed ones need another
        names[:] = sorted(n for n in names if not n.startswith(".") and n not in checkpoints + sidecar)
        for name in sorted(files):
            path = here / name
            weights = is_weight_file(name) and (path.suffix != ".safetensors" or here.parts[:1] != (KV_FOLDER,))
            if name not in own and not name.startswith(".") and not weights and (source / path).is_file():
                if not any((source / path).resolve().is_relative_to(own_folder) for own_folder in own_folders):
                    raise UsageError(
                        f"{source / path} is a link to {(source / path).resolve()}, outside of the model's folder",
                        "copy the file there if it belongs to the model, else remove the link",
                    )
                if not name.isprintable():  # the manifest could not name it, or its name would steer a terminal
                    raise UsageError(f"the name of {source / path} is no text", "rename the file, or move it away")
                found.append(path)
    return found


def is_weight_file(name: str) -> bool:
    """Tell whether a file of that name holds weights, in our format or another."""
    return Path(name).suffix in (*_WEIGHT_SUFFIXES, ".safetensors")


def _hub_blobs(source: Path) -> list[Path]:
    """Return where the files of a snapshot lie in the hub's cache, to which it links; nothing for any other folder."""
    parents = source.resolve().parents
    return [parents[1] / "blobs"] if len(parents) > 1 and parents[0].name == "snapshots" else []
