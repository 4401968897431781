"""The page of figures is what the results on cards draw."""

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent


def test_the_page_is_drawn_from_the_results():
    spec = importlib.util.spec_from_file_location("draw", ROOT / "benchmarks" / "draw.py")
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    assert (ROOT / "docs" / "performance.md").read_text() == draw.page()
    for name, picture in draw.pictures().items():
        ElementTree.fromstring(picture)
        assert (ROOT / "docs" / "performance" / f"{name}.svg").read_text() == picture, "run python benchmarks/draw.py"
        assert f"performance/{name}.svg" in draw.page()
