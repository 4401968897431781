"""Pictures for folders and pages of documentation, by matplotlib: PNGs that know what they were drawn from.

A PNG's text `Source` is a hash of its figures. So a test on any machine can tell whether a picture is of today's figures, whatever version of
matplotlib draws there.
"""

import hashlib
import io
import json
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from tilepress.eval.report.figures import COLOURS
from tilepress.formats import UsageError, installing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_QUIET = {"color": "#d9dee5", "linewidth": 0.8}


class Bar(NamedTuple):
    """A bar, its name before it and what stands behind it."""

    name: str
    value: float
    said: str
    colour: str = COLOURS[0]


def has_matplotlib() -> bool:
    """Return whether pictures can be drawn here."""
    return find_spec("matplotlib") is not None


def points(
    series: dict[str, list[tuple[float, float]]], across: str, up: str, level: float | None = None, joined: bool = True
) -> "Figure":
    """Draw points (x, y) of each series: x in powers of two, y from 0; a dashed line at `level`."""
    figure, (axes,) = _figure(6.4, 3.6)
    for number, (name, told) in enumerate(series.items()):
        xs, ys = zip(*sorted(told), strict=True)
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(xs, ys, "o", linestyle="-" if joined else "", color=colour, markersize=4, linewidth=1.4, label=name)
    if level is not None:
        axes.axhline(level, color="black", linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    if joined:
        ticks = sorted({x for told in series.values() for x, _ in told})
        axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def bars(told: Sequence[Bar], title: str) -> "Figure":
    """Draw lying bars, the first at the top, each with its words behind it."""
    figure, (axes,) = _figure(8, 0.7 + 0.38 * len(told))
    places = range(len(told))
    drawn = axes.barh(places, [bar.value for bar in told], height=0.7, color=[bar.colour for bar in told])
    axes.bar_label(drawn, [bar.said for bar in told], padding=5)
    axes.set_yticks(places, [bar.name for bar in told])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.5 * max(bar.value for bar in told))
    axes.xaxis.set_visible(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(left=False)
    axes.grid(False)
    axes.set_title(title, loc="left", fontweight="bold", fontsize=10.5)
    return figure


def costs(panels: dict[str, list[tuple[float, float, str]]], across: str, title: str) -> "Figure":
    """Draw (x, y, name) side by side, a panel for each measure of what a size costs; y logarithmic where all of it is positive."""
    figure, all_axes = _figure(9, 3.4, len(panels))
    for axes, (up, told) in zip(all_axes, panels.items(), strict=True):
        xs, ys, names = zip(*sorted(told), strict=True)
        axes.plot(xs, ys, "o-", color=COLOURS[0], markersize=4, linewidth=1.4)
        for x, y, name in zip(xs, ys, names, strict=True):
            axes.annotate(f"{name}: {y:.3g}", (x, y), (5, 5), textcoords="offset points", fontsize=8)
        axes.set_yscale("log" if min(ys) > 0 else "linear")
        axes.minorticks_off()
        axes.margins(x=0.2, y=0.15)
        axes.set_xlabel(across)
        axes.set_ylabel(up)
    figure.suptitle(title, fontsize=10.5)
    return figure


def png(figure: "Figure", drawn: object) -> bytes:
    """Return a figure as a PNG whose text names what was `drawn`: plain values."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None, "Source": source(drawn)})
    return buffer.getvalue()


def source(drawn: object) -> str:
    """Return the hash by which a picture knows its figures."""
    return hashlib.sha256(json.dumps(drawn, sort_keys=True).encode()).hexdigest()


def source_of(picture: bytes) -> str:
    """Return the hash that stands in a PNG of ours."""
    from PIL import Image

    return Image.open(io.BytesIO(picture)).text["Source"]


def _figure(width: float, height: float, panels: int = 1) -> "tuple[Figure, Sequence[Axes]]":
    if not has_matplotlib():
        raise UsageError("a picture needs matplotlib, which is not installed", installing("report"))
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    all_axes = figure.subplots(1, panels, squeeze=False)[0]
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", **_QUIET)
        axes.set_axisbelow(True)
    return figure, all_axes
