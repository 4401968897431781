"""Ranks that calibrate together: what two add up is what one sees, artifacts are as good, and whoever is stopped goes on."""

import contextlib
import math
import os
import shutil
import signal
import time
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.artifacts import few_words
from support.ranks import of_torchrun

import tilepress
from tilepress import KVCache, Observer, Prune, Quantize, Recover
from tilepress.compress.layers.groups import Group
from tilepress.compress.layers.moments import Moments
from tilepress.compress.quantize.inputs import Input, Settings
from tilepress.compress.quantize.observers import InputStats
from tilepress.compress.run.shared import check_seen
from tilepress.formats import UsageError
from tilepress.formats.checkpoint import read_manifest
from tilepress.formats.int8 import Int8Scheme
from tilepress.models.experts import SeparateExperts, count_of, counting_tokens, expert_tokens
from tilepress.ranks import ALONE, dealt
from tilepress.text import Text

TEXT = few_words(9, 64)
RECIPES = {
    "sparsegpt": Prune(0.3, method="sparsegpt", format="dense"),
    "refitted": Prune(0.3, method="sparsegpt", format="dense", refit=3),
    "wanda by a survey": Prune(0.5, method="wanda", allocation="auto", format="dense"),
    "static": Quantize(activations="tensor", smooth="auto", rounding="nearest"),
    "dynamic": Quantize(),
    "cache": KVCache(),
    "recovered": Recover(3, batch=4, prune=Prune(0.5, format="dense")),
    "recovered, models spread": Recover(3, batch=4, fsdp="always", prune=Prune(0.5, format="dense")),
    "recovered by blocks": Recover(3, batch=4, blocks=True, prune=Prune(0.5, format="dense")),
}
TWICE = (
    "sparsegpt",
    "refitted",
    "dynamic",
    "cache",
    "recovered, models spread",
    "recovered by blocks",
)  # made twice, to see that bytes are the same
# How far perplexity may be off. Which weights go, and what others make up for, hangs on the last bits of sums: one process with another
# number of threads is as far from itself (1.2 % of SparseGPT here). Block by block ranks see their windows in another order.
FAR = {"sparsegpt": 0.03, "refitted": 0.03, "dynamic": 0.01, "recovered by blocks": 0.01}


def made(source: str, group, output: str, recipe, text: Text, **options) -> None:
    tilepress.compress(source, output, recipe, dataset=text, device="cpu", ranks=group, **options)


def digest(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() for path in files}


def test_work_is_dealt_by_cost():
    assert dealt([5, 4, 3, 3, 3], 2) == [0, 1, 1, 0, 1]
    assert dealt([1.0] * 8, 4) == [0, 1, 2, 3, 0, 1, 2, 3] and dealt([], 3) == [] and dealt([2, 1], 1) == [0, 0]


def test_a_rank_by_itself_gets_back_what_it_gives():
    x = torch.randn(3, 4)
    for found in (ALONE.sum(x), ALONE.sum_for(x, 0), ALONE.largest(x), ALONE.share(x, 0), ALONE.tell(x)[0]):
        assert found is x
    assert ALONE.first(lambda: 7) == 7 and ALONE.mine("abc") == list("abc") and ALONE.gather(x).shape == (1, 3, 4)


def seen_by_ranks(windows: list[torch.Tensor], group) -> tuple:
    """Moments, statistics and an input's usual token of windows that are dealt to the ranks; what the second rank has of them."""
    mine = windows[group.rank :: group.size]
    moments, cross = Moments(16), Moments(16, cross=True)
    stats, empty = InputStats(24, 3), InputStats(24, 3)
    for i, x in enumerate(mine):
        moments.add(x, "x")
        cross.add(x, "x", x + 1)
        place = sum(map(len, windows[: i * group.size + group.rank]))
        stats.add(x, "x", lengths=[len(x)], beside=x[:, 0], places=[place])
    moments.reduce(group, 1)
    cross.reduce(group)
    stats.reduce(group, 1)
    empty.reduce(group, 0)
    assert empty.tokens == 0 and (group.rank == 1) == (moments._sum is not None)
    if group.rank == 1:
        return moments, cross, stats
    return None, cross, None


