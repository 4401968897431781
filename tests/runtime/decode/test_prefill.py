"""Prompts that are padded for CUDA graphs: nothing that is read depends on the padding, alone or together, on a CPU with plain calls in place of graphs."""

from itertools import pairwise

import pytest
import torch
from support.artifacts import CARD, prune, quantize, with_cache
from support.decoding import alone, decoded
from support.fallbacks import refuse_all

import tilepress
from tilepress.formats.kv_calibration import uncalibrated
from tilepress.formats.kv_int4 import KVFormat
from tilepress.runtime.decode import batch as batches
from tilepress.runtime.decode.batch import SIZES, Batch, Prompt
from tilepress.runtime.hf import paged_cache as kv_cache

FAMILIES = ["llama", "qwen2", "qwen3", "opt", "phi3", "phi3-partial", "gemma3", "mistral", "gemma2"]
LENGTHS = (1, 31, 32, 33, 100)


def prompt_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 290, (count,), generator=torch.Generator().manual_seed(1000 * count + seed))


@pytest.fixture
def as_graphs(monkeypatch):
    """Batches behave as on a card, each graph being the calls that it would have captured, whose result is always the same tensor."""

    def capture(self, run):
        kept = run()

        def replay():
            return kept.copy_(run())

        return torch.inference_mode()(replay)

    monkeypatch.setattr(Batch, "_capture", capture)
    monkeypatch.setattr(Batch, "_captured", lambda self, count: lambda: self._advance(count))
    monkeypatch.setattr(Batch, "_has_room", lambda *_: True)
    made = Batch.__init__

    def make(self, *arguments, graphs=None, **options):
        made(self, *arguments, **options)
        self._captures = self._pads = graphs is not False

    monkeypatch.setattr(Batch, "__init__", make)


def held(batch: Batch, sequence: int, count: int) -> list[torch.Tensor]:
    """Keys and values of a sequence in every layer, as attention reads them."""
    if batch.cache.name.endswith("contiguous"):
        return [*batch.cache.memory[:, :, sequence, :, :count].flatten(0, 1)]
    pool, found = batch.cache.pool, []
    for layer, packed in enumerate(pool.layers):
        keys, values = packed.sides
        dim = pool.calibration.layers[layer].form.head_dim
        stored = *keys[:2], *values[:2], dim, *packed.form, packed.rotate, torch.float32, *packed.value_form
        lengths = torch.tensor([count], dtype=torch.int32, device=batch.device)
        table = batch.cache.table[sequence : sequence + 1]
        found += torch.ops.tilepress.kv_read(pool.pages[layer], table, lengths, count, *stored)
    return found


def poison(batch: Batch) -> None:
    """Free pages can hold anything."""
    if not batch.cache.name.endswith("contiguous"):
        with torch.inference_mode():
            for pages in batch.cache.pool.pages:
                pages.fill_(0xFF)


