"""Entries of families: what they name is there in transformers, and a family that has one is compressed, fused, decoded and split by it alone."""

import importlib

import pytest
import torch
import transformers
from support.artifacts import few_words, prune, quantize
from support.decoding import alone, decoded
from support.families import FAMILIES as CONFIGS, byte_tokenizer
from transformers import AutoModelForCausalLM

import tilepress
from tilepress import demo
from tilepress.eval.verify import verify
from tilepress.formats.checkpoint import Checkpoint
from tilepress.formats.files import read_json
from tilepress.models import families
from tilepress.models.families import FAMILIES, family_of, heads_of, part
from tilepress.runtime.decode import decoder

NAMED = [family for family in FAMILIES if family.names is not None]
SERVED = [family for family in NAMED if family.decodes or family.int8_layers]
NEW = ["phi3", "phi3-partial", "gemma3", "gemma2"]
IDS = (
    byte_tokenizer()(demo.TEXT.read_text()[100:168], return_tensors="pt").input_ids[:, :64].view(2, 32)
)  # as static ranges know them


def named(found) -> list[str]:
    return [family.model_type for family in found]


def on_meta(family: families.Family):
    """A model of the first random config of a family's type."""
    for name, settings in CONFIGS.values():
        config = getattr(transformers, name)(**settings)
        if config.model_type == family.model_type:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(config)
    raise AssertionError(f"tests/support/families.py has no config of {family.model_type}")


@pytest.mark.parametrize("family", NAMED, ids=named(NAMED))
def test_the_classes_are_there(family):
    for kind, name in family.class_names().items():
        path, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(path), last) or (kind == "norm" and family.norm == families.LAYER), name


@pytest.mark.parametrize("family", SERVED, ids=named(SERVED))
def test_the_parts_are_there(family):
    """The entry's names and classes find every linear layer that the model has, and no parts are beside them."""
    model, names = on_meta(family), family.names
    layer = part(model, f"{names.body}.{names.layers}")[0]
    attention = part(layer, names.attention)
    for module, kind in ((model, "model"), (layer, "layer"), (attention, "attention")):
        assert family_of(module, kind) is family
    inside = [f"{names.attention}.{name}" for name in (*names.qkv, names.out, *names.head_norms)]
    norms = [names.input_norm, names.mlp_norm, names.after_attention, names.after_mlp]
    listed = {*inside, *names.inner, names.outer, *(norm for norm in norms if norm)}
    with_weights = {path for path, module in layer.named_modules() if list(module.parameters(recurse=False))}
    assert listed == with_weights and callable(part(layer, names.activation))
    body = part(model, names.body)
    outside = {names.embedding, names.final_norm, *([names.positions] if names.positions else [])}
    assert outside == {n for n, m in body.named_children() if n != names.layers and list(m.parameters())}
    heads, shapes = heads_of(model.config), [part(attention, name).weight.shape for name in names.qkv]
    wanted = [n * heads.dim for n in (heads.count, heads.kv_count, heads.kv_count)]
    if family.model_type != "gpt2":
        assert [rows for rows, _ in shapes] == (wanted if len(shapes) == 3 else [sum(wanted)])
    assert (family.positions == families.HALVES) == hasattr(body, "rotary_emb")


