"""The paged cache in generate: the tokens of single prompts in batches, pages taken, freed and used again, pools that are too small."""

import copy
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.artifacts import few_words, run_recipe, with_cache
from support.families import byte_tokenizer
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, eager_mask

import tilepress
from tilepress import KVCache, demo
from tilepress.eval import perplexity as eval_perplexity
from tilepress.eval.perplexity import Protocol, measure
from tilepress.formats import TilepressError, UsageError
from tilepress.formats.kv_calibration import uncalibrated
from tilepress.formats.kv_int4 import KVFormat, fake_quantize
from tilepress.models.attention import window_of
from tilepress.runtime.attention import PagePool
from tilepress.runtime.hf import paged_cache as kv_cache
from tilepress.runtime.hf.paged_cache import PagedCache

OPTIONS = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
PROMPTS = ("import os", "def main(args):\n    for name in args:\n        print(name", "The")


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory, tiny):
    path = tmp_path_factory.mktemp("kv") / "tiny-kv4"
    run_recipe(KVCache(), tiny, path, text=few_words(4, 128))
    return path


@pytest.fixture(scope="module")
def model(calibrated):
    return tilepress.load(calibrated, dtype=torch.float32)


@pytest.fixture(scope="module")
def steady(tmp_path_factory, tiny):
    """8 bits, where it hardly shows that rounding tips a value from one code to the next: batches and pieces of a text round differently."""
    path = tmp_path_factory.mktemp("kv") / "tiny-kv8"
    run_recipe(KVCache(bits=8), tiny, path, text=few_words(4, 128))
    return tilepress.load(path, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(calibrated):
    return AutoTokenizer.from_pretrained(calibrated, padding_side="left", pad_token="<|endoftext|>")


def test_generate_uses_the_packed_cache(model, tokenizer):
    ids = tokenizer(PROMPTS[1], return_tensors="pt").input_ids
    out = model.generate(ids, return_dict_in_generate=True, **OPTIONS)
    cache = out.past_key_values
    assert isinstance(cache, PagedCache) and cache.lengths == [out.sequences.shape[1] - 1]
    assert cache.pool.pages[0].dtype == torch.uint8 and "int4 dynamic, row-wise" in repr(cache)
    assert tilepress.runtime.loader.paths(model)["decode_attention reference (int4 dynamic, row-wise) on cpu"] == 4
    unused = model.generate(ids, use_cache=False, **OPTIONS)
    assert unused.shape == out.sequences.shape


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "gpt2-64", "opt", "mixtral", "granite", "gemma2", "gpt-oss"]
)
def test_16_bits_give_the_logits_of_the_stock_cache(checkpoint_of, family):
    """Logits of a float32 model up to what bfloat16 pages round, whatever the prompt's length and padding."""
    source = checkpoint_of(family)
    stock = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    head_dim = getattr(stock.config, "head_dim", None) or stock.config.hidden_size // stock.config.num_attention_heads
    ours, ids = with_cache(source, KVFormat(head_dim, 16)), torch.arange(40).view(2, 20) * 3 + 3
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    out = [m(ids, attention_mask=mask, use_cache=True) for m in (stock, ours)]
    torch.testing.assert_close(out[1].logits[:, 6:], out[0].logits[:, 6:], rtol=0.05, atol=0.05)
    for step in range(3):
        mask, new = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1), torch.full((2, 1), 17 + step)
        positions = {} if family == "opt" else {"position_ids": mask.sum(1, keepdim=True) - 1}
        out = [
            m(new, attention_mask=mask, past_key_values=o.past_key_values, **positions)
            for m, o in zip((stock, ours), out, strict=True)
        ]
        torch.testing.assert_close(out[1].logits, out[0].logits, rtol=0.05, atol=0.05)
    assert out[1].past_key_values.lengths == [23, 17]


def test_batches_with_padding_give_the_tokens_of_single_prompts(steady, tokenizer):
    batch = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    together = steady.generate(**batch, **OPTIONS)[:, batch.input_ids.shape[1] :]
    for prompt, tokens in zip(PROMPTS, together, strict=True):
        alone = tokenizer(prompt, return_tensors="pt")
        assert torch.equal(steady.generate(**alone, **OPTIONS)[0, alone.input_ids.shape[1] :], tokens)


