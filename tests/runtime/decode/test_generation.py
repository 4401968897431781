"""The decode loop: tokens of transformers' own generate, whatever runs beside a request, when it comes and how its prompt is cut."""

import math

import pytest
import torch
from support.artifacts import CARD, STACKED, prune, quantize, with_cache
from support.fallbacks import FALLBACKS, refuse_all

import tilepress
from tilepress.formats import UsageError
from tilepress.formats.kv_int4 import KVFormat
from tilepress.kernels import jit
from tilepress.kernels.arch import references
from tilepress.runtime.decode import decoder
from tilepress.runtime.decode.generation import Engine, Request, generate
from tilepress.runtime.decode.sampling import Sampling

FAMILIES = ["llama", "llama-tied", "qwen2", "qwen3", "mistral", "opt"]
PROMPTS = [[5, 9, 2, 77, 130], [8], [250, 3, 3, 9, 40, 41, 7, 7, 100], list(range(10, 80)), [1, 2]]


def test_fallbacks_are_those_of_all_ops():
    """Also of ops that come later: each file that defines one has its reference in the list."""
    assert all(callable(getattr(owner, name)) for owner, names in FALLBACKS.items() for name in names)
    listed = {owner.__module__ if isinstance(owner, type) else owner.__name__ for owner in FALLBACKS}
    defining = {f"tilepress.kernels.{f.stem}" for f in jit.FOLDER.glob("*.py") if "library.define(" in f.read_text()}
    assert listed == defining


def theirs(model, prompt: list[int], count: int, **options) -> list[int]:
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options
    return model.generate(torch.tensor([prompt]), max_new_tokens=count, **options)[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def llama(checkpoint_of):
    return tilepress.load(checkpoint_of("llama"), dtype=torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_every_family(family, checkpoint_of):
    changes = {"sliding_window": None} if family == "mistral" else {}
    model = tilepress.load(checkpoint_of(family, **changes), dtype=torch.float32)
    assert decoder.why_not(model, 128) is None
    expected = [theirs(model, prompt, 12) for prompt in PROMPTS]
    for chunk, places in ((1024, 8), (7, 3)):
        assert generate(model, PROMPTS, 12, stop=[], chunk=chunk, places=places) == expected
    assert [theirs(model, prompt, 12) for prompt in PROMPTS] == expected  # merging left the model as it was


def test_a_trained_model(tiny):
    """In bfloat16, where sums are rounded otherwise, tokens part only where two are about equally likely."""
    from transformers import AutoTokenizer

    model, tokenizer = tilepress.load(tiny, dtype=torch.float32), AutoTokenizer.from_pretrained(tiny)
    prompts = [tokenizer(text).input_ids for text in ("import os\n\ndef main(", "The quick brown", "class A:\n    def")]
    assert generate(model, prompts, 30) == [theirs(model, p, 30, eos_token_id=0) for p in prompts]
    rounded = tilepress.load(tiny)
    for prompt, ours in zip(prompts, generate(rounded, prompts, 30), strict=True):
        other = theirs(rounded, prompt, 30, eos_token_id=0)
        parted = next((i for i, (a, b) in enumerate(zip(ours, other, strict=False)) if a != b), None)
        if parted is not None:
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + ours[:parted]])).logits[0, -1]
            assert float((logits[ours[parted]] - logits[other[parted]]).abs()) < 2**-5 * float(logits.max())


@pytest.mark.parametrize("format", ["tiled-csl", "tiled-bitmap"])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_sparse_artifacts(family, format, checkpoint_of, tmp_path):
    shape = {"hidden_size": 128, "num_attention_heads": 4}
    source = checkpoint_of(family, **shape)
    prune(source, tmp_path / "out", 0.5, format)
    model = tilepress.load(tmp_path / "out", dtype=torch.float32)
    engine = Engine(model, places=2, max_len=128)
    merged, prompts = engine.backend.decoder.layers[0].qkv, PROMPTS[:3]
    if family == "opt":  # 128 rows each: one product; k and v of the other have 64
        assert type(merged).__name__ in ("TiledCSLLinear", "TiledBitmapLinear") and merged.out_features == 384
    done = engine.run([Request(tuple(prompt), 6) for prompt in prompts])
    assert [one.tokens for one in done] == [theirs(model, prompt, 6) for prompt in prompts]
    assert any("spmm" in path.kernel for path in references(engine.paths()))


@pytest.mark.parametrize("activations", ["token", "tensor-dynamic", "none"])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_int8_artifacts(family, activations, checkpoint_of, tmp_path):
    quantize(checkpoint_of(family), tmp_path / "out", activations=activations)
    model = tilepress.load(tmp_path / "out", dtype=torch.float32)
    # A scale for a whole tensor is for all that is multiplied at once: pieces of a prompt have others.
    expected = [theirs(model, prompt, 10) for prompt in PROMPTS]
    if activations == "tensor-dynamic":
        assert [generate(model, [prompt], 10, stop=[])[0] for prompt in PROMPTS] == expected
    else:
        assert generate(model, PROMPTS, 10, stop=[], places=2) == expected


