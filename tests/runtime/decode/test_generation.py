"""`generate(custom_generate=tilepress.decode)`: the tokens of plain `generate`, with transformers' own processors, criteria and streamers."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from support.artifacts import CARD, STACKED, prune, quantize, with_cache
from support.decoding import alone, decoded, generated, padded
from support.fallbacks import FALLBACKS, refuse_all
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import tilepress
from tilepress.formats import UsageError
from tilepress.formats.kv_calibration import uncalibrated
from tilepress.formats.kv_int4 import KVFormat
from tilepress.kernels import jit
from tilepress.runtime.decode import decoder, generation
from tilepress.runtime.hf import paged_cache as kv_cache

FAMILIES = ["llama", "llama-tied", "qwen2", "qwen3", "mistral", "opt", "phi3", "phi3-partial", "gemma3", "gemma2"]
PROMPTS = [[5, 9, 2, 77, 130], [8], [250, 3, 3, 9, 40, 41, 7, 7, 100], list(range(10, 80)), [1, 2]]
SAMPLING = {"do_sample": True, "temperature": 0.9, "top_k": 50, "top_p": 0.95}


def test_fallbacks_are_those_of_all_ops():
    """Also of ops that come later: each file that defines one has its reference in the list."""
    assert all(callable(getattr(owner, name)) for owner, names in FALLBACKS.items() for name in names)
    listed = {owner.__module__ if isinstance(owner, type) else owner.__name__ for owner in FALLBACKS}
    defining = {f"tilepress.kernels.{f.stem}" for f in jit.FOLDER.glob("*.py") if "library.define(" in f.read_text()}
    assert listed == defining


@pytest.fixture(scope="module")
def llama(checkpoint_of):
    return tilepress.load(checkpoint_of("llama"), dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(checkpoint_of):
    return AutoTokenizer.from_pretrained(checkpoint_of("llama"))


def served(model, words: str) -> bool:
    """Whether the lean pass ran, and a path of it has these words."""
    return any(words in path for path in generation.paths(model))


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_every_family(family, checkpoint_of):
    """Tokens of a batch with padding and of each prompt alone, whole and in pieces; windows of 24 tokens slide in some of them."""
    model = tilepress.load(checkpoint_of(family), dtype=torch.float32)
    assert decoder.why_not(model, 128) is None
    expected = alone(model, PROMPTS, 12)
    assert generated(model, PROMPTS, 12) == expected
    for options in ({}, {"chunk": 7}, {"prefill_chunk_size": 33}):
        assert decoded(model, PROMPTS, 12, **options) == expected
        assert served(model, "decode steps")
    assert [decoded(model, [prompt], 12)[0] for prompt in PROMPTS[:2]] == expected[:2]
    assert alone(model, PROMPTS, 12) == expected  # merging left the model as it was


def test_a_trained_model(tiny):
    """Tokens in bfloat16, where sums are rounded otherwise, part only where two are about equally likely."""
    model, tokenizer = tilepress.load(tiny, dtype=torch.float32), AutoTokenizer.from_pretrained(tiny)
    prompts = [tokenizer(text).input_ids for text in ("import os\n\ndef main(", "The quick brown", "class A:\n    def")]
    assert decoded(model, prompts, 30, eos_token_id=0) == generated(model, prompts, 30, eos_token_id=0)
    rounded = tilepress.load(tiny)
    for prompt, ours in zip(prompts, decoded(rounded, prompts, 30), strict=True):
        (theirs,) = generated(rounded, [prompt], 30)
        parted = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        if parted is not None:
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + ours[:parted]])).logits[0, -1]
            assert float((logits[ours[parted]] - logits[theirs[parted]]).abs()) < 2**-5 * float(logits.max())


KINDS = [(family, kind) for family in ("llama", "opt") for kind in STACKED]
KINDS += [
    (family, kind)
    for family in FAMILIES[1:5] + FAMILIES[6:]
    for kind in ("tiled-csl", "int8", "tiled-bitmap+kv4", "int8+kv4")
]


@pytest.mark.thorough
@pytest.mark.parametrize("family,kind", KINDS)
def test_every_kind_of_artifact(family, kind, made):
    """Dense, sparse, INT8, each with and without packed pages, in a batch with padding."""
    model = tilepress.load(made(family, kind), dtype=torch.float32)
    expected = alone(model, PROMPTS, 6)
    assert decoded(model, PROMPTS, 6) == expected
    assert served(model, "decode_attention reference (int4") == kind.endswith("+kv4")


@pytest.mark.parametrize("format", ["tiled-csl", "tiled-bitmap"])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_sparse_artifacts(family, format, checkpoint_of, tmp_path):
    source = checkpoint_of(family, hidden_size=128, num_attention_heads=4)
    prune(source, tmp_path / "out", 0.5, format)
    model = tilepress.load(tmp_path / "out", dtype=torch.float32)
    assert decoded(model, PROMPTS[:3], 6) == alone(model, PROMPTS[:3], 6)
    assert served(model, "spmm reference")


@pytest.mark.parametrize("activations", ["token", "tensor-dynamic", "none"])
@pytest.mark.parametrize("family", ["llama", "opt", "phi3", "gemma3"])
def test_int8_artifacts(family, activations, checkpoint_of, tmp_path):
    quantize(checkpoint_of(family), tmp_path / "out", activations=activations)
    model = tilepress.load(tmp_path / "out", dtype=torch.float32)
    expected = alone(model, PROMPTS, 10)
    # A scale for a whole tensor is for all that is multiplied at once: a batch has another one than each of its prompts.
    if activations == "tensor-dynamic":
        assert [decoded(model, [prompt], 10)[0] for prompt in PROMPTS] == expected
    else:
        assert decoded(model, PROMPTS, 10) == expected


@pytest.mark.parametrize("form", [KVFormat(32), KVFormat(32, 8), KVFormat(32, 16)], ids=lambda form: form.name)
@pytest.mark.parametrize("family", ["llama", "qwen3", "opt", "phi3", "gemma3", "mistral", "gemma2"])
def test_packed_pages(family, form, checkpoint_of):
    """The model's own forward pass over a PagedCache: the same pages, the same tokens. All pages come back."""
    model = with_cache(checkpoint_of(family), form)
    assert decoded(model, PROMPTS, 8) == alone(model, PROMPTS, 8)
    assert served(model, form.name)
    pool = getattr(model, generation._KEPT)[0].cache.pool
    assert len(pool.free) == pool.total and not any(pool.users)
    with kv_cache.cache_mode(model, "off"):
        assert decoded(model, PROMPTS, 8) == alone(model, PROMPTS, 8) and not served(model, form.name)


