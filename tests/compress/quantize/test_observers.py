"""Ranges of observers against brute force on the values themselves."""

import numpy as np
import pytest
import torch

from tilepress.compress.quantize.observers import InputStats, Observer, clipped_share
from tilepress.formats import TilepressError, UsageError, int8


def heavy(rows=400, cols=64, seed=0, shift=0.0):
    """Normal values with a few far out."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator)
    x[torch.rand(rows, cols, generator=generator) < 0.002] *= 25
    return x + shift


def seen(x, pieces=7, max_rows=32):
    stats = InputStats(max_rows, seed=0)
    for piece in x.split(len(x) // pieces):
        stats.add(piece[None], "layer")
    return stats


def chosen(x, observer, asymmetric):
    stats = seen(x)
    return observer.range(stats.histogram, float(stats.low.min()), float(stats.high.max()), asymmetric)


def error(x, low, high, asymmetric):
    scale, zero_point = int8.static_scale(low, high, asymmetric, torch.float32)
    back = int8.dequantize(int8.quantize(x, scale, zero_point), scale, zero_point)
    return float((back.double() - x.double()).square().mean())


@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_minmax(shift):
    x = heavy(shift=shift)
    low, high = float(x.min()), float(x.max())
    assert chosen(x, Observer("minmax"), True) == (low, high)
    assert chosen(x, Observer("minmax"), False) == (-max(-low, high), max(-low, high))


@pytest.mark.parametrize("percentile", [99.9, 99.99, 99.9999])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_percentile(percentile, asymmetric):
    x = heavy(shift=0.5)
    low, high = chosen(x, Observer("percentile", percentile), asymmetric)
    flat, outside = x.flatten().double().numpy(), round((1 - percentile / 100) * x.numel(), 6)
    if asymmetric:
        ordered, cut = np.sort(flat), int(outside / 2)
        assert low == pytest.approx(ordered[cut], rel=2e-3) and high == pytest.approx(ordered[-1 - cut], rel=2e-3)
    else:
        assert low == -high and high == pytest.approx(np.sort(np.abs(flat))[-1 - int(outside)], rel=2e-3)


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("shift", [0.0, 2.0, -40.0])
def test_mse_is_close_to_the_best_of_all_ranges(asymmetric, shift):
    x = heavy(shift=shift)
    found = error(x, *chosen(x, Observer("mse"), asymmetric), asymmetric)
    low, high = float(x.min()), float(x.max())
    factors = np.linspace(0.02, 1.0, 120)
    if asymmetric:
        best = min(error(x, low * a, high * b, True) for a in factors[::4] for b in factors[::4])
    else:
        full = max(-low, high)
        best = min(error(x, -full * f, full * f, False) for f in factors)
    assert found <= 1.15 * best
    assert found <= error(x, low, high, asymmetric) * 1.001


def test_mse_on_values_without_outliers_takes_nearly_everything():
    x = torch.rand(200, 50) * 2 - 1
    low, high = chosen(x, Observer("mse"), False)
    assert 0.95 <= high <= 1.0 and low == -high


@pytest.mark.parametrize("name", ["minmax", "percentile", "mse"])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_constant_and_zero_inputs(name, asymmetric):
    for x in (torch.zeros(20, 8), torch.full((20, 8), 0.75), torch.full((20, 8), -2.0)):
        low, high = chosen(x, Observer(name), asymmetric)
        scale, zero_point = int8.static_scale(low, high, asymmetric, torch.bfloat16)
        back = int8.dequantize(int8.quantize(x, scale, zero_point), scale.float(), zero_point)
        torch.testing.assert_close(back, x, rtol=0.01, atol=0.0)


def test_statistics_are_of_everything_and_rows_are_a_uniform_sample():
    x = heavy(1000, 16)
    stats = seen(x, pieces=9, max_rows=100)
    assert stats.tokens == 1000 and int(stats.histogram.sum()) == 16000
    assert torch.equal(stats.low, x.amin(0)) and torch.equal(stats.high, x.amax(0))
    rows = stats.rows
    where = (rows[:, None] == x[None]).all(-1).float().argmax(1)
    assert len(rows) == 100 and torch.equal(x[where], rows) and len(set(where.tolist())) == 100
    assert 350 < float(where.float().mean()) < 650  # neither the first nor the last ones
    assert torch.equal(rows, seen(x, pieces=9, max_rows=100).rows)


def test_clipped_share_counts_values():
    x = heavy()
    stats = seen(x)
    assert clipped_share(stats.histogram, -3.0, 2.0) == pytest.approx(
        float(((x < -3) | (x > 2)).float().mean()), abs=2e-4
    )


def test_tensors_together_are_seen_as_if_they_came_one_by_one():
    """Extremes, histogram, and the sample of rows, before and after it is full."""
    parts = heavy(300).split([120, 1, 79, 100])
    alone, together = InputStats(64, seed=3), InputStats(64, seed=3)
    for part in parts:
        alone.add(part, "layer")
    for several in (parts[:3], parts[3:]):
        together.add(torch.cat(several), "layer", lengths=[len(part) for part in several])
    assert together.tokens == 300 and torch.equal(together.rows, alone.rows)
    for name in ("low", "high", "histogram"):
        assert torch.equal(getattr(together, name), getattr(alone, name))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_activations_name_the_layer(bad):
    x = torch.ones(4, 8)
    x[2, 3] = bad
    with pytest.raises(TilepressError, match=r"model\.layers\.3\.mlp"):
        InputStats(4, 0).add(x, "model.layers.3.mlp")


def test_settings_out_of_range():
    for settings in (("histogram",), ("percentile", 99.0), ("percentile", 100.0)):
        with pytest.raises(UsageError):
            Observer(*settings)
