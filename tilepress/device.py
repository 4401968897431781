"""The device that a command or a call computes on, and the threads of a CPU."""

import contextlib
import math
import os
import re
from pathlib import Path

import torch

from tilepress.formats import UsageError

_ASKED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # set by users who have chosen
_CGROUP = Path("/sys/fs/cgroup")


def find_device(name: str | torch.device) -> str:
    """Return cpu, cuda or cuda:N as torch takes it; `auto` is the first card that there is, else the CPU.

    Raises UsageError for another name, and for a card that torch does not see."""
    name = str(name)  # a torch.device too
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if not re.fullmatch(r"(cpu|cuda)(:[0-9]+)?", name):
        raise UsageError(f"--device {name} is no device to compute on", "use cpu, cuda or cuda:N")
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and int(number or 0) >= cards:
        raise UsageError(f"--device {name}, but torch sees {cards} cards", "`tilepress env` shows what torch sees")
    return name


def usable_cores() -> int:
    """Return how many cores this process may use: those it may run on, and no more than its control group pays for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # version 2; without a limit it is "max"
        quota, period = (int(number) for number in (_CGROUP / "cpu.max").read_text().split())
        return max(1, min(cores, math.ceil(quota / period)))
    with contextlib.suppress(OSError, ValueError):  # version 1; without a limit it is -1
        quota, period = (int((_CGROUP / "cpu" / f"cpu.cfs_{what}_us").read_text()) for what in ("quota", "period"))
        return max(1, min(cores, math.ceil(quota / period))) if quota > 0 else cores
    return cores


def use_threads(count: int | None) -> str | None:
    """Compute with so many threads on the CPU, unless told with one for each usable core; return a hint where that may be slow.

    How busy the cores are changes nothing by itself: sums of floating numbers depend on the number of threads, and a run that is
    resumed must give the same bytes.
    """
    cores = usable_cores()
    if count is not None:
        torch.set_num_threads(count)
    elif not any(os.environ.get(name) for name in _ASKED):
        torch.set_num_threads(min(torch.get_num_threads(), cores))
    threads, load = torch.get_num_threads(), os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if threads > cores:
        return f"{threads} threads on {cores} usable cores wait for one another; --threads {cores} may be faster"
    if threads > 1 and load + threads > 2 * cores:
        return f"other programs keep {load:.0f} of {cores} cores busy, and {threads} threads wait for one another; --threads 1 may be faster"
    return None
