"""Runs killed at random moments and resumed: `make kills`, or `python tests/fuzz/kills.py --kills 200`.

Each round starts a run, kills it with SIGKILL after a random time, up to four times, resumes it to its end, and compares every
byte with the run that nobody stopped. `verify` looks at one of each kind.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

import torch  # noqa: E402
from support.artifacts import few_words  # noqa: E402
from support.families import build  # noqa: E402
from support.interruption import digest  # noqa: E402

import tilepress  # noqa: E402
from tilepress import KVCache, Prune, Quantize  # noqa: E402

WORKERS = "prune with two workers"
RUNS = {  # what is run, and how
    "prune": (Prune(0.6), {}),
    "prune, a global threshold": (Prune(0.6, scope="global"), {}),
    "prune by Wanda": (Prune(0.6, method="wanda"), {"dataset": few_words(2, 32)}),
    "quantize": (Quantize(), {}),
    "quantize, calibrated": (Quantize(activations="tensor"), {"dataset": few_words(2, 32)}),
    "kv": (KVCache(), {"dataset": few_words(2, 32)}),
    "prune, then quantize": ([Prune(0.6), Quantize()], {}),
    WORKERS: (Prune(0.6), {"workers": 2}),
    "prune by ADMM": (Prune(0.6, method="admm"), {"dataset": few_words(2, 32)}),
    "quantize, the head too": (Quantize(head="int8"), {"dataset": few_words(2, 32)}),
    "prune, then INT8 bitmaps": ([Prune(0.6), Quantize(activations="none")], {}),
    "kv, values folded": (KVCache(fold_values=True), {"dataset": few_words(2, 32)}),
    "kv, forms by layer": (KVCache("auto", budget=6.5), {"dataset": few_words(2, 32)}),
}


def start(source: Path, output: Path, recipe, how: dict) -> int:
    """Fork a process that runs to the end, or until it is killed; return its number."""
    if pid := os.fork():
        return pid
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)
    try:
        tilepress.compress(source, output, recipe, device="cpu", resume=True, **how)
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def ended(pid: int, within_s: float) -> int | None:
    """Wait; return the exit code, or None of a process that still runs."""
    until = time.monotonic() + within_s
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            return None
        time.sleep(0.001)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further round after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN", help=", ".join(RUNS))
    asked = parser.parse_args()
    rng, began, work = random.Random(asked.seed), time.monotonic(), Path(tempfile.mkdtemp(prefix="kills-"))
    source = build(work / "source", "llama", torch.bfloat16, "200KB", {})
    # Processes that start anew cost as much as ten of the other runs: they come once in four times.
    names = asked.runs + 3 * [name for name in asked.runs if name != WORKERS]
    whole, seconds, kills, rounds, wrong = {}, {}, {}, {}, []
    while sum(kills.values()) < asked.kills and time.monotonic() - began < asked.seconds:
        name = names[sum(rounds.values()) % len(names)]
        recipe, how = RUNS[name]
        if name not in whole:
            tilepress.compress(source, work / "here", recipe, device="cpu", **how)  # so that forks find all imported
            at = time.monotonic()
            assert ended(start(source, work / "whole", recipe, how), 600) == 0, name
            seconds[name], whole[name] = time.monotonic() - at, digest(work / "whole")
            assert digest(work / "here") == whole[name], name
            shutil.rmtree(work / "here")
            shutil.rmtree(work / "whole")
        output = work / "out"
        rounds[name] = rounds.get(name, 0) + 1
        for _ in range(rng.randint(1, 4)):
            pid = start(source, output, recipe, how)
            if ended(pid, rng.uniform(0, seconds[name])) is None:
                kill = os.killpg if rng.random() < 0.5 else os.kill
                try:
                    kill(pid, signal.SIGKILL)
                except ProcessLookupError:  # it is no group yet
                    os.kill(pid, signal.SIGKILL)
                kills[name] = kills.get(name, 0) + (ended(pid, 60) == -signal.SIGKILL)  # else it was quicker
        code = ended(start(source, output, recipe, how), 600)
        if code != 0 or digest(output) != whole[name]:
            wrong.append(f"{name}, round {rounds[name]}: exit code {code}")
            print("WRONG", wrong[-1], file=sys.stderr, flush=True)
            if output.exists():
                shutil.copytree(output, work / f"wrong-{len(wrong)}")
        elif rounds[name] == 1:
            assert tilepress.verify(output, reload=False).passed, name
        print(f"{sum(kills.values())} kills in {time.monotonic() - began:.0f} s: {name}", file=sys.stderr, flush=True)
        shutil.rmtree(output, ignore_errors=True)
        shutil.rmtree(f"{output}.steps", ignore_errors=True)
    for name in rounds:
        print(f"{name}: {kills.get(name, 0)} kills in {rounds[name]} runs of {seconds[name]:.1f} s")
    good = sum(rounds.values()) - len(wrong)
    print(
        f"{sum(kills.values())} kills; {good} of {sum(rounds.values())} resumed runs have the bytes of one not stopped"
    )
    if wrong:
        print(*wrong, f"kept in {work}", sep="\n")
        sys.exit(1)
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
