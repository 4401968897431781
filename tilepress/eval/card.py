"""Measured figures in an artifact's model card, in words for people and as metadata that the hub reads.

    README.md   front matter (base_model, licence, model-index) · what the run wrote · between two marks: a table of figures

What a run writes depends on the run alone, so that the same run gives the same bytes; this is added when somebody asks for it, and the manifest's
record of README.md follows. A figure that is measured again replaces the one before.
"""

import re
from pathlib import Path

import yaml

from tilepress.compress.run.finish import source_head
from tilepress.eval.tasks import metrics_of
from tilepress.formats import UsageError, foreign_errors
from tilepress.formats.artifact import sha256_file, to_json, write_atomic
from tilepress.formats.checkpoint import MANIFEST_NAME, read_manifest
from tilepress.formats.files import read_yaml

CARD = "README.md"
_BEGIN, _END = "<!-- tilepress: measured -->", "<!-- tilepress: end -->"
_SECTION = re.compile(rf"{re.escape(_BEGIN)}.*?{re.escape(_END)}\n?", re.S)
_HEAD = ["| what | on | this model | base |", "|---|---|---|---|"]


def write_card(artifact: str | Path, result: dict) -> Path:
    """Add figures to an artifact's card: `tilepress.write_card("int8", tilepress.perplexity("int8", …).to_json())`.

    result  what `eval perplexity`, `eval tasks` or `eval speed` print with --json

    Returns the card's path. Raises UsageError for a folder without a manifest, TilepressError for a result that is none of these."""
    folder = Path(artifact)
    if not (folder / MANIFEST_NAME).exists():
        raise UsageError(f"{folder} is no finished artifact, so it has no card", "give the folder that was compressed")
    manifest = read_manifest(folder)
    with foreign_errors("the result does not say what it should", "give what `eval … --json` prints"):
        rows, metrics = _figures(result)
    with foreign_errors(f"{CARD} of {folder} is not as a run writes it", "make the artifact again"):
        text = (folder / CARD).read_text(encoding="utf-8")
        _, front, body = text.split("---\n", 2)
        head = read_yaml(front) or {}
        before = _SECTION.search(body)
        rows = _joined(before[0] if before else "", rows)
        section = "\n".join([_BEGIN, "## Measured", "", *_HEAD, *rows, "", _END, ""])
        body = _SECTION.sub("", body).rstrip("\n") + "\n\n" + section
        head |= source_head(folder)
        head["model-index"] = _index(head.get("model-index"), manifest, folder, metrics)
        text = f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n{body}"
    write_atomic(folder / CARD, text.encode(), folder)
    for file in manifest["files"]:
        if file["name"] == CARD:
            file |= {"bytes": (folder / CARD).stat().st_size, "sha256": sha256_file(folder / CARD)}
    write_atomic(folder / MANIFEST_NAME, to_json(manifest), folder)
    return folder / CARD


def _figures(result: dict) -> tuple[list[str], list[dict]]:
    """Return rows of the table, and metrics for the hub: {type, name, value, dataset}."""
    if "perplexity" in result:
        return _of_perplexity(result)
    if "results" in result:
        return _of_tasks(result)
    return _of_speed(result), []


def _of_perplexity(result: dict) -> tuple[list[str], list[dict]]:
    protocol, base = result["protocol"], result.get("base")
    data = Path(protocol["dataset"]).name
    on = f"{data}, {result['windows']} windows of {protocol['seqlen']} tokens, recipe {protocol['recipe']}, {protocol['dtype']}"
    other = "" if base is None else _told(base["perplexity"], base["perplexity_stderr"])
    rows = [_row("perplexity", on, _told(result["perplexity"], result["perplexity_stderr"]), other)]
    metrics = [{"type": "perplexity", "name": "perplexity", "value": result["perplexity"], "dataset": data}]
    if base is not None:
        kl = result["kl_divergence"]
        rows.append(_row("KL divergence from base, nats", on, _told(kl["mean"], kl["stderr"]), ""))
        rows.append(_row("same top token as base", on, f"{result['top1_agreement']:.2%}", ""))
        metrics.append(
            {"type": "kl_divergence", "name": "KL divergence from base", "value": kl["mean"], "dataset": data}
        )
    return rows, metrics


def _of_tasks(result: dict) -> tuple[list[str], list[dict]]:
    rows, metrics = [], []
    for task, scores in result["results"].items():
        for key in metrics_of(scores):
            base = scores.get("base", {})
            other = "" if key not in base else _told(base[key], base.get(f"{key}_stderr"))
            told = _told(scores[key], scores.get(f"{key}_stderr"))
            rows.append(_row(f"{task} {key}", f"{scores['items']:,} items", told, other))
            metrics.append({"type": key, "name": key, "value": scores[key], "dataset": task})
    return rows, metrics


def _of_speed(result: dict) -> list[str]:
    base = {(row["asked"], row["context"]): row for row in result["rows"] if row["is_base"] and row["fits"]}
    where, rows = result["env"].get("card") or "CPU", []
    for row in result["rows"]:
        if row["fits"] and not row["is_base"]:
            on = f"{where}, batch {row['batch']}, context {row['context']}"
            other = base.get((row["asked"], row["context"]))
            rows.append(
                _row("tokens/s", on, f"{row['tokens_per_s']:,.1f}", f"{other['tokens_per_s']:,.1f}" if other else "")
            )
    return rows


def _told(value: float, stderr: float | None) -> str:
    return f"{value:.4f}" + ("" if stderr is None else f" ± {stderr:.4f}")


def _row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.replace("|", "/").split()) for cell in cells) + " |"


def _joined(section: str, rows: list[str]) -> list[str]:
    """Return the rows of a section before, and those that are new; what is measured again is the new one."""
    old = [line for line in section.splitlines() if line.startswith("| ") and line not in _HEAD]
    return [*{tuple(row.split(" | ")[:2]): row for row in (*old, *rows)}.values()]


def _index(before: object, manifest: dict, folder: Path, metrics: list[dict]) -> list[dict]:
    """Return the hub's `model-index` with these metrics, and those of other data that it had."""
    results = before[0].get("results", []) if isinstance(before, list) and before else []
    for metric in metrics:
        mine = {"type": metric["type"], "name": metric["name"], "value": round(metric["value"], 6)}
        results = [
            each
            for each in results
            if (each["dataset"]["name"], each["metrics"][0]["type"]) != (metric["dataset"], metric["type"])
        ]
        data = {"name": metric["dataset"], "type": metric["dataset"]}
        results.append(
            {"task": {"type": "text-generation", "name": "Text Generation"}, "dataset": data, "metrics": [mine]}
        )
    return [{"name": folder.resolve().name, "results": results}]
