"""The folder that a run writes: what may stand in it before, and making it ready."""

import os
import shutil
from pathlib import Path

from tilepress.compress.run.lock import LOCK_NAME, Lock
from tilepress.compress.run.plan import Plan
from tilepress.compress.run.remote import source_hash
from tilepress.formats import TilepressError, UsageError
from tilepress.formats.artifact import WORK_FOLDER, disk_errors, sha256_file, to_json, write_atomic
from tilepress.formats.checkpoint import INDEX_NAME, MANIFEST_NAME, read_manifest
from tilepress.formats.files import in_utf8, read_json

_SPARE_BYTES = 64 << 20  # left free on the disk beyond the planned size


def open_output(plan: Plan, resume: bool, overwrite: bool, joining: bool = False, lock: Lock | None = None) -> bool:
    """Make the output folder ready, and take its lock; return False if the artifact is already complete.

    An unfinished run of the same plan goes on only with `resume` (or when `joining`, as one of several ranks). Raises UsageError
    where something is in the way or another run is at work, and TilepressError where the disk has too little room.
    """
    text = () if plan.text is None else (Path(plan.text.file or plan.text.dataset),)
    for read in (plan.source, *plan.recipe.reads(), *text):
        check_place(plan.output, read)
    if overwrite and (resume or joining):
        raise UsageError(
            f"--overwrite cannot go with {'--resume' if resume else 'several ranks: each would remove what the others wrote'}",
            "run it alone first, or remove the folder" if joining else "choose one of them",
        )
    if lock is not None and plan.work.exists():
        lock.take()
    own = _look(plan, resume, overwrite, joining)
    if own is None:
        return False
    parent = next(p for p in (plan.output, *plan.output.absolute().parents) if p.exists())
    in_store = plan.remote is not None and plan.remote.output is not None
    needed = _SPARE_BYTES + (plan.shard_room_bytes if in_store else plan.expected_bytes + plan.scratch_bytes)
    needed -= sum(path.stat().st_size for path in own if path.is_file() and not in_store)
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise TilepressError(
            f"{needed / 1e9:.2f} GB are needed in {parent}, {free / 1e9:.2f} GB are free",
            "free some space or choose another -o DIR",
        )
    if lock is not None and not lock.held:
        lock.take()
        own = _look(plan, resume, overwrite, joining)  # a run may have come and gone since
        if own is None:
            return False
    if overwrite:
        _clear(plan, own)
    with disk_errors(plan.work):
        plan.work.mkdir(parents=True, exist_ok=True)
    facts = {"fingerprint": plan.fingerprint, "command": plan.recipe.command, "settings": plan.settings}
    write_atomic(plan.work / "plan.json", to_json(facts), plan.work)
    return True


def _look(plan: Plan, resume: bool, overwrite: bool, joining: bool) -> list[Path] | None:
    """Return the files of ours that stand in the output, or None where it is this plan's finished artifact, which was asked for.

    Raises UsageError where something is in the way."""
    if not plan.output.exists() or not any(plan.output.iterdir()):
        return []
    if not overwrite:
        state = _what_is_there(plan)
        if state == "finished" and (resume or joining):
            _check_sources(plan)
            shutil.rmtree(plan.work, ignore_errors=True)
            return None
        if state != "fresh" and not (state == "started" and (resume or joining)):
            _refuse(plan, state, resume)
    own = _own_files(plan.output, plan.place)
    for folder, names, _ in os.walk(plan.output):
        if link := next((Path(folder, name) for name in names if Path(folder, name).is_symlink()), None):
            raise UsageError(
                f"{link} is a link to another folder: what stands there is not this run's to write or remove",
                "remove the link, or choose another -o DIR",
            )
    return own


def check_place(output: Path, source: Path) -> None:
    """Raise UsageError for an output that can be no folder, or is or holds what is read."""
    out, source = (
        Path(os.path.realpath(path)) for path in (in_utf8(output), source)
    )  # which a loop of links does not stop
    if out == source or out in source.parents:
        raise UsageError(f"the output {output} is or holds the input {source}", "choose another with -o DIR")
    if (output.is_symlink() and not output.exists()) or (output.exists() and not output.is_dir()):
        raise UsageError(f"{output} is no folder", "choose another with -o DIR")


def _what_is_there(plan: Plan) -> str:
    """`finished` or `started` for this plan, `fresh` if nothing counts yet, else `artifact`, `run` or `files` of something else."""
    out = plan.output
    if (out / MANIFEST_NAME).exists():
        found = _fingerprint(out / MANIFEST_NAME)
        return "finished" if found == plan.fingerprint else "artifact"
    if (plan.work / "plan.json").exists():
        if {path.name for path in plan.work.iterdir()} <= {"plan.json", LOCK_NAME}:
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
            f"{plan.place} holds another run: other settings, another source, or none of ours",
            "use the same command as before, or --overwrite",
        )
    what = {"finished": "a finished artifact", "artifact": "a finished artifact", "files": "files"}.get(
        state, "an unfinished run"
    )
    ways = {"files": "", "finished": "take it with --resume, replace it with --overwrite, or "}
    ways["started"] = "continue it with --resume, replace it with --overwrite, or "
    hint = ways.get(state, "replace it with --overwrite, or ") + "choose another -o DIR"
    raise UsageError(f"{plan.place} exists and holds {what}", hint)


def _check_sources(plan: Plan) -> None:
    """A finished artifact is this plan's only if it was made from these very files."""
    declared = {file["name"]: file["sha256"] for file in read_manifest(plan.output)["source"]["files"]}
    in_store = plan.remote is not None and plan.remote.source is not None
    for shard in plan.shards:
        found = source_hash(plan, shard) if in_store else sha256_file(plan.source / shard.source)
        if declared.get(shard.source) != found:
            raise UsageError(
                f"{plan.place} is complete, but {shard.source} has changed since", "make it again with --overwrite"
            )


def _own_files(out: Path, place: Path | str) -> list[Path]:
    """List the files that tilepress wrote into a folder: those a manifest lists, or the parts of an unfinished run."""
    if (out / MANIFEST_NAME).exists():
        try:
            names = [file["name"] for file in read_manifest(out)["files"]]
        except TilepressError:
            names = []
        return [out / name for name in (*names, "config.json", INDEX_NAME, MANIFEST_NAME)]
    if (out / WORK_FOLDER).exists():
        return [*out.glob("model-*-of-*.safetensors"), out / "config.json", out / INDEX_NAME]
    raise UsageError(
        f"{place} was not written by tilepress, so --overwrite leaves it alone",
        "remove it yourself or choose another -o DIR",
    )


def _clear(plan: Plan, own: list[Path]) -> None:
    """Remove our files, and of the work folder all but the lock that is held."""
    with disk_errors(plan.output):
        (plan.output / "config.json").unlink(missing_ok=True)  # from here on nothing loads it
        for path in own:
            path.unlink(missing_ok=True)
        for path in plan.work.iterdir() if plan.work.exists() else ():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != LOCK_NAME:
                path.unlink(missing_ok=True)
