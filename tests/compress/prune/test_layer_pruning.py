"""`compress prune` with calibration text: exact counts in every family, better than magnitude, resumable, experts that saw too little."""

import gc
import json
import math
import shutil
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.artifacts import few_words, prune, run_recipe
from support.interruption import digest, killed_before_each_rename
from transformers import AutoTokenizer

import tilepress
from tilepress import Prune, demo
from tilepress.compress.layers import stream as stream_module, walk
from tilepress.compress.layers.groups import watch_inputs
from tilepress.compress.layers.layerwise import LayerByLayer
from tilepress.compress.layers.moments import Moments
from tilepress.compress.layers.stream import Stream
from tilepress.compress.prune import layer_pruning, survey
from tilepress.compress.prune.settings import METHODS
from tilepress.compress.run.targets import find_targets
from tilepress.eval import sweep
from tilepress.eval.perplexity import Protocol, measure
from tilepress.eval.report.pictures import source, source_of
from tilepress.eval.verify import verify
from tilepress.formats import TilepressError, UsageError
from tilepress.formats.checkpoint import Checkpoint

TEXT = few_words(8, 64)


def check_zeros(source, output, sparsity, manifest):
    """The whole is exact to the element, and what the manifest says of each weight is true."""
    checkpoint, result = Checkpoint(source), Checkpoint(output)
    targets = {t.name: t for t in find_targets(checkpoint, ("lm_head",))[0]}
    zeros = {name: int((result.dense(result.weights[name]) == 0).sum()) for name in targets}
    assert sum(zeros.values()) == round(sparsity * sum(t.elements for t in targets.values()))
    for record in manifest["tensors"]:
        if record["name"] in targets:
            assert record["zeros"] == zeros[record["name"]]
    for item in manifest["calibration"]["pruned"]:
        assert item["zeros"] == zeros[item["name"]]
        assert item["sparsity"] == pytest.approx(zeros[item["name"]] / targets[item["name"]].elements)
    return zeros


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "opt", "falcon", "mixtral", "qwen3-moe"])
@pytest.mark.parametrize("method", METHODS)
def test_zeros_are_exact_in_every_family(checkpoint_of, tmp_path, family, method):
    source = checkpoint_of(family, torch.float32)
    manifest = prune(source, tmp_path / "out", 0.537, format="dense", method=method, text=TEXT)
    check_zeros(source, tmp_path / "out", 0.537, manifest)
    saw = {item["method"] for item in manifest["calibration"]["pruned"]}
    assert method in saw and saw <= {method, "magnitude"}
    assert verify(tmp_path / "out", source).passed