def test_what_a_family_cannot_have_is_said_with_its_reason(checkpoint_of):
    """Attention to later tokens, RoPE that changes with the length, families without a lean pass."""
    model = tilepress.load(checkpoint_of("gemma2"), dtype=torch.float32)
    assert decoder.why_not(model, 128) is None
    model.config.use_bidirectional_attention = True
    assert decoder.why_not(model, 128) == "Gemma2ForCausalLM with attention to later tokens"
    with pytest.raises(ValueError, match="attention to later tokens"):
        decoder.Decoder(model, 128)
    model = tilepress.load(checkpoint_of("phi3"))
    model.model.rotary_emb.rope_type = "longrope"
    assert decoder.why_not(model, 64) == "longrope RoPE"
    assert "scaled embeddings" in decoder.why_not(tilepress.load(checkpoint_of("gemma")), 64)


@pytest.mark.parametrize("family", ["gemma", "gpt2", "gpt-oss"])
def test_others_run_by_their_own_forward_pass(family, checkpoint_of):
    """The lean pass does not know the family: it says so, and the tokens are the same."""
    model = tilepress.load(checkpoint_of(family), dtype=torch.float32)
    with pytest.warns(UserWarning, match="own forward pass"):
        assert decoded(model, PROMPTS, 5) == generated(model, PROMPTS, 5)
    assert generation.paths(model) == {}
    torch.manual_seed(3)
    expected = generated(model, PROMPTS, 5, **SAMPLING)
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match="own forward pass"):
        assert decoded(model, PROMPTS, 5, **SAMPLING) == expected
    with pytest.raises(UsageError, match="not for this model"):
        decoded(model, PROMPTS, 5, cache="contiguous")


def test_a_window_that_never_slides_is_none(checkpoint_of):
    """The kernel for all tokens serves then."""
    model = tilepress.load(checkpoint_of("mistral"), dtype=torch.float32)
    for most, window in ((24, 0), (25, 24)):
        assert {layer.scores.window for layer in decoder.Decoder(model, most).layers} == {window}


