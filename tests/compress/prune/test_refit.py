"""Pruned layers that are trained: nearer to the dense model on other text, masks and counts as they were, the same bytes after any stop."""

import copy
from types import SimpleNamespace

import pytest
import torch
from support.artifacts import few_words, prune, run_recipe
from support.interruption import digest, killed_before_each_rename
from torch import nn

import tilepress
from tilepress import Prune
from tilepress.compress.layers import windows
from tilepress.compress.prune import layer_pruning, refit as refitting
from tilepress.compress.recover.distillation import MaskedAdamW
from tilepress.eval.verify import verify
from tilepress.formats.checkpoint import Checkpoint
from tilepress.ranks import ALONE

TEXT = few_words(20, 64)


def weights_of(folder, manifest):
    checkpoint = Checkpoint(folder)
    names = [item["name"] for item in manifest["calibration"]["pruned"]]
    return {name: checkpoint.dense(checkpoint.weights[name]) for name in names}


def test_the_model_comes_nearer_on_other_text_and_zeros_stay_counted(tiny, halves, tmp_path):
    text, held_out = halves
    text = few_words(24, 128, text.dataset)
    kl, told = {}, {}
    for steps in (0, 20):
        folder = tmp_path / str(steps)
        told[steps] = prune(tiny, folder, 0.6, format="dense", method="sparsegpt", refit=steps, text=text)
        found = tilepress.perplexity(folder, held_out, base=tiny, seqlen=128, limit=16, device="cpu")
        kl[steps] = found.to_json()["kl_divergence"]["mean"]
        zeros = {name: int((weight == 0).sum()) for name, weight in weights_of(folder, told[steps]).items()}
        assert zeros == {item["name"]: item["zeros"] for item in told[steps]["calibration"]["pruned"]}
        assert verify(folder, tiny).passed
        cost = told[steps]["calibration"]["cost"]
        assert cost["tokens"] >= 23 * 127 and 0.1 * kl[steps] < cost["kl"] < kl[steps] and 0.9 < cost["perplexity"] < 10
    assert kl[20] < 0.95 * kl[0], kl
    layers = told[20]["calibration"]["refitted"]
    assert len(layers) == 4 and "refitted" not in told[0]["calibration"]
    assert all(layer["error_after"] < layer["error_before"] for layer in layers)
    assert told[20]["settings"]["refit"] == 20 and "refit" not in told[0]["settings"]


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "opt", "falcon", "mixtral", "gemma3"])
def test_families_are_refitted(checkpoint_of, tmp_path, family):
    """Random layers are fitted nearly exactly by the solver, and a few large steps only harm: what it gave is kept."""
    source, made = checkpoint_of(family), {}
    for steps in (0, 3):
        folder = tmp_path / str(steps)
        made[steps] = prune(source, folder, 0.537, format="dense", method="sparsegpt", refit=steps, text=TEXT)
        assert verify(folder, source).passed
    layers = made[3]["calibration"]["refitted"]
    assert len(layers) == 2 and all(layer["error_before"] < layer["error_after"] < 1 for layer in layers)
    solved, found = (weights_of(tmp_path / str(steps), made[steps]) for steps in (0, 3))
    assert all(torch.equal(weight, solved[name]) for name, weight in found.items())


def test_training_that_does_not_help_changes_nothing(checkpoint_of, tmp_path, monkeypatch):
    source = checkpoint_of("llama")
    plain = prune(source, tmp_path / "plain", 0.5, format="dense", method="sparsegpt", text=TEXT)
    expected = weights_of(tmp_path / "plain", plain)
    step = MaskedAdamW.step

    def spoil(self):
        step(self)
        for parameter in self.parameters.values():
            parameter.data.mul_(3.0)

    monkeypatch.setattr(MaskedAdamW, "step", spoil)
    manifest = prune(source, tmp_path / "out", 0.5, format="dense", method="sparsegpt", refit=2, text=TEXT)
    assert all(layer["error_after"] > layer["error_before"] for layer in manifest["calibration"]["refitted"])
    for name, weight in weights_of(tmp_path / "out", manifest).items():
        assert torch.equal(weight, expected[name]), name


