"""`import tilepress.hf`: from_pretrained gives what `tilepress.load` gives, for every kind of artifact; what it did before stays."""

import subprocess
import sys

import pytest
import torch
from support.artifacts import STACKED, quantize
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, LlamaForCausalLM
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.utils.quantization_config import CompressedTensorsConfig

import tilepress
import tilepress.hf
from tilepress.formats import TilepressError
from tilepress.formats.checkpoint import Checkpoint
from tilepress.runtime.hf import from_pretrained
from tilepress.runtime.hf.paged_cache import PagedCache
from tilepress.runtime.linear.int8 import Int8Linear
from tilepress.runtime.linear.sparse import SparseLinear

IDS = torch.arange(24).view(2, 12) * 5 + 3
MASK = torch.ones_like(IDS).index_fill_(1, torch.tensor([0, 1]), 0)
OPTIONS = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}


def told(model) -> tuple[torch.Tensor, torch.Tensor, type]:
    """Tokens, logits and the kind of cache of a batch with padding."""
    out = model.generate(
        IDS, attention_mask=MASK, output_logits=True, return_dict_in_generate=True, use_cache=True, **OPTIONS
    )
    return out.sequences, torch.stack(out.logits), type(out.past_key_values)


def kinds(model) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("kind", STACKED)
def test_from_pretrained_gives_what_load_gives(kind, family, made):
    path = made(family, kind)
    ours, theirs = tilepress.load(path), AutoModelForCausalLM.from_pretrained(path)
    (tokens, logits, cache), expected = told(theirs), told(ours)
    assert torch.equal(tokens, expected[0]) and torch.equal(logits, expected[1])
    assert cache is expected[2] is (PagedCache if kind.endswith("+kv4") else DynamicCache)
    assert kinds(theirs) == kinds(ours) and not theirs.training
    packed = Int8Linear if kind.startswith("int8") else SparseLinear
    assert any(isinstance(m, packed) for m in theirs.modules()) != kind.startswith("dense")
    assert theirs.config.to_dict() == ours.config.to_dict()


@pytest.mark.parametrize("how", ["loading info", "class", "class, config", "config", "device map", "hub"])
@pytest.mark.parametrize("kind", ["int8+kv4", "dense+kv4"])
def test_ways_to_call_it(kind, how, made, monkeypatch):
    path, read = made("llama", kind), []
    expected = told(tilepress.load(path))
    if how == "loading info":
        model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
        assert not any(info.values())
    elif how == "device map":
        pytest.importorskip("accelerate")
        model = AutoModelForCausalLM.from_pretrained(path, device_map="auto")
    elif how == "hub":  # transformers finds the files of an id in its own way
        monkeypatch.setattr(from_pretrained, "locate", lambda *args, **options: read.append(options) or path)
        model = AutoModelForCausalLM.from_pretrained(path, revision="v2", cache_dir="here")
        assert [(asked["revision"], asked["cache_dir"]) for asked in read] == [("v2", "here")]
    else:
        kind = LlamaForCausalLM if how.startswith("class") else AutoModelForCausalLM
        given = {"config": AutoConfig.from_pretrained(path)} if how.endswith("config") else {}
        model = kind.from_pretrained(path, **given)
    found = told(model)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert found[2] is expected[2] is PagedCache


@pytest.mark.parametrize("given", ["argument", "config"])
def test_attn_implementation_leaves_the_cache_out(given, made, tmp_path):
    path = made("llama", "int8+kv4")
    options = {"attn_implementation": "eager"}
    for kind in (AutoModelForCausalLM, LlamaForCausalLM):
        if given == "config":
            options = {"config": AutoConfig.from_pretrained(path, attn_implementation="eager")}
        model = kind.from_pretrained(path, **options)
        assert told(model)[2] is DynamicCache and not hasattr(model, "kv_state")
        assert model.config._attn_implementation == "eager"
        assert any(isinstance(module, Int8Linear) for module in model.modules())
    model.save_pretrained(tmp_path / "saved")  # without the calibration, which its config must not name
    tilepress.load(tmp_path / "saved")


