"""Recovery: the loss and the optimizer against computations of their own, zeros that stay, resumed runs, what comes out."""

import itertools
import math
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.artifacts import few_words, prune, run_recipe
from support.interruption import digest, stop_anywhere_and_resume

from tilepress import KVCache, Prune, Recover, demo
from tilepress.compress.layers.walk import Walk, write_tensors
from tilepress.compress.recover import distillation as distill, recipe as recovering, settings as recovery_settings
from tilepress.compress.recover.distillation import CLIP_NORM, MaskedAdamW, divergence, learning_rate, relative_error
from tilepress.compress.recover.retraining import Stream
from tilepress.compress.run import shards
from tilepress.compress.run.plan import Inputs
from tilepress.compress.run.targets import find_targets
from tilepress.formats import TilepressError, UsageError
from tilepress.formats.checkpoint import Checkpoint, read_manifest
from tilepress.runtime.loader import load
from tilepress.text import Text


def recovery(
    dataset: Path = demo.TEXT, nsamples: int = 128, seqlen: int = 32, seed: int = 0, **settings
) -> tuple[Recover, Text]:
    return Recover(**{"steps": 20, "batch": 2} | settings), Text(str(dataset), nsamples, seqlen, seed)


def recover(pruned: Path, base: Path, output: Path, dataset: Path = demo.TEXT, device: str = "cpu", **settings) -> dict:
    recipe, text = recovery(dataset, base=base, base_name="base", **settings)
    return run_recipe(recipe, pruned, output, device, text=text)


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(path)
    return {name: checkpoint.dense(weight) for name, weight in checkpoint.weights.items()}


