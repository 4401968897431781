"""How long a run takes on this machine: a piece of one weight goes through the very code that writes shards, into a folder that is removed.

Calibration is not foreseen: only runs that look at each weight once are.
"""

import shutil
import tempfile
import time
from dataclasses import replace
from math import ceil
from pathlib import Path

import torch
from safetensors.torch import save_file

from tilepress.compress.run.plan import Job, Plan, Shard
from tilepress.compress.run.shards import run_shards
from tilepress.compress.run.targets import Target
from tilepress.formats import TilepressError
from tilepress.formats.checkpoint import Checkpoint
from tilepress.formats.storage import Store

_ELEMENTS = 1 << 24  # of the piece: about half a second
_NAME = "model.safetensors"
_HOUR_S = 3600


def forecast(plan: Plan, device: str, workers: int = 1) -> dict | None:
    """Return seconds of a run, of each of so many workers, and how many end within an hour; each alone on a machine like this one.

    None where it cannot be told: for calibrated runs, packed weights, and where there is no room for the piece."""
    targets = [target for target in plan.targets if not target.weight.is_packed]
    if plan.text is not None or plan.recipe.passes(None) > 1 or plan.recipe.links or not targets:
        return None
    place = next(path for path in (plan.output, *plan.output.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".tilepress-sample-", dir=place) as folder:
            return _timed(plan, max(targets, key=lambda target: target.elements), Path(folder), device, workers)
    except (OSError, TilepressError):
        return None


def _timed(plan: Plan, target: Target, folder: Path, device: str, workers: int) -> dict:
    entry = target.weight.entries[0]
    lines = min(entry.shape[0], max(128, _ELEMENTS // entry.shape[1] // 128 * 128))
    shape = (lines, entry.shape[1])
    started = time.perf_counter()
    if plan.remote is not None and plan.remote.source:  # what comes back is another piece, as long
        data = Store(plan.remote.source).read(entry.file, 0, lines * entry.shape[1] * entry.dtype.itemsize)
        piece = torch.randn(shape).to(entry.dtype)
        nbytes = len(data)
    else:
        piece = Checkpoint(plan.source).part(target.name, slice(0, lines)).clone()
        nbytes = piece.nbytes
    read_s = (time.perf_counter() - started) / nbytes
    small = _alone(plan, target, piece, folder)
    for _ in range(2):  # the first time has what is done once: threads that start, code that is imported
        shutil.rmtree(small.output, ignore_errors=True)
        small.work.mkdir(parents=True)
        stages = run_shards(small, device=device)
    read_s += stages.get("read", 0.0) / piece.nbytes  # what hashing takes longer than all else
    written = (small.output / small.shards[0].output).stat().st_size
    write_s = stages.get("write", 0.0) / written
    compute_s = sum(s for name, s in stages.items() if name not in ("read", "write", "prepare")) / piece.numel()
    elements = sum(t.elements for t in plan.targets)
    seconds = read_s * plan.source_bytes + compute_s * elements + write_s * plan.expected_bytes
    most = ceil(len(plan.shards) / workers)  # shards of the worker that has the most
    within = int(len(plan.shards) * _HOUR_S / seconds)  # shards in an hour
    return {
        "sample_elements": piece.numel(),
        "read_bytes_s": round(1 / read_s),
        "elements_s": round(1 / compute_s),
        "write_bytes_s": round(1 / write_s),
        "seconds": round(seconds, 2),
        "workers": workers,
        "seconds_per_worker": round(seconds * most / len(plan.shards), 2),
        "read_bytes_per_worker": plan.source_bytes * most // len(plan.shards),
        "workers_for_an_hour": ceil(len(plan.shards) / within) if within else None,
    }


def _alone(plan: Plan, target: Target, piece: torch.Tensor, folder: Path) -> Plan:
    """Return the plan of a model that is one piece of one weight."""
    source = folder / "model"
    source.mkdir()
    shutil.copyfile(plan.source / "config.json", source / "config.json")
    save_file({target.name: piece}, source / _NAME)
    entry = replace(target.weight.entries[0], file=_NAME, shape=tuple(piece.shape), nbytes=piece.nbytes)
    rows, cols = reversed(piece.shape) if target.transposed else piece.shape
    cut = replace(target, weight=replace(target.weight, entries=(entry,)), rows=rows, cols=cols)
    shard = Shard(0, _NAME, _NAME, (Job(cut.weight, cut),))
    return replace(plan, source=source, output=folder / "out", shards=(shard,), remote=None)
