"""The largest element of each row, where torch finds it."""

import itertools

import pytest
import torch
from support.kernel_costs import cost

from tilepress.kernels import argmax, jit

ops = torch.ops.tilepress
COMPILER = pytest.mark.skipif(jit.missing() is not None, reason="needs cuda-core")


def rows(count, columns, dtype, seed=0):
    """Few different numbers, so that many are equal; rows of zeros of both signs, of infinities, with NaN."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-9, 9, (count, columns), generator=generator).to(dtype)
    x[1 % count] = torch.where(torch.rand(columns, generator=generator) < 0.5, 0.0, -0.0).to(dtype)
    x[2 % count] = -torch.inf
    x[3 % count] = -torch.inf
    x[3 % count, columns // 2] = -3
    x[4 % count, torch.randint(columns, (3,), generator=generator)] = torch.nan
    x[5 % count, columns // 3 :] = torch.inf
    x[6 % count, -1] = 100
    return x


def test_op_is_well_formed():
    torch.library.opcheck(ops.argmax.default, (torch.randn(3, 10),))
    x = rows(8, 40, torch.bfloat16)
    first = [next(i for i, v in enumerate(row) if v != v or (v == row.max() and not row.isnan().any())) for row in x]
    assert ops.argmax(x).tolist() == first


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 9, 16, 300, 8184, 8192, 32000, 50257, 128256])
def test_kernel_against_torch(columns, dtype):
    for count in (1, 3, 8, 65):
        x = rows(count, columns, dtype, count)
        here = x.cuda()
        assert argmax.why_not(here) is None
        assert torch.equal(ops.argmax(here).cpu(), x.argmax(-1)), count
        for skipped in (1, 8):
            wide = torch.zeros(count, columns + 8, dtype=dtype, device="cuda")[:, skipped : columns + skipped]
            wide.copy_(x)
            assert torch.equal(ops.argmax(wide).cpu(), x.argmax(-1)), (count, skipped)


@pytest.mark.gpu
def test_what_the_kernel_does_not_take():
    for x in (torch.randn(3, 16), torch.randn(0, 16).half()):
        here = x.cuda()
        assert argmax.why_not(here) and torch.equal(ops.argmax(here).cpu(), x.argmax(-1))
    columns = torch.randn(16, 3).half().cuda().t()
    assert argmax.why_not(columns) is None and torch.equal(ops.argmax(columns), columns.argmax(-1))


@pytest.mark.thorough
@COMPILER
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_it_compiles_without_spills(arch):
    for dtype, vectors in itertools.product((torch.bfloat16, torch.float16), (False, True)):
        found = cost(jit.compile_cubin("argmax", argmax.source(dtype, vectors), arch)[1])
        assert found["spills"] == found["stack"] == 0 and found["registers"] <= 64