@pytest.mark.parametrize("allocation", ["owl", "auto"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_allocations_are_exact_and_told(checkpoint_of, tmp_path, family, allocation):
    source = checkpoint_of(family)
    text = few_words(8, 128)
    manifest = prune(source, tmp_path / "out", 0.6, method="sparsegpt", text=text, allocation=allocation, format="auto")
    zeros = check_zeros(source, tmp_path / "out", 0.6, manifest)
    shares = manifest["allocation"]["sparsity"]
    assert manifest["allocation"]["chosen"] == allocation and len({round(v, 4) for v in shares.values()}) > 1
    assert all(0.4 <= value <= 0.8 for value in shares.values())
    layers = Checkpoint(source).weights
    for name, value in shares.items():
        assert zeros[name] == pytest.approx(
            value * layers[name].entries[0].shape[0] * layers[name].entries[0].shape[1], abs=1.01
        )


def measured(folder, text) -> float:
    model, protocol = tilepress.load(folder, dtype=torch.float32), Protocol(str(text), seqlen=512, limit=12)
    return measure(model, AutoTokenizer.from_pretrained(folder), protocol).perplexity


@pytest.mark.thorough
def test_better_methods_are_better(tiny, halves, tmp_path):
    """Better on text that neither training of the masks nor the refit saw."""
    text, held_out = halves
    found = {}
    for method in ("magnitude", "wanda", "sparsegpt"):
        settings = {} if method == "magnitude" else {"text": text}
        prune(tiny, tmp_path / method, 0.6, format="dense", method=method, **settings)
        found[method] = measured(tmp_path / method, held_out)
    assert found["sparsegpt"] < 0.8 * found["wanda"] < 0.8 * found["magnitude"], found


def test_kept_weights_of_wanda_are_the_sources(checkpoint_of, tmp_path):
    source = checkpoint_of("llama")
    prune(source, tmp_path / "out", 0.5, format="dense", method="wanda", text=TEXT)
    before, after = Checkpoint(source), Checkpoint(tmp_path / "out")
    for target in find_targets(before)[0]:
        pruned, weight = after.read(target.name), before.read(target.name)
        assert torch.equal(pruned[pruned != 0], weight[pruned != 0])
        by_row = (pruned == 0).sum(1)
        assert int(by_row.max() - by_row.min()) <= 1


def test_wanda_is_exact_on_a_pruned_model(checkpoint_of, tmp_path):
    """Rows of it have more zeros than their share."""
    source = checkpoint_of("llama")
    prune(source, tmp_path / "once", 0.4, format="dense", scope="global")
    settings = {"format": "dense", "method": "wanda", "text": few_words(8, 128), "allocation": "auto"}
    manifest = prune(tmp_path / "once", tmp_path / "out", 0.6, **settings)
    check_zeros(source, tmp_path / "out", 0.6, manifest)


def test_a_later_layer_gets_what_the_pruned_ones_make(checkpoint_of, tmp_path):
    """The second layer's fit depends on how the first was pruned; without its inputs changed it would not."""
    source = checkpoint_of("llama", torch.float32)
    results = []
    for ignore in (("lm_head",), ("lm_head", "model.layers.0.*")):
        folder = tmp_path / str(len(results))
        prune(source, folder, 0.5, format="dense", method="wanda", text=TEXT, ignore=ignore)
        results.append(Checkpoint(folder).read("model.layers.1.mlp.down_proj.weight"))
    assert not torch.equal(*results)


def test_the_same_run_gives_the_same_bytes_and_a_stopped_one_too(checkpoint_of, tmp_path, monkeypatch):
    source = checkpoint_of("llama", shard_size="10MB")
    recipe, text = Prune(0.5, method="sparsegpt", format="tiled-bitmap", allocation="auto"), TEXT
    states = killed_before_each_rename(
        lambda out: run_recipe(recipe, source, out, text=text), tmp_path / "whole", monkeypatch
    )
    run_recipe(recipe, source, tmp_path / "again", text=text)
    expected = digest(tmp_path / "whole")
    assert digest(tmp_path / "again") == expected
    for step in (2, 4, 5, 6, 8):
        run_recipe(recipe, source, states[step], resume=True, text=text)
        assert digest(states[step]) == expected, step
    other = Prune(0.5, method="sparsegpt", format="tiled-bitmap")
    run_recipe(other, source, tmp_path / "other", text=few_words(7, 64))
    assert digest(tmp_path / "other") != expected


@pytest.mark.thorough
@pytest.mark.parametrize("allocation", ["owl", "auto"])
def test_a_stopped_survey_goes_on_after_its_last_layer(checkpoint_of, tmp_path, monkeypatch, allocation):
    source = checkpoint_of("llama", num_hidden_layers=3)
    recipe, text = Prune(0.5, method="wanda", format="dense", allocation=allocation), few_words(4, 64)
    run_recipe(recipe, source, tmp_path / "whole", text=text)
    monkeypatch.setattr(walk, "KEEP_EVERY_S", 0.0)
    states = killed_before_each_rename(
        lambda out: run_recipe(recipe, source, out, text=text), tmp_path / "saving", monkeypatch
    )
    looked, look = [], survey._Survey.visit
    monkeypatch.setattr(survey._Survey, "visit", lambda self, layer: looked.append(layer) or look(self, layer))
    # Before the renames: the plan, then each layer's tensors, facts and streams, and the facts of all.
    for step, layers in ((2, 3), (3, 3), (4, 2), (6, 2), (7, 1), (9, 1), (10, 0), (11, 0), (12, 0)):
        looked.clear()
        run_recipe(recipe, source, states[step], resume=True, text=text)
        assert len(looked) == layers and digest(states[step]) == digest(tmp_path / "whole"), step


def test_an_allocation_of_another_text_is_not_taken(checkpoint_of, tmp_path, monkeypatch):
    source, words = checkpoint_of("llama"), tmp_path / "text.txt"
    before = demo.TEXT.read_text()
    words.write_text(before)
    recipe, text = Prune(0.5, method="wanda", format="dense", allocation="owl"), few_words(8, 128, words)
    run = partial(run_recipe, recipe, source, text=text)
    states = killed_before_each_rename(run, tmp_path / "whole", monkeypatch)
    state = next(state for state in states if (state / ".tilepress" / "allocation.json").exists())
    words.write_text(before[500:])
    with pytest.raises(UsageError, match="have changed since"):
        run(state, resume=True)
    words.write_text(before)
    run(state, resume=True)
    assert digest(state) == digest(tmp_path / "whole")


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "falcon", "diffllama", "mixtral"])
def test_outputs_that_are_kept_are_those_of_another_run(checkpoint_of, tmp_path, monkeypatch, family):
    source = checkpoint_of(family, torch.float32)
    settings = {"format": "dense", "method": "sparsegpt", "text": TEXT}
    prune(source, tmp_path / "kept", 0.5, **settings)
    monkeypatch.setattr(Stream, "settle", lambda self, changing: None)
    prune(source, tmp_path / "computed", 0.5, **settings)
    found = [[f for f in digest(tmp_path / name).items() if "safetensors" in f[0]] for name in ("kept", "computed")]
    assert found[0] == found[1] and len(found[0])


