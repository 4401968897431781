"""Some of the cases that benchmarks/bad_inputs.py makes by the thousand, in this process."""

import importlib.util
import json
import random
import shutil
from pathlib import Path

import pytest

from tilepress import demo

_spec = importlib.util.spec_from_file_location("bad_inputs", Path(__file__).parents[2] / "benchmarks" / "bad_inputs.py")
bad_inputs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(bad_inputs)


@pytest.fixture(scope="module")
def small(checkpoint_of):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    return checkpoint_of("llama", shard_size="60KB", **sizes)


@pytest.mark.parametrize("seed", range(12))
def test_a_spoiled_model_is_told_in_two_lines(small, tmp_path, cli, seed):
    rng, source = random.Random(seed), tmp_path / "model"
    shutil.copytree(small, source)
    bad_inputs.spoil_model(rng, source)
    for words in (
        ("inspect", source),
        ("compress", "prune", source, "-o", tmp_path / "out", "--sparsity", "0.5", "-q"),
    ):
        ran = cli(*words)
        assert ran.code in (0, 1, 2) and "not foreseen" not in ran.err
        assert ran.code == 0 or ran.err.splitlines()[-2].startswith("error: "), ran.err


@pytest.mark.parametrize("seed", range(12))
def test_a_bad_text_is_told_in_two_lines(small, tmp_path, cli, seed):
    text = bad_inputs.bad_text(random.Random(seed), tmp_path)
    ran = cli("eval", "perplexity", small, "--dataset", text, "--seqlen", "32", "--limit", "1", "-q")
    assert ran.code in (0, 1, 2) and "not foreseen" not in ran.err
    assert ran.code == 0 or ran.err.splitlines()[-2].startswith("error: "), ran.err


def test_a_tokenizer_that_fails_on_a_text_is_told(small, tmp_path, cli, text):
    source = tmp_path / "model"
    shutil.copytree(small, source)
    config = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(config | {"model_max_length": "many"}))
    words = ("--activations", "tensor", "--dataset", text, "--nsamples", "2", "--seqlen", "32")
    ran = cli("compress", "quantize", source, "-o", tmp_path / "out", *words)
    assert ran.code == 1 and "the tokenizer fails on a text: TypeError" in ran.err


def test_a_case_is_the_same_every_time(tmp_path):
    models = tmp_path / "models"
    for name in bad_inputs.MODELS:
        shutil.copytree(demo.MODEL, models / name)
    for name in bad_inputs.FILES.values():
        (models / name).write_text(json.dumps(bad_inputs.RECIPE))
    numbers = range(len(bad_inputs.SOUND), len(bad_inputs.SOUND) + 4)
    cases = [
        [bad_inputs.make_case(3, number, models, tmp_path / f"{run}-{number}") for number in numbers] for run in "ab"
    ]
    assert [kind for kind, _, _ in cases[0]] == [kind for kind, _, _ in cases[1]]


@pytest.mark.parametrize(
    "code,seconds,peak,said,problem",
    [
        (None, 1, 0, "", "hang"),
        (1, 30, 0, "error: x\nhint: y", "hang"),
        (1, 1, 0, "Traceback (most recent call last)", "traceback"),
        (1, 1, 0, "error: x\nhint: this was not foreseen", "not foreseen"),
        (0, 1, 0, "DOES NOT LOAD: KeyError", "does not load"),
        (-11, 1, 0, "", "exit code -11"),
        (1, 1, 0, "error: x", "not two lines"),
        (1, 1, 2 * 10**9, "error: x\nhint: y", "memory"),
        (1, 1, 0, "error: x\nhint: y", ""),
        (0, 1, 0, "done", ""),
    ],
)
def test_what_counts_as_a_problem(code, seconds, peak, said, problem):
    assert bad_inputs.judge("any", code, seconds, peak, 1000, said) == problem
