"""`compress quantize`: what it costs in perplexity, what the artifact declares, resuming, bad input."""

import dataclasses
import json
import math
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.artifacts import few_words, quantize, run_recipe
from support.families import byte_tokenizer
from support.interruption import digest, stop_anywhere_and_resume
from support.outliers import add_outliers
from transformers import AutoModelForCausalLM, AutoTokenizer

import tilepress
from tilepress import Quantize, demo
from tilepress.compress.layers import walk
from tilepress.compress.layers.walk import wait_for_walk
from tilepress.compress.quantize import inputs, ranges as calibrating
from tilepress.compress.quantize.observers import Observer
from tilepress.compress.quantize.recipe import CHOICES
from tilepress.compress.run import shards
from tilepress.compress.run.targets import find_targets
from tilepress.eval.perplexity import Protocol, measure
from tilepress.eval.verify import verify
from tilepress.formats import TilepressError, UsageError, int8
from tilepress.formats.checkpoint import Checkpoint
from tilepress.runtime.decode.batch import Batch
from tilepress.runtime.linear.int8 import Int8Linear
from tilepress.runtime.loader import paths
from tilepress.text import Text

TEXT = few_words()
STATIC = {"activations": "tensor", "text": TEXT, "smooth": "off"}
SCHEMES = {
    "token": {},
    "weights-tensor": {"weights": "tensor"},
    "static": STATIC,
    "asymmetric": STATIC | {"activations": "tensor-asym"},
    "channel": {"activations": "channel", "text": TEXT},
    "dynamic-tensor": {"activations": "tensor-dynamic"},
    "weight-only": {"activations": "none"},
    "smoothed": STATIC | {"smooth": "auto"},
    "token-smoothed": {"text": TEXT, "smooth": "0.5"},
    "recommended": {"text": TEXT},
    "static-recommended": {"activations": "tensor", "text": TEXT},
    "percentile": STATIC | {"observer": Observer("percentile", 99.99)},
}


@pytest.fixture(scope="module")
def increase(tiny, halves):
    """Relative rise of an artifact's perplexity over that of `tiny`, on its first windows, computed in float32."""
    tokenizer, dense, (_, held_out) = AutoTokenizer.from_pretrained(tiny), {}, halves

    def measured(path, limit: int) -> float:
        model = tilepress.load(path, dtype=torch.float32)
        assert any("w8a" in path for path in paths(model)) == (path != tiny)
        return measure(model, tokenizer, Protocol(str(held_out), "gptq", 512, None, limit)).perplexity

    def increase(artifact, limit=3) -> float:
        if limit not in dense:
            dense[limit] = measured(tiny, limit)
        return measured(artifact, limit) / dense[limit] - 1

    return increase


@pytest.mark.thorough
@pytest.mark.parametrize(
    "settings,most",
    [
        ({}, 0.005),
        ({"activations": "none"}, 0.002),
        ({"activations": "token"}, 0.005),
        ({"activations": "tensor", "smooth": "off"}, 0.03),
        ({"activations": "tensor", "smooth": "auto"}, 0.02),
        ({"activations": "channel"}, 0.02),
    ],
)
def test_what_it_costs(tiny, tmp_path, halves, increase, settings, most):
    calibration, _ = halves
    quantize(tiny, tmp_path / "out", **settings | ({"text": calibration} if "activations" in settings else {}))
    assert -0.005 < increase(tmp_path / "out") < most


@pytest.mark.thorough
def test_outliers_ruin_static_ranges_and_smoothing_mends_them(tiny, tmp_path, halves, increase):
    calibration, _ = halves
    source = add_outliers(tiny, tmp_path / "outliers")
    ids = torch.arange(200)[None] + 100
    with torch.no_grad():
        plain, moved = (
            AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32)(ids).logits for p in (tiny, source)
        )
    torch.testing.assert_close(plain, moved, rtol=1e-4, atol=1e-4)
    costs = {}
    for name, settings in {
        "static": {"activations": "tensor", "smooth": "off"},
        "smoothed": {"activations": "tensor", "smooth": "auto"},
        "channel": {"activations": "channel"},
        "token": {"smooth": "auto"},
        "recommended": {},
        "random": {"text": Text("random", 4, 512)},  # without any text
    }.items():
        manifest = quantize(source, tmp_path / name, **{"text": calibration} | settings)
        costs[name] = increase(tmp_path / name, limit=2)
    assert costs["static"] > 0.2
    assert costs["smoothed"] < 0.02 and costs["channel"] < 0.02 and costs["token"] < 0.01
    assert costs["recommended"] < 0.005 and costs["random"] < 0.01
    assert manifest["settings"]["smooth"] == "learn" and "rounding" not in manifest["settings"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "family", ["llama", "llama-tied", "qwen2", "gpt2", "opt", "falcon", "mixtral", "qwen3-moe", "mistral", "qwen3"]
)
@pytest.mark.parametrize("scheme", ["token", "asymmetric", "smoothed", "recommended"])
def test_every_family_and_its_manifest(checkpoint_of, tmp_path, family, scheme):
    source, settings = checkpoint_of(family), SCHEMES[scheme]
    manifest = quantize(source, tmp_path / "out", **settings)
    checks = verify(tmp_path / "out", source).checks
    assert [f for c in checks for f in c.findings] == []
    targets, _ = find_targets(Checkpoint(source))
    records = {r["name"]: r for r in manifest["tensors"]}
    quantized = {n for n, r in records.items() if r["layout"] == "int8" or r.get("kept")}
    assert quantized == {t.name for t in targets}
    layers = manifest["report"]["layers"]
    kept = {n for n, r in records.items() if r.get("kept")}
    assert {x["name"] for x in layers} | kept == {t.name for t in targets} and len(manifest["report"]["worst"]) == 5
    assert all(30 < x["snr_db"] < 70 for x in layers)
    if "text" in settings:
        inputs = manifest["calibration"]["inputs"]
        assert {name for item in inputs for name in item["weights"]} == {t.name for t in targets}
        assert all(0 < x["output_error"] < 0.2 for x in layers if x["output_error"] is not None)
        assert all(0 <= x["clip_share"] < 0.05 for x in layers if x["clip_share"] is not None)
        for item in inputs:
            assert item["tokens"] == 0 or item["low"] <= item["high"]
            if scheme == "smoothed":
                assert (item["alpha"] is None) == ("left_alone" in item)
    with torch.no_grad():
        logits = tilepress.load(tmp_path / "out", dtype=torch.float32)(torch.arange(40)[None]).logits
        exact = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)(torch.arange(40)[None]).logits
    assert float((logits - exact).norm() / exact.norm()) < 0.2


