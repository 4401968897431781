"""INT8 models: equal to compressed-tensors in plain transformers, merged layers equal to separate ones, saving, generating."""

import copy
import json
import shutil
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.artifacts import few_words, quantize
from support.op_calls import Counted
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import tilepress
from tilepress.eval.verify import verify
from tilepress.formats import TilepressError, int8
from tilepress.formats.checkpoint import Checkpoint
from tilepress.runtime.hf import int8_layers
from tilepress.runtime.hf.int8_layers import fuse
from tilepress.runtime.linear.int8 import Int8Linear, MergedInt8Linear
from tilepress.runtime.loader import paths

TEXT = few_words()
SCHEMES = {
    "token": {},
    "weights-tensor": {"weights": "tensor"},
    "static": {"activations": "tensor", "text": TEXT, "smooth": "off"},
    "asymmetric": {"activations": "tensor-asym", "text": TEXT, "smooth": "off"},
    "mixed": {"activations": "tensor", "text": TEXT, "dynamic": 0.3},
    "channel": {"activations": "channel", "text": TEXT},
    "dynamic-tensor": {"activations": "tensor-dynamic"},
    "weight-only": {"activations": "none"},
}
IDS = torch.arange(34).view(2, 17) * 5 % 250


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids.to(model.device)).logits.float()


@pytest.fixture(scope="module")
def static(tmp_path_factory, checkpoint_of):
    """An artifact of one shard to copy."""
    path = tmp_path_factory.mktemp("static") / "out"
    quantize(checkpoint_of("llama", shard_size="10MB"), path, **SCHEMES["static"])
    return path


def stock_run(stock, path, folder):
    """What plain transformers with the compressed-tensors package makes of an artifact: its traceback if it failed, else its logits, and (input, output)
    of every quantized linear layer by name."""
    if stock.package is None:
        pytest.skip("`make test` installs compressed-tensors for this")
    torch.save(IDS, folder / "ids.pt")
    failure = stock.run(path, folder / "ids.pt", folder / "stock.pt")
    assert "compressed_tensors" in stock.modules or failure
    return failure, None if failure else torch.load(folder / "stock.pt")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_plain_transformers_gives_the_same_logits(checkpoint_of, tmp_path, monkeypatch, stock, family, scheme):
    """float32, several shards, untied and tied (which has biases and odd sizes): equal but for float32 rounding, layer by layer on the same
    inputs.

    In the whole model a value that lies on the edge of two codes may get one here and the other there, as sums are rounded differently: what comes after
    it then differs by a step of quantization. So most positions must be equal, and none may be far.
    """
    source = checkpoint_of(family, torch.float32)
    quantize(source, tmp_path / "out", **SCHEMES[scheme])
    assert len(Checkpoint(tmp_path / "out").shards) > 1
    failure, found = stock_run(stock, tmp_path / "out", tmp_path)
    assert failure is None, failure
    (theirs, layers), model = found, tilepress.load(tmp_path / "out")
    ours = logits(model)
    assert len(layers) == 14
    monkeypatch.setattr(int8_layers, "family_of", lambda module, kind: None)
    separate = tilepress.load(tmp_path / "out")
    for name, (x, y) in layers.items():
        torch.testing.assert_close(separate.get_submodule(name)(x), y, rtol=1e-5, atol=1e-5 * float(y.abs().max()))
    assert any(path.startswith(("w8a8_gemm", "w8a16_gemm")) for path in paths(model))
    off = (ours - theirs).abs().amax(-1) / theirs.abs().max()
    assert float(off.max()) < 5e-3
    assert scheme == "dynamic-tensor" or float((off < 2e-5).float().mean()) > 0.5


def test_one_shard_and_bfloat16(checkpoint_of, tmp_path, stock):
    """Their bfloat16 arithmetic rounds where ours counts: near, not equal."""
    quantize(checkpoint_of("llama-tied", shard_size="10MB"), tmp_path / "out")
    assert len(Checkpoint(tmp_path / "out").shards) == 1
    failure, found = stock_run(stock, tmp_path / "out", tmp_path)
    assert failure is None, failure
    theirs, ours = found[0].float(), logits(tilepress.load(tmp_path / "out"))
    assert float((ours - theirs).norm() / theirs.norm()) < 0.02


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "qwen3-moe"])
def test_what_plain_transformers_cannot_run_it_does_not_load(checkpoint_of, tmp_path, stock, family):
    """Conv1D and experts: it must stop, and not take codes for weights."""
    quantize(checkpoint_of(family), tmp_path / "out")
    failure, _ = stock_run(stock, tmp_path / "out", tmp_path)
    assert failure is not None and not (tmp_path / "stock.pt").exists()
    assert "RuntimeError" in failure, failure