def test_the_same_bytes_again_and_after_stops(checkpoint_of, tmp_path, monkeypatch):
    source = checkpoint_of("llama")
    recipe = Prune(0.5, method="admm", refit=2)
    states = killed_before_each_rename(
        lambda out: run_recipe(recipe, source, out, text=TEXT), tmp_path / "whole", monkeypatch
    )
    expected = digest(tmp_path / "whole")
    for step in range(1, len(states), 3):
        run_recipe(recipe, source, states[step], resume=True, text=TEXT)
        assert digest(states[step]) == expected


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_windows_that_run_together_are_pruned_as_those_apart(checkpoint_of, tmp_path, monkeypatch, family):
    """As a card runs them. Float32, so that what differs by rounding is little."""
    source, found = checkpoint_of(family, torch.float32), []
    for at_once in (0, 192):
        monkeypatch.setitem(layer_pruning._AT_ONCE, "cpu", at_once)
        monkeypatch.setitem(refitting.TOKENS, "cpu", at_once)
        folder = tmp_path / str(at_once)
        manifest = prune(source, folder, 0.5, format="dense", method="sparsegpt", refit=2, text=TEXT)
        found.append((weights_of(folder, manifest), manifest["calibration"]))
    (one, facts), (other, others) = found
    same = [float(((one[name] - other[name]).abs() < 1e-3 * one[name].abs().mean()).float().mean()) for name in one]
    assert min(same) > 0.97, same
    assert others["cost"]["kl"] == pytest.approx(facts["cost"]["kl"], rel=0.02)


class Alone(SimpleNamespace):
    def run(self, path, h):
        return self.module(h)


def test_windows_run_together_only_where_a_layer_gives_the_same():
    class Shifted(nn.Linear):
        def forward(self, h):  # what it adds was made for one window
            return super().forward(h) + torch.arange(len(h))[:, None, None]

    class One(nn.Linear):
        def forward(self, h):
            return super().forward(h.view(8, 4))[None]

    probe = torch.randn(1, 8, 4)
    assert windows.run_together(Alone(module=nn.Linear(4, 4)), "l", probe)
    assert not windows.run_together(Alone(module=Shifted(4, 4)), "l", probe)
    assert not windows.run_together(Alone(module=One(4, 4)), "l", probe)


def test_windows_of_one_length_go_together_as_many_as_fit():
    assert windows.together([8, 8, 8, 5, 30], 20) == [[0, 1], [2], [3], [4]]
    assert windows.together([8, 8], 0) == [[0], [1]] and windows.together([], 9) == []
    stream = [torch.randn(2, 8, 4), torch.randn(1, 5, 4)]
    assert [tuple(h.shape) for h in windows.apart(stream)] == [(1, 8, 4), (1, 8, 4), (1, 5, 4)]


def test_a_sinks_tokens_are_not_all_that_counts():
    """One token of the stream a thousand times the others: with roots what a layer adds for it counts a thousand times, not a million."""
    before = torch.randn(1, 64, 32)
    after = copy.deepcopy(before)
    after[0, 0] *= 1000
    sizes = layer_pruning._sizes(before, after)
    assert 300 < layer_pruning._massive([sizes, sizes], ALONE) < 3000
    roots = layer_pruning._roots(sizes)
    assert torch.equal(roots, torch.exp2(torch.log2(roots).round())) and 1 / 64 < float(roots[0]) < 1 / 16
    sizes = (after * roots[:, None]).square().mean(-1).sqrt().reshape(-1)
    assert float(sizes.median()) == pytest.approx(1, rel=0.4) and 16 < float(sizes[0]) < 64


@pytest.mark.parametrize(
    "words,message",
    [
        (("--method", "wanda", "--refit", 5, "--dataset", TEXT.dataset), "--refit trains what sparsegpt or admm left"),
        (("--refit", 5), "--refit trains what sparsegpt or admm left"),
        (("--method", "admm", "--refit", -1, "--dataset", TEXT.dataset), "--refit -1 is no number of steps"),
    ],
)
def test_requests_that_make_no_sense(checkpoint_of, tmp_path, cli, words, message):
    ran = cli("compress", "prune", checkpoint_of("llama"), "-o", tmp_path / "out", "--sparsity", 0.5, *words)
    assert ran.code == 2 and message in ran.err and ran.err.count("\n") == 2 and not (tmp_path / "out").exists()
