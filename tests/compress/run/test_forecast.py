"""What a dry run says of time: from a piece of the model that went through the writer, and nothing of it stays."""

import math

import pytest
from support.artifacts import few_words, prune

import tilepress
from tilepress import Convert, Prune, Quantize
from tilepress.compress.run import forecast


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_time_follows_from_rates_and_sizes(checkpoint_of, tmp_path, cli, family):
    words = ("compress", "quantize", checkpoint_of(family), "-o", tmp_path / "out", "--workers", "3", "--dry-run")
    facts = cli(*words, "--json").json
    told, elements = facts["forecast"], sum(layer["rows"] * layer["cols"] for layer in facts["layers"])
    seconds = facts["source_bytes"] / told["read_bytes_s"] + elements / told["elements_s"]
    seconds += facts["disk_bytes"] / told["write_bytes_s"]
    assert told["seconds"] == pytest.approx(seconds, rel=0.05, abs=0.01) and seconds > 0
    part = math.ceil(facts["shards"] / 3) / facts["shards"]
    assert told["seconds_per_worker"] == pytest.approx(seconds * part, rel=0.05, abs=0.01)
    assert told["workers_for_an_hour"] == 1 and told["workers"] == 3
    assert list(tmp_path.iterdir()) == []
    text = cli(*words).out
    assert "for each of 3 workers" in text and "1 worker ends within an hour" in text


def test_slow_machines_need_more_workers(checkpoint_of, tmp_path, monkeypatch):
    """A machine that takes so many seconds for each piece: an hour holds 3 shards, 1, and none."""
    run = tilepress.plan(checkpoint_of("llama"), tmp_path / "out", Quantize())
    shards = len(run.plan.shards)
    elements = sum(target.elements for target in run.plan.targets)

    def takes(seconds_per_shard):
        def writes(plan, device):
            (plan.output / plan.shards[0].output).write_bytes(bytes(1000))
            return {"quantize": seconds_per_shard * shards * plan.targets[0].elements / elements, "write": 1e-9}

        monkeypatch.setattr(forecast, "run_shards", writes)
        return run.forecast("cpu")["workers_for_an_hour"]

    assert [takes(seconds) for seconds in (1000, 3000, 3700)] == [math.ceil(shards / 3), shards, None]


def test_what_looks_twice_or_is_packed_is_not_foreseen(checkpoint_of, tmp_path):
    source = checkpoint_of("llama")
    for recipe, text in ((Prune(0.5, "global"), None), (Quantize(activations="tensor"), few_words(2, 32))):
        assert tilepress.plan(source, tmp_path / "out", recipe, dataset=text).forecast("cpu") is None
    prune(source, tmp_path / "packed")
    assert tilepress.plan(tmp_path / "packed", tmp_path / "out", Convert("dense")).forecast("cpu") is None
    assert tilepress.plan(source, tmp_path / "out", Prune(0.5)).forecast("cpu")["seconds"] > 0
