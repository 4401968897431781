"""The parts that commands which make an artifact share: plan, run, and say what came out."""

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import tilepress
from tilepress.cli.flags import Making
from tilepress.cli.terminal import (
    Bar,
    check_report,
    hushed,
    is_verbose,
    left_alone,
    plain,
    quiet_libraries,
    say,
    settle_threads,
    show_report,
    size,
    table,
)
from tilepress.formats import UsageError, is_address

if TYPE_CHECKING:
    from tilepress.compress.run.plan import Recipe
    from tilepress.ranks import Ranks
    from tilepress.text import Text

_WARNINGS_SHOWN = 5


def plan_text(facts: dict, *told: str) -> str:
    """Return what `--dry-run` prints of a command that writes weights, with what it has to tell itself.

    Weights of one kind and shape, those of all layers, are a row; with `-v` each weight is one."""
    kinds: dict[tuple[str, str], list[dict]] = {}
    for weight in facts["layers"]:
        name = weight["name"] if is_verbose() else re.sub(r"(?<=\.)\d+(?=\.)", "*", weight["name"])
        kinds.setdefault((name, f"{weight['rows']} x {weight['cols']}"), []).append(weight)
    rows = [
        [name, str(len(alike)), shape, *(size(sum(each[key] for each in alike)) for key in ("bytes", "disk_bytes"))]
        for (name, shape), alike in kinds.items()
    ]
    count = f"{len(facts['layers'])} weights"
    if len(kinds) < len(facts["layers"]):
        count += f" of {len(kinds)} kinds (-v lists each)"
    head = [table("", ["weights", "count", "rows x cols", "now", "then, about"], rows), left_alone(facts["left_alone"])]
    return "\n".join([*head, sizes_text(facts, count), *told, "  nothing was written"])


def sizes_text(facts: dict, what: str) -> str:
    """Return the lines of a dry run that tell shards, sizes, memory, and what a piece of the model took here."""
    lines = (
        f"  {what} in {facts['shards']} shards; {size(facts['source_bytes'])} now, about "
        f"{size(facts['disk_bytes'])} of disk; memory about {size(facts['peak_memory_bytes'])} beside torch itself"
    )
    return f"{lines}\n{forecast_text(facts['forecast'])}" if "forecast" in facts else lines


def forecast_text(found: dict) -> str:
    """Return the line that tells how long workers take, each alone on a machine like this one."""
    rates = f"read {size(found['read_bytes_s'])}/s, compute {found['elements_s'] / 1e6:.0f} M weights/s, write {size(found['write_bytes_s'])}/s"
    many = f"each of {found['workers']} workers" if found["workers"] > 1 else "one worker"
    hour = found["workers_for_an_hour"]
    enough = "no number of workers ends" if hour is None else f"{hour} worker{'s' * (hour > 1)} end{'s' * (hour == 1)}"
    return (
        f"  about {duration(found['seconds_per_worker'])} and {size(found['read_bytes_per_worker'])} to read for {many}, by a piece "
        f"timed here ({rates}); {enough} within an hour"
    )


def duration(seconds: float) -> str:
    """Return seconds, minutes or hours, as they are read."""
    return next(
        (f"{seconds / unit:.1f} {name}" for name, unit in (("h", 3600), ("min", 60)) if seconds >= unit),
        f"{seconds:.1f} s",
    )


def result_text(facts: dict, *told: str) -> str:
    """Return what a command prints that wrote weights: sizes, what it has to tell itself, what was left alone, and the time it took."""
    share = facts["bytes"] / facts["source_bytes"]
    lines = [f"  weights    {size(facts['source_bytes'])} -> {size(facts['bytes'])}  ({share:.1%})", *told]
    lines += [left_alone(facts["left_alone"]), f"  wrote      {facts['output']} in {facts['seconds']:.1f} s"]
    if facts["stages"]:
        lines.append(f"  time       {stages_text(facts['stages'])}")
    return "\n".join(lines)


def zeros_text(facts: dict) -> str:
    """Return the line that tells the zeros of a sparse artifact."""
    return f"  zeros      {facts['sparsity']:.2%} of {facts['targets']} linear weights"


def stages_text(seconds: dict[str, float]) -> str:
    """Return where the time went."""
    return ", ".join(f"{name.removesuffix('_s')} {value:.1f} s" for name, value in seconds.items())


@dataclass(frozen=True)
class Words:
    """The words in which a command speaks of its run."""

    title: str  # of the progress
    result: Callable[[dict], str]  # a text of what came out
    planned: Callable[[dict], str] = plan_text  # a text of what `--dry-run` finds
    told: dict = field(default_factory=dict)  # further keys of what came out


def make(
    model: str, output: str, recipe: "Recipe", text: "Text | None", how: Making, words: Words, writer: str | None = None
) -> "tilepress.Outcome | None":
    """Compress `model` into `output` and print the result. With `--dataset self` the text is what `writer` samples, by default `model`.

    Returns the outcome; None for a dry run, and where other ranks have not done their part."""
    with _ranks(text is not None and not how.dry_run, how) as ranks:
        return _make(model, output, recipe, text, how, words, writer, ranks)


