"""A run, put together in one place: find the targets, check them, plan, write the shards, finish.

`compress` does it all; `plan` stops before anything is written and returns a `Run`, which `Run.start` carries out. The command line, the
sweep, the demo and Python programs come in here.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from tilepress.compress.run import cluster
from tilepress.compress.run.finish import GENERAL, finish, history
from tilepress.compress.run.forecast import forecast
from tilepress.compress.run.lock import LOCK_NAME, Lock
from tilepress.compress.run.output import check_place, open_output
from tilepress.compress.run.plan import Inputs, Plan, Recipe, make_plan
from tilepress.compress.run.remote import Output, Scratch, bring_model, check_remote, remote_of
from tilepress.compress.run.shards import run_parallel, run_shards
from tilepress.compress.run.shared import check_seen, check_shared
from tilepress.compress.run.stages import add
from tilepress.device import find_device
from tilepress.formats import UsageError
from tilepress.formats.artifact import WORK_FOLDER, sha256_file
from tilepress.formats.checkpoint import MANIFEST_NAME, Checkpoint, open_model, read_manifest
from tilepress.formats.kv_calibration import FOLDER as KV_FOLDER
from tilepress.ranks import ALONE, Ranks
from tilepress.text import RANDOM, Text, check_source, load_tokenizer

Report = Callable[[str, int, int], None]  # (what is at hand, units of work done, units in all)


@dataclass(frozen=True)
class Outcome:
    """What a finished run made; sizes are bytes of stored weights, counts are elements of the compressed ones."""

    output: Path | str  # an address where one was given
    source_bytes: int
    bytes: int
    targets: int  # weights that were compressed
    elements: int
    nonzeros: int
    left_alone: dict[str, str]  # name of a weight: why it is as it was
    details: dict  # what the manifest says of the recipe: its settings, and what it measured
    warnings: tuple[str, ...]
    seconds: float
    stages: dict[str, float]  # seconds of reading, computing, packing and writing; empty for what was complete
    was_complete: bool = False  # found finished by `resume`

    @property
    def sparsity(self) -> float | None:
        """Share of zeros of the compressed weights; None where there are none."""
        return 1 - self.nonzeros / self.elements if self.elements else None

    def to_json(self) -> dict:
        """Return what the command prints with `--json`, as a dictionary of plain values."""
        return {
            "output": str(self.output),
            **{name: getattr(self, name) for name in ("source_bytes", "bytes", "targets", "elements", "nonzeros")},
            "sparsity": self.sparsity,
            "left_alone": self.left_alone,
            **self.details,
            "seconds": round(self.seconds, 2),
            "stages": {f"{name}_s": round(seconds, 2) for name, seconds in self.stages.items()},
        }


@dataclass(frozen=True)
class Run:
    """A run that is planned and not started."""

    plan: Plan
    scratch: Scratch | None = None  # what stands here for addresses; it goes with the run

    @property
    def warnings(self) -> list[str]:
        """What speaks against the recipe's settings."""
        return self.plan.recipe.warnings()

    def to_json(self) -> dict:
        """Return layers, sizes and memory in bytes, what is left alone and why, as `--dry-run --json` prints it beside `forecast`."""
        return self.plan.to_json()

    def forecast(self, device: str = "auto", workers: int = 1) -> dict | None:
        """Time a small piece of the model here; return what the run takes then, of which each of so many workers has a part."""
        return forecast(self.plan, find_device(device), workers)

    def start(
        self,
        device: str = "auto",
        *,
        resume: bool = False,
        overwrite: bool = False,
        workers: int = 1,
        rank: int = 0,
        world_size: int = 1,
        ray: str | None = None,
        progress: Report | None = None,
        ranks: Ranks | None = None,
    ) -> Outcome | None:
        """Carry the run out, as `compress` describes it."""
        plan, recipe, device = self.plan, self.plan.recipe, find_device(device)
        ranks = ranks or ALONE
        if ranks.size > 1:
            rank, world_size, device = ranks.rank, ranks.size, str(ranks.device)
        counts = workers, rank, world_size
        if not all(isinstance(count, int) for count in counts) or workers < 1 or not 0 <= rank < world_size:
            raise UsageError(
                f"{workers!r} workers as rank {rank!r} of {world_size!r} cannot be",
                "ranks count from 0, workers from 1",
            )
        if progress is not None and not callable(progress):
            raise UsageError(f"progress={progress!r} cannot be called", "give a function of what, done and total")
        apart = world_size > ranks.size  # ranks that meet in the output's folder alone
        if (recipe.alone and apart) or (ranks.size > 1 and not recipe.together):
            way = "start it once, or with torchrun" if recipe.together else "start it once"
            raise UsageError(f"`{recipe.command}` with these settings runs in one process", way)
        if ray is not None and world_size > 1:
            raise UsageError("a Ray cluster is given, and ranks too", "let Ray share the run, or the ranks")
        if plan.text is not None and rank == 0:
            _ = plan.text.source  # raises before anything is written
        started, stages = time.monotonic(), {}
        store = Output(plan) if plan.remote is not None and plan.remote.output is not None else None
        on_ray = contextlib.nullcontext() if ray is None else cluster.connected(ray, workers)
        # The first of ranks that speak to each other holds the lock for all.
        with on_ray, Lock(plan.output, plan.work, apart) as lock:
            if store is not None:
                store.look()
            opened = ranks.first(lambda: open_output(plan, resume, overwrite, apart, lock))
            if opened:
                if store is not None:
                    store.begin()
                step = _counted(progress, recipe.work_units(plan, rank, world_size))
                if apart and store is None:
                    check_shared(plan, rank)
                check_seen(plan, ranks)
                share = rank, world_size, device, step, ranks
                busy = min(workers, len(plan.shards))  # each has a shard at a time
                if ray is not None:
                    stages = cluster.run_on_cluster(plan, workers, device, step)
                else:
                    stages = run_parallel(plan, busy, *share) if busy > 1 else run_shards(plan, *share)
                if store is not None:
                    store.look()  # others may have sent shards, too
                ranks.wait()
                if not ranks.first(lambda: finish(plan) is not None):
                    return None
                if store is not None:
                    store.end()
        made = _outcome(
            plan.output,
            recipe,
            plan.source_bytes,
            left_behind=(plan.source / KV_FOLDER).exists(),
            seconds=time.monotonic() - started,
            stages=stages,
            was_complete=not opened,
        )
        return made if store is None else replace(made, output=plan.remote.output)


