"""`compress prune --sweep`: what each of several sparsities costs, one artifact on the disk at a time.

Every artifact is written to a folder of its own inside the output, measured against its source, and removed; its row stays in `sweep.json`, so a
stopped sweep goes on.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tilepress.compress.prune.recipe import Prune
from tilepress.compress.run.api import compress, text_for
from tilepress.device import find_device
from tilepress.eval.perplexity import Protocol, measure
from tilepress.eval.report.pictures import costs, has_matplotlib, png
from tilepress.formats import UsageError
from tilepress.formats.artifact import WORK_FOLDER, disk_errors, to_json, write_atomic
from tilepress.formats.checkpoint import MANIFEST_NAME, open_model
from tilepress.runtime.loader import load
from tilepress.text import EVALUATION, Text, check_source, default_seqlen, load_tokenizer

FILES = ("sweep.json", "sweep.md", "sweep.png")
_MARKS = {WORK_FOLDER, MANIFEST_NAME}  # of an artifact, finished or not


@dataclass(frozen=True)
class Row:
    """The cost of one sparsity: sizes in bytes of stored weights, divergence in nats a token."""

    sparsity_asked: float
    sparsity: float
    bytes: int
    source_bytes: int
    perplexity: float
    base_perplexity: float
    times_dense: float  # perplexity over the base's
    kl_divergence: float
    top1_agreement: float


@dataclass(frozen=True)
class Sweep:
    """Rows by ascending sparsity, and what they were measured with."""

    source: str
    protocol: dict
    settings: list[dict]
    rows: tuple[Row, ...]

    def to_json(self) -> dict:
        """Return what `sweep.json` holds and `--sweep --json` prints."""
        return asdict(self) | {"rows": [asdict(row) for row in self.rows]}


def sweep(
    model: str | Path,
    output: str | Path,
    recipes: Sequence[Prune],
    *,
    dataset: str | Path | Text | None = None,
    evaluate_on: str | Path = EVALUATION,
    bos: str = "auto",
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    revision: str | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Sweep:
    """Measure what each of several recipes costs that differ in sparsity alone, and write a table, a drawing and the rows to `output`.

    `dataset` is the text that the recipes read, `evaluate_on` the text to measure on, in windows that begin as `bos` says
    (`tilepress.perplexity`); the rest is as in `tilepress.compress`. Raises UsageError where something else is in the way, and what
    `compress` raises."""
    checkpoint, output, device = open_model(model, revision), Path(output), find_device(device)
    text = text_for(recipes[0], dataset, checkpoint, trust_remote_code)
    check_source(str(evaluate_on))
    protocol = Protocol(str(evaluate_on), "gptq", default_seqlen(checkpoint.text_config), bos=bos)
    tokenizer = load_tokenizer(checkpoint.path, trust_remote_code)
    settings = {key: value for key, value in recipes[0].settings(text).items() if key != "sparsity"}
    identity = {"source": checkpoint.name, "protocol": asdict(protocol), "settings": [settings]}
    rows = [Row(**row) for row in _rows_so_far(output, identity, resume, overwrite)]
    options = {"device": device, "kv": False, "trust_remote_code": trust_remote_code}
    base = None
    for done, recipe in enumerate(sorted(recipes, key=lambda recipe: recipe.sparsity)):
        if any(row.sparsity_asked == recipe.sparsity for row in rows):
            continue
        what = f"{recipe.method} {recipe.sparsity:.0%}"
        progress(what, done, len(recipes))
        folder = output / f"sparsity-{recipe.sparsity:g}"  # the artifact that is measured

        def report(item: str, *_, done=done, what=what) -> None:
            progress(f"{what}: {item}", done, len(recipes))

        made = compress(
            checkpoint.path,
            folder,
            recipe,
            dataset=text,
            device=device,
            resume=resume and folder.exists(),
            trust_remote_code=trust_remote_code,
            progress=report,
        )
        base = base or load(str(checkpoint.path), **options)
        found = measure(load(str(folder), **options), tokenizer, protocol, base)
        dense = found.comparison.base.perplexity
        rows.append(
            Row(
                recipe.sparsity,
                made.sparsity,
                made.bytes,
                made.source_bytes,
                found.perplexity,
                dense,
                found.perplexity / dense,
                found.comparison.kl_divergence["mean"],
                found.comparison.top1_agreement,
            )
        )
        told = identity | {"rows": [asdict(row) for row in rows]}
        write_atomic(output / FILES[0], to_json(told | {"measured": folder.name}), output)
        _remove(folder)
        write_atomic(output / FILES[0], to_json(told), output)
    result = Sweep(**identity, rows=tuple(sorted(rows, key=lambda row: row.sparsity_asked)))
    write_atomic(output / FILES[1], markdown(result.rows, recipes[0].method, protocol).encode(), output)
    if has_matplotlib():
        write_atomic(output / FILES[2], drawing(result.rows, recipes[0].method), output)
    return result


def _remove(folder: Path) -> None:
    """Takes an artifact away, and last what tells that it is one: --overwrite finds it if this is stopped."""
    if folder.exists():
        for path in sorted(folder.iterdir(), key=lambda path: path.name in _MARKS):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        folder.rmdir()


def _rows_so_far(output: Path, identity: dict, resume: bool, overwrite: bool) -> list[dict]:
    found = output / FILES[0]
    if overwrite:
        for folder in output.glob("sparsity-*"):
            if folder.is_dir() and (not any(folder.iterdir()) or any((folder / mark).exists() for mark in _MARKS)):
                _remove(folder)
        for name in FILES:
            (output / name).unlink(missing_ok=True)
    elif output.exists() and any(output.iterdir()) and not resume:
        raise UsageError(
            f"{output} is not empty",
            "continue a sweep with --resume, replace it with --overwrite, or choose another -o DIR",
        )
    with disk_errors(output):
        output.mkdir(parents=True, exist_ok=True)
    if not found.exists():
        return []
    before = json.loads(found.read_text())
    if {key: before.get(key) for key in identity} != json.loads(to_json(identity)):
        raise UsageError(f"{output} holds another sweep", "use the same command as before, or --overwrite")
    if "measured" in before:  # it was stopped while it removed what the last row was made of
        _remove(output / before["measured"])
    return before["rows"]


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """A row a sparsity, as text."""
    return [
        [
            f"{row.sparsity:.2%}",
            f"{row.bytes / 1e6:.2f} MB",
            f"{row.bytes / row.source_bytes:.1%}",
            f"{row.perplexity:.4f}",
            f"{row.times_dense:.3f}",
            f"{row.kl_divergence:.4f}",
            f"{row.top1_agreement:.2%}",
        ]
        for row in rows
    ]


HEAD = ["zeros", "weights", "of dense", "perplexity", "times dense", "KL divergence", "same top token"]


def markdown(rows: Sequence[Row], method: str, protocol: Protocol) -> str:
    text = f"{protocol.dataset}, windows of {protocol.seqlen} tokens; dense: {rows[0].base_perplexity:.4f}"
    lines = [f"# {method}: what each sparsity costs", "", text, ""]
    lines += ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in cells(rows)), ""])


def drawing(rows: Sequence[Row], method: str) -> bytes:
    """Draw perplexity over dense, and KL divergence, against bytes: a PNG."""
    panels = {
        up: [(row.bytes / 1e6, getattr(row, key), f"{row.sparsity:.0%}") for row in rows]
        for key, up in (("times_dense", "perplexity / dense"), ("kl_divergence", "KL divergence, nats"))
    }
    return png(costs(panels, "MB of weights", method), panels)
