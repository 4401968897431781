"""benchmarks/quality.py: rows of what a recipe costs, limits, and files that are gone on with."""

import importlib.util
import json
import time
from pathlib import Path

import pytest

from tilepress import demo

KEYS = {
    *("model", "recipe", "command", "perplexity", "over_dense", "kl", "same_top", "bits_per_element", "sparsity"),
    *("hellaswag_acc_norm", "seconds", "device", "versions", "commit"),
}


@pytest.fixture(scope="module")
def quality():
    path = Path(__file__).parents[1] / "benchmarks" / "quality.py"
    spec = importlib.util.spec_from_file_location("quality", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(checkpoint_of):
    return checkpoint_of("llama", hidden_size=256, num_attention_heads=4)  # head dimension 64


@pytest.fixture
def run(quality, cli):
    """Runs a command in this process, and keeps the words of all."""

    def run(words: list[str], seconds: float) -> dict:
        run.asked.append(words)
        ran = cli(*words, "--json")
        if ran.code:
            raise quality.Failed(ran.err)
        return ran.json

    run.asked = []
    return run


@pytest.fixture
def words(tmp_path, model, text):
    items = tmp_path / "items.jsonl"
    items.write_text(
        json.dumps({"query": "import", "choices": ["os", "a very long ending of no use"], "gold": 0}) + "\n"
    )
    found = [model, "-o", tmp_path / "rows" / "quality.json", "--calibrate", text, "--evaluate", text]
    found += ["--hellaswag", items, "--device", "cpu", "--seqlen", 64, "--nsamples", 4, "--windows", 2]
    return [*map(str, found), "--scratch", str(tmp_path)]


def test_rows_of_recipes(quality, run, words, tmp_path, model):
    recipes = "dense;kv4, groups of 32;50 % zeros"
    quality.main([*words, "--recipes", recipes], run)
    told = json.loads((tmp_path / "rows" / "quality.json").read_text())
    assert told["protocol"]["windows"] == 2 and told["protocol"]["evaluate"] == demo.TEXT.name
    dense, cache, zeros = told["rows"]
    assert all(set(row) >= KEYS and "failed" not in row for row in told["rows"]), told
    assert dense["over_dense"] is None and 0 < dense["kl"] < 0.01  # its noise floor
    assert cache["bits_per_element"] == pytest.approx(4 + 32 / 32, abs=0.3) and cache["sparsity"] is None
    assert zeros["sparsity"] == pytest.approx(0.5, abs=0.01) and zeros["bits_per_element"] is None
    assert zeros["over_dense"] == pytest.approx(zeros["perplexity"] / dense["perplexity"] - 1, rel=1e-6)
    assert zeros["hellaswag_acc_norm"] in (0.0, 1.0) and zeros["device"] == "cpu" and zeros["seconds"] > 0
    shown = f"tilepress compress prune {model.name} -o step-0 --sparsity 0.5 --method admm"
    shown += f" --allocation auto --refit 100 --dataset {demo.TEXT.name} --nsamples 4 --seqlen 64"
    assert zeros["command"] == shown
    assert not list(tmp_path.glob("tmp*"))  # artifacts are removed
    asked = len(run.asked)
    quality.main([*words, "--recipes", recipes], run)
    assert run.asked[asked:] == [["env"]]  # nothing is measured twice
    with pytest.raises(SystemExit, match="another protocol"):
        quality.main([*words, "--seqlen", "32"], run)
    with pytest.raises(SystemExit, match="no recipe"):
        quality.main([*words, "--recipes", "int3"], run)


def test_steps_follow_each_other(quality, words, tmp_path):
    """The second step of a recipe reads the first's artifact, and the numbers of both are told."""
    asked = []

    def run(command, seconds):
        asked.append(command)
        if command[0] == "eval":
            distance = {"kl_divergence": {"mean": 0.5}, "top1_agreement": 0.5, "base": {"perplexity": 2.0}}
            scores = {"acc_norm": 0.5, "items": 1}
            return {
                "perplexity": 3.0,
                "perplexity_stderr": 0.1,
                "windows": 2,
                "results": {"hellaswag": scores},
            } | distance
        return {"bytes": 7, "sparsity": 0.5}

    how = quality.arguments().parse_args(words)
    row = quality.row_of(how.model, "50 % zeros, recovered", how, run)
    assert asked[1][2] == asked[0][asked[0].index("-o") + 1] and asked[1][asked[1].index("--base") + 1] == how.model
    assert asked[2][2] == asked[1][asked[1].index("-o") + 1] and asked[2][asked[2].index("--base") + 1] == how.model
    assert row["command"].count(" && ") == 1 and (row["over_dense"], row["sparsity"], row["bytes"]) == (0.5, 0.5, 7)


def test_steps_that_recipes_share_are_made_once(quality, words, tmp_path):
    """Their seconds count for both, and nothing names a folder of this machine."""
    asked = []

    def run(command, seconds):
        asked.append(command)
        if command[0] == "compress":
            time.sleep(0.1)
            assert not Path(command[command.index("-o") + 1]).exists()
            Path(command[command.index("-o") + 1]).mkdir()
        told = {"kl_divergence": {"mean": 0.5}, "top1_agreement": 0.5, "base": {"perplexity": 2.0}, "perplexity": 3.0}
        told |= {"perplexity_stderr": 0.1, "windows": 2, "results": {"hellaswag": {"acc_norm": 0.5, "items": 1}}}
        return told | {"bytes": 7, "sparsity": 0.5}

    quality.main([*words, "--recipes", "50 % zeros;50 % zeros, recovered"], run)
    prune, recover = (command for command in asked if command[0] == "compress")  # each once
    pruned, recovered = json.loads((tmp_path / "rows" / "quality.json").read_text())["rows"]
    assert 0.1 <= pruned["seconds"] < recovered["seconds"] and recovered["command"].startswith(pruned["command"])
    assert f"--dataset self+{demo.TEXT.name}" in recovered["command"] and str(tmp_path) not in recovered["command"]
    made_at = prune[prune.index("-o") + 1]
    assert (prune[1], recover[1], recover[2]) == ("prune", "recover", made_at) and not Path(made_at).exists()


def test_a_recipe_over_its_limit_says_so_and_is_tried_again(quality, run, words, tmp_path):
    def slow(command, seconds):
        assert seconds <= 5 or command == ["env"]
        if command[0] == "compress":
            raise quality.Failed("over the time limit")
        return run(command, seconds)

    words += ["--recipes", "int8;dense", "--seconds", "5"]
    quality.main(words, slow)
    slow_row, dense = json.loads((tmp_path / "rows" / "quality.json").read_text())["rows"]
    assert slow_row["failed"] == "over the time limit" and slow_row["perplexity"] is None and "failed" not in dense
    quality.main(words, run)
    rows = json.loads((tmp_path / "rows" / "quality.json").read_text())["rows"]
    assert len(rows) == 2 and not any("failed" in row for row in rows)


def test_a_command_is_stopped_in_time(quality):
    with pytest.raises(quality.Failed, match="over the time limit"):
        quality.command(["env"], 0.01)
    with pytest.raises(quality.Failed, match="error: No such command"):
        quality.command(["no-such"], 60)


def test_every_recipe_is_one_that_the_commands_take(quality, words, model, tmp_path, cli, artifact, tiny):
    """All steps by their dry runs: a flag that is renamed is found here."""
    how = quality.arguments().parse_args(words)

    def dry(command, seconds):
        source = artifact if command[1] == "recover" else tiny
        words = [str(tiny) if word == str(model) else word for word in command[3:]]
        ran = cli(command[0], command[1], source, *words, "--dry-run", "--json", "--quiet")
        assert ran.code == 0, (command, ran.err)
        return ran.json | {"bytes": 0, "sparsity": 0.0}

    for name in quality.RECIPES:
        quality.made(str(model), name, how, tmp_path, time.monotonic() + 60, dry)