@pytest.mark.parametrize("scheme", SCHEMES)
def test_stored_tensors_are_the_formats(checkpoint_of, tmp_path, scheme):
    source = checkpoint_of("llama")
    manifest = quantize(source, tmp_path / "out", **SCHEMES[scheme])
    checkpoint, config = Checkpoint(tmp_path / "out"), Checkpoint(tmp_path / "out").config["quantization_config"]
    found = int8.scheme_of(config)
    assert config["quant_method"] == "compressed-tensors" and config["ignore"] == ["lm_head"]
    assert len(found.dynamic) == (scheme == "static-recommended")  # of 14 layers a tenth
    smoothed = {r["name"] for r in manifest["tensors"] if r.get("smoothed")}
    assert bool(smoothed) == (scheme in ("smoothed", "channel", "token-smoothed") or "recommended" in scheme)
    assert {r["name"] for r in manifest["tensors"] if r.get("refitted")} == (
        {r["name"] for r in manifest["report"]["layers"]} if "recommended" in scheme else set()
    )
    for name, weight in checkpoint.weights.items():
        if weight.layout != "int8":
            continue
        codes, scale = checkpoint.read(name), checkpoint.read(name + "_scale")
        assert scale.dtype == torch.bfloat16
        assert scale.shape == ((codes.shape[0], 1) if found.weights == "channel" else (1,))
        original = Checkpoint(source).read(name)
        if name not in smoothed and "recommended" not in scheme:
            expected = torch.round(original.double() / scale.double())
            assert int((codes.double() - expected).abs().max()) == 0
        stem = name.removesuffix(".weight")
        assert (f"{stem}.input_scale" in checkpoint.tensors) == found.of(name).static
        assert (f"{stem}.input_zero_point" in checkpoint.tensors) == found.asymmetric
    if found.static:
        for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            block = "self_attn" if "q_proj" in names else "mlp"
            for layer in range(2):
                values = {float(checkpoint.read(f"model.layers.{layer}.{block}.{n}.input_scale")) for n in names}
                assert len(values) == 1


def test_static_ranges_are_those_of_the_model(checkpoint_of, tmp_path):
    """Ranges of minmax against hooks on the whole model, run over the same windows."""
    source = checkpoint_of("qwen2", torch.float32)
    manifest = quantize(source, tmp_path / "out", **STATIC | {"observer": Observer("minmax")})
    model, seen = AutoModelForCausalLM.from_pretrained(source), {}

    def see(name):
        def hook(_, args):
            low, high = seen.get(name, (math.inf, -math.inf))
            seen[name] = (min(low, float(args[0].min())), max(high, float(args[0].max())))

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(see(f"{name}.weight"))
    with torch.no_grad():
        for window in TEXT.windows(AutoTokenizer.from_pretrained(source)):
            model(torch.tensor([window]))
    for item in manifest["calibration"]["inputs"]:
        for name in item["weights"]:
            assert (item["low"], item["high"]) == pytest.approx(seen[name], rel=1e-4)
        reach = max(-item["low"], item["high"])
        assert item["scale"] == pytest.approx(reach / 127, rel=1e-3) and item["tokens"] == 8 * 64
        stem = item["weights"][0].removesuffix(".weight")
        assert float(Checkpoint(tmp_path / "out").read(f"{stem}.input_scale")) == item["scale"]


def test_smoothed_artifact_computes_the_source(checkpoint_of, tmp_path, cli):
    """Its weights, taken back to floating point, give the source's logits but for the rounding of weights."""
    source, ids, errors = checkpoint_of("llama-tied", torch.float32), torch.arange(60)[None], {}
    with torch.no_grad():
        exact = AutoModelForCausalLM.from_pretrained(source)(ids).logits
        for smooth in ("off", "0.6"):
            quantize(source, tmp_path / smooth, **STATIC | {"smooth": smooth})
            assert cli("convert", tmp_path / smooth, "-o", tmp_path / f"{smooth}-dense", "--to", "dense").code == 0
            logits = AutoModelForCausalLM.from_pretrained(tmp_path / f"{smooth}-dense")(ids).logits
            errors[smooth] = float((logits - exact).norm() / exact.norm())
    assert 0 < errors["0.6"] < 2 * errors["off"] < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_producers_without_a_fold_of_their_own_are_divided_once(checkpoint_of, tmp_path, dtype):
    """OPT's fc1 -> fc2 where the norm before fc1 takes no factors: a stored float32 weight must not be changed in place."""
    source = checkpoint_of("opt", dtype, do_layer_norm_before=False)
    manifest = quantize(source, tmp_path / "out", text=TEXT, smooth="0.5")
    folded = {item["folded_into"] for item in manifest["calibration"]["inputs"]}
    assert "model.decoder.layers.0.fc1" in folded and "model.decoder.layers.0.self_attn_layer_norm" not in folded
    assert all(layer["snr_db"] > 38 for layer in manifest["report"]["layers"])
    ids = torch.arange(40)[None]
    with torch.no_grad():
        exact = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)(ids).logits
        found = tilepress.load(tmp_path / "out", dtype=torch.float32)(ids).logits
    assert float((found - exact).norm() / exact.norm()) < 0.03


def test_stopped_anywhere_it_resumes_to_the_same_bytes(checkpoint_of, tmp_path, monkeypatch):
    """Among the stops: each layer's calibration."""

    def nothing_loads(output):
        if not (output / "config.json").exists():
            with pytest.raises(TilepressError):
                tilepress.load(output)

    recipe, text = Quantize(activations="tensor", smooth="0.5"), few_words(2, 32)
    source = checkpoint_of("llama", shard_size="1MB")
    assert stop_anywhere_and_resume(recipe, source, tmp_path, monkeypatch, nothing_loads, text) > 12