class Some(StoppingCriteria):
    """Stops sequences behind tokens that each of them comes to."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -1], torch.tensor([214, 95, 1, 133, 281], device=input_ids.device))


class Never(LogitsProcessor):
    """Forbids every third token, and the one before."""

    def __call__(self, input_ids, scores):
        scores[:, ::3] = -torch.inf
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


def test_stop_tokens_end_a_sequence(llama):
    """What has ended gets padding while others run; when all have ended nothing more is generated."""
    long = decoded(llama, PROMPTS, 20)
    for stops in (long[0][3], [long[0][3], long[2][1]], [row[4] for row in long]):
        found = decoded(llama, PROMPTS, 20, eos_token_id=stops, pad_token_id=299)
        assert found == generated(llama, PROMPTS, 20, eos_token_id=stops, pad_token_id=299)
    assert len(found[0]) <= 5
    assert any(299 in row for row in decoded(llama, PROMPTS, 20, eos_token_id=long[0][3], pad_token_id=299))


def test_criteria_of_the_user(llama):
    for options in (
        {"stopping_criteria": StoppingCriteriaList([Some()])},
        {"eos_token_id": 7, "stopping_criteria": StoppingCriteriaList([Some()]), "min_new_tokens": 3},
        {"max_time": 1e-9},
        {"max_length": 72, "max_new_tokens": None},
    ):
        found = decoded(llama, PROMPTS, 15, **options)
        assert found == generated(llama, PROMPTS, 15, **options) != decoded(llama, PROMPTS, 15)


def test_stop_strings(llama, tokenizer):
    prompts = [[number] for number in range(40, 90)]
    runs = zip(prompts, alone(llama, prompts, 12), strict=True)
    prompt, tokens = next((p, run) for p, run in runs if max(run[:5]) < 95 and run[2] != run[3])  # in ASCII
    options = {"stop_strings": [tokenizer.decode(tokens[2:4])], "tokenizer": tokenizer}
    (found,) = decoded(llama, [prompt], 12, **options)
    assert [found] == generated(llama, [prompt], 12, **options)
    assert found == tokens[: len(found)] and 1 < len(found) <= 4


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.8},
        {"no_repeat_ngram_size": 1, "eos_token_id": 7, "min_new_tokens": 5},
        {"logits_processor": LogitsProcessorList([Never()])},
        {"bad_words_ids": [[number] for number in range(200)]},
        {"forced_eos_token_id": 9, "eos_token_id": 9},
    ],
    ids=lambda options: next(iter(options)),
)
def test_logits_processors(llama, options):
    found = decoded(llama, PROMPTS, 10, **options)
    assert found == generated(llama, PROMPTS, 10, **options) != generated(llama, PROMPTS, 10)


@pytest.mark.parametrize("cached", [False, True], ids=["dense", "pages"])
def test_scores_and_logits(llama, cached, checkpoint_of):
    model = with_cache(checkpoint_of("llama"), KVFormat(32, 16)) if cached else llama
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "pad_token_id": 0}
    options |= {"repetition_penalty": 1.5, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    theirs = model.generate(**padded(PROMPTS), **options)
    ours = model.generate(**padded(PROMPTS), custom_generate=tilepress.decode, **options)
    assert type(ours) is type(theirs) and torch.equal(ours.sequences, theirs.sequences)
    for name in ("scores", "logits"):
        found, expected = torch.stack(ours[name]), torch.stack(theirs[name])
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)
    assert not torch.equal(torch.stack(ours.scores), torch.stack(ours.logits)) and ours.past_key_values is None
    plain = {**options, "output_scores": False, "output_logits": False}
    assert model.generate(**padded(PROMPTS), custom_generate=tilepress.decode, **plain).scores is None


class Heard:
    """A streamer."""

    def __init__(self):
        self.said, self.ended = [], 0

    def put(self, tokens):
        self.said.append(tokens.tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("options", [{}, {"eos_token_id": 7}, {"repetition_penalty": 1.5}], ids=str)
def test_streamers(llama, options):
    ours, theirs = Heard(), Heard()
    long = decoded(llama, PROMPTS[:1], 9, streamer=ours, **options)
    assert long == generated(llama, PROMPTS[:1], 9, streamer=theirs, **options)
    assert ours.said == theirs.said and ours.ended == theirs.ended == 1
    assert ours.said == [PROMPTS[:1], *([token] for token in long[0])]


def test_sampled_tokens_are_those_of_the_seed(llama):
    """Processors and random numbers are transformers' own, so that they go on from the same place."""
    for options in ({}, {"num_return_sequences": 3}, {"eos_token_id": [7, 8, 9, 10], "min_p": 0.01}):
        found = []
        for generate in (decoded, generated):
            torch.manual_seed(5)
            found.append((generate(llama, PROMPTS, 15, **SAMPLING, **options), torch.rand(3).tolist()))
        assert found[0] == found[1]
        torch.manual_seed(6)
        assert decoded(llama, PROMPTS, 15, **SAMPLING, **options) != found[0][0]


