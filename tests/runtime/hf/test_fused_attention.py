"""Attention through tilepress::rope_append: the rows, logits and tokens of the model's own forward and tilepress::kv_append, and what is left to those."""

import copy
import importlib
import inspect
import pickle
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
import transformers
from support.artifacts import few_words, quantize, run_recipe
from support.op_calls import Counted
from transformers.models.llama.modeling_llama import LlamaAttention

import tilepress
from tilepress import KVCache
from tilepress.formats import TilepressError, UsageError
from tilepress.formats.kv_calibration import CachedLayer, KVCalibration, Side, uncalibrated
from tilepress.formats.kv_int4 import KVFormat
from tilepress.models import families
from tilepress.runtime.hf import fused_attention, paged_cache as kv_cache
from tilepress.runtime.hf.paged_cache import PagedCache
from tilepress.runtime.loader import paths

OPTIONS = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
SHAPE = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "intermediate_size": 96,
    "vocab_size": 300,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
FAMILIES = {
    "Llama": {},
    "LlamaBiased": {"attention_bias": True},
    "Mistral": {"num_key_value_heads": 1},
    "Qwen2": {"num_key_value_heads": 4},
    "Qwen3": {"head_dim": 32},
    "Granite": {"attention_multiplier": 0.3},
    "Phi3": {},
    "Phi3Partial": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "Gemma3Text": {"head_dim": 32, "layer_types": ["full_attention"] * 2},
    "Gemma2": {"head_dim": 32, "sliding_window": 24, "attn_logit_softcapping": 2.0},
}
FORMS = {
    "int4 dynamic": KVFormat(32),
    "int4 static": KVFormat(32, static=True),
    "int8 dynamic": KVFormat(32, 8),
    "16 bits": KVFormat(32, 16),
}


def calibration(form: KVFormat, kv_heads: int, layers: int, rotate: bool = True) -> KVCalibration:
    """Means, scales and weights of channels that matter; nothing for 16 bits."""
    if form.bits == 16:
        return uncalibrated(form, kv_heads, layers)
    generator = torch.Generator().manual_seed(3)

    def side() -> Side:
        channels = torch.rand(3, kv_heads, form.head_dim, generator=generator) + torch.tensor([-0.5, 0.5, 0.5])[
            :, None, None
        ].expand(3, 1, 1)
        fixed = torch.tensor([0.4, -3.0]).half().expand(kv_heads, form.groups, 2).clone() if form.static else None
        return Side(channels, fixed, 0.9)

    return KVCalibration(kv_heads, tuple(CachedLayer(side(), side(), form, rotate) for _ in range(layers)), 1)


def stock(family: str, dtype: torch.dtype = torch.float32, **changes):
    """A random model without a cache of ours, with biases and norms that matter."""
    torch.manual_seed(0)
    settings = SHAPE | FAMILIES.get(family, {}) | changes
    config = getattr(transformers, f"{re.sub('Biased|Partial', '', family)}Config")(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.5, 1.5) if parameter.dim() == 1 else parameter.normal_(std=0.08)
    return model.to(dtype)


def with_pages(model, form: KVFormat = FORMS["int4 dynamic"]):
    config = model.config
    kv_cache.install(model, calibration(form, config.num_key_value_heads, config.num_hidden_layers))
    return model


def pair(monkeypatch, model, form: KVFormat = FORMS["int4 dynamic"]):
    """The model as it is installed, and a copy all of whose attention is left alone."""
    separate = copy.deepcopy(model)
    fused = with_pages(model, form)
    with monkeypatch.context() as patch:
        patch.setattr(fused_attention, "family_of", lambda module, kind: None)
        with_pages(separate, form)
    layers = model.config.num_hidden_layers
    assert (len(fused_attention.modules(fused)), len(fused_attention.modules(separate))) == (layers, 0)
    return fused, separate


def counts(run, *args, **kwargs) -> Counter:
    with Counted() as counted, torch.no_grad():
        run(*args, **kwargs)
    return counted.calls


