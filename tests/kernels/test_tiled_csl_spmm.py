"""The op: reference and kernel against float64, opcheck, fullgraph compile, graphs, streams; the kernel's cost from the compiler's log."""

import functools
import itertools

import pytest
import torch
from support.cards import H200_BLOCKS, HOPPER, pretend, take_for_older
from support.kernel_costs import cost
from support.stub_card import kept

from tilepress.formats.tiled_csl import TiledCSL, pack, unpack
from tilepress.kernels import (
    arch,
    jit,
    packed as packed_ops,
    split_sum,
    tiled_csl_decode,
    tiled_csl_mma,
    tiled_csl_spmm,
)
from tilepress.kernels.tiled_csl_spmm import COLUMNS, Configuration, columns_for, configuration, make_cuts
from tilepress.runtime.linear.sparse import TiledCSLLinear

ops = torch.ops.tilepress
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CONFIGURATIONS = sorted(
    {
        configuration(density, columns, dtype)
        for density in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
        for columns, dtype in [*((n, torch.float16) for n in COLUMNS), (16, torch.bfloat16), (256, torch.bfloat16)]
    },
    key=str,
)


def sparse(rows, cols, sparsity, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, cols, generator=generator)
    weight[torch.rand(rows, cols, generator=generator) < sparsity] = 0
    return weight.to(dtype)


def arguments(rows=70, cols=130, n=(2, 3), sparsity=0.7, dtype=torch.bfloat16, bias=True, device="cpu"):
    """The op's arguments, and the weight in float64 on the CPU."""
    packed, exact = random_weight(rows, cols, sparsity, dtype, device)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*n, cols, generator=generator).to(dtype).to(device)
    b = torch.randn(rows, generator=generator).to(dtype).to(device) if bias else None
    return (x, packed.words, packed.offsets, b, rows, dtype), exact


@functools.lru_cache(maxsize=2)
def random_weight(rows, cols, sparsity, dtype, device):
    """Packed and in float64, once for the tests of a shape that follow one another: nobody writes to either."""
    weight = sparse(rows, cols, sparsity, dtype)
    return pack(weight).to(device), weight.double()


def exact(args, weight):
    x, bias = args[0].double().cpu(), args[3]
    return x @ weight.t() + (0 if bias is None else bias.double().cpu())


def relative_error(found, expected):
    return float((found.double().cpu() - expected).norm() / expected.norm().clamp(min=1e-30))


SHAPES = [
    (70, 130, (2, 3), 0.7),
    (1, 1, (1,), 0.0),
    (128, 64, (5,), 0.0),
    (200, 300, (1, 1, 1), 0.95),
    (64, 64, (4,), 1.0),
    (1000, 3333, (7,), 0.8),
    (4096, 1024, (64,), 0.9),
    (640, 2048, (33,), 0.5),
    (333, 72, (16,), 0.6),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows,cols,n,sparsity", SHAPES)
def test_against_float64(rows, cols, n, sparsity, bias, dtype, device):
    args, weight = arguments(rows, cols, n, sparsity, dtype, bias, device)
    found = ops.tiled_csl_spmm(*args)
    assert found.shape == (*n, rows) and found.dtype == dtype
    expected = exact(args, weight)
    assert relative_error(found, expected) < (2e-3 if dtype == torch.float16 else 4e-3)
    zeros = expected == 0
    assert not bool(found.cpu()[zeros].any())


@pytest.mark.parametrize("device", DEVICES)
def test_values_keep_their_dtype_under_another_activation_dtype(device):
    args, weight = arguments(dtype=torch.float16, device=device)
    x = args[0].double().cpu()
    found = ops.tiled_csl_spmm(args[0].float(), *args[1:3], None, *args[4:])
    torch.testing.assert_close(found.double().cpu(), x @ weight.t(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device):
    args, _ = arguments(device=device)
    torch.library.opcheck(ops.tiled_csl_spmm.default, args)
    words, offsets, rows, dtype = args[1], args[2], *args[4:]
    torch.library.opcheck(ops.tiled_csl_decode.default, (words, offsets, rows, args[0].shape[-1], dtype))


@pytest.mark.parametrize("device", DEVICES)
def test_compiles_without_graph_breaks(device):
    args, _ = arguments(device=device)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a: ops.tiled_csl_spmm(*a) * 2, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*args), ops.tiled_csl_spmm(*args) * 2)


