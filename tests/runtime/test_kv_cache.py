"""The paged cache in generate: the tokens of single prompts in batches, pages taken, freed and used again, pools that are too small."""

import copy

import pytest
import torch
from conftest import few_words, run_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import tilepress
from tilepress import demo
from tilepress.compress.kv import KVRecipe
from tilepress.eval.perplexity import Protocol, perplexity
from tilepress.formats import TilepressError, UsageError
from tilepress.formats.kv_calibration import uncalibrated
from tilepress.formats.kv_int4 import KVFormat, fake_quantize
from tilepress.runtime import kv_cache
from tilepress.runtime.kv_cache import PagedCache, PagePool

OPTIONS = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
PROMPTS = ("import os", "def main(args):\n    for name in args:\n        print(name", "The")


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory, tiny):
    path = tmp_path_factory.mktemp("kv") / "tiny-kv4"
    run_recipe(KVRecipe(few_words(8, 256)), tiny, path)
    return path


@pytest.fixture(scope="module")
def model(calibrated):
    return tilepress.load(calibrated, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(calibrated):
    return AutoTokenizer.from_pretrained(calibrated, padding_side="left", pad_token="<|endoftext|>")


def with_cache(source, form):
    model = tilepress.load(source, dtype=torch.float32)
    config = model.config
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    kv_cache.install(model, uncalibrated(form, kv_heads, config.num_hidden_layers))
    return model


def test_generate_uses_the_packed_cache(model, tokenizer):
    ids = tokenizer(PROMPTS[1], return_tensors="pt").input_ids
    out = model.generate(ids, return_dict_in_generate=True, **OPTIONS)
    cache = out.past_key_values
    assert isinstance(cache, PagedCache) and cache.lengths == [out.sequences.shape[1] - 1]
    assert cache.pool.pages[0].dtype == torch.uint8 and "int4 dynamic, row-wise" in repr(cache)
    assert tilepress.runtime.loader.paths(model)["decode_attention reference (int4 dynamic, row-wise) on cpu"] == 4
    unused = model.generate(ids, use_cache=False, **OPTIONS)
    assert unused.shape == out.sequences.shape


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2-64", "opt", "mixtral"])
def test_16_bits_give_the_tokens_of_the_stock_cache(checkpoint_of, family):
    """bfloat16 pages and a bfloat16 model: nothing is lost, whatever the prompt's length and padding."""
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


def test_batches_with_padding_give_the_tokens_of_single_prompts(model, tokenizer):
    batch = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    together = model.generate(**batch, **OPTIONS)[:, batch.input_ids.shape[1] :]
    for prompt, tokens in zip(PROMPTS, together, strict=True):
        alone = tokenizer(prompt, return_tensors="pt")
        assert torch.equal(model.generate(**alone, **OPTIONS)[0, alone.input_ids.shape[1] :], tokens)


def test_pieces_of_a_prompt_give_what_the_whole_gives(model, tokenizer):
    ids = tokenizer(demo.TEXT.read_text()[:900], return_tensors="pt").input_ids[:, :200]
    with torch.no_grad():
        whole = model(ids, use_cache=True).logits
        cache = PagedCache(model.kv_state.calibration, "cpu", num_pages=4)
        pieces = torch.cat(
            [model(piece, past_key_values=cache).logits for piece in ids.split([70, 1, 1, 64, 1, 63], 1)], 1
        )
    assert cache.lengths == [200] and len(cache.pool.free) == 0
    assert float((pieces - whole).norm() / whole.norm()) < 0.02  # a value on the edge of two codes may tip


def test_simulated_and_decoded_perplexity_agree(model, tokenizer):
    scores = perplexity(model, tokenizer, Protocol(str(demo.TEXT), "gptq", 256, None, 3), kv="decode")
    assert abs(scores["kv_cache"]["decode_over_sim"]) < 0.003
    alone = perplexity(model, tokenizer, Protocol(str(demo.TEXT), "gptq", 256, None, 3), kv="sim")
    assert alone["perplexity"] == pytest.approx(scores["kv_cache"]["sim_perplexity"], rel=1e-6)
    assert model.kv_state.mode == "cache"


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
    for i, rotate in ((1, calibration.rotate), (2, False)):
        exact = results["off"][i][0].transpose(0, 1)
        expected = fake_quantize(exact, calibration.form, *calibration.layers[0][i - 1], rotate, calibration.refits)
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
    assert cache.lengths == [100] and cache.columns == 100
    with torch.no_grad():
        model(ids[:, 100:128], past_key_values=cache)
    assert cache.lengths == [128]
    with pytest.raises(UsageError, match="holds 1 sequences, the batch has 2"):
        model(ids[:, :2].expand(2, 2), past_key_values=cache)
    cache.free()
    assert len(cache.pool.free) == 2 and cache.get_seq_length() == 0


def test_beams_and_cropping(model, tokenizer):
    ids = tokenizer(PROMPTS[1], return_tensors="pt").input_ids
    beams = model.generate(ids, num_beams=3, **OPTIONS)
    assert beams.shape == (1, ids.shape[1] + 12)
    cache = PagedCache(model.kv_state.calibration, "cpu")
    with torch.no_grad():
        model(torch.cat([ids, ids + 1], 1), past_key_values=cache)
        cache.crop(-ids.shape[1])
        found = model(torch.tensor([[7]]), past_key_values=cache).logits
        expected = model(torch.cat([ids, torch.tensor([[7]])], 1), use_cache=True).logits[:, -1:]
    assert float((found - expected).norm() / expected.norm()) < 0.02
    cache.reorder_cache(torch.tensor([0, 0, 0]))
    assert len({page for table in cache.tables for page in table}) == 3 * len(cache.tables[0])


def test_other_caches_and_copies_of_the_model(model, tokenizer):
    ids = tokenizer(PROMPTS[1], return_tensors="pt").input_ids
    with torch.no_grad():
        full = DynamicCache(config=model.config)
        model.model(ids, past_key_values=full)  # not announced: its own cache serves
        assert full.get_seq_length() == ids.shape[1]
        assert isinstance(model(ids[:, :1], past_key_values=full).past_key_values, DynamicCache)
    other = copy.deepcopy(model)
    assert torch.equal(other.generate(ids, **OPTIONS), model.generate(ids, **OPTIONS))


def test_keys_that_are_not_finite_name_the_layer(checkpoint_of):
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
        caches = [PagedCache(calibration, "cpu", 0) for _ in range(4)]
        pool = PagePool(calibration, "cpu", None if grows else 6)
        for cache in caches:
            cache.pool = pool
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
                args = (pool.pages[0], c.block_table, c.seq_lens, len(exact), None, None, None, None, form.head_dim)
                key, value = torch.ops.tilepress.kv_read(*args, form.bits, form.group_size, False, False, torch.float32)
                back = [fake_quantize(part, form, None, None, 1.0, False, 0) for part in (exact, -exact)]
                assert torch.equal(key[0].transpose(0, 1), back[0]) and torch.equal(value[0].transpose(0, 1), back[1])

    check()


@pytest.mark.gpu
def test_on_a_card(calibrated, model, tokenizer, tiny, tmp_path):
    """Calibrated there it costs the same; generating there gives tokens, and the simulated perplexity of the CPU."""
    run_recipe(KVRecipe(few_words(8, 256)), tiny, tmp_path / "out", device="cuda")
    protocol = Protocol(str(demo.TEXT), "gptq", 256, None, 3)
    expected = perplexity(model, tokenizer, protocol, kv="sim")["perplexity"]
    for path in (calibrated, tmp_path / "out"):
        ours = tilepress.load(path, device="cuda", dtype=torch.float32)
        scores = perplexity(ours, tokenizer, protocol, kv="decode")
        assert (
            scores["perplexity"] == pytest.approx(expected, rel=0.01)
            and abs(scores["kv_cache"]["decode_over_sim"]) < 0.005
        )
        batch = tokenizer(list(PROMPTS), return_tensors="pt", padding=True).to("cuda")
        assert ours.generate(**batch, **OPTIONS).shape == (3, batch.input_ids.shape[1] + 12)
