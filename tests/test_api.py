"""The public calls: what `tilepress.…` returns and writes is what the commands print and write."""

import importlib
import inspect
import json
import subprocess
import sys
import typing
from dataclasses import asdict, is_dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from support.artifacts import few_words
from support.interruption import digest

import tilepress
from tilepress import Convert, KVCache, Observer, Prune, Quantize, Recover, Text, UsageError, demo
from tilepress.text import CALIBRATION

TEXT = few_words(4, 64)
WORDS = ["--dataset", demo.TEXT, "--nsamples", 4, "--seqlen", 64]


def timeless(facts: dict) -> dict:
    return {key: value for key, value in facts.items() if key not in ("seconds", "stages", "output")}


@pytest.mark.parametrize("first", ["import tilepress", "import tilepress.compress", "from tilepress import compress"])
def test_importing_it_loads_no_torch_and_compress_is_a_call_and_a_package(first):
    script = (
        f"{first}\nimport sys, tilepress, tilepress.compress.run, tilepress.compress as package\n"
        "assert tilepress.compress is package and callable(package) and package.__path__\n"
        "assert 'perplexity' in dir(tilepress) and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_public_name_is_there_and_documented():
    for name in tilepress.__all__:
        assert inspect.getdoc(getattr(tilepress, name)), name
    api = importlib.import_module("tilepress.compress.run.api")
    assert inspect.signature(tilepress.compress) == inspect.signature(api.compress)
    assert "overwrite" in inspect.getdoc(tilepress.compress)
    with pytest.raises(AttributeError, match="no attribute 'squeeze'"):
        tilepress.squeeze  # noqa: B018


def test_every_result_can_be_stored_as_json():
    """Whatever a public call returns is a dataclass with `to_json`, but for a model, generate's own output and a path."""
    others = {"load", "decode", "write_card"}
    calls = {name: call for name in tilepress.__all__ if inspect.isfunction(call := getattr(tilepress, name))}
    calls |= {"compress": importlib.import_module("tilepress.compress.run.api").compress, "say": tilepress.Chat.say}
    assert others <= calls.keys() and len(calls) > 14
    for name in calls.keys() - others:
        found = typing.get_type_hints(calls[name])["return"]  # X, X | None, or tuple[X, ...]
        found = next((part for part in typing.get_args(found) if isinstance(part, type)), found)
        assert is_dataclass(found) and inspect.getdoc(found.to_json), name


@pytest.mark.parametrize(
    "recipe,text,words",
    [
        (Prune(0.5), None, ["prune", "--sparsity", 0.5]),
        (Prune(0.6, method="wanda"), TEXT, ["prune", "--sparsity", 0.6, "--method", "wanda", *WORDS]),
        (Quantize(activations="tensor"), TEXT, ["quantize", "--activations", "tensor", *WORDS]),
        (KVCache(bits=8), TEXT, ["kv", "--bits", 8, *WORDS]),
        (
            Recover(2, batch=2, base=demo.MODEL),
            Text(str(demo.TEXT), seqlen=64),
            ["recover", "--base", demo.MODEL, "--steps", 2, "--batch", 2, "--dataset", demo.TEXT, "--seqlen", 64],
        ),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, list) else value[0],
)
def test_compress_writes_and_tells_what_the_command_does(tiny, artifact, tmp_path, cli, recipe, text, words):
    source = artifact if words[0] == "recover" else tiny
    seen = []
    plan = tilepress.plan(source, tmp_path / "api", recipe, dataset=text)
    dry = cli("compress", words[0], source, "-o", tmp_path / "api", *words[1:], "--dry-run", "--json").json
    dry.pop("forecast", None)  # times vary
    assert plan.to_json() == dry and list(tmp_path.iterdir()) == []
    made = tilepress.compress(
        source, tmp_path / "api", recipe, dataset=text, device="cpu", progress=lambda *told: seen.append(told)
    )
    ran = cli("compress", words[0], source, "-o", tmp_path / "cli", *words[1:], "--device", "cpu", "--json").json
    ran.pop("memory_gib", None)
    assert digest(tmp_path / "api") == digest(tmp_path / "cli")
    assert timeless(made.to_json()) == timeless(ran) and json.loads(json.dumps(made.to_json())) == made.to_json()
    assert made.output == tmp_path / "api" and made.seconds > 0 and not made.was_complete
    counts = [done for _, done, _ in seen]
    assert counts == sorted(counts) and seen[-1][1] == seen[-1][2] > 0
    again = tilepress.compress(source, tmp_path / "api", recipe, dataset=text, device="cpu", resume=True)
    assert again.was_complete and timeless(again.to_json()) == timeless(ran)


def test_stacked_recipes_are_the_commands_one_after_the_other(checkpoint_of, tmp_path, cli):
    """Each step knows the model by its first name: so do commands whose folders are called like it."""
    source, seen = checkpoint_of("llama"), []
    made = tilepress.compress(
        source,
        tmp_path / "stack",
        [Prune(0.6, format="tiled-csl"), KVCache()],
        dataset=TEXT,
        device="cpu",
        progress=lambda what, done, total: seen.append(what),
    )
    (tmp_path / "between").mkdir()
    between = tmp_path / "between" / source.name
    words = ["--sparsity", 0.6, "--format", "tiled-csl", "--device", "cpu"]
    assert cli("compress", "prune", source, "-o", between, *words).code == 0
    ran = cli("compress", "kv", between, "-o", tmp_path / "kv", *WORDS, "--device", "cpu", "--json").json
    assert digest(tmp_path / "stack") == digest(tmp_path / "kv") and not (tmp_path / "stack.steps").exists()
    assert made.bytes == ran["bytes"] and made.source_bytes == tilepress.inspect(source).bytes
    assert any(what.startswith("step 1 of 2") for what in seen) and seen[-1].startswith("step 2 of 2")


def test_recovery_in_a_stack_has_the_model_as_its_base(checkpoint_of, tmp_path, cli):
    source, text = checkpoint_of("llama"), Text(str(demo.TEXT), seqlen=64)
    tilepress.compress(source, tmp_path / "stack", [Prune(0.6), Recover(2, batch=2)], dataset=text, device="cpu")
    between = tmp_path / "between" / source.name
    tilepress.compress(source, between, Prune(0.6), device="cpu")
    words = ["--base", source, "--steps", 2, "--batch", 2, "--dataset", demo.TEXT, "--seqlen", 64, "--device", "cpu"]
    assert cli("compress", "recover", between, "-o", tmp_path / "cli", *words).code == 0
    assert digest(tmp_path / "stack") == digest(tmp_path / "cli")


def test_a_stopped_stack_goes_on(checkpoint_of, tmp_path):
    source = checkpoint_of("llama")
    recipes, out, how = [Prune(0.6), KVCache()], tmp_path / "out", {"dataset": TEXT, "device": "cpu"}
    tilepress.compress(source, tmp_path / "whole", recipes, **how)
    for step in ("step 1", "step 2"):

        def stop(what: str, done: int, total: int, step: str = step) -> None:
            if what.startswith(step) and done:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            tilepress.compress(source, out, recipes, **how, resume=True, progress=stop)
    with pytest.raises(UsageError, match="out exists and is not empty"):
        tilepress.compress(source, out, recipes, **how)
    assert not (out / "config.json").exists()
    tilepress.compress(source, out, recipes, **how, resume=True)
    assert digest(out) == digest(tmp_path / "whole") and not (tmp_path / "out.steps").exists()
    again = tilepress.compress(source, out, recipes, **how, resume=True)
    assert again.was_complete and again.details["kv_cache"]["format"] == "int4 dynamic, row-wise"
    with pytest.raises(UsageError, match="holds another run"):
        tilepress.compress(source, out, [Prune(0.5), KVCache()], **how, resume=True)


def test_a_foreign_folder_beside_the_output_stays(tiny, tmp_path):
    (tmp_path / "out.steps").mkdir()
    (tmp_path / "out.steps" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="not of this run"):
        tilepress.compress(tiny, tmp_path / "out", [Prune(0.5), KVCache()], dataset=TEXT, overwrite=True)
    assert (tmp_path / "out.steps" / "thesis.txt").exists()


def test_a_stack_leaves_its_model_alone(checkpoint_of, tmp_path):
    """Not even `overwrite` replaces what the steps read, nor do they stand around it."""
    made, steps = tmp_path / "made", tmp_path / "made.steps" / "1-prune"
    for folder in (made, steps):
        tilepress.compress(checkpoint_of("llama"), folder, Prune(0.5), device=torch.device("cpu"))
    before = digest(tmp_path)
    for model, output in ((made, made), (made, tmp_path), (made, f"{made}/../made"), (steps, made)):
        with pytest.raises(UsageError, match="is or holds the input"):
            tilepress.compress(model, output, [Prune(0.6), Prune(0.7)], device="cpu", overwrite=True)
    assert digest(tmp_path) == before and not tmp_path.with_name(f"{tmp_path.name}.steps").exists()


@pytest.mark.parametrize("recipe", [Prune(0.5), [Prune(0.5), Prune(0.6)]], ids=["one", "stack"])
def test_outputs_that_are_no_folders(tiny, tmp_path, recipe, monkeypatch):
    (tmp_path / "file").write_text("mine")
    for output in (None, 3, b"out", tmp_path / "file"):
        with pytest.raises(UsageError, match="is no folder"):
            tilepress.compress(tiny, output, recipe, device="cpu")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert tilepress.compress(tiny, ".", recipe, device="cpu").targets
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


def test_ranks_share_a_run(checkpoint_of, tmp_path):
    source, out = checkpoint_of("llama"), tmp_path / "out"
    assert len(list(source.glob("*.safetensors"))) > 1
    assert tilepress.compress(source, out, Prune(0.5), device="cpu", rank=1, world_size=2) is None
    assert tilepress.compress(source, out, Prune(0.5), device="cpu", rank=0, world_size=2).sparsity == 0.5
    tilepress.compress(source, tmp_path / "alone", Prune(0.5), device="cpu")
    assert digest(out) == digest(tmp_path / "alone")


def test_text_has_the_commands_defaults(checkpoint_of, tmp_path):
    source = checkpoint_of("llama")
    longest = json.loads((source / "config.json").read_text())["max_position_embeddings"]
    planned = tilepress.plan(source, tmp_path / "out", Quantize(activations="tensor")).plan
    assert planned.text == Text(CALIBRATION, 128, min(2048, longest), 0, bos="always")  # as the tokenizer adds one
    planned = tilepress.plan(source, tmp_path / "out", Quantize(smooth=0.5), dataset=demo.TEXT).plan
    assert planned.text.dataset == str(demo.TEXT) and planned.recipe.smooth == "0.5"
    assert tilepress.plan(source, tmp_path / "out", Quantize()).plan.text is None


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: Prune(1.0), "not in"),
        (lambda: Prune(0.5, method="oracle"), "--method oracle"),
        (lambda: Prune(0.5, allocation="owl"), "needs a method that reads text"),
        (lambda: Prune(0.5, ignore=("re:(",)), "--ignore"),
        (lambda: Quantize(activations="row"), "--activations row"),
        (lambda: KVCache(bits=3), "--bits 3"),
        (lambda: Recover(0), "--steps 0"),
        (lambda: Recover(5, prune=Prune(0.5, value_dtype="int8")), "floating values"),
        (lambda: Text("x", nsamples=0), "--nsamples 0"),
        (lambda: Text("x", seqlen=3), "--seqlen 3"),
        (lambda: Prune("0.5"), "Prune(sparsity='0.5')"),
        (lambda: Prune(torch.tensor(0.5)), "Prune(sparsity="),
        (lambda: Prune(0.5, ignore="lm_head"), "Prune(ignore='lm_head')"),
        (lambda: Prune(0.5, ignore=[3]), "Prune(ignore="),
        (lambda: Prune(0.5, dtype="bfloat16"), "Prune(dtype='bfloat16')"),
        (lambda: Quantize(dtype=torch.int8), "Quantize(dtype=torch.int8)"),
        (lambda: Quantize(activations="tensor", observer="mse"), "Quantize(observer='mse')"),
        (lambda: KVCache(True), "KVCache(bits=True)"),
        (lambda: KVCache(group_size="64"), "KVCache(group_size='64')"),
        (lambda: Recover(2.5), "Recover(steps=2.5)"),
        (lambda: Recover(2, blocks="no"), "Recover(blocks='no')"),
        (lambda: Recover(2, prune=KVCache()), "Recover(prune=KVCache"),
        (lambda: Recover(2, prune=Prune), "Recover(prune="),
        (lambda: Convert(None), "Convert(to=None)"),
        (lambda: Observer("percentile", "99.99"), "Observer(percentile='99.99')"),
        (lambda: Text(None), "Text(dataset=None)"),
    ],
)
def test_recipes_are_checked_when_they_are_made(make, message):
    with pytest.raises(UsageError) as error:
        make()
    assert message in error.value.message and error.value.hint