@pytest.mark.parametrize("form", [KVFormat(32), KVFormat(32, 8), KVFormat(32, 16)], ids=lambda form: form.name)
@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
def test_packed_pages(family, form, checkpoint_of):
    """The model's own forward pass over a PagedCache: the same pages, the same tokens."""
    model = with_cache(checkpoint_of(family), form)
    expected = [theirs(model, prompt, 8) for prompt in PROMPTS]
    engine = Engine(model, places=3, max_len=128)
    done = engine.run([Request(tuple(prompt), 8) for prompt in PROMPTS])
    assert [one.tokens for one in done] == expected
    assert len(engine.backend.cache.pool.free) == engine.backend.cache.pool.total
    assert any(form.name in str(path) for path in engine.paths())


def test_others_run_by_their_own_forward_pass(checkpoint_of):
    for source in (checkpoint_of("mistral"), checkpoint_of("gemma")):  # windows of 24 tokens slide
        model = tilepress.load(source, dtype=torch.float32)
        engine = Engine(model, places=2, max_len=100)
        done = engine.run([Request(tuple(prompt), 5) for prompt in PROMPTS])
        assert [one.tokens for one in done] == [theirs(model, prompt, 5) for prompt in PROMPTS]
        assert any("own forward pass" in str(path) for path in engine.paths())
        with pytest.raises(UsageError, match="not for this model"):
            Engine(model, cache="contiguous", max_len=100)


def test_arrival_and_departure(llama):
    """Requests that come while others run, with few pages: each has the tokens that it has alone, and all pages come back."""
    engine = Engine(llama, places=3, max_len=128, cache="bfloat16", num_pages=4)
    alone = [generate(llama, [prompt], 6 + i, stop=[], cache="bfloat16")[0] for i, prompt in enumerate(PROMPTS)]
    done, most = [], 0
    for i, prompt in enumerate(PROMPTS):
        done.append(engine.submit(Request(tuple(prompt), 6 + i)))
        engine.step()
        engine.step()
        most = max(most, len(engine.running))
    while not engine.idle:
        engine.step()
        most = max(most, len(engine.running))
    assert most > 1 and [one.tokens for one in done] == alone
    assert all(one.finish == "length" for one in done) and engine.backend.cache.pool.users == [0] * 4


def test_copies_of_a_running_request(llama):
    for cache in ("contiguous", "bfloat16"):
        engine = Engine(llama, places=3, max_len=128, cache=cache)
        request = Request(tuple(PROMPTS[3]), 9)
        first = engine.submit(request)
        while not first.tokens:
            engine.step()
        others = [engine.fork(first, request) for _ in range(2)]
        with pytest.raises(UsageError, match="3 places are taken"):
            engine.fork(first, request)
        while not engine.idle:
            engine.step()
        alone = generate(llama, [PROMPTS[3]], 9, stop=[], cache=cache)[0]
        assert [one.tokens for one in (first, *others)] == [alone] * 3
        with pytest.raises(UsageError, match="only a running request"):
            engine.fork(first, request)


def test_stop_tokens_end_a_request(llama):
    long = generate(llama, PROMPTS, 20, stop=[])
    stop = long[0][3]
    for prompt, tokens, whole in zip(PROMPTS, generate(llama, PROMPTS, 20, stop=[stop]), long, strict=True):
        end = whole.index(stop) + 1 if stop in whole else 20
        assert tokens == whole[:end]
        assert tokens == theirs(llama, prompt, 20, eos_token_id=stop)


def test_sampled_tokens_depend_on_the_seed_alone(llama):
    """Not on what else is in the batch, nor on how prompts are cut."""
    how = Sampling(temperature=1.0, top_k=40, top_p=0.9, seed=5)
    request = Request(tuple(PROMPTS[0]), 15, sampling=how)
    alone = Engine(llama, places=1, max_len=128).run([request])[0].tokens
    others = [Request(tuple(p), 9 + i, sampling=Sampling(1.3, seed=i)) for i, p in enumerate(PROMPTS)]
    mixed = Engine(llama, places=4, max_len=128, chunk=2).run([others[1], Request((4, 4), 9), request, *others])
    assert mixed[2].tokens == alone
    assert mixed[1].tokens == generate(llama, [[4, 4]], 9, stop=[])[0]  # greedy beside sampled ones
    other = Engine(llama, places=1, max_len=128).run([Request(request.prompt, 15, sampling=Sampling(1.0, 40, 0.9, 6))])
    assert other[0].tokens != alone


