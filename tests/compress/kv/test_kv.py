"""`compress kv`: what it costs, what the sidecar says, stacking, bad input."""

import json
import os
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.artifacts import few_words, prune, quantize, run_recipe, with_cache
from support.families import byte_tokenizer
from support.interruption import digest, killed_before_each_rename, stop_anywhere_and_resume
from support.outliers import add_key_outliers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

import tilepress
from tilepress import KVCache, demo
from tilepress.cli.kv import kv_text
from tilepress.compress.kv import calibration, search as kv_search
from tilepress.compress.kv.attention import AttentionShape, LayerSeen, Sample, attention_shape, by_pairs
from tilepress.eval.perplexity import Protocol, measure
from tilepress.eval.verify import verify
from tilepress.formats import TilepressError, UsageError, kv_calibration
from tilepress.formats.checkpoint import Checkpoint
from tilepress.formats.kv_calibration import uncalibrated
from tilepress.formats.kv_int4 import KVFormat, fake_quantize
from tilepress.models.attention import Scores
from tilepress.runtime.hf import paged_cache as kv_cache

CLIPS = kv_search.CLIPS[False]
FAMILIES = ["llama", "qwen2", "qwen3", "gpt2-64", "opt", "mixtral", "phi3-partial", "mistral", "gemma2", "gpt-oss"]


def calibrate(source, output, text=None, **settings):
    return run_recipe(KVCache(**settings), source, output, text=text or few_words(4, 64))


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory, checkpoint_of):
    """An artifact to copy."""
    path = tmp_path_factory.mktemp("calibrated") / "out"
    calibrate(checkpoint_of("llama"), path)
    return path


def divergence_from(base, model, text, kv="sim", limit=3):
    dense = tilepress.load(base, dtype=torch.float32, kv=False)
    scores = measure(
        model, AutoTokenizer.from_pretrained(base), Protocol(str(text), "gptq", 512, None, limit), dense, kv=kv
    ).to_json()
    return scores["kl_divergence"]["mean"], scores["perplexity"] / scores["base"]["perplexity"] - 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    "settings,form,most",
    [
        ({}, KVFormat(64), 0.02),
        ({"group_size": 32}, KVFormat(64, 4, 32), 0.015),
        ({"bits": 8, "mode": "static"}, None, 0.002),
        ({"bits": 8}, None, 0.001),
    ],
)
def test_what_it_costs(tiny, tmp_path, halves, settings, form, most):
    """4 bits: at most 0.6 of the divergence that uncalibrated rows have."""
    text, held_out = halves
    calibrate(tiny, tmp_path / "out", replace(text, nsamples=24), **settings)
    found, increase = divergence_from(tiny, tilepress.load(tmp_path / "out", dtype=torch.float32), held_out)
    assert increase < most
    if form is not None:
        assert found < 0.6 * divergence_from(tiny, with_cache(tiny, form), held_out)[0]


@pytest.mark.thorough
def test_key_outliers_ruin_plain_rows_and_calibration_mends_them(tiny, tmp_path, halves):
    text, held_out = halves
    source = add_key_outliers(tiny, tmp_path / "outliers")
    ids = torch.arange(100)[None] + 50
    with torch.no_grad():
        plain, moved = (tilepress.load(p, dtype=torch.float32)(ids).logits for p in (tiny, source))
    torch.testing.assert_close(plain, moved, rtol=1e-4, atol=1e-3)
    assert divergence_from(source, with_cache(source, KVFormat(64)), held_out, limit=3)[1] > 5
    calibrate(source, tmp_path / "out", text)
    assert divergence_from(source, tilepress.load(tmp_path / "out", dtype=torch.float32), held_out, limit=3)[1] < 0.03


