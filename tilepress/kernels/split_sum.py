"""The host's side of split_sum.cuh: memory for sums that several blocks share."""

import itertools
import secrets
from collections.abc import Callable

import torch
from torch import Tensor

from tilepress.kernels import jit

_tickets = itertools.count(secrets.randbits(62))


def scratch(
    device: torch.device, blocks: int, of_block: int, rows: int, columns: int
) -> Callable[[], tuple[Tensor, int, int, int]]:
    """Return what makes memory for a launch of `blocks` blocks that leave sums [rows, columns], float32, in `of_block` parts: the memory, to be kept until
    the launch; the addresses of sums and flags in it; a ticket that no other launch has."""
    flags = -(-8 * of_block * blocks // 256) * 256
    like = jit.like((flags + 4 * blocks * rows * columns,), torch.uint8, device)

    def make() -> tuple[Tensor, int, int, int]:
        memory = jit.empty_like(like)
        start = memory.data_ptr()
        return memory, start + flags, start, next(_tickets)

    return make
