"""The page of a report: verdict, tables, drawings, texts, recipe. Names and texts on it are anyone's, so everything is escaped."""

import re
import shlex
from html import escape
from pathlib import Path

from tilepress.compress.layers.walk import FEW_TOKENS
from tilepress.eval.report.figures import figures
from tilepress.eval.report.gather import CARDS, EXPERT_TOKENS, Artifact, Gathered, json_for_script
from tilepress.eval.tasks import metrics_of
from tilepress.version import __version__

_NEAR_THE_FLOOR = 3  # times the noise floor: a divergence below cannot be told from rounding
_STYLE = """
:root { color-scheme: light; --line: #d9dee5; --soft: #f5f7fa; --text: #1c2430; --dim: #5b6675; --blue: #1f5fa8 }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); margin: 0 auto; max-width: 1080px; padding: 16px 20px 60px }
h1 { font-size: 1.5rem; margin: 12px 0 } h2 { font-size: 1.15rem; margin: 34px 0 8px; border-bottom: 1px solid var(--line) }
h3 { font-size: 1rem; margin: 18px 0 4px }
p.verdict { background: var(--soft); border-left: 4px solid var(--blue); margin: 10px 0; padding: 10px 14px; font-size: 1.05rem }
p.note { color: var(--dim); font-size: .88rem }
.scroll { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums }
th, td { padding: 5px 10px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
th { background: var(--soft); font-weight: 600 } th:first-child, td:first-child { text-align: left }
th.text { text-align: left } td.text { white-space: pre-wrap; text-align: left; vertical-align: top; min-width: 220px; overflow-wrap: anywhere }
pre { background: var(--soft); padding: 10px 14px; overflow-x: auto; font-size: .85rem }
.figure { width: 100%; min-height: 120px } footer { color: var(--dim); font-size: .85rem; margin-top: 40px }
@media (max-width: 600px) { body { padding: 8px 12px 40px; font-size: 14px } th, td { padding: 4px 6px } td.text { min-width: 112px } }
"""
_SCRIPT = """
const drawn = JSON.parse(document.getElementById('figures').textContent);
for (const [id, figure] of Object.entries(drawn)) {
  Plotly.newPlot(id, figure.data, figure.layout, {responsive: true, displaylogo: false, displayModeBar: false});
}
"""