def test_statistics_of_two_ranks_are_those_of_one(two):
    windows = [torch.randn(7 + i, 16) * (1 + i) for i in range(5)]
    (_, first_cross, _), (moments, cross, stats) = two(seen_by_ranks, windows)
    whole, whole_cross, one = Moments(16), Moments(16, cross=True), InputStats(24, 3)
    for x in windows:
        whole.add(x, "x")
        whole_cross.add(x, "x", x + 1)
        one.add(x, "x", beside=x[:, 0])
    assert moments.tokens == whole.tokens == stats.tokens == one.tokens
    torch.testing.assert_close(moments.hessian(0.01), whole.hessian(0.01), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cross._difference, whole_cross._difference, rtol=1e-5, atol=1e-4)
    assert torch.equal(cross._sum, first_cross._sum)
    for what in ("low", "high", "histogram"):
        assert torch.equal(getattr(stats, what), getattr(one, what)), what
    assert sorted(stats.rows.tolist()) == sorted(one.rows.tolist())  # the very same rows are sampled
    assert torch.equal(stats.beside, stats.rows[:, 0])


@pytest.fixture(scope="module")
def of_one(tiny, tmp_path_factory):
    """The artifacts of one process, each made once."""
    folder, done = tmp_path_factory.mktemp("one"), {}

    def make(name: str) -> Path:
        if name not in done:
            made(str(tiny), None, str(folder / name), RECIPES[name], TEXT)
            done[name] = folder / name
        return done[name]

    return make


def perplexity(folder: Path) -> float:
    return tilepress.perplexity(folder, TEXT.dataset, seqlen=128, limit=6, device="cpu").perplexity


@pytest.mark.thorough
@pytest.mark.parametrize("name", RECIPES)
def test_two_ranks_make_as_good_an_artifact_twice_the_same(name, two, of_one, tiny, tmp_path):
    for out in ("a", "b") if name in TWICE else ("a",):
        two(made, str(tiny), str(tmp_path / out), RECIPES[name], TEXT)
    if (tmp_path / "b").exists():
        assert digest(tmp_path / "a") == digest(tmp_path / "b")
    one, ours = read_manifest(of_one(name)), read_manifest(tmp_path / "a")
    assert one["fingerprint"] == ours["fingerprint"]
    for facts in ("calibration", "recovery"):
        assert ours.get(facts, {"ranks": 2})["ranks"] == 2 and "ranks" not in one.get(facts, {})
    if name == "static":
        ranges = [[item["range"] for item in found["calibration"]["inputs"]] for found in (ours, one)]
        assert torch.allclose(*map(torch.tensor, ranges), rtol=1e-4)
    assert perplexity(tmp_path / "a") == pytest.approx(perplexity(of_one(name)), rel=FAR.get(name, 1e-3))


def test_a_budget_is_spent_alike(two, checkpoint_of, tmp_path):
    source, recipe = str(checkpoint_of("llama")), KVCache(bits="auto", budget=6.0)
    two(made, source, str(tmp_path / "two"), recipe, TEXT)
    made(source, None, str(tmp_path / "one"), recipe, TEXT)
    one, ours = (read_manifest(tmp_path / out)["kv_cache"]["report"] for out in ("one", "two"))
    for layer, of_ours in zip(one, ours, strict=True):
        assert {key: of_ours[key] for key in ("key_format", "value_format")}.items() <= layer.items()
        assert of_ours["output_error"] == pytest.approx(layer["output_error"], rel=1e-3)


