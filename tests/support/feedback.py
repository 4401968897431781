"""Feedback of keys' rounding errors that tells one channel from another."""

import torch
from torch import Tensor

from tilepress.formats.kv_int4 import FEEDBACK_BLOCKS, feedback_words


def random_feedback(heads: int, dim: int, most: int = 25, seed: int = 0) -> Tensor:
    """Return whole numbers up to `most`, from each block of channels to those behind it: int8 [heads, D / 4, D, 4]."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-most, most + 1, (heads, dim, dim), generator=generator)
    block = torch.arange(dim) // (dim // FEEDBACK_BLOCKS)
    return feedback_words(numbers * (block[:, None] > block))
