"""The page of figures is what the results on cards draw."""

import importlib.util
from pathlib import Path

from tilepress.eval.report import pictures

ROOT = Path(__file__).parent.parent


def test_the_page_is_drawn_from_the_results():
    spec = importlib.util.spec_from_file_location("draw", ROOT / "benchmarks" / "draw.py")
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    assert (ROOT / "docs" / "performance.md").read_text() == draw.page()
    for name, drawn in draw.drawings().items():
        found = (ROOT / "docs" / "performance" / f"{name}.png").read_bytes()
        assert pictures.source_of(found) == pictures.source(drawn), "run python benchmarks/draw.py"
        assert f"performance/{name}.png" in draw.page()


def test_points_are_drawn_where_they_lie():
    figure = pictures.points({"a": [(4, 2.0), (1, 3.0)], "b": [(2, 5.0)]}, "across", "up", 1.5)
    (axes,) = figure.axes
    lines = [line.get_xydata().tolist() for line in axes.lines]
    assert lines == [[[1, 3], [4, 2]], [[2, 5]], [[0, 1.5], [1, 1.5]]] and axes.get_ylim()[0] == 0
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
    assert pictures.png(figure, 1) == pictures.png(figure, 1) != pictures.png(figure, 2)


def test_costs_have_a_panel_for_each_measure():
    figure = pictures.costs({"one": [(2, 0.5, "50%"), (1, 4.0, "70%")], "two": [(2, 0.0, "50%")]}, "MB", "title")
    first, second = figure.axes
    assert first.lines[0].get_xydata().tolist() == [[1, 4], [2, 0.5]] and first.get_yscale() == "log"
    assert second.get_yscale() == "linear" and [text.get_text() for text in first.texts] == ["70%: 4", "50%: 0.5"]