def test_cuts_are_equal_shares_in_order():
    weight = sparse(1024, 640, 0.5, torch.float16)
    weight[:256] = torch.randn(256, 640)  # uneven: a dense head
    packed = pack(weight)
    ends = packed.offsets.tolist()
    cuts, firsts = make_cuts(packed.offsets, 16).t().tolist()
    assert cuts[0] == 0 and cuts[-1] == 8 * 10 and cuts == sorted(cuts) and firsts == [ends[tile] for tile in cuts]
    shares = [ends[b] - ends[a] for a, b in itertools.pairwise(cuts)]
    largest = max(b - a for a, b in itertools.pairwise(ends))
    assert sum(shares) == ends[-1] and max(shares) <= ends[-1] / 16 + 2 * largest
    empty = pack(torch.zeros(1024, 640, dtype=torch.float16))
    cuts = make_cuts(empty.offsets, 16)[:, 0].tolist()
    assert cuts[-1] == 80 and max(b - a for a, b in itertools.pairwise(cuts)) <= 6  # empty tiles take time too


def test_no_run_is_empty_but_the_last_ones_of_few_tiles():
    """A block waits for every one before it in its row block."""
    generator = torch.Generator().manual_seed(0)
    for tiles, parts in ((80, 16), (17, 16), (16, 16), (5, 16), (300, 132), (1, 3), (3, 1)):
        sizes = torch.randint(0, 9, (tiles,), generator=generator) ** 4  # most of all in a few tiles
        offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int()
        cuts = packed_ops.cuts_of(offsets, 1, parts)
        starts = cuts[:, 0].tolist()
        assert starts[0] == 0 and starts[-1] == tiles and torch.equal(cuts[:, 1], offsets[cuts[:, 0]])
        lengths = [b - a for a, b in itertools.pairwise(starts)]
        assert all(lengths[: min(tiles, parts)]) and not any(lengths[tiles:]), (tiles, parts, starts)


def test_x_as_the_kernels_need_it():
    wide = torch.randn(6, 1040, dtype=torch.float16)
    for x in (
        wide[:, :515],
        wide[:, 1:9],
        wide[:, ::2],
        wide[:1, :520].expand(6, 520),
        wide.t()[:16],
        torch.randn(3, 513, dtype=torch.float16)[:, :512],
        wide[:, :520],
    ):
        found = packed_ops.aligned(x)
        assert torch.equal(found[:, : x.shape[1]], x) and not bool(found[:, x.shape[1] :].any())
        assert found.shape[1] % 8 == found.stride(0) % 8 == found.data_ptr() % 16 == 0 and found.stride(1) == 1
        assert found.stride(0) >= found.shape[1]
    assert found.data_ptr() == wide.data_ptr()  # what is fit is not copied


def test_scratch_is_large_enough_and_no_ticket_comes_twice():
    memory, sums, left, ticket = split_sum.scratch(torch.device("cpu"), 132, 2, 128, 96)()
    start, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    assert (
        start <= left and left + 8 * 2 * 132 <= sums and sums + 4 * 132 * 128 * 96 <= end and sums % 16 == left % 8 == 0
    )
    make = split_sum.scratch(torch.device("cpu"), 1, 1, 128, 8)
    assert len({make()[3] for _ in range(100)} | {ticket}) == 101