@pytest.mark.parametrize("name,family", [("sparsegpt", "mixtral"), ("static", "qwen3-moe")])
def test_experts_are_spread_and_their_tokens_counted(name, family, two, checkpoint_of, tmp_path):
    source, key = str(checkpoint_of(family)), {"sparsegpt": "pruned", "static": "inputs"}[name]
    two(made, source, str(tmp_path / "two"), RECIPES[name], TEXT)
    made(source, None, str(tmp_path / "one"), RECIPES[name], TEXT)
    facts = [read_manifest(tmp_path / out)["calibration"][key] for out in ("one", "two")]
    tokens = [{str(item.get("name", item.get("weights"))): item["tokens"] for item in found} for found in facts]
    experts = [what for what in tokens[0] if ".experts." in what]
    assert list(tokens[0]) == list(tokens[1]) and experts
    dense = [what for what in tokens[0] if what not in experts]
    assert all(tokens[0][what] == tokens[1][what] for what in dense)
    # A router may send a token to another expert where rounding makes two as likely, after layers that were pruned otherwise.
    for what in experts:
        assert tokens[1][what] == pytest.approx(tokens[0][what], abs=0.05 * 9 * 64)
    if name == "static":
        assert tokens[0] == tokens[1]
    two(made, source, str(tmp_path / "all"), replace(RECIPES[name], experts="all"), TEXT)
    shown = read_manifest(tmp_path / "all")["calibration"]
    told = {str(item.get("name", item.get("weights"))): item for item in shown[key]}
    assert {told[what]["tokens"] for what in experts} == {9 * 64}  # every token, seen once
    assert all("routed" not in told[what] for what in dense)
    for what in experts:
        near = tokens[1][what] if name == "static" else pytest.approx(tokens[1][what], abs=0.05 * 9 * 64)
        assert told[what]["routed"] == near
    layers = expert_tokens(shown)
    assert layers and all(sum(of_layer) == sum(next(iter(layers.values()))) for of_layer in layers.values())


def test_an_expert_that_sees_every_token_gives_what_it_gave():
    class Original(torch.nn.Module):
        num_experts, act_fn = 3, staticmethod(torch.nn.functional.silu)

    sizes = {"gate_proj": (8, 16), "up_proj": (8, 16), "down_proj": (16, 8)}
    experts = {str(i): {name: torch.nn.Linear(*size) for name, size in sizes.items()} for i in range(3)}
    module, seen = SeparateExperts(Original(), experts), []
    for linears in experts.values():
        linears["gate_proj"].register_forward_hook(lambda _, args, out: seen.append(len(args[0])))
    x, index, weights = torch.randn(10, 8), torch.tensor([[0, 1]] * 6 + [[1, 0]] * 4), torch.rand(10, 2)
    with counting_tokens({"e": module}, torch.device("cpu")) as counts:
        before = module(x, index, weights)
    assert (
        counts["e"].tolist() == [10, 10, 0] and count_of("e.2.up_proj", counts) == 0 and count_of("o", counts) is None
    )
    module.every_token = True
    torch.testing.assert_close(module(x, index, weights), before)
    assert seen == [10, 10, 10, 10, 10]  # the last five: also the expert that the router left out


def test_refusals_name_what_is_wrong(two, tiny, tmp_path):
    few = two(made, str(tiny), str(tmp_path / "few"), RECIPES["static"], few_words(1, 64))
    assert all(kind == "UsageError" and "1 windows for 2 ranks" in message for kind, message in few)
    for what, told in (("text", "text"), ("files", "files of the model"), ("versions", "versions of packages")):
        other = two(made_with_other, what, str(tmp_path / what), str(tiny), RECIPES["static"])
        assert all(kind == "UsageError" and "rank 1 has" in message and told in message for kind, message in other)
    apart = two(made_with_other, "disk", str(tmp_path / "disk"), str(tiny), RECIPES["static"])
    assert all(kind == "UsageError" and "rank 1 does not see" in message for kind, message in apart)
    steps = Recover(3, batch=1, prune=Prune(0.5))
    alone = two(made, str(tiny), str(tmp_path / "batch"), steps, TEXT)
    assert all(kind == "UsageError" and "1 windows" in message and "2 ranks" in message for kind, message in alone)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    there = two(made, str(tiny), str(tmp_path / "full"), RECIPES["static"], TEXT)
    assert all(kind == "UsageError" and "holds files" in message for kind, message in there)
    recovery = Recover(1, base=str(tiny))
    with pytest.raises(UsageError):  # ranks that do not speak to each other cannot train
        made(str(tiny), ALONE, str(tmp_path / "r"), recovery, TEXT, rank=0, world_size=2)