@pytest.mark.thorough
@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "weight-only"])
@pytest.mark.parametrize(
    "family,merges",
    [("llama", 4), ("llama-tied", 4), ("qwen2", 4), ("opt", 2), ("gpt2", 0), ("phi3", 0), ("gemma3", 4)],
)
def test_fused_layers_equal_separate_ones(checkpoint_of, tmp_path, monkeypatch, family, merges, scheme):
    quantize(checkpoint_of(family), tmp_path / "out", **SCHEMES[scheme])
    merged = tilepress.load(tmp_path / "out")
    assert sum(isinstance(m, MergedInt8Linear) for m in merged.modules()) == merges
    assert sum(type(m).__name__.startswith("Int8") and "Linear" not in type(m).__name__ for m in merged.modules()) == 2
    monkeypatch.setattr(int8_layers, "family_of", lambda module, kind: None)
    separate = tilepress.load(tmp_path / "out")
    assert not any(isinstance(m, MergedInt8Linear) for m in separate.modules())
    torch.testing.assert_close(logits(merged), logits(separate), rtol=2e-2, atol=2e-3)
    one, other = (m.to(torch.float32) for m in (merged, separate))
    torch.testing.assert_close(logits(one), logits(other), rtol=1e-5, atol=1e-5)


def test_an_int8_layer_against_float64(checkpoint_of, tmp_path):
    quantize(checkpoint_of("gpt2", torch.float32), tmp_path / "out", activations="tensor-asym", text=TEXT)
    model, checkpoint = tilepress.load(tmp_path / "out"), Checkpoint(tmp_path / "out")
    path = "transformer.h.1.mlp.c_fc"
    layer, x = model.get_submodule(path), torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    parts = [
        checkpoint.read(f"{path}.{n}").double()
        for n in ("weight", "weight_scale", "input_scale", "input_zero_point", "bias")
    ]
    weight, scale, input_scale, zero_point, bias = parts
    codes = torch.clamp(torch.round(x.double() / input_scale + zero_point), -128, 127)
    exact = (codes - zero_point) * input_scale @ (weight[0] * scale.t()) + bias
    torch.testing.assert_close(layer(x).double(), exact, rtol=1e-5, atol=1e-5)
    assert isinstance(layer, Int8Linear) and layer.transposed and "Int8Scheme" in repr(layer)


@pytest.mark.parametrize(
    "family,scheme",
    [("llama", "asymmetric"), ("llama-tied", "weights-tensor"), ("gpt2", "static"), ("mixtral", "token")],
)
def test_saved_again_it_is_the_same_artifact(checkpoint_of, tmp_path, family, scheme):
    quantize(checkpoint_of(family), tmp_path / "out", **SCHEMES[scheme])
    model = tilepress.load(tmp_path / "out")
    model.save_pretrained(tmp_path / "again", max_shard_size="100KB")
    before, after = Checkpoint(tmp_path / "out"), Checkpoint(tmp_path / "again")
    assert set(before.tensors) == set(after.tensors)
    assert before.config["quantization_config"] == after.config["quantization_config"]
    for name in before.tensors:
        assert torch.equal(before.read(name), after.read(name)) and before.read(name).dtype == after.read(name).dtype
    assert torch.equal(logits(tilepress.load(tmp_path / "again")), logits(model))


def test_generates_with_cache_batch_and_padding(tiny, tmp_path):
    quantize(tiny, tmp_path / "out")
    model, ids = tilepress.load(tmp_path / "out", dtype=torch.float32), torch.arange(30).view(2, 15) + 400
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    cached = model.generate(ids, **options)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **options))
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids[:1]], 1)
    mask = torch.cat([torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 15, dtype=torch.long)], 1)
    assert torch.equal(model.generate(padded, attention_mask=mask, **options)[:, 19:], cached[:1, 15:])


def test_outputs_of_every_layer_can_be_asked_for(checkpoint_of, tmp_path):
    quantize(checkpoint_of("llama"), tmp_path / "out")
    out = tilepress.load(tmp_path / "out", attn_implementation="eager")(
        IDS, output_hidden_states=True, output_attentions=True
    )
    assert len(out.hidden_states) == 3 and len(out.attentions) == 2


def test_compiles(checkpoint_of, tmp_path):
    quantize(checkpoint_of("llama", torch.float32), tmp_path / "out")
    model = tilepress.load(tmp_path / "out")
    torch._dynamo.reset()
    compiled = torch.compile(lambda ids: model(ids, use_cache=False).logits, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(IDS), logits(model), rtol=1e-4, atol=1e-5)


