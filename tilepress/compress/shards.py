"""From a plan to an artifact, one shard at a time, by any number of workers, through any number of interruptions.

The plan comes from the headers alone. A worker is stateless: it takes the shards of its rank, skips those whose done-record
carries this plan's fingerprint, and whoever finds the last shard done writes index, config and manifest. One output shard
comes from each input shard, so who writes it, and when, does not change a byte.
"""

import hashlib
import json
import math
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tilepress import __version__
from tilepress.compress.targets import LeftAlone, Target
from tilepress.formats import TilepressError, UsageError, tiled_csl
from tilepress.formats.artifact import (
    FORMAT_VERSION,
    WORK_FOLDER,
    PlannedTensor,
    ShardWriter,
    disk_errors,
    sha256_file,
    to_json,
    write_atomic,
)
from tilepress.formats.checkpoint import (
    INDEX_NAME,
    MANIFEST_NAME,
    PICKLE_SUFFIXES,
    Checkpoint,
    Weight,
    read_header,
    read_json,
)

Progress = Callable[[str, int], None]  # (what is at hand, elements or bytes done since the last call)
_OWN_FILES = ("config.json", MANIFEST_NAME, INDEX_NAME)
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
    planned = [planned_tensors(job, recipe) for shard in shards for job in shard.jobs]
    largest = max((t.elements for t in targets), default=0)
    return Plan(
        checkpoint.path,
        output,
        recipe,
        shards,
        tuple(left_alone),
        hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest(),
        sum(e.nbytes for e in checkpoint.tensors.values()),
        sum(_expected_nbytes(tensor, recipe) for tensors in planned for tensor in tensors),
        2 * largest * (recipe.dtype or torch.bfloat16).itemsize + (128 << 20),
    )


def planned_tensors(job: Job, recipe: Recipe) -> list[PlannedTensor]:
    """The tensors that a job will write, with the most elements that each can have."""
    name, entries = job.weight.name, job.weight.entries
    if job.target is None:
        return [
            PlannedTensor(
                e.name,
                recipe.dtype if recipe.dtype and e.dtype.is_floating_point else e.dtype,
                math.prod(e.shape),
                len(e.shape),
            )
            for e in entries
        ]
    if recipe.layout == "dense":
        return [PlannedTensor(name, recipe.dtype or job.target.dtype, job.target.elements, 2)]
    tiles = tiled_csl.num_tiles(job.target.rows, job.target.cols, 64)
    most = (job.target.elements + 31 * tiles, tiles + 1, 5)
    return [
        PlannedTensor(name + suffix, torch.int32, n) for suffix, n in zip(tiled_csl.SUFFIXES, most, strict=True)
    ]


def _expected_nbytes(tensor: PlannedTensor, recipe: Recipe) -> int:
    packed_words = (
        tensor.dtype == torch.int32
        and tensor.dims == 1
        and tensor.max_elements > 5
        and recipe.layout != "dense"
    )
    return (
        int(tensor.max_nbytes * min(1.0, recipe.expected_density() * 1.03))
        if packed_words
        else tensor.max_nbytes
    )


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
                return False
        elif joining and not started and [path.name for path in out.iterdir()] == [WORK_FOLDER]:
            pass  # another rank is about to write the plan
        elif resume:
            raise UsageError(
                f"{out} holds another run: other settings, another source, or none of ours",
                "use the same command as before, or --overwrite",
            )
        else:
            what = (
                "an unfinished run"
                if started and not finished
                else "a finished artifact"
                if finished
                else "files"
            )
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
        to_json(
            {
                "fingerprint": plan.fingerprint,
                "command": plan.recipe.command,
                "settings": plan.recipe.settings(),
            }
        ),
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


