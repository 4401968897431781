"""Checkpoints whose tensors and config.json do not belong together: refused by every command before anything is written, and by `load`; and
configs that ask for more than any checkpoint has.
"""

import json
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.artifacts import few_words, prune

import tilepress
from tilepress import Convert, KVCache, Prune, Quantize, TilepressError, UsageError
from tilepress.formats.checkpoint import Checkpoint
from tilepress.models.meta import build_meta_model, check_fit

EMBEDDING = "model.embed_tokens.weight"
INCONSISTENT = {
    "vocab_size": ({"vocab_size": 10}, None, r"is \[300, 128\], .* \[10, 128\]"),
    "fewer layers": ({"num_hidden_layers": 1}, None, "9 unexpected tensors"),
    "norm": ({}, lambda t: t.pop("model.norm.weight"), "1 missing tensors.*model.norm.weight"),
    "head": ({}, lambda t: t.pop("lm_head.weight"), "1 missing tensors.*lm_head.weight"),
    "renamed": (
        {},
        lambda t: t.__setitem__("model.embedding.weight", t.pop(EMBEDDING)),
        "unexpected tensors.*embedding",
    ),
    "1-D": ({}, lambda t: t.__setitem__(EMBEDDING, t[EMBEDDING].reshape(-1)), r"embed_tokens.weight is \[38400\]"),
    "embedding": ({}, lambda t: t.pop(EMBEDDING), "1 missing tensors"),
    "bias": ({}, lambda t: t.__setitem__("model.layers.0.mlp.up_proj.bias", torch.zeros(200)), "1 unexpected tensors"),
}


def changed(source, path, config=(), change=None):
    """A copy of a checkpoint in one shard with other tensors and config."""
    shutil.copytree(source, path)
    (path / "model.safetensors.index.json").unlink(missing_ok=True)
    (path / "tilepress.json").unlink(missing_ok=True)
    tensors = {}
    for shard in path.glob("*.safetensors"):
        tensors |= load_file(shard)
        shard.unlink()
    if change:
        change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | dict(config)))
    return path


@pytest.mark.parametrize("case", INCONSISTENT)
def test_what_is_inconsistent_is_refused_before_the_first_byte(checkpoint_of, tmp_path, case):
    config, change, message = INCONSISTENT[case]
    source = changed(checkpoint_of("llama"), tmp_path / "source", config, change)
    for recipe, text in ((Prune(0.5), None), (KVCache(group_size=32), few_words(2, 32))):
        with pytest.raises(UsageError, match=message):
            tilepress.compress(source, tmp_path / "out", recipe, dataset=text)
    with pytest.raises(TilepressError, match=message):
        tilepress.load(source)
    assert not (tmp_path / "out").exists()


def test_a_generation_config_that_keeps_a_model_from_loading_is_refused(tiny, tmp_path):
    source = changed(tiny, tmp_path / "source")
    for content, sound in (("[]", False), ('{"max_new_tokens": "x", "do_sample": [1]}', False), ("{oops", True)):
        (source / "generation_config.json").write_text(content)
        if sound:
            tilepress.load(source)
            continue
        with pytest.raises(UsageError, match="generation_config.json of source does not load"):
            tilepress.plan(source, tmp_path / "out", Prune(0.5))


def test_every_recipe_looks_at_all_tensors(checkpoint_of, tmp_path):
    """An artifact too, whose packed weights count as what they stand for, transposed ones as well."""
    for family, norm in (("llama", "model.norm.weight"), ("gpt2", "transformer.ln_f.weight")):
        prune(checkpoint_of(family), tmp_path / family)
        check_fit(Checkpoint(tmp_path / family))
        source = changed(tmp_path / family, tmp_path / f"{family}-changed", change=lambda t, norm=norm: t.pop(norm))
        for recipe in (Convert("dense"), Convert("tiled-bitmap"), Quantize(activations="none"), Prune(0.7)):
            with pytest.raises(UsageError, match=f"1 missing tensors.*{norm}"):
                tilepress.compress(source, tmp_path / "out", recipe)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 1_000_000},
        {"num_hidden_layers": 10**18},
        {"num_hidden_layers": 20_000},
        {"num_labels": 10**9},
        {"model_type": "mixtral", "num_local_experts": 10**9},
        {"model_type": "gpt_neo", "max_position_embeddings": 10**6},  # a mask of so many rows and columns
    ],
    ids=str,
)
def test_a_config_costs_no_more_than_what_is_stored(checkpoint_of, tmp_path, config):
    source = changed(checkpoint_of("llama"), tmp_path / "source", config)
    build_meta_model(Checkpoint(checkpoint_of("llama")))  # imports are not what is measured
    started = time.process_time()
    with pytest.raises(UsageError):
        check_fit(Checkpoint(source))
    assert time.process_time() - started < 10


