"""W8A8 and W8A16 products: the same bits as integer arithmetic done by numpy, whatever kernel and configuration runs; what the compiler makes of them."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.cards import HOPPER
from support.kernel_costs import cost

from tilepress.formats import TilepressError, int8
from tilepress.kernels import arch, jit, w8a8_gemm, w8a16_gemm
from tilepress.kernels.w8a8_gemm import Configuration, configuration_for

ops = torch.ops.tilepress
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
COMPILER = pytest.mark.skipif(jit.missing() is not None, reason="needs cuda-core")
# m, n, k: one token, every edge of tiles and boxes, shapes that TMA does not take
SHAPES = [
    (1, 8, 16),
    (1, 64, 128),
    (3, 7, 5),
    (9, 24, 48),
    (17, 100, 272),
    (33, 136, 1040),
    (70, 129, 256),
    (129, 72, 4096),
]
SHAPES += [(200, 1000, 144), (257, 264, 528), (5, 4096, 4112), (65, 64, 33)]
# Of each kind that the table has or a tuner tries.
CONFIGURATIONS = [
    *(
        Configuration(1, tokens, 2, stages, split)
        for (tokens, stages), split in itertools.product(((8, 10), (16, 9), (32, 8), (64, 6)), (1, 2))
    ),
    Configuration(2, 8, 2, 3),
    Configuration(1, 8, 4, 6, 2),
    Configuration(1, 16, 4, 5),
    Configuration(2, 64, 1, 4),
    Configuration(1, 64, 2, 4, 4),
    Configuration(1, 128, 1, 4, 2),
    Configuration(2, 128, 1, 3),
    Configuration(2, 128, 1, 6),
    Configuration(2, 256, 1, 4, together=4),
    Configuration(2, 256, 1, 4, 2),
]


def codes(*shape, seed=0):
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def arguments(
    m, n, k, zero_point=None, per_token=True, per_channel=True, bias=True, dtype=torch.bfloat16, scale_dtype=None
):
    x_scale, w_scale, more = scales_of(m, n, k, per_token, per_channel, bias, dtype, scale_dtype)
    zero = None if zero_point is None else torch.tensor([zero_point], dtype=torch.int8)
    return codes(m, k), x_scale, zero, codes(n, k, seed=1), w_scale, more, dtype


def scales_of(m, n, k, per_token, per_channel, bias, dtype, scale_dtype=None):
    generator = torch.Generator().manual_seed(m + n + k)
    x_scale = torch.rand((m, 1) if per_token else (1,), generator=generator)
    w_scale = torch.rand((n, 1) if per_channel else (1,), generator=generator).to(scale_dtype or dtype)
    return x_scale, w_scale, torch.randn(n, generator=generator).to(dtype) * 100 if bias else None


def expected_of(x, x_scale, zero_point, weight, w_scale, bias, dtype):
    """Integers by numpy, then float32 operations one by one, then one rounding."""
    return scaled(product_of(x, zero_point, weight), x_scale, w_scale, bias, dtype)


def product_of(x, zero_point, weight):
    x = x.numpy().astype(np.int64) - (0 if zero_point is None else int(zero_point))
    return x @ weight.numpy().astype(np.int64).T


def scaled(total, x_scale, w_scale, bias, dtype):
    y = total.astype(np.float32) * x_scale.float().numpy().reshape(-1, 1) * w_scale.float().numpy().reshape(1, -1)
    return torch.from_numpy(y if bias is None else y + bias.float().numpy()).to(dtype)


def on(device, values):
    return [value.to(device) if isinstance(value, torch.Tensor) else value for value in values]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m,n,k", SHAPES)
def test_bits(m, n, k, dtype, device):
    x, weight = on(device, (codes(m, k), codes(n, k, seed=1)))
    for zero_point in (None, -128, 5):
        zero = None if zero_point is None else torch.tensor([zero_point], dtype=torch.int8)
        total = product_of(x.cpu(), zero, weight.cpu())
        for kind in itertools.product((True, False), repeat=3):  # scales of tokens, of channels, bias
            x_scale, w_scale, bias = scales_of(m, n, k, *kind, dtype)
            found = ops.w8a8_gemm(x, *on(device, (x_scale, zero)), weight, *on(device, (w_scale, bias)), dtype)
            assert torch.equal(found.cpu(), scaled(total, x_scale, w_scale, bias, dtype)), (zero_point, kind)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float16])
def test_scales_of_other_dtypes(scale_dtype, device):
    x, x_scale, *rest = arguments(9, 24, 48, scale_dtype=scale_dtype)
    args = x, x_scale[:1].reshape(1).to(torch.float16), *rest
    assert torch.equal(ops.w8a8_gemm(*on(device, args)).cpu(), expected_of(*args))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n,k", [(64, 4096), (24, 66304), (20, 4100)])
def test_extremes_are_exact(n, k, device):
    """The largest sums that there are, a power of two as scale."""
    one = torch.tensor([2.0**-20])
    for low, zero_point in itertools.product((-128, 127), (None, -128, 127)):
        x, weight = torch.full((3, k), low, dtype=torch.int8), torch.full((n, k), -127, dtype=torch.int8)
        zero = None if zero_point is None else torch.tensor([zero_point], dtype=torch.int8)
        args = x, one, zero, weight, torch.ones(1), None, torch.bfloat16
        assert torch.equal(ops.w8a8_gemm(*on(device, args)).cpu(), expected_of(*args))


@pytest.mark.parametrize("device", DEVICES)
def test_zeros_and_what_is_not_finite(device):
    x, x_scale, zero, weight, w_scale, _, dtype = arguments(20, 64, 128)
    x[3] = 0
    x_scale[4], x_scale[5] = float("inf"), float("nan")
    found = ops.w8a8_gemm(*on(device, (x, x_scale, zero, weight, w_scale, None, dtype))).cpu()
    assert not found[3].any() and not found[4:6].isfinite().any() and found[6:].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_shapes_of_tokens_and_strides(device):
    x, x_scale, _, weight, w_scale, bias, dtype = on(device, arguments(12, 40, 64))
    expected = ops.w8a8_gemm(x, x_scale, None, weight, w_scale, bias, dtype)
    folded = ops.w8a8_gemm(x.view(3, 4, 64), x_scale.view(3, 4, 1), None, weight, w_scale, bias, dtype)
    assert torch.equal(folded, expected.view(3, 4, 40))
    assert ops.w8a8_gemm(x[:0], x_scale[:0], None, weight, w_scale, bias, dtype).shape == (0, 40)
    apart = torch.stack([x, x], 1)[:, 1]  # rows that do not follow one another
    turned = weight.t().contiguous().t()  # a Conv1D's way round
    assert torch.equal(ops.w8a8_gemm(apart, x_scale, None, turned, w_scale, bias, dtype), expected)
    odd = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(12, 64)  # not at a multiple of 16 bytes
    assert torch.equal(ops.w8a8_gemm(odd, x_scale, None, weight, w_scale, bias, dtype), expected)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("chosen", CONFIGURATIONS, ids=str)
def test_every_configuration(chosen, monkeypatch):
    monkeypatch.setattr(w8a8_gemm, "configuration_for", lambda *_: chosen)
    for (m, n, k), zero_point in itertools.product(
        [(1, 8, 16), *SHAPES[8:11], (2 * chosen.tokens + 3, 1096, 2064)], (None, 3)
    ):
        args = arguments(m, n, k, zero_point)
        found = [ops.w8a8_gemm(*on("cuda", args)) for _ in range(3)]
        assert all(torch.equal(y.cpu(), expected_of(*args)) for y in found), (m, n, k)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("chosen", [c for c in CONFIGURATIONS if c.split == 1], ids=str)
def test_blocks_of_many_tiles(chosen, monkeypatch):
    """The last tiles are for all blocks, for half of them, and for fewer."""
    monkeypatch.setattr(w8a8_gemm, "configuration_for", lambda *_: chosen)
    for blocks, (m, n, k) in itertools.product(
        (3, 4, 5), [(2 * chosen.tokens + 9, 456, 2064), (3 * chosen.tokens, 200, 144)]
    ):
        few = replace(arch.HOPPER, multiprocessors=blocks)
        monkeypatch.setattr(arch, "card", lambda _, few=few: few)
        args = arguments(m, n, k)
        assert torch.equal(ops.w8a8_gemm(*on("cuda", args)).cpu(), expected_of(*args)), (blocks, m, n, k)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["w8a8", "w8a16"])
def test_in_graphs_and_on_streams(op):
    args = on("cuda", arguments(16, 512, 1024))
    wide = torch.randn(16, 1024, device="cuda").bfloat16()
    call = (lambda: ops.w8a8_gemm(*args)) if op == "w8a8" else (lambda: ops.w8a16_gemm(wide, args[3], args[4], args[5]))
    expected = call().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [call() for _ in range(4)]
    side = torch.cuda.Stream()
    for _ in range(20):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        with torch.cuda.stream(side):
            other = [call() for _ in range(4)]
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in [*outs, *other])


@pytest.mark.gpu
def test_a_first_zero_point_is_refused_in_a_graph():
    ops.w8a8_gemm(*on("cuda", arguments(16, 512, 1024, 5)))
    fresh = on("cuda", arguments(16, 512, 1024, 5))
    with (
        pytest.raises(TilepressError, match="first used inside a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        ops.w8a8_gemm(*fresh)


def test_what_is_known_of_a_weight(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    weights = torch.nn.Parameter(codes(2, 16, 24), requires_grad=False)  # two Conv1Ds' in one tensor
    for _ in range(2):
        sums = [w8a8_gemm.row_sums(weights[i].t()) for i in (0, 1)]
    assert all(torch.equal(sums[i], weights[i].sum(0, dtype=torch.int32)) for i in (0, 1))
    assert w8a8_gemm.row_sums(weights[0].t()) is sums[0]
    assert [w8a8_gemm.is_settled(weights[i].t()) for i in (0, 1, 0, 1)] == [False, False, True, True]
    weights[0, 0] += 1
    assert not w8a8_gemm.is_settled(weights[0].t()) and w8a8_gemm.is_settled(weights[0].t())
    assert w8a8_gemm.row_sums(weights[0].t()) is sums[0]  # where graphs look for it
    assert torch.equal(sums[0], weights[0].sum(0, dtype=torch.int32))


@pytest.mark.parametrize("device", [*DEVICES, pytest.param("cuda, mma.sync", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [1, 8, 13, 16, 31, 64, 65, 128, 300, 513])
def test_w8a16_against_float64(m, dtype, device, monkeypatch):
    if "mma" in device:
        device = "cuda"
        monkeypatch.setattr(w8a16_gemm, "_uses_wgmma", lambda _: False)
    for n, k, per_channel, bias in (
        (24, 40, True, True),
        (130, 144, True, False),
        (1000, 528, False, True),
        (128, 4096, True, True),
        (7, 16, True, True),
    ):
        generator = torch.Generator().manual_seed(m)
        x, weight = torch.randn(m, k, generator=generator).to(dtype), codes(n, k)
        scale = (torch.rand((n, 1) if per_channel else (1,), generator=generator) / 100).to(dtype)
        more = torch.randn(n, generator=generator).to(dtype) if bias else None
        exact = x.double() @ (weight.double() * scale.double()).t() + (0 if more is None else more.double())
        found = ops.w8a16_gemm(*on(device, (x, weight, scale, more)))
        assert found.dtype == dtype and found.shape == (m, n)
        most = x.double().abs() @ (weight.double() * scale.double()).abs().t()
        rounding = 2**-8 if dtype == torch.bfloat16 else 2**-11
        wrong = (found.double().cpu() - exact).abs() > 2 * rounding * exact.abs() + rounding * most / k**0.5 * 4 + 1e-6
        assert not bool(wrong.any()), (n, k)
        assert torch.equal(ops.w8a16_gemm(*on(device, (x, weight, scale, more))), found)


@pytest.mark.gpu
def test_w8a16_multiplies_every_code():
    """Codes times powers of two, exact in every dtype."""
    weight = torch.arange(-128, 128, dtype=torch.int8).repeat(128, 1)
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.eye(256, dtype=dtype)[:64]
        found = ops.w8a16_gemm(*on("cuda", (x, weight, torch.ones(1, dtype=dtype), None)))
        assert torch.equal(found.cpu(), weight[:, :64].t().to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dequantizing_rounds_as_the_reference(dtype):
    weight, scale = codes(300, 272), (torch.rand(300, 1) / 50).to(dtype)
    x = torch.eye(272, dtype=dtype)
    found = ops.w8a16_gemm(*on("cuda", (x, weight, scale, None)))
    assert torch.equal(found.cpu(), int8.dequantize(weight, scale).t())


def test_paths():
    cpu = torch.device("cpu")
    how = "torch._int_mm" if w8a8_gemm.cpu_multiplies() else "float64"
    assert str(w8a8_gemm.path(cpu, torch.bfloat16, torch.bfloat16, 64, 64)) == f"w8a8_gemm reference ({how}) on cpu"
    assert str(w8a16_gemm.path(cpu, torch.bfloat16, torch.bfloat16, 64)) == "w8a16_gemm reference (dequantize) on cpu"


@pytest.mark.gpu
@HOPPER
def test_paths_on_a_card():
    card, bf16 = torch.device("cuda", 0), torch.bfloat16
    assert str(w8a8_gemm.path(card, bf16, bf16, 64, 64)) == "w8a8_gemm kernel on cuda"
    for n, k in ((63, 64), (64, 63)):
        assert str(w8a8_gemm.path(card, bf16, bf16, n, k)) == "w8a8_mma kernel on cuda"
    assert w8a8_gemm.path(card, torch.float32, torch.float32, 64, 64).is_reference
    assert str(w8a16_gemm.path(card, bf16, bf16, 64, 64)) == "w8a16_gemm kernel on cuda"
    assert str(w8a16_gemm.path(card, bf16, bf16, 64, 513)) == "dequantize kernel and cuBLAS on cuda"
    assert w8a16_gemm.path(card, bf16, bf16, 63).is_reference


@pytest.mark.parametrize("wrong", ["columns", "scales", "bias", "zero_point", "dtype"])
@pytest.mark.gpu
def test_wrong_arguments(wrong):
    x, x_scale, _, weight, w_scale, bias, dtype = on("cuda", arguments(12, 40, 64))
    zero = None
    if wrong == "columns":
        x = x[:, :48]
    elif wrong == "scales":
        x_scale = x_scale[:5]
    elif wrong == "bias":
        bias = bias[:5]
    elif wrong == "zero_point":
        zero = torch.tensor([1], device="cuda")
    else:
        x = x.int()
    with pytest.raises((ValueError, RuntimeError)):
        ops.w8a8_gemm(x, x_scale, zero, weight, w_scale, bias, dtype)


def test_configurations_fit_a_multiprocessor():
    for m, n, k in itertools.product((1, 9, 17, 33, 65, 129, 5000), (8, 4096, 57344), (16, 4096, 28672)):
        chosen = configuration_for(m, n, k)
        assert chosen.shared_bytes <= arch.HOPPER.block_shared_bytes and chosen.grid(
            m, n, 132
        ) % chosen.split == 0 < chosen.grid(m, n, 132)


@pytest.mark.thorough
@COMPILER
@pytest.mark.parametrize("chosen", CONFIGURATIONS, ids=str)
def test_configurations_compile_without_spills(chosen):
    found = cost(jit.compile_cubin("w8a8_gemm", chosen.source(torch.bfloat16), "sm_90a")[1])
    assert found["spills"] == 0 and found["stack"] == 0 and not found["serialized"]
    assert (
        chosen.shared_bytes <= arch.HOPPER.block_shared_bytes
        and found["registers"] * -(-chosen.threads * chosen.blocks // 128) * 128 <= 65536
    )


@pytest.mark.thorough
@COMPILER
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_other_kernels_compile_without_spills(target):
    sources = {
        "w8a8_mma": w8a8_gemm.mma_source(torch.bfloat16),
        "dequantize": w8a16_gemm.dequantize_source(torch.float16),
    }
    for name, source in sources.items():
        assert cost(jit.compile_cubin(name, source, target)[1])["spills"] == 0, name
    # float16 takes as many registers: it is compiled where the fewest are left, for each of the two kernels
    for columns, dtype in (
        *((n, torch.bfloat16) for n in w8a16_gemm.BLOCKS),
        (64, torch.float16),
        (128, torch.float16),
    ):
        sources = {"w8a16_mma": w8a16_gemm.mma_source(columns, dtype)} if columns <= 64 else {}
        if target == "sm_90a":
            sources["w8a16_gemm"] = w8a16_gemm.source(columns, dtype)
        for name, source in sources.items():
            found = cost(jit.compile_cubin(name, source, target)[1])
            assert found["spills"] == 0 and found["stack"] == 0 and not found["serialized"], (
                name,
                columns,
                dtype,
                found,
            )