def made_with_other(what: str, group, output: str, source: str, recipe) -> None:
    """Have the second rank see something else."""
    other, text, patches = bool(group.rank), TEXT, []
    if what == "text" and other:
        text = Text(TEXT.dataset, 9, 64, seed=1)
    if what == "files" and other:
        source = shutil.copytree(source, f"{output}-copy/{Path(source).name}", copy_function=shutil.copy)
    if what == "versions" and other:
        patches.append(mock.patch("tilepress.compress.layers.walk.version", lambda name: "0.1"))
    if what == "disk":
        output = f"{output}-{group.rank}"
        patches.append(mock.patch("tilepress.compress.run.api.check_seen", partial(check_seen, patience_s=0.2)))
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        made(source, group, output, recipe, text)


def test_an_input_takes_what_is_usual_from_the_first_rank_that_saw_it():
    class Twice:  # a rank beside one that saw nothing yet
        size, rank, device = 2, 1, torch.device("cpu")

    settings = Settings(Int8Scheme(), Observer(), "learn", "gptq", 0.0, None)
    item = Input(Group(("l",), None), settings, torch.float32, 0)
    assert all(map(math.isnan, item.usual()))
    item.settle_usual(4.0, 2.0, Twice.device)
    assert item.usual() == [4.0, 2.0]
    item.settle_usual(math.nan, math.nan, Twice.device)
    assert item.usual() == [4.0, 2.0]


def start(command, words: list, size: int) -> list:
    return [command(*words, "--device", "cpu", env=env) for env in of_torchrun(size)]


def until(condition, running: list) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end and all(one.poll() is None for one in running), running[0].communicate()
        time.sleep(0.005)


@pytest.mark.parametrize("killed,again", [(1, 2), (0, 1)])
def test_a_rank_that_dies_ends_all_and_the_run_goes_on(command, of_one, tiny, tmp_path, killed, again):
    out, work = tmp_path / "out", tmp_path / "out" / ".tilepress"
    words = ["compress", "prune", tiny, "-o", out, "--method", "sparsegpt", "--sparsity", 0.3, "--format", "dense"]
    words += ["--dataset", TEXT.dataset, "--nsamples", 9, "--seqlen", 64, "-q"]
    running = start(command, words, 2)
    until(lambda: list(work.glob("calibration-*-0001.json")), running)
    os.kill(running[killed].pid, signal.SIGKILL)
    _, said = running[1 - killed].communicate()
    assert running[1 - killed].returncode == 1
    # Torch has its own words where the store went with the first rank; under torchrun its agent has the store.
    told = [line.split(":")[0] for line in said.splitlines() if line.startswith(("error:", "hint:"))]
    assert told == ["error", "hint"] and "error: a rank of this run has ended" in said
    layers = {path: path.stat().st_mtime_ns for path in work.glob("calibration-*-000[01].json")}
    assert len(layers) == 2
    running = start(command, [*words, "--resume"], again) if again > 1 else [command(*words, "--resume")]
    until(lambda: list(work.glob("calibration-*-0002.json")), running)
    assert all(path.stat().st_mtime_ns == at for path, at in layers.items())
    said = [one.communicate() for one in running]
    assert [one.returncode for one in running] == [0] * again, said
    assert all(not out_of for out_of, _ in said[1:]) and "zeros" in said[0][0]
    assert perplexity(out) == pytest.approx(perplexity(of_one("sparsegpt")), rel=FAR["sparsegpt"])


def test_one_rank_tells_why_all_of_them_end(command, tiny, tmp_path):
    words = ["compress", "quantize", tiny, "-o", tmp_path / "out", "--dataset", TEXT.dataset, "--seqlen", 64]
    environments = of_torchrun(2)
    running = [command(*words, "--nsamples", 8 + rank, env=env) for rank, env in enumerate(environments)]
    said = [one.communicate()[1] for one in running]
    assert [one.returncode for one in running] == [2, 2]
    told = [text for text in said if "error" in text]
    assert len(told) == 1 and "rank 1 has" in told[0] and len(told[0].splitlines()) == 2


