"""The drawings of a report, by plotly: each is checked by plotly's own validators when it is made."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

from tilepress.eval.report.gather import EXPERT_TOKENS, Artifact, Gathered
from tilepress.formats import UsageError, installing

COLOURS = ["#1f5fa8", "#c2410c", "#15803d", "#7e22ce", "#b45309", "#0e7490"]
_SCALES = {  # of heat maps; an expert that saw nothing stands out
    "sparsity": "Blues",
    EXPERT_TOKENS: [[0, "#c2410c"], [1e-6, "#deebf7"], [1, "#08306b"]],
}
_FONT = {"family": "system-ui, sans-serif", "size": 12}
_CALM = {  # of every drawing
    "template": "none",
    "font": _FONT,
    "margin": {"l": 10, "r": 10, "t": 34, "b": 10},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "legend": {"orientation": "h", "y": -0.25},
    "hoverlabel": {"align": "left"},
}


def needs_plotly() -> None:
    """Raise UsageError where plotly is missing."""
    if find_spec("plotly") is None:
        raise UsageError("a report needs plotly, which is not installed", installing("report"))


def figures(found: Gathered) -> dict[str, tuple[str, dict]]:
    """Return drawings as {id: (title, plotly's JSON)}: those for which something was measured."""
    drawn = {"pareto": ("Size against divergence", pareto(found))}
    for number, artifact in enumerate(found.artifacts):
        for what, cells in artifact.maps.items():
            made = heat_map(cells, what) if cells else None
            drawn[f"{what.replace(' ', '-')}-{number}"] = (f"{artifact.name}: {what}, layer by layer", made)
        drawn[f"cache-{number}"] = (f"{artifact.name}: error of the attention cache", cache_errors(artifact))
    for number, result in enumerate(found.speeds):
        drawn[f"speed-{number}"] = ("Tokens a second", speeds(result))
        drawn[f"bandwidth-{number}"] = ("Share of what the card's memory can read", bandwidths(result))
    return {name: (title, figure) for name, (title, figure) in drawn.items() if figure is not None}


def _figure(traces: list, layout: dict, height: int) -> dict:
    import plotly.graph_objects as go
    from plotly.io import to_json

    figure = go.Figure(data=traces, layout=go.Layout(**{**_CALM, **layout}, height=height))
    return json.loads(to_json(figure, validate=True))


def _axis(title: str, **more) -> dict:
    return {"title": {"text": title}, "automargin": True, "gridcolor": "#ddd", "zeroline": False} | more


def points(found: Gathered) -> list[dict]:
    """Return what was measured of artifacts of known size: name, MB, KL divergence and its error, on which text."""
    told = []
    for result in found.perplexities:
        artifact = found.artifact(result.get("model") or "")
        if artifact is not None and "kl_divergence" in result:
            kl = result["kl_divergence"]
            about = {"name": artifact.name, "mb": artifact.bytes / 1e6, "kl": kl["mean"], "error": kl["stderr"] or 0.0}
            told.append(about | {"text": Path(result["protocol"]["dataset"]).name})
    for sweep in found.sweeps:
        for row in sweep["rows"]:
            name = f"{sweep['settings'][0].get('method', 'pruned')} {row['sparsity']:.0%}"
            about = {"name": name, "mb": row["bytes"] / 1e6, "kl": row["kl_divergence"], "error": 0.0}
            told.append(about | {"text": Path(sweep["protocol"]["dataset"]).name})
    return told


def on_the_front(told: list[dict]) -> list[dict]:
    """Return the points that no other of the same text is both as small and as close as, by size."""
    front = []
    for one in told:
        others = [other for other in told if other["text"] == one["text"] and other is not one]
        if not any(
            o["mb"] <= one["mb"] and o["kl"] <= one["kl"] and (o["mb"], o["kl"]) != (one["mb"], one["kl"])
            for o in others
        ):
            front.append(one)
    return sorted(front, key=lambda one: one["mb"])


def pareto(found: Gathered) -> dict | None:
    """Draw size against KL divergence of two artifacts or more; lines join those that none beats."""
    import plotly.graph_objects as go

    told = points(found)
    if len(told) < 2:
        return None
    traces = []
    for number, text in enumerate(dict.fromkeys(one["text"] for one in told)):
        colour, mine = COLOURS[number % len(COLOURS)], [one for one in told if one["text"] == text]
        front = on_the_front(mine)
        traces.append(
            go.Scatter(
                x=[one["mb"] for one in mine],
                y=[one["kl"] for one in mine],
                error_y={"type": "data", "array": [one["error"] for one in mine], "thickness": 1},
                mode="markers+text",
                text=[one["name"] for one in mine],
                textposition="top center",
                cliponaxis=False,
                name=text,
                marker={"size": 9, "color": colour},
            )
        )
        traces.append(
            go.Scatter(
                x=[one["mb"] for one in front],
                y=[one["kl"] for one in front],
                mode="lines",
                line={"color": colour, "dash": "dot"},
                hoverinfo="skip",
                showlegend=False,
            )
        )
    spread = max(one["kl"] for one in told) / max(min(one["kl"] for one in told), 1e-9)
    ticks = [digit * 10.0**power for power in range(-6, 3) for digit in (1, 2, 5)]
    logs = {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
    kind = logs if spread > 20 and min(one["kl"] for one in told) > 0 else {"rangemode": "tozero"}
    axes = {"xaxis": _axis("MB of weights", rangemode="tozero"), "yaxis": _axis("KL divergence, nats", **kind)}
    drawn = {one["name"] for one in told}
    for size in {one.source_bytes for one in found.artifacts if one.source_bytes and one.name in drawn}:
        line = {"type": "line", "x0": size / 1e6, "x1": size / 1e6, "yref": "paper", "y0": 0, "y1": 1}
        note = {
            "x": size / 1e6,
            "yref": "paper",
            "y": 0,
            "text": "dense",
            "showarrow": False,
            "xanchor": "right",
            "yanchor": "bottom",
        }
        axes.setdefault("shapes", []).append(line | {"line": {"color": "#888", "dash": "dash", "width": 1}})
        axes.setdefault("annotations", []).append(note)
    return _figure(traces, axes, 380)


def _in_order(name: str) -> list:
    """Return what names are sorted by: head 2 before head 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def heat_map(cells: list[dict], what: str) -> dict:
    """Draw a value for each layer (across) and projection, KV head or expert (down)."""
    import plotly.graph_objects as go

    layers = sorted({cell["layer"] for cell in cells})
    projections = sorted({cell["projection"] for cell in cells}, key=_in_order)
    values = {(cell["projection"], cell["layer"]): cell["value"] for cell in cells}
    counted = what == EXPERT_TOKENS
    trace = go.Heatmap(
        z=[[values.get((projection, layer)) for layer in layers] for projection in projections],
        x=layers,
        y=projections,
        colorscale=_SCALES.get(what, "OrRd"),
        zmin=0,  # which plotly heeds only beside zmax
        zmax=1 if what == "sparsity" else max(values.values()) or 1,
        hovertemplate="layer %{x}, %{y}: %{z:" + ("," if counted else ".3%") + "}<extra></extra>",
        colorbar={"tickformat": ",.0f" if counted else ".1%", "thickness": 12},
        xgap=1,
        ygap=1,
    )
    ticks = {"dtick": 1} if len(layers) <= 16 else {}
    axes = {"xaxis": _axis("layer", **ticks), "yaxis": _axis("", autorange="reversed")}
    return _figure([trace], axes, 110 + min(24 * len(projections), 600))


def cache_errors(artifact: Artifact) -> dict | None:
    """Draw the relative errors of keys, values and attention's outputs of each layer, and how much of it looks at the first token."""
    import plotly.graph_objects as go

    report = artifact.cache_errors
    names = {"key_error": "keys", "value_error": "values", "output_error": "outputs of attention"}
    traces = [
        go.Bar(
            x=[layer["layer"] for layer in report],
            y=[layer[key] for layer in report],
            name=name,
            marker={"color": COLOURS[number]},
            hovertemplate="layer %{x}: %{y:.2%}<extra>" + name + "</extra>",
        )
        for number, (key, name) in enumerate(names.items())
        if all(isinstance(layer.get(key), (int, float)) for layer in report)
    ]
    axes = {"xaxis": _axis("layer"), "yaxis": _axis("relative error", tickformat=".0%"), "barmode": "group"}
    return _figure(traces, axes, 320) if report and traces else None


def _bars(result: dict, key: str, title: str, form: str, spread: str | None) -> dict | None:
    import plotly.graph_objects as go

    rows = [row for row in result["rows"] if row.get("fits", True) and row.get(key) is not None]
    traces = []
    for number, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
        mine = [row for row in rows if row["model"] == model]
        error = None
        if spread is not None:
            error = {"type": "data", "array": [row[key] * row.get(spread, 0.0) / 2 for row in mine], "thickness": 1}
        name = Path(model).name + (" (base)" if mine[0].get("is_base") else "")
        traces.append(
            go.Bar(
                x=[f"batch {row['batch']}, context {row['context']:,}" for row in mine],
                y=[row[key] for row in mine],
                error_y=error,
                name=name,
                marker={"color": COLOURS[number % len(COLOURS)]},
                hovertemplate="%{x}: %{y:" + form + "}<extra>" + name.replace("<", "&lt;") + "</extra>",
            )
        )
    axes = {"xaxis": _axis(""), "yaxis": _axis(title, tickformat=form, rangemode="tozero"), "barmode": "group"}
    return _figure(traces, axes, 340) if traces else None


def speeds(result: dict) -> dict | None:
    """Draw the tokens a second of each model and batch; a whisker is half of the spread of the runs, both ways."""
    return _bars(result, "tokens_per_s", "tokens a second", ",.0f", "tokens_per_s_spread")


def bandwidths(result: dict) -> dict | None:
    """Draw what share of the bytes that the card can read a second the steps read."""
    return _bars(result, "share_of_read", "of read bandwidth", ".0%", None)
