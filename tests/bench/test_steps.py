"""What benchmarks time: steps behind a prompt, by the lean pass and by a model's own, and the shares of a step."""

import pytest
import torch

import tilepress
from tilepress.bench.steps import Case, OwnPass, pass_of, times_without_overlap
from tilepress.runtime.decode.batch import Batch

PROMPT = torch.tensor([5, 9, 2, 77, 130])


def test_kernels_that_wait_for_others_have_what_is_beyond_them():
    spans = [("gemm", 0, 10), ("norm", 7, 12), ("gemm", 11, 20), ("copy", 13, 15), ("norm", 25, 26)]
    assert times_without_overlap(spans) == {"gemm": 10 + 5, "norm": 2 + 1, "copy": 2}
    assert times_without_overlap([]) == {}


@pytest.mark.parametrize("family", ["llama", "gemma", "mistral"])
def test_every_sequence_goes_on_from_the_prompt(family, checkpoint_of):
    """Greedily, as the model's own passes over everything do, whichever pass is timed."""
    model = tilepress.load(checkpoint_of(family), dtype=torch.float32)
    case = Case(pass_of(model, 3, 40, "auto", 4), PROMPT, 3, 40)
    assert isinstance(case.timed, OwnPass if family == "gemma" else Batch)
    ids = PROMPT[None]
    with torch.inference_mode():
        for _ in range(4):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    for _ in range(2):  # the second time nothing is left of the first
        assert case.start() > 0
        found = [case.timed.tokens[:1].tolist()]
        for _ in range(3):
            logits = case.timed.step(3)
            found.append(case.timed.tokens.tolist())
            assert logits.shape == (3, 300) and logits.argmax(-1).tolist() == found[-1]
        assert found[0] == ids[0, 5:6].tolist() and found[1:] == [[token] * 3 for token in ids[0, 6:].tolist()]
        case.timed.clear()
    ttft, step = case.run(2)
    assert ttft > 0 and step > 0
    assert sum(part["share"] for part in case.shares_of_a_step()) == pytest.approx(1)