def test_attention_runs_once_for_a_window_when_it_is_pruned(checkpoint_of):
    checkpoint = Checkpoint(checkpoint_of("llama", torch.float32))
    model = LayerByLayer(checkpoint, find_targets(checkpoint)[0], "cpu", torch.float32)
    layer, runs = model.layers[0], []
    hidden = [model.embed(torch.arange(20)), model.embed(torch.arange(100, 120))]
    with model.loaded(layer) as module:
        module.self_attn.register_forward_hook(lambda *_: runs.append("attention"))
        module.mlp.down_proj.register_forward_hook(lambda *_: runs.append("down"))
        stream = Stream(model, layer, module, list(hidden))
        expected = [stream.run(i) for i in range(2)]
        stream.settle({f"{layer}.mlp.down_proj"})
        assert stream.after(f"{layer}.self_attn.o_proj", f"{layer}.mlp.gate_proj") == f"{layer}.mlp.gate_proj"
        assert stream.after(f"{layer}.self_attn.q_proj", f"{layer}.self_attn.o_proj") == f"{layer}.self_attn.q_proj"
        runs.clear()
        stream.run(0), stream.run(1), stream.run(0)
        stream.advance()
    assert runs.count("down") == 5 and all(map(torch.equal, stream.hidden, expected))
    assert "forward" not in vars(module.self_attn)


def test_what_ends_in_a_pruned_linear_layer_runs_from_there(checkpoint_of, monkeypatch):
    checkpoint = Checkpoint(checkpoint_of("llama", torch.float32))
    model = LayerByLayer(checkpoint, find_targets(checkpoint)[0], "cpu", torch.float32)
    layer, hidden = model.layers[0], [model.embed(torch.arange(20)), model.embed(torch.arange(100, 120))]
    path, runs = f"{layer}.mlp.down_proj", []
    with model.loaded(layer) as module:
        stream = Stream(model, layer, module, list(hidden))
        stream.find_ends(hidden[0])
        module.mlp.gate_proj.register_forward_hook(lambda *_: runs.append("gate"))
        for i in range(2):
            with watch_inputs(stream.modules, [path], partial(lambda i, path, x: stream.saw(path, i, x), i)):
                stream.run(i)
        module.mlp.down_proj.weight.data.mul_(2)
        expected = [stream.run(i) for i in range(2)]
        assert len(runs) == 4
        stream.advance()
        assert len(runs) == 4 and all(map(torch.equal, stream.hidden, expected))
        monkeypatch.setattr(stream_module, "KEPT_BYTES", 0)
        stream.saw(path, 0, hidden[0])
        stream.run(0)
        assert len(runs) == 5


def test_a_child_that_changes_its_last_output_in_place_runs_whole(checkpoint_of, monkeypatch):
    checkpoint = Checkpoint(checkpoint_of("llama", torch.float32))
    model = LayerByLayer(checkpoint, find_targets(checkpoint)[0], "cpu", torch.float32)
    layer, probe = model.layers[0], model.embed(torch.arange(20))
    with model.loaded(layer) as module:
        stream, forward = Stream(model, layer, module, [probe]), module.mlp.forward
        monkeypatch.setattr(module.mlp, "forward", lambda x: forward(x).add_(1.0))
        stream.find_ends(probe)
        assert list(stream._ends) == [f"{layer}.self_attn.o_proj"]