def test_the_command_resumes(checkpoint_of, tmp_path, cli, monkeypatch):
    source = checkpoint_of("llama")
    words = ["--activations", "tensor", "--dataset", demo.TEXT, "--nsamples", 4, "--seqlen", 64]
    assert cli("compress", "quantize", source, "-o", tmp_path / "whole", *words).code == 0
    again = ("compress", "quantize", source, "-o", tmp_path / "out", *words)
    with monkeypatch.context() as patch:
        patch.setattr(shards.ShardWriter, "finish", lambda self: 1 / 0)  # after the calibration
        assert cli(*again).code == 1
    assert cli(*again).code == 2
    with monkeypatch.context() as patch:
        patch.setattr(calibrating, "_calibrate_layer", lambda *_: 1 / 0)  # which is not repeated
        assert cli(*again, "--resume").code == 0
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


def test_another_kind_of_device_does_not_take_over(checkpoint_of, tmp_path, monkeypatch):
    """Layers computed in other arithmetic must not stand beside each other in one artifact."""
    source, text = checkpoint_of("llama"), few_words(2, 32)
    recipe = Quantize(activations="tensor")
    done = []

    def one_layer(*args):
        if done:
            raise KeyboardInterrupt
        done.append(None)
        return calibrate_layer(*args)

    calibrate_layer = calibrating._calibrate_layer
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(calibrating, "_calibrate_layer", one_layer)
        run_recipe(recipe, source, tmp_path / "out", text=text)
    with monkeypatch.context() as patch:
        patch.setattr(walk, "compute_dtype", lambda dtype, device: torch.float64)
        run_recipe(recipe, source, tmp_path / "out", text=text, resume=True)
        run_recipe(recipe, source, tmp_path / "whole", text=text)
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


def test_workers_and_ranks_write_the_same_bytes(checkpoint_of, tmp_path, cli, command, quick_workers):
    source = checkpoint_of("llama")
    words = ["--activations", "channel", "--dataset", demo.TEXT, "--nsamples", 4, "--seqlen", 64]
    assert cli("compress", "quantize", source, "-o", tmp_path / "one", *words).code == 0
    assert cli("compress", "quantize", source, "-o", tmp_path / "two", "--workers", 2, *words).code == 0
    ranks = [
        command("compress", "quantize", source, "-o", tmp_path / "ranks", *words, "--rank", rank, "--world-size", 2)
        for rank in (1, 0)
    ]
    for process in ranks:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert digest(tmp_path / "one") == digest(tmp_path / "two") == digest(tmp_path / "ranks")


def test_a_rank_without_work_sees_that_the_others_are_done(checkpoint_of, tmp_path):
    source, out = checkpoint_of("llama", shard_size="10MB"), tmp_path / "out"
    how = {"dataset": TEXT, "device": "cpu", "world_size": 2}
    assert tilepress.compress(source, out, Quantize(activations="tensor"), **how).targets
    before = digest(out)
    assert tilepress.compress(source, out, Quantize(activations="tensor"), **how, rank=1).was_complete
    assert digest(out) == before


def test_a_rank_gives_up_when_rank_0_does_nothing(tmp_path):
    with pytest.raises(TilepressError, match="has written nothing"):
        wait_for_walk(tmp_path, lambda what, count: None, patience_s=0.05, every_s=0.01)


def test_resume_notices_that_text_or_weights_changed(checkpoint_of, tmp_path, cli, monkeypatch):
    source, text = tmp_path / "source", tmp_path / "text.txt"
    shutil.copytree(checkpoint_of("llama"), source)
    text.write_text("some words " * 100)
    words = [
        "compress",
        "quantize",
        source,
        "-o",
        tmp_path / "out",
        "--activations",
        "tensor",
        "--dataset",
        text,
        "--nsamples",
        4,
    ]
    words += ["--seqlen", 64]
    monkeypatch.setattr(shards.ShardWriter, "finish", lambda self: 1 / 0)
    assert cli(*words).code == 1
    monkeypatch.undo()
    text.write_text("other words " * 100)
    ran = cli(*words, "--resume")
    assert ran.code == 2 and "have changed since" in ran.err and "--overwrite" in ran.err
    text.write_text("some words " * 100)
    shard = next(source.glob("*.safetensors"))
    os.utime(shard, ns=(1, 1))
    assert "have changed since" in cli(*words, "--resume").err
    assert cli(*words, "--overwrite").code == 0


def test_dry_run_and_result(checkpoint_of, tmp_path, cli):
    source = checkpoint_of("llama")
    words = ["--activations", "tensor", "--dataset", demo.TEXT, "--nsamples", 4, "--seqlen", 64, "--smooth", "auto"]
    plan = cli("compress", "quantize", source, "-o", tmp_path / "out", *words, "--dry-run", "--json").json
    assert not (tmp_path / "out").exists() and len(plan["layers"]) == 14
    ran = cli("compress", "quantize", source, "-o", tmp_path / "out", *words, "--json")
    assert ran.code == 0 and ran.json["report"]["worst"] and ran.json["calibration"]["tokens"] == 256
    assert "eval perplexity" in ran.err
    stored = sum(p.stat().st_size for p in (tmp_path / "out").glob("*.safetensors"))
    assert stored <= plan["disk_bytes"] <= 1.5 * stored + 100_000
    text = cli("compress", "quantize", source, "-o", tmp_path / "again", *words).out
    assert "weight SNR" in text and ran.json["report"]["worst"][0] in text and "calibrated on 256 tokens" in text
    card = (tmp_path / "out" / "README.md").read_text()
    assert "compressed-tensors" in card and "Tiled-CSL" not in card
    shown = cli("inspect", tmp_path / "out")
    assert shown.code == 0 and "int8" in shown.out


