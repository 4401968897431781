"""A calibrated attention cache in vLLM's own engine, against transformers' forward pass over the same pages.

One forward pass over prompt and answer stands beside each request: what other requests do, and in which pieces a prompt comes, must change nothing.
Pages that the scheduler hands out hold NaN until they are written.
"""

import gc
import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from support import artifacts
from support.artifacts import few_words, prune, quantize, run_recipe
from support.engines import CARD, assert_as, differences, engine, generate, model_of, sampled, vllm

import tilepress
from tilepress import KVCache, demo
from tilepress.formats import TilepressError, kv_calibration
from tilepress.formats.checkpoint import Checkpoint
from tilepress.formats.kv_calibration import CachedLayer, KVCalibration, Side
from tilepress.formats.kv_int4 import KVFormat, forms_of
from tilepress.kernels import arch, jit
from tilepress.runtime.vllm import attention, cache

# Bounds of log-probabilities: at most, and on average. A rounding elsewhere tips a stored number from one code to the next here and there, and attention of
# further layers sees it. 8 bits are compared, where that does little: in 4 bits the model itself, given a text at once or in pieces, differs by up to 1.
TOLERANCE, MEAN = (0.3, 0.05) if CARD else (0.15, 0.01)
PAGE = 64 * 1088  # bytes of the demo's model in 8 bits
ROOM = {"kv_cache_memory_bytes": 20 * PAGE, "max_model_len": 512, "block_size": 64}
WORDS = [3 + 7 * i % 250 for i in range(2000)]


@pytest.fixture(scope="module", autouse=True)
def room():
    """The tests say how much memory a cache has, and ask for it on a card. Few queries are a long piece, so that batches have long and short ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "LONG", 48)
        patch.setattr(attention.PackedMetadataBuilder, "reorder_batch_threshold", 47)
        patch.delenv("VLLM_CPU_KVCACHE_SPACE")
        if CARD:
            patch.setenv(cache.SWITCH, "packed")
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Writes the demo's model with a cache of a form, once for each."""
    folder, found = tmp_path_factory.mktemp("caches"), {}

    def make(bits: int = 4, mode: str = "dynamic"):
        if (bits, mode) not in found:
            out = found[bits, mode] = folder / f"{mode}{bits}"
            run_recipe(KVCache(bits, mode=mode), demo.MODEL, out, text=few_words(4, 64))
        return found[bits, mode]

    return make


@pytest.fixture(scope="module")
def mixed(made):
    """Layers of four forms; the second has keys unlike its values."""
    of_four, of_eight = (kv_calibration.load(Checkpoint(made(*form))) for form in ((4, "static"), (8, "dynamic")))
    first, last = of_four.layers[1], of_eight.layers[1]
    unlike = CachedLayer(first.key, last.value, forms_of(first.form, last.form))
    plain = CachedLayer(Side(None), Side(None), KVFormat(64, 16))
    layers = of_four.layers[0], unlike, plain, of_eight.layers[3]
    path = made(8)
    out = path.with_name("mixed")
    out.mkdir()
    for file in path.iterdir():
        if file.is_file():
            (out / file.name).symlink_to(file)
    (out / kv_calibration.FOLDER).mkdir()
    calibration = KVCalibration(of_four.kv_heads, layers)
    for name, content in kv_calibration.to_files(calibration, kv_calibration.weights_hash(Checkpoint(out))).items():
        (out / name).write_bytes(content)
    return out


def poisoned(llm):
    """Fill the pages that the scheduler hands out, and those that it takes back for good, with NaN. Returns the engine."""
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    layers = [layer.self_attn.attn for layer in model_of(llm).model.layers]
    hand_out, take_back = pool.get_new_blocks, pool.free_blocks

    def poison(blocks) -> None:
        numbers = [block.block_id for block in blocks]
        for layer in layers:
            layer.kv_cache[numbers] = 255  # float16's NaN

    def get_new_blocks(count: int) -> list:
        blocks = hand_out(count)
        poison(blocks)
        return blocks

    def free_blocks(ordered) -> None:
        blocks = list(ordered)
        take_back(blocks)
        poison([block for block in blocks if block.ref_cnt == 0 and block.block_hash is None and not block.is_null])

    pool.get_new_blocks, pool.free_blocks = get_new_blocks, free_blocks
    poison(pool.blocks)
    return llm


