"""What a run will do, from the headers alone, and the folder that it does it in."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilepress.compress.run.encode import Compressed
from tilepress.compress.run.targets import LeftAlone, Target, find_targets
from tilepress.formats import TilepressError, UsageError, dtype_name
from tilepress.formats.artifact import WORK_FOLDER, disk_errors, sha256_file, to_json, write_atomic
from tilepress.formats.checkpoint import (
    FORMAT_VERSION,
    INDEX_NAME,
    MANIFEST_NAME,
    PICKLE_SUFFIXES,
    Checkpoint,
    Weight,
    read_json,
    read_manifest,
)
from tilepress.formats.kv_calibration import CONFIG_KEY, FOLDER as KV_FOLDER
from tilepress.formats.layout import Layout, layout_named

Progress = Callable[[str, int], None]  # (what is at hand, elements done since the last call)
_SPARE_BYTES = 64 << 20  # left free on the disk beyond the planned size
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


class Recipe:
    """What a command does to each target. Picklable; everything that changes the result is in `settings`."""

    command: str  # as in `tilepress compress prune`
    ignore: tuple[str, ...] = ()  # patterns of layers that are left alone
    dtype: torch.dtype | None = None  # cast every floating tensor to it first
    passes: int = 1  # over the targets: more if `prepare` reads them too
    links: bool = False  # the weights' files stay as they are: hard links where the disk has them, else copies

    def find_targets(
        self, checkpoint: Checkpoint, trust_remote_code: bool = False
    ) -> tuple[list[Target], list[LeftAlone]]:
        """What it works on, and why not on the rest."""
        return find_targets(checkpoint, self.ignore, trust_remote_code)

    def layout(self, target: Target) -> Layout:
        """Of a target in the result."""
        raise NotImplementedError

    def settings(self) -> dict:
        raise NotImplementedError

    def check(self, checkpoint: Checkpoint, targets: list[Target], left_alone: list[LeftAlone]) -> None:
        """Raises UsageError before the work starts for what cannot be done."""

    def expected_density(self) -> float:
        return 1.0

    def peak_bytes(self, checkpoint: Checkpoint, targets: list[Target]) -> int:
        """Anonymous memory of a run, about."""
        return 2 * max(t.elements * (self.dtype or t.dtype).itemsize for t in targets)

    def work_units(self, plan: "Plan", rank: int, world_size: int) -> int:
        """What progress is counted to: elements of the rank's targets, and of all for each pass of `prepare`."""
        once, mine = (
            sum(shard.elements for shard in shards) for shards in (plan.shards, plan.shards[rank::world_size])
        )
        return mine + (self.passes - 1) * once

    def warnings(self) -> list[str]:
        """What speaks against these settings, said before the work starts."""
        return []

    def foreseen(self, checkpoint: Checkpoint) -> dict:
        """Further facts for `--dry-run`."""
        return {}

    def prepare(self, plan: "Plan", rank: int, device: str, progress: Progress) -> dict | None:
        """Looks at the whole model once, where a recipe has to; what it finds out goes to `transform` and `copy`.

        Its files are in `plan.work`, so a resumed run finds them and ranks share them. None if other ranks have completed the artifact.
        """
        return {}

    def transform(self, target: Target, weight: Tensor, state: dict) -> Compressed:
        """What becomes of a target [rows, cols]. The writer asks once for each target of a shard."""
        raise NotImplementedError

    def copy(self, name: str, tensor: Tensor, state: dict) -> Compressed:
        """A stored tensor that is no target's, as the result has it."""
        return Compressed(tensor, {})

    def describe(self, plan: "Plan", tensors: list[dict]) -> dict:
        """Further keys of the manifest, from the records of its tensors and what `prepare` left in the work folder."""
        return {}

    def extra_files(self, plan: "Plan") -> dict[str, bytes]:
        """Further files of the artifact by name, once every shard is done."""
        return {}

    def result_config(self, config: dict, tensors: list[dict], left_alone: list[LeftAlone]) -> dict:
        """`config.json` of the result, from the source's: with `quantization_config` exactly if a weight is packed or INT8."""
        config = {k: v for k, v in config.items() if k not in ("quantization_config", CONFIG_KEY)}
        if self.dtype is not None:
            config["dtype"] = dtype_name(self.dtype)
            config.pop("torch_dtype", None)
        quantization = self.quantization_config(tensors, left_alone)
        return config if quantization is None else config | {"quantization_config": quantization}

    def quantization_config(self, tensors: list[dict], left_alone: list[LeftAlone]) -> dict | None:
        """`config.json`'s `quantization_config` for a result with these manifest records; None for a dense one."""
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
class Plan:
    """Everything about a run that the headers tell."""

    source: Path
    name: str  # of the source: hub id or folder
    output: Path
    recipe: Recipe
    shards: tuple[Shard, ...]
    left_alone: tuple[LeftAlone, ...]
    fingerprint: str
    source_bytes: int
    expected_bytes: int  # of the result's shards
    scratch_bytes: int  # of the largest of them, which is there twice while its streams are joined
    peak_bytes: int  # anonymous memory, about, without what torch itself takes

    @property
    def targets(self) -> list[Target]:
        return [job.target for shard in self.shards for job in shard.jobs if job.target]

    @property
    def work(self) -> Path:
        return self.output / WORK_FOLDER

    def facts(self) -> dict:
        """What `--dry-run` shows: layers, sizes in bytes, what is left alone and why."""
        return {
            "source_bytes": self.source_bytes,
            "disk_bytes": self.expected_bytes,
            "peak_memory_bytes": self.peak_bytes,
            "shards": len(self.shards),
            "layers": [
                {"name": t.name, "rows": t.rows, "cols": t.cols, "bytes": t.weight.nbytes} for t in self.targets
            ],
            "left_alone": {item.name: item.reason for item in self.left_alone},
        } | self.recipe.foreseen(Checkpoint(self.source))

    def outcome(self) -> dict:
        """What came out, from the finished artifact's manifest."""
        manifest = read_manifest(self.output)
        names = {target.name: target.elements for target in self.targets}
        nonzeros = sum(tensor["nonzeros"] for tensor in manifest["tensors"] if tensor["name"] in names)
        elements = sum(names.values())
        return {
            "output": str(self.output),
            "source_bytes": self.source_bytes,
            "bytes": sum(tensor["bytes"] for tensor in manifest["tensors"]),
            "targets": len(names),
            "elements": elements,
            "nonzeros": nonzeros,
            "sparsity": 1 - nonzeros / elements if elements else None,
            "left_alone": {item["name"]: item["reason"] for item in manifest["left_alone"]},
        } | {
            key: manifest[key]
            for key in ("settings", "calibration", "allocation", "report", "kv_cache", "recovery")
            if key in manifest
        }