def edited(source: Path, output: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """A copy of a checkpoint with other values."""
    shutil.copytree(source, output)
    for shard in output.glob("*.safetensors"):
        tensors = {name: change(name, tensor) for name, tensor in load_file(shard).items()}
        save_file(tensors, shard, metadata={"format": "pt"})


def assert_zeros_held(before: Path, after: Path) -> int:
    """Every zero is one still, nothing else became one, and what is left of pruned weights did change; returns how many zeros trained tensors have."""
    old, new = tensors_of(before), tensors_of(after)
    assert old.keys() == new.keys()
    zeros = 0
    for record in read_manifest(after)["tensors"]:
        was, now = old[record["name"]], new[record["name"]]
        assert torch.equal(was == 0, now == 0), record["name"]
        if record.get("trained"):
            zeros += int((was == 0).sum())
        assert "zeros" not in record or not torch.equal(was, now), record["name"]
    assert zeros
    return zeros


@pytest.fixture(scope="module")
def llama(checkpoint_of, tmp_path_factory) -> tuple[Path, Path]:
    """A random model and the same with half of its weights."""
    base, pruned = checkpoint_of("llama"), tmp_path_factory.mktemp("llama") / "pruned"
    prune(base, pruned, 0.5)
    return base, pruned


# The loss and the optimizer.


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_divergence_and_its_gradient_against_float64(dtype, tolerance, monkeypatch):
    monkeypatch.setattr(distill, "_ROWS", 3)
    torch.manual_seed(0)
    student, teacher = (3 * torch.randn(8, 50)).to(dtype).requires_grad_(), (3 * torch.randn(8, 50)).to(dtype)
    wide = student.detach().double().requires_grad_()
    q, p = wide.log_softmax(-1), teacher.double().softmax(-1)
    expected = (p * (p.log() - q)).sum() / 8
    (5 * expected).backward()
    found = divergence(student, teacher)
    (5 * found).backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert float((student.grad - wide.grad).norm() / wide.grad.norm()) < tolerance
    assert float(divergence(teacher, teacher)) == pytest.approx(0, abs=1e-6)


def test_relative_error_counts_every_token_alike():
    teacher = torch.tensor([[[100.0, 0.0], [0.0, 1.0]]])
    student = torch.tensor([[[110.0, 0.0], [0.5, 1.0]]])
    assert float(relative_error(student, teacher)) == pytest.approx((0.01 + 0.25) / 2)


def test_learning_rate_rises_to_its_peak_and_falls_to_zero():
    rates = [learning_rate(step, 200, 0.5) for step in range(200)]
    assert rates[0] == pytest.approx(0.05) and max(rates) == rates[9] == 0.5 and rates[-1] < 1e-4
    assert all(a < b for a, b in itertools.pairwise(rates[:10]))
    assert all(a > b for a, b in itertools.pairwise(rates[9:]))
    assert learning_rate(0, 1, 0.5) == 0.5


def test_masked_adamw_against_numpy():
    """Adam as Kingma and Ba write it, in float64, on the kept elements alone; gradients clipped by the norm of those."""
    torch.manual_seed(0)
    weight, bias = torch.randn(6, 5), torch.randn(6)
    weight[torch.rand(6, 5) < 0.5] = 0.0
    parameters = {"w": torch.nn.Parameter(weight.clone()), "b": torch.nn.Parameter(bias.clone())}
    optimizer, steps, peak = MaskedAdamW(parameters, 0.01, 30), 30, 0.01
    kept = (weight != 0).numpy()
    values = np.concatenate([weight.numpy()[kept], bias.numpy()]).astype(np.float64)
    m, v = np.zeros_like(values), np.zeros_like(values)
    for step in range(steps):
        gradients = torch.randn(6, 5) * 3, torch.randn(6)
        for parameter, gradient in zip(parameters.values(), gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        g = np.concatenate([gradients[0].numpy()[kept], gradients[1].numpy()]).astype(np.float64)
        g *= min(1.0, CLIP_NORM / (np.linalg.norm(g) + 1e-6))
        m, v = 0.9 * m + 0.1 * g, 0.98 * v + 0.02 * g * g
        unbiased = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.98 ** (step + 1))
        values -= learning_rate(step, steps, peak) * unbiased[0] / (np.sqrt(unbiased[1]) + 1e-8)
    found = np.concatenate([parameters["w"].detach().numpy()[kept], parameters["b"].detach().numpy()])
    np.testing.assert_allclose(found, values, rtol=1e-4, atol=1e-6)
    assert not parameters["w"].detach().numpy()[~kept].any() and optimizer.done == steps


def test_windows_are_pieces_of_the_text_and_never_the_held_out_end():
    ids, stream = list(range(1000, 11_000)), Stream(list(range(1000, 11_000)), [7], 100, seed=1)
    held = set(stream.held_out[:, 1:].flatten().tolist())
    assert stream.held == 3 and held == set(ids[-3 * 99 :])
    seen = []
    for step in range(30):
        batch = stream.batch(step, 4)
        assert batch.shape == (4, 100) and bool((batch[:, 0] == 7).all())
        assert bool((batch[:, 2:] - batch[:, 1:-1] == 1).all())
        seen += batch[:, 1].tolist()
        assert not held & set(batch[:, 1:].flatten().tolist())
    first = seen[: stream.per_epoch]
    assert len(set(first)) == stream.per_epoch and np.diff(sorted(first)).tolist() == [99] * (stream.per_epoch - 1)
    assert {start % 99 for start in first} != {start % 99 for start in seen[stream.per_epoch :][: stream.per_epoch]}
    again, other = Stream(ids, [7], 100, seed=1), Stream(ids, [7], 100, seed=2)
    assert torch.equal(again.batch(29, 4), stream.batch(29, 4))
    assert not torch.equal(other.batch(29, 4), stream.batch(29, 4))


def test_noise_replaces_its_share_of_tokens_by_others_of_the_text():
    ids = list(range(1000, 11_000))
    clean, noisy, again = (Stream(ids, [7], 100, 1, noise).to(torch.device("cpu")) for noise in (0.0, 0.2, 0.2))
    a, b = clean.batch(3, 50), noisy.batch(3, 50)
    assert torch.equal(b, again.batch(3, 50)) and not torch.equal(b[:, 1:] - b[:, :-1], noisy.batch(4, 50).diff())
    assert torch.equal(clean.held_out, noisy.held_out) and bool((b[:, 0] == 7).all())
    assert 0.17 < float((a[:, 1:] != b[:, 1:]).float().mean()) < 0.23
    assert set(b[:, 1:].flatten().tolist()) <= set(ids) - set(noisy.held_out.flatten().tolist())


# What comes out.


@pytest.mark.thorough
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt2", "opt", "mixtral", "qwen3-moe", "gpt-oss"])
def test_families_recover_with_their_zeros_held(checkpoint_of, tmp_path, family, blocks):
    base, pruned = checkpoint_of(family), tmp_path / "pruned"
    prune(base, pruned, 0.5)
    manifest = recover(pruned, base, tmp_path / "out", blocks=blocks, lr=2e-4, nsamples=8)
    told = manifest["recovery"]
    assert told["zeros_held"] == assert_zeros_held(pruned, tmp_path / "out")
    if blocks:
        assert len(told["layers"]) == 2
        assert all(layer["error_after"] < layer["error_before"] for layer in told["layers"])
    else:
        assert told["kl_after"] < told["kl_before"] and told["losses"][-1] < told["losses"][0] and not told["warnings"]
    last, what = (told["layers"][-1], "error") if blocks else (told, "kl")
    brought = f"{last[f'{what}_before']:.4f} -> {last[f'{what}_after']:.4f}"
    assert brought in (tmp_path / "out" / "README.md").read_text()
    names = {record["name"]: record for record in manifest["tensors"]}
    for name, record in names.items():
        outside = "layers." not in name and ".h." not in name
        assert record.get("trained", False) == (not blocks or not outside), name


@pytest.mark.parametrize("blocks", [False, True])
def test_experts_in_one_tensor_learn_what_those_apart_do(checkpoint_of, tmp_path, blocks):
    """They are no targets: left dense by pruning, trained with `all`, and stored the way that they were."""
    apart, fused = checkpoint_of("mixtral"), tmp_path / "fused"
    model = transformers.AutoModelForCausalLM.from_pretrained(apart, dtype=torch.bfloat16)
    model.save_pretrained(fused, save_original_format=False)
    shutil.copy(apart / "tokenizer.json", fused)
    shutil.copy(apart / "tokenizer_config.json", fused)
    for base in (apart, fused):
        recipe = Prune(0.5, format="tiled-csl", ignore=("*.experts.*",) if base == apart else ())
        recipe, text = recovery(blocks=blocks, nsamples=8, prune=recipe)
        run_recipe(recipe, base, tmp_path / base.name / "out", text=text)
    before, one, many = tensors_of(fused), tensors_of(fused / "out"), tensors_of(tmp_path / apart.name / "out")
    for layer in (0, 1):
        experts = f"model.layers.{layer}.block_sparse_moe.experts"
        w1, w2, w3 = (torch.stack([many[f"{experts}.{i}.{w}.weight"] for i in range(4)]) for w in ("w1", "w2", "w3"))
        for name, expected in (("gate_up_proj", torch.cat([w1, w3], 1)), ("down_proj", w2)):
            was, now = (found[f"model.layers.{layer}.mlp.experts.{name}"].float() for found in (before, one))
            assert float((now - expected.float()).norm()) < 0.2 * float((now - was).norm())


@pytest.mark.parametrize("family", ["gpt-oss", "opt", "llama-tied"])
def test_every_zero_of_another_tool_is_held(checkpoint_of, tmp_path, cli, family):
    """Zeros of embeddings, fused experts and biases are held too."""
    base, pruned = checkpoint_of(family), tmp_path / "pruned"
    torch.manual_seed(3)
    edited(base, pruned, lambda name, tensor: tensor * (torch.rand(tensor.shape) > 0.3))
    recover(pruned, base, tmp_path / "out")
    assert_zeros_held(pruned, tmp_path / "out")
    checked = cli("verify", tmp_path / "out", "--base", pruned)
    assert checked.code == 0, checked.out


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["tiled-csl", "tiled-bitmap", "dense"])
def test_the_layout_stays_and_the_artifact_is_sound(tiny, text, tmp_path, cli, layout):
    prune(tiny, tmp_path / "pruned", 0.7, layout)
    words = ["--base", tiny, "--steps", "10", "--dataset", text, "--seqlen", "64", "--batch", "2", "--json"]
    ran = cli("compress", "recover", tmp_path / "pruned", "-o", tmp_path / "out", *words)
    assert ran.code == 0, ran.err
    assert f"--base {tiny}" in ran.err and ran.json["sparsity"] == pytest.approx(0.7, abs=1e-5)
    assert_zeros_held(tmp_path / "pruned", tmp_path / "out")
    manifest = read_manifest(tmp_path / "out")
    assert {r["layout"] for r in manifest["tensors"] if "zeros" in r} == {layout}
    assert manifest["settings"]["steps"] == 10 and manifest["source"]["recipe"]["command"] == "compress prune"
    assert "recovered" in (tmp_path / "out" / "README.md").read_text()
    for base in (tmp_path / "pruned", tiny):
        checked = cli("verify", tmp_path / "out", "--base", base)
        assert checked.code == 0, checked.out