def test_a_batch_is_kept_for_the_next_call(checkpoint_of):
    model = tilepress.load(checkpoint_of("llama", attention_bias=True), dtype=torch.float32)

    def kept():
        return getattr(model, generation._KEPT)[0]

    first = decoded(model, PROMPTS, 8)
    batch = kept()
    assert decoded(model, PROMPTS[:2], 8) == first[:2] and kept() is batch  # fewer, shorter
    assert decoded(model, PROMPTS, 9, chunk=9) == alone(model, PROMPTS, 9) and kept() is not batch
    batch = kept()
    with torch.no_grad():  # what was merged has copies of biases
        model.model.layers[0].self_attn.k_proj.bias.mul_(-3)
    changed = decoded(model, PROMPTS, 9, chunk=9)
    assert changed == alone(model, PROMPTS, 9) and kept() is not batch
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert generation.paths(other) == {} and decoded(other, PROMPTS, 9) == changed
    batch = kept()
    with pytest.raises(ZeroDivisionError):
        decoded(model, PROMPTS, 9, chunk=9, stopping_criteria=StoppingCriteriaList([lambda *_: 1 / 0]))
    assert decoded(model, PROMPTS, 9, chunk=9) == changed and kept() is not batch
    batch = kept()
    kv_cache.install(model, uncalibrated(KVFormat(32), 2, 2))
    assert decoded(model, PROMPTS, 9, chunk=9) == alone(model, PROMPTS, 9) and kept() is not batch


class Wrapped(torch.nn.Module):
    """A linear layer with something beside it, as adapters are: it has no weight of its own."""

    def __init__(self, inner, factor: float = 1.5):
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, x):
        return self.inner(x) * self.factor


@pytest.mark.parametrize("names", [["q_proj"], ["q_proj", "k_proj", "v_proj"], ["down_proj"], ["gate_proj", "up_proj"]])
def test_modules_around_linear_layers(names, checkpoint_of):
    """Also where they come after a batch is kept, and bring no tensor."""
    model = tilepress.load(checkpoint_of("llama"), dtype=torch.float32)
    before = decoded(model, PROMPTS[:2], 8)
    for layer in model.model.layers:
        for name in names:
            parent = layer.mlp if hasattr(layer.mlp, name) else layer.self_attn
            setattr(parent, name, Wrapped(getattr(parent, name), -40.0))
    assert decoded(model, PROMPTS[:2], 8) == generated(model, PROMPTS[:2], 8) != before
    assert served(model, "decode steps")


@pytest.mark.parametrize("how", ["hook", "before", "forward", "root"])
def test_hooks_and_other_forwards_are_called(how, checkpoint_of):
    """The pass calls few modules: with hooks that do something the model's own forward pass runs."""
    model = tilepress.load(checkpoint_of("llama"), dtype=torch.float32)
    model(torch.tensor([[1, 2]]), output_hidden_states=True)  # its hooks, which record, stay
    before, q = decoded(model, PROMPTS[:2], 8), model.model.layers[0].self_attn.q_proj
    assert served(model, "decode steps")
    handle = None
    if how == "hook":
        handle = q.register_forward_hook(lambda module, args, out: out * -9)
    elif how == "before":
        handle = model.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: (args[0] * -9,))
    elif how == "root":
        handle = model.register_forward_hook(lambda module, args, out: setattr(out, "logits", -out.logits))
    else:
        q.forward = lambda x: torch.nn.functional.linear(x, -9 * q.weight)
    with pytest.warns(UserWarning, match="hooks, or a forward of their own"):
        assert decoded(model, PROMPTS[:2], 8) == generated(model, PROMPTS[:2], 8) != before
    if handle is not None:
        handle.remove()
        assert decoded(model, PROMPTS[:2], 8) == before and served(model, "decode steps")