def preemptions(llm) -> list:
    """Return a list that grows with every preemption from now on."""
    scheduler, seen = llm.llm_engine.engine_core.engine_core.scheduler, []
    preempt = scheduler._preempt_request

    def counted(request, *args, **kwargs):
        seen.append(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = counted
    return seen


def assert_near(model, prompts: list[list[int]], outputs: list, greedy: bool = True) -> None:
    found = differences(model, prompts, outputs, TOLERANCE if greedy else None)
    assert found.max() < TOLERANCE and found.mean() < MEAN


@pytest.fixture(scope="module")
def packed(made):
    """An engine with few pages, which takes prompts in chunks."""
    llm = engine(made(8), max_num_batched_tokens=96, enable_chunked_prefill=True, enable_prefix_caching=True, **ROOM)
    return poisoned(llm)


@pytest.fixture(scope="module")
def model(made):
    return tilepress.load(made(8), dtype="float32")


def test_one_request(packed, model, monkeypatch):
    attend, pieces = attention.PackedAttention._attend, []

    def counted(self, pages, query, piece, out):
        pieces.append(piece.rows)
        attend(self, pages, query, piece, out)

    monkeypatch.setattr(attention.PackedAttention, "_attend", counted)
    assert {type(layer.self_attn.attn.impl) for layer in model_of(packed).model.layers} == {attention.PackedAttention}
    prompt = WORDS[:70]
    (output,) = generate(packed, [prompt], 20)
    assert pieces == [slice(0, 70)] * 4  # one of each layer
    assert_near(model, [prompt], [output])
    greedy = model.generate(torch.tensor([prompt]), max_new_tokens=20, min_new_tokens=20, do_sample=False)
    assert CARD or greedy[0, len(prompt) :].tolist() == list(output.token_ids)


def test_long_pieces_go_to_attention_of_vllms(packed, model, monkeypatch):
    """Its CPU build has none over tokens that lie one behind another; one that takes the same arguments stands for it."""
    seen = []

    def flash(q, k, v, *, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k, softmax_scale, causal, out):
        (zero, rows), (first, length) = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        assert zero == first == 0 and rows == len(q) == max_seqlen_q and length <= max_seqlen_k == len(k) and causal
        seen.append((rows, length))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k[:length], v[:length]))
        mask = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
        shared = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True
        )
        out.copy_(shared[0].transpose(0, 1))

    for layer in model_of(packed).model.layers:
        monkeypatch.setattr(layer.self_attn.attn.impl, "flash", flash)
    prompt = WORDS[1600:1750]
    assert_near(model, [prompt], generate(packed, [prompt], 5))
    assert seen == [(96, 96)] * 4 + [(54, 150)] * 4


def test_what_a_prompt_is_worth(packed, model):
    """Perplexity by way of the engine."""
    prompt = WORDS[300:500]
    (found,) = packed.generate([{"prompt_token_ids": prompt}], sampled(1, prompt_logprobs=0), use_tqdm=False)
    expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for i, told in enumerate(found.prompt_logprobs[1:]):
        assert math.isclose(expected[i, prompt[i + 1]].item(), told[prompt[i + 1]].logprob, abs_tol=TOLERANCE)


def test_a_prefix_is_shared(packed, model):
    """A hit of two whole pages, of one, a miss, and a prompt that is cached to its end."""
    shared = WORDS[500:640]
    prompts = [shared, [*shared[:130], 9, 8], [*shared[:70], 7], [5, *shared], shared[:128]]
    assert_near(model, prompts[:1], generate(packed, prompts[:1]))
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    found = packed.generate(asked, sampled(6), use_tqdm=False)
    assert [request.num_cached_tokens for request in found] == [128, 128, 64, 0, 64]
    assert_near(model, prompts, [request.outputs[0] for request in found])


def test_more_requests_than_pages(packed, model):
    """Prompts in chunks beside requests that decode; some lose their pages and are computed again."""
    seen = preemptions(packed)
    prompts = [WORDS[100 * i : 100 * i + length] for i, length in enumerate((120, 9, 100, 60, 1, 250, 70, 110))]
    outputs = generate(packed, prompts, 80)
    assert seen
    assert_near(model, prompts, outputs)


