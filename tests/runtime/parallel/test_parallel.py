"""Tensor parallelism: two ranks give the tokens and logits of one process, each holds about half; heads that cannot be shared are refused."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from support.artifacts import few_words, prune, quantize, run_recipe
from support.cards import HAS_WGMMA
from support.decoding import decoded
from support.ranks import Answer, ask

from tilepress import KVCache
from tilepress.bench import speed
from tilepress.formats.checkpoint import Checkpoint
from tilepress.kernels.arch import references
from tilepress.runtime.loader import load
from tilepress.runtime.parallel.group import parts

PROMPTS = [[5, 9, 2, 77, 130], [8], [250, 3, 3, 9, 40, 41, 7, 7, 100], list(range(10, 50))]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}  # tiles of 128 for each of two ranks
FAMILIES = ["llama", "llama-tied", "qwen2", "qwen3", "mistral", "opt", "phi3", "gemma3", "gemma2"]


def same(ours: list[Answer], one: Answer, tolerance: float = 1e-4, steps: int | None = None) -> None:
    for answer in ours:
        assert answer.tokens == ours[0].tokens and torch.equal(answer.logits, ours[0].logits)
        assert [x[:steps] for x in answer.tokens] == [x[:steps] for x in one.tokens]
        scale = float(one.logits.abs().max())
        torch.testing.assert_close(answer.logits, one.logits, rtol=0, atol=tolerance * scale)
        if one.own_logits is not None:
            torch.testing.assert_close(answer.own_logits, one.own_logits, rtol=0, atol=tolerance * scale)


def halves(ours: list[Answer], one: Answer, most: float = 0.6) -> None:
    for answer in ours:
        assert answer.layer_bytes < most * one.layer_bytes, (answer.layer_bytes, one.layer_bytes)
        assert answer.bytes < one.bytes


def test_parts_are_whole_tiles():
    for count in (1, 77, 200, 256, 300, 4096, 11008, 14336, 28672, 128256, 151936):
        for size in (2, 3, 4, 8):
            ends = parts(count, size)
            sizes = [end - first for first, end in itertools.pairwise(ends)]
            assert ends[0] == 0 and ends[-1] == count and len(sizes) == size and (count < size or min(sizes) > 0)
            if count >= 128 * size:
                assert all(end % 128 == 0 for end in ends[:-1]) and max(sizes) - min(sizes) < 256
    assert parts(11008, 4) == [0, 21 * 128, 43 * 128, 64 * 128, 11008]


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_models(two, family, checkpoint_of):
    source = str(checkpoint_of(family))
    one = ask(source, None, PROMPTS, 10)
    ours = two(ask, source, PROMPTS, 10, chunk=7)
    same(ours, one)
    halves(ours, one, 0.7 if family != "llama-tied" else 0.75)  # norms are everybody's
    assert any("2 ranks, gloo" in str(path) for path in ours[0].paths)
    assert ours[0].kv_bytes_per_token == one.kv_bytes_per_token / 2


@pytest.mark.parametrize("format", ["tiled-csl", "tiled-bitmap"])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_sparse_artifacts(two, family, format, checkpoint_of, tmp_path):
    width = {"ffn_dim": 512, "word_embed_proj_dim": 256} if family == "opt" else {"num_key_value_heads": 4}
    source = checkpoint_of(family, **(WIDE | width))
    prune(source, tmp_path / "out", 0.6, format)
    one = ask(str(tmp_path / "out"), None, PROMPTS, 8)
    ours = two(ask, str(tmp_path / "out"), PROMPTS, 8)
    same(ours, one)
    halves(ours, one)
    spmm = [path for path in ours[0].paths if "spmm" in str(path)]
    assert spmm and not any("torch linear" in str(path) for path in ours[0].paths if ours[0].paths[path] > 1)


@pytest.mark.parametrize(
    "family,format",
    [("llama", "tiled-csl"), ("llama", "tiled-bitmap"), ("phi3", "tiled-bitmap"), ("gemma3", "tiled-csl")],
)
def test_parts_of_tiles(two, family, format, checkpoint_of, tmp_path):
    """Heads of 32 and a width of 200: parts begin and end within tiles, those of one stored matrix too."""
    prune(checkpoint_of(family), tmp_path / "out", 0.6, format)
    same(two(ask, str(tmp_path / "out"), PROMPTS, 8), ask(str(tmp_path / "out"), None, PROMPTS, 8))


def test_int8_values_in_tiles(two, checkpoint_of, tmp_path):
    source = checkpoint_of("llama", **WIDE)
    prune(source, tmp_path / "sparse", 0.6, "tiled-bitmap")
    quantize(tmp_path / "sparse", tmp_path / "out", activations="none")
    same(two(ask, str(tmp_path / "out"), PROMPTS, 8), ask(str(tmp_path / "out"), None, PROMPTS, 8))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "family,activations",
    [(f, a) for f in ("llama", "opt") for a in ("token", "tensor", "tensor-asym", "tensor-dynamic", "none")]
    + [(f, a) for f in ("phi3", "gemma3") for a in ("token", "tensor")],
)
def test_int8_artifacts(two, family, activations, checkpoint_of, tmp_path):
    """Scales of row-parallel layers are of whole tokens: the codes are those of one process."""
    settings = {"activations": activations, "weights": "tensor" if activations == "tensor" else "channel"}
    if activations in ("tensor", "tensor-asym"):
        settings["text"] = few_words()
    quantize(checkpoint_of(family), tmp_path / "out", **settings)
    prompts = PROMPTS[:1] if activations == "tensor-dynamic" else PROMPTS
    one = ask(str(tmp_path / "out"), None, prompts, 8)
    ours = two(ask, str(tmp_path / "out"), prompts, 8)
    same(ours, one, 2e-3)  # sums of floating numbers round otherwise, and a code may tip
    halves(ours, one, 0.75)


def outer_products(path: str, group, rows: int = 5) -> torch.Tensor:
    """What the first layer's down projection makes of random inputs, of which a token has a part that is all zeros and one with an outlier."""
    model = load(path, dtype=torch.float32, group=group)
    linear = model.model.layers[0].mlp.down_proj
    x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(1))
    x[0, :256], x[1, 300], x[2, 7], x[3] = 0, 40, -90, 0
    if group is not None:
        first, end = group.part(512)
        assert linear.in_features == end - first == 256
        x = x[:, first:end].contiguous()
    with torch.inference_mode():
        return linear(x)