def run_shards(
    plan: Plan,
    rank: int = 0,
    world_size: int = 1,
    device: str = "cpu",
    progress: Progress = lambda what, count: None,
) -> None:
    """Writes this rank's shards that are not done yet. Raises TilepressError; what is done stays for --resume."""
    checkpoint = Checkpoint(plan.source)
    for stale in plan.output.glob(".model-*.tmp"):
        if not _alive(stale.name.split(".")[-2]):
            stale.unlink(missing_ok=True)
    state = plan.recipe.prepare(plan, plan.work, device, progress)
    for shard in plan.shards[rank::world_size]:
        if done_record(plan, shard) is not None:
            progress(shard.output, shard.elements)
            continue
        _write_shard(plan, shard, checkpoint, state, device, progress)


def run_parallel(
    plan: Plan,
    workers: int,
    rank: int,
    world_size: int,
    device: str,
    progress: Progress = lambda what, count: None,
) -> None:
    """Like `run_shards`, with so many local processes that each take a shard at a time; cards are dealt round-robin."""
    plan.recipe.prepare(plan, plan.work, device, progress)  # once, so that the workers find its files
    mine = plan.shards[rank::world_size]
    cards = torch.cuda.device_count() if device == "cuda" else 0
    threads = max(1, (os.cpu_count() or 1) // workers)
    with ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), torch.set_num_threads, (threads,)
    ) as pool:
        # Rank i of as many ranks as shards is shard i alone.
        waiting = {
            pool.submit(
                run_shards,
                plan,
                shard.number,
                len(plan.shards),
                f"cuda:{shard.number % cards}" if cards else device,
            ): shard
            for shard in mine
        }
        try:
            for future in as_completed(waiting):
                future.result()
                progress(waiting[future].output, waiting[future].elements)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def done_record(plan: Plan, shard: Shard) -> dict | None:
    """The record of a finished shard of this plan, if the shard is there in its full size and its source has not changed since."""
    try:
        record = json.loads((plan.work / f"{shard.output}.done.json").read_text())
        size = (plan.output / shard.output).stat().st_size
    except (OSError, ValueError):
        return None
    expected = (plan.fingerprint, source_mtime(plan, shard), size)
    return (
        record
        if (record["fingerprint"], record["source_mtime_ns"], record["file"]["bytes"]) == expected
        else None
    )


def source_mtime(plan: Plan, shard: Shard) -> int:
    return (plan.source / shard.source).stat().st_mtime_ns


def _write_shard(
    plan: Plan, shard: Shard, checkpoint: Checkpoint, state: dict, device: str, progress: Progress
) -> None:
    source_hash = sha256_file(plan.source / shard.source)
    expected = next(
        (f["sha256"] for f in (checkpoint.manifest or {}).get("files", []) if f["name"] == shard.source),
        source_hash,
    )
    if expected != source_hash:
        raise TilepressError(
            f"{shard.source} does not have the hash that {MANIFEST_NAME} declares",
            "the file changed after it was written: make the artifact again",
        )
    planned = sorted(
        ((tensor, job) for job in shard.jobs for tensor in planned_tensors(job, plan.recipe)),
        key=lambda pair: _order(pair[0]),
    )
    writer = ShardWriter(plan.output / shard.output, [tensor for tensor, _ in planned])
    records, side = {}, {}
    try:
        for tensor, job in planned:
            if job.target is None:
                if job.weight.name not in records:
                    records[job.weight.name] = _copied_record(checkpoint, job.weight, plan.recipe)
                writer.add(
                    tensor.name,
                    checkpoint.tensors[tensor.name].shape,
                    _pieces(checkpoint.read(tensor.name), tensor.dtype),
                )
            elif tensor.name in side:
                values = side.pop(tensor.name)
                records[job.weight.name]["bytes"] += writer.add(tensor.name, tuple(values.shape), [values])
            else:
                progress(tensor.name, 0)
                records[job.weight.name] = _compress(
                    plan.recipe, job.target, checkpoint, state, device, writer, side
                )
                progress(tensor.name, job.target.elements)
        size, digest = writer.finish()
    except BaseException:
        writer.abandon()
        raise
    write_atomic(
        plan.work / f"{shard.output}.done.json",
        to_json(
            {
                "fingerprint": plan.fingerprint,
                "source_mtime_ns": source_mtime(plan, shard),
                "source": {
                    "name": shard.source,
                    "bytes": (plan.source / shard.source).stat().st_size,
                    "sha256": source_hash,
                },
                "file": {"name": shard.output, "bytes": size, "sha256": digest},
                "weight_map": {
                    name: entry.file for name, entry in read_header(plan.output / shard.output).items()
                },
                "tensors": [records[name] for name in sorted(records)],
            }
        ),
    )