def prompt(padding: int = 5) -> dict:
    """Two sequences of 70 tokens, the second one padded on the left."""
    ids, mask = torch.arange(140).view(2, 70) * 7 % 290 + 3, torch.ones(2, 70, dtype=torch.long)
    mask[1, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


def passes(model, steps: int = 3):
    """Logits of a prompt and of single positions after it, and the pages of all layers after each pass."""
    inputs, cache = prompt(), PagedCache(model.kv_state.calibration, model.device, num_pages=4)
    inputs = {name: x.to(model.device) for name, x in inputs.items()}
    mask, logits, pages = inputs["attention_mask"], [], []
    for unused in cache.pool.pages:
        unused.zero_()
    with torch.no_grad():
        for step in range(steps + 1):
            if step:
                mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
                inputs = {"input_ids": torch.full_like(mask[:, :1], 17 + step), "attention_mask": mask}
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -inputs["input_ids"].shape[1] :]
            logits.append(model(**inputs, past_key_values=cache, position_ids=positions).logits)
            pages.append(torch.stack(cache.pool.pages))
    assert cache.lengths == [70 + steps, 65 + steps]
    logits[0] = logits[0][:, 5:]  # without padding
    return logits, pages


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_pages_and_logits_are_those_of_the_models_own_forward(monkeypatch, family, dtype):
    fused, separate = pair(monkeypatch, stock(family, dtype))
    (found, ours), (expected, theirs) = passes(fused), passes(separate)
    differ = [float((a != b).float().mean()) for a, b in zip(ours, theirs, strict=True)]
    if family == "Qwen3":  # whose norms are added up in another order
        assert max(differ) < 0.01
    else:  # a pass of one position rounds the query otherwise, which the next layer's keys see
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[-1][0], theirs[-1][0]) and max(differ) < 0.01
    for a, b in zip(found, expected, strict=True):
        assert distance(a, b) < (1e-4 if dtype == torch.float32 else 0.03)


@pytest.mark.parametrize("form", FORMS)
def test_formats(monkeypatch, form):
    """Static scales, 8 bits, and 16 bits, where nothing of the query is folded."""
    fused, separate = pair(monkeypatch, stock("Llama"), FORMS[form])
    (found, ours), (expected, theirs) = passes(fused), passes(separate)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[-1][0], theirs[-1][0])
    for a, b in zip(found, expected, strict=True):
        assert distance(a, b) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens(monkeypatch, family):
    """Tokens of a batch with padding, greedily and by beams, against each model's own forward; and of a sequence of the batch alone."""
    fused, separate = pair(monkeypatch, stock(family))
    found = fused.generate(**prompt(), **OPTIONS)
    assert torch.equal(found, separate.generate(**prompt(), **OPTIONS))
    alone = fused.generate(prompt()["input_ids"][1:, 5:], **OPTIONS)
    assert torch.equal(alone[0, 65:], found[1, 70:])
    beams = OPTIONS | {"num_beams": 3, "num_return_sequences": 2}
    assert torch.equal(fused.generate(**prompt(), **beams), separate.generate(**prompt(), **beams))


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_bfloat16(monkeypatch, family):
    """Each is what the model's own forward takes after those before it, or as good as that up to rounding."""
    fused, separate = pair(monkeypatch, stock(family, torch.bfloat16))
    found, cache = fused.generate(**prompt(0), **OPTIONS), PagedCache(separate.kv_state.calibration, "cpu")
    with torch.no_grad():
        pieces = found[:, :-1].split([70, *[1] * 9], 1)
        logits = torch.cat([separate(piece, past_key_values=cache).logits[:, -1:] for piece in pieces], 1).float()
    taken = logits.gather(2, found[:, 70:, None])
    assert bool((logits.amax(2, keepdim=True) - taken <= 0.1 * logits.std()).all())


def test_one_append_a_layer_and_pass():
    model = with_pages(stock("Llama", torch.bfloat16))
    assert counts(model.generate, **prompt(), **OPTIONS) == {"rope_append": 20, "kv_read": 2, "decode_attention": 18}
    assert counts(model, **prompt(), use_cache=True) == {"rope_append": 2, "kv_read": 2}
    assert counts(model, torch.tensor([[5]]), use_cache=True) == {"rope_append": 2, "decode_attention": 2}
    assert paths(model) == {
        "torch linear on cpu": 15,
        "rope_append reference on cpu": 2,
        "kv_read reference on cpu": 2,
        "decode_attention reference (int4 dynamic, row-wise) on cpu": 2,
    }