def test_converted_back_it_is_dense_and_rounded(checkpoint_of, tmp_path, cli):
    source = checkpoint_of("gpt2")
    quantize(source, tmp_path / "int8")
    assert cli("convert", tmp_path / "int8", "-o", tmp_path / "dense", "--to", "dense").code == 0
    back, original = Checkpoint(tmp_path / "dense"), Checkpoint(source)
    assert "quantization_config" not in back.config and set(back.tensors) == set(original.tensors)
    for name, entry in original.tensors.items():
        assert back.tensors[name].shape == entry.shape and back.tensors[name].dtype == entry.dtype
        torch.testing.assert_close(back.read(name).float(), original.read(name).float(), rtol=0.01, atol=0.01)


def test_layers_left_alone_are_named_in_the_config(checkpoint_of, tmp_path):
    quantize(checkpoint_of("llama"), tmp_path / "out", ignore=("lm_head", "*.mlp.*"))
    ignore = Checkpoint(tmp_path / "out").config["quantization_config"]["ignore"]
    assert len(ignore) == 1 + 2 * 3 and "model.layers.1.mlp.down_proj" in ignore
    assert verify(tmp_path / "out", checkpoint_of("llama")).passed


def test_gpt2_is_marked_as_ours_alone(checkpoint_of, tmp_path):
    """compressed-tensors has no Conv1D: its loader would take codes for weights, were they of a weight's shape."""
    quantize(checkpoint_of("gpt2"), tmp_path / "out")
    found = Checkpoint(tmp_path / "out")
    assert found.config["quantization_config"]["quant_method"] == "tilepress"
    assert found.tensors["transformer.h.0.attn.c_attn.weight"].shape == (1, 100, 300)
    assert "other loaders refuse" in (tmp_path / "out" / "README.md").read_text()


def test_routers_are_named_in_the_config_and_missing_names_are_found(checkpoint_of, tmp_path):
    for family, router in (("mixtral", "block_sparse_moe.gate"), ("qwen3-moe", "mlp.gate")):
        out = tmp_path / family
        manifest = quantize(checkpoint_of(family), out)
        config = json.loads((out / "config.json").read_text())
        routers = [f"model.layers.{layer}.{router}" for layer in range(2)]
        assert config["quantization_config"]["ignore"] == ["lm_head", *routers]
        reasons = {item["name"]: item["reason"] for item in manifest["left_alone"]}
        assert all(reasons[f"{name}.weight"] == "expert router" for name in routers)
        assert any("transformers 5" in note for check in verify(out).checks for note in check.notes)
        config["quantization_config"]["ignore"] = ["lm_head"]
        (out / "config.json").write_text(json.dumps(config))
        findings = [finding for check in verify(out, reload=False).checks for finding in check.findings]
        assert all(any(f"{name} is float but not in `ignore`" in f for f in findings) for name in routers)


def test_float_layers_that_ignore_does_not_name_are_found(checkpoint_of, tmp_path):
    quantize(checkpoint_of("llama"), tmp_path / "out", ignore=("*.down_proj",))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    ignore = config["quantization_config"]["ignore"]
    for names, found in ((["re:.*down_proj", "lm_head"], []), (ignore[:2], ["model.layers.1.mlp.down_proj"])):
        config["quantization_config"]["ignore"] = names
        (tmp_path / "out" / "config.json").write_text(json.dumps(config))
        (check,) = (c for c in verify(tmp_path / "out", reload=False).checks if c.name == "vLLM's rules")
        assert [finding.partition(" is float")[0] for finding in check.findings] == found


def test_auto_takes_the_best_alpha(checkpoint_of, tmp_path):
    """The recorded error is what the search compares, where one layer reads an input and ranges are the extremes."""
    source, errors, alphas = checkpoint_of("qwen2", torch.float32), {}, [i / 10 for i in range(11)]
    for smooth in ("off", "auto", *map(str, alphas)):
        settings = {"activations": "tensor", "observer": Observer("minmax"), "smooth": smooth, "text": TEXT}
        manifest = quantize(source, tmp_path / smooth, **settings)
        for item in manifest["calibration"]["inputs"]:
            if len(item["weights"]) == 1:
                name = item["weights"][0]
                errors.setdefault(name, {})[smooth] = item["output_error"][name]
                if smooth == "auto":
                    errors[name]["chosen"] = str(item["alpha"]) if item["alpha"] is not None else "off"
    assert len(errors) == 4
    for found in errors.values():
        best = min(("off", *map(str, alphas)), key=found.get)
        assert found["auto"] == pytest.approx(found[found["chosen"]], rel=1e-4)
        assert found["auto"] <= 1.001 * found[best]
    assert len({found["chosen"] for found in errors.values()}) > 1


def test_auto_leaves_alone_what_smoothing_does_not_help(checkpoint_of, tmp_path, monkeypatch):
    wild = torch.Generator().manual_seed(0)
    monkeypatch.setattr(inputs, "smooth_factors", lambda x, w, alpha: torch.exp(6 * torch.rand(len(x), generator=wild)))
    manifest = quantize(checkpoint_of("llama"), tmp_path / "out", **STATIC | {"smooth": "auto"})
    for item in manifest["calibration"]["inputs"]:
        assert item["left_alone"] == "no alpha lowers the output error"
        assert item["alpha"] is item["folded_into"] is None
    monkeypatch.undo()
    quantize(checkpoint_of("llama"), tmp_path / "plain", **STATIC)
    for name, entry in Checkpoint(tmp_path / "plain").tensors.items():
        assert torch.equal(Checkpoint(tmp_path / "out").read(name), Checkpoint(tmp_path / "plain").read(name)), entry


