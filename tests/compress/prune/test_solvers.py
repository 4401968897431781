"""Wanda, SparseGPT and ADMM on small matrices: against tiny implementations of their own, on Hessians that are singular, and exact to the element.

On a card they are compared with the CPU, and must not spend their time on launches."""

import time

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilepress.compress.layers.moments import Moments, cholesky, inverse_factor
from tilepress.compress.prune import admm, sparsegpt, wanda
from tilepress.compress.prune.magnitude import smallest
from tilepress.formats import TilepressError

ROWS, COLS, TOKENS = 24, 40, 400
SOLVERS = {"sparsegpt": sparsegpt.prune, "admm": admm.prune}


def problem(tokens=TOKENS, seed=0):
    """A weight, correlated inputs and their moments."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(COLS, COLS, generator=generator) / 6 + torch.eye(COLS)
    x = torch.randn(tokens, COLS, generator=generator) @ mixing
    moments = Moments(COLS)
    for part in x.split(150):
        moments.add(part, "x")
    return torch.randn(ROWS, COLS, generator=generator), x, moments


def plain_sparsegpt(weight: np.ndarray, hessian: np.ndarray, zeros: int, block: int) -> np.ndarray:
    """SparseGPT in float64, by definition: after each column the inverse Hessian of the columns that are left, by elimination."""
    weight, inverse = weight.copy(), np.linalg.inv(hessian)
    rows, columns = weight.shape
    done, pruned = 0, np.zeros((rows, columns), bool)
    for j in range(columns):
        if j % block == 0:  # scores of a block with the inverses its columns will have
            last, ahead = min(j + block, columns), inverse.copy()
            scores = np.empty((rows, last - j))
            for k in range(j, last):
                scores[:, k - j] = weight[:, k] ** 2 / ahead[k, k]
                ahead = ahead - np.outer(ahead[:, k], ahead[k]) / ahead[k, k]
            count = round(zeros * last / columns) - done
            done += count
            chosen = np.argsort(scores, axis=None, kind="stable")[:count]
            view = pruned[:, j:last].copy().reshape(-1)
            view[chosen] = True
            pruned[:, j:last] = view.reshape(rows, last - j)
        lost = np.where(pruned[:, j], weight[:, j], 0.0)
        weight[:, j:] -= np.outer(lost / inverse[j, j], inverse[j, j:])
        weight[pruned[:, j], j] = 0.0
        inverse = inverse - np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return weight


@pytest.mark.parametrize("block", [7, 16, 64])
@pytest.mark.parametrize("zeros", [0, 1, 333, 480, 777])
def test_sparsegpt_is_what_the_definition_gives(block, zeros):
    weight, _, moments = problem()
    hessian = moments.hessian(0.01)
    ours = sparsegpt.prune(weight, hessian, zeros, block=block)
    expected = torch.from_numpy(plain_sparsegpt(weight.double().numpy(), hessian.double().numpy(), zeros, block))
    assert torch.equal(ours == 0, expected == 0) and int((ours == 0).sum()) == zeros
    torch.testing.assert_close(ours.double(), expected, rtol=1e-3, atol=1e-4)


def test_moments_are_those_of_the_inputs():
    _, x, moments = problem()
    expected = x.double().t() @ x.double() / TOKENS
    torch.testing.assert_close(moments.hessian(0.0).double(), expected + 1e-12 * torch.eye(COLS), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(moments.norms.double(), expected.diagonal().sqrt(), rtol=1e-6, atol=0)
    added = moments.hessian(0.1).double() - expected
    torch.testing.assert_close(added, 0.1 * expected.diagonal().mean() * torch.eye(COLS).double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 63, 65, 300])
def test_moments_of_bfloat16_inputs_of_any_number(tokens):
    """Which are filled up with tokens of zeros."""
    x = torch.randn(tokens, COLS, generator=torch.Generator().manual_seed(0)).bfloat16()
    moments = Moments(COLS)
    moments.add(x, "x")
    expected = x.double().t() @ x.double() / tokens
    assert moments.tokens == tokens
    torch.testing.assert_close(moments.hessian(0.0).double(), expected, rtol=1e-5, atol=1e-5)


def test_the_target_is_the_least_squares_fit_to_the_dense_outputs():
    weight, x, _ = problem()
    z = x + 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) + 0.2 * x.roll(1, 1)
    moments = Moments(COLS, cross=True)
    moments.add(z, "z", x)
    inverse = inverse_factor(moments.hessian(0.0))
    ours = moments.target(weight, inverse, 1.0)
    expected = torch.linalg.lstsq(z.double(), (x @ weight.t()).double()).solution.t()
    torch.testing.assert_close(ours.double(), expected, rtol=1e-3, atol=1e-3)
    halfway = moments.target(weight, inverse, 0.5)
    torch.testing.assert_close(halfway, (weight + ours) / 2, rtol=1e-4, atol=1e-4)


def test_the_factor_of_the_inverse():
    hessian = problem()[2].hessian(0.01)
    upper = inverse_factor(hessian)
    assert torch.equal(upper, upper.triu()) and bool((upper.diagonal() > 0).all())
    torch.testing.assert_close((upper.t() @ upper).double(), hessian.double().inverse(), rtol=1e-4, atol=1e-4)


def test_each_solver_is_better_than_the_one_before():
    weight, x, moments = problem()
    hessian, zeros = moments.hessian(0.01), 600
    magnitude = weight.masked_fill(smallest(weight.abs(), zeros), 0.0)

    def outputs(pruned):
        return float(((pruned - weight) @ x.t()).square().sum())

    errors = [
        outputs(magnitude),
        outputs(wanda.prune(weight, moments.norms, zeros)),
        outputs(sparsegpt.prune(weight, hessian, zeros, block=8)),
        outputs(admm.prune(weight, hessian, zeros)),
    ]
    assert errors[1] < errors[0] and errors[2] < 0.9 * errors[1] and errors[3] < 0.7 * errors[2], errors


def test_refit_is_the_best_on_its_mask():
    weight, _, moments = problem()
    hessian = moments.hessian(0.01)
    start = sparsegpt.prune(weight, hessian, 600)
    ours = admm.refit(weight, hessian, start, start != 0, steps=60)
    h = hessian.double()
    for row in range(ROWS):
        kept = start[row] != 0
        expected = torch.linalg.solve(h[kept][:, kept], h[kept] @ weight[row].double())
        torch.testing.assert_close(ours[row, kept].double(), expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(ours == 0, start == 0)


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("tokens", [1, 5, 400])
def test_singular_hessians_and_dead_columns(name, tokens):
    weight, x, _ = problem()
    x = x[:tokens].clone()
    x[:, [3, 17, 39]] = 0.0
    moments = Moments(COLS)
    moments.add(x, "x")
    pruned = SOLVERS[name](weight, moments.hessian(0.01), 500)
    assert bool(torch.isfinite(pruned).all()) and int((pruned == 0).sum()) == 500
    if tokens == 400:  # what does nothing is pruned first
        assert bool((pruned[:, [3, 17, 39]] == 0).all())


@pytest.mark.parametrize("name", SOLVERS)
def test_zeros_of_the_source_stay(name):
    weight, _, moments = problem()
    weight[torch.rand(ROWS, COLS, generator=torch.Generator().manual_seed(3)) < 0.6] = 0.0
    stay, before = weight == 0, int((weight == 0).sum())
    for zeros in (before - 100, before, before + 200):
        pruned = SOLVERS[name](weight, moments.hessian(0.01), zeros, stay)
        assert bool((pruned[stay] == 0).all()) and int((pruned == 0).sum()) == max(zeros, before)


@pytest.mark.parametrize("zeros", [0, 1, 24, 500, 959])
def test_wanda_counts_by_row(zeros):
    weight, _, moments = problem()
    pruned = wanda.prune(weight, moments.norms, zeros)
    by_row = (pruned == 0).sum(1)
    assert int(by_row.sum()) == zeros and int(by_row.max() - by_row.min()) <= 1
    scores = weight.abs() * moments.norms
    for row in range(ROWS):
        cut = pruned[row] == 0
        assert not bool(cut.any()) or bool(cut.all()) or scores[row, cut].max() <= scores[row, ~cut].min()
    assert torch.equal(pruned[pruned != 0], weight[pruned != 0])


@pytest.mark.parametrize("zeros", [100, 300, 333, 480, 777, 960])
@pytest.mark.parametrize("dead", [False, True])
def test_wanda_counts_zeros_of_the_source(zeros, dead):
    weight, _, moments = problem()
    weight[3, :35] = weight[7] = 0.0
    weight[11, 5:17] = -0.0
    norms = moments.norms.index_fill(0, torch.tensor([0, 1, 2]), 0.0) if dead else moments.norms
    before = (weight == 0).sum(1)
    pruned = wanda.prune(weight, norms, zeros)
    by_row = (pruned == 0).sum(1)
    assert int(by_row.sum()) == max(zeros, int(before.sum())) and bool((by_row >= before).all())
    filled = by_row[by_row > before]
    if zeros > int(before.sum()):  # all that grew are alike, the others had as many
        assert int(filled.max() - filled.min()) <= 1 and int(by_row.min()) >= int(filled.max()) - 1
    assert bool((pruned[weight == 0] == 0).all()) and torch.equal(pruned[pruned != 0], weight[pruned != 0])
    assert torch.equal(pruned, wanda.prune(weight, norms, zeros))


def test_smallest_is_exact_with_ties():
    scores = torch.tensor([[2.0, 1.0, 1.0], [1.0, 0.0, 1.0]])
    assert smallest(scores, 3).tolist() == [[False, True, True], [False, True, False]]
    assert not smallest(scores, 0).any() and smallest(scores, 6).all()


def test_a_matrix_that_cannot_be_factored_is_named():
    with pytest.raises(TilepressError, match="of layer 7"):
        cholesky(-torch.eye(4), "layer 7")
    assert bool(cholesky(torch.ones(2, 2)).isfinite().all())  # singular: a little more on the diagonal


def test_a_column_takes_few_operations():
    """Each is a launch on a card, and large models have a million columns."""

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += not func.is_view
            return func(*args, **kwargs or {})

    weight, hessian = torch.randn(4, 512), torch.eye(512)
    with Counter() as counter:
        sparsegpt.prune(weight, hessian, 1000)
    assert counter.count < 3 * 512


@pytest.mark.gpu
@pytest.mark.parametrize("name", SOLVERS)
def test_a_card_gives_what_the_cpu_does(name):
    weight, _, moments = problem()
    hessian = moments.hessian(0.01)
    here, *there = (SOLVERS[name](weight.to(device), hessian.to(device), 500) for device in ("cpu", "cuda", "cuda"))
    assert torch.equal(*there) and int((there[0] == 0).sum()) == 500
    there = there[0].cpu()
    assert float(((here == 0) != (there == 0)).float().mean()) < 0.02
    assert admm.error(weight, hessian, there) == pytest.approx(admm.error(weight, hessian, here), rel=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_on_a_card(dtype):
    _, x, _ = problem()
    z, x = (x + 0.1 * x.roll(1, 1)).to(dtype), x.to(dtype)
    weight = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(5))
    hessians, targets = [], []
    for device in ("cpu", "cuda"):
        moments = Moments(COLS, cross=True)
        moments.add(z.to(device), "z", x.to(device))
        hessians.append(moments.hessian(0.01).cpu())
        inverse = inverse_factor(moments.hessian(0.01))
        targets.append(moments.target(weight.to(device), inverse, 0.5).cpu())
    torch.testing.assert_close(*hessians, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*targets, rtol=0.02, atol=0.02)


@pytest.mark.gpu
def test_large_weights_take_little_time_on_a_card():
    weight = torch.randn(4096, 4096, device="cuda")
    hessian = weight.t() @ weight / 4096 + torch.eye(4096, device="cuda")
    sparsegpt.prune(weight, hessian, weight.numel() // 2)
    torch.cuda.synchronize()
    started = time.perf_counter()
    sparsegpt.prune(weight, hessian, weight.numel() // 2)
    torch.cuda.synchronize()
    assert time.perf_counter() - started < 1.0