def test_what_means_the_same_is_taken():
    prune = Prune(np.float64(0.5), ignore=["lm_head"])
    assert prune == Prune(0.5) and type(prune.sparsity) is float and hash(prune) == hash(Prune(0.5))
    text = Text(Path("words.txt"), np.int64(4))
    assert text == Text("words.txt", 4) and json.dumps(asdict(text))
    assert json.dumps(Prune(0).settings(None)) == json.dumps(Prune(0).settings(None) | {"sparsity": 0})


@pytest.mark.parametrize(
    "recipe,how,message",
    [
        ("prune", {}, "is no recipe"),
        ([], {}, "is no recipe"),
        (None, {}, "is no recipe"),
        (Prune, {}, "is no recipe"),
        ([Prune(0.5), [Prune(0.6)]], {}, "is no recipe"),
        (Prune(0.5), {"device": None}, "--device None"),
        (Prune(0.5), {"device": "cpu:"}, "--device cpu:"),
        (Prune(0.5), {"workers": "2"}, "'2' workers"),
        (Prune(0.5), {"world_size": None}, "rank 0 of None"),
        (Prune(0.5), {"progress": "bar"}, "progress='bar'"),
        (Prune(0.5), {"dataset": demo.TEXT}, "reads no text"),
        ([Prune(0.5), Prune(0.6)], {"dataset": demo.TEXT}, "none of the recipes reads text"),
        (Prune(0.5), {"device": "abacus"}, "abacus"),
        (Prune(0.5), {"rank": 2, "world_size": 2}, "rank 2 of 2"),
        (Prune(0.5), {"workers": 0}, "0 workers"),
        (KVCache(), {"dataset": TEXT, "world_size": 2}, "one process"),
        ([Prune(0.5), KVCache()], {"dataset": TEXT, "world_size": 2}, "cannot share a stack"),
        (Recover(5), {"dataset": TEXT}, "needs the dense model"),
        (Recover(5, prune=Prune(0.5)), {"dataset": Text(str(demo.TEXT), 1, 64)}, "--nsamples 1"),
        (KVCache(), {"dataset": Text(str(demo.TEXT), 4, 100_000)}, "positions"),
        (Prune(0.5, ignore=("nothing_like_it",)), {}, "matches no linear layer"),
    ],
)
def test_calls_that_make_no_sense_write_nothing(tiny, tmp_path, recipe, how, message):
    with pytest.raises(UsageError, match=message):
        tilepress.compress(tiny, tmp_path / "out", recipe, **how)
    assert list(tmp_path.iterdir()) == []