def test_layers_that_do_not_fit_are_not_merged(checkpoint_of, tmp_path):
    quantize(checkpoint_of("llama"), tmp_path / "out", **SCHEMES["static"])
    shard = next(
        p for p in (tmp_path / "out").glob("*.safetensors") if "model.layers.0.mlp.up_proj.input_scale" in load_file(p)
    )
    tensors = load_file(shard)
    tensors["model.layers.0.mlp.up_proj.input_scale"] *= 2
    shard.unlink()
    save_file(tensors, shard)
    (tmp_path / "out" / "tilepress.json").unlink()
    model = tilepress.load(tmp_path / "out")
    assert isinstance(model.model.layers[0].mlp.up_proj, Int8Linear) and fuse(model) == 0
    assert isinstance(model.model.layers[1].mlp.gate_up_proj, MergedInt8Linear)


def _drop(name):
    def change(tensors, config):
        tensors.pop(name)

    return change


def _shape(name):
    def change(tensors, config):
        tensors[name] = tensors[name].reshape(-1)

    return change


def _config(key, value):
    def change(tensors, config):
        config["quantization_config"][key] = value

    return change


LAYER = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    "change,message",
    [
        (_drop(f"{LAYER}.weight_scale"), "weight_scale"),
        (_drop(f"{LAYER}.input_scale"), "input_scale"),
        (_shape(f"{LAYER}.weight_scale"), "weight_scale"),
        (_config("quantization_status", "frozen"), "quantization_status"),
        (_config("format", "float-quantized"), "format"),
        (_config("config_groups", {}), "config_groups"),
    ],
)
def test_damaged_artifacts_do_not_load(static, tmp_path, cli, change, message):
    path = tmp_path / "out"
    shutil.copytree(static, path)
    (path / "tilepress.json").unlink()
    (path / "model.safetensors.index.json").unlink()
    shard, config = next(path.glob("*.safetensors")), json.loads((path / "config.json").read_text())
    tensors = load_file(shard)
    change(tensors, config)
    shard.unlink()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(TilepressError, match=message):
        tilepress.load(path)
    assert cli("verify", path).code in (1, 3)


def test_verify_looks_at_codes_scales_and_vllms_rules(checkpoint_of, static, tmp_path, cli):
    source = checkpoint_of("llama", shard_size="10MB")
    assert cli("verify", static, "--base", source).code == 0
    changes = {
        "values differ from the base": lambda t: t[f"{LAYER}.weight"][3, 4].add_(1),
        "no scale": lambda t: t[f"{LAYER}.weight_scale"][3].fill_(float("nan")),
        "input scales differ": lambda t: t["model.layers.0.self_attn.k_proj.input_scale"].mul_(2),
    }
    for message, change in changes.items():
        copy = tmp_path / message.replace(" ", "-")
        shutil.copytree(static, copy)
        shard = next(copy.glob("*.safetensors"))
        tensors = load_file(shard)
        change(tensors)
        shard.unlink()
        save_file(tensors, shard, metadata={"format": "pt"})
        ran = cli("verify", copy, "--base", source)
        assert ran.code == 3 and message in ran.out, ran.out


@pytest.mark.parametrize("shape", [(-1,), (2, -1, 64), (1, 1, -1, 64)])
def test_verify_lists_codes_of_any_shape(checkpoint_of, tmp_path, cli, shape):
    quantize(checkpoint_of("llama", shard_size="10MB"), tmp_path / "out")
    shard = next((tmp_path / "out").glob("*.safetensors"))
    tensors = load_file(shard)
    tensors[f"{LAYER}.weight"] = tensors[f"{LAYER}.weight"].reshape(shape).contiguous()
    shard.unlink()
    save_file(tensors, shard, metadata={"format": "pt"})
    ran = cli("verify", tmp_path / "out")
    assert ran.code == 3 and f"{LAYER}.weight" in ran.out and "not a matrix" in ran.out


