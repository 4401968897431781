"""LoRA adapters of peft over artifacts: trained by transformers' Trainer, saved, loaded again, and refused where they cannot be."""

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support.artifacts import prune, quantize
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import tilepress.hf  # noqa: F401
from tilepress.formats import TilepressError
from tilepress.runtime.linear.packed import PackedLinear

TARGETS = ["q_proj", "v_proj", "gate_proj", "down_proj"]
LORA = {"r": 4, "target_modules": TARGETS, "task_type": "CAUSAL_LM"}
IDS = torch.arange(36).view(2, 18) * 7 % 250
MAKE = {
    "tiled-csl": lambda source, out: prune(source, out, 0.6),
    "tiled-bitmap": lambda source, out: prune(source, out, 0.5, "tiled-bitmap"),
    "int8 weights": lambda source, out: quantize(source, out, activations="none"),
    "int8": quantize,
}


@pytest.fixture(scope="module")
def artifact_of(checkpoint_of, tmp_path_factory):
    made = {}

    def make(kind: str):
        if kind not in made:
            MAKE[kind](checkpoint_of("llama"), out := tmp_path_factory.mktemp("adapters") / kind.replace(" ", "-"))
            made[kind] = out
        return made[kind]

    return make


def open_model(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def moved(model, seed: int = 0):
    """Give every adapter's B numbers, which are zeros at first."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.02)
    return model


@pytest.mark.parametrize("kind", ["tiled-csl", "tiled-bitmap", "int8 weights"])
def test_trainer_trains_adapters(artifact_of, tmp_path, kind):
    model = open_model(artifact_of(kind))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model = get_peft_model(model, LoraConfig(**LORA))
    rows = [{"input_ids": row, "labels": row} for row in IDS] * 8
    how = TrainingArguments(
        tmp_path, max_steps=8, learning_rate=0.02, per_device_train_batch_size=2, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    with torch.no_grad():
        first = model(IDS, labels=IDS).loss
    Trainer(model, how, train_dataset=rows).train()
    with torch.no_grad():
        assert model(IDS, labels=IDS).loss < first - 0.5
    after = dict(model.base_model.model.named_buffers())
    for name, buffer in before.items():  # the base is as it was, under the names that adapters give it
        layer, _, last = name.rpartition(".")
        assert torch.equal(after.get(name, after.get(f"{layer}.base_layer.{last}")), buffer)
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(open_model(artifact_of(kind)), tmp_path / "adapter")
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("kind", list(MAKE))
def test_adapters_add_their_product(artifact_of, kind):
    """Against the adapters' own matrices beside the layers of a model that was loaded anew."""
    model = moved(get_peft_model(open_model(artifact_of(kind)), LoraConfig(**LORA, lora_alpha=8)))
    plain, added = open_model(artifact_of(kind)), []
    if kind == "int8":
        from tilepress.runtime.hf.int8_layers import take_apart

        take_apart(plain)
    for name, module in model.base_model.model.named_modules():
        if hasattr(module, "lora_A"):
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
            added.append(name)
            plain.get_submodule(name).register_forward_hook(lambda m, x, y, a=a, b=b: y + 2 * (x[0] @ a.T @ b.T))
    layers = plain.config.num_hidden_layers
    assert len(added) == len(TARGETS) * layers and isinstance(plain.get_submodule(added[0]), PackedLinear)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-4)
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), logits(open_model(artifact_of(kind))), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["tiled-csl", "int8"])
def test_add_adapter_of_transformers(artifact_of, kind):
    model = open_model(artifact_of(kind))
    before = logits(model)
    model.add_adapter(LoraConfig(**LORA))
    assert torch.equal(logits(model), before)
    assert not torch.equal(logits(moved(model)), before)


def test_layers_of_int8_activations_do_not_train(artifact_of, tmp_path):
    model = moved(get_peft_model(open_model(artifact_of("int8")), LoraConfig(**LORA)))
    with pytest.raises(TilepressError, match="no gradient"):
        model(IDS, labels=IDS).loss.backward()
    with pytest.raises(ValueError, match="do not support training"):
        Trainer(model, TrainingArguments(tmp_path, use_cpu=True, report_to=[]), train_dataset=[])


@pytest.mark.parametrize("asked", [{"use_dora": True}, {"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}])
def test_what_reads_the_weight_is_refused(artifact_of, asked):
    with pytest.raises(TilepressError, match="packed"):
        get_peft_model(open_model(artifact_of("tiled-csl")), LoraConfig(**LORA, **asked))


def test_adapters_come_off_and_do_not_merge(artifact_of):
    plain = logits(open_model(artifact_of("tiled-csl")))
    model = moved(get_peft_model(open_model(artifact_of("tiled-csl")), LoraConfig(**LORA)))
    with pytest.raises(TilepressError, match="cannot be merged"):
        model.merge_and_unload()
    assert torch.equal(logits(model.unload()), plain)


def test_dense_models_get_adapters_as_ever(checkpoint_of):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint_of("llama")), LoraConfig(**LORA))
    kinds = {type(module) for module in model.modules() if isinstance(module, peft.tuners.lora.LoraLayer)}
    assert kinds == {peft.tuners.lora.Linear}
    assert set(model.merge_and_unload().state_dict()) == set(
        AutoModelForCausalLM.from_pretrained(checkpoint_of("llama")).state_dict()
    )
