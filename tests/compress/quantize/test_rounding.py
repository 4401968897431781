"""GPTQ's codes and learned smoothing factors, each against an independent computation in float64."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilepress.cli.quantize import _statistics_text
from tilepress.compress.layers.groups import Group
from tilepress.compress.layers.moments import Moments
from tilepress.compress.quantize import gptq
from tilepress.compress.quantize.gptq import DAMPING, Rounding
from tilepress.compress.quantize.inputs import Input, Settings
from tilepress.compress.quantize.observers import Observer
from tilepress.compress.quantize.smoothing import learned_factors, smooth_factors
from tilepress.formats import TilepressError, int8


def _correlated(tokens: int, channels: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    mixed = torch.randn(channels, channels, generator=random) / channels**0.5
    return torch.randn(tokens, channels, generator=random) @ (mixed + 0.5 * torch.eye(channels))


def test_codes_are_those_of_the_plain_algorithm():
    """Column by column in float64, without blocks: Frantar et al. 2022, algorithm 1."""
    x, weight = (
        _correlated(600, 200).double(),
        torch.randn(40, 200, generator=torch.Generator().manual_seed(1)).double(),
    )
    hessian = x.t() @ x / len(x)
    scale = int8.weight_scale(weight.float(), "channel", torch.float32)
    order = hessian.diagonal().argsort(descending=True)
    damped = hessian + DAMPING * hessian.diagonal().mean() * torch.eye(200)
    inverse, left = torch.linalg.inv(damped[order][:, order]), weight[:, order].clone()
    upper, expected = torch.linalg.cholesky(inverse, upper=True), torch.empty(40, 200)
    for j in range(200):
        expected[:, order[j]] = (left[:, j] / scale[:, 0].double()).round().clamp(-128, 127).float()
        error = left[:, j] - expected[:, order[j]] * scale[:, 0]
        left[:, j:] -= error[:, None] / upper[j, j] * upper[j, j:]
    codes = Rounding(hessian.float(), "x").codes(weight.float(), scale)
    assert codes.dtype == torch.int8 and float((codes != expected).double().mean()) < 1e-3
    nearest = int8.quantize(weight, scale)
    fitted, rounded = (((c.double() * scale - weight) @ x.t()).norm() for c in (codes, nearest))
    assert fitted < 0.8 * rounded


@pytest.mark.parametrize("per", ["channel", "tensor"])
def test_channels_without_inputs_and_scales_of_tensors(per):
    hessian, weight = (
        torch.diag(torch.tensor([4.0, 0.0, 1.0, 0.0])),
        torch.tensor([[1.0, 2.0, 3.0, -4.0], [0, 0, 0, 0]]),
    )
    scale = int8.weight_scale(weight, per, torch.bfloat16)
    assert torch.equal(Rounding(hessian, "x").codes(weight, scale), int8.quantize(weight, scale))


def test_moments_that_cannot_be_factored_are_named():
    with pytest.raises(TilepressError, match="the input of model.x"):
        Rounding(torch.full((4, 4), torch.nan), "model.x")


@pytest.mark.parametrize("repeat", [(1, 1), (2, 4)])
def test_learned_factors_lower_the_error_of_outputs(repeat):
    """Inputs with channels that are large everywhere, others that are large in few tokens, and one token that dwarfs all."""
    x = _correlated(512, 64)
    x[:, 5] *= 40
    x[:, 23] *= 15
    x[::9, 40] *= 60
    x[3] *= 1e4
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(2))
    group, scheme = Group(("down",), "up", repeat=repeat), int8.Int8Scheme()
    typical = x.square().sum(-1).median()

    def error(factors: torch.Tensor) -> float:
        """The mean over tokens of what quantizing inputs and weights adds, relative to each token's output."""
        columns = group.spread(factors)
        rows, matrix = x.double() / columns, weight.double() * columns
        step = rows.abs().amax(1, keepdim=True) / 127.5
        row_step = matrix.abs().amax(1, keepdim=True) / 127
        found = ((rows / step).round() * step) @ ((matrix / row_step).round() * row_step).t()
        exact = x.double() @ weight.double().t()
        return float(((found - exact).norm(dim=1) / exact.norm(dim=1)).square().mean())

    token = x.square().sum(-1).clamp(min=typical).reciprocal()
    learned = learned_factors(x, weight, group, token, scheme, 1.0)
    assert learned.shape == (64 // repeat[0],) and bool((learned > 0).all())
    reach, columns = group.shared(x.abs().amax(0)), group.shared(weight.abs().amax(0))
    best = min(error(smooth_factors(reach, columns, alpha / 10)) for alpha in range(11))
    assert error(learned) < 0.9 * best < 0.9 * error(torch.ones_like(learned))


def test_a_sinks_values_are_told_and_do_not_rule_the_weights_of_tokens():
    settings = Settings(int8.Int8Scheme(), Observer(), "learn", "gptq", 0.0, None)
    item, linear, x = (
        Input(Group(("a",), None), settings, torch.float32, 0),
        torch.nn.Linear(64, 8),
        _correlated(256, 64),
    )
    x[0] *= 1e4
    item.start()
    item.see(x[None])
    item.end_window(x.square().sum(-1), counting=True)
    item.fold({"a": linear}, {})
    record = item.record({"a": "a.weight"})
    assert record["reach"] == float(x.abs().max())
    assert record["massive"] == pytest.approx(float(x.abs().max() / x.square().mean(1).median().sqrt()), rel=0.01)
    plain = Moments(64)
    plain.add(x[1:], "a")
    assert item.moments.norms.norm() < 3 * plain.norms.norm()
    assert "sink" in "".join(_statistics_text([record]))


def test_windows_that_wait_are_looked_at_as_they_were():
    """A card looks at many windows together; a layer may go on in place on what it showed, and the last ones are few."""
    settings, windows = (
        Settings(int8.Int8Scheme(), Observer(), "learn", "gptq", 0.0, None),
        _correlated(250, 64).split(50),
    )
    found = []
    for together in (1, 3 * 50 * 64):
        item = Input(Group(("a",), None), settings, torch.float32, 0)
        item.start()
        for window in windows:
            shown = window.clone()[None]
            item.see(shown)
            shown.zero_()
            item.end_window(window.square().sum(-1), counting=True, together=together)
        item.look(counting=True)
        found.append(item)
    assert (
        torch.equal(found[0].stats.rows, found[1].stats.rows) and found[0].stats.tokens == found[1].stats.tokens == 250
    )
    assert torch.equal(found[0].stats.histogram, found[1].stats.histogram) and found[0].typical == found[1].typical
    torch.testing.assert_close(found[0].moments.hessian(0.0), found[1].moments.hessian(0.0))


class _Launches(TorchDispatchMode):
    """Counts what a card would be given: ops that are no views."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += not op.is_view
        return op(*args, **(kwargs or {}))


def test_rounding_takes_few_launches():
    """A card waits for the host here: four for a column, and all weights of an input at once."""
    weight, hessian = torch.randn(48, 256), torch.eye(256)
    rounding, scale = Rounding(hessian, "x"), int8.weight_scale(weight, "channel", torch.float32)
    with _Launches() as launches:
        rounding.codes(weight, scale)
    assert launches.count < 4 * 256 + 40


@pytest.mark.gpu
def test_a_recorded_block_rounds_as_its_launches_do(monkeypatch):
    x, weight = _correlated(900, 300), torch.randn(64, 300, generator=torch.Generator().manual_seed(1))
    rounding, scale = Rounding((x.t() @ x / len(x)).cuda(), "x"), int8.weight_scale(weight, "channel", torch.float32)
    recorded = rounding.codes(weight.cuda(), scale.cuda())
    monkeypatch.setattr(gptq, "_recorded", lambda *like: gptq._round_columns)
    assert torch.equal(recorded, rounding.codes(weight.cuda(), scale.cuda()))


def test_factors_of_inputs_without_values_stay_finite():
    group = Group(("down",), "up")
    for x, weight in ((torch.zeros(8, 4), torch.ones(3, 4)), (torch.ones(8, 4), torch.zeros(3, 4))):
        found = learned_factors(x, weight, group, torch.ones(8), int8.Int8Scheme("tensor", "tensor"), 0.3)
        assert bool(torch.isfinite(found).all()) and bool((found > 0).all())