def compress(
    model: str | Path,
    output: str | Path,
    recipe: Recipe | Sequence[Recipe],
    *,
    dataset: str | Path | Text | Sequence[str | Path | Text | None] | None = None,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    workers: int = 1,
    rank: int = 0,
    world_size: int = 1,
    ray: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    progress: Report | None = None,
    ranks: Ranks | None = None,
) -> Outcome | None:
    """Compress a language model into an artifact: `tilepress.compress("meta-llama/Llama-3.1-8B", "pruned", tilepress.Prune(0.5))`.

    model       folder, hub id or address (`s3://…`, `hf://…`): a dense checkpoint or an artifact; `revision` is of the hub
    output      folder or address to write; it must be empty or absent, but for `resume` (go on with a stopped run) and `overwrite` (replace an artifact)
    recipe      Prune, Quantize, KVCache, Recover or Convert; or several, each of which works on what the one before made
    dataset     text for recipes that read it: a file, a hub id, or a `tilepress.Text`, which says how much of it; unless given WikiText-2.
                What the model writes itself is made before: `tilepress.sample(model).text`. Of several recipes each has its own if this is a list
    device      "cpu", "cuda", "cuda:N", or "auto": the first card, else the CPU
    workers     local processes that write shards
    rank        which one of `world_size` processes this is that share the run, on one machine or several with a common folder
    ray         address of a Ray cluster whose machines write the shards, `workers` at a time where that is more than one: HOST:PORT, "auto",
                or "local" for one on this machine
    progress    called with what is at hand, the units of work that are done, and those in all
    ranks       of a calibrated recipe, under torchrun: `tilepress.ranks.Ranks.start()`, whose processes share text and work, in place of `rank`

    Of several recipes the steps before the last are written beside the output, in `OUTPUT.steps`, and removed at the end; `resume` goes on with
    the step that was stopped. The artifact is the one that a call for each recipe would make; every step knows the model by its first name.

    Returns the Outcome, or None where other ranks have not done their part: the last one finishes.
    Raises UsageError for a request that makes no sense (settings, folders, models that cannot be compressed so), before anything is written;
    TilepressError for damaged checkpoints, non-finite weights and full disks. What is done by then stays for `resume`.
    """
    recipes = list(recipe) if isinstance(recipe, Iterable) else [recipe]
    if not recipes or not all(isinstance(each, Recipe) for each in recipes):
        raise UsageError(f"{recipe!r} is no recipe", "give Prune, Quantize, KVCache, Recover or Convert, or a list")
    how = {"workers": workers, "rank": rank, "world_size": world_size, "ray": ray}
    datasets = list(dataset) if isinstance(dataset, (list, tuple)) else [dataset] * len(recipes)
    if len(datasets) != len(recipes):
        told = f"{len(datasets)} texts for {len(recipes)} recipes"
        raise UsageError(told, "give one for all, or one for each: None where it reads none")
    if len(recipes) == 1:
        (dataset,) = datasets
        run = plan(model, output, recipes[0], dataset=dataset, trust_remote_code=trust_remote_code, revision=revision)
        return run.start(device, resume=resume, overwrite=overwrite, progress=progress, ranks=ranks, **how)
    if world_size != 1 or ranks is not None:
        raise UsageError("ranks cannot share a stack of recipes", "give them one recipe after the other")
    how |= {"device": device, "resume": resume, "overwrite": overwrite}
    if remote_of(model, output, revision) is not None:
        raise UsageError("a stack of recipes reads and writes folders", "give addresses to one recipe at a time")
    return _stack(open_model(model, revision), _folder(output), recipes, datasets, trust_remote_code, how, progress)


