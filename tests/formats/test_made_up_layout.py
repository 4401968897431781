"""A layout from outside of the package, registered by one file of tests, goes through every command: nothing else knows of it."""

import json
import shutil

import pytest
import torch
from support import made_up_layout
from support.artifacts import prune
from support.interruption import digest

import tilepress
from tilepress import demo
from tilepress.eval.verify import verify
from tilepress.formats import TilepressError, layout
from tilepress.formats.checkpoint import Checkpoint, read_manifest
from tilepress.runtime.loader import paths

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module", autouse=True)
def known():
    """The registry knows it in this file's tests only."""
    layout.register(made_up_layout.MadeUp())
    yield
    del layout._registered["made-up"]


@pytest.fixture(scope="module")
def source(checkpoint_of):
    return checkpoint_of("llama")


@pytest.fixture(scope="module")
def made(source, tmp_path_factory, known):
    return prune_to(source, tmp_path_factory.mktemp("made") / "made-up", "made-up")


def prune_to(source, output, form):
    prune(source, output, 0.6, form)
    return output


def same_weights(one, other):
    one, other = Checkpoint(one), Checkpoint(other)
    assert one.weights.keys() == other.weights.keys()
    for name, weight in one.weights.items():
        assert torch.equal(one.dense(weight), other.dense(other.weights[name])), name


def test_it_is_pruned_to_and_inspected(source, tmp_path, cli):
    words = ("compress", "prune", source, "-o", tmp_path / "out", "--sparsity", "0.6", "--format", "made-up")
    assert cli(*words).code == 0
    prune_to(source, tmp_path / "dense", "dense")
    same_weights(tmp_path / "out", tmp_path / "dense")
    rows = {row["name"]: row for row in cli("inspect", tmp_path / "out", "--json").json["rows"]}
    assert rows[UP]["layout"] == "made-up" and rows[UP]["sparsity"] == pytest.approx(0.6, abs=1e-3)
    stored = Checkpoint(tmp_path / "out").tensors
    assert stored.keys() >= {UP, f"{UP}_places", f"{UP}_size"} and stored[UP].dtype == torch.int16
    assert "14 as lists of coordinates" in (tmp_path / "out" / "README.md").read_text()
    wrong = cli(*words[:-1], "unheard-of")
    assert wrong.code == 2 and "made-up" in wrong.err
    int8 = cli(*words[:4], tmp_path / "int8", *words[5:], "--value-dtype", "int8")
    assert int8.code == 2 and "no int8 values" in int8.err


def test_verify_passes_and_finds_a_damaged_word(source, made, tmp_path, cli):
    assert cli("verify", made, "--base", source).code == 0
    broken = tmp_path / "broken"
    shutil.copytree(made, broken)
    shard = next(broken.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = next(name for name in header if name.endswith("_places"))
    first = 8 + length + header[name]["data_offsets"][0]
    data[first + 12 : first + 16] = data[first + 8 : first + 12]  # the fourth place becomes the third
    shard.write_bytes(data)
    findings = {check.name: check.findings for check in verify(broken).checks if not check.passed}
    assert "files and hashes" in findings
    assert findings["weights as declared"] == (f"{name.removesuffix('_places')}: places do not rise within the matrix",)
    with pytest.raises(TilepressError, match="places do not rise"):
        tilepress.load(broken)


@pytest.mark.parametrize("to", ["dense", "tiled-csl", "tiled-bitmap"])
def test_converting_there_and_back_changes_no_byte(made, tmp_path, cli, to):
    assert cli("convert", made, "-o", tmp_path / to, "--to", to).code == 0
    assert cli("convert", tmp_path / to, "-o", tmp_path / "back", "--to", "made-up").code == 0
    same_weights(tmp_path / to, made)
    shards = [name for name in digest(made) if name.endswith(".safetensors")]
    assert all(digest(tmp_path / "back")[name] == digest(made)[name] for name in shards)
    assert {t["layout"] for t in read_manifest(tmp_path / "back")["tensors"]} == {"dense", "made-up"}


def test_it_loads_generates_and_is_evaluated(source, made, tmp_path, cli):
    prune_to(source, tmp_path / "dense", "dense")
    ours, theirs = tilepress.load(made, dtype="float32"), tilepress.load(tmp_path / "dense", dtype="float32")
    assert paths(ours)["coordinates_linear reference on cpu"] == 14
    ids = torch.arange(12)[None] + 5
    with torch.inference_mode():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)
        tokens = [model.generate(ids, max_new_tokens=8, do_sample=False) for model in (ours, theirs)]
    assert torch.equal(*tokens)
    words = ("--dataset", demo.TEXT, "--seqlen", 64, "--limit", 2, "--dtype", "float32", "--json")
    measured = [cli("eval", "perplexity", path, *words).json["perplexity"] for path in (made, tmp_path / "dense")]
    assert measured[0] == pytest.approx(measured[1], rel=1e-4)
    ours.save_pretrained(tmp_path / "again")
    same_weights(tmp_path / "again", made)


def test_two_ranks_share_it(two, made):
    prompts = [[5, 9, 2, 77, 130], [8]]
    one = made_up_layout.ask(str(made), None, prompts, 6)
    for answer in two(made_up_layout.ask, str(made), prompts, 6):
        assert answer.tokens == one.tokens
        torch.testing.assert_close(answer.logits, one.logits, rtol=0, atol=1e-4 * float(one.logits.abs().max()))
        torch.testing.assert_close(answer.own_logits, one.own_logits, rtol=0, atol=1e-4 * float(one.logits.abs().max()))
        assert answer.layer_bytes < 0.65 * one.layer_bytes and answer.paths["coordinates_linear reference on cpu"] > 0
