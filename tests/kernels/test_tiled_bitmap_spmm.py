"""The bitmap's ops: reference and kernels against float64, opcheck, fullgraph compile, graphs; the kernels' cost from the compiler's log."""

import functools
import itertools

import pytest
import torch
from support.cards import HOPPER, pretend, take_for_older
from support.kernel_costs import cost
from support.stub_card import kept

from tilepress.formats import tiled_bitmap
from tilepress.formats.int8 import quantize, weight_scale
from tilepress.formats.tiled_bitmap import TiledBitmap
from tilepress.kernels import arch, jit, packed as packed_ops, tiled_bitmap_decode, tiled_bitmap_mma, tiled_bitmap_spmm
from tilepress.kernels.tiled_bitmap_spmm import COLUMNS, Configuration, blocks_for
from tilepress.runtime.linear.sparse import TiledBitmapLinear

ops = torch.ops.tilepress
SHARED_BYTES = arch.HOPPER.block_shared_bytes
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = [
    (dtype, int8, group) for dtype in (torch.float16, torch.bfloat16) for int8 in (False, True) for group in (1, 2)
]
CONFIGURED = [*((columns, 1) for columns in COLUMNS), (128, 2)]  # columns and pairs
SHAPES = [
    (70, 130, (2, 3), 0.7),
    (1, 1, (1,), 0.0),
    (128, 128, (5,), 0.0),
    (200, 300, (1, 1, 1), 0.95),
    (64, 64, (4,), 1.0),
    (1000, 3333, (7,), 0.8),
    (640, 2048, (33,), 0.5),
    (333, 72, (16,), 0.6),
]


def packed_weight(weight, int8, group):
    if not int8:
        return tiled_bitmap.pack(weight, group)
    scale = weight_scale(weight, "channel", weight.dtype)
    return tiled_bitmap.pack(quantize(weight, scale), group, scale.view(-1))


def arguments(rows=70, cols=130, n=(2, 3), sparsity=0.7, kind=(torch.bfloat16, False, 1), bias=True, device="cpu"):
    """The op's arguments, and the weight that it stands for in float64."""
    return with_inputs(*random_weight(rows, cols, sparsity, kind, device), n, bias)


@functools.lru_cache(maxsize=2)
def random_weight(rows, cols, sparsity, kind, device):
    """Packed and in float64, once for the tests of a shape that follow one another: nobody writes to either."""
    dtype, int8, group = kind
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, cols, generator=generator)
    weight[torch.rand(rows, cols, generator=generator) < sparsity] = 0
    return packed_and_exact(weight.to(dtype), int8, group, device)


def packed_and_exact(weight, int8, group, device):
    packed = packed_weight(weight.to(device), int8, group)
    exact = tiled_bitmap.unpack_values(packed).double()
    if int8:
        exact *= packed.scale.double()[:, None]
    return packed, exact


def of_weight(weight, n, int8, group, bias, device):
    return with_inputs(*packed_and_exact(weight, int8, group, device), n, bias)


def with_inputs(packed, exact, n, bias):
    generator = torch.Generator().manual_seed(1)
    (rows, cols), device = exact.shape, exact.device
    x = torch.randn(*n, cols, generator=generator).to(packed.weight_dtype).to(device)
    b = torch.randn(rows, generator=generator).to(packed.weight_dtype).to(device) if bias else None
    return (x, packed.words, packed.offsets, packed.scale, b, rows, packed.dtype, packed.group), exact


def expected_of(args, weight):
    x, bias = args[0].double(), args[4]
    return x @ weight.t() + (0 if bias is None else bias.double())


def assert_right(found, args, weight):
    """Every element, with room for what float32 sums of its products lose."""
    expected, x = expected_of(args, weight), args[0].double()
    most = x.abs() @ weight.abs().t() + (0 if args[4] is None else args[4].double().abs())
    rounding = 2**-10 if found.dtype == torch.float16 else 2**-7
    wrong = (found.double() - expected).abs() > rounding * expected.abs() + 2**-16 * most + 1e-7
    assert not bool(wrong.any()) and not bool(found.isnan().any()), int(wrong.sum())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows,cols,n,sparsity", SHAPES)