@pytest.mark.thorough
def test_perplexity_of_other_text_is_better_than_before(tiny, artifact, halves, tmp_path, cli):
    text, held_out = halves

    def measured(path: Path) -> dict:
        words = ["--dataset", held_out, "--seqlen", "512", "--limit", "2", "--json", "-q"]
        return cli("eval", "perplexity", path, "--base", tiny, *words).json

    before = measured(artifact)
    for way, flags in (("model", ()), ("blocks", ("--blocks",))):
        words = ["--steps", "20", "--dataset", text.dataset, "--seqlen", "128", "--batch", "4", *flags, "-q"]
        ran = cli("compress", "recover", artifact, "--base", tiny, "-o", tmp_path / way, *words)
        assert ran.code == 0 and "recovered" in ran.out, ran.err
        after = measured(tmp_path / way)
        assert after["perplexity"] < 0.8 * before["perplexity"], way
        assert after["kl_divergence"]["mean"] < 0.8 * before["kl_divergence"]["mean"], way


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_prune_with_recover_is_prune_and_then_recover(llama, tmp_path, cli, scope):
    base, _ = llama
    prune(base, tmp_path / "pruned", 0.6, scope=scope)
    recover(tmp_path / "pruned", base, tmp_path / "two")
    recipe, text = recovery(prune=Prune(0.6, scope, format="tiled-csl"))
    run_recipe(recipe, base, tmp_path / "one", text=text)
    one, two = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "two")
    assert all(torch.equal(one[name], two[name]) for name in two) and one.keys() == two.keys()
    assert_zeros_held(tmp_path / "pruned", tmp_path / "one")
    manifest = read_manifest(tmp_path / "one")
    assert manifest["command"] == "compress prune" and manifest["settings"]["recover_steps"] == 20
    assert manifest["settings"]["sparsity"] == 0.6 and "recipe" not in manifest["source"]