def test_pieces_of_a_prompt_give_what_the_whole_gives(steady, tokenizer):
    ids = tokenizer(demo.TEXT.read_text()[:900], return_tensors="pt").input_ids[:, :200]
    with torch.no_grad():
        whole = steady(ids, use_cache=True).logits
        cache = PagedCache(steady.kv_state.calibration, "cpu", num_pages=4)
        pieces = torch.cat(
            [steady(piece, past_key_values=cache).logits for piece in ids.split([70, 1, 1, 64, 1, 63], 1)], 1
        )
    assert cache.lengths == [200] and len(cache.pool.free) == 0
    assert float((pieces - whole).norm() / whole.norm()) < 2e-3


def test_simulated_and_decoded_perplexity_agree(model, tokenizer):
    scores = measure(model, tokenizer, Protocol(str(demo.TEXT), "gptq", 256, None, 3), kv="decode").to_json()
    assert abs(scores["kv_cache"]["decode_over_sim"]) < 0.003
    alone = measure(model, tokenizer, Protocol(str(demo.TEXT), "gptq", 256, None, 3), kv="sim").to_json()
    assert alone["perplexity"] == pytest.approx(scores["kv_cache"]["sim_perplexity"], rel=1e-6)
    assert model.kv_state.mode == "cache"


def test_windows_decoded_together_are_those_decoded_alone(steady, tokenizer, monkeypatch, tmp_path):
    (text := tmp_path / "some.txt").write_text(tokenizer.decode(list(range(1, 180))))
    protocol, asked = Protocol(str(text), "strided", 64, 32), []
    together = measure(steady, tokenizer, protocol, progress=lambda *what: asked.append(what), kv="decode").to_json()
    monkeypatch.setattr(eval_perplexity, "_MOST_DECODED", 1)
    alone = measure(steady, tokenizer, protocol, kv="decode").to_json()
    assert together["window_nll"] == pytest.approx(alone["window_nll"], rel=2e-3, abs=2e-3)
    assert len(asked) == 3 < len(together["window_nll"])  # all long ones, the short one, the end


def test_simulation_changes_keys_and_values_alone(model, tokenizer, monkeypatch):
    """The attention of layer 0 against one written out, on fake-quantized keys and values of the stock model."""
    ids = tokenizer(PROMPTS[1], return_tensors="pt").input_ids
    seen = {}

    def spy(module, query, key, value, *args, **kwargs):
        seen.setdefault(module.layer_idx, (query, key, value))
        return plain(module, query, key, value, *args, **kwargs)

    plain = kv_cache.sdpa_attention_forward
    monkeypatch.setattr(kv_cache, "sdpa_attention_forward", spy)
    results = {}
    for mode in ("off", "sim"):
        seen.clear()
        monkeypatch.setattr(model.kv_state, "mode", mode)
        with torch.no_grad():
            model(ids, use_cache=False)
        results[mode] = seen[0]
    calibration = model.kv_state.calibration
    assert torch.equal(results["off"][0], results["sim"][0])
    layer = calibration.layers[0]
    for i, rotate in ((1, layer.rotate), (2, False)):
        exact = results["off"][i][0].transpose(0, 1)
        fed = layer.feedback if i == 1 else None
        expected = fake_quantize(exact, layer.form, *layer.sides[i - 1], rotate, calibration.refits, fed)
        torch.testing.assert_close(results["sim"][i][0].transpose(0, 1), expected)
        assert not torch.equal(exact, expected)


def test_a_pool_too_small_says_the_size_and_changes_nothing(model, tokenizer):
    ids = torch.arange(130)[None] + 300
    cache = PagedCache(model.kv_state.calibration, "cpu", num_pages=2)
    with torch.no_grad():
        model(ids[:, :100], past_key_values=cache)
        before = [pages.clone() for pages in cache.pool.pages]
        with pytest.raises(TilepressError, match="needs 3 pages of 64 tokens, it has 2"):
            model(ids[:, 100:], past_key_values=cache)
    assert all(torch.equal(a, b) for a, b in zip(before, cache.pool.pages, strict=True))
    assert cache.lengths == [100] and cache.columns == 100 and sorted(cache.pool.free) == []
    with torch.no_grad():
        model(ids[:, 100:128], past_key_values=cache)
    assert cache.lengths == [128]
    with pytest.raises(UsageError, match="holds 1 sequences, the batch has 2"):
        model(ids[:, :2].expand(2, 2), past_key_values=cache)
    cache.free()
    assert len(cache.pool.free) == 2 and cache.get_seq_length() == 0