@pytest.mark.parametrize("cache", ["contiguous", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_prompts_are_the_prompts(family, cache, checkpoint_of, as_graphs):
    """Logits behind the last token and what the cache holds, by all of the ways that a size takes, in sequences that others had before."""
    model = tilepress.load(checkpoint_of(family), dtype=torch.float32)
    batch, plain = Batch(model, 2, 120, cache), Batch(model, 1, 120, cache, graphs=False)
    rounded = 1e-2 if cache == "bfloat16" else 1e-5
    for sequence in (0, 1, 0, 1):
        for count in LENGTHS:
            prompt = prompt_of(count, sequence)
            plain.clear()
            expected = plain.prefill(0, prompt, 120)
            batch.clear()
            poison(batch)
            found = batch.prefill(sequence, prompt, 120)
            torch.testing.assert_close(found, expected, rtol=rounded, atol=rounded)
            assert batch.tokens[sequence] == expected.argmax() and batch.positions[sequence] == count
            for ours, theirs in zip(held(batch, sequence, count), held(plain, 0, count), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=rounded, atol=rounded)
    assert sorted(batch._prefills) == [(1, 32), (1, 64), (1, 120)]  # 128 tokens have no room
    assert all(known.replay is not None for known in batch._prefills.values()) and not plain._prefills


@pytest.mark.parametrize("form", [KVFormat(32), KVFormat(32, 8), KVFormat(32, 16), None], ids=str)
@torch.inference_mode()
def test_what_stands_behind_the_end_changes_no_bit(form, checkpoint_of, as_graphs):
    """Neither other tokens there nor what other prompts of the pass are."""
    source = checkpoint_of("llama")
    model = tilepress.load(source, dtype=torch.float32) if form is None else with_cache(source, form)
    batch = Batch(model, 3, 90, "contiguous" if form is None else "auto")
    seen = []
    for number in range(3):
        given = prompt_of(3 * 66, number).view(3, 66).clone()
        lengths = (33, 5, 64) if number < 2 else (33, 64, 1)
        given[:, 0], given[:, 1], given[0, 2:35] = torch.arange(3), torch.tensor(lengths), prompt_of(33)
        poison(batch)
        for sequence, most in enumerate((90, 70, 64)):
            batch.cache.begin(sequence, most)
        logits = batch._begin(given)
        assert batch.positions.tolist() == list(lengths)
        seen.append([logits[0], *held(batch, 0, 33)])
        batch.clear()
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


@pytest.mark.parametrize("cache", ["contiguous", "bfloat16"])
def test_prompts_of_about_one_length_go_together(cache, checkpoint_of, as_graphs, monkeypatch):
    model = tilepress.load(checkpoint_of("llama"), dtype=torch.float32)
    passes = []
    forward = batches.Decoder.forward

    def counting(self, tokens, *rest):
        passes.append(len(tokens))
        return forward(self, tokens, *rest)

    monkeypatch.setattr(batches.Decoder, "forward", counting)
    batch, plain = Batch(model, 7, 240, cache, chunk=160), Batch(model, 7, 240, cache, graphs=False)
    lengths = (5, 33, 170, 31, 1, 20, 129)
    asked = [Prompt(6 - i, prompt_of(count), count + 1) for i, count in enumerate(lengths)]
    expected = torch.cat([plain.prefill(*prompt) for prompt in asked])
    # 5, 31, 1 and 20 tokens are one pass; 33; 170 in two pieces, the second of which is as long as it is; 129
    sizes = [4 * 32, 64, 240, 10, 240]
    for captured in ([240], [4 * 32, 64], []):
        passes.clear()
        poison(batch)
        found = batch.prefill_all(asked)
        assert sorted(passes) == sorted(sizes + captured)
        rounded = 2e-2 if cache == "bfloat16" else 1e-5
        torch.testing.assert_close(found, expected, rtol=rounded, atol=rounded)
        assert batch.positions.tolist() == plain.positions.tolist() == [*lengths][::-1]
        assert batch.tokens.tolist() == plain.tokens.tolist()
        for sequence, count in enumerate(lengths[::-1]):
            for ours, theirs in zip(held(batch, sequence, count), held(plain, sequence, count), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=rounded, atol=rounded)
        batch.clear()


def test_a_few_short_prompts_go_with_longer_ones(checkpoint_of, as_graphs):
    model = tilepress.load(checkpoint_of("llama"), dtype=torch.float32)

    def passes(lengths, chunk):
        batch = Batch(model, 9, 500, "contiguous", chunk=chunk)
        asked = [Prompt(i, prompt_of(count), 500) for i, count in enumerate(lengths)]
        return [(size, [len(prompt.tokens) for prompt in some]) for size, some in batch._together(asked)]

    assert passes((40, 3, 100), 2048) == [(64, [3, 40]), (128, [100])]  # three of 128 would be many rows
    assert passes((100, 3), 2048) == [(128, [3, 100])]
    assert passes((100, 3), 255) == [(32, [3]), (128, [100])]
    assert passes((3, 40, 200), 2048) == [(64, [3, 40]), (256, [200])]
    assert passes((3, 3, 3, 40, 40), 2048) == [(32, [3, 3, 3]), (64, [40, 40])]
    batch, plain = Batch(model, 3, 200, "contiguous"), Batch(model, 3, 200, "contiguous", graphs=False)
    asked = [Prompt(i, prompt_of(count), count + 1) for i, count in enumerate((40, 3, 100))]
    expected = torch.cat([plain.prefill(*prompt) for prompt in asked])
    for _ in range(3):
        torch.testing.assert_close(batch.prefill_all(asked), expected, rtol=1e-5, atol=1e-5)
        batch.clear()


@pytest.mark.parametrize("kind", ["tiled-csl", "int8+kv4"])
def test_tokens_of_every_kind(kind, made, as_graphs):
    """Through `generate`, with prompts that are equal, again and again, in one piece and in several."""
    model = tilepress.load(made("llama", kind), dtype=torch.float32)
    prompts = [prompt_of(n).tolist() for n in (5, 33, 5, 1)]
    expected = alone(model, prompts, 3)
    for _ in range(3):
        assert decoded(model, prompts, 3) == expected
    assert decoded(model, prompts, 3, chunk=32) == expected


def test_sizes_waste_little():
    """Beyond 128 tokens, where a pass is bound by its products."""
    assert list(SIZES) == sorted(set(SIZES)) and SIZES[-1] == batches.CHUNK
    assert max((b - a - 1) / b for a, b in pairwise(SIZES[2:])) < 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "tiled-csl", "tiled-bitmap", "int8"])
