"""Half precision on CPUs without instructions for it: fast products give the values of slow ones, and only while a model runs."""

import pytest
import torch
from support.decoding import decoded

import tilepress
from tilepress.eval import perplexity
from tilepress.runtime import half
from tilepress.runtime.half import fast_products


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Names of the replaced ops that ran, on a CPU that is slow in half precision."""
    found, make = [], half._in_float32

    def spied(name, left):
        product = make(name, left)
        return lambda *args, **scales: found.append(name) or product(*args, **scales)

    monkeypatch.setattr(half, "is_slow", lambda dtype, device: dtype in half._HALF)
    monkeypatch.setattr(half, "_in_float32", spied)
    return found


def whole(*shape):
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(sum(shape))).double()


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_are_rounded_once(calls, rows, dtype):
    """Sums of whole numbers are exact, so that there is one right answer."""
    a, b, c = whole(rows, 300), whole(300, 24), whole(24)
    many, others = whole(3, rows, 300), whole(3, 300, 24)
    cases = {
        "mm": (torch.mm, (a, b), {}, a @ b),
        "addmm": (torch.addmm, (c, a, b), {"beta": 2, "alpha": 0.5}, 2 * c + a @ b / 2),
        "bmm": (torch.bmm, (many, others), {}, many @ others),
        "baddbmm": (torch.baddbmm, (c, many, others), {"alpha": 2}, c + 2 * (many @ others)),
    }
    layer = many @ b + c
    with fast_products(torch.bfloat16, "cpu"):
        for name, (op, args, scales, exact) in cases.items():
            found = op(*(x.to(dtype) for x in args), **scales)
            assert torch.equal(found, exact.to(dtype)) and calls == [name]
            calls.clear()
        found = torch.nn.functional.linear(many.to(dtype), b.t().to(dtype), c.to(dtype))
        assert torch.equal(found, layer.to(dtype)) and calls
    calls.clear()
    a.to(dtype) @ b.to(dtype)
    assert not calls


def test_gradients(calls):
    x, w = whole(9, 20).bfloat16().requires_grad_(), whole(20, 6).bfloat16().requires_grad_()
    with fast_products(torch.bfloat16, "cpu"):
        (x @ w).float().sum().backward()
    assert calls == ["mm"] * 3
    assert torch.equal(x.grad, w.sum(1).expand(9, 20)) and torch.equal(w.grad, x.sum(0)[:, None].expand(20, 6))


def test_measuring_and_decoding_compute_so(calls, checkpoint_of):
    source, ids = checkpoint_of("llama"), torch.arange(30)[None]
    model = tilepress.load(source)
    found = perplexity._logits(model, ids)
    assert len(calls) > 7 * model.config.num_hidden_layers and half._library is None
    wide = perplexity._logits(tilepress.load(source, dtype=torch.float32), ids)
    torch.testing.assert_close(found.float(), wide, rtol=0.05, atol=0.05)
    with pytest.raises(IndexError):
        perplexity._logits(model, torch.full((1, 30), 1 << 40))
    assert half._library is None
    calls.clear()
    assert len(decoded(model, [[3, 4, 5, 6, 7, 8]], 3)[0]) == 3 and calls and half._library is None
    calls.clear()
    model(ids)
    assert not calls