def test_which_kernel_takes_what(monkeypatch):
    here = torch.device("cuda", 0)
    for capability, expected in (
        ((9, 0), ["tiled_csl_spmm"] * 3 + [None]),
        ((8, 6), ["tiled_csl_mma", None, None, None]),
    ):
        pretend(monkeypatch, capability)
        sizes = 64, tiled_csl_spmm.MMA_MOST_ROWS + 1, tiled_csl_spmm.MOST_ROWS, tiled_csl_spmm.MOST_ROWS + 1
        found = [tiled_csl_spmm._kernel_for(n, here, torch.float16, torch.float16) for n in sizes]
        assert found == expected
        assert tiled_csl_spmm._kernel_for(1, here, torch.float32, torch.float16) is None


def test_decoding_by_parts_is_the_whole_product(monkeypatch):
    monkeypatch.setattr(packed_ops, "_DECODED_ROWS", 256)
    args, weight = arguments(1000, 300, (5,), 0.8, torch.bfloat16)
    packed = TiledCSL(*args[1:3], 1000, 300, torch.bfloat16)
    x = args[0].clone().requires_grad_()
    assert relative_error(tiled_csl_spmm._multiply_decoded(x, packed, args[3]), exact(args, weight)) < 4e-3
    without = tiled_csl_spmm._multiply_decoded(args[0].float(), packed, None)
    assert without.dtype == torch.float32 and relative_error(without, args[0].double() @ weight.t()) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_beyond_one_launch_a_bias_costs_no_rounding_of_its_own(dtype, device):
    """A bias much larger than the products: rounded once, they are next to float64's; rounded before it is added too, a fifth are not."""
    args, weight = arguments(300, 256, (65,), 0.8, dtype, True, "cpu")
    args[3].mul_(50)
    packed = TiledCSL(*args[1:3], 300, 256, dtype).to(device)
    found = tiled_csl_spmm._multiply_decoded(args[0].to(device), packed, args[3].to(device)).cpu()
    expected = (args[0].double() @ weight.double().t() + args[3].double()).to(dtype)
    twice = (args[0].double() @ weight.double().t()).to(dtype) + args[3]
    assert float((found != expected).float().mean()) < 0.002 < 0.05 < float((twice != expected).float().mean())


def test_cuts_are_made_once_for_a_weight_and_again_when_it_is_written():
    packed = pack(sparse(256, 256, 0.5, torch.float16))
    cuts = tiled_csl_spmm._cuts_of(packed.words, packed.offsets, 4)
    assert tiled_csl_spmm._cuts_of(packed.words, packed.offsets, 4) is cuts
    assert torch.equal(cuts.owner, make_cuts(packed.offsets, 4)) and cuts.owner.is_contiguous()
    assert tiled_csl_spmm._cuts_of(packed.words, packed.offsets, 5).owner.shape == (6, 2)
    packed.words.mul_(1)
    assert tiled_csl_spmm._cuts_of(packed.words, packed.offsets, 5) is not cuts
    with torch.inference_mode():
        other = pack(sparse(128, 64, 0.5, torch.float16))
        assert tiled_csl_spmm._cuts_of(other.words, other.offsets, 2).owner[:, 0].tolist() == [0, 1, 1]


def test_a_bias_of_another_dtype():
    args, weight = arguments(dtype=torch.float16)
    found = ops.tiled_csl_spmm(*args[:3], args[3].float(), *args[4:])
    assert found.dtype == torch.float16 and relative_error(found, exact(args, weight)) < 2e-3


def test_columns_fit_and_small_weights_get_fewer():
    assert [columns_for(n, 8192, 8192, 132) for n in (1, 8, 9, 33, 64, 65, 96)] == [8, 8, 16, 64, 64, 96, 96]
    assert all(columns_for(n, 28672, 8192, 132) >= n for n in range(1, 257))
    assert columns_for(4096, 28672, 8192, 132) == 256
    assert columns_for(256, 4096, 4096, 132) == 128  # 32 row blocks: two passes rather than four blocks a sum


def test_padding_does_not_change_what_was_measured_for_a_sparsity():
    for zeros in (0.5, 0.6, 0.7, 0.8, 0.9):
        packed = pack(sparse(1024, 1024, zeros, torch.float16))
        found = configuration(packed.words.numel() / 1024**2, 8, torch.float16)
        assert found == configuration(1 - zeros, 8, torch.float16)


