"""The bitmap's kernel for many rows of x: plans and launches without a card, products on one, the kernel's cost from the compiler's log.

The op's own tests (test_tiled_bitmap_spmm.py) go through it, too, wherever they have more than 128 rows.
"""

import itertools

import pytest
import torch
from support.bitmap_cases import KINDS, arguments, assert_right
from support.cards import HOPPER, pretend
from support.kernel_costs import cost
from support.stub_card import kept

from tilepress.formats import tiled_bitmap
from tilepress.formats.tiled_bitmap import TiledBitmap
from tilepress.kernels import arch, jit, tiled_bitmap_prefill
from tilepress.kernels.once import forget_plans
from tilepress.kernels.tiled_bitmap_prefill import COLUMNS, Configuration, Plan, plan, slots_for

ops = torch.ops.tilepress
MANY = tiled_bitmap_prefill.FEWEST_ROWS
CUDA = torch.device("cuda", 0)


@pytest.fixture
def always(monkeypatch):
    """Have the kernel serve whatever it can, timed or not."""
    monkeypatch.setattr(tiled_bitmap_prefill, "serves", lambda n, *rest: n >= MANY)
    forget_plans()
    yield
    forget_plans()


def test_it_serves_what_was_timed(monkeypatch):
    monkeypatch.setattr(jit, "why_not", lambda device: None)
    pretend(monkeypatch, (9, 0))
    bf16, fp16 = torch.bfloat16, torch.float16

    def serves(n, cols, dtype=bf16, value_dtype=bf16, group=1, scale=None):
        packed = TiledBitmap(torch.empty(0), torch.empty(0), 256, cols, value_dtype, group, scale)
        return tiled_bitmap_prefill.serves(n, CUDA, dtype, packed)

    assert serves(MANY, 4096) and serves(2048, 4096) and serves(512, 14336) and serves(300, 64, fp16, fp16)
    assert not any([serves(128, 4096), serves(2049, 4096), serves(1024, 14336), serves(300, 4096, fp16)])
    assert not serves(300, 4096, group=2) and not serves(300, 4096, value_dtype=torch.int8, scale=torch.empty(256))
    pretend(monkeypatch, (10, 0))
    assert not serves(300, 4096)


@pytest.mark.parametrize("multiprocessors", [1, 2, 7, 114, 132])
def test_walks_take_all_rows_and_equal_numbers_of_clusters(multiprocessors):
    for n in (*range(MANY, 600, 7), 1024, 1536, 2048, 5000):
        columns, walks, clusters = plan(n, multiprocessors)
        assert columns in COLUMNS and columns * (walks - 1) < n <= columns * walks
        assert clusters % walks == 0 < clusters
        assert 2 * clusters <= max(multiprocessors, 2 * walks)


def test_as_few_columns_beside_what_is_asked_for_as_pays():
    assert [plan(n, 132)[:2] for n in (130, 192, 193, 256, 384, 512, 768, 2048)] == [
        (192, 1),
        (192, 1),
        (256, 1),
        (256, 1),
        (192, 2),
        (256, 2),
        (256, 3),
        (256, 8),
    ]


def test_slots_fit_a_block():
    sizes = 2560, 9984, 19840, tiled_bitmap.largest_tile(1, torch.float16)
    for columns, clusters, tile_bytes in itertools.product(COLUMNS, (1, 64, 66), sizes):
        tiles, of_x = slots_for(columns, clusters, tile_bytes)
        assert tiles >= 2 and of_x >= 4  # what is multiplied, and what is read meanwhile
        used = of_x * 128 * columns + tiles * tile_bytes + 16 * (of_x + tiles) + 4 * (clusters + 1)
        assert used <= arch.HOPPER.block_shared_bytes