def test_several_samples_share_a_prompt(packed, model):
    prompt = WORDS[900:1000]
    outputs = generate(packed, [prompt], 40, n=3, temperature=1.0)
    assert len({tuple(output.token_ids) for output in outputs}) == 3
    assert_near(model, [prompt] * 3, outputs, greedy=False)


def test_a_request_is_aborted(packed, model):
    """Its pages go to the next one, while others go on."""
    core, prompts = packed.llm_engine, [WORDS[1000:1150], WORDS[1150:1240], WORDS[1300:1500]]
    for name, prompt in zip("ab", prompts[:2], strict=True):
        core.add_request(name, {"prompt_token_ids": prompt}, sampled(30))
    for _ in range(10):
        core.step()
    core.abort_request(["a"])
    core.add_request("c", {"prompt_token_ids": prompts[2]}, sampled(12))
    ended = {}
    while core.has_unfinished_requests():
        ended |= {request.request_id: request.outputs[0] for request in core.step() if request.finished}
    assert set(ended) == {"b", "c"} and len(ended["b"].token_ids) == 30
    assert_near(model, prompts[1:], [ended["b"], ended["c"]])


def fill_with_nan(model: torch.nn.Module) -> list[int]:
    """Fill all pages, and return what a token takes in each layer."""
    layers = [layer.self_attn.attn.kv_cache for layer in model.model.layers]
    return [pages.fill_(255).shape[-1] for pages in layers]


def test_drafted_tokens_and_mixed_forms(mixed, monkeypatch):
    """Layers of four forms, one with keys unlike its values; n-grams of the prompt are drafted, some are taken.

    In a process of its own: what drafts imports keeps vLLM's CPU build from starting another engine."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    llm = engine(mixed, speculative_config=drafts, max_num_batched_tokens=96, **ROOM, disable_log_stats=False)
    assert llm.apply_model(fill_with_nan) == [[32 + 32, 32 + 68, 128 + 128, 68 + 68]]
    model, text = tilepress.load(mixed, dtype="float32"), [9, 8, 7, 6, 5, 4, 3] * 30
    prompts = [text[:200], WORDS[:130], text[3:80], [5, *text[:64]]]
    assert_near(model, prompts, generate(llm, prompts, 30))
    counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    drafted, taken = (counts[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
    assert 0 < taken < drafted


def test_w8a8_weights_and_what_4_bits_save(checkpoint_of, tmp_path, monkeypatch):
    """Weights by vLLM's own kernels, in blocks that vLLM chooses. The same memory holds 3.5 times as many tokens as in 16 bits."""
    quantize(checkpoint_of("llama", **artifacts.CARD), tmp_path / "int8")
    run_recipe(KVCache(), tmp_path / "int8", tmp_path / "out", text=few_words(4, 64))

    def tokens(switch: str, backend: str) -> int:
        monkeypatch.setenv(cache.SWITCH, switch)
        llm = engine(tmp_path / "out", dtype="bfloat16", kv_cache_memory_bytes=1 << 24)
        layer, config = model_of(llm).model.layers[0].self_attn.attn, llm.llm_engine.vllm_config.cache_config
        assert CARD or layer.attn_backend.get_name() == backend
        model, prompts = (
            tilepress.load(tmp_path / "out", dtype=torch.float32, kv=switch != "plain"),
            [WORDS[:70], WORDS[:5]],
        )
        assert_as(model, prompts, generate(llm, prompts), 0.25)  # bfloat16 against float32
        return config.num_gpu_blocks * config.block_size

    ours = tokens("packed" if CARD else "", "TILEPRESS")
    gc.collect()  # an engine that goes takes vLLM's groups of ranks with it, from the next one too
    assert ours >= 3.3 * tokens("plain", "CPU_ATTN")


