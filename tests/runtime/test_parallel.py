"""Tensor parallelism: two ranks give the tokens and logits of one process, each holds about half; heads that cannot be shared are refused."""

import pytest
import torch
from conftest import prune, quantize, run_recipe
from ranks import Answer, Ranks, ask

from tilepress.runtime.parallel import parts

PROMPTS = [[5, 9, 2, 77, 130], [8], [250, 3, 3, 9, 40, 41, 7, 7, 100], list(range(10, 50))]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}  # tiles of 128 for each of two ranks
FAMILIES = ["llama", "llama-tied", "qwen2", "qwen3", "mistral", "opt"]


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


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
            sizes = [end - first for first, end in zip(ends, ends[1:], strict=False)]
            assert ends[0] == 0 and ends[-1] == count and len(sizes) == size and (count < size or min(sizes) > 0)
            if count >= 128 * size:
                assert all(end % 128 == 0 for end in ends[:-1]) and max(sizes) - min(sizes) < 256
    assert parts(11008, 4) == [0, 21 * 128, 43 * 128, 64 * 128, 11008]


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_models(two, family, checkpoint_of):
    source = str(checkpoint_of(family))
    one = ask(source, None, PROMPTS, 10)
    ours = two(ask, source, PROMPTS, 10, chunk=7, places=3)
    same(ours, one)
    halves(ours, one, 0.7 if family != "llama-tied" else 0.75)  # norms are everybody's
    assert any("2 ranks, gloo" in path for path in ours[0].paths)
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
    spmm = [path for path in ours[0].paths if "spmm" in path]
    assert spmm and not any("torch linear" in path for path in ours[0].paths if ours[0].paths[path] > 1)


@pytest.mark.parametrize("format", ["tiled-csl", "tiled-bitmap"])
def test_parts_of_tiles(two, format, checkpoint_of, tmp_path):
    """Heads of 32 and a width of 200: parts begin and end within tiles."""
    prune(checkpoint_of("llama"), tmp_path / "out", 0.6, format)
    same(two(ask, str(tmp_path / "out"), PROMPTS, 8), ask(str(tmp_path / "out"), None, PROMPTS, 8))


def test_int8_values_in_tiles(two, checkpoint_of, tmp_path):
    source = checkpoint_of("llama", **WIDE)
    prune(source, tmp_path / "sparse", 0.6, "tiled-bitmap")
    quantize(tmp_path / "sparse", tmp_path / "out", activations="none")
    same(two(ask, str(tmp_path / "out"), PROMPTS, 8), ask(str(tmp_path / "out"), None, PROMPTS, 8))


@pytest.mark.parametrize("activations", ["token", "tensor", "tensor-asym", "tensor-dynamic", "none"])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_int8_artifacts(two, family, activations, checkpoint_of, tmp_path):
    """Scales of row-parallel layers are of whole tokens: the codes are those of one process."""
    settings = {"activations": activations, "weights": "tensor" if activations == "tensor" else "channel"}
    quantize(checkpoint_of(family), tmp_path / "out", **settings)
    prompts = PROMPTS[:1] if activations == "tensor-dynamic" else PROMPTS
    one = ask(str(tmp_path / "out"), None, prompts, 8)
    ours = two(ask, str(tmp_path / "out"), prompts, 8)
    same(ours, one, 2e-3)  # sums of floating numbers round otherwise, and a code may tip
    halves(ours, one, 0.75)