def test_static_ranges_hold_beyond_the_calibrated_positions(tiny, tmp_path, halves):
    """RoPE turns keys on and on: ranges from windows of 64 tokens serve windows of 512."""
    text, held_out = halves
    calibrate(tiny, tmp_path / "out", few_words(64, 64, text.dataset), bits=8, mode="static")
    assert divergence_from(tiny, tilepress.load(tmp_path / "out", dtype=torch.float32), held_out)[1] < 0.003


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", [{}, {"bits": 8, "mode": "static"}], ids=str)
def test_every_family(checkpoint_of, tmp_path, family, settings):
    source = checkpoint_of(family)
    manifest = calibrate(source, tmp_path / "out", **settings)
    assert [f for check in verify(tmp_path / "out", source).checks for f in check.findings] == []
    told, shape = manifest["kv_cache"], attention_shape(Checkpoint(source))
    assert len(told["report"]) == shape.layers == 2
    assert told["bytes_per_token_bfloat16"] == 2 * 2 * shape.kv_heads * shape.head_dim * 2
    assert told["bytes_per_token"] == 2 * 2 * shape.kv_heads * (
        shape.head_dim // 2 + 4 if not settings else shape.head_dim
    )
    for layer in told["report"]:
        assert 0 < layer["key_error"] < 0.2 and 0 < layer["value_error"] < 0.2 and 0 < layer["output_error"] < 0.25
        assert ("key_overflow" in layer) == bool(settings)
        assert len(layer["head_errors"]) == shape.kv_heads and min(layer["head_errors"]) > 0
    ids = torch.tensor([few_words(1, 40).windows(byte_tokenizer())[0]])
    model = tilepress.load(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        exact = tilepress.load(source, dtype=torch.float32)(ids, use_cache=False).logits
        found = model(ids).logits
    # A norm behind the attention divides its errors by what the layer adds, too.
    assert 0 < float((found - exact).norm() / exact.norm()) < (0.15 if family == "gemma2" else 0.1)


def test_statistics_are_those_of_the_model(checkpoint_of, tmp_path):
    """Means of keys after RoPE and of values, against the stock cache of the whole model."""
    source, text = checkpoint_of("llama", torch.float32), few_words(4, 64)
    calibrate(source, tmp_path / "out", text, rotation="none", bits=8)
    found = kv_calibration.load(Checkpoint(tmp_path / "out"))
    model, keys, values = AutoModelForCausalLM.from_pretrained(source), [], []
    for window in text.windows(AutoTokenizer.from_pretrained(source)):
        with torch.no_grad():
            cache = model(torch.tensor([window])).past_key_values
        keys.append([layer.keys[0] for layer in cache.layers])
        values.append([layer.values[0] for layer in cache.layers])
    for number, sides in enumerate(layer.sides for layer in found.layers):
        for side, parts in zip(sides, (keys, values), strict=True):
            seen = torch.cat([layers[number] for layers in parts], 1)
            torch.testing.assert_close(side.channels[0], seen.mean(1), rtol=1e-4, atol=1e-5)
            y = (seen - side.channels[0][:, None]) / side.channels[1][:, None]
            assert float(y.square().mean()) == pytest.approx(1.0, rel=1e-3)
        key_scale = sides[0].channels[1]
        torch.testing.assert_close(key_scale[:, :16], key_scale[:, 16:])  # pairs that RoPE rotates


def test_pairs():
    x = torch.arange(8.0)
    half_apart, neighbours = (AttentionShape(1, 1, 1, 8, interleaved, 6) for interleaved in (False, True))
    assert by_pairs(x, half_apart, torch.amax).tolist() == [3, 4, 5, 3, 4, 5, 6, 7]
    assert by_pairs(x, neighbours, torch.amax).tolist() == [1, 1, 3, 3, 5, 5, 6, 7]
    assert by_pairs(x, half_apart, torch.sum).tolist() == [3, 5, 7, 3, 5, 7, 6, 7]


@pytest.mark.parametrize(
    "family,changes,dim",
    [
        ("llama", {}, 32),
        ("gpt2-64", {}, 0),
        ("stablelm", {}, 8),
        ("cohere", {}, 32),
        ("llama", {"head_dim": 64}, 64),
        ("gpt-oss", {}, 32),
    ],
)
def test_what_rope_turns_is_what_the_model_turns(checkpoint_of, tmp_path, family, changes, dim):
    """Partial rotation by the class's default, none at all, and a config that does not say it has RoPE."""
    source = tmp_path / "source"
    shutil.copytree(checkpoint_of(family, **changes), source)
    config = json.loads((source / "config.json").read_text())
    silent = {k: v for k, v in config.items() if k not in ("rope_parameters", "rope_theta", "partial_rotary_factor")}
    (source / "config.json").write_text(json.dumps(silent))
    calibrate(source, tmp_path / "out")
    facts = kv_calibration.read_facts(tmp_path / "out")
    assert facts["rotary_dim"] == dim and facts["rope_pairs"] == (
        "neighbours" if family == "cohere" else "halves" if dim else "none"
    )


def test_the_searchs_attention_is_the_models(checkpoint_of):
    """Causal, grouped, scaled as the model scales: against torch's own; with soft caps and sinks against transformers' eager attention."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 20, 32, generator=generator) for heads in (6, 2, 2))
    seen = LayerSeen("layer", AttentionShape(1, 6, 2, 32))
    seen.add(query, key, value, 0.3, keep=True)
    found = kv_search.attend(seen.samples[0], seen)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.3, enable_gqa=True
    )
    scores = (query @ key.repeat_interleave(3, 1).mT * 0.3).masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf)
    share = float(scores.softmax(-1)[..., 0].mean())
    assert kv_search.Search(seen).first_attention == pytest.approx(share, rel=1e-4)
    torch.testing.assert_close(found.flatten(0, 2)[:, :20], expected[0][:, seen.samples[0].positions[0]])
    sinks, mask = (
        torch.randn(6, generator=generator),
        torch.zeros(20, 20).masked_fill(torch.ones(20, 20).triu(1).bool(), -1e9),
    )
    module = SimpleNamespace(num_key_value_groups=3, training=False, sinks=sinks)
    given = module, query, key, value, mask[None, None]
    for scores, eager in (
        (Scores(softcap=0.7), modeling_gemma2.eager_attention_forward(*given, scaling=0.3, softcap=0.7)),
        (Scores(sinks=sinks), modeling_gpt_oss.eager_attention_forward(*given, scaling=0.3)),
    ):
        seen.scores = scores
        found = kv_search.attend(seen.samples[0], seen).flatten(0, 2)
        torch.testing.assert_close(found, eager[0][0].transpose(0, 1)[:, seen.samples[0].positions[0]])


def test_the_grid_is_searched_by_the_outputs_error():
    """Keys that differ in size by channel: no clip, and alpha for each head, of the grid gives keys or values a smaller output error."""
    generator = torch.Generator().manual_seed(0)
    size = torch.logspace(-1, 1, 32)
    query, key, value = (torch.randn(1, heads, 100, 32, generator=generator) for heads in (4, 2, 2))
    seen = LayerSeen("layer", AttentionShape(1, 4, 2, 32, False, 32))
    seen.add(query / size, key * size, value * size.flip(0), 0.1, keep=True)
    form, sample = KVFormat(32), seen.samples[0]
    exact = kv_search.attend(sample, seen)

    def errors(sides: dict) -> torch.Tensor:
        """Squared errors of the two heads."""
        back = {
            what: fake_quantize(getattr(sample, what).transpose(1, 2), form, *side, False, form.refits).transpose(1, 2)
            for what, side in sides.items()
        }
        return (kv_search.attend(Sample(*sample)._replace(**back), seen) - exact)[0].square().sum((1, 2, 3))

    chosen = kv_search.choose(kv_search.Search(seen, feeds_back=False), form, False)[:2]
    for what, side in zip(("key", "value"), (each.side for each in chosen), strict=True):
        plain = {
            (alpha, clip): kv_search.plain_side(seen, what, form, alpha, clip)
            for alpha in kv_search.ALPHAS
            for clip in CLIPS
        }
        first = getattr(sample, what)[0, :, 0]
        moved = [kv_search.on_grid(first, form, side, False) for (_, clip), side in plain.items() if clip == 1]
        others = {clip: [errors({what: plain[alpha, clip]}) for alpha in kv_search.ALPHAS] for clip in CLIPS}
        others[1.0] += [errors({what: side}) for side in moved]
        least = min(float(sum(min(head) for head in zip(*each, strict=True))) for each in others.values())
        assert float(errors({what: side}).sum()) == pytest.approx(least, rel=1e-4)
        assert max(float(each.sum()) for each in others[1.0]) > 1.6 * least


def _with_a_sink(scale: float = 3.0, dim: int = 32, tokens: int = 100) -> LayerSeen:
    """A layer with two windows in which most attention goes to the first token, whose key and value are always the same."""
    generator = torch.Generator().manual_seed(0)
    seen = LayerSeen("layer", AttentionShape(1, 4, 2, dim, False, dim))
    sink = torch.randn(2, 1, 2, 1, dim, generator=generator)
    for _ in range(2):
        query, key, value = (torch.randn(1, heads, tokens, dim, generator=generator) for heads in (4, 2, 2))
        key[:, :, :1], value[:, :, :1] = sink[0], 0.3 * sink[1]
        query += scale * sink[0].repeat_interleave(2, 1)
        seen.add(query, key, value, 0.2, keep=True)
    return seen


def test_queries_in_a_sliding_window_see_no_further():
    seen = _with_a_sink()
    seen.scores = Scores(window=9)
    for sample, given in zip(seen.samples, kv_search.Search(seen).weights, strict=True):
        for row, position in enumerate(sample.positions[0].tolist()):
            weight = given[0, :, :, row]
            assert bool((weight[..., max(0, position - 8) : position + 1] > 0).all())
            assert float(weight.sum(-1).min()) == pytest.approx(1, abs=1e-4)
            assert not bool(weight[..., : max(0, position - 8)].any() or weight[..., position + 1 :].any())


def _attention(sample: Sample, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return torch's attention of the sample's queries: [windows, KV heads, queries, D]."""
    seen = torch.arange(key.shape[2]) <= sample.positions[:, None, None, :, None]
    seen = seen.expand(*sample.query.shape[:-1], -1).flatten(2, 3)
    return torch.nn.functional.scaled_dot_product_attention(sample.query.flatten(2, 3), key, value, seen, scale=0.2)


def test_windows_together_are_searched_as_one_by_one():
    """Those of a length side by side, as a card has them; another length by itself."""
    seen, generator = _with_a_sink(), torch.Generator().manual_seed(1)
    seen.add(*(torch.randn(1, heads, 70, 32, generator=generator) for heads in (4, 2, 2)), 0.2, keep=True)
    alone, together = kv_search.Search(seen), kv_search.Search(seen, 1 << 24)
    assert [len(sample.key) for sample in together.samples] == [2, 1] and len(alone.samples) == 3
    for rotate in (False, True):
        found = [kv_search.choose(search, KVFormat(32), rotate) for search in (alone, together)]
        for one, other in zip(found[0][:2], found[1][:2], strict=True):
            assert torch.equal(one.side.channels, other.side.channels) and one.side.clip == other.side.clip
            assert (one.feedback is None) == (other.feedback is None)
            # A sum in another order may tip what is rounded.
            assert one.feedback is None or int((one.feedback.int() - other.feedback).abs().max()) <= 1
        for name, value in found[0][2].items():
            assert found[1][2][name] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("form,rotate", [(KVFormat(32), False), (KVFormat(32), True)], ids=str)
def test_a_first_token_that_is_always_the_same_is_stored_exactly(form, rotate):
    """It is exact to the rounding of float16 scales, and where it takes most of the attention the output's error falls by half."""
    seen = _with_a_sink()
    search = kv_search.Search(seen)
    assert search.first_attention > 0.6
    key, value, facts = kv_search.choose(search, form, rotate)
    assert all(facts["key_first_exact"] + facts["value_first_exact"])
    turns = {"key": rotate, "value": False}
    plain = [kv_search.plain_side(seen, what, form, 0.5, 1.0) for what in turns]
    if rotate:
        plain[0] = kv_search.rotated_side(seen, seen.query_power, 0.5, 1.0)
    for (what, turned), one, before in zip(turns.items(), (key, value), plain, strict=True):
        first = getattr(seen.samples[1], what)[0, :, :1].transpose(0, 1)
        back = fake_quantize(first, form, *one.side, turned, form.refits, one.feedback)
        rounded = fake_quantize(first, form, *before, turned, form.refits)
        assert float((back - first).norm() / first.norm()) < 2e-3
        assert float((rounded - first).norm() / first.norm()) > 0.03
    back = {
        what: search.back(what, form, one.side, rotate, one.feedback) for what, one in (("key", key), ("value", value))
    }
    rounded = {what: search.back(what, form, side, rotate) for what, side in zip(turns, plain, strict=True)}
    errors = [search.error(**rows) for rows in (back, rounded)]
    assert errors[0] ** 0.5 == pytest.approx(facts["output_error"], rel=1e-4) and errors[0] < 0.5 * errors[1]
    off, power = 0.0, 0.0
    for i, sample in enumerate(search.samples):
        exact = _attention(sample, sample.key, sample.value)
        found = _attention(sample, back["key"][i], back["value"][i])
        off, power = off + (found - exact).square().sum((0, 2, 3)), power + exact.square().sum()
    assert facts["head_errors"] == pytest.approx((off / power).sqrt().tolist(), rel=1e-3)


@pytest.mark.parametrize("scores", [Scores(), Scores(softcap=0.5), Scores(sinks=torch.arange(4.0))], ids=str)
def test_queries_are_weighted_by_what_reaches_the_output(scores):
    """Their power, against the derivatives of the outputs with respect to every key but the first."""
    seen, scaling = _with_a_sink(0.5, 8, 20), 0.2
    seen.scores = scores
    seen.add(*(torch.randn(1, heads, 14, 8) for heads in (4, 2, 2)), scaling, keep=True)
    expected, moments = torch.zeros(2, 8, dtype=torch.float64), torch.zeros(2, 8, 8, dtype=torch.float64)
    for sample in seen.samples:
        exact = Sample(*(x if x.dtype == torch.int64 else x.double() for x in sample))
        slopes = torch.autograd.functional.jacobian(
            lambda key, exact=exact: kv_search.attend(exact._replace(key=key), seen).flatten(),
            exact.key,
            vectorize=True,
        )
        expected += slopes.square().sum(0)[0, :, 1:].sum(1) / scaling**2
        moments += torch.einsum("ohtd,ohte->hde", slopes[:, 0, :, 1:], slopes[:, 0, :, 1:]) / scaling**2
    for together in (1, 1 << 24):
        search = kv_search.Search(seen, together)
        for found, wanted in ((search.reaching, expected), (search.moments, moments)):
            assert float((found - wanted).norm() / wanted.norm()) < 1e-3


def test_queries_that_look_at_the_first_token_alone_set_no_scales():
    """Most queries are large in one pair of channels and see nothing but the first token; the few others mind every channel but those."""
    generator = torch.Generator().manual_seed(0)
    seen = LayerSeen("layer", AttentionShape(1, 2, 1, 32, False, 32))
    query, key, value = (torch.randn(1, heads, 100, 32, generator=generator) for heads in (2, 1, 1))
    pair = torch.zeros(32)
    pair[[3, 19]] = 1.0
    looks_back = (torch.arange(100) % 8 != 0)[:, None]
    query = torch.where(looks_back, 30 * pair, query * (1 - pair))
    key[:, :, 0] = 3 * pair
    seen.add(query, key, value, 0.2, keep=True)
    search, form = kv_search.Search(seen, feeds_back=False), KVFormat(32)
    chosen, least = search.best("key", form, True), {}
    for name, queries in (("all", seen.query_power), ("reaching", search.reaching)):
        sides = [kv_search.rotated_side(seen, queries, a, 1.0) for a in kv_search.ROTATED_ALPHAS]
        sides += [kv_search.on_grid(seen.first("key"), form, side, True) for side in sides]
        back = [search.back("key", form, side, True) for side in sides]
        least[name] = min(search.error(key=rows) for rows in back)
    assert chosen.facts["key_weighted"] == [True] and chosen.cost <= least["reaching"] * (1 + 1e-6)
    assert least["reaching"] < 0.9 * least["all"]


def test_keys_are_rotated_where_that_lowers_the_error(checkpoint_of, tmp_path):
    source = checkpoint_of("qwen2", torch.float32, num_attention_heads=2)
    errors = {}
    for rotation in ("none", "hadamard", "auto"):
        report = calibrate(source, tmp_path / rotation, rotation=rotation)["kv_cache"]["report"]
        errors[rotation] = sum(layer["output_error"] ** 2 for layer in report)
    assert errors["auto"] == pytest.approx(min(errors["none"], errors["hadamard"]), rel=1e-6)
    assert errors["none"] != pytest.approx(errors["hadamard"], rel=1e-3)
    rotated = kv_calibration.read_facts(tmp_path / "auto")["rotation"] == "hadamard"
    assert rotated == (errors["hadamard"] < errors["none"])


def test_error_weights(checkpoint_of, tmp_path):
    """A value's weight is its scale squared; a key's also the power of the queries that meet it; a mean of 1 in each head."""
    calibrate(checkpoint_of("llama"), tmp_path / "out", rotation="none")
    for keys, values, *_ in kv_calibration.load(Checkpoint(tmp_path / "out")).layers:
        expected = values.channels[1].square()
        torch.testing.assert_close(values.channels[2], expected / expected.mean(-1, keepdim=True))
        power = keys.channels[2] / keys.channels[1].square()
        assert float(power.std(-1).min()) > 0 and torch.allclose(keys.channels[2].mean(-1), torch.ones(2))


def test_weights_are_linked_and_other_commands_leave_the_calibration_behind(checkpoint_of, tmp_path, cli):
    source = checkpoint_of("llama")
    calibrate(source, tmp_path / "kv")
    for shard in Checkpoint(source).shards:
        assert any(os.path.samefile(source / shard, path) for path in (tmp_path / "kv").glob("*.safetensors"))
    before = (source / "config.json").read_bytes()
    ran = cli("compress", "prune", tmp_path / "kv", "-o", tmp_path / "pruned", "--sparsity", "0.5")
    assert ran.code == 0 and "run `compress kv` again" in ran.err
    assert not (tmp_path / "pruned" / "kv_cache").exists()
    assert "tilepress_kv_cache" not in json.loads((tmp_path / "pruned" / "config.json").read_text())
    assert before == (source / "config.json").read_bytes()
    assert (
        cli(
            "compress",
            "kv",
            tmp_path / "kv",
            "-o",
            tmp_path / "again",
            "--dataset",
            demo.TEXT,
            "--nsamples",
            2,
            "--seqlen",
            64,
        ).code
        == 0
    )
    assert verify(tmp_path / "again").passed


@pytest.mark.parametrize("first", ["prune", "quantize"])
def test_it_stacks(checkpoint_of, tmp_path, first):
    source = checkpoint_of("llama")
    (prune if first == "prune" else quantize)(source, tmp_path / "one")
    calibrate(tmp_path / "one", tmp_path / "two")
    assert [f for check in verify(tmp_path / "two").checks for f in check.findings] == []
    assert (
        Checkpoint(tmp_path / "two").config["quantization_config"]
        == Checkpoint(tmp_path / "one").config["quantization_config"]
    )
    ids, one, two = torch.arange(30)[None] + 3, tilepress.load(tmp_path / "one"), tilepress.load(tmp_path / "two")
    leaves = [{type(m) for m in model.modules() if not list(m.children())} for model in (one, two)]
    assert leaves[0] == leaves[1]  # attention is of a subclass in one of them
    with torch.no_grad():
        found, expected = (m(ids, use_cache=True).logits.float() for m in (two, one))
    assert 0 < float((found - expected).norm() / expected.norm()) < 0.1
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert two.generate(ids, **options).shape == (1, 35)


def test_stopped_anywhere_it_resumes_to_the_same_bytes(checkpoint_of, tmp_path, monkeypatch):
    def nothing_loads(output):
        if not (output / "config.json").exists():
            with pytest.raises(TilepressError):
                tilepress.load(output)

    source = checkpoint_of("llama", shard_size="1MB")
    assert stop_anywhere_and_resume(KVCache(), source, tmp_path, monkeypatch, nothing_loads, few_words(2, 32)) > 10


@pytest.mark.thorough
@pytest.mark.parametrize("rotation", ["auto", "none"])
def test_a_stopped_search_goes_on_after_its_last_layer(checkpoint_of, tmp_path, monkeypatch, rotation):
    source, whole = checkpoint_of("llama", num_hidden_layers=3), tmp_path / "whole"
    run = partial(run_recipe, KVCache(rotation=rotation), source, text=few_words(4, 64))
    states = killed_before_each_rename(run, whole, monkeypatch)
    searched, choose = [], calibration.choose
    monkeypatch.setattr(
        calibration, "choose", lambda search, *rest: searched.append(search.seen.name) or choose(search, *rest)
    )
    # Before the renames: the plan, then each layer's tensors and facts, and the facts of all.
    for step, layers in ((1, 3), (2, 3), (3, 2), (4, 2), (5, 1), (6, 1), (7, 0), (8, 0)):
        searched.clear()
        run(states[step], resume=True)
        assert [f"model.layers.{n}" for n in range(3 - layers, 3)] == list(dict.fromkeys(searched)), step
        assert digest(states[step]) == digest(whole), step


def test_a_search_in_another_text_is_not_taken(checkpoint_of, tmp_path, monkeypatch):
    words = tmp_path / "text.txt"
    before = demo.TEXT.read_text()
    words.write_text(before)
    run = partial(run_recipe, KVCache(), checkpoint_of("llama"), text=few_words(4, 64, words))
    states = killed_before_each_rename(run, tmp_path / "whole", monkeypatch)
    half, done = states[3], states[6]
    words.write_text(before[500:])
    with pytest.raises(UsageError, match="have changed since"):
        run(done, resume=True)
    run(half, resume=True)
    run(tmp_path / "other")
    assert digest(half) == digest(tmp_path / "other") != digest(tmp_path / "whole")


def test_the_command(checkpoint_of, tmp_path, cli):
    source = checkpoint_of("llama")
    words = ["compress", "kv", source, "-o", tmp_path / "out", "--dataset", demo.TEXT, "--nsamples", 4, "--seqlen", 64]
    plan = cli(*words, "--dry-run")
    assert plan.code == 0 and "nothing was written" in plan.out and not (tmp_path / "out").exists()
    ran = cli(*words, "--memory", "2")
    told = json.loads((tmp_path / "out" / "tilepress.json").read_text())["kv_cache"]
    assert ran.code == 0 and f"{told['bytes_per_token_bfloat16']:,} -> {told['bytes_per_token']:,} bytes" in ran.out
    assert f"2 GiB     {2 * told['tokens_per_gib_bfloat16']:,} -> {2 * told['tokens_per_gib']:,} tokens" in ran.out
    assert f"{told['bytes_per_token']:,} bytes a token" in (tmp_path / "out" / "README.md").read_text()
    assert f"-> {told['bytes_per_token']:,} bytes" in cli("inspect", tmp_path / "out").out
    assert cli("inspect", tmp_path / "out", "--json").json["kv_cache"]["bytes_per_token"] == told["bytes_per_token"]
    measure = ["eval", "perplexity", tmp_path / "out", "--dataset", demo.TEXT, "--seqlen", 64, "--limit", 2]
    measured = {kv: cli(*measure, "--kv", kv, "--json").json for kv in ("decode", "sim", "off")}
    assert abs(measured["decode"]["kv_cache"]["decode_over_sim"]) < 0.01
    assert all(result["protocol"]["kv"] == kv for kv, result in measured.items())
    default = cli(*measure)
    assert measured["sim"]["nll"] != measured["off"]["nll"] and "inside an ordinary forward pass" in default.out


def test_a_sink_is_told(calibrated):
    """A sink is where the first token takes half of a layer's attention; random models have no such layer."""
    told = json.loads((calibrated / "tilepress.json").read_text())["kv_cache"]
    assert all(0 < layer["first_attention"] < 0.5 for layer in told["report"])
    assert "sink" not in kv_text(told, 1.0)
    told["report"][1] |= {"first_attention": 0.9, "key_first_exact": [True] * 2, "value_first_exact": [True] * 2}
    told["report"][0] |= {"key_first_exact": [True, False]}
    assert "in 1 of 2 layers, 90% in layer 1; 1 layers store it exactly" in kv_text(told, 1.0)
    for layer in told["report"]:
        del layer["first_attention"]  # what older versions wrote
    assert "sink" not in kv_text(told, 1.0)


# Bad input


@pytest.mark.parametrize(
    "words,message",
    [
        (["--bits", "3"], "--bits 3"),
        (["--mode", "both"], "--mode both"),
        (["--rotation", "yes"], "--rotation yes"),
        (["--rotation", "hadamard", "--mode", "static"], "goes with 4 bits"),
        (["--group-size", "48"], "groups of 48"),
        (["--group-size", "64"], "groups of 64 do not divide the head dimension 32"),
        (["--seqlen", "99999"], "use --seqlen"),
        (["--dataset", "missing.txt"], "missing.txt"),
    ],
)
def test_wrong_requests_end_with_2(checkpoint_of, tmp_path, cli, words, message):
    given = {"--dataset": demo.TEXT, "--nsamples": 2, "--seqlen": 64} | dict(zip(words[::2], words[1::2], strict=True))
    flags = [word for pair in given.items() for word in pair]
    ran = cli("compress", "kv", checkpoint_of("llama"), "-o", tmp_path / "out", *flags)
    assert ran.code == 2 and message in ran.err and len(ran.err.strip().splitlines()) == 2, ran.err
    with pytest.raises(TilepressError):
        tilepress.load(tmp_path / "out")


@pytest.mark.parametrize(
    "family,changes,message",
    [
        ("llama", {"kv_lora_rank": 16}, "latent"),
        ("llama", {"use_bidirectional_attention": True}, "bidirectional"),
        ("llama", {"head_dim": 40}, "no multiple of 32"),
        ("falcon", {}, "common way"),
    ],
)
def test_attention_that_the_cache_does_not_serve(checkpoint_of, tmp_path, family, changes, message):
    with pytest.raises(UsageError) as error:
        calibrate(checkpoint_of(family, **changes), tmp_path / "out")
    assert message in error.value.message and "leave this model's cache" in error.value.hint


def test_too_little_text_is_refused(checkpoint_of, tmp_path):
    (tmp_path / "short.txt").write_text("a")
    with pytest.raises(UsageError, match="too few to calibrate on"):
        calibrate(checkpoint_of("llama"), tmp_path / "out", few_words(2, 32, tmp_path / "short.txt"))


def test_keys_that_are_not_finite_name_the_layer(checkpoint_of, tmp_path):
    source = tmp_path / "bad"
    shutil.copytree(checkpoint_of("llama", torch.float32, shard_size="10MB"), source)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"] *= 1e38
    tensors["model.layers.1.input_layernorm.weight"] *= 1e38
    (source / "model.safetensors").unlink()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TilepressError, match=r"keys of model.layers.1 are not finite"):
        calibrate(source, tmp_path / "out")