def test_beams_are_those_of_the_simulation(steady, tokenizer):
    """Beams share pages and copy them when they part: the same sequences as by passes over everything, simulated."""
    batch = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    options = OPTIONS | {"num_beams": 3, "num_return_sequences": 2}
    found = steady.generate(**batch, return_dict_in_generate=True, **options)
    with kv_cache.cache_mode(steady, "sim"):
        expected = steady.generate(**batch, use_cache=False, **options)
    assert torch.equal(found.sequences, expected)
    cache = found.past_key_values
    assert isinstance(cache, PagedCache)
    cache.free()
    assert sorted(cache.pool.free) == list(range(cache.pool.total)) and not any(cache.pool.users)


def test_repeated_and_chosen_sequences(steady, tokenizer):
    ids = torch.stack([torch.arange(70), torch.arange(70) + 200]) + 50
    cache, new = PagedCache(steady.kv_state.calibration, "cpu", num_pages=8), torch.tensor([[7], [8], [9], [10]])
    with torch.no_grad():
        steady(ids, past_key_values=cache)
        cache.batch_repeat_interleave(2)
        assert len(cache.pool.free) == 4  # nothing is copied yet
        found = steady(new, past_key_values=cache).logits[:, 0]
        expected = steady(torch.cat([ids.repeat_interleave(2, 0), new], 1), use_cache=True).logits[:, -1]
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
        assert len(cache.pool.free) == 2  # the second page of two of them
        cache.batch_select_indices(torch.tensor([3, 0]))
        again = steady(new[:2], past_key_values=cache).logits[:, 0]
    both = torch.cat([ids.repeat_interleave(2, 0), new], 1)[[3, 0]]
    with torch.no_grad():
        expected = steady(torch.cat([both, new[:2]], 1), use_cache=True).logits[:, -1]
    torch.testing.assert_close(again, expected, rtol=2e-2, atol=2e-2)
    cache.free()
    assert len(cache.pool.free) == 8


def test_reordering_needs_no_pages(model):
    cache = PagedCache(model.kv_state.calibration, "cpu", num_pages=3)
    with torch.no_grad():
        model(torch.arange(30).view(3, 10) + 5, past_key_values=cache)
    cache.reorder_cache(torch.tensor([2, 1, 0]))
    assert len(cache.pool.free) == 0 and sorted(page for table in cache.tables for page in table) == [0, 1, 2]
    cache.reorder_cache(torch.tensor([0, 0, 0]))
    with torch.no_grad():
        model(torch.tensor([[1], [2], [3]]), past_key_values=cache)
    assert len({table[0] for table in cache.tables}) == 3


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_cropping(steady, padding):
    ids = torch.arange(40)[None] + 100
    mask = torch.ones_like(ids)
    if padding != "none":
        mask[0, slice(0, 6) if padding == "left" else slice(34, 40)] = 0
    cache = PagedCache(steady.kv_state.calibration, "cpu")
    with torch.no_grad():
        first = (mask.cumsum(1) - 1).clamp(min=0)
        steady(ids, attention_mask=mask, past_key_values=cache, position_ids=first)
        cache.crop(-10)
        assert cache.columns == 30 and cache.lengths == [int(mask[0, :30].sum())]
        new, kept = torch.tensor([[7]]), ids[:, :30][mask[:, :30].bool()][None]
        longer = torch.cat([mask[:, :30], torch.ones(1, 1, dtype=torch.long)], 1)
        positions = longer.sum(1, keepdim=True) - 1
        found = steady(new, attention_mask=longer, past_key_values=cache, position_ids=positions).logits
        expected = steady(torch.cat([kept, new], 1), use_cache=True).logits[:, -1:]
    assert float((found - expected).norm() / expected.norm()) < 2e-3
    cache.crop(-1000)
    assert cache.columns == 0 and cache.lengths == [0] and sorted(cache.pool.free) == list(range(cache.pool.total))


def test_a_dynamic_cache_that_the_caller_holds_becomes_a_paged_one(steady, tokenizer):
    ids = tokenizer(PROMPTS[1], return_tensors="pt").input_ids
    held = DynamicCache(config=steady.config)
    with torch.no_grad():
        steady(ids[:, :-1], past_key_values=held)
        assert isinstance(held, PagedCache) and held.get_seq_length() == ids.shape[1] - 1
        found = steady(ids[:, -1:], past_key_values=held).logits
        torch.testing.assert_close(found, steady(ids, use_cache=True).logits[:, -1:], rtol=2e-2, atol=2e-2)