def test_a_run_that_is_to_stop_at_an_expert_without_tokens(checkpoint_of, tmp_path, monkeypatch):
    """It goes on to the layer's end, which is not yet the next one's input."""
    source, settings = checkpoint_of("mixtral"), {"format": "dense", "method": "sparsegpt", "text": TEXT}
    prune(source, tmp_path / "stopped", 0.5, **settings)
    watch, passed = layer_pruning.watch_inputs, []

    def without_expert(modules, paths, see, until=None):
        passed.append(until and ".experts." in until)
        return watch(modules, paths, see, None if passed[-1] else until)

    monkeypatch.setattr(layer_pruning, "watch_inputs", without_expert)
    prune(source, tmp_path / "whole", 0.5, **settings)
    found = [[f for f in digest(tmp_path / name).items() if "safetensors" in f[0]] for name in ("stopped", "whole")]
    assert any(passed) and found[0] == found[1] and len(found[0])


@pytest.mark.parametrize("allocation", ["owl", "auto"])
def test_too_little_text_to_allocate_by(checkpoint_of, tmp_path, allocation):
    with pytest.raises(UsageError, match="too little text"):
        prune(
            checkpoint_of("llama"), tmp_path / "out", 0.5, method="wanda", text=few_words(2, 16), allocation=allocation
        )


def test_what_a_layer_took_is_freed_without_a_garbage_collector(checkpoint_of, tmp_path, monkeypatch):
    """A card's memory does not make Python look for cycles: layers would pile up there."""
    made = []

    class Watched(Moments):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(weakref.ref(self))

    monkeypatch.setattr(layer_pruning, "Moments", Watched)
    gc.disable()
    try:
        prune(checkpoint_of("llama"), tmp_path / "out", 0.5, method="sparsegpt", text=TEXT)
        assert made and not any(ref() for ref in made)
    finally:
        gc.enable()


def test_experts_that_saw_too_little_are_named(checkpoint_of, tmp_path, monkeypatch):
    source = checkpoint_of("mixtral")
    monkeypatch.setattr(layer_pruning, "FEW_TOKENS", 10_000_000)
    manifest = prune(source, tmp_path / "out", 0.5, format="auto", method="sparsegpt", text=TEXT)
    seen = manifest["calibration"]
    assert {item["method"] for item in seen["pruned"]} == {"magnitude"}
    assert any("saw only" in w and "by magnitude" in w for w in seen["warnings"])
    check_zeros(source, tmp_path / "out", 0.5, manifest)


def test_verify_compares_what_was_pruned_by_magnitude(checkpoint_of, tmp_path, monkeypatch):
    """Among weights that were refitted, which cannot be compared."""
    source = checkpoint_of("mixtral", torch.float32, shard_size="100MB")
    monkeypatch.setattr(layer_pruning, "FEW_TOKENS", 250)  # 512 tokens, each to two of four experts
    manifest = prune(source, tmp_path / "out", 0.5, format="dense", method="sparsegpt", text=TEXT)
    methods = {item["name"]: item["method"] for item in manifest["calibration"]["pruned"]}
    refitted = {record["name"] for record in manifest["tensors"] if record.get("refitted")}
    assert refitted == {name for name, method in methods.items() if method == "sparsegpt"}
    assert verify(tmp_path / "out", source).passed
    fallen_back = next(name for name, method in methods.items() if method == "magnitude")
    other = tmp_path / "other"
    shutil.copytree(source, other)
    tensors = load_file(other / "model.safetensors")
    tensors[fallen_back] *= 2
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    found = {check.name: check.findings for check in verify(tmp_path / "out", other).checks}["values equal the base"]
    assert len(found) == 1 and fallen_back in found[0]


def test_short_text_is_told_and_no_text_refused(checkpoint_of, tmp_path):
    source, short = checkpoint_of("llama"), tmp_path / "short.txt"
    short.write_text("import os\n" * 40)
    text = few_words(16, 64, short)
    manifest = prune(source, tmp_path / "out", 0.5, format="auto", method="sparsegpt", text=text)
    assert any("of the 1,024 asked for" in warning for warning in manifest["calibration"]["warnings"])
    short.write_text("")
    with pytest.raises(UsageError, match="no text"):
        prune(source, tmp_path / "none", 0.5, format="auto", method="sparsegpt", text=text)