@contextmanager
def _ranks(calibrates: bool, how: Making) -> "Iterator[Ranks | None]":
    """Give the ranks that torchrun started, where they calibrate together; None else. Only the first of them speaks while all goes well."""
    apart = how.rank is not None or how.world_size is not None or "LOCAL_RANK" not in os.environ
    if apart or not calibrates:
        yield None
        return
    from tilepress.device import find_device
    from tilepress.ranks import Ranks

    ranks = Ranks.start(find_device(how.device))
    with hushed(ranks is not None and ranks.rank > 0):
        yield ranks
    if ranks is not None:
        ranks.close()


def _make(
    model: str,
    output: Path,
    recipe: "Recipe",
    text: "Text | None",
    how: Making,
    words: Words,
    writer: str | None,
    ranks: "Ranks | None",
) -> "tilepress.Outcome | None":
    check_report(how.report)
    if how.report is not None and is_address(output):
        raise UsageError("--report reads a folder", "leave it out, or write to a folder")
    quiet_libraries()
    settle_threads(how.threads, how.quiet or how.dry_run)
    run = tilepress.plan(model, output, recipe, dataset=text, **how.source())
    for warning in run.warnings:
        say(f"warning: {warning}")
    if how.dry_run:
        facts = run.to_json()
        if (found := run.forecast(how.device, how.workers * how.share[1])) is not None:
            facts["forecast"] = found
        print(json.dumps(facts, indent=2) if how.json_ else words.planned(facts))
        return None
    rank, world_size = how.share if ranks is None else (ranks.rank, ranks.size)
    if ranks is not None and rank:
        ranks.wait()  # for text that the first one has the model write
    if run.plan.text is not None and (rank == 0 or ranks is not None):  # others take what it calibrates
        written = own_text(writer or model, run.plan.text, how, None if writer else how.revision)
        run = tilepress.plan(model, output, recipe, dataset=written, **how.source())
    if ranks is not None and not rank:
        ranks.wait()
    with Bar(words.title, how.quiet or (ranks is not None and rank > 0)) as bar:
        made = run.start(
            how.device,
            resume=how.resume,
            overwrite=how.overwrite,
            workers=how.workers,
            rank=rank,
            world_size=world_size,
            ray=how.ray,
            progress=bar.at,
            ranks=ranks,
        )
    if ranks is not None and rank:
        return None
    if made is None:
        say(f"the shards of rank {rank} of {world_size} are done; whoever finishes last completes {output}")
        if how.json_:
            print(json.dumps({"output": str(output), "complete": False, "rank": rank, "world_size": world_size}))
        return None
    if made.was_complete:
        say(f"{output} is complete already")
    facts = made.to_json()
    last = {name: facts.pop(name) for name in ("seconds", "stages")}
    facts |= words.told | last
    print(json.dumps(facts, indent=2) if how.json_ else words.result(facts))
    for warning in made.warnings[:_WARNINGS_SHOWN]:
        say(f"warning: {plain(warning)}")
    if len(made.warnings) > _WARNINGS_SHOWN:
        say(f"warning: {len(made.warnings) - _WARNINGS_SHOWN} more in {output}/tilepress.json")
    show_report([output], how.report)
    return made


def experts_text(calibration: dict) -> list[str]:
    """Return a line on how many tokens a mixture's experts got, if it is one."""
    from tilepress.models.experts import expert_tokens

    layers = expert_tokens(calibration)
    tokens = sorted(count for of_layer in layers.values() for count in of_layer)
    if not tokens:
        return []
    none = f", {tokens.count(0)} of them none" if 0 in tokens else ""
    told = f"{len(tokens)} in {len(layers)} layers got {tokens[0]:,} to {tokens[-1]:,} tokens"
    return [f"  experts    {told}, half of them at least {tokens[len(tokens) // 2]:,}{none}"]


def own_text(model: str, text: "Text", how: Making, revision: str | None) -> "Text":
    """Return the text; one that the model writes with where it now is, and say what came of it."""
    if text.temperature is None:
        return text
    with Bar("sampling", how.quiet) as bar:
        found = tilepress.sample(
            model, text, device=how.device, trust_remote_code=how.trust_remote_code, revision=revision, progress=bar.at
        )
    for warning in found.warnings:
        say(f"warning: {warning}")
    if not how.quiet:
        before = ", sampled before" if found.was_complete else ""
        say(f"text: {found.tokens:,} tokens in {found.documents} documents by {model}{before}: {found.text.file}")
    return found.text


def say_next(output: str, base: str | Path, how: Making) -> None:
    """Name the command that measures what the new artifact costs."""
    if how.quiet or is_address(output):
        return
    from tilepress.formats.checkpoint import read_manifest
    from tilepress.text import CALIBRATION, RANDOM, Text

    words = ["tilepress", "eval", "perplexity", output, "--base", str(base)]
    dataset = read_manifest(Path(output))["settings"].get("dataset")
    if dataset not in (None, CALIBRATION, RANDOM) and Text(dataset).temperature is None:
        words += ["--dataset", dataset]
        say("hint: measure on a text that it was not calibrated on, where there is one")
    if how.trust_remote_code:
        words.append("--trust-remote-code")
    say(f"next: {shlex.join(words)}")