def test_the_report_counted_anew(checkpoint_of, tmp_path):
    """SNR, clipped share and output error of every layer from the stored tensors and the whole model's activations, in float64."""
    source = checkpoint_of("qwen2", torch.float32)
    manifest = quantize(source, tmp_path / "out", **STATIC | {"observer": Observer("percentile", 99.9)})
    model, seen = AutoModelForCausalLM.from_pretrained(source), {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, args, n=name: seen.setdefault(n, []).append(args[0][0].double()))
    with torch.no_grad():
        for window in TEXT.windows(AutoTokenizer.from_pretrained(source)):
            model(torch.tensor([window]))
    found, layers = Checkpoint(tmp_path / "out"), manifest["report"]["layers"]
    assert len(layers) == 14
    for layer in layers:
        path = layer["name"].removesuffix(".weight")
        weight, x = model.get_submodule(path).weight.detach().double(), torch.cat(seen[path])
        back = found.read(layer["name"]).double() * found.read(f"{path}.weight_scale").double()
        scale = found.read(f"{path}.input_scale").double()
        codes = torch.clamp(torch.round(x / scale), -128, 127)
        assert layer["snr_db"] == pytest.approx(
            20 * math.log10(float(weight.norm() / (weight - back).norm())), abs=0.01
        )
        outside = float(((x < -128.5 * scale) | (x > 127.5 * scale)).double().mean())
        assert layer["clip_share"] == pytest.approx(outside, rel=0.15)  # bins are 0.2 % wide
        exact = x @ weight.t()
        error = float(((codes * scale) @ back.t() - exact).norm() / exact.norm())
        assert layer["output_error"] == pytest.approx(error, rel=1e-3)
    errors = [layer["output_error"] for layer in layers]
    assert errors == sorted(errors, reverse=True)
    assert manifest["report"]["worst"] == [layer["name"] for layer in layers[:5]]


def test_what_was_left_per_tensor_is_listed(checkpoint_of, tmp_path, cli):
    words = ["--activations", "channel", "--dataset", demo.TEXT, "--nsamples", 4, "--seqlen", 64]
    out = cli("compress", "quantize", checkpoint_of("gpt2"), "-o", tmp_path / "out", *words).out
    assert "per channel 4 of 8 inputs" in out and "smoothed" not in out
    assert "left per tensor 4 x its input comes neither from a norm nor" in out


def test_gemmas_norms_take_no_factors(checkpoint_of, tmp_path):
    """They scale by 1 + w: dividing w divides nothing."""
    manifest = quantize(checkpoint_of("gemma"), tmp_path / "out", **STATIC | {"smooth": "0.5"})
    reasons = {item["weights"][0].split(".")[-2]: item.get("left_alone") for item in manifest["calibration"]["inputs"]}
    assert all("not only scaled" in reasons[name] for name in ("q_proj", "gate_proj"))
    assert reasons["down_proj"] is None and reasons["o_proj"] is None


def test_a_layer_that_does_not_run_or_sees_nothing_is_named(checkpoint_of, tmp_path, monkeypatch):
    source = checkpoint_of("llama")
    with (
        monkeypatch.context() as patch,
        pytest.raises(TilepressError, match=r"does not run model.layers.0.mlp.down_proj"),
    ):
        find = walk.find_groups
        patch.setattr(walk, "find_groups", lambda *a, **k: find(*a, **k)[:-1])
        quantize(source, tmp_path / "unused", **STATIC)
    with monkeypatch.context() as patch, pytest.raises(TilepressError, match=r"saw no token of the calibration text"):
        patch.setattr(inputs.InputStats, "add", lambda *_: None)
        quantize(source, tmp_path / "unseen", **STATIC)


def with_a_huge_channel(source, folder):
    """Return a copy of a checkpoint that computes the same; one channel of the last layer's `down_proj` is huge, as a sink's is."""
    (shard,) = source.glob("*.safetensors")
    tensors = load_file(shard)
    tensors["model.layers.1.mlp.up_proj.weight"][7] *= 3000
    tensors["model.layers.1.mlp.down_proj.weight"][:, 7] /= 3000
    shutil.copytree(source, folder, copy_function=shutil.copyfile)
    save_file(tensors, folder / shard.name, {"format": "pt"})
    return folder


@pytest.mark.parametrize("settings", [{"smooth": "off"}, {"rounding": "gptq"}, {"activations": "tensor"}])
def test_what_int8_costs_most_stays_in_16_bits(checkpoint_of, tmp_path, settings):
    """Nothing that moves the channel back is on; a kept layer has the source's values, or those that a fold makes of them."""
    folder = with_a_huge_channel(checkpoint_of("llama", torch.float32, shard_size="10MB"), tmp_path / "source")
    name = "model.layers.1.mlp.down_proj"
    settings = STATIC | {"activations": "token"} | settings
    manifest = quantize(folder, tmp_path / "out", **settings, keep=0.2)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", name]
    assert [item["weights"] for item in manifest["calibration"]["inputs"] if item.get("kept")] == [[f"{name}.weight"]]
    assert manifest["settings"]["keep"] == 0.2 and name not in str(manifest["report"]["layers"])
    assert all(check.passed for check in verify(tmp_path / "out", folder).checks)
    stored = {key: value for path in (tmp_path / "out").glob("*.safetensors") for key, value in load_file(path).items()}
    assert stored[f"{name}.weight"].dtype == torch.float32 and f"{name}.weight_scale" not in stored
    quantize(folder, tmp_path / "all", **settings)
    ids, found = torch.arange(40)[None], {}
    with torch.no_grad():
        exact = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
        for out in ("out", "all"):
            logits = tilepress.load(tmp_path / out, dtype=torch.float32)(ids).logits
            found[out] = float((logits - exact).norm() / exact.norm())
    assert found["out"] < 0.7 * found["all"]


def test_a_budget_too_small_for_any_layer_keeps_none(checkpoint_of, tmp_path):
    folder = with_a_huge_channel(checkpoint_of("llama", torch.float32, shard_size="10MB"), tmp_path / "source")
    manifest = quantize(folder, tmp_path / "out", text=TEXT, smooth="off", keep=0.01)
    assert not any(item.get("kept") for item in manifest["calibration"]["inputs"])
    assert all("noise" in item and "elements" not in item for item in manifest["calibration"]["inputs"])


@pytest.mark.parametrize("settings", [{}, {"weights": "tensor", "smooth": "off", "rounding": "gptq"}])
def test_the_expected_cost_is_about_what_the_logits_diverge_by(checkpoint_of, tmp_path, settings):
    source = checkpoint_of("llama", torch.float32)
    found = quantize(source, tmp_path / "out", text=TEXT, **settings)["calibration"]
    ids = torch.tensor(dataclasses.replace(TEXT, seed=1).windows(AutoTokenizer.from_pretrained(source)))
    with torch.no_grad():
        exact = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)(ids).logits.log_softmax(-1)
        other = tilepress.load(tmp_path / "out", dtype=torch.float32)(ids).logits.log_softmax(-1)
    measured = float((exact.exp() * (exact - other)).sum(-1).mean())
    assert measured / 4 < found["expected_kl"] < 4 * measured
    assert "sensitivity" not in found