def test_wrong_requests_are_refused(llama, checkpoint_of):
    with pytest.raises(UsageError, match="nothing to generate"):
        Request((), 3)
    engine = Engine(llama, places=1, max_len=200, cache="bfloat16", num_pages=1)
    for request, message in (
        (Request((1,) * 150, 60), "more than 200"),
        (Request((1,), 64), "1 pages"),
        (Request((300,), 2), "beyond the vocabulary of 300"),
    ):
        with pytest.raises(UsageError, match=message):
            engine.submit(request)
    for options, message in (({"places": 0}, "0 places"), ({"max_len": 1}, "a model for"), ({"cache": "x"}, "x")):
        with pytest.raises(UsageError, match=message):
            Engine(llama, **options)
    with pytest.raises(UsageError, match="CUDA graphs need"):
        Engine(llama, graphs=True)
    with pytest.raises(UsageError, match="no calibrated cache"):
        Engine(llama, cache="calibrated")
    with pytest.raises(UsageError, match="a model for 128"):
        Engine(tilepress.load(checkpoint_of("opt")), max_len=129)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["load", "from_pretrained"])
@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("kind", STACKED)
def test_no_fallback_runs(kind, family, how, made, monkeypatch):
    """A prompt in pieces and alone, steps, a batch with padding: by the decode loop and by transformers' generate, one after the other."""
    from transformers import AutoModelForCausalLM

    import tilepress.hf

    path = made(family, kind)
    refuse_all(monkeypatch)
    loads = how == "load"
    model = tilepress.load(path, device="cuda") if loads else AutoModelForCausalLM.from_pretrained(path).cuda().eval()
    options = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    for prompts in (PROMPTS[3:4], [[7, *PROMPTS[0][:2]], [1, 2, 3]]):
        ids = torch.tensor(prompts, device="cuda")
        mask = torch.ones_like(ids)
        mask[1:, 0] = 0
        out = model.generate(ids, attention_mask=mask, **options)
        assert out.shape == (len(prompts), len(prompts[0]) + 6)
    if loads:
        engine = Engine(model, places=2, max_len=128, chunk=32)
        assert all(one.finish for one in engine.run([Request(tuple(prompt), 6) for prompt in PROMPTS]))
        assert not references(engine.paths())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "tiled-csl", "tiled-bitmap", "int8"])
@pytest.mark.parametrize("bits", [16, 4, None], ids=["16", "4", "contiguous"])
def test_graphs_replay_what_runs_eagerly(kind, bits, checkpoint_of, tmp_path, monkeypatch):
    """On kernels alone, with requests that come and go."""
    source = checkpoint_of("llama", **CARD)
    if kind == "int8":
        quantize(source, tmp_path / "out")
    elif kind != "dense":
        prune(source, tmp_path / "out", 0.6, kind)
    from tilepress.formats.kv_calibration import uncalibrated
    from tilepress.runtime.hf import paged_cache as kv_cache

    refuse_all(monkeypatch)
    model = tilepress.load(source if kind == "dense" else tmp_path / "out", device="cuda")
    if bits is not None:
        kv_cache.install(model, uncalibrated(KVFormat(64, bits), 2, model.config.num_hidden_layers))
    cache = "contiguous" if bits is None else "auto"
    requests = [
        Request(tuple(prompt), 12 + i, sampling=Sampling(1.0 if i == 2 else 0.0, seed=i))
        for i, prompt in enumerate(PROMPTS)
    ]
    found = []
    for graphs in (True, False):
        engine = Engine(model, places=4, max_len=128, cache=cache, graphs=graphs)
        found.append([one.tokens for one in engine.run(requests)])
        assert not references(engine.paths())
        assert bits is None or len(engine.backend.cache.pool.free) == engine.backend.cache.pool.total
    assert found[0] == found[1]


def test_sampling_is_the_distribution():
    from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    from tilepress.runtime.decode.sampling import filtered, sample

    torch.manual_seed(0)
    logits = torch.randn(3, 50) * 2
    temperature, top_k, top_p = torch.tensor([0.7, 1.5, 1.0]), torch.tensor([0, 12, 5]), torch.tensor([0.8, 1.0, 0.6])
    kept, order = filtered(logits, temperature, top_k, top_p)
    kept = kept / kept.sum(-1, keepdim=True)
    uniforms = (torch.arange(2000) + 0.5) / 2000
    for row in range(3):
        scores = TemperatureLogitsWarper(float(temperature[row]))(None, logits[row : row + 1])
        if top_k[row]:
            scores = TopKLogitsWarper(int(top_k[row]))(None, scores)
        if top_p[row] < 1:
            scores = TopPLogitsWarper(float(top_p[row]))(None, scores)
        expected = scores.softmax(-1)[0].double()
        torch.testing.assert_close(torch.zeros(50).double().scatter(0, order[row], kept[row]), expected)
        many = [x[row : row + 1].expand(2000, *x.shape[1:]) for x in (logits, temperature, top_k, top_p)]
        counts = sample(*many, uniforms).bincount(minlength=50) / 2000
        assert float((counts - expected).abs().max()) <= 1 / 2000 + 1e-6
    with pytest.raises(UsageError, match="top_p"):
        Sampling(1.0, top_p=math.nan)