def _facts(**changes):
    def change(folder):
        path = folder / "kv_cache" / "kv_cache.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _tensors(change_tensors):
    def change(folder):
        path = folder / "kv_cache" / "scales.safetensors"
        tensors = load_file(path)
        change_tensors(tensors)
        path.unlink()
        save_file(tensors, path)

    return change


def _pipe(folder):
    (folder / "kv_cache" / "scales.safetensors").unlink()
    os.mkfifo(folder / "kv_cache" / "scales.safetensors")


def _weights(folder):
    path = next(folder.glob("*.safetensors"))
    tensors = load_file(path)
    first = sorted(tensors)[0]
    tensors[first] = tensors[first] + 1
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "change,message",
    [
        (_weights, "belongs to other weights"),
        (_facts(format_version=9), "format version 9"),
        (_facts(layers=3), "does not describe"),
        (_facts(clip=[[0, 1], [1, 1]]), "does not describe"),
        (_facts(kv_heads=4), "not float32"),
        (_facts(bits=5), "does not describe"),
        (_facts(bits=16), "does not describe"),
        (_facts(head_dim=0), "does not describe"),
        (_facts(refits=9), "does not describe"),
        (_facts(clip=[["1", 1], [1, 1]]), "does not describe"),
        (_tensors(lambda t: t.pop("layers.1.key_mean")), "layers.1.key_mean is missing"),
        (_tensors(lambda t: t["layers.0.value_scale"].fill_(float("nan"))), "layers.0.value_scale"),
        (_tensors(lambda t: t["layers.0.value_scale"].fill_(0)), "that no calibration gives"),
        (_tensors(lambda t: t["layers.0.key_weight"].fill_(-1)), "that no calibration gives"),
        (_tensors(lambda t: t.update({"layers.9.key_mean": t["layers.0.key_mean"].clone()})), "of no layer"),
        (_pipe, "scales.safetensors is no regular file"),
        (lambda folder: shutil.rmtree(folder / "kv_cache"), "kv_cache.json is missing"),
    ],
)
def test_sidecars_of_other_models_and_damaged_ones_are_refused(calibrated, tmp_path, cli, change, message):
    shutil.copytree(calibrated, tmp_path / "out")
    change(tmp_path / "out")
    with pytest.raises(TilepressError, match=message):
        tilepress.load(tmp_path / "out")
    assert cli("verify", tmp_path / "out").code == 3
    assert tilepress.load(tmp_path / "out", kv=False) is not None


