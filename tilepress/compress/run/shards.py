"""Writing an artifact's shards: one at a time, by any number of workers, through any number of interruptions.

A worker is stateless: it takes the shards of its rank and skips those whose done-record carries this plan's fingerprint. One
output shard comes from each input shard, so who writes it, and when, does not change a byte. Tensors pass through one by one:
memory holds the largest weight about twice, whatever the shard's size.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import ExitStack

import torch
from torch import Tensor

from tilepress.compress.run.encode import Compressed
from tilepress.compress.run.plan import Job, Plan, Progress, Recipe, Shard, done_record, source_mtime
from tilepress.compress.run.remote import fetched, send_shard
from tilepress.compress.run.stages import Stages, add
from tilepress.compress.run.targets import Target
from tilepress.device import usable_cores
from tilepress.formats import TilepressError, dtype_name
from tilepress.formats.artifact import ShardWriter, sha256_file, to_json, write_atomic
from tilepress.formats.checkpoint import MANIFEST_NAME, Checkpoint, Weight, read_header
from tilepress.formats.layout import Add
from tilepress.formats.stripes import converted, nonzeros as count_nonzeros
from tilepress.ranks import ALONE, Ranks


def run_shards(
    plan: Plan,
    rank: int = 0,
    world_size: int = 1,
    device: str = "cpu",
    progress: Progress = lambda what, count: None,
    ranks: Ranks = ALONE,
) -> dict[str, float]:
    """Writes this rank's shards that are not done yet; returns the seconds of each stage. Raises TilepressError; what is done stays for --resume."""
    stages = Stages(device)
    with stages.of("prepare"):
        state = plan.recipe.prepare(plan, rank, device, progress, ranks)
    for shard in plan.shards[rank::world_size] if state is not None else ():
        _ensure_shard(plan, shard, state, stages, progress)
    return stages.seconds


def run_parallel(
    plan: Plan,
    workers: int,
    rank: int,
    world_size: int,
    device: str,
    progress: Progress = lambda what, count: None,
    ranks: Ranks = ALONE,
) -> dict[str, float]:
    """Run shards as `run_shards` does, in so many local processes that each take a shard at a time; cards are dealt
    round-robin. Seconds are those of all of them.
    """
    stages = Stages(device)
    with stages.of("prepare"):
        state = plan.recipe.prepare(plan, rank, device, progress, ranks)
    if state is None:
        return stages.seconds
    cards = torch.cuda.device_count() if device == "cuda" else 0
    context = multiprocessing.get_context("spawn")
    lifeline, held = context.Pipe(duplex=False)  # closed when this process lets go of it, or dies
    setup = (max(1, usable_cores() // workers), lifeline)
    with held, lifeline, ProcessPoolExecutor(workers, context, _setup_worker, setup) as pool:
        try:
            waiting = {}
            for shard in plan.shards[rank::world_size]:
                card = f"cuda:{shard.number % cards}" if cards else device
                waiting[pool.submit(write_alone, plan, shard, state, card)] = shard
            for future in as_completed(waiting):
                add(stages.seconds, future.result())
                progress(waiting[future].output, waiting[future].elements)
        except BaseException:
            held.close()
            pool.shutdown(cancel_futures=True)
            raise
    return stages.seconds


def _setup_worker(threads: int, lifeline) -> None:
    """A worker ends at once when the process that started it says so or is gone."""
    torch.set_num_threads(threads)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            lifeline.recv()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def write_alone(plan: Plan, shard: Shard, state: dict, device: str) -> dict[str, float]:
    """Write a shard, unless it is done, in a process that has nothing else to do with the run; return the seconds of each stage."""
    stages = Stages(device)
    _ensure_shard(plan, shard, state, stages, lambda what, count: None)
    return stages.seconds


def _ensure_shard(plan: Plan, shard: Shard, state: dict, stages: Stages, progress: Progress) -> None:
    in_store = plan.remote is not None and plan.remote.output is not None  # which vouches for the bytes
    if done_record(plan, shard, hashed=not in_store) is not None:
        progress(shard.output, shard.elements)
        return
    with ExitStack() as fetching:
        with stages.of("read"):
            fetching.enter_context(fetched(plan, shard))
        _write_shard(plan, shard, Checkpoint(plan.source), state, stages, progress)
    with stages.of("write"):
        send_shard(plan, shard)


def _write_shard(
    plan: Plan, shard: Shard, checkpoint: Checkpoint, state: dict, stages: Stages, progress: Progress
) -> None:
    for stale in plan.work.glob(f"{shard.output}.*.tmp"):  # of a killed run: a shard has one worker at a time
        stale.unlink(missing_ok=True)
    write = _link if plan.recipe.links else _rewrite
    with ThreadPoolExecutor(1) as beside:
        hashing = beside.submit(sha256_file, plan.source / shard.source)
        declared = {file["name"]: file["sha256"] for file in (checkpoint.manifest or {}).get("files", [])}
        if shard.source in declared:  # an artifact: what it is made of is checked first
            with stages.of("read"):
                _check_hash(shard, hashing.result(), declared[shard.source])
        size, digest, tensors = write(plan, shard, checkpoint, state, stages, progress)
        with stages.of("read"):
            source_hash = hashing.result()
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
                "file": {"name": shard.output, "bytes": size, "sha256": digest or source_hash},
                "weight_map": {name: entry.file for name, entry in read_header(plan.output / shard.output).items()},
                "tensors": tensors,
            }
        ),
        plan.work,
    )