def test_the_card_of_a_recovered_model_says_what_is_known_of_one(llama, tmp_path, cli):
    """It does not warn of what pruning alone costs, whichever command it went through last."""
    base, _ = llama
    prune(base, tmp_path / "pruned", 0.8)
    recover(tmp_path / "pruned", base, tmp_path / "recovered")
    recipe, text = recovery(prune=Prune(0.8, format="tiled-csl"))
    assert recipe.warnings() == []
    run_recipe(recipe, base, tmp_path / "at-once", text=text)
    for name in ("recovered", "at-once"):
        run_recipe(KVCache(), tmp_path / name, tmp_path / f"{name}-with-cache", text=few_words(2, 16))
    assert "**Warning**: magnitude pruning breaks models" in (tmp_path / "pruned" / "README.md").read_text()
    for name in ("recovered", "at-once", "recovered-with-cache", "at-once-with-cache"):
        card = (tmp_path / name / "README.md").read_text()
        assert "What pruning by magnitude to 80% zeros left was trained against the dense model" in card
        assert "at 1.151 times its dense perplexity" in card and "**Warning**" not in card
    recover(tmp_path / "pruned", base, tmp_path / "in-vain", lr=0.9)
    assert "**Warning**: recovery did not bring the model nearer" in (tmp_path / "in-vain" / "README.md").read_text()


