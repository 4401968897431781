"""INT8 ops: integers exact, roundings those of transformers' own modules, opcheck, fullgraph compile."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tilepress.kernels import w8a8_gemm

ops = torch.ops.tilepress
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def codes(*shape, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("m,n,k", [(1, 1, 1), (3, 7, 5), (17, 8, 16), (33, 130, 70), (1, 64, 4096)])
def test_int_mm_is_exact(m, n, k, device):
    x, weight = codes(m, k, device=device), codes(n, k, seed=1, device=device)
    expected = x.cpu().numpy().astype(np.int64) @ weight.cpu().numpy().astype(np.int64).T
    assert np.array_equal(w8a8_gemm.int_mm(x, weight).cpu().numpy(), expected)


OLD_CPU = """
import torch
from tilepress.kernels import w8a8_gemm
print(w8a8_gemm.path(torch.device("cpu"), torch.float32, torch.float32, 8, 8))
x = torch.full((3, 70), 127, dtype=torch.int8)
assert w8a8_gemm.int_mm(x, x).unique().tolist() == [70 * 127 * 127]
"""


def test_int_mm_is_exact_without_vnni(monkeypatch):
    """torch's own product is not exact there, which oneDNN shows when it is held to old instructions before it is first used."""
    env = os.environ | {"ONEDNN_MAX_CPU_ISA": "SSE41"}
    ran = subprocess.run([sys.executable, "-c", OLD_CPU], capture_output=True, text=True, env=env)
    # Some processors are exact all the same; the script fails where a product is not.
    told = [f"w8a8_gemm reference ({how}) on cpu\n" for how in ("float64", "torch._int_mm")]
    assert ran.returncode == 0 and ran.stdout in told, ran.stderr
    monkeypatch.setattr(w8a8_gemm, "cpu_multiplies", lambda: False)
    with torch.autocast("cpu", torch.bfloat16):
        test_int_mm_is_exact(33, 1300, 2500, "cpu")
    test_int_mm_is_exact_at_the_extremes()


def test_int_mm_is_exact_at_the_extremes():
    x = torch.full((2, 8192), -128, dtype=torch.int8)
    assert w8a8_gemm.int_mm(x, x).unique().tolist() == [8192 * 128 * 128]
    x = torch.full((2, 140_000), -128, dtype=torch.int8)  # more than int32 holds
    assert w8a8_gemm.int_mm(x, x).unique().tolist() == [140_000 * 128 * 128]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("zero_point", [None, -128, 5])
@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_w8a8_against_float64(device, zero_point, per_token, per_channel, dtype):
    x, weight = codes(2, 5, 48, device=device), codes(24, 48, seed=1, device=device)
    generator = torch.Generator().manual_seed(2)
    x_scale = torch.rand((2, 5, 1) if per_token else (1,), generator=generator).to(device)
    w_scale = torch.rand((24, 1) if per_channel else (1,), generator=generator).to(dtype).to(device)
    bias = torch.randn(24, generator=generator).to(dtype).to(device)
    zero = None if zero_point is None else torch.tensor([zero_point], dtype=torch.int8, device=device)
    y = ops.w8a8_gemm(x, x_scale, zero, weight, w_scale, bias, dtype)
    exact = ((x.double() - (zero_point or 0)) * x_scale.double()) @ (
        weight.double() * w_scale.double()
    ).t() + bias.double()
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), exact, rtol=1e-6 if dtype == torch.float32 else 2**-8, atol=1e-4)


def test_w8a16_against_float64():
    x, weight, scale = torch.randn(3, 40), codes(9, 40), torch.rand(9, 1)
    wide = (weight.double() * scale.double()).t()
    error = ops.w8a16_gemm(x, weight, scale, torch.ones(9)).double() - (x.double() @ wide + 1)
    assert bool((error.abs() <= 1e-6 * (x.double().abs() @ wide.abs() + 1)).all())  # of what is added up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", [0, 1])
def test_quantize_against_numpy(dtype, mode):
    x = torch.randn(4, 3, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[1, 1] = 0
    q, scale = ops.quantize_int8(x, mode)
    wide = x.float().numpy()
    absmax = np.abs(wide).max(axis=-1, keepdims=True) if mode == 0 else np.abs(wide).max().reshape(1)
    expected = absmax / np.float32(127.5)
    nonzero = expected > 0
    assert np.array_equal(scale.numpy()[nonzero], expected[nonzero])
    assert np.array_equal(q.numpy(), np.clip(np.rint(wide / scale.numpy()), -128, 127).astype(np.int8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("static", [False, True])
def test_norms_round_as_the_models_own(dtype, static):
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(2, 5, 64, generator=generator).to(dtype) for _ in range(2))
    norm = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    norm.weight.data = torch.rand(64, generator=generator).to(dtype)
    scale, zero = (torch.tensor([0.02]), torch.tensor([7], dtype=torch.int8)) if static else (None, None)

    def quantized(y):
        return (ops.quantize_int8_static(y, scale, zero), scale) if static else ops.quantize_int8(y, 0)

    with torch.no_grad():
        for found, expected in zip(
            ops.rms_norm_int8(x, norm.weight, 1e-5, 0, scale, zero), quantized(norm(x)), strict=True
        ):
            assert torch.equal(found, expected)
        *found, total = ops.add_rms_norm_int8(x, residual, norm.weight, 1e-5, 0, scale, zero)
        assert torch.equal(total, x + residual)
        assert all(torch.equal(a, b) for a, b in zip(found, quantized(norm(x + residual)), strict=True))
        gate, up = x, residual
        found = ops.silu_mul_int8(torch.cat([gate, up], -1), 0, scale, zero)
        expected = quantized(torch.nn.SiLU()(gate) * up)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def calls():
    x, w = torch.randn(2, 3, 16), torch.rand(16)
    q, scale, zero = codes(2, 3, 16), torch.tensor([0.1]), torch.tensor([2], dtype=torch.int8)
    weight, w_scale = codes(8, 16), torch.rand(8, 1)
    yield "quantize_int8", (x, 0)
    yield "quantize_int8", (x, 1)
    yield "quantize_int8_static", (x, scale, zero)
    yield "rms_norm_int8", (x, w, 1e-6, 0, None, None)
    yield "rms_norm_int8", (x, w, 1e-6, 0, scale, None)
    yield "add_rms_norm_int8", (x, x + 1, w, 1e-6, 1, None, None)
    yield "silu_mul_int8", (x, 0, None, None)
    yield "w8a8_gemm", (q, torch.rand(2, 3, 1), zero, weight, w_scale, torch.rand(8), torch.bfloat16)
    yield "w8a8_gemm", (q, scale, None, weight, w_scale, None, torch.float32)
    yield "w8a16_gemm", (x, weight, w_scale, None)


@pytest.mark.parametrize("name,args", calls())
def test_opcheck_and_fullgraph_compile(name, args):
    op = getattr(ops, name)
    torch.library.opcheck(op.default, args)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a: op(*a), backend="aot_eager", fullgraph=True)
    found, expected = compiled(*args), op(*args)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, expected)), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