def test_caches_of_full_precision_are_told(model, tokenizer):
    ids = tokenizer(PROMPTS[1], return_tensors="pt").input_ids
    with pytest.warns(UserWarning, match="StaticCache of full precision"):
        model.generate(ids, cache_implementation="static", **OPTIONS)


def test_arguments_by_place(model):
    ids, mask = torch.arange(20)[None] + 30, torch.ones(1, 20, dtype=torch.long)
    mask[0, :5] = 0
    with torch.no_grad():
        by_name = model(input_ids=ids, attention_mask=mask, use_cache=True).logits
        torch.testing.assert_close(model(ids, mask).logits[:, 5:], by_name[:, 5:])
        cache = PagedCache(model.kv_state.calibration, "cpu")
        torch.testing.assert_close(model(ids, mask, None, cache).logits[:, 5:], by_name[:, 5:])
    assert cache.lengths == [15]


def test_threads_do_not_share_a_pass(model, tokenizer):
    inputs = [tokenizer(prompt, return_tensors="pt").input_ids for prompt in PROMPTS]
    expected = [model.generate(ids, **OPTIONS) for ids in inputs]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda ids: model.generate(ids, **OPTIONS), inputs * 2))
    assert all(torch.equal(a, b) for a, b in zip(found, expected * 2, strict=True))


def test_a_pass_that_failed_ends_the_cache(model, monkeypatch):
    cache, ids = PagedCache(model.kv_state.calibration, "cpu"), torch.arange(5)[None]
    handle = model.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with torch.no_grad():
        with pytest.raises(ZeroDivisionError):
            model(ids, past_key_values=cache)
        handle.remove()
        with pytest.raises(UsageError, match="stopped in the middle"):
            model(ids, past_key_values=cache)
        cache.free()
        assert model(ids, past_key_values=cache).logits.isfinite().all()


def test_what_the_cache_does_not_serve_is_refused(checkpoint_of, calibrated):
    def fresh():
        return with_cache(checkpoint_of("llama"), KVFormat(32))

    ids = torch.arange(6)[None]
    other = fresh()
    other.set_attn_implementation("sdpa")
    with pytest.raises(UsageError, match="was set to 'sdpa'"):
        other(ids)
    with pytest.raises(UsageError, match="no gradients"):
        fresh().train()(ids, labels=ids)
    assert fresh().train()(ids, labels=ids, use_cache=False).loss.requires_grad
    with pytest.raises(UsageError, match="brings its own attention"):
        tilepress.load(calibrated, attn_implementation="eager")
    with pytest.raises(UsageError, match="attention mask of"):
        fresh()(ids, attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool))


@pytest.mark.parametrize("family", ["diffllama", "doge"])
def test_attention_that_changes_what_it_keeps_is_refused(checkpoint_of, tmp_path, family):
    source = checkpoint_of(family)
    with pytest.raises(UsageError):
        run_recipe(KVCache(), source, tmp_path / "out", text=few_words(2, 64))
    with torch.no_grad(), pytest.raises(UsageError, match="than it keeps|mask of its own"):
        with_cache(source, KVFormat(32))(torch.arange(8)[None])