@pytest.mark.parametrize("activations", ["token", "tensor-dynamic"])
def test_scales_are_of_whole_tokens(two, activations, checkpoint_of, tmp_path):
    """Scales of the whole give the same integer sums; a part's own would be a hundredth off."""
    quantize(checkpoint_of("llama", **WIDE), tmp_path / "out", activations=activations)
    one = outer_products(str(tmp_path / "out"), None)
    for found in two(outer_products, str(tmp_path / "out")):
        torch.testing.assert_close(found, one, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"mode": "static"}, {"bits": 8, "group_size": 32}])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_packed_caches(two, family, settings, checkpoint_of, tmp_path):
    run_recipe(KVCache(**settings), checkpoint_of(family), tmp_path / "out", text=few_words(4, 64))
    one = ask(str(tmp_path / "out"), None, PROMPTS, 8)
    ours = two(ask, str(tmp_path / "out"), PROMPTS, 8)
    same(ours, one, 2e-2)  # a code of 4 bits that tips is a larger step
    assert ours[0].kv_bytes_per_token == one.kv_bytes_per_token / 2
    assert any("decode_attention" in str(path) for path in ours[0].paths)


def test_stacked(two, checkpoint_of, tmp_path):
    prune(checkpoint_of("qwen3"), tmp_path / "sparse", 0.6, "tiled-csl")
    run_recipe(KVCache(), tmp_path / "sparse", tmp_path / "out", text=few_words(4, 64))
    same(two(ask, str(tmp_path / "out"), PROMPTS, 8), ask(str(tmp_path / "out"), None, PROMPTS, 8), 2e-2)