def test_arguments_that_do_not_fit_are_refused():
    args, _ = arguments(200, 300)
    x, words, offsets, bias, *rest = args
    for wrong in (
        (x[..., :200], words, offsets, bias),
        (x, words, offsets[:-1], bias),
        (x, words, offsets, bias[:-1]),
        (x, words[::2], offsets, bias),
    ):
        with pytest.raises(ValueError):
            ops.tiled_csl_spmm(*wrong, *rest)


@pytest.mark.parametrize("n,columns,passes", [(3, 8, 1), (64, 64, 1), (100, 128, 1), (1500, 256, 6)])
def test_what_the_kernel_gets(monkeypatch, n, columns, passes):
    """Sizes and addresses of one launch, without a card."""
    pretend(monkeypatch, (9, 0))
    seen = kept(monkeypatch, tiled_csl_spmm)
    monkeypatch.setattr(tiled_csl_spmm, "_planned", tiled_csl_spmm._planned.__wrapped__)
    monkeypatch.setattr(tiled_csl_spmm, "_kernel", lambda chosen, grid: chosen)
    (_, words, offsets, bias, rows, dtype), _ = arguments(20000, 1003, (1,), 0.8, torch.float16)
    x, packed = torch.zeros(n, 1008, dtype=dtype), TiledCSL(words, offsets, rows, 1003, dtype)
    run = tiled_csl_spmm._multiplying(jit.like((n, rows), dtype, x.device), x, packed, bias)
    y = run(x, words, offsets, bias)
    cuts = tiled_csl_spmm._cuts_of(packed.words, packed.offsets, 132)
    ((chosen, device, grid, *arguments_, n_, m, k_blocks, tiles, all_tiles, successors_wait),) = seen
    assert successors_wait is True
    addresses = [argument for argument in arguments_ if argument is not cuts]
    assert (len(arguments_) > len(addresses)) == (n <= 64)
    assert (chosen.columns, grid, n_, m, k_blocks, tiles, all_tiles) == (
        columns,
        132,
        n,
        rows,
        16,
        157 * 16,
        157 * 16 * passes,
    )
    assert addresses[:2] == [words.data_ptr(), offsets.data_ptr()]
    assert addresses[2:5] == [(x.data_ptr(), (n, 1008), columns, 64), bias.data_ptr(), y.data_ptr()]
    sums, left, ticket = addresses[5:]
    assert sums - left >= 8 * 132 * chosen.consumers and sums % 16 == left % 8 == 0 < ticket
    assert y.shape == (n, rows) and y.dtype == dtype and device == x.device


# On a card


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("n", [1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 160, 192, 256, 300])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99])
def test_every_configuration_is_right_and_deterministic(n, sparsity):
    """More tiles than blocks, rows that several blocks share; the output is poisoned by what the allocator gives back."""
    args, weight = arguments(1536, 2500, (n,), sparsity, torch.float16, True, "cuda")
    poison = torch.full((n, 1536), float("nan"), dtype=torch.float16, device="cuda")
    del poison
    first = ops.tiled_csl_spmm(*args)
    assert relative_error(first, exact(args, weight)) < 2e-3
    for _ in range(20):
        assert torch.equal(ops.tiled_csl_spmm(*args), first)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("grid", [1, 3, 40])