def test_positions_of_one_row_serve_a_batch():
    """cos and sin of [1, positions, rotary], as a pass without position_ids has them."""
    model, ids = with_pages(stock("Llama")), prompt()["input_ids"]
    cache = PagedCache(model.kv_state.calibration, "cpu")
    with torch.no_grad():
        pieces = [model(piece, past_key_values=cache).logits for piece in ids.split([60, 9, 1], 1)]
        alone = [model(row[None], use_cache=True).logits for row in ids]
    assert distance(torch.cat(pieces, 1), torch.cat(alone)) < 0.02  # codes may tip


def test_passes_without_the_paged_cache_are_the_models_own():
    model, inputs = with_pages(stock("Qwen3")), prompt()
    plain = stock("Qwen3")
    with torch.no_grad():
        assert torch.equal(model(**inputs, use_cache=False).logits, plain(**inputs, use_cache=False).logits)
    for mode in ("off", "sim"):
        with kv_cache.cache_mode(model, mode):
            assert not counts(model, **inputs, use_cache=True)
    assert not counts(model.model, **inputs)  # not announced
    full = transformers.StaticCache(config=model.config, max_cache_len=80)
    with pytest.warns(UserWarning, match="StaticCache of full precision"):
        assert not counts(model, **inputs, past_key_values=full)
    with torch.autocast("cpu", torch.bfloat16):
        assert counts(model, **inputs, use_cache=True) == {"kv_append": 2, "kv_read": 2}
    wide = with_pages(stock("Llama", torch.float64))
    assert counts(wide, **inputs, use_cache=True) == {"kv_append": 2, "kv_read": 2}
    with pytest.raises(UsageError, match="no gradients"):
        model.train()(**inputs, use_cache=True)


class Cautious(LlamaAttention):
    """A forward of its own."""

    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states.clamp(-50, 50), **kwargs)


def as_subclass(model):
    for layer in model.model.layers:
        layer.self_attn.__class__ = Cautious


def as_namesake(model):
    """A class of code that came with a checkpoint, of a name that we know."""
    namesake = type("LlamaAttention", (LlamaAttention,), {"__module__": "transformers_modules.modeling_llama"})
    for layer in model.model.layers:
        layer.self_attn.__class__ = namesake


def as_patched(model):
    for layer in model.model.layers:
        layer.self_attn.forward = layer.self_attn.forward


def as_own_norm(model):
    for layer in model.model.layers:
        layer.self_attn.k_norm = torch.nn.RMSNorm(32, 1e-6)


def as_two_eps(model):
    for layer in model.model.layers:
        layer.self_attn.k_norm.variance_epsilon *= 2


@pytest.mark.parametrize(
    "family,change",
    [
        ("Llama", as_subclass),
        ("Llama", as_namesake),
        ("Llama", as_patched),
        ("Qwen3", as_own_norm),
        ("Qwen3", as_two_eps),
        ("Cohere", lambda model: None),
        ("StableLm", lambda model: None),
    ],
)
def test_attention_of_other_kinds_is_left_alone(family, change):
    changes = {"head_dim": 32} if family == "Qwen3" else {}
    model = stock(family, **changes)
    change(model)
    kinds = [type(layer.self_attn) for layer in model.model.layers]
    with_pages(model)
    assert [type(layer.self_attn) for layer in model.model.layers] == kinds and not fused_attention.modules(model)
    assert counts(model.generate, **prompt(), **OPTIONS) == {"kv_append": 20, "kv_read": 2, "decode_attention": 18}
    assert paths(model)["kv_append reference on cpu"] == 2


def test_a_setting_that_the_family_does_not_serve_leaves_attention_alone(monkeypatch):
    found, capped = fused_attention.family_of, families.Setting("soft_cap", None, "soft-capped scores")

    def family_of(module, kind: str):
        family = found(module, kind)
        return family and replace(family, settings=(*family.settings, capped))

    monkeypatch.setattr(fused_attention, "family_of", family_of)
    for cap, fused in ((None, 2), (30.0, 0)):
        model = stock("Llama")
        model.config.soft_cap = cap
        assert len(fused_attention.modules(with_pages(model))) == fused