def make_plan(
    checkpoint: Checkpoint, output: Path, recipe: Recipe, targets: list[Target], left_alone: list[LeftAlone]
) -> Plan:
    """Lays out the run; reads nothing but what `checkpoint` already read."""
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
    identity = {
        "format_version": FORMAT_VERSION,
        "command": recipe.command,
        "settings": recipe.settings(),
        "config": checkpoint.config,
        "targets": [target.name for target in targets],
        "source": [[e.name, e.file, str(e.dtype), e.shape] for e in checkpoint.tensors.values()],
    }
    sizes = [sum(_expected_bytes(job, recipe) for job in shard.jobs) for shard in shards]
    return Plan(
        checkpoint.path,
        checkpoint.name,
        output,
        recipe,
        shards,
        tuple(left_alone),
        hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest(),
        sum(e.nbytes for e in checkpoint.tensors.values()),
        sum(sizes) + sum((checkpoint.path / path).stat().st_size for path in other_files(checkpoint.path)),
        max(sizes, default=0),
        recipe.peak_bytes(checkpoint, targets) + (128 << 20),
    )


def _expected_bytes(job: Job, recipe: Recipe) -> int:
    if recipe.links:
        return 0
    if job.target is None:
        names = [entry.name for entry in job.weight.entries]
        nbytes = sum(math.prod(e.shape) * _cast(e.dtype, recipe).itemsize for e in job.weight.entries)
    else:
        layout = recipe.layout(job.target)
        names = layout.stored_names(job.target.name)
        nbytes = layout.expected_bytes(job.target.form(recipe.dtype), recipe.expected_density())
    return nbytes + sum(_HEADER_BYTES + 2 * len(name) for name in names)


def _cast(dtype: torch.dtype, recipe: Recipe) -> torch.dtype:
    return recipe.dtype if recipe.dtype and dtype.is_floating_point else dtype


def open_output(plan: Plan, resume: bool, overwrite: bool, joining: bool = False) -> bool:
    """Makes the output folder ready; returns False if the artifact is already complete.

    An unfinished run of the same plan goes on only with `resume` (or when `joining`, as one of several ranks). Raises UsageError
    where something is in the way, and TilepressError where the disk has too little room.
    """
    out, source = plan.output.resolve(), plan.source.resolve()
    if out == source or out in source.parents:
        raise UsageError(f"the output {plan.output} is or holds the input {plan.source}", "choose another with -o DIR")
    if overwrite and (resume or joining):
        raise UsageError(
            f"--overwrite cannot go with {'--resume' if resume else 'several ranks: each would remove what the others wrote'}",
            "run it alone first, or remove the folder" if joining else "choose one of them",
        )
    if (plan.output.is_symlink() and not plan.output.exists()) or (plan.output.exists() and not plan.output.is_dir()):
        raise UsageError(f"{plan.output} is no folder", "choose another with -o DIR")
    occupied = plan.output.exists() and any(plan.output.iterdir())
    if occupied and not overwrite:
        state = _what_is_there(plan)
        if state == "finished" and (resume or joining):
            _check_sources(plan)
            shutil.rmtree(plan.work, ignore_errors=True)
            return False
        if state != "fresh" and not (state == "started" and (resume or joining)):
            _refuse(plan, state, resume)
    own = _own_files(plan.output) if occupied else []
    parent = next(p for p in (plan.output, *plan.output.absolute().parents) if p.exists())
    needed = plan.expected_bytes + plan.scratch_bytes + _SPARE_BYTES
    needed -= sum(path.stat().st_size for path in own if path.is_file())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise TilepressError(
            f"{needed / 1e9:.2f} GB are needed in {parent}, {free / 1e9:.2f} GB are free",
            "free some space or choose another -o DIR",
        )
    if occupied and overwrite:
        _clear(plan.output, own)
    with disk_errors(plan.work):
        plan.work.mkdir(parents=True, exist_ok=True)
    facts = {"fingerprint": plan.fingerprint, "command": plan.recipe.command, "settings": plan.recipe.settings()}
    write_atomic(plan.work / "plan.json", to_json(facts), plan.work)
    return True