@pytest.mark.skipif(CARD and torch.cuda.device_count() < 2, reason="one card")
def test_sparse_weights_on_two_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv(cache.SWITCH, "packed")
    prune(demo.MODEL, tmp_path / "sparse", 0.5, format="tiled-bitmap")
    run_recipe(KVCache(), tmp_path / "sparse", tmp_path / "out", text=few_words(4, 64))
    llm = engine(tmp_path / "out", tensor_parallel_size=2, distributed_executor_backend="mp", **ROOM)
    prompts = [WORDS[:70], WORDS[100:105]]
    assert_near(tilepress.load(tmp_path / "out", dtype="float32"), prompts, generate(llm, prompts))


def asked_of(path, **changes):
    """What an engine's configuration says of the cache."""
    config = json.loads((path / "config.json").read_text())
    text = SimpleNamespace(**config)
    settings = {"cache_dtype": "auto", "user_specified_block_size": False, "block_size": 16, "mla": False}
    settings |= {"dcp": 1, "transfer": None, "layers": text.num_hidden_layers, "heads": 2, "dim": 64} | changes
    text.num_hidden_layers = settings["layers"]
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(path),
            revision=None,
            hf_config=text,
            hf_text_config=text,
            use_mla=settings["mla"],
            dtype=torch.float32,
            get_total_num_kv_heads=lambda: settings["heads"],
            get_head_size=lambda: settings["dim"],
        ),
        cache_config=SimpleNamespace(
            **{name: settings[name] for name in ("cache_dtype", "user_specified_block_size", "block_size")}
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=settings["dcp"]),
        kv_transfer_config=settings["transfer"],
        load_config=SimpleNamespace(download_dir=None),
    )