def test_the_bytes_of_a_resumed_run_are_those_of_one_that_went_through(two, tiny, tmp_path, monkeypatch):
    made_whole = two(made, str(tiny), str(tmp_path / "whole"), RECIPES["sparsegpt"], TEXT)
    assert made_whole == [None, None]
    stopped = two(stopped_after_two_layers, str(tiny), str(tmp_path / "out"), RECIPES["sparsegpt"], TEXT)
    assert all(kind == "TilepressError" and "stopped" in message for kind, message in stopped)
    two(made, str(tiny), str(tmp_path / "out"), RECIPES["sparsegpt"], TEXT, resume=True)
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


def memory_of_spread(source: str, group) -> tuple[int, int, bool]:
    """A rank's parameters of a spread model, those of the whole model, and whether it computes the same."""
    from tilepress.compress.layers.layerwise import LayerByLayer
    from tilepress.compress.recover.sharded import Spread, own
    from tilepress.compress.run.targets import find_targets
    from tilepress.formats.checkpoint import Checkpoint

    checkpoint = Checkpoint(Path(source))
    targets, _ = find_targets(checkpoint, ())
    spread, whole = (
        Spread(group, on).load(LayerByLayer(checkpoint, targets, "cpu", torch.float32)) for on in (True, False)
    )
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        same = torch.equal(spread(ids).logits, whole(ids).logits)
    return sum(own(p).numel() for p in spread.parameters()), sum(p.numel() for p in whole.parameters()), same


def test_a_rank_keeps_its_part_of_a_spread_model(two, tiny):
    parts, wholes, same = zip(*two(memory_of_spread, str(tiny)), strict=True)
    assert all(same) and sum(parts) == wholes[0] and max(parts) < 0.51 * wholes[0]


@pytest.mark.parametrize("goes_on", ["two, spread", "two", "one"])
def test_training_of_spread_models_goes_on_with_any_ranks(goes_on, two, tiny, tmp_path):
    recipe = replace(RECIPES["recovered, models spread"], steps=12, save_every_s=0.0)
    source, out = str(tiny), str(tmp_path / "out")
    stopped = two(stopped_in_training, source, out, recipe, TEXT)
    assert all(kind == "TilepressError" and "stopped" in message for kind, message in stopped)
    assert (tmp_path / "out" / ".tilepress" / "training.safetensors").exists()
    if goes_on == "one":
        made(source, None, out, recipe, TEXT, resume=True)
    else:
        two(made, source, out, replace(recipe, fsdp="never") if goes_on == "two" else recipe, TEXT, resume=True)
    whole = str(tmp_path / "whole")
    two(made, source, whole, recipe, TEXT)
    if goes_on == "two, spread":
        assert digest(Path(out)) == digest(Path(whole))
    found = [read_manifest(folder)["recovery"]["losses"] for folder in (Path(out), Path(whole))]
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_spread_models_need_windows_for_all_ranks(two, tiny, tmp_path):
    recipe = replace(RECIPES["recovered, models spread"], batch=3)
    for kind, message in two(made, str(tiny), str(tmp_path / "out"), recipe, TEXT):
        assert kind == "UsageError" and "3 windows for 2 ranks" in message
    with pytest.raises(UsageError, match="--fsdp sometimes is unknown"):
        Recover(3, fsdp="sometimes")


def stopped_in_training(source: str, group, output: str, recipe, text: Text) -> None:
    from tilepress.compress.recover.distillation import MaskedAdamW
    from tilepress.formats import TilepressError

    step = MaskedAdamW.step

    def stop(self) -> None:
        if self.done == 11:
            raise TilepressError("stopped")
        step(self)

    with mock.patch.object(MaskedAdamW, "step", stop):
        made(source, group, output, recipe, text)


def stopped_after_two_layers(source: str, group, output: str, recipe, text: Text) -> None:
    from tilepress.compress.prune.layer_pruning import LayerPruner
    from tilepress.formats import TilepressError

    visit = LayerPruner.visit

    def stop(self, layer):
        if layer.number == 2:
            raise TilepressError("stopped")
        return visit(self, layer)

    with mock.patch.object(LayerPruner, "visit", stop):
        made(source, group, output, recipe, text)
