"""What ops find out about their arguments once."""

import gc
import weakref

import pytest
import torch

from tilepress.kernels import once
from tilepress.kernels.once import Once


@pytest.fixture
def looks():
    """A look that counts, and raises for negative numbers."""
    seen = []

    def look(x, number):
        seen.append(number)
        if number < 0:
            raise ValueError("negative")
        return x.is_contiguous(), number

    return Once(look), seen


def test_arguments_that_are_alike_are_looked_at_once(looks):
    look, seen = looks
    memory = torch.zeros(64)
    for x in (memory[:16].view(4, 4), torch.ones(4, 4), memory[32:48].view(4, 4)):
        assert look(x, 1) == (True, 1)
    assert seen == [1]


def test_whatever_a_look_can_see_is_looked_at_again(looks):
    look, seen = looks
    x, memory = torch.zeros(4, 4), torch.zeros(64)
    others = x.t(), x.double(), torch.zeros(4, 5), torch.zeros(16), memory[1:17].view(4, 4), x.to("meta")
    for number, other in enumerate((x, *others)):
        assert look(other, 7) == (other.is_contiguous(), 7)
        assert len(seen) == number + 1
    assert look(x, 8) == (True, 8) and len(seen) == len(others) + 2


def test_what_is_raised_is_raised_again(looks):
    look, seen = looks
    for _ in range(2):
        with pytest.raises(ValueError, match="negative"):
            look(torch.zeros(2), -1)
    assert seen == [-1, -1]


def test_no_tensor_is_kept_and_kinds_are_bounded(looks, monkeypatch):
    look, seen = looks
    monkeypatch.setattr(once, "_MOST", 3)
    x = torch.zeros(3)
    gone = weakref.ref(x)
    look(x, 1)
    del x
    gc.collect()
    assert gone() is None
    for number in range(2, 9):
        look(torch.zeros(3), number)
        assert len(look._found) <= 3
    assert seen == list(range(1, 9))
