"""The host's side of split_sum.cuh: memory for sums that several blocks share."""

import itertools
import secrets

import torch
from torch import Tensor

_tickets = itertools.count(secrets.randbits(62))


def scratch(device: torch.device, blocks: int, of_block: int, rows: int, columns: int) -> tuple[Tensor, int, int, int]:
    """Return memory for `blocks` blocks that leave sums [rows, columns], float32, in `of_block` parts: the memory, to be kept until the launch; the
    addresses of sums and flags in it; a ticket that no other launch has."""
    flags = -(-8 * of_block * blocks // 256) * 256
    memory = torch.empty(flags + 4 * blocks * rows * columns, dtype=torch.uint8, device=device)
    return memory, memory.data_ptr() + flags, memory.data_ptr(), next(_tickets)
