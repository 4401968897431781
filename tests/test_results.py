"""The page of results and the tables of README are what the results on cards say."""

import importlib.util
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def results():
    spec = importlib.util.spec_from_file_location("results", ROOT / "benchmarks" / "results.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_written_from_the_results(results):
    """Run `python benchmarks/results.py` where this fails."""
    assert (ROOT / "docs" / "results.md").read_text() == results.page()
    assert (ROOT / "docs" / "performance" / "h100.svg").read_text() == results.picture()
    text = (ROOT / "README.md").read_text()
    assert text == results.readme(text)


def test_the_picture_has_a_bar_for_each_row(results):
    bars = ElementTree.fromstring(results.picture()).findall("{http://www.w3.org/2000/svg}rect")[1:]
    rows = [row for row, _ in results.speed(16, 8192)]
    lengths = [float(bar.get("width")) for bar in bars]
    assert len(bars) == len(rows)
    assert lengths[0] / lengths[2] == pytest.approx(rows[0]["tokens_per_s"] / rows[2]["tokens_per_s"], abs=0.001)


def test_figures_in_prose_are_those_of_the_files():
    """What README says in words of a recipe or of vLLM, found in the JSON by hand and not by the code that writes tables."""
    text = re.sub(r"<!-- (\w+) -->.*?<!-- end of \1 -->", "", (ROOT / "README.md").read_text(), flags=re.S)
    rows = {
        row["recipe"]: row for row in json.loads((ROOT / "benchmarks" / "h100" / "quality.json").read_text())["rows"]
    }
    for name, said in {"int8": "costs it {} perplexity", "kv4": "4-bit cache {}"}.items():
        assert said.format(f"{100 * rows[name]['over_dense']:.2f} %") in " ".join(text.split())


def test_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 100 and not line.startswith(("|", "[!"))] == []
