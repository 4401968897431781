"""Loading: the packed model equals the dense model with the same mask; saving gives the same bytes; anything off raises."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.artifacts import prune
from transformers import AutoModelForCausalLM, AutoTokenizer

import tilepress
from tilepress.formats import TilepressError, UsageError
from tilepress.formats.checkpoint import Checkpoint
from tilepress.models.experts import SeparateExperts
from tilepress.runtime.linear.sparse import TiledCSLLinear
from tilepress.runtime.loader import paths

IDS = torch.arange(40).view(2, 20) + 7


def logits(model):
    with torch.inference_mode():
        return model(IDS.to(model.device)).logits.float()


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "gpt2", "opt", "falcon", "mixtral", "qwen3-moe"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed_model_equals_the_masked_dense_one(checkpoint_of, tmp_path, family, dtype):
    source = checkpoint_of(family, dtype)
    prune(source, tmp_path / "packed", 0.5)
    prune(source, tmp_path / "dense", 0.5, format="dense")
    packed = tilepress.load(tmp_path / "packed", dtype=torch.float32)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    torch.testing.assert_close(logits(packed), logits(dense), rtol=1e-4, atol=1e-4)
    expected = sum(w.layout != "dense" for w in Checkpoint(tmp_path / "packed").weights.values())
    assert paths(packed)["tiled_csl_spmm reference on cpu"] == expected
    if packed.config.tie_word_embeddings:
        assert packed.get_output_embeddings().weight is packed.get_input_embeddings().weight
    assert any(isinstance(m, SeparateExperts) for m in packed.modules()) == (family in ("mixtral", "qwen3-moe"))


@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "mixtral"])
def test_saving_again_gives_equal_tensors_that_load(checkpoint_of, tmp_path, family):
    prune(checkpoint_of(family), tmp_path / "packed", 0.5)
    model = tilepress.load(tmp_path / "packed")
    model.save_pretrained(tmp_path / "again", max_shard_size="100KB")
    before, after = Checkpoint(tmp_path / "packed"), Checkpoint(tmp_path / "again")
    assert len(after.shards) > 1 and set(before.tensors) == set(after.tensors)
    for name in before.tensors:
        mine, theirs = before.read(name), after.read(name)
        assert (
            mine.dtype == theirs.dtype
            and mine.contiguous().numpy(force=True).tobytes() == theirs.numpy(force=True).tobytes()
            if mine.dtype == torch.int32
            else torch.equal(mine, theirs)
        )
    assert torch.equal(logits(tilepress.load(tmp_path / "again")), logits(model))


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_without_the_import_the_stock_loader_fails(checkpoint_of, tmp_path, stock, family):
    prune(checkpoint_of(family), tmp_path / "packed", 0.5)
    assert stock.load(checkpoint_of(family)) is None
    assert stock.load(tmp_path / "packed") is not None


def test_generates_the_same_tokens_as_the_masked_model(artifact, tiny, tmp_path):
    prune(tiny, tmp_path / "dense", 0.6, format="dense")
    tokenizer = AutoTokenizer.from_pretrained(artifact)
    prompt = tokenizer(["import os", "fn main() {"], return_tensors="pt", padding=True, padding_side="left")
    told = [
        m.generate(**prompt, max_new_tokens=24, do_sample=False)
        for m in (tilepress.load(artifact), AutoModelForCausalLM.from_pretrained(tmp_path / "dense"))
    ]
    assert torch.equal(*told)


def copy_with(artifact, tmp_path, change=None, config=None):
    """A copy of an artifact without its manifest, its tensors changed by `change`."""
    path = tmp_path / "changed"
    shutil.copytree(artifact, path)
    (path / "tilepress.json").unlink()
    (path / "model.safetensors.index.json").unlink()
    shard = next(path.glob("*.safetensors"))
    tensors = load_file(shard)
    shard.unlink()
    if change:
        change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    if config:
        (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | config))
    return path


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda t: t.pop("model.layers.1.input_layernorm.weight"), "1 missing tensors"),
        (lambda t: [t.pop(UP), t.pop(UP + "_offsets"), t.pop(UP + "_layout")], "1 missing tensors"),
        (lambda t: t.pop(UP + "_offsets"), "other parts are missing"),
        (lambda t: t.__setitem__("model.layers.9.extra.weight", torch.ones(3)), "1 unexpected tensors"),
        (lambda t: t.__setitem__("model.norm.weight", torch.ones(3, dtype=torch.bfloat16)), "mismatch"),
        (
            lambda t: t.__setitem__(UP + "_layout", torch.tensor([768, 300, 128, 0, 0], dtype=torch.int32)),
            "expected int32",
        ),
        (lambda t: t[UP + "_offsets"].__setitem__(3, 8000), "offsets"),
        (lambda t: t.__setitem__(UP, t[UP][:-128].clone()), "offsets run"),
        (lambda t: t.__setitem__(UP, t[UP].to(torch.int64)), "expected int32"),
        (lambda t: t[UP].__setitem__(0, 0x40F03F80), "outside its tile"),
        (lambda t: t[UP].__setitem__(0, 0x7FFF3F80), "outside its tile"),
        (lambda t: t[UP].__setitem__(0, 0x00033F80), "outside its tile"),
    ],
)
@pytest.mark.parametrize("how", ["load", "from_pretrained"])
def test_anything_missing_unexpected_or_mismatched_raises(artifact, tmp_path, change, message, how):
    path = copy_with(artifact, tmp_path, change)
    with pytest.raises((TilepressError, RuntimeError), match=message):
        tilepress.load(path) if how == "load" else AutoModelForCausalLM.from_pretrained(path)


def test_shape_that_is_not_the_models_is_refused(artifact, tmp_path):
    path = copy_with(artifact, tmp_path, config={"intermediate_size": 700})
    for load, message in (
        (tilepress.load, r"down_proj.weight is \[256, 768\], the model's \[256, 700\]"),
        (AutoModelForCausalLM.from_pretrained, "packed as 256 x 768, the model has"),
    ):
        with pytest.raises(TilepressError, match=message):
            load(path)


def test_artifact_of_a_later_version_is_refused(artifact, tmp_path):
    path = copy_with(
        artifact, tmp_path, config={"quantization_config": {"quant_method": "tilepress", "format_version": 2}}
    )
    with pytest.raises(TilepressError, match="format version 2"):
        tilepress.load(path)


def test_shard_of_another_size_than_declared_is_refused(artifact, tmp_path):
    path = tmp_path / "changed"
    shutil.copytree(artifact, path)
    shard = next(path.glob("*.safetensors"))
    tensors = load_file(shard)
    save_file(tensors, shard, metadata={"format": "pt"})  # the same tensors, another file
    with pytest.raises(TilepressError, match=r"tilepress\.json declares"):
        tilepress.load(path)


def test_dense_checkpoints_load_too_and_are_held_to_the_same(tiny, tmp_path):
    assert paths(tilepress.load(tiny)) == {"torch linear on cpu": 29}
    tensors = load_file(tiny / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    with pytest.raises(UsageError, match="1 missing tensors"):
        tilepress.load(tmp_path)


def test_code_from_a_checkpoint_never_runs_unasked(tiny, tmp_path, cli):
    path = tmp_path / "hostile"
    shutil.copytree(tiny, path)
    config = json.loads((path / "config.json").read_text()) | {
        "model_type": "hostile",
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').write('x')\n")
    for words in (
        ("eval", "perplexity", path, "--dataset", tiny / "config.json"),
        ("compress", "prune", path, "-o", tmp_path / "o", "--sparsity", "0.5"),
    ):
        ran = cli(*words)
        assert ran.code == 2 and "trust-remote-code" in ran.err
    assert not (tmp_path / "ran").exists()


def test_module_says_what_it_is(artifact):
    model = tilepress.load(artifact)
    module = model.model.layers[0].mlp.up_proj
    assert isinstance(module, TiledCSLLinear) and "in_features=256, out_features=768" in repr(module)
    assert str(module.path_for(torch.bfloat16)) == "tiled_csl_spmm reference on cpu"


@pytest.mark.gpu
def test_loads_on_a_card(artifact):
    torch.testing.assert_close(
        logits(tilepress.load(artifact, device="cuda")).cpu(), logits(tilepress.load(artifact)), rtol=0.05, atol=0.3
    )