def test_one_module_of_another_kind():
    model = stock("Llama")
    model.model.layers[1].self_attn.__class__ = Cautious
    with_pages(model)
    assert counts(model, **prompt(), use_cache=True) == {"rope_append": 1, "kv_append": 1, "kv_read": 2}
    found = paths(model)
    assert found["rope_append reference on cpu"] == found["kv_append reference on cpu"] == 1


def source(thing) -> str:
    """A body without its signature, its docstring and the sliding window that it hands on."""
    text = inspect.getsource(thing)
    text = (
        text[text.index('"""', text.index('"""') + 3) + 3 :]
        if '"""' in text
        else text[re.search(r"\):|-> .*:\n", text).end() :]
    )
    return "".join(line for line in text.splitlines(True) if "sliding_window=" not in line).strip()


LIKE_LLAMA = [
    family.class_names()["attention"]
    for family in families.FAMILIES
    if family.fused_attention and len(family.names.qkv) == 3 and family.norm == families.RMS
]


@pytest.mark.parametrize("name", LIKE_LLAMA)
def test_the_classes_compute_what_the_op_does(name):
    """Their forward, RoPE and its angles are Llama's or Qwen3's to the letter, as transformers has them now."""
    path, kind = name.rsplit(".", 1)
    module = importlib.import_module(path)
    llama, qwen3 = (importlib.import_module(f"transformers.models.{n}.modeling_{n}") for n in ("llama", "qwen3"))
    attention = getattr(module, kind)
    normed = "q_norm" in inspect.getsource(attention.__init__)
    assert source(attention.forward) == source((qwen3.Qwen3Attention if normed else llama.LlamaAttention).forward)
    ours = list(inspect.signature(fused_attention.forward).parameters)
    assert list(inspect.signature(attention.forward).parameters) == ours
    for function in ("apply_rotary_pos_emb", "rotate_half"):
        assert source(getattr(module, function)) == source(getattr(llama, function))
    prefix = kind.removesuffix("Attention")
    rotary = getattr(module, f"{prefix}RotaryEmbedding")
    assert source(rotary.forward) == source(llama.LlamaRotaryEmbedding.forward)
    if normed:
        assert source(getattr(module, f"{prefix}RMSNorm").forward) == source(llama.LlamaRMSNorm.forward)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_values_that_are_not_finite_name_the_layer(family):
    """They are told in prompts and, on a CPU, in single positions."""
    model = with_pages(stock(family))
    with torch.no_grad():
        cache = model(**prompt(), use_cache=True).past_key_values
        model.model.layers[1].self_attn.k_proj.weight.fill_(float("nan"))
        for new in ({"input_ids": torch.tensor([[5], [6]]), "past_key_values": cache}, prompt()):
            with pytest.raises(TilepressError, match="layer 1 gives keys or values that are not finite"):
                model(**new, use_cache=True)


def test_classes_copies_and_pickles():
    model = with_pages(stock("Qwen3"))
    expected = model.generate(**prompt(), **OPTIONS)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        attention = other.model.layers[0].self_attn
        assert type(attention) is type(model.model.layers[0].self_attn) and attention.kv_state is other.kv_state
        assert isinstance(attention, transformers.models.qwen3.modeling_qwen3.Qwen3Attention)
        assert torch.equal(other.generate(**prompt(), **OPTIONS), expected)
    assert type(attention).__name__ == "FusedQwen3Attention"
    assert model.state_dict().keys() == stock("Qwen3").state_dict().keys()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_int8_with_merged_projections(monkeypatch, checkpoint_of, tmp_path, family):
    quantize(checkpoint_of(family), tmp_path / "int8")
    run_recipe(KVCache(), tmp_path / "int8", tmp_path / "both", text=few_words(4, 64))
    fused = tilepress.load(tmp_path / "both")
    monkeypatch.setattr(fused_attention, "family_of", lambda module, kind: None)
    separate = tilepress.load(tmp_path / "both")
    assert hasattr(fused.model.layers[0].self_attn, "qkv_proj") and len(fused_attention.modules(fused)) == 2
    (found, ours), (expected, theirs) = passes(fused), passes(separate)
    assert torch.equal(ours[0][0], theirs[0][0]) or family == "qwen3"
    for a, b in zip(found, expected, strict=True):
        assert distance(a, b) < 0.05
    ran = counts(fused, **prompt(), use_cache=True)
    assert ran["rope_append"] == 2 and ran["kv_append"] == 0 and ran["w8a8_gemm"] == 8
    assert fused.generate(**prompt(), **OPTIONS).shape == (2, 80)


