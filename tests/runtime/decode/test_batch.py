"""A batch of the lean pass: prompts in pieces and copied, room and pages, how many sequences a step advances."""

import pytest
import torch
from support.artifacts import with_cache

import tilepress
from tilepress.formats import TilepressError, UsageError
from tilepress.formats.kv_int4 import KVFormat
from tilepress.kernels.arch import references
from tilepress.runtime.decode.batch import Batch
from tilepress.runtime.decode.cache import CACHES

PROMPT = torch.arange(10, 80)


@pytest.fixture(scope="module")
def llama(checkpoint_of):
    return tilepress.load(checkpoint_of("llama"), dtype=torch.float32)


@pytest.fixture(scope="module")
def packed(checkpoint_of):
    return with_cache(checkpoint_of("llama"), KVFormat(32, 8))


def greedy(batch: Batch, count: int, steps: int) -> list[list[int]]:
    found = [batch.tokens[:count].tolist()]
    for _ in range(steps):
        batch.step(count)
        found.append(batch.tokens[:count].tolist())
    return [list(row) for row in zip(*found, strict=True)]


def by_itself(model, prompt: torch.Tensor, steps: int) -> list[int]:
    """Each time a pass of the model's own over everything."""
    ids = prompt[None]
    with torch.inference_mode():
        for _ in range(steps + 1):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("cache", [name for name in CACHES if name != "calibrated"])
def test_pieces_of_a_prompt_give_what_the_whole_gives(llama, cache):
    expected = Batch(llama, 1, 80, cache).prefill(0, PROMPT, 80)
    with torch.inference_mode():
        own = llama(PROMPT[None]).logits[0, -1:]
    rounded = 2e-2 if cache == "bfloat16" else 1e-4
    torch.testing.assert_close(expected, own, rtol=rounded, atol=rounded)
    for chunk in (1, 9, 64, 69):
        found = Batch(llama, 1, 80, cache, chunk=chunk).prefill(0, PROMPT, 80)
        torch.testing.assert_close(found, expected, rtol=rounded, atol=rounded)


@pytest.mark.parametrize("cache", ["contiguous", "bfloat16"])
def test_copies_of_a_sequence(llama, cache):
    batch = Batch(llama, 3, 90, cache)
    batch.prefill(0, PROMPT, 90)
    for to in (1, 2):
        batch.copy(0, to, 90)
    rows = greedy(batch, 3, 9)
    assert rows[0] == rows[1] == rows[2]
    assert cache == "bfloat16" or rows[0] == by_itself(llama, PROMPT, 9)


def test_the_first_sequences_alone(llama):
    """A step of some leaves the others where they are; one that has not begun does nothing."""
    batch = Batch(llama, 4, 90)
    prompts = [PROMPT[:5], PROMPT[5:30], PROMPT]
    for number, prompt in enumerate(prompts):
        batch.prefill(number, prompt, 90)
    expected = [by_itself(llama, prompt, 6) for prompt in prompts]
    assert greedy(batch, 2, 3) == [row[:4] for row in expected[:2]]
    assert batch.positions.tolist() == [8, 28, 70, -1]
    assert [row[3:] for row in expected[:2]] + [expected[2][:4]] == greedy(batch, 3, 3)
    assert greedy(batch, 4, 1)[3] == [0, 0] and batch.positions[3] == -1


def test_fed_tokens_come_next(llama):
    batch = Batch(llama, 1, 90)
    batch.prefill(0, PROMPT, 90)
    batch.feed(torch.tensor([123]))
    batch.step(1)
    assert batch.tokens.tolist() == by_itself(llama, torch.cat([PROMPT, torch.tensor([123])]), 0)


def test_pages_are_taken_and_given_back(packed):
    batch = Batch(packed, 3, 128, num_pages=4)
    pool = batch.cache.pool
    for number, (count, most, free) in enumerate([(5, 64, 3), (5, 65, 1), (64, 64, 0)]):
        batch.prefill(number, PROMPT[:count], most)
        assert len(pool.free) == free
    with pytest.raises(TilepressError, match="needs 5 pages"):
        batch.prefill(0, PROMPT[:5], 64)
    first = greedy(batch, 2, 3)
    batch.clear()
    assert len(pool.free) == 4 and not any(pool.users) and batch.positions.tolist() == [-1] * 3
    with torch.inference_mode():
        for pages in pool.pages:
            pages.fill_(0xFF)  # free pages can hold anything
    for number in (1, 0):
        batch.prefill(number, PROMPT[:5], 70)
    assert greedy(batch, 2, 3) == first


def test_what_does_not_fit_is_refused(llama, checkpoint_of):
    batch = Batch(llama, 1, 70)
    for prompt, most, message in ((PROMPT, 71, "room for 70"), (PROMPT[:0], 5, "of 0 tokens"), (PROMPT, 60, "room")):
        with pytest.raises(UsageError, match=message):
            batch.prefill(0, prompt, most)
    for options, message in (
        ({"sequences": 0}, "0 sequences"),
        ({"max_len": 1}, "a model of"),
        ({"chunk": 0}, "pieces of 0"),
        ({"cache": "x"}, "the cache 'x' is unknown"),
        ({"cache": "calibrated"}, "no calibrated cache"),
        ({"graphs": True}, "CUDA graphs need"),
    ):
        with pytest.raises(UsageError, match=message):
            Batch(llama, **({"sequences": 1, "max_len": 64} | options))
    with pytest.raises(UsageError, match="a model of 128"):
        Batch(tilepress.load(checkpoint_of("opt")), 1, 129)
    with pytest.raises(ValueError, match="no lean pass"):
        Batch(tilepress.load(checkpoint_of("gpt2")), 1, 64)


def test_paths_name_what_runs(packed):
    paths = Batch(packed, 1, 64).paths()
    assert paths["decode steps: launched op by op"] == 1
    assert {"rope_append reference on cpu", "kv_read reference on cpu"} < set(map(str, references(paths)))
