"""`compress kv --bits auto`: forms under a budget against every assignment there is, what mixed caches compute, bad input."""

import itertools
import json
import math
import random
import shutil

import pytest
import torch
from support.artifacts import few_words, run_recipe
from support.decoding import alone, decoded
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import tilepress
from tilepress import KVCache, demo
from tilepress.compress.kv import calibration
from tilepress.compress.kv.attention import Watch, attention_shape
from tilepress.compress.kv.budget import Option, assign, check_budget, forms_for_budget
from tilepress.compress.layers.layerwise import LayerByLayer
from tilepress.compress.layers.walk import Layer
from tilepress.compress.run.targets import find_targets
from tilepress.eval.perplexity import Protocol, measure
from tilepress.eval.verify import verify
from tilepress.formats import TilepressError, UsageError, kv_calibration
from tilepress.formats.checkpoint import Checkpoint
from tilepress.formats.kv_int4 import KVFormat, fake_quantize
from tilepress.runtime.hf import paged_cache

LAYERS = 2


@pytest.fixture(scope="module")
def searched(tmp_path_factory, checkpoint_of):
    """An artifact whose layers' keys and values have forms of 6.1 bits in the mean, and what each form cost."""
    path, costs = tmp_path_factory.mktemp("searched") / "out", []
    plain = calibration.assign
    with pytest.MonkeyPatch.context() as patch:

        def spy(sides, most_bytes):
            costs.extend([option.cost for option in options] for options in sides)
            return plain(sides, most_bytes)

        patch.setattr(calibration, "assign", spy)
        run_recipe(KVCache("auto", budget=6.1), checkpoint_of("llama"), path, text=few_words(2, 64))
    return path, costs


