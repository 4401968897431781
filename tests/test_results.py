"""The page of results and the tables of README are what the results on cards say."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from tilepress.eval.report import pictures

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
    drawn = (ROOT / "docs" / "performance" / "h100.png").read_bytes()
    assert pictures.source_of(drawn) == pictures.source(results.rates())
    text = (ROOT / "README.md").read_text()
    assert text == results.readme(text)


def test_the_picture_has_a_bar_for_each_row(results):
    (axes,) = pictures.bars(*results.rates()).axes
    rows = [row for row, _ in results.speed(16, 8192)]
    assert [bar.get_width() for bar in axes.patches] == [row["tokens_per_s"] for row in rows]
    assert [label.get_text() for label in axes.get_yticklabels()] == [results.name_of(row) for row in rows]


def test_figures_in_prose_are_those_of_the_files():
    """What README says in words of a recipe or of vLLM, found in the JSON by hand and not by the code that writes tables."""
    text = re.sub(r"<!-- (\w+) -->.*?<!-- end of \1 -->", "", (ROOT / "README.md").read_text(), flags=re.S)
    rows = {
        row["recipe"]: row for row in json.loads((ROOT / "benchmarks" / "h100" / "quality.json").read_text())["rows"]
    }
    for name, said in {"int8": "costs it {} perplexity", "kv4, values folded": "4-bit cache {}"}.items():
        assert said.format(f"{100 * rows[name]['over_dense']:.2f} %") in " ".join(text.split())
    rates = {
        (row["engine"], row["weights"], row["batch"]): row["tokens_per_s"]
        for row in json.loads((ROOT / "benchmarks" / "h100" / "decode.json").read_text())["rows"]
        if (row["batch"], row["context"]) in ((1, 2048), (16, 8192))
    }
    one, many = (rates["tilepress", "w8a8", batch] / rates["vllm", "dense", batch] for batch in (1, 16))
    assert f"{one:.1f} to {many:.1f} times as fast as vLLM's BF16" in " ".join(text.split())


def test_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 100 and not line.startswith(("|", "[!"))] == []