@pytest.mark.parametrize(
    "ranks,rank,local,own", [(1, 0, 2, (0, 2)), (2, 1, 1, (1, 2)), (4, 2, 1, (1, 2)), (4, 1, 1, (0, 1))]
)
def test_a_rank_takes_its_own_heads(made, monkeypatch, ranks, rank, local, own):
    """Two heads: one for each of two ranks, and one for every two of four."""
    monkeypatch.setattr(vllm.distributed, "get_tensor_model_parallel_rank", lambda: rank)
    monkeypatch.setattr(vllm.distributed, "get_tensor_model_parallel_world_size", lambda: ranks)
    monkeypatch.setenv(cache.SWITCH, "packed")
    found = cache.cache_for(asked_of(made(4, "static")), LAYER | {"num_heads": 4 // ranks, "num_kv_heads": local})
    whole = kv_calibration.load(Checkpoint(made(4, "static"))).layers[1]
    for part, side in zip(found.sides, whole.sides, strict=True):
        assert torch.equal(part.channels, side.channels[:, slice(*own)]) and part.clip == side.clip
        assert torch.equal(part.fixed, side.fixed[slice(*own)])


LAYER = {"prefix": "model.layers.1.self_attn.attn", "num_heads": 4, "num_kv_heads": 2, "head_size": 64}


@pytest.mark.parametrize(
    "changes,layer,words",
    [
        ({"cache_dtype": "fp8"}, {}, "--kv-cache-dtype fp8 asks for another"),
        ({"user_specified_block_size": True, "block_size": 48}, {}, "blocks of 48 tokens are no whole pages of 64"),
        ({"mla": True}, {}, "latent attention"),
        ({"dcp": 2}, {}, "not shared along its tokens"),
        ({"transfer": object()}, {}, "not handed to other engines"),
        ({"layers": 5}, {}, "calibrated for 4 layers with 2 KV heads of 64, the model has 5 with 2 of 64"),
        ({"dim": 128}, {}, "the model has 4 with 2 of 128"),
        ({}, {"head_size": 128}, "heads of 128, the cache was calibrated for 64"),
        ({}, {"per_layer_sliding_window": 128}, "layers.1.self_attn.attn has a sliding window"),
        ({}, {"logits_soft_cap": 30.0}, "has a soft cap"),
        ({}, {"extra_impl_args": {"sinks": torch.zeros(4)}}, "has sinks"),
        ({}, {"attn_type": "encoder_decoder"}, "not a decoder's own"),
    ],
)
def test_what_a_calibrated_cache_does_not_serve(made, monkeypatch, changes, layer, words):
    """Asked for, it is refused; else vLLM's own cache serves and two lines say why."""
    config, said = asked_of(made(), **changes), []
    monkeypatch.setenv(cache.SWITCH, "packed")
    with pytest.raises(TilepressError) as raised:
        cache.cache_for(config, LAYER | layer)
    assert words in raised.value.message and raised.value.hint
    monkeypatch.delenv(cache.SWITCH)
    monkeypatch.setattr(cache._log, "warning_once", lambda text, *words: said.append(text % words))
    assert cache.cache_for(config, LAYER | layer) is None
    (text,) = said
    assert words in text and "vLLM's own attention cache serves" in text and len(text.splitlines()) == 2


@pytest.mark.parametrize("what", ["weights", "missing", "attention", "version", "switch"])
def test_a_sidecar_or_an_engine_that_do_not_fit(made, tmp_path, monkeypatch, what):
    out, words = tmp_path / "out", "belongs to other weights"
    out.mkdir()
    for file in made().iterdir():
        (out / file.name).symlink_to(file)
    if what == "weights":
        (out / kv_calibration.FOLDER).unlink()
        shutil.copytree(made() / kv_calibration.FOLDER, out / kv_calibration.FOLDER)
        facts = out / kv_calibration.FOLDER / kv_calibration.FACTS_NAME
        facts.write_text(facts.read_text().replace(json.loads(facts.read_text())["weights_sha256"], 64 * "0"))
    elif what == "missing":
        (out / kv_calibration.FOLDER).unlink()
        words = "is missing"
    elif what == "attention":
        monkeypatch.setattr(cache, "Attention", type("Attention", (), {"__init__": lambda self, prefix: None}))
        words = "makes attention layers without attn_backend"
    elif what == "version":
        monkeypatch.setattr(cache.compat, "installed", lambda: "0.99.0")
        words = "serves artifacts in vLLM 0.24 to 0.33, this is 0.99.0"
    monkeypatch.setenv(cache.SWITCH, "on" if what == "switch" else "packed")
    if what == "switch":
        words = f"{cache.SWITCH}=on is unknown"
        monkeypatch.setattr(cache._log, "warning_once", lambda text, *words: None)
    with pytest.raises(TilepressError, match=words):
        cache.calibration_for(asked_of(out))


@pytest.mark.parametrize(
    "dtype,words",
    [(torch.bfloat16, "packed pages have to be asked for on cards"), (torch.float32, "no kernel serves a cache of")],
)
def test_cards_take_it_when_they_are_asked_to(made, monkeypatch, dtype, words):
    config, said = asked_of(made(4)), []
    config.model_config.dtype = dtype
    monkeypatch.setattr(cache.torch, "empty", lambda *size: SimpleNamespace(device=torch.device("cuda", 0)))
    monkeypatch.setattr(jit, "why_not", lambda device: None)
    monkeypatch.setattr(arch, "card", lambda device: arch.HOPPER)
    monkeypatch.setattr(cache, "PackedLayer", lambda layer, refits, device: device)
    monkeypatch.setattr(cache, "_own_heads", lambda *_: (0, 2))
    monkeypatch.setattr(cache._log, "warning_once", lambda text, *words: said.append(text % words))
    monkeypatch.delenv(cache.SWITCH, raising=False)
    found = cache.cache_for(config, LAYER)
    assert found is None and len(said) == 1 and words in said[0]
    monkeypatch.setenv(cache.SWITCH, "packed")
    assert cache.cache_for(config, LAYER).type == "cuda"


def test_other_layers_keep_their_cache(made):
    """Those of a draft model, and of artifacts without a calibration."""
    assert cache.cache_for(asked_of(demo.MODEL), LAYER) is None
    assert cache.cache_for(asked_of(made()), LAYER | {"prefix": "model.layers.4.self_attn.attn"}) is None


def build(asked: attention.CommonAttentionMetadata) -> attention.PackedMetadata:
    """Return what a batch becomes; no number may be read from the card."""
    spec, config = SimpleNamespace(block_size=64), SimpleNamespace()
    with NothingRead():
        return attention.PackedMetadataBuilder(spec, ["layer"], config, torch.device("cpu")).build(0, asked)


def batch(counts: list[int], lengths: list[int], tokens: int | None = None) -> attention.CommonAttentionMetadata:
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).to(torch.int32)
    lengths = torch.tensor(lengths, dtype=torch.int32)
    tokens = int(starts[-1]) if tokens is None else tokens
    return attention.CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=lengths,
        num_reqs=len(counts),
        num_actual_tokens=tokens,
        max_query_len=max(counts),
        max_seq_len=int(lengths.max()),
        block_table_tensor=torch.arange(3 * len(counts), dtype=torch.int32).view(-1, 3),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        seq_lens_cpu_upper_bound=lengths.clone(),
    )