@pytest.mark.parametrize("bits", [16, 4, None], ids=["16", "4", "contiguous"])
def test_graphs_of_prefill(kind, bits, checkpoint_of, tmp_path, monkeypatch):
    """A graph gives the bits of what it captured; without padding they are the same up to rounding. Two sequences, in turn and together; nothing grows."""
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
    batch, plain = (Batch(model, 2, 2300, cache, graphs=graphs) for graphs in (None, False))
    plain._pads = False
    lengths, used = (1, 31, 32, 33, 500, 2048, 2100), []
    first: dict[int, list[torch.Tensor]] = {}  # logits, keys and values of each length
    for turn in range(5):
        for count in lengths:
            sequence = turn % 2
            logits = batch.prefill(sequence, prompt_of(count), count + 40)
            assert int(batch.positions[sequence]) == count
            seen = [logits, *held(batch, sequence, count)]
            if count in first:
                assert all(torch.equal(a, b) for a, b in zip(first[count], seen, strict=True)), (turn, count)
            else:
                first[count] = [x.clone() for x in seen]
                expected = plain.prefill(0, prompt_of(count), count + 40)
                torch.testing.assert_close(logits, expected, rtol=5e-2, atol=5e-2)
                plain.clear()
            batch.clear()
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    assert used[2] == used[3] == used[4]
    assert all(known.replay is not None for known in batch._prefills.values())
    assert {size for _, size in batch._prefills} == {32, 64, 512, 2048}
    assert "prefill: a CUDA graph for each size of padded prompts, up to 2048 tokens" in batch.paths()
    asked, plain._pads, seen = [Prompt(0, prompt_of(20), 90), Prompt(1, prompt_of(31), 90)], True, []
    for one in (batch, batch, batch, plain):  # as it is, captured, replayed; and without graphs
        seen.append([one.prefill_all(asked)])
        for _ in range(8):
            one.step(2)
            seen[-1].append(one.tokens.clone())
        one.clear()
    assert (2, 32) in batch._prefills and plain._prefills[2, 32].replay is None
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))
    alone = torch.cat([first[31][0], batch.prefill(0, prompt_of(20), 90)]).flip(0)
    torch.testing.assert_close(seen[0][0], alone, rtol=5e-2, atol=5e-2)


@pytest.mark.gpu
def test_little_memory_leaves_prefill_op_by_op(checkpoint_of, monkeypatch):
    model = tilepress.load(checkpoint_of("llama", **CARD), device="cuda")
    monkeypatch.setattr(batches, "free_bytes", lambda _: batches._SPARE_BYTES)
    batch = Batch(model, 1, 256)
    found = [batch.prefill(0, prompt_of(40), 60) for _ in range(4)]
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert [known.replay for known in batch._prefills.values()] == [None]