def test_saving_leaves_the_calibration_behind(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert "kv_cache" not in (tmp_path / "config.json").read_text()
    assert not hasattr(tilepress.load(tmp_path), "kv_state")


def test_other_caches_and_copies_of_the_model(model, tokenizer):
    ids = tokenizer(PROMPTS[1], return_tensors="pt").input_ids
    with torch.no_grad():
        full = DynamicCache(config=model.config)
        model.model(ids, past_key_values=full)  # not announced: its own cache serves
        assert full.get_seq_length() == ids.shape[1]
        assert isinstance(model(ids[:, :1], past_key_values=full).past_key_values, DynamicCache)
    other = copy.deepcopy(model)
    assert torch.equal(other.generate(ids, **OPTIONS), model.generate(ids, **OPTIONS))


def test_values_that_are_not_finite_name_the_layer(checkpoint_of):
    model = with_cache(checkpoint_of("llama"), KVFormat(32))
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.fill_(float("inf"))
    with pytest.raises(TilepressError, match="layer 1 gives keys or values that are not finite"):
        model(torch.arange(4)[None])


def test_random_appends_frees_and_reuse(checkpoint_of):
    """Property: whatever sequences come, grow and go, each reads back its own rows, and free pages can hold anything."""
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies
    steps = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 90)), min_size=1, max_size=25)

    @hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
    @hypothesis.given(
        steps, st.sampled_from([KVFormat(32), KVFormat(64, 4, 32), KVFormat(32, 8), KVFormat(32, 16)]), st.booleans()
    )
    def check(steps, form, grows):
        calibration = uncalibrated(form, 2, 1)
        pool = PagePool(calibration, "cpu", None if grows else 6)
        caches = [PagedCache(calibration, "cpu", pool=pool) for _ in range(4)]
        generator, expected = torch.Generator().manual_seed(0), [[] for _ in caches]
        for which, count in steps:
            cache = caches[which]
            if count == 0:
                cache.free()
                expected[which] = []
            else:
                x = torch.randn(1, 2, count, form.head_dim, generator=generator)
                try:
                    cache.begin(torch.ones(1, count, dtype=torch.bool))
                except TilepressError:
                    assert not grows and pool.total == 6
                    continue
                cache.append(0, x, -x)
                expected[which].append(x[0].transpose(0, 1))
            if pool.free:
                pool.pages[0][pool.free] = 0xFF
            owned = [page for c in caches for table in c.tables for page in table]
            assert sorted(owned + pool.free) == list(range(pool.total))
            for c, rows in zip(caches, expected, strict=True):
                if not rows:
                    continue
                exact = torch.cat(rows)
                there = c.announced(torch.device("cpu"))
                args = (pool.pages[0], there.block_table, there.seq_lens, len(exact), *[None] * 4, form.head_dim)
                key, value = torch.ops.tilepress.kv_read(*args, form.bits, form.group_size, False, False, torch.float32)
                back = [fake_quantize(part, form, None, None, 1.0, False, 0) for part in (exact, -exact)]
                assert torch.equal(key[0].transpose(0, 1), back[0]) and torch.equal(value[0].transpose(0, 1), back[1])

    check()


@pytest.mark.gpu
def test_on_a_card(calibrated, model, tokenizer, tiny, tmp_path):
    """Calibrated there it costs the same; generating there gives tokens, and the simulated perplexity of the CPU."""
    run_recipe(KVCache(), tiny, tmp_path / "out", device="cuda", text=few_words(4, 128))
    protocol = Protocol(str(demo.TEXT), "gptq", 256, None, 3)
    expected = measure(model, tokenizer, protocol, kv="sim").perplexity
    for path in (calibrated, tmp_path / "out"):
        ours = tilepress.load(path, device="cuda", dtype=torch.float32)
        scores = measure(ours, tokenizer, protocol, kv="decode").to_json()
        assert (
            scores["perplexity"] == pytest.approx(expected, rel=0.01)
            and abs(scores["kv_cache"]["decode_over_sim"]) < 0.005
        )
        batch = tokenizer(list(PROMPTS), return_tensors="pt", padding=True).to("cuda")
        assert ours.generate(**batch, **OPTIONS).shape == (3, batch.input_ids.shape[1] + 12)


def _over_dequantized(module, query, key, value, mask, **given):
    """transformers' own eager attention of a model's class, over keys and values that come back from pages."""
    form, found = module.stored_as, []
    for x in (key, value):
        rows = x.transpose(1, 2)
        back = fake_quantize(rows.flatten(0, 1), form, None, None, 1.0, False, 0)
        found.append(back.view(rows.shape).transpose(1, 2))
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(module, query, *found, mask, **given)


def dequantizing(source, form: KVFormat):
    """transformers' own model, whose attention is eager and sees rounded keys and values."""
    AttentionInterface.register("over_dequantized", _over_dequantized)
    AttentionMaskInterface.register("over_dequantized", eager_mask)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    model.set_attn_implementation("over_dequantized")
    for module in model.modules():
        if hasattr(module, "layer_idx") and hasattr(module, "k_proj"):
            module.stored_as = form
    return model