def test_the_hash_is_of_the_weights_and_not_of_their_files(checkpoint_of):
    split, whole = (Checkpoint(checkpoint_of("llama", shard_size=size)) for size in ("200KB", "10MB"))
    assert len(split.shards) > len(whole.shards) == 1
    assert kv_calibration.weights_hash(split) == kv_calibration.weights_hash(whole)
    assert kv_calibration.weights_hash(split) != kv_calibration.weights_hash(Checkpoint(checkpoint_of("qwen2")))


def test_a_model_of_another_shape_is_refused(checkpoint_of):
    model = tilepress.load(checkpoint_of("llama"))
    for form, layers, message in (
        (KVFormat(32), 3, "3 layers with 2 KV heads of 32"),
        (KVFormat(64), 2, "KV heads of 64, the model"),
    ):
        with pytest.raises(TilepressError, match=message):
            kv_cache.install(model, uncalibrated(form, 2, layers))


def test_kv_modes_need_a_calibration(tiny, cli):
    ran = cli("eval", "perplexity", tiny, "--dataset", demo.TEXT, "--limit", 1, "--seqlen", 64, "--kv", "sim")
    assert ran.code == 2 and "no calibrated cache" in ran.err
    assert "--kv bits is unknown" in cli("eval", "perplexity", tiny, "--dataset", demo.TEXT, "--kv", "bits").err
