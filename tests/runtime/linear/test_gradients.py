"""Gradients through packed linears: those of the same layer with a dense weight, or an error where there are none."""

import pytest
import torch
from support.artifacts import quantize

from tilepress.formats import TilepressError, tiled_bitmap, tiled_csl
from tilepress.formats.int8 import Int8Scheme
from tilepress.runtime.linear.int8 import Int8Linear
from tilepress.runtime.linear.packed import packed_linear
from tilepress.runtime.loader import load

ROWS, COLS = 200, 136  # no multiples of a tile
IDS = torch.arange(20).view(2, 10)


def sparse_weight(rows: int = ROWS, cols: int = COLS) -> torch.Tensor:
    weight = torch.randn(rows, cols)
    return (weight * (torch.rand(rows, cols) < 0.4)).bfloat16()


def layer_of(kind: str, bias: bool, device: str = "cpu") -> tuple[torch.nn.Module, torch.Tensor]:
    """A layer, and its weight in float64 as nothing of ours unpacks it."""
    weight = sparse_weight()
    dtype = torch.float32 if bias else None
    if kind == "tiled-csl":
        made = packed_linear(tiled_csl.pack(weight.to(device)), dtype)
    elif kind.startswith("tiled-bitmap"):
        packed = tiled_bitmap.pack(weight.to(device), int(kind[-1]))
        made = packed_linear(packed, dtype)
    else:
        scale = torch.rand(ROWS) + 0.5
        codes = torch.randint(-127, 128, (ROWS, COLS), dtype=torch.int8)
        weight = codes.double() * scale.double()[:, None]
        if kind == "int8 bitmap":
            made = packed_linear(tiled_bitmap.pack(codes.to(device), 1, scale.to(device)), dtype)
        else:
            made = Int8Linear(
                ROWS, COLS, Int8Scheme("channel", "none"), torch.float32, bias, transposed="Conv1D" in kind
            )
            made.weight = (codes.t()[None].contiguous() if made.transposed else codes).to(device)
            made.weight_scale = scale[:, None].to(device)
    if bias:
        made.bias = torch.nn.Parameter(torch.randn(ROWS, device=device))
    return made, weight.double()


KINDS = ["tiled-csl", "tiled-bitmap 1", "tiled-bitmap 2", "int8 bitmap", "int8 weights", "int8 weights of a Conv1D"]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_dense_layer(kind, bias):
    layer, weight = layer_of(kind, bias)
    x, seen = torch.randn(3, 5, COLS, requires_grad=True), torch.randn(3, 5, ROWS)
    y = layer(x)
    assert y.requires_grad
    (y * seen).sum().backward()
    theirs = x.detach().double().requires_grad_()
    their_bias = layer.bias.detach().double().requires_grad_() if bias else None
    (torch.nn.functional.linear(theirs, weight, their_bias) * seen.double()).sum().backward()
    torch.testing.assert_close(x.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5 * theirs.grad.abs().max().item())
    if bias:
        torch.testing.assert_close(layer.bias.grad.double(), their_bias.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_alone_is_trained_too(kind):
    layer, _ = layer_of(kind, bias=True)
    layer(torch.randn(4, COLS)).sum().backward()
    torch.testing.assert_close(layer.bias.grad, torch.full((ROWS,), 4.0))
    layer.bias.requires_grad_(False)
    assert not layer(torch.randn(4, COLS)).requires_grad


def test_gradients_keep_the_dtype_of_activations():
    layer, weight = layer_of("tiled-csl", bias=False)
    x = torch.randn(7, COLS).bfloat16().requires_grad_()
    layer(x).sum().backward()
    expected = weight.sum(0).expand(7, -1)
    assert x.grad.dtype == torch.bfloat16
    torch.testing.assert_close(x.grad.double(), expected, rtol=2**-7, atol=2**-7 * expected.abs().max().item())


def test_gradients_of_a_function_that_is_linear_are_checked_numerically():
    layer, _ = layer_of("tiled-bitmap 1", bias=True)
    layer.bias.data = layer.bias.data.double()
    x = torch.randn(2, COLS, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, x, fast_mode=True)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS[:-1])
def test_gradients_on_a_card(kind):
    layer, weight = layer_of(kind, bias=False, device="cuda")
    x = torch.randn(9, COLS, device="cuda").bfloat16().requires_grad_()
    layer(x).sum().backward()
    expected = weight.sum(0).expand(9, -1)
    torch.testing.assert_close(x.grad.cpu().double(), expected, rtol=2**-6, atol=2**-6 * expected.abs().max().item())


@pytest.mark.parametrize("activations", ["token", "tensor-dynamic"])
def test_quantized_activations_raise_instead_of_wrong_gradients(checkpoint_of, tmp_path, activations):
    quantize(checkpoint_of("llama"), tmp_path / "out", activations=activations)
    model = load(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        expected = model(IDS).logits
    out = model(IDS, labels=IDS)
    assert torch.equal(out.logits, expected)  # running it with gradients on is no error
    with pytest.raises(TilepressError, match="no gradient"):
        out.loss.backward()


def test_a_single_layer_raises_too():
    layer = Int8Linear(ROWS, COLS, Int8Scheme("channel", "tensor"), torch.float32, False)
    layer.weight, layer.weight_scale = torch.ones(ROWS, COLS, dtype=torch.int8), torch.ones(ROWS, 1)
    layer.input_scale = torch.ones(1)
    x = torch.randn(2, COLS, requires_grad=True)
    with pytest.raises(TilepressError, match="no gradient"):
        layer(x).sum().backward()
    assert not layer(x.detach()).requires_grad