def html(found: Gathered, title: str | None = None) -> str:
    """Return the whole page as a document that loads nothing."""
    from plotly.offline import get_plotlyjs

    drawn = figures(found)
    title = title or ", ".join(artifact.name for artifact in found.artifacts) or "a model"
    sections = [
        *(f'<p class="verdict">{_with_code(line)}</p>' for line in verdicts(found)),
        _sizes(found),
        _quality(found),
        _drawings(drawn, ("pareto",)),
        _tasks(found),
        _speed(found),
        _drawings(drawn, ("speed", "bandwidth")),
        _layers(found, drawn, ("output-error", "sparsity", "cache", "expert")),
        _texts(found),
        _recipes(found),
        _versions(found),
        "".join(f'<p class="note">{escape(note)}</p>' for note in found.notes),
    ]
    data = json_for_script({name: figure for name, (_, figure) in drawn.items()})
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><title>tilepress: {escape(title)}</title><style>{_STYLE}</style></head>
<body><h1>{escape(title)}</h1>
{"".join(sections)}
<footer>Made by tilepress {__version__} from artifacts and results; nothing was measured for this page, and it loads nothing.</footer>
<script type="application/json" id="figures">{data}</script>
<script>{get_plotlyjs()}</script><script>{_SCRIPT}</script></body></html>
"""


def verdicts(found: Gathered) -> list[str]:
    """Return a sentence for each compressed model: its size, what it costs, and what it brings, as far as that was measured."""
    return [_verdict(found, artifact) for artifact in found.artifacts if artifact.steps is not None]


def _verdict(found: Gathered, artifact: Artifact) -> str:
    parts = [f"{_megabytes(artifact.bytes)} of weights"]
    if artifact.source_bytes:
        parts[0] += (
            f", {artifact.bytes / artifact.source_bytes:.1%} of the {_megabytes(artifact.source_bytes)} it was made from"
        )
    if artifact.kv_bytes and artifact.kv_bytes != artifact.kv_bytes_dense:
        parts.append(f"an attention cache of {artifact.kv_bytes / artifact.kv_bytes_dense:.0%}")
    measured = [r for r in found.perplexities if found.artifact(r.get("model") or "") is artifact and "base" in r]
    for result in measured[:1]:
        before, kl = result["base"]["perplexity"], result["kl_divergence"]["mean"]
        told = f"perplexity {before:.3f} → {result['perplexity']:.3f} ({result['perplexity'] / before - 1:+.2%})"
        parts += [
            told,
            f"KL divergence {kl:.4f}{_against_floor(result)}",
            f"same top token {result['top1_agreement']:.1%}",
        ]
    for result in found.tasks:
        if found.artifact(result["model"]) is artifact:
            parts += [
                f"{name} {scores['acc_norm']:.1%}" for name, scores in result["results"].items() if "acc_norm" in scores
            ]
    faster = [
        (row["speedup"], row["batch"], "" if result["env"].get("card") else " by references on a CPU")
        for result in found.speeds
        for row in result["rows"]
        if "speedup" in row and found.artifact(row["model"]) is artifact
    ]
    if faster:
        times, batch, how = max(faster)
        parts.append(f"decodes {times:.2f} times as fast at batch {batch}{how}")
    text = "; ".join(parts)
    return (
        f"{artifact.name}: {text}."
        if measured
        else f"{artifact.name}: {text}. Its cost was not measured: `tilepress eval perplexity`."
    )


def _against_floor(result: dict) -> str:
    """Return how a divergence stands to that of rounding alone, where this was measured."""
    if "noise_floor" not in result:
        return ""
    floor = result["noise_floor"]["kl_divergence"]["mean"]
    kl = result["kl_divergence"]["mean"]
    if kl <= _NEAR_THE_FLOOR * floor:
        return f" (not to be told from rounding, {floor:.4f})"
    return f" ({kl / floor:,.0f} times that of rounding)" if floor > 0 else ""


def _table(head: list[str], rows: list[list[str]], texts: bool = False) -> str:
    kind = ' class="text"' if texts else ""
    cells = "".join(f"<th{kind}>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'


def _section(title: str, body: str) -> str:
    anchor = "".join(letter if letter.isalnum() else "-" for letter in title.lower())
    return f'<section id="{anchor}"><h2>{escape(title)}</h2>{body}</section>'


def _with_code(text: str) -> str:
    """Return text for the page in which backticks set off code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.2f} MB"


def _with_error(value: float | None, stderr: float | None, form: str = ".4f") -> str:
    return "" if value is None else f"{value:{form}}" + (f" ± {stderr:{form}}" if stderr is not None else "")


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _sizes(found: Gathered) -> str:
    if not found.artifacts:
        return ""
    rows, fits = [], []
    for one in found.artifacts:
        layouts = ", ".join(f"{count} x {layout}" for layout, count in sorted(one.layouts.items()))
        share = _share(one.bytes / one.source_bytes) if one.source_bytes else ""
        cache = "" if one.kv_bytes is None else f"{one.kv_bytes:,} bytes"
        bits = f"{8 * one.bytes / max(one.elements, 1):.2f}"
        rows.append([one.name, _megabytes(one.bytes), share, bits, _share(one.zeros), layouts, cache])
        fits.append([one.name, *(_context(one, gib) for gib in CARDS.values())])
    head = ["model", "weights", "of its source", "bits each", "zeros", "stored as", "a token in the cache"]
    body = (
        _table(head, rows) + "<h3>Tokens of context that fit beside the weights</h3>" + _table(["model", *CARDS], fits)
    )
    positions = {f"{one.name} {one.positions:,}" for one in found.artifacts if one.positions}
    told = "One sequence, or several together; an estimate: 95 % of the card, less 2 GiB for activations, graphs and torch."
    if positions:
        told += f" Positions of the model: {', '.join(sorted(positions))}; N x M are N sequences that fill them."
    return _section("Size and memory", body + _note(told))


def _context(artifact: Artifact, gib: float) -> str:
    """Return the tokens that fit; where a sequence cannot have so many, how many of the longest ones do."""
    tokens, longest = artifact.context(gib), artifact.positions
    if not tokens:
        return "" if tokens is None else "does not fit"
    return f"{tokens:,}" if longest is None or tokens <= longest else f"{tokens // longest:,} x {longest:,}"