def test_static_inputs_have_no_expected_cost(checkpoint_of, tmp_path):
    """What a static range clips is rare and large: noise of a mean says little of it."""
    assert (
        "expected_kl"
        not in quantize(checkpoint_of("llama"), tmp_path / "out", **STATIC | {"smooth": "auto"})["calibration"]
    )


def test_a_sinks_layer_gets_a_scale_per_token(checkpoint_of, tmp_path):
    """One channel of one layer's inputs is huge, as a sink's is: no static range serves it and the others."""
    folder = with_a_huge_channel(checkpoint_of("llama", torch.float32, shard_size="10MB"), tmp_path / "source")
    # Smoothing would move the channel back, so it is off.
    manifest = quantize(folder, tmp_path / "out", **STATIC | {"dynamic": 0.1})
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert int8.scheme_of(config).dynamic == {"model.layers.1.mlp.down_proj"}
    assert [item["weights"] for item in manifest["calibration"]["inputs"] if item.get("per_token")] == [
        ["model.layers.1.mlp.down_proj.weight"]
    ]
    assert manifest["settings"]["dynamic"] == 0.1 and all(c.passed for c in verify(tmp_path / "out", folder).checks)
    ids, found = torch.arange(40)[None], {}
    quantize(folder, tmp_path / "static", **STATIC)
    with torch.no_grad():
        exact = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
        for name in ("out", "static"):
            logits = tilepress.load(tmp_path / name, dtype=torch.float32)(ids).logits
            found[name] = float((logits - exact).norm() / exact.norm())
    assert found["out"] < 0.9 * found["static"]


@pytest.mark.parametrize("scheme", ["token", "weight-only", "static", "recommended"])
def test_an_int8_head(checkpoint_of, tmp_path, scheme):
    source, settings = checkpoint_of("llama"), SCHEMES[scheme]
    manifest = quantize(source, tmp_path / "out", head="int8", **settings)
    assert manifest["settings"]["head"] == "int8"
    assert [f for c in verify(tmp_path / "out", source).checks for f in c.findings] == []
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    targets = [name for group in config["config_groups"].values() for name in group["targets"]]
    assert "lm_head" in targets and "lm_head" not in config["ignore"]
    dense, model = (tilepress.load(path, dtype=torch.float32) for path in (source, tmp_path / "out"))
    head = model.lm_head
    assert isinstance(head, Int8Linear) and head.scheme.activations == ("none" if scheme == "weight-only" else "token")
    assert type(dense.lm_head) is torch.nn.Linear
    tokens = torch.arange(40)[None] + 20
    with torch.no_grad():
        hidden = dense.model(tokens).last_hidden_state
        exact, found = (m.lm_head(hidden) for m in (dense, model))
        assert 0 < (found - exact).norm() / exact.norm() < 0.02
        batch = Batch(model, 1, 64)
        logits = batch.prefill(0, tokens[0], 50)  # which quantizes with the norm
        torch.testing.assert_close(logits[0], model(tokens).logits[0, -1], rtol=1e-4, atol=1e-4)


def test_what_an_int8_head_costs_is_told(checkpoint_of, tmp_path):
    source = checkpoint_of("llama")
    told = quantize(source, tmp_path / "out", head="int8", **STATIC)["calibration"]["head"]
    dense = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    head = tilepress.load(tmp_path / "out", dtype=torch.float32).lm_head
    kl, rise, count = 0.0, 0.0, 0
    for ids in torch.tensor(TEXT.windows(AutoTokenizer.from_pretrained(source))):
        with torch.no_grad():
            hidden = dense.model(ids[None]).last_hidden_state[0, :-1]
            exact, other = (layer(hidden).log_softmax(-1) for layer in (dense.lm_head, head))
        kl += float((exact.exp() * (exact - other)).sum())
        rise += float((exact - other).gather(1, ids[1:, None]).sum())
        count += len(hidden)
    assert told["tokens"] == count > 200
    assert told["kl"] == pytest.approx(kl / count, rel=0.1) and told["kl"] > 0
    assert told["perplexity"] == pytest.approx(math.expm1(rise / count), abs=5e-5)


# Bad input


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"weights": "group"}, "--weights group"),
        ({"activations": "row"}, "--activations row"),
        ({"smooth": "1.5"}, "--smooth 1.5"),
        ({"smooth": "nan"}, "--smooth nan"),
        ({"smooth": "yes"}, "--smooth yes"),
        ({"dynamic": 0.1}, "excepts layers from static ranges"),
        ({"dynamic": 1.5, "activations": "tensor"}, "no share of the layers"),
        ({"rounding": "down"}, "--rounding down is unknown"),
        ({"keep": 1.0}, "no share of the weights"),
        ({"keep": 0.05, "activations": "none"}, "quantizes no inputs"),
        ({"rounding": "gptq", "activations": "none"}, "as they are pruned"),
        ({"observer": Observer("mse")}, "finds its scales at run time"),
        ({"observer": Observer("mse"), "activations": "none"}, "has none"),
        ({"smooth": "auto", "activations": "none"}, "floating point"),
        ({"smooth": "auto", "activations": "channel"}, "same reach"),
        ({"head": "int4"}, "--head int4 is unknown"),
    ],
)
def test_contradictions(settings, message):
    with pytest.raises(UsageError) as error:
        Quantize(**settings)
    assert message in error.value.message and error.value.hint