def test_few_blocks_use_their_windows_again_and_again(monkeypatch, grid, columns):
    """1 block has 480 tiles: windows, slots of x and batches of offsets go round many times; 40 share row blocks among four."""
    monkeypatch.setattr(tiled_csl_spmm, "blocks", lambda device: grid)
    monkeypatch.setattr(tiled_csl_spmm, "columns_for", lambda *sizes: columns)
    tiled_csl_spmm._planned.cache_clear()
    try:
        for sparsity in (0.0, 0.6, 0.7, 0.8, 0.9, 0.97):
            for n in {columns, columns // 2 + 1, 2 * columns + 5 if columns > 64 else columns}:
                args, weight = arguments(1531, 2500, (n,), sparsity, torch.float16, True, "cuda")
                found = ops.tiled_csl_spmm(*args)
                assert relative_error(found, exact(args, weight)) < 2e-3, (sparsity, n)
                assert torch.equal(ops.tiled_csl_spmm(*args), found)
    finally:
        tiled_csl_spmm._planned.cache_clear()


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("columns", [3, 48, 100, 500])
def test_uneven_rows(columns):
    """Dense rows, empty rows and tiles with far more words than a chunk beside sparse ones."""
    weight = sparse(1000, 1600, 0.9, torch.float16)
    weight[100:300] = torch.randn(200, 1600)
    weight[:, 640:704] = torch.randn(1000, 64)
    weight[500:700] = 0
    packed, x = pack(weight).to("cuda"), torch.randn(columns, 1600, dtype=torch.float16, device="cuda")
    args = (x, packed.words, packed.offsets, None, 1000, torch.float16)
    found = ops.tiled_csl_spmm(*args)
    assert relative_error(found, exact(args, weight.double())) < 2e-3 and not bool(found[:, 500:640].any())
    assert torch.equal(ops.tiled_csl_spmm(*args), found)


@pytest.mark.gpu
@HOPPER
def test_inputs_that_are_not_aligned_or_contiguous():
    args, weight = arguments(256, 512, (6,), 0.8, torch.float16, False, "cuda")
    x, rest, expected = args[0], args[1:], exact(args, weight)
    wide = torch.cat([x, x], 1)
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view_as(x).copy_(x)
    for given in (wide[:, :512], x.t().contiguous().t(), shifted):
        assert relative_error(ops.tiled_csl_spmm(given, *rest), expected) < 2e-3
    odd = torch.zeros(4, 515, dtype=x.dtype, device="cuda")
    odd[:1, :512] = x[:1]
    assert relative_error(ops.tiled_csl_spmm(odd[:1, :512], *rest), expected[:1]) < 2e-3
    assert relative_error(ops.tiled_csl_spmm(x[:1].expand(6, 512), *rest), expected[:1].expand(6, 256)) < 2e-3
    assert ops.tiled_csl_spmm(x[:0], *rest).shape == (0, 256)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("n", [5, 200])
def test_graphs_replay_and_streams_do_not_meet(n):
    args, weight = arguments(2048, 2048, (n,), 0.8, torch.float16, True, "cuda")
    expected = ops.tiled_csl_spmm(*args)
    graph, static = torch.cuda.CUDAGraph(), args[0].clone()
    side = torch.cuda.Stream()
    with torch.cuda.graph(graph):
        outs = [ops.tiled_csl_spmm(static, *args[1:]) for _ in range(4)]
    for _ in range(50):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        with torch.cuda.stream(side):
            other = [ops.tiled_csl_spmm(*args) for _ in range(4)]
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in [*outs, *other])
    for _ in range(20):  # nothing of the replay before is taken
        static.copy_(torch.randn_like(static))
        graph.replay()
        assert all(torch.equal(out, ops.tiled_csl_spmm(static, *args[1:])) for out in outs)
    assert relative_error(outs[0], exact((static, *args[1:]), weight)) < 2e-3


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("n", [65, 97, 129, 193, 257, 300, 1000, 2500])
def test_many_rows(n):
    """Several passes over W, the last one not full; beyond a limit decoding and cuBLAS."""
    args, weight = arguments(2200, 1003, (n,), 0.8, torch.float16, True, "cuda")
    found, expected = ops.tiled_csl_spmm(*args), exact(args, weight)
    errors = found.double().cpu() - expected
    assert float((errors.norm(dim=0) / expected.norm(dim=0)).max()) < 5e-3
    assert float((errors.norm(dim=1) / expected.norm(dim=1)).max()) < 2e-3
    assert torch.equal(ops.tiled_csl_spmm(*args), found)


