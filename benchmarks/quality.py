"""Runs the recommended recipes on a model and writes what each costs: one row a recipe, written as soon as it is measured.

    python benchmarks/quality.py MODEL -o benchmarks/h200/quality.json --calibrate wikitext2_valid.jsonl --evaluate wikitext2_test.jsonl \\
        --hellaswag hellaswag.jsonl --device cuda --seconds 300

Every step is a `tilepress` command in a process of its own, so a row's `command` can be run again as it stands. A recipe that takes longer than --seconds
is stopped and its row says so; the others go on. Rows that the file has already with this protocol are not measured again, but for --again, so a call
that was cut short is called once more. `--windows` and `--items` make a quick try: keep those figures apart from real ones.

    model, recipe, command      what was run
    perplexity, over_dense      recipe gptq on --evaluate; the share that it rises over the dense model's
    kl, same_top                mean KL divergence of a token from the dense model, nats; share of tokens with the same most likely one
    bits_per_element, sparsity  of a stored key or value; of the linear weights
    hellaswag_acc_norm, seconds of HellaSwag, with its standard error; of all steps that made the artifact
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

PRUNE = "compress prune {{model}} -o {{out}} --sparsity {} --method admm --allocation auto --refit 100 {{text}}"
RECOVER = "compress recover {made} --base {model} -o {out} --steps 600 --batch 8 --dataset self+{calibrate}"
RECIPES = {  # name: the steps that make an artifact; {made} is {out} of the step before, {text} and {own} are the flags of a text
    "dense": (),
    "int8": ("compress quantize {model} -o {out} {text}",),
    "int8, none kept": ("compress quantize {model} -o {out} --keep 0 {text}",),
    "int8, 10 % kept": ("compress quantize {model} -o {out} --keep 10% {text}",),
    "int8, smoothed": ("compress quantize {model} -o {out} --smooth auto {text}",),
    "int8, no text": ("compress quantize {model} -o {out}",),
    "int8, random tokens": ("compress quantize {model} -o {out} --dataset random",),
    "int8, own text": ("compress quantize {model} -o {out} {own}",),
    "int8, static": ("compress quantize {model} -o {out} --activations tensor {text}",),
    "int8, static, 5 % kept": ("compress quantize {model} -o {out} --activations tensor --keep 5% {text}",),
    "kv4": ("compress kv {model} -o {out} {text}",),
    "kv4, no feedback": ("compress kv {model} -o {out} --no-feedback {text}",),
    "kv4, values folded": ("compress kv {model} -o {out} --fold-values {text}",),
    "kv4, groups of 32": ("compress kv {model} -o {out} --group-size 32 {text}",),
    "kv4, groups of 32, values folded": ("compress kv {model} -o {out} --group-size 32 --fold-values {text}",),
    "kv, 4.5 bits": ("compress kv {model} -o {out} --bits auto --budget 4.5 {text}",),
    "kv, 4.5 bits, values folded": ("compress kv {model} -o {out} --bits auto --budget 4.5 --fold-values {text}",),
    "kv8": ("compress kv {model} -o {out} --bits 8 {text}",),
    **{f"{share} % zeros": (PRUNE.format(share / 100),) for share in (50, 60)},
    **{f"{share} % zeros, recovered": (PRUNE.format(share / 100), RECOVER) for share in (50, 60, 70)},
    "int8 + kv4": ("compress quantize {model} -o {out} {text}", "compress kv {made} -o {out} {text}"),
}
Run = Callable[
    [list[str], float], dict
]  # a command's words and the seconds that it may take; what it prints with --json


class Failed(Exception):
    """A command that did not end well, with the reason that a row gives."""


def command(words: list[str], seconds: float) -> dict:
    """Run a `tilepress` command and return its JSON. Raises Failed for one that fails or takes too long, whose process is gone then."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tilepress", *words, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=max(seconds, 0.1))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise Failed("over the time limit") from None
    if process.returncode:
        raise Failed(next((line for line in err.splitlines() if line.startswith("error")), err[-200:].strip()))
    return json.loads(out)