def test_fewer_kv_heads_than_ranks(two, checkpoint_of, tmp_path):
    """Both ranks keep the one KV head."""
    source = checkpoint_of("llama", num_key_value_heads=1)
    one = ask(str(source), None, PROMPTS, 8)
    ours = two(ask, str(source), PROMPTS, 8)
    same(ours, one)
    assert ours[0].kv_bytes_per_token == one.kv_bytes_per_token
    run_recipe(KVCache(), source, tmp_path / "out", text=few_words(4, 64))
    same(two(ask, str(tmp_path / "out"), PROMPTS, 8), ask(str(tmp_path / "out"), None, PROMPTS, 8), 2e-2)


def test_in_bfloat16(two, checkpoint_of):
    """Sums of rounded parts: the ranks agree with one another, and with one process to the dtype's rounding."""
    source = str(checkpoint_of("llama"))
    ours, one = (
        two(ask, source, PROMPTS, 8, dtype=torch.bfloat16),
        ask(source, None, PROMPTS, 8, dtype=torch.bfloat16),
    )
    assert ours[0].tokens == ours[1].tokens and torch.equal(ours[0].logits, ours[1].logits)
    torch.testing.assert_close(ours[0].logits, one.logits, rtol=0, atol=0.05 * float(one.logits.abs().max()))
    assert "bfloat16, paged" not in ours[0].paths and any("decode_attention" in str(path) for path in ours[0].paths)


def sampled(path: str, group) -> list[list[int]]:
    """Sequences of different lengths, of which some stop."""
    model = load(path, dtype=torch.float32, group=group)
    torch.manual_seed(3)
    how = {"do_sample": True, "temperature": 0.9, "top_k": 50, "top_p": 0.9, "eos_token_id": list(range(0, 300, 25))}
    return [decoded(model, PROMPTS[:3], 9, chunk=4), decoded(model, PROMPTS, 20, **how)]


def test_sampled_tokens(two, checkpoint_of):
    """Ranks that begin with the same seed draw the same tokens."""
    source = str(checkpoint_of("llama"))
    one = sampled(source, None)
    assert two(sampled, source) == [one, one] and one[1] != one[0] and 0 in one[1][0]


def theirs(path: str, group) -> list[int]:
    """The tokens of transformers' own generate."""
    model = load(path, dtype=torch.float32, group=group)
    ids = torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    return model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0).tolist()


@pytest.mark.parametrize("kv", [False, True])
def test_generate_of_transformers(two, kv, checkpoint_of, tmp_path):
    source = checkpoint_of("llama")
    if kv:
        run_recipe(KVCache(bits=8), source, tmp_path / "out", text=few_words(4, 64))
        source = tmp_path / "out"
    one = theirs(str(source), None)
    assert two(theirs, str(source)) == [one, one]


def eager(path: str, group) -> None:
    load(path, group=group, attn_implementation="eager")