@pytest.mark.gpu
@HOPPER
def test_decoding_waits_for_a_product_before_it():
    """Few rows, many, few, again and again without a pause: memory that one gives back is another's at once."""
    few, weight = arguments(2048, 2048, (48,), 0.8, torch.float16, False, "cuda")
    many = (torch.randn(3000, 2048, dtype=torch.float16, device="cuda"), *few[1:])
    expected = ops.tiled_csl_spmm(*few), ops.tiled_csl_spmm(*many)
    found = [(ops.tiled_csl_spmm(*few), ops.tiled_csl_spmm(*many)) for _ in range(50)]
    assert all(torch.equal(a, expected[0]) and torch.equal(b, expected[1]) for a, b in found)
    assert relative_error(expected[1], exact(many, weight)) < 2e-3


def by_mma(x: torch.Tensor, packed: TiledCSL, bias: torch.Tensor | None) -> torch.Tensor:
    out = jit.like((len(x), packed.rows), x.dtype, x.device)
    return tiled_csl_mma.multiplying(out, x, packed, bias)(x, packed.words, packed.offsets, bias)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 8, 9, 30, 64, 100, 300])
@pytest.mark.parametrize(
    "rows,cols,sparsity",
    [(1, 1, 0.0), (300, 1003, 0.5), (2200, 4096, 0.8), (70, 130, 1.0), (12800, 512, 0.95), (4000, 4096, 0.6)],
)
def test_the_kernel_for_other_cards(rows, cols, sparsity, n, dtype):
    args, weight = arguments(rows, cols, (n,), sparsity, dtype, True, "cuda")
    x, packed = packed_ops.aligned(args[0]), TiledCSL(*args[1:3], rows, cols, dtype)
    first = by_mma(x, packed, args[3])
    assert relative_error(first, exact(args, weight)) < (2e-3 if dtype == torch.float16 else 4e-3)
    for _ in range(3):
        assert torch.equal(by_mma(x, packed, args[3]), first)


