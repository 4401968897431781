"""`compress kv --fold-values`: the weights compute the same, and values round better."""

from functools import partial

import pytest
import torch
from support.artifacts import few_words, prune, quantize, run_recipe
from support.families import byte_tokenizer
from support.interruption import digest, killed_before_each_rename
from transformers import AutoModelForCausalLM

import tilepress
from tilepress import KVCache
from tilepress.compress.kv import fold
from tilepress.eval.verify import verify
from tilepress.formats import UsageError, kv_calibration
from tilepress.formats.checkpoint import Checkpoint
from tilepress.formats.kv_int4 import KVFormat, fake_quantize

calibrate = partial(run_recipe, KVCache(fold_values=True))


@pytest.fixture(autouse=True)
def few_steps(request, monkeypatch):
    """How well matrices are learned is one test's matter."""
    if "learned" not in request.node.name:
        monkeypatch.setattr(fold, "STEPS", 2)


def logits(folder, **settings):
    model = AutoModelForCausalLM.from_pretrained(folder, **settings)
    with torch.no_grad():
        return model(torch.arange(40)[None] + 3, use_cache=False).logits.double()


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral"])  # qwen2 has biases of values
def test_the_written_weights_compute_the_same(checkpoint_of, tmp_path, family):
    source = checkpoint_of(family, torch.float32)
    manifest = calibrate(source, tmp_path / "out", text=few_words(2, 64))
    assert [f for check in verify(tmp_path / "out").checks for f in check.findings] == []
    assert all(layer["value_folded"] for layer in manifest["kv_cache"]["report"])
    expected, found = logits(source), logits(tmp_path / "out")
    assert float((found - expected).norm() / expected.norm()) < 1e-5
    before, after = Checkpoint(source), Checkpoint(tmp_path / "out")
    changed = {name for name in before.tensors if not torch.equal(before.read(name), after.read(name))}
    assert changed == {name for name in before.tensors if ".v_proj." in name or ".o_proj.weight" in name}
    assert kv_calibration.load(after) is not None  # the hash is that of the weights as they were written


def test_a_fold_is_undone_after_the_sum():
    generator = torch.Generator().manual_seed(0)
    heads, size, times = 2, 32, 3
    matrix = torch.randn(heads, size, size, dtype=torch.float64, generator=generator)
    values, out = (torch.randn(n, 20, dtype=torch.float64, generator=generator) for n in (heads * size, 20))
    out = torch.randn(20, heads * times * size, dtype=torch.float64, generator=generator)
    given = torch.rand(heads * times, 7, 20, dtype=torch.float64, generator=generator)  # attention of 20 tokens

    def attended(values, out):
        rows = values.view(heads, size, 20).mT.repeat_interleave(times, 0)
        return (given @ rows).transpose(0, 1).flatten(1) @ out.t()

    found = attended(fold.folded_values(values, matrix), fold.folded_outputs(out, matrix))
    torch.testing.assert_close(found, attended(values, out))


@pytest.mark.parametrize("size", [64, 96])  # of 96 the Hadamard matrix has blocks of 32
def test_learned_matrices_round_better(size):
    """Against rows as they are, and scaled channel by channel, in the values' own space."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(2, size, size, generator=generator) * torch.logspace(0, -1.5, size)[:, None]
    rows = torch.randn(2, 2000, size, generator=generator) @ mixed + torch.randn(2, 1, size, generator=generator)

    def error(matrix):
        y = (rows @ matrix.mT).transpose(0, 1)
        channels = torch.stack([y.mean(0), *torch.ones(2, 2, size)])
        back = fake_quantize(y, KVFormat(size), channels, None, 1.0, False, 1).transpose(0, 1)
        off = back.double() @ torch.linalg.inv(matrix.double()).mT - rows
        return float(off.square().sum())

    plain, scaled = torch.eye(size).expand(2, -1, -1), torch.diag_embed(1 / rows.std(1))
    assert error(fold.learned(rows)) < 0.7 * min(error(plain), error(scaled))


def test_a_layer_that_does_not_let_it_through_stays(checkpoint_of, tmp_path, monkeypatch):
    source = checkpoint_of("llama", torch.float32)
    tried = iter([False, True])
    passes = fold.passes
    monkeypatch.setattr("tilepress.compress.kv.calibration.passes", lambda *args: passes(*args) and next(tried))
    told = calibrate(source, tmp_path / "out", text=few_words(2, 64))["kv_cache"]["report"]
    assert [layer["value_folded"] for layer in told] == [False, True]
    expected, found = logits(source), logits(tmp_path / "out")
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_a_trial_refuses_what_channels_pass_one_by_one(checkpoint_of, tmp_path, monkeypatch):
    """A gate after attention, or a norm of values, multiplies channels: a matrix over them does not pass it."""
    source = checkpoint_of("llama", torch.float32)
    run = fold.folded_outputs
    monkeypatch.setattr(fold, "folded_outputs", lambda weight, matrix: run(weight, matrix.roll(1, 0)))
    told = calibrate(source, tmp_path / "out", text=few_words(2, 64))["kv_cache"]["report"]
    assert not any(layer["value_folded"] for layer in told)


def test_forms_under_a_budget_with_folded_values(checkpoint_of, tmp_path):
    source = checkpoint_of("llama")
    recipe = KVCache(bits="auto", budget=5.0, fold_values=True)
    told = run_recipe(recipe, source, tmp_path / "out", text=few_words(2, 64))["kv_cache"]["report"]
    assert all(layer["value_folded"] for layer in told)
    ids = torch.tensor([few_words(1, 40).windows(byte_tokenizer())[0]])
    dense, model = (tilepress.load(folder, dtype=torch.float32) for folder in (source, tmp_path / "out"))
    with torch.no_grad():
        expected, found = (each(ids).logits for each in (dense, model))
    assert 0 < float((found - expected).norm() / expected.norm()) < 0.15


def test_a_stopped_run_goes_on_to_the_same_bytes(checkpoint_of, tmp_path, monkeypatch):
    source = checkpoint_of("llama", num_hidden_layers=1)
    run = partial(calibrate, source, text=few_words(2, 64))
    states = killed_before_each_rename(run, tmp_path / "whole", monkeypatch)
    for state in states[:: max(len(states) // 3, 1)]:
        run(state, resume=True)
        assert digest(state) == digest(tmp_path / "whole")


def test_what_cannot_be_folded_is_refused(checkpoint_of, tmp_path):
    source = checkpoint_of("llama")
    prune(source, tmp_path / "dense", format="dense")
    prune(source, tmp_path / "packed")
    quantize(source, tmp_path / "int8")
    for made, message in (
        (tmp_path / "dense", "pruned"),
        (tmp_path / "packed", "pruned"),
        (tmp_path / "int8", "quantized already"),
        (checkpoint_of("gpt2-64"), "linear layers of their own"),
    ):
        with pytest.raises(UsageError, match=message):
            calibrate(made, tmp_path / "out", text=few_words(2, 64))
        assert not (tmp_path / "out").exists()