def test_what_follows_from_the_entries():
    """The names that compression goes by, whatever the model: these must not change by an entry that is only added."""
    assert families.ONE_PRODUCT == (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
    assert set(families.FOLDS) == {
        ("down_proj", "up_proj"), ("w2", "w3"), ("fc2", "fc1"), ("o_proj", "v_proj"), ("out_proj", "v_proj"),
    }  # fmt: skip
    assert set(families.EXPERTS) == {("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")}
    routers = ("model.layers.0.mlp.gate", "router", "mlp.shared_expert_gate")
    others = ("mlp.gate_proj", "gated", "shared_expert.gate_proj", "gate.weight")
    assert all(map(families.ROUTER.search, routers)) and not any(map(families.ROUTER.search, others))
    kinds = ("cohere2", "glm", "gptj", "llama", "gpt2", "unheard-of")
    assert [families.turns_neighbours(kind) for kind in kinds] == [True, True, True, False, False, False]


def test_whoever_has_no_entry_or_half_of_one_is_told_why(checkpoint_of):
    granite, stablelm = (tilepress.load(checkpoint_of(name)) for name in ("granite", "stablelm"))
    assert (
        decoder.why_not(granite, 64) == "no lean pass for GraniteForCausalLM (scaled embeddings, residuals and logits)"
    )
    assert decoder.why_not(stablelm, 64) == "no lean pass for StableLmForCausalLM"
    assert all(family.limits for family in FAMILIES if not (family.decodes and family.int8_layers))


def reference(source, artifact) -> torch.nn.Module:
    """transformers' own model, in float32, with the weights that an artifact stands for."""
    model, checkpoint = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval(), Checkpoint(artifact)
    left = model.load_state_dict({name: checkpoint.dense(w) for name, w in checkpoint.weights.items()}, strict=False)
    assert left.unexpected_keys == [] and set(left.missing_keys) <= {"lm_head.weight"}
    return model


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits.float()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "settings", [{"format": "tiled-csl"}, {"format": "tiled-bitmap"}, {"method": "wanda", "text": few_words()}], ids=str
)
@pytest.mark.parametrize("family", NEW)
def test_pruned_models(checkpoint_of, tmp_path, family, settings):
    source = checkpoint_of(family)
    prune(source, tmp_path / "out", 0.6, **settings)
    model = tilepress.load(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(logits(model), logits(reference(source, tmp_path / "out")), rtol=1e-4, atol=1e-5)
    zeros = [
        float((w == 0).float().mean())
        for n, w in reference(source, tmp_path / "out").named_parameters()
        if "_proj" in n and w.dim() == 2  # not a bias
    ]
    assert min(zeros) > 0.55


@pytest.mark.thorough
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"activations": "tensor", "text": few_words(), "smooth": "0.5"},
        {"activations": "tensor-asym", "text": few_words(), "smooth": "auto"},
    ],
    ids=["dynamic", "static-smoothed", "asymmetric-auto"],
)
@pytest.mark.parametrize("family", NEW)
def test_quantized_models(checkpoint_of, tmp_path, family, settings):
    """The weights that were stored compute what the source's do, but for 8 bits of each; the fused layers compute what those weights do."""
    source = checkpoint_of(family)
    quantize(source, tmp_path / "out", **settings)
    model, floating = tilepress.load(tmp_path / "out", dtype=torch.float32), reference(source, tmp_path / "out")
    dense = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    assert (
        sum(type(m).__name__.endswith("DecoderLayer") and type(m).__name__.startswith("Int8") for m in model.modules())
        == 2
    )
    assert distance(logits(floating), logits(dense)) < 0.06
    assert distance(logits(model), logits(floating)) < 0.2  # Gemma 3 divides errors by what its layers add, too
    assert verify(tmp_path / "out", base=source).passed
    if "smooth" in settings:
        records = read_json(tmp_path / "out" / "tilepress.json")["calibration"]["inputs"]
        norms = {item["folded_into"] for item in records if (item["folded_into"] or "").endswith("layernorm")}
        stock, stored = dict(dense.named_parameters()), dict(floating.named_parameters())
        changed = {
            name.removesuffix(".weight")
            for name in stored
            if "layernorm" in name and not torch.equal(stored[name], stock[name])
        }
        assert norms == changed and (len(norms) == 4 or settings["smooth"] == "auto")


@pytest.mark.parametrize("family", NEW)
def test_decoded_as_generate_does(checkpoint_of, tmp_path, family):
    """Greedy tokens of the lean pass over smoothed INT8 weights: those of transformers' generate over the fused layers, and over plain weights' nearly."""
    quantize(checkpoint_of(family), tmp_path / "out", smooth="0.5", text=few_words())
    model, prompts = tilepress.load(tmp_path / "out", dtype=torch.float32), [[5, 9, 2, 77, 130], list(range(10, 60))]
    assert decoded(model, prompts, 10) == alone(model, prompts, 10)