@pytest.mark.gpu
@pytest.mark.parametrize("windows", [1, 2])
@pytest.mark.parametrize("columns", tiled_csl_mma.BLOCKS)
@pytest.mark.parametrize("grid", [1, 3, 40])
def test_few_blocks_for_other_cards_use_their_windows_again_and_again(monkeypatch, grid, columns, windows):
    """1 block has 480 tiles, and more words than it fetches ahead where `groups` is too small; 40 share row blocks among
    four."""
    take_for_older(monkeypatch)
    for sparsity, groups in ((0.0, 2), (0.6, 6), (0.6, 8), (0.95, 2)):
        for n in {columns, columns // 2 + 1, 2 * columns + 5}:
            args, weight = arguments(1531, 2500, (n,), sparsity, torch.float16, True, "cuda")
            walks = -(-n // columns)
            chosen = tiled_csl_mma.Configuration(columns, windows, groups, 1, False)
            made = tiled_csl_mma.Plan(chosen, walks, max(walks, grid // walks * walks))
            monkeypatch.setattr(tiled_csl_mma, "plan", lambda *given, made=made: made)
            found = ops.tiled_csl_spmm(*args)
            assert relative_error(found, exact(args, weight)) < 2e-3, (sparsity, n)
            assert torch.equal(ops.tiled_csl_spmm(*args), found)


@pytest.mark.gpu
def test_graphs_of_the_kernel_for_other_cards(monkeypatch):
    take_for_older(monkeypatch)
    args, weight = arguments(2048, 2048, (5,), 0.8, torch.float16, True, "cuda")
    expected = ops.tiled_csl_spmm(*args)
    assert relative_error(expected, exact(args, weight)) < 2e-3
    graph, static = torch.cuda.CUDAGraph(), args[0].clone()
    with torch.cuda.graph(graph):
        outs = [ops.tiled_csl_spmm(static, *args[1:]) for _ in range(4)]
    for _ in range(20):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(out, expected) for out in outs)
    for _ in range(10):  # nothing of the replay before is taken
        static.copy_(torch.randn_like(static))
        graph.replay()
        assert all(torch.equal(out, ops.tiled_csl_spmm(static, *args[1:])) for out in outs)


@pytest.mark.gpu
def test_the_kernel_for_other_cards_reads_no_further_than_x():
    args, weight = arguments(300, 520, (5,), 0.8, torch.float16, False, "cuda")
    wide = torch.full((5, 1024), float("nan"), dtype=torch.float16, device="cuda")
    wide[:, :520] = args[0]
    x = packed_ops.aligned(wide[:, :520])
    assert x.stride(0) == 1024
    found = by_mma(x, TiledCSL(*args[1:3], 300, 520, torch.float16), None)
    assert relative_error(found, exact(args, weight)) < 2e-3
    assert relative_error(ops.tiled_csl_spmm(wide[:, :520], *args[1:]), exact(args, weight)) < 2e-3


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("n", [4, 200, 2000])
def test_a_layer_compiles_whole_and_needs_no_grad_mode(n):
    args, weight = arguments(256, 512, (n,), 0.8, torch.bfloat16, True, "cuda")
    layer = TiledCSLLinear(TiledCSL(*args[1:3], 256, 512, torch.bfloat16), True, torch.bfloat16)
    layer.bias.data.copy_(args[3])
    torch._dynamo.reset()
    x = args[0].clone().requires_grad_()
    for call in (torch.compile(layer, backend="aot_eager", fullgraph=True), layer):
        assert relative_error(call(x).detach(), exact(args, weight)) < 4e-3


@pytest.mark.gpu
@HOPPER
def test_a_weight_that_is_written_again_is_waited_for():
    args, weight = arguments(640, 1280, (100,), 0.8, torch.float16, False, "cuda")
    words, offsets = torch.zeros_like(args[1]), args[2].clone()
    packed = TiledCSL(words, offsets, 640, 1280, torch.float16)
    cuts = tiled_csl_spmm._cuts_of(packed.words, packed.offsets, 132)
    assert tiled_csl_spmm._cuts_of(packed.words, packed.offsets, 132) is cuts
    words.copy_(args[1])
    assert tiled_csl_spmm._cuts_of(packed.words, packed.offsets, 132) is not cuts
    assert relative_error(ops.tiled_csl_spmm(args[0], words, offsets, *args[3:]), exact(args, weight)) < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)])
def test_other_cards_take_it(monkeypatch, capability):
    pretend(monkeypatch, capability)
    here = torch.device("cuda", 0), torch.bfloat16, torch.bfloat16
    assert str(tiled_csl_spmm.path(*here, 64)) == "tiled_csl_mma kernel on cuda"
    most = tiled_csl_spmm.MMA_MOST_ROWS
    assert str(tiled_csl_spmm.path(*here, most + 1)) == "tiled_csl_decode kernel and cuBLAS on cuda"


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("rows", [200, 4200])
def test_other_dtypes_decode(rows):
    args, weight = arguments(rows, 320, (4,), 0.8, torch.bfloat16, True, "cuda")
    assert tiled_csl_spmm.path(args[0].device, torch.float32, torch.bfloat16).decodes
    found = ops.tiled_csl_spmm(args[0].float(), *args[1:])
    assert found.dtype == torch.float32 and relative_error(found, exact(args, weight)) < 2e-3


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("n", [16, 700])
def test_one_launch_and_no_other_kernel(n):
    args, _ = arguments(1024, 1024, (n,), 0.8, torch.float16, True, "cuda")
    ops.tiled_csl_spmm(*args)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        ops.tiled_csl_spmm(*args)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert names == ["tiled_csl_spmm"], names


