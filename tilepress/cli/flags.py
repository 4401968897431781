"""The flags that several commands share, and what their texts mean. Torch is imported only where a value needs it."""

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, get_type_hints

import typer

from tilepress.formats import UsageError

if TYPE_CHECKING:
    from tilepress.text import Text


def _size(gib: float) -> float:
    """Return a size that a card may have; typer's own bounds let nan pass."""
    if not 0.001 <= gib <= 1e6:
        raise typer.BadParameter(f"{gib} is not in the range 0.001<=x<=1e6.")
    return gib


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Folder, hub id or address (s3://…), dense or an artifact.", show_default=False
    ),
]
Output = Annotated[
    str,  # of an address a path would keep one slash
    typer.Option(
        "--output", "-o", metavar="DIR", help="Folder to write; or an address: s3://BUCKET/DIR.", show_default=False
    ),
]
Device = Annotated[str, typer.Option(metavar="cpu|cuda|cuda:N|auto", help="Where to compute.")]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1024,
        help="Threads of the CPU.  [default: OMP_NUM_THREADS, or one for each usable core]",
        show_default=False,
    ),
]
Memory = Annotated[
    float,
    typer.Option(metavar="GIB", callback=_size, help="Memory for the attention cache: the context that fits is told."),
]
JsonFile = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the JSON there.", show_default=False)
]
Report = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="FILE", help="Then show it on a page (HTML; needs the extra report).", show_default=False
    ),
]
WriteCard = Annotated[
    bool, typer.Option("--write-card", help="Add the figures to the model card of MODEL, an artifact.")
]
Dtype = Annotated[str, typer.Option(metavar="auto|float32|bfloat16|float16", help="Of activations and dense weights.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an artifact in DIR.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run in DIR.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show layers, sizes, memory and disk; write nothing.")]
Ignore = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Leave matching layers dense; repeatable. A name, a glob, or re:REGEX.  [default: lm_head]",
        show_default=False,
    ),
]
Workers = Annotated[int, typer.Option(min=1, help="Local processes, each a shard at a time.")]
Rank = Annotated[
    int | None,
    typer.Option(
        min=0, help="This worker of several.  [default: RANK, SLURM_PROCID or JOB_COMPLETION_INDEX]", show_default=False
    ),
]
WorldSize = Annotated[
    int | None, typer.Option(min=1, help="How many workers.  [default: WORLD_SIZE or SLURM_NTASKS]", show_default=False)
]
Ray = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS|local",
        help="Write shards as tasks of a Ray cluster, --workers at a time if given: HOST:PORT, auto, or local (needs the extra ray).",
        show_default=False,
    ),
]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that the checkpoint brings.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.", show_default=False)]
Dataset = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|HUB_ID|self|random",
        help="Text: a .txt, .jsonl or .parquet file, or HUB_ID[:CONFIG[:SPLIT]]; self[:TEMPERATURE][+FILE]: the model writes it; "
        "random: tokens drawn at random (quantize).  "
        "[default, where text is needed: Salesforce/wikitext:wikitext-2-raw-v1:train]",
        show_default=False,
    ),
]
Samples = Annotated[
    int | None, typer.Option(help="Windows of text.  [default: 128; 8 of random tokens]", show_default=False)
]
Seqlen = Annotated[
    int | None,
    typer.Option(help="Tokens of a window.  [default: 2048, or what the model's positions allow]", show_default=False),
]
Bos = Annotated[
    str,
    typer.Option(metavar="auto|always|never", help="Begin windows of text with the BOS; auto: if the tokenizer does."),
]
Seed = Annotated[int, typer.Option(help="Seed of what is chosen at random.")]
Experts = Annotated[
    str,
    typer.Option(
        metavar="routed|all", help="The tokens that calibrate an expert of a mixture: its own, or all of the text."
    ),
]
Card = Annotated[
    str, typer.Option(metavar="any|h100|h200", help="The card that will run it: decides how bitmaps group their bits.")
]
Blocks = Annotated[
    bool, typer.Option("--blocks", help="Recover one decoder layer after the other: in the memory of one.")
]


@dataclass(frozen=True)
class Making:
    """The flags of every command that makes an artifact."""

    workers: ClassVar[int] = 1
    rank: ClassVar[int | None] = None
    world_size: ClassVar[int | None] = None
    ray: ClassVar[str | None] = None
    share: ClassVar[tuple[int, int]] = (0, 1)  # this worker, of how many
    device: Device = "auto"
    threads: Threads = None
    overwrite: Overwrite = False
    resume: Resume = False
    dry_run: DryRun = False
    trust_remote_code: Trust = False
    revision: Revision = None
    report: Report = None
    json_: Json = False
    quiet: Quiet = False

    def source(self) -> dict:
        """Return the arguments that say how a model's files are read."""
        return {"trust_remote_code": self.trust_remote_code, "revision": self.revision}

    def running(self) -> dict:
        """Return the arguments of a run in one process."""
        return self.source() | {"device": self.device, "resume": self.resume, "overwrite": self.overwrite}


