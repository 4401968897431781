"""The recommended recipes on a pretrained model: `make test-real`. On a few windows, so bounds are wide; what is measured stands in benchmarks/."""

import importlib.util
import os
from pathlib import Path

import pytest

MODEL = os.environ.get("TILEPRESS_REAL_MODEL")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "quality.py"
BOUNDS = {  # recipe: perplexity over dense, KL divergence, bits of a stored key or value
    "int8": (0.05, 0.05, None),
    "int8, no text": (0.10, 0.10, None),
    "int8, own text": (0.08, 0.08, None),
    "int8, static": (0.40, 0.40, None),
    "kv4": (0.15, 0.15, 5.0),
    "kv4, groups of 32": (0.10, 0.10, 5.5),
    "kv8": (0.02, 0.02, 9.0),
    "50 % zeros": (1.0, 1.0, None),
}

pytestmark = pytest.mark.skipif(MODEL is None, reason="needs a pretrained model: make test-real")


@pytest.fixture(scope="module")
def quality():
    spec = importlib.util.spec_from_file_location("quality", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, steps in module.RECIPES.items():  # a CPU would train for half an hour
        module.RECIPES[name] = tuple(step.replace("--refit 100", "--refit 3") for step in steps)
    return module


@pytest.fixture(scope="module")
def how(quality, halves, tmp_path_factory):
    calibration, held_out = halves
    words = [MODEL, "-o", tmp_path_factory.mktemp("real") / "rows.json", "--calibrate", calibration.dataset]
    words += ["--evaluate", held_out, "--device", "cpu", "--seqlen", 256, "--nsamples", 8, "--windows", 4]
    return quality.arguments().parse_args([*map(str, words), "--seconds", "1800"])


@pytest.mark.parametrize("recipe", BOUNDS)
def test_a_recipe_costs_little(quality, how, recipe):
    row = quality.row_of(MODEL, recipe, how, quality.command)
    assert "failed" not in row, row
    over, kl, bits = BOUNDS[recipe]
    assert -0.05 < row["over_dense"] < over and row["kl"] < kl, row
    assert bits is None or 4 < row["bits_per_element"] < bits, row
    assert row["sparsity"] is None or row["sparsity"] == pytest.approx(0.5, abs=0.01)


def test_rounding_costs_less_than_any_recipe(quality, how):
    row = quality.row_of(MODEL, "dense", how, quality.command)
    assert "failed" not in row and row["windows"] == 4 and 0 < row["kl"] < 0.01, row
