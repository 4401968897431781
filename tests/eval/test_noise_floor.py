"""The noise floor: the dense model against itself in a wider float, computed here by transformers alone."""

import json
import math

import pytest
import torch
from support.artifacts import few_words, run_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

import tilepress
from tilepress import KVCache
from tilepress.formats import UsageError
from tilepress.runtime.half import fast_products


def by_hand(path, text, narrow, wide) -> tuple[float, float, float]:
    """Perplexity in the wider float, KL(narrow || wide) and the share of same top tokens, of two windows of 64 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    docs = [json.loads(line)["text"] for line in text.read_text().splitlines()]
    ids = torch.tensor(tokenizer("\n\n".join(docs))["input_ids"][:128]).view(2, 64)
    logp = []
    for dtype in (narrow, wide):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        with torch.inference_mode(), fast_products(dtype, "cpu"):  # this noise is that of one way to add
            found = [model(window[None]).logits[0, :-1].float().double() for window in ids]
        logp.append(torch.log_softmax(torch.cat(found), -1))
    p, q = logp
    nll = -q.gather(1, ids[:, 1:].reshape(-1, 1)).mean()
    return math.exp(nll), float((p.exp() * (p - q)).sum(1).mean()), float((p.argmax(1) == q.argmax(1)).double().mean())


@pytest.mark.parametrize(
    ("dtype", "narrow", "wide"),
    [("auto", torch.bfloat16, torch.float32), ("float32", torch.float32, torch.float64)],
    ids=["bfloat16", "float32"],
)
def test_the_dense_model_in_a_wider_float(tiny, text, dtype, narrow, wide):
    found = tilepress.perplexity(tiny, text, seqlen=64, limit=2, noise_floor=True, device="cpu", dtype=dtype).to_json()
    perplexity, kl, same = by_hand(tiny, text, narrow, wide)
    floor = found["noise_floor"]
    assert (floor["of"], floor["dtype"]) == ("model", str(wide).removeprefix("torch."))
    assert floor["perplexity"] == pytest.approx(perplexity, rel=1e-5)
    assert floor["top1_agreement"] == pytest.approx(same)
    assert floor["kl_divergence"]["mean"] == pytest.approx(kl, rel=1e-2, abs=1e-6)
    if narrow == torch.bfloat16:
        assert 1e-6 < floor["kl_divergence"]["mean"] < 0.01
    assert floor["delta_nll"] == pytest.approx(math.log(perplexity) - found["nll"], abs=1e-5)


def test_that_of_the_base_beside_an_artifact(tiny, artifact, text, cli):
    words = ("eval", "perplexity", artifact, "--base", tiny, "--dataset", text, "--seqlen", 64, "--limit", 2)
    found = cli(*words, "--noise-floor", "--json", "--device", "cpu").json
    alone = tilepress.perplexity(tiny, text, seqlen=64, limit=2, noise_floor=True, device="cpu").to_json()
    assert found["noise_floor"] == alone["noise_floor"] | {"of": "base"}
    assert found["noise_floor"]["kl_divergence"]["mean"] < found["kl_divergence"]["mean"]
    plain = cli(*words, "--json", "--device", "cpu").json
    assert "noise_floor" not in plain and plain["kl_divergence"] == found["kl_divergence"]


def test_the_table_has_a_row_of_it(tiny, text, cli):
    ran = cli("eval", "perplexity", tiny, "--dataset", text, "--seqlen", 64, "--limit", 1, "--noise-floor")
    assert ran.code == 0 and "noise floor: model in float32" in ran.out and "KL divergence" in ran.out


def test_only_a_dense_model_has_one(tiny, artifact, text, tmp_path):
    run_recipe(KVCache(), tiny, tmp_path / "kv", text=few_words(2, 64))
    for model, base in ((artifact, None), (tmp_path / "kv", None), (tiny, artifact)):
        with pytest.raises(UsageError, match="that of a dense model") as raised:
            tilepress.perplexity(model, text, base=base, noise_floor=True, seqlen=64, limit=1)
        assert "--base" in raised.value.hint
    found = tilepress.perplexity(tmp_path / "kv", text, base=tiny, noise_floor=True, seqlen=64, limit=1, device="cpu")
    assert found.noise_floor.of == "base"
