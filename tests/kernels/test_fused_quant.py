"""Fused quantization: codes and scales as the references' on the CPU, for any row; what happens to NaN; what the compiler makes of the kernel."""

import itertools
import math

import numpy as np
import pytest
import torch
from support.kernel_costs import cost

from tilepress.kernels import fused_quant, jit
from tilepress.kernels.fused_quant import ACTIVATIONS, PER_TENSOR, PER_TOKEN

ops = torch.ops.tilepress
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
COMPILER = pytest.mark.skipif(jit.missing() is not None, reason="needs cuda-core")
ROWS = [1, 5, 64, 100, 1000, 4096, 5120, 8184, 11008, 14336, 32768]


def numbers(*shape, dtype=torch.bfloat16, seed=0, scale=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def calls(n, tokens, dtype):
    """Name, arguments before mode, and whether the kernel's arithmetic is the reference's to the bit."""
    x, residual, gate_up = (numbers(*tokens, m, dtype=dtype, seed=i) for i, m in enumerate((n, n, 2 * n)))
    weight, bias = numbers(n, dtype=dtype, seed=3), numbers(n, dtype=dtype, seed=4)
    yield "quantize_int8", (x,), True
    yield "rms_norm_int8", (x, weight, 1e-5), False
    yield "add_rms_norm_int8", (x, residual, weight, 1e-5), False
    yield "layer_norm_int8", (x, weight, bias, 1e-5), False
    yield "add_layer_norm_int8", (x, residual, weight, bias, 1e-5), False
    yield "silu_mul_int8", (gate_up,), False
    for activation in ACTIVATIONS:
        yield "activation_int8", (x, activation), activation == "relu"


def on(device, values):
    return [value.to(device) if isinstance(value, torch.Tensor) else value for value in values]


def run(name, args, mode, scale, zero_point):
    if name != "quantize_int8":
        return getattr(ops, name)(*args, mode, scale, zero_point)
    if scale is None:
        return ops.quantize_int8(*args, mode)
    return ops.quantize_int8_static(*args, scale, zero_point), scale.float()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["token", "static", "zero_point"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", ROWS)
def test_kernels_against_references(n, dtype, kind):
    scale = None if kind == "token" else torch.tensor([0.019], dtype=dtype)
    zero_point = torch.tensor([-7], dtype=torch.int8) if kind == "zero_point" else None
    for tokens in ((3,), (2, 5), (1500,) if n <= 1000 else (300,)) if n < 20000 else ((2,),):
        for name, args, exact in calls(n, tokens, dtype):
            expected = run(name, args, PER_TOKEN, scale, zero_point)
            there = on("cuda", args), PER_TOKEN, *on("cuda", (scale, zero_point))
            if name == "activation_int8" and args[1] == "gelu_new":  # torch rounds what is between otherwise on a CPU
                expected = [t.cpu() for t in fused_quant.activation_int8_ref(*there[0], *there[1:])]
            elif name == "activation_int8":  # better than torch's, which loses small results
                rounded = ACTIVATIONS[args[1]](args[0].double()).to(dtype)
                expected = run("quantize_int8", (rounded,), PER_TOKEN, scale, zero_point)
            found = [t.cpu() for t in run(name, *there)]
            codes, scales = found[:2]
            assert codes.shape == expected[0].shape and scales.shape == expected[1].shape, name
            if exact or "add" in name:
                assert all(
                    torch.equal(a, b)
                    for a, b in zip(found[0 if exact else 2 :], expected[0 if exact else 2 :], strict=True)
                )
            torch.testing.assert_close(scales, expected[1], rtol=2**-7, atol=0)
            apart = (codes.int() - expected[0].int()).abs()
            assert int(apart.max()) <= 2 and float((apart > 0).float().mean()) < 0.02, name


@pytest.mark.gpu
@pytest.mark.parametrize("n", [8, 100, 4096])
def test_norms_against_float64(n):
    """Codes times scale: within rounding to 16 bits and to codes."""
    for name, args, _ in calls(n, (40,), torch.bfloat16):
        if "norm" not in name:
            continue
        wide = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
        x = (args[0] + args[1]).double() if "add" in name else wide[0]
        weight, *bias = [t for t in wide if isinstance(t, torch.Tensor) and t.dim() == 1]
        centred = x - x.mean(-1, keepdim=True) if bias else x
        exact = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + sum(bias)
        codes, scale, *_ = (t.cpu() for t in run(name, on("cuda", args), PER_TOKEN, None, None))
        error = (codes.double() * scale.double() - exact).abs()
        assert bool((error <= 0.51 * scale.double() + 2**-6 * exact.abs() + 1e-6).all()), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [24, 50])
def test_what_is_not_finite(n, device):
    x = numbers(6, n)
    x[1, 3], x[2, 4], x[3, 0], x[4] = math.nan, math.inf, -math.inf, 0
    codes, scale = (t.cpu() for t in ops.quantize_int8(x.to(device), PER_TOKEN))
    assert scale[1].isnan() and scale[2:4].isinf().all() and scale[[0, 4, 5]].isfinite().all()
    assert not codes[1:5].any() and codes[0].any()
    y = ops.w8a8_gemm(codes, scale, None, torch.ones(8, n, dtype=torch.int8), torch.ones(1), None, torch.bfloat16)
    assert y[1:4].isnan().all() and y[[0, 4, 5]].isfinite().all()
    one = torch.tensor([0.01], device=device)
    fixed = ops.quantize_int8_static(x.to(device), one, None).cpu()
    assert (fixed[1, 3], fixed[2, 4], fixed[3, 0]) == (0, 127, -128)
    for name, args in (("rms_norm_int8", (numbers(n),)), ("layer_norm_int8", (numbers(n), numbers(n)))):
        codes, scale = (
            t.cpu() for t in getattr(ops, name)(x.to(device), *on(device, args), 1e-5, PER_TOKEN, None, None)
        )
        assert scale[1:4].isnan().all() and not codes[1:4].any() and scale[[0, 4, 5]].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_quotients_are_rounded_as_divisions(device):
    """Every bfloat16 there is, by scales of many sizes, against numpy's division."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.cat([every[every.isfinite()], every[:8].zero_()[:8]])[: 8 * (65280 // 8)].reshape(-1, 2720)
    for scale in (1e-38, 1.17e-38, 3e-5, 0.0133, 0.1, 1.0, 1 / 3, 7e4, 3e38):
        wide = np.float32(scale)
        with np.errstate(over="ignore", under="ignore"):
            expected = np.clip(np.rint(x.float().numpy() / wide), -128, 127).astype(np.int8)
        found = ops.quantize_int8_static(x.to(device), torch.tensor([wide], device=device), None)
        assert np.array_equal(found.cpu().numpy(), expected), scale


@pytest.mark.parametrize("device", DEVICES)
def test_other_arguments_have_the_references(device):
    for x, mode in (
        (numbers(3, 50, dtype=torch.float32), PER_TOKEN),
        (numbers(3, 50), PER_TENSOR),
        (numbers(2, 40000), 0),
    ):
        expected = fused_quant.quantize_int8_ref(x, mode)
        assert all(
            torch.equal(a.cpu(), b) for a, b in zip(ops.quantize_int8(x.to(device), mode), expected, strict=True)
        )
    empty = ops.quantize_int8(numbers(0, 50).to(device), PER_TOKEN)
    assert empty[0].shape == (0, 50) and empty[1].shape == (0, 1)
    part = numbers(4, 100).to(device)[:, 10:60]
    assert torch.equal(ops.quantize_int8(part, 0)[0], ops.quantize_int8(part.contiguous(), 0)[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cut", [48, 51])
def test_parts_of_rows_with_scales_of_the_whole(cut, device):
    """What the ranks of tensor parallelism do: the codes are those of the whole row, NaN and zeros too."""
    x, mode = numbers(2, 5, 2 * cut, scale=3.0), PER_TOKEN
    x[0, 0, :cut], x[0, 1], x[0, 2, 3] = 0, 0, math.nan
    x = x.to(device)
    codes, scale = ops.quantize_int8(x, mode)
    parts = x[..., :cut], x[..., cut:]
    found = torch.stack([ops.quantize_int8(part, mode)[1] for part in parts]).amax(0)
    assert torch.equal(found.nan_to_num(), scale.nan_to_num()) and bool(found.isnan()[0, 2])
    ours = [ops.quantize_int8_static(part, found, None) for part in parts]
    assert torch.equal(torch.cat(ours, -1), codes)
    named = (ops.activation_int8(part, "relu", mode, found, None) for part in parts)
    for part, (there, scales) in zip(parts, named, strict=True):
        expected = fused_quant.quantize_int8_static_ref(part.relu(), found, None)
        assert torch.equal(there, expected) and torch.equal(scales.nan_to_num(), found.nan_to_num())


@pytest.mark.parametrize("device", DEVICES)
def test_wrong_arguments_and_layouts(device):
    x, one = numbers(4, 9).to(device), torch.ones(1, device=device)
    with pytest.raises(ValueError, match="9 columns"):
        ops.silu_mul_int8(x, PER_TOKEN, None, None)
    if device == "cuda":
        for scale, zero_point in (
            (torch.ones(9, device=device), None),
            (one, torch.zeros(1, device=device)),
            (one.cpu(), None),
        ):
            with pytest.raises((ValueError, RuntimeError)):
                ops.quantize_int8_static(x, scale, zero_point)
    turned = numbers(9, 4).to(device).t()  # what compilers are told of layouts holds
    for kind in (torch.float32, torch.bfloat16):
        for out in ops.add_rms_norm_int8(
            turned.to(kind), turned.to(kind), numbers(9).to(device, kind), 1e-5, PER_TOKEN, None, None
        ):
            assert out.is_contiguous()
    empty = ops.rms_norm_int8(x[:0], numbers(9).to(device), 1e-5, PER_TOKEN, one, None)
    assert empty[0].shape == (0, 9) and torch.equal(empty[1], one)


def test_blocks_hold_their_rows():
    for n, is_full in itertools.product((*range(1, 70), *ROWS), (False, True)):
        chosen = fused_quant.configuration_for(n, is_full)
        assert chosen.threads % 32 == 0 and 32 <= chosen.threads <= 1024 and chosen.threads * chosen.parts * 8 >= n


@pytest.mark.thorough
@COMPILER
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_kernel_keeps_rows_in_registers(arch):
    for op, n, vectors in (
        (0, 4096, True),
        (2, 8192, True),
        (4, 8192, True),
        (5, 14336, True),
        (8, 1000, False),
        (1, 32768, True),
    ):
        for is_full in (False, True):
            for static in (0, 2):
                source = fused_quant.configuration_for(n, is_full).source(op, static, vectors, torch.bfloat16)
                found = cost(jit.compile_cubin("fused_quant", source, arch)[1])
                assert found["spills"] <= 16, (op, n, static, found)