@pytest.mark.parametrize("kind", ["dense+kv4", "int8+kv4", "tiled-bitmap+kv4"])
def test_load_alone_decides_about_its_cache(kind, made, monkeypatch):
    path, installed = made("llama", kind), []
    install = tilepress.runtime.hf.paged_cache.install
    monkeypatch.setattr(
        tilepress.runtime.hf.paged_cache, "install", lambda *args: installed.append(args) or install(*args)
    )
    assert told(tilepress.load(path, kv=False))[2] is DynamicCache and not installed
    assert told(tilepress.load(path))[2] is PagedCache and len(installed) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("kind", STACKED)
def test_base_models_load_without_a_head_and_a_cache(kind, family, made):
    path = made(family, kind)
    model, whole = AutoModel.from_pretrained(path), tilepress.load(path, kv=False)
    assert not hasattr(model, "kv_state")
    with torch.no_grad():
        assert torch.equal(model(IDS).last_hidden_state, whole.base_model(IDS).last_hidden_state)


def test_a_damaged_calibration_is_refused(made, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(made("llama", "dense"))
    model.config.tilepress_kv_cache = "kv_cache"
    model.save_pretrained(tmp_path / "out")
    with pytest.raises(TilepressError, match="names a calibrated cache, but"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("kind", ["int8", "int8 weights", "int8+kv4"])
def test_saving_int8_writes_what_compressed_tensors_loads(kind, made, tmp_path):
    path = made("llama", kind)
    model = AutoModelForCausalLM.from_pretrained(path)
    model.save_pretrained(tmp_path / "again")
    before, after = Checkpoint(path), Checkpoint(tmp_path / "again")
    assert after.config["quantization_config"] == before.config["quantization_config"]
    assert set(before.tensors) == set(after.tensors)
    assert all(torch.equal(before.read(name), after.read(name)) for name in before.tensors)
    for load in (tilepress.load, AutoModelForCausalLM.from_pretrained):
        with torch.no_grad():
            assert torch.equal(load(tmp_path / "again")(IDS).logits, model(IDS, use_cache=False).logits)


@pytest.mark.parametrize(
    "change", [{"format": "pack-quantized"}, {"quantization_status": "frozen"}, {"kv_cache_scheme": {"num_bits": 8}}]
)
def test_other_compressed_tensors_go_to_the_stock_quantizer(change, made, monkeypatch):
    config = Checkpoint(made("llama", "int8")).config["quantization_config"]
    assert type(AutoQuantizationConfig.from_dict(config)).__name__ == "TilepressConfig"
    given = {}
    monkeypatch.setattr(CompressedTensorsConfig, "__init__", lambda self, **config: given.update(config))
    assert type(AutoQuantizationConfig.from_dict(config | change)) is CompressedTensorsConfig
    assert given == config | change


def test_from_pretrained_is_as_it_was_until_the_import_registers_with_it(checkpoint_of, artifact, tmp_path):
    """`tilepress.load` adds a quantizer of its own name, and changes nothing that was there; no kernel is needed before a card is."""
    quantize(checkpoint_of("llama"), tmp_path / "out")
    script = (
        "import sys, transformers, tilepress\n"
        "from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as known\n"
        "before = dict(known), transformers.PreTrainedModel.from_pretrained\n"
        "tilepress.load(sys.argv[1])\n"
        "assert known.keys() - before[0].keys() == {'tilepress'}\n"
        "assert before == ({name: known[name] for name in before[0]}, transformers.PreTrainedModel.from_pretrained)\n"
        "try: transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "except ImportError as error: assert 'compressed-tensors' in str(error)\n"
        "import tilepress.hf; assert 'cuda.core' not in sys.modules\n"
        "from transformers import AutoModelForCausalLM as A, AutoTokenizer as T\n"
        "m = A.from_pretrained(sys.argv[2], device_map='auto'); t = T.from_pretrained(sys.argv[2])\n"
        "out = m.generate(**t('def main():', return_tensors='pt'), max_new_tokens=5, do_sample=False)\n"
        "print(type(m.model.layers[0].mlp.up_proj).__name__, m.dtype, out.shape[1])"
    )
    words = str(tmp_path / "out"), str(artifact)
    ran = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("TiledCSLLinear torch.bfloat16")