def test_prune_recover_on_the_command_line(llama, tmp_path, cli):
    base, _ = llama
    words = ["--sparsity", "0.5", "--recover", "5", "--dataset", demo.TEXT, "--seqlen", "32"]
    ran = cli("compress", "prune", base, "-o", tmp_path / "out", *words)
    assert ran.code == 0 and "held-out KL divergence" in ran.out, ran.err
    assert cli("verify", tmp_path / "out", "--base", base).code == 0
    wrong = cli("compress", "prune", base, "-o", tmp_path / "x", "--sparsity", "0.5", "--dataset", demo.TEXT)
    assert wrong.code == 2 and "--recover" in wrong.err and not (tmp_path / "x").exists()


@pytest.mark.parametrize("train", recovery_settings.TRAIN)
def test_only_what_is_asked_for_is_trained(llama, tmp_path, train):
    base, pruned = llama
    recover(pruned, base, tmp_path / "out", train=train)
    old, new = tensors_of(pruned), tensors_of(tmp_path / "out")
    targets = {record["name"] for record in read_manifest(pruned)["tensors"] if "zeros" in record}
    for name in old:
        small = old[name].dim() == 1
        assert torch.equal(old[name], new[name]) != (name in targets or train == "all" or (small and train == "norms"))


@pytest.mark.parametrize("blocks", [False, True])
def test_no_kept_weight_is_rounded_to_zero(checkpoint_of, tmp_path, blocks):
    """float16 has no value below 6e-8: of weights as small as that many train to less than half of it."""
    base, pruned = checkpoint_of("llama", torch.float16), tmp_path / "pruned"
    torch.manual_seed(4)
    smallest = torch.finfo(torch.float16).smallest_normal / 1024

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        choice = torch.rand(tensor.shape)
        small = torch.where(choice < 0.4, tensor.sign() * smallest, tensor)
        return torch.where(choice < 0.2, 0, small) if "proj" in name else tensor

    edited(base, pruned, change)
    told = recover(pruned, base, tmp_path / "out", blocks=blocks, lr=smallest, nsamples=8)["recovery"]
    assert told["zeros_held"] == assert_zeros_held(pruned, tmp_path / "out")


@pytest.mark.parametrize("blocks", [False, True])
def test_seeds_of_any_size(llama, tmp_path, blocks):
    base, pruned = llama
    recover(pruned, base, tmp_path / "out", blocks=blocks, seed=2**70, noise=0.1, steps=1, nsamples=4)


def test_a_block_is_measured_as_it_is_stored(llama, tmp_path, monkeypatch):
    base, pruned = llama
    walks, real = [], Walk.run
    monkeypatch.setattr(Walk, "run", lambda self: walks.append(self) or real(self))
    told = recover(pruned, base, tmp_path / "out", blocks=True, nsamples=4)["recovery"]["layers"][0]
    (walk,) = walks
    windows, held = [torch.tensor(window) for window in walk.windows], walk.visitor.held
    errors = []
    for window in windows[-held:]:
        made = []
        for path in (tmp_path / "out", base):
            model = load(path, dtype=torch.float32)
            with torch.no_grad(), distill.outputs_of(model, ["model.layers.0"]) as found:
                model(window[None], use_cache=False)
            made += found
        errors.append(float(relative_error(made[0], made[1].bfloat16())))
    assert told["error_after"] == pytest.approx(np.mean(errors), rel=1e-5)


# The same bytes.