def test_activations_that_overflow_are_named(tiny, tmp_path):
    tensors = load_file(tiny / "model.safetensors")
    tensors["model.layers.1.post_attention_layernorm.weight"][7] = 3e38
    folder = tmp_path / "loud"
    folder.mkdir()
    for path in tiny.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TilepressError, match=r"layers\.[12]\..* is not finite"):
        prune(folder, tmp_path / "out", 0.5, method="sparsegpt", text=TEXT)


@pytest.mark.parametrize(
    "words,message",
    [
        (("--method", "sparsegpt", "--scope", "row"), "--scope row is of --method magnitude"),
        (("--allocation", "owl"), "needs a method that reads text"),
        (("--allocation", "best", "--method", "wanda"), "--allocation best is unknown"),
        (("--method", "sparsegpt", "--damping", "0"), "--damping 0"),
        (("--nsamples", "4"), "reads no text"),
        (("--method", "magnitude", "--recover", "2", "--nsamples", "4"), "takes all of the text"),
    ],
)
def test_settings_that_contradict_each_other(cli, tiny, text, tmp_path, words, message):
    more = () if words[0] == "--nsamples" or "--method" not in words else ("--dataset", text)
    ran = cli("compress", "prune", tiny, "-o", tmp_path / "x", "--sparsity", "0.5", *words, *more)
    assert ran.code == 2 and message in ran.err and not (tmp_path / "x").exists()


def test_magnitude_beyond_its_reach_is_warned_of(cli, tiny, tmp_path):
    for sparsity, warned in (("0.5", False), ("0.7", True)):
        ran = cli("compress", "prune", tiny, "-o", tmp_path / sparsity, "--sparsity", sparsity)
        card = (tmp_path / sparsity / "README.md").read_text()
        assert ran.code == 0 and ("--method sparsegpt" in ran.err) == warned == ("--method sparsegpt" in card)


def test_the_command_line_and_inspect(cli, tiny, text, tmp_path):
    words = ("--sparsity", "0.5", "--method", "sparsegpt", "--allocation", "owl")
    words += ("--dataset", text, "--nsamples", "4", "--seqlen", "128")
    ran = cli("compress", "prune", tiny, "-o", tmp_path / "out", *words)
    assert ran.code == 0 and "allocation owl" in ran.out and "output error" in ran.out
    shown = cli("inspect", tmp_path / "out")
    assert "sparsegpt" in shown.out and "output error" in shown.out
    rows = cli("inspect", tmp_path / "out", "--json").json["rows"]
    assert sum(row["method"] == "sparsegpt" for row in rows) == 28
    assert "sparsegpt on 512 tokens" in (tmp_path / "out" / "README.md").read_text()


def test_sweep_keeps_a_table_and_a_drawing(cli, tiny, text, tmp_path, monkeypatch):
    def stop(folder):
        raise KeyboardInterrupt

    part = tmp_path / "part.txt"
    part.write_text(json.loads(text.read_text().splitlines()[0])["text"])
    text = part
    words = ("compress", "prune", tiny, "-o", tmp_path / "out", "--sparsity", "0.5,0.3", "--eval-dataset", text)
    assert cli(*words).code == 2
    mine = tmp_path / "out" / "sparsity-0.7"
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "_remove", stop)  # when the first row is written
        assert cli(*words, "--sweep", "--json").code and (tmp_path / "out" / "sparsity-0.3").exists()
    shutil.copytree(tmp_path / "out" / "sparsity-0.3", mine)
    ran = cli(*words, "--sweep", "--resume", "--json")
    rows = ran.json["rows"]
    assert mine.exists() and not shutil.rmtree(mine)
    assert ran.code == 0 and [row["sparsity_asked"] for row in rows] == [0.3, 0.5]
    assert rows[0]["perplexity"] < rows[1]["perplexity"] and rows[0]["bytes"] > rows[1]["bytes"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"sweep.json", "sweep.md", "sweep.png"}
    drawn = {
        up: [[row["bytes"] / 1e6, row[key], f"{row['sparsity']:.0%}"] for row in rows]
        for key, up in (("times_dense", "perplexity / dense"), ("kl_divergence", "KL divergence, nats"))
    }
    assert source_of((tmp_path / "out" / "sweep.png").read_bytes()) == source(drawn)
    assert f"{rows[1]['perplexity']:.4f}" in (tmp_path / "out" / "sweep.md").read_text()
    assert cli(*words, "--sweep").code == 2
    again = cli(*words, "--sweep", "--resume", "--json")
    assert again.code == 0 and json.loads(again.out)["rows"] == rows
    assert math.isclose(rows[0]["times_dense"], rows[0]["perplexity"] / rows[0]["base_perplexity"])