SLIDING = [
    ("mistral", {}, [24, 24]),
    ("gemma3", {"sliding_window": 16}, [16, 0]),
    ("qwen3", {}, [0, 0]),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}, [0, 20]),
    ("gemma2", {"head_dim": 256, "query_pre_attn_scalar": 144}, [24, 0]),
    ("gemma2", {"sliding_window": 7, "attn_logit_softcapping": None}, [7, 0]),
    ("gpt-oss", {"sliding_window": 16, "head_dim": 64, "initializer_range": 0.2}, [16, 0]),
]


@pytest.mark.parametrize("family,changes,windows", SLIDING)
@pytest.mark.parametrize("bits", [4, 16])
def test_windows_caps_and_sinks(checkpoint_of, family, changes, windows, bits):
    """Prompts longer than windows, in pieces and single tokens, in a batch with padding, and the simulation: against transformers' own eager attention."""
    source = checkpoint_of(family, **changes)
    model = tilepress.load(source, dtype=torch.float32).eval()
    layers = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "k_proj")]
    form = KVFormat(layers[0].head_dim, bits)
    kv_cache.install(model, uncalibrated(form, layers[0].k_proj.out_features // form.head_dim, len(layers)))
    assert [window_of(layer) for layer in layers] == windows
    generator = torch.Generator().manual_seed(0)
    ids, mask = torch.randint(3, 290, (3, 70), generator=generator), torch.ones(3, 70, dtype=torch.long)
    mask[1, :5] = 0  # padding is in none of its windows
    real, positions = mask.bool(), (mask.cumsum(1) - 1).clamp(min=0)
    whole = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
    with torch.no_grad():
        expected = dequantizing(source, form)(ids, **whole).logits
        with kv_cache.cache_mode(model, "sim"):
            simulated = model(ids, **whole).logits
        cache, found, at = PagedCache(model.kv_state.calibration, "cpu"), [], 0
        for count in (40, 7, 20, 1, 1, 1):
            upto = mask[:, : at + count]
            step = ids[:, at : at + count], upto, positions[:, at : at + count]
            given = dict(zip(("input_ids", "attention_mask", "position_ids"), step, strict=True))
            found.append(model(**given, past_key_values=cache).logits)
            at += count
    for logits in (torch.cat(found, 1), simulated):
        torch.testing.assert_close(logits[real], expected[real], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("family", ["gemma2", "gpt-oss"])
def test_generated_tokens_are_those_of_eager_attention(checkpoint_of, family):
    """Each token that `generate` takes, of prompts beyond the window in a padded batch, is the likeliest of transformers' own pass over all before it."""
    source = checkpoint_of(family, sliding_window=24, initializer_range=0.1)
    model, stock = with_cache(source, KVFormat(32, 16)), dequantizing(source, KVFormat(32, 16))
    ids, mask = torch.arange(80).view(2, 40) * 7 % 290 + 3, torch.ones(2, 40, dtype=torch.long)
    mask[1, :9] = 0
    out = model.generate(ids, attention_mask=mask, **OPTIONS, return_dict_in_generate=True, output_logits=True)
    assert isinstance(out.past_key_values, PagedCache) and out.past_key_values.lengths == [51, 42]
    mask = torch.cat([mask, mask.new_ones(2, 12)], 1)
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        expected = stock(out.sequences, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, 39:-1]
    torch.testing.assert_close(torch.stack(out.logits, 1), expected, rtol=2e-3, atol=2e-3)
    told = tilepress.runtime.loader.paths(model)
    assert told[f"decode_attention reference ({KVFormat(32, 16).name}) on cpu"] == 2, told


@pytest.mark.parametrize("family", ["gemma2", "gpt-oss"])
def test_perplexity_of_caps_and_sinks(checkpoint_of, tmp_path, family):
    """Calibrated in 8 bits, simulated and decoded: about what the model itself has."""
    source = checkpoint_of(family, sliding_window=24)
    run_recipe(KVCache(bits=8), source, tmp_path / "out", text=few_words(4, 64))
    model, own = tilepress.load(tmp_path / "out", dtype=torch.float32), byte_tokenizer()
    protocol = Protocol(str(demo.TEXT), "gptq", 64, None, 2)
    base = measure(tilepress.load(source, dtype=torch.float32), own, protocol).perplexity
    simulated = measure(model, own, protocol, kv="sim").perplexity
    decoded = measure(model, own, protocol, kv="decode").perplexity
    assert simulated == pytest.approx(base, rel=0.01) and decoded == pytest.approx(simulated, rel=1e-3)