@pytest.mark.gpu
@pytest.mark.parametrize("rows,cols,sparsity", [(70, 130, 0.5), (1, 1, 0.0), (300, 1024, 0.9), (256, 64, 1.0)])
def test_decoding_is_exact(rows, cols, sparsity):
    weight = sparse(rows, cols, sparsity, torch.bfloat16)
    packed = pack(weight).to("cuda")
    found = ops.tiled_csl_decode(packed.words, packed.offsets, rows, cols, torch.bfloat16)
    assert torch.equal(found.cpu().view(torch.int16), weight.view(torch.int16))
    assert torch.equal(unpack(TiledCSL(packed.words, packed.offsets, rows, cols, torch.bfloat16)), found)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_on_the_second_card():
    args, weight = arguments(256, 512, (6,), 0.8, torch.float16, True, "cuda:1")
    assert relative_error(ops.tiled_csl_spmm(*args), exact(args, weight)) < 2e-3


# From the compiler's log


@pytest.mark.thorough
@pytest.mark.parametrize("chosen", CONFIGURATIONS, ids=str)
def test_the_kernel_fits_a_multiprocessor(chosen: Configuration):
    pytest.importorskip("cuda.core")
    _, log = jit.compile_cubin("tiled_csl_spmm", chosen.source(H200_BLOCKS), "sm_90a")
    found = cost(log)
    assert found["stack"] == found["spills"] == 0 and not found["serialized"], log
    assert found["registers"] * chosen.threads <= 65536 and chosen.threads <= 1024
    consumer, other = chosen.registers
    consumers = 128 * chosen.consumers  # what warps take must have been given to the block, or they wait for ever
    assert consumer * consumers + other * (chosen.threads - consumers) <= found["registers"] * chosen.threads
    assert chosen.shared_bytes(H200_BLOCKS) <= arch.HOPPER.block_shared_bytes


OTHER_CARDS = [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0), (9, 0)]


@pytest.mark.parametrize("capability", OTHER_CARDS)
def test_the_kernel_for_other_cards_fits_each(capability):
    card = arch.card_of(*capability)
    for n, words, tiles in itertools.product((1, 9, 17, 33, 65, 500), (0, 800, 3000, 8192), (1, 700, 28672)):
        chosen, walks, grid = tiled_csl_mma.plan(n, words * tiles, tiles, card, torch.float16)
        shared = chosen.shared_bytes
        assert shared <= card.block_shared_bytes and chosen.blocks * (shared + 1024) <= card.shared_bytes
        assert n <= walks * chosen.columns < n + chosen.columns
        assert grid % walks == 0 < grid <= tiles * walks  # no run is empty: a block waits for every one before it


def test_words_fetched_ahead_are_those_of_a_tile():
    found = [tiled_csl_mma.groups_for(round(8192 * density), 1) for density in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 1.0)]
    assert found == [2, 2, 4, 6, 8, 8, 8]


def compiled_for_other_cards():
    """What `plan` makes of weights of 60 % zeros, for which most registers hold words, and of another density."""
    for capability, target in zip(
        OTHER_CARDS, ("sm_80", "sm_86", "sm_89", "sm_100a", "sm_120a", "sm_90a"), strict=True
    ):
        card = arch.card_of(*capability)
        for i, n in enumerate(tiled_csl_mma.BLOCKS):
            for dtype, density in ((torch.float16, 0.4), (torch.bfloat16, (0.1, 0.2, 0.3)[i % 3])):
                yield target, tiled_csl_mma.plan(n, round(8192 * density) * 28672, 28672, card, dtype).chosen


@pytest.mark.thorough
@pytest.mark.parametrize("target,chosen", compiled_for_other_cards(), ids=str)
def test_the_kernel_for_other_cards_compiles(target, chosen):
    pytest.importorskip("cuda.core")
    found = cost(jit.compile_cubin("tiled_csl_mma", chosen.source, target)[1])
    assert found["stack"] == found["spills"] == 0
    assert -(-found["registers"] // 8) * 8 * chosen.threads * chosen.blocks <= 65536


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_decoding_compiles(target):
    pytest.importorskip("cuda.core")
    found = cost(jit.compile_cubin("tiled_csl_decode", tiled_csl_decode.source(), target)[1])
    assert found["stack"] == found["spills"] == 0 and found["registers"] <= 64
