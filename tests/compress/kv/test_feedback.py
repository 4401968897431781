"""Feedback of keys' rounding errors: what it says by normal equations, and that errors that queries see become smaller."""

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard

from tilepress.compress.kv import search as kv_search
from tilepress.compress.kv.attention import AttentionShape, LayerSeen
from tilepress.compress.kv.feedback import DAMP, feedback_for
from tilepress.formats.kv_int4 import FEEDBACK_ONE, KVFormat, fake_quantize, feedback_matrix, feeds_forward


def uneven(rows: int, dim: int, power: float, seed: int) -> torch.Tensor:
    """Return rows [rows, dim] whose principal components differ in size, in directions of no channel."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(dim, dim, generator=generator)).Q
    return torch.randn(rows, dim, generator=generator) * torch.arange(1, dim + 1).float() ** -power @ turn


@pytest.mark.parametrize("rotate", [False, True])
def test_it_is_what_makes_up_for_a_block_with_the_channels_behind_it(rotate):
    dim, size = 64, 8
    moments = torch.stack([(x.mT @ x).double() for x in (uneven(500, dim, 0.5, 1), uneven(500, dim, 0.2, 2))])
    scale = torch.rand(2, dim, generator=torch.Generator().manual_seed(0)) + 0.5
    words = feedback_for(moments, scale, rotate)
    assert words.dtype == torch.int8 and words.shape == (2, dim // 4, dim, 4) and feeds_forward(words)
    turn = hadamard(dim) / dim**0.5 if rotate else np.eye(dim)
    for head in range(2):
        scaled = np.diag(scale[head].double().numpy())
        metric = turn @ scaled @ moments[head].numpy() @ scaled @ turn
        metric = metric / np.diag(metric).mean() + DAMP * np.eye(dim)
        matrix = feedback_matrix(words)[head].numpy()
        for end in range(size, dim, size):
            wanted = np.linalg.solve(metric[end:, end:], metric[end:, end - size : end]) * FEEDBACK_ONE
            assert np.abs(np.clip(wanted, -127, 127) - matrix[end:, end - size : end]).max() <= 0.5 + 1e-6


@pytest.mark.parametrize("form", [KVFormat(64), KVFormat(64, 4, 32), KVFormat(128, 4, 0, True)], ids=str)
def test_errors_move_where_queries_do_not_look(form):
    """Half of the squared error of scores goes, of other keys and queries than those that it was made from; the keys' own error grows."""
    dim = form.head_dim
    queries, keys = uneven(4000, dim, 1.0, 1), torch.randn(400, 1, dim, generator=torch.Generator().manual_seed(3))
    fixed = torch.tensor([0.4, -3.0]).half().expand(1, 1, 2) if form.static else None
    rotate = not form.static
    words = feedback_for((queries[:2000].mT @ queries[:2000])[None].double(), torch.ones(1, dim), rotate)
    channels = torch.stack([torch.zeros(1, dim), torch.ones(1, dim), torch.ones(1, dim)])
    errors = []
    for fed in (None, words):
        off = fake_quantize(keys, form, channels, fixed, 1.0, rotate, form.refits, fed) - keys
        errors.append((float((off[:, 0] @ queries[2000:].mT).square().mean()), float(off.square().mean())))
    assert errors[1][0] < 0.5 * errors[0][0] and errors[1][1] > errors[0][1]


@pytest.mark.parametrize("rotate", [False, True])
def test_the_search_takes_it_where_it_pays(rotate):
    """Of one head queries look in few directions; without feedback its error is larger."""
    generator = torch.Generator().manual_seed(0)
    seen = LayerSeen("layer", AttentionShape(1, 4, 2, 64, False, 64))
    for number in range(3):
        query = torch.stack([uneven(200, 64, power, 5) for power in (1.5, 1.5, 0.0, 0.0)])[None] * 3
        key, value = (torch.randn(1, 2, 200, 64, generator=generator) for _ in range(2))
        seen.add(query, key, value, 0.1, keep=True, number=number)
    with_it, without = (kv_search.Search(seen, feeds_back=feeds) for feeds in (True, False))
    fed, plain = (search.best("key", KVFormat(64), rotate) for search in (with_it, without))
    assert plain.feedback is None and fed.feedback.any() and fed.heads[0] < 0.7 * plain.heads[0]
    assert fed.cost == pytest.approx(
        without.error(key=without.back("key", fed.form, fed.side, rotate, fed.feedback)), rel=1e-4
    )
    assert with_it.best("value", KVFormat(64), False).feedback is None
    assert with_it.best("key", KVFormat(64, 8), False).feedback is None
