"""`compress prune` on checkpoints: what is a target, exact sparsity in every scope, what the artifact declares."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.artifacts import prune

import tilepress
from tilepress.compress.run.targets import find_targets
from tilepress.formats import TilepressError, UsageError
from tilepress.formats.checkpoint import Checkpoint

LINEARS = {
    "llama": 14, "llama-tied": 14, "qwen2": 14, "gpt2": 8, "opt": 12, "falcon": 8, "mixtral": 8 + 2 * 4 * 3, "qwen3-moe": 8 + 2 * 4 * 3,
}  # fmt: skip


@pytest.mark.parametrize("family", LINEARS)
def test_every_linear_of_the_decoder_is_a_target(checkpoint_of, family):
    checkpoint = Checkpoint(checkpoint_of(family))
    targets, left = find_targets(checkpoint, ("lm_head",))
    assert len(targets) == LINEARS[family]
    assert {t.name for t in targets} | {item.name for item in left} == set(checkpoint.weights)
    assert all(item.reason for item in left)
    reasons = {item.name: item.reason for item in left}
    for name, reason in reasons.items():
        if "embed" in name or "lm_head" in name or "wte" in name:
            assert reason in ("embedding or output head", "not a linear weight"), name
    if family == "gpt2":
        assert all(t.transposed for t in targets)
        attention = next(t for t in targets if t.name.endswith("h.0.attn.c_attn.weight"))
        assert (attention.rows, attention.cols) == (300, 100)


def test_ignore_patterns(checkpoint_of):
    checkpoint = Checkpoint(checkpoint_of("llama"))
    for pattern, count in (
        ("down_proj", 12),
        ("*.0.*", 7),
        (r"re:layers\.1\.self", 10),
        ("model.layers.0.mlp.up_proj", 13),
    ):
        targets, left = find_targets(checkpoint, ("lm_head", pattern))
        assert len(targets) == count
        assert any(pattern in item.reason for item in left)
    with pytest.raises(UsageError, match="nothing_like_it"):
        find_targets(checkpoint, ("nothing_like_it",))


def test_prefixless_names_are_recognized(checkpoint_of, tmp_path):
    """GPT-2 on the hub is stored without `transformer.`."""
    source = checkpoint_of("gpt2", shard_size="10MB")
    tensors = {
        name.removeprefix("transformer."): value for name, value in load_file(source / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    assert len(find_targets(Checkpoint(tmp_path))[0]) == LINEARS["gpt2"]


@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "mixtral"])
@pytest.mark.parametrize("scope", ["layer", "row", "global"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_zeros_are_exact_and_the_right_ones(checkpoint_of, tmp_path, family, scope, dtype):
    sparsity = 0.37
    source = Checkpoint(checkpoint_of(family, dtype))
    manifest = prune(
        source.path, tmp_path / "out", sparsity, scope=scope, format="dense" if dtype == torch.float32 else "tiled-csl"
    )
    result = Checkpoint(tmp_path / "out")
    targets = {t.name: t for t in find_targets(source)[0]}
    kept, dropped = [], []
    for name, weight in source.weights.items():
        before, after = source.dense(weight), result.dense(result.weights[name])
        if name not in targets:
            assert torch.equal(before, after)
            continue
        before, after = (t.t() if targets[name].transposed else t for t in (before.double(), after.double()))
        assert torch.equal(after[after != 0], before[after != 0])
        zeros = (after == 0).sum(1)
        record = next(r for r in manifest["tensors"] if r["name"] == name)
        assert record["zeros"] == int(zeros.sum()) == before.numel() - record["nonzeros"]
        if scope == "row":
            assert (zeros == round(sparsity * before.shape[1])).all()
            assert (
                before.abs().masked_fill(after == 0, np.inf).amin(1) >= before.abs().masked_fill(after != 0, 0).amax(1)
            ).all()
        elif scope == "layer":
            assert int(zeros.sum()) == round(sparsity * before.numel())
        kept.append(before.abs()[after != 0])
        dropped.append(before.abs()[after == 0])
    if scope == "global":
        kept, dropped = torch.cat(kept), torch.cat(dropped)
        assert dropped.numel() == round(sparsity * (kept.numel() + dropped.numel()))
        assert kept.min() >= dropped.max()


def test_global_over_mixed_dtypes(checkpoint_of, tmp_path):
    """One layer in float16, one in float32: magnitudes compare as numbers, not as bits."""
    source = checkpoint_of("llama", torch.float32, "10MB")
    tensors = load_file(source / "model.safetensors")
    for name in tensors:
        if ".layers.0." in name:
            tensors[name] = tensors[name].half()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    prune(tmp_path, tmp_path / "out", 0.5, scope="global", format="dense")
    result, checkpoint = Checkpoint(tmp_path / "out"), Checkpoint(tmp_path)
    names = [t.name for t in find_targets(checkpoint)[0]]
    before = torch.cat([tensors[name].double().abs().view(-1) for name in names])
    after = torch.cat([result.read(name).double().abs().view(-1) for name in names])
    assert int((after == 0).sum()) == round(0.5 * before.numel())
    assert before[after != 0].min() >= before[after == 0].max()


def test_float32_needs_a_word_from_the_user(checkpoint_of, tmp_path, cli):
    source = checkpoint_of("gpt2", torch.float32)
    ran = cli("compress", "prune", source, "-o", tmp_path / "out", "--sparsity", "0.5")
    assert ran.code == 2 and "float32" in ran.err and "--dtype" in ran.err and not (tmp_path / "out").exists()
    ran = cli("compress", "prune", source, "-o", tmp_path / "out", "--sparsity", "0.5", "--dtype", "float16", "--json")
    assert ran.code == 0 and ran.json["sparsity"] == pytest.approx(0.5, abs=1e-4)
    result = Checkpoint(tmp_path / "out")
    assert result.config["dtype"] == "float16" and result.config["quantization_config"]["value_dtypes"] == ["float16"]
    assert {entry.dtype for entry in result.tensors.values()} == {torch.float16, torch.int32}


def test_an_artifact_can_be_pruned_again(artifact, tmp_path):
    prune(artifact, tmp_path / "again", 0.8)
    before, after = Checkpoint(artifact), Checkpoint(tmp_path / "again")
    assert after.manifest["source"]["recipe"]["settings"]["sparsity"] == 0.6
    for name, weight in after.weights.items():
        if weight.layout != "dense":
            dense, source = after.dense(weight), before.dense(before.weights[name])
            assert int((dense == 0).sum()) == round(0.8 * dense.numel())
            assert torch.equal(dense[dense != 0], source[dense != 0])


def test_artifact_is_an_ordinary_folder(artifact, tiny):
    names = {path.name for path in artifact.iterdir()}
    assert names == {
        "config.json", "generation_config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json", "README.md", "tilepress.json",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    config = json.loads((artifact / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert quantization == {"quant_method": "tilepress", "format_version": 1, "value_dtypes": ["bfloat16"]}
    assert config == json.loads((tiny / "config.json").read_text())
    assert (artifact / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()
    assert "import tilepress.hf" in (artifact / "README.md").read_text()


def test_bytes_per_nonzero(checkpoint_of, tmp_path):
    """Words, offsets and layout of matrices of a usual size at 60 %."""
    source = checkpoint_of("llama", hidden_size=512, intermediate_size=1408, shard_size="20MB")
    manifest = prune(source, tmp_path / "out", 0.6)
    packed = [t for t in manifest["tensors"] if t["layout"] == "tiled-csl"]
    assert sum(t["bytes"] for t in packed) <= 4.1 * sum(t["nonzeros"] for t in packed)


@pytest.mark.parametrize("sparsity", ["-0.1", "1", "1.5", "nan", "inf"])
def test_sparsity_out_of_range(cli, tiny, tmp_path, sparsity):
    ran = cli("compress", "prune", tiny, "-o", tmp_path / "out", "--sparsity", sparsity)
    assert ran.code == 2 and "not in [0, 1)" in ran.err and len(ran.err.strip().splitlines()) == 2


def test_unknown_architecture(cli, tiny, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for path in tiny.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text()) | {"model_type": "perceptron9000"}
    (source / "config.json").write_text(json.dumps(config))
    ran = cli("compress", "prune", source, "-o", tmp_path / "out", "--sparsity", "0.5")
    assert ran.code == 2 and "perceptron9000" in ran.err and len(ran.err.strip().splitlines()) == 2
    ran = cli("eval", "perplexity", source, "--dataset", tiny / "config.json")
    assert ran.code == 2 and "perceptron9000" in ran.err


def test_nan_weights_are_named(tiny, tmp_path):
    tensors = load_file(tiny / "model.safetensors")
    name = "model.layers.2.mlp.down_proj.weight"
    tensors[name][3, 4] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    for scope in ("layer", "row", "global"):
        with pytest.raises(TilepressError, match=name):
            prune(tmp_path, tmp_path / scope, 0.5, scope=scope)
        assert not list((tmp_path / scope).glob("*.safetensors")) and not (tmp_path / scope / "config.json").exists()


def changed(source, tmp_path, change=None, **config):
    """A copy of a checkpoint of one shard with other tensors or another config."""
    path = tmp_path / "changed"
    path.mkdir()
    tensors = load_file(source / "model.safetensors")
    if change:
        change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | config))
    return path


NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    "change,config,message",
    [
        (lambda t: t[NORM].__setitem__(3, float("nan")), {}, "model.norm.weight has non-finite"),
        (
            lambda t: t["model.embed_tokens.weight"][5].__setitem__(3, float("inf")),
            {},
            "embed_tokens.weight has non-finite",
        ),
        (None, {"num_hidden_layers": 5}, "no weight for 7 linear layers"),
        (None, {"intermediate_size": 700}, "config.json makes it"),
        (lambda t: t.__setitem__(UP, t[UP][:, :255].contiguous()), {}, "config.json makes it [768, 256]"),
        (lambda t: t.__setitem__(UP, t[UP].reshape(-1)), {}, "config.json makes it [768, 256]"),
        (None, {"quantization_config": {"quant_method": "fp8"}}, "quantized already (fp8)"),
        (None, {"quantization_config": "x"}, "not an object"),
        (None, {"hidden_size": "256"}, "hidden_size"),
        (None, {"num_attention_heads": 0}, "no causal language model"),
    ],
)
def test_sources_that_are_no_sound_model(tiny, tmp_path, cli, change, config, message):
    source = changed(tiny, tmp_path, change, **config)
    ran = cli("compress", "prune", source, "-o", tmp_path / "out", "--sparsity", "0.5")
    assert ran.code in (1, 2) and message in ran.err and len(ran.err.strip().splitlines()) == 2
    assert not (tmp_path / "out" / "config.json").exists()


def test_values_beyond_the_dtype_are_refused(checkpoint_of, tmp_path, cli):
    source = changed(
        checkpoint_of("llama", shard_size="10MB"),
        tmp_path,
        lambda t: t["model.embed_tokens.weight"][1].__setitem__(1, 1e5),
    )
    ran = cli("compress", "prune", source, "-o", tmp_path / "out", "--sparsity", "0.5", "--dtype", "float16")
    assert ran.code == 1 and "beyond float16" in ran.err and "embed_tokens" in ran.err


def test_masks_that_old_checkpoints_store_are_not_copied(checkpoint_of, tmp_path, cli):
    source = checkpoint_of("gpt2", shard_size="10MB")
    path = changed(
        source,
        tmp_path,
        lambda t: t.update(
            {
                "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
                "transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4),
            }
        ),
    )
    ran = cli("compress", "prune", path, "-o", tmp_path / "out", "--sparsity", "0.5", "--json")
    assert ran.code == 0 and "computes itself" in ran.json["left_alone"]["transformer.h.0.attn.masked_bias"]
    assert not any(
        "masked_bias" in name or name.endswith(".attn.bias") for name in Checkpoint(tmp_path / "out").tensors
    )
    assert cli("verify", tmp_path / "out").code == 0
    assert tilepress.load(path).config.model_type == "gpt2"  # the dense source loads too


def test_layers_that_a_model_reads_itself_stay_dense(tmp_path, cli):
    """Mamba multiplies by `dt_proj.weight` without calling the layer."""
    config = transformers.MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=300, state_size=8)
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path / "mamba")
    ran = cli(
        "compress",
        "prune",
        tmp_path / "mamba",
        "-o",
        tmp_path / "out",
        "--sparsity",
        "0.5",
        "--json",
        "--ignore",
        "lm_head",
    )
    assert ran.code == 0
    assert "reads the weight itself" in ran.json["left_alone"]["backbone.layers.0.mixer.dt_proj.weight"]
    assert cli("verify", tmp_path / "out").code == 0


def test_overlapping_and_broken_ignore_patterns(tiny, cli, tmp_path):
    words = ("compress", "prune", tiny, "-o", tmp_path / "x", "--sparsity", "0.5", "--dry-run")
    assert cli(*words, "--ignore", "model.layers.0.*", "--ignore", "model.layers.0.mlp.*").code == 0
    ran = cli(*words, "--ignore", "re:[")
    assert ran.code == 2 and "--ignore re:[" in ran.err
    assert cli(*words, "--ignore", "*norm*").code == 2