def _quality(found: Gathered) -> str:
    if not found.perplexities:
        return ""
    head = ["model", "perplexity", "of base", "KL divergence", "99 %", "largest", "same top token", "bits a byte"]
    rows, notes, dense = [], [], set()
    for result in found.perplexities:
        base, floor, protocol = result.get("base"), result.get("noise_floor"), result["protocol"]
        settings = (protocol["dataset"], protocol["seqlen"], protocol["recipe"], protocol["dtype"], protocol["kv"])
        if base and (base["model"], settings[:4]) not in dense:
            dense.add((base["model"], settings[:4]))
            name = f"{Path(base['model']).name} (base)"
            told = _with_error(base["perplexity"], base["perplexity_stderr"])
            rows.append([name, told, "1", "", "", "", "", f"{base['bits_per_byte']:.4f}"])
        if floor and (floor["of"], settings[:4]) not in dense:
            dense.add((floor["of"], settings[:4]))
            name = f"noise floor: {floor['of']} in {floor['dtype']}"
            rows.append([name, f"{floor['perplexity']:.4f}", "", *_distance(floor), ""])
        told = _with_error(result["perplexity"], result["perplexity_stderr"])
        over = f"{result['perplexity'] / base['perplexity']:.4f}" if base else ""
        distance = _distance(result) if base else [""] * 4
        rows.append(
            [Path(result.get("model") or "model").name, told, over, *distance, f"{result['bits_per_byte']:.4f}"]
        )
        cache = f", attention cache: {protocol['kv']}" if protocol["kv"] != "off" else ""
        notes.append(
            f"{Path(result.get('model') or 'model').name}: {protocol['dataset']}, recipe {protocol['recipe']}, {result['windows']} windows of "
            f"{protocol['seqlen']} tokens, {result['tokens']:,} scored, {protocol['dtype']} on {protocol['device']}{cache}."
        )
    notes.append(
        "± are standard errors over windows, paired where two models are compared. Divergences are in nats a token."
    )
    return _section("Quality", _table(head, rows) + "".join(map(_note, dict.fromkeys(notes))))


def _distance(found: dict) -> list[str]:
    kl = found["kl_divergence"]
    same = _with_error(100 * found["top1_agreement"], _percent(found["top1_agreement_stderr"]), ".2f") + " %"
    return [_with_error(kl["mean"], kl["stderr"]), f"{kl['p99']:.4f}", f"{kl['max']:.3f}", same]


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _tasks(found: Gathered) -> str:
    rows = []
    for result in found.tasks:
        for task, scores in result["results"].items():
            for metric in metrics_of(scores):
                told = [
                    _with_error(of.get(metric), of.get(f"{metric}_stderr")) for of in (scores, scores.get("base", {}))
                ]
                again = ""
                if "recovery" in scores and metric == scores.get("main", "acc_norm"):
                    again = _with_error(100 * scores["recovery"], _percent(scores.get("recovery_stderr")), ".1f") + " %"
                rows.append([task, Path(result["model"]).name, f"{scores['items']:,}", metric, *told, again])
    told = _note(
        "± are standard errors over items; those of a recovery, the score over the base's, are of paired items."
    )
    head = ["task", "model", "items", "metric", "score", "base", "recovery"]
    return _section("Tasks", _table(head, rows) + told) if rows else ""


def _speed(found: Gathered) -> str:
    head = [
        "model",
        "batch",
        "context",
        "tokens/s",
        "ms a token",
        "ms to the first",
        "peak GiB",
        "of read bandwidth",
        "speed-up",
    ]
    body = ""
    for result in found.speeds:
        rows = []
        for row in result["rows"]:
            name = Path(row["model"]).name + (" (base)" if row.get("is_base") else "")
            start = [name, f"{row.get('batch') or row.get('asked')}", f"{row['context']:,}"]
            if not row.get("fits", True):
                rows.append([*start, "does not fit", *[""] * (len(head) - 4)])
                continue
            peak = "" if row.get("peak_gib") is None else f"{row['peak_gib']:.2f}"
            times = f"{row['tokens_per_s']:,.1f}", f"{row['tpot_ms']:.2f}", f"{row['ttft_ms']:.1f}"
            faster = f"{row['speedup']:.2f}" if "speedup" in row else ""
            rows.append([*start, *times, peak, _share(row.get("share_of_read")), faster])
        env = result["env"]
        threads = env.get("threads")
        where = env.get("card") or f"{threads} thread{'' if threads == 1 else 's'} of a CPU"
        read = f", which reads {result['read_gbps']:,.0f} GB/s" if result.get("read_gbps") else ""
        body += _table(head, rows) + _note(
            f"{where}{read}, torch {env.get('torch')}; medians of runs, drawn with half their spread."
        )
    return _section("Speed", body) if body else ""


