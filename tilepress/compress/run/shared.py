"""Whether the processes that share a run see the same folder.

Whoever leads leaves a token in the work folder, and the others look for it before they write. Without it each would fill a disk of its
own, and none would ever find the artifact complete.
"""

import os
import socket
import time
import uuid
from pathlib import Path

from tilepress.compress.run.plan import Plan
from tilepress.formats import TilepressError, UsageError
from tilepress.formats.artifact import to_json, write_atomic
from tilepress.formats.checkpoint import MANIFEST_NAME
from tilepress.ranks import Ranks

_JOBS = (  # what launchers that start all processes at once tell each of them, which is another for every start
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"),
)
HINT = "give -o a folder on a disk that all machines have under this path, or an address such as s3://BUCKET/DIR"


def leave_token(plan: Plan, name: str) -> Path:
    """Leave a token that says who wrote it, and return where it is."""
    path = plan.work / f"token-{name}.json"
    write_atomic(path, to_json({"host": socket.gethostname(), "pid": os.getpid()}), plan.work)
    return path


def job_id() -> str | None:
    """Return what the launcher calls the processes that it started together; None where each is started by itself."""
    for names in _JOBS:
        if all(os.environ.get(name) for name in names):
            return "-".join("".join(c if c.isalnum() else "_" for c in os.environ[name]) for name in names)
    return None


def check_shared(plan: Plan, rank: int, patience_s: float = 60.0, every_s: float = 0.2) -> None:
    """Leave a token as rank 0, or wait for it as another rank. Raises TilepressError where it does not come.

    Ranks that no launcher started together may run one after the other: nothing can be said of them."""
    if (job := job_id()) is None:
        return
    if rank == 0:
        leave_token(plan, job)
        return
    until = time.monotonic() + patience_s
    while not (plan.work / f"token-{job}.json").exists() and not (plan.output / MANIFEST_NAME).exists():
        if time.monotonic() > until:
            raise TilepressError(
                f"rank {rank} on {socket.gethostname()} sees nothing of rank 0 in {plan.output}: it is another disk there, or rank 0 failed",
                HINT,
            )
        time.sleep(every_s)


def check_seen(plan: Plan, ranks: Ranks, patience_s: float = 15.0, every_s: float = 0.1) -> None:
    """Look on every rank of those that speak to each other for the first one's token. Raises UsageError on all where one does not see it."""
    if ranks.size == 1:
        return
    path = plan.work / ranks.first(
        lambda: leave_token(plan, uuid.uuid4().hex).name
    )  # where this rank has its work folder
    until = time.monotonic() + patience_s  # a network's disk may be late
    while not (seen := path.exists()) and time.monotonic() < until:
        time.sleep(every_s)
    blind = [rank for rank, sees in enumerate(ranks.tell(seen)) if not sees]
    if not ranks.rank:
        path.unlink(missing_ok=True)
    if blind:
        raise UsageError(f"rank {blind[0]} does not see what rank 0 writes to {plan.output}", HINT)