class NothingRead(torch.utils._python_dispatch.TorchDispatchMode):
    """Fails where a number is read from a tensor, which on a card would wait for it."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(function) and "nonzero" not in str(function)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize(
    "counts,lengths,tokens,are_single",
    [
        ([1, 1, 1], [70, 5, 129], 3, True),
        ([1, 1, 0, 0], [70, 5, 0, 0], 4, True),  # two requests in a graph for four
        ([4, 4, 0], [70, 5, 0], 12, False),  # with drafts, in a graph for three
        ([1, 1, 40, 47], [70, 5, 40, 100], 89, False),
        ([1, 1], [70, 5], 4, False),  # rows of no sequence
    ],
)
def test_a_batch_is_taken_as_it_lies_on_the_card(counts, lengths, tokens, are_single):
    """Its memory stands still. Single queries need no word on where they lie, and get the kernel for them."""
    asked = batch(counts, lengths, tokens)
    found = build(asked)
    assert found.queries == tokens and (found.starts is None) == are_single
    assert found.table.data_ptr() == asked.block_table_tensor.data_ptr()
    assert found.seq_lens.data_ptr() == asked.seq_lens.data_ptr()
    assert are_single or found.starts.data_ptr() == asked.query_start_loc.data_ptr()


@pytest.mark.parametrize(
    "counts,lengths,others,starts",
    [
        ([1, 1, 50, 64], [70, 5, 50, 100], 2, None),
        ([1, 40, 64], [70, 40, 64], 2, [0, 1, 41]),
        ([64, 1, 48], [64, 70, 190], 2, [0, 64, 65]),  # where vLLM does not sort
        ([100], [150], 0, None),
        ([1, 64], [5, attention._MOST_READ + 1], 2, [0, 1, 65]),  # too much to be read back
    ],
)
def test_long_pieces_of_prompts_are_told_apart(counts, lengths, others, starts):
    found = build(batch(counts, lengths))
    begins = [sum(counts[:i]) for i in range(len(counts) + 1)]
    assert found.queries == begins[others] and len(found.table) == len(found.seq_lens) == others
    assert (found.starts is None and starts is None) or found.starts.tolist() == starts
    for i, piece in enumerate(found.pieces, others):
        assert piece.rows == slice(begins[i], begins[i + 1]) and piece.length == lengths[i]
        assert piece.table.tolist() == [[3 * i, 3 * i + 1, 3 * i + 2]] and piece.seq_lens.tolist() == [lengths[i]]
        assert [end.tolist() for end in piece.ends] == [[0, counts[i]], [0, lengths[i]]]
    assert others + len(found.pieces) == len(counts)


def test_graphs_hold_where_kernels_serve_every_layer(mixed, made, monkeypatch):
    def support(path, dtype: torch.dtype = torch.bfloat16) -> str:
        config = asked_of(path)
        config.device_config, config.model_config.dtype = SimpleNamespace(device=torch.device("cpu")), dtype
        return attention.PackedMetadataBuilder.get_cudagraph_support(config, None).name

    assert support(made()) == "NEVER"
    monkeypatch.setattr(jit, "why_not", lambda device: None)
    monkeypatch.setattr(arch, "card", lambda device: arch.HOPPER)
    assert support(made()) == "UNIFORM_BATCH"
    assert support(made(), torch.float32) == "NEVER"
    assert support(mixed) == "NEVER"  # keys unlike values: a reference appends


def test_constructors_are_wrapped_once():
    attention.watch()
    for layer in (attention.Attention, attention.MLAAttention):
        wrapped = layer.__init__
        attention.watch()
        assert layer.__init__ is wrapped and not hasattr(wrapped.__wrapped__, "gives_caches")
