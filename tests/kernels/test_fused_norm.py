"""Norms and the gated activation with floating results: the bits of transformers' own modules, and of the references on a card."""

import pytest
import torch
from support.kernel_costs import cost
from torch import nn
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP, LlamaRMSNorm

from tilepress.kernels import fused_norm, jit

ops = torch.ops.tilepress
COMPILER = pytest.mark.skipif(jit.missing() is not None, reason="needs cuda-core")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def numbers(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def calls(n, tokens, dtype):
    x, residual, gate_up = (numbers(*tokens, m, dtype=dtype, seed=i) for i, m in enumerate((n, n, 2 * n)))
    weight, bias = numbers(n, dtype=dtype, seed=3), numbers(n, dtype=dtype, seed=4)
    yield "rms_norm", (x, weight, 1e-5)
    yield "add_rms_norm", (x, residual, weight, 1e-5)
    yield "layer_norm", (x, weight, bias, 1e-5)
    yield "add_layer_norm", (x, residual, weight, bias, 1e-5)
    yield "silu_mul", (gate_up,)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_transformers_modules(dtype):
    x, residual = numbers(3, 7, 48, dtype=dtype), numbers(3, 7, 48, dtype=dtype, seed=1)
    rms, layer = LlamaRMSNorm(48, 1e-5).to(dtype), nn.LayerNorm(48).to(dtype)
    mlp = LlamaMLP(LlamaConfig(hidden_size=48, intermediate_size=40, num_attention_heads=4)).to(dtype)
    for parameter in (*rms.parameters(), *layer.parameters()):
        parameter.data = numbers(48, dtype=dtype, seed=2)
    with torch.inference_mode():
        assert torch.equal(ops.rms_norm(x, rms.weight, 1e-5), rms(x))
        assert torch.equal(ops.layer_norm(x, layer.weight, layer.bias, 1e-5), layer(x))
        for found, norm in (
            (ops.add_rms_norm(x, residual, rms.weight, 1e-5), rms),
            (ops.add_layer_norm(x, residual, layer.weight, layer.bias, 1e-5), layer),
        ):
            assert torch.equal(found[0], norm(x + residual)) and torch.equal(found[1], x + residual)
        gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        assert torch.equal(mlp.down_proj(ops.silu_mul(torch.cat([gate, up], -1))), mlp(x))


def test_ops_are_well_formed():
    for name, args in calls(24, (2, 3), torch.float32):
        torch.library.opcheck(getattr(ops, name).default, args)
    turned = numbers(9, 4).t()  # what compilers are told of layouts holds
    for out in (*ops.add_rms_norm(turned, turned, numbers(9), 1e-5), ops.rms_norm(turned, numbers(9), 1e-5)):
        assert out.is_contiguous()
    with pytest.raises(ValueError, match="9 columns"):
        ops.silu_mul(numbers(4, 9))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("n", [1, 5, 100, 1000, 4096, 5120, 8184, 14336, 32768])
def test_kernels_against_references(n, dtype):
    """Within a rounding of each, and the sums to the bit."""
    assert fused_norm.why_not(torch.device("cuda"), dtype, n) is None
    for tokens in ((1,), (2, 5), (300,)):
        for name, args in calls(n, tokens, dtype):
            found = getattr(ops, name)(*(a.cuda() if isinstance(a, torch.Tensor) else a for a in args))
            expected = getattr(ops, name)(*args)
            pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
            for i, (ours, theirs) in enumerate(pairs):
                step = 2**-7 if dtype == torch.bfloat16 else 2**-10
                torch.testing.assert_close(ours.cpu(), theirs, rtol=0 if i else 2 * step, atol=0 if i else step)
                if not i:
                    assert float((ours.cpu() == theirs).float().mean()) > 0.97, name


@pytest.mark.thorough
@COMPILER
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_kernel_keeps_rows_in_registers(arch):
    for op, n, vectors in ((1, 4096, True), (2, 8192, True), (4, 8192, True), (5, 14336, True), (3, 1000, False)):
        for is_full in (False, True):
            chosen = fused_norm.configuration_of(op, n, is_full)
            source = chosen.source(op, False, vectors, torch.bfloat16, codes=False)
            found = cost(jit.compile_cubin("fused_quant", source, arch)[1])
            assert found["spills"] == 0, (op, n, found)