@pytest.mark.parametrize(
    "words,message",
    [
        (["--observer", "mse"], "finds its scales at run time"),
        (["--percentile", "99.99"], "--observer percentile"),
        (["--nsamples", "4"], "reads no text"),
        (
            ["--activations", "tensor", "--observer", "percentile", "--percentile", "50", "--dataset", "x"],
            "not in 99.9",
        ),
        (["--activations", "tensor", "--dataset", "missing.jsonl"], "missing.jsonl"),
        (["--activations", "tensor", "--dataset", demo.TEXT, "--nsamples", "0"], "--nsamples 0"),
        (["--activations", "tensor", "--dataset", demo.TEXT, "--seed", "-1"], "--seed -1"),
        (["--activations", "tensor", "--dataset", demo.TEXT, "--seqlen", "99999"], "use --seqlen 2048"),
        (["--ignore", "k_proj"], "k_proj.weight"),
        (["--ignore", "model.layers.1.mlp.up_proj"], "gate_proj.weight"),
    ],
)
def test_wrong_requests_end_with_2(checkpoint_of, tmp_path, cli, words, message):
    ran = cli("compress", "quantize", checkpoint_of("llama"), "-o", tmp_path / "out", *words)
    assert ran.code == 2 and message in ran.err and "hint: " in ran.err, ran.err
    assert len(ran.err.strip().splitlines()) == 2
    with pytest.raises(TilepressError):
        tilepress.load(tmp_path / "out")


def test_a_head_that_is_the_embedding_stays_as_it_is(checkpoint_of, tmp_path, cli):
    for family in ("llama-tied", "gpt2"):
        ran = cli("compress", "quantize", checkpoint_of(family), "-o", tmp_path / "out", "--head", "int8")
        assert ran.code == 2 and "tie_word_embeddings" in ran.err and len(ran.err.strip().splitlines()) == 2


def test_half_of_a_fused_group_names_both(checkpoint_of, tmp_path, cli):
    err = cli("compress", "quantize", checkpoint_of("llama"), "-o", tmp_path / "out", "--ignore", "k_proj").err
    assert "q_proj.weight" in err and "k_proj.weight" in err


@pytest.mark.parametrize("pattern", ["*.experts.0.*", "*.experts.*.down_proj"])
def test_some_of_the_experts_cannot_stay_float(checkpoint_of, tmp_path, cli, pattern):
    ran = cli("compress", "quantize", checkpoint_of("qwen3-moe"), "-o", tmp_path / "out", "--ignore", pattern)
    assert ran.code == 2 and "experts run as one" in ran.err and not (tmp_path / "out").exists()


def test_float_experts_are_in_ignore(checkpoint_of, tmp_path):
    quantize(checkpoint_of("qwen3-moe"), tmp_path / "out", ignore=("lm_head", "*.experts.*"))
    ignore = Checkpoint(tmp_path / "out").config["quantization_config"]["ignore"]
    assert "model.layers.1.mlp.experts.3.down_proj" in ignore and len(ignore) == 1 + 2 + 2 * 4 * 3
    checks = verify(tmp_path / "out").checks
    assert all(c.passed for c in checks) and any("mixture" in note for c in checks for note in c.notes)
    assert (
        "transformers" not in (tmp_path / "out" / "README.md").read_text().partition("by its rules")[2].split("\n")[0]
    )