def test_modules_that_accelerate_moves(checkpoint_of, tmp_path):
    """Its hooks stand around the other forward; a norm that is offloaded has no weight to read."""
    pytest.importorskip("accelerate")
    for family, fused in (("llama", 2), ("qwen3", 1)):
        folder = tmp_path / family
        run_recipe(KVCache(), checkpoint_of(family), folder, text=few_words(4, 64))
        places = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu", "lm_head": "cpu"}
        places |= {"model.norm": "cpu", "model.rotary_emb": "cpu"}
        model = tilepress.load(folder, device_map=places, offload_folder=tmp_path / "offload")
        assert len(fused_attention.modules(model)) == fused
        assert counts(model, **prompt(), use_cache=True)["rope_append"] == fused
        for a, b in zip(passes(model)[0], passes(tilepress.load(folder))[0], strict=True):
            assert distance(a, b) < 0.02


CARD = {"num_attention_heads": 8, "head_dim": 64, "hidden_size": 256}  # what decode_attention's kernel takes


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_on_a_card(monkeypatch, family, dtype):
    """Logits of the CPU up to rounding, by kernels; no layer of a step waits for the card."""
    on_cpu = with_pages(stock(family, dtype, **CARD), KVFormat(64))
    model = with_pages(stock(family, dtype, **CARD).cuda(), KVFormat(64))
    for a, b in zip(passes(model)[0], passes(on_cpu)[0], strict=True):
        assert distance(a.cpu(), b) < 0.1  # codes tip where GEMMs round otherwise
    attention = "decode_attention kernel (int4 dynamic, row-wise) on cuda"
    expected = {"rope_append kernel on cuda", "kv_read kernel on cuda", attention}
    assert expected == {path for path in paths(model) if "linear" not in path}
    inputs = {name: x.cuda() for name, x in prompt().items()}
    assert counts(model.generate, **inputs, **OPTIONS) == {"rope_append": 20, "kv_read": 2, "decode_attention": 18}

    def watch(module, args, kwargs):
        torch.cuda.set_sync_debug_mode("error" if args[0].shape[1] == 1 else "default")

    for layer in model.model.layers:
        layer.register_forward_pre_hook(watch, with_kwargs=True)
        layer.register_forward_hook(lambda *_: torch.cuda.set_sync_debug_mode("default"), always_call=True)
    assert model.generate(**inputs, **OPTIONS).shape == (2, 80)


@pytest.mark.gpu
def test_what_is_not_finite_stays_so_on_a_card():
    """A step does not look: the error comes with the next prompt, NaN comes out at once."""
    model = with_pages(stock("Llama", torch.bfloat16, **CARD).cuda(), KVFormat(64))
    inputs = {name: x.cuda() for name, x in prompt().items()}
    with torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
        model.model.layers[1].self_attn.v_proj.weight.fill_(float("nan"))
        assert model(torch.tensor([[5], [6]]).cuda(), past_key_values=cache).logits.isnan().all()
        with pytest.raises(TilepressError, match="layer 1 gives keys or values that are not finite"):
            model(**inputs, use_cache=True)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_layers_on_two_cards(checkpoint_of, tmp_path):
    """Each layer's pages lie on its card."""
    pytest.importorskip("accelerate")
    run_recipe(KVCache(), checkpoint_of("llama"), tmp_path / "out", text=few_words(4, 64))
    places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1, "lm_head": 1}
    model = tilepress.load(tmp_path / "out", device_map=places | {"model.rotary_emb": 0})
    inputs = {name: x.to("cuda:0") for name, x in prompt().items()}
    out = model.generate(**inputs, return_dict_in_generate=True, **OPTIONS)
    assert [pages.device.index for pages in out.past_key_values.pool.pages] == [0, 1]
    assert torch.equal(out.sequences, tilepress.load(tmp_path / "out", device="cuda:0").generate(**inputs, **OPTIONS))