@pytest.mark.parametrize("rows,blocks", [(20000, 157), (20200, 158)])
def test_what_the_kernel_gets(monkeypatch, rows, blocks):
    """Without a card: sizes and addresses of one launch, with a row block that has no other one below, and without."""
    pretend(monkeypatch, (9, 0))
    seen = kept(monkeypatch, tiled_bitmap_prefill)
    monkeypatch.setattr(tiled_bitmap_prefill, "_kernel", lambda chosen: chosen)
    args, _ = arguments(rows, 1003, (1,), 0.8, (torch.float16, True, 2))
    words, offsets, scale, bias, _, dtype, group = args[1:]
    packed = TiledBitmap(words, offsets, rows, 1003, dtype, group, scale)
    x = torch.zeros(1000, 1008, dtype=torch.float16)
    out = jit.like((1000, rows), x.dtype, x.device)
    run = tiled_bitmap_prefill.multiplying(out, x, packed, bias, lambda *weight: 9984)
    y = run(x, words, offsets, scale, bias)
    ((chosen, device, grid, *addresses, n, m, k_blocks, units, tiles, walks, tile_bytes, of_w, of_x, waits),) = seen
    assert (chosen, device, grid) == (Configuration(256, torch.float16, torch.int8, 2), x.device, 2 * 64)
    assert (n, m, k_blocks, units, tiles, walks, tile_bytes) == (1000, rows, 8, 79 * 8, blocks * 8, 4, 9984)
    assert (of_w, of_x) == slots_for(256, 64, 9984) and waits is True
    assert addresses[:2] == [words.data_ptr(), offsets.data_ptr()]
    assert addresses[2:6] == [(x.data_ptr(), (1000, 1008), 128, 64), scale.data_ptr(), bias.data_ptr(), y.data_ptr()]
    sums, left, ticket = addresses[6:]
    assert sums - left >= 8 * 64 * 4 and sums % 16 == left % 8 == 0 < ticket and y.shape == (1000, rows)


# On a card


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [MANY, 192, 193, 256, 500, 1024, 2048])
def test_every_configuration_is_right_and_deterministic(always, n, kind):
    """An odd number of row blocks, which clusters share; the output is poisoned by what the allocator gives back."""
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
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("clusters", [1, 3, 40])
def test_few_clusters_use_their_slots_again_and_again(always, monkeypatch, clusters, columns):
    """1 cluster has 120 units, the last 20 of them with one tile; 40 share row blocks among many, over several walks."""
    for sparsity, group in ((0.0, 1), (0.6, 1), (0.6, 2), (0.95, 2)):
        for n in (MANY, columns, 2 * columns + 5):
            walks = -(-n // columns)
            given = Plan(columns, walks, max(1, clusters // walks) * walks)
            monkeypatch.setattr(tiled_bitmap_prefill, "plan", lambda n, multiprocessors, given=given: given)
            forget_plans()
            args, weight = arguments(1411, 2500, (n,), sparsity, (torch.float16, False, group), True, "cuda")
            found = ops.tiled_bitmap_spmm(*args)
            assert_right(found, args, weight)
            assert torch.equal(ops.tiled_bitmap_spmm(*args), found)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("rows,cols", [(1, 1), (128, 64), (129, 200), (64, 5000)])
def test_weights_of_few_tiles(always, rows, cols):
    """Most clusters have nothing to do, and blocks of a cluster may have no tile."""
    args, weight = arguments(rows, cols, (300,), 0.5, (torch.bfloat16, False, 1), True, "cuda")
    assert_right(ops.tiled_bitmap_spmm(*args), args, weight)


# From the compiler's log


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind[0] == torch.float16 or kind[1]])
@pytest.mark.parametrize("columns", COLUMNS)
def test_the_kernel_compiles_within_its_budget(columns, kind):
    pytest.importorskip("cuda.core")
    dtype, int8, group = kind
    chosen = Configuration(columns, dtype, torch.int8 if int8 else dtype, group)
    found = cost(jit.compile_cubin("tiled_bitmap_prefill", chosen.source, "sm_90a")[1])
    assert found["spills"] == found["stack"] == 0 and not found["serialized"]
    threads, (consumer, other) = tiled_bitmap_prefill.THREADS, tiled_bitmap_prefill.REGISTERS
    assert -(-found["registers"] // 8) * 8 * threads <= 65536
    # What warps take must have been given to the block, or they wait for ever.
    assert consumer * 256 + other * (threads - 256) <= found["registers"] * threads