@pytest.mark.parametrize("blocks", [False, True])
def test_stopped_anywhere_and_resumed_it_gives_the_same_bytes(checkpoint_of, tmp_path, monkeypatch, blocks):
    base, pruned = checkpoint_of("llama", shard_size="1GB"), tmp_path / "pruned"
    prune(base, pruned, 0.5, "dense")
    recipe, text = recovery(blocks=blocks, nsamples=4, steps=4, base=base, base_name="base", save_every_s=0)

    def look(folder: Path) -> None:
        if not (folder / "config.json").exists():
            with pytest.raises(TilepressError):
                Checkpoint(folder)

    assert stop_anywhere_and_resume(recipe, pruned, tmp_path, monkeypatch, look, text) >= 8 + 4 * blocks


def test_a_resumed_run_goes_on_where_the_state_was_kept(llama, tmp_path, monkeypatch):
    base, pruned = llama
    recipe, text = recovery(base=base, base_name="base", save_every_s=0)
    run_recipe(recipe, pruned, tmp_path / "whole", text=text)
    real, seen = MaskedAdamW.step, []

    def step(self):
        if len(seen) == 15:
            seen.append(None)
            raise KeyboardInterrupt
        seen.append(self.done)
        real(self)

    monkeypatch.setattr(MaskedAdamW, "step", step)
    with pytest.raises(KeyboardInterrupt):
        run_recipe(recipe, pruned, tmp_path / "out", text=text)
    run_recipe(recipe, pruned, tmp_path / "out", resume=True, text=text)
    assert seen == [*range(15), None, *range(10, 20)]
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


@pytest.mark.parametrize("blocks", [False, True])
def test_a_run_stopped_while_it_packs_goes_on_from_the_same_text_alone(llama, tmp_path, monkeypatch, blocks):
    """Else some shards would hold what was trained on one text, and others what was on another."""
    base, pruned = llama
    text = tmp_path / "text.jsonl"
    shutil.copy(demo.TEXT, text)
    recipe, words = recovery(text, blocks=blocks, nsamples=4, steps=2, base=base, base_name="base")
    run_recipe(recipe, pruned, tmp_path / "whole", text=words)
    out = tmp_path / "out"
    run = partial(run_recipe, recipe, pruned, out, text=words)
    with monkeypatch.context() as patch:
        patch.setattr(shards, "_write_shard", stopped_at(2, shards._write_shard))
        with pytest.raises(KeyboardInterrupt):
            run()
    assert not [*(out / ".tilepress").glob("training*"), *(out / ".tilepress").glob("unfinished*")]
    text.write_text("".join(demo.TEXT.read_text().splitlines(keepends=True)[::-1]))
    with pytest.raises(UsageError, match="have changed since"):
        run(resume=True)
    shutil.copy(demo.TEXT, text)
    run(resume=True)
    assert digest(out) == digest(tmp_path / "whole")


def stopped_at(call: int, real: Callable) -> Callable:
    """A function that is interrupted when it is called for that time."""
    left = itertools.count(call, -1)

    def run(*args):
        if next(left) == 1:
            raise KeyboardInterrupt
        return real(*args)

    return run