def test_against_float64(rows, cols, n, sparsity, bias, kind, device):
    args, weight = arguments(rows, cols, n, sparsity, kind, bias, device)
    found = ops.tiled_bitmap_spmm(*args)
    assert found.shape == (*n, rows) and found.dtype == kind[0]
    assert_right(found, args, weight)
    assert not bool(found[expected_of(args, weight) == 0].any())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("int8", [False, True])
def test_activations_of_another_dtype(int8, device):
    args, weight = arguments(kind=(torch.float16, int8, 1), device=device, bias=False)
    found = ops.tiled_bitmap_spmm(args[0].float(), *args[1:])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected_of(args, weight), rtol=2e-3 if int8 else 1e-5, atol=1e-3)
    if int8:  # as a model in float32 has it
        found = ops.tiled_bitmap_spmm(args[0].float(), *args[1:3], args[3].float(), *args[4:])
        torch.testing.assert_close(found.double(), expected_of(args, weight), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("int8", [False, True])
def test_opcheck(int8, device):
    args, _ = arguments(kind=(torch.bfloat16, int8, 1), device=device)
    torch.library.opcheck(ops.tiled_bitmap_spmm.default, args)
    words, offsets, scale, rows, dtype, group = *args[1:4], *args[5:]
    torch.library.opcheck(
        ops.tiled_bitmap_decode.default, (words, offsets, scale, rows, args[0].shape[-1], dtype, group)
    )


@pytest.mark.parametrize("device", DEVICES)
def test_compiles_without_graph_breaks(device):
    args, _ = arguments(device=device)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a: ops.tiled_bitmap_spmm(*a) * 2, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*args), ops.tiled_bitmap_spmm(*args) * 2)


def test_arguments_that_do_not_fit_are_refused():
    args, _ = arguments(200, 300, kind=(torch.float16, True, 2))
    x, words, offsets, scale, bias, *rest = args
    for wrong in (
        (x[..., :100], words, offsets, scale, bias),
        (x, words, offsets[:-1], scale, bias),
        (x, words, offsets, scale[:-1], bias),
        (x, words, offsets, None, bias),
        (x, words, offsets, scale, bias[:-1]),
        (x, words[::2], offsets, scale, bias),
    ):
        with pytest.raises(ValueError):
            ops.tiled_bitmap_spmm(*wrong, *rest)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows,cols,sparsity", [(70, 130, 0.5), (1, 1, 0.0), (300, 1024, 0.9), (256, 64, 1.0)])
def test_decoding_is_exact(rows, cols, sparsity, kind, device):
    args, weight = arguments(rows, cols, (1,), sparsity, kind, device=device)
    words, offsets, scale, dtype, group = *args[1:4], *args[6:]
    found = ops.tiled_bitmap_decode(words, offsets, scale, rows, cols, dtype, group)
    assert torch.equal(found, weight.to(kind[0]) if scale is None else weight.float().to(kind[0]))


def test_few_multiprocessors_and_many_rows():
    for multiprocessors in (1, 7, 132):
        for group, n in itertools.product((1, 2), (1, 300, *tiled_bitmap_spmm.MOST_ROWS.values())):
            plan = tiled_bitmap_spmm._planned(n, 64, 19840, multiprocessors, *2 * (torch.float16,), group)
            used = plan.slots * plan.chosen.slot_bytes(19840) + 4 * (plan.grid + 1)
            assert plan.grid % plan.walks == 0 < plan.grid and used <= plan.kernel.shared_bytes <= SHARED_BYTES