@pytest.mark.parametrize("ignore", [["re:("], [3], "lm_head"])
def test_verify_lists_an_ignore_that_is_none(checkpoint_of, tmp_path, cli, ignore):
    quantize(checkpoint_of("llama"), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["quantization_config"]["ignore"] = ignore
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    ran = cli("verify", tmp_path / "out")
    assert ran.code == 3 and "ignore" in ran.out


def test_checkpoints_of_other_tools_load(checkpoint_of, tmp_path):
    """A folder with the keys that llm-compressor writes, without a manifest."""
    quantize(checkpoint_of("llama"), tmp_path / "out")
    (tmp_path / "out" / "tilepress.json").unlink()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = logits(tilepress.load(tmp_path / "out"))
    group = config["quantization_config"]["config_groups"]["group_0"]
    group |= {"output_activations": None, "format": "int-quantized"}
    for part in ("weights", "input_activations"):
        group[part] |= dict.fromkeys(("group_size", "block_structure", "actorder", "observer"))
    config["quantization_config"] |= {
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.17",
    }
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(tilepress.load(tmp_path / "out")), expected)
    assert int8.scheme_of(config["quantization_config"]) == int8.Int8Scheme()


def test_scales_without_a_dimension_and_patterns_in_ignore(static, tmp_path):
    """Scales and patterns as other writers have them."""
    shutil.copytree(static, tmp_path / "out")
    expected = logits(tilepress.load(tmp_path / "out"))
    (tmp_path / "out" / "tilepress.json").unlink()
    shard, config = next((tmp_path / "out").glob("*.safetensors")), tmp_path / "out" / "config.json"
    tensors = {n: t.reshape(()) if n.endswith("input_scale") else t for n, t in load_file(shard).items()}
    shard.unlink()
    save_file(tensors, shard, metadata={"format": "pt"})
    config.write_text(config.read_text().replace('"lm_head"', '"re:.*lm_head"'))
    assert torch.equal(logits(tilepress.load(tmp_path / "out")), expected)
    assert verify(tmp_path / "out").passed


def test_merged_layers_are_copied_and_pickled(checkpoint_of, tmp_path):
    quantize(checkpoint_of("llama"), tmp_path / "out")
    model = tilepress.load(tmp_path / "out")
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert isinstance(other.model.layers[0], LlamaDecoderLayer)
        assert isinstance(other.model.layers[0].mlp.gate_up_proj, MergedInt8Linear)
        assert torch.equal(logits(other), logits(model))


def test_layers_that_accelerate_moves_stay_separate(checkpoint_of, tmp_path):
    pytest.importorskip("accelerate")
    quantize(checkpoint_of("llama"), tmp_path / "out")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu", "lm_head": "cpu"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu"}
    model = tilepress.load(tmp_path / "out", device_map=places, offload_folder=tmp_path / "offload")
    assert type(model.model.layers[0].mlp.up_proj) is Int8Linear
    torch.testing.assert_close(logits(model), logits(tilepress.load(tmp_path / "out")), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "family,fused",
    [
        ("llama", {"rms_norm_int8": 2, "add_rms_norm_int8": 2, "silu_mul_int8": 2}),
        ("phi3", {"rms_norm_int8": 2, "add_rms_norm_int8": 2, "silu_mul_int8": 2}),
        ("gemma3", {"quantize_int8": 8}),  # norms of 1 + w and a gate of GeLU: their modules, then an op that quantizes
        ("opt", {"layer_norm_int8": 2, "add_layer_norm_int8": 2, "activation_int8": 2}),
        ("gpt2", {"layer_norm_int8": 2, "add_layer_norm_int8": 2, "activation_int8": 2}),
    ],
)
def test_only_the_attentions_output_is_quantized_by_itself(checkpoint_of, tmp_path, family, fused, device):
    """What runs in two layers beside four GEMMs each."""
    quantize(checkpoint_of(family), tmp_path / "out")
    model = tilepress.load(tmp_path / "out", device=device)
    with Counted() as counted:
        logits(model)
    assert counted.calls == {"w8a8_gemm": 8, "quantize_int8": 2} | fused


@pytest.mark.gpu
def test_launches_of_a_layer(checkpoint_of, tmp_path):
    """Four GEMMs and four kernels that quantize, nothing else of ours, and no float product of a weight."""
    quantize(checkpoint_of("llama"), tmp_path / "out")
    model = tilepress.load(tmp_path / "out", device="cuda")
    logits(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        logits(model)
    names = Counter(event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    assert names["w8a8_gemm"] + names["w8a8_mma"] == names["fused_quant"] == 8, names


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
def test_on_a_card(checkpoint_of, tmp_path, scheme):
    """Calibrated on the card, loaded there: the CPU's logits, but for values on the edge of two codes."""
    quantize(checkpoint_of("llama", torch.float32), tmp_path / "out", device="cuda", **SCHEMES[scheme])
    model = tilepress.load(tmp_path / "out", device="cuda")
    assert all(path.endswith("cuda") for path in paths(model))
    expected = logits(tilepress.load(tmp_path / "out"))
    assert float((logits(model).cpu() - expected).norm() / expected.norm()) < 1e-2
