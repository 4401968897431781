"""A walk with a made-up visitor: what it hands on from layer to layer, and what a stopped one finds again."""

import pickle
from dataclasses import replace

import pytest
import torch
from support.artifacts import few_words

from tilepress import Prune
from tilepress.compress.layers import walk
from tilepress.compress.layers.walk import HIDDEN, Found, Visitor, Walk
from tilepress.compress.run.output import open_output
from tilepress.compress.run.plan import Inputs, make_plan
from tilepress.formats import TilepressError, UsageError
from tilepress.formats.checkpoint import Checkpoint
from tilepress.runtime.loader import load

LAYERS = 4


class Sums(Visitor):
    """Notes the sum of what each layer gets; a second stream is that of the same model. Stops before a layer if told to."""

    dtype = torch.float32

    def __init__(self, keeps_streams: bool, stop: int | None = None):
        self.keeps_streams, self.stop, self.calls = keeps_streams, stop, []

    def start(self, model, windows, streams):
        streams["twice"] = [2 * h for h in streams[HIDDEN]]

    def visit(self, layer):
        if layer.number == self.stop:
            raise KeyboardInterrupt
        self.calls.append(f"visit {layer.number}")
        layer.scratch.write_bytes(b"half of it")
        sums = {stream: [float(h.double().sum()) for h in windows] for stream, windows in layer.streams.items()}
        tensors = {f"first.{layer.number}": layer.hidden[0]}
        with layer.model.loaded(layer.path):
            for stream in layer.streams:
                layer.advance(stream)
        return {"sums": [sums]}, tensors

    def skip(self, layer, tensors):
        assert torch.equal(tensors[f"first.{layer.number}"], layer.hidden[0])
        self.calls.append(f"skip {layer.number}")
        super().skip(layer, tensors)

    def finish(self, facts, streams):
        return facts | {"streams": sorted(streams)}


@pytest.fixture
def plan_of(checkpoint_of, tmp_path):
    def make(name: str):
        source = Checkpoint(checkpoint_of("llama", torch.float32, num_hidden_layers=LAYERS))
        plan = make_plan(Inputs(source, few_words(3, 32)), tmp_path / name, Prune(0.5, method="wanda", format="dense"))
        open_output(plan, resume=False, overwrite=False)
        return plan

    return make


def walked(plan, visitor: Sums) -> Found:
    seen = []
    found = Walk.over_text(plan, "sums", visitor, "cpu", lambda what, units: seen.append(units)).run()
    assert not visitor.calls or sum(seen) == sum(target.elements for target in plan.targets)
    return found


def test_layers_get_what_the_whole_model_gives_them(plan_of):
    plan = plan_of("whole")
    found = pickle.loads(pickle.dumps(walked(plan, Sums(False))))
    model = load(plan.source, dtype=torch.float32)
    windows = plan.text.windows(walk.load_tokenizer(plan.source))
    with torch.no_grad():
        states = [model(torch.tensor(window)[None], output_hidden_states=True).hidden_states for window in windows]
    assert found.facts["streams"] == ["hidden", "twice"] and found.facts["windows"] == 3
    for number, sums in enumerate(found.facts["sums"]):
        torch.testing.assert_close(found.get(f"first.{number}"), states[0][number], rtol=1e-4, atol=1e-5)
        expected = [float(window[number].double().sum()) for window in states]
        assert sums[HIDDEN] == pytest.approx(expected, rel=1e-3, abs=1e-3)
    assert found.get("first.9") is None and not list(plan.work.glob("unfinished*"))


@pytest.mark.parametrize("stop", range(LAYERS))
@pytest.mark.parametrize("kept", ["nothing", "streams", "no streams in time"])
def test_a_stopped_walk_goes_on(plan_of, monkeypatch, kept, stop):
    keeps = kept != "nothing"
    monkeypatch.setattr(walk, "KEEP_EVERY_S", 0.0 if kept == "streams" else 60.0)
    whole, plan = walked(plan_of("whole"), Sums(keeps)), plan_of("stopped")
    with pytest.raises(KeyboardInterrupt):
        walked(plan, Sums(keeps, stop))
    again = Sums(keeps)
    found = walked(plan, again)
    visits = [f"visit {n}" for n in range(0 if kept == "no streams in time" else stop, LAYERS)]
    # The last layer's inputs are needed, its neighbours' outputs are not.
    skips = [] if keeps else [f"skip {n}" for n in range(stop)]
    assert again.calls == skips + visits
    assert found.facts == whole.facts
    for number in range(LAYERS):
        assert torch.equal(found.get(f"first.{number}"), whole.get(f"first.{number}"))
    finished = Sums(keeps)
    assert walked(plan, finished).facts == whole.facts and finished.calls == []
    assert not list(plan.work.glob("*streams*"))


def test_a_finished_walk_of_something_else_is_refused_and_a_half_one_not_used(plan_of):
    plan = plan_of("out")
    with pytest.raises(KeyboardInterrupt):
        walked(plan, Sums(False, stop=2))
    other = Sums(False)
    walked(replace(plan, text=few_words(4, 32)), other)
    assert other.calls == [f"visit {n}" for n in range(LAYERS)]
    with pytest.raises(UsageError, match="have changed since"):
        walked(plan, Sums(False))


def test_a_target_that_does_not_run_is_named(plan_of, monkeypatch):
    class Groups(Sums):
        def visit(self, layer):
            with layer.model.loaded(layer.path) as module:
                return {"groups": [len(layer.groups(module))]}, {}

    plan, find = plan_of("out"), walk.find_groups
    assert walked(plan, Groups(True)).facts["groups"] == [4] * LAYERS
    monkeypatch.setattr(walk, "find_groups", lambda *rest: find(*rest)[:-1])
    with pytest.raises(TilepressError, match=r"does not run model.layers.0.mlp.down_proj"):
        walked(plan_of("other"), Groups(True))
