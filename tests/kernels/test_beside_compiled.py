"""Products between kernels that torch.compile writes, which start while a product ends, and let it start while they do."""

import pytest
import torch
from support.cards import HOPPER
from torch._inductor import config as inductor

from tilepress.formats import tiled_bitmap, tiled_csl
from tilepress.kernels import jit
from tilepress.kernels.tiled_bitmap_spmm import tiled_bitmap_spmm
from tilepress.kernels.tiled_csl_spmm import tiled_csl_spmm
from tilepress.runtime.vllm import compat

LAYERS, WIDTH = 6, 1024


def products(layout: str) -> list:
    """Square weights as functions of x."""
    torch.manual_seed(0)
    weights = torch.randn(LAYERS, WIDTH, WIDTH, device="cuda").where(torch.rand(WIDTH, WIDTH, device="cuda") > 0.6, 0)
    made = []
    for weight in (weights / WIDTH**0.5).bfloat16():
        if layout == "tiled-csl":
            packed = tiled_csl.pack(weight)
            part = packed.words, packed.offsets, None, WIDTH, packed.dtype
            made.append(lambda x, part=part: tiled_csl_spmm(x, *part))
        else:
            packed = tiled_bitmap.pack(weight)
            part = packed.words, packed.offsets, None, None, WIDTH, packed.dtype, packed.group
            made.append(lambda x, part=part: tiled_bitmap_spmm(x, *part))
    return made


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("layout", ["tiled-csl", "tiled-bitmap"])
@pytest.mark.parametrize("rows", [1, 16])
def test_results_are_those_of_kernels_one_after_another(monkeypatch, layout, rows):
    """Each norm reads what the norm before it wrote, with a product in between that has nothing to do with it."""
    multiply = products(layout)

    def chain(x, residual):
        for product in multiply:
            residual = residual + x
            x = product(residual * torch.rsqrt(residual.float().pow(2).mean(-1, keepdim=True) + 1e-6).bfloat16())
        return x, residual

    def run(early: bool) -> list[torch.Tensor]:
        monkeypatch.setattr(jit, "successors_wait", not early)
        torch.manual_seed(1)
        x, residual = torch.randn(2, rows, WIDTH, device="cuda").bfloat16()
        torch._dynamo.reset()
        found = []
        with inductor.patch({"triton.enable_pdl": early}):
            compiled = torch.compile(chain)
            compiled(x, residual)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(20):
                    y, z = compiled(x, residual)
                    found += [y.clone(), z.clone()]
            for _ in range(20):
                graph.replay()
        return found

    expected = run(early=False)[:2]
    for i, each in enumerate(run(early=True)):
        assert torch.equal(each, expected[i % 2])


def test_the_plug_in_makes_products_wait(monkeypatch):
    monkeypatch.setattr(jit, "successors_wait", True)
    compat.wait_before_successors()
    assert not jit.successors_wait