def test_decoding_by_parts_is_the_whole_product(monkeypatch):
    monkeypatch.setattr(packed_ops, "_DECODED_ROWS", 256)
    for int8 in (False, True):
        args, weight = arguments(1000, 300, (5,), 0.8, (torch.bfloat16, int8, 1))
        packed = TiledBitmap(*args[1:3], 1000, 300, *args[6:], args[3])
        found = tiled_bitmap_spmm._multiply_decoded(args[0], packed, args[4])
        error = (found.double() - expected_of(args, weight)).norm() / expected_of(args, weight).norm()
        assert error < 5e-3  # int8 weights are rounded


def test_blocks_fit_a_multiprocessor():
    sizes = 2560, 9984, 19840, tiled_bitmap.largest_tile(1, torch.float16)
    for (dtype, int8, group), (columns, pairs) in itertools.product(KINDS, CONFIGURED):
        chosen = Configuration(columns, pairs, dtype, torch.int8 if int8 else dtype, group)
        for tile_bytes, tiles in itertools.product(sizes, (1, 1000, 14336)):
            blocks, slots = blocks_for(chosen, tiles, tile_bytes, 132)
            used = slots * chosen.slot_bytes(tile_bytes) + 4 * (132 * blocks + 1) + 1024
            assert 1 <= blocks <= chosen.most_blocks and blocks * used <= SHARED_BYTES + 1024 and slots >= 2