def plan(
    model: str | Path,
    output: str | Path,
    recipe: Recipe,
    *,
    dataset: str | Path | Text | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> Run:
    """Plan what `compress` does with the same arguments, from headers alone, and write nothing. Raises UsageError as `compress` does."""
    if not isinstance(recipe, Recipe):
        raise UsageError(f"{recipe!r} is no recipe", "a plan takes one: Prune, Quantize, KVCache, Recover or Convert")
    if dataset is not None and recipe.refuses_text:
        raise UsageError(f"{recipe.refuses_text}, but a dataset is given", "leave it out")
    if (remote := remote_of(model, output, revision)) is None:
        checkpoint, output, scratch = open_model(model, revision), _folder(output), None
    else:
        scratch = Scratch()
        checkpoint = bring_model(remote.source, scratch.path) if remote.source else open_model(model, revision)
        output = scratch.path / "output" if remote.output else _folder(output)
    text = text_for(recipe, dataset, checkpoint, trust_remote_code)
    if remote is not None:
        check_remote(remote, recipe, text)
    planned = make_plan(Inputs(checkpoint, text, trust_remote_code), output, recipe)
    return Run(replace(planned, remote=remote), scratch)


def _folder(output: str | Path) -> Path:
    if not isinstance(output, (str, Path)):
        raise UsageError(f"the output {output!r} is no folder", "give its path")
    return Path(output)


def text_for(recipe: Recipe, dataset: str | Path | Text | None, checkpoint: Checkpoint, trust: bool) -> Text | None:
    """Return the text that a recipe gets, its windows fitted to the model and its tokenizer; None for one that reads none."""
    if recipe.refuses_text or (dataset is None and not recipe.needs_text):
        return None
    text = Text() if dataset is None else dataset if isinstance(dataset, Text) else Text(str(dataset))
    if text.dataset == RANDOM and not recipe.takes_random:
        raise UsageError(
            f"`{recipe.command}` needs text, not random tokens: they show outliers, not what the model works on",
            "give --dataset a file or a hub id, or self",
        )
    check_source(text.beside or text.dataset)
    return text.fitted(checkpoint.text_config, load_tokenizer(checkpoint.path, trust))


def _counted(progress: Report | None, total: int) -> Callable[[str, int], None]:
    """Return a callback that takes the work done since its last call, and tells `progress` the sum."""
    done = 0

    def step(what: str, amount: int) -> None:
        nonlocal done
        done += amount
        if progress is not None:
            progress(what, done, total)

    return step


def _outcome(output: Path, recipe: Recipe, source_bytes: int, *, left_behind: bool = False, **facts) -> Outcome:
    """Read what came out from the finished artifact; `left_behind` is a calibrated cache that the source had."""
    manifest = read_manifest(output)
    left = {item["name"]: item["reason"] for item in manifest["left_alone"]}
    targets = [] if recipe.links else [tensor for tensor in manifest["tensors"] if tensor["name"] not in left]
    details = {key: value for key, value in manifest.items() if key not in GENERAL}
    warnings = [w for part in details.values() if isinstance(part, dict) for w in part.get("warnings", ())]
    if left_behind and not recipe.links:
        warnings.append("kv_cache/ was not taken over: it belongs to the weights as they were; run `compress kv` again")
    return Outcome(
        output,
        source_bytes,
        sum(tensor["bytes"] for tensor in manifest["tensors"]),
        len(targets),
        sum(prod(tensor["shape"]) for tensor in targets),
        sum(tensor["nonzeros"] for tensor in targets),
        left,
        details,
        tuple(warnings),
        **facts,
    )


def _stack(
    model: Checkpoint,
    output: Path,
    recipes: list[Recipe],
    datasets: list,
    trust: bool,
    how: dict,
    progress: Report | None,
) -> Outcome:
    """Apply recipes one after the other, each to what the one before made."""
    check_place(output, model.path)
    steps = Path(f"{os.path.abspath(output)}.steps")
    check_place(steps, model.path)
    recipes = [recipe.after(model).settled() for recipe in recipes]
    for read in (read for recipe in recipes for read in recipe.reads()):
        check_place(output, read)
        check_place(steps, read)
    pairs = zip(recipes, datasets, strict=True)
    texts = [text_for(recipe, dataset, model, trust) for recipe, dataset in pairs]
    for text in filter(None, texts):
        _ = text.source  # raises before anything is written
    if any(dataset is not None for dataset in datasets) and not any(texts):
        raise UsageError("none of the recipes reads text, but a dataset is given", "leave it out")
    if output.exists() and any(output.iterdir()) and not (how["resume"] or how["overwrite"]):
        hint = "take a finished artifact or go on with --resume, replace it with --overwrite, or choose another -o DIR"
        raise UsageError(f"{output} exists and is not empty", hint)
    started, source_bytes = time.monotonic(), sum(entry.nbytes for entry in model.tensors.values())
    if steps.exists() and not all(path.name == LOCK_NAME or _is_step(path) for path in steps.iterdir()):
        raise UsageError(f"{steps} holds files that are not of this run's steps", "move them away")
    with Lock(output, steps) as lock:
        lock.take()
        if how["resume"] and _is_made_by(output, model, recipes, texts):
            shutil.rmtree(steps, ignore_errors=True)
            seconds = time.monotonic() - started
            return _outcome(output, recipes[-1], source_bytes, seconds=seconds, stages={}, was_complete=True)
        made = _run_steps(model, output, steps, list(zip(recipes, texts, strict=True)), trust, how, progress)
        shutil.rmtree(steps, ignore_errors=True)
    return replace(made, source_bytes=source_bytes, seconds=time.monotonic() - started)


def _run_steps(
    model: Checkpoint,
    output: Path,
    steps: Path,
    recipes: list[tuple[Recipe, Text | None]],
    trust: bool,
    how: dict,
    progress: Report | None,
) -> Outcome:
    """Run each recipe on what the one before made; return the outcome of the last, with the stages and warnings of all."""
    source, stages, warnings = model, {}, []
    for number, (recipe, text) in enumerate(recipes, 1):
        folder = output if number == len(recipes) else steps / f"{number}-{recipe.command.split()[-1]}"
        run = Run(make_plan(Inputs(source, text, trust), folder, recipe))

        def report(what: str, done: int, total: int, at: str = f"step {number} of {len(recipes)}") -> None:
            if progress is not None:
                progress(f"{at}: {what}", done, total)

        made = run.start(progress=report, **how)
        add(stages, made.stages)
        warnings += made.warnings
        source = Checkpoint(folder, name=model.name)
    return replace(made, warnings=tuple(dict.fromkeys(warnings)), stages=stages)


def _is_step(folder: Path) -> bool:
    """Return whether a folder holds an artifact of ours, finished or not, or nothing."""
    marks = (WORK_FOLDER, MANIFEST_NAME)
    return folder.is_dir() and (not any(folder.iterdir()) or any((folder / mark).exists() for mark in marks))


def _is_made_by(output: Path, model: Checkpoint, recipes: list[Recipe], texts: list[Text | None]) -> bool:
    """Return whether a folder holds the finished artifact of these very recipes and files of the model."""
    if not (output / MANIFEST_NAME).exists():
        return False
    wanted = [(recipe.command, recipe.settings(text)) for recipe, text in zip(recipes, texts, strict=True)]
    steps = history(read_manifest(output))[: len(wanted)]
    if [(step["command"], step["settings"]) for step in reversed(steps)] != wanted:
        return False
    files = {file["name"]: file["sha256"] for file in steps[-1]["source"]["files"]}
    return files == {name: sha256_file(model.path / name) for name in files if (model.path / name).exists()}
