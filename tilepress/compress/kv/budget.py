"""The forms of an attention cache under a budget: each side of each layer gets one, so that the sum of their costs is least.

A side is a layer's keys or its values, or both together where they must be alike. Its options are forms, each with the bytes of a token and a cost. Costs of
sides add up, as rounding errors do that know nothing of each other. The best assignment is then a knapsack problem with one choice for each side, and bytes
are few: dynamic programming over them solves it exactly.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tilepress.formats import UsageError
from tilepress.formats.kv_int4 import KVFormat


class Option(NamedTuple):
    """A form that a side may have."""

    nbytes: int  # of a token's row of one head, or of the key's and the value's
    cost: float


def forms_for_budget(head_dim: int) -> list[KVFormat]:
    """Return the forms that are tried, smallest rows first: 4 bits static, by rows and in groups, 8 bits, and 16."""
    groups = [size for size in (0, 64, 32) if not size or (size < head_dim and head_dim % size == 0)]
    four = [KVFormat(head_dim, 4, 0, True), *(KVFormat(head_dim, 4, size) for size in groups)]
    return [*four, KVFormat(head_dim, 8, 0, True), KVFormat(head_dim, 8), KVFormat(head_dim, 16)]


def check_budget(budget: float, head_dim: int) -> None:
    """Check that a mean number of bits can be met. Raises UsageError with the least one."""
    smallest = min(forms_for_budget(head_dim), key=lambda form: form.row_bytes)
    least = 8 * smallest.row_bytes / head_dim
    if budget < least:
        raise UsageError(
            f"--budget {budget:g} is met by no form: the smallest, {smallest.name}, takes {least:g} bits a number of {head_dim}",
            f"give {least:g} or more",
        )


def assign(sides: Sequence[Sequence[Option]], most_bytes: float) -> list[int]:
    """Return the option of each side, of least cost in sum among those of at most `most_bytes` in sum; of equal ones the smallest.

    Raises ValueError where the smallest options are too large."""
    unit = math.gcd(*(option.nbytes for options in sides for option in options))
    room = math.floor(most_bytes / unit)
    if sum(min(option.nbytes for option in options) for options in sides) > room * unit:
        raise ValueError(f"the smallest options take more than {most_bytes:g} bytes")
    least, picks = np.zeros(room + 1), []  # the least cost of the sides so far in at most so many units
    for options in sides:
        costs = np.full((len(options), room + 1), np.inf)
        for i, option in enumerate(options):
            size = option.nbytes // unit
            if size <= room:
                costs[i, size:] = least[: room + 1 - size] + option.cost
        picks.append(costs.argmin(0))
        least = costs.min(0)
    at, chosen = int(np.argmin(least)), []  # argmin: the first, so the smallest
    for options, pick in zip(reversed(sides), reversed(picks), strict=True):
        chosen.append(int(pick[at]))
        at -= options[chosen[-1]].nbytes // unit
    return chosen[::-1]