def bits_of(form: KVFormat) -> float:
    """Bits of a stored number, written from docs/format.md."""
    scales = 0 if form.static or form.bits == 16 else 32 * (form.head_dim // (form.group_size or form.head_dim))
    return form.bits + scales / form.head_dim


def test_assignments_against_all_that_there_are():
    draw = random.Random(0)
    for _ in range(60):
        sides = [
            [Option(4 * draw.randint(1, 9), draw.choice([0.0, 1.0, draw.random()])) for _ in range(draw.randint(1, 4))]
            for _ in range(draw.randint(1, 5))
        ]
        most = draw.uniform(0, 4 * 9 * len(sides))
        every = [picks for picks in itertools.product(*sides) if sum(one.nbytes for one in picks) <= most]
        if not every:
            with pytest.raises(ValueError, match="smallest options"):
                assign(sides, most)
            continue
        chosen = [options[i] for options, i in zip(sides, assign(sides, most), strict=True)]
        assert sum(one.nbytes for one in chosen) <= most
        least = min(sum(one.cost for one in picks) for picks in every)
        assert sum(one.cost for one in chosen) == pytest.approx(least, abs=1e-12)


def test_the_best_forms_under_the_budget_are_stored(searched):
    """No other assignment of forms to the two layers' keys and values costs less within the budget."""
    path, costs = searched
    forms = forms_for_budget(32)
    assert len(costs) == 2 * LAYERS and all(len(of_side) == len(forms) for of_side in costs)
    best = min(
        (sum(of_side[i] for of_side, i in zip(costs, picks, strict=True)), picks)
        for picks in itertools.product(range(len(forms)), repeat=2 * LAYERS)
        if sum(bits_of(forms[i]) for i in picks) <= 6.1 * 2 * LAYERS
    )
    found = kv_calibration.load(Checkpoint(path))
    chosen = [row for layer in found.layers for row in (layer.form.key, layer.form.value)]
    cost = sum(of_side[forms.index(row)] for of_side, row in zip(costs, chosen, strict=True))
    assert cost == pytest.approx(best[0]) and len({row.name for row in chosen}) > 1
    told = json.loads((path / "tilepress.json").read_text())["kv_cache"]
    mean = sum(map(bits_of, chosen)) / len(chosen)
    assert mean <= 6.1 and told["bytes_per_token"] == mean / 8 * 2 * LAYERS * 2 * 32
    assert [(layer["key_format"], layer["value_format"]) for layer in told["report"]] == [
        (layer.form.key.name, layer.form.value.name) for layer in found.layers
    ]
    assert told["format"] == found.name == f"mixed, {mean:.3f} bits a number"
    assert verify(path).passed


def test_a_mixed_cache_is_what_its_sidecar_says(searched, checkpoint_of, tmp_path):
    """Perplexity with the cache simulated and read from pages, against the stock model with keys and values rounded by hand."""
    path, _ = searched
    facts = json.loads((path / "kv_cache" / "kv_cache.json").read_text())
    layers = kv_calibration.load(Checkpoint(path)).layers
    assert facts["format_version"] == 2 and any(pair[0] != pair[1] for pair in facts["forms"])
    for layer in facts["report"]:
        assert math.hypot(*layer["head_errors"]) == pytest.approx(layer["output_error"])

    def rounded(module, query, key, value, mask, **options):
        number, back = module.layer_idx, []
        for i, x in enumerate((key, value)):
            told = facts["forms"][number][i]
            form = KVFormat(32, told["bits"], told["group_size"], told["mode"] == "static")
            turned = facts["rotation"][number] == "hadamard" and i == 0
            rows = x[0].transpose(0, 1)
            side = layers[number].sides[i]
            fed = layers[number].feedback if i == 0 and form.bits == 4 else None
            back.append(fake_quantize(rows, form, *side, turned, facts["refits"], fed).transpose(0, 1)[None])
        return sdpa_attention_forward(module, query, *back, mask, **options)

    AttentionInterface.register("rounded_by_hand", rounded)
    stock = AutoModelForCausalLM.from_pretrained(checkpoint_of("llama"), dtype=torch.float32)
    stock.set_attn_implementation("rounded_by_hand")
    model, tokenizer = tilepress.load(path, dtype=torch.float32), AutoTokenizer.from_pretrained(path)
    protocol = Protocol(str(demo.TEXT), "gptq", 100, None, 2)
    expected = measure(stock, tokenizer, protocol).nll
    simulated, decoded_ = (measure(model, tokenizer, protocol, kv=kv) for kv in ("sim", "decode"))
    assert simulated.nll == pytest.approx(expected, rel=1e-6)
    assert simulated.nll != pytest.approx(measure(model, tokenizer, protocol, kv="off").nll, rel=1e-6)
    assert abs(decoded_.kv_cache["decode_over_sim"]) < 0.003
    told = [row for pair in facts["forms"] for row in pair]
    bits = sum(bits_of(KVFormat(32, row["bits"], 0, row["mode"] == "static")) for row in told) / len(told)
    assert decoded_.kv_cache["format"].startswith("mixed, ")
    assert decoded_.kv_cache["bits_per_element"] == pytest.approx(bits)


def test_the_decode_loop_serves_mixed_forms(searched):
    """The lean pass and the model's own forward over a PagedCache give the same tokens, and paths name the forms."""
    model = tilepress.load(searched[0], dtype=torch.float32)
    prompts = [list(range(5, 45)), list(range(90, 97))]
    assert decoded(model, prompts, 8) == alone(model, prompts, 8)
    forms = {layer.form.name for layer in model.kv_state.calibration.layers}
    assert forms <= {path.form for path in paged_cache.paths(model, "cache") if path.kernel == "decode_attention"}


def test_alike_keeps_one_form_in_each_layer(checkpoint_of, tmp_path):
    run_recipe(KVCache("auto", budget=7, alike=True), checkpoint_of("llama"), tmp_path / "out", text=few_words(2, 64))
    layers = kv_calibration.load(Checkpoint(tmp_path / "out")).layers
    assert all(layer.form.key == layer.form.value for layer in layers)
    assert sum(bits_of(layer.form.key) for layer in layers) <= 7 * LAYERS


@pytest.mark.parametrize("budget,name", [(16, "bfloat16"), (4, "int4 static, row-wise")])
def test_budgets_that_buy_everything_and_just_one_form(checkpoint_of, tmp_path, budget, name):
    run_recipe(KVCache("auto", budget=budget), checkpoint_of("llama"), tmp_path / "out", text=few_words(2, 32))
    assert tilepress.load(tmp_path / "out").kv_state.calibration.name == name


def test_forms_of_head_dimensions():
    assert [form.row_bytes for form in forms_for_budget(128)] == [64, 68, 72, 80, 128, 132, 256]
    assert [form.row_bytes for form in forms_for_budget(64)] == [32, 36, 40, 64, 68, 128]
    assert [form.group_size for form in forms_for_budget(96)] == [0, 0, 32, 0, 0, 0]
    check_budget(4.0, 128)
    with pytest.raises(UsageError, match="int4 static"):
        check_budget(3.99, 128)


def test_the_change_of_a_layers_output_is_the_models(checkpoint_of):
    """That of all tokens but the first, in the middle, when keys and values are replaced: against the stock model's own layer."""
    source = checkpoint_of("llama", torch.float32)
    model = AutoModelForCausalLM.from_pretrained(source)
    ids, seen = torch.arange(40)[None] + 3, {}
    layer = model.model.layers[0]

    def hand_over(module, args, kwargs, output):
        seen.setdefault("given", (args, kwargs))
        seen.setdefault("exact", output)

    hook = layer.register_forward_hook(hand_over, with_kwargs=True)
    key, value = (torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(i)) for i in range(2))

    def other(module, query, *_, **options):
        return sdpa_attention_forward(module, query, key[None], value[None], None, is_causal=True, **options)

    AttentionInterface.register("others", other)
    with torch.no_grad():
        model(ids, use_cache=False)
        hook.remove()
        model.set_attn_implementation("others")
        args, kwargs = seen["given"]
        changed = layer(*args, **kwargs)
    off = ((changed - seen["exact"])[0, 1:].norm(dim=-1) / seen["exact"][0, 1:].norm(dim=-1)).square()
    checkpoint = Checkpoint(source)
    targets, _ = find_targets(checkpoint, (), quantized=True)
    layers = LayerByLayer(checkpoint, targets, "cpu", torch.float32, None)
    hidden = layers.embed(ids[0])
    watch = Watch(layers, attention_shape(checkpoint))
    found = watch.change(Layer(layers, layers.layers[0], 0, {}, None, None), hidden, key, value)
    assert found == pytest.approx(float(off.median()), rel=1e-4) and found > 0.01