def test_what_is_refused(two, checkpoint_of, tmp_path):
    odd = checkpoint_of("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=96)
    for kind, message in two(ask, str(odd), PROMPTS, 2):
        assert kind == "UsageError" and "3 heads with 3 KV heads" in message
    for kind, message in two(ask, str(checkpoint_of("gpt2")), PROMPTS, 2):
        assert kind == "UsageError" and "GPT2LMHeadModel" in message
    for kind, message in two(eager, str(odd)):
        assert kind == "UsageError" and "attn_implementation" in message


@pytest.mark.parametrize("packed", [False, True])
def test_what_does_not_fit_its_config(two, packed, checkpoint_of, tmp_path):
    source = checkpoint_of("llama")
    if packed:
        prune(source, tmp_path / "packed", 0.6, "tiled-csl")
        source = tmp_path / "packed"
    for change, said in (
        ({"intermediate_size": 320}, "mismatch"),
        ({"num_hidden_layers": 3}, "missing"),
        ({"num_hidden_layers": 1}, "unexpected"),
        ({"attention_bias": True}, "missing"),
    ):
        shutil.copytree(source, tmp_path / "out", dirs_exist_ok=True)
        config = json.loads((source / "config.json").read_text()) | change
        (tmp_path / "out" / "config.json").write_text(json.dumps(config))
        for kind, message in two(ask, str(tmp_path / "out"), PROMPTS, 2):
            assert kind == "UsageError" and said in message, message


def test_only_a_ranks_ranges_are_read(checkpoint_of, tmp_path):
    source = checkpoint_of("llama", **WIDE)
    prune(source, tmp_path / "out", 0.6, "tiled-csl")
    checkpoint = Checkpoint(tmp_path / "out")
    for name, entry in checkpoint.tensors.items():
        index = tuple(slice(n // 2, n - 1) for n in entry.shape)
        assert torch.equal(checkpoint.part(name, *index), checkpoint.read(name)[index]), name


def fits(lacking: int, group) -> list[str]:
    """What comes of models and caches that have no room on rank `lacking`."""

    def make() -> int:
        if group.rank == lacking:
            raise torch.OutOfMemoryError
        return 1

    try:
        return [str(speed._agreed(group, make))]
    except torch.OutOfMemoryError as error:
        return [type(error).__name__]


def test_what_does_not_fit_on_one_rank_fits_on_none(two):
    assert two(fits, 1) == two(fits, 0) == [["_DoesNotFit"]] * 2
    assert two(fits, 2) == [["1"]] * 2


BIG = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}  # heads of 128


def make(kind: str, source: Path, output: Path) -> None:
    if kind in ("tiled-csl", "tiled-bitmap"):
        prune(source, output, 0.6, kind)
    elif kind in ("token", "tensor", "none"):
        quantize(source, output, activations=kind, **({"text": few_words()} if kind == "tensor" else {}))
    elif kind == "kv4":
        run_recipe(KVCache(), source, output, text=few_words(4, 64))
    else:
        shutil.copytree(source, output)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "tiled-csl", "tiled-bitmap", "token", "tensor", "none", "kv4"])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_two_cards(two_cards, family, kind, checkpoint_of, tmp_path):
    """Through the kernels, as CUDA graphs with the collectives in them, against one card: to bfloat16's rounding."""
    changes = {"ffn_dim": 1024, "word_embed_proj_dim": 512, "num_attention_heads": 4, "hidden_size": 512}
    make(kind, checkpoint_of(family, **(BIG if family == "llama" else changes)), tmp_path / "out")
    how = {"dtype": torch.bfloat16}
    one = ask(str(tmp_path / "out"), None, PROMPTS, 12, device="cuda", **how)
    ours = two_cards(ask, str(tmp_path / "out"), PROMPTS, 12, **how)
    assert ours[0].tokens == ours[1].tokens and torch.equal(ours[0].logits, ours[1].logits)
    tolerance = 0.1 if kind == "kv4" else 0.05
    for found, expected in ((ours[0].logits, one.logits), (ours[0].own_logits, one.own_logits)):
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * float(expected.abs().max()))
    assert any("2 ranks, nccl" in str(path) for path in ours[0].paths)
    if HAS_WGMMA:
        assert not references(ours[0].paths), ours[0].paths
        assert any("CUDA graph" in str(path) for path in ours[0].paths)
    halves(ours, one)


@pytest.mark.gpu
def test_a_graph_gives_what_steps_without_give(two_cards, checkpoint_of):
    source = str(checkpoint_of("llama", **BIG))
    graphs, steps = (two_cards(ask, source, PROMPTS, 12, dtype=torch.bfloat16, graphs=x)[0] for x in (None, False))
    assert graphs.tokens == steps.tokens
