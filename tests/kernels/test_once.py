"""What ops work out about their arguments once."""

import gc
import threading
import weakref

import pytest
import torch

from tilepress.kernels import once
from tilepress.kernels.once import OfTensors, Planned, gathering


@pytest.fixture
def plans():
    """An op that counts its plans, and raises for negative numbers."""
    seen = []

    def plan(x, number):
        seen.append(number)
        if number < 0:
            raise ValueError("negative")
        is_contiguous = x.is_contiguous()
        return lambda x, number: (is_contiguous, float(x.sum()), number)

    return Planned(plan), seen


def test_arguments_that_are_alike_are_planned_once(plans):
    op, seen = plans
    memory = torch.zeros(256)
    memory[64:80] = 1
    start = -memory.data_ptr() // 4 % 32  # a multiple of 128 bytes
    for first, total in ((start, 0), (start + 64, 16 - start), (start + 128, 0)):
        assert op(memory[first : first + 16].view(4, 4), 1) == (True, max(0, total), 1)
    assert seen == [1]


def test_whatever_a_plan_can_see_is_planned_again(plans):
    op, seen = plans
    x, memory = torch.zeros(4, 4), torch.zeros(64)
    others = x.t(), x.double(), torch.zeros(4, 5), torch.zeros(16), memory[1:17].view(4, 4)
    for number, other in enumerate((x, *others)):
        assert op(other, 7) == (other.is_contiguous(), 0, 7)
        assert len(seen) == number + 1
    assert op(x, 8) == (True, 0, 8) and len(seen) == len(others) + 2


def test_what_is_raised_is_raised_again(plans):
    op, seen = plans
    for _ in range(2):
        with pytest.raises(ValueError, match="negative"):
            op(torch.zeros(2), -1)
    assert seen == [-1, -1]


def test_no_tensor_is_kept_and_kinds_are_bounded(plans, monkeypatch):
    op, seen = plans
    monkeypatch.setattr(once, "_MOST", 3)
    x = torch.zeros(3)
    gone = weakref.ref(x)
    op(x, 1)
    del x
    gc.collect()
    assert gone() is None
    for number in range(2, 9):
        op(torch.zeros(3), number)
        assert len(op._local.__dict__) <= 3
    assert seen == list(range(1, 9))


def test_each_thread_plans_for_itself(plans):
    op, seen = plans
    x = torch.zeros(3)
    op(x, 5)
    thread = threading.Thread(target=op, args=(x, 5))
    thread.start()
    thread.join()
    op(x, 5)
    assert seen == [5, 5]


def test_what_lies_scattered_is_copied():
    x, y = torch.arange(6.0).view(2, 3).t(), torch.arange(6.0).view(2, 3).t()
    first, second = gathering(lambda *given: given, [1])(x, y)
    assert first is x and second.is_contiguous() and torch.equal(second, y)


def test_facts_about_tensors_go_with_them():
    facts, x = OfTensors(), torch.zeros(4)
    view = x[1:]
    assert facts.get(x) is None
    for fact in ("first", "second"):
        facts.keep(x, fact)
        assert facts.get(x) == fact and facts.get(view) is None
    del x  # the view still has it
    gc.collect()
    assert facts.get(view._base) == "second"
    del view
    gc.collect()
    assert not facts._kept