# Bad input


@pytest.mark.parametrize(
    "words,message",
    [
        (["--bits", "auto"], "needs a budget"),
        (["--bits", "auto", "--budget", "3.9"], "met by no form"),
        (["--bits", "auto", "--budget", "17"], "--budget 17"),
        (["--bits", "auto", "--budget", "nan"], "--budget nan"),
        (["--bits", "auto", "--budget", "5", "--group-size", "32"], "leave --group-size"),
        (["--bits", "auto", "--budget", "5", "--mode", "static"], "leave --group-size and --mode out"),
        (["--budget", "5"], "takes no --budget"),
        (["--alike"], "takes no --alike"),
        (["--bits", "four"], "--bits four"),
    ],
)
def test_wrong_budgets_end_with_2(checkpoint_of, tmp_path, cli, words, message):
    text = ["--dataset", demo.TEXT, "--nsamples", 2, "--seqlen", 64]
    ran = cli("compress", "kv", checkpoint_of("llama"), "-o", tmp_path / "out", *text, *words)
    assert ran.code == 2 and len(ran.err.strip().splitlines()) == 2, ran.err
    assert message in ran.err and not (tmp_path / "out").exists()


def _first_form(**changes):
    def change(facts):
        facts["forms"][0][0] |= changes

    return change


@pytest.mark.parametrize(
    "change",
    [
        _first_form(bits=5),
        _first_form(bits="4"),
        _first_form(mode="both"),
        _first_form(group_size=48),
        lambda facts: facts["forms"].pop(),
        lambda facts: facts["forms"][0].pop(),
        lambda facts: facts.update(forms=None),
        lambda facts: facts.update(rotation="none"),
        lambda facts: facts.update(rotation=["none"]),
    ],
)
def test_damaged_mixed_sidecars_are_refused(searched, tmp_path, change):
    shutil.copytree(searched[0], tmp_path / "out")
    path = tmp_path / "out" / "kv_cache" / "kv_cache.json"
    facts = json.loads(path.read_text())
    change(facts)
    path.write_text(json.dumps(facts))
    with pytest.raises(TilepressError, match="does not describe"):
        tilepress.load(tmp_path / "out")
    assert not verify(tmp_path / "out").passed