@pytest.mark.parametrize("kind", [None, 7, ["llama"]], ids=str)
def test_no_model_type_is_no_unknown_architecture(tiny, tmp_path, kind):
    """Which `convert` unpacks without a look."""
    prune(tiny, tmp_path / "pruned")
    source = changed(tmp_path / "pruned", tmp_path / "source", {"model_type": kind})
    with pytest.raises(UsageError, match="names no model_type"):
        tilepress.compress(source, tmp_path / "out", Convert("dense"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", [None, {"quant_method": "compressed-tensors"}], ids=str)
def test_packed_weights_without_a_word_of_it_in_the_config_are_refused(tiny, tmp_path, kind):
    prune(tiny, tmp_path / "pruned")
    source = changed(tmp_path / "pruned", tmp_path / "source", {"quantization_config": kind} if kind else {})
    if kind is None:
        config = json.loads((source / "config.json").read_text())
        del config["quantization_config"]
        (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="is packed, and config.json has no quantization_config"):
        tilepress.compress(source, tmp_path / "out", KVCache(group_size=32), dataset=few_words(2, 32))
    with pytest.raises(TilepressError, match="is packed, and config.json"):
        tilepress.load(source)


@pytest.mark.parametrize("chosen", [0, -1, 99])
@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_a_router_chooses_no_more_experts_than_there_are(checkpoint_of, tmp_path, family, chosen):
    source = changed(checkpoint_of(family), tmp_path / "source", {"num_experts_per_tok": chosen})
    with pytest.raises(UsageError, match=f"choose {chosen} of"):
        tilepress.compress(source, tmp_path / "out", Prune(0.5))
    with pytest.raises(TilepressError, match=f"choose {chosen} of"):
        tilepress.load(source)


@pytest.mark.parametrize("method", [{}, [], 7, True], ids=str)
def test_a_quantizer_without_a_name_is_refused(checkpoint_of, tmp_path, method):
    source = changed(checkpoint_of("llama"), tmp_path / "source", {"quantization_config": {"quant_method": method}})
    with pytest.raises(UsageError, match="names no quantizer"):
        check_fit(Checkpoint(source))


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_act": "nonsense"},
        {"num_attention_heads": 0},
        {"num_attention_heads": "four"},
        {"num_key_value_heads": 0},
        {"num_key_value_heads": 3},
        {"rope_parameters": {"rope_type": "nonsense"}},
        {"rope_parameters": 7},
        {"pad_token_id": 10**9},
        {"layer_types": ["nonsense", "more"]},
        {"dtype": "nonsense"},
        {"model_type": ["llama"]},
        {"head_dim": -32},
        {"rms_norm_eps": None},
        {"text_config": {"model_type": "llama"}},
        {"quantization_config": {"quant_method": "nonsense"}},
        {"max_position_embeddings": -1},
    ],
    ids=str,
)
def test_a_damaged_config_is_told_by_load_and_eval(checkpoint_of, tmp_path, cli, text, config):
    source = changed(checkpoint_of("llama"), tmp_path / "source", config)
    try:
        tilepress.load(source)
    except TilepressError as error:
        assert error.hint
    ran = cli("eval", "perplexity", source, "--dataset", text, "--seqlen", "32", "--limit", "1")
    assert ran.code in (0, 1, 2) and "not foreseen" not in ran.err


def test_memory_that_runs_out_while_loading_is_told_as_it_is(tiny, monkeypatch):
    from transformers import AutoModelForCausalLM

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(torch.OutOfMemoryError):
        tilepress.load(tiny)


@pytest.mark.parametrize("error", [MemoryError(), SystemError("error return without exception set")], ids=repr)
def test_memory_that_runs_out_while_a_model_is_built_is_no_fault_of_its_config(tiny, tmp_path, cli, monkeypatch, error):
    from transformers import AutoModelForCausalLM

    def full(*_, **__):
        raise error

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", full)
    ran = cli("compress", "prune", tiny, "-o", tmp_path / "out", "--sparsity", "0.5")
    assert ran.code == 1 and ran.err.startswith("error: there is not enough memory") and "ulimit" in ran.err


def test_a_name_does_not_pass_for_a_lack_of_memory(checkpoint_of, tmp_path):
    source = changed(checkpoint_of("llama"), tmp_path / "source", {"model_type": "out of memory"})
    with pytest.raises(TilepressError):
        tilepress.load(source)
    with pytest.raises(UsageError):
        build_meta_model(Checkpoint(source))
