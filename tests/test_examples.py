"""The examples run, and print what they promise."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *words: str) -> None:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main([*words])


def test_compress_and_measure(capsys, tmp_path):
    run("compress_and_measure", "--nsamples", "2", "--seqlen", "64", "-o", str(tmp_path / "small"))
    out = capsys.readouterr().out
    before, after = map(float, re.search(r"([\d.]+) MB became ([\d.]+) MB", out).groups())
    dense, compressed = map(float, re.search(r"perplexity ([\d.]+) became ([\d.]+)", out).groups())
    assert after < before and compressed == pytest.approx(dense, rel=0.2)
    assert (tmp_path / "small" / "kv_cache").is_dir()


def test_compare_recipes(capsys):
    run("compare_recipes", "--nsamples", "2", "--seqlen", "64", "--recipes", "8-bit cache,50 % zeros")
    lines = capsys.readouterr().out.splitlines()
    costs = {line[:26].strip(): float(line.split()[-1]) for line in lines[1:]}
    assert 0 <= costs["8-bit cache"] < costs["50 % zeros"]


def test_generate(capsys, artifact):
    run("generate", str(artifact), "--prompt", "import os", "--prompt", "def main(", "--new-tokens", "3")
    out = capsys.readouterr().out
    assert "import os" in out and "def main(" in out and out.count("---") == 2
    run("generate", str(artifact), "--prompt", "import os", "--new-tokens", "3", "--stream", "--device", "cpu")
    assert "3 tokens in" in capsys.readouterr().out


def test_the_notebook(capsys):
    book = json.loads((EXAMPLES / "first_steps.ipynb").read_text())
    names: dict = {}
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec("".join(cell["source"]).replace("seqlen=256", "seqlen=64"), names)
    divergence, floor = map(
        float, re.search(r"KL divergence ([\d.]+), noise floor ([\d.]+)", capsys.readouterr().out).groups()
    )
    assert 0 < floor < divergence < 0.1


def test_each_is_named_in_the_list():
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"`{path.name}`" in listed for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))
