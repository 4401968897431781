"""Attention over keys and values that were read back, against sums written out."""

import pytest
import torch

from tilepress.runtime.attention import attention


def written_out(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, seen: torch.Tensor):
    """seen int64 [sequences, rows]: how many keys each row attends to."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    group = query.shape[1] // keys.shape[1]
    for i in range(query.shape[0]):
        for head in range(query.shape[1]):
            for row in range(query.shape[2]):
                count = int(seen[i, row])
                key, value = (x[i, head // group, :count].double() for x in (keys, values))
                out[i, head, row] = (key @ query[i, head, row].double() * scale).softmax(0) @ value
    return out.to(query.dtype)


@pytest.mark.parametrize("rows", [1, 5, 9], ids=["one row", "the last rows", "all rows"])
@pytest.mark.parametrize("heads", [2, 6], ids=["own keys", "shared keys"])
def test_rows_attend_to_what_stands_before_them(rows, heads):
    query, keys, values = (torch.randn(3, n, count, 16) for n, count in ((heads, rows), (2, 9), (2, 9)))
    last = torch.arange(10 - rows, 10).expand(3, -1)
    expected = written_out(query, keys, values, 0.3, last)
    torch.testing.assert_close(attention(query, keys, values, 0.3), expected)
    torch.testing.assert_close(attention(query, keys, values, 0.3, last - 1), expected)


def test_padding_attends_to_the_first_key():
    query, keys, values = (torch.randn(2, n, count, 16) for n, count in ((4, 3), (2, 7), (2, 7)))
    positions = torch.tensor([[4, 5, 6], [-1, -1, 2]])
    expected = written_out(query, keys, values, 0.5, positions.clamp(min=0) + 1)
    torch.testing.assert_close(attention(query, keys, values, 0.5, positions), expected)
