"""Tiled-CSL: golden bytes, a decoder written from docs/format.md, scipy as oracle, the order's quality, malformed words."""

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch

from tilepress.formats import TilepressError, tiled_csl
from tilepress.formats.tiled_csl import PackStats, TiledCSL, check, pack, pack_stripes, unpack

DOC = Path(__file__).parents[2] / "docs" / "format.md"


def random_weight(rows, cols, sparsity, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, cols, generator=generator).to(dtype)
    weight[weight == 0] = 1.0
    weight[torch.rand(rows, cols, generator=generator) < sparsity] = 0
    return weight


def decode(words: np.ndarray, offsets: np.ndarray, layout: np.ndarray) -> dict[tuple[int, int], int]:
    """{(row, column): value bits}, straight from the specification: plain Python, nothing of ours."""
    rows, cols, tile_rows, _, _ = (int(n) for n in layout)
    assert tile_rows == 128
    column_blocks = -(-cols // 64)
    found = {}
    for tile in range(len(offsets) - 1):
        block, column_block = divmod(tile, column_blocks)
        for word in words[4 * offsets[tile] : 4 * offsets[tile + 1]]:
            word = int(word) & 0xFFFFFFFF
            offset, value = word >> 16, word & 0xFFFF
            if offset >= 128 * tile_rows:
                assert value == 0 and offset < 128 * tile_rows + 128
                continue
            r = offset // 128
            c = 8 * ((offset // 16 % 8) ^ (r % 8)) + offset // 2 % 8
            at = (128 * block + r, 64 * column_block + c)
            assert at not in found and at[0] < rows and at[1] < cols and value != 0
            found[at] = value
    return found


def replay(packed: TiledCSL) -> int:
    """Wavefronts of a warp that stores every tile once: distinct words of the fullest bank, step by step, in plain Python."""
    total = 0
    ends = packed.offsets.tolist()
    for first, last in pairwise(ends):
        words = packed.words[4 * first : 4 * last].tolist()
        for load in range(0, len(words), 128):
            for v in range(4):
                cells = {(word >> 18) & 0x3FFF for word in words[load + v : load + 128 : 4]}
                total += max(Counter(cell % 32 for cell in cells).values())
    return total


def bits(weight):
    return weight.view(torch.int16)


def test_golden_words_are_those_of_the_specification():
    weight = torch.zeros(2, 66, dtype=torch.bfloat16)
    weight[0, 0], weight[0, 1], weight[1, 9], weight[1, 65] = 1.0, -2.0, 0.5, -0.0
    packed = pack(weight)
    section = DOC.read_text().split("### Golden bytes")[1].split("\n## ")[0]
    words = [int(word, 16) for word in re.findall(r"\b[0-9a-f]{8}\b", section)]
    assert (packed.words.numpy().astype(np.int64) & 0xFFFFFFFF).tolist() == words
    assert packed.words[:3].numpy().tobytes() == bytes.fromhex("803f000000c00200003f8200")
    assert packed.offsets.tolist() == [0, 8, 16]
    assert packed.layout().tolist() == [2, 66, 128, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "rows,cols,sparsity",
    [(1, 1, 0.0), (128, 64, 0.0), (130, 70, 0.5), (200, 130, 0.9), (64, 200, 0.99), (129, 65, 1.0), (300, 257, 0.3)],
)
def test_round_trip_and_independent_decoder(rows, cols, sparsity, dtype):
    weight = random_weight(rows, cols, sparsity, dtype)
    packed = pack(weight)
    assert torch.equal(bits(unpack(packed)), bits(weight))
    found = decode(packed.words.numpy(), packed.offsets.numpy(), packed.layout().numpy())
    expected = scipy.sparse.coo_array(bits(weight).numpy())
    assert found == {
        (int(r), int(c)): int(v) & 0xFFFF for r, c, v in zip(expected.row, expected.col, expected.data, strict=True)
    }
    problems, stats = check(packed)
    assert problems == []
    assert stats.nonzeros == expected.nnz
    assert (packed.offsets % 8 == 0).all() and packed.words.numel() == 4 * packed.offsets[-1]


@pytest.mark.parametrize("sparsity", [0.0, 0.2, 0.5, 0.8, 0.95, 0.999])
def test_product_equals_scipy(sparsity):
    weight = random_weight(190, 310, sparsity)
    x = torch.randn(310, 3, dtype=torch.float64)
    expected = scipy.sparse.csr_array(weight.double().numpy()) @ x.numpy()
    np.testing.assert_array_equal(
        unpack(pack(weight)).double().numpy() @ x.numpy(), weight.double().numpy() @ x.numpy()
    )
    np.testing.assert_allclose(unpack(pack(weight)).double().numpy() @ x.numpy(), expected, rtol=1e-12, atol=1e-12)


def test_minus_zero_survives_and_subnormals_too():
    weight = torch.zeros(3, 5, dtype=torch.float16)
    weight[0, 0], weight[1, 1], weight[2, 4] = -0.0, 6e-8, -6e-8
    packed = pack(weight)
    assert torch.equal(bits(unpack(packed)), bits(weight))
    assert check(packed)[1].nonzeros == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_non_finite_is_refused_by_name_and_place(bad, dtype):
    weight = random_weight(150, 90, 0.5, dtype)
    weight[141, 7] = bad
    with pytest.raises(TilepressError, match=r"layers\.3\.up_proj\.weight has a non-finite value at \[141, 7\]"):
        pack(weight, name="layers.3.up_proj.weight")


def test_other_dtypes_are_refused():
    with pytest.raises(TilepressError, match="float32"):
        pack(torch.randn(4, 4))


# The ceilings are those that a distinct-first greedy order reaches on tiles of 128 x 64; without order it is 3.1 to 3.6.
@pytest.mark.parametrize("sparsity,ceiling", [(0.5, 1.14), (0.6, 1.17), (0.7, 1.21), (0.8, 1.29), (0.9, 1.42)])
def test_order_meets_few_bank_conflicts(sparsity, ceiling):
    weight = random_weight(512, 512, sparsity)
    stats = PackStats()
    for _, _, found in pack_stripes(weight):
        stats.add(found)
    assert stats.wavefronts_per_32 <= ceiling
    packed = pack(weight)
    assert stats.wavefronts == replay(packed) == check(packed)[1].wavefronts
    shuffled = packed.words.clone()
    for first, last in zip(packed.offsets[:-1] * 4, packed.offsets[1:] * 4, strict=True):
        shuffled[first:last] = packed.words[first:last][
            torch.randperm(int(last - first), generator=torch.Generator().manual_seed(1))
        ]
    unordered = TiledCSL(shuffled, packed.offsets, packed.rows, packed.cols, packed.dtype)
    assert 32 * replay(unordered) / stats.nonzeros > 3.0  # the metric can fail
    assert torch.equal(bits(unpack(unordered)), bits(weight))  # and order is nobody's business but the kernel's


@pytest.mark.parametrize("sparsity", [0.0, 0.05, 0.97, 0.995])
def test_statistics_are_those_of_a_replay_at_extreme_densities(sparsity):
    weight = random_weight(260, 200, sparsity)
    stats = PackStats()
    for _, _, found in pack_stripes(weight):
        stats.add(found)
    packed = pack(weight)
    assert (stats.nonzeros, stats.wavefronts) == (int(torch.count_nonzero(weight)), replay(packed))
    tiles = torch.nn.functional.pad(weight, (0, 56, 0, 124)).unfold(0, 128, 128).unfold(1, 64, 64)
    assert stats.densest_tile == int((tiles != 0).sum((2, 3)).max())


def test_uneven_banks_and_columns_keep_every_element():
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        weight = random_weight(128, 128, 0.3, seed=seed)
        weight[:, torch.rand(128, generator=generator) < 0.6] = 0  # whole columns: some banks stay empty
        weight[torch.rand(128, generator=generator) < 0.5] = 0
        packed = pack(weight)
        assert torch.equal(bits(unpack(packed)), bits(weight))
        assert check(packed)[0] == []


def test_window_serves_both_tensor_core_paths():
    """mma.sync: lane (g, t) reads chunk 4h + t of row 0 4 1 5 2 6 3 7 [g]: every quarter warp must touch all 32 banks once."""
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    for h in (0, 1):
        for quarter in range(4):
            banks = []
            for lane in range(8 * quarter, 8 * quarter + 8):
                row, chunk = order[lane // 4], 4 * h + lane % 4
                address = 128 * row + 16 * (chunk ^ (row % 8))
                banks += [address // 4 % 32 + i for i in range(4)]
            assert sorted(banks) == list(range(32))


def corrupted(change):
    weight = random_weight(100, 100, 0.6)
    packed = pack(weight)
    words, offsets = packed.words.clone(), packed.offsets.clone()
    change(words, offsets)
    return check(TiledCSL(words, offsets, 100, 100, torch.bfloat16))[0]


def set_word(value):
    def change(words, offsets):
        words[5] = value

    return change


@pytest.mark.parametrize(
    "change,finding",
    [
        (set_word(0x3F80 | 0x4081 << 16), "neither an item nor padding"),
        (set_word(0x3F80 | 0x4000 << 16), "neither an item nor padding"),
        (set_word(0x3F80 | 0x0003 << 16), "odd offset"),
        (set_word(0x0004 << 16), "stores a zero"),
        (set_word(0x7F80 | 0x0004 << 16), "not finite"),
        (lambda words, offsets: words.__setitem__(6, words[5]), "same element"),
        (lambda words, offsets: offsets.__setitem__(1, offsets[2] + 8), "offsets fall"),
        (lambda words, offsets: offsets.__setitem__(1, offsets[1] + 1), "no multiples of 8"),
        (lambda words, offsets: offsets.__setitem__(0, 8), "offsets run from 8"),
        (lambda words, offsets: offsets.__setitem__(-1, offsets[-1] + 8), "offsets run from 0"),
    ],
)
def test_check_names_every_defect(change, finding):
    assert any(finding in problem for problem in corrupted(change))


@pytest.mark.parametrize("rows,cols", [(100, 40), (100, 64), (128, 40)])
def test_check_finds_items_outside_the_weight(rows, cols):
    packed = pack(random_weight(128, 64, 0.5))
    problems = check(TiledCSL(packed.words, packed.offsets, rows, cols, torch.bfloat16))[0]
    assert any(f"lies outside {rows} x {cols}" in problem for problem in problems)


@pytest.mark.parametrize("bad", [0x3F80 | 0x4000 << 16, 0x4080 << 16, 0x3F80 | 0x0003 << 16])
def test_words_that_would_be_written_elsewhere_are_found_in_one_pass(bad):
    packed = pack(random_weight(300, 200, 0.6))
    assert tiled_csl.check_bounds(packed) is None
    packed.words[-100] = bad
    assert tiled_csl.check_bounds(packed) == "a word points outside its tile"
    packed = pack(random_weight(300, 200, 0.6))
    packed.offsets[2] = packed.offsets[3] + 8
    assert "offsets fall" in tiled_csl.check_bounds(packed)


def test_parts_of_wrong_dtypes_and_sizes_are_refused():
    packed = pack(random_weight(4, 4, 0.5))
    for words, offsets in (
        (packed.words.long(), packed.offsets),
        (packed.words[:-1], packed.offsets),
        (packed.words.view(2, -1), packed.offsets),
        (packed.words, packed.offsets.long()),
        (packed.words, packed.offsets[:1]),
    ):
        with pytest.raises(TilepressError, match="w: "):
            tiled_csl.from_parts(words, offsets, packed.layout(), "w")


def test_many_small_pieces_are_one_large_one(monkeypatch):
    """Packing, unpacking and checking work a few row blocks or tiles at a time: where they are cut shows nowhere."""
    weight = random_weight(700, 500, 0.7)
    weight[300:400] = torch.randn(100, 500).bfloat16()  # the densest tile is in the middle
    whole, stats = pack(weight), PackStats()
    _, expected = check(whole)
    monkeypatch.setattr(tiled_csl, "_CHUNK_ELEMENTS", 128 * 64)
    packed = pack(weight)
    assert torch.equal(packed.words, whole.words) and torch.equal(packed.offsets, whole.offsets)
    for _, _, found in pack_stripes(weight):
        stats.add(found)
    problems, checked = check(packed)
    assert problems == [] and stats == checked == expected
    assert torch.equal(bits(unpack(packed)), bits(weight))
    packed.words[4 * int(packed.offsets[20])] = 0x3F80 | 0x0003 << 16
    assert "tile 20:" in check(packed)[0][0]
    weight[600, 7] = float("inf")
    with pytest.raises(TilepressError, match=r"w has a non-finite value at \[600, 7\]"):
        pack(weight, "w")


@pytest.mark.parametrize(
    "layout",
    [
        [0, 4, 128, 0, 0],
        [4, 4, 64, 0, 0],
        [4, 4, 128, 2, 0],
        [4, 4, 128, -1, 0],
        [4, 4, 128, 0, 7],
        [4, 4, 128, 0],
        [400, 4, 128, 0, 0],
    ],
)
def test_layout_out_of_range_is_refused(layout):
    packed = pack(random_weight(4, 4, 0.5))
    with pytest.raises(TilepressError, match="w"):
        tiled_csl.from_parts(packed.words, packed.offsets, torch.tensor(layout, dtype=torch.int32), "w")


@pytest.mark.gpu
@pytest.mark.parametrize("sparsity", [0.5, 0.9])
def test_gpu_packs_the_same_bytes(sparsity):
    weight = random_weight(700, 900, sparsity)
    cpu, gpu = pack(weight), pack(weight.cuda())
    assert torch.equal(gpu.words.cpu(), cpu.words) and torch.equal(gpu.offsets.cpu(), cpu.offsets)
    assert torch.equal(bits(unpack(gpu).cpu()), bits(weight))