def _drawings(drawn: dict[str, tuple[str, dict]], kinds: tuple[str, ...]) -> str:
    return "".join(
        f'<h3>{escape(title)}</h3><div class="figure" id="{name}"></div>'
        for name, (title, _) in drawn.items()
        if name.startswith(kinds)
    )


def _layers(found: Gathered, drawn: dict[str, tuple[str, dict]], kinds: tuple[str, ...]) -> str:
    body = _drawings(drawn, kinds)
    notes = [
        "Errors are relative, of outputs on calibration text, as the manifest has them; experts of a layer are one mean."
    ]
    if any(name.startswith("output-error") for name in drawn):
        notes.append("White: not compressed, such as weights that quantization keeps in 16 bits.")
    if any(name.startswith("cache-error") for name in drawn):
        notes.append("The squares of a layer's KV heads add up to that of its attention's outputs.")
    for one in found.artifacts:
        if tokens := [cell["value"] for cell in one.maps.get(EXPERT_TOKENS, ())]:
            few, none = sum(seen < FEW_TOKENS for seen in tokens), tokens.count(0)
            told = f"{one.name}: {len(tokens) - few:,} of {len(tokens):,} experts saw {FEW_TOKENS} tokens of the calibration text or more"
            notes.append(f"{told}; {none:,} saw none.")
    return _section("Layer by layer", body + "".join(map(_note, notes))) if body else ""


def _texts(found: Gathered) -> str:
    body = ""
    for result in found.compared:
        names = Path(result["a"]).name, Path(result["b"]).name
        rows = [[pair["prompt"], pair["of_a"], pair["of_b"]] for pair in result["pairs"]]
        kl, same = result["distance"]["kl_divergence"], result["distance"]["top1_agreement"]
        told = f"Greedy, at most {result['new_tokens']} tokens. Over {names[0]}'s answers: KL divergence "
        told += f"{_with_error(kl['mean'], kl['stderr'])}, same top token {same:.1%}."
        body += _table(["prompt", *names], rows, texts=True) + _note(told)
    return _section("Side by side", body) if body else ""


def _recipes(found: Gathered) -> str:
    body = ""
    for one in found.artifacts:
        if one.steps is None:
            continue
        words = [
            "tilepress",
            "compress",
            "stack",
            one.steps.model or "MODEL",
            "-o",
            one.name,
            "--recipe",
            "recipe.yaml",
        ]
        body += f"<h3>{escape(one.name)}</h3><pre>{escape(one.steps.to_yaml())}</pre>"
        body += f"<p>With this in recipe.yaml: <code>{escape(shlex.join(words))}</code></p>"
        if one.left_alone:
            told = "; ".join(f"{count} x {reason}" for reason, count in sorted(one.left_alone.items()))
            body += _note(f"Left alone: {told}.")
    commands = [_command(result) for result in found.perplexities]
    if commands:
        body += "<h3>How it was measured</h3><pre>" + escape("\n".join(dict.fromkeys(commands))) + "</pre>"
    return _section("Recipe and commands", body) if body else ""


def _command(result: dict) -> str:
    protocol, base = result["protocol"], result.get("base")
    words = [
        "tilepress",
        "eval",
        "perplexity",
        result.get("model") or "MODEL",
        *(["--base", base["model"]] if base else []),
    ]
    words += ["--dataset", protocol["dataset"], "--seqlen", str(protocol["seqlen"]), "--dtype", protocol["dtype"]]
    words += ["--recipe", "strided", "--stride", str(protocol["stride"])] if protocol["recipe"] == "strided" else []
    words += ["--bos", protocol["bos"]] if protocol["bos"] != "auto" else []
    words += ["--limit", str(protocol["limit"])] if protocol["limit"] else []
    words += ["--kv", protocol["kv"]] if protocol["kv"] == "decode" else []
    words += ["--noise-floor"] if "noise_floor" in result else []
    return shlex.join(words)


def _versions(found: Gathered) -> str:
    names = list(dict.fromkeys(name for one in found.artifacts for name in one.versions))
    rows = [[one.name, *(one.versions.get(name, "") for name in names)] for one in found.artifacts if one.versions]
    return _section("Versions that made it", _table(["artifact", *names], rows)) if rows else ""
