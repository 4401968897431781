"""`compress prune --sweep`: what each of several sparsities costs, one artifact on the disk at a time.

Every artifact is written to a folder of its own inside the output, measured against its source, and removed; its row stays in `sweep.json`, so a
stopped sweep goes on.
"""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

from tilepress.compress.prune.recipe import PruneRecipe
from tilepress.compress.run.finish import finish
from tilepress.compress.run.plan import make_plan, open_output
from tilepress.compress.run.shards import run_shards
from tilepress.eval.perplexity import Protocol, perplexity
from tilepress.formats import UsageError
from tilepress.formats.artifact import WORK_FOLDER, to_json, write_atomic
from tilepress.formats.checkpoint import MANIFEST_NAME, Checkpoint
from tilepress.runtime.loader import load

FILES = ("sweep.json", "sweep.md", "sweep.svg")
_MARKS = {WORK_FOLDER, MANIFEST_NAME}  # of an artifact, finished or not
_WIDTH, _HEIGHT, _MARGIN = 420, 300, 56


def sweep(
    checkpoint: Checkpoint,
    recipes: list[PruneRecipe],
    protocol: Protocol,
    output: Path,
    device: str,
    resume: bool,
    overwrite: bool,
    progress: Callable[[str, int, int], None],
    tokenizer,
) -> dict:
    """Rows by ascending sparsity, written to `output` as table and drawing. Raises UsageError where something else is in the way."""
    identity = {
        "source": checkpoint.name,
        "protocol": protocol.__dict__,
        "settings": [{k: v for k, v in recipe.settings().items() if k != "sparsity"} for recipe in recipes[:1]],
    }
    rows = _rows_so_far(output, identity, resume, overwrite)
    trust = recipes[0].trust_remote_code
    base = None
    for done, recipe in enumerate(sorted(recipes, key=lambda recipe: recipe.sparsity)):
        if any(row["sparsity_asked"] == recipe.sparsity for row in rows):
            continue
        what = f"{recipe.method} {recipe.sparsity:.0%}"
        progress(what, done, len(recipes))
        folder = output / f"sparsity-{recipe.sparsity:g}"  # the artifact that is measured
        targets, left = recipe.find_targets(checkpoint, trust)
        recipe.check(checkpoint, targets, left)
        plan = make_plan(checkpoint, folder, recipe, targets, left)
        if open_output(plan, resume and folder.exists(), False):
            run_shards(
                plan, device=device, progress=lambda item, _, d=done, w=what: progress(f"{w}: {item}", d, len(recipes))
            )
            finish(plan)
        made = plan.outcome()
        base = base or load(str(checkpoint.path), device=device, kv=False, trust_remote_code=trust)
        subject = load(str(folder), device=device, kv=False, trust_remote_code=trust)
        found = perplexity(subject, tokenizer, protocol, base)
        rows.append(
            {
                "sparsity_asked": recipe.sparsity,
                "sparsity": made["sparsity"],
                "bytes": made["bytes"],
                "source_bytes": made["source_bytes"],
                "perplexity": found["perplexity"],
                "base_perplexity": found["base"]["perplexity"],
                "times_dense": found["perplexity"] / found["base"]["perplexity"],
                "kl_divergence": found["kl_divergence"]["mean"],
                "top1_agreement": found["top1_agreement"],
            }
        )
        told = identity | {"rows": rows}
        write_atomic(output / FILES[0], to_json(told | {"measured": folder.name}), output)
        _remove(folder)
        write_atomic(output / FILES[0], to_json(told), output)
    method = recipes[0].method
    result = identity | {"rows": sorted(rows, key=lambda row: row["sparsity_asked"])}
    write_atomic(output / FILES[1], markdown(result["rows"], method, protocol).encode(), output)
    write_atomic(output / FILES[2], drawing(result["rows"], method).encode(), output)
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
    output.mkdir(parents=True, exist_ok=True)
    if not found.exists():
        return []
    before = json.loads(found.read_text())
    if {key: before.get(key) for key in identity} != json.loads(to_json(identity)):
        raise UsageError(f"{output} holds another sweep", "use the same command as before, or --overwrite")
    if "measured" in before:  # it was stopped while it removed what the last row was made of
        _remove(output / before["measured"])
    return before["rows"]


def cells(rows: list[dict]) -> list[list[str]]:
    """A row a sparsity, as text."""
    return [
        [
            f"{row['sparsity']:.2%}",
            f"{row['bytes'] / 1e6:.2f} MB",
            f"{row['bytes'] / row['source_bytes']:.1%}",
            f"{row['perplexity']:.4f}",
            f"{row['times_dense']:.3f}",
            f"{row['kl_divergence']:.4f}",
            f"{row['top1_agreement']:.2%}",
        ]
        for row in rows
    ]


HEAD = ["zeros", "weights", "of dense", "perplexity", "times dense", "KL divergence", "same top token"]


def markdown(rows: list[dict], method: str, protocol: Protocol) -> str:
    text = f"{protocol.dataset}, windows of {protocol.seqlen} tokens; dense: {rows[0]['base_perplexity']:.4f}"
    lines = [f"# {method}: what each sparsity costs", "", text, ""]
    lines += ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in cells(rows)), ""])


def drawing(rows: list[dict], method: str) -> str:
    """An SVG: perplexity over dense, and KL divergence, against bytes; both logarithmic upwards."""
    panels = [
        _panel(rows, "times_dense", "perplexity / dense", 0),
        _panel(rows, "kl_divergence", "KL divergence, nats", _WIDTH),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * _WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/><text x="{_WIDTH}" y="16" text-anchor="middle">{method}</text>'
        + "".join(panels)
        + "</svg>\n"
    )


def _panel(rows: list[dict], key: str, title: str, left: int) -> str:
    xs, ys = [row["bytes"] for row in rows], [math.log10(max(row[key], 1e-9)) for row in rows]
    low_x, high_x, low_y, high_y = min(xs), max(xs), min(ys), max(ys)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - low_x) / (high_x - low_x) if high_x > low_x else 0.5
        up = (y - low_y) / (high_y - low_y) if high_y > low_y else 0.5
        return left + _MARGIN + across * (_WIDTH - 2 * _MARGIN), _HEIGHT - _MARGIN - up * (_HEIGHT - 2 * _MARGIN)

    points = [place(x, y) for x, y in zip(xs, ys, strict=True)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    marks = [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#1f5fa8"/><text x="{x + 6:.1f}" y="{y - 6:.1f}">{row["sparsity"]:.0%}: {row[key]:.3g}</text>'
        for (x, y), row in zip(points, rows, strict=True)
    ]
    floor, wall, right = _HEIGHT - _MARGIN, left + _MARGIN, left + _WIDTH - _MARGIN
    return (
        f'<polyline points="{path}" fill="none" stroke="#1f5fa8" stroke-width="1.5"/>{"".join(marks)}'
        f'<path d="M{wall - 10},{_MARGIN - 16} V{floor + 10} H{right + 30}" fill="none" stroke="#888"/>'
        f'<text x="{wall - 10}" y="{_MARGIN - 22}">{title}</text>'
        f'<text x="{wall}" y="{floor + 26}">{low_x / 1e6:.1f} MB</text>'
        f'<text x="{right}" y="{floor + 26}" text-anchor="middle">{high_x / 1e6:.1f} MB of weights</text>'
    )