@dataclass
class Shared:
    """Artifacts that several recipes begin with: each is made once, and its seconds count for all of them."""

    folder: Path
    wanted: set[tuple[str, ...]]  # the steps that they begin with
    made: dict[tuple[str, ...], tuple[str, dict, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, names: list[str], folder: Path) -> "Shared":
        begins = [RECIPES[name][: number + 1] for name in names for number in range(len(RECIPES[name]))]
        return cls(folder, {steps for steps in begins if begins.count(steps) > 1})


def made(
    model: str, name: str, how: argparse.Namespace, folder: Path, until: float, run: Run, shared: Shared | None = None
) -> tuple[str, dict, str, float]:
    """Make a recipe's artifact; return where it is, what its commands told, the commands as a user would give them, and their seconds."""
    shared = shared or Shared(folder, set())
    amount = ["--nsamples", str(how.nsamples), "--seqlen", str(how.seqlen)]
    texts = {"{text}": ["--dataset", how.calibrate, *amount], "{own}": ["--dataset", "self", *amount]}
    path, told, commands, total = model, {}, [], 0.0
    for number, step in enumerate(RECIPES[name]):
        steps = RECIPES[name][: number + 1]
        place = tempfile.mkdtemp(dir=shared.folder) if steps in shared.wanted - shared.made.keys() else folder
        out = shared.made[steps][0] if steps in shared.made else str(Path(place) / f"step-{number}")
        words = [
            word.format(model=model, out=out, made=path, calibrate=how.calibrate)
            for part in step.split()
            for word in texts.get(part, [part])
        ]
        names = {word: Path(word).name for word in (model, out, path, how.calibrate)}
        commands.append(shlex.join(["tilepress", *(_shown(word, names) for word in words)]))
        if steps not in shared.made:
            started = time.monotonic()
            facts = run([*words, "--device", how.device, "--quiet"], until - started)
            made_of = out, facts, time.monotonic() - started
            if steps in shared.wanted:
                shared.made[steps] = made_of
        else:
            made_of = shared.made[steps]
        path, facts, seconds = made_of
        told |= facts
        total += seconds
    return path, told, " && ".join(commands), total


def _shown(word: str, names: dict[str, str]) -> str:
    """Return a word of a command without the folders of this machine; of text beside the model's own, too."""
    own, plus, beside = word.partition("+")
    return names.get(word) or (f"{own}+{names[beside]}" if plus and beside in names else word)


def row_of(model: str, name: str, how: argparse.Namespace, run: Run, shared: Shared | None = None) -> dict:
    """Measure a recipe. What could not be measured within the limit is None, with the reason as `failed`."""
    row = {"model": Path(model).name, "recipe": name, "command": None}
    row |= dict.fromkeys(("perplexity", "perplexity_stderr", "over_dense", "kl", "same_top", "bits_per_element"))
    row |= dict.fromkeys(("sparsity", "bytes", "hellaswag_acc_norm", "hellaswag_acc_norm_stderr", "seconds"))
    started = time.monotonic()
    until = started + how.seconds
    with tempfile.TemporaryDirectory(dir=how.scratch) as folder:
        try:
            path, told, row["command"], seconds = made(model, name, how, Path(folder), until, run, shared)
            row["seconds"] = round(seconds, 1) if RECIPES[name] else None
            if "kv_cache" in told:
                cache = told["kv_cache"]
                row["bits_per_element"] = 16 * cache["bytes_per_token"] / cache["bytes_per_token_bfloat16"]
            if any("compress prune" in step for step in RECIPES[name]):
                row["sparsity"] = told["sparsity"]
            row["bytes"] = told.get("bytes")
            words = ["eval", "perplexity", path, "--dataset", how.evaluate, "--seqlen", str(how.seqlen)]
            words += ["--device", how.device, "--quiet", *(["--limit", str(how.windows)] if how.windows else [])]
            words += ["--base", model] if RECIPES[name] else ["--noise-floor"]
            found = run(words, until - time.monotonic())
            row |= {key: found[key] for key in ("perplexity", "perplexity_stderr")}
            row["windows"] = found["windows"]
            if RECIPES[name]:
                row["over_dense"] = found["perplexity"] / found["base"]["perplexity"] - 1
            distance = found if RECIPES[name] else found["noise_floor"]  # of dense: from itself, rounded otherwise
            row |= {"kl": distance["kl_divergence"]["mean"], "same_top": distance["top1_agreement"]}
            if how.hellaswag:
                words = ["eval", "tasks", path, "--tasks", "hellaswag", "--dataset", how.hellaswag]
                words += ["--device", how.device, "--quiet"]
                words += ["--limit", str(how.items)] if how.items else []
                scores = run(words, until - time.monotonic())["results"]["hellaswag"]
                row |= {"hellaswag_acc_norm": scores["acc_norm"], "items": scores["items"]}
                row["hellaswag_acc_norm_stderr"] = scores.get("acc_norm_stderr")
        except Failed as failure:
            row["failed"] = str(failure)
    return row


def protocol_of(how: argparse.Namespace) -> dict:
    """Return what decides the figures beside the model and the recipe."""
    told = {name: getattr(how, name) for name in ("seqlen", "nsamples", "windows", "items")}
    texts = {
        name: getattr(how, name) and Path(getattr(how, name)).name for name in ("calibrate", "evaluate", "hellaswag")
    }
    return (
        told | texts | {"recipe": "gptq", "bos": "auto", "noise": "kl and same_top of dense rows are its noise floor"}
    )


def environment(run: Run) -> dict:
    """Return the device, the versions and the commit, which each row has."""
    found = run(["env"], 120)
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    commit = (
        subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() if shutil.which("git") else ""
    )
    return {
        "device": (found.get("cards") or ["cpu"])[0],
        "versions": {name: found.get(name) for name in ("tilepress", "torch", "transformers")},
        "commit": commit or None,
    }


def main(words: list[str] | None = None, run: Run = command) -> None:
    how = arguments().parse_args(words)
    names = [name.strip() for name in how.recipes.split(";")] if how.recipes else [*RECIPES]
    if unknown := [name for name in names if name not in RECIPES]:
        sys.exit(f"no recipe {unknown[0]!r}; there are {'; '.join(RECIPES)}")
    told = {"protocol": protocol_of(how), "rows": []}
    if how.output.exists():
        told = json.loads(how.output.read_text())
        if told["protocol"] != protocol_of(how):
            sys.exit(f"{how.output} has rows of another protocol: write to another file")
    env = environment(run)
    env["device"] = "cpu" if how.device == "cpu" else env["device"]
    fresh = [name for name in names if how.again or not _measured(told["rows"], how, name)]
    with tempfile.TemporaryDirectory(dir=how.scratch) as folder:
        shared = Shared.of(fresh, Path(folder))
        for name in fresh:
            row = row_of(how.model, name, how, run, shared) | env
            others = [other for other in told["rows"] if (other["model"], other["recipe"]) != (row["model"], name)]
            told["rows"] = [*others, row]
            how.output.parent.mkdir(parents=True, exist_ok=True)
            how.output.with_suffix(".tmp").write_text(json.dumps(told, indent=1) + "\n")
            how.output.with_suffix(".tmp").replace(how.output)
            print(
                json.dumps({key: row.get(key) for key in ("recipe", "perplexity", "over_dense", "kl", "failed")}),
                flush=True,
            )


def _measured(rows: list[dict], how: argparse.Namespace, name: str) -> bool:
    model = Path(how.model).name
    return any((row["model"], row["recipe"]) == (model, name) and "failed" not in row for row in rows)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a dense model")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--calibrate", required=True, help="text to calibrate on")
    parser.add_argument("--evaluate", required=True, help="text to measure on")
    parser.add_argument("--hellaswag", help="items of HellaSwag; none are scored unless given")
    parser.add_argument("--recipes", help="names with semicolons; default: all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=300, help="that a recipe may take with its measurement")
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--nsamples", type=int, default=128)
    parser.add_argument("--windows", type=int, help="to measure at most")
    parser.add_argument("--items", type=int, help="of HellaSwag at most")
    parser.add_argument("--scratch", help="folder for artifacts, which are removed")
    parser.add_argument("--again", action="store_true", help="measure rows anew")
    return parser


if __name__ == "__main__":
    main()
