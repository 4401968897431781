"""Stages, which say where the time goes, against a clock that the test moves, and in what the commands print; on a card, how long large weights take."""

import time

import pytest
import torch
from support.artifacts import run_recipe
from torch.utils._python_dispatch import TorchDispatchMode

from tilepress import Prune
from tilepress.compress.prune import magnitude
from tilepress.compress.run import stages as timing
from tilepress.compress.run.stages import Stages, add
from tilepress.formats import int8, stripes, tiled_bitmap, tiled_csl


def test_a_stage_within_another_is_not_counted_twice(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def takes(seconds: float) -> float:
        now[0] += seconds
        return seconds

    stages = Stages("cpu")
    takes(100)
    with stages.of("write"):
        takes(1)
        for seconds in stages.each("pack", (takes(2) for _ in range(3))):
            assert seconds == 2
            takes(10)
        with pytest.raises(ValueError), stages.of("read"):
            takes(5)
            raise ValueError
        takes(0.5)
    takes(100)
    assert stages.seconds == {"write": 31.5, "pack": 6.0, "read": 5.0}
    add(stages.seconds, {"pack": 1.0, "hash": 2.0})
    assert stages.seconds == {"write": 31.5, "pack": 7.0, "read": 5.0, "hash": 2.0}


def test_the_command_tells_its_stages(cli, checkpoint_of, tmp_path, quick_workers):
    words = [checkpoint_of("llama"), "--sparsity", 0.6, "-q"]
    for workers in (1, 2):
        ran = cli("compress", "prune", *words, "--workers", workers, "-o", tmp_path / str(workers), "--json")
        assert ran.code == 0 and set(ran.json["stages"]) == {
            f"{s}_s" for s in ("prepare", "read", "prune", "pack", "write")
        }
        assert all(seconds >= 0 for seconds in ran.json["stages"].values())
    assert "prune" in cli("compress", "prune", *words, "-o", tmp_path / "two").out.splitlines()[-1]
    ran = cli("compress", "quantize", *words[:1], "-q", "-o", tmp_path / "three", "--json")
    assert {"read_s", "quantize_s", "pack_s", "write_s"} <= set(ran.json["stages"])


class Counter(TorchDispatchMode):
    """How many operations of torch run."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def compressions(weight: torch.Tensor) -> dict:
    """What is timed on a card, by name."""
    pruned, _ = magnitude.prune(weight, magnitude.layer_threshold(weight, round(0.6 * weight.numel()), "w"))
    return {
        "prune": lambda: magnitude.prune(weight, magnitude.layer_threshold(weight, round(0.6 * weight.numel()), "w")),
        "tiled-csl": lambda: tiled_csl.pack(pruned),
        "tiled-bitmap": lambda: tiled_bitmap.pack(pruned, 1),
        "int8": lambda: int8.quantize(weight, int8.weight_scale(weight, "channel", torch.bfloat16)),
    }


@pytest.mark.parametrize("what", ["prune", "tiled-csl", "tiled-bitmap", "int8"])
def test_operations_do_not_grow_with_the_tiles(what):
    """No loop over tiles, rows or items: only the halvings of a search over a tile's steps, which more tiles may make one longer."""
    counts = []
    for rows in (128, 1024):
        weight = torch.randn(rows, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
        compress = compressions(weight)[what]
        with Counter() as counter:
            compress()
        counts.append(counter.count)
    assert counts[0] <= counts[1] <= 1.1 * counts[0] < 2000


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["prune", "tiled-csl", "tiled-bitmap", "int8"])
def test_large_weights_take_no_time_on_a_card(what):
    weight = torch.randn(4096, 14336, device="cuda").bfloat16()
    compress = compressions(weight)[what]
    compress()
    torch.cuda.synchronize()
    started = time.perf_counter()
    compress()
    torch.cuda.synchronize()
    assert time.perf_counter() - started < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1000, 40000])  # one piece on a card, and several
def test_a_card_packs_the_same_bytes(rows):
    weight = torch.randn(rows, 1100, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert rows * 1100 > stripes._ON_A_CARD or rows == 1000
    for what in ("prune", "tiled-csl", "tiled-bitmap", "int8"):
        here, there = (compressions(weight.to(device))[what]() for device in ("cpu", "cuda"))
        if what == "prune":
            assert torch.equal(here[0], there[0].cpu()) and here[1].zeros == there[1].zeros
        elif what == "int8":
            assert torch.equal(here, there.cpu())
        else:
            assert torch.equal(here.words, there.words.cpu()) and torch.equal(here.offsets, there.offsets.cpu())


@pytest.mark.gpu
def test_an_artifact_made_on_a_card_has_the_same_bytes(checkpoint_of, tmp_path):
    source = checkpoint_of("llama")
    for form in ("tiled-csl", "tiled-bitmap"):
        recipe = Prune(0.6, format=form)
        here = run_recipe(recipe, source, tmp_path / f"{form}-cpu")
        there = run_recipe(recipe, source, tmp_path / f"{form}-cuda", "cuda")
        shards = [[f for f in made["files"] if f["name"].endswith(".safetensors")] for made in (here, there)]
        assert shards[0] == shards[1]