def _what_is_there(plan: Plan) -> str:
    """`finished` or `started` for this plan, `fresh` if nothing counts yet, else `artifact`, `run` or `files` of something else."""
    out = plan.output
    if (out / MANIFEST_NAME).exists():
        found = _fingerprint(out / MANIFEST_NAME)
        return "finished" if found == plan.fingerprint else "artifact"
    if (plan.work / "plan.json").exists():
        if [path.name for path in plan.work.iterdir()] == ["plan.json"]:
            return "fresh"  # it failed before anything was done
        return "started" if _fingerprint(plan.work / "plan.json") == plan.fingerprint else "run"
    # Killed before the plan was there, or another rank is about to write it.
    return "fresh" if [path.name for path in out.iterdir()] == [WORK_FOLDER] else "files"


def _fingerprint(path: Path) -> str | None:
    try:
        return read_json(path).get("fingerprint")
    except TilepressError:
        return None


def _refuse(plan: Plan, state: str, resume: bool) -> None:
    if resume:
        raise UsageError(
            f"{plan.output} holds another run: other settings, another source, or none of ours",
            "use the same command as before, or --overwrite",
        )
    what = {"finished": "a finished artifact", "artifact": "a finished artifact", "files": "files"}.get(
        state, "an unfinished run"
    )
    ways = {"files": "", "finished": "take it with --resume, replace it with --overwrite, or "}
    ways["started"] = "continue it with --resume, replace it with --overwrite, or "
    hint = ways.get(state, "replace it with --overwrite, or ") + "choose another -o DIR"
    raise UsageError(f"{plan.output} exists and holds {what}", hint)


def _check_sources(plan: Plan) -> None:
    """A finished artifact is this plan's only if it was made from these very files."""
    declared = {file["name"]: file["sha256"] for file in read_manifest(plan.output)["source"]["files"]}
    for shard in plan.shards:
        if declared.get(shard.source) != sha256_file(plan.source / shard.source):
            raise UsageError(
                f"{plan.output} is complete, but {shard.source} has changed since", "make it again with --overwrite"
            )


def _own_files(out: Path) -> list[Path]:
    """What tilepress wrote into a folder: what a manifest lists, or the parts of an unfinished run."""
    if (out / MANIFEST_NAME).exists():
        try:
            names = [file["name"] for file in read_manifest(out)["files"]]
        except TilepressError:
            names = []
        return [out / name for name in (*names, "config.json", INDEX_NAME, MANIFEST_NAME)]
    if (out / WORK_FOLDER).exists():
        return [*out.glob("model-*-of-*.safetensors"), out / "config.json", out / INDEX_NAME]
    raise UsageError(
        f"{out} was not written by tilepress, so --overwrite leaves it alone",
        "remove it yourself or choose another -o DIR",
    )


def _clear(out: Path, own: list[Path]) -> None:
    with disk_errors(out):
        (out / "config.json").unlink(missing_ok=True)  # from here on nothing loads it
        for path in own:
            path.unlink(missing_ok=True)
        shutil.rmtree(out / WORK_FOLDER, ignore_errors=True)


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

    Not weights in other formats, not hidden files, not folders that are checkpoints of their own.
    """
    found = []
    for folder, names, files in os.walk(source):
        here = Path(folder).relative_to(source)
        own = ("config.json", MANIFEST_NAME, INDEX_NAME) if here == Path() else ()
        checkpoints = [n for n in names if any((Path(folder) / n / m).exists() for m in ("config.json", WORK_FOLDER))]
        sidecar = [KV_FOLDER] if here == Path() else []  # of these very weights: changed ones need another
        names[:] = sorted(n for n in names if not n.startswith(".") and n not in checkpoints + sidecar)
        for name in sorted(files):
            path = here / name
            weights = path.suffix in _WEIGHT_SUFFIXES or (
                path.suffix == ".safetensors" and here.parts[:1] != (KV_FOLDER,)
            )
            if name not in own and not name.startswith(".") and not weights and (source / path).is_file():
                found.append(path)
    return found
