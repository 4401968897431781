"""Tiled bitmap: golden bytes, a decoder and an encoder written from docs/format.md, every kind of damage, sizes."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tilepress.formats import TilepressError, tiled_bitmap
from tilepress.formats.tiled_bitmap import (
    PackStats,
    TiledBitmap,
    check,
    check_bounds,
    from_parts,
    pack,
    pack_stripes,
    record,
    unpack,
    unpack_values,
)
from tilepress.formats.tiles import offsets_from_sizes

SECTION = (Path(__file__).parents[2] / "docs" / "format.md").read_text().split("## Tiled bitmap")[1].split("\n## ")[0]
DTYPES = [torch.bfloat16, torch.float16, torch.int8]
KINDS = [(dtype, group) for dtype in DTYPES for group in (1, 2)]
every_kind = pytest.mark.parametrize("dtype,group", KINDS)


def random_weight(rows, cols, density, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.int8:
        weight = torch.randint(1, 128, (rows, cols), generator=generator)
        weight = torch.where(torch.rand(rows, cols, generator=generator) < 0.5, -weight, weight).to(dtype)
    else:
        weight = torch.randn(rows, cols, generator=generator).to(dtype)
        weight[weight == 0] = 1.0
    weight[torch.rand(rows, cols, generator=generator) >= density] = 0
    return weight


def scale_for(weight):
    return torch.linspace(0.01, 3, len(weight)).bfloat16() if weight.dtype == torch.int8 else None


def packed_weight(weight, group):
    return pack(weight, group, scale_for(weight))


def bits(weight):
    return weight if weight.dtype == torch.int8 else weight.view(torch.int16)


def same(packed, weight):
    return torch.equal(bits(unpack_values(packed)), bits(weight))


def stored_bits(weight):
    """{(row, column): bits of the value} of every element that the format keeps; an int8 code as sign and magnitude."""
    dense = bits(weight).numpy()
    found = {(int(r), int(c)): int(dense[r, c]) for r, c in np.argwhere(dense)}
    if weight.dtype == torch.int8:
        return {at: (128 if q < 0 else 0) + abs(q) for at, q in found.items()}
    return {at: value & 0xFFFF for at, value in found.items()}


def place(w, lane, i):
    row = 16 * w + 8 * (i // 2 % 2) + lane // 4
    column = 16 * (i // 8) + 8 * (i // 4 % 2) + 2 * (lane % 4) + i % 2
    return row, column


def run_of(row, column):
    w, lane = row // 16, 4 * (row % 8) + column // 2 % 4
    return w, lane, 8 * (column // 16) + 4 * (column // 8 % 2) + 2 * (row // 8 % 2) + column % 2


def decode(words, offsets, bitmap):
    """{(row, column): value bits}, straight from the specification: plain Python, nothing of ours."""
    rows, cols, tall, wide, dtype, group, _ = (int(n) for n in bitmap)
    assert (tall, wide) == (128, 128) and group in (1, 2)
    size = 1 if dtype == 2 else 2
    data, ends = words.tobytes(), [16 * int(end) for end in offsets]
    column_blocks = -(-cols // 128)
    assert len(ends) == -(-rows // 128) * column_blocks + 1 and ends[0] == 0 and ends[-1] == len(data)
    found = {}
    for tile in range(len(ends) - 1):
        block, column_block = divmod(tile, column_blocks)
        body = data[ends[tile] : ends[tile + 1]]
        values, taken = 2048 // group + 512, set()
        lines = (len(body) - values) / 128
        assert lines in range(257 if size == 2 else 129)
        for w in range(8):
            banks = []
            for lane in range(32):
                n = 32 * w + lane
                mask = int.from_bytes(body[8 // group * n : 8 // group * (n + 1)], "little")
                at = 2048 // group + 2 * n
                start = int.from_bytes(body[at : at + 2], "little")
                assert start % (group * size) == 0 and (mask or start == 0)
                if mask:
                    banks.append(start // 4 % 32)
                k = 0
                for j in range(64 // group):
                    if not mask >> j & 1:
                        continue
                    at = values + start + 128 * k
                    k += 1
                    assert at + group * size <= len(body)
                    whole = body[at : at + group * size]
                    assert any(whole) and taken.isdisjoint(range(at, at + len(whole)))
                    taken.update(range(at, at + len(whole)))
                    for e in range(group):
                        value = int.from_bytes(whole[size * e : size * (e + 1)], "little")
                        r, c = place(w, lane, group * j + e)
                        if value:
                            found[128 * block + r, 128 * column_block + c] = value
                            assert 128 * block + r < rows and 128 * column_block + c < cols
            assert len(set(banks)) == len(banks)
        assert not any(body[at] for at in range(values, len(body)) if at not in taken)
    return found


def encode(weight, group, column_of, gap=0, scale=None):
    """Another writer: runs from the last warp to the first in the columns that column_of(warp, lane) says, `gap` lines between them."""
    rows, cols = weight.shape
    assert rows <= 128 and cols <= 128
    width = group * weight.element_size()
    groups = {}
    for (row, column), value in stored_bits(weight).items():
        w, lane, i = run_of(row, column)
        pair = groups.setdefault((w, lane), {}).setdefault(i // group, [0] * group)
        pair[i % group] = value
    heights, cells, head = {}, {}, bytearray(2048 // group + 512)
    for w, lane in sorted(groups, reverse=True):
        run, n, column = groups[w, lane], 32 * w + lane, column_of(w, lane)
        line = heights.get(column, 0)
        mask, start = sum(1 << j for j in run), 128 * line + width * column
        head[8 // group * n : 8 // group * (n + 1)] = mask.to_bytes(8 // group, "little")
        head[2048 // group + 2 * n : 2048 // group + 2 * n + 2] = start.to_bytes(2, "little")
        for k, j in enumerate(sorted(run)):
            cells[start + 128 * k] = b"".join(value.to_bytes(width // group, "little") for value in run[j])
        heights[column] = line + len(run) + gap
    body = bytearray(128 * max(heights.values(), default=0))
    for at, cell in cells.items():
        body[at : at + width] = cell
    words = torch.frombuffer(head + body, dtype=torch.int32)
    offsets = torch.tensor([0, words.numel() // 4], dtype=torch.int32)
    return TiledBitmap(words, offsets, rows, cols, weight.dtype, group, scale)


def golden():
    """(NAME_bitmap, NAME_offsets, {index: word}) of each example in the specification."""
    for text in SECTION.split("\nNAME_bitmap ")[1:]:
        layout, offsets, rest = text.split("\n", 2)
        words = {int(i): int(word, 16) for i, word in re.findall(r"\b(\d+):([0-9a-f]{8})\b", rest.split("```")[0])}
        yield [int(n) for n in layout.split()], [int(n) for n in offsets.split()[1:]], words


@pytest.mark.parametrize("example", [0, 1, 2])
def test_golden_words_are_those_of_the_specification(example):
    layout, offsets, words = list(golden())[example]
    if example < 2:
        weight = torch.zeros(9, 130, dtype=torch.bfloat16)
        weight[0, 0], weight[0, 1], weight[0, 8], weight[8, 0] = 1.0, -2.0, 0.5, 4.0
        weight[0, 17], weight[1, 2], weight[8, 129] = 3.0, -0.0, -1.0
        packed = pack(weight, 1 + example)
    else:
        weight = torch.zeros(9, 20, dtype=torch.int8)
        weight[0, 0], weight[0, 1], weight[8, 17], weight[1, 2] = 1, -2, 127, -127
        packed = pack(weight, 1, torch.ones(9).bfloat16())
    found = {i: word & 0xFFFFFFFF for i, word in enumerate(packed.words.tolist()) if word}
    assert found == words and packed.offsets.tolist() == offsets and packed.layout().tolist() == layout
    assert packed.words.numel() == 4 * offsets[-1]


def test_runs_are_the_fragments_of_mma_m16n8k16():
    """The PTX manual's A fragment: a0 a1 row g, a2 a3 row g + 8, a4 .. a7 the same 8 columns on; and the formulas there and back agree."""
    for w in range(8):
        for lane in range(32):
            g, t = divmod(lane, 4)
            for i in range(64):
                row = g if i % 8 in (0, 1, 4, 5) else g + 8
                column = 2 * t + i % 2 + (8 if i % 8 >= 4 else 0)
                assert place(w, lane, i) == (16 * w + row, 16 * (i // 8) + column)
                assert run_of(*place(w, lane, i)) == (w, lane, i)


@every_kind
@pytest.mark.parametrize(
    "rows,cols,density",
    [(1, 1, 1.0), (128, 128, 1.0), (130, 70, 0.5), (100, 260, 0.1), (129, 129, 0.0), (256, 128, 0.5)],
)
def test_round_trip_and_independent_decoder(rows, cols, density, dtype, group):
    weight = random_weight(rows, cols, density, dtype)
    packed = packed_weight(weight, group)
    assert same(packed, weight)
    found = decode(packed.words.numpy(), packed.offsets.numpy(), packed.layout().numpy())
    assert found == stored_bits(weight)
    problems, stats = check(packed)
    assert problems == [] and check_bounds(packed) is None
    assert stats.nonzeros == len(found)
    assert (packed.offsets % 8 == 0).all()


@every_kind
@pytest.mark.parametrize("density", [0.0, 0.02, 0.5, 0.97, 1.0])
def test_larger_weights_come_back_bit_for_bit(density, dtype, group):
    weight = random_weight(389, 515, density, dtype)
    packed = packed_weight(weight, group)
    assert same(packed, weight)
    problems, stats = check(packed)
    assert problems == []
    collected = PackStats()
    for _, _, found in pack_stripes(weight, group):
        collected.add(found)
    tiles = torch.nn.functional.pad(weight, (0, 125, 0, 123)).unfold(0, 128, 128).unfold(1, 128, 128)
    assert stats == collected
    assert stats.nonzeros == int((weight != 0).sum())
    assert stats.densest_tile == int((tiles != 0).sum((2, 3)).max())
    header = (4 * 5) * (2048 // group + 512)
    assert stats.slots * weight.element_size() == packed.words.numel() * 4 - header


@every_kind
@pytest.mark.parametrize("where", ["row", "column", "run", "half", "corner"])
def test_uneven_weights(where, dtype, group):
    weight = torch.zeros(200, 300, dtype=dtype)
    full = random_weight(200, 300, 1.0, dtype)
    if where == "row":
        weight[77] = full[77]
    elif where == "column":
        weight[:, 131] = full[:, 131]
    elif where == "run":  # all 64 elements of one lane, nothing else
        for i in range(64):
            weight[place(5, 13, i)] = 3
    elif where == "half":
        weight[:64], weight[:, 150:] = full[:64], full[:, 150:]
    else:
        weight[199, 299] = -1
    packed = packed_weight(weight, group)
    assert same(packed, weight) and check(packed)[0] == []
    if where == "run":
        assert packed.offsets[1] * 16 == 2048 // group + 512 + 128 * (64 // group)


@every_kind
def test_a_full_tile_of_any_kind_needs_the_lines_of_a_dense_one_at_most(dtype, group):
    """Counts of runs between nothing and everything; a column of values must not grow above those of a full tile."""
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.rand(128, 1, generator=generator) ** (seed + 1)
        weight = random_weight(128, 128, 1.0, dtype)
        weight[torch.rand(128, 128, generator=generator) > rows] = 0
        packed = packed_weight(weight, group)
        assert packed.words.numel() * 4 <= 2048 // group + 512 + 128 * 128 * weight.element_size()
        assert same(packed, weight)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_minus_zero_and_subnormals_survive(dtype, group):
    weight = torch.zeros(9, 20, dtype=dtype)
    pattern = bits(weight)  # the same memory
    pattern[0, 0], pattern[1, 1], pattern[8, 19] = -0x8000, 1, -0x7FFF
    pattern[3, 4] = pattern[3, 5] = -0x8000
    packed = pack(weight, group)
    assert same(packed, weight)
    assert check(packed) == ([], PackStats(5, 5, packed_slots(packed)))
    assert decode(packed.words.numpy(), packed.offsets.numpy(), packed.layout().numpy()) == stored_bits(weight)


def packed_slots(packed):
    return (packed.words.numel() * 4 - (packed.offsets.numel() - 1) * (2048 // packed.group + 512)) // 2


def test_every_code_and_its_scale():
    codes = torch.arange(-127, 128, dtype=torch.int8).view(3, 85)
    for dtype in (torch.bfloat16, torch.float16):
        scale = torch.tensor([0.013, 1.0, 2.5]).to(dtype)
        for group in (1, 2):
            packed = pack(codes, group, scale)
            assert torch.equal(unpack_values(packed), codes)
            expected = (codes.numpy().astype(np.float32) * scale.float().numpy()[:, None]).astype(np.float32)
            assert unpack(packed).dtype == dtype == packed.weight_dtype
            assert torch.equal(unpack(packed), torch.from_numpy(expected).to(dtype))


def test_a_view_packs_like_its_copy():
    weight = random_weight(256, 384, 0.5)
    for view in (weight.t(), weight[:, 1:200], weight[::2]):
        packed, copied = pack(view, 1), pack(view.contiguous(), 1)
        assert torch.equal(packed.words, copied.words) and torch.equal(packed.offsets, copied.offsets)
        assert same(packed, view.contiguous())


@every_kind
def test_packing_is_deterministic(dtype, group):
    weight = random_weight(300, 300, 0.4, dtype)
    first, second = packed_weight(weight, group), packed_weight(weight.clone(), group)
    assert torch.equal(first.words, second.words) and torch.equal(first.offsets, second.offsets)


def test_a_group_is_chosen_by_density():
    assert pack(random_weight(128, 128, 0.5)).group == 1
    assert pack(random_weight(128, 128, 0.1)).group == 2
    assert pack(random_weight(128, 128, 0.5, torch.int8), scale=torch.ones(128).half()).group == 2


# 50 % sparsity, of dense bfloat16.
@pytest.mark.parametrize("dtype,ceiling", [(torch.bfloat16, 0.59), (torch.int8, 0.345)])
def test_bytes_at_half_density(dtype, ceiling):
    packed = packed_weight(random_weight(1024, 1024, 0.5, dtype), 1)
    assert packed.words.numel() * 4 < ceiling * 2 * 1024 * 1024


@pytest.mark.parametrize(
    "row,dtype,group",
    [("16 bits", "bfloat16", 1), ("16 bits", "bfloat16", 2), ("int8", "int8", 1), ("int8", "int8", 2)],
)
def test_sizes_are_those_of_the_specification(row, dtype, group):
    line = re.search(rf"\| {row}, G = {group} \|(.*)\|", SECTION)[1]
    shares = [float(share) for share in line.split("|")]
    for share, density in zip(shares, (0.5, 0.4, 0.3, 0.2, 0.1), strict=True):
        packed = packed_weight(random_weight(512, 512, density, getattr(torch, dtype)), group)
        assert abs(packed.words.numel() * 4 / (2 * 512 * 512) - share) < 0.005


@every_kind
def test_what_another_writer_chose_reads_the_same(dtype, group):
    """The assignment of columns of values, the order in them and gaps are the writer's: fixed is that a warp's runs have banks of their own."""
    weight = random_weight(90, 128, 0.25, dtype)
    of_bank = 4 // group // weight.element_size()
    other = encode(weight, group, lambda w, lane: (7 * lane + w) % 32 * of_bank + w % of_bank, 1, scale_for(weight))
    assert same(other, weight)
    assert check(other)[0] == [] and check_bounds(other) is None
    assert decode(other.words.numpy(), other.offsets.numpy(), other.layout().numpy()) == stored_bits(weight)
    assert not torch.equal(other.words, packed_weight(weight, group).words)


def test_record_says_what_a_manifest_needs():
    weight = random_weight(130, 64, 0.5, torch.int8)
    packed = replace(packed_weight(weight, 1), transposed=True)
    expected = {"shape": [130, 64], "dtype": "bfloat16", "value_dtype": "int8", "group": 1, "transposed": True}
    assert record(packed, PackStats(7, 5, 128)) == expected | {"nonzeros": 7, "densest_tile": 5, "slots": 128}
    assert packed.layout().tolist() == [130, 64, 128, 128, 2, 1, 1]
    assert from_parts(packed.words, packed.offsets, packed.layout(), packed.scale).transposed


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_non_finite_is_refused_by_name_and_place(bad, dtype, monkeypatch):
    weight = random_weight(150, 90, 0.5, dtype)
    weight[141, 7] = bad
    for chunk in (tiled_bitmap._CHUNK_ELEMENTS, 1):
        monkeypatch.setattr(tiled_bitmap, "_CHUNK_ELEMENTS", chunk)
        with pytest.raises(TilepressError, match=r"layers\.3\.up_proj\.weight has a non-finite value at \[141, 7\]"):
            pack(weight, name="layers.3.up_proj.weight")


def test_the_code_without_a_counterpart_is_refused():
    codes = random_weight(150, 90, 0.5, torch.int8)
    codes[129, 3] = -128
    with pytest.raises(TilepressError, match=r"w has the code -128 at \[129, 3\]"):
        pack(codes, 1, torch.ones(150).half(), "w")


@pytest.mark.parametrize(
    "values", [torch.randn(4, 4), torch.ones(4).bfloat16(), torch.ones(2, 2, 2).half(), torch.ones(2, 2).short()]
)
def test_other_dtypes_and_shapes_are_refused(values):
    with pytest.raises(TilepressError, match="w: the bitmap stores 2-D bfloat16, float16 or int8 values"):
        pack(values, name="w")


def test_a_weight_beyond_the_offsets_is_refused():
    sizes = torch.full((16,), 2**27)
    with pytest.raises(TilepressError, match="32 GiB"):
        offsets_from_sizes(sizes)
    sizes[0] -= 1
    assert offsets_from_sizes(sizes)[-1] == 2**31 - 1


# Damage. A sound weight, a change of its bytes, offsets or scale, and what check says of it.


def damaged(packed, change):
    broken = replace(packed, words=packed.words.clone(), offsets=packed.offsets.clone())
    change(broken)
    return broken


def place_of_value(packed, tile=0):
    """(number, byte among the words of its first group) of the first run of a tile that has values."""
    data, base, group = packed.words.numpy().view(np.uint8), int(packed.offsets[tile]) * 16, packed.group
    number = next(n for n in range(256) if data[base + 8 // group * n : base + 8 // group * (n + 1)].any())
    at = base + 2048 // group + 2 * number
    return number, base + 2048 // group + 512 + int(data[at]) + 256 * int(data[at + 1])


def set_start(packed, tile, number, start):
    at = int(packed.offsets[tile]) * 16 + 2048 // packed.group + 2 * number
    packed.words.numpy().view(np.uint16)[at // 2] = start


def set_value(packed, pattern, tile=0):
    _, at = place_of_value(packed, tile)
    size = packed.dtype.itemsize
    for e in range(packed.group):
        packed.words.numpy().view(np.uint16 if size == 2 else np.uint8)[at // size + e] = pattern


@every_kind
@pytest.mark.parametrize(
    "change,finding",
    [
        (lambda p: p.offsets.__setitem__(1, p.offsets[2] + 8), r"tile \d has -?\d+ bytes"),
        (lambda p: p.offsets.__setitem__(1, p.offsets[1] + 1), "tile 0 has .* whole lines of 128"),
        (lambda p: p.offsets.__setitem__(1, 8), "tile 0 has 128 bytes"),
        (lambda p: p.offsets.__setitem__(1, -8), "tile 0 has -128 bytes"),
        (lambda p: p.offsets.__setitem__(0, 8), "offsets run from 8 to"),
        (lambda p: p.offsets.__setitem__(-1, p.offsets[-1] + 8), "offsets run from 0 to"),
        (lambda p: p.offsets.__setitem__(-1, p.offsets[-1] - 8), "offsets run from 0 to"),
    ],
)
def test_offsets_that_lead_astray_are_found(change, finding, dtype, group):
    broken = damaged(packed_weight(random_weight(200, 200, 0.4, dtype), group), change)
    problems, stats = check(broken)
    assert len(problems) == 1 and re.search(finding, problems[0]) and stats == PackStats()
    assert check_bounds(broken) == problems[0]


@pytest.mark.parametrize("dtype,lines", [(torch.bfloat16, 256), (torch.int8, 128)])
def test_a_tile_of_more_lines_than_a_full_one_is_found(dtype, lines):
    packed = packed_weight(random_weight(128, 128, 1.0, dtype), 1)
    assert packed.words.numel() * 4 == 2560 + 128 * lines
    longer = torch.cat([packed.words, packed.words.new_zeros(32)])
    assert "tile 0 has" in check_bounds(replace(packed, words=longer, offsets=packed.offsets + torch.tensor([0, 8])))


@every_kind
def test_a_run_outside_its_tile_is_found(dtype, group):
    packed = packed_weight(random_weight(200, 200, 0.4, dtype), group)
    values = int(packed.offsets[2] - packed.offsets[1]) * 16 - (2048 // group + 512)
    number, _ = place_of_value(packed, 1)
    starts = [values, 0xFF80, values - 128]  # the last: only its first value is inside
    if packed.width > 1:
        starts.append(1)  # between two places
    for start in starts:
        broken = damaged(packed, lambda p, start=start: set_start(p, 1, number, start))
        assert check(broken)[0] == ["tiles 0 to 3: 1 runs point outside their tile"]
        assert check_bounds(broken) == "a run of tile 1 points outside the tile"


@every_kind
def test_values_of_two_runs_are_found(dtype, group):
    weight = torch.zeros(128, 128, dtype=dtype)
    weight[0, 0] = weight[16, 0] = 3  # lane 0 of warps 0 and 1
    packed = packed_weight(weight, group)
    broken = damaged(packed, lambda p: set_start(p, 0, 32, place_of_value(p)[1] - 2048 // group - 512))
    assert any("1 values belong to two runs" in problem for problem in check(broken)[0])
    assert check_bounds(broken) is None


@every_kind
def test_a_stored_zero_is_found(dtype, group):
    packed = packed_weight(random_weight(200, 200, 0.4, dtype), group)
    broken = damaged(packed, lambda p: set_value(p, 0, 2))
    assert check(broken)[0] == ["tiles 0 to 3: 1 stored groups are zero"]


@every_kind
def test_bytes_in_unused_places_are_found(dtype, group):
    weight = torch.zeros(200, 200, dtype=dtype)
    weight[0, 0] = weight[150, 150] = 2
    packed = packed_weight(weight, group)
    assert packed.words.numel() == (4 * (2048 // group + 512) + 2 * 128) // 4
    broken = damaged(packed, lambda p: p.words.numpy().view(np.uint8).__setitem__(-1, 1))
    assert check(broken)[0] == ["tiles 0 to 3: 1 places that no run has are not zero"]


@pytest.mark.parametrize("dtype,group", [kind for kind in KINDS if kind[1] * kind[0].itemsize < 4])
def test_a_bank_shared_by_two_runs_of_a_warp_is_found(dtype, group):
    """Lanes 0 and 1 of warp 2 in two columns of values of one bank."""
    weight = random_weight(128, 128, 0.25, dtype)
    of_bank = 4 // group // weight.element_size()

    def column(w, lane):
        return 3 % of_bank if (w, lane) == (2, 1) else lane * of_bank + w % of_bank

    broken = encode(weight, group, column, scale=scale_for(weight))
    assert same(broken, weight)
    assert check(broken)[0] == ["tiles 0 to 0: 1 runs share a bank with another of their warp"]


def test_a_bank_shared_in_one_column_is_found():
    weight = random_weight(128, 128, 0.1)
    broken = encode(weight, 2, lambda w, lane: 0 if (w, lane) == (2, 1) else lane)
    assert same(broken, weight)
    assert check(broken)[0] == ["tiles 0 to 0: 1 runs share a bank with another of their warp"]


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(
    "dtype,pattern",
    [
        (torch.bfloat16, 0x7FC0),
        (torch.bfloat16, 0xFF80),
        (torch.float16, 0x7C00),
        (torch.float16, 0xFE01),
        (torch.int8, 0x80),
    ],
)
def test_values_that_are_no_numbers_are_found(dtype, pattern, group):
    packed = packed_weight(random_weight(200, 200, 0.4, dtype), group)
    broken = damaged(packed, lambda p: set_value(p, pattern, 3))
    assert check(broken)[0] == [f"tiles 0 to 3: {group} values are not finite, or a zero with a sign"]


@every_kind
@pytest.mark.parametrize("rows,cols", [(100, 256), (128, 129), (65, 200)])
def test_values_outside_the_weight_are_found(rows, cols, dtype, group):
    weight = random_weight(128, 256, 0.5, dtype)
    packed = replace(packed_weight(weight, group), rows=rows, cols=cols)
    outside = int((weight != 0).sum() - (weight[:rows, :cols] != 0).sum())
    assert check(packed)[0] == [f"tiles 0 to 1: {outside} values lie outside {rows} x {cols}"]


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_positive_number_is_found(bad):
    packed = packed_weight(random_weight(20, 20, 0.5, torch.int8), 1)
    packed.scale[7] = bad
    assert check(packed)[0] == ["a scale is not a positive number"]


@pytest.mark.parametrize(
    "layout",
    [
        [0, 4, 128, 128, 0, 1, 0],
        [4, -1, 128, 128, 0, 1, 0],
        [4, 4, 64, 128, 0, 1, 0],
        [4, 4, 128, 64, 0, 1, 0],
        [4, 4, 128, 128, 3, 1, 0],
        [4, 4, 128, 128, -1, 1, 0],
        [4, 4, 128, 128, 0, 0, 0],
        [4, 4, 128, 128, 0, 4, 0],
        [4, 4, 128, 128, 0, 1, 2],
        [4, 4, 128, 128, 0, 1],
        [400, 4, 128, 128, 0, 1, 0],
        [4, 400, 128, 128, 0, 1, 0],
    ],
)
def test_layout_out_of_range_is_refused(layout):
    packed = pack(random_weight(4, 4, 0.5), 1)
    with pytest.raises(TilepressError, match="w: "):
        from_parts(packed.words, packed.offsets, torch.tensor(layout, dtype=torch.int32), name="w")
    with pytest.raises(TilepressError, match=r"w: bitmap layout is torch.int64 \[7\]"):
        from_parts(packed.words, packed.offsets, packed.layout().long(), name="w")


def test_parts_of_wrong_dtypes_and_sizes_are_refused():
    packed = pack(random_weight(4, 4, 0.5), 1)
    codes = packed_weight(random_weight(4, 4, 0.5, torch.int8), 1)
    for words, offsets in (
        (packed.words.long(), packed.offsets),
        (packed.words[:-1], packed.offsets),
        (packed.words.view(2, -1), packed.offsets),
        (packed.words, packed.offsets.long()),
        (packed.words, packed.offsets[:1]),
        (packed.words, packed.offsets.view(1, -1)),
    ):
        with pytest.raises(TilepressError, match="w: "):
            from_parts(words, offsets, packed.layout(), name="w")
    for part, scale in (
        (packed, codes.scale),
        (codes, None),
        (codes, codes.scale[:3]),
        (codes, codes.scale.view(4, 1)),
        (codes, codes.scale.float()),
    ):
        with pytest.raises(TilepressError, match="w: .*scale"):
            from_parts(part.words, part.offsets, part.layout(), scale, "w")
    for part in (packed, codes):
        whole = from_parts(part.words, part.offsets, part.layout(), part.scale)
        assert torch.equal(unpack(whole), unpack(part)) and whole.weight_dtype == torch.bfloat16


@every_kind
def test_many_small_pieces_are_one_large_one(dtype, group, monkeypatch):
    """Packing, unpacking and checking work a few row blocks at a time: where they are cut shows nowhere."""
    weight = random_weight(700, 300, 0.3, dtype)
    weight[300:400] = random_weight(100, 300, 1.0, dtype, seed=1)  # the densest tile is in the middle
    whole = packed_weight(weight, group)
    assert len(list(pack_stripes(weight, group))) == 1
    _, expected = check(whole)
    monkeypatch.setattr(tiled_bitmap, "_CHUNK_ELEMENTS", 2 * 128 * 384)
    stripes = list(pack_stripes(weight, group))
    assert [len(sizes) for _, sizes, _ in stripes] == [6, 6, 6]
    packed, stats = packed_weight(weight, group), PackStats()
    assert torch.equal(packed.words, whole.words) and torch.equal(packed.offsets, whole.offsets)
    for _, _, found in stripes:
        stats.add(found)
    problems, checked = check(packed)
    assert problems == [] and stats == checked == expected and check_bounds(packed) is None
    assert same(packed, weight)
    number, _ = place_of_value(packed, 8)
    broken = damaged(packed, lambda p: set_start(p, 8, number, 0xFF80))
    assert check(broken)[0] == ["tiles 6 to 11: 1 runs point outside their tile"]
    assert check_bounds(broken) == "a run of tile 8 points outside the tile"


@pytest.mark.gpu
@every_kind
@pytest.mark.parametrize("density", [0.1, 0.5])
def test_gpu_packs_the_same_bytes(density, dtype, group):
    weight = random_weight(700, 900, density, dtype)
    cpu = packed_weight(weight, group)
    gpu = pack(weight.cuda(), group, None if cpu.scale is None else cpu.scale.cuda())
    assert torch.equal(gpu.words.cpu(), cpu.words) and torch.equal(gpu.offsets.cpu(), cpu.offsets)
    assert torch.equal(bits(unpack_values(gpu).cpu()), bits(weight)) and check_bounds(gpu) is None


def test_an_empty_run_begins_nowhere():
    packed = packed_weight(torch.zeros(4, 4).bfloat16(), 1)
    packed.words[600] = 0x12345678  # two of the starts
    assert check(packed)[0] == ["tiles 0 to 0: 2 empty runs begin somewhere"]


def test_tiles_are_not_too_long():
    for group in (1, 2):
        packed = packed_weight(torch.ones(128, 128).bfloat16(), group)
        offsets = packed.offsets + torch.tensor([0, 8], dtype=torch.int32)
        longer = replace(packed, words=torch.cat([packed.words, packed.words.new_zeros(32)]), offsets=offsets)
        assert "in whole lines of 128" in check(longer)[0][0] == check_bounds(longer)


@pytest.mark.parametrize("group,scale", [(3, None), (1, torch.ones(4).bfloat16())])
def test_packing_what_is_not_stored_is_refused(group, scale):
    with pytest.raises(TilepressError):
        pack(torch.ones(4, 4).bfloat16(), group, scale)
    with pytest.raises(TilepressError):
        pack(torch.ones(4, 4, dtype=torch.int8), 1, None if scale is None else scale[:3])
    with pytest.raises(TilepressError):
        pack(torch.ones(0, 4).bfloat16())


def test_the_card_decides_about_pairs():
    """Fewer bytes where no card is named, pairs where the named one was faster with them; of codes pairs but on cards with less bandwidth."""
    bf16, codes = torch.bfloat16, torch.int8
    assert [tiled_bitmap.best_group(d, bf16) for d in (0.5, 0.2, 0.15)] == [1, 1, 2]
    assert [tiled_bitmap.best_group(d, bf16, "h200") for d in (0.3, 0.2)] == [1, 2]
    assert [tiled_bitmap.best_group(0.5, codes, card) for card in ("any", "h200", "h100")] == [2, 2, 1]
    assert tiled_bitmap.best_group(1.0, codes) == 2 and tiled_bitmap.best_group(0.3, codes, "h100") == 2
    names = "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA A100-SXM4-80GB"
    assert list(map(tiled_bitmap.card_named, names)) == ["h100", "h200", "any"]
    weight = random_weight(256, 256, 0.2, bf16)
    packed = {card: tiled_bitmap.pack(weight, tiled_bitmap.best_group(0.2, bf16, card)) for card in ("any", "h200")}
    assert packed["any"].words.nbytes < 0.8 * packed["h200"].words.nbytes
    assert all(torch.equal(tiled_bitmap.unpack(p), weight) for p in packed.values())