@pytest.mark.parametrize("format", [None, "tiled-csl"])
def test_biases_changed_through_data(format, checkpoint_of, tmp_path):
    """No version tells of that: what was merged has to see it."""
    path = checkpoint_of("llama", attention_bias=True, hidden_size=128, num_attention_heads=4)
    if format is not None:
        prune(path, tmp_path / "out", 0.5, format)
    model = tilepress.load(path if format is None else tmp_path / "out", dtype=torch.float32)
    before = decoded(model, PROMPTS[:2], 8)
    for layer in model.model.layers:
        layer.self_attn.v_proj.bias.data.add_(3)
    assert decoded(model, PROMPTS[:2], 8) == generated(model, PROMPTS[:2], 8) != before


def test_a_kept_batch_does_not_keep_its_model(checkpoint_of):
    model = tilepress.load(checkpoint_of("llama"), dtype=torch.float32)
    generated(model, PROMPTS[:2], 2)
    gc.collect()
    gc.disable()
    try:
        decoded(model, PROMPTS[:2], 3)
        held = weakref.ref(model.lm_head.weight)
        del model
        assert held() is None
    finally:
        gc.enable()


def test_tokens_can_be_trained_on(llama):
    given = padded(PROMPTS[:2])
    ids = llama.generate(**given, custom_generate=tilepress.decode, max_new_tokens=4, do_sample=False)
    model = copy.deepcopy(llama).train().requires_grad_()
    model(ids, labels=ids).loss.backward()
    assert model.lm_head.weight.grad is not None and not ids.is_inference()


def test_what_is_refused(llama, checkpoint_of):
    filled = llama(torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values
    for options, message in (
        ({"num_beams": 2}, "beam search"),
        ({"prompt_lookup_num_tokens": 3}, "assisted"),
        ({"assistant_model": llama}, "assisted"),
        ({"use_cache": False}, "use_cache=False"),
        ({"past_key_values": filled}, "holds something"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
        ({"position_ids": torch.arange(5)[None] + 3}, "positions of your own"),
        ({"cache": "x"}, "the cache 'x' is unknown"),
        ({"cache": "calibrated"}, "no calibrated cache"),
        ({"chunk": -1}, "pieces of -1"),
        ({"chunk": "7"}, "pieces of '7'"),
        ({"graphs": True}, "CUDA graphs need"),
    ):
        with pytest.raises(UsageError, match=message):
            decoded(llama, PROMPTS[:1], 3, **options)
    with pytest.raises(UsageError, match="beyond the vocabulary of 300"):
        decoded(llama, [[300]], 3)
    ids, none = torch.tensor([[1, 2, 3]]), torch.zeros(0, 3, dtype=torch.int64)
    for given, message in (
        ({"inputs": ids, "attention_mask": ids[:, 1:]}, "an attention mask of"),
        ({"inputs": none, "attention_mask": none}, "prompts without tokens"),
        ({"inputs": ids[:, :0], "attention_mask": ids[:, :0]}, "prompts without tokens"),
        ({"inputs_embeds": llama.get_input_embeddings()(ids).detach()}, "inputs_embeds"),
    ):
        with pytest.raises(UsageError, match=message):
            llama.generate(**given, custom_generate=tilepress.decode, max_new_tokens=2, pad_token_id=0)
    ids = torch.tensor([[1, 2, 0], [1, 2, 3]])
    with pytest.raises(UsageError, match="padded on the right"):
        llama.generate(ids, attention_mask=(ids > 0).long(), custom_generate=tilepress.decode, max_new_tokens=2)
    with pytest.raises(UsageError, match="a model of 128"):
        decoded(tilepress.load(checkpoint_of("opt")), PROMPTS, 59)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["load", "from_pretrained"])
@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("kind", STACKED)
def test_no_fallback_runs(kind, family, how, made, monkeypatch):
    """Prompts in pieces and alone, steps, batches with padding: with the lean pass and without, one after the other."""
    from transformers import AutoModelForCausalLM

    import tilepress.hf

    path = made(family, kind)
    refuse_all(monkeypatch)
    loads = how == "load"
    model = tilepress.load(path, device="cuda") if loads else AutoModelForCausalLM.from_pretrained(path).cuda().eval()
    for prompts in (PROMPTS[3:4], [[7, *PROMPTS[0][:2]], [2, 3]]):
        assert [len(tokens) for tokens in generated(model, prompts, 6)] == [6] * len(prompts)
    if loads:
        assert [len(tokens) for tokens in decoded(model, PROMPTS, 6, chunk=32)] == [6] * len(PROMPTS)
        assert served(model, "CUDA graph") and not served(model, "reference")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "tiled-csl", "tiled-bitmap", "int8"])