def test_names_without_the_models_prefix_verify(checkpoint_of, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(checkpoint_of("qwen3-moe", shard_size="10MB"), source)
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    quantize(source, tmp_path / "out")
    assert [f for check in verify(tmp_path / "out").checks for f in check.findings] == []


@pytest.mark.parametrize(
    "settings,who",
    [
        ({}, "vLLM, SGLang, transformers"),
        (
            {"activations": "none"},
            "(`pack-quantized`); by its rules these load the folder as it is: vLLM, SGLang, transf",
        ),
        ({"activations": "none", "weights": "tensor"}, "as it is: transformers"),
        ({"activations": "tensor-dynamic"}, "as it is: transformers"),
    ],
)
def test_the_card_says_who_else_loads_it(checkpoint_of, tmp_path, settings, who):
    quantize(checkpoint_of("llama"), tmp_path / "out", **settings)
    assert who in (tmp_path / "out" / "README.md").read_text()


def test_unseen_experts_cost_no_search_of_their_own(checkpoint_of, tmp_path, monkeypatch):
    text, searches = tmp_path / "a.txt", []
    text.write_text("a")
    search = Observer.range
    monkeypatch.setattr(Observer, "range", lambda *args: searches.append(None) or search(*args))
    source = checkpoint_of("mixtral", num_local_experts=8, num_experts_per_tok=1)
    manifest = quantize(source, tmp_path / "out", activations="tensor", text=few_words(8, 64, text))
    assert len(searches) == sum(item["tokens"] > 0 for item in manifest["calibration"]["inputs"])


def test_already_quantized(checkpoint_of, tmp_path, cli):
    for family in ("llama", "gpt2"):
        quantize(checkpoint_of(family), tmp_path / family)
        for words in (
            ["compress", "quantize"],
            ["compress", "prune", "--sparsity", "0.5"],
            ["convert", "--to", "tiled-csl"],
        ):
            ran = cli(*words, tmp_path / family, "-o", tmp_path / "again")
            assert ran.code == 2 and "quantized already" in ran.err


def test_fewer_tokens_than_asked_are_used_and_told(checkpoint_of, tmp_path, cli):
    text = tmp_path / "short.txt"
    text.write_text("word " * 50)
    source = checkpoint_of("llama")
    words = ["--activations", "tensor", "--dataset", text, "--nsamples", 8, "--seqlen", 64]
    ran = cli("compress", "quantize", source, "-o", tmp_path / "out", *words)
    assert ran.code == 0 and "gave 254 tokens of the 512 asked for" in ran.err  # 250 bytes, a start for each window
    calibration = json.loads((tmp_path / "out" / "tilepress.json").read_text())["calibration"]
    assert calibration["windows"] == 4 and calibration["tokens"] == 250 + 4
    assert json.loads((tmp_path / "out" / "tilepress.json").read_text())["calibration"]["warnings"]
    for nothing in ("", " \n\n "):
        text.write_text(nothing)
        ran = cli("compress", "quantize", source, "-o", tmp_path / "none", *words)
        assert ran.code == 2 and "has no text" in ran.err
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n' * 3)
    with pytest.raises(UsageError, match="has no text"):
        quantize(source, tmp_path / "none", activations="tensor", text=few_words(8, 64, tmp_path / "empty.jsonl"))
    text.write_text("abc")
    manifest = quantize(source, tmp_path / "three", activations="tensor", text=few_words(8, 64, text))
    assert sum("saw only" in warning for warning in manifest["calibration"]["warnings"]) == 8


def test_experts_without_tokens_are_listed(checkpoint_of, tmp_path):
    """Two tokens to each of two layers reach at most four of eight experts."""
    text = tmp_path / "a.txt"
    text.write_text("a")
    source = checkpoint_of("mixtral", num_local_experts=8, num_experts_per_tok=1)
    manifest = quantize(source, tmp_path / "out", activations="tensor", text=few_words(8, 64, text))
    unseen = [i for i in manifest["calibration"]["inputs"] if i["tokens"] == 0]
    assert len(unseen) >= 2 * 2 * 6 and all(i["scale"] > 0 for i in unseen)
    warned = [w for w in manifest["calibration"]["warnings"] if "saw no token" in w]
    assert len(warned) == len(unseen) and "other experts" in warned[0]
    assert verify(tmp_path / "out", source).passed


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("settings", [{}, STATIC, {"activations": "channel", "text": TEXT}])
def test_non_finite_weights_are_named(checkpoint_of, tmp_path, bad, settings):
    source = tmp_path / "bad"
    shutil.copytree(checkpoint_of("llama"), source)
    name = "model.layers.1.mlp.down_proj.weight"
    shard = next(p for p in source.glob("*.safetensors") if name in load_file(p))
    tensors = load_file(shard)
    tensors[name][3, 5] = bad
    shard.unlink()
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(TilepressError) as error:
        quantize(source, tmp_path / "out", **settings)
    assert "model.layers.1.mlp.down_proj" in error.value.message
    with pytest.raises(TilepressError):
        tilepress.load(tmp_path / "out")


def test_weights_beyond_the_dtype_are_named(checkpoint_of, tmp_path):
    source = tmp_path / "wide"
    shutil.copytree(checkpoint_of("llama", torch.float32, shard_size="10MB"), source)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = 1e6
    (source / "model.safetensors").unlink()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    for settings in ({}, STATIC):
        with pytest.raises(TilepressError, match=r"layers.1.mlp.up_proj.weight has values beyond float16"):
            quantize(source, tmp_path / "out", dtype=torch.float16, **settings)
        shutil.rmtree(tmp_path / "out")
    manifest = quantize(source, tmp_path / "out", dtype=torch.bfloat16, **STATIC)
    assert manifest["settings"]["dtype"] == "bfloat16" and verify(tmp_path / "out", source).passed


def test_weights_of_several_dtypes_calibrate_after_a_conversion(checkpoint_of, tmp_path):
    source = tmp_path / "mixed"
    shutil.copytree(checkpoint_of("llama", shard_size="10MB"), source)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].float()
    (source / "model.safetensors").unlink()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match="float32 and|and float32"):
        quantize(source, tmp_path / "out", **STATIC)
    with pytest.raises(UsageError, match="one dtype"):
        quantize(source, tmp_path / "dynamic")
    quantize(source, tmp_path / "out", dtype=torch.bfloat16, **STATIC)
    assert verify(tmp_path / "out", source).passed


def test_weights_in_another_dtype_than_the_config_says(checkpoint_of, tmp_path):
    """Loaders would round the scales again."""
    source = tmp_path / "source"
    shutil.copytree(checkpoint_of("llama", torch.float32), source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    with pytest.raises(UsageError) as error:
        quantize(source, tmp_path / "out")
    assert "--dtype bfloat16" in error.value.hint
    quantize(source, tmp_path / "out", dtype=torch.bfloat16)
    assert {e.dtype for n, e in Checkpoint(tmp_path / "out").tensors.items() if n.endswith("scale")} == {torch.bfloat16}


def test_activations_that_overflow_name_the_layer(checkpoint_of, tmp_path):
    source = tmp_path / "large"
    shutil.copytree(checkpoint_of("llama", torch.float32), source)
    for shard in source.glob("*.safetensors"):
        tensors = load_file(shard)
        for name in tensors:
            if name.endswith(("layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight")):
                tensors[name] *= 1e25
        shard.unlink()
        save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(TilepressError, match=r"layers\.0\.mlp\.down_proj is not finite"):
        quantize(source, tmp_path / "out", **STATIC)


def test_tokenizer_of_another_model(checkpoint_of, tiny, tmp_path):
    source = tmp_path / "mixed"
    shutil.copytree(checkpoint_of("llama"), source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny / name, source / name)
    with pytest.raises(UsageError, match="the tokenizer gives token"):
        quantize(source, tmp_path / "out", **STATIC)


def test_every_choice_is_explained(cli):
    ran = cli("compress", "quantize", "--help")
    assert all(f"\n  {choice} " in ran.out for choice in CHOICES)


def test_random_windows_hold_ordinary_tokens():
    tokenizer, given = byte_tokenizer(), Text("random", 3, 40, seed=5)
    assert Text("random").nsamples == 8 and Text().nsamples == 128
    windows = given.windows(tokenizer)
    assert [len(window) for window in windows] == [40] * 3 and windows[0] != windows[1]
    assert windows == given.windows(tokenizer) != Text("random", 3, 40).windows(tokenizer)
    assert all(window[0] == 0 and 0 not in window[1:] for window in windows)  # the BOS


def test_random_tokens_serve_nothing_else(checkpoint_of, tmp_path, cli):
    ran = cli("compress", "kv", checkpoint_of("llama"), "-o", tmp_path / "out", "--dataset", "random")
    assert (
        ran.code == 2 and "`compress kv` needs text, not random tokens" in ran.err and not (tmp_path / "out").exists()
    )


def test_text_is_the_same_for_the_same_seed():
    one, same, other = (Text(str(demo.TEXT), 4, 128, seed).windows(byte_tokenizer()) for seed in (0, 0, 1))
    assert one == same != other
    assert all(len(window) == 128 and window[0] == 0 and 0 not in window[1:] for window in one)
