"""benchmarks/vllm_cache.py, as far as it needs no vLLM: what rows and answers are compared with, and which engines start together."""

import importlib.util
import json
from pathlib import Path

import pytest

from tilepress import demo

SCRIPTS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("vllm_cache", SCRIPTS / "vllm_cache.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer(tokens: list[int], logprob: float) -> dict:
    """Return an answer; token 0 is the second choice everywhere."""
    return {"tokens": tokens, "told": [{str(token): logprob, "0": -9.0} for token in tokens]}


def test_answers_are_compared_while_both_chose_the_same(script):
    """The token behind them is compared too, where both knew of it: here only what came second."""
    mine, theirs = (
        [answer([5, 6, 7], -1.0), answer([5, 8, 7], -1.0)],
        [answer([5, 6, 7], -1.5), answer([5, 6, 7], -5.0)],
    )
    found = script.differences(mine, theirs)
    assert found["largest"] == 4.0 and found["compared"] == 6 + 3
    assert found["mean"] == pytest.approx((3 * 0.5 + 4.0) / 9) and found["same_tokens"] == 4 / 6


def test_forms_are_compared_with_16_bits_of_the_same_weights(script):
    def timed(tpot: float, ttft: float) -> dict:
        rows = [{"batch": 1, "context": 2048, "tpot_ms": tpot}], [{"batch": 1, "context": 2048, "ttft_ms": ttft}]
        return {"answers": [answer([5], -tpot)], "decode": rows[0], "first": rows[1]}

    found = {"dense+bf16": timed(8.0, 40.0), "w8a8+bf16": timed(4.0, 20.0), "w8a8+tilepress-int4": timed(2.0, 80.0)}
    found["w8a8+tilepress-int4/eager"] = {"answers": [answer([5], -2.5)]}
    *_, decode, first = script.rows(found)
    assert (decode["weights"], decode["kv"]) == (first["weights"], first["kv"]) == ("w8a8", "tilepress-int4")
    assert (decode["over_same_weights_bf16_kv"], decode["over_dense_bf16"]) == (2.0, 4.0)
    assert (first["over_same_weights_bf16_kv"], first["over_dense_bf16"]) == (0.25, 0.5)
    gaps = {pair: gap["largest"] for pair, gap in script.compare(found).items()}
    assert gaps == {"w8a8+tilepress-int4 : w8a8+bf16": 2.0, "w8a8+tilepress-int4/eager : w8a8+tilepress-int4": 0.5}


def test_engines_start_together_as_far_as_the_card_has_room(script, tmp_path):
    names = ["dense+bf16", "dense+tilepress-int4", "dense+fp8", "dense+tilepress-int4/eager"]
    forms = [script.Form(name, demo.MODEL, tmp_path) for name in names]
    config, cases = json.loads((demo.MODEL / "config.json").read_text()), [(2, 1000)]
    of_16_bits = forms[0].cache_bytes(cases)
    token = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    assert 2 * (1000 + script.LONG) < of_16_bits / token < 3 * 2000 + 2000
    assert forms[2].cache_bytes(cases) == of_16_bits // 2
    needs = [form.needs(cases) for form in forms]
    found = script.waves(forms, cases, needs[0] + needs[1] + needs[2] - 1)
    assert [[form.name for form in wave] for wave in found] == [names[:2], names[2:]]
    assert forms[3].options == {"enforce_eager": True} and forms[2].options == {"kv_cache_dtype": "fp8"}
