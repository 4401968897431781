"""Selection against numpy's stable sort: counts to the element, ties in order, every dtype."""

import numpy as np
import pytest
import torch

from tilepress.compress.prune.magnitude import Histogram, layer_threshold, prune, prune_rows
from tilepress.formats import TilepressError

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def weight(dtype, rows=37, cols=53, seed=0):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)


def expected(x: torch.Tensor, count: int) -> np.ndarray:
    """What is left when the `count` smallest magnitudes go, ties by position: a stable argsort in float64."""
    flat = x.double().numpy().reshape(-1).copy()
    flat[np.argsort(np.abs(flat), kind="stable")[:count]] = 0
    return flat.reshape(x.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 2, 700, 1176, 1960, 1961])
def test_layer_prunes_exactly_the_smallest(dtype, count):
    x = weight(dtype)
    out, stats = prune(x, layer_threshold(x, count, "w"))
    np.testing.assert_array_equal(out.double().numpy(), expected(x, count))
    assert stats.zeros == count
    assert stats.error == pytest.approx(
        (float((x.double() - out.double()).norm()) / float(x.double().norm())), abs=1e-3
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_fall_in_storage_order(dtype):
    x = torch.tensor([[1.0, -1.0, 1.0, 2.0], [1.0, 1.0, -1.0, 0.5]], dtype=dtype)
    out, stats = prune(x, layer_threshold(x, 4, "w"))
    assert out.tolist() == [[0.0, 0.0, 0.0, 2.0], [1.0, 1.0, -1.0, 0.0]]
    assert stats.zeros == 4


def test_large_weight_crosses_chunks():
    x = torch.randint(-3, 4, (2100, 1100), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    count = 1_500_000
    out, stats = prune(x, layer_threshold(x, count, "w"))
    assert stats.zeros == count
    np.testing.assert_array_equal(out.double().numpy(), expected(x, count))


def test_zeros_that_are_there_already_stay_and_lose_their_sign():
    x = torch.tensor([[0.0, -0.0, 3.0, -0.0, 1.0]], dtype=torch.bfloat16)
    out, stats = prune(x, layer_threshold(x, 1, "w"))
    assert out.tolist() == [[0.0, 0.0, 3.0, 0.0, 1.0]] and stats.zeros == 3
    assert out.view(torch.int16).tolist() == [[0, 0, 0x4040, 0, 0x3F80]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 26, 53])
def test_rows(dtype, count):
    x = weight(dtype)
    x[3] = 1.0  # a row of nothing but ties
    out, stats = prune_rows(x, count, "w")
    for row in range(x.shape[0]):
        np.testing.assert_array_equal(out[row].double().numpy(), expected(x[row : row + 1], count)[0])
    assert stats.zeros == count * x.shape[0]


@pytest.mark.parametrize("wide", [False, True])
def test_histogram_over_several_weights_finds_the_global_threshold(wide):
    parts = [
        weight(torch.bfloat16, seed=1),
        weight(torch.bfloat16, 11, 200, seed=2),
        weight(torch.bfloat16, 5, 5, seed=3),
    ]
    magnitudes = np.sort(np.abs(np.concatenate([part.double().numpy().ravel() for part in parts])), kind="stable")
    for count in (1, 1000, 3000, magnitudes.size):
        total = Histogram(wide)
        for part in parts:
            total.add(part, "w")
        key, ties = total.locate(count)
        if wide:
            fine = Histogram(wide, key)
            for part in parts:
                fine.add(part, "w")
            low, ties = fine.locate(ties)
            value = torch.tensor(key << 16 | low, dtype=torch.int32).view(torch.float32).item()
        else:
            value = torch.tensor(key, dtype=torch.int16).view(torch.bfloat16).double().item()
        assert value == magnitudes[count - 1]
        assert ties == count - int(np.searchsorted(magnitudes, value))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_is_refused_by_name(dtype, bad):
    x = weight(dtype)
    x[7, 7] = bad
    with pytest.raises(TilepressError, match="mlp.w has non-finite"):
        layer_threshold(x, 10, "mlp.w")
    with pytest.raises(TilepressError, match="mlp.w has non-finite"):
        prune_rows(x, 10, "mlp.w")