@pytest.mark.parametrize("bits", [16, 4, None], ids=["16", "4", "contiguous"])
def test_graphs_replay_what_runs_eagerly(kind, bits, checkpoint_of, tmp_path, monkeypatch):
    """Kernels alone run: greedily, with stop tokens and a streamer, with processors, by sampling; batches of several sizes use one batch's memory."""
    source = checkpoint_of("llama", **CARD)
    if kind == "int8":
        quantize(source, tmp_path / "out")
    elif kind != "dense":
        prune(source, tmp_path / "out", 0.6, kind)
    refuse_all(monkeypatch)
    model = tilepress.load(source if kind == "dense" else tmp_path / "out", device="cuda")
    if bits is not None:
        kv_cache.install(model, uncalibrated(KVFormat(64, bits), 2, model.config.num_hidden_layers))
    cache = "contiguous" if bits is None else "auto"
    stop, found = decoded(model, PROMPTS, 12, cache=cache)[0][5], []
    for graphs in (None, False):
        heard, options = Heard(), {"cache": cache, "graphs": graphs}
        torch.manual_seed(7)
        found.append(
            [
                decoded(model, PROMPTS, 12, **options),
                decoded(model, PROMPTS[:2], 12, **options),
                decoded(model, PROMPTS[:1], 12, eos_token_id=stop, streamer=heard, **options),
                decoded(model, PROMPTS, 12, repetition_penalty=1.5, **options),
                decoded(model, PROMPTS, 12, **SAMPLING, **options),
                decoded(model, PROMPTS[:3], 12, eos_token_id=stop, **options),
                heard.said,
                torch.rand(3, device="cuda").tolist(),
            ]
        )
        assert served(model, "CUDA graph" if graphs is None else "op by op") and not served(model, "reference")
        held = getattr(model, generation._KEPT)[0]
        assert sorted(held._graphs) == ([1, 2, 3, 5] if graphs is None else [])
        assert bits is None or len(held.cache.pool.free) == held.cache.pool.total
    assert found[0] == found[1] and len(found[0][2][0]) == found[0][0][0].index(stop) + 1


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "opt", "qwen3"])
def test_tokens_on_a_card(family, checkpoint_of):
    """Tokens in float32 are those of plain `generate`, also where the prompt lies on the host."""
    shape = {"hidden_size": 256, "ffn_dim": 256, "word_embed_proj_dim": 256} if family == "opt" else CARD
    model = tilepress.load(checkpoint_of(family, **shape), device="cuda", dtype=torch.float32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        expected = generated(model, PROMPTS, 12)
        assert decoded(model, PROMPTS, 12) == expected and served(model, "decode steps")
        on_host = model.generate(
            **padded(PROMPTS), custom_generate=tilepress.decode, max_new_tokens=12, do_sample=False, eos_token_id=None
        )
    finally:
        torch.set_float32_matmul_precision(before)
    assert on_host.device.type == "cpu" and on_host[:, -12:].tolist() == expected


@pytest.mark.gpu
def test_the_host_looks_while_the_next_pass_runs(checkpoint_of, monkeypatch):
    """Nothing between two passes waits for the card but the look at what the one before gave."""
    model = tilepress.load(checkpoint_of("llama", **CARD), device="cuda")
    expected = decoded(model, PROMPTS, 12, eos_token_id=7)
    send = generation._on_its_way

    def looking(numbers):
        there = send(numbers)

        def look():
            torch.cuda.set_sync_debug_mode("default")
            found = there()
            torch.cuda.set_sync_debug_mode("error")
            return found

        return look

    monkeypatch.setattr(generation, "_on_its_way", looking)
    clear = generation.Batch.clear

    def end(self):
        torch.cuda.set_sync_debug_mode("default")
        clear(self)

    monkeypatch.setattr(generation.Batch, "clear", end)
    try:
        assert decoded(model, PROMPTS, 12, eos_token_id=7) == expected
    finally:
        torch.cuda.set_sync_debug_mode("default")