@pytest.mark.parametrize("mark", ["tilepress.json", ".tilepress"])
def test_overwriting_a_sweep_finds_an_artifact_that_was_being_removed(tmp_path, monkeypatch, mark):
    folder, removed = tmp_path / "sparsity-0.5", []
    (folder / "kv_cache").mkdir(parents=True)
    for name in ("a.safetensors", "kv_cache/x", mark, "z.safetensors"):
        (folder / name).touch()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda path: removed.append(path.name))
        with pytest.raises(OSError, match="not empty"):
            sweep._remove(folder)
    assert removed[-1] == mark and len(removed) == 3
    (tmp_path / "sparsity-mine").mkdir()
    (tmp_path / "sparsity-mine" / "notes").touch()
    sweep._rows_so_far(tmp_path, {}, resume=False, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["sparsity-mine"]


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_on_a_card(tiny, tmp_path, method):
    """Exact, the same bytes twice, and what the CPU makes: nearly the mask where the inputs are the same, and everywhere as small an error."""
    recipe, text = Prune(0.6, method=method, format="dense"), few_words(16, 256)
    places = {"cpu": "cpu", "card": "cuda", "again": "cuda"}
    made = {name: run_recipe(recipe, tiny, tmp_path / name, device, text=text) for name, device in places.items()}
    assert made["card"]["calibration"]["device"] == "cuda" and digest(tmp_path / "card") == digest(tmp_path / "again")
    check_zeros(tiny, tmp_path / "card", 0.6, made["card"])
    here, there = (Checkpoint(tmp_path / name) for name in ("cpu", "card"))
    pairs = zip(made["cpu"]["calibration"]["pruned"], made["card"]["calibration"]["pruned"], strict=True)
    for one, other in pairs:
        masks = [found.read(one["name"]) == 0 for found in (here, there)]
        differs = float((masks[0] != masks[1]).float().mean())
        first = "layers.0.self_attn.q_proj" in one["name"]
        assert one["name"] == other["name"] and differs < (0.02 if first else 0.25), (one["name"], differs)
        assert other["output_error"] == pytest.approx(one["output_error"], rel=0.1), one["name"]


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_zeros_are_exact_on_a_card(checkpoint_of, tmp_path, family):
    source = checkpoint_of(family)
    recipe, text = Prune(0.537, method="sparsegpt", format="dense"), TEXT
    check_zeros(source, tmp_path / "out", 0.537, run_recipe(recipe, source, tmp_path / "out", "cuda", text=text))


@pytest.mark.gpu
def test_a_stopped_run_on_a_card_goes_on_to_the_same_bytes(checkpoint_of, tmp_path, monkeypatch):
    source = checkpoint_of("llama", shard_size="10MB")
    recipe, text = Prune(0.5, method="sparsegpt", format="tiled-bitmap", allocation="auto"), TEXT
    whole, run = tmp_path / "whole", partial(run_recipe, recipe, source, device="cuda", text=text)
    states = killed_before_each_rename(run, whole, monkeypatch)
    for step in (2, 4, 6):
        run(states[step], resume=True)
        assert digest(states[step]) == digest(whole), step


@pytest.mark.gpu
@pytest.mark.parametrize("allocation", ["owl", "auto"])
def test_allocations_on_a_card(tiny, tmp_path, allocation):
    """The CPU's sparsities, but for what rounding does to them."""
    recipe, text = Prune(0.6, method="sparsegpt", format="dense", allocation=allocation), few_words(8, 256)
    here, there = (run_recipe(recipe, tiny, tmp_path / device, device, text=text) for device in ("cpu", "cuda"))
    check_zeros(tiny, tmp_path / "cuda", 0.6, there)
    assert there["allocation"]["sparsity"] == pytest.approx(here["allocation"]["sparsity"], abs=0.02)