def _check_hash(shard: Shard, found: str, declared: str) -> None:
    if found != declared:
        raise TilepressError(
            f"{shard.source} does not have the hash that {MANIFEST_NAME} declares",
            "the file changed after it was written: make the artifact again",
        )


def _link(plan: Plan, shard: Shard, checkpoint: Checkpoint, state: dict, stages: Stages, progress: Progress) -> tuple:
    """Puts a source shard into the output as it is: (size, None for the source's hash, records of its weights)."""
    declared = {record["name"]: record for record in (checkpoint.manifest or {}).get("tensors", [])}
    tensors = []
    for job in shard.jobs:
        progress(job.weight.name, 0)
        if (record := declared.get(job.weight.name)) is None:
            record = {"name": job.weight.name} | _copy(plan.recipe, checkpoint, job.weight, state, _measure)
        tensors.append(record)
    source, output = plan.source / shard.source, plan.output / shard.output
    output.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), output)
    except OSError:  # another disk, or one without links
        write_atomic(output, source, plan.work)
    return output.stat().st_size, None, sorted(tensors, key=lambda record: record["name"])


def _measure(name: str, shape: tuple[int, ...], pieces: Iterable[Tensor]) -> int:
    """Looks at a tensor as ShardWriter.add does, and stores nothing."""
    return sum(piece.nbytes for piece in pieces)


def _rewrite(
    plan: Plan, shard: Shard, checkpoint: Checkpoint, state: dict, stages: Stages, progress: Progress
) -> tuple:
    """Writes a shard of what the recipe makes of each weight: (size, hash, records)."""
    recipe, records = plan.recipe, []
    writer = ShardWriter(plan.output / shard.output, plan.work)

    def put(name: str, shape: tuple[int, ...], pieces: Iterable[Tensor]) -> int:
        with stages.of("write"):
            return writer.add(name, shape, stages.each("pack", pieces))

    def width(job: Job) -> int:
        return (recipe.dtype or job.target.dtype).itemsize if job.target else 0

    try:
        for job in sorted(shard.jobs, key=width, reverse=True):  # what is pruned of ties depends on the order
            target = job.target
            progress(job.weight.name, 0)
            if target is None:
                record = _copy(recipe, checkpoint, job.weight, state, put)
            else:
                with stages.of("read"):
                    kept = recipe.keeps_codes(target)
                    read = _codes if kept else _matrix
                    weight = read(checkpoint, target, recipe, stages.device)
                with stages.of(recipe.command.split()[-1]):
                    made = weight if kept else recipe.transform(target, weight, state)
                del weight
                with stages.of("pack"):
                    layout, form = made.layout or recipe.layout(target), target.form(recipe.dtype)
                    record = layout.encode(target.name, form, made.weight, made.record, made.beside, put)
                progress(target.name, target.elements)
            records.append({"name": job.weight.name} | record)
        with stages.of("write"):
            size, digest = writer.finish()
    except BaseException:
        writer.abandon()
        raise
    return size, digest, sorted(records, key=lambda record: record["name"])


def _copy(recipe: Recipe, checkpoint: Checkpoint, weight: Weight, state: dict, add: Add) -> dict:
    """Stores a weight that is no target, its stored tensors as they are or as the recipe has them; returns its record."""
    record = {"layout": weight.layout}
    if weight.is_packed:
        found, problems = checkpoint.examine(weight)
        if problems:
            raise TilepressError(
                f"{weight.name}: {problems[0]}", "the artifact is damaged: `tilepress verify DIR` lists every finding"
            )
        record |= found | {"bytes": weight.nbytes}
    record["error"] = 0.0
    for entry in weight.entries:
        made = recipe.copy(entry.name, checkpoint.read(entry.name), state)
        stored, record = made.weight, record | made.record
        dtype = recipe.dtype if recipe.dtype and stored.is_floating_point() else stored.dtype
        nonzeros: list[int] = []
        nbytes = add(entry.name, tuple(stored.shape), _counted(converted(stored, dtype, entry.name), nonzeros))
        if not weight.is_packed:
            shape = {"shape": list(stored.shape), "dtype": dtype_name(dtype)}
            record |= shape | {"nonzeros": sum(nonzeros), "bytes": nbytes}
    return record


def _counted(pieces: Iterator[Tensor], nonzeros: list[int]) -> Iterator[Tensor]:
    """The pieces; how many elements of each are not zero is added to the list."""
    for piece in pieces:
        nonzeros.append(count_nonzeros(piece))
        yield piece


def _codes(checkpoint: Checkpoint, target: Target, recipe: Recipe, device: torch.device) -> Compressed:
    """The target's int8 codes as [out_features, in_features], their scale beside them: nothing is left to do but to pack them."""
    codes, scale = checkpoint.codes(target.weight, device)
    return Compressed(codes, {"error": 0.0}, {f"{target.name}_scale": scale.reshape(-1)})


def _matrix(checkpoint: Checkpoint, target: Target, recipe: Recipe, device: torch.device) -> Tensor:
    """The target's weight as [out_features, in_features] in the recipe's dtype."""
    source = checkpoint.dense(target.weight, device)
    if recipe.dtype is not None and recipe.dtype != source.dtype:
        source = torch.cat(list(converted(source, recipe.dtype, target.name))).view(source.shape)
    return (source.t() if target.transposed else source).contiguous()