def _order(tensor: PlannedTensor) -> tuple:
    """Wide elements first, so that every tensor is aligned without holes; packed words (whole 128-byte lines) before their side tensors."""
    return (
        -tensor.dtype.itemsize,
        next((i for i, s in enumerate(tiled_csl.SUFFIXES) if s and tensor.name.endswith(s)), 0),
        tensor.name,
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _pieces(tensor: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    return (piece.to(dtype) for piece in tensor.reshape(-1).split(1 << 22))


def _copied_record(checkpoint: Checkpoint, weight: Weight, recipe: Recipe) -> dict:
    record = {"name": weight.name, "layout": weight.layout}
    if weight.layout == "dense":
        tensor = checkpoint.read(weight.name)
        dtype = recipe.dtype if recipe.dtype and tensor.is_floating_point() else tensor.dtype
        nonzeros = sum(int(torch.count_nonzero(piece)) for piece in _pieces(tensor, dtype))
        record |= {
            "shape": list(tensor.shape),
            "dtype": _dtype_name(dtype),
            "nonzeros": nonzeros,
            "bytes": tensor.numel() * dtype.itemsize,
        }
    else:
        packed = checkpoint.packed(weight)
        problems, stats = tiled_csl.check(packed)
        if problems:
            raise TilepressError(
                f"{weight.name}: {problems[0]}",
                "the artifact is damaged: `tilepress verify DIR` lists every finding",
            )
        record |= packed_record(
            packed.rows, packed.cols, packed.tile_rows, packed.dtype, packed.transposed, stats
        ) | {"bytes": weight.nbytes}
    return record | {"error": 0.0}


def packed_record(
    rows: int, cols: int, tile_rows: int, dtype: torch.dtype, transposed: bool, stats: tiled_csl.PackStats
) -> dict:
    """What the manifest says of a packed weight."""
    return {
        "shape": [rows, cols],
        "dtype": _dtype_name(dtype),
        "tile_rows": tile_rows,
        "nonzeros": stats.nonzeros,
        "densest_tile": stats.densest_tile,
        "wavefronts": stats.wavefronts,
    } | ({"transposed": True} if transposed else {})


def _compress(
    recipe: Recipe,
    target: Target,
    checkpoint: Checkpoint,
    state: dict,
    device: str,
    writer: ShardWriter,
    side: dict,
) -> dict:
    source = checkpoint.dense(target.weight, device)
    dtype = recipe.dtype or source.dtype
    weight = (source.t() if target.transposed else source).to(dtype).contiguous()
    del source
    weight, measured = recipe.transform(target, weight, state)
    record = {"name": target.name, "layout": recipe.layout}
    if recipe.layout == "dense":
        stored = weight.t() if target.transposed else weight
        nbytes = writer.add(target.name, tuple(stored.shape), stored.split(1024))
        nonzeros = sum(int(torch.count_nonzero(piece)) for piece in weight.split(1024))
        return (
            record
            | {"shape": list(stored.shape), "dtype": _dtype_name(dtype), "nonzeros": nonzeros, "bytes": nbytes}
            | measured
        )
    tile_rows = tiled_csl.default_tile_rows(tiled_csl.density(weight))
    sizes, stats = [], tiled_csl.PackStats()

    def stripes() -> Iterator[Tensor]:
        for words, counts, found in tiled_csl.pack_stripes(weight, tile_rows, target.name):
            sizes.append(counts.cpu())
            stats.add(found)
            yield words

    nbytes = writer.add(target.name, (-1,), stripes())
    side[target.name + "_offsets"] = tiled_csl.offsets_from_sizes(torch.cat(sizes))
    side[target.name + "_layout"] = tiled_csl.layout_tensor(
        target.rows, target.cols, tile_rows, dtype, target.transposed
    )
    return (
        record
        | packed_record(target.rows, target.cols, tile_rows, dtype, target.transposed, stats)
        | {"bytes": nbytes}
        | measured
    )


def finish(plan: Plan, card: Callable[[dict], str]) -> dict | None:
    """Writes what makes the folder an artifact once every shard is done, and returns its manifest; None while any is missing."""
    records = [done_record(plan, shard) for shard in plan.shards]
    if not all(records):
        return None
    checkpoint = Checkpoint(plan.source)
    copied = _copy_other_files(plan)
    tensors = [tensor for record in records for tensor in record["tensors"]]
    manifest = {
        "format_version": FORMAT_VERSION,
        "tilepress": __version__,
        "command": plan.recipe.command,
        "settings": plan.recipe.settings(),
        "fingerprint": plan.fingerprint,
        "versions": {name: version(name) for name in ("torch", "transformers", "safetensors")},
        "source": {
            "name": checkpoint.config.get("_name_or_path") or plan.source.resolve().name,
            "files": [r["source"] for r in records],
        }
        | (
            {"recipe": {k: checkpoint.manifest[k] for k in ("command", "settings", "source")}}
            if checkpoint.manifest
            else {}
        ),
        "left_alone": [{"name": item.name, "reason": item.reason} for item in plan.left_alone],
        "tensors": sorted(tensors, key=lambda t: t["name"]),
    }
    write_atomic(plan.output / "README.md", card(manifest).encode())
    total = sum(tensor["bytes"] for tensor in tensors)
    weight_map = {name: file for record in records for name, file in record["weight_map"].items()}
    write_atomic(
        plan.output / INDEX_NAME,
        to_json({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}),
    )
    write_atomic(plan.output / "config.json", to_json(result_config(checkpoint.config, plan.recipe, tensors)))
    files = [record["file"] for record in records]
    for name in sorted([*copied, "README.md", INDEX_NAME, "config.json"]):
        files.append(
            {
                "name": name,
                "bytes": (plan.output / name).stat().st_size,
                "sha256": sha256_file(plan.output / name),
            }
        )
    manifest["files"] = files
    write_atomic(plan.output / MANIFEST_NAME, to_json(manifest))
    shutil.rmtree(plan.work, ignore_errors=True)
    return manifest


def result_config(config: dict, recipe: Recipe, tensors: list[dict]) -> dict:
    """The source's config with the result's dtype and `quantization_config`, which is there exactly if a weight is packed."""
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    if recipe.dtype is not None:
        config["dtype"] = _dtype_name(recipe.dtype)
        config.pop("torch_dtype", None)
    value_dtypes = sorted({tensor["dtype"] for tensor in tensors if tensor["layout"] != "dense"})
    if value_dtypes:
        config["quantization_config"] = {
            "quant_method": "tilepress",
            "format_version": FORMAT_VERSION,
            "value_dtypes": value_dtypes,
        }
    return config


def _copy_other_files(plan: Plan) -> list[str]:
    """Tokenizer, licence and whatever else the source has beside its weights; its README as SOURCE_README.md."""
    copied = []
    for path in sorted(plan.source.rglob("*")):
        name = path.relative_to(plan.source)
        weights = path.suffix in (*PICKLE_SUFFIXES, ".h5", ".msgpack", ".onnx", ".gguf") or (
            path.suffix == ".safetensors" and name.parts[0] != "kv_cache"
        )
        if (
            path.is_dir()
            or weights
            or str(name) in _OWN_FILES
            or any(part.startswith(".") for part in name.parts)
        ):
            continue
        copy = Path("SOURCE_README.md") if str(name) == "README.md" else name
        with disk_errors(plan.output / copy):
            write_atomic(plan.output / copy, path.read_bytes())
        copied.append(str(copy))
    return copied