def test_a_killed_save_leaves_nothing_that_the_next_one_does_not_remove(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", stopped_at(1, os.fsync))
        with pytest.raises(KeyboardInterrupt):
            write_tensors(tmp_path / "state", {"a": torch.ones(3)})
    assert not (tmp_path / "state").exists()
    write_tensors(tmp_path / "state", {"a": torch.ones(3)})
    assert list(tmp_path.iterdir()) == [tmp_path / "state"]


def test_seeds_and_recomputed_layers(llama, tmp_path, monkeypatch):
    base, pruned = llama
    recover(pruned, base, tmp_path / "a")
    recover(pruned, base, tmp_path / "b")
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    recover(pruned, base, tmp_path / "other", seed=1)
    a, other = tensors_of(tmp_path / "a"), tensors_of(tmp_path / "other")
    assert any(not torch.equal(a[name], other[name]) for name in a)
    monkeypatch.setattr(recovery_settings, "KEPT_ACTIVATIONS", 0)
    called, real = [], distill.checkpoint
    monkeypatch.setattr(distill, "checkpoint", lambda *args, **kwargs: (called.append(1), real(*args, **kwargs))[1])
    recover(pruned, base, tmp_path / "recomputed")
    assert called and digest(tmp_path / "recomputed") == digest(tmp_path / "a")


def test_micro_batches_add_up(llama, tmp_path):
    base, pruned = llama
    found = [recover(pruned, base, tmp_path / str(n), batch=4, micro_batch=n)["recovery"] for n in (1, 4)]
    assert found[0]["kl_after"] == pytest.approx(found[1]["kl_after"], rel=1e-3)


# What cannot be done.


def test_requests_that_make_no_sense(llama, checkpoint_of, tmp_path, cli, monkeypatch):
    base, pruned = llama
    (tmp_path / "short.txt").write_text("too short")
    torch.manual_seed(5)
    other = tmp_path / "other"
    edited(base, other, lambda name, tensor: tensor.flatten()[torch.randperm(tensor.numel())].view(tensor.shape))
    words = ["--steps", "5", "--dataset", demo.TEXT, "--seqlen", "32"]
    for model, given, message in (
        (pruned, words, "--base"),
        (base, ["--base", base, *words], "has no pruned weight"),
        (pruned, ["--base", pruned, *words], "is compressed itself"),
        (pruned, ["--base", checkpoint_of("qwen3"), *words], "has model_type llama, the base qwen3 qwen3"),
        (pruned, ["--base", checkpoint_of("llama", vocab_size=310), *words], "has vocab_size 300, the base llama 310"),
        (pruned, ["--base", checkpoint_of("llama", hidden_size=256), *words], r"in the base llama it is \[256"),
        (
            pruned,
            ["--base", checkpoint_of("llama", num_hidden_layers=3), *words],
            "has decoder layers 2, the base llama 3",
        ),
        (pruned, ["--base", other, *words], "it is another model"),
        (pruned, ["--base", base, *words, "--dataset", tmp_path / "short.txt"], "needs at least 62"),
        (pruned, ["--base", base, *words, "--seqlen", "100000"], "positions"),
        (pruned, ["--base", base, *words, "--steps", "0"], "--steps 0"),
        (pruned, ["--base", base, *words, "--lr", "7"], "--lr 7"),
        (pruned, ["--base", base, *words, "--train", "some"], "--train some"),
        (pruned, ["--base", base, *words, "--hidden-loss", "-1"], "--hidden-loss"),
        (pruned, ["--base", base, *words, "--noise", "1"], "--noise 1"),
    ):
        ran = cli("compress", "recover", model, "-o", tmp_path / "out", *given)
        assert ran.code == 2 and re.search(message, ran.err), (given, ran.err)
        assert len(ran.err.strip().splitlines()) == 2
    monkeypatch.setenv("SLURM_NTASKS", "2")
    ran = cli("compress", "recover", pruned, "--base", base, "-o", tmp_path / "out", *words)
    assert ran.code == 2 and "one process" in ran.err
    monkeypatch.delenv("SLURM_NTASKS")
    words = ["--sparsity", "0.5", "--recover", "5", "--rank", "0", "--world-size", "2"]
    ran = cli("compress", "prune", base, "-o", tmp_path / "out", *words)
    assert ran.code == 2 and "one process" in ran.err


@pytest.mark.parametrize("blocks", [False, True])
def test_training_in_vain_is_told(llama, tmp_path, blocks):
    base, pruned = llama
    told = recover(pruned, base, tmp_path / "out", lr=0.9, steps=2, blocks=blocks, nsamples=4)["recovery"]
    names = [f"model.layers.{i}" for i in (0, 1)] if blocks else ["the model"]
    assert told["warnings"] == [
        f"recovery did not bring {name} nearer to the dense one on text that was held out" for name in names
    ]


def test_a_loss_that_is_not_finite_stops(llama, tmp_path, monkeypatch):
    base, pruned = llama
    monkeypatch.setattr("tilepress.compress.recover.retraining.relative_error", lambda a, b: a.sum() * math.nan)
    with pytest.raises(TilepressError, match="the loss is nan at step 10 of 20"):
        recover(pruned, base, tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


# Memory.


def test_block_by_block_memory_holds_the_experts_of_one_layer(checkpoint_of):
    def planned(layers: int, way: str) -> int:
        checkpoint = Checkpoint(checkpoint_of("gpt-oss", num_hidden_layers=layers))
        recipe, text = recovery()
        targets = find_targets(checkpoint)[0]
        return recovery_settings.memory_bytes(Inputs(checkpoint, text), targets, recipe, way, "cpu")

    assert planned(2, "blocks") == planned(4, "blocks")
    experts = 4 * (3 * 128 * 200 + 2 * 200 + 128)  # of a layer
    assert planned(4, "model") - planned(2, "model") > 2 * experts * 20


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to read anonymous memory")
def test_memory_is_what_the_dry_run_says(checkpoint_of, tmp_path, cli, command):
    base = checkpoint_of("llama", hidden_size=512, intermediate_size=1536, num_hidden_layers=4, shard_size="100MB")
    prune(base, tmp_path / "pruned", 0.5, "dense")
    text, peaks = tmp_path / "text.txt", {}
    text.write_text("a short text has few windows to hold out " * 60)
    for way, flags in (("model", ()), ("blocks", ("--blocks",))):
        words = ["compress", "recover", tmp_path / "pruned", "--base", base, "-o", tmp_path / way, *flags]
        words += ["--steps", "2", "--batch", "2", "--nsamples", "4", "--seqlen", "64", "--dataset", text, "--json"]
        plan = cli(*words, "--dry-run").json
        assert plan["recovery"]["way"] == way
        peaks[way] = plan["recovery"]["memory_bytes"][way]["cpu"], command(*words, "-q").peak_bytes()
    assert "block by block (--blocks) <- chosen" in cli(*words[:-1], "--dry-run").out
    (whole, of_whole), (blocks, of_blocks) = peaks["model"], peaks["blocks"]
    assert blocks < 0.5 * whole
    # What torch and transformers take is the same in both: what is left is planned to a third.
    assert abs((of_whole - of_blocks) - (whole - blocks)) < 0.35 * (whole - blocks), peaks


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [False, True])
def test_on_a_card(tiny, artifact, tmp_path, blocks):
    settings = {"steps": 60, "seqlen": 256, "batch": 8, "blocks": blocks, "nsamples": 16}
    told = recover(artifact, tiny, tmp_path / "a", device="cuda", **settings)["recovery"]
    assert_zeros_held(artifact, tmp_path / "a")
    assert told["device"] == "cuda" and told["computed_in"] == "bfloat16"
    recover(artifact, tiny, tmp_path / "b", device="cuda", **settings)
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    if not blocks:
        assert told["kl_after"] < 0.5 * told["kl_before"]


@pytest.mark.gpu
def test_a_resumed_run_on_a_card(tiny, artifact, tmp_path, monkeypatch):
    recipe, text = recovery(steps=40, seqlen=128, batch=4, base=tiny, base_name="base", save_every_s=0)
    run_recipe(recipe, artifact, tmp_path / "whole", "cuda", text=text)
    real = recovering.train_model

    def stopping(*args, **kwargs):
        monkeypatch.setattr(MaskedAdamW, "step", stop)
        return real(*args, **kwargs)

    step = MaskedAdamW.step

    def stop(self):
        if self.done == 25:
            raise KeyboardInterrupt
        step(self)

    monkeypatch.setattr(recovering, "train_model", stopping)
    with pytest.raises(KeyboardInterrupt):
        run_recipe(recipe, artifact, tmp_path / "out", "cuda", text=text)
    monkeypatch.undo()
    run_recipe(recipe, artifact, tmp_path / "out", "cuda", resume=True, text=text)
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")
