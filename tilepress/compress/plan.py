"""What a run will do, from the headers alone, and the folder that it does it in."""

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tilepress.compress.layouts import LAYOUTS
from tilepress.compress.targets import LeftAlone, Target
from tilepress.formats import TilepressError, UsageError
from tilepress.formats.artifact import FORMAT_VERSION, WORK_FOLDER, PlannedTensor, disk_errors, to_json, write_atomic
from tilepress.formats.checkpoint import MANIFEST_NAME, Checkpoint, Weight, read_json

Progress = Callable[[str, int], None]  # (what is at hand, elements done since the last call)
_SPARE_BYTES = 64 << 20  # left free on the disk beyond the planned size


class Recipe(Protocol):
    """What a command does to each target. Picklable; everything that changes the result is in `settings`."""

    command: str  # as in `tilepress compress prune`
    layout: str  # of the targets in the result: "dense" or "tiled-csl"
    dtype: torch.dtype | None  # cast every floating tensor to it first

    def settings(self) -> dict: ...
    def expected_density(self) -> float: ...
    def prepare(self, plan: "Plan", work: Path, device: str, progress: Progress) -> dict: ...
    def transform(self, target: Target, weight: Tensor, state: dict) -> tuple[Tensor, dict]: ...


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
    output: Path
    recipe: Recipe
    shards: tuple[Shard, ...]
    left_alone: tuple[LeftAlone, ...]
    fingerprint: str
    source_bytes: int
    expected_bytes: int  # of the result's shards
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
        }

    def outcome(self) -> dict:
        """What came out, from the finished artifact's manifest."""
        manifest = read_json(self.output / MANIFEST_NAME)
        names = {target.name: target.elements for target in self.targets}
        nonzeros = sum(tensor["nonzeros"] for tensor in manifest["tensors"] if tensor["name"] in names)
        return {
            "output": str(self.output),
            "source_bytes": self.source_bytes,
            "bytes": sum(tensor["bytes"] for tensor in manifest["tensors"]),
            "targets": len(names),
            "elements": sum(names.values()),
            "nonzeros": nonzeros,
            "sparsity": 1 - nonzeros / sum(names.values()),
            "left_alone": {item["name"]: item["reason"] for item in manifest["left_alone"]},
        }


def make_plan(
    checkpoint: Checkpoint, output: Path, recipe: Recipe, targets: list[Target], left_alone: list[LeftAlone]
) -> Plan:
    """Lays out the run; reads nothing but what `checkpoint` already read."""
    by_name = {target.name: target for target in targets}
    by_file: dict[str, list[Job]] = {name: [] for name in checkpoint.shards}
    for name, weight in checkpoint.weights.items():
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
    largest = max(t.elements for t in targets)
    return Plan(
        checkpoint.path,
        output,
        recipe,
        shards,
        tuple(left_alone),
        hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest(),
        sum(e.nbytes for e in checkpoint.tensors.values()),
        sum(_expected_bytes(job, recipe) for shard in shards for job in shard.jobs),
        2 * largest * (recipe.dtype or torch.bfloat16).itemsize + (128 << 20),
    )


def planned_tensors(job: Job, recipe: Recipe) -> list[PlannedTensor]:
    """The tensors that a job will write, with the most elements that each can have."""
    if job.target is not None:
        return LAYOUTS[recipe.layout].planned(job.target, recipe.dtype or job.target.dtype)
    return [PlannedTensor(e.name, _cast(e.dtype, recipe), math.prod(e.shape), len(e.shape)) for e in job.weight.entries]


def _cast(dtype: torch.dtype, recipe: Recipe) -> torch.dtype:
    return recipe.dtype if recipe.dtype and dtype.is_floating_point else dtype


def _expected_bytes(job: Job, recipe: Recipe) -> int:
    if job.target is None:
        return sum(tensor.max_nbytes for tensor in planned_tensors(job, recipe))
    dtype = recipe.dtype or job.target.dtype
    return LAYOUTS[recipe.layout].expected_bytes(job.target, dtype, recipe.expected_density())


def open_output(plan: Plan, resume: bool, overwrite: bool, joining: bool = False) -> bool:
    """Makes the output folder ready; returns False if the artifact is already complete.

    An unfinished run of the same plan goes on only with `resume` (or when `joining`, as one of several ranks). Raises UsageError
    where something is in the way, and TilepressError where the disk has too little room.
    """
    out = plan.output
    if out.resolve() == plan.source.resolve():
        raise UsageError("the output folder is the input folder", "choose another with -o DIR")
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file", "choose a folder with -o DIR")
    occupied = out.exists() and any(out.iterdir())
    if occupied and overwrite:
        _clear(out)
        occupied = False
    if occupied:
        finished = read_json(out / MANIFEST_NAME) if (out / MANIFEST_NAME).exists() else None
        started = read_json(plan.work / "plan.json") if (plan.work / "plan.json").exists() else None
        same = plan.fingerprint in ((finished or {}).get("fingerprint"), (started or {}).get("fingerprint"))
        if (resume or joining) and same:
            if finished:
                shutil.rmtree(plan.work, ignore_errors=True)
                return False
        elif not started and [path.name for path in out.iterdir()] == [WORK_FOLDER]:
            pass  # killed before the plan was there, or another rank is about to write it
        elif resume:
            raise UsageError(
                f"{out} holds another run: other settings, another source, or none of ours",
                "use the same command as before, or --overwrite",
            )
        else:
            what = "an unfinished run" if started and not finished else "a finished artifact" if finished else "files"
            raise UsageError(
                f"{out} exists and holds {what}",
                "continue it with --resume, replace it with --overwrite, or choose another -o DIR"
                if started or finished
                else "choose another -o DIR",
            )
    written = sum((out / s.output).stat().st_size for s in plan.shards if (out / s.output).exists())
    parent = next(p for p in (out, *out.absolute().parents) if p.exists())
    free = shutil.disk_usage(parent).free
    if free < plan.expected_bytes - written + _SPARE_BYTES:
        raise TilepressError(
            f"{(plan.expected_bytes - written + _SPARE_BYTES) / 1e9:.2f} GB are needed in {parent}, {free / 1e9:.2f} GB are free",
            "free some space or choose another -o DIR",
        )
    write_atomic(
        plan.work / "plan.json",
        to_json({"fingerprint": plan.fingerprint, "command": plan.recipe.command, "settings": plan.recipe.settings()}),
    )
    return True


def _clear(out: Path) -> None:
    if not (out / MANIFEST_NAME).exists() and not (out / WORK_FOLDER).exists():
        raise UsageError(
            f"{out} was not written by tilepress, so --overwrite leaves it alone",
            "remove it yourself or choose another -o DIR",
        )
    with disk_errors(out):
        (out / "config.json").unlink(missing_ok=True)  # from here on nothing loads it
        for path in out.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def done_record(plan: Plan, shard: Shard) -> dict | None:
    """The record of a finished shard of this plan, if the shard is there in its full size and its source has not changed since."""
    try:
        record = json.loads((plan.work / f"{shard.output}.done.json").read_text())
        size = (plan.output / shard.output).stat().st_size
    except (OSError, ValueError):
        return None
    expected = (plan.fingerprint, source_mtime(plan, shard), size)
    return record if (record["fingerprint"], record["source_mtime_ns"], record["file"]["bytes"]) == expected else None


def source_mtime(plan: Plan, shard: Shard) -> int:
    return (plan.source / shard.source).stat().st_mtime_ns
