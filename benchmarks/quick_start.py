"""Times the commands of README's quick start on a random checkpoint of a shape, each in a process of its own: seconds, memory, sizes.

    python benchmarks/quick_start.py -o benchmarks/h100/quick_start.json --scratch /tmp --device cuda

What a step takes does not depend on the values of weights; the text is random tokens. A row is written as soon as its command has ended, and a command
that takes longer than its share of --seconds is stopped and its row says so.

    command, seconds, stages_s  what was run, as a user would give it; how long it took with everything, and by stage
    card_gib                    peak of what the card says is in use, less what was before
    host_gib                    peak of the process's own memory, without files that are mapped
    source_bytes, bytes         of stored weights, before and after
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
STEPS = {  # the commands, with what they read and write
    "quantize": "compress quantize {model} -o {int8} --dataset {text} --nsamples {nsamples} --seqlen {seqlen}",
    "kv": "compress kv {int8} -o {kv} --dataset {text} --nsamples {nsamples} --seqlen {seqlen}",
}
EVERY_S = 0.1  # memory is looked at


class Peaks:
    """Looks at a process and the card while the process runs."""

    def __init__(self, process: subprocess.Popen, before: float):
        self.process, self.before, self.host_gib, self.card_gib = process, before, 0.0, 0.0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while self.process.poll() is None:
            self.host_gib = max(self.host_gib, own_memory_gib(self.process.pid))
            self.card_gib = max(self.card_gib, card_memory_gib() - self.before)
            time.sleep(EVERY_S)

    def found(self) -> dict:
        self._thread.join()
        return {"card_gib": round(self.card_gib, 1), "host_gib": round(self.host_gib, 1)}


def own_memory_gib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has just ended
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) / 2**20


def card_memory_gib() -> float:
    if not shutil.which("nvidia-smi"):
        return 0.0
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return float(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[0]) / 2**10


def timed(words: list[str], seconds: float, log: Path) -> tuple[dict, str]:
    """Run a command; return seconds, peaks and, where it did not end well, why; and what it printed. Its progress goes to a log."""
    before, started = card_memory_gib(), time.monotonic()
    with open(log, "a") as err:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=err, text=True, start_new_session=True)
        peaks = Peaks(process, before)
        try:
            out, _ = process.communicate(timeout=max(seconds, 0.1))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
    row = {"seconds": round(time.monotonic() - started, 1)} | peaks.found()
    return row | ({"failed": f"ended with {process.returncode}"} if process.returncode else {}), out


def main(words: list[str] | None = None) -> None:
    how = arguments().parse_args(words)
    until, log = time.monotonic() + how.seconds, how.output.with_suffix(".log")
    folder = how.scratch / f"random-{how.shape}"
    paths = {"model": folder, "text": f"{folder}.jsonl", "int8": how.scratch / "int8", "kv": how.scratch / "int8-kv4"}
    _, printed = timed([sys.executable, "-m", "tilepress", "env", "--json"], 60, log)
    env = json.loads(printed or "{}")
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    told: dict = {"shape": how.shape, "nsamples": how.nsamples, "seqlen": how.seqlen, "rows": []}
    told["device"] = (env.get("cards") or ["cpu"])[0] if how.device != "cpu" else "cpu"
    told["versions"] = {name: env.get(name) for name in ("tilepress", "torch", "transformers")}
    told["commit"] = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None
    script = ROOT / "benchmarks" / "random_checkpoint.py"
    made, _ = timed([sys.executable, str(script), how.shape, str(folder), "--device", how.device], how.seconds, log)
    write(how.output, told | {"checkpoint": made})
    for name, step in STEPS.items() if "failed" not in made else ():
        given = paths | {"nsamples": how.nsamples, "seqlen": how.seqlen}
        command = step.format(**given).split()
        shown = step.format(**given | {key: Path(path).name for key, path in paths.items()}).split()
        more = ["--device", how.device, "--json", "--log-file", str(how.output.with_suffix(f".{name}.log"))]
        row, out = timed([sys.executable, "-m", "tilepress", *command, *more], until - time.monotonic(), log)
        row = {"step": name, "command": shlex.join(["tilepress", *shown])} | row
        if "failed" not in row:
            facts = json.loads(out)
            row |= {"stages_s": facts["stages"], "source_bytes": facts["source_bytes"], "bytes": facts["bytes"]}
            if cache := facts.get("kv_cache"):
                row |= {key: cache[key] for key in ("bytes_per_token", "bytes_per_token_bfloat16")}
        told["rows"].append(row)
        write(how.output, told | {"checkpoint": made})
        print(json.dumps(row), flush=True)


def write(path: Path, told: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(told, indent=1) + "\n")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--shape", default="llama-3-8b", help="one of `tilepress demo --shape`")
    parser.add_argument("--scratch", type=Path, required=True, help="folder for checkpoint and artifacts, which stay")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--nsamples", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=1200, help="that all of it may take")
    return parser


if __name__ == "__main__":
    main()