@pytest.mark.parametrize("blocks", [1, 6, 7, 8, 132, 600])
def test_what_the_kernel_knows_of_its_runs(blocks):
    """The first `blocks` + 1 numbers are where runs begin; then, from 16 bytes on, four of each run."""
    args, _ = arguments(1000, 700, (1,), 0.8)
    ends = args[2].tolist()
    runs = tiled_bitmap_spmm.runs_of(args[2], blocks)
    begins, each = runs[: blocks + 1].tolist(), runs[-(-(blocks + 1) // 4) * 4 :].view(blocks, 4).tolist()
    assert runs.dtype == torch.int32 and begins[0] == 0 and begins[-1] == len(ends) - 1
    for run, (begin, end) in zip(each, itertools.pairwise(begins), strict=True):
        assert run[:2] == [begin, end]
        assert begin == end or run[2:] == ends[end - 1 : end + 1]


@pytest.mark.parametrize("n,columns,walks", [(3, 8, 1), (16, 16, 1), (64, 64, 1), (100, 128, 1), (1500, 128, 12)])
def test_what_the_kernel_gets(monkeypatch, n, columns, walks):
    """Without a card: sizes and addresses of one launch."""
    pretend(monkeypatch, (9, 0))
    seen = kept(monkeypatch, tiled_bitmap_spmm)
    monkeypatch.setattr(tiled_bitmap_spmm, "_planned", tiled_bitmap_spmm._planned.__wrapped__)
    monkeypatch.setattr(tiled_bitmap_spmm, "_kernel", lambda *chosen: chosen)
    args, _ = arguments(20000, 1003, (1,), 0.8, (torch.float16, True, 2))
    words, offsets, scale, bias, rows, dtype, group = args[1:]
    packed, x = TiledBitmap(words, offsets, rows, 1003, dtype, group, scale), torch.zeros(n, 1008, dtype=torch.float16)
    run = tiled_bitmap_spmm._multiplying(jit.like((n, rows), x.dtype, x.device), x, packed, bias)
    y = run(x, words, offsets, scale, bias)
    (((chosen, shared), device, grid, *addresses, n_, m, k_blocks, units, tiles, walks_, tile_bytes, slots, waits),) = (
        seen
    )
    facts = tiled_bitmap_spmm._facts_of(words, offsets, 132)
    assert waits is True
    assert (chosen.columns, n_, m, k_blocks, tiles, walks_) == (columns, n, rows, 8, 157 * 8, walks)
    assert units == (157 + chosen.pairs - 1) // chosen.pairs * 8 and grid % walks == 0
    assert (chosen.pairs == 2) == (columns == 128 and walks > 1)  # 1256 tiles are few for 132 multiprocessors
    largest = max(b - a for a, b in itertools.pairwise(offsets.tolist())) * 16
    assert largest <= tile_bytes < largest + 128 and tile_bytes % 128 == 0
    assert slots * chosen.slot_bytes(tile_bytes) + 4 * (grid + 1) <= shared <= SHARED_BYTES
    runs = facts.runs[grid].data_ptr() if walks == 1 and chosen.pairs == 1 else 0
    assert addresses[:3] == [words.data_ptr(), offsets.data_ptr(), runs]
    assert addresses[3:7] == [(x.data_ptr(), (n, 1008), columns, 64), scale.data_ptr(), bias.data_ptr(), y.data_ptr()]
    sums, left, ticket = addresses[7:]
    assert sums - left >= 8 * grid * 2 * chosen.pairs and sums % 16 == left % 8 == 0 < ticket
    assert y.shape == (n, rows) and device == x.device


# On a card


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 300, 1000])
def test_every_configuration_is_right_and_deterministic(n, kind):
    """More tiles than blocks, row blocks that several blocks share; the output is poisoned by what the allocator gives back."""
    for sparsity in (0.0, 0.5, 0.8, 0.97):
        args, weight = arguments(4200, 2500, (n,), sparsity, kind, True, "cuda")
        poison = torch.full((n, 4200), float("nan"), dtype=kind[0], device="cuda")
        del poison
        first = ops.tiled_bitmap_spmm(*args)
        assert_right(first, args, weight)
        for _ in range(5):
            assert torch.equal(ops.tiled_bitmap_spmm(*args), first)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("pairs", [1, 2])
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("grid", [1, 3, 40])
def test_few_blocks_use_their_slots_again_and_again(monkeypatch, grid, columns, pairs, group):
    """1 block has 240 tiles; with 2 row blocks a unit the last unit is half empty; 40 blocks share row blocks among many, over several walks."""
    if pairs == 2 and columns < 128:
        pytest.skip("two row blocks are for 128 columns")
    for sparsity in (0.0, 0.6, 0.95):
        for n in {columns, columns // 2 + 1, 2 * columns + 5}:
            args, weight = arguments(1411, 2500, (n,), sparsity, (torch.float16, False, group), True, "cuda")
            walks = -(-n // columns)

            def planned(n, tiles, tile_bytes, multiprocessors, dtype, value_dtype, group, walks=walks):
                chosen = Configuration(columns, pairs, dtype, value_dtype, group)
                blocks, slots = blocks_for(chosen, tiles, tile_bytes, 132)
                size = max(walks, grid // walks * walks)
                kernel = tiled_bitmap_spmm._kernel(chosen, tiled_bitmap_spmm._room(blocks))
                return tiled_bitmap_spmm.Plan(kernel, chosen, walks, size, slots)

            monkeypatch.setattr(tiled_bitmap_spmm, "_planned", planned)
            facts = tiled_bitmap_spmm._facts(args[2], 132)
            size = max(walks, grid // walks * walks)
            facts.runs[size] = tiled_bitmap_spmm.runs_of(args[2], size, tile_cost=0)
            monkeypatch.setattr(tiled_bitmap_spmm, "_facts_of", lambda *a, facts=facts: facts)
            found = ops.tiled_bitmap_spmm(*args)
            assert_right(found, args, weight)
            assert torch.equal(ops.tiled_bitmap_spmm(*args), found)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("n", [3, 48, 100, 500])
@pytest.mark.parametrize("int8,group", [(False, 1), (False, 2), (True, 1), (True, 2)])
def test_uneven_rows(n, int8, group):
    """Dense rows, empty rows and full tiles beside sparse ones."""
    weight = torch.randn(1000, 1600).half()
    weight[torch.rand(1000, 1600) < 0.9] = 0
    weight[100:300] = torch.randn(200, 1600)
    weight[:, 640:704] = torch.randn(1000, 64)
    weight[500:700] = 0
    args, exact = of_weight(weight, (n,), int8, group, False, "cuda")
    found = ops.tiled_bitmap_spmm(*args)
    assert_right(found, args, exact)
    assert not bool(found[:, 500:640].any()) and torch.equal(ops.tiled_bitmap_spmm(*args), found)


@pytest.mark.gpu
@HOPPER
def test_inputs_that_are_not_aligned_or_contiguous():
    args, weight = arguments(256, 512, (6,), 0.8, (torch.float16, False, 1), False, "cuda")
    x, rest = args[0], args[1:]
    wide = torch.cat([x, x], 1)
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view_as(x).copy_(x)
    for given in (wide[:, :512], x.t().contiguous().t(), shifted):
        assert_right(ops.tiled_bitmap_spmm(given, *rest), args, weight)
    assert ops.tiled_bitmap_spmm(x[:0], *rest).shape == (0, 256)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("n", [5, 200])
def test_graphs_replay_and_streams_do_not_meet(n):
    args, weight = arguments(2048, 2048, (n,), 0.6, (torch.float16, False, 1), True, "cuda")
    expected = ops.tiled_bitmap_spmm(*args)
    graph, static, side = torch.cuda.CUDAGraph(), args[0].clone(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        outs = [ops.tiled_bitmap_spmm(static, *args[1:]) for _ in range(4)]
    for _ in range(50):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        with torch.cuda.stream(side):
            other = [ops.tiled_bitmap_spmm(*args) for _ in range(4)]
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in [*outs, *other])
    for _ in range(20):  # nothing of the replay before is taken
        static.copy_(torch.randn_like(static))
        graph.replay()
        assert all(torch.equal(out, ops.tiled_bitmap_spmm(static, *args[1:])) for out in outs)
    assert_right(outs[0], (static, *args[1:]), weight)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("n", [2500, 4000])
def test_many_rows_decode(n):
    args, weight = arguments(2200, 1003, (n,), 0.8, (torch.float16, False, 1), True, "cuda")
    assert tiled_bitmap_spmm.path(args[0].device, torch.float16, torch.float16, n).decodes
    found, expected = ops.tiled_bitmap_spmm(*args), expected_of(args, weight)
    assert float((found.double() - expected).norm() / expected.norm()) < 1e-3
    assert torch.equal(ops.tiled_bitmap_spmm(*args), found)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("n", [16, 700])
def test_one_launch_and_no_other_kernel(n):
    args, _ = arguments(1024, 1024, (n,), 0.6, (torch.float16, False, 1), True, "cuda")
    ops.tiled_bitmap_spmm(*args)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        ops.tiled_bitmap_spmm(*args)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert names == ["tiled_bitmap_spmm"], names


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("n", [4, 200, 3000])
def test_a_layer_compiles_whole_and_needs_no_grad_mode(n):
    args, weight = arguments(256, 512, (n,), 0.6, (torch.bfloat16, True, 2), True, "cuda")
    layer = TiledBitmapLinear(TiledBitmap(*args[1:3], 256, 512, *args[6:], args[3]), True, torch.bfloat16)
    layer.bias.data.copy_(args[4])
    torch._dynamo.reset()
    x = args[0].clone().requires_grad_()
    expected = expected_of(args, weight)
    for call in (torch.compile(layer, backend="aot_eager", fullgraph=True), layer):
        assert float((call(x).detach().double() - expected).norm() / expected.norm()) < 5e-3


# The kernel on mma.sync, for other cards

OTHER_CARDS = [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)]


@pytest.mark.parametrize("capability", [*OTHER_CARDS, (9, 0)])
def test_the_kernel_for_other_cards_fits_each(capability):
    """Every weight has a launch there; where several blocks share a multiprocessor, all of them fit."""
    card = arch.card_of(*capability)
    for (dtype, int8, group), n in itertools.product(KINDS, (1, 9, 17, 33, 65, 512)):
        values = torch.int8 if int8 else dtype
        for tile_bytes in (2560, 9984, 19840, tiled_bitmap.largest_tile(group, values)):
            for tiles in (1, 600, 14336):
                chosen, walks, grid = tiled_bitmap_mma.plan(n, tiles, tile_bytes, card, dtype, values, group)
                shared = chosen.shared_bytes(tile_bytes)
                assert shared <= card.block_shared_bytes and chosen.blocks * (shared + 1024) <= card.shared_bytes
                assert n <= walks * chosen.columns < n + chosen.columns and chosen.stages >= 2
                assert grid % walks == 0 < grid <= max(walks, card.multiprocessors * chosen.blocks)
                assert (
                    grid <= max(1, tiles // chosen.pairs) * walks
                )  # no run is empty: a block waits for every one before it


def test_what_the_kernel_for_other_cards_gets(monkeypatch):
    """Without a card: sizes and addresses of one launch, with cuts for one walk and none for several."""
    pretend(monkeypatch, (8, 9))
    seen = kept(monkeypatch, tiled_bitmap_mma)
    args, _ = arguments(20000, 1003, (1,), 0.8, (torch.float16, True, 2))
    words, offsets, scale, bias, rows, dtype, group = args[1:]
    packed = TiledBitmap(words, offsets, rows, 1003, dtype, group, scale)
    for n, walks in ((16, 1), (300, 3)):
        seen.clear()
        x = torch.zeros(n, 1003, dtype=torch.float16)
        out = jit.like((n, rows), x.dtype, x.device)
        y = tiled_bitmap_mma.multiplying(out, x, packed, bias, tiled_bitmap_spmm._facts_of)(
            x, words, offsets, scale, bias
        )
        ((kernel, device, grid, *addresses, n_, m, k, stride, k_blocks, units, tiles, walks_, tile_bytes, waits),) = (
            seen
        )
        runs = tiled_bitmap_spmm._facts_of(words, offsets, 142).runs
        assert (n_, m, k, stride, k_blocks, tiles, walks_, waits) == (n, rows, 1008, 1008, 8, 157 * 8, walks, True)
        assert units == (157 if walks == 1 else 79) * 8  # several walks have work for two row blocks a block
        assert addresses[:3] == [words.data_ptr(), offsets.data_ptr(), runs[grid].data_ptr() if walks == 1 else 0]
        assert addresses[4:7] == [scale.data_ptr(), bias.data_ptr(), y.data_ptr()] and device == x.device
        sums, left, ticket = addresses[7:]
        assert sums - left >= 8 * grid and sums % 16 == left % 8 == 0 < ticket
        assert 2 * (tile_bytes + 256 * min(n, 128)) <= kernel.shared_bytes <= 99 * 1024


@pytest.mark.gpu
@pytest.mark.parametrize("capability", [(8, 0), (8, 9)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 8, 9, 16, 30, 64, 65, 128, 300])
def test_the_kernel_for_other_cards_is_right_and_deterministic(monkeypatch, n, kind, capability):
    """More tiles than blocks, row blocks that several blocks share; the output is poisoned by what the allocator gives back."""
    take_for_older(monkeypatch, capability)
    monkeypatch.setattr(tiled_bitmap_spmm, "MMA_MOST_ROWS", {1: 512, 2: 512})
    for sparsity in (0.0, 0.5, 0.8, 0.97):
        args, weight = arguments(4200, 2500, (n,), sparsity, kind, True, "cuda")
        assert tiled_bitmap_spmm.path(args[0].device, kind[0], kind[0], n, kind[2]).kernel == "tiled_bitmap_mma"
        poison = torch.full((n, 4200), float("nan"), dtype=kind[0], device="cuda")
        del poison
        first = ops.tiled_bitmap_spmm(*args)
        assert_right(first, args, weight)
        for _ in range(3):
            assert torch.equal(ops.tiled_bitmap_spmm(*args), first)


@pytest.mark.gpu
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("columns", tiled_bitmap_mma.BLOCKS)
@pytest.mark.parametrize("grid", [1, 3, 40])
def test_few_blocks_for_other_cards_use_their_stages_again_and_again(monkeypatch, grid, columns, stages):
    """1 block has 220 tiles; 40 blocks share row blocks among many, over several walks; with two row blocks a unit the last of
    11 row blocks has a unit alone."""
    take_for_older(monkeypatch)
    for sparsity, group in ((0.6, 1), (0.95, 2)):
        for n in {columns, columns // 2 + 1, 2 * columns + 5}:
            args, weight = arguments(1403, 2500, (n,), sparsity, (torch.float16, False, group), True, "cuda")
            walks = -(-n // columns)
            pairs = 2 if columns == 128 and stages < 4 else 1
            chosen = tiled_bitmap_mma.Configuration(columns, pairs, stages, 1, torch.float16, torch.float16, group)
            made = tiled_bitmap_mma.Plan(chosen, walks, max(walks, grid // walks * walks))
            monkeypatch.setattr(tiled_bitmap_mma, "plan", lambda *given, made=made: made)
            found = ops.tiled_bitmap_spmm(*args)
            assert_right(found, args, weight)
            assert torch.equal(ops.tiled_bitmap_spmm(*args), found)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [3, 100])
@pytest.mark.parametrize("int8,group", [(False, 1), (False, 2), (True, 1), (True, 2)])
def test_the_kernel_for_other_cards_takes_uneven_rows_and_any_x(monkeypatch, n, int8, group):
    """Dense rows, empty rows and full tiles beside sparse ones; x that is part of a wider matrix, whose rest is NaN, and
    x that is not aligned."""
    take_for_older(monkeypatch)
    weight = torch.randn(1000, 1600).half()
    weight[torch.rand(1000, 1600) < 0.9] = 0
    weight[100:300] = torch.randn(200, 1600)
    weight[:, 640:704] = torch.randn(1000, 64)
    weight[500:700] = 0
    args, exact = of_weight(weight, (n,), int8, group, False, "cuda")
    found = ops.tiled_bitmap_spmm(*args)
    assert_right(found, args, exact)
    assert not bool(found[:, 500:640].any())
    wide = torch.full((n, 2000), float("nan"), dtype=torch.float16, device="cuda")
    wide[:, :1600] = args[0]
    shifted = torch.empty(n * 1600 + 1, dtype=torch.float16, device="cuda")[1:].view(n, 1600).copy_(args[0])
    for x in (wide[:, :1600], shifted, args[0].t().contiguous().t()):
        assert torch.equal(ops.tiled_bitmap_spmm(x, *args[1:]), found)
    assert ops.tiled_bitmap_spmm(args[0][:0], *args[1:]).shape == (0, 1000)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [5, 200, 600])
def test_graphs_of_the_kernel_for_other_cards(monkeypatch, n):
    """600 rows are decoded for cuBLAS."""
    take_for_older(monkeypatch)
    args, _ = arguments(2048, 2048, (n,), 0.6, (torch.float16, False, 1), True, "cuda")
    expected = ops.tiled_bitmap_spmm(*args)
    graph, static, side = torch.cuda.CUDAGraph(), args[0].clone(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        outs = [ops.tiled_bitmap_spmm(static, *args[1:]) for _ in range(4)]
    for _ in range(20):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        with torch.cuda.stream(side):
            other = [ops.tiled_bitmap_spmm(*args) for _ in range(4)]
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in [*outs, *other])
    for _ in range(10):  # nothing of the replay before is taken
        static.copy_(torch.randn_like(static))
        graph.replay()
        assert all(torch.equal(out, ops.tiled_bitmap_spmm(static, *args[1:])) for out in outs)


@pytest.mark.gpu
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)])
def test_other_cards_decode_for_many_rows(monkeypatch, capability):
    n = 1 + tiled_bitmap_spmm.MMA_MOST_ROWS[1]
    args, weight = arguments(300, 500, (n,), 0.6, (torch.float16, False, 1), True, "cuda")
    take_for_older(monkeypatch, capability)
    path = tiled_bitmap_spmm.path(torch.device("cuda", 0), torch.bfloat16, torch.bfloat16, n)
    assert str(path) == "tiled_bitmap_decode kernel and cuBLAS on cuda"
    assert_right(ops.tiled_bitmap_spmm(*args), args, weight)


# From the compiler's log


def compiled():
    """All kinds of the widest blocks, which have the fewest registers to spare; of the others each (dtype, int8), with one group or the other."""
    kinds = [kind for kind in KINDS if kind[0] == torch.float16 or kind[1]]  # bfloat16 differs in the product alone
    for i, (columns, pairs) in enumerate(CONFIGURED):
        some = kinds if columns == COLUMNS[-1] else [k for j, k in enumerate(kinds) if (i + j // 2 + j) % 2]
        yield from ((columns, pairs, kind) for kind in some)


@pytest.mark.thorough
@pytest.mark.parametrize("columns,pairs,kind", compiled())
def test_the_kernel_compiles_within_its_budget(columns, pairs, kind):
    pytest.importorskip("cuda.core")
    dtype, int8, group = kind
    chosen = Configuration(columns, pairs, dtype, torch.int8 if int8 else dtype, group)
    found = cost(jit.compile_cubin("tiled_bitmap_spmm", chosen.source, "sm_90a")[1])
    warps = -(-chosen.threads // 32 * chosen.most_blocks // 4)  # of a quarter of the multiprocessor
    assert found["spills"] == found["stack"] == 0 and not found["serialized"]
    assert -(-found["registers"] // 8) * 8 * 32 * warps <= 16384
    consumer, other = chosen.registers  # what warps take must have been given to the block, or they wait for ever
    consumers = 256 * chosen.pairs
    assert consumer * consumers + other * (chosen.threads - consumers) <= found["registers"] * chosen.threads


def compiled_for_other_cards():
    """What `plan` makes for weights of 50 and 80 % zeros, by target: the cards of one shared memory share configurations."""
    for capability, target in zip([*OTHER_CARDS, (9, 0)], TARGETS, strict=True):
        card = arch.card_of(*capability)
        kinds = [
            (torch.float16, False, 1),
            (torch.float16, False, 2),
            (torch.bfloat16, True, 1),
            (torch.float16, True, 2),
        ]
        for i, (n, tile_bytes) in enumerate(itertools.product(tiled_bitmap_mma.BLOCKS, (9984, 19840))):
            dtype, int8, group = kinds[(i + i // 4) % 4]
            values = torch.int8 if int8 else dtype
            yield target, tiled_bitmap_mma.plan(n, 14336, tile_bytes, card, dtype, values, group).chosen


TARGETS = ["sm_80", "sm_86", "sm_89", "sm_100a", "sm_120a", "sm_90a"]


@pytest.mark.thorough
@pytest.mark.parametrize("target,chosen", compiled_for_other_cards(), ids=str)
def test_the_kernel_for_other_cards_compiles_within_its_budget(target, chosen):
    pytest.importorskip("cuda.core")
    found = cost(jit.compile_cubin("tiled_bitmap_mma", chosen.source, target)[1])
    assert found["spills"] == found["stack"] == 0
    assert -(-found["registers"] // 8) * 8 * chosen.threads * chosen.blocks <= 65536


@pytest.mark.thorough
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_compiles_for_both_architectures(kind, arch):
    pytest.importorskip("cuda.core")
    dtype, int8, group = kind
    source = tiled_bitmap_decode.kernel(dtype, torch.int8 if int8 else dtype, group).source
    found = cost(jit.compile_cubin("tiled_bitmap_decode", source, arch)[1])
    assert found["spills"] == found["stack"] == 0 and found["registers"] <= 64
