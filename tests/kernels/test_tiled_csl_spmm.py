"""The op: its reference against float64, opcheck, fullgraph compile, dtypes."""

import pytest
import torch

from tilepress.formats.tiled_csl import pack
from tilepress.kernels import tiled_csl_spmm  # noqa: F401 - registers the op


def arguments(rows=70, cols=130, n=(2, 3), sparsity=0.7, dtype=torch.bfloat16, bias=True, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, cols, generator=generator)
    weight[torch.rand(rows, cols, generator=generator) < sparsity] = 0
    packed = pack(weight.to(dtype)).to(device)
    x = torch.randn(*n, cols, generator=generator).to(dtype).to(device)
    b = torch.randn(rows, generator=generator).to(dtype).to(device) if bias else None
    return (x, packed.words, packed.offsets, b, rows, packed.tile_rows, dtype), weight.to(dtype).double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "rows,cols,n,sparsity",
    [(70, 130, (2, 3), 0.7), (1, 1, (1,), 0.0), (128, 64, (5,), 0.0), (200, 300, (1, 1, 1), 0.95), (64, 64, (4,), 1.0)],
)
def test_reference_against_float64(rows, cols, n, sparsity, bias, dtype):
    args, weight = arguments(rows, cols, n, sparsity, dtype, bias)
    found = torch.ops.tilepress.tiled_csl_spmm(*args)
    exact = args[0].double() @ weight.t() + (args[3].double() if bias else 0)
    assert found.shape == (*n, rows) and found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=2e-2 * (1 + cols**0.5 / 16))


def test_values_keep_their_dtype_under_another_activation_dtype():
    args, weight = arguments(dtype=torch.float16)
    x = args[0].double()
    found = torch.ops.tilepress.tiled_csl_spmm(args[0].float(), *args[1:3], None, *args[4:])
    torch.testing.assert_close(found.double(), x @ weight.t(), rtol=1e-5, atol=1e-4)


def test_opcheck():
    args, _ = arguments()
    torch.library.opcheck(torch.ops.tilepress.tiled_csl_spmm.default, args)


def test_compiles_without_graph_breaks():
    args, _ = arguments()
    compiled = torch.compile(lambda *a: torch.ops.tilepress.tiled_csl_spmm(*a) * 2, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*args), torch.ops.tilepress.tiled_csl_spmm(*args) * 2)