def test_perplexity_inspect_and_verify_tell_what_the_commands_do(tiny, text, artifact, cli):
    protocol = {"seqlen": 64, "limit": 2, "device": "cpu"}
    found = tilepress.perplexity(str(artifact), text, base=str(tiny), **protocol)
    words = ["--dataset", text, "--seqlen", 64, "--limit", 2, "--device", "cpu", "--json"]
    assert timeless(found.to_json()) == timeless(cli("eval", "perplexity", artifact, "--base", tiny, *words).json)
    assert found.perplexity > found.comparison.base.perplexity > 1 and found.comparison.kl_divergence["mean"] > 0
    alone = tilepress.perplexity(tiny, text, dtype=torch.float32, **protocol)
    assert alone.comparison is None and alone.protocol["dtype"] == "float32"

    assert json.loads(json.dumps(tilepress.inspect(artifact).to_json())) == cli("inspect", artifact, "--json").json
    checked = tilepress.verify(artifact, tiny)
    assert checked.passed and checked.to_json() == cli("verify", artifact, "--base", tiny, "--json", "-q").json


def test_verify_names_what_is_wrong(tiny, tmp_path):
    tilepress.compress(tiny, tmp_path / "out", Prune(0.5), device="cpu")
    shard = next(Path(tmp_path / "out").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    found = tilepress.verify(tmp_path / "out", reload=False)
    assert not found.passed and any("sha256" in finding for check in found.checks for finding in check.findings)


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda model: tilepress.load(model, device="gpu"), "--device gpu"),
        (lambda model: tilepress.load(model, device=None), "--device None"),
        (lambda model: tilepress.load(model, dtype="bf16"), "the dtype 'bf16'"),
        (lambda model: tilepress.load(model, dtype="int8"), "the dtype 'int8'"),
        (lambda model: tilepress.load(model, dtype=3), "the dtype 3"),
        (lambda model: tilepress.load(None), "'None' is neither"),
        (lambda model: tilepress.perplexity(model, demo.TEXT, seqlen="64"), "Protocol(seqlen='64')"),
        (lambda model: tilepress.perplexity(model, demo.TEXT, device="cpu", dtype="bf16"), "the dtype 'bf16'"),
        (lambda model: tilepress.verify(None), "None is not a folder"),
        (lambda model: tilepress.inspect(3), "'3' is neither"),
    ],
)
def test_values_of_a_wrong_kind_are_told(tiny, call, message):
    with pytest.raises(UsageError) as error:
        call(tiny)
    assert message in error.value.message and error.value.hint


def test_progress_may_be_none(artifact, text):
    assert tilepress.verify(artifact, reload=False, progress=None).passed
    assert tilepress.perplexity(artifact, text, seqlen=64, limit=1, device="cpu", progress=None).tokens
    for call in (tilepress.sample, tilepress.tasks, tilepress.compress):
        assert inspect.signature(call).parameters["progress"].default is None