@dataclass(frozen=True)
class Writing(Making):
    """The flags of commands that write weights, alone or among several workers."""

    ignore: Ignore = None
    workers: Workers = 1
    rank: Rank = None
    world_size: WorldSize = None
    ray: Ray = None

    @property
    def ignored(self) -> tuple[str, ...]:
        return tuple(self.ignore or ("lm_head",))

    @property
    def share(self) -> tuple[int, int]:
        return find_rank(self.rank, self.world_size)


@dataclass(frozen=True)
class Measuring:
    """The flags of every command that measures a model."""

    dtype: Dtype = "auto"
    device: Device = "auto"
    threads: Threads = None
    trust_remote_code: Trust = False
    revision: Revision = None
    output: JsonFile = None
    report: Report = None
    write_card: WriteCard = False
    json_: Json = False
    quiet: Quiet = False

    def loading(self) -> dict:
        """Return the arguments that say how a model is loaded."""
        chosen = {"device": self.device, "dtype": parse_dtype(self.dtype) or "auto"}
        return chosen | {"trust_remote_code": self.trust_remote_code, "revision": self.revision}


def takes(flags: type) -> Callable:
    """Give a command the fields of a dataclass as flags after its own; it gets them together as its argument `how`."""
    hints = get_type_hints(flags, include_extras=True)
    fields = dataclasses.fields(flags)
    hints = {field.name: hints[field.name] for field in fields}
    more = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields
    ]

    def decorate(command: Callable) -> Callable:
        @functools.wraps(command)
        def run(**words):
            return command(
                **{k: v for k, v in words.items() if k not in hints}, how=flags(**{k: words[k] for k in hints})
            )

        signature = inspect.signature(command)
        own = [parameter for name, parameter in signature.parameters.items() if name != "how"]
        run.__signature__ = signature.replace(parameters=own + more)
        run.__annotations__ = {p.name: p.annotation for p in own + more}
        return run

    return decorate


def reading(dataset: str | None, nsamples: int | None, seqlen: int | None, seed: int, bos: str) -> "Text":
    """Return the text that the flags ask for; what is not given has its default."""
    from tilepress.text import Text

    given = {"dataset": dataset, "nsamples": nsamples, "seqlen": seqlen}
    return Text(**{name: value for name, value in given.items() if value is not None}, seed=seed, bos=bos)


def parse_dtype(name: str):
    """Return the torch dtype of that name; None for auto."""
    import torch

    known = {"auto": None, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name not in known:
        raise UsageError(f"--dtype {name} is unknown", f"choose one of {', '.join(known)}")
    return known[name]


def parse_share(text: str) -> float:
    """Read 5% or 0.05; a bare number above 1 could mean either, so it is refused."""
    try:
        percent = text.strip().endswith("%")
        value = float(text.strip().removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf") or (value > 1 and not percent):
        raise UsageError(f"{text!r} is no share", "write 5% or 0.05")
    return value


def parse_sparsities(text: str) -> list[float]:
    """Read 0.6, or 0.5,0.6,0.7, in the range of a recipe."""
    from tilepress.compress.prune import expectation

    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(
            f"--sparsity {text!r} is no number", "0.6 prunes 60 % of the weights: --sparsity 0.6"
        ) from error
    for value in values:
        expectation.check(value)
    return values


def parse_list(text: str, what: str) -> list[int]:
    """Read whole numbers with commas: 1,8,16."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [0]
    if min(values) < 1:
        raise UsageError(f"{text!r} is no list of {what}", "write whole numbers with commas: 1,8,16")
    return values


def parse_batches(text: str) -> "list[int | str]":
    """Read numbers of sequences with commas, or `fit` for as many as the card holds: 1,8,fit."""
    return ["fit" if part == "fit" else parse_list(part, "batch")[0] for part in text.split(",")]


def parse_shape(text: str) -> tuple[int, int]:
    """Read rows and columns: 8192x4096."""
    try:
        rows, cols = (int(part) for part in text.lower().split("x"))
    except ValueError:
        rows = cols = 0
    if min(rows, cols) < 1:
        raise UsageError(f"{text!r} is no shape", "write ROWSxCOLS: 8192x4096")
    return rows, cols


def find_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return which worker this is and how many there are: from the flags, else from what schedulers set."""

    def first(given: int | None, names: tuple[str, ...]) -> int | None:
        return (
            given
            if given is not None
            else next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()), None)
        )

    world = first(world_size, ("WORLD_SIZE", "SLURM_NTASKS"))
    at = first(rank, ("RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX"))
    if at is not None and world is None:
        raise UsageError(f"rank {at}, but how many workers?", "add --world-size N")
    at, world = at or 0, world or 1
    if not 0 <= at < world:
        raise UsageError(f"rank {at} is not in 0..{world - 1}", "ranks count from 0: check --rank and --world-size")
    return at, world
