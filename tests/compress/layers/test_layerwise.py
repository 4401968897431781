"""Layer by layer is the model: every layer's output equals the whole model's; folds leave it unchanged; only one layer is in memory."""

import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tilepress.compress.layers.groups import Group, apply, find_groups
from tilepress.compress.layers.layerwise import LayerByLayer
from tilepress.compress.quantize.smoothing import exact_factors, smooth_factors
from tilepress.compress.run.targets import find_targets
from tilepress.formats import UsageError
from tilepress.formats.checkpoint import Checkpoint, linear_shape
from tilepress.models.families import norm_offset

FAMILIES = [
    "llama",
    "llama-tied",
    "qwen2",
    "mistral",
    "qwen3",
    "gemma",
    "gemma3",
    "phi3",
    "gpt2",
    "opt",
    "falcon",
    "mixtral",
    "qwen3-moe",
]
IDS = torch.arange(30) * 7 % 250


def layer_by_layer(path, ignore: tuple[str, ...] = ()) -> LayerByLayer:
    checkpoint = Checkpoint(path)
    return LayerByLayer(checkpoint, find_targets(checkpoint, ignore)[0], "cpu", torch.float32)


@pytest.mark.parametrize(
    "family,ignore",
    [(family, ()) for family in FAMILIES]
    + [("gpt-oss", ()), ("mixtral", ("*.experts.*",)), ("qwen3-moe", ("*.experts.*",)), ("mixtral", ("*.w2",))],
)
def test_hidden_states_are_those_of_the_whole_model(checkpoint_of, family, ignore):
    path = checkpoint_of(family, torch.float32)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        expected = model(IDS[None], output_hidden_states=True).hidden_states
    ours = layer_by_layer(path, ignore)
    hidden = ours.embed(IDS)
    torch.testing.assert_close(hidden, expected[0])
    assert ours.outside == [] and len(ours.layers) == 2
    for layer, after in zip(ours.layers[:-1], expected[1:], strict=False):
        with ours.loaded(layer) as module:
            assert all(p.device.type == "cpu" for p in module.parameters())
            hidden = ours.run(layer, hidden)
        torch.testing.assert_close(hidden, after, rtol=1e-4, atol=1e-5)
        assert all(p.device.type == "meta" for p in module.parameters())
    with ours.loaded(ours.layers[-1]):
        hidden = ours.run(ours.layers[-1], hidden)
    base = model.base_model
    norm = next((n for n in (getattr(base, name, None) for name in ("norm", "ln_f")) if n is not None), None)
    norm = norm or base.decoder.final_layer_norm
    torch.testing.assert_close(norm(hidden), expected[-1], rtol=1e-4, atol=1e-5)


def test_arguments_that_depend_on_the_tokens_are_refused(checkpoint_of, monkeypatch):
    ours = layer_by_layer(checkpoint_of("llama", torch.float32))
    ours.embed(IDS)
    base = ours.model.base_model
    rotary = base.rotary_emb.forward
    monkeypatch.setattr(
        base.rotary_emb, "forward", lambda x, *a, **k: tuple(r + 1e4 * x.mean() for r in rotary(x, *a, **k))
    )
    with pytest.raises(UsageError, match="depend on the tokens"):
        ours.embed(IDS + 1)


def groups_of(path, fold=True) -> dict[str, list[Group]]:
    ours, found = layer_by_layer(path), {}
    hidden = ours.embed(IDS)
    for layer in ours.layers:
        with ours.loaded(layer) as module:
            before = {name: p.clone() for name, p in module.named_parameters()}
            names = {ours.module_of[t.name] for t in ours.targets_of[layer]}
            run = lambda layer=layer, h=hidden: ours.run(layer, h)  # noqa: E731
            found[layer] = find_groups(module, layer, names, ours.head_dim, run, fold)
            assert {path for group in found[layer] for path in group.linears} == names
            assert all(
                torch.equal(p, before[name]) for name, p in module.named_parameters()
            )  # the trial leaves no trace
            hidden = run()
    return found


SMOOTHED = {  # last names of the linears -> of the producer
    "llama": {"q_proj k_proj v_proj": "input_layernorm", "o_proj": "v_proj", "gate_proj up_proj": "post_attention_layernorm", "down_proj": "up_proj"},
    "gpt2": {"c_attn": "ln_1", "c_proj": None, "c_fc": "ln_2"},
    "opt": {"q_proj k_proj v_proj": "self_attn_layer_norm", "out_proj": "v_proj", "fc1": "final_layer_norm", "fc2": "fc1"},
    "falcon": {"dense_h_to_4h query_key_value": "input_layernorm", "dense": None, "dense_4h_to_h": None},
    "mixtral": {"q_proj k_proj v_proj": "input_layernorm", "o_proj": "v_proj", "w1 w3": None, "w2": "w3"},
    "qwen3-moe": {"q_proj k_proj v_proj": "input_layernorm", "o_proj": "v_proj", "gate_proj up_proj": None, "down_proj": "up_proj"},
    "gemma": {"q_proj k_proj v_proj": None, "o_proj": "v_proj", "gate_proj up_proj": None, "down_proj": "up_proj"},
}  # fmt: skip
SMOOTHED["gemma3"] = SMOOTHED["llama"] | {"gate_proj up_proj": "pre_feedforward_layernorm"}
SMOOTHED["phi3"] = {
    "qkv_proj": "input_layernorm",
    "o_proj": None,
    "gate_up_proj": "post_attention_layernorm",
    "down_proj": None,
}
SMOOTHED |= dict.fromkeys(("llama-tied", "qwen2", "qwen3", "mistral"), SMOOTHED["llama"])


@pytest.mark.parametrize("family", SMOOTHED)
def test_groups_and_what_they_fold_into(checkpoint_of, family):
    for groups in groups_of(checkpoint_of(family, torch.float32)).values():
        for group in groups:
            linears = " ".join(
                sorted((p.rpartition(".")[2] for p in group.linears), key=lambda n: ("qkv".find(n[0]), n))
            )
            expected = SMOOTHED[family][linears]
            unreached = "did not reach" in group.reason
            assert unreached or (group.producer or "").rpartition(".")[2] == (expected or ""), group
            assert (group.producer is None) == bool(group.reason)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen3-moe"])
def test_folding_leaves_the_float_model_unchanged(checkpoint_of, family, dtype):
    path = checkpoint_of(family, dtype)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    modules, generator = dict(model.named_modules()), torch.Generator().manual_seed(0)
    with torch.no_grad():
        before, folds = model(IDS[None]).logits, 0
        for groups in groups_of(path).values():
            for group in groups:
                if group.producer is None or not all(p in modules for p in (*group.linears, group.producer)):
                    continue
                channels = linear_shape(modules[group.linears[0]])[1] // group.repeat[0]
                factors = torch.exp(4 * torch.rand(channels, generator=generator) - 2)
                if (norm := modules[group.producer]).weight.dim() == 1:
                    factors = exact_factors(factors, norm.weight, dtype, norm_offset(norm))
                apply(group, modules, factors)
                folds += 1
        after = model(IDS[None]).logits
    assert folds >= 2
    assert float((after - before).abs().max()) <= 1e-5 * float(before.abs().max()) + 1e-6


def test_a_large_residual_stream_hides_no_wrong_fold(checkpoint_of, tmp_path):
    """Gemma's norms scale by 1 + w: no fold leaves the layer alone, however large the values are that pass it by."""
    shutil.copytree(checkpoint_of("gemma", torch.float32, shard_size="10MB"), tmp_path / "gemma")
    tensors = load_file(tmp_path / "gemma" / "model.safetensors")
    tensors["model.embed_tokens.weight"][int(IDS[0]), 5] = 1e5
    (tmp_path / "gemma" / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "gemma" / "model.safetensors", metadata={"format": "pt"})
    for groups in groups_of(tmp_path / "gemma").values():
        assert [g.producer is None for g in groups] == [True, False, True, False]


def test_norms_of_single_heads_are_no_producers_of_the_whole_input(tmp_path):
    """Qwen3-Next: out_proj reads the reshaped output of a norm that is one head wide."""
    config = transformers.Qwen3NextConfig(
        hidden_size=64, intermediate_size=96, moe_intermediate_size=32, shared_expert_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=300, num_experts=4, num_experts_per_tok=2,
        linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
        layer_types=["linear_attention", "full_attention"], bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    reasons = {g.linears[0].rpartition(".")[2]: g.reason for found in groups_of(tmp_path).values() for g in found}
    assert "neither from a norm" in reasons["out_proj"]


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_exact_factors_undo_the_rounding_of_the_norm(offset):
    """Factors of a norm that multiplies by its weight, and of one that multiplies by 1 + w, whose stored weight is (1 + w) / factor - 1."""
    weight = torch.rand(200, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[3] = -offset  # multiplies by 0
    wanted = torch.rand(200, generator=torch.Generator().manual_seed(1)) * 10 + 0.01
    factors = exact_factors(wanted, weight, torch.bfloat16, offset)
    stored = ((weight.float() + offset) / factors - offset).bfloat16()
    torch.testing.assert_close((stored.float() + offset) * factors, weight.float() + offset, rtol=1e-6, atol=0)
    torch.testing.assert_close(factors, wanted, rtol=2**-8 if not offset else 2**-4, atol=0)


def test_factors_follow_the_formula():
    inputs, weights = torch.tensor([1.0, 100.0, 0.0, 4.0]), torch.tensor([0.5, 0.25, 1.0, 0.0])
    s = smooth_factors(inputs, weights, 0.8)
    raw = inputs[:2] ** 0.8 / weights[:2] ** 0.2
    torch.testing.assert_close(s[:2], raw / raw.log().mean().exp())
    assert s[2:].tolist() == [1.0, 1.0]
    assert smooth_factors(torch.zeros(3), torch.ones(3), 0.5).tolist() == [1.0] * 3


def test_a_norm_that_is_used_elsewhere_is_left_alone(tmp_path):
    """OPT-350m's norms stand behind the residual sum: their output is the residual stream itself."""
    config = transformers.OPTConfig(
        hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=300, max_position_embeddings=64,
        word_embed_proj_dim=64, do_layer_norm_before=False, bos_token_id=0, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    groups = [group for found in groups_of(tmp_path).values() for group in found]
    reasons = {group.linears[0].rpartition(".")[2]: group.reason for group in groups}
    assert "also used elsewhere" in reasons["fc1"] and reasons["fc2"] == "" and reasons["out_proj"] == ""
    assert "neither from a norm" in reasons["q_proj"]
